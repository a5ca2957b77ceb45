//! `divvy status`: what the fleet's GPUs are, who holds them, what is stuck since when and why, and what to do. Reads
//! the API server and nothing else: what nodes tell of themselves (`GpuNode`), what is published, and what claims ask for.

mod claim;
mod read;
mod render;
mod report;
mod snapshot;
#[cfg(test)]
mod tests;
mod waiting;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use divvy_api::names::DRIVER;
use serde::Serialize;

use self::read::{Access, Wanted, read};
use crate::format::{self, Format};

/// Somebody has to do something.
const NEEDS_PERSON: u8 = 3;

/// What `divvy status` takes.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = false)]
pub(crate) struct Args {
    #[command(subcommand)]
    about: Option<About>,
    #[command(flatten)]
    access: Access,
    /// The namespace of the claim; of the fleet, only claims of this namespace
    #[arg(short, long, global = true, value_name = "NAME", conflicts_with = "all_namespaces")]
    namespace: Option<String>,
    /// Claims of all namespaces, which is what the fleet shows without -n
    #[arg(short = 'A', long, global = true)]
    all_namespaces: bool,
    /// How to show the answer
    #[arg(short, long, global = true, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// The name under which divvy publishes devices
    #[arg(long, global = true, value_name = "NAME", default_value = DRIVER)]
    driver_name: String,
}

/// What to tell about; without it, the fleet.
#[derive(Debug, clap::Subcommand)]
enum About {
    /// One node: its GPUs, who holds them, what is wrong
    Node {
        /// The node's name
        name: String,
    },
    /// One GPU: its mode, who holds it, what is wrong
    Gpu {
        /// Its UUID, the beginning of that, or NODE/gpu-0
        gpu: String,
    },
    /// One claim: what it has, who uses it, or why it waits, node by node
    Claim {
        /// NAMESPACE/NAME, or its name in the namespace of -n or of the context
        claim: String,
    },
}

/// Asks and shows. Exit status 0 if nobody has to do anything, 3 if somebody has.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let claims = matches!(args.about, None | Some(About::Claim { .. }));
    let (snapshot, default_namespace) = runtime.block_on(async {
        let (client, namespace) = args.access.client().await?;
        let inside = match &args.about {
            Some(About::Claim { claim }) => claim_name(claim, args.namespace.as_deref(), &namespace)?.0,
            _ => args.namespace.as_deref().unwrap_or(&namespace),
        };
        let wanted = Wanted { driver: &args.driver_name, claims, namespace: inside };
        let snapshot = read(&client, wanted).await?;
        anyhow::Ok((snapshot, namespace))
    })?;
    let needs_person = match &args.about {
        None => {
            let fleet = report::fleet(&snapshot, args.namespace.as_deref());
            args.show(&fleet, |fleet| render::fleet(&snapshot, fleet))?;
            fleet.needs_person
        }
        Some(About::Node { name }) => {
            let node = report::node(&snapshot, name)?;
            args.show(&node, |node| render::node(&snapshot, node))?;
            node.needs_person
        }
        Some(About::Gpu { gpu }) => {
            let gpu = report::gpu(&snapshot, gpu)?;
            args.show(&gpu, |gpu| render::gpu(&snapshot, gpu))?;
            gpu.needs_person
        }
        Some(About::Claim { claim }) => {
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
        format::show(report, self.output, table).context("the answer cannot be written")
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
            bail!("{claim} is not in namespace {namespace}: leave out one of them")
        }
        (Some(full), _) => Ok(full),
        (None, namespace) => Ok((namespace.unwrap_or(default), claim)),
    }
}
