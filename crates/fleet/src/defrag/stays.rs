//! Pods that are not to be evicted.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use super::Wanted;
use crate::pod::priority;

/// Annotations with which a pod asks to stay, and their values.
const ASKS: [(&str, &str); 3] = [
    ("divvy.dev/do-not-evict", "true"),
    ("cluster-autoscaler.kubernetes.io/safe-to-evict", "false"),
    ("karpenter.sh/do-not-disrupt", "true"),
];
/// Annotation of a pod that the kubelet makes of a file.
const MIRROR: &str = "kubernetes.io/config.mirror";

/// Says why a pod stays, whatever else is evicted; nothing where it may go.
pub(super) fn why(pod: &Pod, wanted: &Wanted, budgets: &[PodDisruptionBudget]) -> Option<String> {
    let (own, most) = (priority(pod), wanted.priority);
    if own > most {
        return Some(format!("its priority {own} is higher than {most}"));
    }
    let made = pod.metadata.creation_timestamp.as_ref();
    let before = wanted.care.made_before.as_ref();
    if before.is_some_and(|before| made.is_none_or(|made| made > before)) {
        return Some("it is newer than the pod that waits".to_owned());
    }
    let annotations = pod.metadata.annotations.as_ref();
    let asks = |(key, value): &&(&str, &str)| {
        annotations
            .and_then(|all| all.get(*key))
            .is_some_and(|found| found == value)
    };
    if let Some((key, value)) = ASKS.iter().find(asks) {
        return Some(format!("it asks to stay ({key}: {value:?})"));
    }
    if annotations.is_some_and(|all| all.contains_key(MIRROR)) {
        return Some("the kubelet made it of a file".to_owned());
    }
    let owners = pod.metadata.owner_references.iter().flatten();
    match owners
        .into_iter()
        .find(|owner| owner.controller == Some(true))
    {
        None => return Some("it has no controller that would make it again".to_owned()),
        Some(owner) if owner.kind == "DaemonSet" => {
            return Some("its DaemonSet would put it there again".to_owned());
        }
        Some(_) => {}
    }
    match of_pod(pod, budgets).as_slice() {
        [] => None,
        [one] => budgets
            .get(*one)
            .filter(|budget| allowed(budget) < 1)
            .map(|budget| {
                let name = budget.metadata.name.clone().unwrap_or_default();
                format!("PodDisruptionBudget {name} allows no disruption now")
            }),
        _ => {
            Some("several PodDisruptionBudgets select it, which the API server refuses".to_owned())
        }
    }
}

/// Returns the budgets that count a pod, by number.
pub(super) fn of_pod(pod: &Pod, budgets: &[PodDisruptionBudget]) -> Vec<usize> {
    let counts = |budget: &PodDisruptionBudget| {
        let selector = budget.spec.as_ref().and_then(|spec| spec.selector.as_ref());
        budget.metadata.namespace == pod.metadata.namespace
            && selector.is_some_and(|selector| selects(selector, pod))
    };
    let all = budgets.iter().enumerate();
    all.filter(|(_, budget)| counts(budget))
        .map(|(number, _)| number)
        .collect()
}

/// Returns how many pods of a budget may go now.
pub(super) fn allowed(budget: &PodDisruptionBudget) -> usize {
    let status = budget.status.as_ref();
    let allowed = status.and_then(|status| status.disruptions_allowed);
    let allowed = allowed.and_then(|allowed| usize::try_from(allowed).ok());
    allowed.unwrap_or(0)
}

/// Says whether a selector selects a pod; an empty one selects all.
fn selects(selector: &LabelSelector, pod: &Pod) -> bool {
    let labels = pod.metadata.labels.as_ref();
    let value = |key: &String| labels.and_then(|labels| labels.get(key));
    let mut equal = selector.match_labels.iter().flatten();
    let holds = |of: &LabelSelectorRequirement| {
        let found = value(&of.key);
        let listed = of
            .values
            .iter()
            .flatten()
            .any(|listed| Some(listed) == found);
        match of.operator.as_str() {
            "In" => listed,
            "NotIn" => !listed,
            "Exists" => found.is_some(),
            "DoesNotExist" => found.is_none(),
            // What is not known counts the pod, which keeps it.
            _ => true,
        }
    };
    equal.all(|(key, wanted)| value(key) == Some(wanted))
        && selector.match_expressions.iter().flatten().all(holds)
}
