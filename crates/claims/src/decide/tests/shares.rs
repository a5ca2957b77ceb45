//! Time-sliced shares, and devices for admin access.

use super::*;

pub(super) fn share(request: &str, device: &str, id: &str) -> AllocatedDevice {
    AllocatedDevice { share_id: Some(id.to_owned()), ..result(request, device) }
}

#[test]
fn shares_of_many_claims_and_several_of_one_live_on_one_gpu_and_with_nothing_else() {
    let mut world = World::new();
    let first = claim("a", vec![share("main", "gpu-0-ts", "s1"), share("main", "gpu-0-ts", "s2")]);
    let planned = plan(world.decide(&first));
    assert_eq!(planned.devices.iter().map(|d| d.kind).collect::<Vec<_>>(), [HoldKind::Share; 2]);
    assert_eq!(planned.steps, [Step::WriteCdi], "MIG mode is off already, and nobody asked for a time slice");
    let record = world.record(&first, Phase::Prepared);
    let answer = Prepared::of("gpu.divvy.dev", &record);
    let told: Vec<_> =
        answer.devices.iter().map(|d| (d.share_id.as_deref(), d.cdi_ids[0].as_str())).collect();
    assert_eq!(
        told,
        [
            (Some("s1"), "gpu.divvy.dev/claim=a-gpu-0-ts-s1"),
            (Some("s2"), "gpu.divvy.dev/claim=a-gpu-0-ts-s2")
        ]
    );
    world.keep(record);

    plan(world.decide(&claim("b", vec![share("main", "gpu-0-ts", "s3")])));
    let whole = claim("w", vec![result("main", "gpu-0")]);
    let holder = |device: &str| {
        let device = device.parse().unwrap();
        [Holder::Record { claim: first.reference(), device, leaving: None }]
    };
    assert_eq!(holders(world.decide(&whole)), holder("gpu-0-ts"));
    let partition = claim("p", vec![result("main", "gpu-0-mig-1g10gb-19-0")]);
    assert_eq!(holders(world.decide(&partition)), holder("gpu-0-ts"));
    plan(world.decide(&claim("w", vec![result("main", "gpu-1")])));
}

#[test]
fn one_share_twice_and_a_share_beside_the_whole_gpu_in_one_claim_are_faults_of_the_scheduler() {
    let world = World::new();
    let twice = claim("a", vec![share("x", "gpu-0-ts", "s1"), share("y", "gpu-0-ts", "s1")]);
    assert_eq!(world.refusal(&twice).0, "allocated-twice");
    let both = claim("a", vec![share("x", "gpu-0-ts", "s1"), result("y", "gpu-0")]);
    assert_eq!(world.refusal(&both).0, "allocated-twice");
}

#[test]
fn the_admin_device_is_served_to_admin_requests_only_beside_whoever_holds_the_gpu() {
    let mut world = World::new();
    let holder = claim("a", vec![share("main", "gpu-0-ts", "s1")]);
    let record = world.record(&holder, Phase::Prepared);
    world.keep(record);
    let monitor = claim("m", vec![admin(result("see", "gpu-0-admin")), admin(result("see", "gpu-2-admin"))]);
    let planned = plan(world.decide(&monitor));
    assert_eq!(planned.devices.iter().map(|d| d.kind).collect::<Vec<_>>(), [HoldKind::Admin; 2]);
    assert_eq!(planned.steps, [Step::WriteCdi], "whatever the MIG mode is");
    assert_eq!(
        world.refusal(&claim("m", vec![result("main", "gpu-0-admin")])),
        (
            "admin-only",
            "device gpu-0-admin of claim ns/claim-m (UID m) is for requests with adminAccess: true only, since nothing of \
             it is held for anybody (ask for a GPU, a partition or a share)"
                .to_owned()
        )
    );
    assert_eq!(world.refusal(&claim("m", vec![admin(share("main", "gpu-0-ts", "s2"))])).0, "admin-share");
}
