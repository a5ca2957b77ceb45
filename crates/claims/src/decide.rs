//! The prepare decision. Everything it looks at is in the [`Snapshot`]; everything that is to be
//! done is in the [`Decision`]. All refusals are made here.

mod conflicts;
mod foreign_processes;
mod memory;
mod mps;
mod servable;

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_api::MemoryBound;
use divvy_api::policy::MemorySize;
use divvy_model::mig::PartitionName;
use divvy_model::{
    BootId, ClaimUid, DeviceKind, Gpu, GpuError, GpuUuid, Inventory, MemoryCaps, MigMode,
    NamedTarget, Ordinals, Place, Sharing, Target,
};

use crate::{
    AllocatedDevice, Claim, Filling, GpuSeen, GpuState, Living, OtherClaim, Phase, Prepared,
    Record, RecordedDevice, Refusal, Stored, Why, resolve,
};

pub(crate) use self::conflicts::conflicts;
pub use self::conflicts::{Clash, Holder, Holders};
pub use self::foreign_processes::ProcessOnGpu;
use self::foreign_processes::foreign_processes;
use self::servable::servable;

/// Input of [`decide`], taken under the locks of the claim and its GPUs.
#[derive(Debug)]
pub struct Snapshot<'a> {
    /// Our driver's name.
    pub driver: &'a str,
    /// The node's GPUs; `None` while the NVIDIA driver has not answered yet.
    pub inventory: Option<Arc<Inventory>>,
    /// GPUs by their number in device names.
    pub ordinals: &'a Ordinals,
    /// All records, by claim. A file that is not there has no entry.
    pub records: BTreeMap<ClaimUid, Arc<Stored<Record>>>,
    /// States of GPUs. A file that is not there has no entry.
    pub gpus: BTreeMap<GpuUuid, Arc<Stored<GpuState>>>,
    pub boot: &'a BootId,
    /// The hardware of the claim's GPUs now: MIG modes, calls in flight, and what fills the places
    /// of its partitions. The inventory may be a minute old.
    pub hardware: BTreeMap<GpuUuid, GpuSeen>,
    /// Processes on the claim's GPUs, or why they could not be listed. A GPU that was not asked, or
    /// that never lists any, has no entry.
    pub processes: BTreeMap<GpuUuid, Result<Vec<ProcessOnGpu>, GpuError>>,
    /// GPUs that another driver of ours has given out, with that driver and its claim in words.
    pub other_drivers: BTreeMap<GpuUuid, String>,
    /// Device nodes of the host that claims may ask for.
    pub extra_nodes: &'a [String],
}

impl Snapshot<'_> {
    /// Returns the state kept about a GPU, if it can be read.
    fn state(&self, gpu: &GpuUuid) -> Option<&GpuState> {
        self.gpus.get(gpu)?.fine()
    }

    /// Returns the node's ability to cap the memory of shares.
    fn memory_caps(&self) -> MemoryCaps {
        let inventory = self.inventory.as_ref();
        inventory.map_or_else(MemoryCaps::default, |inventory| {
            inventory.system.memory_caps
        })
    }

    /// Returns whether the driver keeps limits of control groups that are gone.
    fn caps_linger(&self) -> bool {
        let inventory = self.inventory.as_ref();
        inventory.is_some_and(|inventory| inventory.system.caps_linger)
    }

    /// Returns the filling of a place, if it was asked for.
    pub(crate) fn filling(&self, gpu: &GpuUuid, place: Place) -> Option<&Filling> {
        self.hardware.get(gpu)?.places.get(&place)
    }

    /// Returns the devices of a record whose partitions are certainly gone. A partition that was
    /// not asked for, or cannot be read, counts as living.
    fn gone<'r>(&'r self, record: &'r Record) -> impl Iterator<Item = &'r RecordedDevice> {
        record.devices.iter().filter(|device| {
            let place = device.target.place();
            // The UUID is compared too: an administrator may have removed the instance and made
            // another one at the same place with the same ids.
            let filling = place.and_then(|place| self.filling(&device.gpu, place));
            filling.is_some_and(|filling| device.is_gone(filling))
        })
    }
}

