//! The scheduler's queue: pods that are alike and have waited for the same time are one group, so
//! that a fleet that is full costs the same however many pods wait.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

/// Waits after failed attempts, in milliseconds: the first, and the longest.
const BACKOFF: (u64, u64) = (1_000, 10_000);
/// Failed attempts after which the wait grows no more.
const LONGEST_AFTER: u32 = 5;

/// Pods by number, the first one on top.
type Pods = BinaryHeap<Reverse<usize>>;

/// Equal values of pods in a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Alike {
    shape: usize,
    priority: i32,
    /// Failed attempts, as far as the wait depends on them.
    attempts: u32,
    /// Time of arrival, or of the last failed attempt.
    since: u64,
}

/// Pods that are alike.
#[derive(Debug)]
pub(crate) struct Group {
    alike: Alike,
    pods: Pods,
}

/// Queue of pods that may be tried now, pods that wait out a back-off, and pods that wait for
/// another one to end.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    active: BinaryHeap<Group>,
    /// Back-offs by their end.
    later: BTreeMap<(u64, Alike), Pods>,
    asleep: BTreeMap<Alike, Pods>,
    /// By shape: pods that failed and have not been placed.
    waiting: BTreeMap<usize, usize>,
}

impl Group {
    pub(crate) fn first(&self) -> Option<usize> {
        self.pods.peek().map(|pod| pod.0)
    }

    /// Returns the order of turns: the highest priority, then the longest wait, then the number.
    fn turn(&self) -> (i32, Reverse<u64>, Option<Reverse<usize>>) {
        let Alike {
            priority, since, ..
        } = self.alike;
        (priority, Reverse(since), self.pods.peek().copied())
    }
}

impl PartialEq for Group {
    fn eq(&self, other: &Self) -> bool {
        self.turn() == other.turn()
    }
}

impl Eq for Group {}

impl PartialOrd for Group {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Group {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.turn().cmp(&other.turn())
    }
}

impl Queue {
    pub(crate) fn arrive(&mut self, pod: usize, shape: usize, priority: i32, now: u64) {
        self.active.push(Group {
            alike: Alike {
                shape,
                priority,
                attempts: 0,
                since: now,
            },
            pods: Pods::from([Reverse(pod)]),
        });
    }

    /// Takes the group whose turn it is.
    pub(crate) fn pop(&mut self) -> Option<Group> {
        self.active.pop()
    }

    /// Takes the first pod out of a group; the others keep their turn.
    pub(crate) fn placed(&mut self, mut group: Group) {
        group.pods.pop();
        if group.alike.attempts > 0
            && let Some(waiting) = self.waiting.get_mut(&group.alike.shape)
        {
            *waiting = waiting.saturating_sub(1);
        }
        if !group.pods.is_empty() {
            self.active.push(group);
        }
    }

    /// Lets a group wait, until devices are free and its back-off has passed.
    pub(crate) fn fail(&mut self, group: Group, now: u64) {
        let Group {
            mut alike,
            mut pods,
        } = group;
        if alike.attempts == 0 {
            *self.waiting.entry(alike.shape).or_default() += pods.len();
        }
        alike.attempts = (alike.attempts + 1).min(LONGEST_AFTER);
        alike.since = now;
        self.asleep.entry(alike).or_default().append(&mut pods);
    }

    /// Wakes the pods that wait: devices are free, and each may try again after its back-off.
    pub(crate) fn wake(&mut self, now: u64) {
        let (first, longest) = BACKOFF;
        for (alike, mut pods) in std::mem::take(&mut self.asleep) {
            let doubled = first << alike.attempts.saturating_sub(1).min(LONGEST_AFTER);
            let at = alike.since.saturating_add(doubled.min(longest));
            if at <= now {
                self.active.push(Group { alike, pods });
            } else {
                let later = self.later.entry((at, alike)).or_default();
                later.append(&mut pods);
            }
        }
    }

    pub(crate) fn next_retry(&self) -> Option<u64> {
        self.later.first_key_value().map(|((at, _), _)| *at)
    }

    /// Gives the pods whose back-off is over their turn; those whose shape no node can hold fail at
    /// once.
    pub(crate) fn retry(&mut self, now: u64, is_closed: impl Fn(usize) -> bool) {
        while let Some(entry) = self.later.first_entry() {
            if entry.key().0 > now {
                return;
            }
            let ((_, alike), pods) = entry.remove_entry();
            let group = Group { alike, pods };
            if is_closed(alike.shape) {
                self.fail(group, now);
            } else {
                self.active.push(group);
            }
        }
    }

    /// Returns how many pods of each shape failed and have not been placed.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = (usize, usize)> {
        let all = self.waiting.iter().filter(|(_, pods)| **pods > 0);
        all.map(|(shape, pods)| (*shape, *pods))
    }
}
