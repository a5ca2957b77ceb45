//! Other users of a GPU while claims come and go: processes in a partition, and foreign instances.

use std::time::Duration;

use divvy_claims::Claim;
use divvy_executor::{Event, Unprepared, chain};
use divvy_model::mig::{GpuInstanceProfileId, Placement};
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp};

use crate::mig_world::{HALF, SMALL, claim_of, living, mig_world, setup, shape, sim};
use crate::story::{MOMENTS, uid};
use crate::world::Place;
use crate::world::accessors::{noted, tear};

/// A partition in use is waited for ten seconds then lingers and is removed when its process is
/// gone.
#[test]
fn a_partition_in_use_lingers_and_goes_when_its_process_is_gone() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, _) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    world.lock().api.clear();
    let began = world.lock().now;
    let answer = world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(
        answer,
        Unprepared::Lingering(format!("process 4711 still uses {gpu}"))
    );
    let took = world.lock().now.saturating_sub(began);
    assert!(
        (Duration::from_secs(10)..Duration::from_secs(11)).contains(&took),
        "{took:?}"
    );
    assert_eq!(shape(&world), [(9, 4, 1)], "held");
    // Its neighbour is free meanwhile.
    world
        .prepare(&executor, &claim_of("b", &[SMALL], "t2"))
        .unwrap();
    let over = world
        .prepare(&executor, &claim_of("c", &["gpu-0-mig-1g10gb-19-4"], "t3"))
        .unwrap_err();
    assert_eq!(over.category(), "held");
    sim(&world).end_process(4711);
    executor.reconcile(&world.view());
    assert_eq!(shape(&world), [(19, 0, 1)]);
}

/// The owner of a process on a shared GPU may be unknown: the last share answers for it,
/// of this GPU.
#[test]
fn an_unknown_pods_process_holds_the_last_share_of_its_gpu_only() {
    let (world, executor, _, gpu) = setup();
    for (name, device) in [("a", "gpu-0-ts"), ("b", "gpu-0-ts"), ("c", "gpu-1-ts")] {
        world
            .prepare(&executor, &claim_of(name, &[device], "t1"))
            .unwrap();
    }
    sim(&world).start_process(&gpu, 4711);
    let unprepared = |name: &str| world.unprepare(&executor, &uid(name)).unwrap();
    assert_eq!(unprepared("a"), Unprepared::Done);
    assert!(
        matches!(unprepared("b"), Unprepared::Lingering(_)),
        "a share of another GPU is no other share"
    );
    sim(&world).end_process(4711);
    assert_eq!(unprepared("b"), Unprepared::Done);
}

/// On a read-only disk nothing can be removed afterwards: what is on record stays until it can be.
#[test]
fn a_removal_that_cannot_be_recorded_is_not_begun() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    world.lock().write_error = Some((Place::Store, std::io::ErrorKind::ReadOnlyFilesystem));
    world.unprepare(&executor, &a.uid).unwrap_err();
    assert_eq!(shape(&world), [(9, 4, 1)]);
    world.lock().write_error = None;
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert!(shape(&world).is_empty());
}

/// An administrator has removed the partition of a claim that lingers, and then the claim's next
/// pod comes.
#[test]
fn a_lingering_claim_whose_partition_was_removed_by_others_gets_another() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, inside) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    assert!(matches!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Lingering(_)
    ));
    sim(&world).end_process(4711);
    sim(&world).edit(|e| {
        e.destroy_compute_instance(&gpu, instance.id, inside[0].id)
            .unwrap();
        e.destroy_gpu_instance(&gpu, instance.id).unwrap();
    });
    world.prepare(&executor, &a).unwrap();
    assert_eq!(shape(&world), [(9, 4, 1)]);
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert!(shape(&world).is_empty());
}

/// A process that the driver sees and NVML does not list makes the removal wait without fencing the
/// GPU.
#[test]
fn an_unlisted_process_delays_a_removal_without_fencing_the_gpu() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    let in_use = divvy_gpu_sim::Fault::fail(GpuErrorCode::IN_USE);
    let fault = sim(&world).fault(in_use.of(GpuOp::DestroyGpuInstance));
    let Unprepared::Lingering(why) = world.unprepare(&executor, &a.uid).unwrap() else {
        panic!()
    };
    assert!(why.contains("its GPU instance is still in use"), "{why}");
    assert_eq!(
        shape(&world),
        [(9, 4, 0)],
        "its compute instance is gone already"
    );
    assert_eq!(executor.fences().unwrap().len(), 0);
    world
        .prepare(&executor, &claim_of("b", &[SMALL], "t2"))
        .unwrap();
    sim(&world).edit(|e| e.clear_faults(Some(fault)));
    let report = executor.reconcile(&world.view());
    assert!(
        report.events.contains(&Event::Released {
            claim: a.uid.clone()
        }),
        "{:?}",
        report.events
    );
    assert_eq!(shape(&world), [(19, 0, 1)]);
}

