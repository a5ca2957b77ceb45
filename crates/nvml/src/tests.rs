//! The driver against the mock library, through NVML's C ABI. Sessions: `session_tests.rs`.

use std::time::Duration;

use divvy_conformance::{Expect, conformance};
use divvy_gpu_sim::Fault;
use divvy_model::mig::{GpuInstanceProfileId, Placement};
use divvy_model::{
    Architecture, ComputeMode, FabricFacts, GpuDriver, GpuErrorCode, GpuFacts, GpuOp, GpuProcess,
    HostTopology, MigMode, NvLinkPeer,
};
use nvml_wrapper::Nvml;

use crate::test_library::TestLibrary;
use crate::{NvmlDriver, read_inventory};

/// Every fact through the C ABI is the engine's own.
fn assert_same_facts(library: &TestLibrary) {
    let engine = library.state.read().unwrap();
    let driver = library.open();
    let read: Vec<GpuFacts> = driver
        .list()
        .unwrap()
        .iter()
        .map(|u| driver.facts(u).unwrap())
        .collect();
    let engine_says: Vec<GpuFacts> = engine.gpus().iter().map(|g| engine.facts_of(g)).collect();
    assert_eq!(read, engine_says);
    assert_eq!(driver.system().unwrap(), engine.system);
}

#[test]
fn the_mock_library_passes_the_conformance_checks_and_reports_all_facts() {
    for gpus in [
        "h100x2",
        "h100-nvlx4,l4x2,t4x1",
        "a100-40x4,a30x2",
        "h100x16",
        "none",
    ] {
        let library = TestLibrary::new(gpus);
        let expect = Expect {
            gpus: Some(library.uuids().len()),
            driver_version: Some("580.95.05".to_owned()),
            product_names: None,
        };
        assert_eq!(conformance(&library.open(), &expect), [], "{gpus}");
        assert_same_facts(&library);
    }
}

#[test]
fn facts_that_a_board_has_or_lacks_come_through() {
    let library = TestLibrary::new("h100x1,l4x1");
    let uuids = library.uuids();
    library
        .state
        .edit(|e| {
            let h100 = &mut e.gpu(&uuids[0]).unwrap().facts;
            h100.architecture = Architecture::from_nvml(11);
            h100.addressing_mode = Some("ATS".to_owned());
            h100.c2c = Some(true);
            h100.compute_mode = Some(ComputeMode::ExclusiveProcess);
            h100.mig_mode = MigMode::Supported {
                current: true,
                pending: false,
            };
            h100.fabric = Some(FabricFacts {
                cluster_uuid: "0f0e0d0c-0b0a-0908-0706-050403020100".to_owned(),
                clique_id: 32766,
            });
            let l4 = &mut e.gpu(&uuids[1]).unwrap().facts;
            l4.minor = None;
            l4.memory_bytes = None;
            l4.addressing_mode = None;
            l4.c2c = Some(false);
            l4.compute_mode = None;
            l4.multiprocessors = None;
            l4.pci_address.domain = 0x0001_0000;
        })
        .unwrap();
    let driver = library.open();
    assert_eq!(
        driver.facts(&uuids[0]).unwrap().multiprocessors,
        None,
        "NVML counts no cores in MIG mode"
    );
    let off = MigMode::Supported {
        current: false,
        pending: false,
    };
    library
        .state
        .edit(|e| e.gpu(&uuids[0]).unwrap().facts.mig_mode = off)
        .unwrap();
    assert_same_facts(&library);
}

#[test]
fn an_old_drivers_library_still_gives_what_it_has() {
    let library = TestLibrary::without(
        "h100x2",
        &[
            "nvmlDeviceGetAddressingMode",
            "nvmlDeviceGetC2cModeInfoV",
            "nvmlDeviceGetPersistenceMode",
            "nvmlDeviceGetModuleId",
            "nvmlDeviceGetComputeMode",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetGpuFabricInfoV",
            "nvmlDeviceGetNvLinkRemoteDeviceType",
            "nvmlDeviceGetArchitecture",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
            "nvmlDeviceGetMigMode",
        ],
    );
    let fabric = FabricFacts {
        cluster_uuid: "0f0e0d0c-0b0a-0908-0706-050403020100".to_owned(),
        clique_id: 1,
    };
    let uuids = library.uuids();
    library
        .state
        .edit(|e| {
            let facts = &mut e.gpu(&uuids[0]).unwrap().facts;
            (facts.fabric, facts.c2c) = (Some(fabric), Some(true));
        })
        .unwrap();
    let engine = library.state.read().unwrap();
    let full = engine.facts_of(&engine.gpus()[0]);
    let driver = library.open();
    assert_eq!(
        driver.facts(&uuids[0]).unwrap(),
        GpuFacts {
            memory_reserved_bytes: None,
            addressing_mode: None,
            c2c: None,
            persistence: None,
            module_id: None,
            compute_mode: None,
            architecture: Architecture::Unknown(u32::MAX),
            nvlinks: vec![NvLinkPeer::Other(0xff); 18],
            mig_mode: MigMode::Unsupported,
            ..full
        }
    );
    assert_eq!(driver.processes(&uuids[0]).unwrap(), []);
}

