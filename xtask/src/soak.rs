//! `cargo xtask soak`: what takes too long for CI.

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Subcommand;
use divvy_e2e::cases::SETS;
use divvy_e2e::driver::Driver;
use divvy_e2e::parts::{self, Parts};
use divvy_e2e::programs::Programs;
use divvy_e2e::runner::{Outcome, Plan, run as run_cases};
use divvy_e2e::soak::{self, Day, Trouble};
use divvy_e2e::{Cluster, Gates};

use crate::e2e::{install, whole};
use crate::programs::succeeds;
use crate::{allocator, mutants, nvidia, sequences};

/// The names of the clusters, for `cargo xtask cluster`: both may run at once.
const OLDER_NAME: &str = "soak-versions";
const DAY_NAME: &str = "soak-day";
/// Releases before the one that CI tests with; those below 1.36 also with the gates of sharing
/// switched on.
const OLDER: [&str; 3] = ["1.36.4", "1.35.8", "1.34.9"];

/// Arguments of `cargo xtask soak`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    what: What,
    /// Take the programs from this folder instead of building them
    #[arg(long, global = true)]
    bin: Option<PathBuf>,
    /// Where failures leave their folders
    #[arg(long, global = true, default_value = "target/soak")]
    failures: PathBuf,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The cases of shares and modes on older releases of Kubernetes
    Versions {
        /// Only cases whose name contains one of these
        filter: Vec<String>,
        /// These releases
        #[arg(long, value_delimiter = ',', default_values = OLDER)]
        versions: Vec<String>,
    },
    /// The crates that decide, changed one place at a time: which changes no test notices (hours;
    /// see `--shard`)
    Mutants(mutants::Args),
    /// The offline allocator against the real scheduler's, on generated worlds
    Allocator(allocator::Args),
    /// Random sequences that CI runs fewer of: odd answers of NVML, stories of goals
    Sequences(sequences::Args),
    /// Whole library sets of Debian's drivers, and what a container gets of each (weekly)
    Nvidia(nvidia::LibrarySets),
    /// The fleet simulator against the real scheduler, decision by decision, on nodes that are only
    /// objects
    Truth(Measured),
    /// Costs of published devices to the API server and the scheduler of 1 000 nodes
    Publishing(Measured),
    /// A day in fast motion: pods of every kind, and everything is killed again and again
    Day {
        /// Length in minutes
        #[arg(long, default_value_t = 20)]
        minutes: u64,
        /// Decides what happens
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// Approximate number of pods
        #[arg(long, default_value_t = 16)]
        pods: usize,
        /// Only these troubles: plugin, kubelet, api-server, containerd, scheduler, policy,
        /// gpu-lost, driver-reload
        #[arg(long, value_delimiter = ',')]
        troubles: Vec<String>,
        /// Kubernetes version, as 1.36.4
        #[arg(long, env = "DIVVY_K8S_VERSION", default_value = parts::DEFAULT_VERSION)]
        version: String,
    },
}

/// Options of a program of `tests/bench`.
#[derive(Debug, clap::Args)]
struct Measured {
    /// Passed on; see them with -- --help
    #[arg(
        trailing_var_arg = true,
        allow_hyphen_values = true,
        value_name = "OPTIONS"
    )]
    options: Vec<OsString>,
}

