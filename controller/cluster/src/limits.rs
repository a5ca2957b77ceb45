//! How many pods may be evicted, and which are left alone for a while.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::due::{Candidate, DeviceId, Reason};

const MINUTE: Duration = Duration::from_mins(1);

/// Remembers the last minute. Times are since any fixed moment.
#[derive(Debug)]
pub(crate) struct Limits {
    per_minute: usize,
    evicted: Vec<(Duration, Vec<DeviceId>)>,
    /// Pods that may not be evicted now, by UID, with the time until which they are not asked for again.
    later: BTreeMap<String, Duration>,
    /// Pods that are ending, or are gone, by UID, with their devices and when that was seen last.
    ending: BTreeMap<String, (Duration, Vec<DeviceId>)>,
}

/// What the limits say of a pod.
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
    /// So many pods in any minute.
    pub(crate) fn new(per_minute: usize) -> Self {
        Self { per_minute, evicted: Vec::new(), later: BTreeMap::new(), ending: BTreeMap::new() }
    }

    /// Whether a pod may be evicted now. Of pods that use too much, one for each GPU in a minute: the next reading shows
    /// whether that was enough.
    pub(crate) fn allows(&mut self, candidate: &Candidate, now: Duration) -> Allowance {
        self.evicted.retain(|(at, _)| now.saturating_sub(*at) < MINUTE);
        self.later.retain(|_, until| now < *until);
        self.ending.retain(|_, (at, _)| now.saturating_sub(*at) < MINUTE);
        if self.evicted.len() >= self.per_minute {
            return Allowance::None;
        }
        let is_same = |(_, devices): &(Duration, Vec<DeviceId>)| {
            devices.iter().any(|device| candidate.devices.contains(device))
        };
        let others = self.ending.iter().filter(|(uid, _)| **uid != candidate.uid).map(|(_, ending)| ending);
        let waits = candidate.reason == Reason::OverGrant && self.evicted.iter().chain(others).any(is_same);
        if waits || self.later.contains_key(&candidate.uid) { Allowance::NotThis } else { Allowance::Yes }
    }

    /// A pod was evicted.
    pub(crate) fn evicted(&mut self, candidate: &Candidate, now: Duration) {
        self.evicted.push((now, candidate.devices.clone()));
        self.not_again(candidate, now);
    }

    /// A pod is on its way out: no other goes in its place before a reading without it.
    pub(crate) fn ending(&mut self, candidate: &Candidate, now: Duration) {
        self.ending.insert(candidate.uid.clone(), (now, candidate.devices.clone()));
    }

    /// A pod is left alone for a minute: what keeps it changes rarely, and asking costs reads.
    pub(crate) fn not_again(&mut self, candidate: &Candidate, now: Duration) {
        self.later.insert(candidate.uid.clone(), now + MINUTE);
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
            devices: vec![DeviceId { pool: "node".into(), device: device.into() }],
        }
    }

    const fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn no_more_than_so_many_pods_go_in_any_minute() {
        let mut limits = Limits::new(2);
        for (pod, now) in [("a", 0), ("b", 30)] {
            let pod = candidate(Reason::Idle, pod, pod);
            assert_eq!(limits.allows(&pod, at(now)), Allowance::Yes);
            limits.evicted(&pod, at(now));
        }
        let next = candidate(Reason::Idle, "c", "c");
        assert_eq!(limits.allows(&next, at(59)), Allowance::None);
        assert_eq!(limits.allows(&next, at(60)), Allowance::Yes, "the first is a minute ago");
        limits.evicted(&next, at(60));
        assert_eq!(limits.allows(&candidate(Reason::Idle, "d", "d"), at(89)), Allowance::None);
    }

    #[test]
    fn of_pods_that_use_too_much_of_a_gpu_one_goes_in_a_minute_and_idle_ones_do_not_wait() {
        let mut limits = Limits::new(9);
        limits.evicted(&candidate(Reason::OverGrant, "a", "gpu-0-ts"), at(0));
        let allows = |limits: &mut Limits, reason, device, now| {
            limits.allows(&candidate(reason, "b", device), at(now))
        };
        assert_eq!(allows(&mut limits, Reason::OverGrant, "gpu-0-ts", 59), Allowance::NotThis);
        assert_eq!(allows(&mut limits, Reason::OverGrant, "gpu-1-ts", 59), Allowance::Yes);
        assert_eq!(allows(&mut limits, Reason::Idle, "gpu-0-ts", 59), Allowance::Yes);
        assert_eq!(allows(&mut limits, Reason::OverGrant, "gpu-0-ts", 60), Allowance::Yes);
    }

    #[test]
    fn in_the_place_of_a_pod_that_is_ending_none_goes_before_a_minute_is_over() {
        let mut limits = Limits::new(9);
        let over = |pod, device| candidate(Reason::OverGrant, pod, device);
        limits.ending(&over("a", "gpu-0-ts"), at(0));
        assert_eq!(limits.allows(&over("b", "gpu-0-ts"), at(59)), Allowance::NotThis);
        assert_eq!(limits.allows(&over("b", "gpu-1-ts"), at(59)), Allowance::Yes);
        assert_eq!(limits.allows(&over("a", "gpu-0-ts"), at(59)), Allowance::Yes, "it is looked at again");
        limits.ending(&over("a", "gpu-0-ts"), at(59));
        assert_eq!(limits.allows(&over("b", "gpu-0-ts"), at(118)), Allowance::NotThis);
        assert_eq!(limits.allows(&over("b", "gpu-0-ts"), at(119)), Allowance::Yes);
    }

    #[test]
    fn a_pod_that_is_kept_is_left_alone_for_a_minute_and_takes_no_place() {
        let mut limits = Limits::new(1);
        let pod = candidate(Reason::Idle, "a", "a");
        limits.not_again(&pod, at(0));
        assert_eq!(limits.allows(&pod, at(59)), Allowance::NotThis);
        assert_eq!(limits.allows(&candidate(Reason::Idle, "b", "b"), at(59)), Allowance::Yes);
        assert_eq!(limits.allows(&pod, at(60)), Allowance::Yes);
    }
}
