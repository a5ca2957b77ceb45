//! Two drivers of ours on one node: each has records of its own, and they meet in a folder of
//! locks.

use std::path::Path;
use std::sync::Arc;

use divvy_executor::{Event, Executor, LockName, ProcessOnGpu, Refresh, Unprepared};
use divvy_gpu_sim::Fault;
use divvy_model::{GpuErrorCode, GpuOp};

use crate::mig_world::{claim_of_halves, sim};
use crate::world::accessors::tear;
use crate::world::{World, claim};

const ONE: &str = "gpu.one.example";
const OTHER: &str = "gpu.other.example";

/// The same two GPUs as another driver sees them.
fn driver(name: &'static str, dir: &Path) -> World {
    let world = World::new("h100x2", 1);
    world.lock().among = Some((dir.to_owned(), name));
    world
}

/// Starts an executor and has it restore CDI files, as before the kubelet may call.
fn start(world: &World) -> Executor {
    let executor = world.start();
    executor.restore_cdi(Refresh::All);
    executor
}

fn is_refused(world: &World, executor: &Executor, name: &str, gpu: usize) -> bool {
    match world.prepare(executor, &claim(name, &[gpu], "t1")) {
        Ok(_) => false,
        Err(error) => {
            assert_eq!(error.category(), "other-driver", "{error}");
            true
        }
    }
}

/// A GPU that one driver has prepared is refused by the other until its last claim is gone.
#[test]
fn a_gpu_of_one_driver_is_refused_by_the_other_until_it_is_free() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let (ones, others) = (start(&one), start(&other));
    let a = claim("a", &[0], "t1");
    one.prepare(&ones, &a).unwrap();
    let both = claim("both", &[1, 0], "t1");
    let refused = other.prepare(&others, &both).unwrap_err();
    let gpu = one.gpu(0);
    assert_eq!(
        refused.to_string(),
        format!(
            "device gpu-0 ({gpu}) of claim ns/both (UID uid-both): its GPU is held by driver {ONE}, which has prepared claim ns/a (UID uid-a) on it (a GPU belongs to one driver: release it there, or run the two drivers on different nodes)"
        )
    );
    assert!(other.lock().records().is_empty());
    assert!(
        !is_refused(&one, &ones, "b", 1),
        "what a refused claim would have had is free"
    );
    assert!(is_refused(&other, &others, "c", 1));

    assert_eq!(one.unprepare(&ones, &a.uid).unwrap(), Unprepared::Done);
    assert!(!is_refused(&other, &others, "d", 0));
    assert!(is_refused(&one, &ones, "a", 0), "and the other way round");
}

#[test]
fn failed_claims_and_admin_claims_hold_no_lock_on_their_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let (ones, others) = (start(&one), start(&other));
    one.lock().edits_missing = true;
    one.prepare(&ones, &claim("fails", &[0], "t1")).unwrap_err();
    one.lock().edits_missing = false;
    let mut monitor = claim("monitor", &[0, 1], "t1");
    monitor
        .allocation
        .results
        .iter_mut()
        .for_each(|result| result.admin_access = true);
    one.prepare(&ones, &monitor).unwrap();
    assert!(!is_refused(&other, &others, "a", 0));
    one.prepare(&ones, &claim("fails", &[0], "t1")).unwrap_err();
    let mut again = claim("again", &[0], "t1");
    again.allocation.results[0].admin_access = true;
    one.prepare(&ones, &again).unwrap();
}

#[test]
fn a_gpu_stays_its_drivers_over_restarts_and_rolling_updates() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let (old, others) = (start(&one), start(&other));
    let a = claim("a", &[0], "t1");
    one.prepare(&old, &a).unwrap();
    // Two instances serve for a while, and the older one ends.
    let new = start(&one);
    assert!(!is_refused(&one, &new, "b", 1));
    drop(old);
    assert!(is_refused(&other, &others, "c", 0) && is_refused(&other, &others, "c", 1));
    // Killed: its locks are taken again before the kubelet calls.
    drop(new);
    let new = start(&one);
    assert!(is_refused(&other, &others, "c", 0) && is_refused(&other, &others, "c", 1));
    // An instance beside it that does not serve notices that the claim is gone.
    let idle = start(&one);
    assert_eq!(one.unprepare(&new, &a.uid).unwrap(), Unprepared::Done);
    idle.restore_cdi(Refresh::Missing);
    assert!(!is_refused(&other, &others, "c", 0));
}

/// A call that prepares a claim while another thread looks which GPUs no claim holds any more.
#[test]
fn a_gpu_prepared_while_it_is_looked_at_stays_its_drivers() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let (ones, others) = (Arc::new(start(&one)), start(&other));
    let a = claim("a", &[0], "t1");
    one.prepare(&ones, &a).unwrap();
    // Through the other instance of the driver: this one still has the lock.
    one.unprepare(&one.start(), &a.uid).unwrap();
    let (machine, same, gpu) = (one.clone(), ones.clone(), one.gpu(0));
    let prepare = move || {
        // Under the GPU's lock the call would wait.
        if !machine.lock().locked.contains(&LockName::Gpu(gpu)) {
            machine.prepare(&same, &claim("b", &[0], "t2")).unwrap();
        }
    };
    one.after_listing_records(1, prepare);
    ones.restore_cdi(Refresh::Missing);
    one.prepare(&ones, &claim("b", &[0], "t2")).unwrap();
    assert!(is_refused(&other, &others, "c", 0));
}

