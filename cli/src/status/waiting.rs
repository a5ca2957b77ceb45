//! Why claims are not allocated: the scheduler's allocator, run offline for every node.

use std::collections::{BTreeMap, BTreeSet};

use divvy_allocator::{
    AllocatedState, Allocator, Features, Holder, Inputs, Outcome, Slices, selects_node,
};
use divvy_why::cause::{self, Reader, Scene, chain};
use divvy_why::{Answer, OwnPods, Shortage, Tally, Verdict, Why};
use k8s_openapi::api::core::v1::{Node, NodeSelector, Pod, Toleration};
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::read::{CLAIMS, CLASSES, NODES, SLICES};
use super::siblings;
use super::snapshot::{Snapshot, full_name, name};

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

    /// Asks the allocator for one node after another.
    fn find_out(&self, claims: &[&ResourceClaim], pod: Option<&Pod>) -> Why {
        let lacks = |kind| self.snapshot.lacks(kind);
        if lacks(&SLICES) || lacks(&CLASSES) {
            return Why::of(Verdict::Unknown);
        }
        let slices = || self.snapshot.slices.iter().map(|slice| &slice.spec);
        let of_node: BTreeSet<&str> = slices()
            .filter_map(|slice| slice.node_name.as_deref())
            .collect();
        let everywhere = slices().any(|slice| slice.node_name.is_none());
        let stand_ins = self.stand_ins(&of_node);
        let mut tally = Tally::default();
        for node in self.snapshot.nodes.iter().chain(&stand_ins) {
            let name = name(&node.metadata);
            if !everywhere && !of_node.contains(name) {
                continue;
            }
            let answer = self.on(node, claims, pod);
            // Claims of other namespaces are unknown and may hold the devices.
            if matches!(answer, Answer::Fits) && lacks(&CLAIMS) {
                return Why::of(Verdict::Unknown);
            }
            if let Some(why) = tally.add(name, answer) {
                return why;
            }
        }
        let own = tally.holders().and_then(|holders| self.own(holders, pod));
        tally.why(own)
    }

    /// Says whether all who hold what the pod waits for are pods of its own owner.
    fn own(&self, holders: &BTreeSet<String>, pod: Option<&Pod>) -> Option<OwnPods> {
        if self.snapshot.lacks(&CLAIMS) {
            return None;
        }
        let is_holder = |claim: &&ResourceClaim| holders.contains(&Holder::of(claim).to_string());
        let claims: Vec<_> = self.snapshot.claims.iter().filter(is_holder).collect();
        siblings::own(pod?, &claims)
    }

    fn on(&self, node: &Node, claims: &[&ResourceClaim], pod: Option<&Pod>) -> Answer {
        if let Some(reason) = pod.and_then(|pod| keeps_away(node, pod, self.snapshot)) {
            return Answer::never(reason);
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
            Ok(Outcome::Fits(_)) => Answer::Fits,
            Ok(Outcome::DoesNotFit(now)) => {
                match self.allocator.allocate(&inputs(&alone), claims) {
                    Ok(Outcome::Fits(_)) => Answer::Not(short(&now), true),
                    // The claims of others make no difference then.
                    Ok(Outcome::DoesNotFit(ever)) => Answer::Not(short(&ever), false),
                    Err(error) if error.is_unknown() => Answer::Unknown(chain(&error)),
                    Err(_) => Answer::Not(short(&now), false),
                }
            }
            Err(error) if error.is_unknown() => Answer::Unknown(chain(&error)),
            Err(error) if error.is_of_node() => Answer::never(error.to_string()),
            Err(error) => {
                let classes = &self.snapshot.classes;
                let text = cause::of_error(&error, &self.scene, classes, Reader::Cluster);
                let detail = chain(&error);
                Answer::Mistake(text, detail)
            }
        }
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
