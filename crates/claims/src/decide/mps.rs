//! MPS shares: the slot that a claim gets, and what is in its way. Slots are equal, since a server of
//! protocol v2 has one limit for all of its clients (ADR 18).

use divvy_api::MpsOptions;
use divvy_model::{ClaimUid, GpuUuid};

use super::Snapshot;
use crate::{Claim, MpsSlot, Record, RecordedDevice, Why};

/// The lack of a GPU whose rules never asked for MPS.
const NOT_GRANTED: &str = "no GpuPolicy has offered its GPU in MPS shares";

/// Returns the slot of a claim: of the server that others have, or of the one that the rules ask for.
pub(super) fn slot(
    claim: &ClaimUid,
    gpu: &GpuUuid,
    options: MpsOptions,
    seen: &Snapshot<'_>,
) -> Result<MpsSlot, Why> {
    let state = seen.state(gpu);
    let running = || state?.mps.map(|noted| noted.server);
    let kept = others(claim, gpu, seen).find_map(|device| Some(device.mps?.server));
    let in_use = kept.map(|kept| running().unwrap_or(kept));
    let server = in_use
        .or_else(|| state?.grant.mps)
        .ok_or(Why::MpsUnavailable(NOT_GRANTED))?;
    let unequal = |asked: String| Why::MpsUnequal {
        asked,
        slot: server,
    };
    if let Some(cores) = options.limits.cores.filter(|cores| *cores != server.cores) {
        return Err(unequal(format!("cores {cores}")));
    }
    let memory = options.limits.memory;
    if let Some(bytes) = memory.filter(|bytes| Some(*bytes) != server.memory_mib.map(|m| m << 20)) {
        return Err(unequal(format!("memory {}Mi", bytes >> 20)));
    }
    Ok(MpsSlot {
        server,
        priority: options.priority,
    })
}

/// Refuses a share beside that of another GPU: both would set the one variable that names the folder
/// of sockets.
pub(super) fn one_target(devices: &[RecordedDevice], new: &RecordedDevice) -> Result<(), Why> {
    let mut others = devices.iter().filter(|device| device.is_mps_share());
    match others.find(|other| new.is_mps_share() && other.gpu != new.gpu) {
        Some(other) => Err(Why::MpsTargets {
            other: other.allocated.device.clone(),
        }),
        None => Ok(()),
    }
}

/// Refuses a share on a node that lacks what it needs, and one more share than there are slots.
pub(super) fn servable(
    claim: &Claim,
    device: &RecordedDevice,
    seen: &Snapshot<'_>,
) -> Result<(), Why> {
    let Some(slot) = device.mps else {
        return Ok(());
    };
    let inventory = seen.inventory.as_ref();
    if let Some(lack) = inventory.and_then(|inventory| inventory.system.mps.lack()) {
        return Err(Why::MpsUnavailable(lack));
    }
    // Whatever the scheduler has counted: a change of the policy may have made the slots fewer since.
    let slots = slot.server.slots;
    let taken = others(&claim.uid, &device.gpu, seen).count();
    let own = claim.allocation.results.iter();
    let own = own.filter(|result| result.device == device.allocated.device);
    if taken + own.count() > usize::try_from(slots).unwrap_or(usize::MAX) {
        return Err(Why::MpsFull { slots });
    }
    Ok(())
}

/// Returns the MPS shares that other claims have of a GPU.
fn others<'a>(
    claim: &'a ClaimUid,
    gpu: &'a GpuUuid,
    seen: &'a Snapshot<'_>,
) -> impl Iterator<Item = &'a RecordedDevice> {
    let records = seen.records.iter().filter(move |(uid, _)| *uid != claim);
    let records = records.filter_map(|(_, stored)| stored.fine());
    let devices = records.flat_map(|record: &Record| &record.devices);
    devices.filter(move |device| device.gpu == *gpu && device.is_mps_share())
}
