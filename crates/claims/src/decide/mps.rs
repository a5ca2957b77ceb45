//! MPS servers: the place that an MPS share gets, the server of a claim that has its GPU alone, and
//! what is in their way. Where the driver has protocol v2, the places are equal slots, since a
//! server has one limit for all of its clients (ADR 18). With v3 a claim has a namespace of its own
//! size (ADR 21).

use divvy_api::{MpsLimits, MpsOptions};
use divvy_model::{
    ClaimUid, Gpu, GpuUuid, MpsAbility, MpsNamespace, MpsNamespaceName, MpsProtocol, MpsServer,
    Target,
};

use super::Snapshot;
use crate::Granted;
use crate::{AllocatedDevice, Claim, MpsSlot, Record, RecordedDevice, ShareAmounts, Why};

/// The lack of a GPU whose rules never asked for MPS.
const NOT_GRANTED: &str = "no GpuPolicy has offered its GPU in MPS shares";

/// The lack of a partition of an administrator: its life is not divvy's, and a server would end
/// with it.
const STATIC: &str = "its partition was made by an administrator and not by divvy";

/// The lack of a place at a server of another protocol.
const OTHER_PROTOCOL: &str =
    "the NVIDIA driver of its node has been exchanged for one with another protocol of MPS";

/// Returns the place of a share: at the server that others have, or at the one that the rules ask
/// for.
pub(super) fn slot(
    claim: &ClaimUid,
    gpu: &Gpu,
    target: Target,
    result: &AllocatedDevice,
    options: MpsOptions,
    seen: &Snapshot<'_>,
) -> Result<MpsSlot, Why> {
    let uuid = &gpu.facts.uuid;
    let state = seen.state(uuid);
    let running = || {
        let noted = state?.mps.get(&target)?.server;
        Some(noted).filter(|server| server.slots.is_some())
    };
    let kept = others(claim, uuid, target, seen).find_map(|device| Some(device.mps?.server));
    let in_use = kept.map(|kept| running().unwrap_or(kept));
    let server = in_use
        .or_else(|| granted(gpu, target, state?.grant))
        .ok_or(Why::MpsUnavailable(NOT_GRANTED))?;
    if server.has_namespaces() {
        let namespace = namespace(claim, result, options.limits)?;
        return Ok(MpsSlot {
            server,
            priority: options.priority,
            namespace: Some(namespace),
        });
    }
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
        namespace: None,
    })
}

/// Returns the server that the rules of a GPU ask for.
fn granted(gpu: &Gpu, target: Target, grant: Granted) -> Option<MpsServer> {
    let Some(place) = target.place() else {
        return grant.mps;
    };
    let capabilities = &gpu.mig.as_ref()?.capabilities;
    let memory_mib = capabilities.profile(place.profile)?.memory_mib;
    MpsServer::of_partition(grant.mps_slots_in_partitions?, memory_mib)
}

/// Returns the namespace of one share. Its memory is known when the share's is.
fn namespace(
    claim: &ClaimUid,
    result: &AllocatedDevice,
    limits: MpsLimits,
) -> Result<MpsNamespace, Why> {
    let granted = ShareAmounts::of(result).cores.unwrap_or(100);
    let granted = u32::try_from(granted).unwrap_or(100).clamp(1, 100);
    match limits.cores {
        Some(asked) if asked < granted => Err(Why::CoresBelowGrant { asked, granted }),
        asked => Ok(MpsNamespace {
            name: MpsNamespaceName::of(claim, &result.device),
            cores: asked.unwrap_or(granted),
            memory_mib: None,
        }),
    }
}

/// Makes the namespaces of shares those of all that the claim has of a GPU: a program can use one
/// namespace only.
pub(super) fn add_up(devices: &mut [RecordedDevice]) {
    let part = |device: &RecordedDevice| {
        let namespace = device.mps?.namespace.filter(|_| device.is_mps_share())?;
        let memory = device.memory_cap.or(device.amounts().memory);
        // None at all would be no limit.
        let memory_mib = memory.map(|bytes| (bytes >> 20).max(1));
        Some(MpsNamespace {
            memory_mib,
            ..namespace
        })
    };
    let parts: Vec<_> = devices.iter().filter_map(part).collect();
    for slot in devices.iter_mut().filter_map(|device| device.mps.as_mut()) {
        let Some(namespace) = &mut slot.namespace else {
            continue;
        };
        let same: Vec<_> = parts.iter().filter(|p| p.name == namespace.name).collect();
        if same.is_empty() {
            continue;
        }
        let cores: u32 = same.iter().map(|part| part.cores).sum();
        namespace.cores = cores.min(100);
        // A part that is not known leaves the sum without a limit.
        namespace.memory_mib = same.iter().map(|part| part.memory_mib).sum();
    }
}

