//! MIG through NVML's C ABI, against the mock library.

use std::sync::Arc;
use std::time::Duration;

use divvy_conformance::{Expect, conformance, mig_conformance};
use divvy_gpu_sim::{Fault, MIG_BOARDS};
use divvy_model::mig::{GpuInstanceProfile, GpuInstanceProfileId, MigCapabilities, Placement};
use divvy_model::{CudaVersion, GpuDriver, GpuErrorCode, GpuOp, GpuUuid, MigActivation, MigMode};

use crate::ffi::trial::WRITES_NOTHING;
use crate::session_tests::until;
use crate::test_library::TestLibrary;
use crate::{NvmlDriver, Session, SessionConfig};

const P1G: GpuInstanceProfileId = GpuInstanceProfileId(19);

fn at(start: u32) -> Placement {
    Placement { start, size: 1 }
}

/// A library with one GPU, MIG mode on.
fn with_mig(board: &str, without: &[&str]) -> (TestLibrary, GpuUuid) {
    let library = TestLibrary::without(board, without);
    let gpu = library.uuids().remove(0);
    let mode = MigMode::Supported {
        current: true,
        pending: true,
    };
    library
        .state
        .edit(|e| e.gpu(&gpu).unwrap().facts.mig_mode = mode)
        .unwrap();
    (library, gpu)
}

/// Boards of each shape pass the MIG conformance checks and report what the engine knows.
#[test]
fn boards_of_each_shape_pass_the_mig_conformance_checks() {
    for board in ["a30x1", "h100x1", "b200x1", "rtx-pro-6000x1"] {
        let (library, gpu) = with_mig(board, &[]);
        let driver = library.open();
        assert_eq!(mig_conformance(&driver, &gpu), [], "{board}");
    }
    for board in MIG_BOARDS {
        let (library, gpu) = with_mig(board, &[]);
        let driver = library.open();
        let engine_says = |library: &TestLibrary| {
            library
                .state
                .read()
                .unwrap()
                .mig_capabilities(&gpu)
                .unwrap()
        };
        assert_eq!(
            driver.mig_capabilities(&gpu).unwrap(),
            engine_says(&library),
            "{board}"
        );
        let (profile, start) = (engine_says(&library).profiles()[0].id, 0);
        library
            .state
            .edit(|e| e.make_foreign_instance(&gpu, profile, start))
            .unwrap()
            .unwrap();
        assert_eq!(
            conformance(&driver, &Expect::default()),
            [],
            "{board}, with an instance"
        );
    }
}

#[test]
fn mig_mode_is_toggled_and_the_result_is_reported() {
    let library = TestLibrary::new("a100-40x1,h100x1");
    let [a100, h100] = library.uuids().try_into().unwrap();
    let driver = library.open();
    assert_eq!(mig_conformance(&driver, &h100), [], "from MIG mode off");
    let pending = MigActivation::Pending;
    assert_eq!(
        driver.set_mig_mode(&a100, true).unwrap(),
        pending(GpuErrorCode::RESET_REQUIRED)
    );
    assert_eq!(
        driver.mig_mode(&a100).unwrap(),
        MigMode::Supported {
            current: false,
            pending: true
        }
    );
    library
        .state
        .edit(|e| e.gpu(&h100).unwrap().clients.insert("dcgm".to_owned()))
        .unwrap();
    assert_eq!(
        driver.set_mig_mode(&h100, true).unwrap(),
        pending(GpuErrorCode::IN_USE)
    );
    assert!(!driver.mig_mode(&h100).unwrap().is_on());
}

/// The same, as reported by a driver without names.
fn without_names(caps: &MigCapabilities) -> MigCapabilities {
    let profiles = caps.profiles().iter().cloned();
    MigCapabilities::new(
        caps.memory_bytes,
        profiles.map(|p| GpuInstanceProfile {
            driver_name: None,
            ..p
        }),
    )
}

