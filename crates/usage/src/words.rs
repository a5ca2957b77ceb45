//! Changes of use in words: the condition of a claim that each is.

use std::time::Duration;

use divvy_api::names::{conditions, reclaim};
use divvy_claims::ClaimRef;

use crate::{Change, Due};

/// Condition of a claim that a change is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Said {
    /// Type of the condition.
    pub kind: &'static str,
    pub status: bool,
    pub reason: &'static str,
    pub message: String,
    /// True if people should do something about it.
    pub bad: bool,
}

impl Change {
    /// Returns the claim that has changed.
    pub fn claim(&self) -> &ClaimRef {
        match self {
            Self::Overuse { claim, .. } | Self::Idle { claim, .. } | Self::Due { claim, .. } => {
                claim
            }
        }
    }

    /// Returns the condition that says it.
    pub fn said(&self) -> Said {
        match self {
            Self::Overuse {
                over,
                used,
                allowed,
                capped,
                ..
            } => overuse(*over, *used, *allowed, *capped),
            Self::Idle {
                idle,
                after,
                reclaim,
                ..
            } => idleness(*idle, *after, *reclaim),
            Self::Due { due, .. } => eviction(*due),
        }
    }
}

fn overuse(over: bool, used: u64, allowed: u64, capped: bool) -> Said {
    let (used, allowed) = (used >> 20, allowed >> 20);
    let message = match (over, capped) {
        (true, false) => format!(
            "the pods of the claim use {used} MiB of GPU memory and were granted {allowed} MiB, contexts of CUDA included: request more memory, or limit the framework to DIVVY_MEMORY_*"
        ),
        // The driver counts neither managed memory nor what was there before the limit.
        (true, true) => format!(
            "the pods of the claim are capped at {allowed} MiB of GPU memory, and use {used} MiB: the driver does not count managed memory (cudaMallocManaged), memory imported from another process, and what was allocated before the cap was set"
        ),
        (false, false) => format!(
            "the pods of the claim use {used} MiB of GPU memory, which is within the {allowed} MiB granted"
        ),
        (false, true) => format!(
            "the pods of the claim use {used} MiB of GPU memory, which is within the cap of {allowed} MiB"
        ),
    };
    let reason = if over {
        "MemoryOverGrant"
    } else {
        "MemoryWithinGrant"
    };
    Said {
        kind: conditions::WITHIN_GRANT,
        status: !over,
        reason,
        message,
        bad: over,
    }
}

fn idleness(idle: bool, after: Duration, reclaim: Option<Duration>) -> Said {
    let minutes = |time: Duration| time.as_secs() / 60;
    let (reason, message) = if idle {
        let what = format!(
            "nothing has used the devices of the claim for {} minutes",
            minutes(after)
        );
        let then = reclaim.map(|grace| {
            format!(
                "; by the policy of the GPU it is marked for eviction after {} more",
                minutes(grace)
            )
        });
        ("NotUsed", what + &then.unwrap_or_default())
    } else {
        ("Used", "the devices of the claim are used again".to_owned())
    };
    Said {
        kind: conditions::IDLE,
        status: idle,
        reason,
        message,
        bad: false,
    }
}

fn eviction(due: Option<Due>) -> Said {
    let (reason, message) = match due {
        Some(Due::Overuse) => (
            reclaim::OVER_GRANT,
            "the pods of the claim use so much more GPU memory than it was granted that others cannot get theirs: the policy of the GPU calls for their eviction",
        ),
        Some(Due::Idle) => (
            reclaim::IDLE,
            "nothing uses the devices of the claim: the policy of the GPU calls for the eviction of its pods",
        ),
        None => (
            reclaim::NOT_DUE,
            "nothing calls for the eviction of the pods of the claim",
        ),
    };
    Said {
        kind: conditions::RECLAIM_DUE,
        status: due.is_some(),
        reason,
        message: message.to_owned(),
        bad: due.is_some(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_is_a_condition_that_says_what_to_do() {
        let mib = |n: u64| n << 20;
        let over = overuse(true, mib(30), mib(20), false);
        assert_eq!((over.status, over.bad), (false, true));
        assert!(over.message.contains("use 30 MiB"), "{}", over.message);
        assert!(over.message.contains("DIVVY_MEMORY_*"), "{}", over.message);
        let within = overuse(false, mib(10), mib(20), true);
        assert_eq!((within.status, within.bad), (true, false));
        assert!(within.message.ends_with("the cap of 20 MiB"));
        let minutes = Duration::from_mins;
        let idle = idleness(true, minutes(60), Some(minutes(15)));
        assert!(idle.status && !idle.bad);
        assert!(idle.message.contains("for 60 minutes; "));
        assert!(idle.message.ends_with("after 15 more"));
        assert_eq!(idleness(false, minutes(60), None).reason, "Used");
        assert_eq!(eviction(Some(Due::Idle)).reason, reclaim::IDLE);
        let none = eviction(None);
        assert_eq!((none.status, none.bad), (false, false));
    }
}
