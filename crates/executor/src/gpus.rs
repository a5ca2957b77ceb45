//! The files of GPUs: what was changed on each, which instances were made on it and for which claims, and which steps have
//! an outcome that is not known. Written under the GPU's lock only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use divvy_claims::{Fence, GpuState, OwnedInstance, Phase, Progress, Record, StepError, StepState, Stored};
use divvy_model::{ClaimUid, GpuUuid, Grant};

use crate::run::StepFailed;
use crate::{Event, Executor, Report, StoreError, chain};

impl Executor {
    /// Says what a prepare may do with GPUs; kept on disk, so that a restart and the other instance know. Those that are
    /// not named keep what was said last.
    pub fn grant(&self, grants: &BTreeMap<GpuUuid, Grant>) -> Result<(), StoreError> {
        self.grants.lock().unwrap_or_else(PoisonError::into_inner).extend(grants.clone());
        let known = self.state.gpus()?;
        let is_known = |gpu: &GpuUuid, grant: &Grant| {
            let state = known.get(gpu).and_then(|state| state.fine());
            state.map_or(GpuState::default().has(grant), |state| state.has(grant))
        };
        let unknown = grants.iter().filter(|(gpu, grant)| !is_known(gpu, grant));
        // A GPU whose lock is busy or whose file cannot be written keeps none of the others waiting.
        let failed = unknown.filter_map(|(gpu, grant)| self.grant_one(gpu, *grant).err());
        failed.reduce(|first, _| first).map_or(Ok(()), Err)
    }

    fn grant_one(&self, gpu: &GpuUuid, grant: Grant) -> Result<(), StoreError> {
        let _lock = self.lock_gpu(gpu).map_err(|error| StoreError {
            what: format!("the state of {gpu}"),
            action: "written",
            source: std::io::Error::other(error),
        })?;
        self.change_gpu(gpu, |state| state.take(&grant))
    }

    /// GPUs that are fenced in this boot, and why.
    pub fn fences(&self) -> Result<BTreeMap<GpuUuid, Vec<Fence>>, StoreError> {
        let boot = &self.config.boot;
        let fences = |state: &Stored<GpuState>| match state {
            Stored::Fine(state) => state.fences.iter().filter(|fence| fence.boot == *boot).cloned().collect(),
            Stored::Corrupt { reason } => vec![Fence {
                claim: None,
                reason: format!("its state file cannot be read: {reason}"),
                boot: boot.clone(),
            }],
            Stored::Absent | Stored::Newer { .. } => Vec::new(),
        };
        let states = self.state.gpus()?.into_iter().map(|(gpu, state)| (gpu, fences(&state)));
        Ok(states.filter(|(_, fences)| !fences.is_empty()).collect())
    }

    /// Changes what is kept about a GPU. A file that cannot be read is first made again; one of a later version is left.
    pub(crate) fn change_gpu(
        &self,
        gpu: &GpuUuid,
        change: impl FnOnce(&mut GpuState),
    ) -> Result<(), StoreError> {
        let (on_disk, mut state) = match self.state.gpu(gpu)? {
            Stored::Fine(state) => (Some(state.clone()), state),
            Stored::Absent => (Some(GpuState::default()), self.without_file(gpu)),
            Stored::Newer { .. } => return Ok(()),
            Stored::Corrupt { reason } => {
                (None, self.remade(gpu).map_err(|error| unreadable(gpu, &reason, &error))?)
            }
        };
        change(&mut state);
        match on_disk {
            Some(before) if before == state => return Ok(()),
            Some(_) => {}
            None => self.state.copy_gpu_aside(gpu, self.parts.clock.now())?,
        }
        self.state.write_gpu(gpu, &state)
    }

    /// What is kept about a GPU; the default where that cannot be read.
    pub(crate) fn gpu_state(&self, gpu: &GpuUuid) -> Result<GpuState, StoreError> {
        Ok(self.state.gpu(gpu)?.fine().cloned().unwrap_or_default())
    }

