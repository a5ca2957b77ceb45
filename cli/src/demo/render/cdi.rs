//! What a claim's CDI document brings into a container.

use serde_json::Value;

use super::Report;
use crate::table::Table;

/// The first claim that has a document, and what a container of it gets.
pub(super) fn document(report: &Report) -> Vec<String> {
    let Some((claim, document)) = first_document(report) else { return Vec::new() };
    let title = format!("What a container of {claim} gets ({}):", kind(document));
    let edits = edits(document);
    [String::new(), title].into_iter().chain(edits.lines().map(str::to_owned)).collect()
}

/// All `containerEdits` of a document that apply to one of these CDI ids, the common ones excepted.
fn edits_of<'a>(document: &'a Value, ids: &'a [String]) -> impl Iterator<Item = &'a Value> {
    let devices = document.get("devices").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    devices
        .iter()
        .filter(|device| {
            let name = device.get("name").and_then(Value::as_str).unwrap_or_default();
            ids.iter().any(|id| id.split_once('=').is_some_and(|(_, of)| of == name))
        })
        .filter_map(|device| device.get("containerEdits"))
}

fn array<'a>(edits: &'a Value, key: &str) -> &'a [Value] {
    edits.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default()
}

/// The device nodes that are the device's own: those of GPUs and of MIG capabilities, not the control nodes.
pub(super) fn nodes(document: Option<&Value>, ids: &[String]) -> String {
    let Some(document) = document else { return "-".to_owned() };
    let mut paths: Vec<&str> = edits_of(document, ids)
        .flat_map(|edits| array(edits, "deviceNodes"))
        .filter_map(|node| node.get("path").and_then(Value::as_str))
        .filter_map(|path| {
            let capability = path.strip_prefix("/dev/nvidia-caps/nvidia-");
            capability.or_else(|| {
                let number = path.strip_prefix("/dev/nvidia")?;
                number.bytes().all(|b| b.is_ascii_digit()).then_some(path)
            })
        })
        .collect();
    paths.dedup();
    paths.join(", ")
}

pub(super) fn count(document: Option<&Value>, key: &str) -> usize {
    let Some(document) = document else { return 0 };
    let common = document.get("containerEdits").map_or(0, |edits| array(edits, key).len());
    let devices = document.get("devices").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    common
        + devices
            .iter()
            .filter_map(|d| d.get("containerEdits"))
            .map(|e| array(e, key).len())
            .max()
            .unwrap_or(0)
}

/// The first claim that has a CDI document.
fn first_document(report: &Report) -> Option<(&str, &Value)> {
    let mut claims = report.scenarios.iter().flat_map(|s| &s.rounds).flat_map(|round| &round.claims);
    claims.find_map(|claim| Some((claim.claim.as_str(), claim.cdi.as_ref()?)))
}

fn kind(document: &Value) -> String {
    let text = |key: &str| document.get(key).and_then(Value::as_str).unwrap_or("-").to_owned();
    format!("CDI {}, kind {}", text("cdiVersion"), text("kind"))
}

/// The edits of a document, common and of its devices, one line a sort; long lists are cut.
fn edits(document: &Value) -> String {
    const SHOWN: usize = 2;
    let devices = document.get("devices").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    let all: Vec<&Value> = document
        .get("containerEdits")
        .into_iter()
        .chain(devices.iter().filter_map(|device| device.get("containerEdits")))
        .collect();
    let mut table = Table::new(["EDIT", "COUNT", "WHAT"]);
    for (key, field) in [
        ("env", None),
        ("deviceNodes", Some("path")),
        ("mounts", Some("containerPath")),
        ("hooks", Some("path")),
    ] {
        let items: Vec<&str> = all
            .iter()
            .flat_map(|edits| array(edits, key))
            .filter_map(|item| field.map_or(item.as_str(), |field| item.get(field).and_then(Value::as_str)))
            .collect();
        // Nodes and variables are few and matter; mounts are many and alike.
        let shown = if key == "mounts" { SHOWN } else { items.len() };
        let mut what = items.iter().take(shown).copied().collect::<Vec<_>>().join("  ");
        if items.len() > shown {
            what += &format!("  … (-o json shows all {})", items.len());
        }
        if !items.is_empty() {
            table.row([key.to_owned(), items.len().to_string(), what]);
        }
    }
    table.render(2)
}
