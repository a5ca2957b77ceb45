//! Costs of the released plugin that decide something (claims, start, memory, the allocator), each
//! beside a reference of the same run, taken in turns, and its budget. Called by `cargo xtask
//! bench`, which builds what is measured. Nothing here fails because something is slow.

mod allocator;
mod burst;
mod cluster;
mod contention;
mod fleet;
mod latency;
mod life;
mod looks;
mod mps;
mod offered;
mod process;
mod publishing;
mod rig;
mod scheduling;
mod stats;
mod table;
mod truth;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use fs_err as fs;

use crate::mps::Servers;
use crate::rig::Programs;
use crate::table::Report;

/// Measures the released plugin.
#[derive(Debug, Parser)]
struct Args {
    /// The plugin's binary, with those of the MPS supervisor and its stand-in for NVIDIA's program
    /// in the same folder
    #[arg(long)]
    plugin: PathBuf,
    /// The mock NVML library
    #[arg(long)]
    mock: PathBuf,
    /// Folder whose filesystem is measured, beside the one in memory [default: the folder for
    /// temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Fewer rounds, for a first look
    #[arg(long)]
    quick: bool,
    /// Also write the report to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also measure claims on a real Kubernetes; brings one up, which needs what `cargo xtask
    /// cluster up` needs
    #[arg(long)]
    cluster: bool,
    /// Kubeconfig of a real API server's admin: claims are measured with it, and nothing else is
    #[arg(long)]
    real_api: Option<PathBuf>,
    /// The hook of CDI files, for `--cluster` [default: all programs are built]
    #[arg(long)]
    hook: Option<PathBuf>,
    /// Only these parts
    #[arg(long, value_enum, value_delimiter = ',')]
    only: Vec<Part>,
}

/// A part of the measurements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Part {
    /// Prepare, unprepare, hand-over
    Claims,
    /// Prepare and unprepare of shares, one and many at once
    Shares,
    /// Prepare and unprepare of MPS shares, first and later of a GPU, and the supervisor's memory
    Mps,
    /// Start to first slices
    Start,
    /// Memory, CPU and API calls without work
    Idle,
    /// The allocator, on GPUs offered as everything
    Allocator,
    /// The fleet simulator, up to 10 000 nodes
    Fleet,
    /// Size of the program
    Size,
}

