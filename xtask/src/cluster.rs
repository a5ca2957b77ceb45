//! `cargo xtask cluster`: a real Kubernetes on this machine, for people.

use std::io::Write as _;
use std::process::exit;
use std::time::Instant;

use anyhow::{Context, Result};
use clap::Subcommand;
use divvy_e2e::parts::{self, Parts};
use divvy_e2e::{Cluster, Component, Extent, Gates, Options};

use crate::needs::Need;

/// Arguments of `cargo xtask cluster`.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Which cluster: several run side by side
    #[arg(long, global = true, default_value = "dev")]
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
    },
    /// Run a command in the cluster, as `exec kubectl get pods`
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
        dir: std::path::PathBuf,
    },
    /// End a cluster and remove all it left
    Down,
}

impl Args {
    /// What has to be on the machine first.
    pub(crate) fn needs(&self) -> &'static [Need] {
        match self.action {
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
            writeln!(out, "Kubernetes {} is built, see {}", parts.version(), parts::cache_dir()?.display())?;
        }
        Action::Up { version } => up(&args.name, version)?,
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

fn up(name: &str, version: &str) -> Result<()> {
    Parts::ensure(version)?;
    let start = Instant::now();
    let options = Options {
        name: name.to_owned(),
        version: version.to_owned(),
        owned: false,
        extent: Extent::Whole,
        gates: Gates::Default,
    };
    let cluster = Cluster::up(&options)?;
    let (seconds, option) = (start.elapsed().as_secs_f32(), name_option(name));
    let mut out = std::io::stdout();
    writeln!(
        out,
        "Kubernetes {version} is up after {seconds:.1} s; its files are in {}",
        cluster.state().display()
    )?;
    writeln!(out, "  cargo xtask cluster {option}exec kubectl get pods --all-namespaces")?;
    writeln!(out, "  cargo xtask cluster {option}down")?;
    Ok(())
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
                "{name}: not running; remove it with: cargo xtask cluster {}down",
                name_option(&name)
            )?;
            continue;
        };
        writeln!(out, "{name}: Kubernetes {}, {}", cluster.parts().version(), cluster.state().display())?;
        for component in Component::ALL {
            let pid = cluster.component(component).pid();
            let state = pid.map_or_else(|| "not running".to_owned(), |pid| format!("pid {pid}"));
            writeln!(out, "  {:<24} {state}", component.name())?;
        }
    }
    Ok(())
}

fn running(name: &str) -> Result<Cluster> {
    let hint =
        || format!("cluster {name} is not up; start it with: cargo xtask cluster {}up", name_option(name));
    Cluster::find(name)?.with_context(hint)
}

fn name_option(name: &str) -> String {
    if name == "dev" { String::new() } else { format!("--name {name} ") }
}
