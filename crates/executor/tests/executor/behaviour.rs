//! Behaviour of the executor, one sentence at a time.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{Phase, PodRef, Stored};
use divvy_executor::{
    Event, Folder, LockName, ProcessOnGpu, Refresh, RunningDevice, Unprepared, chain,
};
use divvy_gpu_sim::Fault;
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp};

use crate::mig_world::{claim_of_halves, living, mig_world, sim};
use crate::world::accessors::{granted, made};
use crate::world::{HardwareFault, Moment, Place, World, claim, final_state, result};

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn process(pid: u32, pod: &str) -> ProcessOnGpu {
    ProcessOnGpu {
        pid,
        gpu_instance: None,
        pod: Some(pod.to_owned()),
    }
}

/// A whole GPU is one record and one CDI file and a repeated prepare gets the same answer and notes
/// when.
#[test]
fn a_whole_gpu_is_one_record_and_one_cdi_file_and_one_answer() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[1], "t1");
    world.lock().log.clear();
    let before = world.lock().calls;
    let synced = world.lock().syncs;
    let answer = world.prepare(&executor, &a).unwrap();
    // Tombstone, GPU numbers (once), own record, metadata; no file of another claim or GPU; MIG
    // mode, which the driver is asked for, and the GPU's file; without that, the second copy of its
    // promise of caps, twice; the list of CDI files, for lost records; then the three writes.
    assert_eq!(world.lock().calls - before, 12);
    assert_eq!(world.lock().syncs - synced, 1, "the record");
    assert_eq!(
        answer.devices[0].cdi_ids,
        ["gpu.divvy.dev/claim=uid-a-gpu-1"]
    );
    let first = final_state(&world);
    assert_eq!(
        first.cdi.keys().collect::<Vec<_>>(),
        ["gpu.divvy.dev-claim_uid-a.json"]
    );
    assert!(
        first
            .cdi
            .values()
            .next()
            .unwrap()
            .contains(&format!("GPU={}", world.gpu(1)))
    );
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(
        world.prepare(&world.start(), &a).unwrap(),
        answer,
        "after a restart"
    );
    assert_eq!(final_state(&world), first);
    assert_eq!(
        world.lock().syncs - synced,
        3,
        "when it was asked for again"
    );
    let synced = world.lock().syncs;
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert_eq!(world.lock().syncs - synced, 1, "the record's removal");
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::NothingThere
    );
    assert_eq!(
        final_state(&world).records.len() + final_state(&world).cdi.len(),
        0
    );
}

/// A vanished CDI file is written again by a prepare and by restore and a changed one by a full
/// refresh.
#[test]
fn a_vanished_cdi_file_is_written_again_and_a_changed_one_refreshed() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let whole = final_state(&world);
    world.lock().cdi.clear();
    world.prepare(&executor, &a).unwrap();
    assert_eq!(final_state(&world), whole);
    world.lock().cdi.clear();
    let restored = [Event::CdiRestored {
        claim: a.uid.clone(),
    }];
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
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    world
        .prepare(&executor, &claim_of_halves("a", &[0], "t1"))
        .unwrap();
    let answer = world
        .prepare(&executor, &claim_of_halves("a", &[1], "t2"))
        .unwrap();
    assert_eq!(answer.devices[0].device.as_str(), "gpu-1-mig-3g40gb-9-0");
    let state = final_state(&world);
    assert_eq!(state.instances.keys().collect::<Vec<_>>(), [&world.gpu(1)]);
    world.prepare(&executor, &claim("a", &[], "t3")).unwrap();
    assert_eq!(
        final_state(&world).instances.len() + final_state(&world).records.len(),
        0
    );
}

/// Pods that share a claim later are known too and a full disk keeps none of them from it.
#[test]
fn later_pods_of_a_claim_are_known_too_also_on_a_full_disk() {
    let world = World::new("h100x1", 1);
    let executor = world.start();
    let mut shared = claim("shared", &[0], "t1");
    let answer = world.prepare(&executor, &shared).unwrap();
    shared.pods.push(PodRef {
        name: "second-pod".to_owned(),
        uid: "pod-second".to_owned(),
    });
    assert_eq!(world.prepare(&executor, &shared).unwrap(), answer);
    let known = || executor.held().unwrap().remove(0).pods;
    assert_eq!(known(), shared.pods);

    world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
    let before = known();
    shared.pods.push(PodRef {
        name: "third-pod".to_owned(),
        uid: "pod-third".to_owned(),
    });
    assert_eq!(world.prepare(&executor, &shared).unwrap(), answer);
    assert_eq!(known(), before);
    world.lock().write_error = None;
    assert_eq!(world.prepare(&executor, &shared).unwrap(), answer);
    assert_eq!(known(), shared.pods);
}

