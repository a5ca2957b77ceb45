//! Promises of the simulator about MIG.

use std::thread;
use std::time::{Duration, Instant};

use divvy_conformance::{Expect, conformance, mig_conformance};
use divvy_model::mig::{GpuInstanceId, GpuInstanceProfileId, Placement};
use divvy_model::{CudaVersion, GpuDriver, GpuErrorCode, GpuOp, GpuUuid, MigActivation, MigMode};

use crate::{Engine, Fault, MIG_BOARDS, MigLatency, SimNode};

const SOON: Duration = Duration::from_secs(10);
const P1G: GpuInstanceProfileId = GpuInstanceProfileId(19);
const P2G: GpuInstanceProfileId = GpuInstanceProfileId(14);
const P3G: GpuInstanceProfileId = GpuInstanceProfileId(9);
const P4G: GpuInstanceProfileId = GpuInstanceProfileId(5);
const P7G: GpuInstanceProfileId = GpuInstanceProfileId(0);
const ONE: Placement = Placement { start: 2, size: 1 };

/// A node of one GPU with MIG mode on.
fn with_mig(board: &str) -> (SimNode, GpuUuid) {
    let node = SimNode::parse(board).unwrap();
    let gpu = node.uuids().remove(0);
    node.set_mig_mode(&gpu, true).unwrap();
    if !node.mig_mode(&gpu).unwrap().is_on() {
        node.edit(|e| e.reset_gpu(&gpu)).unwrap();
    }
    (node, gpu)
}

#[test]
fn every_board_passes_the_mig_conformance_checks() {
    for board in MIG_BOARDS {
        let (node, gpu) = with_mig(board);
        assert_eq!(mig_conformance(&node, &gpu), [], "{board}");
        let profile = node.mig_capabilities(&gpu).unwrap().profiles()[0].id;
        node.make_foreign_instance(&gpu, profile, 0).unwrap();
        assert_eq!(
            conformance(&node, &Expect::default()),
            [],
            "{board}, with an instance"
        );
    }
    let node = SimNode::parse("h100x1").unwrap();
    let gpu = node.uuids().remove(0);
    assert_eq!(mig_conformance(&node, &gpu), [], "from MIG mode off");
    assert_eq!(
        node.mig_mode(&gpu).unwrap(),
        MigMode::Supported {
            current: false,
            pending: false
        }
    );
}

#[test]
fn the_checks_see_what_is_wrong() {
    let (node, gpu) = with_mig("h100x1");
    node.fault(
        Fault::fail(GpuErrorCode::UNKNOWN)
            .of(GpuOp::DestroyGpuInstance)
            .after(9)
            .times(1),
    );
    assert!(!mig_conformance(&node, &gpu).is_empty());
}

#[test]
fn ids_say_size_and_place_as_on_real_boards() {
    let ids = |board: &str, wanted: &[(u32, u32)]| -> Vec<u32> {
        let (node, gpu) = with_mig(board);
        let made = wanted.iter().map(|(profile, start)| {
            node.make_foreign_instance(&gpu, GpuInstanceProfileId(*profile), *start)
                .unwrap()
                .gpu_instance
                .0
        });
        made.collect()
    };
    assert_eq!(ids("h100x1", &[(0, 0)]), [0]);
    assert_eq!(ids("a100-40x1", &[(5, 0), (9, 4)]), [1, 2]);
    assert_eq!(
        ids("h100x1", &[(9, 4), (14, 0), (19, 2), (19, 3)]),
        [2, 3, 9, 10]
    );
    assert_eq!(ids("h200x1", &[(15, 6), (19, 0), (19, 5)]), [6, 7, 12]);
    assert_eq!(ids("a30x1", &[(5, 2), (14, 0), (14, 1)]), [2, 3, 4]);
    assert_eq!(
        ids("rtx-pro-6000x1", &[(5, 6), (14, 0), (14, 3)]),
        [2, 3, 4]
    );
}

#[test]
fn the_smallest_profile_cannot_have_the_last_slice_and_engines_run_out() {
    let (node, gpu) = with_mig("h100x1");
    let at = |start, size| Placement { start, size };
    let code = |profile, placement| {
        node.create_gpu_instance(&gpu, profile, placement)
            .unwrap_err()
            .code
    };
    assert_eq!(code(P1G, at(7, 1)), GpuErrorCode::INVALID_ARGUMENT);
    assert_eq!(code(P2G, at(6, 2)), GpuErrorCode::INVALID_ARGUMENT);
    assert_eq!(code(P4G, at(4, 4)), GpuErrorCode::INVALID_ARGUMENT);
    let media = GpuInstanceProfileId(20);
    node.create_gpu_instance(&gpu, media, at(0, 1)).unwrap();
    assert_eq!(
        code(media, at(1, 1)),
        GpuErrorCode::INSUFFICIENT_RESOURCES,
        "one with media engines"
    );
    assert_eq!(code(P7G, at(0, 8)), GpuErrorCode::INSUFFICIENT_RESOURCES);

    let (node, gpu) = with_mig("rtx-pro-6000x1");
    let (all, without, plain) = (
        GpuInstanceProfileId(65),
        GpuInstanceProfileId(67),
        GpuInstanceProfileId(14),
    );
    node.create_gpu_instance(&gpu, all, at(0, 3)).unwrap();
    let result = node
        .create_gpu_instance(&gpu, plain, at(3, 3))
        .map_err(|e| e.code);
    assert_eq!(
        result,
        Err(GpuErrorCode::INSUFFICIENT_RESOURCES),
        "all media engines are taken"
    );
    assert!(node.create_gpu_instance(&gpu, without, at(3, 3)).is_ok());
}

