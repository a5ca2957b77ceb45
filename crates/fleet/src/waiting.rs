//! Pods that wait for devices, and what they ask for.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use thiserror::Error;

use crate::cluster::{Cluster, allocation};
use crate::pod;
use crate::worlds::Shape;

/// A pod that cannot be asked about; pods and claims are named as namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WaitingError {
    #[error("pod {0:?}: write NAMESPACE/NAME")]
    Name(String),
    #[error("pod {0} does not exist")]
    NoPod(String),
    #[error("pod {0} is on a node already")]
    Runs(String),
    #[error("pod {0} has no claims")]
    NoClaims(String),
    #[error("pod {0}: its claims are not made yet")]
    NotMade(String),
    #[error("claim {0} does not exist")]
    NoClaim(String),
    #[error("claim {claim} of pod {pod} has its devices already")]
    HasDevices { claim: String, pod: String },
}

/// Returns the name of a pod, as namespace and name.
pub fn name(pod: &Pod) -> String {
    let text = |part: &Option<String>| part.clone().unwrap_or_default();
    format!(
        "{}/{}",
        text(&pod.metadata.namespace),
        text(&pod.metadata.name)
    )
}

/// Returns the pod of a text as `namespace/name`.
pub fn find<'c>(cluster: &'c Cluster, text: &str) -> Result<&'c Pod, WaitingError> {
    if !text.contains('/') {
        return Err(WaitingError::Name(text.to_owned()));
    }
    let found = cluster.pods.iter().find(|pod| name(pod) == text);
    found.ok_or_else(|| WaitingError::NoPod(text.to_owned()))
}

/// Returns what a pod that waits asks for.
pub fn shape_of(pod: &Pod, all: &[ResourceClaim]) -> Result<Shape, WaitingError> {
    let text = name(pod);
    let spec = pod.spec.as_ref();
    if spec.is_some_and(|spec| spec.node_name.is_some()) {
        return Err(WaitingError::Runs(text));
    }
    let names = claims_of(pod);
    if names.is_empty() {
        return Err(WaitingError::NoClaims(text));
    }
    let mut claims = Vec::new();
    for name in names {
        let name = name.ok_or_else(|| WaitingError::NotMade(text.clone()))?;
        let is_it = |claim: &&ResourceClaim| {
            claim.metadata.name.as_deref() == Some(name.as_str())
                && claim.metadata.namespace == pod.metadata.namespace
        };
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        let full = format!("{namespace}/{name}");
        let Some(claim) = all.iter().find(is_it) else {
            return Err(WaitingError::NoClaim(full));
        };
        if allocation(claim).is_some() {
            return Err(WaitingError::HasDevices {
                claim: full,
                pod: text,
            });
        }
        claims.push(claim.clone());
    }
    Ok(asking(pod, claims))
}

/// Returns what a pod demands of its node, with these claims.
pub(crate) fn asking(pod: &Pod, claims: Vec<ResourceClaim>) -> Shape {
    let spec = pod.spec.as_ref();
    let tolerations = spec.and_then(|spec| spec.tolerations.clone());
    Shape {
        name: name(pod),
        claims,
        selector: spec.and_then(pod::selector),
        tolerations: tolerations.unwrap_or_default(),
        resources: spec.map(pod::resources).unwrap_or_default(),
        ..Shape::default()
    }
}

/// Returns the pods that the scheduler has refused, with the time since which they wait; the most
/// important first, then the one that waits longest.
pub fn refused(cluster: &Cluster) -> Vec<(&Pod, Time)> {
    let mut all: Vec<(&Pod, Time)> = cluster
        .pods
        .iter()
        .filter(|pod| !pod::has_ended(pod) && pod.metadata.deletion_timestamp.is_none())
        .filter_map(|pod| Some((pod, refused_since(pod)?)))
        .collect();
    all.sort_by(|(a, since_a), (b, since_b)| {
        let order = pod::priority(b).cmp(&pod::priority(a));
        order.then_with(|| (since_a, name(a)).cmp(&(since_b, name(b))))
    });
    all
}

fn refused_since(pod: &Pod) -> Option<Time> {
    if pod.spec.as_ref()?.node_name.is_some() {
        return None;
    }
    let conditions = pod.status.as_ref()?.conditions.as_ref()?;
    let refused = conditions.iter().find(|condition| {
        condition.type_ == "PodScheduled"
            && condition.status == "False"
            && condition.reason.as_deref() == Some("Unschedulable")
    });
    refused?.last_transition_time.clone()
}

/// Returns what a pod demands that decides on its node and is not looked at here, in words.
pub fn unknown_demand(pod: &Pod) -> Option<&'static str> {
    let spec = pod.spec.as_ref()?;
    let affinity = spec.affinity.as_ref();
    let beside = affinity.and_then(|affinity| affinity.pod_affinity.as_ref());
    let apart = affinity.and_then(|affinity| affinity.pod_anti_affinity.as_ref());
    let mut terms = [
        beside.and_then(|of| {
            of.required_during_scheduling_ignored_during_execution
                .as_ref()
        }),
        apart.and_then(|of| {
            of.required_during_scheduling_ignored_during_execution
                .as_ref()
        }),
    ]
    .into_iter()
    .flatten();
    if terms.any(|terms| !terms.is_empty()) {
        return Some("affinity to other pods");
    }
    if spec.scheduling_group.is_some() {
        return Some("the other pods of its group");
    }
    let spreads = spec.topology_spread_constraints.as_deref();
    let mut spreads = spreads.unwrap_or_default().iter();
    if spreads.any(|of| of.when_unsatisfiable == "DoNotSchedule") {
        return Some("topology spread");
    }
    let ports = spec
        .containers
        .iter()
        .flat_map(|of| of.ports.iter().flatten());
    if ports.into_iter().any(|port| port.host_port.is_some()) {
        return Some("ports of the node");
    }
    let mut volumes = spec.volumes.iter().flatten();
    if volumes.any(|of| of.persistent_volume_claim.is_some() || of.ephemeral.is_some()) {
        return Some("persistent volumes");
    }
    None
}

