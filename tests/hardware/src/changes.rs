//! `--allow mig` and `--allow time-slice`: what divvy does to a GPU, done and undone by hand.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use divvy_host::{Driver, Smi};
use divvy_model::mig::{GpuInstanceProfile, MigCapabilities};
use divvy_model::{GpuDriver, GpuFacts, GpuUuid, MigActivation, MigMode, TimeSlice};

use crate::report::{Check, Outcome, Report};

/// So long may `nvidia-smi compute-policy` take.
const WITHIN: Duration = Duration::from_secs(30);

/// Why MIG cannot be tried on a GPU, if it cannot.
pub(crate) fn why_no_mig(facts: &GpuFacts) -> Option<String> {
    let name = &facts.product_name;
    match facts.mig_mode {
        MigMode::Unsupported => Some(format!("{name} does no MIG")),
        MigMode::Supported { current: true, .. } => {
            Some("MIG mode is on, and something may count on it".to_owned())
        }
        MigMode::Supported { .. } if !facts.architecture.toggles_mig_without_reset() => {
            Some(format!("MIG mode of {name} changes with a reset only"))
        }
        MigMode::Supported { .. } => None,
    }
}

/// MIG mode on, one partition of each profile, MIG mode off. The GPU must be idle and its MIG mode
/// off.
pub(crate) fn mig(report: &mut Report, driver: &dyn GpuDriver, gpu: &GpuUuid) {
    let on = set_mode(driver, gpu, true);
    if on.is_ok() {
        report.note(Check::Partitions, Outcome::from(partitions(driver, gpu)));
    }
    // Also if switching it on has failed: a change may be pending.
    let off = set_mode(driver, gpu, false);
    let both = on
        .and(off)
        .map(|()| Outcome::Ok("on and off again, without a reset".to_owned()));
    report.note(Check::MigMode, Outcome::from(both));
    report.not_tried(&[Check::Partitions], "MIG mode could not be switched on");
}

/// Sets MIG mode and does not believe it until it is read back.
pub(crate) fn set_mode(driver: &dyn GpuDriver, gpu: &GpuUuid, on: bool) -> Result<()> {
    let became = driver.set_mig_mode(gpu, on)?;
    ensure!(became == MigActivation::Active, "MIG mode {on}: {became:?}");
    let mode = driver.mig_mode(gpu)?;
    ensure!(
        mode == MigMode::Supported {
            current: on,
            pending: on
        },
        "MIG mode was set to {on}, and is {mode:?}"
    );
    Ok(())
}

fn partitions(driver: &dyn GpuDriver, gpu: &GpuUuid) -> Result<Outcome> {
    let capabilities = driver.mig_capabilities(gpu)?;
    let mut problems = Vec::new();
    let mut names = Vec::new();
    for profile in capabilities.profiles() {
        let name = name(&capabilities, profile);
        match partition(driver, gpu, profile) {
            Ok(()) => names.push(name),
            Err(error) => problems.push(format!("{name}: {error:#}")),
        }
    }
    Ok(Outcome::of(
        &problems,
        format!("made and destroyed: {}", names.join(", ")),
    ))
}

fn name(capabilities: &MigCapabilities, profile: &GpuInstanceProfile) -> String {
    capabilities.name(profile).map_or_else(
        || format!("profile {}", profile.id),
        |name| name.to_string(),
    )
}

/// Follows a partition that takes all of its GPU instance from its creation to its end.
fn partition(driver: &dyn GpuDriver, gpu: &GpuUuid, profile: &GpuInstanceProfile) -> Result<()> {
    let at = *profile.placements.first().context("it has no placement")?;
    let made = driver.create_gpu_instance(gpu, profile.id, at)?;
    let inside = || -> Result<()> {
        ensure!(
            made.placement == at,
            "asked for {at}, got {}",
            made.placement
        );
        let offered = driver.compute_profiles(gpu, made.id)?;
        let whole = profile
            .whole_compute_profile(&offered)
            .context("no compute instance takes all of it")?;
        let compute = driver.create_compute_instance(gpu, made.id, whole.id)?;
        let listed = driver.compute_instances(gpu, made.id)?;
        driver.destroy_compute_instance(gpu, made.id, compute.id)?;
        ensure!(
            listed == [compute],
            "its compute instance is listed as {listed:?}"
        );
        Ok(())
    };
    let seen = inside();
    driver.destroy_gpu_instance(gpu, made.id)?;
    let left = driver.gpu_instances(gpu)?;
    ensure!(
        !left.iter().any(|instance| instance.id == made.id),
        "it is listed after its end"
    );
    seen
}

