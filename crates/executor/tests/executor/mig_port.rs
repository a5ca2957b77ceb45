//! The port that changes partitions and modes of GPUs, by itself: what each call comes to, and that
//! nothing is begun beside a call that has not come back.

use std::time::Duration;

use divvy_executor::{Hardware as Port, chain};
use divvy_gpu::{ChangeError, Life, Observed};
use divvy_gpu_sim::{Fault, SimNode};
use divvy_model::{GpuDriver, GpuErrorCode, GpuOp, MigMode, Place};

use crate::mig_hardware::Hardware;
use crate::mig_world::{setup, sim};
use crate::world::{MigLate, World};

/// The port over these GPUs; inventory and time slices are the world's.
fn port<'a>(gpus: &'a dyn GpuDriver, world: &'a World) -> Port<'a> {
    Port {
        gpus,
        time_slices: world,
        mps: world,
        inventory: world,
    }
}

/// A call of this process that is past its deadline may still change the GPU: nothing is begun
/// beside it.
#[test]
fn nothing_is_begun_on_a_gpu_while_an_earlier_call_has_not_come_back() {
    let (world, _, _, gpu) = setup();
    let gpus = Hardware(world.clone());
    let steps = port(&gpus, &world);
    let late = Box::new(|_: &SimNode| ());
    let at = world.lock().now + Duration::from_secs(9);
    let op = GpuOp::CreateGpuInstance;
    world.lock().mig_late.push(MigLate {
        at,
        succeeds: true,
        gpu: gpu.clone(),
        op,
        what: late,
    });
    let wanted = Place {
        profile: divvy_model::mig::GpuInstanceProfileId(9),
        placement: divvy_model::mig::Placement { start: 4, size: 4 },
    };
    for begun in [
        steps.set_mig_mode(&gpu, true),
        steps.set_compute_mode(&gpu, divvy_model::ComputeMode::Prohibited),
        steps.create(&gpu, wanted).map(drop),
    ] {
        let error = begun.unwrap_err();
        assert!(
            matches!(error, ChangeError::NotDone(_)) && error.cause().is_passing(),
            "{error:?}"
        );
    }
    assert_eq!(steps.probe(&gpu, wanted), Observed::InFlight);
    let half = Life::Half {
        gi: divvy_model::mig::GpuInstanceId(1),
    };
    assert!(steps.remove(&gpu, wanted, &half).is_err());
    assert!(!crate::mig_world::mode(&world, &gpu));
}

/// A failed change of MIG mode has a known outcome, and a mode that is only pending is
/// taken back.
#[test]
fn a_failed_change_of_mig_mode_leaves_no_pending_mode() {
    let node = SimNode::parse("h100x2").unwrap();
    let gpu = node.uuids().remove(0);
    let world = World::new("h100x2", 1);
    let steps = port(&node, &world);
    let pending = || match node.mig_mode(&gpu).unwrap() {
        MigMode::Supported { pending, .. } => pending,
        MigMode::Unsupported => panic!("an H100"),
    };
    let cases = [
        (
            GpuErrorCode::IN_USE,
            true,
            "while the GPU is in use: no process computes on it",
        ),
        (GpuErrorCode::NO_PERMISSION, true, "cannot be turned on"),
        (GpuErrorCode::UNKNOWN, false, "may not be on"),
    ];
    for (code, is_certain, text) in cases {
        let calls = node.calls(GpuOp::SetMigMode);
        node.fault(Fault::fail(code).of(GpuOp::SetMigMode).times(1));
        let error = steps.set_mig_mode(&gpu, true).unwrap_err();
        assert_eq!(
            matches!(error, ChangeError::NotDone(_)),
            is_certain,
            "{code:?}"
        );
        assert!(chain(&error).contains(text), "{}", chain(&error));
        assert_eq!(
            node.calls(GpuOp::SetMigMode),
            calls + 1,
            "nothing is pending that is to be taken back"
        );
    }
    node.edit(|e| e.gpu(&gpu).unwrap().clients.insert("dcgm".to_owned()));
    let error = steps.set_mig_mode(&gpu, true).unwrap_err();
    assert!(
        matches!(error, ChangeError::NotDone(_)) && !pending(),
        "{}",
        chain(&error)
    );
    // The driver could not take the mode back: it was not set, or may be.
    let calls = node.calls(GpuOp::SetMigMode);
    node.fault(
        Fault::fail_after(GpuErrorCode::UNKNOWN)
            .of(GpuOp::SetMigMode)
            .times(1),
    );
    let error = steps.set_mig_mode(&gpu, true).unwrap_err();
    assert!(
        matches!(error, ChangeError::Unknown(_)) && pending(),
        "{}",
        chain(&error)
    );
    assert_eq!(
        node.calls(GpuOp::SetMigMode),
        calls + 1,
        "what may still come is not raced with"
    );
    node.edit(|e| e.gpu(&gpu).unwrap().clients.clear());
    steps.set_mig_mode(&gpu, true).unwrap();
    // Turned off under another driver's instance: not even tried.
    node.make_foreign_instance(&gpu, divvy_model::mig::GpuInstanceProfileId(19), 0)
        .unwrap();
    let calls = node.calls(GpuOp::SetMigMode);
    let error = steps.set_mig_mode(&gpu, false).unwrap_err();
    assert!(
        matches!(error, ChangeError::NotDone(_)),
        "{}",
        chain(&error)
    );
    assert!(
        chain(&error).contains("which this driver did not create"),
        "{}",
        chain(&error)
    );
    assert_eq!((node.calls(GpuOp::SetMigMode), pending()), (calls, true));
}

