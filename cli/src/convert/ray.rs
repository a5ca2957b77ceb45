//! The number of GPUs of Ray's groups, which KubeRay reads from extended resources and not from
//! claims.

use super::notes::{Notes, under};
use super::resources;
use crate::yaml::{Map, Node};

const PARAMETERS: &str = "rayStartParams";
const GPUS: &str = "num-gpus";

/// Writes the number that KubeRay read of the group's first container before it was converted.
pub(super) fn count(group: &mut Map, old: &Map, at: &str, notes: &mut Notes) {
    let has_own = group
        .get("resources")
        .and_then(Node::map)
        .is_some_and(|own| own.iter().any(|(name, _)| is_gpu(&name.to_lowercase())));
    let is_set = group
        .get(PARAMETERS)
        .is_some_and(|parameters| parameters.at(&[GPUS]).is_some());
    let containers = old.get("spec").and_then(|spec| spec.at(&["containers"]));
    let first = containers.and_then(|all| all.items().first());
    let limits = first.and_then(|first| first.at(&["resources", "limits"])?.map());
    // KubeRay takes the first of these names, and whole numbers only.
    let mut amounts: Vec<(&str, String)> = limits
        .into_iter()
        .flat_map(Map::iter)
        .filter(|(name, _)| is_gpu(name))
        .filter_map(|(name, amount)| Some((name, amount.scalar()?)))
        .filter(|(_, amount)| amount != "0")
        .collect();
    amounts.sort();
    let Some((name, amount)) = amounts.into_iter().next() else {
        return;
    };
    if has_own || is_set {
        return;
    }
    if group.get(PARAMETERS).and_then(Node::map).is_none() {
        group.set(PARAMETERS, Map::default());
    }
    if let Some(parameters) = group.get_mut(PARAMETERS).and_then(Node::map_mut) {
        parameters.set(GPUS, amount);
    }
    let what = format!("{GPUS} is written, which KubeRay reads from {name} and not from claims");
    notes.note(&under(at, PARAMETERS), what);
}

/// Says whether KubeRay takes a resource for a GPU.
fn is_gpu(resource: &str) -> bool {
    let is_plain = |name: &str| !name.contains(['.', '+']) || name.matches('.').count() == 1;
    let mig = resource.strip_prefix("nvidia.com/mig-");
    resource.ends_with("gpu")
        || mig.is_some_and(|name| {
            name.ends_with("gb") && is_plain(name) && resources::profile_of(name).is_some()
        })
}
