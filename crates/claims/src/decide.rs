//! The prepare decision. Everything it looks at is in the [`Snapshot`]; everything that is to be done is in the
//! [`Decision`].

mod compute_mode;
mod conflicts;
mod strangers;

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::mig::PartitionName;
use divvy_model::{
    BootId, ClaimUid, DeviceKind, DeviceName, Gpu, GpuError, GpuUuid, HoldKind, Inventory, MigMode, Ordinals,
    TimeSlice,
};

use crate::{
    AllocatedDevice, Claim, GpuState, Outcome, Phase, Plan, Prepared, Progress, Record, RecordedDevice,
    Refusal, Step, Stored, resolve,
};

pub(crate) use self::conflicts::conflicts;
use self::conflicts::may_share;
pub use self::conflicts::{Clash, Holder, Holders};
pub use self::strangers::ProcessOnGpu;
use self::strangers::strangers;
use crate::rebuild::steps_on;

/// What [`decide`] looks at, taken under the locks of the claim and its GPUs.
#[derive(Debug, Clone, Copy)]
pub struct Snapshot<'a> {
    /// Our driver's name.
    pub driver: &'a str,
    /// The node's GPUs; `None` while the NVIDIA driver has not answered yet.
    pub inventory: Option<&'a Inventory>,
    /// Which number is which GPU.
    pub ordinals: &'a Ordinals,
    /// All records, by claim. A file that is not there has no entry.
    pub records: &'a BTreeMap<ClaimUid, Arc<Stored<Record>>>,
    /// States of GPUs. A file that is not there has no entry.
    pub gpus: &'a BTreeMap<GpuUuid, Arc<Stored<GpuState>>>,
    /// This boot.
    pub boot: &'a BootId,
    /// MIG modes of the claim's GPUs now; an error where a mode cannot be read. What the inventory says may be a minute old.
    pub modes: &'a BTreeMap<GpuUuid, Result<MigMode, GpuError>>,
    /// Processes on the claim's GPUs, as far as these can be asked.
    pub processes: &'a BTreeMap<GpuUuid, Vec<ProcessOnGpu>>,
    /// What lives at the places of the claim's partitions now, by device, whoever made it; an error where that cannot be
    /// read. A device without an entry is no partition, or none that its GPU can be cut into.
    pub living: &'a Living,
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
    /// This.
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
            return Decision::Refuse(Refusal::RecordNewer { claim: claim.reference(), version: *version });
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
    match resolve_devices(claim, seen).and_then(|devices| compute_mode::computable(claim, devices, seen)) {
        Err(refusal) => Decision::Refuse(refusal),
        Ok(devices) => match conflicts(claim, &devices, seen) {
            Err(refusal) => Decision::Refuse(refusal),
            Ok(Some(holders)) => Decision::Wait(holders),
            Ok(None) => {
                let taken_up_again = own.is_some_and(|own| own.fine().is_some()) && !undo_first;
                let strangers =
                    || strangers(claim, &devices, seen).filter(|_| !taken_up_again).map_or(Ok(()), Err);
                match steps_for(claim, &devices, seen).and_then(|steps| strangers().map(|()| steps)) {
                    Ok(steps) => Decision::Run(Plan { undo_first, devices, steps }),
                    Err(refusal) => Decision::Refuse(refusal),
                }
            }
        },
    }
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
        let device = || result.device.clone();
        let kind = DeviceKind::parse(&result.device)
            .map_err(|source| Refusal::UnknownDevice { claim: claim.reference(), source })?;
        let config = resolve(claim, seen.driver, &result.request, &kind)?;
        let uuid = seen.ordinals.gpu(kind.ordinal()).ok_or_else(|| match seen.inventory {
            Some(_) => Refusal::UnknownOrdinal { claim: claim.reference(), device: device() },
            // GPUs get their numbers when they are first seen: nobody can say yet that there is none.
            None => Refusal::NoInventory,
        })?;
        let gpu = find(claim, &result.device, uuid, seen)?;
        let hold = match (&kind, result.admin_access) {
            (DeviceKind::Whole { .. } | DeviceKind::Admin { .. }, true) => HoldKind::Admin,
            (DeviceKind::Admin { .. }, false) => {
                return Err(Refusal::AdminOnly { claim: claim.reference(), device: device() });
            }
            (DeviceKind::Share { .. }, false) => HoldKind::Share,
            (DeviceKind::Share { .. }, true) => {
                return Err(Refusal::AdminShare { claim: claim.reference(), device: device() });
            }
            (DeviceKind::Whole { .. }, false) => HoldKind::Whole,
            (DeviceKind::Partition(_), true) => {
                return Err(Refusal::AdminPartition { claim: claim.reference(), device: device() });
            }
            (DeviceKind::Partition(name), false) => partition(claim, name, gpu)?,
        };
        let is_static = match &kind {
            DeviceKind::Partition(name) => name.is_static || was_made_outside(result, uuid, hold, seen),
            _ => false,
        };
        let same = |d: &RecordedDevice| {
            let (a, b) = (&d.allocated, result);
            (&a.pool, &a.device, &a.share_id) == (&b.pool, &b.device, &b.share_id) && hold == HoldKind::Share
        };
        let taken = devices.iter().find(|d| d.gpu == *uuid && (!may_share(d.kind, hold) || same(d)));
        if let Some(taken) = taken {
            let (claim, other) = (claim.reference(), taken.allocated.device.clone());
            return Err(if other == result.device {
                Refusal::AllocatedTwice { claim, device: other }
            } else {
                Refusal::Overlap { claim, device: device(), other, gpu: uuid.clone() }
            });
        }
        // Admin access changes nothing, whatever its config says.
        let time_slice = config.time_slice().filter(|_| hold.needs().is_some());
        let new = RecordedDevice {
            allocated: result.clone(),
            gpu: uuid.clone(),
            kind: hold,
            time_slice,
            is_static,
        };
        one_time_slice(claim, &devices, &new)?;
        devices.push(new);
    }
    Ok(devices)
}

