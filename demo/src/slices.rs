//! `divvy slices`: what a node of a kind will publish, and what a node lacks of it.

pub(crate) mod node;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use divvy_api::names::DRIVER;
use divvy_api::policy::GpuPolicy;
use divvy_cli::Usage;
use divvy_cli::format::{self, Format};
use divvy_cli::manifests::Manifests;
use divvy_cli::offered::{Granted, offered_with};
use divvy_cli::status::read::{Access, ClaimsWanted, PodWanted, SlicesWanted, Wanted, read};
use divvy_cli::status::snapshot::Snapshot;
use divvy_cli::templates::{Template, clusterapi, diff, karpenter};
use divvy_gpu_sim::SimNode;
use divvy_model::{CudaVersion, Inventory, MemoryCaps, Offer};
use divvy_offer::{GpuRules, KubeVersion, NodeFacts};
use divvy_why::driver;

use crate::start::{CUDA, Which, switch_mig_on, version};

/// Arguments of `divvy slices`.
#[derive(Debug, clap::Args)]
#[command(group(clap::ArgGroup::new("kind").args(["sim", "node", "diff"]).required(true).multiple(true)))]
pub struct Args {
    /// The GPUs of the node: boards and numbers, such as h100x8 or a100-40x4,l4x2
    #[arg(long, value_name = "GPUS", value_parser = crate::boards::simulated, conflicts_with = "node")]
    sim: Option<String>,
    /// A node of the cluster of whose kind it is: its GPUs, driver and labels, and the cluster's
    /// policies unless --policy gives others
    #[arg(long, value_name = "NODE")]
    node: Option<String>,
    /// A file or folder with GpuPolicies, or - for standard input; may be given several times
    #[arg(long, value_name = "FILE")]
    policy: Vec<PathBuf>,
    /// Compare this node of the cluster with the template, and say why an autoscaler would not take
    /// it for ready; without --sim and --node, the template is that of its own kind
    #[arg(long, value_name = "NODE")]
    diff: Option<String>,
    /// Output format; with --diff, a table unless it is yaml or json
    #[arg(short, long, value_enum)]
    output: Option<SlicesOutput>,
    /// GPUs that are in MIG mode when the node starts: all, or their numbers, such as 0,2
    #[arg(long, value_name = "NUMBERS", requires = "sim")]
    mig_on: Option<Which>,
    /// Version of the NVIDIA driver
    #[arg(long, value_name = "VERSION", value_parser = version, requires = "sim")]
    driver_version: Option<String>,
    /// Modes in which GPUs without a policy are offered, like the node plugin's flag
    #[arg(long, default_value = "auto", value_parser = PossibleValuesParser::new(Offer::names()).try_map(|name| name.parse::<Offer>()))]
    offer: Offer,
    /// Version of the cluster, which decides what is published
    #[arg(long, value_name = "VERSION", value_parser = kubernetes)]
    kubernetes: Option<KubeVersion>,
    /// Part of divvy that the chart's values switch off on the node; may be given several times
    #[arg(long, value_enum, value_name = "WHAT")]
    without: Vec<Without>,
    /// Name of the node, which policies can select
    #[arg(
        long,
        value_name = "NAME",
        default_value = "new-node",
        conflicts_with = "node"
    )]
    node_name: String,
    /// Label of the node, which policies can select; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = divvy_cli::inventory::label, conflicts_with = "node")]
    node_label: Vec<(String, String)>,
    /// Name of the driver
    #[arg(long, value_name = "NAME", value_parser = PossibleValuesParser::new(driver::KNOWN))]
    driver_name: Option<String>,
    /// Instance type of the nodes that a DRAConfig of Karpenter is for; may be given several times
    #[arg(long, value_name = "NAME")]
    instance_type: Vec<String>,
    #[command(flatten)]
    access: Access,
}

/// Format of a template.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum SlicesOutput {
    /// ResourceSlices
    Yaml,
    /// ResourceSlices, as a list
    Json,
    /// A DRAConfig of Karpenter's kwok driver
    Karpenter,
    /// Annotations for Cluster Autoscaler's Cluster API provider
    Clusterapi,
}

/// A part of divvy that values of the chart switch off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Without {
    /// MPS (mps.enabled=false, the chart's default)
    Mps,
    /// Caps of memory (memoryCaps=false)
    MemoryCaps,
}

/// Takes a version of Kubernetes, such as 1.36.4.
fn kubernetes(text: &str) -> Result<KubeVersion, String> {
    KubeVersion::parse(&format!("v{}", text.trim_start_matches('v')))
        .ok_or_else(|| "a version has three numbers, such as 1.36.4".to_owned())
}

/// GPUs, node and policies that a template is worked out from.
pub(crate) struct Kind {
    pub(crate) inventory: Inventory,
    pub(crate) driver: String,
    pub(crate) name: String,
    pub(crate) labels: std::collections::BTreeMap<String, String>,
    pub(crate) policies: Vec<GpuPolicy>,
    pub(crate) granted: Granted,
}

impl Kind {
    /// Returns the template, and what of the policies such a node would not publish.
    pub(crate) fn template(&self, offer: Offer) -> (Template, Vec<String>) {
        let defaults = GpuRules {
            modes: offer.into(),
            ..GpuRules::default()
        };
        let facts = NodeFacts {
            name: &self.name,
            labels: &self.labels,
        };
        let offered = offered_with(
            &self.inventory,
            &facts,
            &self.policies,
            &defaults,
            self.granted,
        );
        (
            Template::of(&self.driver, &self.name, &offered.pool),
            offered.notes,
        )
    }
}

