//! MIG partitions: which fit beside what, and which steps make them.

use super::*;
use divvy_model::mig::{GpuInstanceProfileId, Placement};
use divvy_model::{Architecture, GpuErrorCode, GpuOp, MigMode};

const SMALL: &str = "gpu-2-mig-1g10gb-19-0";
const HALF: &str = "gpu-2-mig-3g40gb-9-4";

fn place(profile: u32, start: u32, size: u32) -> Place {
    Place {
        profile: GpuInstanceProfileId(profile),
        placement: Placement { start, size },
    }
}

#[test]
fn partitions_are_made_at_their_exact_place_after_mig_mode_is_on() {
    let mut world = World::new();
    let c = claim("a", vec![result("main", HALF), result("side", SMALL)]);
    let planned = plan(world.decide(&c));
    let targets: Vec<_> = planned.devices.iter().map(|d| d.target).collect();
    let (half, small) = (place(9, 4, 4), place(19, 0, 1));
    assert_eq!(targets, [Target::Partition(half), Target::Partition(small)]);
    let own = [Change::Create(half), Change::Create(small)];
    assert_eq!(world.changes(&c, 2), own, "MIG mode is not ours to change");
    world.grant_all();
    assert_eq!(world.changes(&c, 2), own, "it is on");
    let off = MigMode::Supported {
        current: false,
        pending: false,
    };
    world.mig_mode(2, Ok(off));
    let on = Change::SetMigMode(true);
    assert_eq!(
        world.changes(&c, 2),
        [&[on][..], &own].concat(),
        "the inventory is old"
    );
    world.mig_mode(
        2,
        Err(divvy_model::GpuError::on_gpu(
            GpuOp::MigMode,
            GpuErrorCode::UNKNOWN,
            &gpu(2),
        )),
    );
    assert_eq!(world.refusal(&c).0, "gpu-unreadable");
    world.hardware.clear();
    // Another name of the same profile, as another driver version would have published it.
    let renamed = claim("a", vec![result("main", "gpu-2-mig-3g37gb-9-4")]);
    assert_eq!(
        plan(world.decide(&renamed)).devices[0].target,
        Target::Partition(half)
    );
}

#[test]
fn mig_mode_is_changed_only_where_that_is_allowed_or_was_our_doing() {
    let mut world = World::new();
    let whole = claim("a", vec![result("main", "gpu-2")]);
    let part = claim("b", vec![result("main", "gpu-0-mig-1g10gb-19-3")]);
    let refused = |world: &World, claim| world.refusal(claim).0;
    assert_eq!(
        (refused(&world, &whole), refused(&world, &part)),
        ("wrong-mode", "wrong-mode")
    );
    let ours = GpuState {
        mig: Some(divvy_gpu::Changed {
            found: false,
            ours: true,
            sure: true,
        }),
        ..GpuState::default()
    };
    world.gpus.insert(gpu(2), Arc::new(Stored::Fine(ours)));
    assert_eq!(world.changes(&whole, 2), [Change::SetMigMode(false)]);
    assert_eq!(refused(&world, &part), "wrong-mode");
    world.grant_all();
    assert_eq!(world.changes(&part, 0)[0], Change::SetMigMode(true));
    for of in world.inventory.gpus.values_mut() {
        of.facts.architecture = Architecture::Ampere;
    }
    assert_eq!(
        refused(&world, &part),
        "wrong-mode",
        "it would need a reset"
    );
}

#[test]
fn partitions_share_a_gpu_unless_they_overlap_or_it_is_held_whole() {
    let mut world = World::new();
    world.grant_all();
    let first = claim("a", vec![result("main", HALF)]);
    let record = world.record(&first, Phase::Prepared);
    world.keep(record);
    plan(world.decide(&claim("b", vec![result("main", SMALL)])));
    plan(world.decide(&claim("w", vec![admin(result("see", "gpu-2"))])));
    for device in [
        "gpu-2",
        "gpu-2-mig-1g10gb-19-4",
        "gpu-2-mig-7g80gb-0-0",
        HALF,
    ] {
        let clash = if device == "gpu-2" {
            Clash::Mode
        } else {
            Clash::Device
        };
        let holder = Holder::Record {
            claim: first.reference(),
            device: HALF.parse().unwrap(),
            leaving: None,
            clash,
        };
        assert_eq!(
            holders(world.decide(&claim("b", vec![result("main", device)]))),
            [holder],
            "{device}"
        );
    }
    let refused = |devices: &[&str]| {
        world.refusal(&claim(
            "c",
            devices.iter().map(|d| result("main", d)).collect(),
        ))
    };
    assert_eq!(
        refused(&["gpu-0", "gpu-0-mig-1g10gb-19-0"]).0,
        "allocated-twice"
    );
    assert_eq!(refused(&[SMALL, SMALL]).0, "allocated-twice");
    assert_eq!(
        refused(&[SMALL, "gpu-2-mig-3g40gb-9-0"]),
        (
            "allocated-twice",
            format!(
                "device gpu-2-mig-3g40gb-9-0 ({}) of claim ns/claim-c (UID c): it needs the same part of its GPU as device {SMALL} of the same claim (this is a bug in the scheduler: delete the pod and the claim)",
                gpu(2)
            )
        )
    );
}

#[test]
fn a_partition_that_cannot_be_is_refused_with_the_reason() {
    let mut world = World::new();
    let one = |result| claim("a", vec![result]);
    let refused = |world: &World, device| world.refusal(&one(result("main", device)));
    assert_eq!(
        refused(&world, "gpu-2-mig-3g40gb-9-1"),
        (
            "unknown-device",
            format!(
                "device gpu-2-mig-3g40gb-9-1 ({}) of claim ns/claim-a (UID a): its GPU does not support this partition (delete the pod and the claim, so that they are scheduled again)",
                gpu(2)
            )
        )
    );
    assert_eq!(refused(&world, "gpu-2-mig-9g99gb-77-0").0, "unknown-device");
    assert_eq!(
        world.refusal(&one(admin(result("see", SMALL)))).0,
        "admin-partition"
    );
    world.inventory.gpus.get_mut(&gpu(2)).unwrap().mig = None;
    assert_eq!(refused(&world, SMALL).0, "partitions-unknown");
    world
        .inventory
        .gpus
        .get_mut(&gpu(2))
        .unwrap()
        .facts
        .mig_mode = MigMode::Unsupported;
    assert_eq!(refused(&world, SMALL).0, "unknown-device");
}
