//! The start times of troubles. The object in the API is the memory that outlasts the plugin: the
//! times in it when this process first writes it are taken over for troubles that still exist.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_api::node::{GpuNodeStatus, Trouble};
use k8s_openapi::jiff::Timestamp;

/// Troubles of an earlier process are kept so long: not everything is found again at once.
const TAKE_OVER: Duration = Duration::from_mins(5);

/// The identity of a trouble, without its words, which may change: process ids do.
type Key = (String, String, String, String);

fn key(trouble: &Trouble) -> Key {
    (
        trouble.kind.clone(),
        trouble.gpu.clone(),
        trouble.subject.clone(),
        trouble.claim.clone(),
    )
}

/// Troubles that exist, and those that an earlier process reported.
#[derive(Debug, Default)]
pub(super) struct Since {
    now: BTreeMap<Key, String>,
    earlier: BTreeMap<Key, String>,
    /// When they were taken over.
    taken: Option<Timestamp>,
}

impl Since {
    /// Takes over the times of the object in the API. Only once: later writes are our own.
    pub(super) fn take_over(&mut self, earlier: &GpuNodeStatus, now: Timestamp) {
        if self.taken.is_some() {
            return;
        }
        // Taken over once, before the first write: later the object has the times of this process.
        self.taken = Some(now);
        let times = earlier
            .troubles
            .iter()
            .filter_map(|trouble| Some((key(trouble), trouble.since.clone()?)));
        self.earlier = times.collect();
        for (key, since) in &self.earlier {
            if let Some(known) = self.now.get_mut(key) {
                known.clone_from(since);
            }
        }
    }

    /// Notes the troubles that there are now. A trouble that is over is forgotten.
    pub(super) fn see(&mut self, report: &GpuNodeStatus, now: Timestamp) {
        let old = |taken: Timestamp| now.duration_since(taken).unsigned_abs() > TAKE_OVER;
        if self.taken.is_some_and(old) {
            self.earlier.clear();
        }
        // Built anew from the report: a trouble that is missing in one report has ended, and begins
        // again with a new time.
        let before = std::mem::take(&mut self.now);
        let seconds = Timestamp::from_second(now.as_second())
            .unwrap_or(now)
            .to_string();
        for trouble in &report.troubles {
            let key = key(trouble);
            let since = before
                .get(&key)
                .or_else(|| self.earlier.get(&key))
                .unwrap_or(&seconds)
                .clone();
            self.now.insert(key, since);
        }
    }

    /// The report with its times.
    pub(super) fn stamp(&self, report: &GpuNodeStatus, now: Timestamp) -> GpuNodeStatus {
        let mut report = GpuNodeStatus {
            changed: Some(now.to_string()),
            ..report.clone()
        };
        for trouble in &mut report.troubles {
            trouble.since = self.now.get(&key(trouble)).cloned();
        }
        let grave = report.troubles.iter().filter(|trouble| !trouble.notice);
        // All are in UTC with whole seconds: as text they sort as times.
        report.summary.since = grave.filter_map(|trouble| trouble.since.clone()).min();
        report
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(kinds: &[(&str, bool)]) -> GpuNodeStatus {
        let trouble = |(kind, notice): &(&str, bool)| Trouble {
            kind: (*kind).to_owned(),
            notice: *notice,
            gpu: "gpu-0".to_owned(),
            why: "words that change".to_owned(),
            ..Trouble::default()
        };
        GpuNodeStatus {
            troubles: kinds.iter().map(trouble).collect(),
            ..GpuNodeStatus::default()
        }
    }

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + second).unwrap()
    }

    fn sinces(status: &GpuNodeStatus) -> Vec<Option<&str>> {
        status
            .troubles
            .iter()
            .map(|trouble| trouble.since.as_deref())
            .collect()
    }

    #[test]
    fn a_trouble_keeps_its_time_until_it_ends_and_a_notice_requires_no_action() {
        let mut since = Since::default();
        since.see(&report(&[("lost", false)]), at(0));
        let both = report(&[("lost", false), ("one-mode", true)]);
        since.see(&both, at(7));
        let stamped = since.stamp(&both, at(9));
        assert_eq!(
            sinces(&stamped),
            [Some("2027-01-15T08:00:00Z"), Some("2027-01-15T08:00:07Z")]
        );
        assert_eq!(
            stamped.summary.since.as_deref(),
            Some("2027-01-15T08:00:00Z")
        );
        assert_eq!(stamped.changed.as_deref(), Some("2027-01-15T08:00:09Z"));
        since.see(&report(&[("one-mode", true)]), at(10));
        assert_eq!(
            since
                .stamp(&report(&[("one-mode", true)]), at(10))
                .summary
                .since,
            None
        );
        since.see(&report(&[("lost", false)]), at(11));
        assert_eq!(
            sinces(&since.stamp(&report(&[("lost", false)]), at(11))),
            [Some("2027-01-15T08:00:11Z")]
        );
    }

    #[test]
    fn times_of_an_earlier_process_are_taken_over_or_forgotten() {
        let (lost, none) = (report(&[("lost", false)]), report(&[]));
        let mut first = Since::default();
        first.see(&lost, at(0));
        let reported = first.stamp(&lost, at(1));
        // Seen before the object was read, or a while after.
        for seen_before in [true, false] {
            let mut second = Since::default();
            second.see(if seen_before { &lost } else { &none }, at(100));
            second.take_over(&reported, at(100));
            second.see(&lost, at(200));
            assert_eq!(
                second.stamp(&lost, at(200)).troubles,
                reported.troubles,
                "{seen_before}"
            );
            second.see(&none, at(900));
            second.see(&lost, at(901));
            assert_eq!(
                second.stamp(&lost, at(901)).summary.since.as_deref(),
                Some("2027-01-15T08:15:01Z")
            );
        }
    }
}
