//! Deadlines, hanging GPUs, reopening and waiting: on the simulator, where a hang ends when the
//! test says so.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use divvy_conformance::{Expect, conformance, mig_conformance};
use divvy_gpu_sim::{Fault, SimNode};
use divvy_model::mig::GpuInstanceProfileId;
use divvy_model::{
    GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuOp, GpuProcess, GpuUuid, MigMode, SystemFacts,
};

use crate::session::{Session, SessionConfig};
use crate::test_library::TestLibrary;
use crate::{NvmlDriver, wait_for_driver};

const SOON: Duration = Duration::from_secs(10);

fn config(deadline: Duration) -> SessionConfig {
    SessionConfig {
        deadline,
        ..SessionConfig::default()
    }
}

/// A session whose calls may take as long as a loaded test machine needs.
fn patient(sim: &SimNode) -> Session<SimNode> {
    let sim = sim.clone();
    Session::new(config(Duration::from_mins(1)), move || sim.open())
}

/// A session that soon gives up on a call that hangs.
fn hasty(sim: &SimNode) -> Session<SimNode> {
    let sim = sim.clone();
    Session::new(config(Duration::from_secs(2)), move || sim.open())
}

pub(crate) fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = Instant::now() + SOON;
    while !holds() {
        assert!(Instant::now() < deadline, "{what} did not happen");
        thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn a_session_passes_the_conformance_checks() {
    let sim = SimNode::parse("h100x2,l4x1").unwrap();
    let session = patient(&sim);
    assert_eq!(
        conformance(
            &session,
            &Expect {
                gpus: Some(3),
                ..Expect::default()
            }
        ),
        []
    );
    let h100 = sim.uuids().remove(1);
    assert_eq!(mig_conformance(&session, &h100), []);
    let library = TestLibrary::new("h100x2");
    let path = library.path();
    let real = Session::new(SessionConfig::default(), move || {
        NvmlDriver::open(Some(&path))
    });
    assert_eq!(
        conformance(
            &real,
            &Expect {
                gpus: Some(2),
                ..Expect::default()
            }
        ),
        []
    );
}

#[test]
fn a_gpu_that_hangs_times_out_and_the_others_answer() {
    let sim = SimNode::parse("h100x2").unwrap();
    let [bad, good] = sim.uuids().try_into().unwrap();
    let session = hasty(&sim);
    session.system().unwrap();
    let hang = sim.fault(Fault::hang().on(&bad));

    let error = session.facts(&bad).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!("NVML facts failed on {bad}: TIMEOUT (10) (no answer within 2s)")
    );
    assert!(session.facts(&good).is_ok());
    let hanging: Vec<_> = session
        .hanging()
        .into_iter()
        .map(|h| (h.op, h.gpu))
        .collect();
    assert_eq!(hanging, [(GpuOp::Facts, Some(bad.clone()))]);

    // Refused without another thread while the first hangs; other operations get their own.
    let refused = session.facts(&bad).unwrap_err();
    assert_eq!(
        refused.to_string(),
        format!("NVML facts failed on {bad}: TIMEOUT (10) (an earlier call has not returned)")
    );
    assert_eq!(
        session.mig_mode(&bad).unwrap_err().code,
        GpuErrorCode::TIMEOUT
    );
    assert!(sim.wait_until_hanging(2, SOON));
    assert_eq!(
        sim.calls(GpuOp::Facts),
        2,
        "one of the bad GPU, one of the good"
    );

    sim.release(hang);
    until("the hanging calls come back", || {
        session.hanging().is_empty()
    });
    assert!(session.facts(&bad).is_ok());
}

