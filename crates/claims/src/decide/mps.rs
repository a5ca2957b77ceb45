//! MPS servers: the slot that an MPS share gets, the server of a claim that has its GPU alone, and what
//! is in their way. Slots are equal, since a server of protocol v2 has one limit for all of its clients
//! (ADR 18).

use divvy_api::{MpsLimits, MpsOptions};
use divvy_model::{ClaimUid, Gpu, GpuUuid, MpsServer};

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
    let running = || {
        let noted = state?.mps?.server;
        Some(noted).filter(|server| server.slots.is_some())
    };
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

/// Returns the place of a claim that has its GPU alone, with a server of its own.
pub(super) fn of_claim(limits: MpsLimits) -> MpsSlot {
    MpsSlot {
        server: MpsServer::of_claim(limits.cores, limits.memory),
        priority: None,
    }
}

/// Refuses a device with MPS beside that of another GPU: both would set the one variable that names the
/// folder of sockets.
pub(super) fn one_target(devices: &[RecordedDevice], new: &RecordedDevice) -> Result<(), Why> {
    let mut others = devices.iter().filter(|device| device.mps.is_some());
    match others.find(|other| new.mps.is_some() && other.gpu != new.gpu) {
        Some(other) => Err(Why::MpsTargets {
            other: other.allocated.device.clone(),
        }),
        None => Ok(()),
    }
}

/// Refuses MPS on a node or GPU that lacks what it needs, and one more share than there are slots.
pub(super) fn servable(
    claim: &Claim,
    device: &RecordedDevice,
    gpu: &Gpu,
    seen: &Snapshot<'_>,
) -> Result<(), Why> {
    let Some(slot) = device.mps else {
        return Ok(());
    };
    let node = seen
        .inventory
        .as_ref()
        .map(|inventory| inventory.system.mps);
    if let Some(lack) = node.and_then(|node| node.lack_for(gpu.facts.architecture)) {
        return Err(match slot.server.slots {
            Some(_) => Why::MpsUnavailable(lack),
            None => Why::MpsServerUnavailable(lack),
        });
    }
    let Some(slots) = slot.server.slots else {
        return Ok(());
    };
    // Whatever the scheduler has counted: a change of the policy may have made the slots fewer since.
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