#[test]
fn what_is_in_use_is_not_destroyed() {
    let (node, gpu) = with_mig("h100x1");
    let made = node.make_foreign_instance(&gpu, P3G, 4).unwrap();
    let id = made.gpu_instance;
    node.start_process_in(&gpu, id, 42);
    let destroy = |what: &str| {
        let code = node
            .destroy_compute_instance(&gpu, id, made.id)
            .map_err(|e| e.code);
        assert_eq!(code, Err(GpuErrorCode::IN_USE), "{what}");
    };
    destroy("a process runs in it");
    assert_eq!(
        node.destroy_gpu_instance(&gpu, id).unwrap_err().code,
        GpuErrorCode::IN_USE
    );
    node.end_process(42);
    node.destroy_compute_instance(&gpu, id, made.id).unwrap();
    node.start_process_in(&gpu, id, 43);
    assert_eq!(
        node.destroy_gpu_instance(&gpu, id).unwrap_err().code,
        GpuErrorCode::IN_USE
    );
    node.end_process(43);
    node.destroy_gpu_instance(&gpu, id).unwrap();

    node.start_process(&gpu, 44);
    let create = node.create_gpu_instance(&gpu, P1G, ONE).map_err(|e| e.code);
    assert_eq!(
        create,
        Err(GpuErrorCode::IN_USE),
        "a context is on the whole GPU"
    );
}

#[test]
fn mig_mode_changes_at_once_on_hopper_if_the_gpu_is_unused() {
    let node = SimNode::parse("h100x1").unwrap();
    let gpu = node.uuids().remove(0);
    let pending = MigActivation::Pending(GpuErrorCode::IN_USE);
    node.edit(|e| {
        e.gpu(&gpu)
            .unwrap()
            .clients
            .insert("nv-hostengine".to_owned())
    });
    assert_eq!(node.set_mig_mode(&gpu, true).unwrap(), pending);
    assert_eq!(
        node.mig_mode(&gpu).unwrap(),
        MigMode::Supported {
            current: false,
            pending: true
        }
    );
    node.edit(|e| e.gpu(&gpu).unwrap().clients.clear());
    node.start_process(&gpu, 1);
    assert_eq!(node.set_mig_mode(&gpu, true).unwrap(), pending);
    node.end_process(1);
    assert_eq!(
        node.set_mig_mode(&gpu, true).unwrap(),
        MigActivation::Active
    );
    node.make_foreign_instance(&gpu, P1G, 0).unwrap();
    assert_eq!(
        node.set_mig_mode(&gpu, false).unwrap(),
        pending,
        "an instance lives"
    );
    assert_eq!(
        node.set_mig_mode(&gpu, true).unwrap(),
        MigActivation::Active,
        "taken back"
    );

    node.edit(Engine::reboot);
    assert_eq!(
        node.mig_mode(&gpu).unwrap(),
        MigMode::Supported {
            current: false,
            pending: false
        }
    );
    assert_eq!(node.gpu_instances(&gpu).unwrap(), []);
    node.set_mig_mode(&gpu, true).unwrap();
    assert_eq!(node.gpu_instances(&gpu).unwrap(), []);
    node.edit(|e| e.set_driver_loaded(false));
    node.edit(|e| e.set_driver_loaded(true));
    assert!(
        !node.mig_mode(&gpu).unwrap().is_on(),
        "lost with the driver"
    );
}

/// The mode survives the reboot.
#[test]
fn on_ampere_mig_mode_waits_for_a_reset_and_instances_end_at_a_reboot() {
    let node = SimNode::parse("a100-80x1").unwrap();
    let gpu = node.uuids().remove(0);
    let pending = MigActivation::Pending(GpuErrorCode::RESET_REQUIRED);
    assert_eq!(node.set_mig_mode(&gpu, true).unwrap(), pending);
    assert_eq!(node.gpu_instances(&gpu).unwrap(), []);
    node.start_process(&gpu, 1);
    assert_eq!(
        node.edit(|e| e.reset_gpu(&gpu)).unwrap_err().code,
        GpuErrorCode::IN_USE
    );
    node.end_process(1);
    node.edit(|e| e.reset_gpu(&gpu)).unwrap();
    assert!(node.mig_mode(&gpu).unwrap().is_on());
    node.make_foreign_instance(&gpu, P4G, 0).unwrap();
    node.edit(Engine::reboot);
    assert!(node.mig_mode(&gpu).unwrap().is_on());
    assert_eq!(node.gpu_instances(&gpu).unwrap(), []);
    node.set_mig_mode(&gpu, false).unwrap();
    node.edit(Engine::reboot);
    assert!(!node.mig_mode(&gpu).unwrap().is_on());
}

