//! Compute mode: a property of a GPU that others set, and that keeps containers from it.

use divvy_model::{ComputeMode, HoldKind};

use super::Snapshot;
use crate::{RecordedDevice, Why};

/// The compute mode that the device's GPU is to be brought to. An administrator sets `PROHIBITED` so that
/// nothing computes there. `EXCLUSIVE_PROCESS`, which an MPS daemon leaves behind, is one process at a time: shares need
/// `DEFAULT`.
pub(super) fn compute_mode_to_set(
    wanted: &RecordedDevice,
    seen: &Snapshot<'_>,
) -> Result<Option<ComputeMode>, Why> {
    let mode = seen.inventory.as_ref().and_then(|i| i.gpus.get(&wanted.gpu)?.facts.compute_mode);
    match mode {
        None | Some(ComputeMode::Default) => Ok(None),
        Some(ComputeMode::ExclusiveProcess) => {
            Ok((wanted.kind == HoldKind::Share).then_some(ComputeMode::Default))
        }
        Some(ComputeMode::Prohibited) => Err(Why::ComputeProhibited),
    }
}
