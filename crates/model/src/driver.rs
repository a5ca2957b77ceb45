//! [`GpuDriver`]: the operations of a driver for GPUs. Each method is an NVML operation in model
//! types: blocking, without retries, raw codes kept. Deadlines, retries and sessions sit above it,
//! once, for all implementations (`divvy_nvml::Session`). Implemented by `divvy-nvml` (the real
//! library) and `divvy-gpu-sim` (simulated GPUs).

use std::io;
use std::path::Path;
use std::time::Duration;

use crate::health::{GpuEvents, GpuVitals};
use crate::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfile, ComputeInstanceProfileId,
    GpuInstance, GpuInstanceId, GpuInstanceProfileId, MigCapabilities, Placement,
};
use crate::{
    ComputeMode, GpuError, GpuErrorCode, GpuFacts, GpuMemory, GpuOp, GpuProcess, GpuUuid,
    MemoryLimit, MigDevice, MigMode, ProcessSample, SystemFacts,
};

/// Marks changes of GPUs that are under way for other processes, so that these know what may still
/// happen.
pub trait CallMarks: Send + Sync {
    /// A mark that is there until this is dropped, and no longer than the process really lives: a
    /// call that hangs in the kernel keeps its process from ending.
    fn mark(&self, gpu: &GpuUuid, op: GpuOp) -> io::Result<Box<dyn Send>>;
    /// A change of the GPU that is under way, of whichever process. A change that cannot be
    /// excluded counts.
    fn marked(&self, gpu: &GpuUuid) -> Option<GpuOp>;
}

/// Result of an accepted MIG mode change. The change may still be pending; read
/// [`GpuDriver::mig_mode`] again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MigActivation {
    /// The mode is the asked one now.
    Active,
    /// The mode is only pending, and why: `IN_USE` (processes, monitoring or other clients have the
    /// GPU open), `RESET_REQUIRED` (before Hopper).
    Pending(GpuErrorCode),
}

/// A driver for GPUs. Implementations are shared between threads; each call blocks until NVML
/// answers.
///
/// Defaults are for fakes of tests. Drivers that the product uses, and those that pass calls on,
/// have every method: `#[deny(clippy::missing_trait_methods)]` stands above them, since a forgotten
/// one would answer `NOT_SUPPORTED` in the place of the driver.
pub trait GpuDriver: Send + Sync {
    /// Versions of the driver, NVML and CUDA.
    fn system(&self) -> Result<SystemFacts, GpuError>;

    /// UUIDs of all GPUs that answer, in NVML's order (by PCI address). A GPU whose handle cannot
    /// be had (`GPU_IS_LOST`) is left out here.
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError>;

    /// Facts of one GPU. `NOT_FOUND` for one that is not there, `GPU_IS_LOST` for one that fell off
    /// the bus.
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError>;

    /// MIG mode now; `Unsupported` when the GPU cannot do MIG.
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError>;

