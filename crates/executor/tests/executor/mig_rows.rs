//! Partitions, one sentence at a time: first the moments at which a driver can be stopped and what is left then
//! (every one ends clean), then what others do to the GPU.

use std::time::Duration;

use divvy_claims::{Claim, Phase, Progress, Rights, Stored};
use divvy_executor::{Event, Executor, Folder, Refresh, Unprepared, chain};
use divvy_model::mig::{GpuInstanceId, GpuInstanceProfileId, Placement};
use divvy_model::{GpuDriver, GpuErrorCode, GpuUuid, MigMode};

use crate::mig_crash::{claim_of, living, mig_world, sim};
use crate::story::uid;
use crate::world::{HardwareFault, Moment, World};

const HALF: &str = "gpu-0-mig-3g40gb-9-4";
const SMALL: &str = "gpu-0-mig-1g10gb-19-0";

fn setup() -> (World, Executor, Claim, GpuUuid) {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    let a = claim_of("a", &[HALF], "t1");
    world.lock().api.insert(a.uid.clone(), a.clone());
    let gpu = world.gpu(0);
    (world, executor, a, gpu)
}

/// Profile id, start, and number of compute instances of all that lives.
fn shape(world: &World) -> Vec<(u32, u32, usize)> {
    let all = (0..2).flat_map(|n| living(world, &world.gpu(n)));
    all.map(|(i, inside)| (i.profile.0, i.placement.start, inside.len())).collect()
}

fn is_clean(world: &World) -> bool {
    let m = world.lock();
    m.records().is_empty() && m.cdi.is_empty() && {
        drop(m);
        shape(world).is_empty()
    }
}

fn mode(world: &World, gpu: &GpuUuid) -> bool {
    sim(world).mig_mode(gpu).is_ok_and(MigMode::is_on)
}

/// Dies there while preparing; the next process restores, and the claim is prepared as if nothing had been.
fn dies_while_preparing(at: &'static str, moment: Moment, left: &[(u32, u32, usize)]) {
    let (world, executor, a, _) = setup();
    world.lock().crash_at = Some((at, moment));
    world.prepare(&executor, &a).unwrap_err();
    assert!(world.lock().dead, "nothing is called {at}");
    assert_eq!(shape(&world), left, "at the time of the crash");
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
fn row_7_a_claim_that_nobody_unprepared_is_undone_by_reconcile_and_its_slices_can_be_had_again() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    world.lock().api.clear();
    let report = executor.reconcile(&world.view());
    assert!(matches!(&report.events[..], [Event::Kept { .. }]), "a grace period: {:?}", report.events);
    world.pass(Duration::from_mins(5));
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
fn a_partition_in_use_is_waited_for_ten_seconds_then_lingers_and_is_removed_when_its_process_is_gone() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, _) = living(&world, &gpu).remove(0);
    sim(&world).start_process_in(&gpu, instance.id, 4711);
    world.lock().api.clear();
    let began = world.lock().now;
    let answer = world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(answer, Unprepared::Lingering(format!("process 4711 still uses {gpu}")));
    let took = world.lock().now.saturating_sub(began);
    assert!((Duration::from_secs(10)..Duration::from_secs(11)).contains(&took), "{took:?}");
    assert_eq!(shape(&world), [(9, 4, 1)], "held");
    // Its neighbour is free meanwhile.
    world.prepare(&executor, &claim_of("b", &[SMALL], "t2")).unwrap();
    let over = world.prepare(&executor, &claim_of("c", &["gpu-0-mig-1g10gb-19-4"], "t3")).unwrap_err();
    assert_eq!(over.category(), "held");
    sim(&world).end_process(4711);
    executor.reconcile(&world.view());
    assert_eq!(shape(&world), [(19, 0, 1)]);
}

