//! The answers as text: tables, then problems with their remedies.

use std::collections::BTreeMap;
use std::fmt::Display;

use divvy_api::node::GpuStatus;
use divvy_model::DeviceKind;

use super::claim::{ClaimLine, ClaimReport, DeviceLine, State};
use super::fold::fold;
use super::pod::{PodReport, Step};
use super::policy::PolicyReport;
use super::read::{GPU_NODES, POLICIES};
use super::report::{Fleet, GpuReport, NodeLine, NodeReport, NodeTrouble, Waiting, kinds};
use super::snapshot::Snapshot;
use crate::table::{Table, or_dash};
use divvy_why::device::kind;
use divvy_why::{Why, some};

/// Nodes with reasons of their own that are written out.
const REASONS: usize = 8;

pub(crate) fn fleet(snapshot: &Snapshot, fleet: &Fleet, wide: bool) -> String {
    let mut out = Out::new(wide);
    if fleet.nodes.is_empty() && snapshot.lacks(&GPU_NODES) {
        out.line("GpuNodes cannot be read: the state of the nodes' GPUs is unknown");
    } else if let Some(nowhere) = &fleet.nowhere {
        out.line(nowhere);
    } else if fleet.nodes.is_empty() {
        out.line("no node reports GPUs");
    } else {
        out.head(&nodes(snapshot, &fleet.nodes));
    }
    troubles(&mut out, snapshot, &fleet.troubles);
    if !fleet.refused.is_empty() {
        out.head("refused by their nodes:");
        for claim in &fleet.refused {
            refused(&mut out, snapshot, claim);
        }
    }
    used(&mut out, snapshot, &fleet.reported_use);
    if !fleet.waiting.is_empty() {
        out.head("waiting:");
        for waiting in &fleet.waiting {
            waits(&mut out, snapshot, waiting);
        }
    }
    unread(&mut out, &fleet.unread);
    if !fleet.needs_person && !fleet.nodes.is_empty() {
        well(&mut out, &fleet.unread);
    }
    out.text
}

pub(crate) fn node(snapshot: &Snapshot, report: &NodeReport) -> String {
    let mut out = Out::default();
    out.line(&versions(snapshot, &report.node));
    if !report.node.share_memory.is_empty() {
        out.line(&format!("memory of shares: {}", report.node.share_memory));
    }
    if !report.gpus.is_empty() {
        let mut table = Table::new([
            "GPU", "PRODUCT", "MODE", "OFFERED", "POLICY", "HOLDERS", "TROUBLE", "UUID",
        ]);
        for gpu in &report.gpus {
            table.row([
                gpu.name.clone(),
                or_dash(&gpu.product),
                gpu.mode.clone(),
                or_dash(&gpu.offered.join(", ")),
                or_dash(&gpu.policy),
                or_dash(&some(holders(gpu).iter())),
                or_dash(&kinds(&report.troubles, &report.node.name, &gpu.name).join("+")),
                gpu.uuid.clone(),
            ]);
        }
        out.head(&table.render(0));
    }
    troubles(&mut out, snapshot, &report.troubles);
    unread(&mut out, &report.unread);
    out.text
}

