//! What the executor does, one sentence at a time.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{Phase, PodRef, Stored};
use divvy_executor::{Event, Folder, LockName, ProcessOnGpu, Refresh, RunningDevice, Unprepared, chain};
use divvy_model::GpuErrorCode;

use crate::world::{HardwareFault, Moment, Place, World, claim, final_state, result};

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn process(pid: u32, pod: &str) -> ProcessOnGpu {
    ProcessOnGpu { pid, gpu_instance: None, pod: Some(pod.to_owned()) }
}

#[test]
fn a_whole_gpu_is_one_record_and_one_cdi_file_and_a_repeated_prepare_gets_the_same_answer_and_notes_when() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[1], "t1");
    world.lock().log.clear();
    let before = world.lock().calls;
    let synced = world.lock().syncs;
    let answer = world.prepare(&executor, &a).unwrap();
    // Tombstone, GPU numbers (once), own record, metadata; no file of another claim or GPU; then the three writes.
    assert_eq!(world.lock().calls - before, 7);
    assert_eq!(world.lock().syncs - synced, 1, "the record");
    assert_eq!(answer.devices[0].cdi_ids, ["gpu.divvy.dev/claim=uid-a-gpu-1"]);
    let first = final_state(&world);
    assert_eq!(first.cdi.keys().collect::<Vec<_>>(), ["gpu.divvy.dev-claim_uid-a.json"]);
    assert!(first.cdi.values().next().unwrap().contains(&format!("GPU={}", world.gpu(1))));
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(world.prepare(&world.start(), &a).unwrap(), answer, "after a restart");
    assert_eq!(final_state(&world), first);
    assert_eq!(world.lock().syncs - synced, 3, "when it was asked for again");
    let synced = world.lock().syncs;
    assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Done);
    assert_eq!(world.lock().syncs - synced, 1, "the record's removal");
    assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::NothingThere);
    assert_eq!(final_state(&world).records.len() + final_state(&world).cdi.len(), 0);
}

#[test]
fn a_vanished_cdi_file_is_written_again_by_a_prepare_and_by_restore_and_a_changed_one_by_a_full_refresh() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let whole = final_state(&world);
    world.lock().cdi.clear();
    world.prepare(&executor, &a).unwrap();
    assert_eq!(final_state(&world), whole);
    world.lock().cdi.clear();
    let restored = [Event::CdiRestored { claim: a.uid.clone() }];
    assert_eq!(executor.restore_cdi(Refresh::Missing).events, restored);
    assert_eq!(final_state(&world), whole);
    for bytes in world.lock().cdi.values_mut() {
        bytes.truncate(10);
    }
    assert_eq!(executor.restore_cdi(Refresh::Missing).events, []);
    assert_eq!(executor.restore_cdi(Refresh::All).events, restored);
    assert_eq!(final_state(&world), whole);
}

#[test]
fn the_same_claim_with_another_allocation_is_undone_and_prepared_anew() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.prepare(&executor, &claim("hw-a", &[0], "t1")).unwrap();
    let answer = world.prepare(&executor, &claim("hw-a", &[1], "t2")).unwrap();
    assert_eq!(answer.devices[0].device.as_str(), "gpu-1");
    let state = final_state(&world);
    assert_eq!(state.instances.keys().collect::<Vec<_>>(), [&world.gpu(1)]);
    world.prepare(&executor, &claim("hw-a", &[], "t3")).unwrap();
    assert_eq!(final_state(&world).instances.len() + final_state(&world).records.len(), 0);
}

#[test]
fn pods_that_share_a_claim_later_are_known_too_and_a_full_disk_keeps_none_of_them_from_it() {
    let world = World::new("h100x1", 1);
    let executor = world.start();
    let mut shared = claim("shared", &[0], "t1");
    let answer = world.prepare(&executor, &shared).unwrap();
    shared.pods.push(PodRef { name: "second-pod".to_owned(), uid: "pod-second".to_owned() });
    assert_eq!(world.prepare(&executor, &shared).unwrap(), answer);
    let known = || executor.held().unwrap().remove(0).pods;
    assert_eq!(known(), shared.pods);

    world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
    let before = known();
    shared.pods.push(PodRef { name: "third-pod".to_owned(), uid: "pod-third".to_owned() });
    assert_eq!(world.prepare(&executor, &shared).unwrap(), answer);
    assert_eq!(known(), before);
    world.lock().write_error = None;
    assert_eq!(world.prepare(&executor, &shared).unwrap(), answer);
    assert_eq!(known(), shared.pods);
}

