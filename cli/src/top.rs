//! `divvy top`: which claims hold what, and what they really use of it; the most wasteful first.

mod since;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::format::{self, Output};
use crate::status::read::{
    Access, CLAIMS, ClaimsWanted, GPU_NODES, PodWanted, SlicesWanted, Wanted,
};
use crate::table::{Table, or_dash};
use crate::usage::{ClaimUsage, Usage};
use crate::view::{self, GpuView, Hold, NodeView, View};

/// Word for a figure that is not known.
const UNKNOWN: &str = "?";

/// Arguments of `divvy top`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Group the lines by
    #[arg(value_enum, default_value_t = By::Claims)]
    by: By,
    #[command(flatten)]
    access: Access,
    /// Count the claims of this namespace only
    #[arg(short, long, value_name = "NAME", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Count the claims of all namespaces (the default)
    #[arg(short = 'A', long)]
    all_namespaces: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Name of the driver; by default the one that most nodes report
    #[arg(long, value_name = "NAME")]
    driver_name: Option<String>,
    #[command(flatten)]
    sums: since::Since,
}

/// Subject of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum By {
    #[value(alias = "claim")]
    Claims,
    #[value(alias = "gpu")]
    Gpus,
    #[value(alias = "node")]
    Nodes,
    #[value(alias = "namespace", alias = "ns")]
    Namespaces,
}

