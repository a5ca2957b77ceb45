//! The publisher against a fake API server that misbehaves, and against neighbours that do. Time is
//! paused: waits cost nothing and the limits are exact.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

mod answers;
mod neighbours;
mod pace;
mod sequences;
mod world;
