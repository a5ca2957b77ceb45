//! `divvy demo`: the whole driver in one process, without a cluster and without a GPU. Real: the
//! plugin and its sockets, records and CDI files, the publisher, the allocator. Stand-ins: the
//! GPUs, the API server, the kubelet, and the controllers that make pods and claims of manifests.

mod boards;
mod covered;
mod examples;
mod expect;
mod fleet;
mod gpus;
pub mod inventory;
mod needs;
mod render;
mod report;
mod review;
mod scenario;
mod schedule;
pub mod simulate;
pub mod slices;
mod start;
mod ui;
pub mod validate;
mod workload;
mod world;

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_api::names::DRIVER;
use divvy_gpu_sim::SimNode;
use k8s_openapi::api::resource::v1::ResourceSlice;

use self::examples::{Example, Stay};
use self::render::Look;
use self::report::{Report, Scenario};
use self::start::Gpus;
use self::ui::Show;
use self::world::World;
use divvy_cli::Usage;
use divvy_cli::format::{self, Format, Output};
use divvy_why::driver;

/// Log without what the plugin also reports in Events: the demo says it of its GPUs in words.
const QUIET: &str = "error,divvy_kubelet_plugin::sinks::events=off";

/// Arguments of `divvy demo`.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    gpus: Gpus,
    /// Manifests to run instead of the examples: a file, a folder, or - for standard input. Without
    /// a GpuPolicy in any of them, each GPU is offered whole, or in partitions where its MIG mode
    /// is on; -f examples/all-modes.yaml, which the program has in it, offers every form
    #[arg(short, long = "file", value_name = "FILE")]
    files: Vec<PathBuf>,
    /// Look into the folders of a folder, too
    #[arg(short = 'R', long, requires = "files")]
    recursive: bool,
    /// Name of the driver: its own, or gpu.nvidia.com, with which divvy stands in for NVIDIA's
    /// driver. Without it, it is that of NVIDIA's where the manifests use only its classes and
    /// configs
    #[arg(long, value_name = "NAME", value_parser = clap::builder::PossibleValuesParser::new(driver::KNOWN))]
    driver_name: Option<String>,
    /// Run only the examples whose names contain this
    #[arg(long, value_name = "TEXT", conflicts_with = "files")]
    only: Option<String>,
    /// Show every example in full, not only the first
    #[arg(long)]
    all: bool,
    /// Play the examples on a page in the browser, again and again, until Ctrl-C
    #[arg(long, conflicts_with_all = ["all", "output"])]
    ui: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Log of the plugin, on standard error: a level, or filter directives
    #[arg(long, default_value = QUIET, value_name = "LEVEL", value_parser = format::log_level)]
    log_level: String,
}

/// Runs the demo. Exit status 1 when a claim failed or stays pending and the manifest does not
/// expect it, or anything was left behind.
pub fn run(args: &Args) -> Result<ExitCode> {
    divvy_telemetry::init_logs(divvy_telemetry::LogFormat::Plain, &args.log_level)
        .context("--log-level")?;
    args.gpus
        .start()
        .map_err(|error| Usage(format!("{error:#}")))?;
    let named = driver::KNOWN
        .into_iter()
        .find(|name| args.driver_name.as_deref() == Some(name));
    let stays = if args.files.is_empty() {
        if named.is_some_and(|name| name != DRIVER) {
            let what = "--driver-name: the examples are written for gpu.divvy.dev; with another name give manifests (-f FILE)";
            return Err(Usage(what.to_owned()).into());
        }
        examples::stays(args.only.as_deref())?
    } else {
        vec![examples::of_files(&args.files, args.recursive, named)?]
    };
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    if args.ui {
        return runtime.block_on(ui::play(&args.gpus, &stays));
    }
    let report = runtime.block_on(perform(&args.gpus, &stays, &Show::default()))?;
    let format = args.output.format();
    let look = Look {
        colour: std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none(),
        wide: args.output == Output::Wide,
        all: args.all || args.only.is_some() || !args.files.is_empty(),
    };
    format::show(&report, format, |report| render::render(report, look))?;
    let problems = report.problems();
    if problems.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    if format != Format::Table {
        for problem in &problems {
            format::talk(&format!("divvy demo: {problem}"));
        }
    }
    Ok(ExitCode::FAILURE)
}

async fn perform(gpus: &Gpus, stays: &[Stay], show: &Show) -> Result<Report> {
    let mut report = Report {
        sim: gpus.sim.clone(),
        ..Report::default()
    };
    for (number, stay) in stays.iter().enumerate() {
        // What a node left of MIG mode is of no concern to the next: fresh GPUs.
        let (sim, troubled) = gpus.start()?;
        let instances = partitions(&sim);
        let world =
            match World::start(&sim, &troubled, &stay.policies, stay.driver, gpus.labels()).await {
                Ok(world) => world,
                Err(error) if number == 0 => return Err(error),
                Err(error) => {
                    let failed = |example: &Example| Scenario {
                        problem: Some(format!("{error:#}")),
                        ..example.scenario()
                    };
                    report.scenarios.extend(stay.examples.iter().map(failed));
                    continue;
                }
            };
        let published = report::published(&world.api.list::<ResourceSlice>());
        if number == 0 {
            report.policies = stay
                .policies
                .iter()
                .map(|policy| policy.name.clone())
                .collect();
            report.published.clone_from(&published);
            report.published_after_ms = millis(world.published_after);
            report.notes.clone_from(&world.notes);
        }
        for example in &stay.examples {
            let needs = if stay.selects {
                needs::of(&example.manifests)?
            } else {
                Vec::new()
            };
            let mut scenario = match needs::unmet(&needs, &world.api.list()) {
                Some(reason) => Scenario {
                    skipped: Some(reason),
                    ..example.scenario()
                },
                None => scenario::run(&world, &sim, example, show).await,
            };
            // Of policies that were given, one at least is meant for this node.
            if !stay.selects && !world.idle.is_empty() && world.idle.len() == stay.policies.len() {
                let idle = |note: &String| world.idle.contains(note);
                report.notes.retain(|note| !idle(note));
                scenario.notes.retain(|note| !idle(note));
                scenario.problem.get_or_insert(world.idle.join("\n"));
            }
            if !scenario.policies.is_empty() && number > 0 {
                scenario.published.clone_from(&published);
                scenario.notes.extend(world.notes.iter().cloned());
            }
            report.scenarios.push(scenario);
        }
        report.left_behind.extend(world.stop().await?);
        report.left_behind.extend(
            partitions(&sim)
                .into_iter()
                .filter(|part| !instances.contains(part)),
        );
    }
    // What was asked for first is shown first.
    let place = |scenario: &Scenario| {
        examples::EXAMPLES
            .iter()
            .position(|(name, _)| *name == scenario.name)
    };
    report.scenarios.sort_by_key(place);
    Ok(report)
}

/// The MIG instances that live.
fn partitions(sim: &SimNode) -> Vec<String> {
    let mut all = Vec::new();
    for gpu in gpus::pictures(&sim.inventory(), &[], &[]) {
        if let gpus::Mode::Partitioned { picture } = gpu.mode {
            let of = |part: &divvy_cli::slices::Part| {
                format!("{} at {} of {}", part.profile, part.start, picture.gpu)
            };
            all.extend(picture.partitions.iter().map(of));
        }
    }
    all
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests;