#[test]
fn a_symbol_that_cannot_be_done_without_is_named() {
    let library = TestLibrary::without("h100x1", &["nvmlDeviceGetName", "nvmlShutdown"]);
    let driver = library.open();
    let uuid = library.uuids().remove(0);
    assert_eq!(
        driver.facts(&uuid).unwrap_err().to_string(),
        format!(
            "NVML facts failed on {uuid}: FUNCTION_NOT_FOUND (13) (the library has no nvmlDeviceGetName: the \
             driver is too old)"
        )
    );
    drop(driver); // without nvmlShutdown: left open, no panic

    let library = TestLibrary::without("h100x1", &["nvmlInit_v2"]);
    assert_eq!(
        NvmlDriver::open(Some(&library.path()))
            .unwrap_err()
            .to_string(),
        "NVML init failed: FUNCTION_NOT_FOUND (13) (the library has no nvmlInit_v2: the driver is too old)"
    );
}

#[test]
fn a_library_that_is_not_there_is_named_with_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libnvidia-ml.so.1");
    let message = NvmlDriver::open(Some(&path)).unwrap_err().to_string();
    assert_eq!(
        message,
        format!(
            "NVML init failed: LIBRARY_NOT_FOUND (12) ({}: cannot open shared object file: No such file or \
             directory; check --driver-root and --nvml-library)",
            path.display()
        )
    );
}

#[test]
fn codes_come_through_raw_those_the_wrapper_does_not_know_too() {
    let library = TestLibrary::new("h100x1");
    let uuid = library.uuids().remove(0);
    let driver = library.open();
    for code in (1..=31).chain([999, 4711]).map(GpuErrorCode) {
        // The driver is asked again on a fresh handle after some codes: both calls fail.
        let fault = Fault::fail(code).of(GpuOp::Processes);
        library.state.edit(|e| e.set_fault(fault)).unwrap();
        let error = driver.processes(&uuid).unwrap_err();
        assert_eq!(
            (error.op, error.code, error.gpu),
            (GpuOp::Processes, code, Some(uuid.clone()))
        );
        library.state.edit(|e| e.clear_faults(None)).unwrap();
    }
    drop(driver);
    for code in [9, 18, 23, 27, 999, 4711].map(GpuErrorCode) {
        library
            .state
            .edit(|e| e.set_fault(Fault::fail(code).of(GpuOp::Init).times(1)))
            .unwrap();
        assert_eq!(
            NvmlDriver::open(Some(&library.path())).unwrap_err().code,
            code
        );
    }
}