/// Sets each time slice, reads it back, and sets the one that was found.
pub(crate) fn time_slices(smi: &Smi, driver: &Driver, gpu: &GpuUuid) -> Result<Outcome> {
    let Some(found) = smi.time_slice(driver, gpu, WITHIN)? else {
        return Ok(Outcome::Failed(
            "the one that is set cannot be read, so it could not be set again".to_owned(),
        ));
    };
    let mut problems = Vec::new();
    for slice in TimeSlice::ALL {
        let set = smi.set_time_slice(driver, gpu, slice, WITHIN);
        match set.and_then(|()| smi.time_slice(driver, gpu, WITHIN)) {
            Ok(Some(read)) if read == slice => {}
            Ok(read) => problems.push(format!("{} was set, {read:?} is read", slice.name())),
            Err(error) => problems.push(format!(
                "{}: {:#}",
                slice.name(),
                anyhow::Error::from(error)
            )),
        }
    }
    smi.set_time_slice(driver, gpu, found, WITHIN)
        .context("the one that was found cannot be set again")?;
    Ok(Outcome::of(
        &problems,
        format!("each can be set; {} is set again", found.name()),
    ))
}

/// The time slice that is set.
pub(crate) fn time_slice(smi: &Smi, driver: &Driver, gpu: &GpuUuid) -> Result<Outcome> {
    Ok(match smi.time_slice(driver, gpu, WITHIN)? {
        Some(slice) => Outcome::Ok(format!("{} of {gpu}", slice.name())),
        None => Outcome::Failed(
            "what nvidia-smi compute-policy --list says is not understood".to_owned(),
        ),
    })
}

#[cfg(test)]
mod tests {
    use divvy_gpu_sim::{Fault, SimNode};
    use divvy_model::{GpuErrorCode, GpuOp};

    use super::*;

    fn left(node: &SimNode, gpu: &GpuUuid) -> MigMode {
        node.clear_faults();
        node.mig_mode(gpu).unwrap()
    }

    #[test]
    fn mig_is_tried_only_where_it_can_be_undone() {
        let facts = |spec: &str| {
            SimNode::parse(spec)
                .unwrap()
                .inventory()
                .gpus
                .into_values()
                .next()
                .unwrap()
                .facts
        };
        assert_eq!(why_no_mig(&facts("h100x1")), None);
        assert!(why_no_mig(&facts("l4x1")).unwrap().ends_with("does no MIG"));
        assert!(
            why_no_mig(&facts("a100-40x1"))
                .unwrap()
                .ends_with("changes with a reset only")
        );
        let on = GpuFacts {
            mig_mode: MigMode::Supported {
                current: true,
                pending: true,
            },
            ..facts("h100x1")
        };
        assert!(why_no_mig(&on).unwrap().starts_with("MIG mode is on"));
    }

    #[test]
    fn every_partition_is_made_and_the_gpu_is_left_as_it_was_whatever_fails() {
        let off = MigMode::Supported {
            current: false,
            pending: false,
        };
        let node = SimNode::parse("h100x1").unwrap();
        let gpu = node.uuids().remove(0);
        let mut report = Report::new(true);
        mig(&mut report, &node, &gpu);
        assert!(report.is_well());
        assert_eq!(left(&node, &gpu), off);

        for op in [
            GpuOp::CreateGpuInstance,
            GpuOp::CreateComputeInstance,
            GpuOp::ComputeProfiles,
        ] {
            node.fault(Fault::fail(GpuErrorCode::UNKNOWN).of(op).after(2).times(1));
            let mut report = Report::new(true);
            mig(&mut report, &node, &gpu);
            assert!(!report.is_well(), "{op:?}");
            assert_eq!(left(&node, &gpu), off, "{op:?}");
        }

        node.edit(|e| {
            e.gpu(&gpu)
                .unwrap()
                .clients
                .insert("nv-hostengine".to_owned())
        });
        let mut report = Report::new(true);
        mig(&mut report, &node, &gpu);
        assert!(!report.is_well(), "something holds the GPU");
        assert_eq!(left(&node, &gpu), off, "and nothing is left pending");
    }
}
