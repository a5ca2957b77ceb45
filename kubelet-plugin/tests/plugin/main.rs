//! The plugin as a whole, in this process: real sockets, a fake kubelet, a fake API server,
//! simulated GPUs and a host made of files.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

mod alerts;
mod bad_input;
mod binary;
mod claims;
mod delivery;
mod driver;
mod drivers;
mod gpu_node;
mod health;
mod hook_words;
mod kills;
mod life;
mod limits;
mod metadata;
mod mig;
mod modes;
mod mps;
mod neighbours;
mod node;
mod pod_groups;
mod policy;
mod publish;
mod records;
mod reports;
mod rolling;
mod shares;
mod standin;
mod unanswered;
mod usage;
