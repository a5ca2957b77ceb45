//! [`Notice`]: what people are notified of, each once.

use std::collections::BTreeSet;

use divvy_model::GpuUuid;
use divvy_model::mig::Placement;

use crate::world::Said;
use crate::{LimitError, Note, OneMode, PolicyProblem, Resolved};

/// Something to log, and for some of it to write as an Event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    /// A warning, as an Event of the node too.
    Node {
        /// The Event's reason.
        reason: &'static str,
        text: String,
    },
    /// A warning about a policy, as an Event of the policy too.
    Policy {
        /// What is wrong.
        problem: PolicyProblem,
        text: String,
    },
    /// A warning for the log only.
    Warning(String),
    /// A fault of divvy, for the log.
    Fault(String),
    /// For the log.
    Info(String),
}

impl Notice {
    /// What is new in the rules of the GPUs.
    pub(crate) fn of_rules(before: &Resolved, now: &Resolved, node: &str) -> Vec<Self> {
        let decided = now.by.iter().filter(|(gpu, by)| before.by.get(*gpu) != Some(*by));
        let decided = decided.map(|(gpu, by)| Self::Info(format!("rule {by} decides the modes of {gpu}")));
        let free = before.by.keys().filter(|gpu| !now.by.contains_key(*gpu));
        let free = free.map(|gpu| Self::Info(format!("no policy selects {gpu} any more")));
        let problems = now.problems.iter().filter(|problem| !before.problems.contains(problem));
        let problems = problems.map(|problem| Self::Policy {
            problem: problem.clone(),
            text: format!("node {node}: {problem}"),
        });
        decided.chain(free).chain(problems).collect()
    }

    pub(crate) fn fault(error: &LimitError) -> Self {
        Self::Fault(format!(
            "the pool exceeds a limit of the API and is not published (a bug in divvy): {error}"
        ))
    }
}

/// How an instance that others made is removed. By its id: without it, nvidia-smi removes all that are idle, those of
/// claims too.
pub fn removal_of_foreign(gpu: &GpuUuid) -> String {
    format!(
        "if it is not needed, find its instance ID with `nvidia-smi mig -i {gpu} -lgi` and remove that one with `nvidia-smi mig -i {gpu} -gi ID -dci && nvidia-smi mig -i {gpu} -gi ID -dgi`"
    )
}

impl Said {
    /// MIG instances made outside divvy.
    pub(crate) fn foreign(&mut self, foreign: &[(GpuUuid, Placement)]) -> Vec<Notice> {
        let now: BTreeSet<_> = foreign.iter().cloned().collect();
        let new = now.difference(&self.foreign).map(|(gpu, at)| Notice::Node {
            reason: "foreign-mig-instance",
            text: format!(
                "{gpu} has a MIG instance at memory slices {}..{} that divvy did not create: devices that overlap it are not allocated ({})",
                at.start,
                at.end().saturating_sub(1),
                removal_of_foreign(gpu)
            ),
        });
        let new = new.collect();
        self.foreign = now;
        new
    }

    /// Why GPUs are published in one mode only although several are asked for.
    pub(crate) fn one_mode(&mut self, why: Option<OneMode>) -> Option<Notice> {
        if self.one_mode == why {
            return None;
        }
        self.one_mode.clone_from(&why);
        Some(match why {
            Some(why) => Notice::Node {
                reason: "one-mode-for-each-gpu",
                text: format!("each GPU is offered in one mode instead of several: {why}"),
            },
            None => Notice::Info("GPUs can be offered in several modes".to_owned()),
        })
    }

    /// What is not published as it could be.
    pub(crate) fn notes(&mut self, notes: &BTreeSet<Note>) -> Vec<Notice> {
        let new = notes.difference(&self.notes).map(|note| match event_of(note) {
            Some(reason) => Notice::Node { reason, text: note.to_string() },
            None => Notice::Warning(note.to_string()),
        });
        let new = new.collect();
        self.notes.clone_from(notes);
        new
    }
}

/// The reason of an Event on the node, for notes that need a person.
fn event_of(note: &Note) -> Option<&'static str> {
    match note {
        Note::Unreadable { .. } => Some("gpu-unreadable"),
        Note::HeldAndGone { .. } => Some("gpu-lost"),
        Note::HeldUnknown { .. } => Some("unknown-device"),
        Note::GivenTwice { .. } => Some("given-twice"),
        _ => None,
    }
}
