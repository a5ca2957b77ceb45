//! Vitals and events through NVML's C ABI, against the mock library.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use divvy_gpu_sim::{Fault, SimNode};
use divvy_model::health::{GpuEvent, GpuEventKind, GpuEvents, GpuVitals, RecoveryAction, RowRemap};
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
    let sent = library.state.edit(|e| e.send_event(gpu, GpuEventKind::Xid(number), gpu_instance));
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
    };
    assert_eq!((driver.vitals(&h100), driver.vitals(&t4)), (Ok(well), Ok(well)));
    let sick = GpuVitals {
        recovery: Some(RecoveryAction::DrainAndReset),
        remap: Some(RowRemap { pending: true, failed: true }),
        uncorrected_ecc: Some(3),
    };
    library.state.edit(|e| [&h100, &t4].map(|gpu| e.gpu(gpu).unwrap().vitals = sick)).unwrap();
    assert_eq!(driver.vitals(&h100), Ok(sick));
    // Before Ampere pages were retired; whether that failed is not reported.
    let pages = GpuVitals { remap: Some(RowRemap { pending: true, failed: false }), ..sick };
    assert_eq!(driver.vitals(&t4), Ok(pages));
    library.state.edit(|e| e.gpu(&h100).unwrap().vitals = GpuVitals::default()).unwrap();
    assert_eq!(driver.vitals(&h100), Ok(GpuVitals::default()));
    library.state.edit(|e| e.gpu(&h100).unwrap().lost = true).unwrap();
    assert_eq!(driver.vitals(&h100).unwrap_err().code, GpuErrorCode::GPU_IS_LOST);
}

#[test]
fn old_libraries_leave_out_values_that_they_do_not_report() {
    let old = ["nvmlDeviceGetRemappedRows", "nvmlDeviceGetFieldValues", "nvmlEventSetFree"];
    let library = TestLibrary::without("h100x1", &old);
    let driver = library.open();
    let gpu = library.uuids().remove(0);
    let reported = GpuVitals { recovery: None, remap: None, uncorrected_ecc: Some(0) };
    assert_eq!(driver.vitals(&gpu), Ok(reported));
    assert_eq!(driver.wait_events(SOON).unwrap_err().code, GpuErrorCode::FUNCTION_NOT_FOUND);
}

#[test]
fn each_event_since_the_first_wait_is_reported_once_with_its_gpu_and_instance() {
    let library = TestLibrary::new("h100x2");
    let [one, two] = library.uuids().try_into().unwrap();
    let driver = library.open();
    send(&library, &one, 48, None);
    assert_eq!(events(&driver, Duration::ZERO), [], "before the first watch");
    send(&library, &one, 79, None);
    send(&library, &two, 95, Some(9));
    assert_eq!(events(&driver, SOON), [xid(&one, 79, None), xid(&two, 95, Some(9))]);
    assert_eq!(events(&driver, Duration::from_millis(20)), []);
    // Also of a GPU that no longer reports anything.
    library.state.edit(|e| e.gpu(&one).unwrap().lost = true).unwrap();
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
fn a_gpu_whose_registration_fails_disturbs_no_other_and_is_heard_once_it_works() {
    let library = TestLibrary::new("h100x2");
    let [one, two] = library.uuids().try_into().unwrap();
    let fault = Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::Events).on(&one);
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
    let session = Session::new(SessionConfig::default(), move || NvmlDriver::open(Some(&path)));
    assert_eq!(events(&session, Duration::ZERO), []);
    send(&library, &gpu, 48, None);
    let fault = Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::Events).times(1);
    library.state.edit(|e| e.set_fault(fault)).unwrap();
    assert_eq!(session.wait_events(SOON).unwrap_err().code, GpuErrorCode::UNKNOWN);
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

/// A driver that reports when a call waits for events, and is not counted any more once it is closed.
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
fn a_session_is_not_opened_again_while_a_call_still_waits_for_events_on_the_old_one() {
    let library = TestLibrary::new("h100x1");
    let (path, gpu) = (library.path(), library.uuids().remove(0));
    let is_waiting = Arc::new(AtomicBool::new(false));
    let found_open = Arc::new(Mutex::new(Vec::new()));
    let (waits, found, open) = (is_waiting.clone(), found_open.clone(), Arc::new(AtomicUsize::new(0)));
    let session = Session::new(SessionConfig::default(), move || {
        found.lock().unwrap().push(open.load(Ordering::SeqCst));
        let driver = NvmlDriver::open(Some(&path))?;
        open.fetch_add(1, Ordering::SeqCst);
        Ok(Waited { driver, is_waiting: waits.clone(), _is_open: IsOpen(open.clone()) })
    });
    session.facts(&gpu).unwrap();
    let waiter = session.clone();
    let waiting = std::thread::spawn(move || waiter.wait_events(SOON));
    until("the wait", || is_waiting.load(Ordering::SeqCst));
    session.reset();
    session.facts(&gpu).unwrap();
    assert_eq!(*found_open.lock().unwrap(), [0, 0], "the library was shut down in between");
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
    assert_eq!((events(&early, Duration::ZERO), events(&late, Duration::ZERO)), (vec![], vec![]));
    let sender = sim.clone();
    let to = gpu.clone();
    let sending = std::thread::spawn(move || sender.send_event(&to, GpuEventKind::Xid(43), Some(7)));
    let began = Instant::now();
    assert_eq!(events(&late, SOON), [xid(&gpu, 43, Some(7))]);
    assert!(sending.join().unwrap() && began.elapsed() < SOON, "a wait ends with the first event");
    sim.edit(|e| e.set_driver_loaded(false));
    assert_eq!(late.wait_events(SOON).unwrap_err().code, GpuErrorCode::DRIVER_NOT_LOADED);
}