    /// Changes a setting of a GPU, which is noted in its state before. A change that was not made leaves the settings that
    /// were noted then. Under the GPU's lock.
    pub(crate) fn change_setting(
        &self,
        gpu: &GpuUuid,
        note: impl FnOnce(&mut GpuState),
        change: impl FnOnce() -> Result<(), StepError>,
    ) -> Result<(), StepFailed> {
        let mut before = GpuState::default();
        self.change_gpu(gpu, |state| {
            before = state.clone();
            note(state);
        })?;
        let done = change();
        if let Err(StepError::NotDone(_)) = done {
            self.change_gpu(gpu, |state| {
                let GpuState { baseline, applied, compute_mode_found, .. } = before;
                *state = GpuState { baseline, applied, compute_mode_found, ..std::mem::take(state) };
            })?;
        }
        Ok(done?)
    }

    /// What is known of a GPU that has no file, or whose file cannot be read: what was granted.
    pub(crate) fn without_file(&self, gpu: &GpuUuid) -> GpuState {
        let mut state = GpuState::default();
        if let Some(grant) = self.grants.lock().unwrap_or_else(PoisonError::into_inner).get(gpu) {
            state.take(grant);
        }
        state
    }

    /// What the claims' records say about a GPU whose file cannot be read: the instances that were made. What its settings
    /// were before us is not known any more, so they are taken for what they are now.
    fn remade(&self, gpu: &GpuUuid) -> Result<GpuState, String> {
        let mut state = self.without_file(gpu);
        for (uid, stored) in self.state.records().map_err(|error| chain(&error))? {
            match stored.as_ref() {
                Stored::Fine(record) => {
                    note_instances(&mut state, gpu, record);
                }
                Stored::Newer { .. } | Stored::Absent => {}
                Stored::Corrupt { .. } => {
                    return Err(format!("the record of claim UID {uid} cannot be read either"));
                }
            }
        }
        Ok(state)
    }

    /// Notes an instance that is about to be made for a claim, or what has become of it.
    pub(crate) fn own_instance(&self, record: &Record, state: &StepState) -> Result<(), StoreError> {
        self.change_gpu(state.step.gpu(), |of_gpu| note_instance(of_gpu, record, state))
    }

    /// Notes the instances of a record that the files of their GPUs do not have: a version before this one has made them,
    /// or has dropped the notes. Under the claim's lock: what is noted of a claim changes under that only.
    pub(crate) fn own_instances(&self, record: &Record) -> Result<(), StoreError> {
        let noted = self.instances_of(&record.uid)?;
        let is_noted = |state: &&StepState| noted.iter().any(|known| known.step == state.step);
        let own = record.steps.iter().filter(|s| s.step.is_owned() && s.progress != Progress::Undone);
        for state in own.filter(|state| !is_noted(state)) {
            let Ok(_lock) = self.lock_gpu(state.step.gpu()) else { continue };
            self.own_instance(record, state)?;
        }
        Ok(())
    }

    /// The steps that made instances in this boot, by claim, as the GPUs' files have them.
    pub(crate) fn instances(&self) -> Result<BTreeMap<ClaimUid, Vec<StepState>>, StoreError> {
        let mut by_claim = BTreeMap::<_, Vec<_>>::new();
        for stored in self.state.gpus()?.values() {
            let all = stored.fine().into_iter().flat_map(|state| &state.instances);
            for made in all.filter(|made| made.boot == self.config.boot) {
                by_claim.entry(made.claim.clone()).or_default().push(made.state.clone());
            }
        }
        Ok(by_claim)
    }

    /// Those that were made for one claim.
    pub(crate) fn instances_of(&self, uid: &ClaimUid) -> Result<Vec<StepState>, StoreError> {
        Ok(self.instances()?.remove(uid).unwrap_or_default())
    }

    pub(crate) fn fence(&self, record: &Record, gpu: &GpuUuid, reason: &str) -> Result<(), StoreError> {
        let (claim, boot) = (Some(record.uid.clone()), self.config.boot.clone());
        let fence = Fence { claim, reason: reason.to_owned(), boot };
        self.change_gpu(gpu, |state| {
            state.fences.retain(|other| other.claim != fence.claim);
            state.fences.push(fence);
        })
    }

    /// A claim has nothing left on these GPUs: no instance and no open question.
    pub(crate) fn forget_on(&self, gpus: &BTreeSet<GpuUuid>, uid: &ClaimUid) -> Result<(), StoreError> {
        for gpu in gpus {
            self.change_gpu(gpu, |state| {
                state.fences.retain(|fence| fence.claim.as_ref() != Some(uid));
                state.instances.retain(|instance| instance.claim != *uid);
            })?;
        }
        Ok(())
    }

