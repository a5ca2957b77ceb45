//! A GPU in use is not allocated again, and an unused one is not kept, whatever fails on the way.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{Phase, PodRef, Stored};
use divvy_executor::{
    Event, Folder, LockName, ProcessOnGpu, Refresh, RunningDevice, Unprepared, chain,
};
use divvy_model::ClaimUid;

use crate::mig_world::{claim_of, claim_of_halves, halves, mig_world};
use crate::story::MOMENTS;
use crate::world::accessors::{made, noted};
use crate::world::{HardwareFault, Place, World, claim, final_state};

fn secs(n: u64) -> Duration {
    Duration::from_secs(n)
}

/// A container of claim `a` computes on a GPU.
fn busy(world: &World, number: usize) {
    let gpu = world.gpu(number);
    let process = ProcessOnGpu {
        pid: 7,
        gpu_instance: None,
        pod: Some("pod-a".to_owned()),
    };
    world.lock().processes.insert(gpu, vec![process]);
}

/// A container of claim `a` computes on the partitions that the claim was given, or on GPU 0.
fn busy_with(world: &World, claim: &ClaimUid) {
    let partitions = made(world, claim);
    if partitions.is_empty() {
        busy(world, 0);
    }
    for (gpu, made) in partitions {
        let process = ProcessOnGpu {
            pid: 7,
            gpu_instance: Some(made.gi.0),
            pod: Some("pod-a".to_owned()),
        };
        world.lock().processes.entry(gpu).or_default().push(process);
    }
}

fn phase(world: &World, uid: &ClaimUid) -> Option<Phase> {
    world
        .lock()
        .records()
        .get(uid)
        .and_then(Stored::fine)
        .map(|record| record.phase.clone())
}

#[test]
fn a_full_disk_does_not_keep_claims_from_being_unprepared() {
    for place in [Place::Store, Place::Cdi] {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        let a = claim("a", &[0], "t1");
        world.prepare(&executor, &a).unwrap();
        world.lock().write_error = Some((place, ErrorKind::StorageFull));
        assert_eq!(
            world.unprepare(&executor, &a.uid).unwrap(),
            Unprepared::Done
        );
        assert_eq!(
            final_state(&world).records.len() + final_state(&world).cdi.len(),
            0
        );
    }
}

/// A full disk does not keep partitions from being removed even if the plugin dies meanwhile.
#[test]
fn on_a_full_disk_partitions_are_removed_even_across_a_crash() {
    let calls = ["destroy_compute_instance", "destroy_gpu_instance"];
    let crashes = calls
        .iter()
        .flat_map(|call| MOMENTS.map(|moment| Some((*call, moment))));
    for dies in crashes.chain([None]) {
        let world = mig_world("h100x2", 1);
        let executor = world.start();
        let a = claim_of_halves("a", &[0], "t1");
        world.prepare(&executor, &a).unwrap();
        world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
        if let Some((call, moment)) = dies {
            world.lock().crash_at = Some((call, moment));
            drop(world.unprepare(&executor, &a.uid));
            assert!(world.lock().dead, "{call} {moment:?}");
        }
        // The kubelet, which has no answer, comes again.
        let executor = world.start();
        assert_eq!(
            world.unprepare(&executor, &a.uid).unwrap(),
            Unprepared::Done
        );
        let left = final_state(&world);
        assert_eq!(
            left.records.len() + left.cdi.len() + left.instances.len(),
            0,
            "{dies:?}"
        );
    }
}

/// A removal that comes back late, or only in part, on a full disk: the record says that it is half
/// gone, to the next prepare as after a crash.
#[test]
fn a_removal_that_began_on_a_full_disk_is_finished_by_the_next_prepare() {
    let late = HardwareFault::Late {
        after: secs(20),
        succeeds: true,
    };
    for (fault, restarts) in [
        (late, false),
        (late, true),
        (HardwareFault::Refuses, false),
        (HardwareFault::Refuses, true),
    ] {
        let world = mig_world("h100x2", 1);
        let mut executor = world.start();
        let a = claim_of_halves("a", &[0], "t1");
        world.lock().api.insert(a.uid.clone(), a.clone());
        world.prepare(&executor, &a).unwrap();
        let whole = final_state(&world).instances;
        world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
        world.lock().hardware_fault = Some(fault);
        drop(world.unprepare(&executor, &a.uid));
        world.lock().write_error = None;
        world.lock().hardware_fault = None;
        world.pass(secs(60));
        if restarts {
            executor = world.start();
            executor.restore_cdi(Refresh::Missing);
        }
        let devices = world.prepare(&executor, &a).unwrap().devices;
        assert_eq!(devices.len(), 2, "{fault:?} {restarts}");
        assert_eq!(final_state(&world).instances, whole, "{fault:?} {restarts}");
    }
}

