//! The mode of a GPU: what it is used for now.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Burst, Form, MpsServer, ShareUnit};

/// The state of a GPU. Decided by the first hold that lands, freed by the last (the mode lock).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// No claim holds it.
    Idle,
    /// A claim holds the whole GPU.
    Whole,
    /// Claims hold partitions.
    Partitioned,
    /// Claims hold time-sliced shares.
    TimeSliced,
    /// Claims hold MPS shares.
    Mps,
}

impl Mode {
    /// All modes, those in use first.
    pub const ALL: [Self; 5] = [
        Self::Whole,
        Self::Partitioned,
        Self::TimeSliced,
        Self::Mps,
        Self::Idle,
    ];

    /// Returns the mode of a GPU that is held in these ways. Any of them says it: holds of two
    /// modes exclude each other.
    pub fn of(held: impl IntoIterator<Item = Form>) -> Self {
        held.into_iter().find_map(Form::mode).unwrap_or(Self::Idle)
    }

    /// The mode as people read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Whole => "whole",
            Self::Partitioned => "partitioned",
            Self::TimeSliced => "time-sliced",
            Self::Mps => "mps",
        }
    }
}

/// The length of the time for which the contexts of a time-shared GPU run in turn, as `nvidia-smi
/// compute-policy` counts it. The lengths themselves are the driver's secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeSlice {
    /// The driver's choice.
    Default,
    /// Short: others come soon.
    Short,
    /// In between.
    Medium,
    /// Long: fewer switches.
    Long,
}

impl TimeSlice {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Default, Self::Short, Self::Medium, Self::Long];

    /// The number that `nvidia-smi compute-policy --set-timeslice` takes.
    pub fn number(self) -> u32 {
        match self {
            Self::Default => 0,
            Self::Short => 1,
            Self::Medium => 2,
            Self::Long => 3,
        }
    }

    /// Returns it as people write and read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "Default",
            Self::Short => "Short",
            Self::Medium => "Medium",
            Self::Long => "Long",
        }
    }

    /// Reads a name back.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|slice| slice.name() == name)
    }
}

impl fmt::Display for TimeSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Changes of a GPU that prepare may make: the node's policies say so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Grant {
    /// Permission to change the MIG mode where that needs no reset. `None`: as granted before.
    pub may_change_mode: Option<bool>,
    /// True if a rule offers partitions of the GPU: while none does, a MIG mode that divvy turned
    /// on is given back once nothing is held. `None`: as granted before.
    pub offers_partitions: Option<bool>,
    /// The time slice of the GPU while claims have shares of it. `None`: none is set.
    pub share_time_slice: Option<TimeSlice>,
    /// The unit in which shares of the GPU are published. `None`: there are none.
    pub share_unit: Option<ShareUnit>,
    /// The memory in MiB that shares do not get: shares by percent are parts of the rest.
    pub share_reserved_mib: u64,
    /// The factor by which the memory limit of a share may be above its request.
    pub share_burst: Burst,
    /// The MPS server of the GPU while claims have MPS shares of it. `None`: as granted before.
    pub mps: Option<MpsServer>,
    /// The number of equal slots of a partition while claims have MPS shares of it. `None`: as
    /// granted before.
    pub mps_slots_in_partitions: Option<u32>,
    /// True if an MPS server that is wedged is started anew also while it has clients.
    pub restarts_wedged_mps: bool,
    /// Promise that the memory of shares of the GPU is capped. `None`: as granted before.
    pub caps: Option<CapsPromise>,
}

/// Promise of the slices that the memory of shares of a GPU is capped.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CapsPromise {
    /// None, as far as is known.
    #[default]
    Never,
    /// The slices say so, or may still say so.
    Given,
    /// The slices said so earlier. At this second since the Unix epoch the API server had accepted
    /// slices that do not.
    Ended { at: i64 },
}

impl CapsPromise {
    /// Returns true if there is none.
    pub fn is_never(&self) -> bool {
        *self == Self::Never
    }

    /// Returns the promise after a grant. A promise that was not given does not end, and the first
    /// end counts: later slices promised nothing.
    #[must_use]
    pub fn then(self, granted: Option<Self>) -> Self {
        match (self, granted) {
            (Self::Given, Some(ended @ Self::Ended { .. })) => ended,
            (_, Some(Self::Given)) => Self::Given,
            (before, _) => before,
        }
    }

    /// Returns whether the scheduler may have chosen a share by slices that promised a cap: before
    /// it can have seen later ones. A claim that did not exist until then was chosen by those, and
    /// so was one whose allocation was written long after. Seconds since the Unix epoch at which
    /// the claim was made and its allocation was written; `None` if not known.
    pub fn covers(self, made: Option<i64>, allocated: Option<i64>) -> bool {
        /// Seconds after which the scheduler has seen slices that were accepted.
        const SEEN: i64 = 2;
        /// Seconds that may lie between the scheduler's choice and the allocation that it writes.
        const WRITTEN: i64 = 90;
        match self {
            Self::Never => false,
            Self::Given => true,
            Self::Ended { at } => {
                made.is_none_or(|made| made <= at.saturating_add(SEEN))
                    && allocated.is_none_or(|written| written <= at.saturating_add(WRITTEN))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_promise_ends_once_and_only_if_it_was_given() {
        let (never, given) = (CapsPromise::Never, CapsPromise::Given);
        let ended = |at| CapsPromise::Ended { at };
        for (before, granted, after) in [
            (never, None, never),
            (never, Some(given), given),
            (never, Some(ended(7)), never),
            (given, None, given),
            (given, Some(ended(7)), ended(7)),
            (ended(7), Some(ended(9)), ended(7)),
            (ended(7), None, ended(7)),
            (ended(7), Some(given), given),
        ] {
            assert_eq!(before.then(granted), after, "{before:?} {granted:?}");
        }
    }

    #[test]
    fn a_share_is_covered_by_an_earlier_promise_until_its_times_say_otherwise() {
        let ended = CapsPromise::Ended { at: 1000 };
        for (promise, made, allocated, covered) in [
            (CapsPromise::Never, None, None, false),
            (CapsPromise::Given, Some(9999), Some(9999), true),
            (ended, None, None, true),
            // A claim that waited is chosen by old slices, and written after new ones.
            (ended, Some(1), Some(1090), true),
            (ended, Some(1), Some(1091), false),
            (ended, Some(1), None, true),
            (ended, Some(1002), Some(1003), true),
            (ended, Some(1003), Some(1003), false),
            (ended, Some(1003), None, false),
            (CapsPromise::Ended { at: i64::MAX }, Some(1), Some(1), true),
        ] {
            assert_eq!(
                promise.covers(made, allocated),
                covered,
                "{promise:?} {made:?} {allocated:?}"
            );
        }
    }
}
