//! When MIG mode of a GPU is turned on and off, and what becomes of a change that is refused or may
//! not be made yet.

use std::time::Duration;

use divvy_executor::{Event, Folder, Refresh, chain};
use divvy_gpu_sim::Fault;
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp, Grant, MigMode};

use crate::mig_world::{claim_of, is_clean, mode, setup, sim};
use crate::story::uid;
use crate::world::accessors::{GpuPicture, granted, picture};
use crate::world::{HardwareFault, Moment, World};

#[test]
fn a_whole_gpu_claim_turns_mig_mode_off_again_and_unprepare_never_does() {
    let (world, executor, a, gpu) = setup();
    assert!(!mode(&world, &gpu));
    world.prepare(&executor, &a).unwrap();
    assert!(mode(&world, &gpu));
    let state = || picture(&world, &gpu);
    assert!(state().turned_mig_on(), "the baseline is on disk");
    assert_eq!(executor.mig_found().unwrap(), [(gpu.clone(), false)].into());
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(mode(&world, &gpu), "off is lazy");
    world
        .prepare(&executor, &claim_of("w", &["gpu-0"], "t2"))
        .unwrap();
    assert!(!mode(&world, &gpu));
    assert_eq!(
        state(),
        GpuPicture::untouched(true),
        "back to the baseline: nothing to remember"
    );
    // And on again for the next partition.
    world.unprepare(&executor, &uid("w")).unwrap();
    world.prepare(&executor, &a).unwrap();
    assert!(mode(&world, &gpu));
}

/// The node goes to another driver, which finds GPUs as divvy has found them, but for those that
/// are in use.
#[test]
fn a_node_that_is_left_has_its_mig_mode_back_on_gpus_without_claims() {
    let (world, executor, a, gpu) = setup();
    world.grant(&executor, true);
    world.prepare(&executor, &a).unwrap();
    assert_eq!(executor.leave().events, []);
    assert!(mode(&world, &gpu), "its pod runs");
    world.unprepare(&executor, &a.uid).unwrap();
    executor.reconcile(&world.view());
    assert!(mode(&world, &gpu), "partitions are offered");
    let event = Event::SettingsGivenBack { gpu: gpu.clone() };
    assert_eq!(executor.leave().events, [event]);
    assert!(!mode(&world, &gpu));
    assert!(!picture(&world, &gpu).turned_mig_on());
    assert_eq!(executor.leave().events, []);
    // The label is back, and the next process grants anew.
    let executor = world.start();
    world.grant(&executor, true);
    world.prepare(&executor, &a).unwrap();
}

#[test]
fn a_node_that_is_left_keeps_a_mig_mode_that_divvy_has_not_turned_on() {
    let (world, executor, a, gpu) = setup();
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    world.prepare(&executor, &a).unwrap();
    world.unprepare(&executor, &a.uid).unwrap();
    assert_eq!(executor.leave().events, []);
    assert!(mode(&world, &gpu));
}

#[test]
fn a_grant_outlasts_a_restart_and_is_read_under_the_lock() {
    let (world, executor, a, gpu) = setup();
    assert_eq!(granted(&world, &gpu).may_change_mode, Some(true));
    world.grant(&executor, false);
    assert_eq!(
        world.lock().file(Folder::Gpus, &format!("{gpu}.json")),
        None
    );
    let began = world.lock().now;
    let error = world.prepare(&world.start(), &a).unwrap_err();
    assert_eq!(error.category(), "wrong-mode");
    assert!(
        world.lock().now < began + Duration::from_secs(1),
        "waiting changes nothing"
    );
    world.grant(&executor, true);
    world.kill();
    world.prepare(&world.start(), &a).unwrap();
}

