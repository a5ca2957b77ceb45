//! The MPS server of a partition that a claim has alone: it comes after the partition, goes before
//! it, and leaves nothing wherever a process dies.

use std::collections::BTreeMap;

use divvy_claims::{Claim, ConfigEntry, ConfigSource};
use divvy_executor::{Event, Executor, InventorySource, Refresh, Unprepared};
use divvy_model::{
    ComputeMode, GpuDriver, GpuTarget, Grant, MigUuid, MpsProtocol, MpsServer, Target,
};
use serde_json::json;

use crate::mig_world::{claim_of, living, mig_world, sim};
use crate::story::uid;
use crate::world::accessors::set_protocol;
use crate::world::{DRIVER, HardwareFault, Moment, World};

const PART: &str = "gpu-0-mig-1g10gb-19-0";
const NEXT: &str = "gpu-0-mig-1g10gb-19-1";

fn setup() -> (World, Executor) {
    let world = mig_world("h100x2", 1);
    let executor = world.start();
    (world, executor)
}

/// A claim of devices whose users share each partition by MPS.
fn served(name: &str, devices: &[&str]) -> Claim {
    let mut claim = claim_of(name, devices, "t1");
    claim.configs.push(ConfigEntry {
        source: ConfigSource::Claim,
        requests: Vec::new(),
        driver: DRIVER.to_owned(),
        parameters: json!({
            "apiVersion": "divvy.dev/v1beta1", "kind": "MigConfig", "mps": {"limits": {"cores": 50}}
        }),
    });
    claim
}

fn server() -> MpsServer {
    MpsServer::of_claim(Some(50), None)
}

fn target(world: &World, place: &str) -> GpuTarget {
    GpuTarget {
        gpu: world.gpu(0),
        target: Target::Partition(place.parse().unwrap()),
    }
}

/// The partitions that live on the first GPU, by their UUIDs.
fn partitions(world: &World) -> Vec<MigUuid> {
    let living = living(world, &world.gpu(0)).into_iter();
    living
        .flat_map(|(_, inside)| inside.into_iter().map(|one| one.uuid))
        .collect()
}

fn servers(world: &World) -> BTreeMap<GpuTarget, (MpsServer, MigUuid)> {
    world.lock().mps_in.clone()
}

fn is_plain(world: &World) {
    assert_eq!(servers(world), BTreeMap::new());
    assert_eq!(partitions(world), []);
    assert!(world.lock().mps.is_empty());
}

#[test]
fn a_partition_has_a_server_that_sees_it_alone_while_it_is_held() {
    // Whatever the driver has for whole GPUs.
    for protocol in [MpsProtocol::V2, MpsProtocol::V3] {
        let (world, executor) = setup();
        set_protocol(&world, protocol);
        world.prepare(&executor, &served("a", &[PART])).unwrap();
        let [first] = partitions(&world).try_into().unwrap();
        let own = (target(&world, "19@0+1"), (server(), first.clone()));
        assert_eq!(servers(&world), [own.clone()].into());
        let facts = sim(&world).facts(&world.gpu(0)).unwrap();
        assert_eq!(
            facts.compute_mode,
            Some(ComputeMode::Default),
            "it is of the GPU, with other partitions on it"
        );
        // A neighbour without MPS has none, one with MPS its own.
        world
            .prepare(&executor, &claim_of("b", &["gpu-0-mig-1g10gb-19-2"], "t1"))
            .unwrap();
        assert_eq!(servers(&world), [own.clone()].into());
        world.prepare(&executor, &served("c", &[NEXT])).unwrap();
        assert_eq!(servers(&world).len(), 2);
        let left = world.unprepare(&executor, &uid("a")).unwrap();
        assert_eq!(left, Unprepared::Done);
        let names: Vec<_> = servers(&world).into_keys().collect();
        assert_eq!(names, [target(&world, "19@1+1")]);
        // The next has another partition at the same place.
        world.prepare(&executor, &served("d", &[PART])).unwrap();
        let (_, again) = servers(&world)[&target(&world, "19@0+1")].clone();
        assert_ne!(again, first);
        assert!(partitions(&world).contains(&again));
        for name in ["b", "c", "d"] {
            world.unprepare(&executor, &uid(name)).unwrap();
        }
        is_plain(&world);
    }
}

