//! `cargo xtask bench scheduler`: what published devices cost the scheduler of the whole cluster.
//!
//! The real API server and the real kube-scheduler, its client limit lifted; nodes that are only Node objects, with the
//! slices that the plugin would publish. Layouts are measured in turn, round by round, so that whatever else the
//! machine does falls on all of them.

mod layout;
mod world;

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use divvy_e2e::parts::version_setting;

use self::layout::{Asked, Layout};
use self::world::{Counts, Pace, World};
use crate::offered::Offered;
use crate::table::{Budget, Report, Row, Value};

/// Measures the scheduler.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many nodes
    #[arg(long, default_value_t = 100)]
    nodes: usize,
    /// GPUs of each node
    #[arg(long, default_value = "h100x8")]
    gpus: String,
    /// Pods with one claim each, of each kind
    #[arg(long, default_value_t = 300)]
    pods: usize,
    /// How often every layout is measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Only these layouts, by name; the first is the reference
    #[arg(long, value_delimiter = ',')]
    layouts: Vec<String>,
    /// One layout for each profile beside the whole GPU: what publishing it costs
    #[arg(long)]
    profiles: bool,
    /// Also write the report to this file, as JSON
    #[arg(long)]
    pub(crate) json: Option<PathBuf>,
}

/// What was measured of one layout.
#[derive(Debug)]
struct Measured {
    layout: Layout,
    counts: Counts,
    /// The pace of each round, by what was asked for.
    paces: Vec<(Asked, Vec<Pace>)>,
}

impl Measured {
    /// The median of the rounds; `None` where nothing of the kind is published.
    fn pace(&self, asked: &Asked) -> Option<Pace> {
        let (_, paces) = self.paces.iter().find(|(of, _)| of == asked)?;
        let median = |of: fn(&Pace) -> f64| {
            let mut sorted: Vec<f64> = paces.iter().map(of).collect();
            sorted.sort_by(f64::total_cmp);
            sorted.get(sorted.len() / 2).copied()
        };
        Some(Pace { rate: median(|pace| pace.rate)?, cpu: median(|pace| pace.cpu)? })
    }
}

/// Measures all layouts.
pub(crate) fn measure(args: &Args, report: &mut Report) -> Result<()> {
    let version = version_setting();
    let layouts = if args.profiles { layout::profiles(&args.gpus, &version)? } else { layout::standard() };
    let wanted = |layout: &Layout| args.layouts.is_empty() || args.layouts.contains(&layout.name);
    let mut all: Vec<Measured> = layouts
        .into_iter()
        .filter(wanted)
        .map(|layout| Measured { layout, counts: Counts::default(), paces: Vec::new() })
        .collect();
    ensure!(!all.is_empty(), "no layout is named like {:?}", args.layouts);
    for round in 1..=args.rounds {
        for measured in &mut all {
            let name = &measured.layout.name;
            crate::progress(&format!("scheduler, round {round} of {}: {name}", args.rounds));
            let offered = Offered::new(&args.gpus, &measured.layout.rules, &version)?;
            let world = World::new(&version, &offered, args.nodes)?;
            measured.counts = world.counts();
            for asked in Asked::of(&offered.carve("any").pool) {
                let pace = world.bind(&asked, args.pods).with_context(|| format!("layout {name}"))?;
                match measured.paces.iter_mut().find(|(of, _)| *of == asked) {
                    Some((_, paces)) => paces.push(pace),
                    None => measured.paces.push((asked, vec![pace])),
                }
            }
        }
    }
    let what = format!(
        "{} nodes × {}, {} pods a figure, median of {}",
        args.nodes, args.gpus, args.pods, args.rounds
    );
    report.add(format!("Scheduler of Kubernetes {version}: {what}"), rows(&all));
    Ok(())
}

/// Every figure beside whole GPUs of the first layout.
fn rows(all: &[Measured]) -> Vec<Row> {
    let Some(reference) = all.first().and_then(|first| first.pace(&Asked::Whole)) else { return Vec::new() };
    let mut rows = Vec::new();
    for (index, measured) in all.iter().enumerate() {
        let (name, Counts { devices, slices }) = (&measured.layout.name, measured.counts);
        rows.push(Row::new(format!("{name}: devices of all nodes"), Value::Count(devices)));
        rows.push(Row::new(format!("{name}: slices of all nodes"), Value::Count(slices)));
        for (asked, _) in &measured.paces {
            let Some(pace) = measured.pace(asked) else { continue };
            let rate = Row::new(format!("{name}: {}", asked.name()), Value::PerSecond(pace.rate));
            let cpu = Row::new(format!("{name}: processor time of one of them"), Value::Seconds(pace.cpu));
            if index == 0 && *asked == Asked::Whole {
                rows.extend([rate, cpu]);
                continue;
            }
            let rate = rate.beside("whole GPUs, first layout", Value::PerSecond(reference.rate));
            rows.push(match (measured.layout.judged, asked) {
                (true, Asked::Whole) => rate.budget(Budget::AtLeastPart(5.0)),
                (true, Asked::Partition(_) | Asked::Share) => rate.budget(Budget::AtLeastPart(7.0)),
                _ => rate,
            });
            rows.push(cpu.beside("whole GPUs, first layout", Value::Seconds(reference.cpu)));
        }
    }
    rows
}