#[test]
fn older_drivers_report_profiles_as_well_as_they_can() {
    // Without the newer call, and without the field: the version of the driver decides.
    let old = [
        "nvmlDeviceGetGpuInstanceProfileInfoV",
        "nvmlDeviceGetFieldValues",
    ];
    let library = TestLibrary::without("h100x1", &old);
    let gpu = library.uuids().remove(0);
    let engine_says = library
        .state
        .read()
        .unwrap()
        .mig_capabilities(&gpu)
        .unwrap();
    let driver = library.open();
    assert_eq!(
        driver.mig_capabilities(&gpu).unwrap(),
        without_names(&engine_says)
    );

    let set_version = |library: &TestLibrary| {
        library.state.edit(|e| {
            e.set_driver_version(
                "535.161.08",
                CudaVersion {
                    major: 12,
                    minor: 2,
                },
            );
        })
    };
    set_version(&library).unwrap();
    assert_eq!(
        driver.mig_capabilities(&gpu).unwrap_err().to_string(),
        format!(
            "NVML mig_capabilities failed on {gpu}: NOT_SUPPORTED (3) (this driver reports MIG profiles only with \
             MIG mode on)"
        )
    );
    assert_eq!(
        driver.gpu_instances(&gpu).unwrap_err().code,
        GpuErrorCode::NOT_SUPPORTED
    );
    assert_eq!(conformance(&driver, &Expect::default()), []);
    driver.set_mig_mode(&gpu, true).unwrap();
    assert_eq!(
        driver.mig_capabilities(&gpu).unwrap(),
        without_names(&engine_says)
    );
    assert_eq!(driver.gpu_instances(&gpu).unwrap(), []);
}

#[test]
fn a_gpu_without_mig_can_be_cut_into_nothing() {
    let library = TestLibrary::new("l4x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let codes = [
        driver.mig_capabilities(&gpu).unwrap_err().code,
        driver.set_mig_mode(&gpu, true).unwrap_err().code,
        driver.gpu_instances(&gpu).unwrap_err().code,
        driver
            .create_gpu_instance(&gpu, P1G, at(0))
            .unwrap_err()
            .code,
    ];
    assert_eq!(codes, [GpuErrorCode::NOT_SUPPORTED; 4]);
}

#[test]
fn a_call_the_library_lacks_is_named_and_the_others_work() {
    let (library, gpu) = with_mig(
        "h100x1",
        &[
            "nvmlDeviceCreateGpuInstanceWithPlacement",
            "nvmlComputeInstanceDestroy",
        ],
    );
    let driver = library.open();
    assert_eq!(
        driver
            .create_gpu_instance(&gpu, P1G, at(0))
            .unwrap_err()
            .to_string(),
        format!(
            "NVML create_gpu_instance failed on {gpu}: FUNCTION_NOT_FOUND (13) (the library has no \
             nvmlDeviceCreateGpuInstanceWithPlacement: the driver is too old)"
        )
    );
    let made = library
        .state
        .edit(|e| e.make_foreign_instance(&gpu, P1G, 0))
        .unwrap()
        .unwrap();
    assert_eq!(
        driver.compute_instances(&gpu, made.gpu_instance).unwrap(),
        std::slice::from_ref(&made)
    );
    let destroy = driver.destroy_compute_instance(&gpu, made.gpu_instance, made.id);
    assert_eq!(destroy.unwrap_err().code, GpuErrorCode::FUNCTION_NOT_FOUND);
}

#[test]
fn an_instance_is_in_use_while_its_processes_run() {
    let (library, gpu) = with_mig("h100x1", &[]);
    let driver = library.open();
    let made = library
        .state
        .edit(|e| e.make_foreign_instance(&gpu, P1G, 6))
        .unwrap()
        .unwrap();
    let process = divvy_model::GpuProcess::new(42, Some(made.gpu_instance.0));
    library
        .state
        .edit(|e| e.gpu(&gpu).unwrap().processes.insert(process.clone()))
        .unwrap();
    assert_eq!(driver.processes(&gpu).unwrap(), [process]);
    let destroy = || driver.destroy_compute_instance(&gpu, made.gpu_instance, made.id);
    assert_eq!(destroy().unwrap_err().code, GpuErrorCode::IN_USE);
    library.state.edit(|e| e.end_process(42)).unwrap();
    destroy().unwrap();
    assert_eq!(destroy().unwrap_err().code, GpuErrorCode::NOT_FOUND);
}