#[test]
fn a_partition_without_its_server_is_no_answer_and_is_taken_back() {
    let (world, executor) = setup();
    world.lock().mps_fault = Some(HardwareFault::Refuses);
    let error = world.prepare(&executor, &served("a", &[PART])).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("start the MPS server of a claim on the partition of profile 19 at 0+1")
            || std::error::Error::source(&error)
                .is_some_and(|cause| cause.to_string().contains("the partition of profile 19")),
        "{error:?}"
    );
    is_plain(&world);
    world.prepare(&executor, &served("a", &[PART])).unwrap();
    assert_eq!(servers(&world).len(), 1);
}

/// A partition is not removed under its server: the claim goes on holding.
#[test]
fn a_partition_whose_server_does_not_end_is_kept() {
    let (world, executor) = setup();
    world.prepare(&executor, &served("a", &[PART])).unwrap();
    world.lock().mps_fault = Some(HardwareFault::Refuses);
    let left = world.unprepare(&executor, &uid("a")).unwrap();
    assert!(matches!(left, Unprepared::Lingering(_)), "{left:?}");
    assert_eq!(partitions(&world).len(), 1);
    executor.reconcile(&world.view());
    is_plain(&world);
}

#[test]
fn the_server_of_a_partition_outlives_plugin_daemon_and_boot() {
    let (world, executor) = setup();
    world.prepare(&executor, &served("a", &[PART])).unwrap();
    world.prepare(&executor, &served("b", &[NEXT])).unwrap();
    for name in [("a", PART), ("b", NEXT)] {
        let claim = served(name.0, &[name.1]);
        world.lock().api.insert(claim.uid.clone(), claim);
    }
    let before = servers(&world);
    drop(executor);
    world.kill();
    let executor = world.start();
    executor.reconcile(&world.view());
    assert_eq!(servers(&world), before);
    // Only the claim of the one that has died hears of it.
    let died = target(&world, "19@0+1");
    world.lock().mps_in.remove(&died);
    let events = executor.reconcile(&world.view()).events;
    let restarted = Event::MpsServerRestarted {
        gpu: world.gpu(0),
        claims: vec![served("a", &[PART]).reference()],
    };
    assert_eq!(events, [restarted]);
    assert_eq!(servers(&world), before);
    world.reboot();
    assert!(servers(&world).is_empty());
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    let after = servers(&world);
    assert_eq!(after.len(), 2);
    for (of, (_, partition)) in &after {
        assert!(partitions(&world).contains(partition), "{of}");
    }
    for name in ["a", "b"] {
        world.unprepare(&executor, &uid(name)).unwrap();
    }
    is_plain(&world);
}

#[test]
fn wherever_a_crash_cuts_it_no_server_of_a_partition_is_left() {
    let mut cuts = 0;
    for moment in [Moment::Before, Moment::During, Moment::After] {
        for in_calls in 0..60 {
            let (world, executor) = setup();
            world.crash_in(in_calls, moment);
            if world.prepare(&executor, &served("a", &[PART])).is_ok() {
                drop(world.unprepare(&executor, &uid("a")));
            }
            if !world.lock().dead {
                break;
            }
            cuts += 1;
            world.kill();
            world.changed(&world.gpu(0)).unwrap();
            let executor = world.start();
            executor.reconcile(&world.view());
            world.unprepare(&executor, &uid("a")).unwrap();
            executor.reconcile(&world.view());
            is_plain(&world);
            world.prepare(&executor, &served("b", &[PART])).unwrap();
            assert_eq!(servers(&world).len(), 1, "{moment:?} {in_calls}");
        }
    }
    assert!(cuts > 20, "{cuts} crashes");
}

#[test]
fn a_claim_has_mps_of_one_partition_only() {
    let (world, executor) = setup();
    let error = world.prepare(&executor, &served("two", &[PART, NEXT]));
    assert_eq!(error.unwrap_err().category(), "mps-targets");
    is_plain(&world);
}

// ---- shares of a partition

const SHARE: &str = "gpu-0-mig-1g10gb-19-0-mps";

