//! Simulated GPUs with the facts, bus layout and NVLink shape of real boards, and faults on demand.
//!
//! [`Engine`] is the state and its rules: pure, serialisable. [`SimNode`] shares one engine between
//! threads and implements [`divvy_model::GpuDriver`] on it; a clone is the same node. `divvy demo`
//! and the tests use [`SimNode`]; `divvy-nvml-mock` puts NVML's C ABI over an engine kept in a
//! file.

mod engine;
mod fault;
mod health;
mod limits;
mod mig;
mod node;
mod nvlink;
mod spec;
mod usage;

#[cfg(test)]
mod mig_tests;
#[cfg(test)]
mod tests;

pub use divvy_boards::{
    MIG_BOARDS, Make, Profile, compute_profiles, mig_capabilities, profile, profiles,
};
pub use engine::{Engine, SimGpu};
pub use fault::{After, Begin, Fault, FaultEffect, FaultId};
pub use health::SimEvent;
pub use limits::{LimitBackend, SimGroup, SimLimits};
pub use mig::{MigLatency, SimInstance};
pub use node::SimNode;
pub use nvlink::NvLinkShape;
pub use spec::{MAX_GPUS, SimSpec, SpecError};
pub use usage::SimUsage;
