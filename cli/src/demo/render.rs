//! The demo's report for people.

use serde_json::Value;

use super::report::{self, ClaimReport, Report, Scenario, State};
use crate::table::Table;

/// The report as text.
pub(crate) fn render(report: &Report) -> String {
    let mut out = format!(
        "A node with {} (simulated) published, {} ms after its start:\n\n",
        report.sim, report.published_after_ms
    );
    let mut table = Table::new(["DEVICE", "PRODUCT", "MEMORY", "NUMA", "UUID"]);
    for (name, d) in report::rows(&report.published) {
        table.row([name, d.product.clone(), d.memory.clone(), d.numa.clone(), d.uuid.clone()]);
    }
    out += &table.render(2);
    for scenario in &report.scenarios {
        out += &format!("\n\n● {}\n", scenario.name);
        out += &of_scenario(scenario);
    }
    if let Some((claim, document)) = first_document(report) {
        out += &format!("\n\nWhat a container of {claim} gets ({}):\n\n", kind(document));
        out += &edits(document);
    }
    let problems = report.problems();
    let claims: usize = report.scenarios.iter().map(|s| s.claims.len()).sum();
    out += "\n\n";
    if problems.is_empty() {
        out += &format!(
            "{}, {}: all prepared, all given back, nothing left behind.",
            number(report.scenarios.len(), "manifest"),
            number(claims, "claim")
        );
    } else {
        out += &format!(
            "{}, {}, {}:",
            number(report.scenarios.len(), "manifest"),
            number(claims, "claim"),
            number(problems.len(), "problem")
        );
        for problem in problems {
            out += &format!("\n  ✗ {}", problem.replace('\n', "\n    "));
        }
    }
    out
}

fn number(count: usize, what: &str) -> String {
    if count == 1 { format!("1 {what}") } else { format!("{count} {what}s") }
}

fn of_scenario(scenario: &Scenario) -> String {
    if let Some(problem) = &scenario.problem {
        return format!("  ✗ {problem}");
    }
    let mut table = Table::new(["CLAIM", "USED BY", "REQUEST", "GOT", "NODES", "MOUNTS", "PREPARE"]);
    for claim in &scenario.claims {
        for row in rows(claim) {
            table.row(row);
        }
    }
    let mut out = table.render(2);
    for picture in &scenario.gpus {
        for line in picture.lines() {
            out += &format!("\n  {line}");
        }
    }
    out
}

fn rows(claim: &ClaimReport) -> Vec<[String; 7]> {
    let users = if claim.pods.is_empty() { "(no pod)".to_owned() } else { claim.pods.join(", ") };
    let dash = || "-".to_owned();
    match &claim.state {
        State::Pending { .. } => {
            vec![[claim.claim.clone(), users, dash(), "pending".to_owned(), dash(), dash(), dash()]]
        }
        State::Failed { .. } => {
            vec![[claim.claim.clone(), users, dash(), "failed".to_owned(), dash(), dash(), dash()]]
        }
        State::Prepared { devices, prepare_us } => devices
            .iter()
            .enumerate()
            .map(|(number, device)| {
                let first = number == 0;
                let once = |text: String| if first { text } else { String::new() };
                [
                    once(claim.claim.clone()),
                    once(users.clone()),
                    device.requests.join(", "),
                    device.device.clone(),
                    nodes(claim.cdi.as_ref(), &device.cdi_ids),
                    once(count(claim.cdi.as_ref(), "mounts").to_string()),
                    once(format!("{}.{} ms", prepare_us / 1000, prepare_us % 1000 / 100)),
                ]
            })
            .collect(),
    }
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
fn nodes(document: Option<&Value>, ids: &[String]) -> String {
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

fn count(document: Option<&Value>, key: &str) -> usize {
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
    let mut claims = report.scenarios.iter().flat_map(|scenario| &scenario.claims);
    claims.find_map(|claim| Some((claim.claim.as_str(), claim.cdi.as_ref()?)))
}

fn kind(document: &Value) -> String {
    let text = |key: &str| document.get(key).and_then(Value::as_str).unwrap_or("-").to_owned();
    format!("CDI {}, kind {}", text("cdiVersion"), text("kind"))
}

/// The edits of a document, common and of its devices, one line a sort; long lists are cut.
fn edits(document: &Value) -> String {
    const SHOWN: usize = 4;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::report::{DeviceReport, PublishedDevice};
    use serde_json::json;

    fn claim(state: State, cdi: Option<Value>) -> ClaimReport {
        ClaimReport { claim: "default/c".to_owned(), pods: vec!["p".to_owned()], state, cdi }
    }

    fn report(claims: Vec<ClaimReport>) -> Report {
        let device = PublishedDevice {
            name: "gpu-0".to_owned(),
            product: "H100".to_owned(),
            memory: "80Gi".to_owned(),
            numa: "0".to_owned(),
            uuid: "GPU-1".to_owned(),
        };
        Report {
            sim: "h100x1".to_owned(),
            published: vec![device],
            published_after_ms: 7,
            scenarios: vec![Scenario { name: "one".to_owned(), claims, gpus: Vec::new(), problem: None }],
            left_behind: Vec::new(),
        }
    }

    #[test]
    fn a_prepared_claim_is_shown_with_its_node_and_its_edits() {
        let cdi = json!({
            "cdiVersion": "0.5.0", "kind": "gpu.divvy.dev/claim",
            "containerEdits": {"env": ["A=b"], "mounts": [{"containerPath": "/l"}]},
            "devices": [{"name": "u-gpu-0", "containerEdits": {"deviceNodes": [{"path": "/dev/nvidia0"}]}}],
        });
        let devices = vec![DeviceReport {
            requests: vec!["gpu".to_owned()],
            device: "gpu-0".to_owned(),
            cdi_ids: vec!["gpu.divvy.dev/claim=u-gpu-0".to_owned()],
        }];
        let text = render(&report(vec![claim(State::Prepared { devices, prepare_us: 1234 }, Some(cdi))]));
        assert!(
            text.contains("  default/c  p        gpu      gpu-0  /dev/nvidia0  1       1.2 ms"),
            "{text}"
        );
        assert!(text.contains("  deviceNodes  1      /dev/nvidia0"), "{text}");
        assert!(
            text.ends_with("1 manifest, 1 claim: all prepared, all given back, nothing left behind."),
            "{text}"
        );
    }

    #[test]
    fn a_pending_claim_is_a_problem_with_its_reason() {
        let text = render(&report(vec![claim(State::Pending { reason: "no room".to_owned() }, None)]));
        assert!(text.ends_with("1 problem:\n  ✗ one: claim default/c stays pending: no room"), "{text}");
    }
}