/// A GPU is handed over as soon as its last holder is unprepared by whichever instance.
#[test]
fn a_gpu_is_handed_over_when_any_instance_unprepares_its_last_holder() {
    let world = World::new("h100x2", 1);
    let (executor, other_instance) = (world.start(), world.start());
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    // Its claim is gone from the API; the kubelet unprepares it 3 s later, at the other instance.
    let (machine, uid) = (world.clone(), a.uid.clone());
    world.later(secs(3), move || {
        assert_eq!(
            machine.unprepare(&other_instance, &uid).unwrap(),
            Unprepared::Done
        );
    });
    let began = world.lock().now;
    let answer = world.prepare(&executor, &claim("b", &[0], "t2")).unwrap();
    assert_eq!(
        answer.devices[0].cdi_ids,
        ["gpu.divvy.dev/claim=uid-b-gpu-0"]
    );
    let took = world.lock().now.saturating_sub(began);
    assert!(took < secs(3) + Duration::from_millis(50), "{took:?}");
}

/// A live holder keeps its GPU and one that does not leave is named after forty seconds.
#[test]
fn a_live_holder_keeps_its_gpu_and_is_named_after_forty_seconds() {
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

/// A process keeps an unprepared GPU held and the next claim gets it when the process ends.
#[test]
fn a_process_keeps_an_unprepared_gpu_held_until_it_ends() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let gpu = world.gpu(0);
    world
        .lock()
        .processes
        .insert(gpu.clone(), vec![process(42, "pod-a")]);
    let began = world.lock().now;
    let why = format!("process 42 still uses {gpu}");
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Lingering(why.clone())
    );
    let took = world.lock().now.saturating_sub(began);
    assert!((secs(10)..secs(11)).contains(&took), "{took:?}");
    assert!(
        world.lock().cdi.is_empty(),
        "no new container starts with it"
    );
    let held = executor.held().unwrap();
    assert_eq!(held.len(), 1);
    assert!(matches!(&held[0].phase, Phase::Leaving(leaving) if leaving.reason == why));
    assert_eq!(
        executor.reconcile(&world.view()).events,
        [Event::Kept {
            claim: a.uid.clone(),
            why: why.clone()
        }]
    );
    // It ends while the next claim waits.
    let machine = world.clone();
    world.later(secs(5), move || machine.lock().processes.clear());
    world.prepare(&executor, &claim("b", &[0], "t2")).unwrap();
    assert_eq!(
        final_state(&world)
            .records
            .keys()
            .map(ToString::to_string)
            .collect::<Vec<_>>(),
        ["uid-b"]
    );
}

#[test]
fn a_lingering_claim_is_taken_up_again_by_its_own_next_pod() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let a = claim_of_halves("a", &[0], "t1");
    let answer = world.prepare(&executor, &a).unwrap();
    let whole = final_state(&world);
    let (gpu, half) = made(&world, &a.uid).remove(0);
    let inside = ProcessOnGpu {
        gpu_instance: Some(half.gi.0),
        ..process(42, "pod-a")
    };
    world.lock().processes.insert(gpu, vec![inside]);
    world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(final_state(&world), whole);
}

/// Processes of a pod with admin access are not in the way and admin access is in nobodys.
#[test]
fn admin_access_is_in_nobodys_way_and_neither_are_its_processes() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let mut watch = claim("watch", &[], "t1");
    watch.allocation.results = vec![result(0, true)];
    world.prepare(&executor, &watch).unwrap();
    let a = claim("a", &[0], "t2");
    world.prepare(&executor, &a).unwrap();
    let gpu = world.gpu(0);
    world
        .lock()
        .processes
        .insert(gpu, vec![process(7, "pod-watch")]);
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert_eq!(
        world.unprepare(&executor, &watch.uid).unwrap(),
        Unprepared::Done
    );
}

#[test]
fn unprepare_works_without_the_driver_and_waits_without_a_list() {
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
        assert_eq!(
            matches!(answer, Unprepared::Lingering(_)),
            lingers,
            "{code}: {answer:?}"
        );
    }
}

