//! The promise that no odd answer and no crash breaks: nothing that the record of another claim
//! names is removed, stopped or set otherwise. Looked at in every change that the executor makes.

use divvy_model::mig::GpuInstanceId;
use divvy_model::{ComputeMode, Sharing};

use super::*;

/// A change that takes something, or sets it.
#[derive(Debug, Clone)]
pub(crate) enum Harm {
    /// A GPU instance goes, or the compute instance in it.
    Instance(GpuInstanceId),
    /// The MPS server of a target ends.
    Server(Target),
    Namespace(MpsNamespaceName),
    Mig(bool),
    Compute(ComputeMode),
    Slice(TimeSlice),
}

impl Machine {
    /// Fails if a change harms another claim than that of the call, which has its claim's lock. A
    /// record of another boot, and one that is being undone, names nothing that is there.
    pub(crate) fn harms_no_other(&self, gpu: &GpuUuid, harm: &Harm) {
        let boot = format!("boot-{}", self.boot);
        let has_lock = |uid: &ClaimUid| self.locked.contains(&LockName::Claim(uid.clone()));
        for (uid, stored) in self.records() {
            let Stored::Fine(record) = stored else {
                continue;
            };
            let is_there = match &record.phase {
                Phase::Prepared => true,
                Phase::Leaving(leaving) => !leaving.undoing,
                Phase::Preparing => false,
            };
            if has_lock(&uid) || !is_there || record.boot.as_str() != boot {
                continue;
            }
            let here = record.devices.iter().filter(|device| device.gpu == *gpu);
            for device in here.filter(|device| device.sharing.holds()) {
                let of_gpu = device.target == Target::Gpu;
                let is_harmed = match harm {
                    Harm::Instance(gi) => {
                        let given = device.given.as_ref();
                        given.is_some_and(|made| made.gi == *gi && self.lives(gpu, made))
                    }
                    Harm::Server(target) => device.mps.is_some() && device.target == *target,
                    Harm::Namespace(name) => {
                        let namespace = device.mps.and_then(|slot| slot.namespace);
                        namespace.is_some_and(|one| one.name == *name)
                    }
                    Harm::Mig(on) => *on == of_gpu,
                    Harm::Compute(to) => {
                        let needed = match device.sharing {
                            _ if device.mps.is_some() => Some(ComputeMode::ExclusiveProcess),
                            Sharing::TimeSliced => Some(ComputeMode::Default),
                            _ => None,
                        };
                        of_gpu && needed.is_some_and(|needed| needed != *to)
                    }
                    // That of shares is the policy's, which may have changed.
                    Harm::Slice(to) => {
                        let is_own = of_gpu && device.sharing == Sharing::Exclusive;
                        is_own && device.time_slice.is_some_and(|one| one != *to)
                    }
                };
                assert!(!is_harmed, "{harm:?} on {gpu} harms {uid}: {device:?}");
            }
        }
    }

    /// Returns whether a partition that was given lives still.
    fn lives(&self, gpu: &GpuUuid, given: &divvy_claims::Made) -> bool {
        self.sim.edit(|engine| {
            let instances = engine.gpu(gpu).map(|gpu| gpu.instances.clone());
            let mut all = instances.into_iter().flatten();
            all.any(|one| one.compute.iter().any(|made| made.uuid == given.uuid))
        })
    }
}
