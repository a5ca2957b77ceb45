//! Vitals and events through NVML's C ABI, against the mock library.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use divvy_gpu_sim::{Fault, SimNode};
use divvy_model::health::{
    FabricState, GpuEvent, GpuEventKind, GpuEvents, GpuVitals, RecoveryAction, RowRemap,
};
use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};
use divvy_model::{
    GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuOp, GpuProcess, GpuUuid, MigMode, SystemFacts,
};

use crate::session_tests::until;
use crate::test_library::TestLibrary;
use crate::{NvmlDriver, Session, SessionConfig};

const SOON: Duration = Duration::from_secs(10);

fn xid(gpu: &GpuUuid, number: u32, gpu_instance: Option<u32>) -> GpuEvent {
    GpuEvent {
        gpu: Some(gpu.clone()),
        kind: GpuEventKind::Xid(number),
        gpu_instance: gpu_instance.map(GpuInstanceId),
        compute_instance: gpu_instance.map(|_| ComputeInstanceId(0)),
    }
}

fn send(library: &TestLibrary, gpu: &GpuUuid, number: u32, gpu_instance: Option<u32>) {
    let sent = library
        .state
        .edit(|e| e.send_event(gpu, GpuEventKind::Xid(number), gpu_instance));
    assert!(sent.unwrap());
}

fn events(driver: &dyn GpuDriver, at_most: Duration) -> Vec<GpuEvent> {
    driver.wait_events(at_most).unwrap().events
}

#[test]
fn vitals_are_the_values_that_the_driver_reports() {
    let library = TestLibrary::new("h100x1,t4x1");
    let [h100, t4] = library.uuids().try_into().unwrap();
    let driver = library.open();
    let well = GpuVitals {
        recovery: Some(RecoveryAction::Nothing),
        remap: Some(RowRemap::default()),
        uncorrected_ecc: Some(0),
        fabric: None,
    };
    assert_eq!(
        (driver.vitals(&h100), driver.vitals(&t4)),
        (Ok(well), Ok(well))
    );
    let sick = GpuVitals {
        recovery: Some(RecoveryAction::DrainAndReset),
        remap: Some(RowRemap {
            pending: true,
            failed: true,
        }),
        uncorrected_ecc: Some(3),
        fabric: Some(FabricState {
            state: FabricState::COMPLETED,
            status: 999,
            health: FabricState::UNHEALTHY,
        }),
    };
    library
        .state
        .edit(|e| [&h100, &t4].map(|gpu| e.gpu(gpu).unwrap().vitals = sick))
        .unwrap();
    assert_eq!(driver.vitals(&h100), Ok(sick));
    // Before Ampere pages were retired; whether that failed is not reported.
    let pages = GpuVitals {
        remap: Some(RowRemap {
            pending: true,
            failed: false,
        }),
        ..sick
    };
    assert_eq!(driver.vitals(&t4), Ok(pages));
    library
        .state
        .edit(|e| e.gpu(&h100).unwrap().vitals = GpuVitals::default())
        .unwrap();
    assert_eq!(driver.vitals(&h100), Ok(GpuVitals::default()));
    library
        .state
        .edit(|e| e.gpu(&h100).unwrap().lost = true)
        .unwrap();
    assert_eq!(
        driver.vitals(&h100).unwrap_err().code,
        GpuErrorCode::GPU_IS_LOST
    );
}

/// The summary of a fabric's health came with version 3 of the struct.
#[test]
fn the_state_of_the_fabric_is_read_in_every_version() {
    let unhealthy = FabricState {
        health: FabricState::UNHEALTHY,
        ..FabricState::READY
    };
    let starting = FabricState {
        state: FabricState::IN_PROGRESS,
        status: 0,
        health: 0,
    };
    let newer = ["nvmlDeviceGetGpuFabricInfoV"];
    let all = ["nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetGpuFabricInfo"];
    for (without, health) in [(&[][..], 2), (&newer[..], 0)] {
        let library = TestLibrary::without("h100x1", without);
        let gpu = library.uuids().remove(0);
        let driver = library.open();
        assert_eq!(driver.vitals(&gpu).unwrap().fabric, None);
        let set = |fabric| {
            let set = library.state.edit(|e| e.set_fabric(&gpu, Some(fabric)));
            set.unwrap().unwrap();
            driver.vitals(&gpu).unwrap().fabric.unwrap()
        };
        assert_eq!(set(starting), starting);
        assert_eq!(set(unhealthy).health, health);
    }
    let library = TestLibrary::without("h100x1", &all);
    let gpu = library.uuids().remove(0);
    let set = library.state.edit(|e| e.set_fabric(&gpu, Some(starting)));
    set.unwrap().unwrap();
    assert_eq!(library.open().vitals(&gpu).unwrap().fabric, None);
}

