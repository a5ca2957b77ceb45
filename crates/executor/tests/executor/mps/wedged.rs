//! Servers that do not serve any more: left to their clients, started anew once these have ended or
//! at once by the rules, and reported with the claims that use them.

use divvy_executor::{Event, Executor, Refresh};
use divvy_gpu::Unwell;
use divvy_model::{GpuTarget, GpuUuid, Grant, MpsFault, MpsServer, Target};

use super::{namespaces, part, restarted, setup, setup_with_namespaces, share};
use crate::story::uid;
use crate::world::{HardwareFault, World};

/// The server of a GPU is wedged, with clients or without.
fn wedge(world: &World, gpu: &GpuUuid, is_idle: bool) {
    let unwell = Unwell {
        fault: MpsFault::Fault,
        is_idle,
        is_lasting: true,
    };
    let target = GpuTarget::whole(gpu.clone());
    world.lock().wedged.insert(target, unwell);
}

fn is_wedged(world: &World) -> bool {
    !world.lock().wedged.is_empty()
}

/// The report that a server is wedged under these claims.
fn reported(gpu: &GpuUuid, claims: &[&str]) -> Event {
    let claims = claims.iter().map(|name| share(name).reference());
    Event::MpsServerWedged {
        gpu: gpu.clone(),
        target: Target::Gpu,
        fault: MpsFault::Fault,
        holder: None,
        claims: claims.collect(),
    }
}

fn noted(executor: &Executor, gpu: &GpuUuid) -> Option<MpsFault> {
    let servers = executor.mps_servers().unwrap();
    servers[&GpuTarget::whole(gpu.clone())].wedged
}

/// Runs a round, and returns the events about servers.
fn round(world: &World, executor: &Executor) -> Vec<Event> {
    let mut events = executor.reconcile(&world.view()).events;
    events.retain(|event| !matches!(event, Event::Kept { .. }));
    events
}

#[test]
fn a_wedged_server_is_left_to_its_clients_and_started_anew_after_them() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    world.prepare(&executor, &share("b")).unwrap();
    wedge(&world, &gpu, false);
    assert_eq!(round(&world, &executor), [reported(&gpu, &["a", "b"])]);
    assert_eq!(noted(&executor, &gpu), Some(MpsFault::Fault));
    assert_eq!(round(&world, &executor), [], "once");
    assert!(is_wedged(&world));
    // Their programs have ended, and their containers start others.
    wedge(&world, &gpu, true);
    assert_eq!(round(&world, &executor), [restarted(&gpu, &["a", "b"])]);
    assert!(!is_wedged(&world));
    assert_eq!(noted(&executor, &gpu), None);
    assert_eq!(round(&world, &executor), []);
}

#[test]
fn a_server_that_recovers_by_itself_is_left_alone() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    wedge(&world, &gpu, false);
    round(&world, &executor);
    world.lock().wedged.clear();
    let serves = Event::MpsServerServes {
        gpu: gpu.clone(),
        target: Target::Gpu,
    };
    assert_eq!(round(&world, &executor), [serves]);
    assert_eq!(noted(&executor, &gpu), None);
}

/// It ends by itself after the last claim has gone, and serves no one.
#[test]
fn a_wedged_server_that_has_ended_is_not_said_to_serve_again() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    wedge(&world, &gpu, false);
    round(&world, &executor);
    world.lock().mps_fault = Some(HardwareFault::Refuses);
    world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(noted(&executor, &gpu), Some(MpsFault::Fault), "not ended");
    world.lock().mps.clear();
    world.lock().wedged.clear();
    let released = Event::Released { claim: uid("a") };
    assert_eq!(round(&world, &executor), [released]);
    assert_eq!(executor.mps_servers().unwrap(), [].into());
}

/// A claim that comes gets no place at a server that it cannot connect to. It waits, since the
/// server may be started anew meanwhile, and what others have stays as it is.
#[test]
fn no_other_claim_gets_a_place_at_a_wedged_server() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    wedge(&world, &gpu, false);
    round(&world, &executor);
    let error = world.prepare(&executor, &share("b")).unwrap_err();
    assert_eq!(error.category(), "mps-wedged");
    assert!(is_wedged(&world));
    // Asked again, the claim that has its place keeps it.
    world.prepare(&executor, &share("a")).unwrap();
    // With the last claim the server ends, and the next one gets another.
    world.unprepare(&executor, &uid("a")).unwrap();
    world.prepare(&executor, &share("b")).unwrap();
    assert!(!is_wedged(&world));
}

