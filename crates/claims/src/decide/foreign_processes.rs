//! Before the first hold on a GPU, and on a partition that others have made: does a process compute there that belongs to
//! no claim of ours? A device plugin may have allocated it to its pod, or the process was started on the host. A second
//! user would harm it.

use std::collections::BTreeSet;

use divvy_model::{GpuUuid, HoldKind};

use super::Snapshot;
use crate::{Claim, Record, RecordedDevice, Refusal, Why};

/// A process on a GPU.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessOnGpu {
    /// Process id on the host.
    pub pid: u32,
    /// The GPU instance it is in, by NVML's id; `None` outside partitions.
    pub gpu_instance: Option<u32>,
    /// UID of the pod it belongs to, where that could be found out.
    pub pod: Option<String>,
}

/// Refuses devices whose GPU has processes that no claim accounts for. A GPU whose processes cannot be listed counts as
/// free.
pub(super) fn foreign_processes(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
) -> Result<(), Refusal> {
    for device in devices.iter().filter(|device| device.kind.needs().is_some()) {
        let Some(found) = seen.processes.get(&device.gpu) else { continue };
        let held = |record: &Record| {
            record.uid != claim.uid
                && record.holds().any(|hold| hold.gpu == device.gpu && hold.kind.needs().is_some())
        };
        let beside = records(seen).any(held);
        if found.is_empty() || (beside && !device.is_static) {
            continue;
        }
        let known = pods(claim, &device.gpu, seen);
        let (is_partition, there) =
            (matches!(device.kind, HoldKind::Partition { .. }), lives_as(device, seen));
        // In another partition: what overlaps that was not to be had, and the rest is not concerned.
        let is_here = |p: &ProcessOnGpu| match p.gpu_instance {
            None => !beside,
            in_one => !is_partition || in_one == there,
        };
        let foreign: Vec<String> = found
            .iter()
            .filter(|p| is_here(p) && !p.pod.as_deref().is_some_and(|pod| known.contains(pod)))
            .map(|p| match &p.pod {
                Some(pod) => format!("{} (of the pod with UID {pod})", p.pid),
                None => p.pid.to_string(),
            })
            .collect();
        if !foreign.is_empty() {
            return Err(Why::ForeignProcesses(foreign.join(", ")).about(claim, device));
        }
    }
    Ok(())
}

/// NVML's id of the GPU instance that a partition is which others have made: it lived before the claim.
fn lives_as(device: &RecordedDevice, seen: &Snapshot<'_>) -> Option<u32> {
    let Some(Ok(Some(living))) = seen.living.get(&device.allocated.device) else { return None };
    device.is_static.then(|| living.gpu_instance().0)
}

/// UIDs of the claim's own pods, and of pods whose claim has a device on this very GPU (admin access).
fn pods<'a>(claim: &'a Claim, gpu: &GpuUuid, seen: &'a Snapshot<'_>) -> BTreeSet<&'a str> {
    let there = records(seen).filter(|record| record.devices.iter().any(|device| device.gpu == *gpu));
    there.flat_map(|record| &record.pods).chain(&claim.pods).map(|pod| pod.uid.as_str()).collect()
}

fn records<'a>(seen: &'a Snapshot<'_>) -> impl Iterator<Item = &'a Record> {
    seen.records.values().filter_map(|stored| stored.fine())
}
