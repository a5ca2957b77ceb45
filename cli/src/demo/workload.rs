//! What the controllers of a cluster make of manifests: pods from Deployments, claims from templates, and who uses
//! which claim. Pure.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::core::v1::{Pod, PodResourceClaim};
use k8s_openapi::api::resource::v1::{
    DeviceClaim, DeviceClass, DeviceRequest, ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::expect::{self, Expected};
use crate::manifests::Manifests;

/// A class as an extended resource without a name of its own.
const BY_CLASS: &str = "deviceclass.resource.kubernetes.io/";

/// Somebody who wants claims prepared: a pod, or nobody (a claim on its own).
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Consumer {
    /// Pod name; `None` for a claim that no pod names.
    pub(crate) pod: Option<String>,
    /// Namespace of the pod and its claims.
    pub(crate) namespace: String,
    /// Names of its claims, in the pod's order.
    pub(crate) claims: Vec<String>,
    /// What should become of it.
    pub(crate) expected: Expected,
    /// The round after which it ends.
    pub(crate) ends: Option<u32>,
}

impl Consumer {
    /// What it is called in messages.
    pub(crate) fn name(&self) -> String {
        match (&self.pod, self.claims.first()) {
            (Some(pod), _) => format!("pod {}/{pod}", self.namespace),
            (None, Some(claim)) => format!("claim {}/{claim}", self.namespace),
            (None, None) => "nobody".to_owned(),
        }
    }
}

/// Everything to allocate: the claims, and their consumers in the order in which they arrive.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Workload {
    pub(crate) claims: Vec<ResourceClaim>,
    pub(crate) consumers: Vec<Consumer>,
}

/// Expands manifests as the Deployment and ResourceClaim controllers would. UIDs are the API server's to give.
pub(crate) fn expand(manifests: &Manifests) -> Result<Workload> {
    let mut workload = Workload { claims: manifests.claims.clone(), consumers: Vec::new() };
    for claim in &mut workload.claims {
        claim.metadata.namespace = Some(namespace(&claim.metadata));
    }
    for pod in pods(manifests) {
        let consumer = consumer(&pod, manifests, &mut workload.claims)?;
        if !consumer.claims.is_empty() {
            workload.consumers.push(consumer);
        }
    }
    for claim in &workload.claims {
        let (namespace, name) = (namespace(&claim.metadata), claim.metadata.name.clone().unwrap_or_default());
        let used = workload.consumers.iter().any(|c| c.namespace == namespace && c.claims.contains(&name));
        if !used {
            let (expected, ends) =
                expect::read(&claim.metadata).with_context(|| format!("claim {namespace}/{name}"))?;
            workload.consumers.push(Consumer { pod: None, namespace, claims: vec![name], expected, ends });
        }
    }
    Ok(workload)
}

fn namespace(meta: &ObjectMeta) -> String {
    meta.namespace.clone().unwrap_or_else(|| "default".to_owned())
}

/// Replicas first, then pods on their own.
fn pods(manifests: &Manifests) -> Vec<Pod> {
    let mut pods = Vec::new();
    for deployment in &manifests.deployments {
        let spec = &deployment.spec;
        let name = deployment.metadata.name.as_deref().unwrap_or("deployment");
        for replica in 0..spec.replicas.unwrap_or(1) {
            let mut metadata = spec.template.metadata.clone().unwrap_or_default();
            metadata.name = Some(format!("{name}-{replica}"));
            metadata.namespace.clone_from(&deployment.metadata.namespace);
            pods.push(Pod { metadata, spec: spec.template.spec.clone(), status: None });
        }
    }
    pods.extend(manifests.pods.iter().cloned());
    pods
}

fn consumer(pod: &Pod, manifests: &Manifests, claims: &mut Vec<ResourceClaim>) -> Result<Consumer> {
    let name = pod.metadata.name.clone().context("a Pod has no metadata.name")?;
    let namespace = namespace(&pod.metadata);
    let entries = pod.spec.as_ref().and_then(|spec| spec.resource_claims.clone()).unwrap_or_default();
    let mut names = Vec::new();
    for entry in &entries {
        names.push(
            claim_of(entry, &name, &namespace, manifests, claims)
                .with_context(|| format!("pod {namespace}/{name}, resourceClaims entry {:?}", entry.name))?,
        );
    }
    names.extend(extended_resources(pod, &name, &namespace, &manifests.classes, claims));
    let (expected, ends) = expect::read(&pod.metadata).with_context(|| format!("pod {namespace}/{name}"))?;
    Ok(Consumer { pod: Some(name), namespace, claims: names, expected, ends })
}

