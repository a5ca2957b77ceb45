//! The controller that publishes the GPUs of a node as ResourceSlices: it keeps the slices of one
//! node in the API server equal to a [`divvy_offer::Pool`], also when others change or delete them.
//!
//! It is a library and runs in the process of the node plugin (and of `divvy demo`), one per node,
//! because a ResourceSlice is written by the node that has the devices: only there is it known what
//! the GPUs are, RBAC and the admission policy of the chart let a node write its own slices only,
//! and no central component can fail.
//!
//! [`spawn`] takes a channel that carries the wanted pool, and [`PublishStatus`] reports the
//! outcome. The writes are decided by [`plan_sync`], a pure function of the slices that exist and
//! the pool that is wanted; the loop around it (`publisher`) watches, writes and retries. Nothing
//! is written while nothing changes. [`Watch`] (kube's watcher, with waits and errors) and
//! [`with_deadline`] (no answer takes for ever) serve the rest of the plugin too.
//!
//! Why generations move as they do: `docs/adr/0002-in-place-updates-keep-the-generation.md`.

mod cache;
mod content;
mod deadline;
mod dry_run;
mod error;
mod evict;
mod names;
mod plan;
mod publisher;
mod removal;
mod server_clock;
mod shallow;
mod status;
mod watch;

pub use content::{comparable_spec, specs};
pub use deadline::{ANSWER, NoAnswer, with_deadline};
pub use dry_run::dropped_features;
pub use error::PublishError;
pub use evict::{budget, evict};
pub use names::slice_name;
pub use plan::{Accepted, Sync, Target, Write, plan_sync};
pub use publisher::{Publisher, PublisherConfig, spawn};
pub use removal::remove_slices;
pub use server_clock::ServerClock;
pub use shallow::shallow;
pub use status::{PublishStatus, Writes};
pub use watch::{Event as Watched, Watch};
