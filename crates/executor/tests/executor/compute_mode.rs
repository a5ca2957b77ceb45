//! The compute mode of GPUs whose shares are given out.

use std::time::Duration;

use divvy_claims::Claim;
use divvy_executor::{Event, Executor, InventorySource, Refresh, Unprepared};
use divvy_gpu_sim::Fault;
use divvy_model::{ComputeMode, GpuDriver, GpuErrorCode, GpuOp, GpuUuid, Grant, TimeSlice};

use crate::mig_world::{claim_of, mig_world, sim};
use crate::mps_world;
use crate::story::uid;
use crate::world::accessors::settings;
use crate::world::{HardwareFault, Moment, World};

/// A GPU as an MPS daemon left it.
fn left_exclusive() -> (World, Executor, GpuUuid) {
    let world = mig_world("h100x2", 1);
    let gpu = world.gpu(0);
    sim(&world)
        .set_compute_mode(&gpu, ComputeMode::ExclusiveProcess)
        .unwrap();
    world.changed(&gpu).unwrap();
    let executor = world.start();
    (world, executor, gpu)
}

fn share(name: &str) -> Claim {
    claim_of(name, &["gpu-0-ts"], "t1")
}

fn mode(world: &World, gpu: &GpuUuid) -> ComputeMode {
    sim(world).facts(gpu).unwrap().compute_mode.unwrap()
}

#[test]
fn shares_need_default_and_the_last_of_them_gives_back_what_was_found() {
    let (world, executor, gpu) = left_exclusive();
    world
        .prepare(&executor, &claim_of("w", &["gpu-0"], "t1"))
        .unwrap();
    assert_eq!(
        mode(&world, &gpu),
        ComputeMode::ExclusiveProcess,
        "a whole GPU needs nothing else"
    );
    world.unprepare(&executor, &uid("w")).unwrap();
    world.prepare(&executor, &share("a")).unwrap();
    assert_eq!(mode(&world, &gpu), ComputeMode::Default);
    world.prepare(&world.start(), &share("b")).unwrap();
    world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(
        mode(&world, &gpu),
        ComputeMode::Default,
        "the other share needs it"
    );
    world.unprepare(&executor, &uid("b")).unwrap();
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    assert_eq!(settings(&world, &gpu).compute, None);
}

#[test]
fn wherever_a_crash_cuts_it_the_mode_is_given_back_by_the_next_instance() {
    for moment in [Moment::Before, Moment::During, Moment::After] {
        let (world, executor, gpu) = left_exclusive();
        world.lock().crash_at = Some(("set_compute_mode", moment));
        world.prepare(&executor, &share("a")).unwrap_err();
        world.kill();
        world.changed(&gpu).unwrap();
        world.start().reconcile(&world.view());
        assert_eq!(
            mode(&world, &gpu),
            ComputeMode::ExclusiveProcess,
            "{moment:?}"
        );
        assert_eq!(settings(&world, &gpu).compute, None, "{moment:?}");
    }
}

#[test]
fn a_mode_that_the_driver_does_not_set_fails_the_claim_and_leaves_nothing() {
    let (world, executor, gpu) = left_exclusive();
    sim(&world).fault(
        Fault::fail(GpuErrorCode::NO_PERMISSION)
            .of(GpuOp::SetComputeMode)
            .times(1),
    );
    let error = world.prepare(&executor, &share("a")).unwrap_err();
    assert_eq!(error.category(), "hardware");
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    assert_eq!(settings(&world, &gpu).compute, None);
}

#[test]
fn a_mode_set_although_the_driver_denied_it_is_given_back() {
    let (world, executor, gpu) = left_exclusive();
    world.lock().hardware_fault = Some(HardwareFault::Lies);
    world.prepare(&executor, &share("a")).unwrap();
    assert_eq!(mode(&world, &gpu), ComputeMode::Default);
    world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    assert_eq!(settings(&world, &gpu).compute, None);
}

#[test]
fn what_others_set_meanwhile_is_left_alone() {
    let (world, executor, gpu) = left_exclusive();
    let set = |to| sim(&world).set_compute_mode(&gpu, to).unwrap();
    set(ComputeMode::Prohibited);
    let error = world.prepare(&executor, &share("a")).unwrap_err();
    assert_eq!(
        error.category(),
        "hardware",
        "decided on what was read before"
    );
    assert_eq!(mode(&world, &gpu), ComputeMode::Prohibited);
    assert_eq!(
        world
            .prepare(&executor, &share("a"))
            .unwrap_err()
            .category(),
        "compute-mode"
    );
    set(ComputeMode::ExclusiveProcess);
    world.changed(&gpu).unwrap();
    world.prepare(&executor, &share("a")).unwrap();
    set(ComputeMode::Prohibited);
    world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(mode(&world, &gpu), ComputeMode::Prohibited);
    assert_eq!(settings(&world, &gpu).compute, None);
}