#[test]
fn each_fault_meets_its_operation_once_a_call() {
    let library = crate::limits_tests::library("615.71.09", "h100x2");
    let uuids = library.uuids();
    let driver = library.open();
    let gpu = &uuids[0];
    let groups = crate::limits_tests::groups("misc");
    let pod = groups.path().join("pod");
    driver
        .set_memory_limit(&uuids[1], &pod, Some(1 << 30))
        .unwrap();
    driver.set_mig_mode(gpu, true).unwrap();
    let living = library
        .state
        .edit(|e| e.make_foreign_instance(gpu, GpuInstanceProfileId(19), 0))
        .unwrap()
        .unwrap();
    let at = |start| Placement { start, size: 1 };
    let [empty, open] = [1, 3].map(|n| {
        driver
            .create_gpu_instance(gpu, GpuInstanceProfileId(19), at(n))
            .unwrap()
            .id
    });
    let fails = |op: GpuOp| -> Vec<bool> {
        if op == GpuOp::Events {
            // The first wait registers every GPU, each of which could meet the fault.
            driver.wait_events(Duration::ZERO).unwrap();
        }
        // What can be left out is an error only where everything else would be, too.
        let code = match op {
            GpuOp::MigCapabilities | GpuOp::Vitals => GpuErrorCode::GPU_IS_LOST,
            _ => GpuErrorCode::UNKNOWN,
        };
        library
            .state
            .edit(|e| e.set_fault(Fault::fail(code).of(op).times(1)))
            .unwrap();
        let failed = (0..2).map(|_| match op {
            GpuOp::Init => NvmlDriver::open(Some(&library.path())).is_err(),
            GpuOp::System => driver.system().is_err(),
            GpuOp::List => driver.list().is_err(),
            GpuOp::Facts => driver.facts(&uuids[0]).is_err(),
            GpuOp::MigMode => driver.mig_mode(&uuids[0]).is_err(),
            GpuOp::PersistenceMode => driver.persistence_mode(gpu).is_err(),
            GpuOp::Processes => driver.processes(gpu).is_err(),
            GpuOp::MigCapabilities => driver.mig_capabilities(gpu).is_err(),
            GpuOp::SetMigMode => driver.set_mig_mode(gpu, true).is_err(),
            GpuOp::SetComputeMode => driver.set_compute_mode(gpu, ComputeMode::Default).is_err(),
            GpuOp::GpuInstances => driver.gpu_instances(gpu).is_err(),
            GpuOp::CreateGpuInstance => driver
                .create_gpu_instance(gpu, GpuInstanceProfileId(19), at(2))
                .is_err(),
            GpuOp::DestroyGpuInstance => driver.destroy_gpu_instance(gpu, empty).is_err(),
            GpuOp::ComputeProfiles => driver.compute_profiles(gpu, living.gpu_instance).is_err(),
            GpuOp::ComputeInstances => driver.compute_instances(gpu, living.gpu_instance).is_err(),
            GpuOp::CreateComputeInstance => driver
                .create_compute_instance(gpu, open, living.profile)
                .is_err(),
            GpuOp::DestroyComputeInstance => driver
                .destroy_compute_instance(gpu, living.gpu_instance, living.id)
                .is_err(),
            GpuOp::Vitals => driver.vitals(gpu).is_err(),
            GpuOp::Events => driver.wait_events(Duration::ZERO).is_err(),
            GpuOp::Memory => driver.memory(&uuids[1], None).is_err(),
            GpuOp::Utilization => driver.utilization(&uuids[1]).is_err(),
            GpuOp::ProcessUtilization => driver.process_utilization(&uuids[1], 0).is_err(),
            GpuOp::SmUtilization => driver.sm_utilization(&uuids[1], None).is_err(),
            GpuOp::MemoryLimit => driver.memory_limit(&uuids[1], &pod).is_err(),
            GpuOp::SetMemoryLimit => driver
                .set_memory_limit(&uuids[1], &pod, Some(1 << 30))
                .is_err(),
        });
        failed.collect()
    };
    for op in GpuOp::ALL {
        assert_eq!(fails(op), [true, false], "{op:?}");
    }
}

#[test]
fn gpus_that_are_lost_removed_or_added_while_running_are_seen() {
    let library = TestLibrary::new("h100x3");
    let uuids = library.uuids();
    let driver = library.open();
    assert_eq!(driver.list().unwrap(), uuids);

    library
        .state
        .edit(|e| e.gpu(&uuids[1]).unwrap().lost = true)
        .unwrap();
    assert_eq!(driver.list().unwrap(), [uuids[0].clone(), uuids[2].clone()]);
    assert_eq!(driver.left_out(), [(1, GpuErrorCode::GPU_IS_LOST)]);
    assert_eq!(
        driver.facts(&uuids[1]).unwrap_err().code,
        GpuErrorCode::GPU_IS_LOST
    );

    library.state.edit(|e| e.remove_gpu(&uuids[1])).unwrap();
    assert_eq!(
        driver.facts(&uuids[1]).unwrap_err().code,
        GpuErrorCode::NOT_FOUND
    );

    let added = library
        .state
        .edit(|e| e.add_gpu(divvy_gpu_sim::profile("h100").unwrap()))
        .unwrap()
        .unwrap();
    assert_eq!(
        driver.list().unwrap(),
        [uuids[0].clone(), added.clone(), uuids[2].clone()]
    );
    assert_eq!(driver.facts(&added).unwrap().uuid, added);

    library.state.edit(|e| e.set_driver_loaded(false)).unwrap();
    assert_eq!(
        driver.list().unwrap_err().code,
        GpuErrorCode::DRIVER_NOT_LOADED
    );
    assert_eq!(
        NvmlDriver::open(Some(&library.path()))
            .unwrap_err()
            .to_string(),
        "NVML init failed: DRIVER_NOT_LOADED (9) (the NVIDIA kernel module is not loaded)"
    );
}