fn main() -> ExitCode {
    // A process has one TLS provider, and kube's client panics if none is installed.
    drop(rustls::crypto::ring::default_provider().install_default());
    let mut arguments = std::env::args_os().skip(1);
    let outcome = match (arguments.next(), arguments.next()) {
        (Some(flag), Some(kubeconfig)) if flag == "--bare-client" => {
            life::bare_client(Path::new(&kubeconfig))
        }
        (Some(what), _) if what == "truth" => {
            truth::run(&truth::Args::parse_from(std::env::args_os().skip(1)))
        }
        (Some(what), _) if what == "contention" => {
            contention::run(&contention::Args::parse_from(std::env::args_os().skip(1)))
        }
        (Some(what), _) if what == "looks" => {
            looks::run(&looks::Args::parse_from(std::env::args_os().skip(1)))
        }
        (Some(what), _) if what == "publishing" => {
            publishing::run(&publishing::Args::parse_from(std::env::args_os().skip(1)))
        }
        _ => run(&Args::parse()),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(std::io::stderr(), "error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<()> {
    let programs = Programs {
        plugin: args.plugin.clone(),
        mock: args.mock.clone(),
    };
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let wanted = |part| args.only.is_empty() || args.only.contains(&part);
    let (calls, starts, idle) = if args.quick {
        (20, 5, 5)
    } else {
        (200, 20, 20)
    };
    let mut report = Report {
        machine: machine(args.quick)?,
        sections: Vec::new(),
    };
    if let Some(kubeconfig) = &args.real_api {
        let filesystem = rig::filesystem(&dir)?;
        let rows = latency::measure(&programs, &dir, calls, Some(kubeconfig))?;
        report.add(
            format!("Claims for whole GPUs, real API server over TLS; records on {filesystem}"),
            rows,
        );
        return finish(&report, args.json.as_deref());
    }
    if wanted(Part::Claims) {
        for parent in [dir.as_path(), Path::new(rig::MEMORY)] {
            let filesystem = rig::filesystem(parent)?;
            progress(&format!("claims on {filesystem}"));
            let rows = latency::measure(&programs, parent, calls, None)?;
            report.add(
                format!(
                    "Claims for whole GPUs; records on {filesystem}, at {}",
                    parent.display()
                ),
                rows,
            );
        }
    }
    if wanted(Part::Shares) {
        progress("shares");
        let filesystem = rig::filesystem(&dir)?;
        let rows = burst::measure(&programs, &dir, calls.div_ceil(4))?;
        report.add(format!("Claims for shares; records on {filesystem}"), rows);
    }
    if wanted(Part::Mps) {
        progress("MPS shares");
        let filesystem = rig::filesystem(&dir)?;
        for servers in Servers::ALL {
            let rows = mps::measure(&programs, &dir, calls.div_ceil(4), servers)?;
            let name = servers.name();
            report.add(
                format!("{name}; a stand-in for NVIDIA's program; records on {filesystem}"),
                rows,
            );
        }
        let rows = mps::measure_in_partitions(&programs, &dir, calls.div_ceil(4))?;
        let what = "MPS inside partitions; a stand-in for NVIDIA's program";
        report.add(format!("{what}; records on {filesystem}"), rows);
    }
    if wanted(Part::Start) {
        progress("start");
        let rows = life::start(&programs, &dir, starts)?;
        report.add("Start, nothing left of an earlier one".to_owned(), rows);
    }
    if wanted(Part::Allocator) {
        let rows = allocator::everything(calls.min(100))?;
        report.add(
            "Allocator, in this process, GPUs offered as everything".to_owned(),
            rows,
        );
    }
    if wanted(Part::Fleet) {
        progress("the fleet simulator");
        let rows = fleet::measure(if args.quick { 100 } else { 10_000 })?;
        report.add(
            "Fleet simulator, in this process, eight H100 a node offered as everything".to_owned(),
            rows,
        );
    }
    if wanted(Part::Idle) {
        progress("idle");
        let rows = life::idle(&programs, &dir, Duration::from_secs(idle))?;
        report.add(
            "Idle, 8 GPUs published, registered with a kubelet".to_owned(),
            rows,
        );
    }
    if wanted(Part::Size) {
        report.add("Program".to_owned(), vec![life::size(&programs)?]);
    }
    if args.cluster {
        on_a_cluster(args, programs, &dir, &mut report)?;
    }
    finish(&report, args.json.as_deref())
}

/// Measures claims against the API server of a real Kubernetes.
fn on_a_cluster(args: &Args, programs: Programs, dir: &Path, report: &mut Report) -> Result<()> {
    progress("claims on a real Kubernetes");
    let Programs { plugin, mock } = programs;
    let built = match args.hook.clone() {
        Some(hook) => {
            let [cli, controller, supervisor, mps] = [
                "divvy",
                "divvy-cluster-controller",
                "divvy-mps-supervisor",
                "divvy-mps-stand-in",
            ]
            .map(|name| plugin.with_file_name(name));
            divvy_e2e::programs::Programs {
                plugin,
                hook,
                controller,
                supervisor,
                mps,
                mock,
                cli,
            }
        }
        None => divvy_e2e::programs::Programs::build()?,
    };
    report
        .sections
        .extend(cluster::measure(&built, dir, args.quick)?.sections);
    Ok(())
}

fn finish(report: &Report, json: Option<&Path>) -> Result<()> {
    write!(std::io::stdout(), "{report}")?;
    if let Some(path) = json {
        let mut bytes = serde_json::to_vec_pretty(report)?;
        bytes.push(b'\n');
        fs::write(path, bytes).context("the report cannot be written (--json)")?;
    }
    Ok(())
}

/// Returns a description of the machine that the figures depend on.
fn machine(quick: bool) -> Result<Vec<String>> {
    let mut lines = vec![
        load()?,
        "API server: the fake one, HTTP on loopback, without TLS; GPUs: mock NVML library; plugin logs at info"
            .to_owned(),
    ];
    if quick {
        lines.push("--quick: few rounds, so that p99 is the slowest".to_owned());
    }
    Ok(lines)
}

fn load() -> Result<String> {
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease")?;
    let load = fs::read_to_string("/proc/loadavg")?;
    let load = load.split(' ').take(3).collect::<Vec<_>>().join(" ");
    let cores = available_parallelism()?;
    Ok(format!(
        "Linux {}, {cores} cores, load {load} when this began",
        kernel.trim()
    ))
}

/// Progress for the person who waits.
fn progress(what: &str) {
    let _ = writeln!(std::io::stderr(), "measuring: {what}");
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    #[test]
    fn the_command_line_is_consistent() {
        super::Args::command().debug_assert();
    }
}
