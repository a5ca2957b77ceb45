//! Simulated GPUs with the facts, bus layout and NVLink shape of real boards, and faults on demand.
//!
//! [`Engine`] is the state and its rules: pure, serialisable. [`SimNode`] shares one engine between
//! threads and implements [`divvy_model::GpuDriver`] on it; a clone is the same node. `divvy demo`
//! and the tests use [`SimNode`]; `divvy-nvml-mock` puts NVML's C ABI over an engine kept in a
//! file.

mod catalogue;
mod engine;
mod fault;
mod health;
mod limits;
mod mig;
mod mig_tables;
mod node;
mod profile;
mod spec;
mod usage;

#[cfg(test)]
mod mig_tests;
#[cfg(test)]
mod tests;

pub use catalogue::{profile, profiles};
pub use engine::{Engine, SimGpu};
pub use fault::{After, Begin, Fault, FaultEffect, FaultId};
pub use health::SimEvent;
pub use limits::{LimitBackend, SimGroup, SimLimits};
pub use mig::{MigLatency, SimInstance};
pub use mig_tables::{MIG_BOARDS, compute_profiles, mig_capabilities};
pub use node::SimNode;
pub use profile::{Make, NvLinkShape, Profile};
pub use spec::{MAX_GPUS, SimSpec, SpecError};
pub use usage::SimUsage;