/// A change of MIG mode that others prevent is tried until the deadline names them and is tried
/// again later.
#[test]
fn a_prevented_change_of_mig_mode_names_who_and_is_tried_again() {
    let (world, executor, a, gpu) = setup();
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.insert("dcgm".to_owned()));
    let began = world.lock().now;
    let error = world.prepare(&executor, &a).unwrap_err();
    assert_eq!(
        chain(&error),
        format!(
            "claim ns/a (UID uid-a) cannot be prepared: failed to turn MIG mode of {gpu} on: it was not done: MIG mode of {gpu} cannot be turned on while the GPU is in use: no process computes on it, so a process has it open (such as DCGM or its exporter, nvidia-persistenced, nvidia-smi, or a device plugin)"
        )
    );
    let took = world.lock().now.saturating_sub(began);
    assert!(
        (Duration::from_secs(40)..Duration::from_secs(45)).contains(&took),
        "{took:?}"
    );
    let facts = sim(&world).mig_mode(&gpu).unwrap();
    assert_eq!(
        facts,
        MigMode::Supported {
            current: false,
            pending: false
        },
        "nothing is left pending"
    );
    assert!(is_clean(&world));
    assert_eq!(picture(&world, &gpu), GpuPicture::untouched(true));
    sim(&world).edit(|e| e.gpu(&gpu).unwrap().clients.clear());
    executor.reconcile(&world.view());
    assert!(
        !mode(&world, &gpu),
        "the next prepare that needs it turns it on"
    );
    // One that leaves in time is not noticed.
    world
        .prepare(&executor, &claim_of("w", &["gpu-1"], "t"))
        .unwrap();
    let other = world.gpu(1);
    world.unprepare(&executor, &uid("w")).unwrap();
    sim(&world).start_process(&other, 99);
    let machine = world.clone();
    world.later(Duration::from_secs(7), move || {
        sim(&machine).end_process(99);
    });
    world
        .prepare(&executor, &claim_of("b", &["gpu-1-mig-1g10gb-19-0"], "t2"))
        .unwrap();
}

/// H1. The other instance gives the whole GPU out while this one reconciles after a change of MIG
/// mode was refused.
#[test]
fn a_refused_mode_is_not_changed_under_a_claim_prepared_meanwhile() {
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
    assert!(
        !mode(&world, &gpu),
        "MIG mode was turned on under the holder of the whole GPU"
    );
}

/// H5.
#[test]
fn a_mode_that_was_changed_and_could_not_be_read_is_remembered_as_ours() {
    // Read some times before the change; then once after.
    let failed = (1..12).find_map(|before| {
        let (world, executor, a, gpu) = setup();
        let fault = Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::MigMode);
        sim(&world).fault(fault.after(before).times(1));
        world.lock().api.clear();
        // No time to try again.
        let call = executor.begin(Duration::from_millis(5));
        let error = executor.prepare(&a, &call).err()?;
        let is_after = chain(&error).contains("its outcome is not known: MIG mode");
        is_after.then_some((world, executor, gpu))
    });
    let (world, executor, gpu) = failed.expect("the mode is read after the change");
    assert!(mode(&world, &gpu), "the driver did it");
    assert!(
        picture(&world, &gpu).turned_mig_on(),
        "nothing says that we have turned it on"
    );
    // So that it goes back for the next whole claim, though no policy lets it change any more.
    world.grant(&executor, false);
    world
        .prepare(&executor, &claim_of("w", &["gpu-0"], "t2"))
        .unwrap();
    assert!(!mode(&world, &gpu));
}

/// H7. The inventory is old.
#[test]
fn a_whole_gpu_whose_mig_mode_was_just_turned_on_is_not_prepared_as_whole() {
    let (world, executor, _, gpu) = setup();
    world.grant(&executor, false);
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    let error = world
        .prepare(&executor, &claim_of("w", &["gpu-0"], "t1"))
        .unwrap_err();
    assert_eq!(error.category(), "wrong-mode");
    // One that cannot be read is not taken for what it was.
    sim(&world).set_mig_mode(&gpu, false).unwrap();
    sim(&world).fault(
        Fault::fail(GpuErrorCode::GPU_IS_LOST)
            .of(GpuOp::MigMode)
            .times(1),
    );
    let call = executor.begin(Duration::ZERO);
    let error = executor
        .prepare(&claim_of("w", &["gpu-0"], "t1"), &call)
        .unwrap_err();
    assert_eq!(error.category(), "gpu-unreadable");
    world
        .prepare(&executor, &claim_of("w", &["gpu-0"], "t1"))
        .unwrap();
}

