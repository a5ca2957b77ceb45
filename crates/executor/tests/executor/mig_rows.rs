//! Partitions, one sentence at a time: the moments at which a driver can be stopped or hang, and
//! what is left then. Every one ends clean.

use std::io::ErrorKind;
use std::time::Duration;

use divvy_claims::Claim;
use divvy_executor::{Event, Refresh, Unprepared};
use divvy_model::{GpuDriver, GpuErrorCode};

use crate::mig_world::{SMALL, claim_of, is_clean, living, mode, setup, shape, sim};
use crate::world::accessors::{Far, Made, lose_gpu_file, made, noted, tear_gpu};
use crate::world::{HardwareFault, Moment, Place};

/// Dies there while preparing; the next process restores, and the claim is prepared as if nothing
/// had been.
fn dies_while_preparing(at: &'static str, moment: Moment, left: &[(u32, u32, usize)]) {
    let (world, executor, a, _) = setup();
    world.lock().crash_at = Some((at, moment));
    world.prepare(&executor, &a).unwrap_err();
    assert!(world.lock().dead, "nothing is called {at}");
    assert_eq!(shape(&world), left, "at the time of the crash");
    let intended = || {
        let (world, executor, a, _) = setup();
        world.lock().crash_at = Some((at, moment));
        drop(world.prepare(&executor, &a));
        world.kill();
        world.start().foreign()
    };
    assert_eq!(
        intended().values().flatten().count(),
        0,
        "what we may be making is not of others"
    );
    // The kubelet may let it go instead.
    let world_of_another_end = || {
        let (world, executor, a, _) = setup();
        world.lock().crash_at = Some((at, moment));
        drop(world.prepare(&executor, &a));
        world.kill();
        (world, a)
    };
    let (other, gone) = world_of_another_end();
    let executor = other.start();
    other.lock().api.clear();
    other.unprepare(&executor, &gone.uid).unwrap();
    assert!(
        is_clean(&other),
        "unprepared after the crash: {:?}",
        shape(&other)
    );

    world.kill();
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    world.prepare(&executor, &a).unwrap();
    assert_eq!(shape(&world), [(9, 4, 1)]);
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(is_clean(&world), "{:?}", shape(&world));
}

#[test]
fn row_1_stopped_after_the_intent_and_before_anything_was_made() {
    dies_while_preparing("create_gpu_instance", Moment::Before, &[]);
    dies_while_preparing("write claims/uid-a.json", Moment::After, &[]);
}

#[test]
fn row_2_stopped_between_the_partition_and_the_claims_record() {
    dies_while_preparing("create_compute_instance", Moment::After, &[(9, 4, 1)]);
}

#[test]
fn row_3_stopped_after_the_gpu_instance_and_before_its_compute_instance() {
    dies_while_preparing("create_gpu_instance", Moment::After, &[(9, 4, 0)]);
    dies_while_preparing("create_compute_instance", Moment::Before, &[(9, 4, 0)]);
}

#[test]
fn row_5_stopped_after_the_cdi_file_was_written() {
    dies_while_preparing(
        "write gpu.divvy.dev-claim_uid-a.json",
        Moment::After,
        &[(9, 4, 1)],
    );
    dies_while_preparing(
        "write gpu.divvy.dev-claim_uid-a.json",
        Moment::Before,
        &[(9, 4, 1)],
    );
}

#[test]
fn row_6_stopped_in_the_middle_of_writing_a_record() {
    dies_while_preparing("write claims/uid-a.json", Moment::During, &[]);
}

/// Row 2 without a restart the same process takes back what a failed prepare has made.
#[test]
fn row_2_without_a_restart_a_failed_prepare_is_taken_back() {
    let (world, executor, a, _) = setup();
    // The compute instance is refused for good; its GPU instance must not stay.
    sim(&world).fault(
        divvy_gpu_sim::Fault::fail(GpuErrorCode::NO_PERMISSION)
            .of(divvy_model::GpuOp::CreateComputeInstance)
            .times(1),
    );
    let error = world.prepare(&executor, &a).unwrap_err();
    assert_eq!(error.category(), "hardware");
    assert!(is_clean(&world), "{:?}", shape(&world));
    world.prepare(&executor, &a).unwrap();
    assert_eq!(shape(&world), [(9, 4, 1)]);
}

