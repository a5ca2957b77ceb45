//! The compute mode of a GPU: `DEFAULT` while shares of it are held, since more than one process computes there then. What
//! was found is in the GPU's state, and comes back when the last share is gone.

use divvy_claims::{Cause, GpuState, StepError};
use divvy_model::{ComputeMode, GpuUuid, HoldKind};

use crate::run::StepFailed;
use crate::{Executor, StoreError, chain};

impl Executor {
    /// Sets the compute mode; what it was is in the GPU's state before it changes. Under the GPU's lock.
    pub(crate) fn set_compute_mode(&self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), StepFailed> {
        let not_done = |what: &str| StepError::NotDone(Cause::new(format!("compute mode of {gpu} {what}")));
        // What was decided on may be a minute old.
        self.parts.inventory.changed(gpu);
        let found = self.compute_mode(gpu).ok_or_else(|| not_done("cannot be read"))?;
        if found == to {
            return Ok(());
        }
        if found == ComputeMode::Prohibited {
            return Err(not_done("is PROHIBITED, which an administrator has set").into());
        }
        let note = |state: &mut GpuState| state.note_compute_mode(found, &self.config.boot);
        self.change_setting(gpu, note, || self.parts.steps.set_compute_mode(gpu, to))?;
        self.parts.inventory.changed(gpu);
        Ok(())
    }

    pub(crate) fn compute_mode(&self, gpu: &GpuUuid) -> Option<ComputeMode> {
        self.parts.inventory.inventory()?.gpus.get(gpu)?.facts.compute_mode
    }

    /// Gives the compute mode back that was found, once no share of the GPU is held; whether it did. Under the GPU's lock.
    pub(crate) fn settle_compute_mode(&self, gpu: &GpuUuid) -> Result<bool, String> {
        let said = |error: StoreError| chain(&error);
        let Some(found) = self.gpu_state(gpu).map_err(said)?.compute_mode_found else { return Ok(false) };
        if found.boot == self.config.boot {
            let (holds, unknown) = self.holds_on(gpu).map_err(said)?;
            if unknown || holds.iter().any(|hold| hold.kind == HoldKind::Share) {
                return Ok(false);
            }
            self.parts.inventory.changed(gpu);
            match self.compute_mode(gpu) {
                // Not seen now: looked at again.
                None => return Ok(false),
                // What is there already is set too: a call that sets ours may still be under way.
                Some(now) if [ComputeMode::Default, found.mode].contains(&now) => {
                    self.parts.steps.set_compute_mode(gpu, found.mode).map_err(|error| {
                        format!("failed to restore compute mode {} of {gpu}: {}", found.mode, chain(&error))
                    })?;
                    self.parts.inventory.changed(gpu);
                }
                // Set by others since.
                Some(_) => {}
            }
        }
        self.change_gpu(gpu, |state| state.compute_mode_found = None).map_err(said)?;
        Ok(true)
    }
}
