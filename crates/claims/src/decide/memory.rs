//! The memory of a share: what its percent come to, and the limit to which its pods are held.

use divvy_api::MemoryBound;
use divvy_api::names::capacity;
use divvy_model::{CapsPromise, Enforcement, Gpu, Limits, MemoryCaps, ShareUnit, Target};

use crate::{AllocatedDevice, GpuState, RecordedDevice, Times, Why};

/// The wishes of a claim for the memory of a device.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted {
    /// Limit in its config.
    pub(super) limit: Option<MemoryBound>,
    pub(super) times: Times,
}

/// The lack of a share that is to be capped.
const UNKNOWN_AMOUNT: &str = "the memory of its share is not known, or nothing";
/// The lack of a board that shares its memory with the processor.
const NO_MEMORY: &str = "its GPU has no memory of its own";
/// The lack of a device whose memory the driver does not cap.
const OTHER: &str = "the driver caps only the memory of shares of a whole GPU";

/// Returns the memory in bytes that a share by percent has of its target: of what the policy leaves
/// to shares of a GPU, or of all that a partition has. `None` for shares by amounts, and where it
/// is not known or nothing.
pub(super) fn of_percent(
    result: &AllocatedDevice,
    target: Target,
    gpu: &Gpu,
    state: Option<&GpuState>,
) -> Option<u64> {
    let percent = result.granted(capacity::PERCENT)?;
    let mib = match target {
        Target::Gpu => for_shares(gpu, state)?,
        Target::Partition(place) => {
            let capabilities = &gpu.mig.as_ref()?.capabilities;
            capabilities.profile(place.profile)?.memory_mib
        }
    };
    let bytes = ShareUnit::part_of_memory(mib, percent);
    Some(bytes).filter(|bytes| *bytes > 0)
}

/// Returns the memory in MiB that all shares of a GPU have together.
fn for_shares(gpu: &Gpu, state: Option<&GpuState>) -> Option<u64> {
    let reserved = state.map_or(0, |state| state.grant.share_reserved_mib);
    Some((gpu.facts.memory_bytes? >> 20).saturating_sub(reserved))
}

/// Returns the bytes that the driver caps the memory of a device to: the limit that its config asks
/// for, or what it was granted. `None` where nothing is capped. A limit that cannot be kept is
/// refused.
pub(super) fn cap(
    device: &RecordedDevice,
    wanted: Wanted,
    gpu: &Gpu,
    state: Option<&GpuState>,
    caps: MemoryCaps,
) -> Result<Option<u64>, Why> {
    let limits = Limits::of(device.target.kind(), device.sharing, caps);
    // A board without memory of its own has nothing to cap, and is published so.
    let for_shares = for_shares(gpu, state).filter(|_| limits.memory == Enforcement::Cgroup);
    let Some(mib) = for_shares else {
        let lack = caps.lack().unwrap_or(OTHER);
        return match wanted.limit {
            None if was_promised(device, wanted, gpu, state) => Err(Why::CapLost(lack)),
            None => Ok(None),
            Some(_) if gpu.facts.memory_bytes.is_none() => Err(Why::LimitNotKept(NO_MEMORY)),
            Some(_) => Err(Why::LimitNotKept(lack)),
        };
    };
    let request = device.amounts().memory;
    let request = request.filter(|bytes| *bytes > 0);
    let request = request.ok_or(Why::CapLost(UNKNOWN_AMOUNT))?;
    match wanted.limit {
        None => Ok(Some(request)),
        Some(bound) => {
            let percent = device.allocated.granted(capacity::PERCENT);
            limit(bound, request, percent, mib, state).map(Some)
        }
    }
}

/// Returns whether the slices by which a device was allocated said that its memory is capped: the
/// scheduler may have chosen it for that.
fn was_promised(
    device: &RecordedDevice,
    wanted: Wanted,
    gpu: &Gpu,
    state: Option<&GpuState>,
) -> bool {
    let capped = Limits::of(device.target.kind(), device.sharing, MemoryCaps::Available);
    let promise = state.map_or(CapsPromise::Never, |state| state.grant.caps);
    capped.memory == Enforcement::Cgroup
        && gpu.facts.memory_bytes.is_some()
        && promise.covers(wanted.times.made, wanted.times.allocated)
}

/// Returns the bytes of a limit, if the request (in bytes, and in percent if it is granted so), the
/// GPU and the policy allow it.
fn limit(
    bound: MemoryBound,
    request: u64,
    percent: Option<u64>,
    mib: u64,
    state: Option<&GpuState>,
) -> Result<u64, Why> {
    let (limit, all) = (bound.bytes(mib), mib << 20);
    if limit < request {
        return Err(Why::LimitBelowRequest {
            bound,
            limit,
            request,
        });
    }
    if limit > all {
        return Err(Why::LimitAboveGpu { bound, limit, all });
    }
    let burst = state
        .map(|state| state.grant.share_burst)
        .unwrap_or_default();
    let most = burst.of(request);
    // Percent of percent are compared as they are written: both amounts are rounded down.
    let is_above = match (bound, percent) {
        (MemoryBound::Percent(limit), Some(percent)) => {
            u64::from(limit) * 100 > burst.of(percent * 100)
        }
        (MemoryBound::Amount(_), _) | (MemoryBound::Percent(_), None) => limit > most,
    };
    if is_above {
        return Err(Why::LimitAbovePolicy {
            bound,
            limit,
            most,
            burst,
            request,
        });
    }
    Ok(limit)
}
