//! Looks at a GPU that fail: what cannot be read is not gone, and takes nothing from anyone.

use divvy_executor::{ProcessOnGpu, Unprepared};
use divvy_gpu_sim::{Fault, FaultEffect};
use divvy_model::{GpuErrorCode, GpuOp};

use crate::mig_world::{claim_of, living, sim};
use crate::mps_world::{MPS, TS, grants, prepared, shared, start};
use crate::story::uid;
use crate::world::Moment;
use crate::world::accessors::made;

/// A second user comes while the partition of the first cannot be read.
#[test]
fn one_odd_answer_takes_no_shared_partition_from_its_other_users() {
    let mut bad = Vec::new();
    for device in [TS, MPS] {
        for op in [GpuOp::GpuInstances, GpuOp::ComputeInstances] {
            for code in [GpuErrorCode::UNKNOWN, GpuErrorCode::TIMEOUT] {
                for skip in 0..12 {
                    let (world, executor, gpu) = start();
                    grants(&world, &executor);
                    prepared(&world, &executor, &shared("a", device));
                    let before = made(&world, &uid("a"));
                    let servers = world.lock().mps_in.clone();
                    sim(&world).fault(Fault {
                        op: Some(op),
                        skip,
                        times: Some(1),
                        effect: FaultEffect::Fail(code),
                        ..Fault::fail(code)
                    });
                    let b = shared("b", device);
                    world.lock().api.insert(b.uid.clone(), b.clone());
                    let answer = world.prepare(&executor, &b);
                    let lives = living(&world, &gpu);
                    let there = lives
                        .iter()
                        .any(|(_, inside)| inside.iter().any(|c| c.uuid == before[0].1.uuid));
                    if !there || world.lock().mps_in != servers {
                        bad.push(format!(
                            "{device} {op:?} {code:?} skip {skip}: {} partition of a there: {there}",
                            if answer.is_ok() { "b prepared," } else { "b refused," }
                        ));
                    }
                }
            }
        }
    }
    assert!(bad.is_empty(), "{}\n{}", bad.len(), bad.join("\n"));
}

/// Its programs still run there when it is taken up again.
#[test]
fn one_odd_answer_takes_no_partition_from_a_lingering_claim() {
    let mut bad = Vec::new();
    for op in [GpuOp::GpuInstances, GpuOp::ComputeInstances] {
        for skip in 0..12 {
            let (world, executor, gpu) = start();
            let a = claim_of("a", &["gpu-0-mig-1g10gb-19-0"], "t1");
            prepared(&world, &executor, &a);
            let before = made(&world, &uid("a"));
            world.lock().process_error = Some(GpuErrorCode::TIMEOUT);
            world.unprepare(&executor, &uid("a")).unwrap();
            world.lock().process_error = None;
            sim(&world).fault(Fault {
                op: Some(op),
                skip,
                times: Some(1),
                ..Fault::fail(GpuErrorCode::UNKNOWN)
            });
            let answer = world.prepare(&executor, &a).is_ok();
            let there = living(&world, &gpu)
                .iter()
                .any(|(_, inside)| inside.iter().any(|c| c.uuid == before[0].1.uuid));
            if !there {
                bad.push(format!("{op:?} skip {skip}: prepared {answer}"));
            }
        }
    }
    assert!(bad.is_empty(), "{}\n{}", bad.len(), bad.join("\n"));
}

