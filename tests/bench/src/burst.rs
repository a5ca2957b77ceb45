//! A burst: as many pods as a full node of shared GPUs has start at once, each with a claim and a
//! call of its own.

use std::path::Path;

use anyhow::Result;

use crate::latency::{Bench, GPUS, Shape, Times, WARM_UP};
use crate::rig::{Programs, Rig};
use crate::table::{Budget, Row, Value};

const CLAIMS: usize = 64;
/// Budget of the burst beside its writes, in seconds.
const BUDGET: f64 = 0.1;

/// Shares of sixteen GPUs, four each.
fn share(position: usize, _: usize) -> (String, Option<String>) {
    (
        format!("gpu-{}-ts", position % 16),
        Some(format!("00000000-0000-4000-8000-{position:012}")),
    )
}

/// Measures with the records on the filesystem of `parent`.
pub(crate) fn measure(programs: &Programs, parent: &Path, rounds: usize) -> Result<Vec<Row>> {
    let rig = Rig::new(programs, parent, GPUS, None)?.offering_everything();
    let mut bench = Bench::new(rig, share)?;
    let (mut one, mut burst) = (Times::default(), Times::default());
    for round in 0..WARM_UP + rounds {
        if round == WARM_UP {
            (one, burst) = (Times::default(), Times::default());
        }
        bench.round(Shape::OneCall(1), &mut one)?;
        bench.round(Shape::AtOnce(CLAIMS), &mut burst)?;
    }
    let row = |what: &str, measured| Row::new(what.to_owned(), measured);
    let (single, single_99) = (one.prepare.p50(), one.prepare.p99());
    let writes = format!("{CLAIMS} GETs at once + {CLAIMS} writes at once");
    let all = Row::new(
        format!("prepare, {CLAIMS} share claims, {CLAIMS} calls at once, p50"),
        burst.prepare.p50(),
    );
    let late = Row::new(
        format!("prepare, {CLAIMS} share claims, {CLAIMS} calls at once, p99"),
        burst.prepare.p99(),
    );
    let leave = Row::new(
        format!("unprepare, {CLAIMS} share claims, {CLAIMS} calls at once, p50"),
        burst.unprepare.p50(),
    );
    let allowed = Value::Seconds(BUDGET + burst.write.p50().as_secs_f64());
    Ok(vec![
        row("prepare, 1 share claim, p50", single)
            .beside("GET + write", one.reference.p50())
            .budget(Budget::Times(1.5)),
        row("prepare, 1 share claim, p99", single_99)
            .beside("GET + write", one.reference.p50())
            .budget(Budget::Times(3.0)),
        row("unprepare, 1 share claim, p50", one.unprepare.p50()),
        all.beside(&writes, burst.reference.p50())
            .budget(Budget::AtMost(allowed))
            .theirs("5 claims/s after a burst of 10"),
        late.beside(&writes, burst.reference.p50()),
        one.switches_row("1 share claim"),
        burst.switches_row(&format!("{CLAIMS} share claims at once")),
        leave,
    ])
}
