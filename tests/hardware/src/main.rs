//! `divvy-hardware`: one program for a machine with a real NVIDIA GPU and no network. It reads what divvy reads, holds the
//! driver to the contract that the simulator keeps, prepares one claim with the real node plugin in this process against
//! a fake API server, and runs a small CUDA program with nothing but what the claim's CDI file gives. It changes nothing
//! on the GPU. Run by people; exit status 3 says that there is no GPU to look at.

mod apply;
mod claim;
mod cuda;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use divvy_host::HostRoot;
use divvy_model::{Expect, GpuDriver, Inventory, conformance};
use divvy_nvml::NvmlDriver;
use serde::Serialize;

/// There is no GPU, or no driver, on this machine.
const NO_GPU: u8 = 3;

/// Looks at a real NVIDIA GPU as divvy does, without changing it.
#[derive(Debug, Parser)]
#[command(name = "divvy-hardware", version)]
struct Args {
    /// Where the driver is installed; the known places are tried if left out
    #[arg(long, value_name = "FOLDER")]
    driver_root: Option<PathBuf>,
    /// The NVML library; found in the driver root if left out
    #[arg(long, value_name = "FILE")]
    nvml_library: Option<PathBuf>,
    /// Write what was read into this folder, to be used as fixtures
    #[arg(long, value_name = "FOLDER")]
    capture: Option<PathBuf>,
    /// Stop after what only reads: no claim, no CUDA program
    #[arg(long)]
    read_only: bool,
    /// Root of the host's /proc, /sys and /dev (tests)
    #[arg(long, hide = true, value_name = "FOLDER", default_value = "/")]
    host_root: PathBuf,
    /// Table of device nodes (tests)
    #[arg(long, hide = true, value_name = "FILE")]
    device_nodes: Option<PathBuf>,
    /// Run as the program in the claim's container (used by this program itself)
    #[arg(long, hide = true, value_name = "FILE")]
    inside: Option<PathBuf>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let outcome = match &args.inside {
        Some(container) => apply::inside(container).map(|()| ExitCode::SUCCESS),
        None => run(&args),
    };
    outcome.unwrap_or_else(|error| {
        say(&format!("FAILED: {error:#}"));
        ExitCode::FAILURE
    })
}

fn run(args: &Args) -> Result<ExitCode> {
    let host = HostRoot::under(&args.host_root);
    let opened = open(args, &host);
    let (library, driver) = match opened {
        Ok(opened) => opened,
        Err(why) => {
            say(&format!("there is no NVIDIA GPU that can be used on this machine: {why:#}"));
            return Ok(ExitCode::from(NO_GPU));
        }
    };
    let topology = |address| divvy_host::topology(&host, address).unwrap_or_default();
    let inventory = divvy_nvml::read_inventory(&driver, &topology).context("the GPUs cannot be read")?;
    if inventory.gpus.is_empty() {
        say("there is no NVIDIA GPU on this machine: the driver lists none");
        return Ok(ExitCode::from(NO_GPU));
    }
    let gpus: BTreeMap<_, _> = inventory.gpus.iter().map(|(uuid, gpu)| (uuid.to_string(), gpu)).collect();
    let read = serde_json::json!({ "system": inventory.system, "gpus": gpus });
    capture(args.capture.as_deref(), "inventory", &read)?;
    for (uuid, gpu) in &inventory.gpus {
        say(&format!("{uuid}: {} (driver {})", gpu.facts.product_name, inventory.system.driver_version));
    }
    let problems: Vec<_> = inventory.problems.iter().map(|problem| problem.error.to_string()).collect();
    report("every GPU can be read", &problems)?;
    let broken: Vec<_> = conformance(&driver, &Expect::default()).into_iter().map(|v| v.0).collect();
    capture(args.capture.as_deref(), "conformance", &broken)?;
    report("the driver keeps the contract of the simulator", &broken)?;
    if args.read_only {
        return Ok(ExitCode::SUCCESS);
    }
    match idle(&inventory, &driver) {
        None => say("NOT TRIED: a claim, since every GPU has MIG mode on or is in use"),
        Some(uuid) => {
            let _tls = rustls::crypto::ring::default_provider().install_default();
            let prepared = claim::prepared(args, &library, &uuid)?;
            capture(args.capture.as_deref(), "cdi", &prepared.cdi)?;
            say(&format!("ok: a claim of {uuid} was prepared by the node plugin"));
            let seen = apply::run(&prepared.cdi);
            let let_go = prepared.let_go();
            say(&format!("ok: {}", seen?));
            let_go?;
            say("ok: and it was let go without a trace");
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn open(args: &Args, host: &HostRoot) -> Result<(PathBuf, NvmlDriver)> {
    let library = match &args.nvml_library {
        Some(path) => path.clone(),
        None => divvy_host::find_driver(host, args.driver_root.as_deref())?.nvml_library,
    };
    let driver = NvmlDriver::open(Some(&library))?;
    Ok((library, driver))
}

/// A GPU that nobody uses and that can be had whole without a change.
fn idle(inventory: &Inventory, driver: &NvmlDriver) -> Option<divvy_model::GpuUuid> {
    let free = |uuid: &divvy_model::GpuUuid| driver.processes(uuid).is_ok_and(|found| found.is_empty());
    let whole = inventory.gpus.iter().filter(|(_, gpu)| !gpu.facts.mig_mode.is_on());
    whole.map(|(uuid, _)| uuid).find(|uuid| free(uuid)).cloned()
}

fn report(what: &str, broken: &[String]) -> Result<()> {
    anyhow::ensure!(broken.is_empty(), "not so: {what}: {}", broken.join("; "));
    say(&format!("ok: {what}"));
    Ok(())
}

fn capture(folder: Option<&Path>, name: &str, what: &impl Serialize) -> Result<()> {
    let Some(folder) = folder else { return Ok(()) };
    fs_err::create_dir_all(folder)?;
    fs_err::write(folder.join(format!("{name}.json")), serde_json::to_vec_pretty(what)?)?;
    Ok(())
}

fn say(line: &str) {
    use std::io::Write;
    // Nobody listens: nothing to be done about it.
    let _written = writeln!(std::io::stdout(), "{line}");
}