#[test]
fn after_a_reboot_the_mode_is_set_before_a_share_is_ready() {
    let (world, executor, gpu) = left_exclusive();
    let a = share("a");
    world.prepare(&executor, &a).unwrap();
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.reboot();
    // An administrator sets it at each boot.
    sim(&world)
        .set_compute_mode(&gpu, ComputeMode::ExclusiveProcess)
        .unwrap();
    world.changed(&gpu).unwrap();
    let events = world.start().restore_cdi(Refresh::Missing).events;
    assert_eq!(events, [Event::ExecutedAgain { claim: a.uid }]);
    assert_eq!(mode(&world, &gpu), ComputeMode::Default);
}

/// Only shares need another mode: what an administrator sets at each boot stays under a whole GPU.
#[test]
fn after_a_reboot_a_whole_gpu_keeps_the_mode_that_it_has() {
    let (world, executor, gpu) = left_exclusive();
    let whole = claim_of("w", &["gpu-0"], "t1");
    world.prepare(&executor, &whole).unwrap();
    world.lock().api.insert(whole.uid.clone(), whole.clone());
    world.reboot();
    sim(&world)
        .set_compute_mode(&gpu, ComputeMode::ExclusiveProcess)
        .unwrap();
    world.changed(&gpu).unwrap();
    let events = world.start().restore_cdi(Refresh::Missing).events;
    assert_eq!(events, [Event::ExecutedAgain { claim: whole.uid }]);
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
}

/// A call of the driver that has not come back, a GPU that is not seen, a time slice that cannot be
/// set: none of them is a reason to forget what was found.
#[test]
fn what_was_found_is_not_forgotten_before_it_is_certainly_back() {
    for succeeds in [true, false] {
        let (world, executor, gpu) = left_exclusive();
        let after = Duration::from_mins(2);
        world.lock().hardware_fault = Some(HardwareFault::Late { after, succeeds });
        world.prepare(&executor, &share("a")).unwrap_err();
        world.pass(Duration::from_mins(3));
        executor.reconcile(&world.view());
        assert_eq!(
            mode(&world, &gpu),
            ComputeMode::ExclusiveProcess,
            "{succeeds}"
        );
        assert_eq!(settings(&world, &gpu).compute, None);
    }
    let (world, executor, gpu) = left_exclusive();
    world.prepare(&executor, &share("a")).unwrap();
    let inventory = world.lock().inventory.take();
    world.unprepare(&executor, &uid("a")).unwrap();
    world.lock().inventory = inventory;
    executor.reconcile(&world.view());
    assert_eq!(
        mode(&world, &gpu),
        ComputeMode::ExclusiveProcess,
        "not seen for a moment"
    );

    let (world, executor, gpu) = left_exclusive();
    let grant = Grant {
        may_change_mode: None,
        offers_partitions: Some(true),
        share_time_slice: Some(TimeSlice::Long),
        ..Grant::default()
    };
    executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
    world.prepare(&executor, &share("a")).unwrap();
    world.lock().slice_fault = Some(HardwareFault::Refuses);
    world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(
        mode(&world, &gpu),
        ComputeMode::ExclusiveProcess,
        "the time slice is another matter"
    );
}

/// The mode that was found is given back at once also where another GPU makes its claim linger.
#[test]
fn a_gpu_beside_a_lost_one_of_its_claim_has_its_mode_back() {
    let (world, executor, gpu) = left_exclusive();
    let two = claim_of("two", &["gpu-0-ts", "gpu-1-mig-1g10gb-19-0"], "t1");
    world.prepare(&executor, &two).unwrap();
    assert_eq!(mode(&world, &gpu), ComputeMode::Default);
    sim(&world).lose_gpu(&world.gpu(1));
    assert!(matches!(
        world.unprepare(&executor, &two.uid).unwrap(),
        Unprepared::Lingering(_)
    ));
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
}

/// A mode that could not be given back is given back before the next claim has the GPU.
#[test]
fn a_whole_gpu_is_not_given_in_the_mode_of_a_server_that_is_gone() {
    let (world, executor, gpu) = mps_world::start();
    mps_world::grants(&world, &executor);
    mps_world::prepared(&world, &executor, &mps_world::shared("a", "gpu-0-mps"));
    world.lock().hardware_fault = Some(HardwareFault::Refuses);
    world.unprepare(&executor, &uid("a")).unwrap();
    world.lock().hardware_fault = None;
    world
        .prepare(&executor, &claim_of("w", &["gpu-0"], "t1"))
        .unwrap();
    let now = sim(&world).facts(&gpu).unwrap().compute_mode;
    assert_eq!(now, Some(ComputeMode::Default));
}
