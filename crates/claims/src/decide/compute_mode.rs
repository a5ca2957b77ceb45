//! Compute mode: a property of a GPU that others set, and that keeps containers from it.

use divvy_model::{ComputeMode, HoldKind};

use super::Snapshot;
use crate::{Claim, RecordedDevice, Refusal};

/// The devices, unless the compute mode of a GPU keeps processes from one: `PROHIBITED` all, `EXCLUSIVE_PROCESS` (which
/// an MPS daemon leaves behind) all but one, so that a share would run and fail the others. An unknown mode refuses
/// nothing, and neither does admin access.
pub(super) fn computable(
    claim: &Claim,
    devices: Vec<RecordedDevice>,
    seen: &Snapshot<'_>,
) -> Result<Vec<RecordedDevice>, Refusal> {
    for device in &devices {
        let mode = seen.inventory.and_then(|i| i.gpus.get(&device.gpu)?.facts.compute_mode);
        let (Some(mode), true) = (mode, device.kind.needs().is_some()) else { continue };
        let refused = match mode {
            ComputeMode::Default => false,
            ComputeMode::ExclusiveProcess => device.kind == HoldKind::Share,
            ComputeMode::Prohibited => true,
        };
        if refused {
            let (claim, gpu) = (claim.reference(), device.gpu.clone());
            return Err(Refusal::ComputeMode { claim, device: device.allocated.device.clone(), gpu, mode });
        }
    }
    Ok(devices)
}
