//! Partitions whose claim's record was lost or cannot be read any more: adopted, made anew or
//! removed, by what else is known of them.

use std::io::ErrorKind;
use std::time::Duration;

use divvy_claims::Phase;
use divvy_executor::{Event, Executor, Folder, Refresh, Unprepared, chain};
use divvy_model::mig::{GpuInstanceId, GpuInstanceProfileId};
use divvy_model::{GpuOp, GpuUuid};

use crate::mig_world::{HALF, SMALL, claim_of, is_clean, living, setup, shape, sim};
use crate::story::uid;
use crate::world::accessors::{
    Open, granted, keep_notes, lose, lose_gpu_file, noted, open_question, picture, tear, tear_gpu,
};
use crate::world::{MigLate, Moment, Place, World};

/// After a lost record store partitions are adopted from allocated claims with a CDI file and no
/// others.
#[test]
fn lost_partitions_are_adopted_from_allocated_claims_and_no_others() {
    for by_prepare in [true, false] {
        let (world, executor, a, gpu) = setup();
        let answer = world.prepare(&executor, &a).unwrap();
        let theirs = sim(&world)
            .make_foreign_instance(&gpu, GpuInstanceProfileId(19), 0)
            .unwrap();
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
            assert_eq!(
                report.events,
                [Event::Rebuilt {
                    claim: a.uid.clone()
                }]
            );
        }
        assert_eq!(
            living(&world, &gpu),
            before,
            "nothing is made anew under a running container"
        );
        let foreign = executor.foreign();
        assert_eq!(
            foreign[&gpu].iter().map(|i| i.id).collect::<Vec<_>>(),
            [theirs.gpu_instance]
        );
        assert_eq!(
            world.unprepare(&executor, &a.uid).unwrap(),
            Unprepared::Done
        );
        assert_eq!(shape(&world), [(19, 0, 1)]);
        // Allocated, never prepared: an instance at its placement is foreign, and stays.
        let b = claim_of("b", &[SMALL], "t2");
        world.lock().api.insert(b.uid.clone(), b.clone());
        let error = chain(&world.prepare(&executor, &b).unwrap_err());
        assert!(error.contains("is in its place"), "{error}");
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
        e.destroy_compute_instance(&gpu, instance.id, inside[0].id)
            .unwrap();
    });
    tear(&world, &uid("a"), b"rubbish");
    let executor = {
        drop(executor);
        world.start()
    };
    executor.reconcile(&world.view());
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer);
    assert_eq!(shape(&world), [(9, 4, 1)], "half of one is no partition");
    assert_eq!(instance.id, GpuInstanceId(2));
    let phase = world.lock().records()[&uid("a")]
        .fine()
        .unwrap()
        .phase
        .clone();
    assert_eq!(phase, Phase::Prepared);
}

/// Partitions of a claim that is gone together with its record are removed by what its CDI file
/// says.
#[test]
fn a_gone_claims_partitions_are_removed_although_its_record_is_lost() {
    for record in [None, Some(b"rubbish".as_slice())] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        sim(&world)
            .make_foreign_instance(&gpu, GpuInstanceProfileId(19), 0)
            .unwrap();
        world.lock().api.clear();
        world.kill();
        damage_record(&world, record);
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

/// An unreadable record of a gone claim whose partition is in use holds that partition and nothing
/// else.
#[test]
fn a_gone_claims_torn_record_holds_its_used_partition_and_no_more() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, _) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    world.lock().api.clear();
    tear(&world, &uid("a"), b"rubbish");
    let over = world
        .prepare(&executor, &claim_of("b", &["gpu-0-mig-1g10gb-19-4"], "t2"))
        .unwrap_err();
    assert_eq!(over.category(), "held");
    world
        .prepare(&executor, &claim_of("b", &[SMALL], "t3"))
        .unwrap();
    sim(&world).end_process(4711);
    executor.reconcile(&world.view());
    assert_eq!(shape(&world), [(19, 0, 1)]);
}

/// Tears the record of claim `a`, or loses it.
fn damage_record(world: &World, bytes: Option<&[u8]>) {
    match bytes {
        Some(bytes) => tear(world, &uid("a"), bytes),
        None => lose(world, &uid("a")),
    }
}

fn after_a_day(world: &World, executor: &Executor) {
    for _ in 0..4 {
        executor.reconcile(&world.view());
        world.pass(Duration::from_mins(5));
    }
}

