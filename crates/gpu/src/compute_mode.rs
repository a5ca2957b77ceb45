//! Compute mode of a GPU: of the whole GPU alone, since in MIG mode programs of other partitions
//! run beside.
//!
//! A claim that is added decides; a hold that stays keeps the mode even if it was changed behind
//! our back, unless a server is started for it: reconcile does not fight an administrator.

use divvy_model::{ComputeMode, GpuError, GpuUuid, Hold, Sharing, Target};

use crate::change::Change;
use crate::setting::{Changed, Want};

/// Reading of the mode.
pub(crate) type Seen = Result<ComputeMode, GpuError>;

/// Returns the mode that a hold needs: more than one process computes where shares are, and one
/// server alone where MPS is.
pub(crate) fn need(hold: &Hold) -> Option<ComputeMode> {
    match (hold.target, hold.sharing) {
        (Target::Gpu, _) if hold.mps.is_some() => Some(ComputeMode::ExclusiveProcess),
        (Target::Gpu, Sharing::TimeSliced) => Some(ComputeMode::Default),
        _ => None,
    }
}

/// Returns the mode that holds need.
pub(crate) fn want<'h>(mut holds: impl Iterator<Item = &'h Hold>) -> Want<ComputeMode> {
    holds.find_map(need).map_or(Want::Found, Want::To)
}

/// Returns what brings the mode to what is wanted.
pub(crate) fn change(
    note: Option<Changed<ComputeMode>>,
    seen: Option<&Seen>,
    want: Want<ComputeMode>,
) -> Option<Change> {
    // Where the driver does not report compute mode, it is left as it is.
    let now = seen?;
    let to = Changed::wanted(note, want)?;
    // The change says why it cannot be read.
    let is_so = now.as_ref().is_ok_and(|now| *now == to);
    (!is_so).then_some(Change::SetComputeMode(to))
}

/// Returns the note in line with the hardware.
pub(crate) fn corrected(
    note: Option<Changed<ComputeMode>>,
    seen: Option<&Seen>,
) -> Option<Changed<ComputeMode>> {
    note.filter(|note| !matches!(seen, Some(Ok(now)) if *now != note.ours))
}

/// Returns the mode as it is noted.
pub(crate) fn as_noted(note: Option<Changed<ComputeMode>>) -> Option<Seen> {
    note.map(|note| Ok(note.ours))
}

/// Returns the change in words.
pub(crate) fn in_words(to: ComputeMode, gpu: &GpuUuid) -> String {
    format!("set compute mode of {gpu} to {to}")
}

#[cfg(test)]
mod tests {
    use divvy_model::{GpuErrorCode, GpuOp};

    use super::*;

    #[test]
    fn a_mode_that_is_not_reported_is_left_and_one_that_is_not_read_is_set() {
        let (default, exclusive) = (ComputeMode::Default, ComputeMode::ExclusiveProcess);
        let note = Changed {
            found: exclusive,
            ours: default,
            sure: true,
        };
        let error = GpuError::global(GpuOp::SetComputeMode, GpuErrorCode::UNKNOWN);
        let set = |to| Some(Change::SetComputeMode(to));
        for (note, seen, want, expected) in [
            (None, None, Want::To(exclusive), None),
            (None, Some(Err(error)), Want::To(exclusive), set(exclusive)),
            (None, Some(Ok(default)), Want::To(exclusive), set(exclusive)),
            (None, Some(Ok(default)), Want::To(default), None),
            (Some(note), Some(Ok(default)), Want::Found, set(exclusive)),
            (None, Some(Ok(default)), Want::Found, None),
        ] {
            assert_eq!(
                change(note, seen.as_ref(), want),
                expected,
                "{seen:?} {want:?}"
            );
        }
    }
}