#[test]
fn a_call_past_its_deadline_may_have_had_its_effect_or_have_it_later() {
    let (library, gpu) = with_mig("h100x1", &[]);
    let path = library.path();
    let config = SessionConfig {
        deadline: Duration::from_millis(300),
        ..SessionConfig::default()
    };
    let session = Session::new(config, move || NvmlDriver::open(Some(&path)));
    // Another user of the library, whose calls have no deadline.
    let other = library.open();
    let living = || {
        let living = other.gpu_instances(&gpu).unwrap();
        living.iter().map(|i| i.placement.start).collect::<Vec<_>>()
    };
    assert_eq!(living(), [] as [u32; 0]);
    let create = |start| {
        session
            .create_gpu_instance(&gpu, P1G, at(start))
            .map_err(|e| e.code)
    };
    let set = |fault: Fault| {
        let fault = fault.of(GpuOp::CreateGpuInstance).times(1);
        library.state.edit(|e| e.set_fault(fault)).unwrap();
    };
    let release = || library.state.edit(|e| e.release(None)).unwrap();

    set(Fault::hang_after());
    assert_eq!(create(0), Err(GpuErrorCode::TIMEOUT));
    until("the effect before the hang", || living() == [0]);
    assert_eq!(session.hanging().len(), 1);
    release();
    until("the late answer", || session.hanging().is_empty());

    set(Fault::hang());
    assert_eq!(create(1), Err(GpuErrorCode::TIMEOUT));
    assert_eq!(living(), [0]);
    assert_eq!(
        create(2),
        Err(GpuErrorCode::TIMEOUT),
        "nothing is created past a call that hangs"
    );
    release();
    until("the effect after the caller's timeout", || {
        living() == [0, 1] && session.hanging().is_empty()
    });
}

/// A code such as `INSUFFICIENT_RESOURCES` of the question would read as "nothing was made".
#[test]
fn an_instance_that_was_made_and_cannot_be_read_is_no_refusal() {
    let (library, gpu) = with_mig("h100x1", &[]);
    let driver = library.open();
    let trial = &driver.library.trial;
    let refusal = GpuErrorCode::INSUFFICIENT_RESOURCES;
    trial.fail_once_in("nvmlGpuInstanceGetInfo", 0, refusal);
    let error = driver.create_gpu_instance(&gpu, P1G, at(0)).unwrap_err();
    assert_eq!(error.code, GpuErrorCode::UNKNOWN);
    let [made] = driver.gpu_instances(&gpu).unwrap()[..] else {
        panic!("the GPU instance lives");
    };
    let whole = divvy_model::mig::ComputeInstanceProfileId(0);
    trial.fail_once_in("nvmlComputeInstanceGetInfo_v2", 0, refusal);
    let error = driver
        .create_compute_instance(&gpu, made.id, whole)
        .unwrap_err();
    assert_eq!(error.code, GpuErrorCode::UNKNOWN);
    assert_eq!(driver.compute_instances(&gpu, made.id).unwrap().len(), 1);
}

#[test]
fn a_compute_instance_without_a_mig_device_is_an_error_and_no_null_handle() {
    let (library, gpu) = with_mig("h100x1", &[]);
    let profile = divvy_model::mig::GpuInstanceProfileId(19);
    let made = library
        .state
        .edit(|e| e.make_foreign_instance(&gpu, profile, 0))
        .unwrap()
        .unwrap();
    let driver = library.open();
    let trial = &driver.library.trial;
    trial.fail_in("nvmlComputeInstanceGetInfo_v2", 0, 3, WRITES_NOTHING);
    let error = driver
        .compute_instances(&gpu, made.gpu_instance)
        .unwrap_err();
    assert_eq!(error.code, GpuErrorCode::UNKNOWN);
    let detail = error.detail.unwrap_or_default();
    let why = "a compute instance has no MIG device";
    assert!(detail.contains(why), "{detail}");
    let found = driver.compute_instances(&gpu, made.gpu_instance).unwrap();
    assert_eq!(found, [made]);
}

#[test]
fn a_change_is_never_made_twice_by_a_session() {
    let (library, gpu) = with_mig("h100x1", &[]);
    let path = library.path();
    let session = Session::new(SessionConfig::default(), move || {
        NvmlDriver::open(Some(&path))
    });
    let fault = Fault::fail_after(GpuErrorCode::UNINITIALIZED)
        .of(GpuOp::CreateGpuInstance)
        .times(1);
    library.state.edit(|e| e.set_fault(fault)).unwrap();
    let create = session
        .create_gpu_instance(&gpu, P1G, at(4))
        .map_err(|e| e.code);
    assert_eq!(
        create,
        Err(GpuErrorCode::UNINITIALIZED),
        "not INSUFFICIENT_RESOURCES from a second try"
    );
    assert_eq!(session.gpu_instances(&gpu).unwrap().len(), 1);
}

#[test]
fn instances_outlive_the_session_that_made_them() {
    let (library, gpu) = with_mig("h100x1", &[]);
    let driver = Arc::new(library.open());
    let made = driver.create_gpu_instance(&gpu, P1G, at(3)).unwrap();
    drop(driver);
    let driver = library.open();
    assert_eq!(driver.gpu_instances(&gpu).unwrap(), [made]);
    driver.destroy_gpu_instance(&gpu, made.id).unwrap();
}