/// Answer to a prepare.
#[derive(Debug)]
pub enum Decision {
    /// Needs nothing done: the answer (the CDI file must be there).
    Ready(Prepared),
    /// Asks to make the claim's record again, which cannot be read or was lost, and to decide then.
    Rebuild,
    /// Asks to bring the GPUs of these devices to the goal with the claim.
    Hold {
        /// The devices, resolved; none if only the earlier allocation is to go.
        devices: Vec<RecordedDevice>,
        /// True if the claim's present record is let go first: it is of another allocation, or of a
        /// prepare or unprepare that was cut short. Otherwise the claim goes on with it.
        let_go_first: bool,
    },
    /// Asks to wait until these let go; the API says if they will.
    Wait(Holders),
    /// The claim is not served.
    Refuse(Refusal),
}

/// Decides what a prepare does.
///
/// Invariants:
/// - The same claim with the same allocation gets the same answer, also after a crash, a restart
///   and a change of policies: a record is answered from, not resolved again.
/// - A claim never goes on with what it holds for another allocation, or with what a cut-short call
///   left half made: that is let go first (`let_go_first`).
/// - A record that cannot be read is never taken for no record: it is rebuilt, or the claim is
///   refused.
/// - A claim gets a device only if no other record, no stray instance and no call in flight may
///   need the same part of the GPU.
/// - Nothing outside the snapshot is read, so a decision holds for as long as its locks are held.
pub fn decide(claim: &Claim, seen: &Snapshot<'_>) -> Decision {
    // Phase 1: find out if the claim has a record that can be used. `Absent` and `Corrupt` differ:
    // only the first one means that the claim holds nothing.
    let own = seen.records.get(&claim.uid).map(Arc::as_ref);
    let record = match own {
        Some(Stored::Corrupt { .. }) => return Decision::Rebuild,
        // Instances were made for it: its record was lost.
        None | Some(Stored::Absent) if has_strays(&claim.uid, seen) => return Decision::Rebuild,
        None | Some(Stored::Absent) => None,
        Some(Stored::Newer { version, .. }) => {
            return Decision::Refuse(Why::RecordNewer { version: *version }.of(claim, None, None));
        }
        Some(Stored::Fine(record)) => Some(record),
    };
    // Phase 2: choose between an answer from the record, going on with its devices, and a new
    // start. The order of the arms matters: another allocation makes everything else in the record
    // obsolete, and after a reboot no partition of it lives, whatever its phase says.
    let (devices, let_go_first) = match record {
        None => (None, false),
        Some(record) if !record.is_of(&claim.allocation) => (None, true),
        // Its devices are as they were resolved then, whatever rules say now.
        Some(record) if record.boot != *seen.boot => (Some(&record.devices), false),
        Some(record) => match &record.phase {
            // Its pods have the device nodes of a partition that is gone: another one under the
            // same record would be theirs by chance only.
            Phase::Prepared => {
                return match seen.gone(record).next() {
                    None => Decision::Ready(Prepared::of(seen.driver, record)),
                    Some(device) => Decision::Refuse(Why::PartitionGone.about(claim, device)),
                };
            }
            // Nothing of it has been removed: the processes in the way are its own.
            Phase::Leaving(leaving) if !leaving.undoing => (Some(&record.devices), false),
            // Part of it may be missing, and policies may have changed since: undo all of it, then
            // resolve the claim as if it were new.
            Phase::Leaving(_) | Phase::Preparing => (None, true),
        },
    };
    // The claim has no device of ours (a claim of several drivers): success without a record.
    if claim.allocation.results.is_empty() && !let_go_first {
        return Decision::Ready(Prepared::default());
    }
    // Phase 3: check the devices against all other holds, and against the hardware.
    let had = match record.filter(|_| devices.is_some()) {
        None => Had::Nothing,
        Some(record) if record.boot == *seen.boot => Had::InThisBoot,
        Some(_) => Had::BeforeBoot,
    };
    match hold(claim, seen, devices.cloned(), had) {
        Ok(Ok(devices)) => Decision::Hold {
            devices,
            let_go_first,
        },
        Ok(Err(holders)) => Decision::Wait(holders),
        Err(refusal) => Decision::Refuse(refusal),
    }
}

