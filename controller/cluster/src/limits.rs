//! Limits of evictions, and the pods that are left alone for a while.
//!
//! Departures of the last minute are kept in the Lease, so that the limits hold over restarts of
//! the controller. Times are measured by the clock of the process, since any fixed moment, and
//! written as times of day.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::due::{Candidate, DeviceId, Reason};

const MINUTE: Duration = Duration::from_mins(1);

/// A pod that was evicted, or goes by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Departure {
    uid: String,
    /// Time at which it was evicted, or was last seen to be ending.
    at: Timestamp,
    /// The devices of the claim for which it was to go.
    devices: Vec<DeviceId>,
    /// `false` for a pod that goes by itself: it takes no place of those that may be evicted.
    evicted: bool,
}

/// The departures of the last minute.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    per_minute: usize,
    /// Departures, with the time until which each counts.
    departures: Vec<(Departure, Duration)>,
    /// Pods that may not be evicted now, by UID, with the time until which they are not asked for
    /// again.
    later: BTreeMap<String, Duration>,
}

/// The answer of the limits for a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Allowance {
    /// It may be evicted.
    Yes,
    /// Not now; others may.
    NotThis,
    /// No pod may be evicted now.
    None,
}

impl Limits {
    /// Allows so many evictions in any minute.
    pub(crate) fn new(per_minute: usize) -> Self {
        Self {
            per_minute,
            departures: Vec::new(),
            later: BTreeMap::new(),
        }
    }

    /// Learns what is stored, maybe by another instance.
    ///
    /// The age of a departure is taken from the time of day once, when it is first seen, and is
    /// between nothing and a minute: whatever the clocks of the instances say, none is forgotten
    /// early by a clock that is set while the process runs, and none counts for longer than a
    /// minute.
    pub(crate) fn learn(&mut self, stored: Vec<Departure>, now: Duration, clock: Timestamp) {
        // Departures that are over are kept for as long as they are stored, to be known again.
        self.departures
            .retain(|(known, until)| now < *until || stored.contains(known));
        for departure in stored {
            if self.departures.iter().any(|(known, _)| *known == departure) {
                continue;
            }
            let age = Duration::try_from(clock.duration_since(departure.at)).unwrap_or_default();
            let until = now + MINUTE.saturating_sub(age);
            self.departures.push((departure, until));
        }
    }

    /// Returns the departures that still count, to be stored.
    pub(crate) fn stored(&self, now: Duration) -> Vec<Departure> {
        let counting = self.departures.iter().filter(|(_, until)| now < *until);
        counting.map(|(departure, _)| departure.clone()).collect()
    }

    /// Returns whether a pod may be evicted now. A pod that uses too much waits for a minute after
    /// another of the same GPU: the next reading shows whether that was enough.
    pub(crate) fn allows(&self, candidate: &Candidate, now: Duration) -> Allowance {
        let recent = || {
            let counting = self.departures.iter().filter(|(_, until)| now < *until);
            counting.map(|(departure, _)| departure)
        };
        if recent().filter(|departure| departure.evicted).count() >= self.per_minute {
            return Allowance::None;
        }
        let is_in_its_place = |departure: &Departure| {
            let is_other = departure.evicted || departure.uid != candidate.uid;
            let mut devices = departure.devices.iter();
            is_other && devices.any(|device| candidate.devices.contains(device))
        };
        let waits = candidate.reason == Reason::OverGrant && recent().any(is_in_its_place);
        let is_later = self
            .later
            .get(&candidate.uid)
            .is_some_and(|until| now < *until);
        if waits || is_later {
            Allowance::NotThis
        } else {
            Allowance::Yes
        }
    }

    /// Counts a pod as evicted.
    pub(crate) fn evicted(&mut self, candidate: &Candidate, now: Duration, clock: Timestamp) {
        self.depart(candidate, true, now, clock);
    }

    /// Counts a pod as on its way out by itself: no other goes in its place before a reading
    /// without it.
    pub(crate) fn ending(&mut self, candidate: &Candidate, now: Duration, clock: Timestamp) {
        self.departures
            .retain(|(known, _)| known.evicted || known.uid != candidate.uid);
        self.depart(candidate, false, now, clock);
    }

    /// Takes it back that a pod was evicted.
    pub(crate) fn stays(&mut self, candidate: &Candidate) {
        self.departures
            .retain(|(known, _)| !known.evicted || known.uid != candidate.uid);
    }