pub fn run(args: &Args) -> Result<ExitCode> {
    let since::Since { since, prometheus } = &args.sums;
    if let (Some(since), Some(prometheus)) = (since, prometheus) {
        anyhow::ensure!(
            matches!(args.by, By::Claims | By::Namespaces),
            "GPU time is summed by namespace alone: divvy top namespaces --since {since}"
        );
        return since::run(since, prometheus, args.namespace.as_deref(), args.output);
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let (snapshot, usage) = runtime.block_on(async {
        let (client, namespace, server) = args.access.client().await?;
        let namespace = args.namespace.as_deref().unwrap_or(&namespace);
        read(&client, args.driver_name.as_deref(), namespace)
            .await
            .context(server)
    })?;
    let view = view::of(&snapshot, &usage);
    let top = top(&view, args.by, args.namespace.as_deref());
    let knows = top.holds_known;
    let wide = args.output == Output::Wide;
    format::show(&top, args.output.format(), |top| render(top, wide))
        .context("writing the answer")?;
    Ok(if knows {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Everything that a view is made of.
pub(crate) async fn read(
    client: &kube::Client,
    driver: Option<&str>,
    namespace: &str,
) -> Result<(crate::status::snapshot::Snapshot, Usage)> {
    let wanted = Wanted {
        driver,
        claims: ClaimsWanted::Waiting,
        events: false,
        policies: false,
        plugins: false,
        namespace,
        pod: PodWanted::No,
        slices: SlicesWanted::All,
    };
    let (snapshot, usage) = futures::join!(
        crate::status::read::read(client, wanted),
        crate::usage::read(client)
    );
    Ok((snapshot?, usage))
}

/// The answer.
#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Top<'v> {
    #[serde(flatten)]
    lines: Lines<'v>,
    /// False if claims could not be read, so that holders may be missing.
    holds_known: bool,
    /// Kinds that could not be read.
    unread: &'v [String],
}

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
enum Lines<'v> {
    Claims(Vec<OfClaim<'v>>),
    Gpus(Vec<OfGpu<'v>>),
    Nodes(Vec<Of<'v>>),
    Namespaces(Vec<Of<'v>>),
}

/// A claim's part of a GPU.
#[derive(Debug, PartialEq, Serialize)]
struct OfClaim<'v> {
    node: &'v str,
    gpu: &'v str,
    uuid: &'v str,
    #[serde(flatten)]
    hold: &'v Hold,
}

/// A GPU.
#[derive(Debug, PartialEq, Serialize)]
struct OfGpu<'v> {
    node: &'v str,
    #[serde(flatten)]
    gpu: &'v GpuView,
    #[serde(flatten)]
    sum: Sum,
}

/// A node or a namespace.
#[derive(Debug, PartialEq, Serialize)]
struct Of<'v> {
    name: &'v str,
    /// GPUs of the node, or on which the namespace has something.
    gpus: usize,
    #[serde(flatten)]
    sum: Sum,
}

/// Sums over several claims.
#[derive(Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
struct Sum {
    /// Parts of GPUs.
    held: usize,
    granted_total: Total,
    used_total: Total,
    wasted_total: Total,
    /// Parts that are idle, and the time of the one that is so for longest.
    idle_held: usize,
    /// Parts of which that is not known.
    idle_unknown: usize,
    longest_idle_seconds: Option<u64>,
}

/// Bytes of which not all may be known.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize)]
struct Total {
    /// Sum of those that are known; nothing if none is.
    bytes: Option<u64>,
    /// Number of those that are not known.
    unknown: usize,
}

impl Total {
    fn add(&mut self, bytes: Option<u64>) {
        match bytes {
            Some(bytes) => self.bytes = Some(self.bytes.unwrap_or(0).saturating_add(bytes)),
            None => self.unknown += 1,
        }
    }
}

impl Total {
    /// Shows the sum, of which something is missing unless all parts are known.
    fn shown(self, is_known: bool) -> String {
        let unknown = self.unknown + usize::from(!is_known);
        Self { unknown, ..self }.to_string()
    }
}

impl fmt::Display for Total {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.bytes, self.unknown) {
            (None, 0) => f.write_str("-"),
            (None, _) => f.write_str(UNKNOWN),
            (Some(bytes), 0) => f.write_str(&format::bytes(bytes)),
            (Some(bytes), _) => write!(f, "≥ {}", format::bytes(bytes)),
        }
    }
}

impl<'v> Sum {
    fn of(holds: impl IntoIterator<Item = &'v Hold>) -> Self {
        let mut sum = Self::default();
        // Admin access takes nothing from others.
        for hold in holds.into_iter().filter(|hold| !hold.is_admin()) {
            sum.held += 1;
            sum.granted_total.add(hold.usage.memory_granted);
            sum.used_total.add(hold.usage.memory_used);
            sum.wasted_total.add(hold.wasted);
            sum.idle_unknown += usize::from(hold.usage.idle_seconds.is_none());
            if hold.idle {
                sum.idle_held += 1;
                sum.longest_idle_seconds = sum.longest_idle_seconds.max(hold.usage.idle_seconds);
            }
        }
        sum
    }

    /// Shows the number of parts.
    fn held(&self, is_known: bool) -> String {
        match (is_known, self.held) {
            (true, held) => held.to_string(),
            (false, 0) => UNKNOWN.to_owned(),
            (false, held) => format!("≥ {held}"),
        }
    }

    /// The most wasteful first: what has idle parts, then by memory that is not used.
    fn rank(&self) -> impl Ord + use<> {
        std::cmp::Reverse((self.longest_idle_seconds, self.wasted_total.bytes))
    }
}

