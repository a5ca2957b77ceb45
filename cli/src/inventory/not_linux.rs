//! Stands in for this machine's GPUs where NVIDIA's driver does not exist.

use anyhow::{Result, bail};
use divvy_model::Inventory;

use super::Args;

/// Fails: only Linux has a driver that divvy reads.
pub(super) fn read(_: &Args, otherwise: &str) -> Result<(Inventory, Vec<String>)> {
    bail!("GPUs are read on Linux only: run it on a node{otherwise}")
}
