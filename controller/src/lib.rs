//! The ResourceSlice publisher: keeps the API server's slices of one node equal to a [`divvy_offer::Pool`].
//!
//! The node plugin (and `divvy demo`) calls [`spawn`] with a channel that carries the pool to publish, and reads
//! [`PublishStatus`]. What to write is decided by [`plan_sync`], a pure function of the slices that exist and the
//! pool that is wanted; the loop around it watches, writes and retries. Nothing is written while nothing changes.
//!
//! Why generations move as they do: `docs/adr/0002-in-place-updates-keep-the-generation.md`.

mod cache;
mod content;
mod error;
mod names;
mod plan;
mod publisher;
mod retry;
mod status;
mod watch;

pub use content::{comparable_spec, specs};
pub use error::PublishError;
pub use names::slice_name;
pub use plan::{Accepted, Sync, Target, Write, plan_sync};
pub use publisher::{Publisher, PublisherConfig, spawn};
pub use status::{PublishStatus, Writes};
pub use watch::{Event as Watched, Watch};
