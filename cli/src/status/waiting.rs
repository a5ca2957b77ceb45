//! Why a claim is not allocated: the scheduler's allocator, run offline for every node, and its
//! reasons in short.

use std::collections::{BTreeMap, BTreeSet};

use divvy_allocator::{
    AllocError, AllocatedState, Allocator, Explanation, Features, Holder, Inputs, Outcome, Reason,
    RequestReason, Slices, selects_node,
};
use k8s_openapi::api::core::v1::{Node, NodeSelector, Pod, Toleration};
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;

use super::read::{CLAIMS, CLASSES, NODES, SLICES};
use super::siblings;
use super::snapshot::{Snapshot, full_name, name};
use crate::cause::{self, Cause, Reader, Scene, over_nodes};
use crate::taints::behind;

/// Names that are written out; the rest is counted.
const NAMED: usize = 3;

/// The hint where other claims hold the devices.
const ROOM: &str = "wait, or ask for less: a smaller request may fit now";

/// The outlook of a waiting claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Verdict {
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
    pub(crate) fn sentence(self) -> &'static str {
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
    pub(crate) fn is_hopeless(self) -> bool {
        matches!(
            self,
            Self::Mistake | Self::NeverFits | Self::Blocked | Self::Bypassed | Self::OwnPods
        )
    }
}

/// Why claims that are allocated together wait.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Why {
    pub(crate) verdict: Verdict,
    /// The mistake in the claim itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) mistake: Option<String>,
    /// The reason in a sentence without a stop: who has what would do, or what is not offered.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) cause: String,
    /// Reasons per node; nodes with the same reasons are grouped.
    pub(crate) nodes: Vec<NodesWhy>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) hint: Option<String>,
}

impl Why {
    /// Returns the reason in a sentence without a stop.
    pub(crate) fn sentence(&self) -> &str {
        if self.cause.is_empty() {
            self.verdict.sentence()
        } else {
            &self.cause
        }
    }

    fn of(verdict: Verdict) -> Self {
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
pub(crate) struct NodesWhy {
    pub(crate) nodes: Vec<String>,
    pub(crate) reasons: Vec<String>,
    /// All the reasons of the first of them, device by device.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) detail: String,
}

/// Answers questions about claims and remembers the answers.
pub(crate) struct Asker<'a> {
    snapshot: &'a Snapshot,
    slices: Slices<'a>,
    scene: Scene<'a>,
    allocated: AllocatedState,
    allocator: Allocator,
    /// Answers by question: the pods of a Deployment share one.
    known: BTreeMap<String, Why>,
}

/// The answer for one node.
enum NodeAnswer {
    Fits,
    /// The reasons, and whether the claims would fit on the empty node.
    Not(Box<Shortage>, bool),
    /// The mistake in a sentence, and as the allocator has it.
    Mistake(String, String),
    /// The allocator cannot decide, for this reason.
    Unknown(String),
}

impl NodeAnswer {
    fn never(reason: String) -> Self {
        Self::Not(
            Box::new(Shortage {
                reasons: vec![reason],
                ..Shortage::default()
            }),
            false,
        )
    }
}

/// Reasons of one node, to be merged with those of others.
#[derive(Debug, Default, PartialEq, Eq)]
struct Shortage {
    /// Nodes with the same reasons are grouped.
    reasons: Vec<String>,
    /// The reason in a sentence, where devices are the reason.
    cause: Option<Cause>,
    /// Claims that hold the requested devices.
    held_by: BTreeSet<String>,
    detail: String,
    hint: Option<String>,
    /// Claims that hold more of a pool's counters than there is: every other device of the pool is
    /// blocked.
    overdrawn_by: BTreeSet<String>,
}

impl<'a> Asker<'a> {
    /// Indexes the snapshot.
    pub(crate) fn new(snapshot: &'a Snapshot) -> Self {
        Self {
            snapshot,
            slices: Slices::new(&snapshot.slices),
            scene: Scene::new(&snapshot.driver, &snapshot.slices, &snapshot.claims),
            allocated: AllocatedState::from_claims(&snapshot.claims),
            allocator: Allocator::new(Features::of_kubernetes(snapshot.minor)),
            known: BTreeMap::new(),
        }
    }

