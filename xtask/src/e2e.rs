//! `cargo xtask e2e`: the end-to-end cases on a cluster of their own.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use divvy_e2e::case::Case;
use divvy_e2e::cases::{ALL, GPUS};
use divvy_e2e::driver::Driver;
use divvy_e2e::parts::{self, Parts};
use divvy_e2e::programs::Programs;
use divvy_e2e::runner::{Plan, run as run_cases};
use divvy_e2e::{Cluster, Extent, Gates, Options};

/// Arguments of `cargo xtask e2e`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Only cases whose name contains one of these
    filter: Vec<String>,
    /// Show the cases and run none
    #[arg(long)]
    list: bool,
    /// Kubernetes version, as 1.36.4
    #[arg(long, env = "DIVVY_K8S_VERSION", default_value = parts::DEFAULT_VERSION)]
    version: String,
    /// How many cases at once
    #[arg(long, default_value_t = 4)]
    jobs: usize,
    /// Take the programs from this folder instead of building them
    #[arg(long)]
    bin: Option<PathBuf>,
    /// Leave the cluster up afterwards, as `e2e` (see `cargo xtask cluster --name e2e`)
    #[arg(long)]
    keep: bool,
    /// Where failed cases leave their folders
    #[arg(long, default_value = "target/e2e")]
    failures: PathBuf,
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut out = std::io::stdout();
    let wanted =
        |name: &str| args.filter.is_empty() || args.filter.iter().any(|part| name.contains(part.as_str()));
    let suits = |case: &Case| case.suits(&args.version, Gates::Default);
    let cases: Vec<_> = ALL.iter().copied().filter(|case| wanted(case.name) && suits(case)).collect();
    ensure!(
        !cases.is_empty(),
        "no case is named like {:?}; see them with: cargo xtask e2e --list",
        args.filter
    );
    if args.list {
        for case in cases {
            writeln!(out, "{}{}", case.name, if case.alone { " (alone)" } else { "" })?;
        }
        return Ok(());
    }
    let programs = args.bin.as_deref().map_or_else(Programs::build, Programs::in_folder)?;
    Parts::ensure(&args.version)?;
    parts::helm()?;
    if args.failures.exists() {
        fs_err::remove_dir_all(&args.failures)?;
    }

    let start = Instant::now();
    Cluster::down("e2e")?;
    let cluster = whole("e2e", &args.version, !args.keep, Gates::Default)?;
    writeln!(out, "Kubernetes {} is up after {:.1} s", args.version, start.elapsed().as_secs_f32())?;
    let driver = install(&cluster, &programs, &args.failures)?;
    writeln!(out, "the driver has published its GPUs after {:.1} s", start.elapsed().as_secs_f32())?;
    let plan = Plan { cases, jobs: args.jobs, failures: args.failures.clone() };
    let outcome = run_cases(&cluster, &driver, &plan)?;
    writeln!(out, "{:.0} s in all", start.elapsed().as_secs_f32())?;
    writeln!(out, "{} passed, {} failed", outcome.passed, outcome.failed)?;
    ensure!(outcome.failed == 0, "{} cases failed; see {}", outcome.failed, args.failures.display());
    Ok(())
}

/// A whole cluster of this name and version.
pub(crate) fn whole(name: &str, version: &str, owned: bool, gates: Gates) -> Result<Cluster> {
    let (name, version) = (name.to_owned(), version.to_owned());
    Cluster::up(&Options { name, version, owned, extent: Extent::Whole, gates })
}

/// The driver with the GPUs of the cases; logs of a failure are in a folder of `failures`.
pub(crate) fn install<'c>(cluster: &'c Cluster, programs: &Programs, failures: &Path) -> Result<Driver<'c>> {
    Driver::install(cluster, programs, GPUS).inspect_err(|_| {
        // The error that counts is the one being returned.
        let _ = cluster.collect_logs(&failures.join("install"));
    })
}
