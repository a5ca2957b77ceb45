//! The needs of the executor from others, as traits: filled by the kubelet plugin, faked in tests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use divvy_cdi::{CommonEdits, ContainerEdits, Hook};
use divvy_claims::{Attributes, Claim, ClaimRef, ProcessOnGpu, RecordedDevice};
use divvy_model::{ClaimUid, Gpu, GpuDriver, GpuError, GpuProcess, GpuUuid, Inventory};

use crate::EditsError;

/// Source of what a container needs for a device.
pub trait DeviceEdits: Send + Sync {
    /// Returns what every container of a claim gets: driver files, control nodes, environment.
    fn common(&self) -> Result<Arc<CommonEdits>, EditsError>;
    /// Returns what a container with this device gets.
    fn device(&self, gpu: &Gpu, device: &RecordedDevice) -> Result<ContainerEdits, EditsError>;
    /// Returns the call by which the memory of a share is capped before its program runs. `None`
    /// where no program is called when a container starts.
    fn cap(&self, claim: &ClaimUid, cdi_device: &str) -> Option<Hook>;
    /// Returns what is published of a device, for its metadata.
    fn attributes(&self, inventory: &Inventory, device: &RecordedDevice) -> Attributes;
}

/// The node's GPUs as last read; cheap.
pub trait InventorySource: Send + Sync {
    /// `None` while the NVIDIA driver has not answered yet.
    fn inventory(&self) -> Option<Arc<Inventory>>;
    /// This GPU was changed just now (its MIG mode): what was read of it before is old, its minor
    /// number too. When this returns, [`InventorySource::inventory`] knows, unless the GPU cannot
    /// be read.
    fn changed(&self, gpu: &GpuUuid) -> Result<(), GpuError>;
}

/// Answer of the API about a claim.
#[derive(Debug, Clone, PartialEq)]
pub enum Lookup {
    /// It is there, with these devices of ours on this node (perhaps none).
    Found(Box<Claim>),
    /// No claim with this UID is allocated: deleted, replaced, or deallocated.
    Gone,
    /// The API could not say.
    Unknown(String),
}

/// Asks the API server. Blocking; called without any lock held.
pub trait ClaimsApi: Send + Sync {
    /// Looks a claim up; without its name (a record that cannot be read) by listing. An answer that
    /// has not come by `until` (time since boot) is [`Lookup::Unknown`].
    fn look_up(&self, uid: &ClaimUid, name: Option<&ClaimRef>, until: Duration) -> Lookup;

    /// Numbers in the names of this node's published devices, with the GPUs they are published for.
    /// Asked when there is no usable file of numbers.
    fn published_numbers(&self) -> Result<Vec<(u32, GpuUuid)>, String>;

    /// Numbers in the names of this node's devices that claims have allocated. Asked when the file
    /// of numbers is lost.
    fn allocated_numbers(&self) -> Result<Vec<u32>, String>;
}

/// Source of the processes on a GPU.
pub trait ProcessSource: Send + Sync {
    /// Processes with a context on the GPU.
    fn on_gpu(&self, gpu: &GpuUuid) -> Result<Vec<ProcessOnGpu>, GpuError>;
}

/// Processes as listed by NVML, with their pods from `pods` (from `/proc/<pid>/cgroup`; empty if
/// unknown).
pub struct DriverProcesses<P = fn(&[u32]) -> BTreeMap<u32, String>> {
    pub gpus: Arc<dyn GpuDriver>,
    /// Finds the pod UIDs of processes.
    pub pods: P,
}

impl<P: Fn(&[u32]) -> BTreeMap<u32, String> + Send + Sync> ProcessSource for DriverProcesses<P> {
    fn on_gpu(&self, gpu: &GpuUuid) -> Result<Vec<ProcessOnGpu>, GpuError> {
        let found = self.gpus.processes(gpu)?;
        let pids: Vec<_> = found.iter().map(|p| p.pid).collect();
        let known = if pids.is_empty() {
            BTreeMap::new()
        } else {
            (self.pods)(&pids)
        };
        let process = |p: GpuProcess| ProcessOnGpu {
            pid: p.pid,
            gpu_instance: p.gpu_instance,
            pod: known.get(&p.pid).cloned(),
        };
        Ok(found.into_iter().map(process).collect())
    }
}