#[test]
fn an_instance_with_our_ids_and_another_uuid_is_foreign_and_stays() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, inside) = living(&world, &gpu).remove(0);
    let sim = sim(&world);
    sim.edit(|e| {
        e.destroy_compute_instance(&gpu, instance.id, inside[0].id)
            .unwrap();
        e.destroy_gpu_instance(&gpu, instance.id).unwrap();
    });
    let theirs = sim
        .make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4)
        .unwrap();
    assert_eq!(
        (theirs.gpu_instance, theirs.id),
        (instance.id, inside[0].id),
        "ids come again"
    );
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert_eq!(living(&world, &gpu), [(instance, vec![theirs])]);
    assert_eq!(executor.foreign(), [(gpu, vec![instance])].into());
}

#[test]
fn a_foreign_instance_in_the_way_is_named_and_left_alone() {
    let (world, executor, a, gpu) = setup();
    let sim = sim(&world);
    sim.set_mig_mode(&gpu, true).unwrap();
    let theirs = sim
        .make_foreign_instance(&gpu, GpuInstanceProfileId(19), 5)
        .unwrap();
    let began = world.lock().now;
    let error = world.prepare(&executor, &a).unwrap_err();
    let expected = format!(
        "claim ns/a (UID uid-a) cannot be prepared: failed to create a partition of profile 9 at 4+4 on {gpu}: it was not done: GPU instance {0} (profile 19, 5:1) overlaps 4:4 on {gpu}; this driver did not create it and does not change it (if it is not needed, remove it: `nvidia-smi mig -i {gpu} -gi {0} -dci && nvidia-smi mig -i {gpu} -gi {0} -dgi`): NVML create_gpu_instance failed on {gpu}: INSUFFICIENT_RESOURCES (23)",
        theirs.gpu_instance.0
    );
    assert_eq!(chain(&error), expected);
    assert!(
        world.lock().now.saturating_sub(began) < Duration::from_secs(1),
        "waiting would not help"
    );
    assert_eq!(shape(&world), [(19, 5, 1)]);
    executor.reconcile(&world.view());
    let foreign: Vec<_> = executor.foreign()[&gpu]
        .iter()
        .map(|i| (i.profile.0, i.placement))
        .collect();
    assert_eq!(foreign, [(19, Placement { start: 5, size: 1 })]);
    // Beside it there is room.
    world
        .prepare(&executor, &claim_of("b", &["gpu-0-mig-3g40gb-9-0"], "t2"))
        .unwrap();
    assert_eq!(
        executor.foreign().len(),
        1,
        "instances of divvy are not listed"
    );
    let whole = world.prepare(&executor, &claim_of("c", &["gpu-1"], "t3"));
    whole.unwrap();
}

/// Another driver, or a program on the host, has the administrator's instance. Neither the claim
/// that asks first nor one that holds another instance of the GPU lets a second user in.
#[test]
fn a_static_partition_in_which_a_stranger_computes_is_not_given_out() {
    for beside in [false, true] {
        let (world, executor, _, gpu) = setup();
        let sim = sim(&world);
        sim.set_mig_mode(&gpu, true).unwrap();
        let theirs = sim
            .make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4)
            .unwrap();
        sim.make_foreign_instance(&gpu, GpuInstanceProfileId(19), 0)
            .unwrap();
        let other = claim_of("b", &["gpu-0-mig-static-1g10gb-19-0"], "t1");
        sim.start_process_in(&gpu, theirs.gpu_instance, 4711);
        if beside {
            world.prepare(&executor, &other).unwrap();
        }
        let a = claim_of("a", &["gpu-0-mig-static-3g40gb-9-4"], "t2");
        assert_eq!(
            world.prepare(&executor, &a).unwrap_err().category(),
            "foreign-processes",
            "{beside}"
        );
        // In the other instance it is in no claim's way.
        world.prepare(&executor, &other).unwrap();
        world.lock().pods.insert(4711, "pod-a".to_owned());
        world.prepare(&executor, &a).unwrap();
    }
}

const SHARED: &str = "gpu-0-mig-1g10gb-19-0-ts";

fn share(name: &str, device: &str) -> Claim {
    let mut claim = claim_of(name, &[device], "t1");
    claim.allocation.results[0].share_id = Some(format!("share-{name}"));
    claim
}

