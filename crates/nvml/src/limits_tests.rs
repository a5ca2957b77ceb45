//! Limits of memory through NVML's C ABI, over real folders in the place of control groups.

use std::path::Path;

use divvy_gpu_sim::{LimitBackend, SimGroup};
use divvy_model::{GpuDriver, GpuErrorCode, MemoryCaps};
use nvidia_ml::GENERATIONS;
use tempfile::TempDir;

use crate::test_library::TestLibrary;

const GIB: u64 = 1 << 30;

/// A library of a driver.
pub(crate) fn library(version: &str, boards: &str) -> TestLibrary {
    let driver = GENERATIONS.iter().find(|driver| driver.version == version);
    TestLibrary::of(*driver.unwrap(), boards)
}

/// A hierarchy with a pod and its container.
pub(crate) fn groups(controllers: &str) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let leaf = root.path().join("pod/container");
    fs_err::create_dir_all(&leaf).unwrap();
    for folder in leaf.ancestors().take(3) {
        fs_err::write(folder.join("cgroup.controllers"), controllers).unwrap();
    }
    root
}

#[test]
fn drivers_from_r615_on_limit_the_memory_of_groups() {
    for (version, expected) in [
        ("610.10.01", MemoryCaps::OldDriver),
        ("615.71.09", MemoryCaps::Available),
        ("620.10.01", MemoryCaps::Available),
    ] {
        let library = library(version, "h100x1");
        let driver = library.open();
        assert_eq!(driver.system().unwrap().memory_caps, expected, "{version}");
        let groups = groups("misc");
        let set = driver.set_memory_limit(&library.uuids()[0], &groups.path().join("pod"), None);
        let code = set.err().map(|error| error.code);
        let missing =
            (expected == MemoryCaps::OldDriver).then_some(GpuErrorCode::FUNCTION_NOT_FOUND);
        assert_eq!(code, missing, "{version}");
    }
}

#[test]
fn a_limit_is_set_read_and_holds_the_programs_of_its_group() {
    for backend in [LimitBackend::Misc, LimitBackend::Dmem] {
        let library = library("615.71.09", "h100x1");
        let gpu = &library.uuids()[0];
        let controllers = match backend {
            LimitBackend::Misc => "cpu misc",
            LimitBackend::Dmem => "cpu dmem misc",
        };
        library.state.edit(|e| e.limits.backend = backend).unwrap();
        let driver = library.open();
        let root = groups(controllers);
        let pod = root.path().join("pod");
        driver.set_memory_limit(gpu, &pod, Some(2 * GIB)).unwrap();
        let allocate = |bytes| {
            let chain = SimGroup::chain(&pod.join("container")).unwrap();
            let done = library.state.edit(|e| e.allocate(gpu, &chain, bytes));
            done.unwrap()
        };
        assert_eq!(allocate(GIB), Ok(()), "{backend:?}");
        assert_eq!(allocate(2 * GIB), Err(GpuErrorCode::MEMORY), "{backend:?}");
        let limit = driver.memory_limit(gpu, &pod).unwrap();
        assert_eq!(
            (limit.hard, limit.used),
            (Some(2 * GIB), GIB),
            "{backend:?}"
        );
        // A group that is not there, and the root.
        let code = |path: &Path| {
            let set = driver.set_memory_limit(gpu, path, Some(GIB));
            set.unwrap_err().code
        };
        assert_eq!(code(&pod.join("gone")), GpuErrorCode::OPERATING_SYSTEM);
        assert_eq!(code(root.path()), GpuErrorCode::NOT_SUPPORTED);
        driver.set_memory_limit(gpu, &pod, None).unwrap();
        assert_eq!(driver.memory_limit(gpu, &pod).unwrap().hard, None);
    }
}