    /// Returns whether the kernel module keeps the GPU initialised while no program has it open
    /// (persistence mode, which nvidia-persistenced sets). Without it the GPU forgets its
    /// instances, its compute mode and, from Hopper on, its MIG mode when the last program closes
    /// it.
    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        cannot(GpuOp::PersistenceMode, gpu)
    }

    /// Processes with a compute context on the GPU, sorted; one entry for each instance in which a
    /// process has one. The dearest of the readings: the driver walks through all clients of all
    /// GPUs.
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError>;

    /// Lets go of the driver until the next call, so that its kernel module can be unloaded: calls
    /// at work are finished, and the last of them closes. Nothing for a driver that keeps nothing
    /// open.
    fn release(&self) {}

    /// Changes of the GPU that have not come back and may still happen: those of this process that
    /// are past their deadline, and those of other processes ([`CallMarks`]). Empty for a driver
    /// whose calls block until they are done.
    fn changes_in_flight(&self, gpu: &GpuUuid) -> Vec<GpuOp> {
        let _ = gpu;
        Vec::new()
    }

    /// Health of the GPU: pending recovery action, replaced memory, ECC errors. Values that the
    /// driver does not report are left out of the answer; `NOT_FOUND` and `GPU_IS_LOST` as for
    /// [`GpuDriver::facts`].
    fn vitals(&self, gpu: &GpuUuid) -> Result<GpuVitals, GpuError> {
        cannot(GpuOp::Vitals, gpu)
    }

    /// Waits for events of all GPUs, at most so long, and returns those that came since the last
    /// call (of this session; the first call starts the watch). Empty after a wait in which nothing
    /// happened. Only for a single caller at a time: each event is reported once.
    fn wait_events(&self, at_most: Duration) -> Result<GpuEvents, GpuError> {
        let _ = at_most;
        Err(GpuError::global(GpuOp::Events, GpuErrorCode::NOT_SUPPORTED))
    }

    /// Memory of the GPU, or of one of its MIG devices.
    fn memory(&self, gpu: &GpuUuid, part: Option<&MigDevice>) -> Result<GpuMemory, GpuError> {
        let _ = part;
        cannot(GpuOp::Memory, gpu)
    }

    /// Percent of the last moments in which anything computed on the GPU. `NOT_SUPPORTED` while MIG
    /// mode is on.
    fn utilization(&self, gpu: &GpuUuid) -> Result<u32, GpuError> {
        cannot(GpuOp::Utilization, gpu)
    }

    /// Returns what processes have computed after `since` (the driver's time in microseconds; it
    /// remembers some seconds), sorted. Empty if none has. `NOT_SUPPORTED` while MIG mode is on.
    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since: u64,
    ) -> Result<Vec<ProcessSample>, GpuError> {
        let _ = since;
        cannot(GpuOp::ProcessUtilization, gpu)
    }

    /// Percent of the multiprocessors' time in which they were in use since this was last asked of
    /// the same GPU or MIG device in this session. `None` if there is nothing to compare with: the
    /// first time, or after a pause that is too short or too long. `NOT_SUPPORTED` before Hopper.
    fn sm_utilization(
        &self,
        gpu: &GpuUuid,
        part: Option<&MigDevice>,
    ) -> Result<Option<f64>, GpuError> {
        let _ = part;
        cannot(GpuOp::SmUtilization, gpu)
    }

    /// Returns the limit of the memory that the programs of a control group can allocate on the
    /// GPU; `cgroup` is the group's directory, `/sys/fs/cgroup/…`. `NOT_SUPPORTED` where none was
    /// ever set, and for drivers that cannot limit it ([`SystemFacts::memory_caps`] shows which).
    fn memory_limit(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<MemoryLimit, GpuError> {
        let _ = cgroup;
        cannot(GpuOp::MemoryLimit, gpu)
    }

    /// Limits the bytes that the programs of a control group can allocate on the GPU together;
    /// `None` ends the limit. Kept until the driver is unloaded or the last program closes the GPU.
    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Option<u64>,
    ) -> Result<(), GpuError> {
        let _ = (cgroup, hard);
        cannot(GpuOp::SetMemoryLimit, gpu)
    }

    /// Everything the GPU can be cut into. Answers with MIG mode off too where driver and library
    /// can (from R550 on); `NOT_SUPPORTED` where they cannot, and for a GPU without MIG
    /// ([`GpuDriver::mig_mode`] shows which). The answer stays the same while the driver stays
    /// loaded: keep it.
    fn mig_capabilities(&self, gpu: &GpuUuid) -> Result<MigCapabilities, GpuError> {
        cannot(GpuOp::MigCapabilities, gpu)
    }

    /// Asks for MIG mode on or off. May change the GPU's minor number. Success does not mean that
    /// it came about: see [`MigActivation`].
    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<MigActivation, GpuError> {
        let _ = on;
        cannot(GpuOp::SetMigMode, gpu)
    }

    /// Sets who may compute on the GPU, until the driver is unloaded.
    fn set_compute_mode(&self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), GpuError> {
        let _ = to;
        cannot(GpuOp::SetComputeMode, gpu)
    }

    /// GPU instances that live now, by id. `NOT_SUPPORTED` while MIG mode is off, or none (R580).
    fn gpu_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        cannot(GpuOp::GpuInstances, gpu)
    }

    /// Creates a GPU instance at exactly this placement. `INVALID_ARGUMENT` where the profile may
    /// not be placed there, `INSUFFICIENT_RESOURCES` where something is in the way: another
    /// instance, or engines are exhausted. After an error other than these the instance may live.
    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        let _ = (profile, placement);
        cannot(GpuOp::CreateGpuInstance, gpu)
    }

    /// Destroys a GPU instance. `IN_USE` while it has compute instances or processes, `NOT_FOUND`
    /// if it is gone.
    fn destroy_gpu_instance(&self, gpu: &GpuUuid, id: GpuInstanceId) -> Result<(), GpuError> {
        let _ = id;
        cannot(GpuOp::DestroyGpuInstance, gpu)
    }

    /// The compute instances that a GPU instance can be cut into, by index; one takes it whole
    /// ([`crate::mig::GpuInstanceProfile::whole_compute_profile`]).
    fn compute_profiles(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstanceProfile>, GpuError> {
        let _ = gpu_instance;
        cannot(GpuOp::ComputeProfiles, gpu)
    }

    /// Compute instances that live in a GPU instance now, by id, with the UUIDs of their MIG
    /// devices.
    fn compute_instances(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstance>, GpuError> {
        let _ = gpu_instance;
        cannot(GpuOp::ComputeInstances, gpu)
    }

    /// Creates a compute instance, with a UUID that no other had. `INSUFFICIENT_RESOURCES` where
    /// the GPU instance has not so many slices left. After other errors than that the instance may
    /// live.
    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstance, GpuError> {
        let _ = (gpu_instance, profile);
        cannot(GpuOp::CreateComputeInstance, gpu)
    }

    /// Destroys a compute instance. `IN_USE` while processes run in it, `NOT_FOUND` if it is gone.
    fn destroy_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        id: ComputeInstanceId,
    ) -> Result<(), GpuError> {
        let _ = (gpu_instance, id);
        cannot(GpuOp::DestroyComputeInstance, gpu)
    }
}

