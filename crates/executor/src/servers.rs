//! The MPS servers that run, compared with what is noted and needed, and the claims that use them.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::{Caller, ClaimRef, Record, Stored, holds_on};
use divvy_gpu::{Goal, GpuSeen, GpuState, MpsNote, Scope, diff};
use divvy_model::{GpuTarget, GpuUuid, MpsFault, Target};

use crate::bring::ASK_WITHIN;
use crate::gpus::Gpus;
use crate::hardware::seen_on;
use crate::records::with_lost;
use crate::state::GpuStates;
use crate::{Event, Report, StoreError};

/// Returns the GPUs with an MPS server that is not as noted: it has died, or no file names it. A
/// server that runs on a GPU without a file is one of them too, one without the namespaces that
/// claims need, and one that is wedged.
pub(crate) fn servers_to_look_at(gpus: Gpus<'_>, states: &GpuStates) -> BTreeSet<GpuUuid> {
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
    // One that does not serve, which may be wedged by now, and one that was and may serve again.
    let unwell = running.iter().filter(|(_, one)| one.unwell.is_some());
    to_look_at.extend(unwell.map(|(of, _)| of.gpu.clone()));
    let is_noted = |stored: &Stored<GpuState>| {
        let state = stored.fine().map(|state| state.clone().in_boot(boot));
        state.is_some_and(|state| !wedged(state).is_empty())
    };
    let noted = states.iter().filter(|(_, stored)| is_noted(stored));
    to_look_at.extend(noted.map(|(gpu, _)| gpu.clone()));
    // Of most nodes no server has namespaces, and then no record is read.
    for (of, _) in running.iter().filter(|(_, r)| r.server.has_namespaces()) {
        let gpu = &of.gpu;
        let state = states.get(gpu).and_then(|stored| stored.fine());
        let Some((state, records)) = state.zip(with_lost(gpus.context).ok()) else {
            continue;
        };
        let holds = holds_on(gpu, Caller::Round, &records, boot);
        let scope = Scope::new(holds, state.grant, &state.instances);
        let seen = GpuSeen {
            mps: Some(Ok(seen_on(gpu, &running))),
            ..GpuSeen::as_noted(state)
        };
        let goal = Goal::of(&scope, &state.mps);
        if !diff(state, &seen, &goal, &scope).is_empty() {
            to_look_at.insert(gpu.clone());
        }
    }
    to_look_at
}

/// Returns the MPS servers that are noted as wedged.
pub(crate) fn wedged(state: GpuState) -> BTreeMap<Target, MpsFault> {
    let servers = state.mps.into_iter();
    servers
        .filter_map(|(target, noted)| Some((target, noted.wedged?)))
        .collect()
}

/// Reports the MPS servers of a GPU that are wedged now and were not before, and those that serve
/// again.
pub(crate) fn report_wedged(
    gpus: Gpus<'_>,
    gpu: &GpuUuid,
    before: &BTreeMap<Target, MpsFault>,
    now: &BTreeMap<Target, MpsFault>,
    serves: impl Fn(Target) -> bool,
    report: &mut Report,
) -> Result<(), StoreError> {
    for (target, fault) in now {
        if !before.contains_key(target) {
            let of = GpuTarget {
                gpu: gpu.clone(),
                target: *target,
            };
            let holder = (*fault == MpsFault::Held).then(|| gpus.hardware.mps.holder(&of));
            report.events.push(Event::MpsServerWedged {
                gpu: gpu.clone(),
                target: *target,
                fault: *fault,
                holder: holder.flatten(),
                claims: gpus.served(gpu, &BTreeSet::from([*target]))?,
            });
        }
    }
    let over = before.keys().filter(|target| !now.contains_key(target));
    for target in over.copied().filter(|target| serves(*target)) {
        let gpu = gpu.clone();
        report.events.push(Event::MpsServerServes { gpu, target });
    }
    Ok(())
}

impl Gpus<'_> {
    /// Returns the claims that use the MPS servers of these targets of a GPU in this boot.
    pub(crate) fn served(
        self,
        gpu: &GpuUuid,
        targets: &BTreeSet<Target>,
    ) -> Result<Vec<ClaimRef>, StoreError> {
        let records = self.context.state.records()?;
        let is_served = |record: &&Record| {
            let mut devices = record.devices.iter();
            record.may_be_of(&self.context.config.boot)
                && devices.any(|device| {
                    device.gpu == *gpu && targets.contains(&device.target) && device.mps.is_some()
                })
        };
        let fine = records.values().filter_map(|stored| stored.fine());
        Ok(fine.filter(is_served).map(Record::reference).collect())
    }
}
