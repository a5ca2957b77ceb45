//! [`MigSteps`]: MIG mode and partitions, as [`Steps`] over a [`GpuDriver`].
//!
//! Nothing here is remembered: the result of a step is read from the GPU. [`GpuError::is_transient`] classifies error codes;
//! the caller retries what can pass within seconds ([`Cause::is_passing`]).

use std::fmt::Write as _;
use std::sync::Arc;

use divvy_claims::{Cause, Observed, Outcome, Retry, StepError};
use divvy_model::mig::{ComputeInstance, GpuInstance, GpuInstanceId, Partition};
use divvy_model::{ComputeMode, GpuDriver, GpuError, GpuErrorCode, GpuUuid, MigActivation, MigMode};

use crate::Steps;

/// Give it a driver whose calls have deadlines.
pub struct MigSteps {
    gpus: Arc<dyn GpuDriver>,
}

impl MigSteps {
    /// Over this driver.
    pub fn new(gpus: Arc<dyn GpuDriver>) -> Self {
        Self { gpus }
    }

    /// A call past its deadline may still change the GPU under everything that is found out or done meanwhile.
    fn in_flight(&self, gpu: &GpuUuid) -> Result<(), StepError> {
        match self.gpus.changes_in_flight(gpu).first() {
            None => Ok(()),
            Some(op) => Err(not_done(
                Cause::new(format!("an earlier call ({}) on {gpu} has not returned", op.name())).passing(),
            )),
        }
    }

