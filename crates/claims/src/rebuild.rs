//! What the records and the GPUs' files together know of the instances that live: whose they are, and what the record of a
//! claim must have said that was lost or cannot be read any more.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::mig::GpuInstance;
use divvy_model::{ClaimUid, GpuUuid};

use crate::decide::conflicts;
use crate::{
    Claim, GpuState, Holder, Outcome, Phase, Progress, Record, Refusal, Snapshot, Step, StepState, Stored,
    Why, resolve_devices,
};

type Records = BTreeMap<ClaimUid, Arc<Stored<Record>>>;
type Gpus = BTreeMap<GpuUuid, Arc<Stored<GpuState>>>;

/// All steps that may have made something on a GPU.
pub(crate) fn steps_on<'a>(
    records: &'a Records,
    gpus: &'a Gpus,
    gpu: &'a GpuUuid,
) -> impl Iterator<Item = &'a StepState> {
    let of_gpu =
        gpus.get(gpu).and_then(|stored| stored.fine()).into_iter().flat_map(|state| &state.instances);
    let of_claims = records.values().filter_map(|stored| stored.fine()).flat_map(|record| &record.steps);
    let all = of_gpu.map(|instance| &instance.state).chain(of_claims);
    all.filter(move |state| state.step.gpu() == gpu && state.progress != Progress::Undone)
}

/// Whether an instance that lives is one that we have made, or may be making. A record of a later version may be about
/// anything on its GPUs.
pub fn accounts_for(records: &Records, gpus: &Gpus, gpu: &GpuUuid, instance: &GpuInstance) -> bool {
    let newer = records.values().any(|stored| match stored.as_ref() {
        Stored::Newer { head, .. } => head.gpus.contains(gpu),
        Stored::Absent | Stored::Corrupt { .. } | Stored::Fine(_) => false,
    });
    let ours = Step::create_partition(gpu.clone(), instance.profile, instance.placement);
    newer
        || steps_on(records, gpus, gpu).filter(|state| state.step == ours).any(|state| {
            match &state.progress {
                Progress::Begun { made, .. } | Progress::Done { outcome: made } => {
                    made.gpu_instance() == instance.id
                }
                Progress::Intended { .. } | Progress::Undone => true,
            }
        })
}

/// The record of a claim that has none which can be read, although the claim was prepared: as the API says now, if that
/// agrees with the partitions that were made for it (`owned`: those that still live) and with all other claims. `None`
/// means that it does not: the claim was allocated anew since, or what it had is gone.
pub fn rebuild(claim: &Claim, seen: &Snapshot<'_>, owned: &[StepState]) -> Result<Option<Record>, Refusal> {
    let devices = resolve_devices(claim, seen)?;
    let holders = conflicts(claim, &devices, seen)?;
    if holders.is_some_and(|in_the_way| in_the_way.holders.iter().any(|h| matches!(h, Holder::Record { .. })))
    {
        return Ok(None);
    }
    let mut steps = Vec::new();
    for device in &devices {
        let Some(step) = device.step() else { continue };
        let found = seen.living.get(&device.allocated.device);
        let living = match found {
            Some(Ok(Some(living @ Outcome::Partition { .. }))) => living,
            // It may live: not known yet.
            Some(Err(error)) => return Err(Why::GpuUnreadable(error.clone()).about(claim, device)),
            Some(Ok(_)) | None => return Ok(None),
        };
        let progress = Progress::Done { outcome: living.clone() };
        let found = StepState { step, progress };
        if found.step.is_owned() && !owned.contains(&found) {
            return Ok(None);
        }
        steps.push(found);
    }
    if owned.iter().any(|made| !steps.contains(made)) {
        return Ok(None);
    }
    let mut record = Record::new(claim, seen.boot, devices, Phase::Prepared);
    record.steps = steps;
    Ok(Some(record))
}
