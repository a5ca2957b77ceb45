//! `cargo xtask e2e`: the end-to-end cases, each set on a cluster of its own, side by side.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, bail, ensure};
use divvy_e2e::case::Case;
use divvy_e2e::cases::{GPUS, SETS};
use divvy_e2e::driver::Driver;
use divvy_e2e::parts::{self, Parts};
use divvy_e2e::programs::Programs;
use divvy_e2e::runner::{Outcome, Plan, run as run_cases};
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
    /// Number of cases that run at once on a cluster
    #[arg(long, default_value_t = 4)]
    jobs: usize,
    /// Take the programs from this folder instead of building them
    #[arg(long)]
    bin: Option<PathBuf>,
    /// Leave the clusters up afterwards, as `e2e` and `e2e-modes` (see `cargo xtask cluster
    /// status`)
    #[arg(long)]
    keep: bool,
    /// Where failed cases leave their folders
    #[arg(long, default_value = "target/e2e")]
    failures: PathBuf,
}

impl Args {
    /// Returns the sets with cases that were asked for.
    fn sets(&self) -> Vec<(&'static str, Vec<Case>)> {
        let named = |name: &str| self.filter.iter().any(|part| name.contains(part.as_str()));
        let is_wanted = |case: &&Case| {
            (self.filter.is_empty() || named(case.name))
                && case.suits(&self.version, Gates::Default)
        };
        let sets = SETS.iter().map(|set| {
            (
                set.cluster,
                set.cases.iter().filter(is_wanted).copied().collect(),
            )
        });
        sets.filter(|(_, cases): &(_, Vec<_>)| !cases.is_empty())
            .collect()
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut out = std::io::stdout();
    let sets = args.sets();
    ensure!(
        !sets.is_empty(),
        "no case is named like {:?}; see them with: cargo xtask e2e --list",
        args.filter
    );
    if args.list {
        for case in sets.iter().flat_map(|(_, cases)| cases) {
            writeln!(
                out,
                "{}{}",
                case.name,
                if case.alone { " (alone)" } else { "" }
            )?;
        }
        return Ok(());
    }
    let programs = args
        .bin
        .as_deref()
        .map_or_else(Programs::build, Programs::in_folder)?;
    Parts::ensure(&args.version)?;
    parts::helm()?;
    if args.failures.exists() {
        fs_err::remove_dir_all(&args.failures)?;
    }

    let start = Instant::now();
    let programs = &programs;
    let outcomes: Vec<Result<Outcome>> = std::thread::scope(|scope| {
        let start = |(name, cases)| scope.spawn(move || on_cluster(name, cases, programs, args));
        let running: Vec<_> = sets.into_iter().map(start).collect();
        running
            .into_iter()
            .map(|set| {
                set.join()
                    .unwrap_or_else(|_| bail!("a set of cases panicked"))
            })
            .collect()
    });
    let mut all = Outcome::default();
    for outcome in outcomes {
        let outcome = outcome?;
        all.passed += outcome.passed;
        all.failed += outcome.failed;
    }
    writeln!(out, "{:.0} s in all", start.elapsed().as_secs_f32())?;
    writeln!(out, "{} passed, {} failed", all.passed, all.failed)?;
    ensure!(
        all.failed == 0,
        "{} cases failed; see {}",
        all.failed,
        args.failures.display()
    );
    Ok(())
}

/// Runs cases on a cluster of their own.
fn on_cluster(name: &str, cases: Vec<Case>, programs: &Programs, args: &Args) -> Result<Outcome> {
    let start = Instant::now();
    Cluster::down(name)?;
    let cluster = whole(name, &args.version, !args.keep, Gates::Default)?;
    let up = start.elapsed().as_secs_f32();
    let driver = install(&cluster, programs, &args.failures.join(name))?;
    crate::say(&format!(
        "cluster {name}: Kubernetes {} was up after {up:.1} s and the GPUs published after {:.1} s; {} cases",
        args.version,
        start.elapsed().as_secs_f32(),
        cases.len()
    ));
    let failures = args.failures.clone();
    let outcome = run_cases(
        &cluster,
        &driver,
        &Plan {
            cases,
            jobs: args.jobs,
            failures,
        },
    )?;
    crate::say(&format!(
        "cluster {name}: {:.0} s",
        start.elapsed().as_secs_f32()
    ));
    Ok(outcome)
}

/// Brings up a whole cluster of this name and version.
pub(crate) fn whole(name: &str, version: &str, owned: bool, gates: Gates) -> Result<Cluster> {
    let (name, version) = (name.to_owned(), version.to_owned());
    Cluster::up(&Options {
        name,
        version,
        owned,
        extent: Extent::Whole,
        gates,
    })
}

/// Installs the driver with the GPUs of the cases; logs of a failure are in a folder of `failures`.
pub(crate) fn install<'c>(
    cluster: &'c Cluster,
    programs: &Programs,
    failures: &Path,
) -> Result<Driver<'c>> {
    Driver::install(cluster, programs, GPUS).inspect_err(|_| {
        // The error that counts is the one being returned.
        let _ = cluster.collect_logs(&failures.join("install"));
    })
}
