//! The node plugin. Called by its `main`, and by `divvy demo` and tests with fakes in [`Deps`].
//!
//! A claim's way through it: `grpc::dra` (gRPC in, gRPC out) → `claims::service` (one claim: read
//! it from the API, check it, hand it to the executor, report to the user) → `claims::tasks` (one
//! claim, one task) → `divvy_executor` on a thread of its own. Things that are published go the
//! other way: `sources` observe and send facts, `node` takes them in and decides
//! (`divvy_offer::step`), `sinks` follow what comes out: slices (`divvy_controller`, while this
//! instance holds the publisher lock), the GpuNode, Events. `upkeep` keeps files and records right.
//! `wiring` makes these tasks, `app` runs and stops them, `supervise` notices one that ends;
//! `start` makes the real things that they work on. ARCHITECTURE.md has a table of all tasks.

mod api;
mod app;
mod args;
mod claims;
mod config;
mod edits;
mod events;
mod grpc;
mod hook_words;
mod limits;
mod metrics;
mod mps;
mod node;
mod parts;
mod pods;
mod ready;
mod saved;
mod servers;
mod sinks;
mod sockets;
mod sources;
mod start;
mod supervise;
mod time_slices;
mod upkeep;
mod wiring;

pub use app::run;
pub use args::{Args, UsageArgs};
pub use config::{Config, Delivery, NodeSelector, Timing};
pub use divvy_host::become_other;
pub use sockets::{SocketNames, TooLong};
pub use start::start;
pub use wiring::Deps;

use divvy_model::{chain, lock};
