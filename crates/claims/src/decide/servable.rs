//! The check that the hardware can be brought to what devices need: MIG mode, compute mode, and
//! partitions of others.

use divvy_model::{ComputeMode, Gpu, MigMode, Target};

use super::{Snapshot, find, mps};
use crate::{Claim, GpuState, RecordedDevice, Refusal, Why};

/// Refuses devices that their GPUs cannot be brought to. `again` says that the claim was prepared
/// before, in this boot or an earlier one: MIG mode is then turned on for its partitions without a
/// grant, as it was allowed when they were allocated.
pub(crate) fn servable(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
    again: bool,
) -> Result<(), Refusal> {
    for device in devices.iter().filter(|device| device.sharing.holds()) {
        can_be_served(claim, device, seen, again).map_err(|why| why.about(claim, device))?;
    }
    Ok(())
}

fn can_be_served(
    claim: &Claim,
    device: &RecordedDevice,
    seen: &Snapshot<'_>,
    again: bool,
) -> Result<(), Why> {
    let gpu = find(&device.gpu, seen)?;
    // Before the modes: the other driver's claim may have set them, and the refusal for a held GPU
    // is the one that passes when that claim ends.
    if let Some(driver) = seen.other_drivers.get(&device.gpu) {
        return Err(Why::OtherDriver(driver.clone()));
    }
    mig_mode(device, gpu, seen, again)?;
    caps_if_promised(device, seen)?;
    mps::servable(claim, device, gpu, seen)?;
    lives_if_theirs(device, seen)?;
    // An administrator sets this mode so that nothing computes there.
    if gpu.facts.compute_mode == Some(ComputeMode::Prohibited) {
        return Err(Why::ComputeProhibited);
    }
    Ok(())
}

/// Refuses a share whose memory was promised to be capped, on a node that fell below that.
fn caps_if_promised(device: &RecordedDevice, seen: &Snapshot<'_>) -> Result<(), Why> {
    match (device.memory_cap, seen.memory_caps().lack()) {
        (Some(_), Some(lack)) => Err(Why::CapLost(lack)),
        _ => Ok(()),
    }
}

fn mig_mode(
    device: &RecordedDevice,
    gpu: &Gpu,
    seen: &Snapshot<'_>,
    again: bool,
) -> Result<(), Why> {
    // The mode that was read under the lock counts. The inventory may be a minute old, and the
    // claim that turned the mode may have been prepared since.
    let read = seen
        .hardware
        .get(&device.gpu)
        .and_then(|gpu| gpu.mig.clone());
    let mode = read
        .unwrap_or(Ok(gpu.facts.mig_mode))
        .map_err(Why::GpuUnreadable)?;
    let on = matches!(device.target, Target::Partition(_));
    if mode == MigMode::Unsupported || mode.is_on() == on {
        return Ok(());
    }
    let state = seen.state(&device.gpu);
    // The administrator who makes the instances sets the mode too.
    if !device.theirs && state.is_some_and(|state| may_set_mig(state, gpu, on, again)) {
        return Ok(());
    }
    Err(Why::MigMode { on: mode.is_on() })
}

/// Returns true if MIG mode of a GPU may be brought to `on` for a claim: policies grant it and no
/// reset is needed, or it is a mode that we have changed, or the claim had it before (`again`). No
/// other rule permits or refuses it.
fn may_set_mig(state: &GpuState, gpu: &Gpu, on: bool, again: bool) -> bool {
    // By a policy, if the change takes effect at once; as the way back from a mode that we set; or
    // on, without a grant, for partitions that were allocated while it was granted.
    let granted = state.grant.may_change_mode && gpu.facts.architecture.toggles_mig_without_reset();
    granted || state.mig.is_some_and(|mig| mig.ours != on) || (again && on)
}

/// Refuses a partition that an administrator has made and that does not live: this driver makes
/// none in its place.
fn lives_if_theirs(device: &RecordedDevice, seen: &Snapshot<'_>) -> Result<(), Why> {
    let Some(place) = device.target.place().filter(|_| device.theirs) else {
        return Ok(());
    };
    match seen.filling(&device.gpu, place) {
        Some(Err(error)) => Err(Why::GpuUnreadable(error.clone())),
        Some(Ok(Some(living))) if living.as_partition().is_some() => Ok(()),
        Some(Ok(_)) | None => Err(Why::NoStaticPartition),
    }
}