#[test]
fn an_init_that_hangs_and_then_succeeds_is_used_when_it_has() {
    let sim = SimNode::parse("h100x1").unwrap();
    let hang = sim.fault(Fault::hang().of(GpuOp::Init).times(1));
    let session = hasty(&sim);
    assert_eq!(session.system().unwrap_err().code, GpuErrorCode::TIMEOUT);
    sim.release(hang);
    until("the session opens", || session.hanging().is_empty());
    assert!(session.system().is_ok());
    assert_eq!(sim.calls(GpuOp::Init), 1, "opened once, late");
}

#[test]
fn hanging_calls_are_bounded_in_number() {
    let sim = SimNode::parse("h100x4").unwrap();
    let uuids = sim.uuids();
    let opener = sim.clone();
    let config = SessionConfig {
        max_threads: 2,
        ..config(Duration::from_millis(500))
    };
    let session = Session::new(config, move || opener.open());
    sim.fault(Fault::hang().of(GpuOp::Facts));
    for uuid in &uuids[..2] {
        assert_eq!(session.facts(uuid).unwrap_err().code, GpuErrorCode::TIMEOUT);
    }
    assert_eq!(
        session.facts(&uuids[2]).unwrap_err().to_string(),
        format!(
            "NVML facts failed on {}: TIMEOUT (10) (all 2 threads for NVML calls hang)",
            uuids[2]
        )
    );
    sim.clear_faults();
    until("the threads are free again", || {
        session.facts(&uuids[2]).is_ok()
    });
}

#[test]
fn a_dead_session_is_opened_again_within_the_call() {
    let sim = SimNode::parse("h100x1").unwrap();
    let uuid = sim.uuids().remove(0);
    let session = patient(&sim);
    session.facts(&uuid).unwrap();
    for code in [
        GpuErrorCode::UNINITIALIZED,
        GpuErrorCode::DRIVER_NOT_LOADED,
        // The driver was replaced: what this process has loaded no longer fits the module.
        GpuErrorCode::LIB_RM_VERSION_MISMATCH,
    ] {
        let opened = sim.calls(GpuOp::Init);
        sim.fault(Fault::fail(code).of(GpuOp::Facts).times(1));
        assert!(session.facts(&uuid).is_ok(), "{code}");
        assert_eq!(sim.calls(GpuOp::Init), opened + 1, "{code}");
    }
    // Any other code is the caller's affair.
    sim.fault(Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::Facts).times(1));
    assert_eq!(
        session.facts(&uuid).unwrap_err().code,
        GpuErrorCode::UNKNOWN
    );
    // A driver that is unloaded for good is said so, and used again when it is back.
    sim.edit(|e| e.set_driver_loaded(false));
    assert_eq!(
        session.list().unwrap_err().code,
        GpuErrorCode::DRIVER_NOT_LOADED
    );
    sim.edit(|e| e.set_driver_loaded(true));
    assert!(session.list().is_ok());
}

#[test]
fn a_lost_gpu_reopens_only_a_session_that_is_old_enough() {
    let sim = SimNode::parse("h100x2").unwrap();
    let lost = sim.uuids().remove(0);
    sim.lose_gpu(&lost);
    for (reopen_after, opened) in [(Duration::from_hours(1), 1), (Duration::ZERO, 2)] {
        let counter = Arc::new(AtomicUsize::new(0));
        let (opener, count) = (sim.clone(), Arc::clone(&counter));
        let config = SessionConfig {
            reopen_after,
            ..config(SOON)
        };
        let session = Session::new(config, move || {
            count.fetch_add(1, Ordering::Relaxed);
            opener.open()
        });
        assert_eq!(
            session.facts(&lost).unwrap_err().code,
            GpuErrorCode::GPU_IS_LOST
        );
        assert_eq!(counter.load(Ordering::Relaxed), opened, "{reopen_after:?}");
    }
}