    /// Why these claims, which one pod needs together, are not allocated.
    pub(crate) fn ask(&mut self, claims: &[&ResourceClaim], pod: Option<&Pod>) -> Why {
        // The answer does not depend on names; it quotes the names of the first question.
        let specs: Vec<_> = claims.iter().map(|claim| &claim.spec).collect();
        let selector = pod.and_then(|pod| pod.spec.as_ref()?.node_selector.as_ref());
        if let Some(node) = pod.and_then(node_of) {
            let hint = format!(
                "make the pod again without nodeName, and with nodeSelector: {{kubernetes.io/hostname: {node}}}"
            );
            return Why {
                hint: Some(hint),
                ..Why::of(Verdict::Bypassed)
            };
        }
        let elsewhere = pod.map(|pod| bound(pod, self.snapshot)).unwrap_or_default();
        let own = pod
            .map(|pod| held_by_pod(pod, self.snapshot))
            .unwrap_or_default();
        let own: Vec<String> = own.iter().map(|claim| full_name(&claim.metadata)).collect();
        let tolerations = pod.and_then(|pod| pod.spec.as_ref()?.tolerations.as_ref());
        let owner = pod.map(siblings::key);
        let question =
            serde_json::json!([specs, selector, elsewhere, own, tolerations, owner]).to_string();
        if let Some(why) = self.known.get(&question) {
            return why.clone();
        }
        let why = self.find_out(claims, pod);
        self.known.insert(question, why.clone());
        why
    }

    /// Returns nodes of these names where Nodes cannot be read.
    fn stand_ins(&self, names: &BTreeSet<&str>) -> Vec<Node> {
        if !self.snapshot.lacks(&NODES) {
            return Vec::new();
        }
        names.iter().map(|name| stand_in(name)).collect()
    }

