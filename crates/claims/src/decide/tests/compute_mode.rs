//! GPUs that were left in a compute mode that keeps containers from them.

use divvy_model::ComputeMode;

use super::shares::share;
use super::*;

#[test]
fn shares_need_the_default_compute_mode_and_prohibited_is_refused() {
    let claims = [
        claim("w", vec![result("main", "gpu-0")]),
        claim(
            "s",
            vec![
                share("main", "gpu-0-ts", "s1"),
                share("main", "gpu-0-ts", "s2"),
            ],
        ),
        claim("p", vec![result("main", "gpu-0-mig-1g10gb-19-0")]),
        claim("a", vec![admin(result("main", "gpu-0"))]),
    ];
    for (mode, sets) in [
        (None, [false, false, false, false]),
        (Some(ComputeMode::Default), [false, false, false, false]),
        (
            Some(ComputeMode::ExclusiveProcess),
            [false, true, false, false],
        ),
    ] {
        let mut world = World::new();
        world.grant_all();
        world
            .inventory
            .gpus
            .get_mut(&gpu(0))
            .unwrap()
            .facts
            .compute_mode = mode;
        let change = Change::SetComputeMode(ComputeMode::Default);
        let set = claims
            .each_ref()
            .map(|claim| world.changes(claim, 0).contains(&change));
        assert_eq!(set, sets, "{mode:?}");
    }
    let mut world = World::new();
    world.grant_all();
    world
        .inventory
        .gpus
        .get_mut(&gpu(0))
        .unwrap()
        .facts
        .compute_mode = Some(ComputeMode::Prohibited);
    for claim in &claims[..3] {
        assert_eq!(world.refusal(claim).0, "compute-mode");
    }
    plan(world.decide(&claims[3]));
    assert_eq!(
        world.refusal(&claims[0]).1,
        "device gpu-0 (GPU-12345678-1234-1234-1234-123456780000) of claim ns/claim-w (UID w): compute mode of its GPU is PROHIBITED, so its container would fail (an administrator has set this mode; reset it with `nvidia-smi -i GPU-12345678-1234-1234-1234-123456780000 -c DEFAULT`)"
    );
}
