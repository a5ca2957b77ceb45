//! Carrying a plan out, and unwinding it. Called under the locks of the claim and its GPUs.
//!
//! A claim without hardware steps is one write: its record says *prepared* before the CDI file is there, and whoever
//! finds the one without the other writes the other. With hardware steps, the intent of each is on disk before it
//! begins and its outcome before the next; after a crash, an instance that was not there before, at our exact place, is
//! ours, and anything less certain fences the GPU.

use std::time::Duration;

use divvy_claims::{
    Cause, Claim, Fence, GpuState, Leaving, Observed, Outcome, Phase, Plan, Prepared, Progress, Record,
    Refusal, Step, StepError, StepState, Stored,
};
use divvy_model::GpuUuid;

use crate::partitions::ModeError;
use crate::{Call, CdiError, Executor, PrepareError, StoreError, chain};

/// Why something could not be taken back as a whole. What is left is on record.
#[derive(Debug)]
pub(crate) enum Left {
    Store(StoreError),
    Cdi(CdiError),
    /// A step's outcome is not known, or its undo failed: the GPU is fenced and the claim lingers.
    Steps(String),
}

impl From<StoreError> for Left {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<CdiError> for Left {
    fn from(error: CdiError) -> Self {
        Self::Cdi(error)
    }
}

impl std::fmt::Display for Left {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Store(error) => f.write_str(&chain(error)),
            Self::Cdi(error) => f.write_str(&chain(error)),
            Self::Steps(reason) => f.write_str(reason),
        }
    }
}

/// Why a step could not be taken back.
struct Stuck {
    reason: String,
    /// Whether it is known how things stand.
    certain: bool,
}

fn progress(record: &mut Record, progress: Progress) {
    if let Some(last) = record.steps.last_mut() {
        last.progress = progress;
    }
}

impl Executor {
    /// Carries a plan out. `revived` is the claim's lingering record, if that is simply taken up again.
    pub(crate) fn run(
        &self,
        claim: &Claim,
        plan: Plan,
        revived: Option<&Record>,
        call: &Call,
    ) -> Result<Prepared, PrepareError> {
        let stored = |source| PrepareError::Store { claim: claim.reference(), source };
        // What a failure must leave as it was: it holds GPUs that containers may still use.
        let mut earlier = revived.map(Record::encode);
        if plan.set_aside {
            earlier = self.state.copy_aside(&claim.uid, self.parts.clock.now()).map_err(stored)?;
        }
        let mut record = Record::new(claim, &self.config.boot, plan.devices, Phase::Prepared);
        record.received = Some(call.received);
        if record.devices.is_empty() {
            // Nothing of ours any more: only the earlier state had to go.
            let gone = self
                .remove_cdi(&claim.uid)
                .map_err(|source| PrepareError::Cdi { claim: claim.reference(), source });
            gone.and_then(|()| self.state.remove_record(&claim.uid).map_err(stored))?;
            return Ok(Prepared::default());
        }
        if let Some(old) = revived {
            record.steps.clone_from(&old.steps);
        } else {
            let hardware: Vec<_> = plan.steps.into_iter().filter(Step::is_hardware).collect();
            record = self.run_steps(record, hardware, call.until, earlier.as_deref())?;
        }
        self.complete(record, revived.is_some(), earlier.as_deref())
    }

    /// The last part of every prepare: content, record, file. The content comes first, since it can fail for reasons
    /// of its own and then nothing has been written. `kept`: the steps on record are not of this call. `earlier` is the
    /// file that was there before, which a failure puts back.
    pub(crate) fn complete(
        &self,
        mut record: Record,
        kept: bool,
        earlier: Option<&[u8]>,
    ) -> Result<Prepared, PrepareError> {
        let claim = record.reference();
        record.phase = Phase::Prepared;
        let failed = |record: Record, error: PrepareError| match earlier {
            Some(earlier) if kept || record.steps.is_empty() => self.put_back(&record, earlier, error),
            _ => self.take_back(record, error, earlier),
        };
        let bytes = match self.document(&record) {
            Ok(bytes) => bytes,
            Err(source) if record.steps.is_empty() || kept => {
                return Err(PrepareError::Cdi { claim, source });
            }
            Err(source) => return Err(failed(record, PrepareError::Cdi { claim, source })),
        };
        if let Err(source) = self.state.write_record(&record) {
            return Err(failed(record, PrepareError::Store { claim, source }));
        }
        if let Err(source) = self.write_cdi(&record.uid, &bytes) {
            return Err(failed(record, PrepareError::Cdi { claim, source }));
        }
        Ok(Prepared::of(&self.config.driver, &record))
    }