/// Devices that a claim had before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Had {
    /// It is new, or its earlier devices go first.
    Nothing,
    /// It had the same devices before the node was booted.
    BeforeBoot,
    /// It has had the same devices in this boot: processes there are its own.
    InThisBoot,
}

/// Returns the devices that the claim may have, or who is in the way. `devices` are those of its
/// record, if it goes on with it.
fn hold(
    claim: &Claim,
    seen: &Snapshot<'_>,
    devices: Option<Vec<RecordedDevice>>,
    had: Had,
) -> Result<Result<Vec<RecordedDevice>, Holders>, Refusal> {
    let devices = match devices {
        Some(devices) => devices,
        None => resolve_devices(claim, seen)?,
    };
    // Conflicts come first: while another claim holds the GPU, its mode is as that claim needs it,
    // and a refusal for the mode would be final where waiting helps.
    if let Some(holders) = conflicts(claim, &devices, seen)? {
        return Ok(Err(holders));
    }
    fit(claim, &devices, seen, had)?;
    Ok(Ok(devices))
}

/// Refuses devices of an earlier boot that the claim cannot have again: the hardware cannot be
/// brought to them, or others use it now. Other records are no obstacle, since both were prepared
/// before the boot.
pub fn fit_after_boot(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
) -> Result<(), Refusal> {
    fit(claim, devices, seen, Had::BeforeBoot)
}

/// Checks devices against the hardware and those who use it without a record.
fn fit(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
    had: Had,
) -> Result<(), Refusal> {
    servable(claim, devices, seen, had != Had::Nothing)?;
    gone_beside(claim, devices, seen)?;
    if had == Had::InThisBoot {
        return Ok(());
    }
    foreign_processes(claim, devices, seen)
}

/// Refuses to make a partition on a GPU where one is gone under the pods of another claim: the
/// driver gives numbers of instances out again, and with the number of the lost one, the device
/// nodes that these pods still have.
fn gone_beside(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
) -> Result<(), Refusal> {
    let is_made = |device: &&RecordedDevice| {
        let place = device.own_place().filter(|_| device.sharing.holds());
        let filling = place.and_then(|place| seen.filling(&device.gpu, place));
        // No whole partition is there now, so this call would make one.
        let is_whole = |there: &Option<Living>| {
            let there = there.as_ref();
            there.is_some_and(|living| living.as_partition().is_some())
        };
        matches!(filling, Some(Ok(there)) if !is_whole(there))
    };
    for device in devices.iter().filter(is_made) {
        let others = seen.records.values().filter_map(|stored| stored.fine());
        let mut in_use = others.filter(|record| {
            record.uid != claim.uid
                && record.boot == *seen.boot
                && may_run(&record.phase)
                && seen.gone(record).any(|gone| gone.gpu == device.gpu)
        });
        if let Some(record) = in_use.next() {
            let holder = OtherClaim::seen_from(&claim.namespace, &record.reference());
            return Err(Why::PartitionGoneBeside { holder }.about(claim, device));
        }
    }
    Ok(())
}

/// Returns whether programs of a claim in this phase may run: also those of one that lingers.
fn may_run(phase: &Phase) -> bool {
    match phase {
        Phase::Prepared => true,
        Phase::Leaving(leaving) => !leaving.undoing,
        Phase::Preparing => false,
    }
}

/// Returns true if instances were made for a claim that no record holds: a file that was lost after
/// its instances had been made.
fn has_strays(uid: &ClaimUid, seen: &Snapshot<'_>) -> bool {
    seen.gpus.iter().any(|(gpu, stored)| {
        let state = stored.fine();
        state.is_some_and(|state| {
            state
                .instances_in(seen.boot)
                .any(|(place, i)| i.made_for == *uid && !is_held(gpu, place, &seen.records))
        })
    })
}

