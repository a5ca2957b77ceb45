//! Volumes of containers in whose place a mount of their claim is. Kubernetes does not say so: the
//! container runtime replaces a mount of the same path. Pure.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use divvy_cdi::Spec;
use k8s_openapi::api::core::v1::{Container, Pod, PodSpec};

use super::report::{ClaimReport, DeviceReport, State};
use divvy_cli::manifests::namespace;

/// Place of the memory that an MPS server shares with its clients.
const MEMORY: &str = "/dev/shm";

/// Returns a note for each such volume of the first pod of those that are alike.
pub(super) fn volumes<'r>(
    pods: &[Pod],
    reports: impl IntoIterator<Item = &'r ClaimReport>,
) -> Vec<String> {
    let reports = reports.into_iter().map(|report| (&*report.claim, report));
    let reports: BTreeMap<&str, &ClaimReport> = reports.collect();
    let (mut notes, mut covered) = (Vec::new(), Vec::new());
    for pod in pods {
        let Some(spec) = pod.spec.as_ref().filter(|spec| !covered.contains(spec)) else {
            continue;
        };
        let found = of_pod(pod, spec, &reports);
        if !found.is_empty() {
            covered.push(spec);
        }
        notes.extend(found);
    }
    notes
}

fn of_pod(pod: &Pod, spec: &PodSpec, reports: &BTreeMap<&str, &ClaimReport>) -> Vec<String> {
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    let inside = namespace(&pod.metadata);
    let init = spec.init_containers.as_deref().unwrap_or_default();
    let groups = [("initContainers", init), ("containers", &spec.containers)];
    let all = groups.into_iter().flat_map(|(group, containers)| {
        let numbered = containers.iter().enumerate();
        numbered.map(move |(number, container)| (group, number, container))
    });
    let mut notes = Vec::new();
    for (index, (group, number, container)) in all.enumerate() {
        let used = used(container, index, spec, pod_name);
        let mounts: Vec<PathBuf> = used
            .iter()
            .filter_map(|(claim, request)| {
                let report = reports.get(&*format!("{inside}/{claim}"))?;
                Some(mounts(report, request))
            })
            .flatten()
            .collect();
        for (at, volume) in container.volume_mounts.iter().flatten().enumerate() {
            let path = plain(&volume.mount_path);
            if !mounts.contains(&path) {
                continue;
            }
            let what = if path == Path::new(MEMORY) {
                "the memory of the MPS server takes the place of this volume: the chart's mps.sharedMemory (4Gi) for all containers of \
                 the server is what counts (docs/mps.md#what-a-container-finds)"
            } else {
                "a mount of the claim takes the place of this volume"
            };
            notes.push(format!(
                "Pod {inside}/{pod_name}: spec.{group}[{number}].volumeMounts[{at}]: {what}"
            ));
        }
    }
    notes
}

/// Requests of a claim that a container uses.
enum Requests {
    All,
    /// The request of this name.
    Named(String),
    /// Requests whose names begin so: the scheduler makes one for each resource of a container.
    Begin(String),
}

/// Returns the claims of a container, which is the pod's `index`-th, init containers included.
fn used(container: &Container, index: usize, spec: &PodSpec, pod: &str) -> Vec<(String, Requests)> {
    let resources = container.resources.as_ref();
    let claims = resources.and_then(|resources| resources.claims.as_deref());
    let named = claims.into_iter().flatten().filter_map(|used| {
        let mut entries = spec.resource_claims.iter().flatten();
        let entry = entries.find(|entry| entry.name == used.name)?;
        let of_template = || format!("{pod}-{}", entry.name);
        let claim = entry
            .resource_claim_name
            .clone()
            .unwrap_or_else(of_template);
        let requests = used.request.clone().map_or(Requests::All, Requests::Named);
        Some((claim, requests))
    });
    let extended = (
        format!("{pod}-extended-resources"),
        Requests::Begin(format!("container-{index}-request-")),
    );
    named.chain([extended]).collect()
}

/// Returns where a claim mounts something in a container that uses these requests.
fn mounts(report: &ClaimReport, requests: &Requests) -> Vec<PathBuf> {
    let State::Prepared { devices, .. } = &report.state else {
        return Vec::new();
    };
    let document = report.cdi.clone();
    let Some(document) = document.and_then(|cdi| serde_json::from_value::<Spec>(cdi).ok()) else {
        return Vec::new();
    };
    let is_used = |device: &&DeviceReport| {
        device.requests.iter().any(|name| {
            // An alternative of a request is REQUEST/ALTERNATIVE.
            let request = name.split('/').next().unwrap_or(name);
            match requests {
                Requests::All => true,
                Requests::Named(wanted) => request == wanted,
                Requests::Begin(with) => request.starts_with(with),
            }
        })
    };
    let used = devices.iter().filter(is_used);
    let names: Vec<&str> = used
        .flat_map(|device| &device.cdi_ids)
        .filter_map(|id| Some(id.split_once('=')?.1))
        .collect();
    if names.is_empty() {
        return Vec::new();
    }
    let own = document
        .devices
        .iter()
        .filter(|device| names.contains(&&*device.name));
    let edits = own.map(|device| &device.container_edits);
    let edits = edits.chain([&document.container_edits]);
    edits
        .flat_map(|edits| &edits.mounts)
        .map(|mount| plain(&mount.container_path))
        .collect()
}

/// Returns a path as a kernel reads it, without links.
fn plain(path: &str) -> PathBuf {
    Path::new(path).components().collect()
}
