//! Reasons of one node, in short: without the details that differ between nodes.

use std::collections::{BTreeMap, BTreeSet};

use divvy_allocator::{Explanation, Holder, Reason, RequestReason};
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaim};

use crate::cause::{self, Cause, Reader, Scene};
use crate::detail::{counted, detail, hint};
use crate::taints::behind;
use crate::verdict::NodesWhy;

/// Names that are written out; the rest is counted.
const NAMED: usize = 3;

/// Reasons of one node, to be merged with those of others.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Shortage {
    /// Nodes with the same reasons are grouped.
    pub(crate) reasons: Vec<String>,
    /// The reason in a sentence, where devices are the reason.
    pub(crate) cause: Option<Cause>,
    /// Claims that hold the requested devices.
    pub(crate) held_by: BTreeSet<String>,
    pub(crate) detail: String,
    pub(crate) hint: Option<String>,
    /// Claims that hold more of a pool's counters than there is: every other device of the pool is
    /// blocked.
    pub(crate) overdrawn_by: BTreeSet<String>,
}

impl Shortage {
    /// Returns the reasons of an explanation, with the DeviceTaintRules behind them.
    pub fn of(explanation: &Explanation, rules: &[DeviceTaintRule], scene: &Scene<'_>) -> Self {
        let cause = cause::of(explanation, scene).set_by(behind(explanation, rules));
        let mut short = Self {
            hint: cause
                .hint(Reader::Cluster)
                .map(|hint| small(&hint))
                .or_else(|| hint(explanation)),
            cause: Some(cause),
            ..Self::default()
        };
        if explanation.competing {
            short.reasons.push(if explanation.limited {
                "together, the requests exceed the limit of one claim".to_owned()
            } else {
                format!(
                    "each request can be met alone, but not all together{}",
                    counted(explanation)
                )
            });
            for constraint in &explanation.constraints {
                short
                    .reasons
                    .push(format!("{}: {}", constraint.constraint, constraint.problem));
            }
        } else {
            for request in &explanation.requests {
                short.reasons.push(short_request(request));
            }
        }
        for (_, problem) in &explanation.unusable_pools {
            short.reasons.push(format!("one of its pools {problem}"));
        }
        short.reasons.extend(behind(explanation, rules));
        let reasons = explanation
            .requests
            .iter()
            .flat_map(|request| &request.refused)
            .map(|d| &d.reason);
        short.held_by = reasons
            .clone()
            .flat_map(Reason::holders)
            .map(ToString::to_string)
            .collect();
        let overdrawn = reasons.filter(|reason| matches!(reason, Reason::PoolOverdrawn { .. }));
        short.overdrawn_by = overdrawn
            .flat_map(Reason::holders)
            .map(ToString::to_string)
            .collect();
        short.detail = detail(explanation);
        short
    }

    /// Names the pod's own claims apart from those of others.
    pub fn set_apart(&mut self, own: &[&ResourceClaim]) {
        let own = own.iter().map(|claim| Holder::of(claim).to_string());
        let holding: BTreeSet<String> = own.filter(|claim| self.held_by.remove(claim)).collect();
        if holding.is_empty() {
            return;
        }
        let claims = some(holding.iter());
        self.reasons
            .push(format!("the pod's own claim {claims} holds some of them"));
        self.hint = Some(format!(
            "the pod needs devices beside those of its own claim {claims}: ask for all of them in one claim, or use a node with \
             more"
        ));
    }

    /// Returns the way out where claims hold more than there is.
    pub(crate) fn unblock(&self) -> Option<String> {
        (!self.overdrawn_by.is_empty()).then(|| {
            let claims = some(self.overdrawn_by.iter());
            format!("delete one of the claims {claims} with its pods")
        })
    }

    /// Returns the reasons of these nodes, which have the same.
    pub(crate) fn into_nodes(self, nodes: Vec<String>) -> NodesWhy {
        let mut reasons = self.reasons;
        if !self.held_by.is_empty() {
            reasons.push(format!("held by {}", some(self.held_by.iter())));
        }
        NodesWhy {
            nodes,
            reasons,
            detail: self.detail,
        }
    }
}

/// `request "gpu" needs 1, 0 of 3 available: 1 in use, 2 tainted gpu.divvy.dev/lost`.
fn short_request(request: &RequestReason) -> String {
    let mut counts: BTreeMap<(u8, String), usize> = BTreeMap::new();
    for refused in &request.refused {
        *counts.entry(kind(&refused.reason)).or_default() += 1;
    }
    let total = request.available + request.refused.len();
    let wanted = request
        .wanted
        .map_or_else(|| "all".to_owned(), |wanted| wanted.to_string());
    let reasons: Vec<String> = counts
        .into_iter()
        .map(|((_, what), count)| format!("{count} {what}"))
        .collect();
    let class = &request.class;
    if total == 0 {
        return format!(
            "request {:?} needs {wanted} of class {class}, but there are no devices",
            request.request
        );
    }
    let colon = if reasons.is_empty() { "" } else { ": " };
    format!(
        "request {:?} needs {wanted} of class {class}, {} of {total} devices are available{colon}{}",
        request.request,
        request.available,
        reasons.join(", ")
    )
}

/// A reason without the details that differ between nodes; devices in use sort first, unselected
/// devices last.
fn kind(reason: &Reason) -> (u8, String) {
    match reason {
        Reason::InUse { .. } | Reason::CounterShort { .. } => {
            (0, "in use or overlapping a device in use".to_owned())
        }
        Reason::PoolOverdrawn { set, .. } => (
            0,
            format!("blocked, since more is held of {set} than it has"),
        ),
        Reason::CapacityShort {
            capacity, wanted, ..
        } => (1, format!("with less than {wanted} {capacity} left")),
        Reason::CapacityExceeded {
            capacity, wanted, ..
        } => (2, format!("with less than {wanted} {capacity} in total")),
        Reason::NoSuchCapacity { capacity, .. } => (3, format!("without capacity {capacity}")),
        Reason::Tainted { taint } => (
            4,
            format!(
                "tainted {}",
                taint.rsplit_once(':').map_or(taint.as_str(), |(t, _)| t)
            ),
        ),
        Reason::NoSuchAttribute { constraint } => (5, format!("without a value for {constraint}")),
        Reason::NotOnNode => (6, "on other nodes".to_owned()),
        Reason::FeatureOff => (6, "behind a disabled feature gate".to_owned()),
        Reason::Failed { error } => (7, format!("whose selector fails ({error})")),
        Reason::SelectorFalse {
            origin, expression, ..
        } => {
            let expression: Vec<&str> = expression.split_whitespace().collect();
            (
                8,
                format!("not selected by {origin} (`{}`)", expression.join(" ")),
            )
        }
    }
}

/// A sentence as what follows a colon.
fn small(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => String::new(),
    }
}

/// A list that stays short.
pub fn some<T: AsRef<str>>(names: impl ExactSizeIterator<Item = T>) -> String {
    let total = names.len();
    let first: Vec<String> = names
        .take(NAMED)
        .map(|name| name.as_ref().to_owned())
        .collect();
    let rest = if total > NAMED {
        format!(" and {} more", total - NAMED)
    } else {
        String::new()
    };
    format!("{}{rest}", first.join(", "))
}
