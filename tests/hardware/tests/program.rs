//! The program as it is called: on a machine without a GPU, and with the mock library in the place of a real one.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::path::PathBuf;
use std::process::{Command, Output};

use divvy_host::fixture::{Fixture, FixtureGpu};

fn hardware(args: &[&str], env: &[(&str, &str)]) -> Output {
    let program = env!("CARGO_BIN_EXE_divvy-hardware");
    Command::new(program).args(args).env_clear().envs(env.iter().copied()).output().unwrap()
}

/// The mock library, which cargo puts beside this test.
fn library() -> PathBuf {
    std::env::current_exe().unwrap().with_file_name("libnvidia_ml.so")
}

#[test]
fn without_a_gpu_it_says_so_and_exits_with_3() {
    let empty = tempfile::tempdir().unwrap();
    let out = hardware(&["--driver-root", empty.path().to_str().unwrap()], &[]);
    let said = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(3), "{said}");
    assert!(
        said.starts_with(
            "there is no NVIDIA GPU that can be used on this machine: no usable NVIDIA driver found"
        ),
        "{said}"
    );
}

#[test]
fn what_only_reads_runs_on_any_nvml_and_becomes_fixtures() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let library = library();
    let args = ["--nvml-library", library.to_str().unwrap(), "--read-only", "--capture", &at("captured")];
    let env = [("DIVVY_MOCK_STATE", at("gpus.json")), ("DIVVY_MOCK_GPUS", "h100x2".to_owned())];
    let env: Vec<_> = env.iter().map(|(name, value)| (*name, value.as_str())).collect();
    let out = hardware(&args, &env);
    let said = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success(), "{said}");
    assert!(said.contains("ok: the driver keeps the contract of the simulator"), "{said}");
    let inventory: serde_json::Value =
        serde_json::from_slice(&fs_err::read(folder.path().join("captured/inventory.json")).unwrap())
            .unwrap();
    assert_eq!(inventory["gpus"].as_object().unwrap().len(), 2);
}

#[test]
fn a_claim_is_prepared_its_files_are_applied_and_what_cuda_says_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let host = folder.path().join("host");
    let sim = divvy_gpu_sim::SimNode::parse("l4x1").unwrap().inventory();
    let gpus = sim.gpus.values().map(|gpu| FixtureGpu {
        minor: gpu.facts.minor.unwrap(),
        pci: gpu.facts.pci_address,
        numa_node: None,
        pcie_root: "pci0000:00".to_owned(),
    });
    // Its libcuda is a library that has no functions: how far the program gets without a GPU.
    let made = Fixture::new(gpus.collect()).build(&host).unwrap();
    let text = |path: &std::path::Path| path.to_str().unwrap().to_owned();
    let (library, state) = (text(&library()), text(&folder.path().join("gpus.json")));
    let (host, nodes) = (text(&host), text(&made.node_table));
    let args =
        ["--nvml-library", &library, "--driver-root", &host, "--host-root", &host, "--device-nodes", &nodes];
    let out = hardware(&args, &[("DIVVY_MOCK_STATE", &state), ("DIVVY_MOCK_GPUS", "l4x1")]);
    let said = String::from_utf8(out.stdout).unwrap();
    assert_eq!(out.status.code(), Some(1), "{said}");
    assert!(said.contains(" was prepared by the node plugin\n"), "{said}");
    let end = "FAILED: the program in the container: FAILED: cuInit is not in libcuda";
    assert!(said.lines().last().unwrap().starts_with(end), "{said}");
}
