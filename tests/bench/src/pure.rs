//! What is decided in this process: carving a node.

use std::hint::black_box;

use anyhow::{Result, ensure};

use crate::offered::Offered;
use crate::rig::NODE;
use crate::stats::median;
use crate::table::{Budget, Row, Value};

/// Deciding what a node publishes that offers everything, beside a copy of the decision.
pub(crate) fn carving(rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (gpus, mig) in [("h100x8", false), ("h100x16", false), ("a100-40x16", true)] {
        let offered = Offered::everything(gpus, mig)?;
        let pool = offered.carve(NODE).pool;
        let (devices, slices) = (pool.devices().count(), pool.slices.len());
        ensure!(devices > 0, "nothing was carved");
        let carving = median(rounds, || drop(black_box(offered.carve(black_box(NODE)))));
        let copying = median(rounds, || drop(black_box(black_box(&pool).clone())));
        let row = Row::new(
            format!("carve {gpus} offered as everything: {devices} devices, {slices} slices"),
            carving,
        );
        let row = row.beside("clone of the pool", copying);
        rows.push(row.budget(Budget::AtMost(Value::Seconds(0.002))));
    }
    Ok(rows)
}
