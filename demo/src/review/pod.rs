//! Pods and templates of pods: their containers, the claims and requests that these name, and
//! extended resources.

use std::collections::BTreeSet;

use divvy_model::Quantity;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, ResourceClaim, ResourceRequirements};
use k8s_openapi::api::resource::v1::DeviceRequest;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::{Findings, naming};
use crate::workload;
use divvy_cli::extended;
use divvy_cli::manifests::Manifests;
use divvy_cli::runtime;
use divvy_why::spelling::did_you_mean;

/// Greatest number of a port.
const LAST_PORT: i32 = 65_535;

impl Findings {
    pub(super) fn pod(&mut self, place: &str, pod: &Pod, manifests: &Manifests, driver: &str) {
        let at = format!("{place}: spec");
        let spec = pod.spec.clone().unwrap_or_default();
        self.restart_policy(&at, "Pod", spec.restart_policy.as_deref());
        self.pod_spec(&at, &spec, &pod.metadata, (manifests, driver));
    }

    /// Checks the spec of a pod, or of a template of pods in the namespace of `owner`.
    pub(super) fn pod_spec(
        &mut self,
        at: &str,
        spec: &PodSpec,
        owner: &ObjectMeta,
        (manifests, driver): (&Manifests, &str),
    ) {
        let entries = spec.resource_claims.as_deref().unwrap_or_default();
        self.labels(
            &format!("{at}.resourceClaims"),
            entries.iter().map(|entry| entry.name.as_str()),
        );
        for (number, entry) in entries.iter().enumerate() {
            let at = format!("{at}.resourceClaims[{number}]");
            if entry.resource_claim_name.is_some() == entry.resource_claim_template_name.is_some() {
                let what = "Invalid value: must specify one of: `resourceClaimName`, `resourceClaimTemplateName`";
                self.refuse(&at, what);
            }
            for (field, name) in [
                ("resourceClaimName", &entry.resource_claim_name),
                (
                    "resourceClaimTemplateName",
                    &entry.resource_claim_template_name,
                ),
            ] {
                if let Some(name) = name.as_deref().filter(|name| !naming::is_subdomain(name)) {
                    let what = format!("Invalid value: {name:?}: {}", naming::SUBDOMAIN);
                    self.refuse(&format!("{at}.{field}"), &what);
                }
            }
            if !is_used(&entry.name, spec) {
                let what = format!(
                    "no container has {:?} in resources.claims: the pod holds the devices, and no container gets them (write claims: \
                     [{{name: {}}}])",
                    entry.name, entry.name
                );
                self.fault(&at, &what);
            }
        }
        self.placement(at, spec, manifests);
        self.pod_resources(&format!("{at}.resources"), spec.resources.as_ref());
        if spec.containers.is_empty() {
            self.refuse(&format!("{at}.containers"), "Required value");
        }
        let volumes: Vec<&str> = spec
            .volumes
            .iter()
            .flatten()
            .map(|volume| volume.name.as_str())
            .collect();
        self.labels(&format!("{at}.volumes"), volumes.iter().copied());
        let groups = [
            ("initContainers", spec.init_containers.as_deref()),
            ("containers", Some(&spec.containers[..])),
        ];
        // Names are there once in both groups.
        let mut before = Vec::new();
        for (group, containers) in groups {
            for (number, container) in containers.unwrap_or_default().iter().enumerate() {
                let at = format!("{at}.{group}[{number}]");
                self.label(&format!("{at}.name"), &container.name, &before);
                before.push(&container.name);
                self.container_itself(&at, container, &volumes);
                let devices = |claim: &str| {
                    let entry = entries.iter().find(|entry| entry.name == claim)?;
                    workload::devices_of(entry, owner, manifests)
                };
                self.together(&at, driver, container, &devices);
                let of_pod: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
                self.resources(&format!("{at}.resources"), container, &of_pod, |claim| {
                    let entry = entries.iter().find(|entry| entry.name == claim)?;
                    let devices = workload::devices_of(entry, owner, manifests);
                    // Without their alternatives: a container takes the request, whichever it gets.
                    let name = |request: &DeviceRequest| request.name.clone();
                    Some(
                        devices
                            .map(|devices| devices.requests.iter().flatten().map(name).collect()),
                    )
                });
            }
        }
    }