    fn find_out(&self, claims: &[&ResourceClaim], pod: Option<&Pod>) -> Why {
        let slices = self.snapshot.slices.iter();
        let of_node: BTreeSet<&str> = slices
            .filter_map(|slice| slice.spec.node_name.as_deref())
            .collect();
        if [SLICES, CLASSES]
            .iter()
            .any(|kind| self.snapshot.lacks(kind))
        {
            return Why::of(Verdict::Unknown);
        }
        let everywhere = self
            .snapshot
            .slices
            .iter()
            .any(|slice| slice.spec.node_name.is_none());
        let mut why = Why::of(Verdict::NeverFits);
        let mut unknown = None;
        let mut causes: Vec<(String, Cause)> = Vec::new();
        let mut away: Vec<(String, String)> = Vec::new();
        // Holders of what would do, of each node that has room without them.
        let mut holders: Option<BTreeSet<String>> = Some(BTreeSet::new());
        // Nodes by reasons, with the holders of all of them.
        let mut alike: Vec<(Shortage, Vec<String>)> = Vec::new();
        let stand_ins = self.stand_ins(&of_node);
        for node in self.snapshot.nodes.iter().chain(&stand_ins) {
            let name = name(&node.metadata);
            if !everywhere && !of_node.contains(name) {
                continue;
            }
            match self.on(node, claims, pod) {
                // Claims of other namespaces are unknown and may hold the devices.
                NodeAnswer::Fits if self.snapshot.lacks(&CLAIMS) => {
                    return Why::of(Verdict::Unknown);
                }
                NodeAnswer::Fits => {
                    why.verdict = Verdict::Fits;
                    why.nodes = vec![NodesWhy {
                        nodes: vec![name.to_owned()],
                        reasons: vec!["has room for the claim".to_owned()],
                        detail: String::new(),
                    }];
                    return why;
                }
                // Another node may have room for certain.
                NodeAnswer::Unknown(reason) => unknown = Some(reason),
                NodeAnswer::Mistake(mistake, detail) => {
                    return Why {
                        verdict: Verdict::Mistake,
                        mistake: Some(mistake),
                        nodes: vec![NodesWhy {
                            nodes: vec![name.to_owned()],
                            reasons: vec![detail],
                            detail: String::new(),
                        }],
                        ..why
                    };
                }
                NodeAnswer::Not(short, room) => {
                    match &short.cause {
                        Some(cause) => causes.push((name.to_owned(), cause.clone())),
                        None => away.push((name.to_owned(), short.reasons.join("; "))),
                    }
                    if room && short.overdrawn_by.is_empty() {
                        why.verdict = Verdict::NoRoom;
                        holders = holders.filter(|_| !short.held_by.is_empty());
                        let all = holders.iter_mut();
                        all.for_each(|all| all.extend(short.held_by.iter().cloned()));
                    } else if room && why.verdict != Verdict::NoRoom {
                        why.verdict = Verdict::Blocked;
                    }
                    group(&mut alike, *short, name);
                }
            }
        }
        if unknown.is_some() {
            return Why {
                verdict: Verdict::Offline,
                hint: unknown,
                ..why
            };
        }
        if alike.is_empty() {
            why.hint = Some(
                "no driver publishes devices on any node: check that the plugin is running"
                    .to_owned(),
            );
        }
        why.cause = sentence(&causes, &away);
        if let Some(own) = holders.and_then(|holders| self.own(&why, &holders, pod)) {
            why.verdict = Verdict::OwnPods;
            why.cause = format!("{}; {}", why.cause, own.cause);
            why.hint = Some(own.hint);
        }
        why.hint = why.hint.or_else(|| match why.verdict {
            Verdict::NoRoom => Some(ROOM.to_owned()),
            Verdict::Blocked => alike.iter().find_map(|(short, _)| short.unblock()),
            _ => alike.iter().find_map(|(short, _)| short.hint.clone()),
        });
        why.nodes = alike
            .into_iter()
            .map(|(short, nodes)| short.into_nodes(nodes))
            .collect();
        why
    }

    /// Says whether all who hold what the pod waits for are pods of its own owner.
    fn own(
        &self,
        why: &Why,
        holders: &BTreeSet<String>,
        pod: Option<&Pod>,
    ) -> Option<siblings::Own> {
        if why.verdict != Verdict::NoRoom || self.snapshot.lacks(&CLAIMS) {
            return None;
        }
        let is_holder = |claim: &&ResourceClaim| holders.contains(&Holder::of(claim).to_string());
        let claims: Vec<_> = self.snapshot.claims.iter().filter(is_holder).collect();
        siblings::own(pod?, &claims)
    }

