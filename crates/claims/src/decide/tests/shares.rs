//! Time-sliced shares, and devices for admin access.

use super::*;
use crate::{AllocatedDevice, ConfigEntry, ConfigSource};

pub(super) fn share(request: &str, device: &str, id: &str) -> AllocatedDevice {
    AllocatedDevice { share_id: Some(id.to_owned()), ..result(request, device) }
}

#[test]
fn shares_of_many_claims_and_several_of_one_live_on_one_gpu_and_with_nothing_else() {
    let mut world = World::new();
    let first = claim("a", vec![share("main", "gpu-0-ts", "s1"), share("main", "gpu-0-ts", "s2")]);
    let planned = plan(world.decide(&first));
    assert_eq!(planned.devices.iter().map(|d| d.kind).collect::<Vec<_>>(), [HoldKind::Share; 2]);
    assert_eq!(planned.steps, [], "MIG mode is off already, and no time slice is requested");
    let record = world.record(&first, Phase::Prepared);
    let answer = Prepared::of("gpu.divvy.dev", &record);
    let answered: Vec<_> =
        answer.devices.iter().map(|d| (d.share_id.as_deref(), d.cdi_ids[0].as_str())).collect();
    assert_eq!(
        answered,
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
        [Holder::Record { claim: first.reference(), device, leaving: None, clash: Clash::Mode }]
    };
    assert_eq!(holders(world.decide(&whole)), holder("gpu-0-ts"));
    let partition = claim("p", vec![result("main", "gpu-0-mig-1g10gb-19-0")]);
    assert_eq!(holders(world.decide(&partition)), holder("gpu-0-ts"));
    plan(world.decide(&claim("w", vec![result("main", "gpu-1")])));
}

fn asking(claim: Claim, slice: &str) -> Claim {
    let parameters = |kind: &str| {
        let interval = serde_json::json!({ "interval": slice });
        serde_json::json!({ "apiVersion": "divvy.dev/v1beta1", "kind": kind, "timeSlicing": interval })
    };
    let entry = |kind| ConfigEntry {
        source: ConfigSource::Claim,
        requests: Vec::new(),
        driver: "gpu.divvy.dev".to_owned(),
        parameters: parameters(kind),
    };
    Claim { configs: vec![entry("GpuConfig")], ..claim }
}

/// The policy of GPU 0 has this time slice for shares, and it was set as `applied` says.
fn policy(world: &mut World, share_time_slice: Option<TimeSlice>, applied: Option<TimeSlice>) {
    let mut state = GpuState { share_time_slice, ..GpuState::default() };
    if let Some(to) = applied {
        state.note_time_slice(TimeSlice::Default, to, &world.boot);
    }
    world.gpus.insert(gpu(0), Arc::new(Stored::Fine(state)));
}

#[test]
fn shares_have_the_time_slice_of_the_policy_which_may_change_while_they_are_held() {
    let mut world = World::new();
    policy(&mut world, Some(TimeSlice::Long), None);
    let first = claim("a", vec![share("main", "gpu-0-ts", "s1")]);
    let set = Step::SetTimeSlice { gpu: gpu(0), to: TimeSlice::Long };
    assert_eq!(plan(world.decide(&first)).steps, std::slice::from_ref(&set));
    let record = world.record(&first, Phase::Prepared);
    assert_eq!(record.holds().next().unwrap().time_slice, Some(TimeSlice::Long));
    world.keep(record);
    let second = claim("b", vec![share("main", "gpu-0-ts", "s2"), share("main", "gpu-0-ts", "s3")]);
    assert_eq!(plan(world.decide(&second)).steps[0], set, "it is unknown whether it was set");
    policy(&mut world, Some(TimeSlice::Long), Some(TimeSlice::Long));
    assert_eq!(plan(world.decide(&second)).steps, []);
    policy(&mut world, Some(TimeSlice::Short), Some(TimeSlice::Long));
    let set = Step::SetTimeSlice { gpu: gpu(0), to: TimeSlice::Short };
    assert_eq!(plan(world.decide(&second)).steps, [set]);
    policy(&mut world, None, Some(TimeSlice::Long));
    assert_eq!(plan(world.decide(&second)).steps, [], "reconcile gives it back");
}

#[test]
fn a_whole_gpu_takes_a_time_slice_a_partition_has_none_and_admin_access_changes_nothing() {
    let world = World::new();
    let whole = asking(claim("a", vec![result("main", "gpu-0")]), "Short");
    let planned = plan(world.decide(&whole));
    assert_eq!(planned.steps[0], Step::SetTimeSlice { gpu: gpu(0), to: TimeSlice::Short });
    let mixed = vec![result("part", "gpu-2-mig-1g10gb-19-0"), admin(result("see", "gpu-0-admin"))];
    let planned = plan(world.decide(&asking(claim("a", mixed), "Short")));
    assert_eq!(planned.devices.iter().map(|d| d.time_slice).collect::<Vec<_>>(), [None, None]);
}

#[test]
fn a_share_that_asks_for_a_time_slice_is_refused() {
    let world = World::new();
    let mut asks = asking(claim("a", vec![share("x", "gpu-0-ts", "s1")]), "Long");
    asks.configs[0].parameters["kind"] = "ShareConfig".into();
    assert_eq!(world.refusal(&asks).0, "bad-config");
}

