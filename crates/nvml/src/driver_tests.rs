//! Drivers that answer oddly, or not as the newest does.

use divvy_gpu_sim::{Engine, Fault};
use divvy_model::health::GpuVitals;
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp, GpuProcess, HostTopology, Inventory, MigMode};
use nvidia_ml::GENERATIONS;

use crate::test_library::TestLibrary;
use crate::{read_inventory, read_inventory_after};

/// Questions that a GPU is usable without.
const UNIMPORTANT: [&str; 21] = [
    "nvmlSystemGetNVMLVersion",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetBrand",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetNumGpuCores",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetModuleId",
    "nvmlDeviceGetAddressingMode",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetGpuFabricInfoV",
    "nvmlDeviceGetGpuFabricInfo",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetGpuInstanceProfileInfoV",
    "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetTotalEccErrors",
];

const ODD: [GpuErrorCode; 4] = [
    GpuErrorCode::UNKNOWN,
    GpuErrorCode::RESET_REQUIRED,
    GpuErrorCode::LIBRARY_NOT_FOUND,
    GpuErrorCode::TIMEOUT,
];

fn inventory(driver: &dyn GpuDriver) -> Inventory {
    read_inventory(driver, &|_| HostTopology::default()).unwrap()
}

#[test]
fn an_odd_answer_to_an_unimportant_question_takes_no_gpu_out() {
    for function in UNIMPORTANT {
        let library = TestLibrary::answering("h100x2", &[function], GpuErrorCode::UNKNOWN);
        let driver = library.open();
        let seen = inventory(&driver);
        assert_eq!((seen.gpus.len(), seen.problems), (2, vec![]), "{function}");
        assert!(driver.vitals(&library.uuids()[0]).is_ok(), "{function}");
    }
    for code in ODD {
        let library = TestLibrary::answering("h100x2", &UNIMPORTANT[..19], code);
        let driver = library.open();
        let seen = inventory(&driver);
        assert_eq!((seen.gpus.len(), seen.problems), (2, vec![]), "{code}");
        assert_eq!(
            (seen.system.cuda_version, seen.system.nvml_version),
            (None, None),
            "{code}"
        );
        let facts = &seen.gpus[&library.uuids()[0]].facts;
        assert_eq!(
            (facts.minor, facts.memory_bytes, facts.nvlinks.len()),
            (None, None, 0),
            "{code}"
        );
        let (uuid, driver) = (library.uuids().remove(0), &driver);
        let reported = GpuVitals {
            recovery: None,
            ..library.state.read().unwrap().vitals(&uuid).unwrap()
        };
        assert_eq!(driver.vitals(&uuid), Ok(reported), "{code}");
    }
}

#[test]
fn a_gpu_with_odd_answers_about_its_health_does_not_answer() {
    let all = [
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetTotalEccErrors",
    ];
    let library = TestLibrary::answering("h100x1", &all, GpuErrorCode::UNKNOWN);
    let error = library.open().vitals(&library.uuids()[0]).unwrap_err();
    assert_eq!(error.code, GpuErrorCode::UNKNOWN);
}

#[test]
fn codes_that_end_the_session_and_a_lost_gpu_are_always_errors() {
    for (function, code) in [
        ("nvmlDeviceGetBrand", GpuErrorCode::GPU_IS_LOST),
        ("nvmlDeviceGetNvLinkState", GpuErrorCode::UNINITIALIZED),
        ("nvmlDeviceGetModuleId", GpuErrorCode::DRIVER_NOT_LOADED),
        (
            "nvmlDeviceGetMemoryInfo_v2",
            GpuErrorCode::LIB_RM_VERSION_MISMATCH,
        ),
    ] {
        let library = TestLibrary::answering("h100x1", &[function], code);
        assert_eq!(
            library.open().facts(&library.uuids()[0]).unwrap_err().code,
            code,
            "{function}"
        );
    }
}

#[test]
fn a_mig_profile_without_placements_costs_that_profile_only() {
    for code in [GpuErrorCode::INVALID_ARGUMENT, GpuErrorCode::UNKNOWN] {
        let library = TestLibrary::new("h100x1");
        let uuid = library.uuids().remove(0);
        // Field 199, then the first profile's placements.
        let fault = Fault::fail(code).of(GpuOp::MigCapabilities).times(2);
        library.state.edit(|e| e.set_fault(fault)).unwrap();
        let reported = library.open().mig_capabilities(&uuid).unwrap();
        let known = library
            .state
            .read()
            .unwrap()
            .mig_capabilities(&uuid)
            .unwrap();
        assert_eq!(reported.profiles(), &known.profiles()[1..], "{code}");
    }
}