/// Shares of partitions are granted in so many equal slots.
fn slots(world: &World, executor: &Executor, slots: u32) {
    let grant = Grant {
        may_change_mode: Some(true),
        offers_partitions: Some(true),
        mps_slots_in_partitions: Some(slots),
        ..Grant::default()
    };
    executor.grant(&[(world.gpu(0), grant)].into()).unwrap();
}

fn share(name: &str) -> Claim {
    let mut claim = claim_of(name, &[SHARE], "t1");
    for result in &mut claim.allocation.results {
        result.share_id = Some(format!("share-{name}"));
    }
    claim
}

#[test]
fn shares_of_a_partition_have_one_server_from_the_first_to_the_last() {
    for protocol in [MpsProtocol::V2, MpsProtocol::V3] {
        let (world, executor) = setup();
        set_protocol(&world, protocol);
        slots(&world, &executor, 2);
        world.prepare(&executor, &share("a")).unwrap();
        let [partition] = partitions(&world).try_into().unwrap();
        let (server, sees) = servers(&world)[&target(&world, "19@0+1")].clone();
        assert_eq!((server.slots, server.cores, sees), (Some(2), 50, partition));
        assert_eq!(server.protocol, MpsProtocol::V2);
        assert!(
            server
                .memory_mib
                .is_some_and(|mib| (4_000..5_200).contains(&mib))
        );
        // A policy that has changed counts from the next server on.
        slots(&world, &executor, 4);
        world.prepare(&executor, &share("b")).unwrap();
        assert_eq!(servers(&world).len(), 1);
        let error = world.prepare(&executor, &share("c")).unwrap_err();
        assert_eq!(error.category(), "mps-full");
        // Another partition is another server, with slots of its own.
        let mut beside = claim_of("f", &["gpu-0-mig-1g10gb-19-1-mps"], "t1");
        beside.allocation.results[0].share_id = Some("share-f".to_owned());
        world.prepare(&executor, &beside).unwrap();
        let all = servers(&world);
        let slots = |place: &str| all[&target(&world, place)].0.slots;
        assert_eq!((slots("19@0+1"), slots("19@1+1")), (Some(2), Some(4)));
        world.unprepare(&executor, &uid("f")).unwrap();
        // One partition, in one way.
        for device in [PART, "gpu-0-mig-1g10gb-19-0-ts", "gpu-0"] {
            let error = world.prepare(&executor, &claim_of("d", &[device], "t1"));
            let category = error.unwrap_err().category();
            assert!(
                ["conflict", "mode-conflict", "held"].contains(&category),
                "{category}"
            );
        }
        world.unprepare(&executor, &uid("a")).unwrap();
        assert_eq!(servers(&world).len(), 1, "the other needs it");
        assert_eq!(partitions(&world).len(), 1);
        world.unprepare(&executor, &uid("b")).unwrap();
        is_plain(&world);
        world.prepare(&executor, &share("e")).unwrap();
        let (server, _) = servers(&world)[&target(&world, "19@0+1")].clone();
        assert_eq!(server.slots, Some(4));
    }
}

#[test]
fn a_share_of_a_partition_is_refused_where_no_rule_has_offered_it() {
    let (world, executor) = setup();
    let error = world.prepare(&executor, &share("a")).unwrap_err();
    assert_eq!(error.category(), "mps-unavailable");
    is_plain(&world);
}

#[test]
fn wherever_a_crash_cuts_shares_of_a_partition_nothing_is_left() {
    let mut cuts = 0;
    for moment in [Moment::Before, Moment::During, Moment::After] {
        for in_calls in 0..80 {
            let (world, executor) = setup();
            slots(&world, &executor, 4);
            world.crash_in(in_calls, moment);
            let done = || -> Option<()> {
                for name in ["a", "b"] {
                    world.prepare(&executor, &share(name)).ok()?;
                }
                for name in ["b", "a"] {
                    world.unprepare(&executor, &uid(name)).ok()?;
                }
                Some(())
            };
            let _cut = done();
            if !world.lock().dead {
                break;
            }
            cuts += 1;
            world.kill();
            world.changed(&world.gpu(0)).unwrap();
            let executor = world.start();
            executor.reconcile(&world.view());
            for name in ["a", "b"] {
                world.unprepare(&executor, &uid(name)).unwrap();
            }
            executor.reconcile(&world.view());
            is_plain(&world);
        }
    }
    assert!(cuts > 30, "{cuts} crashes");
}
