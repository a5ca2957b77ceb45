//! `divvy inventory`, which also shows simulated GPUs.

use std::process::ExitCode;

use anyhow::{Context, Result};
use divvy_cli::{Usage, inventory};
use divvy_gpu_sim::SimNode;

use crate::start::{Which, switch_mig_on};

/// Arguments of `divvy inventory`.
#[derive(Debug, clap::Args)]
pub struct SimArgs {
    /// Simulated GPUs instead of this machine's: boards and numbers, such as h100x8 or
    /// a100-40x4,l4x2
    #[arg(long, value_name = "GPUS", value_parser = crate::boards::simulated)]
    sim: Option<String>,
    /// Simulated GPUs that are in MIG mode: all, or their numbers, such as 0,2
    #[arg(long, value_name = "NUMBERS", requires = "sim")]
    mig_on: Option<Which>,
    #[command(flatten)]
    plain: inventory::Args,
}

/// Runs `divvy inventory`. Exit status 1 when a GPU could not be read.
pub fn run(args: &SimArgs) -> Result<ExitCode> {
    let Some(spec) = &args.sim else {
        return inventory::run(&args.plain, ", and --sim h100x2 needs none");
    };
    let node = SimNode::parse(spec).context("invalid --sim")?;
    switch_mig_on(&node, args.mig_on.as_ref()).map_err(|error| Usage(format!("{error:#}")))?;
    inventory::show(&node.inventory(), Vec::new(), &args.plain)
}