#[test]
fn why_no_mig_profile_can_be_placed_is_said() {
    let placements = ["nvmlDeviceGetGpuInstancePossiblePlacements_v2"];
    let library = TestLibrary::answering("h100x1", &placements, GpuErrorCode::NO_PERMISSION);
    let error = library
        .open()
        .mig_capabilities(&library.uuids()[0])
        .unwrap_err();
    assert_eq!(error.code, GpuErrorCode::NO_PERMISSION);
}

#[test]
fn multiprocessors_stay_known_while_mig_mode_is_on() {
    let library = TestLibrary::new("a100-40x1,h100x1");
    let uuids = library.uuids();
    let driver = library.open();
    let count = |before: Option<&Inventory>| {
        let seen = read_inventory_after(&driver, &|_| HostTopology::default(), before).unwrap();
        (
            uuids
                .iter()
                .map(|uuid| seen.gpus[uuid].facts.multiprocessors)
                .collect::<Vec<_>>(),
            seen,
        )
    };
    let (off, before) = count(None);
    let on = MigMode::Supported {
        current: true,
        pending: true,
    };
    let switch = |e: &mut Engine| {
        for uuid in &uuids {
            e.gpu(uuid).unwrap().facts.mig_mode = on;
        }
    };
    library.state.edit(switch).unwrap();
    assert_eq!(
        (&off[..], count(Some(&before)).0),
        (&[Some(108), Some(132)][..], off.clone())
    );
    assert_eq!(
        count(None).0,
        [Some(98), Some(132)],
        "of the largest profile, where nothing was known"
    );
}

#[test]
fn lists_of_processes_are_read_as_each_driver_writes_them() {
    for driver in GENERATIONS {
        let library = TestLibrary::of(*driver, "h100x1");
        let uuid = library.uuids().remove(0);
        let memory = |pid: u32| (!pid.is_multiple_of(3)).then_some(u64::from(pid) << 30);
        let process = |pid: u32| GpuProcess {
            memory_bytes: memory(pid),
            ..GpuProcess::new(pid, pid.is_multiple_of(2).then_some(7))
        };
        let expected: Vec<_> = (1000..1100).map(process).collect();
        library
            .state
            .edit(|e| e.gpu(&uuid).unwrap().processes.extend(expected.clone()))
            .unwrap();
        assert_eq!(
            library.open().processes(&uuid).unwrap(),
            expected,
            "{}",
            driver.version
        );
    }
    let neither = [
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "nvmlDeviceGetComputeRunningProcesses_v2",
    ];
    let library = TestLibrary::without("h100x1", &neither);
    let error = library
        .open()
        .processes(&library.uuids()[0])
        .unwrap_err()
        .to_string();
    assert!(
        error.ends_with(
            "(the library has no nvmlDeviceGetComputeRunningProcesses_v2: the driver is too old)"
        ),
        "{error}"
    );
}

/// The driver gives a handle to another GPU after one was taken out.
#[test]
fn a_handle_that_is_another_gpus_now_is_looked_up_anew() {
    let library = TestLibrary::new("h100x2");
    let [one, two] = library.uuids().try_into().unwrap();
    let driver = library.open();
    let of = |gpu| driver.facts(gpu).unwrap().pci_address;
    let expected = (of(&one), of(&two));
    assert_ne!(expected.0, expected.1);
    let mut handles = driver.handles.lock().unwrap();
    let others = handles[&two];
    handles.insert(one.clone(), others);
    drop(handles);
    assert_eq!((of(&one), of(&two)), expected);
}

/// Looking a handle up takes the driver seconds, and a lost GPU has none.
#[test]
fn a_lost_gpu_is_not_looked_up_anew() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    driver.facts(&gpu).unwrap();
    let trial = &driver.library.trial;
    let lookups = trial.calls("nvmlDeviceGetHandleByUUID");
    trial.fail_once_in("nvmlDeviceGetUUID", 0, GpuErrorCode::GPU_IS_LOST);
    let error = driver.facts(&gpu).unwrap_err();
    assert_eq!(error.code, GpuErrorCode::GPU_IS_LOST);
    assert_eq!(trial.calls("nvmlDeviceGetHandleByUUID"), lookups);
}