/// H2, H2b. A torn record, and the claim was allocated anew under its UID.
#[test]
fn a_torn_record_of_a_reallocated_claim_leaks_no_partition() {
    for by_prepare in [true, false] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        assert_eq!(living(&world, &gpu).len(), 1);
        tear(&world, &uid("a"), b"{\"checksum\":");
        let again = claim_of("a", &["gpu-1-mig-1g10gb-19-0"], "t2");
        world.lock().api.insert(again.uid.clone(), again.clone());
        if by_prepare {
            world.prepare(&executor, &again).unwrap();
            assert!(
                living(&world, &gpu).is_empty(),
                "what it had is gone before it has something else"
            );
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
fn a_torn_record_of_a_reallocated_claim_keeps_its_used_partition() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, _) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    tear(&world, &uid("a"), b"rubbish");
    let again = claim_of("a", &["gpu-1-mig-1g10gb-19-0"], "t2");
    world.lock().api.insert(again.uid.clone(), again.clone());
    assert_eq!(
        world.prepare(&executor, &again).unwrap_err().category(),
        "held"
    );
    executor.reconcile(&world.view());
    assert_eq!(shape(&world), [(9, 4, 1)]);
    sim(&world).end_process(4711);
    world.prepare(&executor, &again).unwrap();
    assert_eq!(shape(&world), [(19, 0, 1)]);
}

/// The process dies in the middle of a creation, and the record that says so is torn or lost too:
/// the GPU's file has noted what was about to be made.
#[test]
fn a_cut_short_creation_leaks_nothing_with_its_record_torn_or_lost() {
    for record in [None, Some(b"rubbish".as_slice())] {
        for op in [GpuOp::CreateGpuInstance, GpuOp::CreateComputeInstance] {
            let (world, executor, a, gpu) = setup();
            world.lock().crash_at = Some((op.name(), Moment::After));
            world.prepare(&executor, &a).unwrap_err();
            assert_eq!(living(&world, &gpu).len(), 1);
            damage_record(&world, record);
            world.lock().api.clear();
            let executor = world.start();
            executor.restore_cdi(Refresh::All);
            after_a_day(&world, &executor);
            assert!(is_clean(&world), "left: {:?}", shape(&world));
            assert_eq!(noted(&world, &gpu), []);
        }
    }
}

/// H3. A lost record (not a torn one), with or without the CDI file, and then the unprepare.
#[test]
fn a_lost_record_and_an_unprepare_leak_no_partition() {
    for file in [true, false] {
        let (world, executor, a, _) = setup();
        world.prepare(&executor, &a).unwrap();
        lose(&world, &uid("a"));
        if !file {
            world.lock().cdi.clear();
        }
        world.lock().api.clear();
        assert_eq!(
            world.unprepare(&executor, &a.uid).unwrap(),
            Unprepared::Done
        );
        assert!(is_clean(&world), "left: {:?}", shape(&world));
    }
}

/// A GPU's file that cannot be read fences the GPU until it is made again from the claims' records.
#[test]
fn a_torn_file_of_a_gpu_fences_it_and_is_made_again_and_nothing_leaks() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let whole = noted(&world, &gpu);
    tear_gpu(&world, &gpu, b"{\"checksum\":");
    let fences = executor.fences().unwrap();
    assert!(
        fences[&gpu][0]
            .reason
            .starts_with("its state file cannot be read"),
        "{fences:?}"
    );
    // As long as a record cannot be read either, the owner of an instance is unknown.
    let record = world.lock().file(Folder::Claims, "uid-a.json").unwrap();
    tear(&world, &uid("a"), b"rubbish");
    world.lock().api_down = true;
    let small = claim_of("b", &[SMALL], "t2");
    assert_eq!(
        world.prepare(&executor, &small).unwrap_err().category(),
        "fenced"
    );
    executor.reconcile(&world.view());
    assert_eq!(executor.fences().unwrap().len(), 1);
    world.lock().api_down = false;
    tear(&world, &uid("a"), &record);
    world.prepare(&executor, &small).unwrap();
    let again = picture(&world, &gpu);
    assert!(again.noted.contains(&whole[0]), "{again:?}");
    assert_eq!(
        again.grant.may_change_mode,
        Some(true),
        "what was granted is forgotten"
    );
    assert_eq!(world.lock().files(Folder::Corrupt).len(), 1, "for people");
    for claim in [&a, &small] {
        world.unprepare(&executor, &claim.uid).unwrap();
    }
    assert!(is_clean(&world));
}

/// Grants of policies come once. A prepare that needs it must not be refused because the file was
/// lost or torn since.
#[test]
fn what_was_granted_outlives_the_file_of_a_gpu() {
    let lost: fn(&World, &GpuUuid) = lose_gpu_file;
    let torn = |world: &World, gpu: &GpuUuid| tear_gpu(world, gpu, b"rubbish");
    for damage in [lost, torn] {
        let (world, executor, a, gpu) = setup();
        damage(&world, &gpu);
        world.grant(&executor, true);
        assert_eq!(
            granted(&world, &gpu).may_change_mode,
            Some(true),
            "granted again and not written"
        );
        damage(&world, &gpu);
        world.prepare(&executor, &a).unwrap();
        assert_eq!(granted(&world, &gpu).may_change_mode, Some(true));
        world.unprepare(&executor, &a.uid).unwrap();
        assert!(is_clean(&world));
    }
}