#[test]
fn an_unlisted_gpu_reopens_only_a_session_that_is_old_enough() {
    struct Lists(Vec<GpuUuid>);
    impl GpuDriver for Lists {
        fn system(&self) -> Result<SystemFacts, GpuError> {
            unreachable!()
        }
        fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
            Ok(self.0.clone())
        }
        fn facts(&self, _: &GpuUuid) -> Result<GpuFacts, GpuError> {
            unreachable!()
        }
        fn mig_mode(&self, _: &GpuUuid) -> Result<MigMode, GpuError> {
            unreachable!()
        }
        fn processes(&self, _: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
            unreachable!()
        }
    }
    let all = SimNode::parse("h100x2").unwrap().uuids();
    for (reopen_after, again) in [(Duration::from_hours(1), 0), (Duration::ZERO, 1)] {
        let opened = Arc::new(AtomicUsize::new(0));
        let (count, gpus) = (Arc::clone(&opened), all.clone());
        let config = SessionConfig {
            reopen_after,
            ..config(SOON)
        };
        let session = Session::new(config, move || {
            // Both, then one, then (if it is opened once more) both again.
            let n = count.fetch_add(1, Ordering::Relaxed);
            Ok(Lists(if n == 1 {
                gpus[..1].to_vec()
            } else {
                gpus.clone()
            }))
        });
        assert_eq!(session.list().unwrap(), all);
        session.reset();
        let expected = if again == 0 { &all[..1] } else { &all[..] };
        assert_eq!(session.list().unwrap(), expected, "{reopen_after:?}");
        assert_eq!(
            opened.load(Ordering::Relaxed),
            2 + again,
            "{reopen_after:?}"
        );
    }
}

#[test]
fn many_callers_at_once_open_the_driver_once() {
    let sim = SimNode::parse("h100x16").unwrap();
    let session = patient(&sim);
    let uuids = sim.uuids();
    thread::scope(|scope| {
        for uuid in &uuids {
            scope.spawn(|| assert_eq!(session.facts(uuid).unwrap().uuid, *uuid));
        }
    });
    assert_eq!(sim.calls(GpuOp::Init), 1);
    session.reset();
    session.list().unwrap();
    assert_eq!(sim.calls(GpuOp::Init), 2);
}

#[test]
fn waiting_for_the_driver_backs_off_and_ends() {
    let sim = SimNode::parse("h100x1").unwrap();
    sim.edit(|e| e.set_driver_loaded(false));
    let session = patient(&sim);
    let mut waits = Vec::new();
    let found = wait_for_driver(&session, &mut |error, wait| {
        assert_eq!(error.code, GpuErrorCode::DRIVER_NOT_LOADED);
        waits.push(wait.as_millis());
        if waits.len() == 7 {
            sim.edit(|e| e.set_driver_loaded(true));
        }
        ControlFlow::Continue(())
    });
    assert_eq!(found.unwrap(), sim.system().unwrap());
    assert_eq!(waits, [500, 1000, 2000, 4000, 8000, 10_000, 10_000]);

    let nowhere = Session::new(SessionConfig::default(), || {
        NvmlDriver::open(Some("/nowhere/lib.so".as_ref()))
    });
    let error = wait_for_driver(&nowhere, &mut |_, _| ControlFlow::Break(())).unwrap_err();
    assert_eq!(error.code, GpuErrorCode::LIBRARY_NOT_FOUND);
}

#[test]
fn a_library_that_appears_later_is_found() {
    let library = TestLibrary::new("h100x1");
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("libnvidia-ml.so.1");
    let opened = path.clone();
    let session = Session::new(SessionConfig::default(), move || {
        NvmlDriver::open(Some(&opened))
    });
    let mut tries = 0;
    let found = wait_for_driver(&session, &mut |error, _| {
        assert_eq!(error.code, GpuErrorCode::LIBRARY_NOT_FOUND);
        tries += 1;
        fs_err::copy(library.path(), &path).unwrap();
        ControlFlow::Continue(())
    });
    assert_eq!(
        (found.unwrap().driver_version.as_str(), tries),
        ("580.95.05", 1)
    );
}

