//! The MPS servers that run, compared with what is noted and needed.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::{GpuSeen, Holds, MpsNote, Own, diff, goal};
use divvy_model::{GpuUuid, Target};

use crate::bring::ASK_WITHIN;
use crate::gpus::Gpus;
use crate::hardware::seen_on;
use crate::state::Gpus as GpuFiles;

/// Returns the GPUs with an MPS server that is not as noted: it has died, or no file names it. A server that
/// runs on a GPU without a file is one of them too, and one without the namespaces that claims need.
pub(crate) fn servers_to_look_at(gpus: Gpus<'_>, states: &GpuFiles) -> BTreeSet<GpuUuid> {
    let until = gpus.context.now() + ASK_WITHIN;
    let running = match gpus.hardware.mps.running(None, until) {
        Ok(running) => running,
        Err(error) => {
            tracing::warn!(
                error,
                "failed to ask for the MPS servers that run, will retry"
            );
            return BTreeSet::new();
        }
    };
    let boot = &gpus.context.config.boot;
    // Compare what runs with what is noted.
    let noted = |gpu: &GpuUuid| {
        let state = states.get(gpu).and_then(|stored| stored.fine());
        let state = state.map(|state| state.clone().in_boot(boot));
        let servers = state.into_iter().flat_map(|state| {
            let of = |(target, noted): (&Target, &MpsNote)| {
                let partition = target.place().and_then(|place| state.partition_at(place));
                (*target, (noted.server, partition))
            };
            state.mps.iter().map(of).collect::<Vec<_>>()
        });
        servers.collect::<BTreeMap<_, _>>()
    };
    let runs = |gpu: &GpuUuid| {
        let here = running.iter().filter(|(of, _)| of.gpu == *gpu);
        let servers = here.map(|(of, one)| (of.target, (one.server, one.partition.clone())));
        servers.collect::<BTreeMap<_, _>>()
    };
    let known = states.keys().chain(running.keys().map(|of| &of.gpu));
    let mut to_look_at: BTreeSet<_> = known
        .filter(|gpu| noted(gpu) != runs(gpu))
        .cloned()
        .collect();
    // Of most nodes no server has namespaces, and then no record is read.
    for (of, _) in running.iter().filter(|(_, r)| r.server.has_namespaces()) {
        let gpu = &of.gpu;
        let state = states.get(gpu).and_then(|stored| stored.fine());
        let Some((state, records)) = state.zip(gpus.context.state.records().ok()) else {
            continue;
        };
        let holds = Holds::of(gpu, Own::None, &records, (state, boot));
        let seen = GpuSeen {
            mps: Some(Ok(seen_on(gpu, &running))),
            ..GpuSeen::as_noted(state)
        };
        if !diff(state, &seen, &goal(&holds, state.grant, false)).is_empty() {
            to_look_at.insert(gpu.clone());
        }
    }
    to_look_at
}