#[test]
fn old_libraries_leave_out_values_that_they_do_not_report() {
    let old = [
        "nvmlDeviceGetRemappedRows",
        "nvmlDeviceGetFieldValues",
        "nvmlEventSetFree",
    ];
    let library = TestLibrary::without("h100x1", &old);
    let driver = library.open();
    let gpu = library.uuids().remove(0);
    let reported = GpuVitals {
        recovery: None,
        remap: None,
        uncorrected_ecc: Some(0),
        fabric: None,
    };
    assert_eq!(driver.vitals(&gpu), Ok(reported));
    assert_eq!(
        driver.wait_events(SOON).unwrap_err().code,
        GpuErrorCode::FUNCTION_NOT_FOUND
    );
}

#[test]
fn each_event_since_the_first_wait_is_reported_once() {
    let library = TestLibrary::new("h100x2");
    let [one, two] = library.uuids().try_into().unwrap();
    let driver = library.open();
    send(&library, &one, 48, None);
    assert_eq!(
        events(&driver, Duration::ZERO),
        [],
        "before the first watch"
    );
    send(&library, &one, 79, None);
    send(&library, &two, 95, Some(9));
    assert_eq!(
        events(&driver, SOON),
        [xid(&one, 79, None), xid(&two, 95, Some(9))]
    );
    assert_eq!(events(&driver, Duration::from_millis(20)), []);
    // Also of a GPU that no longer reports anything.
    library
        .state
        .edit(|e| e.gpu(&one).unwrap().lost = true)
        .unwrap();
    send(&library, &one, 79, None);
    assert_eq!(events(&driver, SOON), [xid(&one, 79, None)]);
}

#[test]
fn events_are_watched_anew_after_a_change_of_mig_mode_and_by_each_session() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let other = library.open();
    assert_eq!(events(&driver, Duration::ZERO), []);
    assert_eq!(events(&other, Duration::ZERO), []);
    driver.set_mig_mode(&gpu, true).unwrap();
    assert_eq!(events(&driver, Duration::ZERO), []);
    send(&library, &gpu, 31, None);
    assert_eq!(events(&driver, SOON), [xid(&gpu, 31, None)]);
    drop(driver);
    assert_eq!(events(&other, SOON), [xid(&gpu, 31, None)]);
}

#[test]
fn a_gpu_whose_registration_fails_disturbs_no_other() {
    let library = TestLibrary::new("h100x2");
    let [one, two] = library.uuids().try_into().unwrap();
    let fault = Fault::fail(GpuErrorCode::UNKNOWN)
        .of(GpuOp::Events)
        .on(&one);
    library.state.edit(|e| e.set_fault(fault)).unwrap();
    let driver = library.open();
    let unmonitored = || driver.wait_events(Duration::ZERO).unwrap().unmonitored;
    assert_eq!(unmonitored(), [(one.clone(), GpuErrorCode::UNKNOWN)].into());
    send(&library, &two, 95, None);
    assert_eq!(events(&driver, SOON), [xid(&two, 95, None)]);
    library.state.edit(|e| e.clear_faults(None)).unwrap();
    until("the GPU that is watched again", || unmonitored().is_empty());
    send(&library, &one, 79, None);
    assert_eq!(events(&driver, SOON), [xid(&one, 79, None)]);
}

#[test]
fn a_failed_wait_loses_no_event_and_other_calls_are_served_meanwhile() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let path = library.path();
    let session = Session::new(SessionConfig::default(), move || {
        NvmlDriver::open(Some(&path))
    });
    assert_eq!(events(&session, Duration::ZERO), []);
    send(&library, &gpu, 48, None);
    let fault = Fault::fail(GpuErrorCode::UNKNOWN)
        .of(GpuOp::Events)
        .times(1);
    library.state.edit(|e| e.set_fault(fault)).unwrap();
    assert_eq!(
        session.wait_events(SOON).unwrap_err().code,
        GpuErrorCode::UNKNOWN
    );
    assert_eq!(events(&session, SOON), [xid(&gpu, 48, None)]);

    let waiter = session.clone();
    let waiting = std::thread::spawn(move || waiter.wait_events(SOON));
    let began = Instant::now();
    while !waiting.is_finished() {
        session.facts(&gpu).unwrap();
    }
    assert!(began.elapsed() < SOON, "a session is not held by one wait");
    assert_eq!(waiting.join().unwrap().unwrap().events, []);
}

/// A driver that reports when a call waits for events, and is not counted any more once it is
/// closed.
struct Waited {
    driver: NvmlDriver,
    is_waiting: Arc<AtomicBool>,
    _is_open: IsOpen,
}

struct IsOpen(Arc<AtomicUsize>);

impl Drop for IsOpen {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl GpuDriver for Waited {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        self.driver.system()
    }
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        self.driver.list()
    }
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        self.driver.facts(gpu)
    }
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.driver.mig_mode(gpu)
    }
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        self.driver.processes(gpu)
    }
    fn wait_events(&self, at_most: Duration) -> Result<GpuEvents, GpuError> {
        self.is_waiting.store(true, Ordering::SeqCst);
        self.driver.wait_events(at_most)
    }
}

