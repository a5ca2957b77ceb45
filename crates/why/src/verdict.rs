//! The answer to why claims wait, over all nodes.

use serde::Serialize;

/// The outlook of a waiting claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verdict {
    /// A node has room: the scheduler has not retried yet, or another constraint holds the pod
    /// back.
    Fits,
    /// It would fit if other claims released their devices.
    NoRoom,
    /// It would fit if pods of the pod's own owner ended, which they do only after it.
    OwnPods,
    /// It would fit, but claims hold devices that exclude each other, and nothing of their pool can
    /// be allocated.
    Blocked,
    /// It would not fit on an empty cluster either.
    NeverFits,
    /// It cannot be allocated anywhere as written.
    Mistake,
    /// The pod has a node that no scheduler gave it, and only the scheduler allocates.
    Bypassed,
    /// Objects that decide it cannot be read.
    Unknown,
    /// Only the scheduler can evaluate it.
    Offline,
}

impl Verdict {
    /// Returns a sentence about the claim.
    pub fn sentence(self) -> &'static str {
        match self {
            Self::Fits => {
                "a node has room: the scheduler has not retried the pod yet, or another constraint holds it back"
            }
            Self::NoRoom => "no room now: other claims hold the devices",
            Self::OwnPods => {
                "no room: pods of its own owner hold the devices, and end only when it is ready"
            }
            Self::Blocked => {
                "blocked: other claims hold devices that exclude each other, so nothing of their pool can be allocated"
            }
            Self::NeverFits => "it fits on no node, even with the devices of all other claims free",
            Self::Bypassed => {
                "the pod's nodeName passes the scheduler by, and only the scheduler allocates claims"
            }
            Self::Mistake => "the claim cannot be allocated as written",
            Self::Unknown => "unknown: objects that decide this cannot be listed",
            Self::Offline => "unknown: only the scheduler can evaluate it",
        }
    }

    /// Says whether an administrator or user has to act: waiting does not help.
    pub fn is_hopeless(self) -> bool {
        matches!(
            self,
            Self::Mistake | Self::NeverFits | Self::Blocked | Self::Bypassed | Self::OwnPods
        )
    }
}

/// Why claims that are allocated together wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Why {
    pub verdict: Verdict,
    /// The mistake in the claim itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mistake: Option<String>,
    /// The reason in a sentence without a stop: who has what would do, or what is not offered.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cause: String,
    /// Reasons per node; nodes with the same reasons are grouped.
    pub nodes: Vec<NodesWhy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Why {
    /// Returns the reason in a sentence without a stop.
    pub fn sentence(&self) -> &str {
        if self.cause.is_empty() {
            self.verdict.sentence()
        } else {
            &self.cause
        }
    }

    /// Returns an answer without reasons.
    pub fn of(verdict: Verdict) -> Self {
        Self {
            verdict,
            mistake: None,
            cause: String::new(),
            nodes: Vec::new(),
            hint: None,
        }
    }
}

/// Nodes with the same reasons.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodesWhy {
    pub nodes: Vec<String>,
    pub reasons: Vec<String>,
    /// All the reasons of the first of them, device by device.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub detail: String,
}