/// The file of a GPU has more to say than which instances live, so that it is written and not
/// removed.
#[test]
fn on_a_full_disk_partitions_are_removed_though_the_gpu_file_stays() {
    let (world, executor, a, gpu) = crate::mig_world::setup();
    world.prepare(&executor, &a).unwrap();
    world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert!(crate::mig_world::is_clean(&world));
    // What could not be written is put right later.
    world.lock().api.clear();
    world.lock().write_error = None;
    for _ in 0..2 {
        executor.reconcile(&world.view());
        world.pass(secs(300));
    }
    assert_eq!(noted(&world, &gpu), []);
    world.prepare(&executor, &a).unwrap();
}

/// A claim that must linger on a full disk is answered with an error goes on holding and goes when
/// its process does.
#[test]
fn a_claim_that_must_linger_on_a_full_disk_is_an_error_and_holds() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    busy(&world, 0);
    world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
    let began = world.lock().now;
    let error = world.unprepare(&executor, &a.uid).unwrap_err();
    let gpu = world.gpu(0);
    assert_eq!(
        chain(&error),
        format!(
            "claim UID uid-a cannot be unprepared: process 7 still uses {gpu}, and this could not be recorded: the record of claim UID uid-a cannot be written (the node's disk is full: free some space): no storage space"
        )
    );
    let took = world.lock().now.saturating_sub(began);
    assert!(
        (secs(10)..secs(11)).contains(&took),
        "the process might have ended: {took:?}"
    );
    assert_eq!(
        phase(&world, &a.uid),
        Some(Phase::Prepared),
        "nothing could be written"
    );
    let held = world
        .prepare(&executor, &claim("b", &[0], "t2"))
        .unwrap_err();
    assert!(
        chain(&held).contains("is still held by claim ns/a"),
        "{}",
        chain(&held)
    );

    // The kubelet comes again: with the disk still full and the process gone, and once while it
    // goes.
    let (machine, instance) = (world.clone(), world.gpu(0));
    world.later(secs(3), move || {
        drop(machine.lock().processes.remove(&instance));
    });
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert_eq!(final_state(&world).records.len(), 0);
}

#[test]
fn a_lingering_claim_that_cannot_be_taken_up_keeps_its_gpu() {
    // Its partitions are as little this call's to take back as its record is.
    for devices in [vec!["gpu-0".to_owned()], halves(&[0])] {
        for (place, missing) in [
            (Place::Store, false),
            (Place::Cdi, false),
            (Place::Cdi, true),
        ] {
            let world = mig_world("h100x2", 1);
            let executor = world.start();
            let names: Vec<_> = devices.iter().map(String::as_str).collect();
            let a = claim_of("a", &names, "t1");
            world.prepare(&executor, &a).unwrap();
            busy_with(&world, &a.uid);
            assert!(matches!(
                world.unprepare(&executor, &a.uid).unwrap(),
                Unprepared::Lingering(_)
            ));
            let lingering = final_state(&world);

            world.lock().edits_missing = missing;
            world.lock().write_error = (!missing).then_some((place, ErrorKind::StorageFull));
            world.prepare(&executor, &a).unwrap_err();
            world.lock().edits_missing = false;
            world.lock().write_error = None;
            assert_eq!(
                final_state(&world),
                lingering,
                "{names:?} {place:?} {missing}"
            );
            world
                .prepare(&executor, &claim("b", &[0], "t2"))
                .unwrap_err();

            world.prepare(&executor, &a).unwrap();
            assert_eq!(phase(&world, &a.uid), Some(Phase::Prepared));
        }
    }
}

#[test]
fn an_earlier_boots_record_that_cannot_be_carried_out_is_later() {
    let full = ErrorKind::StorageFull;
    for (devices, error) in [
        (vec!["gpu-0".to_owned()], full),
        (halves(&[0]), full),
        (halves(&[0]), ErrorKind::ReadOnlyFilesystem),
    ] {
        let world = mig_world("h100x2", 1);
        let names: Vec<_> = devices.iter().map(String::as_str).collect();
        let a = claim_of("a", &names, "t1");
        world.prepare(&world.start(), &a).unwrap();
        world.lock().api.insert(a.uid.clone(), a.clone());
        let whole = final_state(&world);
        world.reboot();
        let executor = world.start();
        world.lock().write_error = Some((Place::Cdi, error));
        let events = executor.restore_cdi(Refresh::All).events;
        assert!(matches!(&events[..], [Event::Failed { .. }]), "{events:?}");
        world.lock().write_error = None;
        assert_eq!(
            final_state(&world).instances.len(),
            0,
            "what this call made is taken back"
        );
        assert_eq!(
            executor.restore_cdi(Refresh::Missing).events,
            [Event::ExecutedAgain {
                claim: a.uid.clone()
            }]
        );
        assert_eq!(final_state(&world), whole);
    }
}