/// Returns the names of a pod's claims; none for one that is not made of its template yet.
fn claims_of(pod: &Pod) -> Vec<Option<String>> {
    let entries = pod
        .spec
        .iter()
        .flat_map(|spec| &spec.resource_claims)
        .flatten();
    let status = pod.status.as_ref();
    let made = status.and_then(|status| status.resource_claim_statuses.as_deref());
    let made = made.unwrap_or_default();
    let of = entries.map(|entry| {
        let own = made.iter().find(|of| of.name == entry.name);
        let own = own.and_then(|of| of.resource_claim_name.clone());
        entry.resource_claim_name.clone().or(own)
    });
    let extended = status.and_then(|status| status.extended_resource_claim_status.as_ref());
    let extended = extended.map(|of| Some(of.resource_claim_name.clone()));
    of.chain(extended).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<T: serde::de::DeserializeOwned>(text: &str) -> T {
        serde_json::from_str(text).unwrap()
    }

    #[test]
    fn refused_pods_come_by_priority_then_by_time() {
        let pod = |name: &str, priority: i32, since: &str, more: &str| -> Pod {
            read(&format!(
                r#"{{"metadata": {{"name": "{name}", "namespace": "n"}}, "spec": {{"containers": [], "priority": {priority} {more}}},
                "status": {{"conditions": [{{"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                    "lastTransitionTime": "2026-01-01T00:00:{since}Z"}}]}}}}"#
            ))
        };
        let runs = pod("runs", 9, "00", r#", "nodeName": "x""#);
        let mut ends = pod("ends", 9, "00", "");
        ends.metadata.deletion_timestamp = Some(read(r#""2026-01-01T00:00:00Z""#));
        let gated: Pod = read(
            r#"{"metadata": {"name": "g"}, "spec": {"containers": []}, "status": {"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}]}}"#,
        );
        let pods = [("late", 0, "09"), ("first", 5, "07"), ("early", 0, "03")];
        let mut all = vec![runs, ends, gated];
        all.extend(pods.map(|(name, priority, since)| pod(name, priority, since, "")));
        let cluster = Cluster {
            pods: all,
            ..Cluster::default()
        };
        let names: Vec<String> = refused(&cluster).iter().map(|(pod, _)| name(pod)).collect();
        assert_eq!(names, ["n/first", "n/early", "n/late"]);
    }

    #[test]
    fn a_demand_that_is_not_looked_at_is_named() {
        for (spec, expected) in [
            ("", None),
            (
                r#", "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "ScheduleAnyway"}]"#,
                None,
            ),
            (
                r#", "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "z", "whenUnsatisfiable": "DoNotSchedule"}]"#,
                Some("topology spread"),
            ),
            (
                r#", "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "h"}]}}"#,
                Some("affinity to other pods"),
            ),
            (
                r#", "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "h"}]}}"#,
                Some("affinity to other pods"),
            ),
            (
                r#", "volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]"#,
                Some("persistent volumes"),
            ),
            (r#", "volumes": [{"name": "v", "emptyDir": {}}]"#, None),
            (
                r#", "schedulingGroup": {"podGroupName": "g"}"#,
                Some("the other pods of its group"),
            ),
        ] {
            let pod: Pod = read(&format!(r#"{{"spec": {{"containers": []{spec}}}}}"#));
            assert_eq!(unknown_demand(&pod), expected, "{spec}");
        }
        let ports: Pod = read(
            r#"{"spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 80}]}]}}"#,
        );
        assert_eq!(unknown_demand(&ports), Some("ports of the node"));
    }

    #[test]
    fn a_pod_that_waits_asks_with_all_its_claims() {
        let waiting: Pod = read(
            r#"{"metadata": {"name": "a", "namespace": "n"}, "spec": {"containers": [], "resourceClaims": [
                {"name": "x", "resourceClaimTemplateName": "t"}, {"name": "y", "resourceClaimName": "own"}]},
                "status": {"resourceClaimStatuses": [{"name": "x", "resourceClaimName": "a-x-1"}]}}"#,
        );
        let claim = |name: &str| -> ResourceClaim {
            read(&format!(
                r#"{{"metadata": {{"name": "{name}", "namespace": "n"}}, "spec": {{}}}}"#
            ))
        };
        let mut cluster = Cluster {
            pods: vec![waiting],
            claims: vec![claim("a-x-1"), claim("own")],
            ..Cluster::default()
        };
        let asked = |cluster: &Cluster, pod: &str| {
            find(cluster, pod).and_then(|pod| shape_of(pod, &cluster.claims))
        };
        assert_eq!(asked(&cluster, "n/a").unwrap().claims.len(), 2);
        let says = |cluster: &Cluster, pod: &str| asked(cluster, pod).unwrap_err().to_string();
        assert!(says(&cluster, "a").contains("write NAMESPACE/NAME"));
        assert!(says(&cluster, "n/b").contains("does not exist"));
        cluster.claims[1].status = Some(read(r#"{"allocation": {}}"#));
        assert!(says(&cluster, "n/a").contains("has its devices already"));
        cluster.claims.pop();
        assert_eq!(says(&cluster, "n/a"), "claim n/own does not exist");
        cluster.pods[0].status = None;
        assert!(says(&cluster, "n/a").contains("its claims are not made yet"));
        cluster.pods[0].spec.as_mut().unwrap().node_name = Some("x".to_owned());
        assert!(says(&cluster, "n/a").contains("is on a node already"));
    }
}