#[test]
fn a_gpu_is_handed_over_as_soon_as_its_last_holder_is_unprepared_by_whichever_instance() {
    let world = World::new("h100x2", 1);
    let (executor, other_instance) = (world.start(), world.start());
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    // Its claim is gone from the API; the kubelet unprepares it 3 s later, at the other instance.
    let (machine, uid) = (world.clone(), a.uid.clone());
    world.later(secs(3), move || {
        assert_eq!(machine.unprepare(&other_instance, &uid).unwrap(), Unprepared::Done);
    });
    let began = world.lock().now;
    let answer = world.prepare(&executor, &claim("b", &[0], "t2")).unwrap();
    assert_eq!(answer.devices[0].cdi_ids, ["gpu.divvy.dev/claim=uid-b-gpu-0"]);
    let took = world.lock().now.saturating_sub(began);
    assert!(took < secs(3) + Duration::from_millis(50), "{took:?}");
}

#[test]
fn a_live_holder_keeps_its_gpu_and_one_that_does_not_leave_is_named_after_forty_seconds() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().api.insert(a.uid.clone(), a.clone());
    let b = claim("b", &[0], "t2");
    let error = world.prepare(&executor, &b).unwrap_err();
    assert!(error.is_permanent());
    assert_eq!(
        chain(&error),
        format!(
            "device gpu-0 ({}) of claim ns/b (UID uid-b): it is held by claim ns/a (UID uid-a), which is in use with device gpu-0 (the scheduler allocated one GPU to both claims: delete one of them and its pod)",
            world.gpu(0)
        )
    );
    world.lock().api.clear();
    let began = world.lock().now;
    let error = world.prepare(&executor, &b).unwrap_err();
    assert!(!error.is_permanent());
    assert_eq!(
        chain(&error),
        format!(
            "device gpu-0 ({}) of claim ns/b (UID uid-b): it is still held by claim ns/a (UID uid-a), to which it is no longer allocated: it is not yet unprepared (it is free when the last container of that claim has ended)",
            world.gpu(0)
        )
    );
    let took = world.lock().now.saturating_sub(began);
    assert!((secs(40)..secs(41)).contains(&took), "{took:?}");
}

#[test]
fn a_process_keeps_an_unprepared_gpu_held_and_the_next_claim_gets_it_when_the_process_ends() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let gpu = world.gpu(0);
    world.lock().processes.insert(gpu.clone(), vec![process(42, "pod-a")]);
    let began = world.lock().now;
    let why = format!("process 42 still uses {gpu}");
    assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Lingering(why.clone()));
    let took = world.lock().now.saturating_sub(began);
    assert!((secs(10)..secs(11)).contains(&took), "{took:?}");
    assert!(world.lock().cdi.is_empty(), "no new container starts with it");
    let held = executor.held().unwrap();
    assert_eq!(held.len(), 1);
    assert!(matches!(&held[0].phase, Phase::Leaving(leaving) if leaving.reason == why));
    assert_eq!(
        executor.reconcile(&world.view()).events,
        [Event::Kept { claim: a.uid.clone(), why: why.clone() }]
    );
    // It ends while the next claim waits.
    let machine = world.clone();
    world.later(secs(5), move || machine.lock().processes.clear());
    world.prepare(&executor, &claim("b", &[0], "t2")).unwrap();
    assert_eq!(final_state(&world).records.keys().map(ToString::to_string).collect::<Vec<_>>(), ["uid-b"]);
}