#[test]
fn a_partition_that_was_made_outside_is_known_by_its_name_and_found_and_never_made() {
    let mut world = World::new();
    let part = claim("a", vec![result("main", "gpu-2-mig-static-1g10gb-19-4")]);
    let found = Step::UsePartition(divvy_model::mig::Partition {
        gpu: gpu(2),
        profile: divvy_model::mig::GpuInstanceProfileId(19),
        placement: divvy_model::mig::Placement { start: 4, size: 1 },
    });
    let check = |world: &World, part: &Claim| {
        let planned = plan(world.decide(part));
        assert_eq!(planned.steps, std::slice::from_ref(&found), "its MIG mode stays");
        assert!(planned.devices[0].is_static);
    };
    assert_eq!(world.refusal(&part).0, "no-static-partition", "this driver makes none");
    let lives = |uuid: &str| {
        let (gi, ci) = (divvy_model::mig::GpuInstanceId(7), divvy_model::mig::ComputeInstanceId(0));
        Outcome::Partition { gi, ci, uuid: uuid.parse().unwrap() }
    };
    let at = || DeviceName::clone(&part.allocation.results[0].device);
    world.living.insert(at(), Ok(Some(Outcome::GpuInstance { gi: divvy_model::mig::GpuInstanceId(7) })));
    assert_eq!(world.refusal(&part).0, "no-static-partition", "half of one");
    let error =
        GpuError::on_gpu(divvy_model::GpuOp::GpuInstances, divvy_model::GpuErrorCode::TIMEOUT, &gpu(2));
    world.living.insert(at(), Err(error));
    assert_eq!(world.refusal(&part).0, "gpu-unreadable");
    world.living.insert(at(), Ok(Some(lives("MIG-0"))));
    check(&world, &part);
    let off = claim("a", vec![result("main", "gpu-0-mig-static-1g10gb-19-4")]);
    assert_eq!(world.refusal(&off).0, "wrong-mode");
    world.grant_all();
    check(&world, &part);
    // Under the name that it had until this release, if it lives and nothing of ours accounts for it.
    let device = "gpu-2-mig-1g10gb-19-4";
    let plain = claim("a", vec![result("main", device)]);
    assert!(!plan(world.decide(&plain)).devices[0].is_static, "nothing lives there");
    world.living.insert(device.parse().unwrap(), Ok(Some(lives("MIG-1"))));
    check(&world, &plain);
    let mut theirs = GpuState::default();
    let step = Step::create_partition(
        gpu(2),
        divvy_model::mig::GpuInstanceProfileId(19),
        divvy_model::mig::Placement { start: 4, size: 1 },
    );
    let state = crate::StepState { step, progress: Progress::Done { outcome: lives("MIG-1") } };
    theirs.instances.push(crate::OwnedInstance {
        claim: "b".parse().unwrap(),
        boot: world.boot.clone(),
        state,
    });
    world.gpus.insert(gpu(2), Arc::new(Stored::Fine(theirs)));
    assert!(!plan(world.decide(&plain)).devices[0].is_static, "we have made it for another claim");
    world.living.insert(device.parse().unwrap(), Ok(Some(lives("MIG-2"))));
    check(&world, &plain);
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
fn the_admin_device_is_served_to_admin_requests_only_beside_the_holders_of_the_gpu() {
    let mut world = World::new();
    let holder = claim("a", vec![share("main", "gpu-0-ts", "s1")]);
    let record = world.record(&holder, Phase::Prepared);
    world.keep(record);
    let monitor = claim("m", vec![admin(result("see", "gpu-0-admin")), admin(result("see", "gpu-2-admin"))]);
    let planned = plan(world.decide(&monitor));
    assert_eq!(planned.devices.iter().map(|d| d.kind).collect::<Vec<_>>(), [HoldKind::Admin; 2]);
    assert_eq!(planned.steps, [], "whatever the MIG mode is");
    assert_eq!(
        world.refusal(&claim("m", vec![result("main", "gpu-0-admin")])),
        (
            "admin-only",
            format!(
                "device gpu-0-admin ({}) of claim ns/claim-m (UID m): it is only for requests with adminAccess: true, because \
                 it reserves nothing (request a GPU, a partition or a share)",
                gpu(0)
            )
        )
    );
    assert_eq!(world.refusal(&claim("m", vec![admin(share("main", "gpu-0-ts", "s2"))])).0, "admin-share");
}

#[test]
fn a_time_slice_counts_as_set_while_a_prepared_claim_of_this_boot_that_asked_holds_the_gpu() {
    let holder = claim("a", vec![share("main", "gpu-0-ts", "s1")]);
    let next = claim("b", vec![share("main", "gpu-0-ts", "s2")]);
    let sets = |change: &dyn Fn(&mut Record)| {
        let mut world = World::new();
        policy(&mut world, Some(TimeSlice::Long), Some(TimeSlice::Long));
        let mut record = world.record(&holder, Phase::Prepared);
        change(&mut record);
        world.keep(record);
        plan(world.decide(&next)).steps == [Step::SetTimeSlice { gpu: gpu(0), to: TimeSlice::Long }]
    };
    assert!(!sets(&|_| {}));
    let leaving = crate::Leaving { reason: "process 1".to_owned(), undoing: false };
    assert!(sets(&|r| r.phase = Phase::Leaving(leaving.clone())));
    assert!(sets(&|r| r.boot = "boot-0".parse().unwrap()));
    assert!(sets(&|r| r.devices[0].time_slice = None));
    assert!(sets(&|r| r.devices[0].gpu = gpu(1)));
}
