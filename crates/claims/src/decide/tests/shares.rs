//! Time-sliced shares, and devices for admin access.

use super::*;
use crate::{AllocatedDevice, ConfigEntry, ConfigSource};

pub(super) fn share(request: &str, device: &str, id: &str) -> AllocatedDevice {
    AllocatedDevice {
        share_id: Some(id.to_owned()),
        ..result(request, device)
    }
}

#[test]
fn shares_live_on_one_gpu_together_and_with_nothing_else() {
    let mut world = World::new();
    let first = claim(
        "a",
        vec![
            share("main", "gpu-0-ts", "s1"),
            share("main", "gpu-0-ts", "s2"),
        ],
    );
    let planned = plan(world.decide(&first));
    assert_eq!(
        planned
            .devices
            .iter()
            .map(|d| d.sharing)
            .collect::<Vec<_>>(),
        [Sharing::TimeSliced; 2]
    );
    assert_eq!(
        world.changes(&first, 0),
        [],
        "MIG mode is off already, and no time slice is requested"
    );
    let record = world.record(&first, Phase::Prepared);
    let answer = Prepared::of("gpu.divvy.dev", &record);
    let answered: Vec<_> = answer
        .devices
        .iter()
        .map(|d| (d.share_id.as_deref(), d.cdi_ids[0].as_str()))
        .collect();
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
        [Holder::Record {
            claim: first.reference(),
            device,
            leaving: None,
            clash: Clash::Mode,
        }]
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
    Claim {
        configs: vec![entry("GpuConfig")],
        ..claim
    }
}

/// The policy of GPU 0 has this time slice for shares, and it was set as `applied` says.
fn policy(world: &mut World, share_time_slice: Option<TimeSlice>, applied: Option<TimeSlice>) {
    let mut state = GpuState::default().in_boot(&world.boot);
    state.grant.share_time_slice = share_time_slice;
    state.slice = applied.map(|ours| divvy_gpu::Changed {
        found: TimeSlice::Default,
        ours,
        sure: true,
    });
    world.gpus.insert(gpu(0), Arc::new(Stored::Fine(state)));
}

#[test]
fn shares_have_the_time_slice_that_the_policy_has_now() {
    let mut world = World::new();
    policy(&mut world, Some(TimeSlice::Long), None);
    let first = claim("a", vec![share("main", "gpu-0-ts", "s1")]);
    let set = Change::SetTimeSlice(TimeSlice::Long);
    assert_eq!(world.changes(&first, 0), std::slice::from_ref(&set));
    let record = world.record(&first, Phase::Prepared);
    assert_eq!(
        record.holds().next().unwrap().time_slice,
        Some(TimeSlice::Long)
    );
    world.keep(record);
    let second = claim(
        "b",
        vec![
            share("main", "gpu-0-ts", "s2"),
            share("main", "gpu-0-ts", "s3"),
        ],
    );
    assert_eq!(
        world.changes(&second, 0)[0],
        set,
        "it is unknown whether it was set"
    );
    policy(&mut world, Some(TimeSlice::Long), Some(TimeSlice::Long));
    assert_eq!(world.changes(&second, 0), []);
    policy(&mut world, Some(TimeSlice::Short), Some(TimeSlice::Long));
    let set = Change::SetTimeSlice(TimeSlice::Short);
    assert_eq!(world.changes(&second, 0), [set]);
    policy(&mut world, None, Some(TimeSlice::Long));
    assert_eq!(world.changes(&second, 0), [], "reconcile gives it back");
}

fn percent(id: &str, percent: &str) -> AllocatedDevice {
    AllocatedDevice {
        consumed_capacity: [("percent".to_owned(), percent.to_owned())].into(),
        ..share("main", "gpu-0-ts", id)
    }
}

fn reserve(world: &mut World, share_reserved_mib: u64) {
    let mut state = GpuState::default().in_boot(&world.boot);
    state.grant.share_reserved_mib = share_reserved_mib;
    world.gpus.insert(gpu(0), Arc::new(Stored::Fine(state)));
}