pub(crate) fn gpu(snapshot: &Snapshot, report: &GpuReport) -> String {
    let mut out = Out::default();
    let GpuReport { gpu, node, .. } = report;
    out.line(&format!(
        "{} of node {node}, {}, {}",
        gpu.name,
        or_dash(&gpu.product),
        gpu.uuid
    ));
    let offered = if gpu.offered.is_empty() {
        "nothing".to_owned()
    } else {
        gpu.offered.join(", ")
    };
    let by = if gpu.policy.is_empty() {
        String::new()
    } else {
        format!(" (by policy {})", gpu.policy)
    };
    out.line(&format!("mode {}, offered as {offered}{by}", gpu.mode));
    if !gpu.taints.is_empty() {
        out.line(&format!("tainted: {}", gpu.taints.join(", ")));
    }
    if gpu.holders.is_empty() {
        out.line("no claim holds it");
    } else {
        let mut table = Table::new(["CLAIM", "DEVICE", "PHASE", "FOR", "PODS"]);
        if !report.granted.is_empty() {
            table.widen(&["GRANTED"]);
        }
        for holder in &gpu.holders {
            let claim = format!("{}/{}", holder.namespace, holder.name);
            let granted = report.granted.get(&claim);
            let granted = granted.and_then(|by_device| by_device.get(&holder.device));
            let mut cells = vec![
                claim.clone(),
                holder.device.clone(),
                holder.phase.clone(),
                age(snapshot, holder.since.as_deref()),
                or_dash(&holder.pods.join(", ")),
            ];
            if !report.granted.is_empty() {
                cells.push(or_dash(granted.map_or("", String::as_str)));
            }
            table.cells(cells);
        }
        out.head(&table.render(0));
    }
    for (device, left) in &report.left {
        // A GPU as a whole gives out the shares of one device, its partitions those of several.
        let of = match kind(device).as_ref().and_then(DeviceKind::partition) {
            Some(_) => format!("left of {device}"),
            None => "left for shares".to_owned(),
        };
        out.line(&format!("{of}: {left}"));
    }
    troubles(&mut out, snapshot, &report.troubles);
    unread(&mut out, &report.unread);
    out.text
}

pub(crate) fn claim(snapshot: &Snapshot, report: &ClaimReport, wide: bool) -> String {
    let mut out = Out::new(wide);
    let pods = match report.pods.as_slice() {
        [] => String::new(),
        pods => format!(", pods {}", pods.join(", ")),
    };
    let state = match report.state {
        State::Unused => "unused: no pod needs it, so no device is allocated",
        State::Waiting => "waiting: no device is allocated",
        State::Allocated => "allocated, not prepared yet",
        State::Preparing => "allocated, devices are being prepared",
        State::Prepared => "allocated, devices are ready",
        State::Refused => "allocated, but the node refuses to prepare it",
        State::Leaving => "released, but its devices are still in use",
    };
    let since = report
        .since
        .as_deref()
        .map(|since| format!(", for {}", snapshot.since(since)));
    out.line(&format!("claim {}{pods}", report.claim));
    out.line(&format!("{state}{}", since.unwrap_or_default()));
    if !report.devices.is_empty() {
        let mut table = Table::new([
            "REQUEST", "DEVICE", "NODE", "MODE", "GRANTED", "PHASE", "UUID",
        ]);
        for device in &report.devices {
            table.row([
                device.request.clone(),
                device.device.clone(),
                device.node.clone(),
                or_dash(&device.mode),
                or_dash(&device.granted),
                or_dash(&device.phase),
                or_dash(&device.uuid),
            ]);
        }
        out.head(&table.render(0));
    }
    waits_for(&mut out, &report.devices);
    if let Some(condition) = report
        .condition
        .as_ref()
        .filter(|_| report.state == State::Refused)
    {
        out.head("refused:");
        refused(&mut out, snapshot, condition);
    }
    used(&mut out, snapshot, &report.reported_use);
    if let Some(waiting) = &report.waiting {
        out.head(&format!("why: {}", waiting.sentence()));
        reasons(&mut out, waiting, 2);
    }
    if let Some(kubelet) = &report.kubelet {
        out.line(&format!("kubelet: {kubelet}"));
    }
    if let Some(scheduler) = &report.scheduler {
        out.line(&format!("scheduler: {scheduler}"));
    }
    troubles(&mut out, snapshot, &report.troubles);
    unread(&mut out, &report.unread);
    out.text
}

/// Shows why devices are still in use, or are not ready yet.
fn waits_for(out: &mut Out, devices: &[DeviceLine]) {
    for device in devices {
        if !device.reason.is_empty() {
            out.line(&format!("{}: {}", device.device, device.reason));
        }
        if !device.after.is_empty() {
            out.line(&format!("{}: {}", device.device, device.after));
        }
    }
}