#[test]
fn more_processes_than_asked_room_for_are_all_listed() {
    let library = TestLibrary::new("h100x1");
    let uuid = library.uuids().remove(0);
    let processes: Vec<GpuProcess> = (1..=100)
        .map(|pid| GpuProcess::new(pid, (pid % 2 == 0).then_some(pid % 7)))
        .collect();
    let expected = processes.clone();
    library
        .state
        .edit(|e| e.gpu(&uuid).unwrap().processes.extend(processes))
        .unwrap();
    assert_eq!(library.open().processes(&uuid).unwrap(), expected);
}

#[test]
fn an_inventory_has_one_bad_gpu_as_a_problem_and_the_others_in_full() {
    let library = TestLibrary::new("h100x3");
    let uuids = library.uuids();
    let fault = Fault::fail(GpuErrorCode::UNKNOWN)
        .of(GpuOp::Facts)
        .on(&uuids[1]);
    library.state.edit(|e| e.set_fault(fault)).unwrap();
    let engine = library.state.read().unwrap();
    let driver = library.open();
    let topology = engine.topology();
    let inventory = read_inventory(&driver, &|pci| {
        topology.get(&pci).cloned().unwrap_or_default()
    })
    .unwrap();
    let mut expected = engine.inventory();
    expected.gpus.remove(&uuids[1]);
    expected.with_mig.remove(&uuids[1]);
    expected.problems = inventory.problems.clone();
    assert_eq!(inventory, expected);
    assert_eq!(
        inventory.problems[0].error.to_string(),
        format!("NVML facts failed on {}: UNKNOWN (999)", uuids[1])
    );

    library.state.edit(|e| e.set_driver_loaded(false)).unwrap();
    let error = read_inventory(&driver, &|_| HostTopology::default()).unwrap_err();
    assert_eq!(error.code, GpuErrorCode::DRIVER_NOT_LOADED);
}

#[test]
fn mig_profiles_are_kept_while_they_are_not_reported_by_the_same_driver() {
    let sim = divvy_gpu_sim::SimNode::parse("h100x1").unwrap();
    let uuid = sim.uuids().remove(0);
    let nowhere = |_| HostTopology::default();
    let read = |before: Option<&divvy_model::Inventory>| {
        let inventory = crate::read_inventory_after(&sim, &nowhere, before).unwrap();
        (
            inventory.gpus[&uuid].mig.clone(),
            sim.calls(GpuOp::MigCapabilities),
            inventory,
        )
    };
    let (first, calls, inventory) = read(None);
    assert_eq!(
        (first.as_ref().map(|mig| mig.instances.clone()), calls),
        (Some(Some(Vec::new())), 1)
    );
    sim.fault(Fault::fail(GpuErrorCode::NOT_SUPPORTED).of(GpuOp::MigCapabilities));
    assert_eq!(
        read(Some(&inventory)),
        (first.clone(), 2, inventory.clone())
    );

    sim.set_mig_mode(&uuid, true).unwrap();
    let made = sim
        .create_gpu_instance(
            &uuid,
            divvy_model::mig::GpuInstanceProfileId(19),
            divvy_model::mig::Placement { start: 3, size: 1 },
        )
        .unwrap();
    let (with_one, _, inventory) = read(Some(&inventory));
    assert_eq!(with_one.as_ref().unwrap().instances, Some(vec![made]));
    sim.fault(Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::GpuInstances));
    assert_eq!(
        read(Some(&inventory)).0,
        with_one,
        "what was known is not forgotten"
    );

    sim.edit(|e| {
        e.set_driver_version(
            "590.10.01",
            divvy_model::CudaVersion {
                major: 13,
                minor: 1,
            },
        );
    });
    let (unknown, calls, _) = read(Some(&inventory));
    assert_eq!(
        (unknown, calls),
        (None, 5),
        "another driver may have others"
    );
}

#[test]
fn the_wrappers_own_safe_methods_read_the_mock_too() {
    let library = TestLibrary::new("h100-nvlx2");
    let path = library.path();
    let nvml = Nvml::builder().lib_path(path.as_os_str()).init().unwrap();
    assert_eq!(nvml.device_count().unwrap(), 2);
    let device = nvml.device_by_uuid(library.uuids()[1].as_str()).unwrap();
    assert_eq!(device.index().unwrap(), 1);
    assert_eq!(device.name().unwrap(), "NVIDIA H100 NVL");
    assert_eq!(device.memory_info().unwrap().total, 100_485_038_080);
    assert_eq!(device.pci_info().unwrap().bus_id, "00000000:2A:00.0");
    assert_eq!(device.num_cores().unwrap(), 16896);
    assert_eq!(
        nvml.device_by_pci_bus_id("00000000:2A:00.0")
            .unwrap()
            .uuid()
            .unwrap(),
        library.uuids()[1].as_str()
    );
}
