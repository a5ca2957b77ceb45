//! Followers of the outputs of the brain. Each sink carries out and decides nothing.

pub(crate) mod debug;
pub(crate) mod events;
pub(crate) mod gpu_node;
pub(crate) mod notifier;
pub(crate) mod publisher;
pub(crate) mod slices;
pub(crate) mod usage;
