//! Partitions that were given out under other rules than those in force when they are prepared: what the hardware can
//! still serve is served.

use std::collections::BTreeSet;

use divvy_claims::{Rights, Step};
use divvy_executor::{Executor, Folder, Refresh};
use divvy_model::mig::{ComputeInstance, GpuInstanceProfileId};
use divvy_model::{GpuDriver, GpuUuid};

use crate::mig_world::{HALF, claim_of, living, mig_world, sim};
use crate::world::World;

/// A GPU on which somebody has made a partition.
fn with_theirs() -> (World, Executor, GpuUuid, ComputeInstance) {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    let theirs = sim(&world).make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4).unwrap();
    (world, executor, gpu, theirs)
}

fn given_out(gpu: &GpuUuid, device: &ComputeInstance) -> Rights {
    let known = BTreeSet::from([device.uuid.clone()]);
    Rights { static_instances: [(gpu.clone(), known)].into(), ..Rights::default() }
}

#[test]
fn an_instance_of_somebody_else_that_was_given_out_is_served_after_the_rule_and_stays_his() {
    let (world, executor, gpu, theirs) = with_theirs();
    executor.set_rights(given_out(&gpu, &theirs));
    let a = claim_of("a", &[HALF], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let answer = world.prepare(&executor, &a).unwrap();
    let held = executor.held().unwrap();
    assert_eq!(held[0].made.as_ref().unwrap().uuid, theirs.uuid);
    // Also to a process that starts again, and when its record is lost.
    world.kill();
    let executor = world.start();
    executor.set_rights(given_out(&gpu, &theirs));
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
fn another_instance_at_the_same_place_was_given_to_nobody() {
    let (world, executor, gpu, theirs) = with_theirs();
    executor.set_rights(given_out(&gpu, &ComputeInstance { uuid: "MIG-other".parse().unwrap(), ..theirs }));
    let error = world.prepare(&executor, &claim_of("a", &[HALF], "t1")).unwrap_err();
    assert_eq!(error.category(), "step");
}

#[test]
fn a_partition_that_was_given_out_to_be_made_is_made_where_only_others_may_now_and_removed_with_its_claim() {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    let rights = |on_demand: &[&str]| Rights {
        static_gpus: [gpu.clone()].into(),
        on_demand: on_demand.iter().map(|device| device.parse().unwrap()).collect(),
        ..Rights::default()
    };
    let a = claim_of("a", &[HALF], "t1");
    executor.set_rights(rights(&[]));
    assert_eq!(world.prepare(&executor, &a).unwrap_err().category(), "no-static-partition");
    executor.set_rights(rights(&[HALF]));
    world.prepare(&executor, &a).unwrap();
    assert_eq!(living(&world, &gpu).len(), 1);
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(living(&world, &gpu).is_empty());
}

#[test]
fn after_a_reboot_the_mig_mode_of_a_gpu_whose_instances_are_others_now_is_left_to_them() {
    let world = mig_world("h100x1", 1);
    let executor = world.start();
    let gpu = world.gpu(0);
    // Turned on for a partition, and not off again since.
    world.prepare(&executor, &claim_of("a", &[HALF], "t1")).unwrap();
    world.unprepare(&executor, &"uid-a".parse().unwrap()).unwrap();
    let whole = claim_of("w", &["gpu-0"], "t2");
    world.lock().api.insert(whole.uid.clone(), whole.clone());
    let mode_off = Step::SetMigMode { gpu: gpu.clone(), on: false };
    sim(&world).edit(|e| e.set_mig_mode(&gpu, false)).unwrap();
    world.prepare(&executor, &whole).unwrap();
    let mut state = divvy_claims::GpuState::default();
    state.note_mig_mode(false, true);
    world.lock().put(Folder::Gpus, &format!("{gpu}.json"), Some(&state.encode()));
    world.reboot();
    sim(&world).edit(|e| e.set_mig_mode(&gpu, true)).unwrap();
    let executor = world.start();
    // Nothing is known of the rules yet: it is not guessed.
    executor.await_rights(std::time::Duration::from_mins(5));
    executor.restore_cdi(Refresh::All);
    assert!(sim(&world).mig_mode(&gpu).unwrap().is_on(), "before the rules are known: {mode_off}");
    executor.set_rights(Rights { static_gpus: [gpu.clone()].into(), ..Rights::default() });
    executor.restore_cdi(Refresh::All);
    assert!(sim(&world).mig_mode(&gpu).unwrap().is_on(), "by the rules: {mode_off}");
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
    executor.set_rights(Rights { static_gpus: [gpu.clone()].into(), ..Rights::default() });
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(world.lock().cdi, file);
    sim(&world).end_process(4711);
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(living(&world, &gpu).is_empty());
}
