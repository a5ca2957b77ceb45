//! When MIG mode of a GPU is turned on and off, and what becomes of a change that is refused or may not be made yet.

use std::time::Duration;

use divvy_claims::Rights;
use divvy_executor::{Folder, chain};
use divvy_model::{GpuDriver, MigMode};

use crate::mig_world::{claim_of, is_clean, mode, setup, sim};
use crate::story::uid;

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
