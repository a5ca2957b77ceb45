//! The demo's report for people.

use std::collections::BTreeSet;

use divvy_api::names::capacity;
use serde_json::Value;

use super::gpus::GpuPicture;
use super::report::{self, ClaimReport, DeviceReport, Report, Round, Scenario, State};
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
        let policies = match scenario.policies.as_slice() {
            [] => String::new(),
            names => format!(" (policy {})", names.join(", ")),
        };
        out += &format!("\n\n● {}{policies}\n", scenario.name);
        out += &of_scenario(scenario);
    }
    if let Some((claim, document)) = first_document(report) {
        out += &format!("\n\nWhat a container of {claim} gets ({}):\n\n", kind(document));
        out += &edits(document);
    }
    let problems = report.problems();
    let of_rounds = || report.scenarios.iter().flat_map(|s| &s.rounds).flat_map(|round| &round.claims);
    let claims = of_rounds().map(|claim| &claim.claim).collect::<BTreeSet<_>>().len();
    let pending = of_rounds().filter(|claim| matches!(claim.state, State::Pending { expected: true, .. }));
    let pending = match pending.map(|claim| &claim.claim).collect::<BTreeSet<_>>().len() {
        0 => "all prepared".to_owned(),
        1 => "all prepared as expected (1 waited)".to_owned(),
        several => format!("all prepared as expected ({several} waited)"),
    };
    out += "\n\n";
    if problems.is_empty() {
        out += &format!(
            "{}, {}: {pending}, all given back, nothing left behind.",
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
    let mut out = String::new();
    if !scenario.published.is_empty() {
        let names = report::rows(&scenario.published).into_iter().map(|(name, _)| name);
        out += &format!("  published: {}\n", names.collect::<Vec<_>>().join(" "));
    }
    // What somebody has is a picture where GPUs are divided or somebody waits; else the table says it all.
    let drawn = scenario.rounds.iter().any(|round| {
        let waits = round.claims.iter().any(|claim| matches!(claim.state, State::Pending { .. }));
        waits || round.gpus.iter().any(GpuPicture::is_divided)
    });
    for (number, round) in scenario.rounds.iter().enumerate() {
        if number > 0 {
            out += &format!("\n\n  then, after {} ended:\n", round.ended.join(", "));
        }
        let before = number.checked_sub(1).and_then(|before| scenario.rounds.get(before));
        out += &of_round(round, before, drawn);
    }
    out
}

/// A round; the claims that were pending before it too only say what they wait for.
fn of_round(round: &Round, before: Option<&Round>, drawn: bool) -> String {
    let mut table = Table::new(["CLAIM", "USED BY", "REQUEST", "GOT", "NODES", "MOUNTS", "PREPARE"]);
    for claim in &round.claims {
        for row in rows(claim) {
            table.row(row);
        }
    }
    let mut out = table.render(2);
    if drawn {
        for line in round.gpus.iter().flat_map(GpuPicture::lines) {
            out += &format!("\n  {line}");
        }
    }
    for claim in &round.claims {
        if let State::Pending { reason, expected } = &claim.state {
            let as_expected = if *expected { ", as expected" } else { "" };
            let waited = before.is_some_and(|before| before.claims.iter().any(|b| b.claim == claim.claim));
            let still = if waited { "still " } else { "" };
            out += &format!("\n  {} is {still}pending{as_expected}:", claim.claim);
            let reason = if waited { reason.lines().last().unwrap_or_default() } else { reason };
            out += &format!("\n    {}", reason.replace('\n', "\n    "));
        }
    }
    out
}

fn rows(claim: &ClaimReport) -> Vec<[String; 7]> {
    let users = if claim.pods.is_empty() { "(no pod)".to_owned() } else { claim.pods.join(", ") };
    let dash = || "-".to_owned();
    match &claim.state {
        State::Pending { expected, .. } => {
            let what = if *expected { "pending, as expected" } else { "pending" };
            vec![[claim.claim.clone(), users, dash(), what.to_owned(), dash(), dash(), dash()]]
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
                    got(device),
                    nodes(claim.cdi.as_ref(), &device.cdi_ids),
                    once(count(claim.cdi.as_ref(), "mounts").to_string()),
                    once(format!("{}.{} ms", prepare_us / 1000, prepare_us % 1000 / 100)),
                ]
            })
            .collect(),
    }
}

/// The device, with the part of it that a share is.
fn got(device: &DeviceReport) -> String {
    let part = |name: &str, unit: &str| Some(format!("{}{unit}", device.consumed.get(name)?));
    let parts: Vec<String> =
        [part(capacity::MEMORY, ""), part(capacity::CORES, " %")].into_iter().flatten().collect();
    match parts.as_slice() {
        [] => device.device.clone(),
        parts => format!("{} ({})", device.device, parts.join(", ")),
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::demo::report::PublishedDevice;
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
            scenarios: vec![Scenario {
                name: "one".to_owned(),
                policies: Vec::new(),
                published: Vec::new(),
                rounds: vec![Round { ended: Vec::new(), claims, gpus: Vec::new(), surprises: Vec::new() }],
                problem: None,
            }],
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
            ..DeviceReport::default()
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
        let text = render(&report(vec![claim(
            State::Pending { reason: "no room".to_owned(), expected: false },
            None,
        )]));
        assert!(text.ends_with("1 problem:\n  ✗ one: claim default/c stays pending: no room"), "{text}");
    }
}