/// Two claims of one partition, of which one has a record that cannot be read and is in no API, and
/// a third one. Returns the end of the first.
fn end_beside_a_torn_record(first: &Claim, third: &str) -> Unprepared {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    for claim in [first, &share("b", SHARED), &share("c", third)] {
        world.prepare(&executor, claim).unwrap();
    }
    let torn = "uid-b".parse().unwrap();
    tear(&world, &torn, b"rubbish");
    let ended = world.unprepare(&executor, &first.uid).unwrap();
    let lives = living(&world, &world.gpu(0));
    let mut starts = lives.iter().map(|(instance, _)| instance.placement.start);
    assert!(starts.any(|start| start == 0), "{third}");
    ended
}

#[test]
fn a_shared_partition_stays_while_a_torn_record_may_be_of_its_other_user() {
    let first = share("a", SHARED);
    for beside in ["gpu-0-mig-1g10gb-19-1-ts", "gpu-1-mig-1g10gb-19-0-ts"] {
        let ended = end_beside_a_torn_record(&first, beside);
        let waits = "a claim's record cannot be read, and it may share its partition";
        assert_eq!(ended, Unprepared::Lingering(waits.to_owned()), "{beside}");
    }
}

#[test]
fn a_claim_does_not_wait_for_a_torn_record_that_takes_nothing_from_it() {
    // The third claim has the partition too, and keeps it.
    let ended = end_beside_a_torn_record(&share("a", SHARED), SHARED);
    assert_eq!(ended, Unprepared::Done);
    // It has its partition alone, or a share of a whole GPU.
    for first in [claim_of("a", &[HALF], "t1"), share("a", "gpu-1-ts")] {
        let ended = end_beside_a_torn_record(&first, SHARED);
        assert_eq!(ended, Unprepared::Done, "{first:?}");
    }
}

/// The kubelet asks again after its own time, which the pod spends in Terminating.
#[test]
fn an_unprepare_waits_for_a_removal_that_can_still_work_and_for_no_other() {
    for (code, waits) in [
        (GpuErrorCode::IN_USE, true),
        (GpuErrorCode::NO_PERMISSION, false),
    ] {
        let (world, executor, a, _) = setup();
        world.prepare(&executor, &a).unwrap();
        sim(&world).fault(divvy_gpu_sim::Fault::fail(code).of(GpuOp::DestroyGpuInstance));
        let began = world.lock().now;
        let ended = world.unprepare(&executor, &a.uid).unwrap();
        assert!(matches!(ended, Unprepared::Lingering(_)), "{ended:?}");
        let took = world.lock().now.saturating_sub(began);
        assert_eq!(took >= Duration::from_secs(5), waits, "{code:?}: {took:?}");
        assert_eq!(took < Duration::from_secs(1), !waits, "{code:?}: {took:?}");
    }
}

/// Its partition is gone, and nothing else says that its unprepare had begun.
#[test]
fn a_claim_whose_unprepare_was_cut_short_is_prepared_anew() {
    for moment in MOMENTS {
        let (world, executor, a, _) = setup();
        world.prepare(&executor, &a).unwrap();
        world.lock().crash_at = Some(("destroy_gpu_instance", moment));
        drop(world.unprepare(&executor, &a.uid));
        assert!(world.lock().dead, "{moment:?}");
        let executor = world.start();
        world.prepare(&executor, &a).unwrap();
        assert_eq!(shape(&world), [(9, 4, 1)], "{moment:?}");
    }
}

/// A creation failed half way and could not be taken back. Then the place is another owner's, under
/// the same id, with a compute instance.
#[test]
fn a_whole_instance_at_the_place_of_a_half_made_one_is_foreign_and_stays() {
    let (world, executor, a, gpu) = setup();
    for op in [GpuOp::CreateComputeInstance, GpuOp::DestroyGpuInstance] {
        let fails = divvy_gpu_sim::Fault::fail(GpuErrorCode::NO_PERMISSION);
        sim(&world).fault(fails.of(op));
    }
    world.prepare(&executor, &a).unwrap_err();
    sim(&world).clear_faults();
    assert_eq!(shape(&world), [(9, 4, 0)]);
    let (half, _) = living(&world, &gpu).remove(0);
    let theirs = sim(&world).edit(|e| {
        e.destroy_gpu_instance(&gpu, half.id).unwrap();
        e.make_foreign_instance(&gpu, half.profile, half.placement.start)
            .unwrap()
    });
    assert_eq!(theirs.gpu_instance, half.id, "ids come again");
    executor.finish_lingering();
    assert_eq!(living(&world, &gpu), [(half, vec![theirs])]);
    assert!(noted(&world, &gpu).is_empty() && world.lock().records().is_empty());
}