/// Shows a pod.
pub(crate) fn pod(snapshot: &Snapshot, report: &PodReport, wide: bool) -> String {
    let mut out = Out::new(wide);
    let node = report
        .node
        .as_deref()
        .map(|node| format!(", on node {node}"));
    out.line(&format!("pod {}{}", report.pod, node.unwrap_or_default()));
    let step = match report.step {
        Step::Gated => "gated: its scheduling gates keep it from the scheduler",
        Step::Waiting => "waiting: no node, or claims without devices",
        Step::Preparing => "its node prepares the devices of its claims",
        Step::Starting => "its devices are ready, its containers do not run yet",
        Step::Running => "running",
        Step::Ending => "ending: it is to be deleted",
        Step::Ended => "ended",
    };
    let since = report.since.as_deref();
    let since = since.map(|since| format!(", for {}", snapshot.since(since)));
    out.line(&format!("{step}{}", since.unwrap_or_default()));
    if !report.claims.is_empty() {
        let mut table = Table::new(["CLAIM", "STATE", "DEVICES", "GRANTED"]);
        for claim in &report.claims {
            let devices = claim.devices.iter().map(|device| device.device.as_str());
            let granted = claim.devices.iter().map(|device| device.granted.as_str());
            let granted: Vec<&str> = granted.filter(|granted| !granted.is_empty()).collect();
            table.row([
                claim.claim.clone(),
                claim.state.word().to_owned(),
                or_dash(&devices.collect::<Vec<_>>().join(", ")),
                or_dash(&granted.join("; ")),
            ]);
        }
        out.head(&table.render(0));
    }
    if !report.missing.is_empty() {
        out.head("missing:");
        for missing in &report.missing {
            out.line(&format!("  {missing}"));
        }
    }
    for claim in &report.claims {
        waits_for(&mut out, &claim.devices);
        let condition = claim
            .condition
            .as_ref()
            .filter(|_| claim.state == State::Refused);
        if let Some(condition) = condition {
            out.head("refused by its node:");
            refused(&mut out, snapshot, condition);
        }
        used(&mut out, snapshot, &claim.reported_use);
    }
    // The claims of a pod have the kubelet's message in common.
    if let Some(kubelet) = report
        .claims
        .iter()
        .find_map(|claim| claim.kubelet.as_ref())
    {
        out.head(&format!("kubelet: {kubelet}"));
    }
    if let Some(waiting) = &report.waiting {
        out.head(&format!("why: {}", waiting.sentence()));
        reasons(&mut out, waiting, 2);
    }
    if let Some(scheduler) = &report.scheduler {
        out.line(&format!("scheduler: {scheduler}"));
    }
    for (head, lines) in [
        ("containers:", &report.containers),
        ("warnings:", &report.warnings),
    ] {
        if !lines.is_empty() {
            out.head(head);
        }
        for line in lines {
            out.line(&format!("  {}", indented(line, 2)));
        }
    }
    if let Some(hint) = &report.hint {
        out.head(&format!("do: {hint}"));
    }
    let mut of_claims: Vec<NodeTrouble> = Vec::new();
    for trouble in report.claims.iter().flat_map(|claim| &claim.troubles) {
        if !of_claims.contains(trouble) {
            of_claims.push(trouble.clone());
        }
    }
    troubles(&mut out, snapshot, &of_claims);
    unread(&mut out, &report.unread);
    out.text
}

