//! MIG mode and instances.

use divvy_gpu::{Cause, ChangeError, Life, Made, Retry};
use divvy_model::mig::GpuInstance;
use divvy_model::{GpuError, GpuErrorCode, GpuUuid, MigActivation, MigMode, Place};

use super::{Hardware, failed, is_gone, not_done, nothing_happened};

impl Hardware<'_> {
    /// Turns MIG mode on or off.
    pub fn set_mig_mode(self, gpu: &GpuUuid, on: bool) -> Result<(), ChangeError> {
        self.nothing_in_flight(gpu)?;
        let to = if on { "on" } else { "off" };
        let read = |source| not_done(Cause::from_gpu("MIG mode cannot be read", source));
        if self.mig_mode(gpu).map_err(read)?.is_on() == on {
            return Ok(());
        }
        if !on {
            self.no_instance_lives(gpu)?;
        }
        // The driver refuses with IN_USE while any program has the GPU open. On Ampere the mode
        // only becomes pending until a reset.
        let set = self.gpus.set_mig_mode(gpu, on);
        // The answer proves nothing: success can hide that the mode is only pending.
        let now = self.mig_mode(gpu);
        if now.as_ref().is_ok_and(|mode| mode.is_on() == on) {
            return Ok(());
        }
        let error = match set {
            Ok(MigActivation::Pending(GpuErrorCode::RESET_REQUIRED)) => {
                not_done(Cause::new(format!(
                    "MIG mode of {gpu} changes only with a GPU reset, which needs an empty node (docs/maintenance.md)"
                )))
            }
            // It may have worked all the same.
            Ok(MigActivation::Active | MigActivation::Pending(_)) if now.is_err() => {
                let what = format!("MIG mode of {gpu} may be {to}, but cannot be read");
                ChangeError::Unknown(Cause::new(what).passing())
            }
            Ok(MigActivation::Active | MigActivation::Pending(_)) => {
                not_done(self.in_use(gpu, to, None))
            }
            Err(error) if error.code == GpuErrorCode::IN_USE && now.is_ok() => {
                not_done(self.in_use(gpu, to, Some(error)))
            }
            Err(error) if nothing_happened(error.code) => not_done(Cause::from_gpu(
                format!("MIG mode of {gpu} cannot be turned {to}"),
                error,
            )),
            Err(error) => ChangeError::Unknown(Cause::from_gpu(
                format!("MIG mode of {gpu} may not be {to}"),
                error,
            )),
        };
        // Cancel the pending mode; otherwise it takes effect at the next reset, for an unrelated
        // workload.
        if matches!(error, ChangeError::NotDone(_))
            && matches!(now, Ok(MigMode::Supported { pending, .. }) if pending == on)
        {
            drop(self.gpus.set_mig_mode(gpu, !on));
        }
        Err(error)
    }

    fn no_instance_lives(self, gpu: &GpuUuid) -> Result<(), ChangeError> {
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

    /// Returns the error of a change that is refused because the GPU is in use, with its users as
    /// far as they can be listed: NVML lists processes that compute, but not those that only
    /// monitor.
    fn in_use(self, gpu: &GpuUuid, to: &str, source: Option<GpuError>) -> Cause {
        let by = match self.gpus.processes(gpu) {
            Ok(found) if found.is_empty() => {
                "no process computes on it, so a process has it open (such as DCGM or its exporter, nvidia-persistenced, nvidia-smi, or a device plugin)".to_owned()
            }
            Ok(found) => {
                let pids: Vec<_> = found.iter().map(|p| p.pid.to_string()).collect();
                format!("process {}", pids.join(", "))
            }
            Err(error) => format!(
                "the processes on it cannot be listed ({error}; see `nvidia-smi -i {gpu}` on the node)"
            ),
        };
        Cause {
            what: format!("MIG mode of {gpu} cannot be turned {to} while the GPU is in use: {by}"),
            source,
            retry: Retry::Soon,
        }
    }

    /// Makes a GPU instance, and in it a compute instance that takes it whole. The caller has seen
    /// that nothing fills the place, and finds out what an error left there.
    pub fn create(self, gpu: &GpuUuid, place: Place) -> Result<Made, ChangeError> {
        // Beside a call that has not returned its outcome could not be distinguished from that of
        // this one.
        self.nothing_in_flight(gpu)?;
        let made = self
            .gpus
            .create_gpu_instance(gpu, place.profile, place.placement)
            .map_err(|error| self.not_created(gpu, place, error))?;
        let gi = made.id;
        let failed = |what: &'static str| {
            move |error: GpuError| failed(format!("{what} in GPU instance {}", gi.0), error)
        };
        // Then the compute instance that takes it whole.
        // An error from here on leaves a GPU instance without one, which the caller's probe finds
        // as a half.
        let capabilities = self
            .gpus
            .mig_capabilities(gpu)
            .map_err(failed("profiles cannot be read"))?;
        let offered = self
            .gpus
            .compute_profiles(gpu, gi)
            .map_err(failed("profiles cannot be read"))?;
        let whole = capabilities
            .profile(place.profile)
            .and_then(|profile| profile.whole_compute_profile(&offered))
            .ok_or_else(|| {
                not_done(Cause::new(format!(
                    "no compute instance takes all of GPU instance {}",
                    gi.0
                )))
            })?;
        let compute = self
            .gpus
            .create_compute_instance(gpu, gi, whole.id)
            .map_err(failed("failed to create a compute instance"))?;
        Ok(Made {
            gi,
            ci: compute.id,
            uuid: compute.uuid,
        })
    }

    /// Returns the error of a GPU instance that was not made, with what is in its way as far as
    /// that can be listed.
    fn not_created(self, gpu: &GpuUuid, place: Place, error: GpuError) -> ChangeError {
        let at = place.placement;
        match error.code {
            GpuErrorCode::INSUFFICIENT_RESOURCES => {
                let living = self.instances(gpu);
                let overlapping = living
                    .as_ref()
                    .map(|all| all.iter().find(|i| i.placement.overlaps(at)));
                not_done(match overlapping {
                    Ok(Some(other)) => Cause::from_gpu(
                        format!(
                            "{} overlaps {at} on {gpu}; this driver did not create it and does not change it (if it is not needed, remove it: `{}`)",
                            named(other),
                            removal(gpu, other)
                        ),
                        error,
                    ),
                    // Engines that a neighbour has, or memory that a process is still giving back.
                    Ok(None) => Cause::from_gpu(
                        format!("{at} is free on {gpu}, but another resource is exhausted"),
                        error,
                    )
                    .passing(),
                    Err(unread) => Cause::from_gpu(
                        format!(
                            "the driver makes no GPU instance at {at} on {gpu}, and the instances that may be in its way cannot be listed ({unread})"
                        ),
                        error,
                    )
                    .passing(),
                })
            }
            GpuErrorCode::IN_USE => {
                let cause = self.in_use(gpu, "into partitions", Some(error));
                ChangeError::Unknown(cause)
            }
            _ => failed(
                format!("failed to create a GPU instance at {at} on {gpu}"),
                error,
            ),
        }
    }

    /// Returns the error for a place that another owner's instance fills.
    pub(crate) fn occupied(gpu: &GpuUuid, instance: &GpuInstance) -> ChangeError {
        not_done(Cause::new(format!(
            "{} is in its place on {gpu}; this driver did not create it and does not change it (if it is not needed, remove it: `{}`)",
            named(instance),
            removal(gpu, instance)
        )))
    }

    /// Removes an instance of ours, as far as it was made. An instance that is already gone is a
    /// success: a crash may have cut a removal short. An instance with a compute instance that is
    /// not ours belongs to another owner, to whom the driver gave the id again, and is left alone.
    pub fn remove(self, gpu: &GpuUuid, place: Place, life: &Life) -> Result<(), ChangeError> {
        self.nothing_in_flight(gpu)?;
        let read = |source| not_done(Cause::from_gpu("its state cannot be read", source));
        let Some(living) = self.filling(gpu, place).map_err(read)? else {
            return Ok(());
        };
        let (gi, inside) = (living.instance.id, &living.inside);
        // Find what is ours of it.
        let own = match life {
            Life::Half { gi: noted } if *noted == gi && inside.is_empty() => None,
            Life::Whole(made) if made.gi == gi => {
                let own = inside
                    .iter()
                    .find(|c| c.id == made.ci && c.uuid == made.uuid);
                if own.is_none() && !inside.is_empty() {
                    return Ok(());
                }
                own
            }
            // Another id, or none noted: NVML gives ids out again, so the instance may be another
            // owner's. It is not touched.
            Life::Begun | Life::Half { .. } | Life::Whole(_) => return Ok(()),
        };
        // From the inside out: an instance with one in it cannot be destroyed.
        if let Some(own) = own {
            let removed = self.gpus.destroy_compute_instance(gpu, gi, own.id);
            gone(removed, "compute instance")?;
        }
        let Err(error) = self.gpus.destroy_gpu_instance(gpu, gi) else {
            return Ok(());
        };
        // An answer that it is gone already is odd while it is listed.
        if is_gone(error.code)
            && self
                .instances(gpu)
                .map_err(read)?
                .contains(&living.instance)
        {
            let cause = Cause::from_gpu("its GPU instance is still there", error);
            return Err(not_done(cause.passing()));
        }
        gone(Err(error), "GPU instance")
    }
}

/// Returns the error of a removal that failed. A thing that was gone already is a success.
fn gone(result: Result<(), GpuError>, what: &str) -> Result<(), ChangeError> {
    match result {
        Ok(()) => Ok(()),
        Err(error) if is_gone(error.code) => Ok(()),
        Err(error) if error.code == GpuErrorCode::IN_USE => Err(not_done(Cause::from_gpu(
            format!("its {what} is still in use"),
            error,
        ))),
        Err(error) => Err(failed(format!("its {what} could not be removed"), error)),
    }
}

fn named(instance: &GpuInstance) -> String {
    format!(
        "GPU instance {} (profile {}, {})",
        instance.id.0, instance.profile, instance.placement
    )
}

fn removal(gpu: &GpuUuid, instance: &GpuInstance) -> String {
    let id = instance.id.0;
    format!("nvidia-smi mig -i {gpu} -gi {id} -dci && nvidia-smi mig -i {gpu} -gi {id} -dgi")
}