/// Notes of two partitions that the file of a GPU has lost, all or the first, are made again from
/// what their claim was given, as soon as anything of the GPU is written.
#[test]
fn instances_that_are_on_record_only_are_accounted_for_and_removed() {
    for dropped in [2, 1] {
        let (world, executor, _, gpu) = setup();
        let a = claim_of("a", &[HALF, SMALL], "t1");
        world.lock().api.insert(a.uid.clone(), a.clone());
        world.prepare(&executor, &a).unwrap();
        let whole = noted(&world, &gpu);
        keep_notes(&world, &gpu, |note| !whole[..dropped].contains(note));
        assert_eq!(noted(&world, &gpu).len(), 2 - dropped);
        world.kill();
        let executor = world.start();
        executor.restore_cdi(Refresh::All);
        assert!(executor.foreign().is_empty(), "they are ours");
        let b = claim_of("b", &["gpu-0-mig-1g10gb-19-2"], "t1");
        world.prepare(&executor, &b).unwrap();
        assert_eq!(noted(&world, &gpu).len(), 3);
        world.unprepare(&executor, &b.uid).unwrap();
        assert_eq!(noted(&world, &gpu), whole);
        world.unprepare(&executor, &a.uid).unwrap();
        assert!(is_clean(&world), "left: {:?}", shape(&world));
    }
}

/// A GPU's file is made again of what the records say of this GPU, and no other.
#[test]
fn a_file_that_is_made_again_has_no_instances_of_other_gpus() {
    let (world, executor, _, gpu) = setup();
    let a = claim_of("a", &[HALF, "gpu-1-mig-3g40gb-9-4"], "t1");
    world.prepare(&executor, &a).unwrap();
    let whole = noted(&world, &gpu);
    assert_eq!(whole.len(), 1);
    tear_gpu(&world, &gpu, b"rubbish");
    executor.reconcile(&world.view());
    assert_eq!(noted(&world, &gpu), whole);
}

/// Open questions end with their answer, with the boot, and not with their claim.
#[test]
fn a_round_asks_about_what_is_in_doubt() {
    let (world, executor, a, gpu) = setup();
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.prepare(&executor, &a).unwrap();
    let notes = noted(&world, &gpu);
    let file = format!("{gpu}.json");
    let whole = world.lock().file(Folder::Gpus, &file).unwrap();
    let question = |claim: &str, boot: &str| Open {
        claim: Some(claim.parse().unwrap()),
        boot: boot.parse().unwrap(),
    };
    let this_boot = notes[0].boot.as_str();
    let cleared = Event::FenceCleared { gpu: gpu.clone() };
    // The hardware answers: the partition lives, and nothing lives where one was begun.
    for claim in ["uid-a", "uid-gone"] {
        tear_gpu(&world, &gpu, &whole);
        open_question(&world, &gpu, &question(claim, this_boot));
        assert!(!executor.fences().unwrap().is_empty());
        let events = executor.reconcile(&world.view()).events;
        assert!(events.contains(&cleared), "{claim}: {events:?}");
        assert_eq!(noted(&world, &gpu), notes);
    }
    // Of another boot: not even asked.
    tear_gpu(&world, &gpu, &whole);
    open_question(&world, &gpu, &question("uid-gone", "boot-before"));
    assert!(executor.fences().unwrap().is_empty());
    executor.reconcile(&world.view());
    assert_eq!(noted(&world, &gpu), notes, "noted again from the record");
    // A call that has not come back answers nothing yet.
    open_question(&world, &gpu, &question("uid-a", this_boot));
    let late = MigLate {
        at: world.lock().now + Duration::from_secs(9),
        succeeds: true,
        gpu: gpu.clone(),
        op: divvy_model::GpuOp::CreateGpuInstance,
        what: Box::new(|_| ()),
    };
    world.lock().mig_late.push(late);
    executor.reconcile(&world.view());
    assert!(!executor.fences().unwrap().is_empty());
    world.pass(Duration::from_secs(10));
    let events = executor.reconcile(&world.view()).events;
    assert!(events.contains(&cleared), "{events:?}");
}

/// Others have the same place on another GPU, and another place on the same GPU.
#[test]
fn partitions_without_a_record_go_and_those_beside_them_stay() {
    let (world, executor, a, gpu) = setup();
    let others = [
        claim_of("b", &[SMALL], "t1"),
        claim_of("c", &["gpu-1-mig-3g40gb-9-4"], "t1"),
    ];
    world.prepare(&executor, &a).unwrap();
    let alone = shape(&world);
    for other in &others {
        world.prepare(&executor, other).unwrap();
        lose(&world, &other.uid);
    }
    assert_eq!(shape(&world).len(), 3);
    for _ in 0..2 {
        executor.reconcile(&world.view());
        world.pass(Duration::from_mins(5));
    }
    executor.reconcile(&world.view());
    assert_eq!(shape(&world), alone);
    assert_eq!(living(&world, &gpu).len(), 1);
}