fn top<'v>(view: &'v View, by: By, only: Option<&str>) -> Top<'v> {
    let shown = |hold: &Hold| only.is_none_or(|only| hold.namespace == only);
    let holds: Vec<(&NodeView, &GpuView, &Hold)> =
        view.holds().filter(|(_, _, hold)| shown(hold)).collect();
    let lines = match by {
        By::Claims => {
            let mut lines: Vec<OfClaim<'_>> = holds
                .into_iter()
                .map(|(node, gpu, hold)| OfClaim {
                    node: &node.name,
                    gpu: &gpu.name,
                    uuid: &gpu.uuid,
                    hold,
                })
                .collect();
            lines.sort_by(|a, b| a.hold.rank().cmp(&b.hold.rank()));
            Lines::Claims(lines)
        }
        By::Gpus => {
            let gpus = view
                .nodes
                .iter()
                .flat_map(|node| node.gpus.iter().map(move |gpu| (node, gpu)));
            let mut lines: Vec<OfGpu<'_>> = gpus
                .map(|(node, gpu)| {
                    let sum = Sum::of(gpu.holds.iter().filter(|hold| shown(hold)));
                    OfGpu {
                        node: &node.name,
                        gpu,
                        sum,
                    }
                })
                .collect();
            lines.sort_by_key(|line| line.sum.rank());
            Lines::Gpus(lines)
        }
        By::Nodes => {
            let mut lines: Vec<Of<'_>> = view
                .nodes
                .iter()
                .map(|node| {
                    let of_node = node
                        .gpus
                        .iter()
                        .flat_map(|gpu| &gpu.holds)
                        .filter(|hold| shown(hold));
                    Of {
                        name: &node.name,
                        gpus: node.gpus.len(),
                        sum: Sum::of(of_node),
                    }
                })
                .collect();
            lines.sort_by_key(|line| line.sum.rank());
            Lines::Nodes(lines)
        }
        By::Namespaces => Lines::Namespaces(namespaces(&holds)),
    };
    let kinds = [&CLAIMS, &GPU_NODES];
    let is_of_holds = |unread: &String| kinds.iter().any(|kind| unread.starts_with(kind.name));
    Top {
        lines,
        holds_known: !view.unread.iter().any(is_of_holds),
        unread: &view.unread,
    }
}

fn namespaces<'v>(holds: &[(&'v NodeView, &'v GpuView, &'v Hold)]) -> Vec<Of<'v>> {
    let mut all: BTreeMap<&str, (BTreeSet<&str>, Vec<&Hold>)> = BTreeMap::new();
    for (_, gpu, hold) in holds {
        let (gpus, of_namespace) = all.entry(&hold.namespace).or_default();
        of_namespace.push(*hold);
        gpus.insert(&gpu.uuid);
    }
    let mut lines: Vec<Of<'_>> = all
        .into_iter()
        .map(|(name, (gpus, holds))| Of {
            name,
            gpus: gpus.len(),
            sum: Sum::of(holds),
        })
        .collect();
    lines.sort_by_key(|line| line.sum.rank());
    lines
}

fn render(top: &Top<'_>, wide: bool) -> String {
    let table = match &top.lines {
        Lines::Claims(lines) => claims(lines, wide),
        Lines::Gpus(lines) => gpus(lines, wide, top.holds_known),
        Lines::Nodes(lines) => sums("NODE", lines, top.holds_known),
        Lines::Namespaces(lines) => sums("NAMESPACE", lines, top.holds_known),
    };
    let nothing = if top.holds_known {
        "no claim holds a GPU"
    } else {
        "unknown which claims hold GPUs"
    };
    let mut text = table.map_or_else(|| nothing.to_owned(), |table| table.render(0));
    if !top.unread.is_empty() {
        text += &format!("\n\nunknown:\n  {}", top.unread.join("\n  "));
    }
    text
}

/// Returns the grant of a claim, with the limit of its memory where that is more.
fn granted(usage: &ClaimUsage) -> String {
    let of = bytes(usage.memory_granted);
    match usage.memory_limit {
        Some(limit) if usage.memory_granted < Some(limit) => {
            format!("{of}, limit {}", format::bytes(limit))
        }
        _ => of,
    }
}