    /// Puts the files of GPUs right: what cannot be read is made again; fences whose claim has no record any more, or of
    /// another boot, are lifted; notes of another boot, and of steps that a claim's record does not have, are dropped (the
    /// note comes before the record, and the step after both).
    pub(crate) fn check_gpus(&self, report: &mut Report) {
        let states = match self.state.gpus() {
            Ok(states) => states,
            Err(error) => return report.events.push(Event::failed(None, &error)),
        };
        for (gpu, stored) in states {
            let settled = match stored.as_ref() {
                Stored::Fine(state) => state.fences.is_empty() && state.instances.is_empty(),
                Stored::Corrupt { .. } => false,
                Stored::Absent | Stored::Newer { .. } => true,
            };
            if settled {
                continue;
            }
            let Ok(_lock) = self.lock_gpu(&gpu) else { continue };
            match self.check_gpu(&gpu) {
                Ok(true) => report.events.push(Event::FenceCleared { gpu }),
                Ok(false) => {}
                Err(error) => report.events.push(Event::failed(None, &error)),
            }
        }
    }

    /// Whether the GPU was fenced and is no longer.
    fn check_gpu(&self, gpu: &GpuUuid) -> Result<bool, StoreError> {
        let was_fenced = |state: &Stored<GpuState>| match state {
            Stored::Fine(state) => !state.fences.is_empty(),
            Stored::Corrupt { .. } => true,
            Stored::Absent | Stored::Newer { .. } => false,
        };
        let before = was_fenced(&self.state.gpu(gpu)?);
        let records = self.state.records()?;
        let gone = |uid: &ClaimUid| !records.contains_key(uid);
        let is_void = |instance: &OwnedInstance| {
            let record = records.get(&instance.claim).and_then(|stored| stored.fine());
            let without = |record: &Record| record.steps.iter().all(|s| s.step != instance.state.step);
            instance.boot != self.config.boot || record.is_some_and(without)
        };
        self.change_gpu(gpu, |state| {
            state.fences.retain(|f| f.boot == self.config.boot && !f.claim.as_ref().is_some_and(gone));
            state.instances.retain(|instance| !is_void(instance));
        })?;
        Ok(before && !was_fenced(&self.state.gpu(gpu)?))
    }

    /// Makes the file of a GPU again if it cannot be read: a prepare waits for that.
    pub(crate) fn repair_gpu(&self, gpu: &GpuUuid) {
        let Ok(_lock) = self.lock_gpu(gpu) else { return };
        if let Err(error) = self.change_gpu(gpu, |_| {}) {
            tracing::warn!(%gpu, error = chain(&error), "failed to rebuild the GPU's state, will retry");
        }
    }
}

fn unreadable(gpu: &GpuUuid, reason: &str, why: &str) -> StoreError {
    StoreError {
        what: format!("the state of {gpu} ({reason}; {why})"),
        action: "rebuilt",
        source: std::io::ErrorKind::InvalidData.into(),
    }
}

fn note_instances(state: &mut GpuState, gpu: &GpuUuid, record: &Record) {
    let own = record.steps.iter().filter(|s| s.step.is_owned() && s.step.gpu() == gpu);
    for step in own.filter(|s| s.progress != Progress::Undone) {
        note_instance(state, record, step);
    }
    if let Phase::Leaving(leaving) = &record.phase
        && record
            .steps
            .iter()
            .any(|s| matches!(s.progress, Progress::Intended { .. } | Progress::Begun { .. }))
    {
        let (claim, reason, boot) = (Some(record.uid.clone()), leaving.reason.clone(), record.boot.clone());
        state.fences.push(Fence { claim, reason, boot });
    }
}

fn note_instance(of_gpu: &mut GpuState, record: &Record, state: &StepState) {
    let is_it = |i: &OwnedInstance| i.claim == record.uid && i.state.step == state.step;
    of_gpu.instances.retain(|instance| !is_it(instance));
    if state.progress != Progress::Undone {
        let (claim, boot) = (record.uid.clone(), record.boot.clone());
        of_gpu.instances.push(OwnedInstance { claim, boot, state: state.clone() });
    }
}
