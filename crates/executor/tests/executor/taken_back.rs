//! Prepares that fail after they have begun: the claim has again what it had before.

use divvy_executor::{Executor, InventorySource, ProcessOnGpu, Refresh};
use divvy_model::{ComputeMode, GpuDriver, GpuUuid};

use crate::mig_world::sim;
use crate::mps_world::{MPS, TS, grants, part, prepared, set_exclusive, shared, start, v3};
use crate::story::uid;
use crate::world::{Moment, Place, World};

const DEVICES: [&str; 5] = ["gpu-0-mig-1g10gb-19-0", TS, MPS, "gpu-0-ts", "gpu-0-mps"];

/// Its program still runs under the server.
#[test]
fn a_lingering_claim_that_cannot_be_taken_up_keeps_its_server() {
    let (world, executor, gpu) = start();
    grants(&world, &executor);
    let a = shared("a", "gpu-0-mps");
    prepared(&world, &executor, &a);
    world.lock().processes.insert(
        gpu.clone(),
        vec![ProcessOnGpu {
            pid: 7,
            gpu_instance: None,
            pod: Some("pod-a".to_owned()),
        }],
    );
    world.unprepare(&executor, &uid("a")).unwrap();
    let server = world.lock().mps.clone();
    assert_eq!(server.len(), 1);
    // The disk is full just now.
    world.lock().write_error = Some((Place::Store, std::io::ErrorKind::StorageFull));
    world.prepare(&executor, &a).unwrap_err();
    let m = world.lock();
    assert_eq!(m.mps, server, "its program still runs under it");
}

/// Its program still runs in the namespace.
#[test]
fn a_lingering_claim_that_cannot_be_taken_up_keeps_its_namespace() {
    let (world, executor, gpu) = v3();
    let a = part("a", 10);
    prepared(&world, &executor, &a);
    prepared(&world, &executor, &part("b", 10));
    world.lock().processes.insert(
        gpu.clone(),
        vec![ProcessOnGpu {
            pid: 7,
            gpu_instance: None,
            pod: Some("pod-a".to_owned()),
        }],
    );
    world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(world.lock().namespaces[&gpu].len(), 2);
    world.lock().write_error = Some((Place::Cdi, std::io::ErrorKind::StorageFull));
    world.prepare(&executor, &a).unwrap_err();
    assert_eq!(
        world.lock().namespaces[&gpu].len(),
        2,
        "its program runs in it"
    );
}

/// The record says that it is being undone before the first thing goes.
#[test]
fn a_prepare_that_dies_while_it_is_taken_back_can_be_tried_again() {
    let mut bad = Vec::new();
    for device in DEVICES {
        for moment in [Moment::Before, Moment::During, Moment::After] {
            for in_calls in 0..60 {
                let (world, executor, gpu) = start();
                grants(&world, &executor);
                set_exclusive(&world, &gpu);
                let a = shared("a", device);
                world.lock().api.insert(a.uid.clone(), a.clone());
                world.lock().write_error = Some((Place::Cdi, std::io::ErrorKind::StorageFull));
                world.crash_in(in_calls, moment);
                let first = world.prepare(&executor, &a);
                assert!(first.is_err());
                if !world.lock().dead {
                    break;
                }
                world.kill();
                world.lock().write_error = None;
                world.changed(&gpu).unwrap();
                let executor = world.start();
                executor.restore_cdi(Refresh::Missing);
                // The kubelet asks again.
                if let Err(error) = world.prepare(&executor, &a) {
                    let category = error.category();
                    bad.push(format!(
                        "{device} {moment:?} {in_calls}: {category} {error}"
                    ));
                    continue;
                }
                let now = sim(&world).facts(&gpu).unwrap().compute_mode.unwrap();
                let m = world.lock();
                let is_right = match device {
                    "gpu-0-ts" => now == ComputeMode::Default,
                    "gpu-0-mps" => now == ComputeMode::ExclusiveProcess && !m.mps.is_empty(),
                    MPS => !m.mps_in.is_empty(),
                    _ => true,
                };
                if !is_right {
                    let servers = (&m.mps, &m.mps_in);
                    bad.push(format!(
                        "{device} {moment:?} {in_calls}: answered, but mode {now:?} servers {servers:?}"
                    ));
                }
            }
        }
    }
    assert!(bad.is_empty(), "{}\n{}", bad.len(), bad.join("\n"));
}