    fn set_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), StepError> {
        let to = if on { "on" } else { "off" };
        let read = |source| not_done(Cause::from_gpu("MIG mode cannot be read", source));
        if self.gpus.mig_mode(gpu).map_err(read)?.is_on() == on {
            return Ok(());
        }
        if !on {
            self.no_instance_lives(gpu)?;
        }
        let set = self.gpus.set_mig_mode(gpu, on);
        // The answer proves nothing: success can hide that the mode is only pending.
        let now = self.gpus.mig_mode(gpu);
        if now.as_ref().is_ok_and(|mode| mode.is_on() == on) {
            return Ok(());
        }
        let error = match set {
            Ok(MigActivation::Pending(GpuErrorCode::RESET_REQUIRED)) => not_done(Cause::new(format!(
                "MIG mode of {gpu} changes only with a GPU reset (`nvidia-smi --gpu-reset -i {gpu}` while the GPU is unused)"
            ))),
            // It may have worked all the same.
            Ok(MigActivation::Active | MigActivation::Pending(_)) if now.is_err() => {
                let what = format!("MIG mode of {gpu} may be {to}, but cannot be read");
                StepError::Unknown(Cause::new(what).passing())
            }
            Ok(MigActivation::Active | MigActivation::Pending(_)) => not_done(self.in_use(gpu, to, None)),
            Err(error) if error.code == GpuErrorCode::IN_USE => not_done(self.in_use(gpu, to, Some(error))),
            Err(error) if nothing_happened(error.code) => {
                not_done(Cause::from_gpu(format!("MIG mode of {gpu} cannot be turned {to}"), error))
            }
            Err(error) => {
                StepError::Unknown(Cause::from_gpu(format!("MIG mode of {gpu} may not be {to}"), error))
            }
        };
        // Cancel the pending mode; otherwise it takes effect at the next reset, for an unrelated workload.
        if matches!(error, StepError::NotDone(_))
            && matches!(now, Ok(MigMode::Supported { pending, .. }) if pending == on)
        {
            drop(self.gpus.set_mig_mode(gpu, !on));
        }
        Err(error)
    }

    fn no_instance_lives(&self, gpu: &GpuUuid) -> Result<(), StepError> {
        let read = |source| not_done(Cause::from_gpu("its GPU instances cannot be read", source));
        match self.instances(gpu).map_err(read)?.first() {
            None => Ok(()),
            Some(instance) => Err(not_done(Cause::new(format!(
                "{gpu} has {}, which this driver did not create (if it is not needed, remove it: `{}`)",
                named(instance),
                removal(gpu, instance)
            )))),
        }
    }

    /// What may prevent a change of MIG mode: NVML lists processes that compute, but not those that only monitor.
    fn in_use(&self, gpu: &GpuUuid, to: &str, source: Option<GpuError>) -> Cause {
        let pids: Vec<_> =
            self.gpus.processes(gpu).unwrap_or_default().iter().map(|p| p.pid.to_string()).collect();
        let mut what = format!("MIG mode of {gpu} cannot be turned {to} while the GPU is in use: ");
        let _never_fails = if pids.is_empty() {
            write!(
                what,
                "no process computes on it, so a process has it open (such as DCGM or its exporter, nvidia-persistenced, nvidia-smi, or a device plugin)"
            )
        } else {
            write!(what, "process {}", pids.join(", "))
        };
        Cause { what, source, retry: Retry::Soon }
    }

    fn make(&self, wanted: &Partition, so_far: &mut dyn FnMut(Outcome)) -> Result<Outcome, StepError> {
        let gpu = &wanted.gpu;
        let made = self
            .gpus
            .create_gpu_instance(gpu, wanted.profile, wanted.placement)
            .map_err(|error| self.not_created(wanted, error))?;
        let gi = made.id;
        so_far(Outcome::GpuInstance { gi });
        let failed = |what: &'static str| {
            move |error: GpuError| failed(format!("{what} in GPU instance {}", gi.0), error)
        };
        let capabilities = self.gpus.mig_capabilities(gpu).map_err(failed("profiles cannot be read"))?;
        let offered = self.gpus.compute_profiles(gpu, made.id).map_err(failed("profiles cannot be read"))?;
        let whole = capabilities
            .profile(wanted.profile)
            .and_then(|profile| profile.whole_compute_profile(&offered))
            .ok_or_else(|| {
                not_done(Cause::new(format!("no compute instance takes all of GPU instance {}", gi.0)))
            })?;
        let compute = self
            .gpus
            .create_compute_instance(gpu, made.id, whole.id)
            .map_err(failed("failed to create a compute instance"))?;
        Ok(Outcome::Partition { gi, ci: compute.id, uuid: compute.uuid })
    }

    fn not_created(&self, wanted: &Partition, error: GpuError) -> StepError {
        let (gpu, at) = (&wanted.gpu, wanted.placement);
        match error.code {
            GpuErrorCode::INSUFFICIENT_RESOURCES => {
                let living = self.instances(gpu).unwrap_or_default();
                not_done(match living.iter().find(|i| i.placement.overlaps(at)) {
                    Some(other) => Cause::from_gpu(
                        format!(
                            "{} overlaps {at} on {gpu}; this driver did not create it and does not change it (if it is not needed, remove it: `{}`)",
                            named(other),
                            removal(gpu, other)
                        ),
                        error,
                    ),
                    // Engines that a neighbour has, or memory that a process is still giving back.
                    None => Cause::from_gpu(
                        format!("{at} is free on {gpu}, but another resource is exhausted"),
                        error,
                    )
                    .passing(),
                })
            }
            GpuErrorCode::IN_USE => {
                let cause = self.in_use(gpu, "into partitions", Some(error));
                StepError::Unknown(cause)
            }
            _ => failed(format!("failed to create a GPU instance at {at} on {gpu}"), error),
        }
    }

    /// The instance that fills exactly this place, and what is in it.
    fn filling(&self, wanted: &Partition) -> Result<Option<(GpuInstance, Vec<ComputeInstance>)>, GpuError> {
        let living = self.instances(&wanted.gpu)?;
        let Some(instance) = living.into_iter().find(|i| wanted.is_filled_by(i)) else { return Ok(None) };
        match self.gpus.compute_instances(&wanted.gpu, instance.id) {
            Ok(inside) => Ok(Some((instance, inside))),
            Err(error) if is_gone(error.code) => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn remove(&self, wanted: &Partition, outcome: &Outcome) -> Result<(), StepError> {
        let gpu = &wanted.gpu;
        let (gi, own) = match outcome {
            Outcome::GpuInstance { gi } => (gi, None),
            Outcome::Partition { gi, ci, uuid } => (gi, Some((*ci, uuid))),
        };
        let read = |source| not_done(Cause::from_gpu("its state cannot be read", source));
        let Some((instance, inside)) = self.filling(wanted).map_err(read)? else { return Ok(()) };
        if instance.id != *gi {
            return Ok(());
        }
        let doomed: Vec<_> = match own {
            // Ours as a whole; so is what is in it.
            None => inside.iter().map(|c| c.id).collect(),
            // An earlier removal got half-way.
            Some(_) if inside.is_empty() => Vec::new(),
            Some((id, uuid)) if inside.iter().any(|c| c.id == id && c.uuid == *uuid) => vec![id],
            // Ours is gone; IDs are reused, UUIDs are not: this instance belongs to another owner.
            Some(_) => return Ok(()),
        };
        for id in doomed {
            gone(self.gpus.destroy_compute_instance(gpu, instance.id, id), "compute instance")?;
        }
        gone(self.gpus.destroy_gpu_instance(gpu, instance.id), "GPU instance")
    }
}

/// A removal that failed. What was gone already is a success.
fn gone(result: Result<(), GpuError>, what: &str) -> Result<(), StepError> {
    match result {
        Ok(()) => Ok(()),
        Err(error) if is_gone(error.code) => Ok(()),
        Err(error) if error.code == GpuErrorCode::IN_USE => {
            Err(not_done(Cause::from_gpu(format!("its {what} is still in use"), error)))
        }
        Err(error) => Err(failed(format!("its {what} could not be removed"), error)),
    }
}

fn not_done(cause: Cause) -> StepError {
    StepError::NotDone(cause)
}

fn failed(what: impl Into<String>, error: GpuError) -> StepError {
    let certain = nothing_happened(error.code);
    let cause = Cause::from_gpu(what, error);
    if certain { not_done(cause) } else { StepError::Unknown(cause) }
}

/// Codes with which a call certainly has changed nothing.
fn nothing_happened(code: GpuErrorCode) -> bool {
    [
        GpuErrorCode::INVALID_ARGUMENT,
        GpuErrorCode::INSUFFICIENT_RESOURCES,
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::NO_PERMISSION,
        GpuErrorCode::NOT_FOUND,
        GpuErrorCode::FUNCTION_NOT_FOUND,
        GpuErrorCode::LIBRARY_NOT_FOUND,
        GpuErrorCode::DRIVER_NOT_LOADED,
        GpuErrorCode::LIB_RM_VERSION_MISMATCH,
        GpuErrorCode::GPU_NOT_FOUND,
    ]
    .contains(&code)
}

/// Codes that say that no instance lives: none is there, MIG mode is off, the driver knows no such GPU (it was taken out,
/// or another board is in its place) or the module is unloaded (no instance outlives either). A GPU that is *lost* is
/// still the driver's: it may come back with all that was on it, unless it is reset.
fn is_gone(code: GpuErrorCode) -> bool {
    [
        GpuErrorCode::NOT_FOUND,
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::GPU_NOT_FOUND,
        GpuErrorCode::DRIVER_NOT_LOADED,
    ]
    .contains(&code)
}

fn named(instance: &GpuInstance) -> String {
    format!("GPU instance {} (profile {}, {})", instance.id.0, instance.profile, instance.placement)
}

fn removal(gpu: &GpuUuid, instance: &GpuInstance) -> String {
    let id = instance.id.0;
    format!("nvidia-smi mig -i {gpu} -gi {id} -dci && nvidia-smi mig -i {gpu} -gi {id} -dgi")
}

fn outcome_of(instance: &GpuInstance, inside: &[ComputeInstance]) -> Outcome {
    let gi = instance.id;
    match inside {
        [one] => Outcome::Partition { gi, ci: one.id, uuid: one.uuid.clone() },
        _ => Outcome::GpuInstance { gi },
    }
}

impl Steps for MigSteps {
    fn before(&self, wanted: &Partition) -> Result<Vec<GpuInstanceId>, StepError> {
        self.in_flight(&wanted.gpu)?;
        let read = |source| not_done(Cause::from_gpu("its state cannot be read", source));
        let living = self.instances(&wanted.gpu).map_err(read)?;
        Ok(living.iter().map(|instance| instance.id).collect())
    }

    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<(), StepError> {
        self.in_flight(gpu)?;
        self.set_mode(gpu, on)
    }

    fn set_compute_mode(&self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), StepError> {
        self.in_flight(gpu)?;
        self.gpus.set_compute_mode(gpu, to).map_err(|error| failed("the driver refused", error))
    }

    fn create(&self, wanted: &Partition, so_far: &mut dyn FnMut(Outcome)) -> Result<Outcome, StepError> {
        self.in_flight(&wanted.gpu)?;
        self.make(wanted, so_far)
    }

    /// An instance at our exact place whose id was not there before is ours. One that was there before is not: with it
    /// in the way ours cannot have been made.
    fn probe(&self, wanted: &Partition, before: &[GpuInstanceId]) -> Observed {
        if self.in_flight(&wanted.gpu).is_err() {
            return Observed::InFlight;
        }
        match self.filling(wanted) {
            Ok(Some((instance, inside))) if !before.contains(&instance.id) => {
                Observed::Ours(outcome_of(&instance, &inside))
            }
            Ok(_) => Observed::Absent,
            Err(error) => Observed::Uncertain(format!("its state cannot be read: {error}")),
        }
    }

    fn undo(&self, wanted: &Partition, outcome: &Outcome) -> Result<(), StepError> {
        self.in_flight(&wanted.gpu)?;
        self.remove(wanted, outcome)
    }

    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.gpus.mig_mode(gpu)
    }

    fn instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        match self.gpus.gpu_instances(gpu) {
            Err(error) if is_gone(error.code) => Ok(Vec::new()),
            other => other,
        }
    }

    fn living(&self, wanted: &Partition) -> Result<Option<Outcome>, GpuError> {
        Ok(self.filling(wanted)?.map(|(instance, inside)| outcome_of(&instance, &inside)))
    }
}