/// Runs `divvy slices`. Exit status 1 when the compared node would not be taken for ready, or the
/// format has no words for the template.
pub fn run(args: &Args) -> Result<ExitCode> {
    let snapshot = if args.node.is_some() || args.diff.is_some() {
        Some(args.cluster()?)
    } else {
        None
    };
    let kind = args.kind(snapshot.as_ref())?;
    let (template, notes) = kind.template(args.offer);
    for note in notes {
        format::talk(&format!("note: {note}"));
    }
    if let (Some(node), Some(snapshot)) = (&args.diff, &snapshot) {
        return args.show_diff(&template, node, snapshot);
    }
    if let (Some(node), Some(snapshot)) = (&args.node, &snapshot)
        && args.policy.is_empty()
        && !diff::compare(&template, node, &snapshot.slices)
            .differences
            .is_empty()
    {
        format::talk(&format!(
            "note: {node} itself publishes something else at the moment: divvy slices --diff {node}"
        ));
    }
    args.show(&template)?;
    Ok(ExitCode::SUCCESS)
}

impl Args {
    /// Returns what the template is worked out from.
    fn kind(&self, snapshot: Option<&Snapshot>) -> Result<Kind> {
        let policies = Manifests::of_files(&self.policy)?.policies;
        let mut kind = match (&self.sim, snapshot) {
            (Some(spec), _) => Kind {
                inventory: self.simulated(spec)?,
                driver: self
                    .driver_name
                    .clone()
                    .or_else(|| snapshot.map(|seen| seen.driver.clone()))
                    .unwrap_or_else(|| DRIVER.to_owned()),
                name: self.node_name.clone(),
                labels: self.node_label.iter().cloned().collect(),
                policies,
                granted: Granted::default(),
            },
            (None, Some(snapshot)) => {
                let name = self.node.as_ref().or(self.diff.as_ref());
                let name = name.context("--node or --diff names the node")?;
                let mut kind = node::kind(snapshot, name)?;
                if !self.policy.is_empty() {
                    kind.policies = policies;
                }
                kind
            }
            (None, None) => bail!("--sim or --node says which GPUs the node has"),
        };
        if let Some(version) = self.kubernetes {
            kind.granted.kubernetes = version;
        }
        for without in &self.without {
            match without {
                Without::Mps => kind.granted.mps = false,
                Without::MemoryCaps => kind.inventory.system.memory_caps = MemoryCaps::SwitchedOff,
            }
        }
        Ok(kind)
    }

    fn simulated(&self, spec: &str) -> Result<Inventory> {
        let sim = SimNode::parse(spec).context("invalid --sim")?;
        if let Some(version) = &self.driver_version {
            set_driver(&sim, version);
        }
        switch_mig_on(&sim, self.mig_on.as_ref()).map_err(|error| Usage(format!("{error:#}")))?;
        Ok(sim.inventory())
    }

    /// Reads what the cluster has of nodes, policies and slices.
    fn cluster(&self) -> Result<Snapshot> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let (client, _, server) = self.access.client().await?;
            let wanted = Wanted {
                driver: self.driver_name.as_deref(),
                claims: ClaimsWanted::No,
                events: false,
                policies: true,
                plugins: false,
                namespace: "",
                pod: PodWanted::No,
                slices: SlicesWanted::All,
            };
            let snapshot = read(&client, wanted).await.context(server)?;
            // Without all of them the template would be one of another cluster.
            if let Some(unread) = snapshot.unread.first() {
                bail!("{unread}");
            }
            Ok(snapshot)
        })
    }

    fn show(&self, template: &Template) -> Result<()> {
        match self.output.unwrap_or(SlicesOutput::Yaml) {
            SlicesOutput::Yaml => format::print(template.yaml()?.trim_end()),
            SlicesOutput::Json => {
                let slices: Vec<_> = template.slices().collect();
                format::show(&slices, Format::Json, |_| String::new())
            }
            SlicesOutput::Karpenter => {
                let config = karpenter::dra_config(template, &self.instance_type)?;
                format::show(&config, Format::Yaml, |_| String::new())
            }
            SlicesOutput::Clusterapi => {
                let annotations = clusterapi::annotations(template)?;
                format::show(&annotations, Format::Yaml, |_| String::new())
            }
        }
    }

    fn show_diff(&self, template: &Template, node: &str, snapshot: &Snapshot) -> Result<ExitCode> {
        if !snapshot
            .nodes
            .iter()
            .any(|one| one.metadata.name.as_deref() == Some(node))
        {
            bail!("there is no node {node} (kubectl get nodes)");
        }
        let report = diff::compare(template, node, &snapshot.slices);
        let format = match self.output {
            None => Format::Table,
            Some(SlicesOutput::Yaml) => Format::Yaml,
            Some(SlicesOutput::Json) => Format::Json,
            Some(SlicesOutput::Karpenter | SlicesOutput::Clusterapi) => {
                return Err(Usage(
                    "--diff has -o yaml and -o json; without -o it prints a text".to_owned(),
                )
                .into());
            }
        };
        format::show(&report, format, diff::text)?;
        Ok(if report.is_ready() {
            ExitCode::SUCCESS
        } else {
            ExitCode::FAILURE
        })
    }
}

/// Gives simulated GPUs a driver of this version.
fn set_driver(sim: &SimNode, version: &str) {
    let before = sim.inventory().system.cuda_version;
    let cuda: Option<CudaVersion> = before.filter(|_| !MemoryCaps::since(version));
    sim.edit(|engine| engine.set_driver_version(version, cuda.unwrap_or(CUDA)));
}