#[test]
fn an_old_driver_reports_profiles_only_with_mig_mode_on() {
    let node = SimNode::parse("h100x1,l4x1").unwrap();
    let [l4, h100] = node.uuids().try_into().unwrap();
    assert_eq!(
        node.mig_capabilities(&h100).unwrap().placements().count(),
        25
    );
    assert_eq!(
        node.mig_capabilities(&l4).unwrap_err().code,
        GpuErrorCode::NOT_SUPPORTED
    );
    assert_eq!(
        node.set_mig_mode(&l4, true).unwrap_err().code,
        GpuErrorCode::NOT_SUPPORTED
    );
    node.edit(|e| {
        e.set_driver_version(
            "535.161.08",
            CudaVersion {
                major: 12,
                minor: 2,
            },
        );
    });
    assert_eq!(
        node.mig_capabilities(&h100).unwrap_err().code,
        GpuErrorCode::NOT_SUPPORTED
    );
    node.set_mig_mode(&h100, true).unwrap();
    assert_eq!(
        node.mig_capabilities(&h100).unwrap().placements().count(),
        25
    );
}

#[test]
fn the_state_with_instances_survives_as_text_and_gives_no_uuid_again() {
    let (node, gpu) = with_mig("h100x1");
    let first = node.make_foreign_instance(&gpu, P1G, 3).unwrap();
    let text = serde_json::to_string(&node.engine()).unwrap();
    let again = SimNode::from_engine(serde_json::from_str(&text).unwrap());
    assert_eq!(again.engine(), node.engine());
    again
        .destroy_compute_instance(&gpu, first.gpu_instance, first.id)
        .unwrap();
    again
        .destroy_gpu_instance(&gpu, first.gpu_instance)
        .unwrap();
    let second = again.make_foreign_instance(&gpu, P1G, 3).unwrap();
    assert_eq!(
        (second.gpu_instance, second.id),
        (first.gpu_instance, first.id)
    );
    assert_ne!(second.uuid, first.uuid);
}

#[test]
fn a_call_may_fail_or_hang_after_its_effect() {
    let (node, gpu) = with_mig("h100x1");
    let create = |start| node.create_gpu_instance(&gpu, P1G, Placement { start, size: 1 });
    let living = || {
        node.gpu_instances(&gpu)
            .unwrap()
            .iter()
            .map(|i| i.placement.start)
            .collect::<Vec<_>>()
    };
    node.fault(
        Fault::fail_after(GpuErrorCode::TIMEOUT)
            .of(GpuOp::CreateGpuInstance)
            .times(1),
    );
    assert_eq!(create(0).unwrap_err().code, GpuErrorCode::TIMEOUT);
    assert_eq!(living(), [0], "it was created all the same");

    let after = node.fault(Fault::hang_after().of(GpuOp::CreateGpuInstance).times(1));
    let before = node.fault(Fault::hang().of(GpuOp::CreateGpuInstance).times(1));
    thread::scope(|scope| {
        let first = scope.spawn(|| create(1));
        assert!(node.wait_until_hanging(1, SOON));
        assert_eq!(living(), [0, 1], "created, but not answered");
        let second = scope.spawn(|| create(2));
        assert!(node.wait_until_hanging(2, SOON));
        assert_eq!(living(), [0, 1]);
        node.release(before);
        assert_eq!(second.join().unwrap().unwrap().id, GpuInstanceId(9));
        assert_eq!(
            living(),
            [0, 1, 2],
            "a call that was given up succeeds later"
        );
        node.release(after);
        assert_eq!(first.join().unwrap().unwrap().id, GpuInstanceId(8));
    });
    let error = GpuErrorCode::INSUFFICIENT_RESOURCES;
    node.fault(Fault::fail_after(GpuErrorCode::TIMEOUT).times(1));
    assert_eq!(
        create(0).unwrap_err().code,
        error,
        "what failed by itself says so"
    );
}

#[test]
fn changes_take_as_long_as_they_are_set_to() {
    let (node, gpu) = with_mig("h100x1");
    node.edit(|e| {
        e.latency = MigLatency {
            create_ms: 30,
            ..MigLatency::default()
        }
    });
    node.fault(Fault::delay(Duration::from_millis(20)).of(GpuOp::CreateGpuInstance));
    let start = Instant::now();
    node.create_gpu_instance(&gpu, P1G, ONE).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(50));
}
