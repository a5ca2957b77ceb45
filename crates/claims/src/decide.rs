//! The prepare decision. Everything it looks at is in the [`Snapshot`]; everything that is to be done is in the
//! [`Decision`].

mod compute_mode;
mod conflicts;
mod foreign_processes;

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::mig::PartitionName;
use divvy_model::{
    BootId, ClaimUid, DeviceKind, DeviceName, Gpu, GpuError, GpuUuid, HoldKind, Inventory, MigMode, Ordinals,
    TimeSlice,
};

use crate::{
    AllocatedDevice, Claim, GpuState, Outcome, Phase, Plan, Prepared, Progress, Record, RecordedDevice,
    Refusal, Step, Stored, Why, resolve,
};

use self::compute_mode::compute_mode_to_set;
pub(crate) use self::conflicts::conflicts;
use self::conflicts::may_share;
pub use self::conflicts::{Clash, Holder, Holders};
pub use self::foreign_processes::ProcessOnGpu;
use self::foreign_processes::foreign_processes;
use crate::rebuild::steps_on;

/// What [`decide`] looks at, taken under the locks of the claim and its GPUs.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// Our driver's name.
    pub driver: &'a str,
    /// The node's GPUs; `None` while the NVIDIA driver has not answered yet.
    pub inventory: Option<Arc<Inventory>>,
    /// Which number is which GPU.
    pub ordinals: &'a Ordinals,
    /// All records, by claim. A file that is not there has no entry.
    pub records: BTreeMap<ClaimUid, Arc<Stored<Record>>>,
    /// States of GPUs. A file that is not there has no entry.
    pub gpus: BTreeMap<GpuUuid, Arc<Stored<GpuState>>>,
    pub boot: &'a BootId,
    /// MIG modes of the claim's GPUs now; an error where a mode cannot be read. What the inventory says may be a minute old.
    pub modes: BTreeMap<GpuUuid, Result<MigMode, GpuError>>,
    /// Processes on the claim's GPUs, as far as these can be asked.
    pub processes: BTreeMap<GpuUuid, Vec<ProcessOnGpu>>,
    /// What exists at the placements of the claim's partitions, by device, created by divvy or not; an error where that
    /// cannot be read. A device without an entry is no partition, or one that its GPU does not support.
    pub living: Living,
    /// Device nodes of the host that claims may ask for.
    pub extra_nodes: &'a [String],
}

/// What lives at the places of partitions, by device.
pub type Living = BTreeMap<DeviceName, Result<Option<Outcome>, GpuError>>;

/// What is to be done about a prepare.
#[derive(Debug)]
pub enum Decision {
    /// Nothing: this is the answer (the CDI file must be there).
    Ready(Prepared),
    /// Make the claim's record again, which cannot be read or was lost, and decide then.
    Rebuild,
    Run(Plan),
    /// Wait until these let go; whether they will is for the API to say.
    Wait(Holders),
    /// The claim is not served.
    Refuse(Refusal),
}

/// Decides. The same claim with the same allocation gets the same answer; the same claim with another allocation is
/// undone first.
pub fn decide(claim: &Claim, seen: &Snapshot<'_>) -> Decision {
    let own = seen.records.get(&claim.uid).map(Arc::as_ref);
    let mut undo_first = false;
    match own {
        Some(Stored::Corrupt { .. }) => return Decision::Rebuild,
        // Instances were made for it: its record was lost.
        None | Some(Stored::Absent) if has_instances(&claim.uid, seen) => return Decision::Rebuild,
        None | Some(Stored::Absent) => {}
        Some(Stored::Newer { version, .. }) => {
            return Decision::Refuse(Why::RecordNewer { version: *version }.of(claim, None, None));
        }
        Some(Stored::Fine(record)) => {
            let same = record.is_of(&claim.allocation) && record.boot == *seen.boot;
            if same && record.phase == Phase::Prepared {
                return Decision::Ready(Prepared::of(seen.driver, record));
            }
            undo_first = !(same && can_be_revived(record));
        }
    }
    if claim.allocation.results.is_empty() && !undo_first {
        return Decision::Ready(Prepared::default());
    }
    let taken_up_again = own.is_some_and(|own| own.fine().is_some()) && !undo_first;
    decide_unprepared(claim, seen, undo_first, taken_up_again).unwrap_or_else(Decision::Refuse)
}