#[test]
fn row_7_an_orphan_is_undone_and_its_slices_are_available_again() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    world.lock().api.clear();
    let report = executor.reconcile(&world.view());
    assert!(
        matches!(&report.events[..], [Event::Kept { .. }]),
        "a grace period: {:?}",
        report.events
    );
    world.pass(Duration::from_mins(5));
    world.lock().write_error = Some((Place::Cdi, ErrorKind::ReadOnlyFilesystem));
    let report = executor.reconcile(&world.view());
    let [Event::Failed { error, .. }] = &report.events[..] else {
        panic!("{:?}", report.events)
    };
    assert_eq!(
        error,
        "CDI file gpu.divvy.dev-claim_uid-a.json in /var/run/cdi cannot be removed (it is mounted read-only: the plugin's hostPath mounts must be writable): read-only filesystem or storage medium"
    );
    world.lock().write_error = None;
    let report = executor.reconcile(&world.view());
    assert_eq!(
        report.events,
        [Event::OrphanUndone {
            claim: a.uid.clone()
        }]
    );
    assert!(is_clean(&world));
    world
        .prepare(&executor, &claim_of("b", &["gpu-0-mig-7g80gb-0-0"], "t2"))
        .unwrap();
}

/// Row 8 after a reboot the same partitions are made at the same places under the same names.
#[test]
fn row_8_after_a_reboot_partitions_are_made_at_their_places_again() {
    let (world, executor, a, gpu) = setup();
    let b = claim_of("b", &[SMALL], "t1");
    world.lock().api.insert(b.uid.clone(), b.clone());
    let answers = [&a, &b].map(|c| world.prepare(&executor, c).unwrap());
    let (before, files) = (
        living(&world, &gpu),
        world.lock().cdi.keys().cloned().collect::<Vec<_>>(),
    );
    world.reboot();
    assert!(!mode(&world, &gpu) && shape(&world).is_empty());
    let executor = world.start();
    let report = executor.restore_cdi(Refresh::Missing);
    let again = |c: &Claim| Event::ExecutedAgain {
        claim: c.uid.clone(),
    };
    assert_eq!(report.events, [again(&a), again(&b)]);
    assert_eq!(shape(&world), [(9, 4, 1), (19, 0, 1)]);
    assert_ne!(living(&world, &gpu), before, "UUIDs are new");
    assert_eq!(world.lock().cdi.keys().cloned().collect::<Vec<_>>(), files);
    assert_eq!(
        [&a, &b].map(|c| world.prepare(&executor, c).unwrap()),
        answers
    );
}

#[test]
fn row_9_after_a_driver_reload_claims_are_let_go_and_prepared_anew() {
    let (world, executor, a, gpu) = setup();
    let b = claim_of("b", &[SMALL], "t1");
    world.lock().api.insert(b.uid.clone(), b.clone());
    let answer = world.prepare(&executor, &a).unwrap();
    world.prepare(&executor, &b).unwrap();
    let before = living(&world, &gpu);
    sim(&world).edit(|e| e.set_driver_loaded(false));
    assert_eq!(
        world.unprepare(&executor, &b.uid).unwrap(),
        Unprepared::Done,
        "without a driver"
    );
    sim(&world).edit(|e| e.set_driver_loaded(true));
    assert!(shape(&world).is_empty() && !mode(&world, &gpu));
    let refused = world.prepare(&executor, &a).unwrap_err();
    assert_eq!(
        refused.category(),
        "partition-gone",
        "its pod may still run"
    );
    world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(
        world.prepare(&executor, &a).unwrap(),
        answer,
        "the same names"
    );
    assert_eq!(shape(&world), [(9, 4, 1)]);
    assert_ne!(living(&world, &gpu), before);
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(is_clean(&world));
}

#[test]
fn a_begun_instance_is_noted_and_given_only_once_it_is_whole() {
    let (world, executor, a, gpu) = setup();
    world.lock().crash_at = Some(("create_compute_instance", Moment::Before));
    world.prepare(&executor, &a).unwrap_err();
    let noted = noted(&world, &gpu);
    assert_eq!(living(&world, &gpu)[0].1, [], "half of it");
    assert_eq!(noted.len(), 1);
    assert_eq!((&noted[0].made_for, &noted[0].far), (&a.uid, &Far::Begun));
    assert_eq!(made(&world, &a.uid), [], "not before it is whole");
    world.kill();
    let executor_2 = world.start();
    drop(executor);
    executor_2.restore_cdi(Refresh::Missing);
    world.prepare(&executor_2, &a).unwrap();
    let (instance, inside) = living(&world, &gpu).remove(0);
    let whole = Made {
        gi: instance.id,
        ci: inside[0].id,
        uuid: inside[0].uuid.clone(),
    };
    assert_eq!(made(&world, &a.uid), [(gpu, whole)]);
}