#[test]
fn a_gpu_is_given_out_once_its_processes_can_be_listed() {
    for (code, refused) in [
        (GpuErrorCode::TIMEOUT, true),
        (GpuErrorCode::UNKNOWN, true),
        (GpuErrorCode::GPU_IS_LOST, true),
        (GpuErrorCode::NOT_SUPPORTED, false),
        (GpuErrorCode::NO_PERMISSION, false),
        (GpuErrorCode::FUNCTION_NOT_FOUND, false),
    ] {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        let a = claim("a", &[0], "t1");
        world.lock().process_error = Some(code);
        let prepared = world.prepare(&executor, &a);
        assert_eq!(prepared.is_err(), refused, "{code}: {prepared:?}");
        if let Err(error) = prepared {
            assert_eq!(error.category(), "gpu-unreadable", "{code}");
            assert!(world.lock().records().is_empty(), "{code}");
        }
        world.lock().process_error = None;
        world.prepare(&executor, &a).unwrap();
    }
}

/// A prepare that arrived before an unprepare does not bring the claim back and a later one does.
#[test]
fn a_prepare_older_than_an_unprepare_does_not_bring_the_claim_back() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    let late = executor.begin(secs(45));
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::NothingThere
    );
    let error = executor.prepare(&a, &late).unwrap_err();
    assert_eq!(
        chain(&error),
        "claim ns/a (UID uid-a) cannot be prepared: it was unprepared while this call waited (no action required)"
    );
    assert_eq!(final_state(&world).records.len(), 0);
    world.prepare(&executor, &a).unwrap();
}

/// Calls are ordered by their arrival, not by when they get the lock; times of another boot say
/// nothing.
#[test]
fn the_latest_unprepare_wins_over_the_prepares_before_it() {
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
        for unprepare in if is_early_first {
            [&early, &late]
        } else {
            [&late, &early]
        } {
            assert_eq!(
                executor.unprepare(&a.uid, unprepare).unwrap(),
                Unprepared::NothingThere
            );
        }
        let error = executor.prepare(&a, &prepare).unwrap_err();
        assert!(
            chain(&error).contains("it was unprepared while this call waited"),
            "{}",
            chain(&error)
        );
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
    let error = executor
        .prepare(&claim("b", &[0], "t2"), &call)
        .unwrap_err();
    assert_eq!(
        chain(&error),
        "claim ns/b (UID uid-b) cannot be prepared: the call was cancelled"
    );
}

#[test]
fn a_failed_step_is_taken_back_in_the_same_call() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    // The second of two.
    sim(&world).fault(
        Fault::fail(GpuErrorCode::NO_PERMISSION)
            .of(GpuOp::CreateGpuInstance)
            .after(1)
            .times(1),
    );
    let error = world
        .prepare(&executor, &claim_of_halves("a", &[0], "t1"))
        .unwrap_err();
    assert_eq!(
        chain(&error),
        format!(
            "claim ns/a (UID uid-a) cannot be prepared: failed to create a partition of profile 9 at 4+4 on {0}: it was not done: failed to create a GPU instance at 4:4 on {0}: NVML create_gpu_instance failed on {0}: NO_PERMISSION (4) (root is needed)",
            world.gpu(0)
        )
    );
    let state = final_state(&world);
    assert_eq!(
        (
            state.records.len(),
            state.instances.len(),
            state.gpu_states.len()
        ),
        (0, 0, 0)
    );
}

/// A call that times out fences its GPU until it comes back whether or not it succeeded.
#[test]
fn a_call_that_times_out_fences_its_gpu_until_it_comes_back() {
    for succeeds in [true, false] {
        let world = mig_world("h100x2", 1);
        let executor = world.start();
        let gpu = world.gpu(0);
        sim(&world).set_mig_mode(&gpu, true).unwrap();
        world.lock().hardware_fault = Some(HardwareFault::Late {
            after: secs(60),
            succeeds,
        });
        let a = claim_of_halves("a", &[0], "t1");
        let hangs =
            "the call to create a partition of profile 9 at 0+4 has not returned".to_owned();
        assert_eq!(
            chain(&world.prepare(&executor, &a).unwrap_err()),
            format!(
                "claim ns/a (UID uid-a) cannot be prepared: failed to create a partition of profile 9 at 0+4 on {gpu}: its outcome is not known: failed to create a GPU instance at 0:4 on {gpu}: NVML create_gpu_instance failed on {gpu}: TIMEOUT (10) (undoing it failed too: {hangs})"
            )
        );
        let fences = executor.fences().unwrap();
        assert_eq!(fences.keys().collect::<Vec<_>>(), [&gpu]);
        assert_eq!(fences[&gpu][0].reason, hangs);
        // The pod is deleted meanwhile: the answer is success, and the GPU stays held.
        assert_eq!(
            world.unprepare(&executor, &a.uid).unwrap(),
            Unprepared::Lingering(hangs.clone())
        );
        // The next claim waits for the call, which comes back within its 40 s.
        world.pass(secs(20));
        world
            .prepare(&executor, &claim_of_halves("b", &[0], "t2"))
            .unwrap();
        let state = final_state(&world);
        assert_eq!(
            state
                .records
                .keys()
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            ["uid-b"]
        );
        assert_eq!(
            state.instances.values().collect::<Vec<_>>(),
            [&vec![((9, 0, 4), 1), ((9, 4, 4), 1)]]
        );
        assert!(
            state.gpu_states.values().all(|state| state.unsettled == 0),
            "no fence is left"
        );
    }
}