/// What is to be done for a claim that is not prepared.
fn decide_unprepared(
    claim: &Claim,
    seen: &Snapshot<'_>,
    undo_first: bool,
    taken_up_again: bool,
) -> Result<Decision, Refusal> {
    let devices = resolve_devices(claim, seen)?;
    if let Some(holders) = conflicts(claim, &devices, seen)? {
        return Ok(Decision::Wait(holders));
    }
    let steps = steps_for(claim, &devices, seen)?;
    // The processes of a claim that is taken up again are its own.
    if !taken_up_again {
        foreign_processes(claim, &devices, seen)?;
    }
    Ok(Decision::Run(Plan { undo_first, devices, steps }))
}

fn has_instances(uid: &ClaimUid, seen: &Snapshot<'_>) -> bool {
    let states = seen.gpus.values().filter_map(|stored| stored.fine());
    states.flat_map(|state| &state.instances).any(|i| i.claim == *uid && i.boot == *seen.boot)
}

/// A lingering claim of which nothing has been undone yet can be prepared again for its next pod: the processes in
/// the way are its own.
fn can_be_revived(record: &Record) -> bool {
    matches!(&record.phase, Phase::Leaving(leaving) if !leaving.undoing)
        && record.steps.iter().all(|s| matches!(s.progress, Progress::Done { .. }))
}

/// Each allocated device with the GPU that serves it: the name goes through the ordinals, the UUID is checked
/// against the inventory, the published pool is not looked at.
pub fn resolve_devices(claim: &Claim, seen: &Snapshot<'_>) -> Result<Vec<RecordedDevice>, Refusal> {
    let mut devices: Vec<RecordedDevice> = Vec::new();
    for result in &claim.allocation.results {
        let new = resolve_device(claim, result, seen).and_then(|new| beside(&devices, new));
        devices.push(new.map_err(|why| {
            let kind = DeviceKind::parse(&result.device).ok();
            why.of(claim, Some(&result.device), kind.and_then(|kind| seen.ordinals.gpu(kind.ordinal())))
        })?);
    }
    Ok(devices)
}

fn resolve_device(
    claim: &Claim,
    result: &AllocatedDevice,
    seen: &Snapshot<'_>,
) -> Result<RecordedDevice, Why> {
    let kind = DeviceKind::parse(&result.device).map_err(Why::UnknownDevice)?;
    let config = resolve(claim, seen.driver, &result.request, &kind)?;
    // GPUs get their numbers when they are first seen: before that it is not known that there is none.
    let unknown = if seen.inventory.is_some() { Why::UnknownOrdinal } else { Why::NoInventory };
    let uuid = seen.ordinals.gpu(kind.ordinal()).ok_or(unknown)?;
    let gpu = find(uuid, seen)?;
    let hold = match (&kind, result.admin_access) {
        (DeviceKind::Whole { .. } | DeviceKind::Admin { .. }, true) => HoldKind::Admin,
        (DeviceKind::Admin { .. }, false) => return Err(Why::AdminOnly),
        (DeviceKind::Share { .. }, false) => HoldKind::Share,
        (DeviceKind::Share { .. }, true) => return Err(Why::AdminShare),
        (DeviceKind::Whole { .. }, false) => HoldKind::Whole,
        (DeviceKind::Partition(_), true) => return Err(Why::AdminPartition),
        (DeviceKind::Partition(name), false) => partition(name, gpu)?,
    };
    let is_static = match &kind {
        DeviceKind::Partition(name) => name.is_static || was_made_outside(result, uuid, hold, seen),
        _ => false,
    };
    let time_slice = match hold {
        HoldKind::Whole => config.time_slice,
        HoldKind::Share => seen.gpus.get(uuid).and_then(|stored| stored.fine()?.share_time_slice),
        HoldKind::Partition { .. } | HoldKind::Admin => None,
    };
    let extra_nodes = offered(&config.extra_nodes, seen.extra_nodes)?;
    let (allocated, gpu) = (result.clone(), uuid.clone());
    Ok(RecordedDevice { allocated, gpu, kind: hold, time_slice, extra_nodes, is_static })
}

