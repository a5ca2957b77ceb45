//! Taking back what a prepare did, and what is left where that cannot be done now. Called under the locks of the claim
//! and its GPUs.

use std::collections::BTreeSet;

use divvy_claims::{Leaving, Observed, Phase, Progress, Record, Step, StepError, StepState};
use divvy_model::{ClaimUid, GpuUuid};

use crate::run::Before;
use crate::unprepare::gpus_of_record;
use crate::{CdiError, Executor, PrepareCause, StoreError, chain};

/// Why something could not be taken back as a whole. What is left is on record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeftBehind {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// Processes are in the way, and nothing was begun.
    #[error("{0}")]
    InUse(String),
    /// A step's outcome is not known, or its undo failed: the claim lingers.
    #[error("{reason}")]
    Steps {
        /// What is in the way.
        reason: String,
        /// Whether that can pass within seconds.
        soon: bool,
    },
}

/// Why a step could not be taken back.
struct Stuck {
    reason: String,
    /// Whether it is known how things stand.
    certain: bool,
    /// Whether it can pass within seconds.
    soon: bool,
}

impl Executor {
    /// Undoes what a failed prepare made, in the same call, and leaves what was there before it; reports both errors if
    /// that fails too.
    pub(crate) fn take_back(&self, record: Record, first: PrepareCause, before: &Before) -> PrepareCause {
        let done = match before {
            Before::Nothing => self.unwind(record),
            // That also says what its file is: the file can wait.
            Before::OtherBoot(earlier) if !record.steps.is_empty() => {
                let no_cdi = self.remove_cdi(&record.uid);
                self.unwind_steps(record, Some(earlier)).and_then(|()| Ok(no_cdi?))
            }
            // Nothing was made but files. If the earlier record cannot be written, what is on disk now holds the same.
            Before::Lingering(earlier) | Before::OtherBoot(earlier) => {
                let back = self.state.put_back(earlier).map_err(LeftBehind::from);
                back.and_then(|()| Ok(self.remove_cdi(&record.uid)?))
            }
        };
        match done {
            Ok(()) => first,
            Err(left) => PrepareCause::Undo { first: Box::new(first), undo: chain(&left) },
        }
    }

    /// Takes back all that a record says, in reverse, and the record last.
    pub(crate) fn unwind(&self, record: Record) -> Result<(), LeftBehind> {
        self.remove_cdi(&record.uid)?;
        self.unwind_steps(record, None)
    }

    /// Takes the steps of a record back, and leaves an earlier record or none.
    fn unwind_steps(&self, mut record: Record, earlier: Option<&Record>) -> Result<(), LeftBehind> {
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
                    // Everything can be removed from a full disk. Should a crash leave a record that says "prepared", then its
                    // partitions are found to be gone, and removing them again does nothing.
                    Err(error) if error.is_full() => tracing::warn!(
                        claim.uid = %record.uid,
                        error = chain(&error),
                        "removing partitions without a record of the start"
                    ),
                    written => written?,
                }
            }
            let stuck = self.undo_steps(&mut record.steps);
            if !stuck.is_empty() {
                return Err(self.keep_what_is_stuck(record, &on_disk, &stuck)?);
            }
        }
        self.forget(&gpus_of_record(&record), &record.uid)?;
        match earlier {
            Some(earlier) => self.state.put_back(earlier)?,
            None => self.state.remove_record(&record.uid)?,
        }
        self.settle_settings_of(&record.gpus());
        self.leave_gpus(&record.gpus());
        Ok(())
    }

    /// Takes steps back in reverse. One that is stuck keeps none of the others.
    fn undo_steps(&self, steps: &mut [StepState]) -> Vec<(GpuUuid, Stuck)> {
        let undo = |state: &mut StepState| Some((state.step.gpu().clone(), self.undo_step(state).err()?));
        steps.iter_mut().rev().filter_map(undo).collect()
    }

    /// A record goes on holding the GPUs on which something could not be taken back, and no others: no process was in the
    /// way before any of it began.
    fn keep_what_is_stuck(
        &self,
        mut record: Record,
        on_disk: &Record,
        stuck: &[(GpuUuid, Stuck)],
    ) -> Result<LeftBehind, LeftBehind> {
        // What certainly is still there is held by the record; only the unknown endangers its neighbours.
        for (gpu, why) in stuck.iter().filter(|(_, why)| !why.certain) {
            self.fence(&record, gpu, &why.reason)?;
        }
        let left: BTreeSet<_> = stuck.iter().map(|(gpu, _)| gpu.clone()).collect();
        let free: BTreeSet<_> = gpus_of_record(&record).difference(&left).cloned().collect();
        record.devices.retain(|device| left.contains(&device.gpu));
        record.steps.retain(|state| left.contains(state.step.gpu()));
        let reasons: Vec<_> = stuck.iter().map(|(_, why)| why.reason.as_str()).collect();
        let reason = reasons.join("; ");
        record.phase = Phase::Leaving(Leaving { reason: reason.clone(), undoing: true });
        // Retried often while a call waits: only changes are written.
        if record != *on_disk {
            self.forget(&free, &record.uid)?;
            self.state.write_record(&record)?;
            self.settle_settings_of(&free);
            self.leave_gpus(&free);
        }
        Ok(LeftBehind::Steps { reason, soon: stuck.iter().any(|(_, why)| why.soon) })
    }

    /// The files of these GPUs say nothing of the claim any more. Letting go must work on a full disk too: what is noted of
    /// a claim without a record is forgotten by reconcile.
    fn forget(&self, gpus: &BTreeSet<GpuUuid>, uid: &ClaimUid) -> Result<(), StoreError> {
        match self.forget_on(gpus, uid) {
            Err(error) if error.is_full() => tracing::warn!(
                claim.uid = %uid,
                error = chain(&error),
                "failed to remove what is noted of a claim that is gone, will retry"
            ),
            done => done?,
        }
        Ok(())
    }

    fn undo_step(&self, state: &mut StepState) -> Result<(), Stuck> {
        let steps = &self.parts.steps;
        let step = &state.step;
        let Step::CreatePartition(wanted) = step else {
            state.progress = Progress::Undone;
            return Ok(());
        };
        let unknown = |reason| Stuck { reason, certain: false, soon: true };
        if let Progress::Intended { before } | Progress::Begun { before, .. } = &state.progress {
            state.progress = match steps.probe(wanted, before) {
                Observed::Absent => Progress::Undone,
                Observed::Ours(outcome) => Progress::Done { outcome },
                Observed::InFlight => return Err(unknown(format!("the call to {step} has not returned"))),
                Observed::Uncertain(what) => {
                    return Err(unknown(format!(
                        "it is uncertain whether the step to {step} was done: {what}"
                    )));
                }
            };
        }
        if let Progress::Done { outcome } = &state.progress {
            steps.undo(wanted, outcome).map_err(|error| Stuck {
                reason: format!("undoing the step to {step} failed: {}", chain(&error)),
                certain: matches!(error, StepError::NotDone(_)),
                soon: matches!(error, StepError::Unknown(_)) || error.cause().is_passing(),
            })?;
            state.progress = Progress::Undone;
        }
        Ok(())
    }
}
