//! The node plugin. Called by its `main`, and by `divvy demo` and tests with fakes in [`Deps`].
//!
//! A claim's way through it: `dra` (gRPC in, gRPC out) → `service` (one claim: read it from the API, check it, hand
//! it to the executor, report to the user) → `tasks` (one claim, one task) → `divvy_executor` on a thread of its own.
//! What is published goes the other way: `sources` observe and send facts, `node` takes them in and decides
//! (`divvy_offer::step`), `sinks` follow what comes out: slices (`divvy_controller`, while this instance holds the
//! `publisher_lock`), the GpuNode, Events, metrics. `reconcile` keeps files and records right. `wiring` makes these tasks,
//! `app` runs and stops them; `start` makes the real things that they work on. ARCHITECTURE.md has a table of all tasks.

mod api;
mod app;
mod args;
mod cdi_watch;
mod claim;
mod claim_fetch;
mod config;
mod drain;
mod edits;
mod events;
mod grpc;
mod neighbours;
mod node;
mod parts;
mod pods;
mod publisher_lock;
mod ready;
mod reconcile;
mod saved;
mod servers;
mod service;
mod sinks;
mod sockets;
mod sources;
mod start;
mod tasks;
mod time_slices;
mod wiring;

pub use app::{Deps, run};
pub use args::{Args, UsageArgs};
pub use config::{Config, ConfigError, Delivery, Offer, Timing};
pub use divvy_host::become_other;
pub use sockets::{SocketNames, TooLong};
pub use start::start;

/// An error with its causes on one line.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    divvy_telemetry::Chain(error).to_string()
}
