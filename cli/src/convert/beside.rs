//! Devices, volumes and claims of a container that go badly with the devices that it asks for.

use divvy_api::names;

use super::notes::Notes;
use super::pod::Asker;
use crate::format::total;
use crate::yaml::{Map, Node};

/// Folder of the memory that programs share, where MPS has its own.
const MEMORY: &str = "/dev/shm";
const PARTITIONS: [&str; 3] = [
    names::CLASS_MIG,
    names::CLASS_MIG_SHARE,
    names::CLASS_MIG_MPS,
];
const SERVED: [&str; 2] = [names::CLASS_MPS, names::CLASS_MIG_MPS];

/// Notes what one container cannot use, or has twice.
pub(super) fn notes_on(spec: &Map, askers: &[Asker], at: &str, notes: &mut Notes) {
    for asker in askers.iter().filter(|asker| !asker.asks.is_empty()) {
        let (list, number) = asker.place;
        let at = format!("{at}.{list}[{number}]");
        let counted = |classes: &[&str]| {
            let asks = asker.asks.iter().map(|ask| &ask.request);
            total(
                asks.filter(|one| classes.contains(&one.class))
                    .map(|one| one.count),
            )
        };
        let (partitions, servers) = (counted(&PARTITIONS), counted(&SERVED));
        if partitions > 1 {
            let what = format!(
                "{partitions} partitions: a program uses one of them, so start a process for each (CUDA_VISIBLE_DEVICES)"
            );
            notes.note(&format!("{at}.resources"), what);
        }
        if servers > 1 {
            let what = format!(
                "{servers} MPS servers: a container reaches one, and is refused when its pod starts: use a container for each"
            );
            notes.unknown(&format!("{at}.resources"), what);
        }
        let container = spec.get(list).map(Node::items).unwrap_or_default();
        let Some(container) = container.get(number) else {
            continue;
        };
        let claims = container.at(&["resources", "claims"]).map(Node::items);
        if claims.is_some_and(|claims| !claims.is_empty()) {
            let what = "the container had a claim already, and gets the devices of both";
            notes.note(&format!("{at}.resources"), what);
        }
    }
}

/// Notes volumes of containers with MPS, whose memory takes their place. `is_served` says whether
/// an entry of the pod's claims asks for MPS.
pub(super) fn memory(template: &Map, is_served: impl Fn(&Node) -> bool, notes: &mut Notes) {
    let Some(spec) = template.get("spec") else {
        return;
    };
    let items = |node: &Node, field: &str| {
        node.at(&[field])
            .map(Node::items)
            .unwrap_or_default()
            .to_vec()
    };
    let entries = items(spec, "resourceClaims");
    let served: Vec<&str> = entries
        .iter()
        .filter(|entry| is_served(entry))
        .filter_map(|entry| entry.text_at(&["name"]))
        .collect();
    for list in ["initContainers", "containers"] {
        for (number, container) in items(spec, list).iter().enumerate() {
            let claims = container.at(&["resources", "claims"]).map(Node::items);
            let names = claims.unwrap_or_default().iter();
            let mut names = names.filter_map(|claim| claim.text_at(&["name"]));
            if !names.any(|name| served.contains(&name)) {
                continue;
            }
            for (mount, volume) in items(container, "volumeMounts").iter().enumerate() {
                let path = volume.text_at(&["mountPath"]).unwrap_or_default();
                if path.trim_end_matches('/') == MEMORY {
                    let at = format!("spec.{list}[{number}].volumeMounts[{mount}]");
                    let what = "the memory of the MPS server takes the place of this volume, before R615 and in partitions: the chart's \
                                mps.sharedMemory (4Gi) for all containers of the server is what counts (docs/mps.md#what-a-container-finds)";
                    notes.note(&at, what);
                }
            }
        }
    }
}

/// Says whether a spec of a claim or a class asks for MPS: by the class of a request, or by a
/// config. `has_class` says it of a class.
pub(super) fn asks_for_mps(devices: &Node, has_class: impl Fn(&str) -> bool) -> bool {
    let of = |one: &Node| {
        let class = one.text_at(&["deviceClassName"]);
        class.is_some_and(|class| SERVED.contains(&class) || has_class(class))
    };
    let requests = devices.at(&["requests"]).map(Node::items);
    let mut requests = requests.unwrap_or_default().iter();
    let asked = |request: &Node| {
        let either = request.at(&["firstAvailable"]).map(Node::items);
        let exactly = request.at(&["exactly"]);
        of(request) || exactly.is_some_and(of) || either.is_some_and(|all| all.iter().any(of))
    };
    requests.any(asked) || has_server(devices)
}

/// Says whether a config of a claim or a class asks for an MPS server.
pub(super) fn has_server(of: &Node) -> bool {
    let configs = of.at(&["config"]).map(Node::items).unwrap_or_default();
    configs.iter().any(|config| {
        let parameters = config.at(&["opaque", "parameters"]);
        parameters.is_some_and(|all| {
            all.at(&["mps"]).is_some() || all.text_at(&["sharing", "strategy"]) == Some("MPS")
        })
    })
}
