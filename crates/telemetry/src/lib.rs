//! Logs, metrics, health endpoints and signals: the shell that all binaries share. Called by their
//! `main` for wiring; other crates get a [`MetricsRegistry`], a [`ReadyHandle`] or nothing at all,
//! and print errors through [`Chain`].
//!
//! There are no globals, but for the log subscriber that `tracing` itself keeps.

mod logs;
mod metrics;
mod ready;
mod server;
mod signals;

pub use divvy_model::{Chain, chain};
pub use logs::{LogError, LogFormat, init_logs};
pub use metrics::{Counters, Durations, Gauges, Labels, MetricsRegistry, RealGauges, Timer};
pub use prometheus_client::metrics::counter::Counter;
pub use prometheus_client::metrics::gauge::Gauge;
pub use ready::{Readiness, ReadyHandle};
pub use server::{HttpServer, Limits, serve};
pub use signals::stop_on_signals;