#[test]
fn a_lingering_claim_is_taken_up_again_by_its_own_next_pod() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("hw-a", &[0], "t1");
    let answer = world.prepare(&executor, &a).unwrap();
    let whole = final_state(&world);
    let gpu = world.gpu(0);
    world.lock().processes.insert(gpu, vec![process(42, "pod-hw-a")]);
    world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(final_state(&world), whole);
}

#[test]
fn processes_of_a_pod_with_admin_access_are_not_in_the_way_and_admin_access_is_in_nobodys() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let mut watch = claim("watch", &[], "t1");
    watch.allocation.results = vec![result(0, true)];
    world.prepare(&executor, &watch).unwrap();
    let a = claim("a", &[0], "t2");
    world.prepare(&executor, &a).unwrap();
    let gpu = world.gpu(0);
    world.lock().processes.insert(gpu, vec![process(7, "pod-watch")]);
    assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Done);
    assert_eq!(world.unprepare(&executor, &watch.uid).unwrap(), Unprepared::Done);
}

#[test]
fn unprepare_works_without_the_driver_and_waits_when_the_driver_lists_no_processes() {
    for (code, lingers) in [
        (GpuErrorCode::DRIVER_NOT_LOADED, false),
        (GpuErrorCode::GPU_IS_LOST, false),
        (GpuErrorCode::NOT_FOUND, false),
        (GpuErrorCode::TIMEOUT, true),
        (GpuErrorCode::UNKNOWN, true),
        (GpuErrorCode::LIBRARY_NOT_FOUND, false),
        // vGPU guests and WSL never list processes: their GPUs would be stuck after the first use.
        (GpuErrorCode::NOT_SUPPORTED, false),
        (GpuErrorCode::NO_PERMISSION, false),
    ] {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        let a = claim("a", &[0], "t1");
        world.prepare(&executor, &a).unwrap();
        world.lock().process_error = Some(code);
        let answer = world.unprepare(&executor, &a.uid).unwrap();
        assert_eq!(matches!(answer, Unprepared::Lingering(_)), lingers, "{code}: {answer:?}");
    }
}

#[test]
fn a_prepare_that_arrived_before_an_unprepare_does_not_bring_the_claim_back_and_a_later_one_does() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    let late = executor.begin(secs(45));
    assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::NothingThere);
    let error = executor.prepare(&a, &late).unwrap_err();
    assert_eq!(
        chain(&error),
        "claim ns/a (UID uid-a) cannot be prepared: it was unprepared while this call waited (no action required)"
    );
    assert_eq!(final_state(&world).records.len(), 0);
    world.prepare(&executor, &a).unwrap();
}

/// Calls are ordered by their arrival, not by when they get the lock; times of another boot say nothing.
#[test]
fn the_latest_unprepare_keeps_the_prepares_before_it_from_bringing_the_claim_back() {
    for is_early_first in [true, false] {
        let world = World::new("h100x2", 1);
        let a = claim("a", &[0], "t1");
        world.unprepare(&world.start(), &a.uid).unwrap();
        world.reboot();
        let executor = world.start();
        let arrive = || {
            world.lock().now += secs(1);
            executor.begin(secs(45))
        };
        let (early, prepare, late) = (arrive(), arrive(), arrive());
        for unprepare in if is_early_first { [&early, &late] } else { [&late, &early] } {
            assert_eq!(executor.unprepare(&a.uid, unprepare).unwrap(), Unprepared::NothingThere);
        }
        let error = executor.prepare(&a, &prepare).unwrap_err();
        assert!(chain(&error).contains("it was unprepared while this call waited"), "{}", chain(&error));
        world.prepare(&executor, &a).unwrap();
    }
}

#[test]
fn a_cancelled_prepare_stops_waiting() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.prepare(&executor, &claim("a", &[0], "t1")).unwrap();
    let call = executor.begin(secs(45));
    let cancel = call.cancel.clone();
    world.later(secs(1), move || cancel.cancel());
    let error = executor.prepare(&claim("b", &[0], "t2"), &call).unwrap_err();
    assert_eq!(chain(&error), "claim ns/b (UID uid-b) cannot be prepared: the call was cancelled");
}

