//! The driver of a [`World`] whose GPUs are really cut into partitions: the simulated node, at
//! whose every call the process may die, and whose changes may fail, lie, or come back late.

use std::time::Duration;

use divvy_executor::LockName;
use divvy_gpu_sim::SimNode;
use divvy_model::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfile, ComputeInstanceProfileId,
    GpuInstance, GpuInstanceId, GpuInstanceProfileId, MigCapabilities, Placement,
};
use divvy_model::{
    ComputeMode, GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuOp, GpuProcess, GpuUuid,
    MigActivation, MigMode, SystemFacts,
};

use crate::world::{HardwareFault, Harm, MigLate, World};

#[derive(Clone)]
pub(crate) struct Hardware(pub World);

impl Hardware {
    fn ask<T>(
        &self,
        op: GpuOp,
        gpu: &GpuUuid,
        ask: impl FnOnce(&dyn GpuDriver) -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let mut m = self.0.lock();
        m.land();
        let answer = m.call(op.name(), |m, _| ask(m.driver()));
        let lands = m.lands_after.take_if(|(of, answers)| {
            let now = *of == op && *answers == 0;
            *answers -= usize::from(*of == op && !now);
            now
        });
        if lands.is_some() {
            let now = m.now;
            m.mig_late.iter_mut().for_each(|late| late.at = now);
            m.land();
        }
        answer.unwrap_or_else(|_dead| Err(GpuError::on_gpu(op, GpuErrorCode::UNKNOWN, gpu)))
    }

    fn harms_no_other(&self, gpu: &GpuUuid, harm: &Harm) {
        self.0.lock().harms_no_other(gpu, harm);
    }

    fn change<T>(
        &self,
        op: GpuOp,
        gpu: &GpuUuid,
        change: impl FnOnce(&dyn GpuDriver) -> Result<T, GpuError> + Send + 'static,
    ) -> Result<T, GpuError> {
        let error = |code| GpuError::on_gpu(op, code, gpu);
        let mut m = self.0.lock();
        m.needs(&LockName::Gpu(gpu.clone()), op.name());
        m.land();
        if m.mig_late
            .iter()
            .any(|late| late.gpu == *gpu && late.op == op)
        {
            return Err(error(GpuErrorCode::TIMEOUT));
        }
        let fault = m.hardware_fault.take();
        let answer = m.call(op.name(), |m, whole| match fault {
            // The process dies while the call is in the driver.
            None if !whole && m.chance.one_in(2) => Err(error(GpuErrorCode::UNKNOWN)),
            None => change(m.driver()),
            Some(HardwareFault::Refuses) => Err(error(
                [
                    GpuErrorCode::IN_USE,
                    GpuErrorCode::UNKNOWN,
                    GpuErrorCode::INSUFFICIENT_RESOURCES,
                    GpuErrorCode::NO_PERMISSION,
                ][m.chance.below(4)],
            )),
            Some(HardwareFault::Lies) => change(&m.sim).and(Err(error(GpuErrorCode::UNKNOWN))),
            Some(HardwareFault::Late { after, succeeds }) => {
                m.now += Duration::from_secs(10);
                let what = Box::new(move |sim: &SimNode| drop(change(sim)));
                m.mig_late.push(MigLate {
                    at: m.now + after,
                    succeeds,
                    gpu: gpu.clone(),
                    op,
                    what,
                });
                Err(error(GpuErrorCode::TIMEOUT))
            }
        });
        answer.unwrap_or_else(|_dead| Err(error(GpuErrorCode::UNKNOWN)))
    }
}

impl GpuDriver for Hardware {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        self.0.lock().driver().system()
    }
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        self.0.lock().driver().list()
    }
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        self.ask(GpuOp::Facts, gpu, |sim| sim.facts(gpu))
    }
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.ask(GpuOp::MigMode, gpu, |sim| sim.mig_mode(gpu))
    }
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        self.ask(GpuOp::Processes, gpu, |sim| sim.processes(gpu))
    }
    fn changes_in_flight(&self, gpu: &GpuUuid) -> Vec<GpuOp> {
        let mut m = self.0.lock();
        m.land();
        m.mig_late
            .iter()
            .filter(|late| late.gpu == *gpu)
            .map(|late| late.op)
            .collect()
    }
    fn mig_capabilities(&self, gpu: &GpuUuid) -> Result<MigCapabilities, GpuError> {
        self.ask(GpuOp::MigCapabilities, gpu, |sim| sim.mig_capabilities(gpu))
    }
    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<MigActivation, GpuError> {
        self.harms_no_other(gpu, &Harm::Mig(on));
        let uuid = gpu.clone();
        self.change(GpuOp::SetMigMode, gpu, move |sim| {
            sim.set_mig_mode(&uuid, on)
        })
    }
    fn set_compute_mode(&self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), GpuError> {
        self.harms_no_other(gpu, &Harm::Compute(to));
        let uuid = gpu.clone();
        self.change(GpuOp::SetComputeMode, gpu, move |sim| {
            sim.set_compute_mode(&uuid, to)
        })
    }
    fn gpu_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        self.ask(GpuOp::GpuInstances, gpu, |sim| sim.gpu_instances(gpu))
    }
    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        let uuid = gpu.clone();
        self.change(GpuOp::CreateGpuInstance, gpu, move |sim| {
            sim.create_gpu_instance(&uuid, profile, placement)
        })
    }
    fn destroy_gpu_instance(&self, gpu: &GpuUuid, id: GpuInstanceId) -> Result<(), GpuError> {
        self.harms_no_other(gpu, &Harm::Instance(id));
        let uuid = gpu.clone();
        self.change(GpuOp::DestroyGpuInstance, gpu, move |sim| {
            sim.destroy_gpu_instance(&uuid, id)
        })
    }
    fn compute_profiles(
        &self,
        gpu: &GpuUuid,
        inside: GpuInstanceId,
    ) -> Result<Vec<ComputeInstanceProfile>, GpuError> {
        self.ask(GpuOp::ComputeProfiles, gpu, |sim| {
            sim.compute_profiles(gpu, inside)
        })
    }
    fn compute_instances(
        &self,
        gpu: &GpuUuid,
        inside: GpuInstanceId,
    ) -> Result<Vec<ComputeInstance>, GpuError> {
        self.ask(GpuOp::ComputeInstances, gpu, |sim| {
            sim.compute_instances(gpu, inside)
        })
    }
    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        inside: GpuInstanceId,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstance, GpuError> {
        let uuid = gpu.clone();
        self.change(GpuOp::CreateComputeInstance, gpu, move |sim| {
            sim.create_compute_instance(&uuid, inside, profile)
        })
    }
    fn destroy_compute_instance(
        &self,
        gpu: &GpuUuid,
        inside: GpuInstanceId,
        id: ComputeInstanceId,
    ) -> Result<(), GpuError> {
        self.harms_no_other(gpu, &Harm::Instance(inside));
        let uuid = gpu.clone();
        self.change(GpuOp::DestroyComputeInstance, gpu, move |sim| {
            sim.destroy_compute_instance(&uuid, inside, id)
        })
    }
}
