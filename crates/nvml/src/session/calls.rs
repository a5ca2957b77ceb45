//! Every call of a driver, as a session makes it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divvy_model::health::{GpuEvents, GpuVitals};
use divvy_model::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfile, ComputeInstanceProfileId,
    GpuInstance, GpuInstanceId, GpuInstanceProfileId, MigCapabilities, Placement,
};
use divvy_model::{
    ComputeMode, GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuMemory, GpuOp, GpuProcess,
    GpuUuid, MemoryLimit, MigActivation, MigDevice, MigMode, ProcessSample, SystemFacts, lock,
};

use super::{Inner, LEAVING, Session, would_lose_partitions};

#[deny(clippy::missing_trait_methods)]
impl<D: GpuDriver + 'static> GpuDriver for Session<D> {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        self.call(GpuOp::System, None, GpuDriver::system)
    }
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        let (inner, reopened) = (Arc::clone(&self.inner), AtomicBool::new(false));
        self.call(GpuOp::List, None, move |driver| {
            let listed = driver.list()?;
            // A driver leaves out a GPU that does not answer. As after a call on a lost GPU, a
            // fresh session may find it again.
            if inner.misses_one(&listed) && !reopened.swap(true, Ordering::Relaxed) {
                if would_lose_partitions(driver) {
                    inner.put_off();
                    return Ok(listed);
                }
                return Err(GpuError {
                    op: GpuOp::List,
                    code: GpuErrorCode::GPU_IS_LOST,
                    gpu: None,
                    detail: None,
                });
            }
            lock(&inner.known).extend(listed.iter().cloned());
            Ok(listed)
        })
    }
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::Facts, Some(gpu), move |d| d.facts(&uuid))
    }
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::MigMode, Some(gpu), move |d| d.mig_mode(&uuid))
    }
    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::PersistenceMode, Some(gpu), move |d| {
            d.persistence_mode(&uuid)
        })
    }
    fn memory_limit(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<MemoryLimit, GpuError> {
        let (uuid, cgroup) = (gpu.clone(), cgroup.to_owned());
        self.call(GpuOp::MemoryLimit, Some(gpu), move |d| {
            d.memory_limit(&uuid, &cgroup)
        })
    }
    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Option<u64>,
    ) -> Result<(), GpuError> {
        let (uuid, cgroup) = (gpu.clone(), cgroup.to_owned());
        self.call(GpuOp::SetMemoryLimit, Some(gpu), move |d| {
            d.set_memory_limit(&uuid, &cgroup, hard)
        })
    }
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::Processes, Some(gpu), move |d| d.processes(&uuid))
    }
    fn release(&self) {
        self.reset();
    }
    fn changes_in_flight(&self, gpu: &GpuUuid) -> Vec<GpuOp> {
        // Own calls that are past their deadline; marks show those of other processes, and own ones
        // that are still in time.
        let hanging = self.hanging().into_iter();
        let own = hanging
            .filter(|h| h.gpu.as_ref() == Some(gpu) && h.op.changes_gpu())
            .map(|h| h.op);
        own.chain(
            self.inner
                .marks
                .as_ref()
                .and_then(|marks| marks.marked(gpu)),
        )
        .collect()
    }
    fn vitals(&self, gpu: &GpuUuid) -> Result<GpuVitals, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::Vitals, Some(gpu), move |d| d.vitals(&uuid))
    }
    fn memory(&self, gpu: &GpuUuid, part: Option<&MigDevice>) -> Result<GpuMemory, GpuError> {
        let (uuid, part) = (gpu.clone(), part.cloned());
        self.call(GpuOp::Memory, Some(gpu), move |d| {
            d.memory(&uuid, part.as_ref())
        })
    }
    fn utilization(&self, gpu: &GpuUuid) -> Result<u32, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::Utilization, Some(gpu), move |d| d.utilization(&uuid))
    }
    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since: u64,
    ) -> Result<Vec<ProcessSample>, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::ProcessUtilization, Some(gpu), move |d| {
            d.process_utilization(&uuid, since)
        })
    }
    fn sm_utilization(
        &self,
        gpu: &GpuUuid,
        part: Option<&MigDevice>,
    ) -> Result<Option<f64>, GpuError> {
        let (uuid, part) = (gpu.clone(), part.cloned());
        self.call(GpuOp::SmUtilization, Some(gpu), move |d| {
            d.sm_utilization(&uuid, part.as_ref())
        })
    }
    /// Not longer than a second at once: while it waits, the session cannot be shut down. The
    /// driver remembers what comes between two waits.
    fn wait_events(&self, at_most: Duration) -> Result<GpuEvents, GpuError> {
        // Half of each bound: the wait is over before the call counts as hanging, and before a
        // session that is closed is given up.
        let at_most = at_most.min(self.inner.config.deadline / 2).min(LEAVING / 2);
        self.call(GpuOp::Events, None, move |d| d.wait_events(at_most))
    }
    fn mig_capabilities(&self, gpu: &GpuUuid) -> Result<MigCapabilities, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::MigCapabilities, Some(gpu), move |d| {
            d.mig_capabilities(&uuid)
        })
    }
    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<MigActivation, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::SetMigMode, Some(gpu), move |d| {
            d.set_mig_mode(&uuid, on)
        })
    }
    fn set_compute_mode(&self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::SetComputeMode, Some(gpu), move |d| {
            d.set_compute_mode(&uuid, to)
        })
    }
    fn gpu_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::GpuInstances, Some(gpu), move |d| {
            d.gpu_instances(&uuid)
        })
    }
    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::CreateGpuInstance, Some(gpu), move |d| {
            d.create_gpu_instance(&uuid, profile, placement)
        })
    }
    fn destroy_gpu_instance(&self, gpu: &GpuUuid, id: GpuInstanceId) -> Result<(), GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::DestroyGpuInstance, Some(gpu), move |d| {
            d.destroy_gpu_instance(&uuid, id)
        })
    }
    fn compute_profiles(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstanceProfile>, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::ComputeProfiles, Some(gpu), move |d| {
            d.compute_profiles(&uuid, gpu_instance)
        })
    }
    fn compute_instances(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstance>, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::ComputeInstances, Some(gpu), move |d| {
            d.compute_instances(&uuid, gpu_instance)
        })
    }
    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstance, GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::CreateComputeInstance, Some(gpu), move |d| {
            d.create_compute_instance(&uuid, gpu_instance, profile)
        })
    }
    fn destroy_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        id: ComputeInstanceId,
    ) -> Result<(), GpuError> {
        let uuid = gpu.clone();
        self.call(GpuOp::DestroyComputeInstance, Some(gpu), move |d| {
            d.destroy_compute_instance(&uuid, gpu_instance, id)
        })
    }
}

impl<D> Inner<D> {
    /// Returns whether a GPU that was there is not listed any more, by a session that is old enough
    /// to be opened again.
    fn misses_one(&self, listed: &[GpuUuid]) -> bool {
        let missing = lock(&self.known).iter().any(|gpu| !listed.contains(gpu));
        missing
            && lock(&self.current)
                .as_ref()
                .is_none_or(|opened| self.is_old_enough(opened))
    }
}