/// Until this release a partition that was made outside divvy was published under the name of one that is made on demand.
/// An allocation under that name is still served with the partition that lives there, if nothing of ours accounts for it.
fn was_made_outside(result: &AllocatedDevice, gpu: &GpuUuid, hold: HoldKind, seen: &Snapshot<'_>) -> bool {
    let HoldKind::Partition { profile, placement } = hold else { return false };
    let Some(Ok(Some(Outcome::Partition { uuid, .. }))) = seen.living.get(&result.device) else {
        return false;
    };
    let ours = Step::create_partition(gpu.clone(), profile, placement);
    let mut own = steps_on(seen.records, seen.gpus, gpu).filter(|state| state.step == ours);
    own.all(|state| {
        matches!(&state.progress, Progress::Done { outcome: Outcome::Partition { uuid: made, .. } } if made != uuid)
    })
}

/// A GPU has one time slice for all.
fn one_time_slice(claim: &Claim, devices: &[RecordedDevice], new: &RecordedDevice) -> Result<(), Refusal> {
    let Some(wanted) = new.time_slice else { return Ok(()) };
    let asked = devices
        .iter()
        .filter(|d| d.gpu == new.gpu)
        .find_map(|d| Some((d, d.time_slice.filter(|other| *other != wanted)?)));
    let Some((other, other_wanted)) = asked else { return Ok(()) };
    Err(Refusal::TwoTimeSlices {
        claim: claim.reference(),
        device: new.allocated.device.clone(),
        wanted,
        other: other.allocated.device.clone(),
        other_wanted,
        gpu: new.gpu.clone(),
    })
}

