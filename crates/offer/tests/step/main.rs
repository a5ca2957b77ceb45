//! `step`, one fact after another, beside a small model of an API server, a scheduler and a node.
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "helpers of tests"
)]

mod cluster;
mod mps;
mod property;
mod stories;