/// Its CDI file says that a claim was served, and the note of a partition that one may be.
#[test]
fn a_record_of_partitions_is_made_again_by_its_cdi_file_or_what_lives() {
    for lives in [true, false] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        lose(&world, &a.uid);
        world.lock().cdi.clear();
        if !lives {
            let (instance, inside) = living(&world, &gpu).remove(0);
            sim(&world).edit(|e| {
                e.destroy_compute_instance(&gpu, instance.id, inside[0].id)
                    .unwrap();
                e.destroy_gpu_instance(&gpu, instance.id).unwrap();
            });
        }
        let events = executor.reconcile(&world.view()).events;
        let rebuilt = Event::Rebuilt {
            claim: a.uid.clone(),
        };
        assert_eq!(events.contains(&rebuilt), lives, "{events:?}");
        assert_eq!(world.lock().records().contains_key(&a.uid), lives);
        world.prepare(&executor, &a).unwrap();
        assert_eq!(shape(&world), [(9, 4, 1)]);
    }
}

/// The record that cannot be read may hold the place of the partition. A claim without one has no
/// place to lose.
#[test]
fn a_lost_record_of_partitions_is_made_again_after_torn_ones() {
    let (world, executor, a, _) = setup();
    let (whole, torn) = (
        claim_of("w", &["gpu-1"], "t1"),
        claim_of("t", &[SMALL], "t1"),
    );
    for claim in [&a, &whole, &torn] {
        world.prepare(&executor, claim).unwrap();
        world.lock().api.insert(claim.uid.clone(), claim.clone());
    }
    tear(&world, &torn.uid, b"rubbish");
    for lost in [&a, &whole] {
        lose(&world, &lost.uid);
    }
    let first = world.lock().api.remove(&torn.uid);
    let events = executor.reconcile(&world.view()).events;
    let waits = "is made again when another claim's record can be read";
    let is_wait = |event: &Event| matches!(event, Event::Failed { claim: Some(uid), error } if *uid == a.uid && error.contains(waits));
    assert!(events.iter().any(is_wait), "{events:?}");
    let rebuilt = |claim: &divvy_model::ClaimUid| Event::Rebuilt {
        claim: claim.clone(),
    };
    assert!(events.contains(&rebuilt(&whole.uid)), "{events:?}");

    world.lock().api.insert(torn.uid.clone(), first.unwrap());
    let events = executor.reconcile(&world.view()).events;
    assert_eq!(events[1..], [rebuilt(&torn.uid), rebuilt(&a.uid)]);
}

/// Its pods may be starting.
#[test]
fn a_file_that_is_as_the_record_will_say_stays_while_it_cannot_be_written() {
    for same in [true, false] {
        let (world, executor, a, _) = setup();
        world.prepare(&executor, &a).unwrap();
        tear(&world, &a.uid, b"rubbish");
        if !same {
            for content in world.lock().cdi.values_mut() {
                let text = String::from_utf8(content.clone()).unwrap();
                *content = text.replace("PARTITIONS=1", "PARTITIONS=2").into();
            }
        }
        world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
        let events = executor.reconcile(&world.view()).events;
        let fails = matches!(&events[..], [Event::Kept { .. }, Event::Failed { .. }]);
        assert!(fails, "{events:?}");
        assert_eq!(world.lock().cdi.is_empty(), !same);
    }
}

#[test]
fn claims_that_no_record_names_are_known_to_be_there() {
    let (world, executor, a, _) = setup();
    let said = |executor: &Executor| (executor.has_records(), executor.has_nameless_claims());
    assert_eq!(said(&executor), (false, Ok(false)));
    world.prepare(&executor, &a).unwrap();
    assert_eq!(said(&executor), (true, Ok(false)));
    tear(&world, &a.uid, b"rubbish");
    assert_eq!(said(&executor), (true, Ok(true)));
    lose(&world, &a.uid);
    assert_eq!(said(&executor), (false, Ok(true)));
}

#[test]
fn an_unprepare_that_cannot_hold_what_a_lost_record_held_says_why() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    lose(&world, &a.uid);
    world.lock().write_error = Some((Place::Store, ErrorKind::StorageFull));
    let Unprepared::Lingering(why) = world.unprepare(&executor, &a.uid).unwrap() else {
        panic!("its partition lives");
    };
    assert!(why.contains("the node's disk is full"), "{why}");
    world.lock().write_error = None;
    let ended = world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(ended, Unprepared::Done);
    assert!(is_clean(&world));
}