#[test]
fn an_unreadable_record_whose_replacement_fails_stays_in_the_way() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
    world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
    assert_eq!(
        world.prepare(&executor, &a).unwrap_err().category(),
        "unreadable-record"
    );
    world.lock().write_error = None;
    assert_eq!(
        world.lock().file(Folder::Claims, "uid-a.json").unwrap(),
        b"{"
    );
}

/// With a CDI file or without: only the API says what the record was about. Processes that are left
/// keep their GPU as any foreign process does.
#[test]
fn an_unreadable_record_of_a_gone_claim_is_set_aside_at_once() {
    for cdi_file in [true, false] {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        let a = claim("a", &[0], "t1");
        world.prepare(&executor, &a).unwrap();
        busy(&world, 0);
        world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
        if !cdi_file {
            world.lock().cdi.clear();
        }
        let b = claim("b", &[0], "t2");
        let error = world.prepare(&executor, &b).unwrap_err();
        assert_eq!(error.category(), "foreign-processes");
        assert_eq!(world.lock().files(Folder::Corrupt).len(), 1);
        // Nothing runs on the other GPU: whatever the record said, it is free.
        world.prepare(&executor, &claim("c", &[1], "t2")).unwrap();
        assert_eq!(
            world.unprepare(&executor, &a.uid).unwrap(),
            Unprepared::NothingThere
        );
        world.lock().processes.clear();
        world.prepare(&executor, &b).unwrap();
    }
}

/// A live claim's record is torn: it is rebuilt, also without its CDI file, and not before the
/// driver says what is there.
#[test]
fn a_torn_record_waits_for_the_driver_and_needs_no_cdi_file() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let answer = world.prepare(&executor, &a).unwrap();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
    let inventory = world.lock().inventory.take();
    let events = executor.reconcile(&world.view()).events;
    assert!(
        matches!(events.last(), Some(Event::Failed { .. })),
        "{events:?}"
    );
    assert_eq!(world.lock().cdi.len(), 1, "a container of it may start");
    world.lock().inventory = inventory;
    world.lock().cdi.clear();
    let events = executor.reconcile(&world.view()).events;
    assert_eq!(
        events.last(),
        Some(&Event::Rebuilt {
            claim: a.uid.clone()
        })
    );
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    // What it has allocated now can never be prepared: there is nothing to wait for.
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
    let elsewhere = claim("a", &[9], "t1");
    world.lock().api.insert(a.uid.clone(), elsewhere);
    let events = executor.reconcile(&world.view()).events;
    assert!(
        matches!(events.last(), Some(Event::SetAside { .. })),
        "{events:?}"
    );
}

/// Files were copied about.
#[test]
fn a_record_of_another_claim_under_a_claims_name_counts_as_unreadable() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.prepare(&executor, &claim("a", &[0], "t1")).unwrap();
    let record = world.lock().file(Folder::Claims, "uid-a.json").unwrap();
    world
        .lock()
        .put(Folder::Claims, "uid-b.json", Some(&record));
    let events = executor.restore_cdi(Refresh::Missing).events;
    let why = "its record cannot be read and is rebuilt from the API: it is the record of claim UID uid-a";
    let kept = Event::Kept {
        claim: "uid-b".parse().unwrap(),
        why: why.to_owned(),
    };
    assert!(events.contains(&kept), "{events:?}");
}

/// The plugin looks again soon only if an answer says that a claim lingers still.
#[test]
fn finishing_lingering_claims_says_whether_any_is_left() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    assert!(!executor.finish_lingering().1);
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    busy(&world, 0);
    assert!(matches!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Lingering(_)
    ));
    assert!(executor.finish_lingering().1);
    world.lock().processes.clear();
    assert!(!executor.finish_lingering().1);
    assert!(world.lock().records().is_empty());
}

/// The disk does not give the content of one file any more: that is as bad as a torn one, and no
/// worse.
#[test]
fn a_bad_block_in_one_file_stops_no_other_claim() {
    // A record.
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let answer = world.prepare(&executor, &a).unwrap();
    let bad = (Folder::Claims, "uid-a.json".to_owned());
    world.lock().bad_blocks.insert(bad.clone());
    let executor = world.start();
    assert_eq!(executor.held().unwrap(), []);
    world.lock().bad_blocks.clear();
    assert_eq!(
        executor.held().unwrap().len(),
        1,
        "the disk gives it after all"
    );
    world.lock().bad_blocks.insert(bad);
    let executor = world.start();
    world.prepare(&executor, &claim("b", &[1], "t2")).unwrap();
    executor.reconcile(&world.view());
    assert_eq!(phase(&world, &a.uid), Some(Phase::Prepared), "rebuilt");
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(executor.held().unwrap().len(), 2);
    // The file of a GPU.
    let (world, executor, a, gpu) = crate::mig_world::setup();
    world.prepare(&executor, &a).unwrap();
    world
        .lock()
        .bad_blocks
        .insert((Folder::Gpus, format!("{gpu}.json")));
    let executor = world.start();
    world
        .prepare(
            &executor,
            &crate::mig_world::claim_of("b", &["gpu-1"], "t2"),
        )
        .unwrap();
    executor.reconcile(&world.view());
    assert_eq!(noted(&world, &gpu).len(), 1, "rebuilt");
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
}

