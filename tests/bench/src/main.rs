//! What the released plugin costs, each figure beside a reference of the same run and its budget.
//! Called by `cargo xtask bench`, which builds what is measured. Nothing here fails because something is slow.

mod allocator;
mod binary;
mod burst;
mod latency;
mod life;
mod offered;
mod partitions;
mod pods;
mod process;
mod pure;
mod rig;
mod stats;
mod table;
mod usage;

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::available_parallelism;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Parser, ValueEnum};
use divvy_e2e::parts::version_setting;
use fs_err as fs;

use crate::rig::Programs;
use crate::table::Report;

/// Measures the released plugin.
#[derive(Debug, Parser)]
struct Args {
    /// The plugin's binary
    #[arg(long)]
    plugin: PathBuf,
    /// The mock NVML library
    #[arg(long)]
    mock: PathBuf,
    /// Folder whose filesystem is measured, beside the one in memory [default: the folder for temporary files]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Fewer rounds, for a first look
    #[arg(long)]
    quick: bool,
    /// Also write the report to this file, as JSON
    #[arg(long)]
    json: Option<PathBuf>,
    /// Also start pods on a real Kubernetes; brings one up, which needs what `cargo xtask cluster up` needs
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
    /// Prepare and unprepare of partitions
    Partitions,
    /// Prepare and unprepare of shares, one and many at once
    Shares,
    /// Start to first slices; then the allocator, on those slices
    Start,
    /// Memory, CPU and API calls without work
    Idle,
    /// Measuring who uses what, beside nothing being held
    Usage,
    /// Carving a node
    Carve,
    /// The allocator, on GPUs offered as everything
    Allocator,
    /// Size of the binary
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
    let programs = Programs { plugin: args.plugin.clone(), mock: args.mock.clone() };
    let dir = args.dir.clone().unwrap_or_else(std::env::temp_dir);
    let wanted = |part| args.only.is_empty() || args.only.contains(&part);
    let (calls, starts, idle, usage) = if args.quick { (20, 5, 5, 30) } else { (200, 20, 20, 120) };
    let mut report = Report { machine: machine(args.quick)?, sections: Vec::new() };
    if let Some(kubeconfig) = &args.real_api {
        let filesystem = rig::filesystem(&dir)?;
        let rows = latency::measure(&programs, &dir, calls, Some(kubeconfig))?;
        report.add(format!("Claims for whole GPUs, real API server over TLS; records on {filesystem}"), rows);
        return finish(&report, args.json.as_deref());
    }
    if wanted(Part::Claims) {
        for parent in [dir.as_path(), Path::new(rig::MEMORY)] {
            let filesystem = rig::filesystem(parent)?;
            progress(&format!("claims on {filesystem}"));
            let rows = latency::measure(&programs, parent, calls, None)?;
            report.add(
                format!("Claims for whole GPUs; records on {filesystem}, at {}", parent.display()),
                rows,
            );
        }
    }
    if wanted(Part::Partitions) {
        progress("partitions");
        let filesystem = rig::filesystem(&dir)?;
        let rows = partitions::measure(&programs, &dir, calls)?;
        report.add(format!("Claims for partitions; records on {filesystem}"), rows);
    }
    if wanted(Part::Shares) {
        progress("shares");
        let filesystem = rig::filesystem(&dir)?;
        let rows = burst::measure(&programs, &dir, calls.div_ceil(4))?;
        report.add(format!("Claims for shares; records on {filesystem}"), rows);
    }
    if wanted(Part::Start) {
        progress("start");
        let (rows, slices) = life::start(&programs, &dir, starts)?;
        report.add("Start, nothing left of an earlier one".to_owned(), rows);
        let rounds = calls.min(100);
        report.add(
            "Allocator, in this process, on what was published".to_owned(),
            allocator::whole(&slices, rounds)?,
        );
    }
    if wanted(Part::Carve) {
        report.add("Carve, in this process".to_owned(), pure::carving(calls)?);
    }
    if wanted(Part::Allocator) {
        let rows = allocator::everything(calls.min(100))?;
        report.add("Allocator, in this process, GPUs offered as everything".to_owned(), rows);
    }
    if wanted(Part::Idle) {
        progress("idle");
        let rows = life::idle(&programs, &dir, Duration::from_secs(idle))?;
        report.add("Idle, 8 GPUs published, registered with a kubelet".to_owned(), rows);
    }
    if wanted(Part::Usage) {
        progress("usage");
        let rows = usage::measure(&programs, &dir, Duration::from_secs(usage))?;
        report.add(format!("Who uses what: 16 GPUs, {} processes on each", usage::PROCESSES), rows);
    }
    if wanted(Part::Size) {
        report.add("Binary".to_owned(), binary::size(&programs)?);
    }
    if args.cluster {
        on_a_cluster(args, programs, &dir, &mut report)?;
    }
    finish(&report, args.json.as_deref())
}

/// Pods and claims on a real Kubernetes.
fn on_a_cluster(args: &Args, programs: Programs, dir: &Path, report: &mut Report) -> Result<()> {
    progress("pods on a real Kubernetes");
    let Programs { plugin, mock } = programs;
    let built = match args.hook.clone() {
        Some(hook) => {
            let [cli, controller] =
                ["divvy", "divvy-cluster-controller"].map(|name| plugin.with_file_name(name));
            divvy_e2e::programs::Programs { plugin, hook, controller, mock, cli }
        }
        None => divvy_e2e::programs::Programs::build()?,
    };
    let pods = if args.quick { 5 } else { 20 };
    let real = pods::Real { quick: args.quick, dir };
    let (rows, claims) = pods::measure(&built, pods, &real)?;
    report.add(format!("Pods on Kubernetes {}", version_setting()), rows);
    report.sections.extend(claims.sections);
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

/// What the figures depend on.
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
    Ok(format!("Linux {}, {cores} cores, load {load} when this began", kernel.trim()))
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
