//! The simulated GPUs, and how they are when the node starts.

use std::str::FromStr;

use anyhow::{Context, Result, bail};
use divvy_gpu_sim::{Engine, SimNode};
use divvy_model::health::RecoveryAction;
use divvy_model::{CudaVersion, GpuUuid, MemoryCaps};

/// CUDA of the first driver that caps memory.
pub(crate) const CUDA: CudaVersion = CudaVersion {
    major: 13,
    minor: 4,
};

/// The GPUs of the demo's node.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Gpus {
    /// The simulated GPUs: boards and numbers, such as h100x8 or a100-40x4,l4x2
    #[arg(long, value_name = "GPUS", default_value = "h100x2", value_parser = crate::boards::simulated)]
    pub(crate) sim: String,
    /// GPUs that start in MIG mode: all, or their numbers, such as 0,2
    #[arg(long, value_name = "NUMBERS")]
    mig_on: Option<Which>,
    /// GPUs with a MIG instance that an administrator has made (in MIG mode, too)
    #[arg(long, value_name = "NUMBERS")]
    foreign_mig: Option<Which>,
    /// GPUs that ask for a reset
    #[arg(long, value_name = "NUMBERS")]
    sick: Option<Which>,
    /// Label of the node, which policies can select; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = divvy_cli::inventory::label)]
    node_label: Vec<(String, String)>,
    /// Version of the NVIDIA driver; from 615 on it caps the memory of shares
    #[arg(long, value_name = "VERSION", value_parser = version)]
    driver_version: Option<String>,
}

/// Takes the version of a driver, such as 615.71.09.
pub(crate) fn version(text: &str) -> Result<String, String> {
    let is_number = |part: &str| part.parse::<u32>().is_ok();
    if (2..=3).contains(&text.split('.').count()) && text.split('.').all(is_number) {
        Ok(text.to_owned())
    } else {
        Err("a version has two or three numbers, such as 615.71.09".to_owned())
    }
}

/// Some of the GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Which {
    All,
    Numbers(Vec<usize>),
}

impl FromStr for Which {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == "all" {
            return Ok(Self::All);
        }
        let number = |part: &str| {
            part.trim()
                .parse()
                .map_err(|_| format!("{part:?} is neither a number nor all"))
        };
        text.split(',')
            .map(number)
            .collect::<Result<_, _>>()
            .map(Self::Numbers)
    }
}

/// The GPUs that an option names, with their numbers.
fn named(which: Option<&Which>, option: &str, gpus: &[GpuUuid]) -> Result<Vec<(usize, GpuUuid)>> {
    let all = gpus.iter().cloned().enumerate();
    let numbers = match which {
        None => return Ok(Vec::new()),
        Some(Which::All) => return Ok(all.collect()),
        Some(Which::Numbers(numbers)) => numbers,
    };
    if let Some(none) = numbers.iter().find(|number| **number >= gpus.len()) {
        bail!(
            "--{option} {none}: the GPUs are numbered from 0 to {}",
            gpus.len().saturating_sub(1)
        );
    }
    Ok(all.filter(|(number, _)| numbers.contains(number)).collect())
}

impl Gpus {
    /// Returns the labels that the node has beside those of every demo.
    pub(super) fn labels(&self) -> &[(String, String)] {
        &self.node_label
    }

    /// The node, fresh, and the numbers of the GPUs that the plugin must find something wrong with.
    pub(super) fn start(&self) -> Result<(SimNode, Vec<usize>)> {
        let node = SimNode::parse(&self.sim).context("--sim")?;
        if let Some(version) = &self.driver_version {
            let before = node.inventory().system.cuda_version;
            let cuda = before.filter(|_| !MemoryCaps::since(version));
            node.edit(|engine| engine.set_driver_version(version, cuda.unwrap_or(CUDA)));
        }
        let gpus = node.uuids();
        switch_mig_on(&node, self.mig_on.as_ref())?;
        let mut troubled = Vec::new();
        for (number, uuid) in named(self.foreign_mig.as_ref(), "foreign-mig", &gpus)? {
            node.edit(|engine| foreign(engine, &uuid))
                .with_context(|| format!("--foreign-mig {number}"))?;
            troubled.push(number);
        }
        for (number, uuid) in named(self.sick.as_ref(), "sick", &gpus)? {
            node.edit(|engine| engine.set_recovery(&uuid, Some(RecoveryAction::Reset)))
                .context("--sick")?;
            troubled.push(number);
        }
        Ok((node, troubled))
    }
}

/// Starts the GPUs that `--mig-on` names in MIG mode.
pub(crate) fn switch_mig_on(node: &SimNode, which: Option<&Which>) -> Result<()> {
    for (number, uuid) in named(which, "mig-on", &node.uuids())? {
        node.edit(|engine| mig_on(engine, &uuid))
            .with_context(|| format!("--mig-on {number}"))?;
    }
    Ok(())
}

fn mig_on(engine: &mut Engine, gpu: &GpuUuid) -> Result<()> {
    engine.set_mig_mode(gpu, true)?;
    if !engine.facts(gpu)?.mig_mode.is_on() {
        engine.reset_gpu(gpu)?;
    }
    Ok(())
}

/// An instance of the smallest profile, at the first place.
fn foreign(engine: &mut Engine, gpu: &GpuUuid) -> Result<()> {
    mig_on(engine, gpu)?;
    let capabilities = engine.mig_capabilities(gpu)?;
    let (profile, place) = capabilities
        .placements()
        .next()
        .context("the GPU has no MIG profiles")?;
    engine.make_foreign_instance(gpu, profile.id, place.start)?;
    Ok(())
}