/// Returns the place of a claim that has its target alone, with a server of its own.
pub(super) fn of_claim(
    claim: &ClaimUid,
    target: Target,
    result: &AllocatedDevice,
    limits: MpsLimits,
    seen: &Snapshot<'_>,
) -> MpsSlot {
    let inventory = seen.inventory.as_ref();
    let protocol = inventory.and_then(|inventory| inventory.system.mps.protocol());
    let protocol = protocol.map(|protocol| protocol.of_target(target));
    let own = MpsServer::of_claim(limits.cores, limits.memory);
    let (server, namespace) = match protocol {
        Some(MpsProtocol::V3) => {
            let name = MpsNamespaceName::of(claim, &result.device);
            let MpsServer {
                cores, memory_mib, ..
            } = own;
            let namespace = MpsNamespace {
                name,
                cores,
                memory_mib,
            };
            (MpsServer::NAMESPACES, Some(namespace))
        }
        Some(MpsProtocol::V2) | None => (own, None),
    };
    MpsSlot {
        server,
        priority: None,
        namespace,
    }
}

/// Refuses a device with MPS beside that of another target: both would set the one variable that
/// names the folder of sockets.
pub(super) fn one_target(devices: &[RecordedDevice], new: &RecordedDevice) -> Result<(), Why> {
    let mut others = devices.iter().filter(|device| device.mps.is_some());
    let target = |device: &RecordedDevice| (device.gpu.clone(), device.target);
    match others.find(|other| new.mps.is_some() && target(other) != target(new)) {
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
    let has_other = |node: MpsAbility| {
        let protocol = node.protocol();
        let protocol = protocol.map(|protocol| protocol.of_target(device.target));
        protocol.is_some_and(|protocol| protocol != slot.server.protocol)
    };
    let lack = node.and_then(|node| {
        let other = || has_other(node).then_some(OTHER_PROTOCOL);
        node.lack_for(gpu.facts.architecture).or_else(other)
    });
    let lack = lack.or_else(|| device.theirs.then_some(STATIC));
    if let Some(lack) = lack {
        return Err(if device.is_mps_share() {
            Why::MpsUnavailable(lack)
        } else {
            Why::MpsServerUnavailable(lack)
        });
    }
    // The first claim gets a server that is started for it.
    let (gpu, target) = (&device.gpu, device.target);
    // What was noted of a server ended with its boot.
    let state = seen.state(&device.gpu);
    let state = state.filter(|state| state.boot.as_ref() == Some(seen.boot));
    let noted = state.and_then(|state| state.mps.get(&device.target));
    let is_shared = device.is_mps_share() && others(&claim.uid, gpu, target, seen).next().is_some();
    if let Some(fault) = noted.and_then(|noted| noted.wedged).filter(|_| is_shared) {
        return Err(Why::MpsWedged { fault });
    }
    let Some(slots) = slot.server.slots else {
        return Ok(());
    };
    // Whatever the scheduler has counted: a change of the policy may have made the slots fewer
    // since.
    let taken = others(&claim.uid, gpu, target, seen).count();
    let own = claim.allocation.results.iter();
    let own = own.filter(|result| result.device == device.allocated.device);
    if taken + own.count() > usize::try_from(slots).unwrap_or(usize::MAX) {
        return Err(Why::MpsFull { slots });
    }
    Ok(())
}

/// Returns the MPS shares that other claims have of a target.
fn others<'a>(
    claim: &'a ClaimUid,
    gpu: &'a GpuUuid,
    target: Target,
    seen: &'a Snapshot<'_>,
) -> impl Iterator<Item = &'a RecordedDevice> {
    let records = seen.records.iter().filter(move |(uid, _)| *uid != claim);
    let records = records.filter_map(|(_, stored)| stored.fine());
    let devices = records.flat_map(|record: &Record| &record.devices);
    devices.filter(move |device| {
        device.gpu == *gpu && device.target == target && device.is_mps_share()
    })
}
