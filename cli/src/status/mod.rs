//! `divvy status`: the GPUs of the fleet, the claims that hold them, problems with their age, reason and remedy. Reads
//! only the API server: the nodes' reports (`GpuNode`), published devices, and claims.

pub(crate) mod claim;
pub(crate) mod read;
pub(crate) mod render;
pub(crate) mod report;
pub(crate) mod snapshot;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod waiting;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use divvy_api::names::DRIVER;
use serde::Serialize;

use self::read::{Access, Wanted, read};
use crate::format::{self, Format};

/// Exit status when an administrator or user has to act.
const NEEDS_PERSON: u8 = 3;

/// What `divvy status` takes.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = false)]
pub(crate) struct Args {
    #[command(subcommand)]
    about: Option<Target>,
    #[command(flatten)]
    access: Access,
    /// Namespace of the claim; for the fleet, show claims of this namespace only
    #[arg(short, long, global = true, value_name = "NAME", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Show claims of all namespaces (the default for the fleet)
    #[arg(short = 'A', long, global = true)]
    all_namespaces: bool,
    /// Output format
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Name of the driver, if divvy is installed under another one
    #[arg(long, global = true, value_name = "NAME", default_value = DRIVER)]
    driver_name: String,
}

/// What to report on; by default the fleet.
#[derive(Debug, clap::Subcommand)]
enum Target {
    /// One node: its GPUs, their holders, and problems
    Node { name: String },
    /// One GPU: its mode, holders, and problems
    Gpu {
        /// UUID (or a unique prefix of it), or NODE/gpu-0
        gpu: String,
    },
    /// One claim: its devices and users, or why it is waiting, node by node
    Claim {
        /// NAMESPACE/NAME, or a name in the namespace given by -n or the context
        claim: String,
    },
}

/// Reads and prints. Exit status 0 if no action is required, 3 if it is.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let events = matches!(args.about, Some(Target::Claim { .. }));
    let claims = args.about.is_none() || events;
    let (snapshot, default_namespace) = runtime.block_on(async {
        let (client, namespace, server) = args.access.client().await?;
        let inside = match &args.about {
            Some(Target::Claim { claim }) => claim_name(claim, args.namespace.as_deref(), &namespace)?.0,
            _ => args.namespace.as_deref().unwrap_or(&namespace),
        };
        let wanted = Wanted { driver: &args.driver_name, claims, events, namespace: inside };
        let snapshot = read(&client, wanted).await.context(server)?;
        anyhow::Ok((snapshot, namespace))
    })?;
    let needs_person = match &args.about {
        None => {
            let fleet = report::fleet(&snapshot, args.namespace.as_deref());
            args.show(&fleet, |fleet| render::fleet(&snapshot, fleet))?;
            fleet.needs_person
        }
        Some(Target::Node { name }) => {
            let node = report::node(&snapshot, name)?;
            args.show(&node, |node| render::node(&snapshot, node))?;
            node.needs_person
        }
        Some(Target::Gpu { gpu }) => {
            let gpu = report::gpu(&snapshot, gpu)?;
            args.show(&gpu, |gpu| render::gpu(&snapshot, gpu))?;
            gpu.needs_person
        }
        Some(Target::Claim { claim }) => {
            let (namespace, name) = claim_name(claim, args.namespace.as_deref(), &default_namespace)?;
            let claim = claim::claim(&snapshot, namespace, name)?;
            args.show(&claim, |claim| render::claim(&snapshot, claim))?;
            claim.needs_person
        }
    };
    Ok(if needs_person { ExitCode::from(NEEDS_PERSON) } else { ExitCode::SUCCESS })
}

impl Args {
    fn show<T: Serialize>(&self, report: &T, table: impl FnOnce(&T) -> String) -> Result<()> {
        format::show(report, self.output, table).context("writing the answer")
    }
}

/// Namespace and name of a claim.
fn claim_name<'a>(
    claim: &'a str,
    namespace: Option<&'a str>,
    default: &'a str,
) -> Result<(&'a str, &'a str)> {
    match (claim.split_once('/'), namespace) {
        (Some((inside, _)), Some(namespace)) if inside != namespace => {
            bail!("the claim {claim} contradicts -n {namespace}: leave out one of them")
        }
        (Some(full), _) => Ok(full),
        (None, namespace) => Ok((namespace.unwrap_or(default), claim)),
    }
}
