//! Partitions that were given out under other rules than those in force when they are prepared:
//! what the hardware can still serve is served.

use divvy_executor::{Event, Executor, Folder, Refresh, chain};
use divvy_gpu_sim::Fault;
use divvy_model::mig::{ComputeInstance, GpuInstanceProfileId, Placement};
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp, GpuUuid};

use crate::mig_world::{HALF, SMALL, claim_of, living, mig_world, sim};
use crate::world::World;

/// A GPU with a foreign partition.
fn with_theirs() -> (World, Executor, GpuUuid, ComputeInstance) {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    let theirs = sim(&world)
        .make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4)
        .unwrap();
    (world, executor, gpu, theirs)
}

#[test]
fn a_foreign_instance_is_served_under_its_name_and_stays_foreign() {
    let device = "gpu-0-mig-static-3g40gb-9-4";
    let (world, mut executor, gpu, theirs) = with_theirs();
    let a = claim_of("a", &[device], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let answer = world.prepare(&executor, &a).unwrap();
    let held = executor.held().unwrap();
    assert_eq!(held[0].made.as_ref().unwrap().uuid, theirs.uuid);
    // Also to a process that starts again, and when its record is lost.
    world.kill();
    executor = world.start();
    executor.restore_cdi(Refresh::All);
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    world.lock().put(Folder::Claims, "uid-a.json", None);
    executor.reconcile(&world.view());
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(living(&world, &gpu).remove(0).1, [theirs]);
    assert!(world.lock().records().is_empty());
}

#[test]
fn a_static_partition_that_does_not_live_is_refused_and_never_made() {
    let (world, executor, gpu, _) = with_theirs();
    let error = world
        .prepare(
            &executor,
            &claim_of("a", &["gpu-0-mig-static-1g10gb-19-0"], "t1"),
        )
        .unwrap_err();
    assert_eq!(error.category(), "no-static-partition");
    assert_eq!(living(&world, &gpu).len(), 1);
}

/// Its instance lives; only a look at it fails, also the one after another partition of the claim
/// was made.
#[test]
fn a_static_partition_that_cannot_be_read_is_not_said_to_be_gone() {
    let (world, executor, gpu, _) = with_theirs();
    let a = claim_of("a", &["gpu-0-mig-static-3g40gb-9-4", SMALL], "t1");
    let mut said = Vec::new();
    for reads in 0..8 {
        let fault = Fault::fail(GpuErrorCode::NO_PERMISSION);
        sim(&world).fault(fault.of(GpuOp::ComputeInstances).after(reads).times(1));
        said.extend(world.prepare(&executor, &a).err().map(|e| chain(&e)));
        sim(&world).clear_faults();
        world.unprepare(&executor, &a.uid).unwrap();
    }
    let find = format!("failed to find the partition of profile 9 at 4+4 on {gpu}: ");
    let cannot = |said: &&String| said.contains(&format!("{find}it was not done: its instances"));
    assert!(said.iter().any(|said| cannot(&said)), "{said:?}");
    assert!(
        !said.iter().any(|s| s.contains("no longer exists")),
        "{said:?}"
    );
    assert_eq!(living(&world, &gpu).len(), 1);
}

/// A partition that was given out to be made is made where MIG mode may not change and removed with
/// its claim.
#[test]
fn a_given_out_partition_is_made_where_mig_mode_may_not_change() {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    world.grant(&executor, false);
    let a = claim_of("a", &[HALF], "t1");
    world.prepare(&executor, &a).unwrap();
    assert_eq!(living(&world, &gpu).len(), 1);
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(living(&world, &gpu).is_empty());
}

/// A lingering claim that is taken up again has the partition that was made for it whatever the
/// rules say now.
#[test]
fn a_claim_taken_up_again_has_its_partition_whatever_the_rules_say() {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    let a = claim_of("a", &[HALF], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let answer = world.prepare(&executor, &a).unwrap();
    let file = world.lock().cdi.clone();
    let (instance, _) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    world.unprepare(&executor, &a.uid).unwrap();
    world.grant(&executor, false);
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(world.lock().cdi, file);
    sim(&world).end_process(4711);
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(living(&world, &gpu).is_empty());
}

#[test]
fn after_a_reboot_a_static_partition_and_mig_mode_are_left_alone() {
    let (world, executor, gpu, _) = with_theirs();
    let a = claim_of("a", &["gpu-0-mig-static-3g40gb-9-4"], "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.reboot();
    let executor = world.start();
    let events = executor.restore_cdi(Refresh::Missing).events;
    assert!(matches!(&events[..], [Event::Failed { .. }]), "{events:?}");
    assert!(!crate::mig_world::mode(&world, &gpu));
    // Its administrator makes it again, at first without what is inside.
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    let place = Placement { start: 4, size: 4 };
    let half = sim(&world)
        .create_gpu_instance(&gpu, GpuInstanceProfileId(9), place)
        .unwrap();
    let events = executor.restore_cdi(Refresh::Missing).events;
    assert!(matches!(&events[..], [Event::Failed { .. }]), "{events:?}");
    sim(&world).destroy_gpu_instance(&gpu, half.id).unwrap();
    sim(&world)
        .make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4)
        .unwrap();
    let events = executor.restore_cdi(Refresh::Missing).events;
    assert_eq!(events, [Event::ExecutedAgain { claim: a.uid }]);
}