pub(crate) fn run(root: &Path, args: &Args) -> Result<()> {
    match &args.what {
        What::Truth(of) => return measure(root, "truth", of),
        What::Publishing(of) => return measure(root, "publishing", of),
        What::Mutants(mutants) => return mutants::run(root, mutants, &args.failures),
        What::Allocator(args) => return allocator::run(root, args),
        What::Sequences(args) => return sequences::run(root, args),
        What::Nvidia(args) => return nvidia::library_sets(root, args),
        What::Versions { .. } | What::Day { .. } => {}
    }
    let programs = args
        .bin
        .as_deref()
        .map_or_else(Programs::build, Programs::in_folder)?;
    parts::helm()?;
    if args.failures.exists() {
        fs_err::remove_dir_all(&args.failures)?;
    }
    match &args.what {
        What::Versions { filter, versions } => {
            let mut all = Outcome::default();
            for version in versions {
                for gates in gates_of(version) {
                    let outcome = on_version(version, *gates, filter, &programs, &args.failures)
                        .with_context(|| format!("Kubernetes {version}, {}", gates.name()))?;
                    all.passed += outcome.passed;
                    all.failed += outcome.failed;
                }
            }
            crate::say(&format!("{} passed, {} failed", all.passed, all.failed));
            ensure!(
                all.failed == 0,
                "{} cases failed; see {}",
                all.failed,
                args.failures.display()
            );
            Ok(())
        }
        What::Day {
            minutes,
            seed,
            pods,
            troubles,
            version,
        } => {
            let named = |name: &String| {
                Trouble::named(name).with_context(|| format!("no trouble is named {name}"))
            };
            let chosen: Vec<Trouble> = troubles.iter().map(named).collect::<Result<_>>()?;
            let day = Day {
                length: Duration::from_secs(minutes * 60),
                seed: *seed,
                troubles: if chosen.is_empty() {
                    Trouble::ALL.to_vec()
                } else {
                    chosen
                },
                pods: *pods,
            };
            one_day(&day, version, &programs, &args.failures)
        }
        // Needs neither programs nor a cluster.
        What::Mutants(_)
        | What::Allocator(_)
        | What::Sequences(_)
        | What::Nvidia(_)
        | What::Truth(_)
        | What::Publishing(_) => Ok(()),
    }
}

/// Runs a program of `tests/bench`, which is not part of this one so that this one stays quick to
/// build.
fn measure(root: &Path, what: &str, of: &Measured) -> Result<()> {
    parts::helm()?;
    let mut program = Command::new("cargo");
    program
        .args(["run", "--release", "--package", "divvy-bench", "--", what])
        .args(&of.options)
        .current_dir(root);
    succeeds(&mut program)
}

/// Returns the gates to test a version with: from 1.36 on sharing needs none.
fn gates_of(version: &str) -> &'static [Gates] {
    if parts::numbers(version).is_some_and(|numbers| numbers >= (1, 36, 0)) {
        &[Gates::Default]
    } else {
        &[Gates::Default, Gates::Sharing]
    }
}

fn up(name: &str, version: &str, gates: Gates) -> Result<Cluster> {
    Parts::ensure(version)?;
    Cluster::down(name)?;
    whole(name, version, true, gates)
}

fn on_version(
    version: &str,
    gates: Gates,
    filter: &[String],
    programs: &Programs,
    failures: &Path,
) -> Result<Outcome> {
    let wanted =
        |name: &str| filter.is_empty() || filter.iter().any(|part| name.contains(part.as_str()));
    let suits = |case: &&divvy_e2e::case::Case| case.of_sharing && case.suits(version, gates);
    let cases: Vec<_> = SETS
        .iter()
        .flat_map(|set| set.cases)
        .filter(suits)
        .filter(|case| wanted(case.name))
        .copied()
        .collect();
    crate::say(&format!(
        "\nKubernetes {version}, {}: {} cases",
        gates.name(),
        cases.len()
    ));
    let cluster = up(OLDER_NAME, version, gates)?;
    let failures = failures.join(format!("{version}-{}", gates.name().replace(' ', "-")));
    let driver = install(&cluster, programs, &failures)?;
    run_cases(
        &cluster,
        &driver,
        &Plan {
            cases,
            jobs: 1,
            failures,
        },
    )
}

fn one_day(day: &Day, version: &str, programs: &Programs, failures: &Path) -> Result<()> {
    let start = Instant::now();
    let cluster = up(DAY_NAME, version, Gates::Default)?;
    let driver = Driver::install(&cluster, programs, soak::GPUS)?;
    let tally = soak::run(&cluster, &driver, day).inspect_err(|_| {
        let _ = cluster.collect_logs(failures);
    })?;
    if !tally.wrong.is_empty() {
        cluster.collect_logs(failures)?;
    }
    let took = start.elapsed().as_secs();
    let mut out = std::io::stdout();
    write!(
        out,
        "\nKubernetes {version}, seed {}, {} minutes ({took} s in all)\n{tally}",
        day.seed,
        day.length.as_secs() / 60
    )?;
    if !tally.wrong.is_empty() {
        bail!(
            "{} things were wrong; see {}",
            tally.wrong.len(),
            failures.display()
        );
    }
    Ok(())
}
