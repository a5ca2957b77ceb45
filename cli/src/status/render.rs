//! The answers as text: tables, then problems with their remedies.

use divvy_api::node::GpuStatus;

use super::claim::{ClaimLine, ClaimReport, State};
use super::read::GPU_NODES;
use super::report::{Fleet, GpuReport, NodeLine, NodeReport, NodeTrouble, Waiting, kinds};
use super::snapshot::Snapshot;
use super::waiting::{Why, some};
use crate::table::{Table, or_dash};

/// Nodes with reasons of their own that are written out.
const REASONS: usize = 8;

pub(crate) fn fleet(snapshot: &Snapshot, fleet: &Fleet) -> String {
    let mut out = Out::default();
    if fleet.nodes.is_empty() && snapshot.lacks(&GPU_NODES) {
        out.line("GpuNodes cannot be read: the state of the nodes' GPUs is unknown");
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
        let known = if fleet.unread.is_empty() {
            "no action required"
        } else {
            "no action required, as far as is known"
        };
        out.head(known);
    }
    out.text
}

pub(crate) fn node(snapshot: &Snapshot, report: &NodeReport) -> String {
    let mut out = Out::default();
    out.line(&versions(snapshot, &report.node));
    if !report.gpus.is_empty() {
        let mut table =
            Table::new(["GPU", "PRODUCT", "MODE", "OFFERED", "POLICY", "HOLDERS", "TROUBLE", "UUID"]);
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
    out.line(&format!("{} of node {node}, {}, {}", gpu.name, or_dash(&gpu.product), gpu.uuid));
    let offered = if gpu.offered.is_empty() { "nothing".to_owned() } else { gpu.offered.join(", ") };
    let by = if gpu.policy.is_empty() { String::new() } else { format!(" (by policy {})", gpu.policy) };
    out.line(&format!("mode {}, offered as {offered}{by}", gpu.mode));
    if !gpu.taints.is_empty() {
        out.line(&format!("tainted: {}", gpu.taints.join(", ")));
    }
    if gpu.holders.is_empty() {
        out.line("no claim holds it");
    } else {
        let mut table = Table::new(["CLAIM", "DEVICE", "PHASE", "FOR", "PODS"]);
        for holder in &gpu.holders {
            table.row([
                format!("{}/{}", holder.namespace, holder.name),
                holder.device.clone(),
                holder.phase.clone(),
                age(snapshot, holder.since.as_deref()),
                or_dash(&holder.pods.join(", ")),
            ]);
        }
        out.head(&table.render(0));
    }
    troubles(&mut out, snapshot, &report.troubles);
    unread(&mut out, &report.unread);
    out.text
}

pub(crate) fn claim(snapshot: &Snapshot, report: &ClaimReport) -> String {
    let mut out = Out::default();
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
    let since = report.since.as_deref().map(|since| format!(", for {}", snapshot.since(since)));
    out.line(&format!("claim {}{pods}", report.claim));
    out.line(&format!("{state}{}", since.unwrap_or_default()));
    if !report.devices.is_empty() {
        let mut table = Table::new(["REQUEST", "DEVICE", "NODE", "MODE", "GRANTED", "PHASE", "UUID"]);
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
    for device in report.devices.iter().filter(|device| !device.reason.is_empty()) {
        out.line(&format!("{}: {}", device.device, device.reason));
    }
    if let Some(condition) = report.condition.as_ref().filter(|_| report.state == State::Refused) {
        out.head("refused:");
        refused(&mut out, snapshot, condition);
    }
    used(&mut out, snapshot, &report.reported_use);
    if let Some(waiting) = &report.waiting {
        out.head(&format!("why: {}", waiting.verdict.sentence()));
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

/// Text that is assembled from lines and blocks.
#[derive(Default)]
struct Out {
    text: String,
}

impl Out {
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
    let mut table = Table::new(["NODE", "GPUS", "FREE", "CLAIMS", "MODES", "TROUBLE", "DRIVER", "CHANGED"]);
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
    let mut parts =
        vec![format!("node {}: {} GPUs, {} free, {} claims", node.name, node.gpus, node.free, node.claims)];
    let versions = &node.versions;
    for (what, version) in
        [("driver", &versions.driver), ("divvy", &versions.divvy), ("Kubernetes", &versions.kubernetes)]
    {
        if !version.is_empty() {
            parts.push(format!("{what} {version}"));
        }
    }
    if let Some(age) = node.changed.as_deref().and_then(|changed| snapshot.age(changed)) {
        parts.push(format!("unchanged for {age}"));
    }
    parts.join(", ")
}

fn age(snapshot: &Snapshot, since: Option<&str>) -> String {
    or_dash(&since.and_then(|since| snapshot.age(since)).unwrap_or_default())
}

/// The claims that hold a GPU, each once.
fn holders(gpu: &GpuStatus) -> Vec<String> {
    let mut all: Vec<String> = gpu.holders.iter().map(|h| format!("{}/{}", h.namespace, h.name)).collect();
    all.dedup();
    all
}

fn troubles(out: &mut Out, snapshot: &Snapshot, troubles: &[NodeTrouble]) {
    for (notice, head) in [(false, "action required:"), (true, "for information:")] {
        let of_it: Vec<&NodeTrouble> =
            troubles.iter().filter(|entry| entry.trouble.notice == notice).collect();
        if of_it.is_empty() {
            continue;
        }
        out.head(head);
        for entry in of_it {
            let trouble = &entry.trouble;
            let place = [entry.node.as_str(), &trouble.gpu, &trouble.subject];
            let place: Vec<&str> = place.into_iter().filter(|part| !part.is_empty()).collect();
            let since = trouble.since.as_deref().map(|since| format!(", for {}", snapshot.since(since)));
            out.line(&format!("  {}: {}{}", place.join(" "), trouble.kind, since.unwrap_or_default()));
            out.line(&format!("    why: {}", indented(&trouble.why, 9)));
            if !trouble.claim.is_empty() {
                out.line(&format!("    claim: {}", trouble.claim));
            }
            if !entry.affects.is_empty() {
                out.line(&format!("    held by: {}", some(entry.affects.iter())));
            }
            if !trouble.remedy.is_empty() {
                out.line(&format!("    do:  {}", trouble.remedy));
            }
        }
    }
}

fn refused(out: &mut Out, snapshot: &Snapshot, claim: &ClaimLine) {
    let pods =
        if claim.pods.is_empty() { String::new() } else { format!(" (pods {})", claim.pods.join(", ")) };
    out.line(&format!("  {}{pods}: {}, for {}", claim.claim, claim.reason, snapshot.since(&claim.since)));
    out.line(&format!("    {}", indented(&claim.message, 4)));
}

fn used(out: &mut Out, snapshot: &Snapshot, claims: &[ClaimLine]) {
    if !claims.is_empty() {
        out.head("use too much or nothing:");
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
    let since = waiting.since.as_deref().and_then(|since| snapshot.age(since));
    let since = since.map_or_else(String::new, |age| format!(" for {age}"));
    let claims = waiting.claims.join(", ");
    out.line(&format!(
        "  pod {}{others}{since}, claim {claims}: {}",
        waiting.pod,
        waiting.why.verdict.sentence()
    ));
    reasons(out, &waiting.why, 4);
}

fn reasons(out: &mut Out, why: &Why, indent: usize) {
    let pad = " ".repeat(indent);
    if let Some(mistake) = &why.mistake {
        out.line(&format!("{pad}{}", indented(mistake, indent)));
    }
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
    if let Some(more) = why.nodes.len().checked_sub(REASONS).filter(|more| *more > 0) {
        out.line(&format!("{pad}and {more} more groups of nodes (all with -o json)"));
    }
    if let Some(hint) = &why.hint {
        out.line(&format!("{pad}do: {hint}"));
    }
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
    text.trim_end().replace('\n', &format!("\n{}", " ".repeat(indent)))
}
