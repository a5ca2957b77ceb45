//! `divvy inventory` on a machine whose NVML library answers.

use std::error::Error;
use std::path::Path;
use std::process::Command;

use divvy_model::GpuUuid;
use nvidia_ml::MockState;
use serde_json::Value;

/// Returns the exit status of `divvy inventory` with these GPUs, and its answer.
fn inventory(state: &Path) -> Result<(Option<i32>, Value), Box<dyn Error>> {
    // The mock library, which cargo puts beside this test.
    let library = std::env::current_exe()?.with_file_name("libnvidia_ml.so");
    let output = Command::new(env!("CARGO_BIN_EXE_divvy"))
        .args(["inventory", "-o", "json", "--nvml-library"])
        .arg(library)
        .env("DIVVY_MOCK_STATE", state)
        .output()?;
    let answer = serde_json::from_slice(&output.stdout)
        .map_err(|error| format!("{error}: {}", String::from_utf8_lossy(&output.stderr)))?;
    Ok((output.status.code(), answer))
}

/// Returns the names of the GPUs of an answer.
fn names(answer: &Value) -> Vec<&str> {
    let gpus = answer.get("gpus").and_then(Value::as_array).into_iter();
    gpus.flatten()
        .filter_map(|gpu| gpu.get("name")?.as_str())
        .collect()
}

#[test]
fn a_gpu_that_is_lost_is_named_by_its_index() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gpus.json");
    let state = MockState::open_or_create(&path, &"h100x3".parse().unwrap()).unwrap();
    let (code, answer) = inventory(&path).unwrap();
    assert_eq!(code, Some(0), "{answer}");
    assert_eq!(names(&answer), ["gpu-0", "gpu-1", "gpu-2"]);

    let lost: GpuUuid = state.read().unwrap().gpus()[1].facts.uuid.clone();
    state
        .edit(|engine| engine.gpu(&lost).unwrap().lost = true)
        .unwrap();
    let (code, answer) = inventory(&path).unwrap();
    assert_eq!(code, Some(1), "{answer}");
    assert_eq!(names(&answer), ["gpu-0", "gpu-1"]);
    let problems = answer["problems"].to_string();
    assert!(
        problems.contains("GPU at index 1") && problems.contains("may differ from the node's"),
        "{problems}"
    );
}
