//! A case of the publisher as data.
//!
//! Names follow the titles of the cases of the Go helper's controller, so that coverage can be
//! compared; the fixtures are our own. Titles that do not apply are in [`NOT_APPLICABLE`], each
//! with its reason.

use divvy_offer::{Feature, Pool, Slice};

/// Slices that exist, the wanted pool, and the expected outcome.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// Title.
    pub(crate) name: &'static str,
    /// Slices before.
    pub(crate) existing: Vec<Existing>,
    /// Pools published before `desired`, by the same publisher: for what it must remember.
    pub(crate) before: Option<Pool>,
    /// Wanted pool.
    pub(crate) desired: Pool,
    /// Feature gates that are off in the server.
    pub(crate) gates_off: Vec<Feature>,
    /// Expected outcome.
    pub(crate) expect: Expect,
}

/// A slice that exists before.
#[derive(Debug, Clone)]
pub(crate) struct Existing {
    /// Its name.
    pub(crate) name: Name,
    /// Its pool.
    pub(crate) pool: &'static str,
    /// Generation of its pool.
    pub(crate) generation: i64,
    /// Number of slices of its pool.
    pub(crate) count: i64,
    /// Content.
    pub(crate) slice: Slice,
    /// When its taints were added, if it says so.
    pub(crate) tainted_at: Option<&'static str>,
    /// True if the Node owns it.
    pub(crate) owned: bool,
}

/// The name of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    /// Name that this publisher gives the slice at an index.
    Index(usize),
    /// Any other, before the driver and node are appended.
    Other(&'static str),
}

/// Expected outcome of a case.
#[derive(Debug, Clone)]
pub(crate) enum Expect {
    /// Exactly these slices, and these features reported as dropped.
    Slices(Vec<Expected>, Vec<Feature>),
    /// Nothing is written; the error contains this.
    Error(&'static str),
}

/// A slice that must be there afterwards, at the index of its place in the list.
#[derive(Debug, Clone)]
pub(crate) struct Expected {
    /// Generation of its pool.
    pub(crate) generation: i64,
    /// Outcome.
    pub(crate) fate: Fate,
    /// Content, in the form that the server stores.
    pub(crate) slice: Slice,
    /// When its taints were added, if that is to be kept.
    pub(crate) tainted_at: Option<&'static str>,
}

/// Outcome of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Not written: same resource version.
    Kept,
    /// Same object, written.
    Updated,
    /// A new object.
    Created,
}

/// Titles that do not apply, and why.
pub(crate) const NOT_APPLICABLE: &[(&str, &str)] = &[
    (
        "add-one-network-device-all-nodes",
        "slices are node-local: nodeName always",
    ),
    (
        "add-one-network-device-some-nodes",
        "slices are node-local: nodeName always",
    ),
    (
        "update-node-selector",
        "slices are node-local: nodeName always",
    ),
    (
        "reconcile-with-pool-name-create-slice-no-node-name",
        "slices are node-local: nodeName always",
    ),
    (
        "reconcile-with-pool-name-with-node-selector",
        "slices are node-local: nodeName always",
    ),
    (
        "reconcile-with-pool-name-with-perdevice-node-selector",
        "slices are node-local: nodeName always",
    ),
    (
        "create-device-with-binding-condition",
        "binding conditions are not published",
    ),
    (
        "drop-device-with-binding-condition",
        "binding conditions are not published",
    ),
];
