//! What concerns partitions beyond single steps: MIG mode of a GPU, instances that no record accounts for, partitions
//! whose record was lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;
use std::time::Duration;

use divvy_claims::{
    AllocatedDevice, Cause, Claim, Living, Outcome, Progress, Record, RecordedDevice, Step, StepError,
    StepState, Stored,
};
use divvy_model::mig::{GpuInstance, GpuInstanceId, PartitionName};
use divvy_model::{ClaimUid, DeviceName, GpuUuid, HoldKind, Inventory, MigMode, Ordinals, TimeSlice};

use crate::release::BRIEFLY;
use crate::{Executor, StoreError, chain};

/// GPU instances by GPU.
pub type Instances = BTreeMap<GpuUuid, Vec<GpuInstance>>;

/// Why MIG mode or time slice is not as it should be.
pub(crate) enum ModeError {
    Store(StoreError),
    Step(StepError),
    /// It has no time slice that can be set.
    Unsupported {
        /// What was asked for.
        to: TimeSlice,
        /// Which GPU that is.
        which: String,
    },
}

impl Executor {
    /// Brings MIG mode of a GPU to `on`. What it was is in the GPU's state before it changes. Under the GPU's lock.
    pub(crate) fn set_mig_mode(&self, gpu: &GpuUuid, on: bool, until: Duration) -> Result<(), ModeError> {
        let steps = &self.parts.steps;
        let step_failed = |error| ModeError::Step(error);
        let mode = steps.mig_mode(gpu).map_err(|source| {
            step_failed(StepError::NotDone(Cause::from_gpu("MIG mode cannot be read", source)))
        })?;
        let current = match mode {
            MigMode::Supported { current, .. } => current,
            MigMode::Unsupported if !on => return Ok(()),
            MigMode::Unsupported => {
                let cause = Cause::new(format!("{gpu} cannot be cut into partitions"));
                return Err(step_failed(StepError::NotDone(cause)));
            }
        };
        let earlier = self.gpu_state(gpu).map_err(ModeError::Store)?;
        let mut state = earlier.clone();
        state.note_mig_mode(current, on);
        let write =
            |state| self.state.write_gpu(gpu, state, self.parts.clock.now()).map_err(ModeError::Store);
        if state != earlier {
            write(&state)?;
        }
        if current != on
            && let Err(error) = steps.apply(&Step::SetMigMode { gpu: gpu.clone(), on }, until, &mut |_| {})
        {
            if matches!(error, StepError::NotDone(_)) && state != earlier {
                write(&earlier)?;
            }
            return Err(step_failed(error));
        }
        if current != on {
            self.parts.inventory.changed(gpu);
        }
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

    /// GPU instances that live and that no record accounts for: somebody else made them, and they are never touched.
    /// For taints. A GPU that somebody is at work on, or that does not answer, keeps its last answer.
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
                let Ok(records) = self.state.records() else { continue };
                living.retain(|instance| !records.values().any(|r| accounts_for(r, gpu, instance)));
            }
            last.insert(gpu.clone(), living);
        }
        last.retain(|gpu, living| gpus.contains(gpu) && !living.is_empty());
        last.clone()
    }

    /// What a lost record said about a step: the partition that lives at its place, unless another record has it.
    /// Half of one is removed, so that it can be made anew.
    pub(crate) fn adopt(&self, uid: &ClaimUid, step: &Step) -> Result<Option<StepState>, StepError> {
        let read = |source| StepError::NotDone(Cause::from_gpu("what is there cannot be read", source));
        let Some(outcome) = self.parts.steps.living(step).map_err(read)? else { return Ok(None) };
        let records = self.state.records().map_err(|e| StepError::NotDone(Cause::new(chain(&e))))?;
        let theirs = Self::others(&records, uid)
            .flat_map(|r| &r.steps)
            .any(|s| s.step == *step && s.progress != Progress::Undone);
        if theirs {
            return Ok(None);
        }
        if matches!(outcome, Outcome::Partition { .. }) {
            return Ok(Some(StepState { step: step.clone(), progress: Progress::Done { outcome } }));
        }
        if step.is_owned() {
            self.parts.steps.undo(step, &outcome)?;
        }
        Ok(None)
    }

    /// The partition that others have made at the place of a step, whole.
    pub(crate) fn find_static(&self, step: &Step) -> Result<Option<Outcome>, StepError> {
        let read = |source| StepError::NotDone(Cause::from_gpu("what is there cannot be read", source));
        let living = self.parts.steps.living(step).map_err(read)?;
        Ok(living.filter(|outcome| matches!(outcome, Outcome::Partition { .. })))
    }

    /// Removes partitions of a claim that is gone and so is its record: those at the places its CDI file names, which
    /// only a prepare of ours writes. Under the claim's lock.
    pub(crate) fn remove_abandoned(&self, uid: &ClaimUid) -> Result<(), String> {
        let ordinals = self.state.ordinals().map_err(|e| chain(&e))?;
        // What others have made stays.
        let mut devices = self.partitions_of_cdi_file(uid, &ordinals);
        devices.retain(|device| !device.is_static);
        // A GPU that is lost, or whose driver has not answered yet: only this file knows of what may live there.
        for (name, gpu, is_static) in self.named_in_cdi_file(uid, &ordinals) {
            let device = name.device_name();
            let told = is_static || devices.iter().any(|known| known.allocated.device == device);
            let nothing_lives = || self.parts.steps.instances(&gpu).is_ok_and(|living| living.is_empty());
            if !told && !nothing_lives() {
                return Err(format!("{gpu} does not tell what lives at the place of {device}"));
            }
        }
        let steps: Vec<_> = devices.iter().filter_map(RecordedDevice::step).collect();
        let gpus = steps.iter().filter_map(|step| step.gpu().cloned()).collect();
        let until = self.parts.clock.now() + BRIEFLY;
        let _locks = self.lock_gpus(&gpus, until).map_err(|e| chain(&e))?;
        for step in steps {
            if let Some(StepState { progress: Progress::Done { outcome }, .. }) =
                self.adopt(uid, &step).map_err(|e| chain(&e))?
            {
                self.parts.steps.undo(&step, &outcome).map_err(|e| chain(&e))?;
            }
        }
        Ok(())
    }

    /// The partitions that a claim's CDI file names, and whether others have made them. Those of GPUs that are not in the
    /// inventory are left out.
    pub(crate) fn partitions_of_cdi_file(&self, uid: &ClaimUid, ordinals: &Ordinals) -> Vec<RecordedDevice> {
        let Some(inventory) = self.parts.inventory.inventory() else { return Vec::new() };
        let partition = |(name, gpu, is_static): (PartitionName, GpuUuid, bool)| {
            let mig = inventory.gpus.get(&gpu)?.mig.as_ref()?;
            let placement = mig.capabilities.placement(name.profile, name.start)?;
            let allocated = AllocatedDevice {
                request: String::new(),
                pool: String::new(),
                device: name.device_name(),
                share_id: None,
                admin_access: false,
                consumed_capacity: BTreeMap::new(),
            };
            Some(RecordedDevice {
                allocated,
                gpu,
                kind: HoldKind::Partition { profile: name.profile, placement },
                time_slice: None,
                is_static,
            })
        };
        self.named_in_cdi_file(uid, ordinals).into_iter().filter_map(partition).collect()
    }

    /// A claim's CDI file: its partitions, their GPUs, and whether others have made them.
    fn named_in_cdi_file(&self, uid: &ClaimUid, ordinals: &Ordinals) -> Vec<(PartitionName, GpuUuid, bool)> {
        let read = self.parts.cdi.read(&self.cdi_name(uid)).ok().flatten();
        let Some(spec) = read.and_then(|bytes| divvy_cdi::Spec::from_json_bytes(&bytes).ok()) else {
            return Vec::new();
        };
        let named = |found: &divvy_cdi::Device| {
            let device: DeviceName =
                found.name.strip_prefix(uid.as_str())?.strip_prefix('-')?.parse().ok()?;
            let name = PartitionName::parse(&device).ok()?;
            let gpu = ordinals.gpu(name.ordinal)?.clone();
            let is_static = name.is_static;
            Some((name, gpu, is_static))
        };
        spec.devices.iter().filter_map(named).collect()
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

    /// Whether the partitions a record says it made still live: a reload of the driver or somebody else may have
    /// removed them. What cannot be told counts as living.
    pub(crate) fn partitions_live(&self, record: &Record) -> bool {
        record.steps.iter().all(|state| match &state.progress {
            Progress::Done { outcome } => {
                self.parts.steps.living(&state.step).map_or(true, |now| now.as_ref() == Some(outcome))
            }
            _ => true,
        })
    }
}

/// Whether an instance is one that this record has made, or may be making.
fn accounts_for(stored: &Stored<Record>, gpu: &GpuUuid, instance: &GpuInstance) -> bool {
    match stored {
        // An unreadable record may be about anything; it keeps others off by itself.
        Stored::Absent | Stored::Corrupt { .. } => false,
        Stored::Newer { head, .. } => head.gpus.contains(gpu),
        Stored::Fine(record) => record.steps.iter().any(|state| {
            let ours = Step::create_partition(gpu.clone(), instance.profile, instance.placement);
            let id = match &state.progress {
                Progress::Undone => return false,
                Progress::Intended { .. }
                | Progress::Begun { made: Outcome::Nothing, .. }
                | Progress::Done { outcome: Outcome::Nothing } => None,
                Progress::Begun {
                    made: Outcome::GpuInstance { gi } | Outcome::Partition { gi, .. }, ..
                }
                | Progress::Done { outcome: Outcome::GpuInstance { gi } | Outcome::Partition { gi, .. } } => {
                    Some(GpuInstanceId(gi.0))
                }
            };
            state.step == ours && id.is_none_or(|id| id == instance.id)
        }),
    }
}