/// A call that hangs in the library times out and a driver is shut down when it returns.
#[test]
fn a_hanging_call_times_out_and_its_driver_is_shut_down_on_return() {
    let library = TestLibrary::new("h100x2");
    let uuids = library.uuids();
    let path = library.path();
    let session = Session::new(config(Duration::from_secs(2)), move || {
        NvmlDriver::open(Some(&path))
    });
    session.list().unwrap();
    library
        .state
        .edit(|e| e.set_fault(Fault::hang().of(GpuOp::Facts).on(&uuids[0])))
        .unwrap();
    assert_eq!(
        session.facts(&uuids[0]).unwrap_err().code,
        GpuErrorCode::TIMEOUT
    );
    assert!(session.facts(&uuids[1]).is_ok());
    session.reset();
    assert!(
        session.facts(&uuids[1]).is_ok(),
        "a fresh session beside the call that still hangs"
    );
    library.state.edit(|e| e.release(None)).unwrap();
    until("the hanging call comes back", || {
        session.hanging().is_empty()
    });
    assert!(session.facts(&uuids[0]).is_ok());
}

#[test]
fn a_call_that_panics_is_an_error_and_the_session_goes_on() {
    struct Panics;
    impl GpuDriver for Panics {
        fn system(&self) -> Result<SystemFacts, GpuError> {
            panic!("in the driver")
        }
        fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
            Ok(Vec::new())
        }
        fn facts(&self, _: &GpuUuid) -> Result<GpuFacts, GpuError> {
            unreachable!()
        }
        fn mig_mode(&self, _: &GpuUuid) -> Result<MigMode, GpuError> {
            unreachable!()
        }
        fn processes(&self, _: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
            unreachable!()
        }
    }
    let session = Session::new(SessionConfig::default(), || Ok(Panics));
    assert_eq!(
        session.system().unwrap_err().to_string(),
        "NVML system failed: UNKNOWN (999) (the call panicked)"
    );
    assert_eq!(session.list(), Ok(Vec::new()));
}

/// A driver that counts how many of its kind are open.
struct Counted {
    sim: SimNode,
    open: Arc<AtomicUsize>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }
}

impl GpuDriver for Counted {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        self.sim.system()
    }
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        self.sim.list()
    }
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        self.sim.facts(gpu)
    }
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.sim.mig_mode(gpu)
    }
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        self.sim.processes(gpu)
    }
}

/// A driver that is let go is closed by the last call at work and opened by the next.
#[test]
fn a_released_driver_is_closed_by_the_last_call_and_opened_by_the_next() {
    let sim = SimNode::parse("l4x1").unwrap();
    let uuid = sim.uuids().remove(0);
    let open = Arc::new(AtomicUsize::new(0));
    let (behind, count) = (sim.clone(), open.clone());
    let session = Session::new(config(Duration::from_mins(1)), move || {
        count.fetch_add(1, Ordering::SeqCst);
        Ok(Counted {
            sim: behind.open()?,
            open: count.clone(),
        })
    });
    session.release();
    assert_eq!(open.load(Ordering::SeqCst), 0, "not opened to be closed");
    session.list().unwrap();
    let hang = sim.fault(Fault::hang().of(GpuOp::Facts));
    thread::scope(|scope| {
        let call = scope.spawn(|| session.facts(&uuid));
        assert!(sim.wait_until_hanging(1, SOON));
        session.release();
        assert_eq!(open.load(Ordering::SeqCst), 1, "a call is at work");
        sim.release(hang);
        assert!(call.join().unwrap().is_ok(), "and is not cut");
    });
    until("the driver is closed", || open.load(Ordering::SeqCst) == 0);
    sim.clear_faults();
    session.list().unwrap();
    assert_eq!(open.load(Ordering::SeqCst), 1);
}

