//! `divvy inventory`: the GPUs of this machine or of a simulated one, and what divvy would publish of them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context, Result};
use divvy_carve::{Input, Note, Pool, ServerFeatures, carve};
use divvy_gpu_sim::SimNode;
use divvy_host::HostRoot;
use divvy_model::{GpuFacts, HostTopology, Inventory, MigMode, NvLinkPeer, Ordinals, SystemFacts};
use serde::Serialize;

use crate::format::{self, Format};
use crate::table::Table;

/// What `divvy inventory` takes.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Simulated GPUs instead of this machine's: models and numbers, such as h100x8 or a100-40x4,l4x2
    #[arg(long, value_name = "GPUS")]
    sim: Option<String>,
    /// How to show it
    #[arg(short, long, value_enum, default_value_t = Format::Table)]
    output: Format,
    /// Where the driver is installed; found by itself if left out
    #[arg(long, env = "DRIVER_ROOT", value_name = "FOLDER")]
    driver_root: Option<PathBuf>,
    /// The NVML library; found in the driver root if left out
    #[arg(long, env = "NVML_LIBRARY", value_name = "FILE")]
    nvml_library: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Shown {
    system: SystemFacts,
    gpus: Vec<ShownGpu>,
    /// GPUs that are there but could not be read.
    problems: Vec<String>,
    /// What divvy would publish for a node without a policy.
    pool: Pool,
    /// What it would leave out, and why.
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ShownGpu {
    ordinal: Option<u32>,
    #[serde(flatten)]
    facts: GpuFacts,
    topology: HostTopology,
    nvlink_domain: Option<String>,
}

/// Runs `divvy inventory`. Exit status 1 when a GPU could not be read.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let inventory = match &args.sim {
        Some(spec) => SimNode::parse(spec).context("--sim cannot be used")?.inventory(),
        None => of_this_machine(args)?,
    };
    let shown = shown(&inventory);
    format::show(&shown, args.output, table)?;
    Ok(if shown.problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn of_this_machine(args: &Args) -> Result<Inventory> {
    let host = HostRoot::default();
    let library = if let Some(path) = &args.nvml_library {
        path.clone()
    } else {
        divvy_host::find_driver(&host, args.driver_root.as_deref())
            .context("no NVIDIA driver was found on this machine (divvy inventory --sim h100x2 needs none)")?
            .nvml_library
    };
    let driver = divvy_nvml::NvmlDriver::open(Some(&library))
        .context("NVML cannot be used (divvy inventory --sim h100x2 needs no GPU)")?;
    let topology = |address| divvy_host::topology(&host, address).unwrap_or_default();
    Ok(divvy_nvml::read_inventory(&driver, &topology)?)
}

fn shown(inventory: &Inventory) -> Shown {
    let mut ordinals = Ordinals::default();
    ordinals.assign(inventory.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)));
    let carved = carve(&Input {
        node: "this-node",
        inventory,
        ordinals: &ordinals,
        taints: &BTreeMap::new(),
        held: &BTreeSet::new(),
        previous: None,
        features: &ServerFeatures::default(),
    });
    let domains = inventory.nvlink_domains();
    let mut gpus: Vec<ShownGpu> = inventory
        .gpus
        .iter()
        .map(|(uuid, gpu)| ShownGpu {
            ordinal: ordinals.of(uuid),
            facts: gpu.facts.clone(),
            topology: gpu.topology.clone(),
            nvlink_domain: domains.get(uuid).cloned(),
        })
        .collect();
    gpus.sort_by_key(|gpu| gpu.ordinal);
    Shown {
        system: inventory.system.clone(),
        gpus,
        problems: inventory.problems.iter().map(|p| p.error.to_string()).collect(),
        pool: carved.pool,
        notes: carved.notes.iter().map(Note::to_string).collect(),
    }
}

fn table(shown: &Shown) -> String {
    let system = &shown.system;
    let mut out = format!(
        "driver {}, CUDA {}, NVML {}\n\n",
        system.driver_version, system.cuda_version, system.nvml_version
    );
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
    out += "\n\npublished without a policy:";
    for device in shown.pool.devices() {
        out += &format!(" {}", device.name);
    }
    for (what, lines) in [("left out", &shown.notes), ("problem", &shown.problems)] {
        for line in lines {
            out += &format!("\n{what}: {line}");
        }
    }
    out
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