/// After a crash an instance at our place that was not there before is removed and the record with
/// it.
#[test]
fn after_a_crash_a_new_instance_at_our_place_goes_with_its_record() {
    let world = mig_world("h100x2", 4);
    let executor = world.start();
    // Dies right after the first instance was made: only its intent is noted.
    let a = claim_of_halves("a", &[0], "t1");
    for at in 0.. {
        world.crash_in(at, Moment::After);
        drop(world.prepare(&executor, &a));
        if living(&world, &world.gpu(0)).len() == 1 {
            break;
        }
        let executor = world.start();
        executor.restore_cdi(Refresh::Missing);
    }
    let executor = world.start();
    assert_eq!(
        executor.restore_cdi(Refresh::Missing).events,
        [Event::TakenBack {
            claim: a.uid.clone()
        }]
    );
    let state = final_state(&world);
    assert_eq!((state.records.len(), state.instances.len()), (0, 0));
}

#[test]
fn records_of_another_boot_are_carried_out_again_under_the_same_cdi_names() {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    // In the order of their UIDs `b` comes first.
    let (a, b) = (
        claim_of_halves("halves", &[0], "t1"),
        claim("b", &[1], "t1"),
    );
    for one in [&a, &b] {
        world.prepare(&executor, one).unwrap();
        world.lock().api.insert(one.uid.clone(), one.clone());
    }
    let before = final_state(&world);
    world.reboot();
    let executor = world.start();
    world.lock().inventory = None;
    let failed = executor.restore_cdi(Refresh::Missing).events;
    assert!(
        failed.iter().all(|e| matches!(e, Event::Failed { .. })) && failed.len() == 2,
        "{failed:?}"
    );
    world.lock().inventory = Some(std::sync::Arc::new(
        divvy_gpu_sim::SimNode::parse("h100x2").unwrap().inventory(),
    ));
    let again = |uid: &divvy_model::ClaimUid| Event::ExecutedAgain { claim: uid.clone() };
    assert_eq!(
        executor.restore_cdi(Refresh::Missing).events,
        [again(&b.uid), again(&a.uid)]
    );
    assert_eq!(final_state(&world), before);
    // A claim that is gone, or was allocated anew, is let go instead, and others need not wait for
    // it. Where the API does not say, what was prepared is kept.
    world.reboot();
    world.lock().api.remove(&a.uid);
    world
        .lock()
        .api
        .insert(b.uid.clone(), claim("b", &[0], "t2"));
    let executor = world.start();
    world.lock().api_down = true;
    assert_eq!(
        executor.restore_cdi(Refresh::Missing).events,
        [again(&b.uid), again(&a.uid)]
    );
    world.reboot();
    world.lock().api_down = false;
    let executor = world.start();
    let released = |uid: &divvy_model::ClaimUid| Event::Released { claim: uid.clone() };
    assert_eq!(
        executor.restore_cdi(Refresh::Missing).events,
        [released(&b.uid), released(&a.uid)]
    );
    let state = final_state(&world);
    assert_eq!(
        (
            state.records.len(),
            state.instances.len(),
            state.gpu_states.len()
        ),
        (0, 0, 0)
    );
}