#[test]
fn a_failed_step_is_taken_back_in_the_same_call() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.lock().hardware_fault = Some(HardwareFault::Refuses);
    let error = world.prepare(&executor, &claim("hw-a", &[0], "t1")).unwrap_err();
    assert_eq!(
        chain(&error),
        format!(
            "claim ns/hw-a (UID uid-hw-a) cannot be prepared: the step to create a partition of profile 9 at 0+4 on {} failed: it was not done: the driver refused",
            world.gpu(0)
        )
    );
    let state = final_state(&world);
    assert_eq!((state.records.len(), state.instances.len(), state.gpu_states.len()), (0, 0, 0));
}

#[test]
fn a_call_that_times_out_fences_its_gpu_until_it_comes_back_whether_or_not_it_succeeded() {
    for succeeds in [true, false] {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        world.lock().hardware_fault = Some(HardwareFault::Late { after: secs(60), succeeds });
        let gpu = world.gpu(0);
        let a = claim("hw-a", &[0], "t1");
        let hangs = format!("the call to create a partition of profile 9 at 0+4 on {gpu} has not returned");
        assert_eq!(
            chain(&world.prepare(&executor, &a).unwrap_err()),
            format!(
                "claim ns/hw-a (UID uid-hw-a) cannot be prepared: the step to create a partition of profile 9 at 0+4 on {gpu} failed: its outcome is not known: no answer within 10 s (undoing the earlier steps failed too: {hangs})"
            )
        );
        let fences = executor.fences().unwrap();
        assert_eq!(fences.keys().collect::<Vec<_>>(), [&gpu]);
        assert_eq!(fences[&gpu][0].reason, hangs);
        // The pod is deleted meanwhile: the answer is success, and the GPU stays held.
        assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Lingering(hangs.clone()));
        // The next claim waits for the call, which comes back within its 40 s.
        world.pass(secs(20));
        world.prepare(&executor, &claim("hw-b", &[0], "t2")).unwrap();
        let state = final_state(&world);
        assert_eq!(state.records.keys().map(ToString::to_string).collect::<Vec<_>>(), ["uid-hw-b"]);
        assert_eq!(state.instances.values().collect::<Vec<_>>(), [&vec![(9, 0, 4), (9, 4, 4)]]);
        assert!(state.gpu_states.values().all(|state| state.fences.is_empty()), "no fence is left");
    }
}

#[test]
fn after_a_crash_an_instance_at_our_place_that_was_not_there_before_is_removed_and_the_record_with_it() {
    let world = World::new("h100x2", 4);
    let executor = world.start();
    // Dies in the write after the first step: it was done, and only its intent is on record.
    let a = claim("hw-a", &[0], "t1");
    for at in 0.. {
        world.crash_in(at, Moment::After);
        drop(world.prepare(&executor, &a));
        let made: usize = world.lock().instances.values().map(Vec::len).sum();
        if made == 1 {
            break;
        }
        let executor = world.start();
        executor.restore_cdi(Refresh::Missing);
    }
    let executor = world.start();
    assert_eq!(executor.restore_cdi(Refresh::Missing).events, [Event::TakenBack { claim: a.uid.clone() }]);
    let state = final_state(&world);
    assert_eq!((state.records.len(), state.instances.len()), (0, 0));
}

