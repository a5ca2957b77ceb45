//! Carrying a plan out; [`crate::unwind`] takes it back. Called under the locks of the claim and its GPUs.
//!
//! A claim without hardware steps is one write: its record says *prepared* before the CDI file is there, and whoever
//! finds the one without the other writes the other. With hardware steps, the intent of each is on disk before it
//! begins and its outcome before the next; after a crash, an instance that was not there before, at our exact place, is
//! ours, and anything less certain fences the GPU.

use std::time::Duration;

use divvy_claims::{
    Cause, Claim, Observed, Outcome, Phase, Plan, Prepared, Progress, Record, Refusal, Step, StepError,
    StepState,
};

use crate::partitions::ModeError;
use crate::{Call, Executor, PrepareError, chain};

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
            // As they were made: the rules may say something else now.
            record.steps.clone_from(&old.steps);
            record.devices.clone_from(&old.devices);
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
}