/// Returns true if a record that can be read holds a place.
pub(crate) fn is_held(
    gpu: &GpuUuid,
    place: Place,
    records: &BTreeMap<ClaimUid, Arc<Stored<Record>>>,
) -> bool {
    let fine = records.values().filter_map(|stored| stored.fine());
    fine.flat_map(|record| &record.devices)
        .any(|device| device.gpu == *gpu && device.own_place() == Some(place))
}

/// Returns each allocated device with the GPU that serves it: the name goes through the ordinals,
/// the UUID is checked against the inventory, the published pool is not looked at.
pub fn resolve_devices(claim: &Claim, seen: &Snapshot<'_>) -> Result<Vec<RecordedDevice>, Refusal> {
    let mut devices: Vec<RecordedDevice> = Vec::new();
    for result in &claim.allocation.results {
        let new =
            resolve_device(claim, result, seen).and_then(|new| beside(&claim.uid, &devices, new));
        devices.push(new.map_err(|why| {
            let kind = DeviceKind::parse(&result.device).ok();
            why.of(
                claim,
                Some(&result.device),
                kind.and_then(|kind| seen.ordinals.gpu(kind.ordinal())),
            )
        })?);
    }
    mps::add_up(&mut devices);
    Ok(devices)
}

fn resolve_device(
    claim: &Claim,
    result: &AllocatedDevice,
    seen: &Snapshot<'_>,
) -> Result<RecordedDevice, Why> {
    let kind = DeviceKind::parse(&result.device).map_err(Why::UnknownDevice)?;
    let config = resolve(claim, seen.driver, &result.request, &kind)?;
    // GPUs get their numbers when they are first seen: before that it is not known that there is
    // none. The same while the file of numbers is lost and not written again yet.
    let unknown = if seen.inventory.is_some() && !seen.ordinals.is_empty() {
        Why::UnknownOrdinal
    } else {
        Why::NoInventory
    };
    let uuid = seen.ordinals.gpu(kind.ordinal()).ok_or(unknown)?;
    let gpu = find(uuid, seen)?;
    let target = match &kind.target {
        NamedTarget::Gpu { .. } => Target::Gpu,
        NamedTarget::Partition(name) if !result.admin_access => {
            Target::Partition(place(name, gpu)?)
        }
        // A published partition exists only while a claim holds it, and admin access must not
        // create one.
        NamedTarget::Partition(_) => return Err(Why::AdminPartition),
    };
    let sharing = match (kind.sharing, result.admin_access) {
        (Sharing::Exclusive | Sharing::Admin, true) => Sharing::Admin,
        (Sharing::Admin, false) => return Err(Why::AdminOnly),
        (_, true) => return Err(Why::AdminShare),
        (sharing, false) => sharing,
    };
    // The name says if the partition was made by an administrator (`static`), so that a policy
    // which changed since the allocation does not change the answer.
    let theirs = kind.partition().is_some_and(|name| name.is_static);
    // A claim that has the GPU alone chooses the time slice; users of shares cannot, because the
    // setting is of the whole GPU: the policy does.
    let time_slice = match (target, sharing) {
        (Target::Gpu, Sharing::Exclusive) => config.time_slice,
        (Target::Gpu, Sharing::TimeSliced) => seen
            .state(uuid)
            .and_then(|state| state.grant.share_time_slice),
        _ => None,
    };
    let state = seen.state(uuid);
    let of_percent = || memory::of_percent(result, target, gpu, state);
    let share_memory = sharing.is_shared().then(of_percent).flatten();
    let mps = match (target, sharing) {
        (_, Sharing::Mps) => Some(mps::slot(
            &claim.uid, gpu, target, result, config.mps, seen,
        )?),
        (_, Sharing::Exclusive) => {
            let limits = config.mps_server;
            limits.map(|limits| mps::of_claim(&claim.uid, target, result, limits, seen))
        }
        _ => None,
    };
    let slot = mps.filter(|_| sharing.is_shared());
    let slot_memory = slot.and_then(|slot| Some(slot.server.memory_mib? << 20));
    let extra_nodes = offered(&config.extra_nodes, seen.extra_nodes)?;
    let device = RecordedDevice {
        allocated: result.clone(),
        gpu: uuid.clone(),
        target,
        sharing,
        theirs,
        time_slice,
        share_memory: share_memory.or(slot_memory),
        memory_cap: None,
        clears_caps: false,
        mps,
        extra_nodes,
        given: None,
    };
    // A slot has its limit already; a namespace has that of its share.
    let of_namespace = slot
        .and_then(|slot| slot.namespace)
        .and(config.mps.limits.memory);
    let of_namespace = of_namespace.map(|bytes| MemoryBound::Amount(MemorySize { bytes }));
    let wanted = memory::Wanted {
        limit: config.memory_limit.or(of_namespace),
        times: claim.times,
    };
    let memory_cap = memory::cap(&device, wanted, gpu, state, seen.memory_caps())?;
    let is_whole = target == Target::Gpu && sharing == Sharing::Exclusive;
    Ok(RecordedDevice {
        memory_cap,
        clears_caps: is_whole && seen.caps_linger(),
        ..device
    })
}

