//! Questions to a GPU: what is concluded from its answers, and what is not asked at all.

use std::sync::Arc;
use std::time::Duration;

use divvy_claims::Claim;
use divvy_executor::{DriverProcesses, Event, Executor, ProcessOnGpu, ProcessSource, Refresh};
use divvy_gpu_sim::Fault;
use divvy_model::{GpuErrorCode, GpuOp};

use crate::mig_world::{SMALL, claim_of, living, setup, sim};
use crate::world::{World, claim};

const DRIVER_NOT_LOADED: GpuErrorCode = GpuErrorCode::DRIVER_NOT_LOADED;
const GPU_NOT_FOUND: GpuErrorCode = GpuErrorCode::GPU_NOT_FOUND;
const NOT_FOUND: GpuErrorCode = GpuErrorCode::NOT_FOUND;
const NOT_SUPPORTED: GpuErrorCode = GpuErrorCode::NOT_SUPPORTED;
const UNKNOWN: GpuErrorCode = GpuErrorCode::UNKNOWN;

fn outcome(world: &World, executor: &Executor, claim: &Claim) -> &'static str {
    match world.prepare(executor, claim) {
        Ok(_) => "served",
        Err(error) => error.category(),
    }
}

/// Outcome of a call for a prepared claim of a partition, while the GPU answers so.
fn answered(faults: &[(GpuOp, GpuErrorCode)]) -> &'static str {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    for (op, code) in faults {
        sim(&world).fault(Fault::fail(*code).of(*op));
    }
    outcome(&world, &executor, &a)
}

/// A partition that is taken for gone is withdrawn from its pods, and never removed.
#[test]
fn a_partition_is_gone_only_where_the_gpu_the_mode_and_the_list_agree() {
    use GpuOp::{ComputeInstances, GpuInstances, List, MigMode};
    let gone = "partition-gone";
    for (faults, expected) in [
        // MIG mode is on, or cannot be read.
        (&[(GpuInstances, NOT_FOUND)][..], "served"),
        (&[(GpuInstances, NOT_FOUND), (MigMode, UNKNOWN)], "served"),
        // A GPU with MIG that denies to have any.
        (
            &[
                (GpuInstances, NOT_SUPPORTED),
                (MigMode, NOT_SUPPORTED),
                (List, DRIVER_NOT_LOADED),
            ],
            "served",
        ),
        (
            &[
                (GpuInstances, DRIVER_NOT_LOADED),
                (MigMode, UNKNOWN),
                (List, DRIVER_NOT_LOADED),
            ],
            "served",
        ),
        // A GPU that does not answer, and is on the list.
        (
            &[(GpuInstances, GPU_NOT_FOUND), (MigMode, GPU_NOT_FOUND)],
            "served",
        ),
        (
            &[
                (GpuInstances, GPU_NOT_FOUND),
                (MigMode, GPU_NOT_FOUND),
                (List, UNKNOWN),
            ],
            "served",
        ),
        // No driver is loaded.
        (
            &[
                (GpuInstances, DRIVER_NOT_LOADED),
                (MigMode, DRIVER_NOT_LOADED),
                (List, DRIVER_NOT_LOADED),
            ],
            gone,
        ),
        // Its instance is listed.
        (&[(ComputeInstances, NOT_FOUND)], "served"),
        (&[(ComputeInstances, UNKNOWN)], "served"),
    ] {
        assert_eq!(answered(faults), expected, "{faults:?}");
    }
}

/// Mode off says that no instance lives; an error of another kind says nothing.
#[test]
fn with_mig_mode_off_a_partition_is_gone_unless_the_call_fails_oddly() {
    for (code, expected) in [
        (None, "partition-gone"),
        (Some(NOT_SUPPORTED), "partition-gone"),
        (Some(UNKNOWN), "served"),
    ] {
        let (world, executor, a, gpu) = setup();
        world.prepare(&executor, &a).unwrap();
        let (instance, inside) = living(&world, &gpu).remove(0);
        sim(&world).edit(|e| {
            e.destroy_compute_instance(&gpu, instance.id, inside[0].id)
                .unwrap();
            e.destroy_gpu_instance(&gpu, instance.id).unwrap();
            e.set_mig_mode(&gpu, false).unwrap();
        });
        if let Some(code) = code {
            sim(&world).fault(Fault::fail(code).of(GpuOp::GpuInstances));
        }
        assert_eq!(outcome(&world, &executor, &a), expected, "{code:?}");
    }
}

