//! MIG mode of a GPU.
//!
//! It follows from what a call makes and never from what is held: turning it off is left to the
//! next use that needs it off, and a round does not fight an administrator. A mode that we turned
//! on for partitions goes back in a round only, when nothing holds the GPU and no rule offers any.

use divvy_model::{GpuError, GpuUuid, Hold, MigMode, Target};

use crate::change::Change;
use crate::setting::{Changed, Want};

/// Reading of the mode.
pub(crate) type Seen = Result<MigMode, GpuError>;

/// Returns the mode that a hold needs. Instances of others come with a mode that others have set.
pub(crate) fn need(hold: &Hold) -> Option<bool> {
    match hold.target {
        Target::Gpu => Some(false),
        Target::Partition(_) => (!hold.theirs).then_some(true),
    }
}

/// Returns the mode that holds need.
pub(crate) fn want<'h>(mut holds: impl Iterator<Item = &'h Hold>) -> Want<bool> {
    holds.find_map(need).map_or(Want::Found, Want::To)
}

/// Returns what brings the mode to what is wanted.
pub(crate) fn change(
    note: Option<Changed<bool>>,
    seen: Option<&Seen>,
    want: Want<bool>,
) -> Option<Change> {
    let to = Changed::wanted(note, want)?;
    let is_so = match seen {
        Some(Ok(MigMode::Unsupported)) => !to,
        Some(Ok(mode)) => mode.is_on() == to,
        // The change says why it cannot be read.
        Some(Err(_)) | None => false,
    };
    (!is_so).then_some(Change::SetMigMode(to))
}

/// Returns the note in line with the hardware: giving `found` back would undo a change that an
/// administrator made after us.
pub(crate) fn corrected(note: Option<Changed<bool>>, seen: Option<&Seen>) -> Option<Changed<bool>> {
    note.filter(|note| !matches!(seen, Some(Ok(mode)) if mode.is_on() != note.ours))
}

/// Returns the mode as it is noted.
pub(crate) fn as_noted(note: Option<Changed<bool>>) -> Option<Seen> {
    note.map(|note| {
        Ok(MigMode::Supported {
            current: note.ours,
            pending: note.ours,
        })
    })
}

/// Returns the change in words.
pub(crate) fn in_words(on: bool, gpu: &GpuUuid) -> String {
    format!("turn MIG mode of {gpu} {}", if on { "on" } else { "off" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_board_without_mig_has_its_mode_off() {
        let seen = Ok(MigMode::Unsupported);
        for (on, expected) in [(false, None), (true, Some(Change::SetMigMode(true)))] {
            assert_eq!(change(None, Some(&seen), Want::To(on)), expected);
        }
    }

    /// A mode that cannot be read is not as wanted, and one that no claim needs is given back only
    /// where it is noted.
    #[test]
    fn a_mode_is_set_unless_it_certainly_is_so() {
        let mode = |on| {
            Ok(MigMode::Supported {
                current: on,
                pending: on,
            })
        };
        let note = Changed {
            found: false,
            ours: true,
            sure: true,
        };
        let set = |on| Some(Change::SetMigMode(on));
        for (note, seen, want, expected) in [
            (None, Some(mode(true)), Want::To(true), None),
            (None, Some(mode(false)), Want::To(true), set(true)),
            (None, None, Want::To(true), set(true)),
            (None, Some(mode(true)), Want::Found, None),
            (Some(note), Some(mode(true)), Want::Found, set(false)),
            (Some(note), Some(mode(false)), Want::Found, None),
        ] {
            assert_eq!(
                change(note, seen.as_ref(), want),
                expected,
                "{seen:?} {want:?}"
            );
        }
    }
}