/// The extra nodes that a config asks for, if claims may have them all.
fn offered(wanted: &[String], offered: &[String]) -> Result<Vec<String>, Why> {
    match wanted.iter().find(|path| !offered.contains(path)) {
        None => Ok(wanted.to_vec()),
        Some(path) => Err(Why::ExtraNode { path: path.clone(), offered: offered.to_vec() }),
    }
}

/// The device, unless it does not go with those that the claim has besides: a part of a GPU is given once.
fn beside(devices: &[RecordedDevice], new: RecordedDevice) -> Result<RecordedDevice, Why> {
    let name = |d: &RecordedDevice| {
        (d.allocated.pool.clone(), d.allocated.device.clone(), d.allocated.share_id.clone())
    };
    for other in devices.iter().filter(|d| d.gpu == new.gpu) {
        let same_share = new.kind == HoldKind::Share && name(other) == name(&new);
        if !may_share(other.kind, new.kind) || same_share {
            let other = other.allocated.device.clone();
            let twice = other == new.allocated.device;
            return Err(if twice { Why::AllocatedTwice } else { Why::Overlap { other } });
        }
    }
    Ok(new)
}

/// Until this release a partition that was made outside divvy was published under the name of one that is made on demand.
/// An allocation under that name is still served with the partition that lives there, if nothing of ours accounts for it.
fn was_made_outside(result: &AllocatedDevice, gpu: &GpuUuid, hold: HoldKind, seen: &Snapshot<'_>) -> bool {
    let HoldKind::Partition { profile, placement } = hold else { return false };
    let Some(Ok(Some(Outcome::Partition { uuid, .. }))) = seen.living.get(&result.device) else {
        return false;
    };
    let ours = Step::create_partition(gpu.clone(), profile, placement);
    let mut own = steps_on(&seen.records, &seen.gpus, gpu).filter(|state| state.step == ours);
    own.all(|state| {
        matches!(&state.progress, Progress::Done { outcome: Outcome::Partition { uuid: made, .. } } if made != uuid)
    })
}

/// The exact place of a partition: profile id and start are in its name, the size is the profile's.
fn partition(name: &PartitionName, gpu: &Gpu) -> Result<HoldKind, Why> {
    let Some(mig) = &gpu.mig else {
        return Err(match gpu.facts.mig_mode {
            MigMode::Unsupported => Why::NoSuchPartition,
            MigMode::Supported { .. } => Why::PartitionsUnknown,
        });
    };
    let placement = mig.capabilities.placement(name.profile, name.start).ok_or(Why::NoSuchPartition)?;
    Ok(HoldKind::Partition { profile: name.profile, placement })
}

/// What is to be done for these devices, in order: MIG mode of their GPUs, their compute mode, their time slices,
/// their partitions.
fn steps_for(claim: &Claim, devices: &[RecordedDevice], seen: &Snapshot<'_>) -> Result<Vec<Step>, Refusal> {
    let (mut modes, mut computes) = (BTreeMap::new(), BTreeMap::new());
    let (mut slices, mut makes) = (BTreeMap::new(), Vec::new());
    for wanted in devices.iter().filter(|device| device.kind.needs().is_some()) {
        let gpu = &wanted.gpu;
        let refused = |why: Why| why.about(claim, wanted);
        modes.extend(mode_to_set(wanted, seen).map_err(refused)?.map(|on| (gpu, on)));
        lives_if_static(wanted, seen).map_err(refused)?;
        computes.extend(compute_mode_to_set(wanted, seen).map_err(refused)?.map(|to| (gpu, to)));
        let slice = wanted.time_slice.filter(|to| !is_in_force(claim, gpu, *to, seen));
        slices.extend(slice.map(|to| (gpu, to)));
        makes.extend(wanted.step());
    }
    let modes = modes.into_iter().map(|(gpu, on)| Step::SetMigMode { gpu: gpu.clone(), on });
    let computes = computes.into_iter().map(|(gpu, to)| Step::SetComputeMode { gpu: gpu.clone(), to });
    let slices = slices.into_iter().map(|(gpu, to)| Step::SetTimeSlice { gpu: gpu.clone(), to });
    Ok(modes.chain(computes).chain(slices).chain(makes).collect())
}

