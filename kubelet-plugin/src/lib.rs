//! The node plugin. Called by its `main`, and by `divvy demo` and tests with fakes in [`Deps`].
//!
//! A claim's way through it: `grpc::dra` (gRPC in, gRPC out) → `claims::service` (one claim: read
//! it from the API, check it, hand it to the executor, report to the user) → `claims::tasks` (one
//! claim, one task) → `divvy_executor` on a thread of its own. Things that are published go the
//! other way: `sources` observe and send facts, `node` takes them in and decides
//! (`divvy_offer::step`), `sinks` follow what comes out: slices (`divvy_controller`, while this
//! instance holds the publisher lock), the GpuNode, Events. `upkeep` keeps files and records right.
//! `app` makes these tasks, runs and stops them, and notices one that ends; `host` is what they see
//! of the node, `caps` keeps shares within their memory. ARCHITECTURE.md has a table of all tasks.

mod app;
mod caps;
mod claims;
mod grpc;
mod host;
mod metrics;
mod node;
mod sinks;
mod sources;
mod upkeep;

pub use app::args::{Args, UsageArgs};
pub use app::config::{Config, Delivery, NodeSelector, Timing};
pub use app::run::run;
pub use app::start::start;
pub use app::wiring::Deps;
pub use divvy_host::become_other;
pub use host::sockets::{SocketNames, TooLong};

use divvy_model::{chain, lock};
