//! The time slice of a GPU: set for the claim that has the whole GPU and asks, and for shares as the policy says; given back
//! with the last of them. It belongs to the GPU and to no claim: what was set is in the GPU's state, and what it should be
//! follows from the live holds.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_claims::{Cause, GpuState, Record, StepError, Stored, wanted_time_slice};
use divvy_model::{GpuUuid, Hold, TimeSlice};

use crate::run::StepFailed;
use crate::{Event, Executor, Report, StoreError, chain};

/// Why a time slice could not be read or set.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TimeSliceError {
    /// The GPU has none that can be set. The text says which GPU that is.
    #[error("{0}")]
    Unsupported(String),
    /// No driver is loaded: whatever was set is gone.
    #[error("no NVIDIA driver is loaded")]
    NoDriver,
    /// It did not work.
    #[error(transparent)]
    Failed(#[from] StepError),
}

impl From<TimeSliceError> for StepError {
    fn from(error: TimeSliceError) -> Self {
        match error {
            TimeSliceError::Unsupported(which) => Self::NotDone(Cause::unsupported(format!(
                "{which} (omit timeSlicing in the claim's config, or shares.timeSlice in the GpuPolicy: the GPU is still \
                 shared, with the driver's own time slice)"
            ))),
            TimeSliceError::NoDriver => Self::NotDone(Cause::new("no NVIDIA driver is loaded").passing()),
            TimeSliceError::Failed(error) => error,
        }
    }
}

/// Reads and sets time slices; filled by the kubelet plugin with `nvidia-smi`, since NVML cannot.
pub trait TimeSlices: Send + Sync {
    /// The GPU's time slice now; `None` if unknown. Not past `until` (time since boot).
    fn read(&self, gpu: &GpuUuid, until: Duration) -> Result<Option<TimeSlice>, TimeSliceError>;
    fn set(&self, gpu: &GpuUuid, to: TimeSlice, until: Duration) -> Result<(), TimeSliceError>;
}

/// How long setting a time slice may take where no call's deadline is shorter.
const SET_WITHIN: Duration = Duration::from_secs(10);

impl Executor {
    /// Brings the time slice of a GPU to `to`. What it was is in the GPU's state before it changes. Under the GPU's lock.
    pub(crate) fn set_time_slice(
        &self,
        gpu: &GpuUuid,
        to: TimeSlice,
        until: Duration,
    ) -> Result<(), StepFailed> {
        let boot = &self.config.boot;
        // What such a GPU does anyway is served.
        let is_ignored = |error: &TimeSliceError| {
            to == TimeSlice::Default && matches!(error, TimeSliceError::Unsupported(_))
        };
        let slices = &self.parts.time_slices;
        let was = match self.gpu_state(gpu)?.time_slice_before(boot) {
            Some(_) => None,
            None => match slices.read(gpu, until) {
                Ok(was) => was,
                Err(error) if is_ignored(&error) => return Ok(()),
                Err(error) => return Err(StepError::from(error).into()),
            },
        };
        let was = was.unwrap_or(TimeSlice::Default);
        let mut ignored = false;
        let set = || {
            let set = slices.set(gpu, to, until);
            ignored = set.as_ref().is_err_and(is_ignored);
            Ok(set?)
        };
        match self.change_setting(gpu, |state| state.note_time_slice(was, to, boot), set) {
            Err(StepFailed::Step(_)) if ignored => Ok(()),
            Err(StepFailed::Step(error @ StepError::Unknown(_))) => {
                self.change_gpu(gpu, GpuState::doubt_time_slice)?;
                Err(error.into())
            }
            done => done,
        }
    }

    /// Restores the time slices that no claim requests any more, of GPUs that a record has just released. A failure holds
    /// nothing back, because reconcile retries. Under the GPUs' locks.
    pub(crate) fn settle_settings_of(&self, gpus: &BTreeSet<GpuUuid>) {
        for gpu in gpus {
            let until = self.parts.clock.now() + SET_WITHIN;
            if let Err(error) = self.settle_settings(gpu, until, false) {
                tracing::warn!(%gpu, error, "failed to restore the GPU's settings, will retry");
            }
        }
    }

