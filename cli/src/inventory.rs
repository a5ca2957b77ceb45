//! `divvy inventory`: the GPUs of this machine or of a simulated one, and the devices that divvy would publish.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use divvy_gpu_sim::SimNode;
use divvy_host::HostRoot;
use divvy_kubelet_plugin::Offer;
use divvy_model::{GpuFacts, HostTopology, Inventory, MigMode, NvLinkPeer, SystemFacts};
use divvy_offer::{GpuRules, NodeFacts, Pool};
use serde::Serialize;

use crate::format::{self, Format};
use crate::manifests::Manifests;
use crate::offered::{Offered, offered};
use crate::slices::Picture;
use crate::table::Table;

/// What `divvy inventory` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Simulated GPUs instead of this machine's: models and numbers, such as h100x8 or a100-40x4,l4x2
    #[arg(long, value_name = "GPUS", value_parser = format::simulated)]
    sim: Option<String>,
    /// How GPUs without a policy are offered, like the node plugin's flag
    #[arg(long, value_enum, default_value_t)]
    offer: Offer,
    /// A file or folder with GpuPolicies that decide the modes of the GPUs, or - for standard input; may be given
    /// several times
    #[arg(long, value_name = "FILE")]
    policy: Vec<PathBuf>,
    /// Name of the node, which policies can select
    #[arg(long, value_name = "NAME", default_value = "this-node")]
    node_name: String,
    /// Label of the node, which policies can select; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    node_label: Vec<(String, String)>,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Root of the NVIDIA driver's files; by default the known places are searched
    #[arg(long, env = "DRIVER_ROOT", value_name = "FOLDER")]
    driver_root: Option<PathBuf>,
    /// The NVML library; by default the one in the driver root
    #[arg(long, env = "NVML_LIBRARY", value_name = "FILE")]
    nvml_library: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Shown {
    system: SystemFacts,
    gpus: Vec<ShownGpu>,
    /// GPUs that are there but could not be read.
    problems: Vec<String>,
    /// What divvy would publish.
    pool: Pool,
    /// What it would leave out, and why.
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ShownGpu {
    ordinal: Option<u32>,
    /// The rule of a policy that decides what it may become.
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_by: Option<String>,
    rules: GpuRules,
    #[serde(flatten)]
    facts: GpuFacts,
    topology: HostTopology,
    nvlink_domain: Option<String>,
    /// How it is cut now, if it is a GPU that can be cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    picture: Option<Picture>,
}

/// Runs `divvy inventory`. Exit status 1 when a GPU could not be read.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let inventory = match &args.sim {
        Some(spec) => SimNode::parse(spec).context("invalid --sim")?.inventory(),
        None => of_this_machine(args)?,
    };
    let shown = shown(&inventory, args)?;
    format::show(&shown, args.output, table)?;
    Ok(if shown.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn of_this_machine(args: &Args) -> Result<Inventory> {
    let host = HostRoot::default();
    let library = if let Some(path) = &args.nvml_library {
        path.clone()
    } else {
        divvy_host::find_driver(&host, args.driver_root.as_deref())
            .context("this machine has no NVIDIA driver (divvy inventory --sim h100x2 needs none)")?
            .nvml_library
    };
    let driver = divvy_nvml::NvmlDriver::open(Some(&library))
        .context("failed to open NVML (divvy inventory --sim h100x2 needs no GPU)")?;
    let topology = |address| divvy_host::topology(&host, address).unwrap_or_default();
    Ok(divvy_nvml::read_inventory(&driver, &topology)?)
}

fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected a key, = and a value")?;
    Ok((key.to_owned(), value.to_owned()))
}