/// The exact place of a partition: profile id and start are in its name, the size is the profile's.
fn partition(claim: &Claim, name: &PartitionName, gpu: &Gpu) -> Result<HoldKind, Refusal> {
    let names = || (claim.reference(), name.device_name(), gpu.facts.uuid.clone());
    let Some(mig) = &gpu.mig else {
        let (claim, device, gpu_uuid) = names();
        return Err(match gpu.facts.mig_mode {
            MigMode::Unsupported => Refusal::NoSuchPartition { claim, device, gpu: gpu_uuid },
            MigMode::Supported { .. } => Refusal::PartitionsUnknown { claim, device, gpu: gpu_uuid },
        });
    };
    let Some(placement) = mig.capabilities.placement(name.profile, name.start) else {
        let (claim, device, gpu) = names();
        return Err(Refusal::NoSuchPartition { claim, device, gpu });
    };
    Ok(HoldKind::Partition { profile: name.profile, placement })
}

/// What is to be done for these devices, in order: MIG mode of their GPUs, their time slices, their partitions.
fn steps_for(claim: &Claim, devices: &[RecordedDevice], seen: &Snapshot<'_>) -> Result<Vec<Step>, Refusal> {
    let (mut modes, mut slices, mut makes) = (BTreeMap::new(), BTreeMap::new(), Vec::new());
    for wanted in devices {
        let on = match wanted.kind {
            HoldKind::Admin => continue,
            HoldKind::Whole | HoldKind::Share => false,
            HoldKind::Partition { .. } => true,
        };
        makes.extend(wanted.step());
        if let Some(to) = wanted.time_slice.filter(|to| !is_in_force(claim, &wanted.gpu, *to, seen)) {
            slices.insert(&wanted.gpu, to);
        }
        let (device, gpu) = (&wanted.allocated.device, &wanted.gpu);
        let facts = &find(claim, device, gpu, seen)?.facts;
        let mode = seen.modes.get(gpu).cloned().unwrap_or(Ok(facts.mig_mode)).map_err(|source| {
            Refusal::GpuUnreadable {
                claim: claim.reference(),
                device: device.clone(),
                gpu: gpu.clone(),
                source,
            }
        })?;
        if mode == MigMode::Unsupported {
            continue;
        }
        let state = seen.gpus.get(gpu).and_then(|stored| stored.fine());
        let ours = state.is_some_and(GpuState::turned_mig_on);
        let may = state.is_some_and(|state| state.may_change_mode);
        let may = ours || (may && facts.architecture.toggles_mig_without_reset());
        // Who makes the instances sets the mode.
        if may && !wanted.is_static {
            if mode.is_on() != on || state.is_some_and(|state| state.disagrees_with_mig_mode(on)) {
                modes.insert(gpu, on);
            }
        } else if mode.is_on() != on {
            let (claim, device, gpu) = (claim.reference(), device.clone(), gpu.clone());
            return Err(if on {
                Refusal::MigModeOff { claim, device, gpu }
            } else {
                Refusal::MigModeOn { claim, device, gpu }
            });
        }
    }
    let mut steps: Vec<_> =
        modes.into_iter().map(|(gpu, on)| Step::SetMigMode { gpu: gpu.clone(), on }).collect();
    steps.extend(slices.into_iter().map(|(gpu, to)| Step::SetTimeSlice { gpu: gpu.clone(), to }));
    steps.extend(makes);
    Ok(steps)
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

fn find<'a>(
    claim: &Claim,
    device: &DeviceName,
    uuid: &GpuUuid,
    seen: &Snapshot<'a>,
) -> Result<&'a Gpu, Refusal> {
    let inventory = seen.inventory.ok_or(Refusal::NoInventory)?;
    if let Some(gpu) = inventory.gpus.get(uuid).filter(|gpu| gpu.facts.uuid == *uuid) {
        return Ok(gpu);
    }
    let (claim, device, gpu) = (claim.reference(), device.clone(), uuid.clone());
    Err(match inventory.problems.iter().find(|p| p.gpu == *uuid) {
        Some(problem) => Refusal::GpuUnreadable { claim, device, gpu, source: problem.error.clone() },
        None => Refusal::DeviceGone { claim, device, gpu },
    })
}

#[cfg(test)]
mod tests;