/// A context on the whole GPU keeps partitions from being made; who has it is named.
#[test]
fn a_partition_refused_because_its_gpu_is_in_use_names_the_user() {
    let (world, _, _, gpu) = setup();
    sim(&world).set_mig_mode(&gpu, true).unwrap();
    sim(&world).start_process(&gpu, 4711);
    let wanted = Place {
        profile: divvy_model::mig::GpuInstanceProfileId(9),
        placement: divvy_model::mig::Placement { start: 4, size: 4 },
    };
    let node = sim(&world);
    let error = port(&node, &world).create(&gpu, wanted).unwrap_err();
    assert!(
        chain(&error).contains("while the GPU is in use: process 4711"),
        "{}",
        chain(&error)
    );
}

/// A list that fails is no empty list: nothing is said of who uses the GPU, or of what fills it.
#[test]
fn an_error_says_that_a_list_failed_instead_of_taking_it_for_empty() {
    let node = SimNode::parse("h100x2").unwrap();
    let gpu = node.uuids().remove(0);
    let world = World::new("h100x2", 1);
    let steps = port(&node, &world);
    let fails = |op, code| {
        node.fault(Fault::fail(code).of(op).times(1));
    };
    fails(GpuOp::SetMigMode, GpuErrorCode::IN_USE);
    fails(GpuOp::Processes, GpuErrorCode::TIMEOUT);
    let said = chain(&steps.set_mig_mode(&gpu, true).unwrap_err());
    assert!(
        said.contains("the processes on it cannot be listed") && said.contains("TIMEOUT"),
        "{said}"
    );
    assert!(!said.contains("no process"), "{said}");
    node.set_mig_mode(&gpu, true).unwrap();
    let wanted = Place {
        profile: divvy_model::mig::GpuInstanceProfileId(9),
        placement: divvy_model::mig::Placement { start: 4, size: 4 },
    };
    for unread in [false, true] {
        fails(
            GpuOp::CreateGpuInstance,
            GpuErrorCode::INSUFFICIENT_RESOURCES,
        );
        if unread {
            fails(GpuOp::GpuInstances, GpuErrorCode::UNKNOWN);
        }
        let error = steps.create(&gpu, wanted).unwrap_err();
        let said = chain(&error);
        assert_eq!(said.contains("is free on"), !unread, "{said}");
        assert_eq!(said.contains("cannot be listed"), unread, "{said}");
        assert!(error.cause().is_passing(), "{said}");
    }
}

/// Instances that are gone count as removed; one that could not be read or removed is not taken for
/// gone.
#[test]
fn a_removal_succeeds_for_what_is_gone_and_is_exact_about_the_rest() {
    let node = SimNode::parse("h100x2").unwrap();
    let gpu = node.uuids().remove(0);
    node.set_mig_mode(&gpu, true).unwrap();
    let world = World::new("h100x2", 1);
    let steps = port(&node, &world);
    let wanted = Place {
        profile: divvy_model::mig::GpuInstanceProfileId(9),
        placement: divvy_model::mig::Placement { start: 4, size: 4 },
    };
    let made = steps.create(&gpu, wanted).unwrap();
    let lives = || {
        let filling = steps.filling(&gpu, wanted)?;
        Ok::<_, divvy_model::GpuError>(filling.and_then(|living| living.as_partition()))
    };
    let undo = || steps.remove(&gpu, wanted, &Life::Whole(made.clone()));
    assert_eq!(steps.probe(&gpu, wanted), Observed::Whole(made.clone()));
    let fails = |op, code| {
        node.fault(Fault::fail(code).of(op).times(1));
    };
    // It is not gone while it is listed.
    fails(GpuOp::ComputeInstances, GpuErrorCode::NOT_FOUND);
    assert_eq!(lives().unwrap_err().code, GpuErrorCode::NOT_FOUND);
    fails(GpuOp::ComputeInstances, GpuErrorCode::UNKNOWN);
    assert_eq!(lives().unwrap_err().code, GpuErrorCode::UNKNOWN);
    for (code, is_certain, text) in [
        (
            GpuErrorCode::IN_USE,
            true,
            "its compute instance is still in use",
        ),
        (
            GpuErrorCode::NO_PERMISSION,
            true,
            "its compute instance could not be removed",
        ),
        (
            GpuErrorCode::UNKNOWN,
            false,
            "its compute instance could not be removed",
        ),
    ] {
        fails(GpuOp::DestroyComputeInstance, code);
        let error = undo().unwrap_err();
        assert_eq!(
            matches!(error, ChangeError::NotDone(_)),
            is_certain,
            "{code:?}"
        );
        assert!(chain(&error).contains(text), "{}", chain(&error));
        assert_eq!(lives().unwrap().as_ref(), Some(&made));
    }
    // Another process has removed it in the same moment.
    let fault = Fault::fail_after(GpuErrorCode::NOT_FOUND).times(1);
    node.fault(fault.of(GpuOp::DestroyComputeInstance));
    undo().unwrap();
    assert_eq!(lives().unwrap(), None);
}
