//! When MIG mode of a GPU is turned on and off, and what becomes of a change that is refused or may not be made yet.

use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{GpuState, Observed, Outcome, StepError};
use divvy_executor::{Event, Folder, MigSteps, Refresh, Steps, chain};
use divvy_gpu_sim::{Fault, SimNode};
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp, MigMode};

use crate::mig_hardware::Hardware;
use crate::mig_world::{claim_of, is_clean, mode, setup, sim};
use crate::story::uid;
use crate::world::{HardwareFault, MigLate, Moment, World};

/// What is kept of a GPU that nothing was done to.
fn untouched() -> GpuState {
    GpuState { may_change_mode: true, ..GpuState::default() }
}

#[test]
fn a_whole_gpu_claim_turns_mig_mode_off_again_and_unprepare_never_does() {
    let (world, executor, a, gpu) = setup();
    assert!(!mode(&world, &gpu));
    world.prepare(&executor, &a).unwrap();
    assert!(mode(&world, &gpu));
    let state = || world.lock().gpu_state(&gpu);
    assert!(state().turned_mig_on(), "the baseline is on disk");
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(mode(&world, &gpu), "off is lazy");
    world.prepare(&executor, &claim_of("w", &["gpu-0"], "t2")).unwrap();
    assert!(!mode(&world, &gpu));
    assert_eq!(state(), untouched(), "back to the baseline: nothing to remember");
    // And on again for the next partition.
    world.unprepare(&executor, &uid("w")).unwrap();
    world.prepare(&executor, &a).unwrap();
    assert!(mode(&world, &gpu));
}

#[test]
fn what_a_prepare_may_change_is_kept_for_a_restart_and_asked_for_under_the_lock() {
    let (world, executor, a, gpu) = setup();
    assert!(world.lock().gpu_state(&gpu).may_change_mode);
    world.grant(&executor, false);
    assert_eq!(world.lock().file(Folder::Gpus, &format!("{gpu}.json")), None);
    let began = world.lock().now;
    let error = world.prepare(&world.start(), &a).unwrap_err();
    assert_eq!(error.category(), "wrong-mode");
    assert!(world.lock().now < began + Duration::from_secs(1), "waiting changes nothing");
    world.grant(&executor, true);
    world.kill();
    world.prepare(&world.start(), &a).unwrap();
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
            "claim ns/a (UID uid-a) cannot be prepared: the step to turn MIG mode of {gpu} on failed: it was not done: MIG mode of {gpu} cannot be turned on while the GPU is in use: no process computes on it, so a process has it open (such as DCGM or its exporter, nvidia-persistenced, nvidia-smi, or a device plugin)"
        )
    );
    let took = world.lock().now.saturating_sub(began);
    assert!((Duration::from_secs(40)..Duration::from_secs(45)).contains(&took), "{took:?}");
    let facts = sim(&world).mig_mode(&gpu).unwrap();
    assert_eq!(facts, MigMode::Supported { current: false, pending: false }, "nothing is left pending");
    assert!(is_clean(&world));
    assert_eq!(world.lock().gpu_state(&gpu), untouched());
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.clear());
    executor.reconcile(&world.view());
    assert!(!mode(&world, &gpu), "the next prepare that needs it turns it on");
    // One that leaves in time is not noticed.
    world.prepare(&executor, &claim_of("w", &["gpu-1"], "t")).unwrap();
    let other = world.gpu(1);
    world.unprepare(&executor, &uid("w")).unwrap();
    sim(&world).start_process(&other, 99);
    let machine = world.clone();
    world.later(Duration::from_secs(7), move || sim(&machine).end_process(99));
    world.prepare(&executor, &claim_of("b", &["gpu-1-mig-1g10gb-19-0"], "t2")).unwrap();
}

/// H1. The other instance gives the whole GPU out while this one reconciles after a change of MIG mode was refused.
#[test]
fn a_refused_mode_is_not_changed_under_a_claim_that_was_prepared_meanwhile() {
    let (world, executor, a, gpu) = setup();
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.insert("dcgm".to_owned()));
    world.prepare(&executor, &a).unwrap_err();
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.clear());
    world.lock().api.remove(&a.uid);
    let w = claim_of("w", &["gpu-0"], "t2");
    world.lock().api.insert(w.uid.clone(), w.clone());
    let (other, machine) = (world.start(), world.clone());
    world.after_listing_cdi(move || drop(machine.prepare(&other, &w).unwrap()));
    for _ in 0..3 {
        executor.reconcile(&world.view());
        world.pass(Duration::from_mins(1));
    }
    assert!(world.lock().records().contains_key(&uid("w")));
    assert!(!mode(&world, &gpu), "MIG mode was turned on under the holder of the whole GPU");
}