/// The same after a boot, of a record of the boot before.
#[test]
fn a_restore_that_dies_while_it_is_taken_back_is_made_again() {
    let mut cuts = 0;
    for device in DEVICES {
        for in_calls in 0..80 {
            let (world, executor, gpu) = start();
            grants(&world, &executor);
            set_exclusive(&world, &gpu);
            let a = shared("a", device);
            prepared(&world, &executor, &a);
            world.reboot();
            set_exclusive(&world, &gpu);
            let executor = world.start();
            world.lock().write_error = Some((Place::Cdi, std::io::ErrorKind::StorageFull));
            world.crash_in(in_calls, Moment::After);
            executor.restore_cdi(Refresh::Missing);
            world.lock().write_error = None;
            if !world.lock().dead {
                break;
            }
            cuts += 1;
            world.kill();
            world.changed(&gpu).unwrap();
            let executor = world.start();
            executor.restore_cdi(Refresh::Missing);
            world.prepare(&executor, &a).unwrap();
            let now = sim(&world).facts(&gpu).unwrap().compute_mode.unwrap();
            let m = world.lock();
            let is_right = match device {
                "gpu-0-ts" => now == ComputeMode::Default,
                "gpu-0-mps" => now == ComputeMode::ExclusiveProcess && m.mps.len() == 1,
                MPS => m.mps_in.len() == 1,
                _ => true,
            };
            assert!(is_right, "{device} {in_calls}: {now:?} {:?}", m.mps_in);
        }
    }
    assert!(cuts > 100, "{cuts}");
}

/// The disk is full when the prepare has failed: nothing can say that it is being taken back.
#[test]
fn a_prepare_that_fails_on_a_disk_that_fills_up_can_be_tried_again() {
    let mut cuts = 0;
    for device in DEVICES {
        for moment in [Moment::Before, Moment::During, Moment::After] {
            for in_calls in 0..80 {
                let (world, executor, gpu) = start();
                grants(&world, &executor);
                set_exclusive(&world, &gpu);
                let a = shared("a", device);
                world.lock().api.insert(a.uid.clone(), a.clone());
                world.lock().fills_up = true;
                world.crash_in(in_calls, moment);
                world.prepare(&executor, &a).unwrap_err();
                let is_cut = world.lock().dead;
                cuts += usize::from(is_cut);
                let executor = again(&world, &gpu, executor);
                world.prepare(&executor, &a).unwrap();
                assert!(
                    is_served(&world, &gpu, device),
                    "{device} {moment:?} {in_calls}"
                );
                if !is_cut {
                    break;
                }
            }
        }
    }
    assert!(cuts > 100, "{cuts}");
}

/// Everything can be let go from a full disk; a pod that comes again gets what it asks for.
#[test]
fn a_claim_whose_unprepare_died_on_a_full_disk_can_be_prepared() {
    let mut cuts = 0;
    for device in ["gpu-0-ts", "gpu-0-mps"] {
        for in_calls in 0..80 {
            let (world, executor, gpu) = start();
            grants(&world, &executor);
            set_exclusive(&world, &gpu);
            let a = shared("a", device);
            prepared(&world, &executor, &a);
            world.lock().write_error = Some((Place::Store, std::io::ErrorKind::StorageFull));
            world.crash_in(in_calls, Moment::After);
            drop(world.unprepare(&executor, &uid("a")));
            if !world.lock().dead {
                break;
            }
            cuts += 1;
            let executor = again(&world, &gpu, executor);
            world.prepare(&executor, &a).unwrap();
            executor.tidy();
            assert!(is_served(&world, &gpu, device), "{device} {in_calls}");
        }
    }
    assert!(cuts > 10, "{cuts}");
}

/// A round gives back the compute mode that an unprepare left on a full disk.
#[test]
fn a_compute_mode_that_is_left_on_a_full_disk_is_given_back_by_a_round() {
    let (world, executor, gpu) = start();
    set_exclusive(&world, &gpu);
    prepared(&world, &executor, &shared("a", "gpu-0-ts"));
    world.lock().write_error = Some((Place::Store, std::io::ErrorKind::StorageFull));
    world.unprepare(&executor, &uid("a")).unwrap();
    world.lock().write_error = None;
    assert!(world.lock().records().is_empty());
    executor.tidy();
    let now = sim(&world).facts(&gpu).unwrap().compute_mode;
    assert_eq!(now, Some(ComputeMode::ExclusiveProcess));
}

/// Ends a process that may have died, and starts one on a disk with room.
fn again(world: &World, gpu: &GpuUuid, executor: Executor) -> Executor {
    drop(executor);
    world.kill();
    (world.lock().write_error, world.lock().fills_up) = (None, false);
    world.changed(gpu).unwrap();
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    executor
}

/// Returns whether a GPU is as the share of a claim needs it.
fn is_served(world: &World, gpu: &GpuUuid, device: &str) -> bool {
    let now = sim(world).facts(gpu).unwrap().compute_mode.unwrap();
    let m = world.lock();
    match device {
        "gpu-0-ts" => now == ComputeMode::Default,
        "gpu-0-mps" => now == ComputeMode::ExclusiveProcess && m.mps.len() == 1,
        MPS => m.mps_in.len() == 1,
        _ => true,
    }
}