/// The MIG mode that the device's GPU is to be brought to, if it is not so or our notes say otherwise.
fn mode_to_set(wanted: &RecordedDevice, seen: &Snapshot<'_>) -> Result<Option<bool>, Why> {
    let gpu = &wanted.gpu;
    let facts = &find(gpu, seen)?.facts;
    let mode = seen.modes.get(gpu).cloned().unwrap_or(Ok(facts.mig_mode)).map_err(Why::GpuUnreadable)?;
    if mode == MigMode::Unsupported {
        return Ok(None);
    }
    let on = matches!(wanted.kind, HoldKind::Partition { .. });
    let state = seen.gpus.get(gpu).and_then(|stored| stored.fine());
    let may = state.is_some_and(|state| {
        let granted = state.may_change_mode && facts.architecture.toggles_mig_without_reset();
        granted || state.turned_mig_on()
    });
    // The administrator who makes the instances sets the mode too.
    if may && !wanted.is_static {
        let noted_otherwise = state.is_some_and(|state| state.disagrees_with_mig_mode(on));
        return Ok((mode.is_on() != on || noted_otherwise).then_some(on));
    }
    if mode.is_on() == on { Ok(None) } else { Err(Why::MigMode { on: mode.is_on() }) }
}

/// A partition that an administrator has made must live: this driver makes none in its place.
fn lives_if_static(wanted: &RecordedDevice, seen: &Snapshot<'_>) -> Result<(), Why> {
    if !wanted.is_static {
        return Ok(());
    }
    match seen.living.get(&wanted.allocated.device) {
        Some(Ok(Some(Outcome::Partition { .. }))) => Ok(()),
        Some(Err(error)) => Err(Why::GpuUnreadable(error.clone())),
        Some(Ok(_)) | None => Err(Why::NoStaticPartition),
    }
}

/// Whether the GPU has this time slice already: we have set it in this boot, and another claim that asked for it has held
/// the GPU since. (Without one the driver may have been loaded anew.)
fn is_in_force(claim: &Claim, gpu: &GpuUuid, to: TimeSlice, seen: &Snapshot<'_>) -> bool {
    let set =
        seen.gpus.get(gpu).and_then(|stored| stored.fine()).and_then(|state| state.time_slice(seen.boot));
    let mut others = seen.records.iter().filter(|(uid, _)| **uid != claim.uid);
    let asks = |record: &Record| {
        record.phase == Phase::Prepared
            && record.boot == *seen.boot
            && record.holds().any(|hold| hold.gpu == *gpu && hold.time_slice == Some(to))
    };
    set == Some(to) && others.any(|(_, stored)| stored.fine().is_some_and(asks))
}

fn find<'a>(uuid: &GpuUuid, seen: &'a Snapshot<'_>) -> Result<&'a Gpu, Why> {
    let inventory = seen.inventory.as_deref().ok_or(Why::NoInventory)?;
    if let Some(gpu) = inventory.gpus.get(uuid).filter(|gpu| gpu.facts.uuid == *uuid) {
        return Ok(gpu);
    }
    let problem = inventory.problems.iter().find(|problem| problem.gpu == *uuid);
    Err(problem.map_or(Why::DeviceGone, |problem| Why::GpuUnreadable(problem.error.clone())))
}

#[cfg(test)]
mod tests;
