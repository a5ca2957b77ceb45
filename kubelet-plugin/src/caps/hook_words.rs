//! The hook's words: a call of it has failed, and a container does not start. crun shows nothing
//! but its exit status, so the words become Events of the pod and of its claims.
//!
//! The kernel says which process asks, and its control group which pod it starts: a program that
//! reaches the socket can speak of its own pod alone. Its words are hostile all the same: cut, in
//! printable characters, and no more often than people read them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use divvy_claims::{ClaimRef, PodRef};
use divvy_executor::Executor;
use divvy_host::HostRoot;
use divvy_model::{HookFailure, fnv1a};
use divvy_usage::pods_of_cgroup;
use serde::Deserialize;

use crate::host::pods::{of_node, uids};
use crate::lock;
use crate::sinks::notifier::{EventSubject, Notifier, cut};

/// Longest words, in bytes: as much as the hook says.
const LONGEST: usize = 600;
/// Claims of one pod with an Event each.
const CLAIMS: usize = 8;
/// Pause between two reports of one failure of a pod, whose container the kubelet starts again.
const AGAIN: Duration = Duration::from_secs(30);
/// Reports of all pods within [`AGAIN`].
const AT_ONCE: usize = 20;

/// Message of the hook.
#[derive(Debug, Deserialize)]
pub(crate) struct Words {
    /// Its exit status.
    status: u8,
    /// The reason, for people.
    why: String,
}

/// A report that is due.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Report {
    failure: HookFailure,
    note: String,
    claims: Vec<ClaimRef>,
    /// The pod with its namespace, where its name is known.
    pod: Option<(String, PodRef)>,
}

/// The listener to the hook's words.
pub(crate) struct HookWords {
    executor: Arc<Executor>,
    host: HostRoot,
    notifier: Arc<Notifier>,
    said: Mutex<Said>,
}

/// Reports of the last while, by pod and failure.
#[derive(Debug, Default)]
struct Said(BTreeMap<(String, HookFailure), Instant>);

impl Said {
    /// Returns whether a report is due now, and notes it.
    fn is_due(&mut self, pod: &str, failure: HookFailure, now: Instant) -> bool {
        self.0
            .retain(|_, at| now.saturating_duration_since(*at) < AGAIN);
        let key = (pod.to_owned(), failure);
        if self.0.len() >= AT_ONCE || self.0.contains_key(&key) {
            return false;
        }
        self.0.insert(key, now);
        true
    }

    /// Drops the note of a report that has no object for an Event.
    fn forget(&mut self, pod: &str, failure: HookFailure) {
        self.0.remove(&(pod.to_owned(), failure));
    }
}

impl HookWords {
    pub(crate) fn new(executor: Arc<Executor>, host: HostRoot, notifier: Arc<Notifier>) -> Self {
        Self {
            executor,
            host,
            notifier,
            said: Mutex::default(),
        }
    }

    /// Looks which pod a process starts that says so; `None` if it starts none, or if its failure
    /// was reported just now. May block.
    pub(crate) fn look(&self, pid: u32, words: &Words) -> Option<Report> {
        let failure = HookFailure::of_status(words.status);
        let groups = self.groups(pid)?;
        let uid = of_node(&self.host, pods_of_cgroup(&groups), String::as_str)?;
        if !lock(&self.said).is_due(&uid, failure, Instant::now()) {
            return None;
        }
        // Records learn late of a further pod of a claim: then the pod alone gets an Event.
        let held = self.executor.held().unwrap_or_default();
        let of_pod = |pod: &&PodRef| pod.uid == uid;
        let known = held.iter().find_map(|held| {
            let pod = held.pods.iter().find(of_pod)?;
            Some((held.claim.namespace.clone(), pod.clone()))
        });
        let pod = known.or_else(|| {
            let mut all = uids(&self.host).into_iter();
            let ((namespace, name), uid) = all.find(|(_, of)| *of == uid)?;
            Some((namespace, PodRef { name, uid }))
        });
        let claims: BTreeSet<_> = held
            .iter()
            .filter(|held| held.pods.iter().any(|pod| pod.uid == uid))
            .map(|held| held.claim.clone())
            .collect();
        if pod.is_none() && claims.is_empty() {
            // The next failure, seconds later, may have an Event.
            lock(&self.said).forget(&uid, failure);
        }
        Some(Report {
            failure,
            note: note(failure, words, pod.as_ref()),
            claims: claims.into_iter().take(CLAIMS).collect(),
            pod,
        })
    }

