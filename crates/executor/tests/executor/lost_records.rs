//! Records whose files were deleted while their claims run: until they are made again, nothing that
//! such a claim may hold is given back, removed or ended by any call.

use std::collections::BTreeMap;

use divvy_claims::Claim;
use divvy_executor::{Event, Executor, Folder, Refresh};
use divvy_model::{ComputeMode, GpuDriver, GpuUuid, Grant, MpsServer, TimeSlice};

use crate::mig_world::{living, sim};
use crate::mps_world::{MPS, TS, grants, part, prepared, set_exclusive, shared, start, v3};
use crate::story::uid;
use crate::world::World;

type Node = fn() -> (World, Executor, GpuUuid);

/// A node, a claim that is prepared there, and one that shares with it.
type Case = (&'static str, Node, Claim, Claim);

fn slots() -> (World, Executor, GpuUuid) {
    let (world, executor, gpu) = start();
    grants(&world, &executor);
    (world, executor, gpu)
}

fn exclusive() -> (World, Executor, GpuUuid) {
    let (world, executor, gpu) = start();
    set_exclusive(&world, &gpu);
    (world, executor, gpu)
}

fn sliced() -> (World, Executor, GpuUuid) {
    let (world, executor, gpu) = start();
    let grant = Grant {
        share_time_slice: Some(TimeSlice::Long),
        ..Grant::default()
    };
    executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
    (world, executor, gpu)
}

fn cases() -> Vec<Case> {
    let two = |device: &str| (shared("a", device), shared("b", device));
    let case = |name, node: Node, (a, b)| (name, node, a, b);
    vec![
        case("a server of slots", slots, two("gpu-0-mps")),
        case("a server of a partition", slots, two(MPS)),
        case("a namespace", v3, (part("a", 10), part("b", 20))),
        case("a compute mode", exclusive, two("gpu-0-ts")),
        case("a time slice", sliced, two("gpu-0-ts")),
        case("a shared partition", slots, two(TS)),
    ]
}

/// Returns all of the GPU that a claim can have.
fn shown(world: &World, gpu: &GpuUuid) -> String {
    let mode: Option<ComputeMode> = sim(world).facts(gpu).unwrap().compute_mode;
    let partitions = living(world, gpu);
    let m = world.lock();
    format!(
        "{mode:?} {:?} {:?} {:?} {:?} {partitions:?}",
        m.slices, m.mps, m.mps_in, m.namespaces
    )
}

fn lose(world: &World, claim: &Claim) {
    let file = format!("{}.json", claim.uid);
    world.lock().put(Folder::Claims, &file, None);
}

#[test]
fn a_round_takes_nothing_of_a_claim_whose_record_is_lost() {
    for (name, node, a, _) in cases() {
        let (world, executor, gpu) = node();
        prepared(&world, &executor, &a);
        let before = shown(&world, &gpu);
        lose(&world, &a);
        // The API does not answer in the first round.
        executor.tidy();
        executor.restore_cdi(Refresh::Missing);
        assert_eq!(shown(&world, &gpu), before, "{name}");
        let events = executor.reconcile(&world.view()).events;
        let rebuilt = Event::Rebuilt { claim: uid("a") };
        assert!(events.contains(&rebuilt), "{name}: {events:?}");
        assert_eq!(shown(&world, &gpu), before, "{name}");
        // It is let go as any other.
        world.unprepare(&executor, &uid("a")).unwrap();
        executor.reconcile(&world.view());
        assert_ne!(shown(&world, &gpu), before, "{name}");
    }
}

#[test]
fn a_restart_takes_nothing_of_a_claim_whose_record_is_lost() {
    for (name, node, a, _) in cases() {
        let (world, executor, gpu) = node();
        prepared(&world, &executor, &a);
        let before = shown(&world, &gpu);
        lose(&world, &a);
        drop(executor);
        let executor = world.start();
        executor.restore_cdi(Refresh::All);
        assert_eq!(shown(&world, &gpu), before, "{name}");
        executor.reconcile(&world.view());
        world.prepare(&executor, &a).unwrap();
        assert_eq!(shown(&world, &gpu), before, "{name}");
    }
}

/// The last user that is known lets go.
#[test]
fn an_unprepare_takes_nothing_of_a_claim_whose_record_is_lost() {
    for (name, node, a, b) in cases() {
        let (world, executor, gpu) = node();
        prepared(&world, &executor, &a);
        let before = shown(&world, &gpu);
        prepared(&world, &executor, &b);
        let of_both = shown(&world, &gpu);
        lose(&world, &a);
        drop(world.unprepare(&executor, &uid("b")).unwrap());
        // A namespace of its own may wait for the server's other users to be known.
        let now = shown(&world, &gpu);
        assert!(now == before || now == of_both, "{name}: {now}");
        world.lock().api.remove(&b.uid);
        // Made again first; then what waited for it ends.
        executor.reconcile(&world.view());
        executor.reconcile(&world.view());
        assert_eq!(shown(&world, &gpu), before, "{name}");
        let records = world.lock().records();
        let left: Vec<_> = records.keys().collect();
        assert_eq!(left, [&uid("a")], "{name}");
    }
}

/// The partition was made for the other claim, which has it still.
#[test]
fn a_lost_record_of_a_partition_that_was_made_for_another_is_made_again() {
    for device in [TS, MPS] {
        let (world, executor, gpu) = slots();
        prepared(&world, &executor, &shared("b", device));
        let a = shared("a", device);
        prepared(&world, &executor, &a);
        let before = shown(&world, &gpu);
        lose(&world, &a);
        let events = executor.reconcile(&world.view()).events;
        let rebuilt = Event::Rebuilt { claim: uid("a") };
        assert!(events.contains(&rebuilt), "{device}: {events:?}");
        world.unprepare(&executor, &uid("b")).unwrap();
        executor.reconcile(&world.view());
        assert_eq!(shown(&world, &gpu), before, "{device}");
    }
}

/// The rules ask for other slots by now.
#[test]
fn a_prepare_ends_no_server_of_a_claim_whose_record_is_lost() {
    for device in ["gpu-0-mps", MPS] {
        let (world, executor, gpu) = slots();
        prepared(&world, &executor, &shared("a", device));
        let before = shown(&world, &gpu);
        lose(&world, &shared("a", device));
        let grant = Grant {
            may_change_mode: Some(true),
            offers_partitions: Some(true),
            mps: MpsServer::equal(2, Some(1 << 14)),
            mps_slots_in_partitions: Some(2),
            ..Grant::default()
        };
        executor
            .grant(&BTreeMap::from([(gpu.clone(), grant)]))
            .unwrap();
        drop(world.prepare(&executor, &shared("b", device)));
        assert_eq!(shown(&world, &gpu), before, "{device}");
    }
}

/// A file of a claim that was unprepared keeps nothing.
#[test]
fn a_file_that_an_unprepare_has_left_keeps_nothing_of_a_gpu() {
    let (world, executor, gpu) = slots();
    let before = shown(&world, &gpu);
    let a = shared("a", "gpu-0-mps");
    prepared(&world, &executor, &a);
    let files = world.lock().cdi.clone();
    world.unprepare(&executor, &uid("a")).unwrap();
    world.lock().cdi = files;
    let b = shared("b", "gpu-0-mps");
    prepared(&world, &executor, &b);
    world.unprepare(&executor, &uid("b")).unwrap();
    assert_eq!(shown(&world, &gpu), before);
}
