//! Demands of a pod on its node beside devices.

use divvy_allocator::selects_node;
use divvy_model::Quantity;
use k8s_openapi::api::core::v1::{
    Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm, Pod, PodSpec, Toleration,
};

/// Returns the priority that admission gave a pod.
pub fn priority(pod: &Pod) -> i32 {
    pod.spec
        .as_ref()
        .and_then(|spec| spec.priority)
        .unwrap_or(0)
}

/// Says whether a pod has ended, and so holds nothing of its node.
pub fn has_ended(pod: &Pod) -> bool {
    let phase = pod
        .status
        .as_ref()
        .and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Returns what a pod demands by labels: nodeSelector and required affinity together.
pub fn selector(spec: &PodSpec) -> Option<NodeSelector> {
    let labels = spec.node_selector.iter().flatten();
    let labels: Vec<NodeSelectorRequirement> = labels
        .map(|(key, value)| NodeSelectorRequirement {
            key: key.clone(),
            operator: "In".to_owned(),
            values: Some(vec![value.clone()]),
        })
        .collect();
    let affinity = spec.affinity.as_ref().and_then(|affinity| {
        let of_nodes = affinity.node_affinity.as_ref()?;
        let required = &of_nodes.required_during_scheduling_ignored_during_execution;
        required.clone()
    });
    match affinity {
        None if labels.is_empty() => None,
        None => Some(NodeSelector {
            node_selector_terms: vec![NodeSelectorTerm {
                match_expressions: Some(labels),
                ..NodeSelectorTerm::default()
            }],
        }),
        Some(mut affinity) => {
            for term in &mut affinity.node_selector_terms {
                let all = term.match_expressions.get_or_insert_default();
                all.extend(labels.iter().cloned());
            }
            Some(affinity)
        }
    }
}

/// Returns thousandths of cores and bytes of memory that the containers of a pod request.
pub fn resources(spec: &PodSpec) -> [u64; 2] {
    let of = |name: &str, unit: i128| {
        let resources = spec
            .containers
            .iter()
            .filter_map(|of| of.resources.as_ref());
        let requests = resources.filter_map(|of| of.requests.as_ref());
        let amounts =
            requests.filter_map(|requests| requests.get(name)?.0.parse::<Quantity>().ok());
        amounts
            .map(|amount| u64::try_from(amount.nanos() / unit).unwrap_or(0))
            .sum()
    };
    [of("cpu", 1_000_000), of("memory", 1_000_000_000)]
}

/// Returns what pods may request of a node, in the same units; 0 where it does not say.
pub(crate) fn allocatable(node: &Node) -> [u64; 2] {
    let status = node.status.as_ref();
    let all = status.and_then(|status| status.allocatable.as_ref());
    let of = |name: &str, unit: i128| {
        let amount = all.and_then(|all| all.get(name)?.0.parse::<Quantity>().ok());
        let amount = amount.and_then(|amount| u64::try_from(amount.nanos() / unit).ok());
        amount.unwrap_or(0)
    };
    [of("cpu", 1_000_000), of("memory", 1_000_000_000)]
}

/// Says whether a pod may run on a node: labels and taints.
pub(crate) fn may_run_on(
    node: &Node,
    selector: Option<&NodeSelector>,
    tolerations: &[Toleration],
) -> bool {
    // A selector that cannot be evaluated selects nothing.
    let selected = selector.is_none_or(|selector| selects_node(selector, node).unwrap_or(false));
    let taints = node.spec.as_ref().and_then(|spec| spec.taints.as_deref());
    let mut taints = taints.unwrap_or_default().iter();
    let is_borne = |taint: &k8s_openapi::api::core::v1::Taint| {
        taint.effect == "PreferNoSchedule"
            || tolerations.iter().any(|toleration| {
                let effect = toleration.effect.as_deref().unwrap_or_default();
                let key = toleration.key.as_deref().unwrap_or_default();
                let exists = toleration.operator.as_deref() == Some("Exists");
                let value = toleration.value.as_deref().unwrap_or_default();
                (effect.is_empty() || effect == taint.effect)
                    && (key == taint.key || (key.is_empty() && exists))
                    && (exists || value == taint.value.as_deref().unwrap_or_default())
            })
    };
    selected && taints.all(is_borne)
}
