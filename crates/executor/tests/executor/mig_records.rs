//! Partitions whose claim's record was lost or cannot be read any more: adopted, made anew or removed, by what else is
//! known of them.

use std::time::Duration;

use divvy_claims::{Fence, GpuState, OwnedInstance, Phase};
use divvy_executor::{Event, Executor, Folder, Refresh, Unprepared};
use divvy_model::GpuOp;
use divvy_model::mig::{GpuInstanceId, GpuInstanceProfileId};

use crate::mig_world::{HALF, SMALL, claim_of, is_clean, living, setup, shape, sim};
use crate::story::uid;
use crate::world::{Moment, World};

#[test]
fn after_a_lost_record_store_partitions_are_adopted_from_allocated_claims_with_a_cdi_file_and_no_others() {
    for by_prepare in [true, false] {
        let (world, executor, a, gpu) = setup();
        let answer = world.prepare(&executor, &a).unwrap();
        let theirs = sim(&world).make_foreign_instance(&gpu, GpuInstanceProfileId(19), 0).unwrap();
        let before = living(&world, &gpu);
        world.kill();
        let files = world.lock().files(Folder::Claims);
        for name in files.into_keys() {
            world.lock().put(Folder::Claims, &name, None);
        }
        let executor = world.start();
        if by_prepare {
            assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
        } else {
            let report = executor.reconcile(&world.view());
            assert_eq!(report.events, [Event::Rebuilt { claim: a.uid.clone() }]);
        }
        assert_eq!(living(&world, &gpu), before, "nothing is made anew under a running container");
        let foreign = executor.foreign();
        assert_eq!(foreign[&gpu].iter().map(|i| i.id).collect::<Vec<_>>(), [theirs.gpu_instance]);
        assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Done);
        assert_eq!(shape(&world), [(19, 0, 1)]);
        // Allocated, never prepared: an instance at its placement is foreign, and stays.
        let b = claim_of("b", &[SMALL], "t2");
        world.lock().api.insert(b.uid.clone(), b.clone());
        world.prepare(&executor, &b).unwrap();
        world.unprepare(&executor, &b.uid).unwrap();
        assert_eq!(shape(&world), [(19, 0, 1)]);
    }
}

#[test]
fn a_lost_record_whose_partition_is_gone_too_is_made_anew() {
    let (world, executor, a, gpu) = setup();
    let answer = world.prepare(&executor, &a).unwrap();
    let (instance, inside) = living(&world, &gpu).remove(0);
    sim(&world).edit(|e| {
        e.destroy_compute_instance(&gpu, instance.id, inside[0].id).unwrap();
    });
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"rubbish"));
    let executor = {
        drop(executor);
        world.start()
    };
    executor.reconcile(&world.view());
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(shape(&world), [(9, 4, 1)], "half of one is no partition");
    assert_eq!(instance.id, GpuInstanceId(2));
    let phase = world.lock().records()[&uid("a")].fine().unwrap().phase.clone();
    assert_eq!(phase, Phase::Prepared);
}

#[test]
fn partitions_of_a_claim_that_is_gone_together_with_its_record_are_removed_by_what_its_cdi_file_says() {
    for record in [None, Some(b"rubbish".as_slice())] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        sim(&world).make_foreign_instance(&gpu, GpuInstanceProfileId(19), 0).unwrap();
        world.lock().api.clear();
        world.kill();
        world.lock().put(Folder::Claims, "uid-a.json", record);
        let executor = world.start();
        executor.reconcile(&world.view());
        assert_eq!(shape(&world).len(), 2, "a grace period");
        world.pass(Duration::from_mins(5));
        executor.reconcile(&world.view());
        assert_eq!(shape(&world), [(19, 0, 1)]);
        let m = world.lock();
        assert!(m.records().is_empty() && m.cdi.is_empty());
    }
}

#[test]
fn an_unreadable_record_of_a_gone_claim_whose_partition_is_in_use_holds_that_partition_and_nothing_else() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, _) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    world.lock().api.clear();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"rubbish"));
    let over = world.prepare(&executor, &claim_of("b", &["gpu-0-mig-1g10gb-19-4"], "t2")).unwrap_err();
    assert_eq!(over.category(), "held");
    world.prepare(&executor, &claim_of("b", &[SMALL], "t3")).unwrap();
    sim(&world).end_process(4711);
    executor.reconcile(&world.view());
    assert_eq!(shape(&world), [(19, 0, 1)]);
}

fn after_a_day(world: &World, executor: &Executor) {
    for _ in 0..4 {
        executor.reconcile(&world.view());
        world.pass(Duration::from_mins(5));
    }
}