fn shown(inventory: &Inventory, args: &Args) -> Result<Shown> {
    let defaults = GpuRules { modes: args.offer.modes(), ..GpuRules::default() };
    let labels = args.node_label.iter().cloned().collect();
    let node = NodeFacts { name: &args.node_name, labels: &labels };
    let Offered { ordinals, resolved, pool, notes } =
        offered(inventory, &node, &Manifests::of_files(&args.policy)?.policies, &defaults);
    let domains = inventory.nvlink_domains();
    let mut gpus: Vec<ShownGpu> = inventory
        .gpus
        .iter()
        .map(|(uuid, gpu)| ShownGpu {
            ordinal: ordinals.of(uuid),
            decided_by: resolved.by.get(uuid).map(ToString::to_string),
            rules: resolved.rules.get(uuid).cloned().unwrap_or_default(),
            facts: gpu.facts.clone(),
            topology: gpu.topology.clone(),
            nvlink_domain: domains.get(uuid).cloned(),
            picture: gpu.mig.as_ref().map(|mig| {
                let name = ordinals.of(uuid).map_or_else(String::new, |n| format!("gpu-{n}"));
                Picture::of(name, &mig.capabilities, &mig.instances, |_| None)
            }),
        })
        .collect();
    gpus.sort_by_key(|gpu| gpu.ordinal);
    Ok(Shown {
        system: inventory.system.clone(),
        gpus,
        problems: inventory.problems.iter().map(|p| p.error.to_string()).collect(),
        pool,
        notes,
    })
}

fn table(shown: &Shown) -> String {
    let system = &shown.system;
    let cuda = system.cuda_version.map_or("-".to_owned(), |version| version.to_string());
    let nvml = system.nvml_version.as_deref().unwrap_or("-");
    let mut out = format!("driver {}, CUDA {cuda}, NVML {nvml}\n\n", system.driver_version);
    let mut table = Table::new(["GPU", "PRODUCT", "MEMORY", "SMS", "MIG", "PCI", "NUMA", "NVLINK", "UUID"]);
    for gpu in &shown.gpus {
        let facts = &gpu.facts;
        let number = |n: Option<u32>| n.map_or("-".to_owned(), |n| n.to_string());
        table.row([
            number(gpu.ordinal),
            facts.product_name.clone(),
            facts.memory_bytes.map_or("-".to_owned(), format::bytes),
            number(facts.multiprocessors),
            match facts.mig_mode {
                MigMode::Unsupported => "-".to_owned(),
                mode if mode.is_on() => "on".to_owned(),
                MigMode::Supported { .. } => "off".to_owned(),
            },
            facts.pci_address.to_string(),
            number(gpu.topology.numa_node),
            nvlink(&facts.nvlinks),
            facts.uuid.to_string(),
        ]);
    }
    out += &table.render(0);
    let cut = shown.gpus.iter().filter(|gpu| gpu.facts.mig_mode.is_on());
    for picture in cut.filter_map(|gpu| gpu.picture.as_ref()) {
        out += &format!("\n\n{}", picture.lines().join("\n"));
    }
    for gpu in shown.gpus.iter().filter(|gpu| gpu.decided_by.is_some()) {
        let (name, by) = (gpu.ordinal.unwrap_or_default(), gpu.decided_by.as_deref().unwrap_or_default());
        out += &format!("\n\ngpu-{name} by {by}");
    }
    out += "\n\npublished:";
    for (name, count) in grouped(&shown.pool) {
        out += &format!(" {name}");
        if count > 1 {
            out += &format!("×{count}");
        }
    }
    for (what, lines) in [("left out", &shown.notes), ("problem", &shown.problems)] {
        for line in lines {
            out += &format!("\n{what}: {line}");
        }
    }
    out
}

/// Names of devices; partitions of one profile once, without their starts, and how many there are.
fn grouped(pool: &Pool) -> Vec<(String, usize)> {
    let mut names: Vec<(String, usize)> = Vec::new();
    for device in pool.devices() {
        let name = device.name.as_str();
        let name = match name.rsplit_once('-') {
            Some((stem, _)) if stem.contains("-mig-") => stem,
            _ => name,
        };
        match names.last_mut() {
            Some((last, count)) if last == name => *count += 1,
            _ => names.push((name.to_owned(), 1)),
        }
    }
    names
}

fn nvlink(links: &[NvLinkPeer]) -> String {
    let peers = links.iter().filter(|link| matches!(link, NvLinkPeer::Gpu(_))).count();
    match (links.contains(&NvLinkPeer::Switch), peers) {
        (true, _) => "switch".to_owned(),
        (false, 0) => "-".to_owned(),
        (false, 1) => "1 peer".to_owned(),
        (false, n) => format!("{n} peers"),
    }
}
