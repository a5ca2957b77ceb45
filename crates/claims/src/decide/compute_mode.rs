//! Compute mode: a property of a GPU that others set, and that keeps containers from it.

use divvy_model::{ComputeMode, HoldKind};

use super::Snapshot;
use crate::{Claim, RecordedDevice, Refusal, Why};

/// The compute mode of a GPU keeps processes from it: `PROHIBITED` all, `EXCLUSIVE_PROCESS` (which an MPS daemon leaves
/// behind) all but one, so that a share would run and fail the others. An unknown mode refuses nothing, and neither does
/// admin access.
pub(super) fn computable(
    claim: &Claim,
    devices: &[RecordedDevice],
    seen: &Snapshot<'_>,
) -> Result<(), Refusal> {
    for device in devices.iter().filter(|device| device.kind.needs().is_some()) {
        let mode = seen.inventory.and_then(|i| i.gpus.get(&device.gpu)?.facts.compute_mode);
        let refused = match mode {
            None | Some(ComputeMode::Default) => false,
            Some(ComputeMode::ExclusiveProcess) => device.kind == HoldKind::Share,
            Some(ComputeMode::Prohibited) => true,
        };
        if let (Some(mode), true) = (mode, refused) {
            return Err(Why::ComputeMode(mode).about(claim, device));
        }
    }
    Ok(())
}
