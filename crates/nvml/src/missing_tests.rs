//! Libraries that lack functions, as those of older drivers do.

use divvy_model::{
    ComputeMode, GpuDriver, GpuError, GpuErrorCode, GpuOp, GpuUuid, HostTopology, chain,
};

use crate::test_library::TestLibrary;
use crate::{NvmlDriver, read_inventory};

/// Functions that NVIDIA's libraries of older drivers lack, by `cargo xtask nvidia`.
const OLD_LACKS: [(&str, &[&str]); 2] = [
    (
        "450.248.02",
        &[
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "nvmlDeviceGetAddressingMode",
            "nvmlDeviceGetC2cModeInfoV",
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGpuFabricInfo",
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
            "nvmlDeviceGetGpuInstanceProfileInfoV",
            "nvmlDeviceGetMPSComputeRunningProcesses_v2",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetMemoryLimits_v1",
            "nvmlDeviceGetModuleId",
            "nvmlDeviceGetNumGpuCores",
            "nvmlDeviceGetNvLinkRemoteDeviceType",
            "nvmlDeviceSetMemoryLimits_v1",
            "nvmlGpmMetricsGet",
            "nvmlGpmMigSampleGet",
            "nvmlGpmQueryDeviceSupport",
            "nvmlGpmSampleAlloc",
            "nvmlGpmSampleFree",
            "nvmlGpmSampleGet",
        ],
    ),
    (
        "470.256.02",
        &[
            "nvmlDeviceGetAddressingMode",
            "nvmlDeviceGetC2cModeInfoV",
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetGpuFabricInfo",
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetGpuInstanceProfileInfoV",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetMemoryLimits_v1",
            "nvmlDeviceGetModuleId",
            "nvmlDeviceGetNumGpuCores",
            "nvmlDeviceSetMemoryLimits_v1",
            "nvmlGpmMetricsGet",
            "nvmlGpmMigSampleGet",
            "nvmlGpmQueryDeviceSupport",
            "nvmlGpmSampleAlloc",
            "nvmlGpmSampleFree",
            "nvmlGpmSampleGet",
        ],
    ),
];

/// Makes each kind of call. Returns the errors.
fn errors_of_all_calls(driver: &NvmlDriver, gpu: &GpuUuid) -> Vec<GpuError> {
    let mut errors = Vec::new();
    let mut note = |done: Result<(), GpuError>| errors.extend(done.err());
    note(driver.system().map(drop));
    note(driver.facts(gpu).map(drop));
    note(driver.vitals(gpu).map(drop));
    note(driver.processes(gpu).map(drop));
    note(driver.persistence_mode(gpu).map(drop));
    note(driver.set_mig_mode(gpu, true).map(drop));
    let read = read_inventory(driver, &|_| HostTopology::default());
    let problems = read.map(|inventory| inventory.problems);
    match problems {
        Ok(problems) => problems.into_iter().for_each(|one| note(Err(one.error))),
        Err(error) => note(Err(error)),
    }
    match driver.mig_capabilities(gpu) {
        Err(error) => note(Err(error)),
        Ok(capabilities) => {
            // The rest is the same calls again.
            for profile in capabilities.profiles().iter().take(1) {
                let at = profile.placements[0];
                let made = driver.create_gpu_instance(gpu, profile.id, at);
                note(made.as_ref().map(drop).map_err(Clone::clone));
                let Ok(made) = made else { continue };
                note(driver.gpu_instances(gpu).map(drop));
                let offered = driver.compute_profiles(gpu, made.id);
                note(offered.as_ref().map(drop).map_err(Clone::clone));
                for offered in offered.unwrap_or_default() {
                    let compute = driver.create_compute_instance(gpu, made.id, offered.id);
                    note(compute.as_ref().map(drop).map_err(Clone::clone));
                    if let Ok(compute) = compute {
                        note(driver.compute_instances(gpu, made.id).map(drop));
                        note(driver.destroy_compute_instance(gpu, made.id, compute.id));
                    }
                }
                note(driver.destroy_gpu_instance(gpu, made.id));
            }
        }
    }
    note(driver.set_mig_mode(gpu, false).map(drop));
    note(driver.set_compute_mode(gpu, ComputeMode::Default));
    errors
}

/// Each in turn, and all that NVIDIA's older libraries lack. The mock library is that of a driver
/// that has them all.
#[test]
fn a_function_that_a_library_lacks_is_named_and_none_panics() {
    let mut all: Vec<(String, Vec<&str>)> = OLD_LACKS
        .iter()
        .map(|(version, lacks)| ((*version).to_owned(), lacks.to_vec()))
        .collect();
    for symbol in GpuOp::ALL.iter().flat_map(|op| nvidia_ml::symbols(*op)) {
        all.push(((*symbol).to_owned(), vec![symbol]));
    }
    // What comes after the first error may follow from it. A GPU whose MIG mode cannot be asked for
    // has no MIG.
    let unrelated = |errors: Vec<GpuError>, lacks: &[&str]| {
        let first = errors.first();
        let first = first.filter(|error| error.code != GpuErrorCode::NOT_SUPPORTED);
        let first = first.map(|error| chain(error));
        first.filter(|text| !lacks.iter().any(|name| text.contains(*name)))
    };
    for (name, lacks) in all {
        let library = TestLibrary::without("h100x1", &lacks);
        let gpu = library.uuids().remove(0);
        let errors = match NvmlDriver::open(Some(&library.path())) {
            Ok(driver) => errors_of_all_calls(&driver, &gpu),
            Err(error) => vec![error],
        };
        assert_eq!(unrelated(errors, &lacks), None, "without {name}");
    }
}
