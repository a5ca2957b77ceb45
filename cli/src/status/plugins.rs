//! Nodes on which divvy is to run and does not: what became of the plugin's pod there.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result};
use divvy_api::names::NODE_LABEL;
use k8s_openapi::api::apps::v1::DaemonSet;
use k8s_openapi::api::core::v1::{Event, Node, Pod, Taint, Toleration};
use k8s_openapi::jiff::Timestamp;

use super::pod::not_running;
use super::snapshot::{full_name, name, namespace, span};
use super::waiting::node_of;

/// Labels of the chart's DaemonSet of node plugins and its pods.
pub(crate) const PLUGINS: &str = "app.kubernetes.io/part-of=divvy,app.kubernetes.io/component=node";

/// The DaemonSets of node plugins, their pods, and warnings about the DaemonSets.
#[derive(Debug, Clone, Default)]
pub struct Plugins {
    pub(crate) sets: Vec<DaemonSet>,
    pub(crate) pods: Vec<Pod>,
    /// Warnings about DaemonSets, by their namespace and name.
    pub(crate) events: BTreeMap<String, Vec<Event>>,
    /// Resources that may not be listed, each with its namespace; "" for all of them.
    pub(crate) forbidden: Vec<(&'static str, String)>,
}

/// Why a node has no plugin, and what to do.
pub(crate) struct Absence {
    pub(crate) why: String,
    pub(crate) remedy: String,
}

impl Plugins {
    /// Returns what a list has, and notes one that is forbidden.
    pub(super) fn allowed<K>(
        &mut self,
        resource: &'static str,
        inside: &str,
        listed: Result<Vec<K>, kube::Error>,
    ) -> Result<Vec<K>> {
        match listed {
            Err(kube::Error::Api(status)) if status.code == 403 => {
                self.forbidden.push((resource, inside.to_owned()));
                Ok(Vec::new())
            }
            other => other.with_context(|| format!("{resource} cannot be listed")),
        }
    }

    /// Returns true if it is known that a node has no pod of the plugin.
    pub(super) fn is_away(&self, node: &str) -> bool {
        self.forbidden.is_empty() && !self.pods.iter().any(|pod| node_of(pod) == Some(node))
    }

