//! Prepare and unprepare of MIG partitions over the plugin's socket, with instances that are made at once and with
//! those that take as long as real ones; eight GPUs beside one.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use divvy_api::names::DRIVER;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_result, reserved};
use divvy_gpu_sim::MigLatency;
use divvy_offer::pool_name;
use divvy_proto::dra::v1::Claim;
use divvy_proto::dra::v1::dra_plugin_client::DraPluginClient;
use futures::future::try_join_all;
use tonic::transport::Channel;

use crate::latency::{prepare, unprepare};
use crate::rig::{NODE, Plugin, Programs, Rig};
use crate::stats::Samples;
use crate::table::{Budget, Row};

const NAMESPACE: &str = "default";
const GPUS: u32 = 8;
/// 1g.10gb of an H100 goes into the first seven memory slices.
const PLACES: u32 = 7;
/// The creation time of a real instance, about.
const REAL: Duration = Duration::from_secs(1);
const WARM_UP: usize = 2;

/// What claims for partitions took.
#[derive(Default)]
struct Times {
    prepare: Samples,
    unprepare: Samples,
}

struct Bench {
    rig: Rig,
    plugin: Plugin,
    dra: DraPluginClient<Channel>,
    next: u32,
}

/// Measures with the records on the filesystem of `parent`.
pub(crate) fn measure(programs: &Programs, parent: &Path, rounds: usize) -> Result<Vec<Row>> {
    let rig = Rig::new(programs, parent, &format!("h100x{GPUS}"), None)?.offering_everything();
    let mut plugin = rig.start()?;
    rig.wait_until_published(&mut plugin)?;
    let dra = rig.connect(&mut plugin)?;
    let mut bench = Bench { rig, plugin, dra, next: 0 };
    let mut rows = Vec::new();
    for (creation, rounds) in [(Duration::ZERO, rounds), (REAL, rounds.div_ceil(20).max(5))] {
        let create_ms = u64::try_from(creation.as_millis())?;
        bench.rig.mock()?.edit(|engine| engine.latency = MigLatency { create_ms, ..engine.latency })?;
        let (mut one, mut together, mut apart) = (Times::default(), Times::default(), Times::default());
        for round in 0..WARM_UP + rounds {
            if round == WARM_UP {
                (one, together, apart) = (Times::default(), Times::default(), Times::default());
            }
            bench.round(1, 1, &mut one)?;
            bench.round(GPUS, 1, &mut together)?;
            bench.round(GPUS, GPUS, &mut apart)?;
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

impl Bench {
    /// A claim on each of so many GPUs, in so many calls at once; all are gone afterwards.
    fn round(&mut self, gpus: u32, calls: u32, times: &mut Times) -> Result<()> {
        let claims = (0..gpus).map(|gpu| self.claim(gpu)).collect::<Result<Vec<_>>>()?;
        let of_call = claims.len().div_ceil(usize::try_from(calls)?);
        let batches = || claims.chunks(of_call).map(<[Claim]>::to_vec);
        let all = async |start: Instant| {
            try_join_all(batches().map(|batch| prepare(self.dra.clone(), batch))).await?;
            let prepared = start.elapsed();
            let start = Instant::now();
            try_join_all(batches().map(|batch| unprepare(self.dra.clone(), batch))).await?;
            Ok::<_, anyhow::Error>((prepared, start.elapsed()))
        };
        let took = self.rig.run(all(Instant::now()));
        let (prepared, unprepared) = took.map_err(|error| self.plugin.explain(&format!("{error:#}")))?;
        times.prepare.push(prepared);
        times.unprepare.push(unprepared);
        claims.iter().try_for_each(|claim| self.rig.delete(NAMESPACE, &claim.name))
    }

    /// A new claim for a partition of a GPU, each time at another place.
    fn claim(&mut self, gpu: u32) -> Result<Claim> {
        self.next += 1;
        let (name, pod) = (format!("part-{}", self.next), format!("pod-{}", self.next));
        let device = format!("gpu-{gpu}-mig-1g10gb-19-{}", self.next % PLACES);
        let result = mk_result("gpu", DRIVER, &pool_name(NODE), &device);
        let claim = allocated(mk_claim(NAMESPACE, &name, DRIVER, 1), vec![result]);
        let stored = self.rig.put(&reserved(claim, &pod, &pod))?;
        let uid = stored.metadata.uid.context("a stored claim has no UID")?;
        Ok(Claim { namespace: NAMESPACE.to_owned(), name, uid })
    }
}
