//! Containers that mount a volume at `/dev/shm` and have an MPS share, whose mount takes its place.

use divvy_api::names;
use k8s_openapi::api::core::v1::{Container, PodSpec};
use k8s_openapi::api::resource::v1::{DeviceRequest, ResourceClaimSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::Findings;
use divvy_cli::manifests::{Manifests, namespace};

/// Place of the memory that an MPS server shares with its clients.
const MEMORY: &str = "/dev/shm";

impl Findings {
    /// Notes containers whose own memory is replaced.
    pub(super) fn own_memory(
        &mut self,
        at: &str,
        spec: &PodSpec,
        owner: &ObjectMeta,
        manifests: &Manifests,
    ) {
        let groups = [
            ("initContainers", spec.init_containers.as_deref()),
            ("containers", Some(&spec.containers[..])),
        ];
        for (group, containers) in groups {
            for (number, container) in containers.unwrap_or_default().iter().enumerate() {
                let mounts = container.volume_mounts.as_deref().unwrap_or_default();
                let is_there = |path: &str| path.trim_end_matches('/') == MEMORY;
                let mount = mounts.iter().position(|mount| is_there(&mount.mount_path));
                let Some(mount) = mount else { continue };
                if has_mps(container, spec, owner, manifests) {
                    let at = format!("{at}.{group}[{number}].volumeMounts[{mount}]");
                    let what = "the memory of the MPS server takes the place of this volume, before R615 and in partitions: \
                                the chart's mps.sharedMemory (4Gi) for all containers of the server is what counts (docs/sharing.md)";
                    self.doubt(&at, what);
                }
            }
        }
    }
}

/// Returns whether a container uses a claim that asks for MPS.
fn has_mps(
    container: &Container,
    spec: &PodSpec,
    owner: &ObjectMeta,
    manifests: &Manifests,
) -> bool {
    let resources = container.resources.as_ref();
    let mut used = resources
        .and_then(|all| all.claims.as_ref())
        .into_iter()
        .flatten();
    used.any(|used| {
        let entries = spec.resource_claims.as_deref().unwrap_or_default();
        let entry = entries.iter().find(|entry| entry.name == used.name);
        let is_in = |meta: &ObjectMeta, name: &Option<String>| {
            namespace(meta) == namespace(owner) && meta.name == *name && name.is_some()
        };
        let of_claim = entry.and_then(|entry| {
            let name = &entry.resource_claim_name;
            let found = manifests
                .claims
                .iter()
                .find(|claim| is_in(&claim.metadata, name));
            found.and_then(|claim| claim.spec.as_ref())
        });
        let of_template = || {
            let name = &entry?.resource_claim_template_name;
            let mut all = manifests.templates.iter();
            let found = all.find(|template| is_in(&template.metadata, name));
            found.and_then(|template| template.spec.as_ref()?.spec.as_ref())
        };
        of_claim.or_else(of_template).is_some_and(asks_for_mps)
    })
}

/// Returns whether a claim asks for MPS: by the class of a request, or by its config.
fn asks_for_mps(claim: &ResourceClaimSpec) -> bool {
    let Some(devices) = &claim.devices else {
        return false;
    };
    let is_class = |class: &str| [names::CLASS_MPS, names::CLASS_MIG_MPS].contains(&class);
    let asks = |request: &DeviceRequest| {
        let exactly = request.exactly.iter().map(|one| &one.device_class_name);
        let either = request.first_available.iter().flatten();
        let either = either.map(|one| &one.device_class_name);
        exactly.chain(either).any(|class| is_class(class))
    };
    let sets = |parameters: &serde_json::Value| parameters.get("mps").is_some();
    let mut configs = devices.config.iter().flatten();
    devices.requests.iter().flatten().any(asks)
        || configs.any(|config| {
            let opaque = config.opaque.as_ref();
            opaque.is_some_and(|opaque| sets(&opaque.parameters.0))
        })
}
