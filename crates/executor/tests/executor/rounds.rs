//! GPUs that a round or a claim finds as they should be, and what is not done to them again.

use std::time::Duration;

use divvy_claims::Claim;
use divvy_executor::{Executor, LockName, Refresh};
use divvy_model::{GpuOp, GpuUuid, Grant, ShareUnit, TimeSlice};

use crate::mig_world::{HALF, claim_of, mig_world};
use crate::modes::claim;
use crate::story::uid;
use crate::world::{HardwareFault, MigLate, Moment, World};

/// Every lock of a GPU is held by another call from now on.
fn keep_busy(world: &World) {
    let gpus = [0, 1].map(|number| LockName::Gpu(world.gpu(number)));
    world.lock().busy.extend(gpus);
}

/// A round comes every few seconds, on nodes with many GPUs.
#[test]
fn a_round_takes_no_lock_of_a_gpu_that_is_as_its_notes_say() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let half = claim_of("a", &[HALF], "t1");
    world.prepare(&executor, &half).unwrap();
    let sliced = claim("b", &["gpu-1".to_owned()], Some(TimeSlice::Long), "t1");
    world.prepare(&executor, &sliced).unwrap();
    keep_busy(&world);
    let report = executor.tidy();
    assert!(!report.left_out, "{report:?}");
}

/// It is a call of another program, which takes a tenth of a second.
#[test]
fn a_later_share_has_no_time_slice_set_that_is_set_already() {
    let (world, executor, gpu) = with_long_slices();
    world.prepare(&executor, &share("a")).unwrap();
    assert_eq!(slice(&world, &gpu), Some(TimeSlice::Long));
    world.lock().slice_fault = Some(HardwareFault::Refuses);
    world.prepare(&executor, &share("b")).unwrap();
    world.unprepare(&executor, &uid("a")).unwrap();
    assert!(world.lock().slice_fault.is_some(), "it was called");
    assert_eq!(slice(&world, &gpu), Some(TimeSlice::Long));
}

/// A call that changes the GPU and has not returned may still have its effect.
#[test]
fn no_setting_is_changed_beside_a_call_that_has_not_returned() {
    let (world, executor, gpu) = with_long_slices();
    world.prepare(&executor, &share("a")).unwrap();
    let late = MigLate {
        at: Duration::MAX,
        succeeds: false,
        gpu: gpu.clone(),
        op: GpuOp::SetMigMode,
        what: Box::new(|_| {}),
    };
    world.lock().mig_late.push(late);
    world.unprepare(&executor, &uid("a")).unwrap();
    executor.reconcile(&world.view());
    assert_eq!(slice(&world, &gpu), Some(TimeSlice::Long));
    world.lock().mig_late.clear();
    executor.reconcile(&world.view());
    assert_eq!(slice(&world, &gpu), None);
}

/// A machine whose policy gives shares a long time slice.
fn with_long_slices() -> (World, Executor, GpuUuid) {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    let grant = Grant {
        offers_partitions: Some(true),
        share_time_slice: Some(TimeSlice::Long),
        ..Grant::default()
    };
    executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
    (world, executor, gpu)
}

fn share(name: &str) -> Claim {
    claim(name, &["gpu-0-ts".to_owned()], None, "t1")
}

fn slice(world: &World, gpu: &GpuUuid) -> Option<TimeSlice> {
    world.lock().slices.as_ref()?.get(gpu).copied()
}

/// Shares that claims have are of the unit in which they were published.
#[test]
fn the_unit_of_shares_is_known_to_the_next_process() {
    let world = mig_world("h100x2", 1);
    let gpu = world.gpu(1);
    let grant = Grant {
        share_unit: Some(ShareUnit::Percent),
        ..Grant::default()
    };
    world.start().grant(&[(gpu.clone(), grant)].into()).unwrap();
    world.kill();
    let units = world.start().share_units().unwrap();
    assert_eq!(units, [(gpu, ShareUnit::Percent)].into());
}

/// The process dies between the call and the note of it. The claim is prepared as far as its record
/// says.
#[test]
fn a_time_slice_that_was_given_back_before_a_crash_is_set_again() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    let sliced = claim("a", &["gpu-0".to_owned()], Some(TimeSlice::Short), "t1");
    world.prepare(&executor, &sliced).unwrap();
    world.lock().api.insert(sliced.uid.clone(), sliced.clone());
    world.lock().crash_at = Some(("set the time slice", Moment::After));
    world.unprepare(&executor, &sliced.uid).unwrap_err();
    assert_eq!(slice(&world, &gpu), None);
    world.kill();
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    world.prepare(&executor, &sliced).unwrap();
    assert_eq!(slice(&world, &gpu), Some(TimeSlice::Short));
}

/// An administrator has set it, or a program before divvy.
#[test]
fn a_time_slice_that_was_found_is_given_back() {
    let world = mig_world("h100x2", 1);
    let gpu = world.gpu(1);
    let found = [(gpu.clone(), TimeSlice::Short)].into();
    world.lock().slices = Some(found);
    let executor = world.start();
    let sliced = claim("a", &["gpu-1".to_owned()], Some(TimeSlice::Long), "t1");
    world.prepare(&executor, &sliced).unwrap();
    assert_eq!(slice(&world, &gpu), Some(TimeSlice::Long));
    world.unprepare(&executor, &uid("a")).unwrap();
    executor.tidy();
    assert_eq!(slice(&world, &gpu), Some(TimeSlice::Short));
}
