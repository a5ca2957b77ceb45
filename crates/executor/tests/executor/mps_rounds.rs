//! Servers and namespaces in rounds of reconcile, and where the supervisor does not answer.

use divvy_model::{ComputeMode, GpuDriver, MpsServer};

use crate::mig_world::{claim_of, sim};
use crate::mps_world::{MPS, grants, part, prepared, set_exclusive, shared, start, v3};
use crate::story::uid;
use crate::world::{HardwareFault, Place};

/// ADR 21, 6: "One that cannot be made again keeps no other claim from its own."
#[test]
fn a_namespace_that_cannot_be_made_again_keeps_no_other_from_its_claim() {
    let (world, executor, gpu) = v3();
    prepared(&world, &executor, &part("a", 10));
    prepared(&world, &executor, &part("b", 20));
    world.lock().namespaces.get_mut(&gpu).unwrap().clear();
    // The first one that is made is refused; the supervisor does the second.
    world.lock().mps_fault = Some(HardwareFault::Refuses);
    executor.reconcile(&world.view());
    assert_eq!(world.lock().namespaces[&gpu].len(), 1);
}

/// Each partition has a server of its own.
#[test]
fn a_server_that_cannot_be_started_keeps_no_other_partition_from_its_own() {
    let (world, executor, _) = start();
    grants(&world, &executor);
    prepared(&world, &executor, &shared("a", MPS));
    prepared(&world, &executor, &shared("b", "gpu-0-mig-1g10gb-19-1-mps"));
    assert_eq!(world.lock().mps_in.len(), 2);
    world.lock().mps_in.clear();
    world.lock().mps_fault = Some(HardwareFault::Refuses);
    executor.reconcile(&world.view());
    assert_eq!(world.lock().mps_in.len(), 1);
}

/// The supervisor answered "not done", and could not end the daemon that it had started.
#[test]
fn the_own_server_without_a_note_is_no_stranger() {
    let (world, executor, gpu) = start();
    grants(&world, &executor);
    // The supervisor answered "not done", and could not end the daemon that it had started.
    world
        .lock()
        .mps
        .insert(gpu.clone(), MpsServer::equal(4, Some(1 << 14)).unwrap());
    let a = shared("a", "gpu-0-mps");
    set_exclusive(&world, &gpu);
    let answer = world.prepare(&executor, &a);
    assert!(answer.is_ok(), "{answer:?}");
}

/// A supervisor that does not answer says nothing about the namespace.
#[test]
fn a_claim_is_not_let_go_while_its_namespace_may_be_there() {
    let (world, executor, gpu) = v3();
    prepared(&world, &executor, &part("a", 10));
    prepared(&world, &executor, &part("b", 20));
    world.lock().no_supervisor = true;
    let left = world.unprepare(&executor, &uid("a")).unwrap();
    let records = world.lock().records().len();
    assert!(
        records == 2,
        "{left:?}: {records} records, {} namespaces",
        world.lock().namespaces[&gpu].len()
    );
}

/// Notes of changes that were made and could not be written are found again.
#[test]
fn a_store_error_in_the_middle_of_a_call_loses_nothing_in_the_end() {
    let (world, executor, gpu) = start();
    grants(&world, &executor);
    prepared(&world, &executor, &shared("a", "gpu-0-mps"));
    world.lock().write_error = Some((Place::Store, std::io::ErrorKind::PermissionDenied));
    drop(world.unprepare(&executor, &uid("a")));
    world.lock().write_error = None;
    world.unprepare(&executor, &uid("a")).unwrap();
    executor.reconcile(&world.view());
    assert!(world.lock().mps.is_empty());
    assert_eq!(
        sim(&world).facts(&gpu).unwrap().compute_mode,
        Some(ComputeMode::Default)
    );
}

/// The same server, and a claim that has the GPU alone and without it.
#[test]
fn a_server_without_a_note_is_ended_for_a_claim_of_the_whole_gpu() {
    let (world, executor, gpu) = start();
    grants(&world, &executor);
    let server = MpsServer::equal(4, Some(1 << 14)).unwrap();
    world.lock().mps.insert(gpu.clone(), server);
    prepared(&world, &executor, &claim_of("w", &["gpu-0"], "t1"));
    assert!(world.lock().mps.is_empty());
}
