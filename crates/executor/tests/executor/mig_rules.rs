//! Partitions that were given out under other rules than those in force when they are prepared: what the hardware can
//! still serve is served.

use divvy_executor::{Event, Executor, Folder, Refresh};
use divvy_model::mig::{ComputeInstance, GpuInstanceProfileId, Placement};
use divvy_model::{GpuDriver, GpuUuid};

use crate::mig_world::{HALF, claim_of, living, mig_world, sim};
use crate::world::World;

/// A GPU with a foreign partition.
fn with_theirs() -> (World, Executor, GpuUuid, ComputeInstance) {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    let theirs = sim(&world).make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4).unwrap();
    (world, executor, gpu, theirs)
}

#[test]
fn a_foreign_instance_is_served_under_its_old_and_new_name_and_stays_foreign() {
    for device in ["gpu-0-mig-static-3g40gb-9-4", HALF] {
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
        if device != HALF {
            world.lock().put(Folder::Claims, "uid-a.json", None);
            executor.reconcile(&world.view());
            assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
        }
        world.unprepare(&executor, &a.uid).unwrap();
        assert_eq!(living(&world, &gpu).remove(0).1, [theirs]);
        assert!(world.lock().records().is_empty());
    }
}

#[test]
fn a_static_partition_that_does_not_live_is_refused_and_never_made() {
    let (world, executor, gpu, _) = with_theirs();
    let error =
        world.prepare(&executor, &claim_of("a", &["gpu-0-mig-static-1g10gb-19-0"], "t1")).unwrap_err();
    assert_eq!(error.category(), "no-static-partition");
    assert_eq!(living(&world, &gpu).len(), 1);
}

#[test]
fn a_partition_that_was_given_out_to_be_made_is_made_where_mig_mode_may_not_change_and_removed_with_its_claim()
 {
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

#[test]
fn a_lingering_claim_that_is_taken_up_again_has_the_partition_that_was_made_for_it_whatever_the_rules_say_now()
 {
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
fn after_a_reboot_a_static_partition_is_not_made_by_us_and_mig_mode_stays_as_it_is() {
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
    let half = sim(&world).create_gpu_instance(&gpu, GpuInstanceProfileId(9), place).unwrap();
    let events = executor.restore_cdi(Refresh::Missing).events;
    assert!(matches!(&events[..], [Event::Failed { .. }]), "{events:?}");
    sim(&world).destroy_gpu_instance(&gpu, half.id).unwrap();
    sim(&world).make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4).unwrap();
    let events = executor.restore_cdi(Refresh::Missing).events;
    assert_eq!(events, [Event::ExecutedAgain { claim: a.uid }]);
}