    /// Leaves a pod alone for a minute: what keeps it changes rarely, and asking costs reads.
    pub(crate) fn not_again(&mut self, candidate: &Candidate, now: Duration) {
        self.later.retain(|_, until| now < *until);
        self.later.insert(candidate.uid.clone(), now + MINUTE);
    }

    fn depart(&mut self, candidate: &Candidate, evicted: bool, now: Duration, clock: Timestamp) {
        let departure = Departure {
            uid: candidate.uid.clone(),
            at: clock,
            devices: candidate.devices.clone(),
            evicted,
        };
        self.departures.push((departure, now + MINUTE));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(reason: Reason, pod: &str, device: &str) -> Candidate {
        Candidate {
            reason,
            namespace: "n".into(),
            pod: pod.into(),
            uid: pod.into(),
            claim: "c".into(),
            devices: vec![DeviceId {
                pool: "node".into(),
                device: device.into(),
            }],
        }
    }

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn clock(seconds: u64) -> Timestamp {
        Timestamp::UNIX_EPOCH + at(1_000_000 + seconds)
    }

    /// The limits of an instance that has just started, with what is stored.
    fn started(stored: &[Departure], clock: Timestamp) -> Limits {
        let mut limits = Limits::new(1);
        limits.learn(stored.to_vec(), at(0), clock);
        limits
    }

    #[test]
    fn departures_stored_by_another_instance_count_for_a_minute() {
        let mut first = Limits::new(1);
        first.evicted(&candidate(Reason::Idle, "a", "a"), at(500), clock(0));
        let stored = first.stored(at(530));
        assert_eq!(stored.len(), 1);
        let next = candidate(Reason::Idle, "b", "b");
        let limits = started(&stored, clock(40));
        assert_eq!(limits.allows(&next, at(19)), Allowance::None);
        assert_eq!(limits.allows(&next, at(20)), Allowance::Yes);
        assert_eq!(limits.stored(at(20)), []);
        assert_eq!(first.stored(at(560)), [], "what is over is not stored");
        // The pod that is evicted does not go again, be it due for another reason.
        let over = |pod| candidate(Reason::OverGrant, pod, "gpu-0-ts");
        let mut many = Limits::new(9);
        many.evicted(&over("a"), at(0), clock(0));
        let mut other = Limits::new(9);
        other.learn(many.stored(at(1)), at(7), clock(1));
        for pod in ["a", "b"] {
            assert_eq!(other.allows(&over(pod), at(8)), Allowance::NotThis);
        }
    }

    #[test]
    fn with_wrong_clocks_a_departure_counts_for_a_minute_at_most() {
        let mut first = Limits::new(1);
        first.evicted(&candidate(Reason::Idle, "a", "a"), at(0), clock(1_000));
        let stored = first.stored(at(0));
        let next = candidate(Reason::Idle, "b", "b");
        // The clock of the second is behind, or was set back.
        let mut limits = started(&stored, clock(0));
        assert_eq!(limits.allows(&next, at(59)), Allowance::None);
        limits.learn(stored.clone(), at(60), clock(60));
        assert_eq!(limits.allows(&next, at(60)), Allowance::Yes, "not anew");
        // It was set forward while the process runs.
        let mut limits = started(&stored, clock(1_001));
        limits.learn(stored.clone(), at(1), clock(9_000));
        assert_eq!(limits.allows(&next, at(58)), Allowance::None);
        assert_eq!(limits.allows(&next, at(59)), Allowance::Yes);
    }

    #[test]
    fn an_eviction_that_was_refused_takes_no_place() {
        let mut limits = Limits::new(1);
        let over = |pod| candidate(Reason::OverGrant, pod, "gpu-0-ts");
        limits.evicted(&over("a"), at(0), clock(0));
        limits.stays(&over("a"));
        assert_eq!(limits.allows(&over("b"), at(1)), Allowance::Yes);
        assert_eq!(limits.stored(at(1)), []);
        // A pod that is ending by itself is not forgotten with that.
        limits.ending(&over("a"), at(1), clock(1));
        limits.stays(&over("a"));
        assert_eq!(limits.allows(&over("b"), at(2)), Allowance::NotThis);
        assert_eq!(
            limits.allows(&candidate(Reason::Idle, "c", "c"), at(2)),
            Allowance::Yes,
            "and takes no place of those that may be evicted"
        );
    }

    #[test]
    fn what_this_instance_has_evicted_counts_though_it_is_not_stored() {
        let mut limits = Limits::new(1);
        limits.evicted(&candidate(Reason::Idle, "a", "a"), at(0), clock(0));
        // The answer of a Lease that was read before the write, or that another has written anew.
        limits.learn(Vec::new(), at(1), clock(1));
        let next = candidate(Reason::Idle, "b", "b");
        assert_eq!(limits.allows(&next, at(59)), Allowance::None);
        assert_eq!(limits.allows(&next, at(60)), Allowance::Yes);
    }

    #[test]
    fn notes_about_pods_do_not_grow_with_looks() {
        let mut limits = Limits::new(9);
        let ends = candidate(Reason::OverGrant, "a", "gpu-0-ts");
        for second in 0..30 {
            limits.ending(&ends, at(second), clock(second));
        }
        assert_eq!(limits.stored(at(30)).len(), 1);
        limits.evicted(&ends, at(30), clock(30));
        limits.ending(&ends, at(31), clock(31));
        assert_eq!(limits.stored(at(31)).len(), 2, "an eviction stays counted");
        for minute in 0..30 {
            let pod = candidate(Reason::Idle, &format!("p{minute}"), "b");
            limits.not_again(&pod, at(60 * minute));
        }
        assert_eq!(limits.later.len(), 1, "pods of earlier minutes are kept");
    }

    #[test]
    fn no_more_than_so_many_pods_go_in_any_minute() {
        let mut limits = Limits::new(2);
        for (pod, now) in [("a", 0), ("b", 30)] {
            let pod = candidate(Reason::Idle, pod, pod);
            assert_eq!(limits.allows(&pod, at(now)), Allowance::Yes);
            limits.evicted(&pod, at(now), clock(now));
        }
        let next = candidate(Reason::Idle, "c", "c");
        assert_eq!(limits.allows(&next, at(59)), Allowance::None);
        assert_eq!(
            limits.allows(&next, at(60)),
            Allowance::Yes,
            "the first is a minute ago"
        );
        limits.evicted(&next, at(60), clock(60));
        assert_eq!(
            limits.allows(&candidate(Reason::Idle, "d", "d"), at(89)),
            Allowance::None
        );
    }

    #[test]
    fn one_overusing_pod_of_a_gpu_goes_in_a_minute_and_idle_ones_do_not_wait() {
        let mut limits = Limits::new(9);
        let first = candidate(Reason::OverGrant, "a", "gpu-0-ts");
        limits.evicted(&first, at(0), clock(0));
        let allows = |limits: &mut Limits, reason, device, now| {
            limits.allows(&candidate(reason, "b", device), at(now))
        };
        assert_eq!(
            allows(&mut limits, Reason::OverGrant, "gpu-0-ts", 59),
            Allowance::NotThis
        );
        assert_eq!(
            allows(&mut limits, Reason::OverGrant, "gpu-1-ts", 59),
            Allowance::Yes
        );
        assert_eq!(
            allows(&mut limits, Reason::Idle, "gpu-0-ts", 59),
            Allowance::Yes
        );
        assert_eq!(
            allows(&mut limits, Reason::OverGrant, "gpu-0-ts", 60),
            Allowance::Yes
        );
    }

    #[test]
    fn in_the_place_of_a_pod_that_is_ending_none_goes_before_a_minute_is_over() {
        let mut limits = Limits::new(9);
        let over = |pod, device| candidate(Reason::OverGrant, pod, device);
        limits.ending(&over("a", "gpu-0-ts"), at(0), clock(0));
        assert_eq!(
            limits.allows(&over("b", "gpu-0-ts"), at(59)),
            Allowance::NotThis
        );
        assert_eq!(
            limits.allows(&over("b", "gpu-1-ts"), at(59)),
            Allowance::Yes
        );
        assert_eq!(
            limits.allows(&over("a", "gpu-0-ts"), at(59)),
            Allowance::Yes,
            "it is looked at again"
        );
        limits.ending(&over("a", "gpu-0-ts"), at(59), clock(59));
        assert_eq!(
            limits.allows(&over("b", "gpu-0-ts"), at(118)),
            Allowance::NotThis
        );
        assert_eq!(
            limits.allows(&over("b", "gpu-0-ts"), at(119)),
            Allowance::Yes
        );
    }

    #[test]
    fn a_pod_that_is_kept_is_left_alone_for_a_minute_and_takes_no_place() {
        let mut limits = Limits::new(1);
        let pod = candidate(Reason::Idle, "a", "a");
        limits.not_again(&pod, at(0));
        assert_eq!(limits.allows(&pod, at(59)), Allowance::NotThis);
        assert_eq!(
            limits.allows(&candidate(Reason::Idle, "b", "b"), at(59)),
            Allowance::Yes
        );
        assert_eq!(limits.allows(&pod, at(60)), Allowance::Yes);
    }
}
