//! Settings of a GPU that belong to no claim: compute mode through NVML, the time slice through
//! `nvidia-smi`, since NVML cannot.

use std::time::Duration;

use divvy_gpu::{Cause, ChangeError};
use divvy_model::{ComputeMode, GpuError, GpuUuid, TimeSlice};

use super::{Hardware, failed};
use crate::chain;

/// A time slice that could not be read or set.
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
    Failed(#[from] ChangeError),
}

impl From<TimeSliceError> for ChangeError {
    fn from(error: TimeSliceError) -> Self {
        match error {
            TimeSliceError::Unsupported(which) => Self::NotDone(Cause::unsupported(format!(
                "{which} (omit timeSlicing in the claim's config, or shares.timeSlice in the GpuPolicy: the GPU is still \
                 shared, with the driver's own time slice)"
            ))),
            TimeSliceError::NoDriver => {
                Self::NotDone(Cause::new("no NVIDIA driver is loaded").passing())
            }
            TimeSliceError::Failed(error) => error,
        }
    }
}

/// Reads and sets time slices; filled by the kubelet plugin with `nvidia-smi`.
pub trait TimeSlices: Send + Sync {
    /// Returns the GPU's time slice now; `None` if unknown. Not past `until` (time since boot).
    fn read(&self, gpu: &GpuUuid, until: Duration) -> Result<Option<TimeSlice>, TimeSliceError>;
    /// Sets the GPU's time slice. Not past `until`.
    fn set(&self, gpu: &GpuUuid, to: TimeSlice, until: Duration) -> Result<(), TimeSliceError>;
}

impl Hardware<'_> {
    /// Returns the compute mode as the inventory has it; it may be a minute old.
    pub(super) fn compute_mode(self, gpu: &GpuUuid) -> Option<ComputeMode> {
        let inventory = self.inventory.inventory()?;
        inventory.gpus.get(gpu)?.facts.compute_mode
    }

    /// Has a GPU read again that was changed. A GPU that cannot be read is read later, with the
    /// others.
    pub(crate) fn read_again(self, gpu: &GpuUuid) {
        if let Err(error) = self.inventory.changed(gpu) {
            tracing::warn!(%gpu, error = chain(&error), "failed to read a changed GPU");
        }
    }

    /// Reads the compute mode; `None` if the driver reports none.
    pub(crate) fn compute_mode_now(self, gpu: &GpuUuid) -> Option<Result<ComputeMode, GpuError>> {
        // Read through the inventory, so that every part of the plugin sees the same value. The
        // value of before is none: a note would be dropped because of it.
        match self.inventory.changed(gpu) {
            Ok(()) => self.compute_mode(gpu).map(Ok),
            Err(error) => Some(Err(error)),
        }
    }

    /// Sets the compute mode.
    pub fn set_compute_mode(self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), ChangeError> {
        self.nothing_in_flight(gpu)?;
        let set = self.gpus.set_compute_mode(gpu, to);
        self.read_again(gpu);
        set.map_err(|error| failed("the driver refused", error))
    }

    pub(crate) fn time_slice(
        self,
        gpu: &GpuUuid,
        until: Duration,
    ) -> Result<Option<TimeSlice>, TimeSliceError> {
        self.time_slices.read(gpu, until)
    }

    pub(crate) fn set_time_slice(
        self,
        gpu: &GpuUuid,
        to: TimeSlice,
        until: Duration,
    ) -> Result<(), TimeSliceError> {
        self.time_slices.set(gpu, to, until)
    }
}
