//! `divvy inventory`: the GPUs of this machine or of a simulated one, and the devices that divvy
//! would publish.

#[cfg(target_os = "linux")]
mod linux;
#[cfg(not(target_os = "linux"))]
mod not_linux;
mod shown;
#[cfg(test)]
mod tests;
mod text;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use divvy_api::names::DRIVER;
use divvy_model::{Inventory, Offer};
use divvy_offer::{GpuRules, NodeFacts, ShareRules};

#[cfg(target_os = "linux")]
use self::linux as machine;
#[cfg(not(target_os = "linux"))]
use self::not_linux as machine;
use self::shown::Shown;
use crate::Usage;
use crate::format::{self, Output};
use crate::manifests::{Manifests, source};
use crate::offered::offered;
use divvy_why::driver;

/// Arguments of `divvy inventory`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Modes in which GPUs without a policy are offered, like the node plugin's flag
    #[arg(long, default_value = "auto", value_parser = PossibleValuesParser::new(Offer::names()).try_map(|name| name.parse::<Offer>()))]
    offer: Offer,
    /// Shares of a GPU without a policy, at most, like the node plugin's flag and the chart's value
    #[arg(long, default_value_t = 16, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=1024))]
    slots: u32,
    /// A file or folder with GpuPolicies that decide the modes of the GPUs, or - for standard
    /// input; may be given several times
    #[arg(long, value_name = "FILE")]
    policy: Vec<PathBuf>,
    /// Name of the node, which policies can select
    #[arg(long, value_name = "NAME", default_value = "this-node")]
    node_name: String,
    /// Label of the node, which policies can select; may be given several times
    #[arg(long, value_name = "KEY=VALUE", value_parser = label)]
    node_label: Vec<(String, String)>,
    /// Name of the driver, for the classes and selectors that are shown
    #[arg(long, value_name = "NAME", default_value = DRIVER, value_parser = PossibleValuesParser::new(driver::KNOWN))]
    driver_name: String,
    /// Output format
    #[arg(short, long, value_enum, default_value_t = Output::Table)]
    output: Output,
    /// Root of the NVIDIA driver's files; by default the known places are searched
    #[arg(long, env = "DRIVER_ROOT", value_name = "FOLDER")]
    driver_root: Option<PathBuf>,
    /// The NVML library; by default the one in the driver root
    #[arg(long, env = "NVML_LIBRARY", value_name = "FILE")]
    nvml_library: Option<PathBuf>,
}

/// Runs `divvy inventory` on this machine; `otherwise` is added to the error if it has no driver.
pub fn run(args: &Args, otherwise: &str) -> Result<ExitCode> {
    let (inventory, left_out) = machine::read(args, otherwise)?;
    show(&inventory, left_out, args)
}

/// Shows what divvy would publish of these GPUs. Exit status 1 when a GPU could not be read.
pub fn show(inventory: &Inventory, left_out: Vec<String>, args: &Args) -> Result<ExitCode> {
    let mut shown = shown(inventory, args)?;
    shown.problems.extend(left_out);
    format::show(&shown, args.output.format(), |shown| {
        text::table(shown, args.output == Output::Wide)
    })?;
    Ok(if shown.problems.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Takes a label of a node, `KEY=VALUE`.
pub fn label(text: &str) -> Result<(String, String), String> {
    let (key, value) = text
        .split_once('=')
        .ok_or("expected a key, = and a value")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// Works out what is there and what of it would be published.
fn shown(inventory: &Inventory, args: &Args) -> Result<Shown> {
    let defaults = GpuRules {
        modes: args.offer.into(),
        shares: ShareRules {
            slots: args.slots,
            ..ShareRules::default()
        },
        ..GpuRules::default()
    };
    let labels = args.node_label.iter().cloned().collect();
    let node = NodeFacts {
        name: &args.node_name,
        labels: &labels,
    };
    let policies = Manifests::of_files(&args.policy)?.policies;
    if policies.is_empty() && !args.policy.is_empty() {
        let files: Vec<String> = args.policy.iter().map(|path| source(path)).collect();
        return Err(Usage(format!("--policy: no GpuPolicy in {}", files.join(", "))).into());
    }
    let offered = offered(inventory, &node, &policies, &defaults);
    let driver = driver::known(&args.driver_name);
    Ok(Shown::of(inventory, &offered, driver))
}
