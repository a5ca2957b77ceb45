//! What concerns partitions beyond single steps: MIG mode of a GPU, and its instances, created by divvy or not.

use std::collections::BTreeMap;
use std::sync::PoisonError;

use divvy_claims::{Cause, Claim, GpuState, Living, Progress, Record, Step, StepError, accounts_for};
use divvy_model::mig::{GpuInstance, Partition, PartitionName};
use divvy_model::{DeviceName, GpuUuid, Inventory, MigMode, Ordinals};

use crate::Executor;
use crate::run::StepFailed;

/// GPU instances by GPU.
pub type Instances = BTreeMap<GpuUuid, Vec<GpuInstance>>;

impl Executor {
    /// Brings MIG mode of a GPU to `on`. What it was is in the GPU's state before it changes. Under the GPU's lock.
    pub(crate) fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), StepFailed> {
        let steps = &self.parts.steps;
        let read = |source| StepError::NotDone(Cause::from_gpu("MIG mode cannot be read", source));
        let current = steps.mig_mode(gpu).map_err(read)?.is_on();
        let note = |state: &mut GpuState| state.note_mig_mode(current, on);
        // Also where it is so already: a call that has not come back may still change it.
        let set = || steps.set_mig_mode(gpu, on);
        if self.gpu_state(gpu)?.turned_mig_on() {
            // What it was is noted already, and it is ours until it certainly is off: what a crash or the driver cuts
            // short is tried again.
            set()?;
            self.change_gpu(gpu, note)?;
        } else {
            self.change_setting(gpu, note, set)?;
        }
        if current != on {
            self.parts.inventory.changed(gpu);
        }
        Ok(())
    }

    /// GPU instances that no record accounts for: they were created outside of divvy and are never changed. For taints. A
    /// GPU that a call is working on, or that does not answer, keeps its last answer.
    pub fn foreign(&self) -> Instances {
        let gpus: Vec<_> = self.parts.inventory.inventory().map_or_else(Vec::new, |inventory| {
            let able = inventory.gpus.values().filter(|gpu| gpu.facts.mig_mode != MigMode::Unsupported);
            able.map(|gpu| gpu.facts.uuid.clone()).collect()
        });
        let mut last = self.last_foreign.lock().unwrap_or_else(PoisonError::into_inner);
        for gpu in &gpus {
            // Under the lock nothing is made or removed between the two answers.
            let Ok(_lock) = self.lock_gpu(gpu) else { continue };
            let Ok(mut living) = self.parts.steps.instances(gpu) else { continue };
            if !living.is_empty() {
                let (Ok(records), Ok(states)) = (self.state.records(), self.state.gpus()) else { continue };
                living.retain(|instance| !accounts_for(&records, &states, gpu, instance));
            }
            last.insert(gpu.clone(), living);
        }
        last.retain(|gpu, living| gpus.contains(gpu) && !living.is_empty());
        last.clone()
    }

    /// What lives at the places of a claim's partitions. Under the GPUs' locks.
    pub(crate) fn living(&self, claim: &Claim, ordinals: &Ordinals, inventory: Option<&Inventory>) -> Living {
        let at = |device: &DeviceName| {
            let name = PartitionName::parse(device).ok()?;
            let gpu = ordinals.gpu(name.ordinal)?;
            let mig = inventory?.gpus.get(gpu)?.mig.as_ref()?;
            let placement = mig.capabilities.placement(name.profile, name.start)?;
            let wanted = Partition { gpu: gpu.clone(), profile: name.profile, placement };
            Some((device.clone(), self.parts.steps.living(&wanted)))
        };
        claim.allocation.results.iter().filter_map(|result| at(&result.device)).collect()
    }

    /// Whether the partitions of a record still exist: a reload of the driver or an administrator may have removed them.
    /// Uncertainty counts as existing.
    pub(crate) fn partitions_live(&self, record: &Record) -> bool {
        record.steps.iter().all(|state| match (&state.step, &state.progress) {
            (Step::UsePartition(made) | Step::CreatePartition(made), Progress::Done { outcome }) => {
                self.parts.steps.living(made).map_or(true, |now| now.as_ref() == Some(outcome))
            }
            _ => true,
        })
    }
}