    /// Returns what is known of the plugin of a node that reports nothing.
    pub(crate) fn absence(&self, node: &str, object: Option<&Node>, now: Timestamp) -> Absence {
        let label = format!("the node has the label {NODE_LABEL}=true");
        let pods: Vec<&Pod> = self
            .pods
            .iter()
            .filter(|pod| node_of(pod) == Some(node))
            .collect();
        if let Some(pod) = pods.first() {
            return of_pod(&label, pod);
        }
        if let Some((resource, inside)) = self.forbidden.first() {
            return forbidden(&label, resource, inside);
        }
        let Some(set) = self.sets.first() else {
            return Absence {
                why: format!("{label}, but the cluster has no DaemonSet of divvy's plugin"),
                remedy: "install the chart (docs/install/README.md)".to_owned(),
            };
        };
        let (inside, set_name) = (namespace(&set.metadata), name(&set.metadata));
        let no_pod = format!("{label}, but DaemonSet {inside}/{set_name} has no pod there");
        let describe = format!("`kubectl -n {inside} describe daemonset {set_name}`");
        // The controller makes no pod for a node with such a taint, and reports nothing.
        if let Some(taint) = object.and_then(|node| untolerated(node, set)) {
            let key = &taint.key;
            return Absence {
                why: format!("{no_pod}: it does not tolerate the node's taint {key}"),
                remedy: format!(
                    "add a toleration of {key} to the chart's value tolerations, or remove the taint"
                ),
            };
        }
        let events = self.events.get(&full_name(&set.metadata));
        let last = events.into_iter().flatten().max_by_key(|event| at(event));
        let Some(last) = last else {
            return Absence {
                why: format!("{no_pod}, and no Event says why"),
                remedy: format!("see {describe}; Events last an hour"),
            };
        };
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let (reason, message) = (text(&last.reason), text(&last.message));
        let age = at(last).map(|at| span(now.as_second().saturating_sub(at.as_second())));
        let age = age.map_or_else(String::new, |age| format!(" ({age} ago)"));
        Absence {
            why: format!("{no_pod}: {reason}{age}: {message}"),
            remedy: remedy(inside, &message).unwrap_or_else(|| format!("see {describe}")),
        }
    }
}

/// Returns the time of the last occurrence of an Event.
fn at(event: &Event) -> Option<Timestamp> {
    let series = event.series.as_ref();
    let series = series.and_then(|series| series.last_observed_time.as_ref());
    let last = event.last_timestamp.as_ref().map(|time| time.0);
    let made = event.event_time.as_ref().map(|time| time.0);
    last.or(series.map(|time| time.0)).or(made)
}

/// Returns what lets the DaemonSet make its pods, for the refusals that are usual.
fn remedy(inside: &str, message: &str) -> Option<String> {
    if message.contains("violates PodSecurity") {
        return Some(format!(
            "the plugin is privileged: `kubectl label namespace {inside} pod-security.kubernetes.io/enforce=privileged --overwrite`"
        ));
    }
    if message.contains("exceeded quota") || message.contains("failed quota") {
        return Some(format!(
            "raise or remove the quota: `kubectl -n {inside} describe resourcequota`"
        ));
    }
    if message.contains("denied the request") || message.contains("failed calling webhook") {
        return Some(format!(
            "an admission webhook keeps the pod out: leave namespace {inside} out of it, or make it answer"
        ));
    }
    None
}

fn of_pod(label: &str, pod: &Pod) -> Absence {
    let full = full_name(&pod.metadata);
    let (inside, pod_name) = (namespace(&pod.metadata), name(&pod.metadata));
    match not_running(pod).as_slice() {
        [] => Absence {
            why: format!("{label}, but no plugin reports its GPUs; its pod {full} is there"),
            remedy: format!(
                "see its log: `kubectl -n {inside} logs {pod_name}` (docs/runbooks/not-registered.md)"
            ),
        },
        states => Absence {
            why: format!(
                "{label}, but its pod {full} does not run: {}",
                states.join("; ")
            ),
            remedy: format!("see `kubectl -n {inside} describe pod {pod_name}`"),
        },
    }
}

fn forbidden(label: &str, resource: &str, inside: &str) -> Absence {
    let (scope, flag) = if inside.is_empty() {
        ("in the whole cluster".to_owned(), "-A".to_owned())
    } else {
        (format!("in namespace {inside}"), format!("-n {inside}"))
    };
    Absence {
        why: format!(
            "{label}, but no plugin reports its GPUs; unknown why: you may not list {resource} {scope}"
        ),
        remedy: format!(
            "ask a cluster admin for a ClusterRoleBinding to view (`kubectl auth can-i list {resource} {flag}`), or to look at the DaemonSet of divvy and its Events"
        ),
    }
}

/// Returns a taint of a node that keeps the pods of a DaemonSet away. The controller adds
/// tolerations of the node's own conditions to every pod.
fn untolerated<'a>(node: &'a Node, set: &DaemonSet) -> Option<&'a Taint> {
    let template = set.spec.template.spec.as_ref();
    let tolerations = template.and_then(|spec| spec.tolerations.as_deref());
    let mut taints = node
        .spec
        .iter()
        .flat_map(|spec| spec.taints.iter().flatten());
    taints.find(|taint| {
        let keeps_off = ["NoSchedule", "NoExecute"].contains(&&*taint.effect);
        let of_condition = taint.key.starts_with("node.kubernetes.io/");
        let mut all = tolerations.into_iter().flatten();
        keeps_off && !of_condition && !all.any(|toleration| tolerates(toleration, taint))
    })
}

fn tolerates(toleration: &Toleration, taint: &Taint) -> bool {
    let any = |field: &Option<String>, value: &str| {
        field
            .as_deref()
            .is_none_or(|field| field.is_empty() || field == value)
    };
    let exists = toleration.operator.as_deref() == Some("Exists");
    let value = taint.value.as_deref().unwrap_or_default();
    any(&toleration.effect, &taint.effect)
        && any(&toleration.key, &taint.key)
        && (exists || toleration.value.as_deref().unwrap_or_default() == value)
}