/// No more files can be opened for a moment: what is on disk is neither moved aside nor rebuilt.
#[test]
fn a_file_that_cannot_be_read_now_is_not_taken_for_a_corrupt_one() {
    const TOO_MANY_OPEN_FILES: i32 = 24;
    let (world, executor, a, gpu) = crate::mig_world::setup();
    world.prepare(&executor, &a).unwrap();
    let whole = final_state(&world);
    for bad in [
        (Folder::Claims, "uid-a.json".to_owned()),
        (Folder::Gpus, format!("{gpu}.json")),
    ] {
        let executor = world.start();
        world.lock().bad_disk = Some(TOO_MANY_OPEN_FILES);
        world.lock().bad_blocks.insert(bad);
        executor.reconcile(&world.view());
        assert_eq!(final_state(&world), whole);
        assert!(world.unprepare(&executor, &a.uid).is_err());
        assert_eq!(world.lock().files(Folder::Corrupt).len(), 0);
        world.lock().bad_blocks.clear();
    }
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
}

#[test]
fn a_record_that_stays_unreadable_keeps_no_call_at_work_for_ever() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let answer = world.prepare(&executor, &a).unwrap();
    world.lock().bad_disk = Some(5);
    world
        .lock()
        .bad_blocks
        .insert((Folder::Claims, "uid-a.json".to_owned()));
    let executor = world.start();
    let error = chain(&world.prepare(&executor, &a).unwrap_err());
    assert!(
        error.contains("it was rebuilt just now, and no time of this call is left"),
        "{error}"
    );
    let answer_to_unprepare = world.unprepare(&executor, &a.uid).unwrap();
    assert!(
        matches!(answer_to_unprepare, Unprepared::Lingering(_)),
        "{answer_to_unprepare:?}"
    );
    world.lock().bad_blocks.clear();
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
}

/// The pod waits in Terminating for it.
#[test]
fn a_gone_claim_with_a_torn_record_is_unprepared_at_once() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().asked.clear();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert!(world.lock().records().is_empty());
}

/// An unreadable record of a gone claim that a CDI file puts elsewhere frees all but its GPU.
#[test]
fn a_gone_claims_torn_record_frees_all_but_the_gpu_of_its_instance() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    busy(&world, 1);
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
    world.prepare(&executor, &claim("b", &[0], "t2")).unwrap();
}

#[test]
fn reconcile_treats_a_gone_claims_torn_record_as_an_orphan() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
    let why = |view| match executor.reconcile(&view).events.last() {
        Some(Event::Kept { why, .. }) => why.clone(),
        other => panic!("{other:?}"),
    };
    assert!(why(world.view()).contains("waiting for an unprepare"));
    world.pass(secs(300));
    let mut view = world.view();
    view.running = None;
    assert!(why(view).contains("did not report whether"));
    let mut view = world.view();
    let running = RunningDevice {
        namespace: "ns".to_owned(),
        claim: "a".to_owned(),
        device: "gpu-0".parse().unwrap(),
    };
    view.running = Some(BTreeSet::from([running]));
    assert!(why(view).contains("a running pod has gpu-0 of claim ns/a"));
    let events = executor.reconcile(&world.view()).events;
    let set_aside =
        |event: &Event| matches!(event, Event::SetAside { claim, .. } if *claim == a.uid);
    assert!(events.iter().any(set_aside), "{events:?}");

    world.prepare(&executor, &a).unwrap();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
    executor.reconcile(&world.view());
    world.pass(secs(300));
    let events = executor.reconcile(&world.view()).events;
    assert!(
        matches!(events.last(), Some(Event::SetAside { .. })),
        "{events:?}"
    );
    assert_eq!(world.lock().records().len(), 0);
}

