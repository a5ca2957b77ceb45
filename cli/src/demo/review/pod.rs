//! Pods: the claims and requests that their containers name, and extended resources.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{Container, Pod, ResourceClaim};
use k8s_openapi::api::resource::v1::DeviceRequest;

use super::Findings;
use crate::demo::{extended, workload};
use crate::manifests::Manifests;
use crate::strict::did_you_mean;

impl Findings {
    pub(super) fn pod(&mut self, pod: &Pod, manifests: &Manifests) {
        let place = self.named("Pod", &pod.metadata);
        let Some(spec) = &pod.spec else { return };
        let entries = spec.resource_claims.as_deref().unwrap_or_default();
        let at = format!("{place}: spec");
        self.labels(&format!("{at}.resourceClaims"), entries.iter().map(|entry| entry.name.as_str()));
        for (number, entry) in entries.iter().enumerate() {
            if entry.resource_claim_name.is_some() == entry.resource_claim_template_name.is_some() {
                let what =
                    "Invalid value: must specify one of: `resourceClaimName`, `resourceClaimTemplateName`";
                self.refuse(&format!("{at}.resourceClaims[{number}]"), what);
            }
        }
        if spec.node_selector.is_some() || spec.affinity.is_some() || spec.node_name.is_some() {
            self.doubt(
                &at,
                "nodeSelector, affinity and nodeName are not looked at here: the demo has one node",
            );
        }
        let groups =
            [("initContainers", spec.init_containers.as_deref()), ("containers", Some(&spec.containers[..]))];
        for (group, containers) in groups {
            for (number, container) in containers.unwrap_or_default().iter().enumerate() {
                let at = format!("{at}.{group}[{number}].resources");
                self.container(&at, container, |claim| {
                    let entry = entries.iter().find(|entry| entry.name == claim)?;
                    let devices = workload::devices_of(entry, &pod.metadata, manifests);
                    // Without their alternatives: a container takes the request, whichever it gets.
                    let name = |request: &DeviceRequest| request.name.clone();
                    Some(devices.map(|devices| devices.requests.iter().flatten().map(name).collect()))
                });
            }
        }
    }

    /// `of_claim`: nothing where the pod has no such claim, else its requests, if they are known.
    fn container(
        &mut self,
        at: &str,
        container: &Container,
        of_claim: impl Fn(&str) -> Option<Option<BTreeSet<String>>>,
    ) {
        let Some(resources) = &container.resources else { return };
        let claims = resources.claims.as_deref().unwrap_or_default();
        for (number, claim) in claims.iter().enumerate() {
            let at = format!("{at}.claims[{number}]");
            let same = |before: &ResourceClaim| {
                let all = before.request.is_none() || claim.request.is_none();
                before.name == claim.name && (all || before.request == claim.request)
            };
            if claims.iter().take(number).any(same) {
                self.refuse(&at, &format!("Duplicate value: {:?}", claim.name));
            }
            match (of_claim(&claim.name), &claim.request) {
                (None, _) => {
                    let what = format!("Not found: {:?} is not among the pod's resourceClaims", claim.name);
                    self.refuse(&format!("{at}.name"), &what);
                }
                (Some(Some(there)), Some(request)) if !there.contains(request) => {
                    let hint = match request.split_once('/') {
                        Some((base, _)) if there.contains(base) => {
                            format!(" (write {base:?}: a container takes whichever alternative it gets)")
                        }
                        _ => did_you_mean(request, there.iter().map(String::as_str)),
                    };
                    let what = format!(
                        "the claim has no request {request:?}{hint}: the container would start without a device"
                    );
                    self.refuse(&format!("{at}.request"), &what);
                }
                _ => {}
            }
        }
        let limit = |name: &str| resources.limits.as_ref().and_then(|limits| limits.get(name));
        for (name, requested) in
            resources.requests.iter().flatten().filter(|(name, _)| extended::is_extended(name))
        {
            if limit(name) != Some(requested) {
                let what = format!(
                    "Invalid value: {:?}: must be equal to {name} limit of the container",
                    requested.0
                );
                self.refuse(&format!("{at}.requests[{name}]"), &what);
            }
        }
        for (name, amount) in
            resources.limits.iter().flatten().filter(|(name, _)| extended::is_extended(name))
        {
            if extended::amount(&amount.0).is_none_or(|amount| amount < 0) {
                let what = format!("Invalid value: {:?}: must be an integer", amount.0);
                self.refuse(&format!("{at}.limits[{name}]"), &what);
            }
        }
    }
}
