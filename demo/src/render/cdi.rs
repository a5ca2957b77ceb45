//! Content of a claim's CDI document: devices, files and variables of a container.

use divvy_cdi::{ContainerEdits, Spec};

use super::{ClaimReport, Report};
use divvy_cli::table::Table;

/// The CDI document of a claim, if it has one.
pub(super) fn of(claim: &ClaimReport) -> Option<Spec> {
    serde_json::from_value(claim.cdi.clone()?).ok()
}

/// The first claim that has a document, and what a container of it gets.
pub(super) fn document(report: &Report) -> Vec<String> {
    let mut claims = report
        .scenarios
        .iter()
        .flat_map(|s| &s.rounds)
        .flat_map(|round| &round.claims);
    let Some((claim, spec)) = claims.find_map(|claim| Some((&claim.claim, of(claim)?))) else {
        return Vec::new();
    };
    let kind = format!("CDI {}, kind {}", spec.cdi_version, spec.kind);
    let title = format!("What a container of {claim} gets ({kind}):");
    let edits = edits(&spec);
    [String::new(), title]
        .into_iter()
        .chain(edits.lines().map(str::to_owned))
        .collect()
}

/// The device nodes that are the device's own: those of GPUs and of MIG capabilities, not the
/// control nodes.
pub(super) fn nodes(spec: &Spec, ids: &[String]) -> String {
    let named = |name: &str| {
        ids.iter()
            .any(|id| id.split_once('=').is_some_and(|(_, of)| of == name))
    };
    let devices = spec.devices.iter().filter(|device| named(&device.name));
    let mut paths: Vec<&str> = devices
        .flat_map(|device| &device.container_edits.device_nodes)
        .filter_map(|node| {
            let capability = node.path.strip_prefix("/dev/nvidia-caps/nvidia-");
            capability.or_else(|| {
                let number = node.path.strip_prefix("/dev/nvidia")?;
                number
                    .bytes()
                    .all(|b| b.is_ascii_digit())
                    .then_some(node.path.as_str())
            })
        })
        .collect();
    paths.dedup();
    paths.join(", ")
}

/// The mounts of a container that gets one of the devices.
pub(super) fn mounts(spec: &Spec) -> usize {
    let of_devices = spec
        .devices
        .iter()
        .map(|device| device.container_edits.mounts.len());
    spec.container_edits.mounts.len() + of_devices.max().unwrap_or(0)
}

/// The edits of a document, common and of its devices, one line a sort; long lists are cut.
fn edits(spec: &Spec) -> String {
    const SHOWN: usize = 2;
    let of_devices = spec.devices.iter().map(|device| &device.container_edits);
    let all: Vec<&ContainerEdits> = std::iter::once(&spec.container_edits)
        .chain(of_devices)
        .collect();
    let env = all.iter().flat_map(|edits| &edits.env).collect();
    let nodes = all
        .iter()
        .flat_map(|edits| &edits.device_nodes)
        .map(|node| &node.path)
        .collect();
    let mounts = all
        .iter()
        .flat_map(|edits| &edits.mounts)
        .map(|mount| &mount.container_path)
        .collect();
    let hooks = all
        .iter()
        .flat_map(|edits| &edits.hooks)
        .map(|hook| &hook.path)
        .collect();
    let mut table = Table::new(["EDIT", "COUNT", "WHAT"]);
    let sorts: [(&str, Vec<&String>); 4] = [
        ("env", env),
        ("deviceNodes", nodes),
        ("mounts", mounts),
        ("hooks", hooks),
    ];
    for (key, items) in sorts {
        // Nodes and variables are few and matter; mounts are many and alike.
        let shown = if key == "mounts" { SHOWN } else { items.len() };
        let mut what = items
            .iter()
            .take(shown)
            .map(|item| item.as_str())
            .collect::<Vec<_>>()
            .join("  ");
        if items.len() > shown {
            what += &format!("  … (-o json shows all {})", items.len());
        }
        if !items.is_empty() {
            table.row([key.to_owned(), items.len().to_string(), what]);
        }
    }
    table.render(2)
}