/// The driver keeps a partition in which a program runs, and nothing keeps its server.
#[test]
fn one_odd_answer_ends_no_server_under_its_clients() {
    let mut bad = Vec::new();
    for skip in 0..6 {
        let (world, executor, gpu) = start();
        grants(&world, &executor);
        prepared(&world, &executor, &shared("a", MPS));
        let (_, partition) = made(&world, &uid("a"))[0].clone();
        sim(&world).start_process_in(&gpu, partition.gi, 77);
        world.lock().pods.insert(77, "pod-a".to_owned());
        // What would end the server is seen by the death of the process before it.
        world.lock().crash_at = Some(("stop an MPS", Moment::Before));
        sim(&world).fault(Fault {
            op: Some(GpuOp::GpuInstances),
            skip,
            times: Some(1),
            ..Fault::fail(GpuErrorCode::UNKNOWN)
        });
        let b = shared("b", MPS);
        world.lock().api.insert(b.uid.clone(), b.clone());
        let answer = world.prepare(&executor, &b);
        if world.lock().dead {
            bad.push(format!(
                "skip {skip}: the server is ended under its client, b: {}",
                answer.is_ok()
            ));
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// The GPU is looked at again after the earlier allocation is let go.
#[test]
fn allocated_anew_at_its_own_place_nothing_is_made_beside_a_gone_one() {
    let (world, executor, gpu) = start();
    let gone = claim_of("x", &["gpu-0-mig-1g10gb-19-1"], "t1");
    prepared(&world, &executor, &gone);
    let mut a = claim_of("a", &["gpu-0-mig-1g10gb-19-0"], "t1");
    prepared(&world, &executor, &a);
    // x's partition is destroyed by hand under its pods.
    let lost = made(&world, &uid("x"))[0].1.clone();
    sim(&world).edit(|e| {
        let g = e.gpu(&gpu).unwrap();
        g.instances.retain(|i| i.instance.id != lost.gi);
    });
    // A new claim is refused there ...
    let error = world
        .prepare(&executor, &claim_of("n", &["gpu-0-mig-1g10gb-19-2"], "t1"))
        .unwrap_err();
    assert_eq!(error.category(), "partition-gone", "{error:?}");
    // ... and one that was allocated anew at its own place must be too: its instance is made anew.
    let before = made(&world, &uid("a"))[0].1.clone();
    a.allocation.allocated_at = Some("t2".to_owned());
    world.lock().api.insert(a.uid.clone(), a.clone());
    let answer = world.prepare(&executor, &a);
    let now = made(&world, &uid("a"));
    assert!(
        answer.is_err() || now.first().map(|m| &m.1) == Some(&before),
        "another partition was made: before {before:?}, now {now:?}, lost {lost:?}"
    );
}

/// An administrator has removed a part of it: what is left is in use by the first claim's pods.
#[test]
fn the_remains_of_a_partition_that_others_hold_are_not_removed() {
    for device in [TS, MPS] {
        let (world, executor, gpu) = start();
        grants(&world, &executor);
        prepared(&world, &executor, &shared("a", device));
        sim(&world).edit(|engine| {
            let gpu = engine.gpu(&gpu).unwrap();
            gpu.instances[0].compute.clear();
        });
        let there = living(&world, &gpu);
        let b = shared("b", device);
        let error = world.prepare(&executor, &b).unwrap_err();
        assert_eq!(error.category(), "partition-gone", "{error:?}");
        assert_eq!(living(&world, &gpu), there);
    }
}

/// The processes of a claim are listed before its GPU goes to others, and strangers before the
/// first hold: an answer that says that there are none to list must come several times in a row.
#[test]
fn one_odd_list_of_processes_says_nothing() {
    for code in [
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::NO_PERMISSION,
        GpuErrorCode::NOT_FOUND,
        GpuErrorCode::GPU_IS_LOST,
        GpuErrorCode::FUNCTION_NOT_FOUND,
    ] {
        let (world, executor, gpu) = start();
        let whole = |name| claim_of(name, &["gpu-0"], "t1");
        let process = |pod: &str| ProcessOnGpu {
            pid: 7,
            gpu_instance: None,
            pod: Some(pod.to_owned()),
        };
        let runs = |pod| {
            let found = vec![process(pod)];
            world.lock().processes.insert(gpu.clone(), found);
        };
        // A stranger on a GPU that is to be given out.
        runs("pod-of-another-plugin");
        world.lock().odd_processes = Some(code);
        let error = world.prepare(&executor, &whole("a")).unwrap_err();
        assert_eq!(error.category(), "foreign-processes", "{code:?}");
        // The claim's own process when it is let go.
        world.lock().processes.clear();
        prepared(&world, &executor, &whole("a"));
        runs("pod-a");
        world.lock().odd_processes = Some(code);
        let done = world.unprepare(&executor, &uid("a")).unwrap();
        assert!(
            matches!(done, Unprepared::Lingering(_)),
            "{code:?} {done:?}"
        );
    }
}
