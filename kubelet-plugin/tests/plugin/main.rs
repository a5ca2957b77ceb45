//! The plugin as a whole, in this process: real sockets, a fake kubelet, a fake API server, simulated GPUs and a
//! host made of files.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "helpers of tests; clippy excepts only the test functions"
)]
#![expect(clippy::panic, reason = "helpers of tests")]

mod bad_input;
mod claims;
mod life;
mod node;
mod publish;
mod telling;
