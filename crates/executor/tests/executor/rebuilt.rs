//! Torn records whose boot is not known: they are carried out again before anything is answered.

use divvy_claims::Record;
use divvy_executor::{Event, Folder, InventorySource, ProcessOnGpu, Refresh, Unprepared};
use divvy_model::{ComputeMode, GpuDriver};

use crate::mig_world::{claim_of, living, sim};
use crate::mps_world::{MPS, TS, grants, prepared, set_exclusive, shared, start};
use crate::story::uid;
use crate::world::accessors::tear;

/// An administrator's unit sets the mode at each boot, as it did before divvy came.
#[test]
fn a_torn_record_of_an_earlier_boot_has_its_settings_again() {
    let (world, executor, gpu) = start();
    set_exclusive(&world, &gpu);
    let a = shared("a", "gpu-0-ts");
    prepared(&world, &executor, &a);
    let now = || sim(&world).facts(&gpu).unwrap().compute_mode;
    assert_eq!(now(), Some(ComputeMode::Default));
    drop(executor);
    tear(&world, &uid("a"), b"torn");
    world.reboot();
    // An administrator's unit sets it at each boot, as it did before divvy came.
    set_exclusive(&world, &gpu);
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    executor.reconcile(&world.view());
    world.prepare(&executor, &a).unwrap();
    executor.reconcile(&world.view());
    let records = world.lock().records();
    let record = records[&uid("a")].fine().cloned();
    assert_eq!(now(), Some(ComputeMode::Default), "{record:?}");
}

/// The same with a record that can be read.
#[test]
fn a_whole_record_of_an_earlier_boot_has_its_settings_again() {
    let (world, executor, gpu) = start();
    set_exclusive(&world, &gpu);
    let a = shared("a", "gpu-0-ts");
    prepared(&world, &executor, &a);
    let now = || sim(&world).facts(&gpu).unwrap().compute_mode;
    drop(executor);
    world.reboot();
    set_exclusive(&world, &gpu);
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    world.prepare(&executor, &a).unwrap();
    assert_eq!(now(), Some(ComputeMode::Default));
}

/// Another plugin may have given the GPU out since the boot.
#[test]
fn a_torn_record_of_an_earlier_boot_is_refused_beside_strangers() {
    let (world, executor, gpu) = start();
    let a = shared("a", "gpu-0-ts");
    prepared(&world, &executor, &a);
    drop(executor);
    tear(&world, &uid("a"), b"torn");
    world.reboot();
    world.changed(&gpu).unwrap();
    let executor = world.start();
    world.lock().processes.insert(
        gpu.clone(),
        vec![ProcessOnGpu {
            pid: 7,
            gpu_instance: None,
            pod: Some("pod-of-another-plugin".to_owned()),
        }],
    );
    executor.restore_cdi(Refresh::Missing);
    executor.reconcile(&world.view());
    let error = world.prepare(&executor, &a).map(drop);
    assert!(error.is_err(), "prepared beside a foreign process");
}

/// A share is not answered without its server, or in a mode in which programs get round it.
#[test]
fn a_torn_record_of_an_earlier_boot_has_its_mps_server_again() {
    let (world, executor, gpu) = start();
    grants(&world, &executor);
    let a = shared("a", "gpu-0-mps");
    prepared(&world, &executor, &a);
    drop(executor);
    tear(&world, &uid("a"), b"torn");
    world.reboot();
    world.changed(&gpu).unwrap();
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    executor.reconcile(&world.view());
    let answer = world.prepare(&executor, &a);
    let m = world.lock();
    let mode = m.sim.facts(&gpu).unwrap().compute_mode;
    assert!(
        answer.is_err() || (!m.mps.is_empty() && mode == Some(ComputeMode::ExclusiveProcess)),
        "answered: servers {:?}, mode {mode:?}",
        m.mps
    );
}

/// A record of this boot that was torn under its programs, and cannot be carried out now: they keep
/// the GPU, whatever boot it is of.
#[test]
fn a_torn_record_keeps_the_gpu_of_its_programs() {
    let (world, executor, gpu) = start();
    grants(&world, &executor);
    let a = shared("a", "gpu-0-mps");
    prepared(&world, &executor, &a);
    let process = ProcessOnGpu {
        pid: 7,
        gpu_instance: None,
        pod: Some("pod-a".to_owned()),
    };
    world.lock().processes.insert(gpu.clone(), vec![process]);
    let server = world.lock().mps.clone();
    tear(&world, &uid("a"), b"torn");
    world.lock().no_supervisor = true;
    executor.reconcile(&world.view());
    let done = world.unprepare(&executor, &uid("a")).unwrap();
    assert!(matches!(done, Unprepared::Lingering(_)), "{done:?}");
    world.lock().no_supervisor = false;
    executor.reconcile(&world.view());
    assert_eq!(world.lock().mps, server, "its program runs under it");
    world.lock().processes.clear();
    executor.reconcile(&world.view());
    let m = world.lock();
    assert!(
        m.records().is_empty() && m.mps.is_empty(),
        "{:?}",
        m.records()
    );
}

/// The GPU is at its goal already: nothing is done but writing the record.
#[test]
fn a_torn_record_of_this_boot_is_answered_from_without_a_change() {
    for device in [MPS, TS, "gpu-0-mps", "gpu-0-ts", "gpu-0-mig-1g10gb-19-0"] {
        let (world, executor, gpu) = start();
        grants(&world, &executor);
        let a = shared("a", device);
        prepared(&world, &executor, &a);
        let there = (living(&world, &gpu), world.lock().mps_in.clone());
        let before = world.lock().records()[&uid("a")].fine().cloned().unwrap();
        tear(&world, &uid("a"), b"torn");
        executor.reconcile(&world.view());
        let after = world.lock().records()[&uid("a")].fine().cloned().unwrap();
        let received = before.received;
        assert_eq!(Record { received, ..after }, before, "{device}");
        let now = (living(&world, &gpu), world.lock().mps_in.clone());
        assert_eq!(now, there, "{device}");
        world.prepare(&executor, &a).unwrap();
    }
}

/// The claim was unprepared and prepared again in this boot, and then its record is lost.
#[test]
fn a_claim_that_was_prepared_again_is_not_taken_for_unprepared() {
    for device in ["gpu-0", "gpu-0-ts", "gpu-0-mps"] {
        let (world, executor, _) = start();
        grants(&world, &executor);
        let a = shared("a", device);
        prepared(&world, &executor, &a);
        world.unprepare(&executor, &uid("a")).unwrap();
        world.prepare(&executor, &a).unwrap();
        world.lock().put(Folder::Claims, "uid-a.json", None);
        let events = executor.reconcile(&world.view()).events;
        let rebuilt = Event::Rebuilt { claim: uid("a") };
        assert!(events.contains(&rebuilt), "{device}: {events:?}");
        // Another claim does not get its GPU, also while the folder is as it was found.
        let error = world
            .prepare(&executor, &claim_of("b", &["gpu-0"], "t1"))
            .unwrap_err();
        assert!(error.category().ends_with("conflict"), "{error:?}");
    }
}