/// H2, H2b. A torn record, and the claim was allocated anew under its UID.
#[test]
fn a_torn_record_of_a_claim_that_is_allocated_anew_leaks_no_partition_by_prepare_or_reconcile() {
    for by_prepare in [true, false] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        assert_eq!(living(&world, &gpu).len(), 1);
        world.lock().put(Folder::Claims, "uid-a.json", Some(b"{\"checksum\":"));
        let again = claim_of("a", &["gpu-1-mig-1g10gb-19-0"], "t2");
        world.lock().api.insert(again.uid.clone(), again.clone());
        if by_prepare {
            world.prepare(&executor, &again).unwrap();
            assert!(living(&world, &gpu).is_empty(), "what it had is gone before it has something else");
            world.unprepare(&executor, &again.uid).unwrap();
        } else {
            executor.reconcile(&world.view());
            drop(world.unprepare(&executor, &again.uid));
        }
        world.lock().api.clear();
        after_a_day(&world, &executor);
        assert!(is_clean(&world), "left: {:?}", shape(&world));
    }
}

/// The same while a container of the first allocation still computes: nothing is taken from it.
#[test]
fn a_torn_record_of_a_claim_that_is_allocated_anew_keeps_the_partition_that_is_in_use() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, _) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"rubbish"));
    let again = claim_of("a", &["gpu-1-mig-1g10gb-19-0"], "t2");
    world.lock().api.insert(again.uid.clone(), again.clone());
    assert_eq!(world.prepare(&executor, &again).unwrap_err().category(), "held");
    executor.reconcile(&world.view());
    assert_eq!(shape(&world), [(9, 4, 1)]);
    sim(&world).end_process(4711);
    world.prepare(&executor, &again).unwrap();
    assert_eq!(shape(&world), [(19, 0, 1)]);
}

/// The process dies in the middle of a creation, and the record that says so is torn or lost too: the GPU's file has noted
/// what was about to be made.
#[test]
fn a_creation_that_was_cut_short_leaks_nothing_although_its_record_is_torn_or_lost() {
    for record in [None, Some(b"rubbish".as_slice())] {
        for op in [GpuOp::CreateGpuInstance, GpuOp::CreateComputeInstance] {
            let (world, executor, a, gpu) = setup();
            world.lock().crash_at = Some((op.name(), Moment::After));
            world.prepare(&executor, &a).unwrap_err();
            assert_eq!(living(&world, &gpu).len(), 1);
            world.lock().put(Folder::Claims, "uid-a.json", record);
            world.lock().api.clear();
            let executor = world.start();
            executor.restore_cdi(Refresh::All);
            after_a_day(&world, &executor);
            assert!(is_clean(&world), "left: {:?}", shape(&world));
            assert_eq!(world.lock().gpu_state(&gpu).instances, []);
        }
    }
}

/// H3. A lost record (not a torn one), with or without the CDI file, and then the unprepare.
#[test]
fn a_lost_record_and_an_unprepare_leak_no_partition() {
    for file in [true, false] {
        let (world, executor, a, _) = setup();
        world.prepare(&executor, &a).unwrap();
        world.lock().put(Folder::Claims, "uid-a.json", None);
        if !file {
            world.lock().cdi.clear();
        }
        world.lock().api.clear();
        assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Done);
        assert!(is_clean(&world), "left: {:?}", shape(&world));
    }
}

/// A GPU's file that cannot be read fences the GPU until it is made again from the claims' records.
#[test]
fn a_torn_file_of_a_gpu_fences_it_and_is_made_again_and_nothing_leaks() {
    let (world, executor, a, gpu) = setup();
    let file = format!("{gpu}.json");
    world.prepare(&executor, &a).unwrap();
    let whole = world.lock().gpu_state(&gpu);
    world.lock().put(Folder::Gpus, &file, Some(b"{\"checksum\":"));
    let fences = executor.fences().unwrap();
    assert!(fences[&gpu][0].reason.starts_with("its state file cannot be read"), "{fences:?}");
    // As long as a record cannot be read either, the owner of an instance is unknown.
    let record = world.lock().file(Folder::Claims, "uid-a.json").unwrap();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"rubbish"));
    world.lock().api_down = true;
    let small = claim_of("b", &[SMALL], "t2");
    assert_eq!(world.prepare(&executor, &small).unwrap_err().category(), "fenced");
    executor.reconcile(&world.view());
    assert_eq!(executor.fences().unwrap().len(), 1);
    world.lock().api_down = false;
    world.lock().put(Folder::Claims, "uid-a.json", Some(&record));
    world.prepare(&executor, &small).unwrap();
    let again = world.lock().gpu_state(&gpu);
    assert_eq!(again.instances[0], whole.instances[0]);
    assert!(again.may_change_mode, "what was granted is forgotten");
    assert_eq!(world.lock().files(Folder::Corrupt).len(), 1, "for people");
    for claim in [&a, &small] {
        world.unprepare(&executor, &claim.uid).unwrap();
    }
    assert!(is_clean(&world));
}