/// H5.
#[test]
fn a_mode_that_was_changed_and_could_not_be_read_is_remembered_as_ours() {
    let (world, executor, a, gpu) = setup();
    // Read before by the decision, the executor and the step; then once after.
    sim(&world).fault(Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::MigMode).after(3).times(1));
    world.lock().api.clear();
    // No time to try again.
    let call = executor.begin(Duration::from_millis(5));
    let error = executor.prepare(&a, &call).unwrap_err();
    assert!(chain(&error).contains("its outcome is not known: MIG mode"), "{}", chain(&error));
    assert!(mode(&world, &gpu), "the driver did it");
    assert!(world.lock().gpu_state(&gpu).turned_mig_on(), "nothing says that we have turned it on");
    // So that it goes back for the next whole claim, though no policy lets it change any more.
    world.grant(&executor, false);
    world.prepare(&executor, &claim_of("w", &["gpu-0"], "t2")).unwrap();
    assert!(!mode(&world, &gpu));
}

/// H7. What the inventory says is old.
#[test]
fn a_whole_gpu_whose_mig_mode_was_just_turned_on_is_not_prepared_as_whole() {
    let (world, executor, _, gpu) = setup();
    world.grant(&executor, false);
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    let error = world.prepare(&executor, &claim_of("w", &["gpu-0"], "t1")).unwrap_err();
    assert_eq!(error.category(), "wrong-mode");
    // One that cannot be read is not taken for what it was.
    sim(&world).set_mig_mode(&gpu, false).unwrap();
    sim(&world).fault(Fault::fail(GpuErrorCode::GPU_IS_LOST).of(GpuOp::MigMode).times(1));
    let call = executor.begin(Duration::ZERO);
    let error = executor.prepare(&claim_of("w", &["gpu-0"], "t1"), &call).unwrap_err();
    assert_eq!(error.category(), "gpu-unreadable");
    world.prepare(&executor, &claim_of("w", &["gpu-0"], "t1")).unwrap();
}

/// A call of this process that is past its deadline may still change the GPU: nothing is begun beside it.
#[test]
fn nothing_is_begun_on_a_gpu_while_an_earlier_call_has_not_come_back() {
    let (world, _, _, gpu) = setup();
    let steps = MigSteps::new(Arc::new(Hardware(world.clone())));
    let late = Box::new(|_: &SimNode| ());
    let at = world.lock().now + Duration::from_secs(9);
    let op = GpuOp::CreateGpuInstance;
    world.lock().mig_late.push(MigLate { at, succeeds: true, gpu: gpu.clone(), op, what: late });
    let wanted = &divvy_model::mig::Partition {
        gpu: gpu.clone(),
        profile: divvy_model::mig::GpuInstanceProfileId(9),
        placement: divvy_model::mig::Placement { start: 4, size: 4 },
    };
    for begun in [
        steps.set_mig_mode(&gpu, true),
        steps.set_compute_mode(&gpu, divvy_model::ComputeMode::Prohibited),
        steps.create(wanted, &mut |_| {}).map(drop),
    ] {
        let error = begun.unwrap_err();
        assert!(matches!(error, StepError::NotDone(_)) && error.cause().is_passing(), "{error:?}");
    }
    assert!(steps.before(wanted).is_err());
    assert_eq!(steps.probe(wanted, &[]), Observed::InFlight);
    assert!(steps.undo(wanted, &Outcome::GpuInstance { gi: divvy_model::mig::GpuInstanceId(1) }).is_err());
    assert!(!crate::mig_world::mode(&world, &gpu));
}

