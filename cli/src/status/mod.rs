//! `divvy status`: the GPUs of the fleet, the claims that hold them, problems with their age,
//! reason and remedy. Reads only the API server: the nodes' reports (`GpuNode`), published devices,
//! and claims.

pub(crate) mod claim;
mod fold;
mod hook;
pub(crate) mod plugins;
pub(crate) mod pod;
pub(crate) mod policy;
mod quota;
pub mod read;
pub(crate) mod render;
pub(crate) mod report;
mod shares;
mod siblings;
pub mod snapshot;
mod taints;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod waiting;

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde::Serialize;

use self::read::{Access, ClaimsWanted, PodWanted, SlicesWanted, Wanted, read};
use self::snapshot::Snapshot;
use crate::format::{self, Output};

/// Exit status when an administrator or user has to act.
const NEEDS_PERSON: u8 = 3;

/// Arguments of `divvy status`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = false)]
pub struct Args {
    #[command(subcommand)]
    about: Option<Target>,
    #[command(flatten)]
    access: Access,
    /// Namespace of the claim or pod; for the fleet, show claims of this namespace only
    #[arg(
        short,
        long,
        global = true,
        value_name = "NAME",
        conflicts_with = "all_namespaces"
    )]
    namespace: Option<String>,
    /// Show claims of all namespaces (the default for the fleet)
    #[arg(short = 'A', long, global = true)]
    all_namespaces: bool,
    /// Output format
    #[arg(short, long, global = true, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Name of the driver; by default the one that most nodes report
    #[arg(long, global = true, value_name = "NAME")]
    driver_name: Option<String>,
}

/// Subject of the report; by default the fleet.
#[derive(Debug, clap::Subcommand)]
enum Target {
    /// Show a node: its GPUs, their holders, and problems
    #[command(after_help = "Examples:
  divvy status node NODE
  divvy status node NODE -o json")]
    Node {
        /// Name of the node
        name: String,
    },
    /// Show a GPU: its mode, holders, what shares have left, and problems
    #[command(after_help = "Examples:
  divvy status gpu NODE/gpu-0
  divvy status gpu GPU-12345678")]
    Gpu {
        /// UUID (or a unique prefix of it), or NODE/gpu-0
        gpu: String,
    },
    /// Show on how many nodes and GPUs each rule of the policies decides, and what has no effect
    #[command(after_help = "Examples:
  divvy status policy
  divvy status policy NAME
  divvy status policy -o json")]
    Policy {
        /// Name of the policy, to see which GPUs its rules decide about; without it, all policies
        name: Option<String>,
    },
    /// Show what namespaces have of GPUs, what their quotas allow, and which claims use or wait for
    /// it
    #[command(after_help = "Examples:
  divvy status quota
  divvy status quota -n NAMESPACE
  divvy status quota -o json")]
    Quota,
    /// Show a pod: its claims, what it waits for up to running containers, and what to do
    #[command(after_help = "Examples:
  divvy status pod NAMESPACE/POD
  divvy status pod train -n NAMESPACE
  divvy status pod NAMESPACE/POD -o wide")]
    Pod {
        /// NAMESPACE/NAME (or a unique beginning of it), or a name in the namespace given by -n or
        /// the context
        pod: String,
    },
    /// Show a claim: its devices and users, or why it is waiting, node by node
    #[command(after_help = "Examples:
  divvy status claim NAMESPACE/CLAIM
  divvy status claim NAMESPACE/CLAIM -o wide")]
    Claim {
        /// NAMESPACE/NAME, or a name in the namespace given by -n or the context
        claim: String,
    },
}

fn claims_wanted(about: Option<&Target>) -> ClaimsWanted {
    match about {
        None | Some(Target::Claim { .. } | Target::Pod { .. } | Target::Quota) => {
            ClaimsWanted::Waiting
        }
        Some(Target::Gpu { .. }) => ClaimsWanted::Granted,
        Some(_) => ClaimsWanted::No,
    }
}

fn slices_wanted(about: Option<&Target>) -> SlicesWanted<'_> {
    match about {
        None => SlicesWanted::Few,
        Some(Target::Node { name }) => SlicesWanted::Of(name),
        Some(_) => SlicesWanted::All,
    }
}

