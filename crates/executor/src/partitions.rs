//! What concerns partitions beyond single steps: MIG mode of a GPU, and its instances, created by divvy or not.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use divvy_claims::{Cause, Claim, Living, Outcome, Progress, Record, Step, StepError, accounts_for};
use divvy_model::mig::{GpuInstance, PartitionName};
use divvy_model::{DeviceName, GpuUuid, HoldKind, Inventory, MigMode, Ordinals};

use crate::run::StepFailed;
use crate::unprepare::BRIEFLY;
use crate::{Executor, StoreError};

/// GPU instances by GPU.
pub type Instances = BTreeMap<GpuUuid, Vec<GpuInstance>>;

impl Executor {
    /// Brings MIG mode of a GPU to `on`. What it was is in the GPU's state before it changes. Under the GPU's lock.
    pub(crate) fn set_mig_mode(&self, gpu: &GpuUuid, on: bool, until: Duration) -> Result<(), StepFailed> {
        let steps = &self.parts.steps;
        let mode = steps
            .mig_mode(gpu)
            .map_err(|source| StepError::NotDone(Cause::from_gpu("MIG mode cannot be read", source)))?;
        let current = match mode {
            MigMode::Supported { current, .. } => current,
            MigMode::Unsupported if !on => return Ok(()),
            MigMode::Unsupported => {
                let cause = Cause::new(format!("{gpu} does not support partitions"));
                return Err(StepError::NotDone(cause).into());
            }
        };
        let earlier = self.note_settings(gpu, |state| state.note_mig_mode(current, on))?;
        if current == on {
            return Ok(());
        }
        if let Err(error) = steps.apply(&Step::SetMigMode { gpu: gpu.clone(), on }, until, &mut |_| {}) {
            if matches!(error, StepError::NotDone(_)) {
                self.put_settings_back(gpu, earlier)?;
            }
            return Err(error.into());
        }
        self.parts.inventory.changed(gpu);
        Ok(())
    }

    /// MIG mode that a record's devices need, before its steps are carried out in another boot. Who makes the instances
    /// sets the mode.
    pub(crate) fn modes_of(&self, record: &Record) -> Result<Vec<Step>, StoreError> {
        let mut modes = BTreeMap::new();
        for device in record.devices.iter().filter(|device| !device.is_static) {
            match device.kind {
                HoldKind::Partition { .. } => {
                    modes.insert(&device.gpu, true);
                }
                HoldKind::Whole | HoldKind::Share if self.gpu_state(&device.gpu)?.turned_mig_on() => {
                    modes.insert(&device.gpu, false);
                }
                HoldKind::Whole | HoldKind::Share | HoldKind::Admin => {}
            }
        }
        Ok(modes.into_iter().map(|(gpu, on)| Step::SetMigMode { gpu: gpu.clone(), on }).collect())
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
            let until = self.parts.clock.now() + BRIEFLY;
            // Under the lock nothing is made or removed between the two answers.
            let Ok(_lock) = self.lock_gpus(&BTreeSet::from([gpu.clone()]), until) else { continue };
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

    /// The partition that others have made at the place of a step, whole.
    pub(crate) fn find_static(&self, step: &Step) -> Result<Option<Outcome>, StepError> {
        let read = |source| StepError::NotDone(Cause::from_gpu("its state cannot be read", source));
        let living = self.parts.steps.living(step).map_err(read)?;
        Ok(living.filter(|outcome| matches!(outcome, Outcome::Partition { .. })))
    }

    /// What lives at the places of a claim's partitions. Under the GPUs' locks.
    pub(crate) fn living(&self, claim: &Claim, ordinals: &Ordinals, inventory: Option<&Inventory>) -> Living {
        let at = |device: &DeviceName| {
            let name = PartitionName::parse(device).ok()?;
            let gpu = ordinals.gpu(name.ordinal)?;
            let mig = inventory?.gpus.get(gpu)?.mig.as_ref()?;
            let placement = mig.capabilities.placement(name.profile, name.start)?;
            let step = Step::create_partition(gpu.clone(), name.profile, placement);
            Some((device.clone(), self.parts.steps.living(&step)))
        };
        claim.allocation.results.iter().filter_map(|result| at(&result.device)).collect()
    }

    /// Whether the partitions of a record still exist: a reload of the driver or an administrator may have removed them.
    /// Uncertainty counts as existing.
    pub(crate) fn partitions_live(&self, record: &Record) -> bool {
        record.steps.iter().all(|state| match &state.progress {
            Progress::Done { outcome } => {
                self.parts.steps.living(&state.step).map_or(true, |now| now.as_ref() == Some(outcome))
            }
            _ => true,
        })
    }
}
