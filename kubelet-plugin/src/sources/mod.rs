//! Observations. Each source sends [`crate::node::facts::Fact`]s and decides nothing.

pub(crate) mod disk;
pub(crate) mod gpu_time;
pub(crate) mod health;
pub(crate) mod holders;
pub(crate) mod inventory;
pub(crate) mod mps_supervisor;
pub(crate) mod neighbours;
pub(crate) mod node_labels;
pub(crate) mod nvidia_plugin;
pub(crate) mod policies;
pub(crate) mod records;
pub(crate) mod usage;
