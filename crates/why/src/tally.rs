//! Answer out of those of all nodes.

use std::collections::BTreeSet;

use crate::cause::{Cause, over_nodes};
use crate::shortage::Shortage;
use crate::verdict::{NodesWhy, Verdict, Why};

/// The hint where other claims hold the devices.
const ROOM: &str = "wait, or ask for less: a smaller request may fit now";

/// The allocator's answer for one node.
#[derive(Debug)]
pub enum Answer {
    /// The node has room.
    Fits,
    /// The reasons, and whether the claims would fit on the empty node.
    Not(Box<Shortage>, bool),
    /// The mistake in a sentence, and as the allocator has it.
    Mistake(String, String),
    /// The reason for which the allocator cannot decide.
    Unknown(String),
}

impl Answer {
    /// Returns the answer of a node that never serves the claims.
    pub fn never(reason: String) -> Self {
        Self::Not(
            Box::new(Shortage {
                reasons: vec![reason],
                ..Shortage::default()
            }),
            false,
        )
    }
}

/// Words about a pod that waits for pods of its own owner alone.
#[derive(Debug, PartialEq)]
pub struct OwnPods {
    /// Follows the reason for which the pod waits.
    pub cause: String,
    pub hint: String,
}

/// Answers of the nodes that were asked.
#[derive(Debug)]
pub struct Tally {
    verdict: Verdict,
    unknown: Option<String>,
    causes: Vec<(String, Cause)>,
    /// Nodes that the pod is kept away from, with the reason.
    away: Vec<(String, String)>,
    /// Holders of what would do, of each node that has room without them.
    holders: Option<BTreeSet<String>>,
    /// Nodes by reasons, with the holders of all of them.
    alike: Vec<(Shortage, Vec<String>)>,
}

impl Default for Tally {
    fn default() -> Self {
        Self {
            verdict: Verdict::NeverFits,
            unknown: None,
            causes: Vec::new(),
            away: Vec::new(),
            holders: Some(BTreeSet::new()),
            alike: Vec::new(),
        }
    }
}

impl Tally {
    /// Adds a node's answer; returns the answer for all where it settles that.
    pub fn add(&mut self, node: &str, answer: Answer) -> Option<Why> {
        let settled = |verdict, reason: String, mistake| Why {
            mistake,
            nodes: vec![NodesWhy {
                nodes: vec![node.to_owned()],
                reasons: vec![reason],
                detail: String::new(),
            }],
            ..Why::of(verdict)
        };
        match answer {
            Answer::Fits => {
                let reason = "has room for the claim".to_owned();
                return Some(settled(Verdict::Fits, reason, None));
            }
            Answer::Mistake(mistake, detail) => {
                return Some(settled(Verdict::Mistake, detail, Some(mistake)));
            }
            // Another node may have room for certain.
            Answer::Unknown(reason) => self.unknown = Some(reason),
            Answer::Not(short, room) => self.add_short(node, *short, room),
        }
        None
    }

    fn add_short(&mut self, node: &str, short: Shortage, room: bool) {
        match &short.cause {
            Some(cause) => self.causes.push((node.to_owned(), cause.clone())),
            None => self.away.push((node.to_owned(), short.reasons.join("; "))),
        }
        if room && short.overdrawn_by.is_empty() {
            self.verdict = Verdict::NoRoom;
            self.holders = self.holders.take().filter(|_| !short.held_by.is_empty());
            if let Some(all) = &mut self.holders {
                all.extend(short.held_by.iter().cloned());
            }
        } else if room && self.verdict != Verdict::NoRoom {
            self.verdict = Verdict::Blocked;
        }
        let same = (self.alike.iter_mut()).find(|(other, _)| other.reasons == short.reasons);
        match same {
            Some((other, nodes)) => {
                other.held_by.extend(short.held_by);
                nodes.push(node.to_owned());
            }
            None => self.alike.push((short, vec![node.to_owned()])),
        }
    }

    /// Returns the claims that hold all that would do, where others hold it.
    pub fn holders(&self) -> Option<&BTreeSet<String>> {
        let waits = self.verdict == Verdict::NoRoom && self.unknown.is_none();
        self.holders.as_ref().filter(|_| waits)
    }

    /// Returns the answer; `own` if all holders are pods of the pod's own owner.
    pub fn why(self, own: Option<OwnPods>) -> Why {
        let mut why = Why::of(self.verdict);
        if self.unknown.is_some() {
            return Why {
                hint: self.unknown,
                ..Why::of(Verdict::Offline)
            };
        }
        if self.alike.is_empty() {
            let none = "no driver publishes devices on any node: check that the plugin is running";
            why.hint = Some(none.to_owned());
        }
        why.cause = sentence(&self.causes, &self.away);
        if let Some(own) = own {
            why.verdict = Verdict::OwnPods;
            why.cause = format!("{}; {}", why.cause, own.cause);
            why.hint = Some(own.hint);
        }
        let mut short = self.alike.iter().map(|(short, _)| short);
        why.hint = why.hint.or_else(|| match why.verdict {
            Verdict::NoRoom => Some(ROOM.to_owned()),
            Verdict::Blocked => short.find_map(Shortage::unblock),
            _ => short.find_map(|short| short.hint.clone()),
        });
        let alike = self.alike.into_iter();
        why.nodes = alike
            .map(|(short, nodes)| short.into_nodes(nodes))
            .collect();
        why
    }
}

/// Says why no node serves the claims: for the devices of some, or for what keeps the pod away.
fn sentence(causes: &[(String, Cause)], away: &[(String, String)]) -> String {
    match (causes, away) {
        ([], [(node, reason)]) => format!("node {node}: {reason}"),
        ([], [(node, reason), rest @ ..]) => {
            format!(
                "node {node}: {reason}; no other of {} takes it",
                rest.len() + 1
            )
        }
        (causes, _) => over_nodes(causes, false),
    }
}