fn claim_of(
    entry: &PodResourceClaim,
    pod: &str,
    in_namespace: &str,
    manifests: &Manifests,
    claims: &mut Vec<ResourceClaim>,
) -> Result<String> {
    let is =
        |meta: &ObjectMeta, name: &str| meta.name.as_deref() == Some(name) && namespace(meta) == in_namespace;
    if let Some(name) = &entry.resource_claim_name {
        if !claims.iter().any(|claim| is(&claim.metadata, name)) {
            bail!("resourceClaimName {name:?}: there is no such ResourceClaim in the manifests");
        }
        return Ok(name.clone());
    }
    let Some(template) = &entry.resource_claim_template_name else {
        bail!("neither resourceClaimName nor resourceClaimTemplateName is set");
    };
    let Some(found) = manifests.templates.iter().find(|t| is(&t.metadata, template)) else {
        bail!(
            "resourceClaimTemplateName {template:?}: there is no such ResourceClaimTemplate in the manifests"
        );
    };
    let name = format!("{pod}-{}", entry.name);
    let annotation = ("resource.kubernetes.io/pod-claim-name".to_owned(), entry.name.clone());
    claims.push(ResourceClaim {
        metadata: ObjectMeta {
            name: Some(name.clone()),
            namespace: Some(in_namespace.to_owned()),
            annotations: Some(BTreeMap::from([annotation])),
            ..ObjectMeta::default()
        },
        spec: found.spec.as_ref().and_then(|spec| spec.spec.clone()),
        status: None,
    });
    Ok(name)
}

/// The claim that the scheduler makes for a pod whose containers ask for extended resources that classes stand for.
fn extended_resources(
    pod: &Pod,
    name: &str,
    in_namespace: &str,
    classes: &[DeviceClass],
    claims: &mut Vec<ResourceClaim>,
) -> Option<String> {
    let class_of = |resource: &str| {
        let is_it = |class: &&DeviceClass| {
            let named = class.spec.as_ref().and_then(|spec| spec.extended_resource_name.as_deref());
            let class = class.metadata.name.as_deref().unwrap_or_default();
            named == Some(resource) || resource.strip_prefix(BY_CLASS) == Some(class)
        };
        classes.iter().find(is_it)?.metadata.name.clone()
    };
    let spec = pod.spec.as_ref()?;
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers).enumerate();
    let mut requests = Vec::new();
    for (container, of) in containers {
        let limits = of.resources.iter().flat_map(|resources| resources.limits.iter().flatten());
        for (number, (class, amount)) in
            limits.filter_map(|(resource, amount)| Some((class_of(resource)?, amount))).enumerate()
        {
            requests.push(DeviceRequest {
                name: format!("container-{container}-request-{number}"),
                exactly: Some(ExactDeviceRequest {
                    device_class_name: class,
                    count: amount.0.parse().ok(),
                    ..ExactDeviceRequest::default()
                }),
                ..DeviceRequest::default()
            });
        }
    }
    if requests.is_empty() {
        return None;
    }
    let claim = format!("{name}-extended-resources");
    let annotation = ("resource.kubernetes.io/extended-resource-claim".to_owned(), "true".to_owned());
    let devices = DeviceClaim { requests: Some(requests), ..DeviceClaim::default() };
    claims.push(ResourceClaim {
        metadata: ObjectMeta {
            name: Some(claim.clone()),
            namespace: Some(in_namespace.to_owned()),
            annotations: Some(BTreeMap::from([annotation])),
            ..ObjectMeta::default()
        },
        spec: Some(ResourceClaimSpec { devices: Some(devices) }),
        status: None,
    });
    Some(claim)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expand_text(text: &str) -> Result<Workload> {
        expand(&Manifests::parse("test", text)?)
    }

    #[test]
    fn replicas_get_claims_of_their_own_and_shared_claims_stay_one() {
        let text = include_str!("../../../examples/deployment/manifests.yaml");
        let workload = expand_text(text).unwrap();
        let names: Vec<_> = workload.claims.iter().filter_map(|c| c.metadata.name.as_deref()).collect();
        assert_eq!(names, ["replicas-0-gpu", "replicas-1-gpu"]);
        assert!(workload.claims.iter().all(|claim| claim.spec.is_some()));

        let text = include_str!("../../../examples/shared-claim/manifests.yaml");
        let workload = expand_text(text).unwrap();
        assert_eq!(workload.claims.len(), 1);
        let pods: Vec<_> = workload.consumers.iter().map(|c| (c.pod.as_deref(), c.claims.clone())).collect();
        assert_eq!(
            pods,
            [(Some("reader"), vec!["shared".to_owned()]), (Some("writer"), vec!["shared".to_owned()])]
        );
    }

    #[test]
    fn extended_resources_become_a_claim_as_the_scheduler_makes_it() {
        let text = include_str!("../../../examples/extended-resource/manifests.yaml");
        let workload = expand_text(text).unwrap();
        let claim =
            workload.claims.iter().find(|c| c.metadata.name.as_deref() == Some("legacy-extended-resources"));
        let requests = claim.and_then(|c| c.spec.clone()?.devices?.requests).unwrap();
        let asked = requests.iter().map(|request| {
            let exact = request.exactly.clone().unwrap();
            (request.name.as_str(), exact.device_class_name, exact.count)
        });
        assert_eq!(
            asked.collect::<Vec<_>>(),
            [("container-0-request-0", "gpu-as-extended-resource".to_owned(), Some(1))]
        );
    }

    #[test]
    fn a_bare_claim_is_a_consumer_and_a_missing_one_is_named() {
        let text = include_str!("../../../examples/device-config/manifests.yaml");
        assert_eq!(expand_text(text).unwrap().consumers[0].pod, None);
        let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\nspec:\n  containers: []\n  resourceClaims: [{name: g, resourceClaimName: absent}]\n";
        assert_eq!(
            format!("{:#}", expand_text(text).unwrap_err()),
            "pod default/p, resourceClaims entry \"g\": resourceClaimName \"absent\": there is no such ResourceClaim in the manifests"
        );
    }
}
