//! Prepare and unprepare of MIG partitions over the plugin's socket, with instances that are made at once and with
//! those that take as long as real ones; eight GPUs beside one.

use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use divvy_gpu_sim::MigLatency;

use crate::latency::{Bench, Shape, Times};
use crate::rig::{Programs, Rig};
use crate::table::{Budget, Row};

const GPUS: usize = 8;
/// 1g.10gb of an H100 goes into the first seven memory slices.
const PLACES: usize = 7;
/// The creation time of a real instance, about.
const REAL: Duration = Duration::from_secs(1);
const WARM_UP: usize = 2;

/// 1g.10gb of a GPU, each time at another place.
fn partition(gpu: usize, claim: usize) -> (String, Option<String>) {
    (format!("gpu-{gpu}-mig-1g10gb-19-{}", claim % PLACES), None)
}

/// Measures with the records on the filesystem of `parent`.
pub(crate) fn measure(programs: &Programs, parent: &Path, rounds: usize) -> Result<Vec<Row>> {
    let rig = Rig::new(programs, parent, &format!("h100x{GPUS}"), None)?.offering_everything();
    let mut bench = Bench::new(rig, partition)?;
    let mut rows = Vec::new();
    for (creation, rounds) in [(Duration::ZERO, rounds), (REAL, rounds.div_ceil(20).max(5))] {
        let create_ms = u64::try_from(creation.as_millis())?;
        bench.rig.mock()?.edit(|engine| engine.latency = MigLatency { create_ms, ..engine.latency })?;
        let (mut one, mut together, mut apart) = (Times::default(), Times::default(), Times::default());
        for round in 0..WARM_UP + rounds {
            if round == WARM_UP {
                (one, together, apart) = (Times::default(), Times::default(), Times::default());
            }
            bench.round(Shape::OneCall(1), &mut one)?;
            bench.round(Shape::OneCall(GPUS), &mut together)?;
            bench.round(Shape::AtOnce(GPUS), &mut apart)?;
        }
        let given = format!("instances made in {} s", creation.as_secs());
        let row = |what: &str, measured: Duration| Row::new(format!("{what}; {given}"), measured);
        rows.push(row("prepare, 1g.10gb, 1 claim, p50", one.prepare.p50()));
        rows.push(row("prepare, 1g.10gb, 1 claim, p99", one.prepare.p99()));
        for (name, times) in [("one call", &together), ("8 calls", &apart)] {
            let p50 = row(&format!("prepare, 8 claims on 8 GPUs, {name}, p50"), times.prepare.p50());
            rows.push(p50.beside("one claim", one.prepare.p50()).budget(Budget::Times(3.0)));
            let p99 = row(&format!("prepare, 8 claims on 8 GPUs, {name}, p99"), times.prepare.p99());
            rows.push(p99.beside("one claim", one.prepare.p99()));
        }
        rows.push(row("unprepare, 1 claim, p50", one.unprepare.p50()));
        rows.push(row("unprepare, 1 claim, p99", one.unprepare.p99()));
        let both = row("unprepare, 8 claims on 8 GPUs, one call, p50", together.unprepare.p50());
        rows.push(both.beside("one claim", one.unprepare.p50()));
    }
    Ok(rows)
}
