//! Partitions, one sentence at a time: the moments at which a driver can be stopped or hang, and what is left then. Every
//! one ends clean.

use std::io::ErrorKind;
use std::time::Duration;

use divvy_claims::{Claim, Progress, Stored};
use divvy_executor::{Event, Refresh, Unprepared};
use divvy_model::{GpuDriver, GpuErrorCode};

use crate::mig_world::{SMALL, claim_of, is_clean, living, mode, setup, shape, sim};
use crate::story::uid;
use crate::world::{HardwareFault, Moment, Place, World};

/// Dies there while preparing; the next process restores, and the claim is prepared as if nothing had been.
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
    assert_eq!(intended().values().flatten().count(), 0, "what we may be making is not of others");
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
    assert!(is_clean(&other), "unprepared after the crash: {:?}", shape(&other));

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
fn row_2_stopped_after_the_partition_was_made_and_before_the_claim_was_complete() {
    dies_while_preparing("create_compute_instance", Moment::After, &[(9, 4, 1)]);
}

#[test]
fn row_3_stopped_after_the_gpu_instance_and_before_its_compute_instance() {
    dies_while_preparing("create_gpu_instance", Moment::After, &[(9, 4, 0)]);
    dies_while_preparing("create_compute_instance", Moment::Before, &[(9, 4, 0)]);
}

#[test]
fn row_5_stopped_after_the_cdi_file_was_written() {
    dies_while_preparing("write gpu.divvy.dev-claim_uid-a.json", Moment::After, &[(9, 4, 1)]);
    dies_while_preparing("write gpu.divvy.dev-claim_uid-a.json", Moment::Before, &[(9, 4, 1)]);
}

#[test]
fn row_6_stopped_in_the_middle_of_writing_a_record() {
    dies_while_preparing("write claims/uid-a.json", Moment::During, &[]);
}

#[test]
fn row_2_without_a_restart_the_same_process_takes_back_what_a_failed_prepare_has_made() {
    let (world, executor, a, _) = setup();
    // The compute instance is refused for good; its GPU instance must not stay.
    sim(&world).fault(
        divvy_gpu_sim::Fault::fail(GpuErrorCode::NO_PERMISSION)
            .of(divvy_model::GpuOp::CreateComputeInstance)
            .times(1),
    );
    let error = world.prepare(&executor, &a).unwrap_err();
    assert_eq!(error.category(), "step");
    assert!(is_clean(&world), "{:?}", shape(&world));
    world.prepare(&executor, &a).unwrap();
    assert_eq!(shape(&world), [(9, 4, 1)]);
}

#[test]
fn row_7_an_orphan_is_undone_by_reconcile_and_its_slices_are_available_again() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    world.lock().api.clear();
    let report = executor.reconcile(&world.view());
    assert!(matches!(&report.events[..], [Event::Kept { .. }]), "a grace period: {:?}", report.events);
    world.pass(Duration::from_mins(5));
    world.lock().write_error = Some((Place::Cdi, ErrorKind::ReadOnlyFilesystem));
    let report = executor.reconcile(&world.view());
    let [Event::Failed { error, .. }] = &report.events[..] else { panic!("{:?}", report.events) };
    assert_eq!(
        error,
        "CDI file gpu.divvy.dev-claim_uid-a.json in /var/run/cdi cannot be removed (it is mounted read-only: the plugin's hostPath mounts must be writable): read-only filesystem or storage medium"
    );
    world.lock().write_error = None;
    let report = executor.reconcile(&world.view());
    assert_eq!(report.events, [Event::OrphanUndone { claim: a.uid.clone() }]);
    assert!(is_clean(&world));
    world.prepare(&executor, &claim_of("b", &["gpu-0-mig-7g80gb-0-0"], "t2")).unwrap();
}