/// Reads and prints. Exit status 0 if no action is required, 3 if it is.
pub fn run(args: &Args) -> Result<ExitCode> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let events = matches!(args.about, Some(Target::Claim { .. } | Target::Pod { .. }));
    let (snapshot, quotas, default_namespace) = runtime.block_on(async {
        let (client, namespace, server) = args.access.client().await?;
        let own = args.namespace.as_deref();
        let (inside, pod) = match &args.about {
            Some(Target::Claim { claim }) => {
                let (inside, name) = full_name("claim", claim, own, &namespace)?;
                (inside, PodWanted::UnlessClaim(name))
            }
            Some(Target::Pod { pod }) => {
                let (inside, name) = full_name("pod", pod, own, &namespace)?;
                (inside, PodWanted::Named(name))
            }
            _ => (own.unwrap_or(&namespace), PodWanted::No),
        };
        let wanted = Wanted {
            driver: args.driver_name.as_deref(),
            claims: claims_wanted(args.about.as_ref()),
            events,
            policies: matches!(args.about, Some(Target::Policy { .. })),
            plugins: matches!(args.about, None | Some(Target::Node { .. })),
            namespace: inside,
            pod,
            slices: slices_wanted(args.about.as_ref()),
        };
        let inside = wanted.namespace;
        let snapshot = read(&client, wanted).await.context(server)?;
        let quotas = match &args.about {
            Some(Target::Quota) => quota::read(&client, inside).await?,
            _ => quota::Quotas::default(),
        };
        anyhow::Ok((snapshot, quotas, namespace))
    })?;
    let needs_person = match &args.about {
        None => {
            let fleet = report::fleet(&snapshot, args.namespace.as_deref());
            args.show(&fleet, |fleet| render::fleet(&snapshot, fleet, args.wide()))?;
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
        Some(Target::Policy { name }) => {
            let policies = policy::policies(&snapshot, name.as_deref())?;
            let wide = args.wide() || name.is_some();
            args.show(&policies, |all| render::policies(&snapshot, all, wide))?;
            policies.needs_person
        }
        Some(Target::Quota) => {
            let all = quota::quotas(&snapshot, &quotas, args.namespace.as_deref());
            args.show(&all, quota::render)?;
            all.needs_person
        }
        Some(Target::Pod { pod }) => {
            let (namespace, name) =
                full_name("pod", pod, args.namespace.as_deref(), &default_namespace)?;
            args.pod(&snapshot, namespace, name)?
        }
        Some(Target::Claim { claim }) => {
            let (namespace, name) = full_name(
                "claim",
                claim,
                args.namespace.as_deref(),
                &default_namespace,
            )?;
            if snapshot.named.is_empty() {
                let claim = claim::claim(&snapshot, namespace, name)?;
                args.show(&claim, |claim| render::claim(&snapshot, claim, args.wide()))?;
                claim.needs_person
            } else {
                format::talk(&format!(
                    "there is no claim {namespace}/{name}; this is the pod of that name (divvy status pod {namespace}/{name}):"
                ));
                args.pod(&snapshot, namespace, name)?
            }
        }
    };
    Ok(if needs_person {
        ExitCode::from(NEEDS_PERSON)
    } else {
        ExitCode::SUCCESS
    })
}

impl Args {
    /// Shows a pod; returns whether an administrator or user has to act.
    fn pod(&self, snapshot: &Snapshot, namespace: &str, name: &str) -> Result<bool> {
        let pod = pod::pod(snapshot, namespace, name)?;
        self.show(&pod, |pod| render::pod(snapshot, pod, self.wide()))?;
        Ok(pod.needs_person)
    }

    fn show<T: Serialize>(&self, report: &T, table: impl FnOnce(&T) -> String) -> Result<()> {
        format::show(report, self.output.format(), table).context("writing the answer")
    }

    /// Says whether the reasons node by node are to be shown.
    fn wide(&self) -> bool {
        self.output == Output::Wide
    }
}

/// Splits what is said of a claim or pod into namespace and name.
fn full_name<'a>(
    kind: &str,
    claim: &'a str,
    namespace: Option<&'a str>,
    default: &'a str,
) -> Result<(&'a str, &'a str)> {
    match (claim.split_once('/'), namespace) {
        (Some((inside, _)), Some(namespace)) if inside != namespace => {
            bail!("the {kind} {claim} contradicts -n {namespace}: leave out one of them")
        }
        (Some(full), _) => Ok(full),
        (None, namespace) => Ok((namespace.unwrap_or(default), claim)),
    }
}