/// The record keeps the memory, whatever the policy becomes.
#[test]
fn percent_are_of_the_memory_that_the_policy_leaves() {
    const GIB: u64 = 1 << 30;
    let mut world = World::new();
    let first = claim("a", vec![percent("s1", "50")]);
    let of = |world: &World, claim: &Claim| plan(world.decide(claim)).devices[0].clone();
    let before = of(&world, &first).amounts();
    assert_eq!((before.memory, before.cores), (Some(40 * GIB), Some(50)));
    reserve(&mut world, 16 << 10);
    let share = of(&world, &first);
    assert_eq!(share.share_memory, Some(32 * GIB));
    assert_eq!(
        crate::share_env(std::slice::from_ref(&share), &share),
        [
            format!("DIVVY_MEMORY_GPU_0_TS={}", 32 * GIB),
            "DIVVY_CORES_GPU_0_TS=50".to_owned(),
            format!("DIVVY_SHARE_MEMORY_GPU_0_TS_S1={}", 32 * GIB),
            "DIVVY_SHARE_CORES_GPU_0_TS_S1=50".to_owned(),
        ]
    );
    let mut record = world.record(&first, Phase::Prepared);
    record = match Record::decode(&record.encode()) {
        Stored::Fine(record) => record,
        other => panic!("{other:?}"),
    };
    // The policy changes, and the node starts again.
    reserve(&mut world, 0);
    record.boot = "boot-0".parse().unwrap();
    world.keep(record);
    assert_eq!(of(&world, &first).share_memory, Some(32 * GIB));
    let second = claim("b", vec![percent("s2", "50")]);
    assert_eq!(of(&world, &second).share_memory, Some(40 * GIB));
    let together = [&first, &second].map(|claim| of(&world, claim).share_memory.unwrap());
    assert!(together.iter().sum::<u64>() <= 80 * GIB);
    // What is certain of a share alone: no memory is left, or amounts were granted.
    reserve(&mut world, 1 << 40);
    assert_eq!(of(&world, &second).amounts().memory, None);
    let mut amounts = percent("s3", "1");
    amounts.consumed_capacity = [("memory".to_owned(), "1Gi".to_owned())].into();
    let amounts = of(&world, &claim("c", vec![amounts]));
    assert_eq!(
        (amounts.share_memory, amounts.amounts().memory),
        (None, Some(GIB))
    );
}

#[test]
fn a_whole_gpu_takes_a_time_slice_and_a_partition_has_none() {
    let world = World::new();
    let whole = asking(claim("a", vec![result("main", "gpu-0")]), "Short");
    assert_eq!(
        world.changes(&whole, 0)[0],
        Change::SetTimeSlice(TimeSlice::Short)
    );
    let mixed = vec![
        result("part", "gpu-2-mig-1g10gb-19-0"),
        admin(result("see", "gpu-0-admin")),
    ];
    let planned = plan(world.decide(&asking(claim("a", mixed), "Short")));
    assert_eq!(
        planned
            .devices
            .iter()
            .map(|d| d.time_slice)
            .collect::<Vec<_>>(),
        [None, None]
    );
}

#[test]
fn a_share_that_asks_for_a_time_slice_is_refused() {
    let world = World::new();
    let mut asks = asking(claim("a", vec![share("x", "gpu-0-ts", "s1")]), "Long");
    asks.configs[0].parameters["kind"] = "ShareConfig".into();
    assert_eq!(world.refusal(&asks).0, "bad-config");
}

#[test]
fn a_partition_of_others_is_known_by_its_name_and_never_made() {
    let mut world = World::new();
    let part = claim("a", vec![result("main", "gpu-2-mig-static-1g10gb-19-4")]);
    let check = |world: &World, part: &Claim| {
        assert_eq!(world.changes(part, 2), [], "its MIG mode stays");
        assert!(plan(world.decide(part)).devices[0].theirs);
    };
    assert_eq!(
        world.refusal(&part).0,
        "no-static-partition",
        "this driver makes none"
    );
    world.lives(2, small(4), Ok(Some(&made(7, "MIG-0"))));
    let half = &mut world.hardware.get_mut(&gpu(2)).unwrap().places;
    for living in half.values_mut() {
        let living = living.as_mut().unwrap().as_mut().unwrap();
        living.inside.clear();
    }
    assert_eq!(world.refusal(&part).0, "no-static-partition", "half of one");
    world.lives(2, small(4), Err(divvy_model::GpuErrorCode::TIMEOUT));
    assert_eq!(world.refusal(&part).0, "gpu-unreadable");
    world.lives(2, small(4), Ok(Some(&made(7, "MIG-0"))));
    check(&world, &part);
    let off = claim("a", vec![result("main", "gpu-0-mig-static-1g10gb-19-4")]);
    assert_eq!(world.refusal(&off).0, "wrong-mode");
    world.grant_all();
    check(&world, &part);
    // Under the name of one that is made on demand it is in the way, and is never given out.
    let plain = claim("a", vec![result("main", "gpu-2-mig-1g10gb-19-4")]);
    assert!(!plan(world.decide(&plain)).devices[0].theirs);
}