#[test]
fn a_claim_that_is_unprepared_while_reconcile_looks_at_cdi_files_stays_so() {
    let world = World::new("h100x2", 1);
    let executor = Arc::new(world.start());
    let a = claim("a", &[0], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.prepare(&executor, &a).unwrap();
    let view = world.view();
    let (machine, same, uid) = (world.clone(), executor.clone(), a.uid.clone());
    world.after_listing_cdi(move || {
        assert_eq!(machine.unprepare(&same, &uid).unwrap(), Unprepared::Done);
    });
    assert_eq!(executor.reconcile(&view).events, []);
    assert_eq!(
        final_state(&world).records.len() + final_state(&world).cdi.len(),
        0
    );
}

#[test]
fn an_unprepare_before_another_instances_prepare_does_not_undo_it() {
    let world = World::new("h100x2", 1);
    let (executor, other_instance) = (world.start(), world.start());
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    // Arrives, and gets the lock only after another unprepare and a prepare.
    let early = executor.begin(secs(45));
    assert_eq!(
        world.unprepare(&other_instance, &a.uid).unwrap(),
        Unprepared::Done
    );
    world.prepare(&other_instance, &a).unwrap();
    let whole = final_state(&world);
    assert_eq!(
        executor.unprepare(&a.uid, &early).unwrap(),
        Unprepared::PreparedAgain
    );
    assert_eq!(final_state(&world), whole);
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
}

/// An unprepare that came before a prepare at the other instance that found its claim ready does
/// not undo it.
#[test]
fn an_unprepare_before_a_prepare_that_was_ready_does_not_undo_it() {
    let world = World::new("h100x2", 1);
    let (executor, other_instance) = (world.start(), world.start());
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    // Arrives, and gets the lock only after a prepare for the claim's next pod.
    let early = executor.begin(secs(45));
    world.prepare(&other_instance, &a).unwrap();
    let whole = final_state(&world);
    assert_eq!(
        executor.unprepare(&a.uid, &early).unwrap(),
        Unprepared::PreparedAgain
    );
    assert_eq!(final_state(&world), whole);
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
}

/// An API that does not answer does not make a call last longer than the kubelet waits.
#[test]
fn a_silent_api_does_not_make_a_call_outlast_the_kubelets_wait() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    for unreadable in [false, true] {
        if unreadable {
            world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
        }
        world.lock().api_takes = Some(secs(60));
        let began = world.lock().now;
        world
            .prepare(&executor, &claim("b", &[0], "t2"))
            .unwrap_err();
        let took = world.lock().now.saturating_sub(began);
        assert!(took <= secs(41), "{took:?}");
    }
    let began = world.lock().now;
    assert!(matches!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Lingering(_)
    ));
    let took = world.lock().now.saturating_sub(began);
    assert!(took <= secs(11), "{took:?}");
}

/// Its answer decides for how long another claim waits, and every call on the node asks it.
#[test]
fn the_api_is_asked_for_a_holder_every_two_seconds_unless_it_leaves() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let asked = || {
        let began = world.lock().now;
        let before = world.lock().look_ups;
        let b = claim("b", &[0], "t2");
        let error = world.prepare(&executor, &b).unwrap_err();
        assert_eq!(error.category(), "held");
        let took = world.lock().now.saturating_sub(began);
        assert!(took >= secs(39), "{took:?}");
        world.lock().look_ups - before
    };
    let times = asked();
    assert!((15..=21).contains(&times), "{times}");
    busy(&world, 0);
    world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(asked(), 0);
}

/// The kubelet starts a pod when the one before it has ended: most hand-overs take milliseconds.
#[test]
fn a_hand_over_of_milliseconds_is_noticed_within_milliseconds() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    world.lock().asked.clear();
    let (machine, other) = (world.clone(), world.start());
    let after = Duration::from_millis(5);
    world.later(after, move || {
        machine.unprepare(&other, &a.uid).unwrap();
    });
    let began = world.lock().now;
    world.prepare(&executor, &claim("b", &[0], "t2")).unwrap();
    let took = world.lock().now.saturating_sub(began);
    assert!(took < after * 2, "{took:?}");
}

#[test]
fn of_the_unreadable_files_that_were_set_aside_the_newest_twenty_are_kept() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    for n in 0..25 {
        world.lock().put(
            Folder::Corrupt,
            &format!("claim-uid-x-{}", 100 - n),
            Some(b"{"),
        );
    }
    executor.reconcile(&world.view());
    let kept: BTreeSet<_> = world.lock().files(Folder::Corrupt).into_keys().collect();
    let newest: BTreeSet<_> = (5..25)
        .map(|n| format!("claim-uid-x-{}", 100 - n))
        .collect();
    assert_eq!(kept, newest);
}

#[test]
fn a_crowd_of_holders_that_others_are_at_work_on_is_waited_for_together() {
    let world = World::new("h100x1", 1);
    let executor = world.start();
    for n in 0..20 {
        let share = crate::mig_world::claim_of(&format!("s{n}"), &["gpu-0-ts"], "t1");
        world.prepare(&executor, &share).unwrap();
        world.lock().busy.insert(LockName::Claim(share.uid));
    }
    let began = world.lock().now;
    let call = executor.begin(Duration::from_secs(1));
    executor
        .prepare(&claim("w", &[0], "t2"), &call)
        .unwrap_err();
    let took = world.lock().now.saturating_sub(began);
    assert!(took < Duration::from_millis(1500), "{took:?}");
}

/// A container of a pod computes on a GPU.
fn computes(world: &World, number: usize, pod: &str) {
    let gpu = world.gpu(number);
    let process = ProcessOnGpu {
        pid: 7,
        gpu_instance: None,
        pod: Some(pod.to_owned()),
    };
    world.lock().processes.insert(gpu, vec![process]);
}