    /// Checks the resources of the pod as a whole, which are of its processors and memory.
    fn pod_resources(&mut self, at: &str, resources: Option<&ResourceRequirements>) {
        let Some(resources) = resources else { return };
        let lists = [
            ("limits", &resources.limits),
            ("requests", &resources.requests),
        ];
        for (list, amounts) in lists {
            for name in amounts.iter().flatten().map(|(name, _)| name) {
                if !["cpu", "memory"].contains(&name.as_str()) && !name.starts_with("hugepages-") {
                    let what = format!(
                        "Unsupported value: {name:?}: supported values: \"cpu\", \"hugepages-\", \"memory\" (write it in a container's resources)"
                    );
                    self.refuse(&format!("{at}.{list}[{name}]"), &what);
                }
            }
        }
        if resources
            .claims
            .as_ref()
            .is_some_and(|claims| !claims.is_empty())
        {
            let what = "Forbidden: may not be set at the level of the pod (write it in a container's resources)";
            self.refuse(&format!("{at}.claims"), what);
        }
    }

    /// Notes fields about nodes, schedulers and runtimes, which the demo has one of.
    fn placement(&mut self, at: &str, spec: &PodSpec, manifests: &Manifests) {
        let by_product = !workload::products_of(spec).is_empty();
        if (spec.node_selector.is_some() || spec.affinity.is_some()) && !by_product {
            let what = "nodeSelector and affinity are not looked at here: the demo has one node";
            self.doubt(at, what);
        }
        if let Some(other) = spec
            .scheduler_name
            .as_deref()
            .filter(|name| !["", "default-scheduler"].contains(name))
        {
            let what = format!(
                "{other:?} places the pod on a cluster, and must know dynamic resource allocation; here it is placed as by the \
                 default scheduler"
            );
            self.doubt(&format!("{at}.schedulerName"), &what);
        }
        if let Some(class) = &spec.runtime_class_name {
            let handler = manifests.handlers.get(class).map(String::as_str);
            let what = runtime::note(class, handler);
            self.doubt(&format!("{at}.runtimeClassName"), &what);
        }
    }

    /// Checks a container but for its resources.
    fn container_itself(&mut self, at: &str, container: &Container, volumes: &[&str]) {
        let image = container.image.as_deref().unwrap_or_default();
        if image.is_empty() {
            self.refuse(&format!("{at}.image"), "Required value");
        } else if image.trim() != image {
            let what =
                format!("Invalid value: {image:?}: must not have leading or trailing whitespace");
            self.refuse(&format!("{at}.image"), &what);
        }
        if let Some(other) = container
            .image_pull_policy
            .as_deref()
            .filter(|policy| !["Always", "IfNotPresent", "Never"].contains(policy))
        {
            let what = format!(
                "Unsupported value: {other:?}: supported values: \"Always\", \"IfNotPresent\", \"Never\""
            );
            self.refuse(&format!("{at}.imagePullPolicy"), &what);
        }
        let mut paths = Vec::new();
        for (number, mount) in container.volume_mounts.iter().flatten().enumerate() {
            let at = format!("{at}.volumeMounts[{number}]");
            if !volumes.contains(&mount.name.as_str()) {
                let hint = did_you_mean(&mount.name, volumes.iter().copied());
                self.refuse(
                    &format!("{at}.name"),
                    &format!("Not found: {:?}{hint}", mount.name),
                );
            }
            let path = mount.mount_path.as_str();
            if path.is_empty() {
                self.refuse(&format!("{at}.mountPath"), "Required value");
            } else if paths.contains(&path) {
                self.refuse(
                    &format!("{at}.mountPath"),
                    &format!("Invalid value: {path:?}: must be unique"),
                );
            }
            paths.push(path);
        }
        for (number, variable) in container.env.iter().flatten().enumerate() {
            if variable.name.is_empty() {
                self.refuse(&format!("{at}.env[{number}].name"), "Required value");
            }
        }
        for (number, port) in container.ports.iter().flatten().enumerate() {
            if !(1..=LAST_PORT).contains(&port.container_port) {
                let what = format!(
                    "Invalid value: {}: must be between 1 and {LAST_PORT}, inclusive",
                    port.container_port
                );
                self.refuse(&format!("{at}.ports[{number}].containerPort"), &what);
            }
        }
    }