#[test]
fn records_of_another_boot_are_carried_out_again_under_the_same_cdi_names() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let (a, b) = (claim("hw-a", &[0], "t1"), claim("b", &[1], "t1"));
    for one in [&a, &b] {
        world.prepare(&executor, one).unwrap();
        world.lock().api.insert(one.uid.clone(), one.clone());
    }
    let before = final_state(&world);
    world.reboot();
    let executor = world.start();
    world.lock().inventory = None;
    let failed = executor.restore_cdi(Refresh::Missing).events;
    assert!(failed.iter().all(|e| matches!(e, Event::Failed { .. })) && failed.len() == 2, "{failed:?}");
    world.lock().inventory =
        Some(std::sync::Arc::new(divvy_gpu_sim::SimNode::parse("h100x2").unwrap().inventory()));
    let again = |uid: &divvy_model::ClaimUid| Event::ExecutedAgain { claim: uid.clone() };
    assert_eq!(executor.restore_cdi(Refresh::Missing).events, [again(&b.uid), again(&a.uid)]);
    assert_eq!(final_state(&world), before);
    // A claim that is gone, or was allocated anew, is let go instead, and others need not wait for it. Where the API does
    // not say, what was prepared is kept.
    world.reboot();
    world.lock().api.remove(&a.uid);
    world.lock().api.insert(b.uid.clone(), claim("b", &[0], "t2"));
    let executor = world.start();
    world.lock().api_down = true;
    assert_eq!(executor.restore_cdi(Refresh::Missing).events, [again(&b.uid), again(&a.uid)]);
    world.reboot();
    world.lock().api_down = false;
    let executor = world.start();
    let released = |uid: &divvy_model::ClaimUid| Event::Released { claim: uid.clone() };
    assert_eq!(executor.restore_cdi(Refresh::Missing).events, [released(&b.uid), released(&a.uid)]);
    let state = final_state(&world);
    assert_eq!((state.records.len(), state.instances.len(), state.gpu_states.len()), (0, 0, 0));
}

#[test]
fn an_orphan_is_undone_only_when_its_claim_its_pods_its_processes_and_its_grace_period_are_all_gone() {
    let orphan = |change: &dyn Fn(&World, &mut divvy_executor::ClusterView)| {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        let a = claim("a", &[0], "t1");
        world.prepare(&executor, &a).unwrap();
        executor.reconcile(&world.view());
        world.pass(secs(121));
        let mut view = world.view();
        change(&world, &mut view);
        executor.reconcile(&view);
        !world.lock().records().contains_key(&a.uid)
    };
    assert!(orphan(&|_, _| {}));
    let a = claim("a", &[0], "t1");
    assert!(!orphan(&|_, view| drop(view.claims.as_mut().unwrap().insert(a.uid.clone(), a.clone()))));
    assert!(orphan(&|_, view| drop(
        view.claims.as_mut().unwrap().insert(a.uid.clone(), claim("a", &[1], "t2"))
    )));
    assert!(!orphan(&|_, view| view.claims = None), "the API could not be asked");
    let running =
        RunningDevice { namespace: "ns".to_owned(), claim: "a".to_owned(), device: "gpu-0".parse().unwrap() };
    assert!(!orphan(&|_, view| view.running = Some(BTreeSet::from([running.clone()]))));
    assert!(!orphan(&|_, view| view.running = None), "the kubelet could not be asked");
    assert!(!orphan(
        &|world, view| view.kubelet_connected_since = Some(world.lock().now.saturating_sub(secs(60)))
    ));
    assert!(!orphan(&|_, view| view.kubelet_connected_since = None));
    assert!(!orphan(&|world, _| {
        let gpu = world.gpu(0);
        world.lock().processes.insert(gpu, vec![process(1, "pod-a")]);
    }));
}

#[test]
fn a_lost_record_of_a_live_claim_is_made_again_and_the_cdi_file_of_a_dead_one_is_removed() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let whole = final_state(&world);
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.lock().put(Folder::Claims, "uid-a.json", None);
    assert_eq!(executor.reconcile(&world.view()).events, [Event::Rebuilt { claim: a.uid.clone() }]);
    assert_eq!(final_state(&world), whole);
    world.lock().api.clear();
    world.lock().put(Folder::Claims, "uid-a.json", None);
    assert_eq!(executor.reconcile(&world.view()).events, []);
    world.pass(secs(121));
    let file = "gpu.divvy.dev-claim_uid-a.json".to_owned();
    assert_eq!(executor.reconcile(&world.view()).events, [Event::CdiRemoved { file }]);
}