    /// Does the hardware steps in order. On failure all is undone in reverse before this returns.
    pub(crate) fn run_steps(
        &self,
        mut record: Record,
        steps: Vec<Step>,
        until: Duration,
        earlier: Option<&[u8]>,
    ) -> Result<Record, PrepareError> {
        let lost = steps.iter().any(Step::is_owned) && self.record_was_lost(&record.uid, earlier);
        for step in steps {
            let claim = record.reference();
            let failed = |source| PrepareError::Step { claim: claim.clone(), step: step.to_string(), source };
            let stored = |source| PrepareError::Store { claim: claim.clone(), source };
            // The GPU's, not the claim's: its state says what was done.
            let of_gpu = match &step {
                Step::SetMigMode { gpu, on } => Some(self.set_mig_mode(gpu, *on, until)),
                Step::SetTimeSlice { gpu, to } => Some(self.set_time_slice(gpu, *to, until)),
                Step::WriteCdi | Step::UsePartition { .. } | Step::CreatePartition { .. } => None,
            };
            match of_gpu {
                Some(Ok(())) => continue,
                Some(Err(ModeError::Store(source))) => {
                    return Err(self.take_back(record, stored(source), earlier));
                }
                Some(Err(ModeError::Step(source))) => {
                    return Err(self.take_back(record, failed(source), earlier));
                }
                Some(Err(ModeError::Unsupported { to: wanted, which })) => {
                    let asks = record.devices.iter().find(|d| d.time_slice.is_some());
                    let device = asks.map(|d| d.allocated.device.clone());
                    let refusal = device.map(|device| {
                        Refusal::TimeSliceUnsupported { claim: claim.clone(), device, wanted, which }.into()
                    });
                    let error =
                        refusal.unwrap_or_else(|| failed(StepError::NotDone(Cause::new("unsupported"))));
                    return Err(self.take_back(record, error, earlier));
                }
                None => {}
            }
            record.phase = Phase::Preparing;
            if let Step::UsePartition { gpu, .. } = &step {
                let error = match self.find_static(&step) {
                    Ok(Some(outcome)) => {
                        record
                            .steps
                            .push(StepState { step: step.clone(), progress: Progress::Done { outcome } });
                        continue;
                    }
                    Ok(None) => {
                        let of_step = record.devices.iter().find(|d| d.step().as_ref() == Some(&step));
                        let device = of_step.map(|d| d.allocated.device.clone());
                        device.map_or_else(
                            || failed(StepError::NotDone(Cause::new("nothing lives there"))),
                            |device| {
                                let (claim, gpu) = (claim.clone(), gpu.clone());
                                Refusal::NoStaticPartition { claim, device, gpu }.into()
                            },
                        )
                    }
                    Err(error) => failed(error),
                };
                return Err(self.take_back(record, error, earlier));
            }
            if lost {
                match self.adopt(&record.uid, &step) {
                    Ok(Some(adopted)) => {
                        record.steps.push(adopted);
                        continue;
                    }
                    Ok(None) => {}
                    Err(error) => return Err(self.take_back(record, failed(error), earlier)),
                }
            }
            let before = match self.parts.steps.before(&step) {
                Ok(before) => before,
                Err(error) => return Err(self.take_back(record, failed(error), earlier)),
            };
            record.steps.push(StepState {
                step: step.clone(),
                progress: Progress::Intended { before: before.clone() },
            });
            if let Err(source) = self.state.write_record(&record) {
                progress(&mut record, Progress::Undone);
                return Err(self.take_back(record, stored(source), earlier));
            }
            let mut so_far = |made| {
                progress(&mut record, Progress::Begun { before: before.clone(), made });
                // If this fails, the intent that is on disk says enough to find it again.
                if let Err(error) = self.state.write_record(&record) {
                    tracing::warn!(claim.uid = %claim.uid, error = chain(&error), "progress is not on record");
                }
            };
            let applied = self.parts.steps.apply(&step, until, &mut so_far);
            let half_made =
                matches!(record.steps.last(), Some(StepState { progress: Progress::Begun { .. }, .. }));
            let error = match applied {
                Ok(outcome) => {
                    // On disk with the next write: the intent of the next step, or completion.
                    progress(&mut record, Progress::Done { outcome });
                    continue;
                }
                Err(error @ StepError::NotDone(_)) => {
                    if !half_made {
                        progress(&mut record, Progress::Undone);
                    }
                    error
                }
                // A call past its deadline may have succeeded after all.
                Err(error @ StepError::Unknown(_)) => match self.parts.steps.probe(&step, &before) {
                    Observed::Ours(outcome @ Outcome::Partition { .. }) => {
                        progress(&mut record, Progress::Done { outcome });
                        continue;
                    }
                    Observed::Absent => {
                        progress(&mut record, Progress::Undone);
                        error
                    }
                    // Half of it is found again when it is taken back.
                    Observed::Ours(_) | Observed::InFlight | Observed::Uncertain(_) => error,
                },
            };
            return Err(self.take_back(record, failed(error), earlier));
        }
        Ok(record)
    }