fn claims(lines: &[OfClaim<'_>], wide: bool) -> Option<Table> {
    let mut table = Table::new([
        "CLAIM", "PODS", "NODE", "DEVICE", "GRANTED", "USED", "WASTED", "BUSY", "IDLE", "NOTE",
    ]);
    if wide {
        table.widen(&["PART", "BUSY FROM", "UUID"]);
    }
    for OfClaim {
        node, uuid, hold, ..
    } in lines
    {
        let usage = &hold.usage;
        let mut cells = vec![
            format!("{}/{}", hold.namespace, hold.claim),
            or_dash(&hold.pods.join(",")),
            (*node).to_owned(),
            hold.device.clone(),
            // Admin access is granted no memory of its own.
            if hold.is_admin() {
                "-".to_owned()
            } else {
                granted(usage)
            },
            bytes(usage.memory_used),
            bytes(hold.wasted),
            usage.utilization.map_or_else(
                || UNKNOWN.to_owned(),
                |ratio| format!("{:.0} %", ratio * 100.0),
            ),
            usage.idle_seconds.map_or_else(|| UNKNOWN.to_owned(), idle),
            or_dash(&note(hold)),
        ];
        if wide {
            let source = usage.source.clone().unwrap_or_else(|| UNKNOWN.to_owned());
            cells.extend([hold.part.clone(), source, (*uuid).to_owned()]);
        }
        table.cells(cells);
    }
    (!lines.is_empty()).then_some(table)
}

/// Returns remarks about a part, in words.
fn note(hold: &Hold) -> String {
    let mut notes = Vec::new();
    if hold.idle {
        notes.push("idle");
    }
    if hold.usage.over_grant == Some(true) {
        notes.push("over its grant");
    }
    if hold.phase != "prepared" {
        notes.push(&hold.phase);
    }
    notes.join(", ")
}

fn gpus(lines: &[OfGpu<'_>], wide: bool, is_known: bool) -> Option<Table> {
    let mut table = Table::new([
        "NODE", "GPU", "MODE", "HELD", "MEMORY", "USED", "OUTSIDE", "GRANTED", "WASTED", "IDLE",
        "TROUBLE",
    ]);
    if wide {
        table.widen(&["PRODUCT", "UUID"]);
    }
    for OfGpu { node, gpu, sum } in lines {
        let mut cells = vec![
            (*node).to_owned(),
            gpu.name.clone(),
            gpu.mode.clone(),
            sum.held(is_known),
            bytes(gpu.memory),
            bytes(gpu.usage.memory_used),
            bytes(gpu.usage.memory_unattributed),
            sum.granted_total.shown(is_known),
            sum.wasted_total.shown(is_known),
            idle_of(sum),
            or_dash(&gpu.troubles.join("+")),
        ];
        if wide {
            cells.extend([or_dash(&gpu.product), gpu.uuid.clone()]);
        }
        table.cells(cells);
    }
    (!lines.is_empty()).then_some(table)
}

fn sums(of: &str, lines: &[Of<'_>], is_known: bool) -> Option<Table> {
    let mut table = Table::new([of, "GPUS", "HELD", "GRANTED", "USED", "WASTED", "IDLE"]);
    for line in lines {
        let sum = &line.sum;
        table.row([
            line.name.to_owned(),
            line.gpus.to_string(),
            sum.held(is_known),
            sum.granted_total.shown(is_known),
            sum.used_total.shown(is_known),
            sum.wasted_total.shown(is_known),
            idle_of(sum),
        ]);
    }
    (!lines.is_empty()).then_some(table)
}

fn bytes(bytes: Option<u64>) -> String {
    bytes.map_or_else(|| UNKNOWN.to_owned(), format::bytes)
}

/// Returns the time that a part has been idle; pauses are none.
fn idle(seconds: u64) -> String {
    if seconds < view::IDLE {
        "-".to_owned()
    } else {
        span(seconds)
    }
}

fn idle_of(sum: &Sum) -> String {
    match sum.longest_idle_seconds {
        None if sum.idle_unknown > 0 => UNKNOWN.to_owned(),
        None => "-".to_owned(),
        Some(seconds) => format!("{} for up to {}", sum.idle_held, span(seconds)),
    }
}

fn span(seconds: u64) -> String {
    crate::status::snapshot::span(i64::try_from(seconds).unwrap_or(i64::MAX))
}
