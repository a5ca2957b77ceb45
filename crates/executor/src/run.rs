//! Carrying a plan out; [`crate::unwind`] takes it back. Called under the locks of the claim and its GPUs.
//!
//! A claim without hardware steps is one write: its record says *prepared* before the CDI file exists, and a reader that
//! finds the one without the other writes the other. With hardware steps, the intent of each is on disk before it
//! begins and its outcome before the next; after a crash, an instance that was not there before, at our exact place, is
//! ours, and anything less certain fences the GPU.

use std::time::Duration;

use divvy_claims::{
    Cause, Claim, Observed, Outcome, Phase, Plan, Prepared, Progress, Record, Step, StepError, StepState,
};
use divvy_model::mig::{GpuInstanceId, Partition};

use crate::{Call, Executor, PrepareCause, StoreError, chain};

/// What was on disk of a claim before it is prepared: what a failure must leave.
pub(crate) enum Before {
    Nothing,
    /// Its record lingers and is taken up again: its steps are not of this call.
    Lingering(Record),
    /// Its record is of another boot, and goes on holding its GPUs.
    OtherBoot(Record),
}

/// Why a step was not carried out.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StepFailed {
    #[error(transparent)]
    Step(#[from] StepError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl StepFailed {
    fn cause(self, step: &Step) -> PrepareCause {
        match self {
            Self::Step(source) => PrepareCause::Step { step: step.to_string(), source },
            Self::Store(error) => error.into(),
        }
    }
}

fn progress(record: &mut Record, progress: Progress) {
    if let Some(last) = record.steps.last_mut() {
        last.progress = progress;
    }
}

impl Executor {
    /// Carries a plan out.
    pub(crate) fn run(
        &self,
        claim: &Claim,
        plan: Plan,
        before: &Before,
        call: &Call,
    ) -> Result<Prepared, PrepareCause> {
        let mut record = Record::new(claim, &self.config.boot, plan.devices, Phase::Prepared);
        record.received = Some(call.received);
        if record.devices.is_empty() {
            // Nothing of ours any more: only the earlier state had to go.
            self.remove_cdi(&claim.uid)?;
            self.state.remove_record(&claim.uid)?;
            return Ok(Prepared::default());
        }
        if let Before::Lingering(old) = before {
            // As they were made: the rules may say something else now.
            record.steps.clone_from(&old.steps);
            record.devices.clone_from(&old.devices);
        } else {
            record = self.run_steps(record, plan.steps, call.until, before)?;
        }
        record.metadata = self.metadata_of(claim, &record.devices);
        self.complete(record, before)
    }

    /// The last part of every prepare: content, record, files. The content comes first, since it can fail for reasons
    /// of its own, and then a claim without steps of this call has written nothing.
    pub(crate) fn complete(&self, mut record: Record, before: &Before) -> Result<Prepared, PrepareCause> {
        record.phase = Phase::Prepared;
        let files = self.metadata_files(&record);
        let bytes = match self.document(&record, &files) {
            Ok(bytes) => bytes,
            Err(error) if record.steps.is_empty() || matches!(before, Before::Lingering(_)) => {
                return Err(error.into());
            }
            Err(error) => return Err(self.take_back(record, error.into(), before)),
        };
        if let Err(error) = self.state.write_record(&record) {
            return Err(self.take_back(record, error.into(), before));
        }
        let written = self.ensure_metadata(&record.uid, &files);
        if let Err(error) = written.and_then(|_| self.write_cdi(&record.uid, &bytes)) {
            return Err(self.take_back(record, error.into(), before));
        }
        Ok(Prepared::of(&self.config.driver, &record))
    }

    /// Does the steps in order. On failure all is undone in reverse before this returns.
    pub(crate) fn run_steps(
        &self,
        mut record: Record,
        steps: Vec<Step>,
        until: Duration,
        before: &Before,
    ) -> Result<Record, PrepareCause> {
        for step in steps {
            let done = match &step {
                // Steps of the GPU's and not of the claim's: the GPU's state says what was done.
                Step::SetMigMode { gpu, on } => self.set_mig_mode(gpu, *on),
                Step::SetTimeSlice { gpu, to } => self.set_time_slice(gpu, *to, until),
                Step::SetComputeMode { gpu, to } => self.set_compute_mode(gpu, *to),
                Step::UsePartition(there) => self.use_partition(&mut record, &step, there),
                Step::CreatePartition(wanted) => self.create_partition(&mut record, wanted),
            };
            if let Err(error) = done {
                return Err(self.take_back(record, error.cause(&step), before));
            }
        }
        Ok(record)
    }

    fn use_partition(&self, record: &mut Record, step: &Step, there: &Partition) -> Result<(), StepFailed> {
        record.phase = Phase::Preparing;
        let not_done = |cause| StepFailed::Step(StepError::NotDone(cause));
        let living = self.parts.steps.living(there);
        let living = living.map_err(|e| not_done(Cause::from_gpu("its state cannot be read", e)))?;
        let Some(outcome @ Outcome::Partition { .. }) = living else {
            return Err(not_done(Cause::new(
                "the static instance no longer exists, and this driver does not create it",
            )));
        };
        record.steps.push(StepState { step: step.clone(), progress: Progress::Done { outcome } });
        Ok(())
    }

    /// Makes a partition. That it is about to be made stands in the GPU's file and in the record before it begins.
    fn create_partition(&self, record: &mut Record, wanted: &Partition) -> Result<(), StepFailed> {
        record.phase = Phase::Preparing;
        let before = self.parts.steps.before(wanted)?;
        let step = Step::CreatePartition(wanted.clone());
        let intended = StepState { step, progress: Progress::Intended { before: before.clone() } };
        self.own_instance(record, &intended)?;
        record.steps.push(intended);
        if let Err(error) = self.state.write_record(record) {
            progress(record, Progress::Undone);
            return Err(error.into());
        }
        let made = self.create_or_find(record, wanted, &before)?;
        // On record with the next write: the intent of the next step, or completion. If this one fails, the intent that is
        // on disk says enough to find the instance again.
        progress(record, Progress::Done { outcome: made });
        if let Some(done) = record.steps.last()
            && let Err(error) = self.own_instance(record, done)
        {
            tracing::warn!(claim.uid = %record.uid, error = chain(&error), "failed to record a created instance; the record has it as intended");
        }
        Ok(())
    }

    fn create_or_find(
        &self,
        record: &mut Record,
        wanted: &Partition,
        before: &[GpuInstanceId],
    ) -> Result<Outcome, StepError> {
        let mut half_made = false;
        let mut so_far = |made| {
            half_made = true;
            progress(record, Progress::Begun { before: before.to_vec(), made });
            // If this fails, the intent that is on disk says enough to find it again.
            if let Err(error) = self.state.write_record(record) {
                tracing::warn!(claim.uid = %record.uid, error = chain(&error), "failed to record progress");
            }
        };
        let error = match self.parts.steps.create(wanted, &mut so_far) {
            Err(error) => error,
            done => return done,
        };
        let found = match &error {
            StepError::NotDone(_) if half_made => return Err(error),
            StepError::NotDone(_) => Observed::Absent,
            // A call past its deadline may have succeeded after all.
            StepError::Unknown(_) => self.parts.steps.probe(wanted, before),
        };
        match found {
            Observed::Ours(outcome @ Outcome::Partition { .. }) => return Ok(outcome),
            Observed::Absent => progress(record, Progress::Undone),
            // Half of it is found again when it is taken back.
            Observed::Ours(_) | Observed::InFlight | Observed::Uncertain(_) => {}
        }
        Err(error)
    }
}