    /// Undoes what a failed prepare made, in the same call, and reports both errors if that fails too.
    fn take_back(&self, record: Record, first: PrepareError, earlier: Option<&[u8]>) -> PrepareError {
        match self.unwind_to(record, earlier) {
            Ok(()) => first,
            Err(left) => PrepareError::Undo { first: Box::new(first), undo: left.to_string() },
        }
    }

    /// Nothing was made but files: the earlier record is to be there again. If it cannot be written, what is on disk
    /// now holds the same devices.
    fn put_back(&self, record: &Record, earlier: &[u8], first: PrepareError) -> PrepareError {
        let back = self.state.put_back(&record.uid, earlier).map_err(Left::from);
        match back.and_then(|()| Ok(self.remove_cdi(&record.uid)?)) {
            Ok(()) => first,
            Err(left) => PrepareError::Undo { first: Box::new(first), undo: left.to_string() },
        }
    }

    /// Takes back all that a record says, in reverse, and the record last.
    pub(crate) fn unwind(&self, record: Record) -> Result<(), Left> {
        self.unwind_to(record, None)
    }

    /// Takes back all that a record says, and leaves what was there before it: nothing, or an earlier record.
    fn unwind_to(&self, record: Record, earlier: Option<&[u8]>) -> Result<(), Left> {
        let no_cdi = self.remove_cdi(&record.uid);
        if earlier.is_none() {
            no_cdi?;
            return self.unwind_steps(record, None);
        }
        // An earlier record that is to be there again also says what its file is: that can wait.
        self.unwind_steps(record, earlier)?;
        Ok(no_cdi?)
    }