#[test]
fn a_gpu_that_stays_lost_has_the_session_reopened_less_and_less_often() {
    let sim = SimNode::parse("h100x2").unwrap();
    let lost = sim.uuids().remove(0);
    let (driver, count) = (sim.clone(), Arc::new(AtomicUsize::new(0)));
    let counter = count.clone();
    let config = SessionConfig {
        reopen_after: Duration::from_millis(10),
        ..config(SOON)
    };
    let session = Session::new(config, move || {
        counter.fetch_add(1, Ordering::Relaxed);
        driver.open()
    });
    session.list().unwrap();
    sim.lose_gpu(&lost);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(400) {
        session.facts(&lost).unwrap_err();
    }
    // At 10, 30, 70 and 150 ms, and then every 80; without a pause every 10.
    let (times, most) = (
        count.load(Ordering::Relaxed),
        begun.elapsed().as_millis() / 80 + 6,
    );
    assert!(
        (2..=usize::try_from(most).unwrap()).contains(&times),
        "{times} of {most}"
    );
}

/// Two calls at work when a session dies: the second to say so must not close the session that was
/// opened for the first.
#[test]
fn a_new_session_is_not_forgotten_for_a_late_answer_of_the_old_one() {
    let sim = SimNode::parse("h100x2").unwrap();
    let [one, two] = sim.uuids().try_into().unwrap();
    let session = patient(&sim);
    session.list().unwrap();
    let dies = |gpu: &GpuUuid| {
        let fault = Fault::hang_then_fail(GpuErrorCode::UNINITIALIZED);
        sim.fault(fault.of(GpuOp::Facts).on(gpu).times(1))
    };
    let (first, second) = (dies(&one), dies(&two));
    thread::scope(|scope| {
        let calls = [&one, &two].map(|gpu| scope.spawn(|| session.facts(gpu).is_ok()));
        assert!(sim.wait_until_hanging(2, SOON));
        let [on_one, on_two] = calls;
        sim.release(first);
        assert!(on_one.join().unwrap(), "opened again");
        assert_eq!(sim.calls(GpuOp::Init), 2);
        sim.release(second);
        assert!(on_two.join().unwrap(), "asked once more on what is open");
    });
    assert_eq!(sim.calls(GpuOp::Init), 2);
    session.list().unwrap();
    assert_eq!(sim.calls(GpuOp::Init), 2);
}

/// Without persistence mode the kernel module forgets the instances of a GPU, and on Hopper its MIG
/// mode, when the last program closes it.
#[test]
fn a_lost_gpu_is_not_looked_for_at_the_cost_of_anothers_partitions() {
    for persistent in [true, false] {
        let library = TestLibrary::new("h100x2");
        let path = library.path();
        let [lost, cut] = library.uuids().try_into().unwrap();
        let patience = SessionConfig {
            reopen_after: Duration::ZERO,
            ..SessionConfig::default()
        };
        let session = Session::new(patience, move || NvmlDriver::open(Some(&path)));
        session.set_mig_mode(&cut, true).unwrap();
        library
            .state
            .edit(|e| {
                e.make_foreign_instance(&cut, GpuInstanceProfileId(19), 0)
                    .unwrap();
                e.gpu(&cut).unwrap().facts.persistence = Some(persistent);
                e.gpu(&lost).unwrap().lost = true;
            })
            .unwrap();
        assert_eq!(
            session.facts(&lost).unwrap_err().code,
            GpuErrorCode::GPU_IS_LOST
        );
        assert_eq!(
            session.gpu_instances(&cut).unwrap().len(),
            1,
            "{persistent}"
        );

        // As soon as there is nothing to lose, the lost GPU is looked for again.
        library
            .state
            .edit(|e| {
                let gpu = e.gpu(&cut).unwrap();
                gpu.instances.clear();
            })
            .unwrap();
        session.facts(&lost).unwrap_err();
        assert_eq!(
            session.mig_mode(&cut).unwrap().is_on(),
            persistent,
            "NVML was closed, and what has no persistence mode has forgotten"
        );
    }
}
