//! When MIG mode of a GPU is turned on and off, and what becomes of a change that is refused or may not be made yet.

use std::time::Duration;

use divvy_claims::GpuState;
use divvy_executor::{Folder, chain};
use divvy_model::{GpuDriver, MigMode};

use crate::mig_world::{claim_of, is_clean, mode, setup, sim};
use crate::story::uid;

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
    assert_eq!(executor.granted().unwrap().len(), 2);
    world.grant(&executor, false);
    assert_eq!(world.lock().file(Folder::Gpus, &format!("{gpu}.json")), None);
    let error = world.prepare(&world.start(), &a).unwrap_err();
    assert_eq!(error.category(), "wrong-mode");
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
            "claim ns/a (UID uid-a) cannot be prepared: the step to turn MIG mode of {gpu} on failed: it was not done: MIG mode of {gpu} cannot be turned on while others use it: no process computes on it, so it is one that has it open (DCGM or its exporter, nvidia-persistenced, nvidia-smi, a device plugin)"
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