    fn unwind_steps(&self, mut record: Record, earlier: Option<&[u8]>) -> Result<(), Left> {
        let on_disk = record.clone();
        // Of another boot: the hardware has forgotten.
        let live = record.boot == self.config.boot;
        if live && record.steps.iter().any(|s| s.progress != Progress::Undone) {
            // A crash from here on must not look like a prepared claim, nor like one that only waits for processes.
            let begun = matches!(&record.phase, Phase::Preparing)
                || matches!(&record.phase, Phase::Leaving(l) if l.undoing);
            if !begun {
                let reason = "its partitions are being removed".to_owned();
                record.phase = Phase::Leaving(Leaving { reason, undoing: true });
                match self.state.write_record(&record) {
                    // Everything can be removed from a full disk. Should a crash leave a record that says "prepared",
                    // then its partitions are seen to be gone, and whoever removes them again finds nothing to do.
                    Err(error) if error.is_full() => tracing::warn!(
                        claim.uid = %record.uid,
                        error = chain(&error),
                        "partitions are removed without a trace of having begun"
                    ),
                    written => written?,
                }
            }
            let mut steps = std::mem::take(&mut record.steps);
            let mut stuck = None;
            for state in steps.iter_mut().rev() {
                if let Err(why) = self.undo_step(state) {
                    stuck = Some((state.step.gpu().cloned(), why));
                    break;
                }
            }
            record.steps = steps;
            if let Some((gpu, Stuck { reason, certain })) = stuck {
                // What certainly is still there is held by the record; only the unknown endangers its neighbours.
                if let Some(gpu) = gpu.filter(|_| !certain) {
                    self.fence(&record, &gpu, &reason)?;
                }
                record.phase = Phase::Leaving(Leaving { reason: reason.clone(), undoing: true });
                // Tried again often while somebody waits: only news is written.
                if record != on_disk {
                    self.state.write_record(&record)?;
                }
                return Err(Left::Steps(reason));
            }
        }
        self.clear_fences(&record)?;
        match earlier {
            Some(earlier) => self.state.put_back(&record.uid, earlier)?,
            None => self.state.remove_record(&record.uid)?,
        }
        self.settle_time_slices_of(&record.gpus());
        Ok(())
    }

    fn undo_step(&self, state: &mut StepState) -> Result<(), Stuck> {
        let steps = &self.parts.steps;
        let step = &state.step;
        let unknown = |reason| Stuck { reason, certain: false };
        if let Progress::Intended { before } | Progress::Begun { before, .. } = &state.progress {
            state.progress = match steps.probe(step, before) {
                Observed::Absent => Progress::Undone,
                Observed::Ours(outcome) => Progress::Done { outcome },
                Observed::InFlight => return Err(unknown(format!("the call to {step} has not come back"))),
                Observed::Uncertain(what) => {
                    return Err(unknown(format!(
                        "it is not certain whether the step to {step} was done: {what}"
                    )));
                }
            };
        }
        if let Progress::Done { outcome } = &state.progress {
            if !step.is_owned() {
                state.progress = Progress::Undone;
                return Ok(());
            }
            steps.undo(step, outcome).map_err(|error| Stuck {
                reason: format!("undoing the step to {step} failed: {}", chain(&error)),
                certain: matches!(error, StepError::NotDone(_)),
            })?;
            state.progress = Progress::Undone;
        }
        Ok(())
    }

    fn fence(&self, record: &Record, gpu: &GpuUuid, reason: &str) -> Result<(), StoreError> {
        let mut state = self.gpu_state(gpu)?;
        let fence =
            Fence { claim: record.uid.clone(), reason: reason.to_owned(), boot: self.config.boot.clone() };
        if state.fence.as_ref() == Some(&fence) {
            return Ok(());
        }
        state.fence = Some(fence);
        self.state.write_gpu(gpu, &state, self.parts.clock.now())
    }

    /// Lifts the fences this claim's steps have put up. Its GPUs are those of its devices and of its steps.
    fn clear_fences(&self, record: &Record) -> Result<(), StoreError> {
        let mut gpus = record.gpus();
        gpus.extend(record.steps.iter().filter_map(|s| s.step.gpu().cloned()));
        for gpu in gpus {
            let mut state = self.gpu_state(&gpu)?;
            if state.fence.as_ref().is_some_and(|fence| fence.claim == record.uid) {
                state.fence = None;
                self.state.write_gpu(&gpu, &state, self.parts.clock.now())?;
            }
        }
        Ok(())
    }

    /// A state that cannot be read is as good as none: what may be wrong on the GPU is in the claims' records.
    pub(crate) fn gpu_state(&self, gpu: &GpuUuid) -> Result<GpuState, StoreError> {
        Ok(match self.state.gpu(gpu)? {
            Stored::Fine(state) => state,
            Stored::Absent | Stored::Corrupt { .. } | Stored::Newer { .. } => GpuState::default(),
        })
    }
}