#[test]
fn a_session_is_not_reopened_while_a_call_waits_for_its_events() {
    let library = TestLibrary::new("h100x1");
    let (path, gpu) = (library.path(), library.uuids().remove(0));
    let is_waiting = Arc::new(AtomicBool::new(false));
    let found_open = Arc::new(Mutex::new(Vec::new()));
    let (waits, found, open) = (
        is_waiting.clone(),
        found_open.clone(),
        Arc::new(AtomicUsize::new(0)),
    );
    let session = Session::new(SessionConfig::default(), move || {
        found.lock().unwrap().push(open.load(Ordering::SeqCst));
        let driver = NvmlDriver::open(Some(&path))?;
        open.fetch_add(1, Ordering::SeqCst);
        Ok(Waited {
            driver,
            is_waiting: waits.clone(),
            _is_open: IsOpen(open.clone()),
        })
    });
    session.facts(&gpu).unwrap();
    let waiter = session.clone();
    let waiting = std::thread::spawn(move || waiter.wait_events(SOON));
    until("the wait", || is_waiting.load(Ordering::SeqCst));
    session.reset();
    session.facts(&gpu).unwrap();
    assert_eq!(
        *found_open.lock().unwrap(),
        [0, 0],
        "the library was shut down in between"
    );
    assert_eq!(waiting.join().unwrap().unwrap().events, []);
}

#[test]
fn simulated_gpus_report_events_to_each_session_from_its_beginning_on() {
    let sim = SimNode::parse("h100x1").unwrap();
    let gpu = sim.uuids().remove(0);
    let early = sim.clone();
    sim.send_event(&gpu, GpuEventKind::Xid(13), None);
    let late = sim.clone();
    assert_eq!(events(&early, SOON), [xid(&gpu, 13, None)]);
    assert_eq!(
        (
            events(&early, Duration::ZERO),
            events(&late, Duration::ZERO)
        ),
        (vec![], vec![])
    );
    let sender = sim.clone();
    let to = gpu.clone();
    let sending =
        std::thread::spawn(move || sender.send_event(&to, GpuEventKind::Xid(43), Some(7)));
    let began = Instant::now();
    assert_eq!(events(&late, SOON), [xid(&gpu, 43, Some(7))]);
    assert!(
        sending.join().unwrap() && began.elapsed() < SOON,
        "a wait ends with the first event"
    );
    sim.edit(|e| e.set_driver_loaded(false));
    assert_eq!(
        late.wait_events(SOON).unwrap_err().code,
        GpuErrorCode::DRIVER_NOT_LOADED
    );
}

/// A GPU may have been unbound for the change, and then its old registration hears nothing.
#[test]
fn a_change_of_mig_mode_renews_the_event_set() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let sets = || {
        let calls = |function| driver.library.trial.calls(function);
        (calls("nvmlEventSetCreate"), calls("nvmlEventSetFree"))
    };
    assert_eq!(events(&driver, Duration::ZERO), []);
    // One to try the registration out, one that stays.
    assert_eq!(sets(), (2, 1));
    assert_eq!(events(&driver, Duration::ZERO), []);
    assert_eq!(sets(), (2, 1));
    driver.set_mig_mode(&gpu, true).unwrap();
    assert_eq!(events(&driver, Duration::ZERO), []);
    assert_eq!(sets(), (4, 3));
    // Also where the change failed: it may have got as far as that.
    let trial = &driver.library.trial;
    trial.fail_once_in("nvmlDeviceSetMigMode", 0, GpuErrorCode::UNKNOWN);
    driver.set_mig_mode(&gpu, false).unwrap_err();
    assert_eq!(events(&driver, Duration::ZERO), []);
    assert_eq!(sets(), (6, 5));
}

#[test]
fn events_before_a_failure_are_reported_and_those_after_it_are_not_lost() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    assert_eq!(events(&driver, Duration::ZERO), []);
    for number in [48, 79] {
        send(&library, &gpu, number, None);
    }
    let trial = &driver.library.trial;
    trial.fail_once_in("nvmlEventSetWait_v2", 1, GpuErrorCode::UNKNOWN);
    assert_eq!(events(&driver, SOON), [xid(&gpu, 48, None)]);
    assert_eq!(events(&driver, SOON), [xid(&gpu, 79, None)]);
}

#[test]
fn a_flood_of_events_is_taken_in_parts() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    assert_eq!(events(&driver, Duration::ZERO), []);
    for _ in 0..100 {
        send(&library, &gpu, 31, None);
    }
    let parts = [SOON, SOON].map(|at_most| events(&driver, at_most).len());
    assert_eq!(parts, [64, 36]);
}

/// A GPU that says once that it has no events may have them later: the answer was odd.
#[test]
fn a_gpu_without_events_is_asked_again() {
    let library = TestLibrary::new("h100x1");
    let gpu = library.uuids().remove(0);
    let driver = library.open();
    let trial = &driver.library.trial;
    let asked = "nvmlDeviceGetSupportedEventTypes";
    trial.fail_once_in(asked, 0, GpuErrorCode::NOT_SUPPORTED);
    let unmonitored = || driver.wait_events(Duration::ZERO).unwrap().unmonitored;
    assert_eq!(unmonitored(), [(gpu, GpuErrorCode::NOT_SUPPORTED)].into());
    until("the GPU that is watched", || unmonitored().is_empty());
}
