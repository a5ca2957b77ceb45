//! Hardware steps of machines whose GPUs are not simulated: instances are entries of a list.

use super::*;
use divvy_model::mig::{ComputeInstanceId, GpuInstance, GpuInstanceId, Partition};
use divvy_model::{ComputeMode, MigMode};

fn place_of(wanted: &Partition) -> (GpuUuid, u32, u32, u32) {
    (wanted.gpu.clone(), wanted.profile.0, wanted.placement.start, wanted.placement.size)
}

fn outcome_of(made: &Instance) -> Outcome {
    Outcome::Partition { gi: GpuInstanceId(made.id), ci: ComputeInstanceId(0), uuid: made.uuid.clone() }
}

impl Steps for World {
    fn before(&self, step: &Partition) -> Result<Vec<GpuInstanceId>, StepError> {
        let (gpu, ..) = place_of(step);
        let mut m = self.lock();
        m.land();
        Ok(m.call("look before the step", |m, _| {
            m.instances.get(&gpu).into_iter().flatten().map(|i| GpuInstanceId(i.id)).collect()
        })?)
    }
    fn set_mig_mode(&self, _gpu: &GpuUuid, _on: bool) -> Result<(), StepError> {
        panic!("not a step of these tests")
    }
    fn set_compute_mode(&self, _gpu: &GpuUuid, _to: ComputeMode) -> Result<(), StepError> {
        panic!("not a step of these tests")
    }
    fn create(&self, step: &Partition, _so_far: &mut dyn FnMut(Outcome)) -> Result<Outcome, StepError> {
        let (gpu, profile, start, size) = place_of(step);
        let mut m = self.lock();
        m.needs(&LockName::Gpu(gpu.clone()), "a partition is made");
        m.land();
        let fault = m.hardware_fault.take();
        m.call(&format!("make {step:?}"), |m, whole| match fault {
            // The process dies while the call is in the driver.
            None if !whole && m.chance.one_in(2) => Err(Dead.into()),
            None => match m.create(&gpu, profile, start, size) {
                Some(made) => Ok(outcome_of(&made)),
                None => Err(StepError::NotDone(Cause::from_gpu(
                    "there is no room",
                    GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::INSUFFICIENT_RESOURCES, &gpu),
                ))),
            },
            Some(HardwareFault::Refuses | HardwareFault::Lies) => {
                Err(StepError::NotDone(Cause::new("the driver refused")))
            }
            Some(HardwareFault::Late { after, succeeds }) => {
                m.now += Duration::from_secs(10);
                let late = Late::Create { gpu: gpu.clone(), profile, start, size };
                m.late.push((m.now + after, succeeds, late));
                Err(StepError::Unknown(Cause::new("no answer within 10 s")))
            }
        })?
    }
    fn probe(&self, step: &Partition, before: &[GpuInstanceId]) -> Observed {
        let (gpu, profile, start, size) = place_of(step);
        let mut m = self.lock();
        m.land();
        let call = m.call("probe", |m, _| {
            if m.late.iter().any(
                |(_, _, l)| matches!(l, Late::Create { gpu: g, start: s, .. } if *g == gpu && *s == start),
            ) {
                return Observed::InFlight;
            }
            let on_gpu = m.instances.get(&gpu).cloned().unwrap_or_default();
            let here: Vec<_> =
                on_gpu.iter().filter(|i| i.start < start + size && start < i.start + i.size).collect();
            match here.as_slice() {
                [] => Observed::Absent,
                [one]
                    if (one.start, one.size, one.profile) == (start, size, profile)
                        && !before.contains(&GpuInstanceId(one.id)) =>
                {
                    Observed::Ours(outcome_of(one))
                }
                other => Observed::Uncertain(format!("{other:?} is there")),
            }
        });
        call.unwrap_or(Observed::InFlight)
    }
    fn mig_mode(&self, _gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        Ok(MigMode::Unsupported)
    }
    fn instances(&self, _gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        Ok(Vec::new())
    }
    fn living(&self, step: &Partition) -> Result<Option<Outcome>, GpuError> {
        Ok(self.filling(step))
    }
    fn undo(&self, step: &Partition, outcome: &Outcome) -> Result<(), StepError> {
        let (gpu, ..) = place_of(step);
        let Outcome::Partition { uuid, .. } = outcome else { return Ok(()) };
        let mut m = self.lock();
        m.needs(&LockName::Gpu(gpu.clone()), "a partition is removed");
        m.land();
        let fault = m.hardware_fault.take();
        m.call(&format!("undo: {step:?}"), |m, whole| match fault {
            None if !whole && m.chance.one_in(2) => Err(Dead.into()),
            None if m
                .late
                .iter()
                .any(|(_, _, l)| matches!(l, Late::Destroy { uuid: u, .. } if u == uuid)) =>
            {
                Err(StepError::NotDone(Cause::new("an earlier call to remove it has not returned")))
            }
            None => {
                m.destroy(&gpu, uuid);
                Ok(())
            }
            Some(HardwareFault::Refuses | HardwareFault::Lies) => {
                Err(StepError::NotDone(Cause::new("the driver refused")))
            }
            Some(HardwareFault::Late { after, succeeds }) => {
                m.now += Duration::from_secs(10);
                let at = m.now + after;
                m.late.push((at, succeeds, Late::Destroy { gpu: gpu.clone(), uuid: uuid.clone() }));
                Err(StepError::Unknown(Cause::new("no answer within 10 s")))
            }
        })?
    }
}

impl World {
    fn filling(&self, step: &Partition) -> Option<Outcome> {
        let (gpu, profile, start, size) = place_of(step);
        let m = self.lock();
        let mut on_gpu = m.instances.get(&gpu)?.iter();
        on_gpu.find(|i| (i.start, i.size, i.profile) == (start, size, profile)).map(outcome_of)
    }
}