/// H8. A claim shared by pods is prepared once, so the record knows the first pod only. A later one
/// has another claim too.
#[test]
fn a_shared_gpu_is_not_given_away_while_a_later_pod_computes() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let shared = claim("shared", &[0], "t1");
    world.prepare(&executor, &shared).unwrap();
    // The later pod, "pod-own", uses both claims; it computes on both GPUs, is force-deleted and
    // slow to die.
    let own = claim("own", &[1], "t2");
    world.prepare(&executor, &own).unwrap();
    computes(&world, 0, "pod-own");
    computes(&world, 1, "pod-own");
    assert!(matches!(
        world.unprepare(&executor, &own.uid).unwrap(),
        Unprepared::Lingering(_)
    ));
    assert!(matches!(
        world.unprepare(&executor, &shared.uid).unwrap(),
        Unprepared::Lingering(_)
    ));
    let other = world.prepare(&executor, &claim("c", &[0], "t3"));
    assert_eq!(
        other.unwrap_err().category(),
        "held",
        "process 7 still computes on gpu-0"
    );
}

/// H10. A privileged pod sees all GPUs. If it has a claim of GPU 1 and computes on GPU 0, it is a
/// stranger there.
#[test]
fn a_process_of_a_pod_with_another_gpu_is_a_stranger() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    world.prepare(&executor, &claim("own", &[1], "t1")).unwrap();
    computes(&world, 0, "pod-own");
    let other = world.prepare(&executor, &claim("c", &[0], "t2"));
    assert_eq!(other.unwrap_err().category(), "foreign-processes");
    // Its own pod, or one that may look at the GPU, is none.
    computes(&world, 0, "pod-c");
    world.prepare(&executor, &claim("c", &[0], "t2")).unwrap();
}

/// A claim that had other devices, or the same ones before a boot, has no processes on them yet.
#[test]
fn strangers_are_seen_by_claims_that_were_prepared_before() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.prepare(&executor, &a).unwrap();
    computes(&world, 1, "stranger");
    let moved = world.prepare(&executor, &claim("a", &[1], "t2"));
    assert_eq!(moved.unwrap_err().category(), "foreign-processes");

    world.reboot();
    let executor = world.start();
    computes(&world, 0, "stranger");
    let again = world.prepare(&executor, &a);
    assert_eq!(again.unwrap_err().category(), "foreign-processes");
    let report = executor.restore_cdi(Refresh::All);
    assert!(
        matches!(&report.events[..], [Event::Kept { why, .. }] if why.contains("stranger")),
        "{report:?}"
    );
    assert!(world.lock().cdi.is_empty());
    world.lock().processes.clear();
    executor.restore_cdi(Refresh::Missing);
    assert_eq!(world.lock().cdi.len(), 1);
}

/// The record of another share is of the boot before too, or the share is new and joins it.
#[test]
fn after_a_boot_no_share_vouches_for_another_before_the_gpu_is_looked_at() {
    let world = World::new("h100x1", 1);
    let [a, b, c] = ["a", "b", "c"].map(|name| claim_of(name, &["gpu-0-ts"], "t1"));
    let executor = world.start();
    for claim in [&a, &b] {
        world.lock().api.insert(claim.uid.clone(), claim.clone());
        world.prepare(&executor, claim).unwrap();
    }
    world.reboot();
    let executor = world.start();
    computes(&world, 0, "stranger");
    let events = executor.restore_cdi(Refresh::All).events;
    let waits = |event: &Event| matches!(event, Event::Kept { .. });
    assert!(events.len() == 2 && events.iter().all(waits), "{events:?}");
    for claim in [&a, &c] {
        let refused = world.prepare(&executor, claim).unwrap_err();
        assert_eq!(refused.category(), "foreign-processes");
    }
    assert!(world.lock().cdi.is_empty());

    world.lock().processes.clear();
    world.prepare(&executor, &a).unwrap();
    // A process of a pod that is not known is from here on taken for the first share's.
    computes(&world, 0, "later-pod-of-a");
    executor.restore_cdi(Refresh::Missing);
    assert_eq!(world.lock().cdi.len(), 2);
}

/// P3. Pods that come after the prepare are followed through the API.
#[test]
fn reconcile_follows_the_pods_of_a_claim_and_says_so() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let mut shared = claim("shared", &[0], "t1");
    world.prepare(&executor, &shared).unwrap();
    let later = PodRef {
        name: "later".to_owned(),
        uid: "pod-later".to_owned(),
    };
    shared.pods.push(later.clone());
    world.lock().api.insert(shared.uid.clone(), shared.clone());
    let changed = Event::PodsChanged {
        claim: shared.uid.clone(),
    };
    assert_eq!(executor.reconcile(&world.view()).events, [changed]);
    assert!(executor.held().unwrap()[0].pods.contains(&later));
    assert_eq!(executor.reconcile(&world.view()).events, [], "once");
    // Not of another allocation, and not while another call is at work on the claim.
    shared.allocation.allocated_at = Some("t2".to_owned());
    shared.pods.clear();
    shared.pods.push(later);
    world.lock().api.insert(shared.uid.clone(), shared.clone());
    executor.reconcile(&world.view());
    assert_eq!(executor.held().unwrap()[0].pods.len(), 2);
}

