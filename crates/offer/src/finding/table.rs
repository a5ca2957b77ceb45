//! The table of findings: the kind and weight of each, and where it is shown.

use std::borrow::Cow;

use crate::health::key;
use crate::{Finding, Use};

/// The weight of a finding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Severity {
    /// A fault of divvy.
    Bug,
    /// A person has to do something.
    Trouble,
    /// Worth knowing: the state was requested, or ends by itself.
    Notice,
    /// For the log.
    Info,
}

/// An Event about a finding.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// On the node, when the finding is new.
    Node(&'static str),
    /// On the policy, when the finding is new.
    Policy(&'static str),
    /// Written by the task that observes it, which knows more: when a fault began, who holds the
    /// device, for how long the driver has been away.
    BySource(Cow<'static, str>),
}

impl Event {
    /// Returns the Event's reason, in kebab-case.
    pub fn reason(&self) -> &str {
        match self {
            Self::Node(reason) | Self::Policy(reason) => reason,
            Self::BySource(reason) => reason,
        }
    }
}

/// A row of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// A stable word: the kind of a trouble in the GpuNode's status.
    pub kind: &'static str,
    pub severity: Severity,
    /// True if the GpuNode's status has it.
    pub in_status: bool,
    /// True if it is logged when it is new.
    pub in_log: bool,
    pub event: Option<Event>,
}

fn row(kind: &'static str, severity: Severity) -> Shown {
    Shown {
        kind,
        severity,
        in_status: false,
        in_log: false,
        event: None,
    }
}

impl Shown {
    fn status(self) -> Self {
        Self {
            in_status: true,
            ..self
        }
    }

    fn log(self) -> Self {
        Self {
            in_log: true,
            ..self
        }
    }

    /// An Event is logged too.
    fn node(self, reason: &'static str) -> Self {
        Self {
            event: Some(Event::Node(reason)),
            ..self.log()
        }
    }

    fn policy(self, reason: &'static str) -> Self {
        Self {
            event: Some(Event::Policy(reason)),
            ..self.log()
        }
    }

    /// The task that writes the Event logs the finding too.
    fn by_source(self, reason: impl Into<Cow<'static, str>>) -> Self {
        Self {
            event: Some(Event::BySource(reason.into())),
            ..self
        }
    }
}

impl Finding {
    /// Returns its row of the table.
    pub fn shown(&self) -> Shown {
        use Severity::{Bug, Info, Notice, Trouble};
        match self {
            // The node.
            Self::OverLimit { .. } => row("over-limit", Bug).log(),
            Self::NodeLeft { claims } => {
                row("node-left", if *claims > 0 { Trouble } else { Notice }).status()
            }
            Self::NvidiaServes => row("nvidia-serves", Trouble)
                .status()
                .node("nvidia-plugin-serves"),
            Self::SupervisorAway { .. } => row("mps-supervisor-away", Trouble)
                .status()
                .node("mps-supervisor-away"),
            Self::DriverReleased { .. } => row("driver-released", Notice).status(),
            Self::DriverDown { .. } => row("driver-down", Trouble)
                .status()
                .by_source("nvidia-driver-down"),
            Self::NotStored { .. } | Self::GrantNotStored { .. } => {
                row("not-stored", Trouble).status()
            }
            Self::OneModeForEach { .. } => row("one-mode", Notice)
                .status()
                .node("one-mode-for-each-gpu"),
            // Policies.
            Self::BadPolicy { .. } => row("bad-policy", Trouble).status().by_source("bad-policy"),
            Self::RuleDecides { .. } => row("rule-decides", Info).log(),
            Self::RuleWithoutEffect(_) => row("rule-without-effect", Notice)
                .status()
                .policy("rule-without-effect"),
            // GPUs that are ill or gone.
            Self::Ill { ailment, .. } => row(suffix(key(*ailment)), Trouble)
                .status()
                .by_source(format!("gpu-{}", ailment.name())),
            Self::Silent { .. } => row("unreadable", Trouble).status(),
            Self::Unlisted { .. } => row("lost", Trouble).status(),
            Self::Removed { .. } => row("gpu-removed", Trouble)
                .status()
                .by_source("gpu-removed"),
            Self::PartitionGone { .. } => {
                row("partition-gone", Trouble).by_source("partition-gone")
            }
            Self::Unmonitored { for_good, .. } => {
                row("unmonitored", if *for_good { Notice } else { Trouble }).status()
            }
            Self::Unreadable { .. } => row("not-read", Trouble).node("gpu-unreadable"),
            // GPUs that others than their claims have something to do with.
            Self::Uncertain { .. } | Self::NewerRecord { .. } => row("fenced", Trouble).status(),
            Self::Lingering { .. } => row("lingering", Trouble).status(),
            Self::MpsWedged { .. } => row("mps-wedged", Trouble)
                .status()
                .node("mps-server-wedged"),
            Self::Neighbour { .. } => row("neighbour", Trouble)
                .status()
                .node("gpu-used-by-others"),
            Self::ForeignInstance { .. } => row("foreign", Trouble)
                .status()
                .node("foreign-mig-instance"),
            // Devices that claims hold.
            Self::GivenTwice { .. } => row("given-twice", Trouble).status().node("given-twice"),
            Self::GoneUnderClaim { .. } => row("held-and-gone", Trouble).status(),
            Self::HeldAndGone { recorded, .. } => {
                let row = row("held-and-gone", Trouble).node("gpu-lost");
                if *recorded { row } else { row.status() }
            }
            Self::HeldUnknown { .. } => row("unknown-device", Trouble)
                .status()
                .node("unknown-device"),
            Self::HeldAndWithdrawn { .. } => row("held-and-withdrawn", Notice).log(),
            // Forms that are not offered.
            Self::OutOfUse { .. } => row("not-offered", Trouble).status(),
            Self::NothingOffered { .. } => row("not-offered", Trouble).status().log(),
            Self::NeedsReset { .. } => row("needs-reset", Notice).status().log(),
            Self::NotPersistent { .. } => row("not-persistent", Notice).status().log(),
            Self::MigModeOn { .. } => row("mig-mode-on", Notice).status().log(),
            Self::NoShares { .. } => row("no-shares", Notice).status().log(),
            Self::NoMps { .. } => row("no-mps", Notice).status().log(),
            Self::NoCounters { .. } => row("no-partitions", Notice).status().log(),
            Self::OneMode { .. } => row("one-of-several-modes", Notice).log(),
            Self::NothingToShare { .. } => row("nothing-to-share", Notice).log(),
            Self::NotOneComputeInstance { .. } => row("compute-instances", Notice).log(),
            Self::TaintsDropped { .. } => row("taints-dropped", Notice).log(),
            Self::TooManySlices { .. } => row("too-many-slices", Notice).log(),
            Self::UnknownProfile { .. } => row("unknown-profile", Notice).log(),
            Self::ValueLeftOut { .. } => row("value-left-out", Notice).log(),
            Self::CounterDropped { .. } => row("counter-dropped", Notice).log(),
        }
    }

    /// Returns the reason of its Event in kebab-case, or its kind if it has none.
    pub fn reason(&self) -> String {
        let shown = self.shown();
        let event = shown.event.as_ref();
        event.map_or(shown.kind, Event::reason).to_owned()
    }

    /// Returns whether its words change while it stays the same: it is news only once.
    pub(super) fn is_restless(&self) -> bool {
        matches!(
            self,
            Self::MpsWedged { .. }
                | Self::Neighbour {
                    used: Use::Processes { .. },
                    ..
                }
        )
    }
}

/// The part of a key behind the slash.
fn suffix(key: &'static str) -> &'static str {
    key.rsplit('/').next().unwrap_or(key)
}