    fn on(&self, node: &Node, claims: &[&ResourceClaim], pod: Option<&Pod>) -> NodeAnswer {
        if let Some(reason) = pod.and_then(|pod| keeps_away(node, pod, self.snapshot)) {
            return NodeAnswer::never(reason);
        }
        let inputs = |allocated| Inputs {
            slices: &self.slices,
            classes: &self.snapshot.classes,
            allocated,
            node,
        };
        // The pod does not give up its own claims, whichever others end.
        let own = pod
            .map(|pod| held_by_pod(pod, self.snapshot))
            .unwrap_or_default();
        let alone = AllocatedState::from_claims(own.iter().copied());
        let short = |explanation| {
            let mut short = Shortage::of(explanation, &self.snapshot.taint_rules, &self.scene);
            short.set_apart(&own);
            Box::new(short)
        };
        match self.allocator.allocate(&inputs(&self.allocated), claims) {
            Ok(Outcome::Fits(_)) => NodeAnswer::Fits,
            Ok(Outcome::DoesNotFit(now)) => {
                match self.allocator.allocate(&inputs(&alone), claims) {
                    Ok(Outcome::Fits(_)) => NodeAnswer::Not(short(&now), true),
                    // The claims of others make no difference then.
                    Ok(Outcome::DoesNotFit(ever)) => NodeAnswer::Not(short(&ever), false),
                    Err(error) if error.is_unknown() => NodeAnswer::Unknown(chain(error)),
                    Err(_) => NodeAnswer::Not(short(&now), false),
                }
            }
            Err(error) if error.is_unknown() => NodeAnswer::Unknown(chain(error)),
            Err(error) if error.is_of_node() => NodeAnswer::never(error.to_string()),
            Err(error) => {
                let classes = &self.snapshot.classes;
                let text = cause::of_error(&error, &self.scene, classes, Reader::Cluster);
                let detail = chain(error);
                NodeAnswer::Mistake(text, detail)
            }
        }
    }
}

/// Adds a node to those with the same reasons.
fn group(alike: &mut Vec<(Shortage, Vec<String>)>, short: Shortage, node: &str) {
    let same = alike
        .iter_mut()
        .find(|(other, _)| other.reasons == short.reasons);
    match same {
        Some((other, nodes)) => {
            other.held_by.extend(short.held_by);
            nodes.push(node.to_owned());
        }
        None => alike.push((short, vec![node.to_owned()])),
    }
}

/// A node that cannot be read: it has only a name.
fn stand_in(name: &str) -> Node {
    Node {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        ..Node::default()
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

/// A sentence as what follows a colon.
fn small(text: &str) -> String {
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => String::new(),
    }
}

/// An error with its causes.
fn chain(error: AllocError) -> String {
    format!("{:#}", anyhow::Error::new(error))
}

/// Says what keeps the pod from a node; checks where its other claims are, cordons and the pod's
/// node selector.
fn keeps_away(node: &Node, pod: &Pod, snapshot: &Snapshot) -> Option<String> {
    let spec = pod.spec.as_ref()?;
    let is_elsewhere = |selector: &NodeSelector| selects_node(selector, node) == Ok(false);
    let claims = bound(pod, snapshot);
    if let Some((claim, _)) = claims
        .into_iter()
        .find(|(_, selector)| is_elsewhere(selector))
    {
        return Some(format!(
            "claim {claim} of the pod is allocated on another node"
        ));
    }
    if node.spec.as_ref()?.unschedulable == Some(true)
        && !spec.tolerations.iter().flatten().any(tolerates_cordons)
    {
        return Some("the node is cordoned".to_owned());
    }
    let labels = node.metadata.labels.as_ref();
    let lacks =
        |(key, value): &(&String, &String)| labels.and_then(|all| all.get(*key)) != Some(*value);
    let (key, value) = spec.node_selector.iter().flatten().find(lacks)?;
    Some(format!(
        "the node lacks the label {key}={value}, which the pod selects"
    ))
}

/// Says whether a toleration is for cordons, as that of the pods of a DaemonSet.
fn tolerates_cordons(toleration: &Toleration) -> bool {
    let is = |field: &Option<String>, value: &str| {
        field.as_deref().is_none_or(|f| f.is_empty() || f == value)
    };
    is(&toleration.key, "node.kubernetes.io/unschedulable")
        && is(&toleration.effect, "NoSchedule")
        && (toleration.operator.as_deref() == Some("Exists") || is(&toleration.value, ""))
}

impl Shortage {
    fn of(explanation: &Explanation, rules: &[DeviceTaintRule], scene: &Scene<'_>) -> Self {
        let cause = cause::of(explanation, scene).set_by(behind(explanation, rules));
        let detail = explanation.to_string();
        let mut short = Self {
            hint: cause
                .hint(Reader::Cluster)
                .map(|hint| small(&hint))
                .or_else(|| explanation.hint()),
            cause: Some(cause),
            ..Self::default()
        };
        if explanation.competing {
            short.reasons.push(if explanation.limited {
                "together, the requests exceed the limit of one claim".to_owned()
            } else {
                format!(
                    "each request can be met alone, but not all together{}",
                    explanation.counted()
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
            .flat_map(holders)
            .map(ToString::to_string)
            .collect();
        let overdrawn = reasons.filter(|reason| matches!(reason, Reason::PoolOverdrawn { .. }));
        short.overdrawn_by = overdrawn
            .flat_map(holders)
            .map(ToString::to_string)
            .collect();
        short.detail = detail;
        short
    }

    /// Names the pod's own claims apart from those of others.
    fn set_apart(&mut self, own: &[&ResourceClaim]) {
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
    fn unblock(&self) -> Option<String> {
        (!self.overdrawn_by.is_empty()).then(|| {
            let claims = some(self.overdrawn_by.iter());
            format!("of the claims {claims}, delete one with its pods: together they hold more of a GPU than it has")
        })
    }

    fn into_nodes(self, nodes: Vec<String>) -> NodesWhy {
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

fn holders(reason: &Reason) -> &[Holder] {
    match reason {
        Reason::InUse { by }
        | Reason::CounterShort { by, .. }
        | Reason::PoolOverdrawn { by, .. }
        | Reason::CapacityShort { by, .. } => by,
        _ => &[],
    }
}

/// A list that stays short.
pub(crate) fn some<T: AsRef<str>>(names: impl ExactSizeIterator<Item = T>) -> String {
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

/// Claims of a pod that are not allocated yet, if they are there.
pub(crate) fn open_claims<'a>(pod: &Pod, snapshot: &'a Snapshot) -> Vec<&'a ResourceClaim> {
    let is_open = |claim: &&ResourceClaim| {
        claim
            .status
            .as_ref()
            .is_none_or(|status| status.allocation.is_none())
    };
    there(pod, snapshot).filter(is_open).collect()
}

/// Returns the node that a pod is on, if it has one.
pub(super) fn node_of(pod: &Pod) -> Option<&str> {
    let node = pod.spec.as_ref()?.node_name.as_deref();
    node.filter(|node| !node.is_empty())
}

/// Returns the claims of a pod that are allocated.
fn held_by_pod<'a>(pod: &Pod, snapshot: &'a Snapshot) -> Vec<&'a ResourceClaim> {
    there(pod, snapshot)
        .filter(|claim| {
            claim
                .status
                .as_ref()
                .is_some_and(|status| status.allocation.is_some())
        })
        .collect()
}

/// Returns claims of a pod that are allocated for certain nodes, and these.
fn bound<'a>(pod: &Pod, snapshot: &'a Snapshot) -> Vec<(String, &'a NodeSelector)> {
    let nodes = |claim: &'a ResourceClaim| {
        claim
            .status
            .as_ref()?
            .allocation
            .as_ref()?
            .node_selector
            .as_ref()
    };
    there(pod, snapshot)
        .filter_map(|claim| Some((full_name(&claim.metadata), nodes(claim)?)))
        .collect()
}

/// The claims of a pod that are there.
fn there<'a>(pod: &Pod, snapshot: &'a Snapshot) -> impl Iterator<Item = &'a ResourceClaim> {
    let namespace = super::snapshot::namespace(&pod.metadata);
    let claims = claims_of(pod)
        .into_iter()
        .map(|claim| format!("{namespace}/{claim}"));
    let names: BTreeSet<String> = claims.collect();
    snapshot
        .claims
        .iter()
        .filter(move |claim| names.contains(&full_name(&claim.metadata)))
}

/// Names of a pod's claims, those made of templates too.
pub(crate) fn claims_of(pod: &Pod) -> Vec<String> {
    let named = pod
        .spec
        .iter()
        .flat_map(|spec| spec.resource_claims.iter().flatten());
    let made = pod
        .status
        .iter()
        .flat_map(|status| status.resource_claim_statuses.iter().flatten());
    let extended = pod
        .status
        .iter()
        .filter_map(|s| s.extended_resource_claim_status.as_ref());
    named
        .filter_map(|claim| claim.resource_claim_name.clone())
        .chain(made.filter_map(|status| status.resource_claim_name.clone()))
        .chain(extended.map(|status| status.resource_claim_name.clone()))
        .collect()
}