/// Another process acts between a look and the lock that is taken for it.
#[test]
fn what_was_read_before_a_lock_is_read_again_under_it() {
    let setup = || {
        let world = World::new("h100x2", 1);
        let (executor, other) = (world.start(), world.start());
        let a = claim("a", &[0], "t1");
        world.prepare(&executor, &a).unwrap();
        (world, executor, other, a)
    };
    let lock = |claim: &divvy_claims::Claim| LockName::Claim(claim.uid.clone());
    // Reconcile looks at a claim twice: restored first, then compared with the API.
    for times in 0..2 {
        // An orphan that is prepared anew just then is none.
        let (world, executor, other, a) = setup();
        executor.reconcile(&world.view());
        world.pass(Duration::from_mins(5));
        let (machine, anew) = (world.clone(), claim("a", &[0], "t2"));
        world.before_lock(lock(&a), times, move || {
            drop(machine.prepare(&other, &anew).unwrap());
        });
        executor.reconcile(&world.view());
        let record = world.lock().records()[&a.uid].fine().unwrap().clone();
        assert_eq!(
            (record.allocated_at.as_deref(), record.phase),
            (Some("t2"), Phase::Prepared)
        );
        assert_eq!(world.lock().cdi.len(), 1);
        // A claim that is unprepared just then does not come back with its new pods.
        let (world, executor, other, mut a) = setup();
        a.pods.push(PodRef {
            name: "later".to_owned(),
            uid: "pod-later".to_owned(),
        });
        world.lock().api.insert(a.uid.clone(), a.clone());
        let (machine, uid) = (world.clone(), a.uid.clone());
        world.before_lock(lock(&a), times, move || {
            drop(machine.unprepare(&other, &uid).unwrap());
        });
        executor.reconcile(&world.view());
        assert!(world.lock().records().is_empty());
        // A CDI file whose claim is prepared again just then stays.
        let (world, executor, other, a) = setup();
        world.lock().put(Folder::Claims, "uid-a.json", None);
        executor.reconcile(&world.view());
        world.pass(Duration::from_mins(5));
        let (machine, again) = (world.clone(), a.clone());
        world.before_lock(lock(&a), times, move || {
            drop(machine.prepare(&other, &again).unwrap());
        });
        executor.reconcile(&world.view());
        let m = world.lock();
        assert_eq!((m.records().len(), m.cdi.len()), (1, 1));
    }
    // A GPU that another claim gets just then is held.
    let (world, executor, other, a) = setup();
    world.unprepare(&executor, &a.uid).unwrap();
    let (machine, b) = (world.clone(), claim("b", &[0], "t2"));
    world.lock().api.insert(b.uid.clone(), b.clone());
    world.before_lock(LockName::Gpu(world.gpu(0)), 0, move || {
        drop(machine.prepare(&other, &b).unwrap());
    });
    assert_eq!(
        world.prepare(&executor, &a).unwrap_err().category(),
        "conflict"
    );
    assert_eq!(executor.held().unwrap().len(), 1);
}

/// H6. The orphan's name now belongs to another claim, on another device.
#[test]
fn an_orphan_whose_name_a_later_claim_has_is_undone_all_the_same() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let old = claim("train", &[0], "t1");
    world.prepare(&executor, &old).unwrap();
    // Deleted, and made again under the same name: another UID, another device. Its pod runs.
    let mut new = claim("train", &[1], "t2");
    new.uid = "uid-later".parse().unwrap();
    world.lock().api.insert(new.uid.clone(), new.clone());
    world.prepare(&executor, &new).unwrap();
    let running = |device: &str| {
        let device = device.parse().unwrap();
        RunningDevice {
            namespace: "ns".into(),
            claim: "train".into(),
            device,
        }
    };
    for devices in [vec!["gpu-0", "gpu-1"], vec!["gpu-1"]] {
        for _ in 0..4 {
            let mut view = world.view();
            view.running = Some(devices.iter().map(|device| running(device)).collect());
            executor.reconcile(&view);
            world.pass(Duration::from_mins(5));
        }
        let is_held = world.lock().records().contains_key(&old.uid);
        assert_eq!(is_held, devices.len() == 2, "by {devices:?}");
    }
    assert!(world.lock().records().contains_key(&new.uid));
}