/// It was listed, and is not any more when it is looked at.
#[test]
fn an_instance_that_goes_while_it_is_looked_at_is_gone() {
    for (code, gone) in [(NOT_FOUND, true), (UNKNOWN, false)] {
        let (world, executor, a, _) = setup();
        world.prepare(&executor, &a).unwrap();
        let fails = |op, code| Fault::fail(code).of(op);
        sim(&world).fault(fails(GpuOp::ComputeInstances, code));
        sim(&world).fault(fails(GpuOp::GpuInstances, DRIVER_NOT_LOADED).after(1));
        for op in [GpuOp::MigMode, GpuOp::List] {
            sim(&world).fault(fails(op, DRIVER_NOT_LOADED));
        }
        let events = executor.restore_cdi(Refresh::Missing).events;
        let withdrawn = Event::CdiWithdrawn { claim: a.uid };
        assert_eq!(events.contains(&withdrawn), gone, "{code:?}: {events:?}");
    }
}

/// A question to the driver takes a millisecond, and to the supervisor one of another process.
#[test]
fn claims_that_change_no_setting_ask_for_none() {
    let (world, executor, a, _) = setup();
    world.prepare(&executor, &a).unwrap();
    let whole = claim_of("w", &["gpu-1"], "t1");
    for claim in [&claim_of("b", &[SMALL], "t1"), &whole] {
        let facts = sim(&world).calls(GpuOp::Facts);
        world.prepare(&executor, claim).unwrap();
        world.unprepare(&executor, &claim.uid).unwrap();
        assert_eq!(sim(&world).calls(GpuOp::Facts), facts, "compute mode");
    }
    assert_eq!(world.lock().mps_looks, 0);
}

/// A node has up to seven partitions on each of eight GPUs.
#[test]
fn an_unprepare_asks_about_its_own_partition_and_no_other() {
    let asked = |neighbours: &[&str]| {
        let (world, executor, a, _) = setup();
        for (number, device) in neighbours.iter().enumerate() {
            let name = ["b", "c"][number];
            world
                .prepare(&executor, &claim_of(name, &[device], "t1"))
                .unwrap();
        }
        world.prepare(&executor, &a).unwrap();
        let before = sim(&world).calls(GpuOp::ComputeInstances);
        world.unprepare(&executor, &a.uid).unwrap();
        sim(&world).calls(GpuOp::ComputeInstances) - before
    };
    let alone = asked(&[]);
    assert!(alone > 0);
    assert_eq!(asked(&[SMALL, "gpu-0-mig-1g10gb-19-1"]), alone);
}

/// A claim of an earlier boot may be gone. An API that does not answer is asked for one of them
/// alone, or pods on the node would wait for each.
#[test]
fn after_a_boot_the_api_is_asked_for_each_claim_while_it_answers() {
    for (takes, events, asked) in [(1, "released", 2), (60, "executed again", 1)] {
        let world = World::new("h100x2", 1);
        let executor = world.start();
        for (name, gpu) in [("a", 0), ("b", 1)] {
            let claim = claim(name, &[gpu], "t1");
            world.prepare(&executor, &claim).unwrap();
        }
        world.lock().asked.clear();
        executor.restore_cdi(Refresh::All);
        assert_eq!(world.lock().look_ups, 0, "they are of this boot");
        world.reboot();
        world.lock().api_takes = Some(Duration::from_secs(takes));
        let report = world.start().restore_cdi(Refresh::All);
        let is_expected = |event: &Event| match event {
            Event::Released { .. } => events == "released",
            Event::ExecutedAgain { .. } => events == "executed again",
            _ => false,
        };
        assert!(report.events.iter().all(is_expected), "{report:?}");
        assert_eq!((report.events.len(), world.lock().look_ups), (2, asked));
    }
}

#[test]
fn processes_are_listed_with_the_pods_of_their_control_groups() {
    let (world, _, _, gpu) = setup();
    let node = sim(&world);
    for pid in [7, 8] {
        node.start_process(&gpu, pid);
    }
    let processes = DriverProcesses {
        gpus: Arc::new(node),
        pods: |pids: &[u32]| {
            assert_eq!(pids, [7, 8], "it is asked about processes alone");
            [(7, "pod-a".to_owned())].into()
        },
    };
    let process = |pid, pod: Option<&str>| ProcessOnGpu {
        pid,
        gpu_instance: None,
        pod: pod.map(str::to_owned),
    };
    let expected = vec![process(7, Some("pod-a")), process(8, None)];
    assert_eq!(processes.on_gpu(&gpu), Ok(expected));
    assert_eq!(processes.on_gpu(&world.gpu(1)), Ok(Vec::new()));
}