/// A claim that is prepared already has the GPUs of its record, and no others.
#[test]
fn a_claim_allocated_anew_takes_no_gpu_of_another_driver() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let (ones, others) = (start(&one), start(&other));
    one.prepare(&ones, &claim("a", &[0], "t1")).unwrap();
    let x = claim("x", &[1], "t1");
    other.prepare(&others, &x).unwrap();
    assert!(is_refused(&one, &ones, "a", 1));
    assert!(is_refused(&other, &others, "y", 0), "it has its first GPU");

    other.unprepare(&others, &x.uid).unwrap();
    assert!(!is_refused(&one, &ones, "a", 1));
    assert!(is_refused(&other, &others, "y", 1) && !is_refused(&other, &others, "y", 0));
}

#[test]
fn a_claim_allocated_anew_that_is_refused_leaves_the_new_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let (ones, others) = (start(&one), start(&other));
    one.prepare(&ones, &claim("a", &[0], "t1")).unwrap();
    let stranger = ProcessOnGpu {
        pid: 7,
        gpu_instance: None,
        pod: None,
    };
    let gpu = one.gpu(1);
    one.lock().processes.insert(gpu, vec![stranger]);
    one.prepare(&ones, &claim("a", &[1], "t2")).unwrap_err();
    assert!(!is_refused(&other, &others, "x", 1));
    assert!(is_refused(&other, &others, "x", 0), "it has its first GPU");
}

/// The GPU of a claim is another driver's after a boot: it was faster.
#[test]
fn a_gpu_that_another_driver_took_after_a_boot_is_not_used_by_both() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let a = claim("a", &[0], "t1");
    let ones = start(&one);
    one.lock().api.insert(a.uid.clone(), a.clone());
    one.prepare(&ones, &a).unwrap();
    drop(ones);
    one.reboot();
    let others = start(&other);
    let x = claim("x", &[0], "t1");
    other.prepare(&others, &x).unwrap();

    let ones = one.start();
    let report = ones.restore_cdi(Refresh::All);
    assert!(
        matches!(&report.events[..], [Event::Kept { why, .. }] if why.contains(OTHER)),
        "{report:?}"
    );
    assert!(one.lock().cdi.is_empty());
    assert!(is_refused(&one, &ones, "a", 0));

    other.unprepare(&others, &x.uid).unwrap();
    ones.restore_cdi(Refresh::Missing);
    assert_eq!(one.lock().cdi.len(), 1);
    assert!(is_refused(&other, &others, "y", 0));
}

/// The other GPU cannot be given back yet.
#[test]
fn a_gpu_is_free_while_its_claim_is_stuck_on_another() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    one.lock().is_cut = true;
    let (ones, others) = (start(&one), start(&other));
    let halves = claim_of_halves("a", &[0, 1], "t1");
    one.prepare(&ones, &halves).unwrap();
    let fails = Fault::fail(GpuErrorCode::NO_PERMISSION).of(GpuOp::DestroyGpuInstance);
    sim(&one).fault(fails.on(&one.gpu(0)));
    let ended = one.unprepare(&ones, &halves.uid).unwrap();
    assert!(matches!(ended, Unprepared::Lingering(_)), "{ended:?}");
    assert!(!is_refused(&other, &others, "x", 1));
    assert!(is_refused(&other, &others, "y", 0));
}

#[test]
fn a_claim_allocated_anew_on_its_gpu_keeps_it_from_other_drivers() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let (ones, others) = (start(&one), start(&other));
    for at in ["t1", "t2"] {
        one.prepare(&ones, &claim("a", &[0], at)).unwrap();
        assert!(is_refused(&other, &others, "x", 0), "{at}");
    }
    // The GPU of before goes, and the one that it has twice stays.
    one.prepare(&ones, &claim("a", &[0, 1], "t3")).unwrap();
    one.prepare(&ones, &claim("a", &[1], "t4")).unwrap();
    assert!(!is_refused(&other, &others, "x", 0) && is_refused(&other, &others, "y", 1));
}

/// At the start nothing says which GPUs the claim of a torn record has.
#[test]
fn a_record_that_is_made_again_keeps_its_gpu_from_other_drivers() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let a = claim("a", &[0], "t1");
    one.lock().api.insert(a.uid.clone(), a.clone());
    let ones = start(&one);
    one.prepare(&ones, &a).unwrap();
    drop(ones);
    tear(&one, &a.uid, b"{");
    let (ones, others) = (start(&one), start(&other));
    let events = ones.reconcile(&one.view()).events;
    let rebuilt = Event::Rebuilt { claim: a.uid };
    assert!(events.contains(&rebuilt), "{events:?}");
    assert!(is_refused(&other, &others, "x", 0));
}

/// Admin access holds no GPU.
#[test]
fn a_claim_allocated_anew_with_admin_access_leaves_its_gpu() {
    let dir = tempfile::tempdir().unwrap();
    let (one, other) = (driver(ONE, dir.path()), driver(OTHER, dir.path()));
    let (ones, others) = (start(&one), start(&other));
    one.prepare(&ones, &claim("a", &[0], "t1")).unwrap();
    let mut admin = claim("a", &[0], "t2");
    admin.allocation.results[0].admin_access = true;
    one.prepare(&ones, &admin).unwrap();
    assert!(!is_refused(&other, &others, "x", 0));
}