#[test]
fn an_earlier_boots_claim_lets_go_of_a_gpu_with_a_stranger_on_it() {
    let world = World::new("h100x2", 1);
    let a = claim("a", &[0], "t1");
    world.prepare(&world.start(), &a).unwrap();
    world.reboot();
    computes(&world, 0, "pod-of-a-stranger");
    assert_eq!(
        world.unprepare(&world.start(), &a.uid).unwrap(),
        Unprepared::Done
    );
    assert!(world.lock().records().is_empty());
}

/// Beside other shares only its own processes keep a share: the last one answers for all.
#[test]
fn a_share_is_kept_by_its_own_processes_and_by_no_others() {
    for (pod, keeps) in [
        ("pod-a", true),
        ("pod-b", false),
        ("pod-of-a-stranger", false),
    ] {
        let world = World::new("h100x1", 1);
        let executor = world.start();
        let [a, b] = ["a", "b"].map(|name| crate::mig_world::claim_of(name, &["gpu-0-ts"], "t1"));
        world.prepare(&executor, &a).unwrap();
        world.prepare(&executor, &b).unwrap();
        computes(&world, 0, pod);
        let answer = world.unprepare(&executor, &a.uid).unwrap();
        assert_eq!(
            matches!(answer, Unprepared::Lingering(_)),
            keeps,
            "{pod}: {answer:?}"
        );
    }
}

/// A share of another GPU is no share of this one: the last share here answers for all.
#[test]
fn the_last_share_of_a_gpu_is_kept_by_strangers_whatever_others_share() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let [a, b] = [("a", "gpu-0-ts"), ("b", "gpu-1-ts")]
        .map(|(name, device)| crate::mig_world::claim_of(name, &[device], "t1"));
    world.prepare(&executor, &a).unwrap();
    world.prepare(&executor, &b).unwrap();
    computes(&world, 0, "pod-of-a-stranger");
    let answer = world.unprepare(&executor, &a.uid).unwrap();
    assert!(matches!(answer, Unprepared::Lingering(_)), "{answer:?}");
}

/// The kubelet unprepares a claim that is still allocated, and its record is torn: it is rebuilt,
/// and undone, in one call.
#[test]
fn a_claim_whose_record_is_torn_is_unprepared_while_it_is_still_allocated() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.prepare(&executor, &a).unwrap();
    world.lock().put(Folder::Claims, "uid-a.json", Some(b"{"));
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert_eq!(
        final_state(&world).records.len() + final_state(&world).cdi.len(),
        0
    );
}

/// The other instance unprepares a claim after its record was listed.
#[test]
fn a_claim_that_is_unprepared_while_lost_cdi_files_are_restored_gets_none() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    let prepared = world.lock().file(Folder::Claims, "uid-a.json").unwrap();
    busy(&world, 0);
    assert!(matches!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Lingering(_)
    ));
    let lingering = world.lock().file(Folder::Claims, "uid-a.json").unwrap();
    world
        .lock()
        .put(Folder::Claims, "uid-a.json", Some(&prepared));
    let machine = world.clone();
    world.before_lock(LockName::Claim(a.uid), 0, move || {
        machine
            .lock()
            .put(Folder::Claims, "uid-a.json", Some(&lingering));
    });
    assert_eq!(executor.restore_cdi(Refresh::Missing).events, []);
    assert!(matches!(
        phase(&world, &"uid-a".parse().unwrap()),
        Some(Phase::Leaving(_))
    ));
    assert_eq!(final_state(&world).cdi.len(), 0);
}

/// Lingering claims whose records cannot be read for a moment are looked at again soon.
#[test]
fn lingering_claims_with_unreadable_records_are_looked_at_again_soon() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    busy(&world, 0);
    assert!(matches!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Lingering(_)
    ));
    // Written again, so that it is not known from before.
    let record = world.lock().file(Folder::Claims, "uid-a.json").unwrap();
    world
        .lock()
        .put(Folder::Claims, "uid-a.json", Some(&record));
    // EMFILE: it says nothing of the file.
    world.lock().bad_disk = Some(24);
    world
        .lock()
        .bad_blocks
        .insert((Folder::Claims, "uid-a.json".to_owned()));
    assert!(executor.finish_lingering().1);
}

#[test]
fn a_record_that_this_process_wrote_is_not_read_again() {
    let world = World::new("h100x2", 1);
    let executor = world.start();
    let a = claim("a", &[0], "t1");
    world.prepare(&executor, &a).unwrap();
    // Any read of it would fail the other's prepare.
    world.lock().bad_disk = Some(24);
    world
        .lock()
        .bad_blocks
        .insert((Folder::Claims, "uid-a.json".to_owned()));
    world.prepare(&executor, &claim("b", &[1], "t1")).unwrap();
    let error = world
        .prepare(&executor, &claim("c", &[0], "t1"))
        .unwrap_err();
    assert_eq!(error.category(), "held", "{error}");
    // Its own prepare looks whether the disk has it.
    world.prepare(&executor, &a).unwrap_err();
}