/// What policies grant comes once. A prepare that needs it must not be refused because the file was lost or torn since.
#[test]
fn what_was_granted_outlives_the_file_of_a_gpu() {
    for file in [None, Some(b"rubbish".as_slice())] {
        let (world, executor, a, gpu) = setup();
        let name = format!("{gpu}.json");
        world.lock().put(Folder::Gpus, &name, file);
        world.grant(&executor, true);
        assert!(world.lock().gpu_state(&gpu).may_change_mode, "granted again and not written");
        world.lock().put(Folder::Gpus, &name, file);
        world.prepare(&executor, &a).unwrap();
        assert!(world.lock().gpu_state(&gpu).may_change_mode);
        world.unprepare(&executor, &a.uid).unwrap();
        assert!(is_clean(&world));
    }
}

/// What a version before has made, and what it has dropped from the file when it wrote it: all, or the first of two.
#[test]
fn instances_that_are_on_record_only_are_noted_at_start_and_then_outlast_the_record() {
    for dropped in [2, 1] {
        let (world, executor, _, gpu) = setup();
        let a = claim_of("a", &[HALF, SMALL], "t1");
        world.prepare(&executor, &a).unwrap();
        let whole = world.lock().gpu_state(&gpu);
        let mut state = whole.clone();
        state.instances.drain(..dropped);
        world.lock().put(Folder::Gpus, &format!("{gpu}.json"), Some(&state.encode()));
        world.kill();
        let executor = world.start();
        executor.restore_cdi(Refresh::All);
        let again = world.lock().gpu_state(&gpu);
        assert_eq!(again.instances.len(), 2);
        assert!(whole.instances.iter().all(|instance| again.instances.contains(instance)), "{again:?}");
        world.lock().put(Folder::Claims, "uid-a.json", None);
        world.lock().api.clear();
        after_a_day(&world, &executor);
        assert!(is_clean(&world), "left: {:?}", shape(&world));
    }
}

/// A GPU's file is made again of what the records say of this GPU, and no other.
#[test]
fn a_file_that_is_made_again_has_no_instances_of_other_gpus() {
    let (world, executor, _, gpu) = setup();
    let a = claim_of("a", &[HALF, "gpu-1-mig-3g40gb-9-4"], "t1");
    world.prepare(&executor, &a).unwrap();
    let whole = world.lock().gpu_state(&gpu);
    world.lock().put(Folder::Gpus, &format!("{gpu}.json"), Some(b"rubbish"));
    executor.reconcile(&world.view());
    assert_eq!(world.lock().gpu_state(&gpu).instances, whole.instances);
}

/// What reconcile makes of fences and of notes of instances in a GPU's file, beside a claim that is prepared.
#[test]
fn fences_of_gone_claims_and_notes_that_no_record_bears_out_are_dropped_from_a_gpus_file() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let elsewhere = claim_of("b", &[SMALL], "t1");
    world.prepare(&executor, &elsewhere).unwrap();
    let other =
        world.lock().gpu_state(&gpu).instances.into_iter().find(|i| i.claim == elsewhere.uid).unwrap();
    world.unprepare(&executor, &elsewhere.uid).unwrap();
    let whole = world.lock().gpu_state(&gpu);
    let made = whole.instances[0].clone();
    let reconciled = |change: &dyn Fn(&mut GpuState)| {
        let mut state = whole.clone();
        change(&mut state);
        world.lock().put(Folder::Gpus, &format!("{gpu}.json"), Some(&state.encode()));
        let events = executor.reconcile(&world.view()).events;
        (world.lock().gpu_state(&gpu), events)
    };
    let fence = |claim: Option<&str>, boot: &str| Fence {
        claim: claim.map(|uid| uid.parse().unwrap()),
        reason: "not known".to_owned(),
        boot: boot.parse().unwrap(),
    };
    let this_boot = made.boot.as_str();
    let cleared = Event::FenceCleared { gpu: gpu.clone() };
    for (fence, stays) in [
        (fence(Some("uid-gone"), this_boot), false),
        (fence(Some("uid-a"), "boot-before"), false),
        (fence(Some("uid-a"), this_boot), true),
        (fence(None, this_boot), true),
    ] {
        let (state, events) = reconciled(&|state| state.fences.push(fence.clone()));
        assert_eq!(state.fences.contains(&fence), stays, "{fence:?}");
        assert_eq!(events.contains(&cleared), !stays, "{fence:?}: {events:?}");
        assert_eq!(state.instances, whole.instances);
    }
    for (note, stays) in [
        (OwnedInstance { boot: "boot-before".parse().unwrap(), ..made.clone() }, false),
        (OwnedInstance { claim: a.uid.clone(), ..other.clone() }, false),
        (OwnedInstance { claim: "uid-lost".parse().unwrap(), ..other.clone() }, true),
    ] {
        let (state, events) = reconciled(&|state| state.instances.push(note.clone()));
        assert_eq!(state.instances.contains(&note), stays, "{note:?}");
        assert!(state.instances.contains(&made), "{note:?}");
        assert!(!events.contains(&cleared), "{events:?}");
    }
}