    /// The same for all GPUs that no call is working on, where also a time slice that the policy has changed is set. `again`:
    /// they are set once more, since the driver may have been reloaded.
    pub(crate) fn settle_all_settings(&self, again: bool, report: &mut Report) {
        let states = match self.state.gpus() {
            Ok(states) => states,
            Err(error) => return report.events.push(Event::failed(None, &error)),
        };
        for (gpu, stored) in states {
            let is_set = |state: &GpuState| {
                let slice = state.has_time_slice() || state.share_time_slice.is_some();
                slice || state.compute_mode_found.is_some()
            };
            if !stored.fine().is_some_and(is_set) {
                continue;
            }
            let Ok(_lock) = self.lock_gpu(&gpu) else { continue };
            match self.settle_settings(&gpu, self.parts.clock.now() + SET_WITHIN, again) {
                Ok(false) => {}
                Ok(true) => report.events.push(Event::SettingsGivenBack { gpu }),
                Err(error) => report.events.push(Event::Failed { claim: None, error }),
            }
        }
    }

    /// Whether something was given back.
    fn settle_settings(&self, gpu: &GpuUuid, until: Duration, again: bool) -> Result<bool, String> {
        // One that fails does not keep the other.
        let slice = self.settle_time_slice(gpu, until, again);
        let mode = self.settle_compute_mode(gpu)?;
        Ok(slice? || mode)
    }

    /// What is held of a GPU, and whether a record that cannot be read may hold it too.
    pub(crate) fn holds_on(&self, gpu: &GpuUuid) -> Result<(Vec<Hold>, bool), StoreError> {
        let records = self.state.records()?;
        let unknown = records.values().any(|stored| match stored.as_ref() {
            Stored::Corrupt { .. } => true,
            Stored::Newer { head, .. } => head.gpus.contains(gpu),
            Stored::Absent | Stored::Fine(_) => false,
        });
        let fine = records.values().filter_map(|stored| stored.fine());
        let holds = fine.flat_map(Record::holds).filter(|hold| hold.gpu == *gpu).collect();
        Ok((holds, unknown))
    }

    fn settle_time_slice(&self, gpu: &GpuUuid, until: Duration, again: bool) -> Result<bool, String> {
        let boot = &self.config.boot;
        let said = |error: StoreError| chain(&error);
        let state = self.gpu_state(gpu).map_err(said)?;
        if !state.has_time_slice() && state.share_time_slice.is_none() {
            return Ok(false);
        }
        let (holds, unknown) = self.holds_on(gpu).map_err(said)?;
        let applied = state.time_slice(boot);
        if let Some(wanted) = wanted_time_slice(&holds, state.share_time_slice) {
            if again || applied != Some(wanted) {
                self.set_time_slice(gpu, wanted, until).map_err(|e| cannot(gpu, &e))?;
            }
            return Ok(false);
        }
        if !state.has_time_slice() {
            return Ok(false);
        }
        if let Some(before) = state.time_slice_before(boot) {
            // A record that cannot be read may be of a claim that asked.
            if unknown {
                return Ok(false);
            }
            match self.parts.time_slices.set(gpu, before, until) {
                Ok(()) | Err(TimeSliceError::Unsupported(_) | TimeSliceError::NoDriver) => {}
                Err(error) => return Err(cannot(gpu, &error)),
            }
        }
        self.change_gpu(gpu, GpuState::forget_time_slice).map_err(said)?;
        Ok(true)
    }
}

fn cannot(gpu: &GpuUuid, error: &dyn std::error::Error) -> String {
    format!("the time slice of {gpu} cannot be set: {}", chain(error))
}
