//! Time slice of a GPU: of the claim that has it whole, or of the policy while claims have shares
//! of it. NVML cannot read it back, so that it is set again where it may not be in force any more.

use divvy_model::{GpuUuid, Hold, Sharing, Target, TimeSlice};

use crate::change::Change;
use crate::holds::{Since, Standing, Use};
use crate::setting::{Changed, Moment, Want};

/// Returns the slice that a hold needs; `of_shares` is that of the policy.
pub(crate) fn need(hold: &Hold, of_shares: Option<TimeSlice>) -> Option<TimeSlice> {
    match (hold.target, hold.sharing) {
        (Target::Gpu, Sharing::Exclusive) => hold.time_slice,
        (Target::Gpu, Sharing::TimeSliced) => of_shares,
        (Target::Gpu, Sharing::Mps | Sharing::Admin) | (Target::Partition(_), _) => None,
    }
}

/// Returns the slice that holds need.
pub(crate) fn want<'h>(
    mut holds: impl Iterator<Item = &'h Hold>,
    of_shares: Option<TimeSlice>,
) -> Want<TimeSlice> {
    let needed = holds.find_map(|hold| need(hold, of_shares));
    needed.map_or(Want::Found, Want::To)
}

/// Returns what brings the slice to what is wanted. `seen` is the slice that certainly is in force.
pub(crate) fn change(
    note: Option<Changed<TimeSlice>>,
    seen: Option<TimeSlice>,
    want: Want<TimeSlice>,
) -> Option<Change> {
    match want {
        Want::To(to) => (seen != Some(to)).then_some(Change::SetTimeSlice(to)),
        // What was found is set even if it may be in force already.
        Want::Found => Some(Change::SetTimeSlice(note?.found)),
    }
}

/// Returns the slice as it is noted, if it is certain.
pub(crate) fn as_noted(note: Option<Changed<TimeSlice>>) -> Option<TimeSlice> {
    note.filter(|note| note.sure).map(|note| note.ours)
}

/// Returns the slice that certainly is in force. A round does not doubt what was set; a claim that
/// gets something has it set anew unless another prepared claim of this boot has asked for the
/// same: without one, the driver may have been loaded anew since it was set.
pub(crate) fn in_force(
    note: Option<Changed<TimeSlice>>,
    gets: &[Use],
    others: &[Use],
) -> Option<TimeSlice> {
    let noted = as_noted(note)?;
    // A claim in any other phase, or of another boot, may be older than the slice.
    let vouches = |other: &Use| {
        other.standing == Standing::Prepared
            && other.since == Since::ThisBoot
            && other.hold.time_slice == Some(noted)
    };
    (gets.is_empty() || others.iter().any(vouches)).then_some(noted)
}

/// Returns the note at a moment of a change. Unlike that of a mode it stays, also of a slice that
/// is the one that was found, so that it is known to be set. A slice that is not known to be set,
/// since the call was cut short or failed, is set again: setting it twice does no harm.
pub(crate) fn noted(
    note: Option<Changed<TimeSlice>>,
    now: TimeSlice,
    to: TimeSlice,
    at: Moment,
) -> Changed<TimeSlice> {
    Changed {
        found: note.map_or(now, |slice| slice.found),
        ours: to,
        sure: at == Moment::Done,
    }
}

/// Returns the note at a moment of giving the slice back. If the call is cut short, the note still
/// names ours, and the next round gives it back again, or sets it again for a claim whose release
/// was cut short with it.
pub(crate) fn given_back(
    note: Option<Changed<TimeSlice>>,
    at: Moment,
) -> Option<Changed<TimeSlice>> {
    match at {
        Moment::Before | Moment::Unknown => Changed::unsure(note),
        Moment::Done => None,
    }
}

/// Returns the change in words.
pub(crate) fn in_words(to: TimeSlice, gpu: &GpuUuid) -> String {
    format!("set the time slice of {gpu} to {to}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slice_is_set_unless_it_certainly_is_in_force() {
        let (found, ours) = (TimeSlice::Default, TimeSlice::Long);
        let note = Changed {
            found,
            ours,
            sure: true,
        };
        let set = |to| Some(Change::SetTimeSlice(to));
        for (note, seen, want, expected) in [
            (None, None, Want::To(ours), set(ours)),
            (Some(note), Some(ours), Want::To(ours), None),
            (Some(note), None, Want::To(ours), set(ours)),
            (Some(note), Some(ours), Want::Found, set(found)),
            (None, None, Want::Found, None),
        ] {
            assert_eq!(change(note, seen, want), expected, "{seen:?} {want:?}");
        }
        assert_eq!(as_noted(Some(note)), Some(ours));
        assert_eq!(as_noted(Changed::unsure(Some(note))), None);
    }
}