/// MIG mode still reads as off, and a call that turns it on is under way.
#[test]
fn a_whole_gpu_is_not_prepared_while_a_call_that_turns_mig_mode_on_has_not_come_back() {
    for succeeds in [true, false] {
        let (world, executor, a, gpu) = setup();
        let after = Duration::from_mins(10);
        world.lock().hardware_fault = Some(HardwareFault::Late { after, succeeds });
        world.prepare(&executor, &a).unwrap_err();
        world.lock().api.clear();
        for (name, device) in [("w", "gpu-0"), ("s", "gpu-0-ts")] {
            let error = world.prepare(&executor, &claim_of(name, &[device], "t2")).unwrap_err();
            assert!(chain(&error).contains("(set_mig_mode)"), "{}", chain(&error));
        }
        world.pass(Duration::from_mins(11));
        assert_eq!(mode(&world, &gpu), succeeds);
        world.prepare(&executor, &claim_of("w", &["gpu-0"], "t2")).unwrap();
        assert!(!mode(&world, &gpu));
        assert_eq!(world.lock().gpu_state(&gpu), untouched());
    }
}

/// No policy lets MIG mode change any more: what we have turned on is turned off all the same, also by the second try.
#[test]
fn mig_mode_that_is_ours_stays_ours_until_it_is_certainly_off() {
    let cut_short = |cut: &dyn Fn(&World)| {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        world.unprepare(&executor, &a.uid).unwrap();
        world.grant(&executor, false);
        let w = claim_of("w", &["gpu-0"], "t2");
        cut(&world);
        world.prepare(&executor, &w).unwrap_err();
        world.pass(Duration::from_mins(3));
        let executor = world.start();
        world.prepare(&executor, &w).unwrap();
        assert!(!mode(&world, &gpu));
        assert_eq!(world.lock().gpu_state(&gpu), GpuState::default());
    };
    for moment in [Moment::Before, Moment::During, Moment::After] {
        cut_short(&|world| world.lock().crash_at = Some((GpuOp::SetMigMode.name(), moment)));
    }
    for succeeds in [true, false] {
        let after = Duration::from_mins(2);
        cut_short(&|world| world.lock().hardware_fault = Some(HardwareFault::Late { after, succeeds }));
    }
}

/// What a change of MIG mode that does not work comes to, and that a mode that is only pending is taken back.
#[test]
fn a_change_of_mig_mode_that_fails_says_whether_it_may_have_happened_and_leaves_no_pending_mode() {
    let node = SimNode::parse("h100x2").unwrap();
    let gpu = node.uuids().remove(0);
    let steps = MigSteps::new(Arc::new(node.clone()));
    let pending = || match node.mig_mode(&gpu).unwrap() {
        MigMode::Supported { pending, .. } => pending,
        MigMode::Unsupported => panic!("an H100"),
    };
    let cases = [
        (GpuErrorCode::IN_USE, true, "while the GPU is in use: no process computes on it"),
        (GpuErrorCode::NO_PERMISSION, true, "cannot be turned on"),
        (GpuErrorCode::UNKNOWN, false, "may not be on"),
    ];
    for (code, is_certain, text) in cases {
        let calls = node.calls(GpuOp::SetMigMode);
        node.fault(Fault::fail(code).of(GpuOp::SetMigMode).times(1));
        let error = steps.set_mig_mode(&gpu, true).unwrap_err();
        assert_eq!(matches!(error, StepError::NotDone(_)), is_certain, "{code:?}");
        assert!(chain(&error).contains(text), "{}", chain(&error));
        assert_eq!(node.calls(GpuOp::SetMigMode), calls + 1, "nothing is pending that is to be taken back");
    }
    node.edit(|e| e.gpu(&gpu).unwrap().clients.insert("dcgm".to_owned()));
    let error = steps.set_mig_mode(&gpu, true).unwrap_err();
    assert!(matches!(error, StepError::NotDone(_)) && !pending(), "{}", chain(&error));
    // The driver could not take the mode back: it was not set, or may be.
    let calls = node.calls(GpuOp::SetMigMode);
    node.fault(Fault::fail_after(GpuErrorCode::UNKNOWN).of(GpuOp::SetMigMode).times(1));
    let error = steps.set_mig_mode(&gpu, true).unwrap_err();
    assert!(matches!(error, StepError::Unknown(_)) && pending(), "{}", chain(&error));
    assert_eq!(node.calls(GpuOp::SetMigMode), calls + 1, "what may still come is not raced with");
    node.edit(|e| e.gpu(&gpu).unwrap().clients.clear());
    steps.set_mig_mode(&gpu, true).unwrap();
    // Turned off under another driver's instance: not even tried.
    node.make_foreign_instance(&gpu, divvy_model::mig::GpuInstanceProfileId(19), 0).unwrap();
    let calls = node.calls(GpuOp::SetMigMode);
    let error = steps.set_mig_mode(&gpu, false).unwrap_err();
    assert!(matches!(error, StepError::NotDone(_)), "{}", chain(&error));
    assert!(chain(&error).contains("which this driver did not create"), "{}", chain(&error));
    assert_eq!((node.calls(GpuOp::SetMigMode), pending()), (calls, true));
}