#[test]
fn a_process_that_the_driver_sees_and_nvml_does_not_list_makes_the_removal_wait_without_fencing_the_gpu() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    let in_use = divvy_gpu_sim::Fault::fail(GpuErrorCode::IN_USE);
    let fault = sim(&world).fault(in_use.of(divvy_model::GpuOp::DestroyGpuInstance));
    let Unprepared::Lingering(why) = world.unprepare(&executor, &a.uid).unwrap() else { panic!() };
    assert!(why.contains("its GPU instance is still in use"), "{why}");
    assert_eq!(shape(&world), [(9, 4, 0)], "its compute instance is gone already");
    assert_eq!(executor.fences().unwrap().len(), 0);
    world.prepare(&executor, &claim_of("b", &[SMALL], "t2")).unwrap();
    sim(&world).edit(|e| e.clear_faults(Some(fault)));
    let report = executor.reconcile(&world.view());
    assert!(report.events.contains(&Event::Released { claim: a.uid.clone() }), "{:?}", report.events);
    assert_eq!(shape(&world), [(19, 0, 1)]);
}

#[test]
fn an_instance_with_our_ids_and_another_uuid_is_somebody_elses_and_stays() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    let (instance, inside) = living(&world, &gpu).remove(0);
    let sim = sim(&world);
    sim.edit(|e| {
        e.destroy_compute_instance(&gpu, instance.id, inside[0].id).unwrap();
        e.destroy_gpu_instance(&gpu, instance.id).unwrap();
    });
    let theirs = sim.make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4).unwrap();
    assert_eq!((theirs.gpu_instance, theirs.id), (instance.id, inside[0].id), "ids come again");
    assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Done);
    assert_eq!(living(&world, &gpu), [(instance, vec![theirs])]);
    assert_eq!(executor.foreign(), [(gpu, vec![instance])].into());
}

#[test]
fn an_instance_of_somebody_else_in_the_way_is_named_and_left_alone() {
    let (world, executor, a, gpu) = setup();
    let sim = sim(&world);
    sim.set_mig_mode(&gpu, true).unwrap();
    let theirs = sim.make_foreign_instance(&gpu, GpuInstanceProfileId(19), 5).unwrap();
    let began = world.lock().now;
    let error = world.prepare(&executor, &a).unwrap_err();
    let expected = format!(
        "claim ns/a (UID uid-a) cannot be prepared: the step to create a partition of profile 9 at 4+4 on {gpu} failed: it was not done: GPU instance {0} (profile 19, 5:1) is in the way of 4:4 on {gpu}; this driver has not made it and leaves it alone (whoever made it must remove it: `nvidia-smi mig -i {gpu} -gi {0} -dci && nvidia-smi mig -i {gpu} -gi {0} -dgi`): NVML create_gpu_instance failed on {gpu}: INSUFFICIENT_RESOURCES (23)",
        theirs.gpu_instance.0
    );
    assert_eq!(chain(&error), expected);
    assert!(world.lock().now.saturating_sub(began) < Duration::from_secs(1), "waiting would not help");
    assert_eq!(shape(&world), [(19, 5, 1)]);
    let report = executor.reconcile(&world.view());
    let foreign: Vec<_> = report.foreign[&gpu].iter().map(|i| (i.profile.0, i.placement)).collect();
    assert_eq!(foreign, [(19, Placement { start: 5, size: 1 })]);
    // Beside it there is room.
    world.prepare(&executor, &claim_of("b", &["gpu-0-mig-3g40gb-9-0"], "t2")).unwrap();
    assert_eq!(executor.foreign().len(), 1, "what we have made is not told");
    let whole = world.prepare(&executor, &claim_of("c", &["gpu-1"], "t3"));
    whole.unwrap();
}

#[test]
fn a_whole_gpu_claim_turns_mig_mode_off_again_and_unprepare_never_does() {
    let (world, executor, a, gpu) = setup();
    assert!(!mode(&world, &gpu));
    world.prepare(&executor, &a).unwrap();
    assert!(mode(&world, &gpu));
    let state = || world.lock().file(Folder::Gpus, &format!("{gpu}.json"));
    assert!(state().is_some(), "the baseline is on disk");
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(mode(&world, &gpu), "off is lazy");
    world.prepare(&executor, &claim_of("w", &["gpu-0"], "t2")).unwrap();
    assert!(!mode(&world, &gpu));
    assert_eq!(state(), None, "back to the baseline: nothing to remember");
    // And on again for the next partition.
    world.unprepare(&executor, &uid("w")).unwrap();
    world.prepare(&executor, &a).unwrap();
    assert!(mode(&world, &gpu));
}

