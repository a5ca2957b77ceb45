//! What is observed. Each source sends [`crate::node::Fact`]s and decides nothing.

pub(crate) mod health;
pub(crate) mod holders;
pub(crate) mod inventory;
pub(crate) mod node_labels;
pub(crate) mod policies;
pub(crate) mod records;
pub(crate) mod usage;