/// Answers for a driver that cannot do it (fakes that need not).
fn cannot<T>(op: GpuOp, gpu: &GpuUuid) -> Result<T, GpuError> {
    Err(GpuError::on_gpu(op, GpuErrorCode::NOT_SUPPORTED, gpu))
}

#[deny(clippy::missing_trait_methods)]
impl<T: GpuDriver + ?Sized> GpuDriver for std::sync::Arc<T> {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        (**self).system()
    }
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        (**self).list()
    }
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        (**self).facts(gpu)
    }
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        (**self).mig_mode(gpu)
    }
    fn release(&self) {
        (**self).release();
    }
    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        (**self).persistence_mode(gpu)
    }
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        (**self).processes(gpu)
    }
    fn changes_in_flight(&self, gpu: &GpuUuid) -> Vec<GpuOp> {
        (**self).changes_in_flight(gpu)
    }
    fn vitals(&self, gpu: &GpuUuid) -> Result<GpuVitals, GpuError> {
        (**self).vitals(gpu)
    }
    fn wait_events(&self, at_most: Duration) -> Result<GpuEvents, GpuError> {
        (**self).wait_events(at_most)
    }
    fn memory(&self, gpu: &GpuUuid, part: Option<&MigDevice>) -> Result<GpuMemory, GpuError> {
        (**self).memory(gpu, part)
    }
    fn utilization(&self, gpu: &GpuUuid) -> Result<u32, GpuError> {
        (**self).utilization(gpu)
    }
    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since: u64,
    ) -> Result<Vec<ProcessSample>, GpuError> {
        (**self).process_utilization(gpu, since)
    }
    fn sm_utilization(
        &self,
        gpu: &GpuUuid,
        part: Option<&MigDevice>,
    ) -> Result<Option<f64>, GpuError> {
        (**self).sm_utilization(gpu, part)
    }
    fn memory_limit(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<MemoryLimit, GpuError> {
        (**self).memory_limit(gpu, cgroup)
    }
    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Option<u64>,
    ) -> Result<(), GpuError> {
        (**self).set_memory_limit(gpu, cgroup, hard)
    }
    fn mig_capabilities(&self, gpu: &GpuUuid) -> Result<MigCapabilities, GpuError> {
        (**self).mig_capabilities(gpu)
    }
    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<MigActivation, GpuError> {
        (**self).set_mig_mode(gpu, on)
    }
    fn set_compute_mode(&self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), GpuError> {
        (**self).set_compute_mode(gpu, to)
    }
    fn gpu_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        (**self).gpu_instances(gpu)
    }
    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        (**self).create_gpu_instance(gpu, profile, placement)
    }
    fn destroy_gpu_instance(&self, gpu: &GpuUuid, id: GpuInstanceId) -> Result<(), GpuError> {
        (**self).destroy_gpu_instance(gpu, id)
    }
    fn compute_profiles(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstanceProfile>, GpuError> {
        (**self).compute_profiles(gpu, gpu_instance)
    }
    fn compute_instances(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstance>, GpuError> {
        (**self).compute_instances(gpu, gpu_instance)
    }
    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstance, GpuError> {
        (**self).create_compute_instance(gpu, gpu_instance, profile)
    }
    fn destroy_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        id: ComputeInstanceId,
    ) -> Result<(), GpuError> {
        (**self).destroy_compute_instance(gpu, gpu_instance, id)
    }
}
