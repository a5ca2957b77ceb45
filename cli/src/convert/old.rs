//! Forms of claims of earlier versions of Kubernetes, whatever their devices are.

use super::notes::{Notes, under};
use crate::yaml::{Map, Node};

/// Fields of a request that v1beta1 has beside its name, and v1 below `exactly`.
const EXACTLY: [&str; 7] = [
    "deviceClassName",
    "selectors",
    "allocationMode",
    "count",
    "adminAccess",
    "tolerations",
    "capacity",
];

/// Rewrites the claims of a pod's spec: `source` of Kubernetes before 1.31, and names of claims
/// without their field.
pub(super) fn pod(spec: &mut Map, at: &str, notes: &mut Notes) {
    let entries = spec.get_mut("resourceClaims").and_then(Node::items_mut);
    for (number, entry) in entries.into_iter().flatten().enumerate() {
        let Some(entry) = entry.map_mut() else {
            continue;
        };
        let Some(Node::Map(source)) = entry.get("source").cloned() else {
            continue;
        };
        entry.remove("source");
        for (field, value) in source.iter() {
            entry.set(field, value.clone());
        }
        let what = "since Kubernetes 1.31 its fields stand in the entry itself";
        notes.note(&format!("{at}.resourceClaims[{number}].source"), what);
    }
    for list in ["initContainers", "containers"] {
        let containers = spec.get_mut(list).and_then(Node::items_mut);
        for (number, container) in containers.into_iter().flatten().enumerate() {
            let at = format!("{at}.{list}[{number}].resources.claims");
            let claims = container.at_mut(&["resources", "claims"]);
            for claim in claims.and_then(Node::items_mut).into_iter().flatten() {
                if let Some(name) = claim.text() {
                    *claim = Node::from([("name", name.into())]);
                    notes.note(&at, "an entry is {name: NAME}");
                }
            }
        }
    }
}

/// Brings a claim, a template or a class to `resource.k8s.io/v1`; true if something changed.
pub(super) fn claim(object: &mut Map, kind: &str, notes: &mut Notes) -> bool {
    let version = object.get("apiVersion").and_then(Node::text);
    let version = version.unwrap_or_default().to_owned();
    if version == "resource.k8s.io/v1alpha2" {
        let what = "claims of classes with a controller ended with Kubernetes 1.32: write the claim with divvy claim";
        notes.refuse("apiVersion", what);
        return false;
    }
    let mut changed = false;
    if kind == "ResourceClaimTemplate"
        && let Some(spec) = object.get_mut("spec").and_then(Node::map_mut)
        && spec.get("spec").is_none()
        && let Some(devices) = spec.remove("devices")
    {
        spec.set("spec", Map::from([("devices", devices)]));
        notes.note(
            "spec.devices",
            "a ResourceClaimTemplate has spec.spec.devices",
        );
        changed = true;
    }
    let path: &[&str] = match kind {
        "ResourceClaim" => &["spec", "devices", "requests"],
        "ResourceClaimTemplate" => &["spec", "spec", "devices", "requests"],
        _ => &[],
    };
    let (first, rest) = path.split_first().unwrap_or((&"", &[]));
    let requests = object
        .get_mut(first)
        .and_then(|spec| spec.at_mut(rest))
        .and_then(Node::items_mut);
    for (number, request) in requests.into_iter().flatten().enumerate() {
        let Some(request) = request.map_mut() else {
            continue;
        };
        if flatten(request) {
            changed = true;
            if version == "resource.k8s.io/v1" {
                let at = format!("{}[{number}]", path.join("."));
                let what = "in v1 the class and what goes with it are in exactly";
                notes.note(&under(&at, "deviceClassName"), what);
            }
        }
    }
    if version != "resource.k8s.io/v1" && kind != "DeviceTaintRule" {
        notes.note(
            "apiVersion",
            format!("{version} becomes resource.k8s.io/v1"),
        );
        object.set("apiVersion", "resource.k8s.io/v1");
        changed = true;
    }
    changed
}

/// Moves the fields of a request of v1beta1 to their place in v1; true if there are any.
fn flatten(request: &mut Map) -> bool {
    if request.get("deviceClassName").is_none() {
        return false;
    }
    let mut exactly = match request.remove("exactly") {
        Some(Node::Map(there)) => there,
        _ => Map::default(),
    };
    for field in EXACTLY {
        if let Some(value) = request.remove(field) {
            exactly.set(field, value);
        }
    }
    request.set("exactly", exactly);
    true
}
