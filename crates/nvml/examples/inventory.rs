//! Reads this machine's GPUs and prints them as JSON, with the conformance checks that fail. The
//! check to run on real hardware: `cargo run -p divvy-nvml --example inventory [LIBRARY]`. Exits
//! with 1 if a check fails.
#![expect(clippy::print_stdout, reason = "printing is what it is for")]

use std::path::PathBuf;
use std::process::ExitCode;

use divvy_conformance::{Expect, conformance};
use divvy_model::{GpuDriver, HostTopology, peculiarities};
use divvy_nvml::{NvmlDriver, Session, SessionConfig, read_inventory};
use serde_json::{Value, json};

fn main() -> ExitCode {
    let library = std::env::args_os().nth(1).map(PathBuf::from);
    let session = Session::new(SessionConfig::default(), move || {
        NvmlDriver::open(library.as_deref())
    });
    let report = report(&session);
    println!("{report:#}");
    let clean = report
        .get("violations")
        .is_some_and(|v| v.as_array().is_some_and(Vec::is_empty));
    if clean {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn report(driver: &dyn GpuDriver) -> Value {
    let inventory = match read_inventory(driver, &|_| HostTopology::default()) {
        Ok(inventory) => inventory,
        Err(error) => return json!({ "error": error.to_string() }),
    };
    let violations: Vec<String> = conformance(driver, &Expect::default())
        .into_iter()
        .map(|v| v.0)
        .collect();
    let processes = |gpu| match driver.processes(gpu) {
        Ok(processes) => json!(processes),
        Err(error) => json!(error.to_string()),
    };
    let gpus: Vec<Value> = inventory
        .gpus
        .iter()
        .map(|(uuid, gpu)| json!({ "facts": gpu.facts, "processes": processes(uuid) }))
        .collect();
    json!({
        "violations": violations,
        "peculiarities": peculiarities(driver),
        "system": inventory.system,
        "gpus": gpus,
        "problems": inventory.problems.iter().map(|p| p.error.to_string()).collect::<Vec<_>>(),
        "nvlinkDomains": inventory.nvlink_domains(),
        "nvlinkPairs": inventory.nvlink_pairs(),
    })
}
