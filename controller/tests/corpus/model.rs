//! A case of the publisher as data.
//!
//! Names follow the titles of the cases of the Go helper's controller, so that coverage can be compared; the fixtures
//! are our own. Titles that do not apply are in [`NOT_APPLICABLE`], each with its reason.

use divvy_offer::{Feature, Pool, Slice};

/// What exists, what is wanted, and what must come of it.
#[derive(Debug, Clone)]
pub(crate) struct Case {
    /// Title.
    pub(crate) name: &'static str,
    /// Slices before.
    pub(crate) existing: Vec<Existing>,
    /// What is published before `desired`, by the same publisher: for what it must remember.
    pub(crate) before: Option<Pool>,
    /// What is wanted.
    pub(crate) desired: Pool,
    /// Feature gates that are off in the server.
    pub(crate) gates_off: Vec<Feature>,
    /// What must come of it.
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
    /// How many slices its pool has.
    pub(crate) count: i64,
    /// What is in it.
    pub(crate) slice: Slice,
    /// When its taints were added, if it says so.
    pub(crate) tainted_at: Option<&'static str>,
    /// Whether the Node owns it.
    pub(crate) owned: bool,
}

/// The name of a slice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Name {
    /// As this publisher names the slice at an index.
    Index(usize),
    /// Any other, before the driver and node are appended.
    Other(&'static str),
}

/// What must come of a case.
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
    /// What became of it.
    pub(crate) fate: Fate,
    /// What is in it, as the server stores it.
    pub(crate) slice: Slice,
    /// When its taints were added, if that is to be kept.
    pub(crate) tainted_at: Option<&'static str>,
}

/// What became of a slice.
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
    ("add-one-network-device-all-nodes", "slices are node-local: nodeName always"),
    ("add-one-network-device-some-nodes", "slices are node-local: nodeName always"),
    ("update-node-selector", "slices are node-local: nodeName always"),
    ("reconcile-with-pool-name-create-slice-no-node-name", "slices are node-local: nodeName always"),
    ("reconcile-with-pool-name-with-node-selector", "slices are node-local: nodeName always"),
    ("reconcile-with-pool-name-with-perdevice-node-selector", "slices are node-local: nodeName always"),
    ("create-device-with-binding-condition", "binding conditions are not published"),
    ("drop-device-with-binding-condition", "binding conditions are not published"),
];
