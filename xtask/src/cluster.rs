//! `cargo xtask cluster`: a real Kubernetes on this machine, for people.

use std::io::Write as _;
use std::path::PathBuf;
use std::process::exit;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Subcommand;
use divvy_e2e::driver::Driver;
use divvy_e2e::parts::{self, Parts};
use divvy_e2e::programs::Programs;
use divvy_e2e::{Cluster, Component, Gates};

use crate::e2e::whole;
use crate::needs::Need;

const DEFAULT: &str = "dev";

/// Arguments of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Name of the cluster: several run side by side
    #[arg(long, global = true, default_value = DEFAULT)]
    name: String,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Build the programs of a cluster (once, about ten minutes; `up` does it too)
    Build {
        /// Kubernetes version, as 1.36.4
        #[arg(long, env = "DIVVY_K8S_VERSION", default_value = parts::DEFAULT_VERSION)]
        version: String,
    },
    /// Start a cluster that stays until `down`
    Up {
        /// Kubernetes version, as 1.36.4
        #[arg(long, env = "DIVVY_K8S_VERSION", default_value = parts::DEFAULT_VERSION)]
        version: String,
        /// Install divvy, too, and give the node simulated GPUs
        #[arg(long)]
        driver: bool,
        /// The simulated GPUs, as h100x8 or a100-40x4,l4x2
        #[arg(long, default_value = "h100x8", requires = "driver")]
        sim: String,
        /// Offer of GPUs without a GpuPolicy: in every mode, or as the chart does by default
        #[arg(long, default_value = "everything", value_parser = ["everything", "auto"], requires = "driver")]
        offer: String,
        /// Take divvy's programs from this folder instead of building them
        #[arg(long, requires = "driver")]
        bin: Option<PathBuf>,
    },
    /// Run a command in the cluster, as `exec kubectl get pods`; `divvy` and `helm` are there after
    /// `up --driver`
    Exec {
        /// The command and its arguments
        #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true)]
        command: Vec<String>,
    },
    /// Show the clusters of this machine and what runs in them
    Status,
    /// Write logs, events and objects into a folder
    Logs {
        /// The folder, made if missing
        dir: PathBuf,
    },
    /// End a cluster and remove all it left
    Down,
}

impl Args {
    /// Returns the requirements of the machine.
    pub(crate) fn needs(&self) -> &'static [Need] {
        match self.action {
            Action::Up { driver: true, .. } => &[Need::Build, Need::Cluster],
            Action::Build { .. } | Action::Up { .. } => &[Need::Cluster],
            _ => &[],
        }
    }
}

pub(crate) fn run(args: &Args) -> Result<()> {
    let mut out = std::io::stdout();
    match &args.action {
        Action::Build { version } => {
            let parts = Parts::ensure(version)?;
            writeln!(
                out,
                "Kubernetes {} is built, see {}",
                parts.version(),
                parts::cache_dir()?.display()
            )?;
        }
        Action::Up {
            version,
            driver,
            sim,
            offer,
            bin,
        } => {
            let programs = || {
                bin.as_deref()
                    .map_or_else(Programs::quick, Programs::in_folder)
            };
            let with = if *driver {
                // Before the minutes that Kubernetes takes: a build that fails is known early.
                parts::helm()?;
                Some((programs()?, sim, offer))
            } else {
                None
            };
            let (cluster, start) = up(&args.name, version)?;
            let mut next = vec!["exec kubectl get pods --all-namespaces"];
            if let Some((programs, sim, offer)) = with {
                let offer = format!("profile={offer}");
                Driver::install_with(&cluster, &programs, sim, &[], &[&offer]).with_context(
                    || {
                        format!(
                            "the cluster stays up without divvy; end it with: {}",
                            typed(&args.name, "down")
                        )
                    },
                )?;
                let took = start.elapsed().as_secs_f32();
                writeln!(
                    out,
                    "divvy has published the simulated GPUs {sim} after {took:.1} s"
                )?;
                next.push("exec kubectl apply -f examples/share-small/manifests.yaml");
                next.extend(["exec divvy status", "exec divvy status node node-1"]);
            }
            next.push("down");
            writeln!(out, "Next:")?;
            for words in next {
                writeln!(out, "  {}", typed(&args.name, words))?;
            }
        }
        Action::Exec { command } => {
            let cluster = running(&args.name)?;
            let (program, arguments) = command.split_first().context("no command")?;
            let status = cluster.command(program, arguments).status()?;
            exit(status.code().unwrap_or(1));
        }
        Action::Status => status()?,
        Action::Logs { dir } => running(&args.name)?.collect_logs(dir)?,
        Action::Down => Cluster::down(&args.name)?,
    }
    Ok(())
}

fn up(name: &str, version: &str) -> Result<(Cluster, Instant)> {
    Parts::ensure(version)?;
    let start = Instant::now();
    let cluster = whole(name, version, false, Gates::Default)?;
    let (took, files) = (start.elapsed().as_secs_f32(), cluster.state().display());
    crate::say(&format!(
        "Kubernetes {version} is up after {took:.1} s; its files are in {files}"
    ));
    Ok((cluster, start))
}

fn status() -> Result<()> {
    let mut out = std::io::stdout();
    let names = Cluster::names()?;
    if names.is_empty() {
        writeln!(out, "no cluster; start one with: cargo xtask cluster up")?;
    }
    for name in names {
        let Some(cluster) = Cluster::find(&name)? else {
            writeln!(
                out,
                "{name}: not running; remove it with: {}",
                typed(&name, "down")
            )?;
            continue;
        };
        writeln!(
            out,
            "{name}: Kubernetes {}, {}",
            cluster.parts().version(),
            cluster.state().display()
        )?;
        for component in Component::ALL {
            let pid = cluster.component(component).pid();
            let state = pid.map_or_else(|| "not running".to_owned(), |pid| format!("pid {pid}"));
            writeln!(out, "  {:<24} {state}", component.name())?;
        }
    }
    Ok(())
}

fn running(name: &str) -> Result<Cluster> {
    Cluster::find(name)?.with_context(|| {
        format!(
            "cluster {name} is not up; start it with: {}",
            typed(name, "up")
        )
    })
}

/// Returns the command that does this with a cluster.
fn typed(name: &str, words: &str) -> String {
    let option = if name == DEFAULT {
        String::new()
    } else {
        format!("--name {name} ")
    };
    format!("cargo xtask cluster {option}{words}")
}