    /// Checks the claims and amounts of a container. `of_pod` are the pod's claims. `of_claim` has
    /// nothing where the pod has no such claim, else its requests, if they are known.
    fn resources(
        &mut self,
        at: &str,
        container: &Container,
        of_pod: &[&str],
        of_claim: impl Fn(&str) -> Option<Option<BTreeSet<String>>>,
    ) {
        let Some(resources) = &container.resources else {
            return;
        };
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
                    let what = format!(
                        "Not found: {:?} is not among the pod's resourceClaims{}",
                        claim.name,
                        meant_or_there(&claim.name, of_pod)
                    );
                    self.refuse(&format!("{at}.name"), &what);
                }
                (Some(Some(there)), Some(request)) if !there.contains(request) => {
                    let hint = match request.split_once('/') {
                        Some((base, _)) if there.contains(base) => {
                            format!(
                                " (write {base:?}: a container takes whichever alternative it gets)"
                            )
                        }
                        _ => {
                            let there: Vec<&str> = there.iter().map(String::as_str).collect();
                            meant_or_there(request, &there)
                        }
                    };
                    let what = format!(
                        "the claim has no request {request:?}{hint}: the container would start without a device"
                    );
                    self.refuse(&format!("{at}.request"), &what);
                }
                _ => {}
            }
        }
        self.amounts(at, resources);
    }

    /// Checks the names and amounts of limits and requests.
    fn amounts(&mut self, at: &str, resources: &ResourceRequirements) {
        let limit = |name: &str| resources.limits.as_ref()?.get(name);
        let mut missing = Vec::new();
        let lists = [
            ("limits", &resources.limits),
            ("requests", &resources.requests),
        ];
        for (list, name, amount) in lists.into_iter().flat_map(|(list, all)| {
            all.iter()
                .flatten()
                .map(move |(name, amount)| (list, name, amount))
        }) {
            let at = format!("{at}.{list}[{name}]");
            let Ok(quantity) = amount.0.parse::<Quantity>() else {
                self.refuse(
                    &at,
                    &format!("Invalid value: {:?}: not a quantity", amount.0),
                );
                continue;
            };
            if !extended::is_extended(name) && !is_standard(name) {
                let what =
                    "must be a standard resource type or fully qualified, such as nvidia.com/gpu";
                self.refuse(&at, &format!("Invalid value: {name:?}: {what}"));
            } else if quantity.signum() < 0 {
                self.refuse(
                    &at,
                    &format!(
                        "Invalid value: {:?}: must be greater than or equal to 0",
                        amount.0
                    ),
                );
            } else if list == "limits" {
                self.limit(&at, name, amount);
            } else {
                if extended::is_extended(name) && limit(name).is_none() {
                    missing.push(name);
                }
                self.request_of(&at, name, (amount, quantity), limit(name));
            }
        }
        for name in missing {
            let what = format!(
                "Required value: Limit must be set for non overcommitable resources (write limits: {{{name}: …}}, too)"
            );
            self.refuse(&format!("{at}.limits"), &what);
        }
    }

    fn limit(&mut self, at: &str, name: &str, amount: &Amount) {
        if !extended::is_extended(name) || extended::amount(&amount.0).is_some() {
            return;
        }
        let hint = if !name.ends_with("/gpu") {
            ""
        } else if amount.0 == "0.5" {
            " (for half a GPU claim a share, class share.divvy.dev: divvy convert -f FILE writes the claim)"
        } else {
            " (for a part of a GPU claim a share, class share.divvy.dev, or a partition: divvy convert -f FILE writes the claim)"
        };
        self.refuse(
            at,
            &format!("Invalid value: {:?}: must be an integer{hint}", amount.0),
        );
    }

    fn request_of(
        &mut self,
        at: &str,
        name: &str,
        (amount, quantity): (&Amount, Quantity),
        limit: Option<&Amount>,
    ) {
        if extended::is_extended(name) {
            if limit.is_some_and(|limit| limit != amount) {
                let what = format!(
                    "Invalid value: {:?}: must be equal to {name} limit of the container",
                    amount.0
                );
                self.refuse(at, &what);
            }
        } else if let Some(limit) = limit
            && limit
                .0
                .parse::<Quantity>()
                .is_ok_and(|most| quantity.nanos() > most.nanos())
        {
            let what = format!(
                "Invalid value: {:?}: must be less than or equal to {name} limit of {}",
                amount.0, limit.0
            );
            self.refuse(at, &what);
        }
    }
}

/// Says whether a container of the pod names the claim.
fn is_used(claim: &str, spec: &PodSpec) -> bool {
    let containers = spec
        .containers
        .iter()
        .chain(spec.init_containers.iter().flatten());
    containers
        .filter_map(|container| container.resources.as_ref()?.claims.as_ref())
        .flatten()
        .any(|named| named.name == claim)
}

/// Says whether containers have a resource of Kubernetes with this name.
fn is_standard(name: &str) -> bool {
    ["cpu", "memory", "ephemeral-storage"].contains(&name) || name.starts_with("hugepages-")
}

/// Returns the name that was probably meant, else those that there are.
fn meant_or_there(name: &str, there: &[&str]) -> String {
    match did_you_mean(name, there.iter().copied()) {
        none if none.is_empty() && !there.is_empty() => {
            format!(" (there are {})", divvy_why::cause::named(there))
        }
        hint => hint,
    }
}