/// MIG mode still reads as off, and a call that turns it on is under way.
#[test]
fn a_whole_gpu_waits_for_a_late_call_that_turns_mig_mode_on() {
    for succeeds in [true, false] {
        let (world, executor, a, gpu) = setup();
        let after = Duration::from_mins(10);
        world.lock().hardware_fault = Some(HardwareFault::Late { after, succeeds });
        world.prepare(&executor, &a).unwrap_err();
        world.lock().api.clear();
        for (name, device) in [("w", "gpu-0"), ("s", "gpu-0-ts")] {
            let error = world
                .prepare(&executor, &claim_of(name, &[device], "t2"))
                .unwrap_err();
            assert!(
                chain(&error).contains("(set_mig_mode)"),
                "{}",
                chain(&error)
            );
        }
        world.pass(Duration::from_mins(11));
        assert_eq!(mode(&world, &gpu), succeeds);
        world
            .prepare(&executor, &claim_of("w", &["gpu-0"], "t2"))
            .unwrap();
        assert!(!mode(&world, &gpu));
        assert_eq!(picture(&world, &gpu), GpuPicture::untouched(true));
    }
}

/// No policy lets MIG mode change any more: what we have turned on is turned off all the same, also
/// by the second try.
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
        assert_eq!(picture(&world, &gpu), GpuPicture::untouched(false));
    };
    for moment in [Moment::Before, Moment::During, Moment::After] {
        cut_short(&|world| world.lock().crash_at = Some((GpuOp::SetMigMode.name(), moment)));
    }
    for succeeds in [true, false] {
        let after = Duration::from_mins(2);
        cut_short(&|world| {
            world.lock().hardware_fault = Some(HardwareFault::Late { after, succeeds });
        });
    }
}

/// From Hopper on the mode does not outlast a reboot, and what had turned it on may come later than
/// the kubelet.
#[test]
fn after_a_reboot_a_partition_is_made_although_mig_mode_was_on() {
    let (world, executor, a, gpu) = setup();
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    world.prepare(&executor, &a).unwrap();
    assert!(!picture(&world, &gpu).turned_mig_on());
    world.lock().api.insert(a.uid.clone(), a.clone());
    world.reboot();
    assert!(!mode(&world, &gpu));
    let events = world.start().restore_cdi(Refresh::Missing).events;
    assert_eq!(events, [Event::ExecutedAgain { claim: a.uid }]);
    assert_eq!(crate::mig_world::living(&world, &gpu).len(), 1);
}

/// The kubelet's call may come before the claim is carried out again; both decide alike.
#[test]
fn after_a_reboot_a_prepare_turns_mig_mode_on_without_a_grant() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    world.reboot();
    let executor = world.start();
    world.grant(&executor, false);
    let new = claim_of("b", &["gpu-1-mig-3g40gb-9-4"], "t1");
    let refused = world.prepare(&executor, &new).unwrap_err();
    assert_eq!(refused.category(), "wrong-mode");
    world.prepare(&executor, &a).unwrap();
    assert_eq!(crate::mig_world::living(&world, &gpu).len(), 1);
}

/// A policy has stopped offering partitions while the claim had one: a round turns the mode off.
#[test]
fn an_unprepare_never_turns_mig_mode_off() {
    let (world, executor, a, gpu) = setup();
    world.prepare(&executor, &a).unwrap();
    // The policy stops offering partitions while the claim has one.
    let grant = Grant {
        may_change_mode: Some(true),
        offers_partitions: Some(false),
        ..Grant::default()
    };
    executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
    world.unprepare(&executor, &a.uid).unwrap();
    assert!(mode(&world, &gpu), "turned off in the unprepare");
}

/// The node's administrator turns the mode on and off again under a note of ours: off is what was
/// found before the next claim, and what is given back when the node is left.
#[test]
fn a_mode_that_an_administrator_changed_is_what_was_found() {
    let (world, executor, a, gpu) = setup();
    world.grant(&executor, true);
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    let whole = claim_of("w", &["gpu-0"], "t0");
    world.prepare(&executor, &whole).unwrap();
    world.unprepare(&executor, &whole.uid).unwrap();
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    executor.reconcile(&world.view());
    sim(&world).set_mig_mode(&gpu, false).unwrap();
    world.prepare(&executor, &a).unwrap();
    assert_eq!(executor.mig_found().unwrap(), [(gpu.clone(), false)].into());
    world.unprepare(&executor, &a.uid).unwrap();
    let given_back = Event::SettingsGivenBack { gpu: gpu.clone() };
    assert_eq!(executor.leave().events, [given_back]);
    assert!(!mode(&world, &gpu));
}