#[test]
fn rules_may_have_a_wedged_server_started_anew_at_once() {
    let (world, executor, gpu) = setup_with_namespaces();
    let grant = Grant {
        mps: Some(MpsServer::NAMESPACES),
        restarts_wedged_mps: true,
        ..Grant::default()
    };
    executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
    world.prepare(&executor, &part("a", 30, "10Gi")).unwrap();
    world.prepare(&executor, &part("b", 20, "5Gi")).unwrap();
    let before = namespaces(&world, &gpu);
    wedge(&world, &gpu, false);
    let events = round(&world, &executor);
    assert!(events.contains(&reported(&gpu, &["a", "b"])), "{events:?}");
    assert!(events.contains(&restarted(&gpu, &["a", "b"])), "{events:?}");
    assert!(!is_wedged(&world));
    // The namespaces are there again in the same round.
    assert_eq!(namespaces(&world, &gpu), before);
}

/// A daemon that hangs in the driver cannot be ended. Its claims get one Event, and its taint
/// stays.
#[test]
fn a_restart_that_fails_is_tried_again_and_reported_once() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    wedge(&world, &gpu, true);
    for expected in [vec![reported(&gpu, &["a"])], vec![]] {
        world.lock().mps_fault = Some(HardwareFault::Refuses);
        let mut events = round(&world, &executor);
        let failed = |event: &Event| matches!(event, Event::Failed { error, .. } if error.contains("restart the wedged MPS server"));
        assert!(events.iter().any(failed), "{events:?}");
        events.retain(|event| !failed(event));
        assert_eq!(events, expected);
        assert_eq!(noted(&executor, &gpu), Some(MpsFault::Fault));
    }
    assert_eq!(round(&world, &executor), [restarted(&gpu, &["a"])]);
    assert_eq!(noted(&executor, &gpu), None);
}

/// A claim that is the first to find it so has it started anew too, and takes nothing from anyone.
#[test]
fn a_call_starts_an_idle_server_anew_and_leaves_one_with_clients() {
    for (is_idle, expected) in [(true, false), (false, true)] {
        let (world, executor, gpu) = setup();
        let grant = Grant {
            mps: MpsServer::equal(4, Some(1 << 14)),
            restarts_wedged_mps: true,
            ..Grant::default()
        };
        executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
        world.prepare(&executor, &share("a")).unwrap();
        wedge(&world, &gpu, is_idle);
        world.prepare(&executor, &share("b")).unwrap();
        assert_eq!(is_wedged(&world), expected, "idle: {is_idle}");
    }
}

/// A call that comes between two rounds may be the first that finds the server wedged.
#[test]
fn a_fault_that_a_call_finds_first_is_reported_by_the_next_round() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    world.prepare(&executor, &share("b")).unwrap();
    world.prepare(&executor, &share("c")).unwrap();
    wedge(&world, &gpu, false);
    world.unprepare(&executor, &uid("c")).unwrap();
    assert_eq!(round(&world, &executor), [reported(&gpu, &["a", "b"])]);
}

/// Servers end with the boot, and so does what was noted of them.
#[test]
fn a_server_that_was_wedged_before_a_reboot_keeps_no_claim_waiting() {
    let (world, executor, gpu) = setup();
    for name in ["a", "b"] {
        world.prepare(&executor, &share(name)).unwrap();
        world.lock().api.insert(uid(name), share(name));
    }
    wedge(&world, &gpu, false);
    round(&world, &executor);
    assert_eq!(noted(&executor, &gpu), Some(MpsFault::Fault));
    world.reboot();
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    round(&world, &executor);
    executor.tidy();
    world.prepare(&executor, &share("a")).unwrap();
    world.prepare(&executor, &share("b")).unwrap();
}

/// Notes alone show nothing new to a round then.
#[test]
fn without_a_supervisor_no_file_is_written_round_by_round() {
    for restarts_wedged_mps in [false, true] {
        let (world, executor, gpu) = setup();
        let grant = Grant {
            mps: MpsServer::equal(4, Some(1 << 14)),
            restarts_wedged_mps,
            ..Grant::default()
        };
        world.prepare(&executor, &share("a")).unwrap();
        wedge(&world, &gpu, false);
        round(&world, &executor);
        executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
        world.lock().no_supervisor = true;
        executor.tidy();
        let before = world.lock().writes;
        executor.tidy();
        let written = world.lock().writes - before;
        assert_eq!(written, 0, "restarts: {restarts_wedged_mps}");
    }
}