/// Returns the extra nodes that a config asks for, if the node offers all of them to claims.
fn offered(wanted: &[String], offered: &[String]) -> Result<Vec<String>, Why> {
    match wanted.iter().find(|path| !offered.contains(path)) {
        None => Ok(wanted.to_vec()),
        Some(path) => Err(Why::ExtraNode {
            path: path.clone(),
            offered: offered.to_vec(),
        }),
    }
}

/// Returns the device, unless it does not go with those that the claim has besides: a part of a
/// GPU is given once.
fn beside(
    claim: &ClaimUid,
    devices: &[RecordedDevice],
    new: RecordedDevice,
) -> Result<RecordedDevice, Why> {
    let name = |d: &RecordedDevice| {
        (
            d.allocated.pool.clone(),
            d.allocated.device.clone(),
            d.allocated.share_id.clone(),
        )
    };
    let hold = |device: &RecordedDevice| device.hold(claim);
    mps::one_target(devices, &new)?;
    // Two shares of one target do not conflict, so a share that is listed twice is found by its
    // name.
    for other in devices.iter().filter(|d| d.gpu == new.gpu) {
        let same_share = new.sharing.is_shared() && name(other) == name(&new);
        if hold(other).conflicts(&hold(&new)) || same_share {
            let other = other.allocated.device.clone();
            let twice = other == new.allocated.device;
            return Err(if twice {
                Why::AllocatedTwice
            } else {
                Why::Overlap { other }
            });
        }
    }
    Ok(new)
}

/// Returns the exact place of a partition: profile id and start are in its name, the size is the
/// profile's.
fn place(name: &PartitionName, gpu: &Gpu) -> Result<Place, Why> {
    let Some(mig) = &gpu.mig else {
        // Without capabilities it is not known if the profile exists: drivers before 550 list
        // profiles only with MIG mode on.
        return Err(match gpu.facts.mig_mode {
            MigMode::Unsupported => Why::NoSuchPartition,
            MigMode::Supported { .. } => Why::PartitionsUnknown,
        });
    };
    let placement = mig
        .capabilities
        .placement(name.profile, name.start)
        .ok_or(Why::NoSuchPartition)?;
    Ok(Place {
        profile: name.profile,
        placement,
    })
}

fn find<'a>(uuid: &GpuUuid, seen: &'a Snapshot<'_>) -> Result<&'a Gpu, Why> {
    let inventory = seen.inventory.as_deref().ok_or(Why::NoInventory)?;
    if let Some(gpu) = inventory
        .gpus
        .get(uuid)
        // The key is checked against the facts that were read: an index may be stale after a card
        // was exchanged.
        .filter(|gpu| gpu.facts.uuid == *uuid)
    {
        return Ok(gpu);
    }
    let problem = inventory
        .problems
        .iter()
        .find(|problem| problem.gpu == *uuid);
    Err(problem.map_or(Why::DeviceGone, |problem| {
        Why::GpuUnreadable(problem.error.clone())
    }))
}

#[cfg(test)]
mod tests;