    /// Reads the control groups of a process. The number is one of this process's own PID
    /// namespace, which is the node's: a host root that is not the node's `/` has no processes.
    fn groups(&self, pid: u32) -> Option<String> {
        let own = |_| fs_err::read_to_string(format!("/proc/{pid}/cgroup"));
        self.host.cgroups(pid).or_else(own).ok()
    }

    /// Writes the Events.
    pub(crate) async fn report(&self, report: Report) {
        let Report {
            failure,
            note,
            claims,
            pod,
        } = report;
        tracing::warn!(reason = failure.name(), "{note}");
        // Other words are another Event, and not a repetition.
        let action = format!("Start {:x}", fnv1a(note.bytes()));
        let of_claims = claims.iter().map(EventSubject::Claim);
        let of_pod = pod.iter().map(|(at, pod)| EventSubject::Pod(at, pod));
        for about in of_claims.chain(of_pod) {
            let reason = failure.name();
            self.notifier
                .report_device(&about, true, reason, &action, &note)
                .await;
        }
    }
}

fn note(failure: HookFailure, words: &Words, pod: Option<&(String, PodRef)>) -> String {
    let of = pod.map(|(namespace, pod)| format!(" of pod {namespace}/{}", pod.name));
    format!(
        "A container{} does not start: {} ({}; exit status {} of divvy-cdi-hook)",
        of.unwrap_or_default(),
        printable(&cut(&words.why, LONGEST)),
        failure.text(),
        words.status
    )
}

/// Returns a text in which each character can be seen: a line break could begin another line of a
/// log, and other characters hide or turn round what follows.
fn printable(text: &str) -> String {
    let mut seen = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '\'' | '"' => seen.push(character),
            other => seen.extend(other.escape_debug()),
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_reported_once_in_a_while_and_not_too_many_at_once() {
        let mut said = Said::default();
        let now = Instant::now();
        let [volume, image] = [HookFailure::VolumeInTheWay, HookFailure::ImageInTheWay];
        assert!(said.is_due("a", volume, now));
        assert!(!said.is_due("a", volume, now + AGAIN / 2));
        assert!(said.is_due("a", image, now + AGAIN / 2), "another failure");
        assert!(said.is_due("b", volume, now + AGAIN / 2), "another pod");
        assert!(said.is_due("a", volume, now + AGAIN));
        // Containers that fail all the time, of many pods.
        let later = now + AGAIN * 3;
        let due = (0..1000).filter(|pod| said.is_due(&pod.to_string(), volume, later));
        assert_eq!(due.count(), AT_ONCE);
        assert!(said.0.len() <= AT_ONCE, "it keeps no more than that");
        assert!(said.is_due("x", volume, later + AGAIN));
    }

    #[test]
    fn words_are_cut_and_each_character_of_them_can_be_seen() {
        let words = Words {
            status: 75,
            why: "a\nb\u{1b}[2J\u{202e}\u{0}ä 'x' \\".to_owned(),
        };
        let text = note(HookFailure::VolumeInTheWay, &words, None);
        let expected =
            "A container does not start: a\\nb\\u{1b}[2J\\u{202e}\\0ä 'x' \\\\ (volumes of the pod";
        assert!(text.starts_with(expected), "{text}");
        let pod = PodRef {
            name: "p".to_owned(),
            uid: "u".to_owned(),
        };
        let long = Words {
            status: 1,
            why: "x".repeat(100_000),
        };
        let text = note(HookFailure::Call, &long, Some(&("ns".to_owned(), pod)));
        assert!(text.len() < 1024, "the API takes it: {}", text.len());
        assert!(text.starts_with("A container of pod ns/p does not start: xxx"));
        assert!(text.ends_with("runtime; exit status 1 of divvy-cdi-hook)"));
    }
}