#[test]
fn one_share_twice_and_a_share_beside_its_whole_gpu_are_refused() {
    let world = World::new();
    let twice = claim(
        "a",
        vec![share("x", "gpu-0-ts", "s1"), share("y", "gpu-0-ts", "s1")],
    );
    assert_eq!(world.refusal(&twice).0, "allocated-twice");
    let both = claim(
        "a",
        vec![share("x", "gpu-0-ts", "s1"), result("y", "gpu-0")],
    );
    assert_eq!(world.refusal(&both).0, "allocated-twice");
}

#[test]
fn the_admin_device_is_served_to_admin_requests_only() {
    let mut world = World::new();
    let holder = claim("a", vec![share("main", "gpu-0-ts", "s1")]);
    let record = world.record(&holder, Phase::Prepared);
    world.keep(record);
    let monitor = claim(
        "m",
        vec![
            admin(result("see", "gpu-0-admin")),
            admin(result("see", "gpu-2-admin")),
        ],
    );
    let planned = plan(world.decide(&monitor));
    assert_eq!(
        planned
            .devices
            .iter()
            .map(|d| d.sharing)
            .collect::<Vec<_>>(),
        [Sharing::Admin; 2]
    );
    for number in [0, 2] {
        let changes = world.changes(&monitor, number);
        assert_eq!(changes, [], "whatever the MIG mode is");
    }
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
    assert_eq!(
        world
            .refusal(&claim("m", vec![admin(share("main", "gpu-0-ts", "s2"))]))
            .0,
        "admin-share"
    );
}

#[test]
fn a_time_slice_counts_as_set_while_a_claim_vouches_for_it() {
    let holder = claim("a", vec![share("main", "gpu-0-ts", "s1")]);
    let next = claim("b", vec![share("main", "gpu-0-ts", "s2")]);
    let sets = |change: &dyn Fn(&mut Record)| {
        let mut world = World::new();
        policy(&mut world, Some(TimeSlice::Long), Some(TimeSlice::Long));
        let mut record = world.record(&holder, Phase::Prepared);
        change(&mut record);
        world.keep(record);
        world.changes(&next, 0) == [Change::SetTimeSlice(TimeSlice::Long)]
    };
    assert!(!sets(&|_| {}));
    let leaving = crate::Leaving {
        reason: "process 1".to_owned(),
        undoing: false,
    };
    assert!(sets(&|r| r.phase = Phase::Leaving(leaving.clone())));
    assert!(sets(&|r| r.boot = "boot-0".parse().unwrap()));
    assert!(sets(&|r| r.devices[0].time_slice = None));
    assert!(sets(&|r| r.devices[0].gpu = gpu(1)));
}

/// A cap is promised where the node can keep it, and is on record as bytes; a node that fell below
/// refuses the claim with the reason, as after a boot with another driver.
#[test]
fn a_cap_is_promised_once_and_kept_or_refused() {
    use divvy_model::MemoryCaps;
    let mut world = World::new();
    let granted = |share: AllocatedDevice| AllocatedDevice {
        consumed_capacity: [("memory".to_owned(), "2Gi".to_owned())].into(),
        ..share
    };
    let first = claim("a", vec![granted(share("main", "gpu-0-ts", "s1"))]);
    let cap = |world: &World, claim: &Claim| plan(world.decide(claim)).devices[0].memory_cap;
    assert_eq!(cap(&world, &first), None, "an older driver");
    world.inventory.system.memory_caps = MemoryCaps::Available;
    assert_eq!(cap(&world, &first), Some(2 << 30));
    let half = claim("p", vec![percent("s9", "50")]);
    assert_eq!(
        cap(&world, &half),
        Some(40 << 30),
        "of the memory that they come to"
    );
    let whole = claim("w", vec![result("main", "gpu-1")]);
    assert_eq!(cap(&world, &whole), None, "the GPU itself is the limit");

    let record = world.record(&first, Phase::Prepared);
    let devices = record.devices.clone();
    for lack in [
        MemoryCaps::OldDriver,
        MemoryCaps::NoCgroup2,
        MemoryCaps::NoController,
        MemoryCaps::SwitchedOff,
        MemoryCaps::NoHook,
    ] {
        world.inventory.system.memory_caps = lack;
        let refusal = servable(&first, &devices, &world.seen(), true).unwrap_err();
        assert_eq!(refusal.category(), "cap-lost");
        let text = refusal.to_string();
        assert!(text.contains(lack.lack().unwrap()), "{text}");
    }
    world.inventory.system.memory_caps = MemoryCaps::Available;
    servable(&first, &devices, &world.seen(), true).unwrap();
}