#[test]
fn a_refused_change_of_mig_mode_is_not_tried_again_once_the_gpus_instances_are_others() {
    let (world, executor, a, gpu) = setup();
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.insert("dcgm".to_owned()));
    world.prepare(&executor, &a).unwrap_err();
    assert!(executor.refused_modes()[&gpu].on);
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.clear());
    executor.set_rights(Rights { static_gpus: [gpu.clone()].into(), ..Rights::default() });
    executor.reconcile(&world.view());
    assert_eq!(executor.refused_modes().len(), 0);
    let mode = sim(&world).mig_mode(&gpu).unwrap();
    assert_eq!(mode, MigMode::Supported { current: false, pending: false });
}

#[test]
fn what_depends_on_rights_that_are_not_known_yet_waits_for_them_and_not_for_ever() {
    let (world, executor, a, _) = setup();
    executor.await_rights(Duration::from_mins(5));
    let error = world.prepare(&executor, &a).unwrap_err();
    assert_eq!(error.category(), "rules-unknown");
    assert!(is_clean(&world) && !error.is_permanent());
    executor.await_rights(Duration::from_secs(5));
    let began = world.lock().now;
    world.prepare(&executor, &a).unwrap();
    assert!(world.lock().now.saturating_sub(began) >= Duration::from_secs(5));
}

#[test]
fn a_change_of_mig_mode_that_others_prevent_is_tried_until_the_deadline_names_them_and_is_tried_again_later()
{
    let (world, executor, a, gpu) = setup();
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.insert("dcgm".to_owned()));
    let began = world.lock().now;
    let error = world.prepare(&executor, &a).unwrap_err();
    assert_eq!(
        chain(&error),
        format!(
            "claim ns/a (UID uid-a) cannot be prepared: the step to turn MIG mode of {gpu} on failed: it was not done: MIG mode of {gpu} cannot be turned on while others use it: no process computes on it, so it is one that has it open (DCGM or its exporter, nvidia-persistenced, nvidia-smi, a device plugin)"
        )
    );
    let took = world.lock().now.saturating_sub(began);
    assert!((Duration::from_secs(40)..Duration::from_secs(45)).contains(&took), "{took:?}");
    let facts = sim(&world).mig_mode(&gpu).unwrap();
    assert_eq!(facts, MigMode::Supported { current: false, pending: false }, "nothing is left pending");
    assert!(is_clean(&world));
    assert_eq!(world.lock().file(Folder::Gpus, &format!("{gpu}.json")), None);
    assert!(executor.refused_modes()[&gpu].on);
    executor.reconcile(&world.view());
    assert_eq!(executor.refused_modes().len(), 1);
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.clear());
    executor.reconcile(&world.view());
    assert_eq!(executor.refused_modes().len(), 0);
    // One that leaves in time is not noticed.
    world.prepare(&executor, &claim_of("w", &["gpu-1"], "t")).unwrap();
    let other = world.gpu(1);
    world.unprepare(&executor, &uid("w")).unwrap();
    sim(&world).start_process(&other, 99);
    let machine = world.clone();
    world.later(Duration::from_secs(7), move || sim(&machine).end_process(99));
    world.prepare(&executor, &claim_of("b", &["gpu-1-mig-1g10gb-19-0"], "t2")).unwrap();
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
        let told = executor.foreign();
        assert_eq!(told[&gpu].iter().map(|i| i.id).collect::<Vec<_>>(), [theirs.gpu_instance]);
        assert_eq!(world.unprepare(&executor, &a.uid).unwrap(), Unprepared::Done);
        assert_eq!(shape(&world), [(19, 0, 1)]);
        // Allocated, never prepared: an instance at its place is somebody else's.
        let b = claim_of("b", &[SMALL], "t2");
        world.lock().api.insert(b.uid.clone(), b.clone());
        assert_eq!(world.prepare(&executor, &b).unwrap_err().category(), "step");
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
