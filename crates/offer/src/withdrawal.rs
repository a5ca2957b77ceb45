//! The life of one published device: offered, leaving, kept for the claims that hold it, gone.
//!
//! Counters are charged only for devices that are published, and the scheduler writes an allocation
//! some time after it has chosen the device. So a device that is not offered any more stays
//! published with a taint until such a write must have arrived, and after that for as long as a
//! claim in the API holds it.

use std::time::Duration;

/// The state of a published device. A device that is not published has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeviceState {
    /// The scheduler may give it out.
    Offered,
    /// Not offered any more; a claim may have been given it before the scheduler saw the taint.
    Leaving {
        /// Since when it is tainted.
        since: Duration,
    },
    /// Not offered any more, and a claim in the API holds it.
    Kept,
}

/// Facts that decide about the next state of a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Observed {
    /// True if the rules offer it now.
    pub(crate) offered: bool,
    /// The last list of claims: when it was asked for, and whether a claim holds the device.
    pub(crate) listed: Option<(Duration, bool)>,
    /// For how long after the taint a write of an allocation may still arrive.
    pub(crate) leave: Duration,
    pub(crate) now: Duration,
}

impl DeviceState {
    /// The next state; `None` for a device that is withdrawn now.
    ///
    /// | state | offered | held, by a list from after the wait | not held, by such a list | no such list |
    /// |---|---|---|---|---|
    /// | offered | offered | leaving | leaving | leaving |
    /// | leaving | offered | kept | gone | leaving |
    /// | kept | offered | kept | gone | kept |
    pub(crate) fn next(self, seen: &Observed) -> Option<Self> {
        // An offer ends every wait, also while a claim holds the device: it is an ordinary device
        // again.
        if seen.offered {
            return Some(Self::Offered);
        }
        match self {
            Self::Offered => Some(Self::Leaving { since: seen.now }),
            Self::Leaving { since } => match seen.listed {
                // A list counts from the moment at which it was asked for. An earlier one may lack
                // an allocation that the scheduler wrote before it saw the taint.
                Some((asked, held)) if asked >= since.saturating_add(seen.leave) => {
                    held.then_some(Self::Kept)
                }
                _ => Some(self),
            },
            Self::Kept => match seen.listed {
                Some((_, held)) => held.then_some(Self::Kept),
                None => Some(self),
            },
        }
    }

    /// When a list of claims asked for then would decide about it.
    pub(crate) fn may_be_asked_about_at(self, leave: Duration) -> Option<Duration> {
        match self {
            Self::Leaving { since } => Some(since.saturating_add(leave)),
            Self::Offered | Self::Kept => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use DeviceState::{Kept, Leaving, Offered};

    use super::*;

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn each_state_has_one_way_out_and_nothing_goes_without_a_list() {
        let leaving = Leaving { since: s(100) };
        let (before, after) = (s(159), s(160));
        let rows = [
            (Offered, true, None, Some(Offered)),
            (Offered, false, None, Some(Leaving { since: s(200) })),
            (
                Offered,
                false,
                Some((s(199), false)),
                Some(Leaving { since: s(200) }),
            ),
            (
                Offered,
                false,
                Some((s(199), true)),
                Some(Leaving { since: s(200) }),
            ),
            (leaving, true, Some((after, false)), Some(Offered)),
            (leaving, false, None, Some(leaving)),
            (leaving, false, Some((before, false)), Some(leaving)),
            (leaving, false, Some((before, true)), Some(leaving)),
            (leaving, false, Some((after, true)), Some(Kept)),
            (leaving, false, Some((after, false)), None),
            (Kept, true, Some((after, true)), Some(Offered)),
            (Kept, false, None, Some(Kept)),
            (Kept, false, Some((after, true)), Some(Kept)),
            (Kept, false, Some((after, false)), None),
        ];
        for (state, offered, listed, expected) in rows {
            let seen = Observed {
                offered,
                listed,
                leave: s(60),
                now: s(200),
            };
            assert_eq!(state.next(&seen), expected, "{state:?} {seen:?}");
        }
    }
}
