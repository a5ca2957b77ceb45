//! Time slices by the driver's own `nvidia-smi`, for the executor.

use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{Cause, ChangeError};
use divvy_executor::{Clock, InventorySource, TimeSliceError, TimeSlices};
use divvy_host::{Driver, DriverAt, HostRoot, Smi, SmiError};
use divvy_model::{GpuUuid, TimeSlice};

/// The program takes a tenth of a second, or as long as the driver needs to wake a GPU up.
const LONGEST: Duration = Duration::from_secs(10);

/// Runs the `nvidia-smi` of whichever driver is there now.
pub(crate) struct SmiSlices {
    pub(crate) host: HostRoot,
    pub(crate) at: DriverAt,
    pub(crate) smi: Smi,
    pub(crate) inventory: Arc<dyn InventorySource>,
    pub(crate) clock: Arc<dyn Clock>,
}

impl SmiSlices {
    fn run<T>(
        &self,
        gpu: &GpuUuid,
        until: Duration,
        run: impl FnOnce(&Driver, Duration) -> Result<T, SmiError>,
    ) -> Result<T, TimeSliceError> {
        let not_done =
            |what: String| TimeSliceError::Failed(ChangeError::NotDone(Cause::new(what)));
        let driver = self.at.find(&self.host).map_err(|e| {
            not_done(format!(
                "the NVIDIA driver's files are not there: {}",
                crate::chain(&e)
            ))
        })?;
        let within = until.saturating_sub(self.clock.now()).min(LONGEST);
        run(&driver, within).map_err(|error| {
            let what = crate::chain(&error);
            match error {
                SmiError::Unsupported(text) => {
                    TimeSliceError::Unsupported(self.without(gpu, &text))
                }
                SmiError::NoDriver(_) => TimeSliceError::NoDriver,
                // Ended by its time limit, or with an unknown answer: it may have set the slice
                // before.
                error if error.is_unclear() => {
                    TimeSliceError::Failed(ChangeError::Unknown(Cause::new(what)))
                }
                SmiError::Hangs => {
                    TimeSliceError::Failed(ChangeError::NotDone(Cause::new(what).passing()))
                }
                _ => not_done(what),
            }
        })
    }

    /// Formats the message about a GPU without time slices.
    fn without(&self, gpu: &GpuUuid, text: &str) -> String {
        let inventory = self.inventory.inventory();
        let known = inventory
            .as_ref()
            .and_then(|inventory| inventory.gpus.get(gpu));
        let product = known.map_or("a GPU that does not answer", |gpu| {
            gpu.facts.product_name.as_str()
        });
        let text = text.lines().next().unwrap_or_default();
        format!("{gpu} ({product}) does not support setting a time slice: {text}")
    }
}

impl TimeSlices for SmiSlices {
    fn read(&self, gpu: &GpuUuid, until: Duration) -> Result<Option<TimeSlice>, TimeSliceError> {
        self.run(gpu, until, |driver, within| match self.smi.time_slice(driver, gpu, within) {
            // The value is not known then, and setting it says whether it can be set.
            Err(error @ (SmiError::Refused { .. } | SmiError::Unclear { .. })) => {
                tracing::warn!(%gpu, error = %crate::chain(&error), "failed to read the time slice; assuming the default");
                Ok(None)
            }
            answer => answer,
        })
    }

    fn set(&self, gpu: &GpuUuid, to: TimeSlice, until: Duration) -> Result<(), TimeSliceError> {
        tracing::info!(%gpu, slice = %to, "setting the time slice");
        self.run(gpu, until, |driver, within| {
            self.smi.set_time_slice(driver, gpu, to, within)
        })
    }
}
