//! Reports of the publisher to the rest of the plugin: for readiness, `/debug/state`, metrics and
//! GpuNode.

use std::collections::BTreeSet;
use std::sync::Arc;

use divvy_offer::{Feature, Pool};
use jiff::Timestamp;

/// The publisher's state, sent on every change.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PublishStatus {
    /// True if the API server has the wanted pool, as far as is known.
    pub in_sync: bool,
    /// The pool that was last published in full.
    pub published: Option<Arc<Pool>>,
    /// When that was, or when it was last found unchanged after a doubt, by the API server's clock;
    /// `None` if its answers have no date.
    pub published_at: Option<Timestamp>,
    /// Generation of the published pool.
    pub generation: i64,
    /// Slices of the published pool.
    pub slices: usize,
    /// Devices of the published pool.
    pub devices: usize,
    /// Size of the published pool's slices as JSON, without their metadata, in bytes.
    pub bytes: usize,
    /// Why the last attempt failed; `None` after a success.
    pub last_error: Option<String>,
    /// Why the slices cannot be watched; `None` while they are.
    pub watch_error: Option<String>,
    /// Features whose fields the server drops. To be fed back into the carving
    /// ([`divvy_offer::ServerFeatures::without`]).
    pub dropped: BTreeSet<Feature>,
    /// Slices that the server stored otherwise than they were sent.
    pub altered: BTreeSet<String>,
    /// Rounds of comparing and writing that succeeded.
    pub rounds: u64,
    /// Slices deleted by other clients.
    pub foreign_deletes: u64,
    /// Writes so far.
    pub writes: Writes,
}

/// Counts of writes since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Writes {
    /// Slices created.
    pub created: u64,
    /// Slices updated.
    pub updated: u64,
    /// Slices deleted.
    pub deleted: u64,
    /// Requests that failed, reads too.
    pub failed: u64,
}