/// An orphan is undone only when its claim its pods its processes and its grace period are all
/// gone.
#[test]
fn an_orphan_needs_its_claim_pods_processes_and_grace_gone() {
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
    assert!(!orphan(&|_, view| drop(
        view.claims
            .as_mut()
            .unwrap()
            .insert(a.uid.clone(), a.clone())
    )));
    assert!(orphan(&|_, view| drop(
        view.claims
            .as_mut()
            .unwrap()
            .insert(a.uid.clone(), claim("a", &[1], "t2"))
    )));
    assert!(
        !orphan(&|_, view| view.claims = None),
        "the API could not be asked"
    );
    let running = RunningDevice {
        namespace: "ns".to_owned(),
        claim: "a".to_owned(),
        device: "gpu-0".parse().unwrap(),
    };
    assert!(!orphan(
        &|_, view| view.running = Some(BTreeSet::from([running.clone()]))
    ));
    assert!(
        !orphan(&|_, view| view.running = None),
        "the kubelet could not be asked"
    );
    assert!(!orphan(&|world, view| view.kubelet_connected_since =
        Some(world.lock().now.saturating_sub(secs(60)))));
    assert!(!orphan(&|_, view| view.kubelet_connected_since = None));
    assert!(!orphan(&|world, _| {
        let gpu = world.gpu(0);
        world
            .lock()
            .processes
            .insert(gpu, vec![process(1, "pod-a")]);
    }));
}

/// A lost record of a live claim is made again and the CDI file of a dead one is removed.
#[test]
fn a_lost_record_is_made_again_and_a_dead_claims_cdi_file_removed() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let whole = final_state(&world);
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.lock().put(Folder::Claims, "uid-a.json", None);
    assert_eq!(
        executor.reconcile(&world.view()).events,
        [Event::Rebuilt {
            claim: a.uid.clone()
        }]
    );
    assert_eq!(final_state(&world), whole);
    world.lock().api.clear();
    world.lock().put(Folder::Claims, "uid-a.json", None);
    assert_eq!(executor.reconcile(&world.view()).events, []);
    world.pass(secs(121));
    let file = "gpu.divvy.dev-claim_uid-a.json".to_owned();
    assert_eq!(
        executor.reconcile(&world.view()).events,
        [Event::CdiRemoved { file }]
    );
}

/// A GPU keeps its number while a record names it and unreadable records keep all numbers.
#[test]
fn a_gpu_keeps_its_number_while_a_record_may_name_it() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.prepare(&executor, &claim("a", &[0], "t1")).unwrap();
    let (first, second) = (world.gpu(0), world.gpu(1));
    let none_kept = |_: &divvy_model::GpuUuid, _: u32| false;
    let numbers = executor.number_gpus(&[], &none_kept).unwrap();
    assert_eq!((numbers.of(&first), numbers.of(&second)), (Some(0), None));
    world.lock().put(Folder::Claims, "uid-x.json", Some(b"?"));
    world
        .unprepare(&executor, &"uid-a".parse().unwrap())
        .unwrap();
    assert_eq!(
        executor.number_gpus(&[], &none_kept).unwrap().of(&first),
        Some(0)
    );
    assert!(matches!(
        world.lock().records()[&"uid-x".parse().unwrap()],
        Stored::Corrupt { .. }
    ));
}

/// H9. While a prepare waits for a holder its claim is deallocated and allocated anew (its pod was
/// force-deleted): the device that it waited for belongs to another claim.
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
        world
            .unprepare(&executor, &format!("uid-{name}").parse().unwrap())
            .unwrap();
    }
    let answer = waits_while(|machine| drop(machine.lock().api.remove(&"uid-a".parse().unwrap())));
    assert_eq!(answer.unwrap_err().category(), "deallocated");
    world.prepare(&executor, &x).unwrap();
    world.unprepare(&executor, &x.uid).unwrap();
    let answer = waits_while(|machine| machine.lock().api_down = true);
    assert_eq!(
        answer.unwrap_err().category(),
        "api",
        "nothing is taken that may be another claim's"
    );
    assert!(executor.held().unwrap().is_empty());
}

/// H9 once more: another call is at work on the claim's GPU for long, and the claim is allocated
/// anew meanwhile.
#[test]
fn a_prepare_that_waited_for_a_lock_answers_for_the_claim_of_then() {
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
    let grant = divvy_model::Grant {
        may_change_mode: Some(true),
        offers_partitions: Some(true),
        share_time_slice: None,
        ..divvy_model::Grant::default()
    };
    let all = [world.gpu(0), world.gpu(1)].map(|gpu| (gpu, grant)).into();
    let problem = executor.grant(&all).unwrap_err().to_string();
    assert!(problem.contains(busy.as_str()), "{problem}");
    for gpu in [world.gpu(0), world.gpu(1)] {
        assert_eq!((granted(&world, &gpu) == grant), gpu != busy, "{gpu}");
    }
}
