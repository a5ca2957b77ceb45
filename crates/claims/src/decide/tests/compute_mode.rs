//! GPUs that were left in a compute mode that keeps containers from them.

use divvy_model::ComputeMode;

use super::shares::share;
use super::*;

#[test]
fn a_compute_mode_refuses_what_it_would_fail_and_names_the_command_that_mends_it() {
    let claims = [
        claim("w", vec![result("main", "gpu-0")]),
        claim("s", vec![share("main", "gpu-0-ts", "s1")]),
        claim("p", vec![result("main", "gpu-0-mig-1g10gb-19-0")]),
        claim("a", vec![admin(result("main", "gpu-0"))]),
    ];
    for (mode, refused) in [
        (None, [false, false, false, false]),
        (Some(ComputeMode::Default), [false, false, false, false]),
        (Some(ComputeMode::ExclusiveProcess), [false, true, false, false]),
        (Some(ComputeMode::Prohibited), [true, true, true, false]),
    ] {
        let mut world = World::new();
        world.grant_all();
        world.inventory.gpus.get_mut(&gpu(0)).unwrap().facts.compute_mode = mode;
        let refuses = |claim| match world.decide(claim) {
            Decision::Refuse(refusal) => {
                assert_eq!((refusal.category(), refusal.retry()), ("compute-mode", Retry::Later));
                true
            }
            Decision::Run(_) => false,
            other => panic!("{other:?}"),
        };
        assert_eq!(claims.each_ref().map(refuses), refused, "{mode:?}");
    }

    let mut world = World::new();
    world.inventory.gpus.get_mut(&gpu(0)).unwrap().facts.compute_mode = Some(ComputeMode::ExclusiveProcess);
    assert_eq!(
        world.refusal(&claims[1]).1,
        "device gpu-0-ts (GPU-12345678-1234-1234-1234-123456780000) of claim ns/claim-s (UID s): compute mode of its GPU is EXCLUSIVE_PROCESS, so its container would fail (set it back with `nvidia-smi -i GPU-12345678-1234-1234-1234-123456780000 -c DEFAULT`; an MPS daemon or an administrator has changed it)"
    );
}