/// A creation that hangs and then succeeds is found taken back and never given to another.
#[test]
fn a_creation_that_hangs_and_succeeds_is_found_and_given_to_no_one() {
    for succeeds in [true, false] {
        let (world, executor, a, gpu) = setup();
        sim(&world).set_mig_mode(&gpu, true).unwrap();
        let after = Duration::from_mins(2);
        world.lock().hardware_fault = Some(HardwareFault::Late { after, succeeds });
        world.prepare(&executor, &a).unwrap_err();
        assert_eq!(
            executor.fences().unwrap().keys().collect::<Vec<_>>(),
            [&gpu]
        );
        let other = claim_of("b", &[SMALL], "t2");
        assert_eq!(
            world.prepare(&executor, &other).unwrap_err().category(),
            "fenced"
        );
        world.pass(Duration::from_mins(3));
        assert_eq!(shape(&world).len(), usize::from(succeeds));
        executor.reconcile(&world.view());
        assert_eq!(executor.fences().unwrap().len(), 0);
        assert!(is_clean(&world), "{:?}", shape(&world));
        world.prepare(&executor, &other).unwrap();
        world.prepare(&executor, &a).unwrap();
        assert_eq!(shape(&world).len(), 2);
    }
}

/// The note that a partition was begun is lost with the GPU's file; its claim's record says where
/// it was to be, and that the place was empty then.
#[test]
fn a_creation_that_hangs_is_found_though_the_file_of_its_gpu_is_lost() {
    for (succeeds, torn, restarts) in [
        (true, true, false),
        (true, false, false),
        (true, true, true),
        (false, true, false),
    ] {
        let (world, mut executor, a, gpu) = setup();
        sim(&world).set_mig_mode(&gpu, true).unwrap();
        let after = Duration::from_mins(2);
        world.lock().hardware_fault = Some(HardwareFault::Late { after, succeeds });
        world.prepare(&executor, &a).unwrap_err();
        if torn {
            tear_gpu(&world, &gpu, b"x");
        } else {
            lose_gpu_file(&world, &gpu);
        }
        world.pass(Duration::from_mins(3));
        assert_eq!(shape(&world).len(), usize::from(succeeds));
        if restarts {
            world.kill();
            executor = world.start();
            executor.restore_cdi(Refresh::Missing);
        }
        for _ in 0..2 {
            executor.reconcile(&world.view());
        }
        let case = format!("succeeds: {succeeds}, torn: {torn}, restarts: {restarts}");
        assert_eq!(executor.fences().unwrap(), [].into(), "{case}");
        assert!(is_clean(&world), "{case}: {:?}", shape(&world));
        let other = claim_of("b", &[SMALL], "t2");
        world.prepare(&executor, &other).unwrap();
        world.prepare(&executor, &a).unwrap();
    }
}

#[test]
fn a_call_that_denies_what_it_did_is_found_out() {
    let (world, executor, a, gpu) = setup();
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    world.lock().hardware_fault = Some(HardwareFault::Lies);
    world.prepare(&executor, &a).unwrap();
    assert_eq!(shape(&world), [(9, 4, 1)]);
    world.lock().hardware_fault = Some(HardwareFault::Lies);
    assert_eq!(
        world.unprepare(&executor, &a.uid).unwrap(),
        Unprepared::Done
    );
    assert!(is_clean(&world));
}

/// Ids are given out again: what the late call removes may be another claim's by then.
#[test]
fn a_removal_that_times_out_fences_its_gpu_until_it_comes_back() {
    for succeeds in [true, false] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        world.lock().hardware_fault = Some(HardwareFault::Late {
            after: Duration::from_mins(1),
            succeeds,
        });
        let doubt =
            "the call to remove the partition of profile 9 at 4+4 may still have its effect";
        let done = world.unprepare(&executor, &a.uid).unwrap();
        assert!(matches!(done, Unprepared::Lingering(_)), "{done:?}");
        let fences = executor.fences().unwrap();
        assert_eq!(fences[&gpu][0].reason, doubt);
        world.pass(Duration::from_mins(1));
        executor.finish_lingering();
        executor.tidy();
        assert_eq!(executor.fences().unwrap(), [].into());
        assert!(is_clean(&world), "{:?}", shape(&world));
    }
}

/// A file that cannot be read is copied before it is written anew. A full disk has no room for the
/// copy, and a claim must still be let go; any other error may be over soon.
#[test]
fn a_damaged_file_of_a_gpu_is_written_over_only_with_a_copy_or_no_room() {
    for (kind, is_gone) in [
        (ErrorKind::StorageFull, true),
        (ErrorKind::QuotaExceeded, true),
        (ErrorKind::PermissionDenied, false),
    ] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        tear_gpu(&world, &gpu, b"x");
        world.lock().write_error = Some((Place::Store, kind));
        drop(world.unprepare(&executor, &a.uid));
        assert_eq!(shape(&world).is_empty(), is_gone, "{kind}");
        world.lock().write_error = None;
        drop(world.unprepare(&executor, &a.uid));
        assert!(is_clean(&world), "{kind}: {:?}", shape(&world));
    }
}