#[test]
fn row_8_after_a_reboot_the_same_partitions_are_made_at_the_same_places_under_the_same_names() {
    let (world, executor, a, gpu) = setup();
    let b = claim_of("b", &[SMALL], "t1");
    world.lock().api.insert(b.uid.clone(), b.clone());
    let answers = [&a, &b].map(|c| world.prepare(&executor, c).unwrap());
    let (before, files) = (living(&world, &gpu), world.lock().cdi.keys().cloned().collect::<Vec<_>>());
    world.reboot();
    assert!(!mode(&world, &gpu) && shape(&world).is_empty());
    let executor = world.start();
    let report = executor.restore_cdi(Refresh::Missing);
    let again = |c: &Claim| Event::ExecutedAgain { claim: c.uid.clone() };
    assert_eq!(report.events, [again(&a), again(&b)]);
    assert_eq!(shape(&world), [(9, 4, 1), (19, 0, 1)]);
    assert_ne!(living(&world, &gpu), before, "UUIDs are new");
    assert_eq!(world.lock().cdi.keys().cloned().collect::<Vec<_>>(), files);
    assert_eq!([&a, &b].map(|c| world.prepare(&executor, c).unwrap()), answers);
}

#[test]
fn row_9_after_a_reload_of_the_driver_claims_can_be_unprepared_and_prepared_anew() {
    let (world, executor, a, gpu) = setup();
    let b = claim_of("b", &[SMALL], "t1");
    world.lock().api.insert(b.uid.clone(), b.clone());
    let answer = world.prepare(&executor, &a).unwrap();
    world.prepare(&executor, &b).unwrap();
    let before = living(&world, &gpu);
    sim(&world).edit(|e| e.set_driver_loaded(false));
    assert_eq!(world.unprepare(&executor, &b.uid).unwrap(), Unprepared::Done, "without a driver");
    sim(&world).edit(|e| e.set_driver_loaded(true));
    assert!(shape(&world).is_empty() && !mode(&world, &gpu));
    assert_eq!(world.prepare(&executor, &a).unwrap(), answer, "the same names");
    assert_eq!(shape(&world), [(9, 4, 1)]);
    assert_ne!(living(&world, &gpu), before);
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(is_clean(&world));
}

#[test]
fn progress_is_on_record_by_halves_and_complete_with_ids_and_uuid() {
    let (world, executor, a, gpu) = setup();
    world.lock().crash_at = Some(("create_compute_instance", Moment::Before));
    world.prepare(&executor, &a).unwrap_err();
    let progress = |world: &World| match &world.lock().records()[&uid("a")] {
        Stored::Fine(record) => record.steps[0].progress.clone(),
        other => panic!("{other:?}"),
    };
    assert!(matches!(progress(&world), Progress::Begun { .. }), "{:?}", progress(&world));
    world.kill();
    let executor_2 = world.start();
    drop(executor);
    executor_2.restore_cdi(Refresh::Missing);
    world.prepare(&executor_2, &a).unwrap();
    let (instance, inside) = living(&world, &gpu).remove(0);
    let record = world.lock().records()[&uid("a")].fine().unwrap().clone();
    let made = record.devices[0].partition(&record.steps).unwrap();
    assert_eq!((made.gpu_instance, made.uuid), (instance.id, inside[0].uuid.clone()));
}

#[test]
fn a_creation_that_hangs_and_then_succeeds_is_found_taken_back_and_never_given_to_another() {
    for succeeds in [true, false] {
        let (world, executor, a, gpu) = setup();
        sim(&world).set_mig_mode(&gpu, true).unwrap();
        let after = Duration::from_mins(2);
        world.lock().hardware_fault = Some(HardwareFault::Late { after, succeeds });
        world.prepare(&executor, &a).unwrap_err();
        assert_eq!(executor.fences().unwrap().keys().collect::<Vec<_>>(), [&gpu]);
        let other = claim_of("b", &[SMALL], "t2");
        assert_eq!(world.prepare(&executor, &other).unwrap_err().category(), "fenced");
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

#[test]
fn a_call_that_answers_with_an_error_although_it_did_its_work_is_found_out() {
    let (world, executor, a, gpu) = setup();
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    world.lock().hardware_fault = Some(HardwareFault::Lies);
    world.prepare(&executor, &a).unwrap();
    assert_eq!(shape(&world), [(9, 4, 1)]);
    world.lock().hardware_fault = Some(HardwareFault::Lies);
    assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Done);
    assert!(is_clean(&world));
}