/// Shows policies; the GPUs of each rule with `wide`.
pub(crate) fn policies(snapshot: &Snapshot, report: &PolicyReport, wide: bool) -> String {
    let mut out = Out::default();
    let mut table = Table::new(["POLICY", "PRIORITY", "RULE", "NODES", "GPUS"]);
    let mut gpus = Table::new(["RULE", "DECIDES ABOUT", "OF NODES"]);
    for policy in &report.policies {
        let priority = policy.priority.map(|priority| priority.to_string());
        let mut row = |rule: &str, nodes: String, gpus: String| {
            let priority = priority.clone().unwrap_or_default();
            let cells = [&policy.name, &priority, rule, &nodes, &gpus];
            table.row(cells.map(or_dash));
        };
        if let Some(nodes) = &policy.mode_lock {
            row("modeLock", nodes.len().to_string(), String::new());
        } else if policy.rules.is_empty() {
            row("", String::new(), String::new());
        }
        for rule in &policy.rules {
            let earlier = if rule.earlier {
                " (earlier version)"
            } else {
                ""
            };
            let count = rule.gpus.map(|count| count.to_string());
            row(
                &format!("{}{earlier}", rule.rule),
                rule.nodes.len().to_string(),
                count.unwrap_or_default(),
            );
            // Nodes of a pool have the same GPUs: they share a row.
            let mut alike: BTreeMap<&[String], Vec<&str>> = BTreeMap::new();
            for (node, decided) in &rule.decides {
                alike.entry(decided).or_default().push(node);
            }
            for (decided, nodes) in alike {
                let rule = format!("{}/{}", policy.name, rule.rule);
                gpus.row([rule, decided.join(", "), nodes.join(", ")]);
            }
        }
    }
    if !report.policies.is_empty() {
        out.line(&table.render(0));
    } else if snapshot.lacks(&POLICIES) {
        out.line("GpuPolicies cannot be read");
    } else {
        out.line("there is no GpuPolicy: the defaults of the nodes apply");
    }
    if wide
        && report
            .policies
            .iter()
            .flat_map(|p| &p.rules)
            .any(|rule| !rule.decides.is_empty())
    {
        out.head(&gpus.render(0));
    }
    if !report.policies.is_empty() && !report.without_rule.is_empty() {
        let gpus: usize = report.without_rule.values().map(Vec::len).sum();
        let nodes = report.without_rule.len();
        out.head(&format!(
            "without a rule: {} of {}",
            counted(gpus, "GPU"),
            counted(nodes, "node")
        ));
    }
    troubles(&mut out, snapshot, &report.troubles);
    unread(&mut out, &report.unread);
    if !report.needs_person {
        well(&mut out, &report.unread);
    }
    out.text
}

/// Text that is assembled from lines and blocks.
#[derive(Default)]
struct Out {
    text: String,
    /// Reasons node by node, too.
    wide: bool,
}

impl Out {
    fn new(wide: bool) -> Self {
        Self {
            wide,
            ..Self::default()
        }
    }

    fn line(&mut self, line: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(line);
    }

    /// After an empty line.
    fn head(&mut self, line: &str) {
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.line(line);
    }
}

fn nodes(snapshot: &Snapshot, nodes: &[NodeLine]) -> String {
    let mut table = Table::new([
        "NODE", "GPUS", "FREE", "CLAIMS", "MODES", "TROUBLE", "DRIVER", "CHANGED",
    ]);
    for node in nodes {
        table.row([
            node.name.clone(),
            node.gpus.to_string(),
            node.free.to_string(),
            node.claims.to_string(),
            or_dash(&node.modes),
            or_dash(&node.trouble),
            or_dash(&node.versions.driver),
            age(snapshot, node.changed.as_deref()),
        ]);
    }
    table.render(0)
}

fn versions(snapshot: &Snapshot, node: &NodeLine) -> String {
    let mut parts = vec![format!(
        "node {}: {}, {} free, {}",
        node.name,
        counted(node.gpus, "GPU"),
        node.free,
        counted(node.claims, "claim")
    )];
    let versions = &node.versions;
    for (what, version) in [
        ("driver", &versions.driver),
        ("divvy", &versions.divvy),
        ("Kubernetes", &versions.kubernetes),
    ] {
        if !version.is_empty() {
            parts.push(format!("{what} {version}"));
        }
    }
    if let Some(age) = node
        .changed
        .as_deref()
        .and_then(|changed| snapshot.age(changed))
    {
        parts.push(format!("unchanged for {age}"));
    }
    parts.join(", ")
}

/// Returns `1 GPU` or `2 GPUs`.
fn counted<N: Copy + Display + PartialEq + From<u8>>(count: N, what: &str) -> String {
    let plural = if count == N::from(1) { "" } else { "s" };
    format!("{count} {what}{plural}")
}

fn age(snapshot: &Snapshot, since: Option<&str>) -> String {
    or_dash(
        &since
            .and_then(|since| snapshot.age(since))
            .unwrap_or_default(),
    )
}

/// The claims that hold a GPU, each once.
fn holders(gpu: &GpuStatus) -> Vec<String> {
    let mut all: Vec<String> = gpu
        .holders
        .iter()
        .map(|h| format!("{}/{}", h.namespace, h.name))
        .collect();
    all.dedup();
    all
}

