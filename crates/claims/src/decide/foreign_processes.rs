//! The check for foreign processes before the first hold on a GPU, and on a partition that others
//! have made: does a process compute there that belongs to no claim of ours? A device plugin may
//! have allocated it to its pod, or the process was started on the host. A second user would harm
//! it.

use std::collections::BTreeSet;

use divvy_model::{GpuUuid, Target};

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

/// Refuses devices whose GPU has processes that no claim accounts for, or does not list its
/// processes now. A GPU that never lists any counts as free.
pub(super) fn foreign_processes(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
) -> Result<(), Refusal> {
    for device in devices.iter().filter(|device| device.sharing.holds()) {
        let found = match seen.processes.get(&device.gpu) {
            Some(Ok(found)) => found,
            Some(Err(error)) => {
                return Err(Why::ProcessesUnknown(error.clone()).about(claim, device));
            }
            None => continue,
        };
        // A record of an earlier boot vouches for nothing: no process outlives a boot, and the GPU
        // is looked at again before the first hold in this one.
        let held = |record: &Record| {
            record.uid != claim.uid
                && record.boot == *seen.boot
                && record
                    .holds()
                    .any(|hold| hold.gpu == device.gpu && hold.sharing.holds())
        };
        let beside = records(seen).any(held);
        let known = pods(claim, &device.gpu, seen);
        let is_partition = matches!(device.target, Target::Partition(_));
        let there = lives_as(device, seen);
        let is_here = |p: &ProcessOnGpu| match p.gpu_instance {
            // Processes in other partitions do not conflict: an overlapping partition would have
            // been refused already. A partition that this driver makes has none yet.
            in_one @ Some(_) if is_partition => in_one == there,
            // On a GPU that another claim holds, the check was made at its first hold.
            _ => !beside,
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

/// Returns NVML's id of the GPU instance of a partition that others have made: it lived before the
/// claim.
fn lives_as(device: &RecordedDevice, seen: &Snapshot<'_>) -> Option<u32> {
    let place = device.target.place().filter(|_| device.theirs)?;
    let living = seen.filling(&device.gpu, place)?.as_ref().ok()?.as_ref()?;
    Some(living.instance.id.0)
}

/// Returns the UIDs of the claim's own pods, and of pods whose claim has a device on this very GPU
/// (admin access).
fn pods<'a>(claim: &'a Claim, gpu: &GpuUuid, seen: &'a Snapshot<'_>) -> BTreeSet<&'a str> {
    let there =
        records(seen).filter(|record| record.devices.iter().any(|device| device.gpu == *gpu));
    there
        .flat_map(|record| &record.pods)
        .chain(&claim.pods)
        .map(|pod| pod.uid.as_str())
        .collect()
}

fn records<'a>(seen: &'a Snapshot<'_>) -> impl Iterator<Item = &'a Record> {
    seen.records.values().filter_map(|stored| stored.fine())
}