/// A context on the whole GPU keeps partitions from being made; who has it is named.
#[test]
fn a_partition_that_is_refused_because_the_gpu_is_in_use_names_what_uses_it() {
    let (world, _, _, gpu) = setup();
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    sim(&world).start_process(&gpu, 4711);
    let wanted = divvy_model::mig::Partition {
        gpu: gpu.clone(),
        profile: divvy_model::mig::GpuInstanceProfileId(9),
        placement: divvy_model::mig::Placement { start: 4, size: 4 },
    };
    let error = MigSteps::new(Arc::new(sim(&world))).create(&wanted, &mut |_| {}).unwrap_err();
    assert!(chain(&error).contains("while the GPU is in use: process 4711"), "{}", chain(&error));
}

/// What is gone is removed; what could not be read or removed is not taken for gone.
#[test]
fn a_removal_succeeds_for_what_is_gone_and_says_of_the_rest_whether_it_may_have_happened() {
    let node = SimNode::parse("h100x2").unwrap();
    let gpu = node.uuids().remove(0);
    node.set_mig_mode(&gpu, true).unwrap();
    let steps = MigSteps::new(Arc::new(node.clone()));
    let wanted = divvy_model::mig::Partition {
        gpu: gpu.clone(),
        profile: divvy_model::mig::GpuInstanceProfileId(9),
        placement: divvy_model::mig::Placement { start: 4, size: 4 },
    };
    let made = steps.create(&wanted, &mut |_| {}).unwrap();
    let Outcome::Partition { gi, .. } = made else { panic!("{made:?}") };
    assert_eq!(steps.probe(&wanted, &[]), Observed::Ours(made.clone()));
    assert_eq!(steps.probe(&wanted, &[gi]), Observed::Absent, "it was there before we began");
    let fails = |op, code| {
        node.fault(Fault::fail(code).of(op).times(1));
    };
    // It goes between one question and the next.
    fails(GpuOp::ComputeInstances, GpuErrorCode::NOT_FOUND);
    assert_eq!(steps.living(&wanted).unwrap(), None);
    fails(GpuOp::ComputeInstances, GpuErrorCode::UNKNOWN);
    assert_eq!(steps.living(&wanted).unwrap_err().code, GpuErrorCode::UNKNOWN);
    for (code, is_certain, text) in [
        (GpuErrorCode::IN_USE, true, "its compute instance is still in use"),
        (GpuErrorCode::NO_PERMISSION, true, "its compute instance could not be removed"),
        (GpuErrorCode::UNKNOWN, false, "its compute instance could not be removed"),
    ] {
        fails(GpuOp::DestroyComputeInstance, code);
        let error = steps.undo(&wanted, &made).unwrap_err();
        assert_eq!(matches!(error, StepError::NotDone(_)), is_certain, "{code:?}");
        assert!(chain(&error).contains(text), "{}", chain(&error));
        assert_eq!(steps.living(&wanted).unwrap().as_ref(), Some(&made));
    }
    // Another process has removed it in the same moment.
    let fault = Fault::fail_after(GpuErrorCode::NOT_FOUND).times(1);
    node.fault(fault.of(GpuOp::DestroyComputeInstance));
    steps.undo(&wanted, &made).unwrap();
    assert_eq!(steps.living(&wanted).unwrap(), None);
}

/// From Hopper on the mode does not outlast a reboot, and what had turned it on may come later than the kubelet.
#[test]
fn after_a_reboot_a_partition_is_made_again_also_where_another_program_had_turned_mig_mode_on() {
    let (world, executor, a, gpu) = setup();
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    world.prepare(&executor, &a).unwrap();
    assert!(!world.lock().gpu_state(&gpu).turned_mig_on());
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.reboot();
    assert!(!mode(&world, &gpu));
    let events = world.start().restore_cdi(Refresh::Missing).events;
    assert_eq!(events, [Event::ExecutedAgain { claim: a.uid }]);
    assert_eq!(crate::mig_world::living(&world, &gpu).len(), 1);
}