fn troubles(out: &mut Out, snapshot: &Snapshot, troubles: &[NodeTrouble]) {
    for (notice, head) in [(false, "action required:"), (true, "for information:")] {
        let of_it: Vec<&NodeTrouble> = troubles
            .iter()
            .filter(|entry| entry.trouble.notice == notice)
            .collect();
        if of_it.is_empty() {
            continue;
        }
        out.head(head);
        for equal in fold(snapshot, &of_it) {
            let since = equal.since();
            let since = since.map(|since| format!(", for {}", snapshot.since(since)));
            out.line(&format!(
                "  {}: {}{}",
                some(equal.places().iter()),
                equal.kind(),
                since.unwrap_or_default()
            ));
            out.line(&format!("    why: {}", indented(&equal.why, 9)));
            if !equal.claim().is_empty() {
                out.line(&format!("    claim: {}", equal.claim()));
            }
            let affects = equal.affects();
            if !affects.is_empty() {
                out.line(&format!("    held by: {}", some(affects.into_iter())));
            }
            if !equal.remedy.is_empty() {
                out.line(&format!("    do:  {}", equal.remedy));
            }
        }
    }
}

fn refused(out: &mut Out, snapshot: &Snapshot, claim: &ClaimLine) {
    let pods = if claim.pods.is_empty() {
        String::new()
    } else {
        format!(" (pods {})", claim.pods.join(", "))
    };
    out.line(&format!(
        "  {}{pods}: {}, for {}",
        claim.claim,
        claim.reason,
        snapshot.since(&claim.since)
    ));
    out.line(&format!("    {}", indented(&claim.message, 4)));
}

fn used(out: &mut Out, snapshot: &Snapshot, claims: &[ClaimLine]) {
    if !claims.is_empty() {
        out.head("over their grants, or idle:");
    }
    for claim in claims {
        refused(out, snapshot, claim);
    }
}

fn waits(out: &mut Out, snapshot: &Snapshot, waiting: &Waiting) {
    let others = match waiting.others {
        0 => String::new(),
        others => format!(" and {others} more like it"),
    };
    let since = waiting
        .since
        .as_deref()
        .and_then(|since| snapshot.age(since));
    let since = since.map_or_else(String::new, |age| format!(" for {age}"));
    out.line(&format!(
        "  pod {}{others}{since}: {}",
        waiting.pod,
        waiting.why.sentence()
    ));
    if out.wide {
        out.line(&format!("    claim {}", waiting.claims.join(", ")));
    }
    reasons(out, &waiting.why, 4);
}

fn reasons(out: &mut Out, why: &Why, indent: usize) {
    let pad = " ".repeat(indent);
    if let Some(mistake) = &why.mistake {
        out.line(&format!("{pad}{}", indented(mistake, indent)));
    }
    if out.wide {
        nodes_of(out, why, indent);
    }
    if let Some(hint) = &why.hint {
        out.line(&format!("{pad}do: {hint}"));
    }
}

/// Shows the reasons node by node.
fn nodes_of(out: &mut Out, why: &Why, indent: usize) {
    let pad = " ".repeat(indent);
    for alike in why.nodes.iter().take(REASONS) {
        let nodes = some(alike.nodes.iter());
        match alike.reasons.as_slice() {
            [only] => out.line(&format!("{pad}{nodes}: {only}")),
            several => {
                out.line(&format!("{pad}{nodes}:"));
                for reason in several {
                    out.line(&format!("{pad}  {reason}"));
                }
            }
        }
    }
    if let Some(more) = why
        .nodes
        .len()
        .checked_sub(REASONS)
        .filter(|more| *more > 0)
    {
        out.line(&format!(
            "{pad}and {more} more groups of nodes (all with -o json)"
        ));
    }
}

fn well(out: &mut Out, unread: &[String]) {
    out.head(if unread.is_empty() {
        "no action required"
    } else {
        "no action required, as far as is known"
    });
}

fn unread(out: &mut Out, unread: &[String]) {
    if unread.is_empty() {
        return;
    }
    out.head("unknown:");
    for line in unread {
        out.line(&format!("  {line}"));
    }
}

/// Later lines of a text under its first.
fn indented(text: &str, indent: usize) -> String {
    text.trim_end()
        .replace('\n', &format!("\n{}", " ".repeat(indent)))
}