#[test]
fn a_gpu_keeps_its_number_while_a_record_names_it_and_unreadable_records_keep_all_numbers() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.prepare(&executor, &claim("a", &[0], "t1")).unwrap();
    let (first, second) = (world.gpu(0), world.gpu(1));
    let none_kept = |_: &divvy_model::GpuUuid, _: u32| false;
    let numbers = executor.number_gpus(&[], &none_kept).unwrap();
    assert_eq!((numbers.of(&first), numbers.of(&second)), (Some(0), None));
    world.lock().put(Folder::Claims, "uid-x.json", Some(b"?"));
    world.unprepare(&executor, &"uid-a".parse().unwrap()).unwrap();
    assert_eq!(executor.number_gpus(&[], &none_kept).unwrap().of(&first), Some(0));
    assert!(matches!(world.lock().records()[&"uid-x".parse().unwrap()], Stored::Corrupt { .. }));
}

/// H9. While a prepare waits for a holder its claim is deallocated and allocated anew (its pod was force-deleted): the
/// device that it waited for belongs to another claim.
#[test]
fn a_prepare_that_has_waited_is_answered_with_what_its_claim_has_then() {
    let world = World::new("h100x2", 1);
    let executor = Arc::new(world.start());
    let waits_while = |changes: fn(&World)| {
        let holder = claim("h", &[0], "t1");
        world.prepare(&executor, &holder).unwrap();
        let a = claim("a", &[0], "t2");
        world.lock().api.insert(a.uid.clone(), a.clone());
        let (machine, same) = (world.clone(), executor.clone());
        world.later(secs(5), move || {
            changes(&machine);
            machine.unprepare(&same, &"uid-h".parse().unwrap()).unwrap();
        });
        world.prepare(&executor, &a)
    };
    let x = claim("x", &[0], "t4");
    let answer = waits_while(|machine| {
        let anew = claim("a", &[1], "t3");
        machine.lock().api.insert(anew.uid.clone(), anew);
    });
    assert_eq!(answer.unwrap().devices[0].device.as_str(), "gpu-1");
    world.prepare(&executor, &x).unwrap();
    for name in ["a", "x"] {
        world.unprepare(&executor, &format!("uid-{name}").parse().unwrap()).unwrap();
    }
    let answer = waits_while(|machine| drop(machine.lock().api.remove(&"uid-a".parse().unwrap())));
    assert_eq!(answer.unwrap_err().category(), "deallocated");
    world.prepare(&executor, &x).unwrap();
    world.unprepare(&executor, &x.uid).unwrap();
    let answer = waits_while(|machine| machine.lock().api_down = true);
    assert_eq!(answer.unwrap_err().category(), "api", "nothing is taken that may be another claim's");
    assert!(executor.held().unwrap().is_empty());
}

/// H9 once more: another call is at work on the claim's GPU for long, and the claim is allocated anew meanwhile.
#[test]
fn a_prepare_that_has_waited_for_a_lock_is_answered_with_what_its_claim_has_then() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    let machine = world.clone();
    world.before_lock(LockName::Gpu(world.gpu(0)), 0, move || {
        let anew = claim("a", &[1], "t2");
        machine.lock().api.insert(anew.uid.clone(), anew);
        machine.pass(secs(5));
    });
    let prepared = world.prepare(&executor, &a).unwrap();
    assert_eq!(prepared.devices[0].device.as_str(), "gpu-1");
}

#[test]
fn what_policies_allow_is_stored_for_every_gpu_whose_lock_is_free() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let (first, second) = (world.gpu(0), world.gpu(1));
    let busy = if first < second { first } else { second };
    world.lock().busy.insert(LockName::Gpu(busy.clone()));
    let grant = divvy_model::Grant { may_change_mode: Some(true), share_time_slice: None };
    let all = [world.gpu(0), world.gpu(1)].map(|gpu| (gpu, grant)).into();
    let problem = executor.grant(&all).unwrap_err().to_string();
    assert!(problem.contains(busy.as_str()), "{problem}");
    for gpu in [world.gpu(0), world.gpu(1)] {
        assert_eq!(world.lock().gpu_state(&gpu).has(&grant), gpu != busy, "{gpu}");
    }
}
