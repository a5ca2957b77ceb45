//! MPS shares: the server of a GPU comes with the first claim and goes with the last, whatever
//! fails and wherever a process dies.

mod wedged;

use std::time::Duration;

use divvy_claims::{Claim, ConfigEntry, ConfigSource, ProcessOnGpu};
use divvy_executor::{Event, Executor, InventorySource, LockName, Refresh, Unprepared};
use divvy_model::{
    ComputeMode, GpuDriver, GpuUuid, Grant, MpsAbility, MpsNamespace, MpsNamespaceName,
    MpsProtocol, MpsServer,
};
use serde_json::{Value, json};

use crate::bad_input::newer_record;
use crate::mig_world::{claim_of, mig_world, sim};
use crate::story::uid;
use crate::world::accessors::{set_protocol, settings, tear};
use crate::world::{DRIVER, HardwareFault, Moment, World};

type Namespaces = std::collections::BTreeMap<MpsNamespaceName, MpsNamespace>;

fn setup() -> (World, Executor, GpuUuid) {
    let world = mig_world("h100x2", 1);
    let gpu = world.gpu(0);
    let executor = world.start();
    for gpu in [&gpu, &world.gpu(1)] {
        slots(&executor, gpu, 4);
    }
    (world, executor, gpu)
}

fn share(name: &str) -> Claim {
    let mut claim = claim_of(name, &["gpu-0-mps"], "t1");
    for result in &mut claim.allocation.results {
        result.share_id = Some(format!("share-{name}"));
    }
    claim
}

fn with_config(name: &str, mut config: Value) -> Claim {
    config["apiVersion"] = json!("divvy.dev/v1beta1");
    config["kind"] = json!("MpsConfig");
    let mut claim = share(name);
    claim.configs.push(ConfigEntry {
        source: ConfigSource::Claim,
        requests: Vec::new(),
        driver: DRIVER.to_owned(),
        parameters: config,
    });
    claim
}

/// A claim of these devices, of which those of `requests` have an MPS server of its own with these
/// limits.
fn owned(name: &str, devices: &[&str], requests: &[&str], limits: &Value) -> Claim {
    let mut claim = claim_of(name, devices, "t1");
    claim.configs.push(ConfigEntry {
        source: ConfigSource::Claim,
        requests: requests.iter().map(|name| (*name).to_owned()).collect(),
        driver: DRIVER.to_owned(),
        parameters: json!({
            "apiVersion": "divvy.dev/v1beta1", "kind": "GpuConfig", "mps": {"limits": limits}
        }),
    });
    claim
}

/// A claim of the whole GPU, whose users share it by MPS.
fn own(name: &str) -> Claim {
    owned(
        name,
        &["gpu-0"],
        &[],
        &json!({"cores": 50, "memory": "10Gi"}),
    )
}

/// The server of such a claim.
fn server_of_own() -> MpsServer {
    MpsServer::of_claim(Some(50), Some(10 << 30))
}

/// The report that a server was started again under these claims.
fn restarted(gpu: &GpuUuid, claims: &[&str]) -> Event {
    let claims = claims.iter().map(|name| share(name).reference());
    Event::MpsServerRestarted {
        gpu: gpu.clone(),
        claims: claims.collect(),
    }
}

fn mode(world: &World, gpu: &GpuUuid) -> ComputeMode {
    sim(world).facts(gpu).unwrap().compute_mode.unwrap()
}

/// Nothing of MPS is left on a GPU, and its compute mode is as it was.
fn is_plain(world: &World, gpu: &GpuUuid) {
    assert_eq!(world.lock().mps.get(gpu), None);
    assert_eq!(mode(world, gpu), ComputeMode::Default);
    assert_eq!(settings(world, gpu).compute, None);
}

fn slots(executor: &Executor, gpu: &GpuUuid, slots: u32) {
    let grant = Grant {
        mps: MpsServer::equal(slots, Some(1 << 14)),
        ..Grant::default()
    };
    executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
}

/// Two GPUs whose MPS servers have namespaces.
fn setup_with_namespaces() -> (World, Executor, GpuUuid) {
    let (world, executor, gpu) = setup();
    set_protocol(&world, MpsProtocol::V3);
    let grant = Grant {
        mps: Some(MpsServer::NAMESPACES),
        ..Grant::default()
    };
    executor.grant(&[(gpu.clone(), grant)].into()).unwrap();
    (world, executor, gpu)
}

/// A claim of a share with so much of the GPU.
fn part(name: &str, cores: u32, memory: &str) -> Claim {
    let mut claim = share(name);
    for result in &mut claim.allocation.results {
        let granted = [("cores", cores.to_string()), ("memory", memory.to_owned())];
        result.consumed_capacity = granted
            .map(|(name, amount)| (name.to_owned(), amount))
            .into();
    }
    claim
}

/// The namespaces of a GPU's server: percent of the threads, and MiB.
fn namespaces(world: &World, gpu: &GpuUuid) -> Vec<(u32, Option<u64>)> {
    let m = world.lock();
    let all = m.namespaces.get(gpu).into_iter().flatten();
    let mut sizes: Vec<_> = all.map(|(_, one)| (one.cores, one.memory_mib)).collect();
    sizes.sort_unstable();
    sizes
}

#[test]
fn each_claim_has_a_namespace_of_its_own_size_for_as_long_as_it_lasts() {
    let (world, executor, gpu) = setup_with_namespaces();
    world.prepare(&executor, &part("a", 30, "10Gi")).unwrap();
    assert_eq!(world.lock().mps.get(&gpu), Some(&MpsServer::NAMESPACES));
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    world.prepare(&executor, &part("b", 5, "1Gi")).unwrap();
    let both = [(5, Some(1024)), (30, Some(10_240))];
    assert_eq!(namespaces(&world, &gpu), both);
    // Asked again, it has what it had.
    world.prepare(&executor, &part("b", 5, "1Gi")).unwrap();
    assert_eq!(namespaces(&world, &gpu), both);
    world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(namespaces(&world, &gpu), [(5, Some(1024))]);
    world.unprepare(&executor, &uid("b")).unwrap();
    assert!(world.lock().namespaces.is_empty());
    is_plain(&world, &gpu);
}

#[test]
fn a_round_makes_lost_namespaces_again_and_ends_those_of_no_claim() {
    let (world, executor, gpu) = setup_with_namespaces();
    for (name, cores) in [("a", 30), ("b", 5)] {
        let claim = part(name, cores, "1Gi");
        world.prepare(&executor, &claim).unwrap();
        world.lock().api.insert(uid(name), claim);
    }
    let before = world.lock().namespaces.clone();
    let expected = [(5, Some(1024)), (30, Some(1024))];
    // The daemon dies, one is lost, one is of a claim that no record is left of.
    let stray = |all: &mut Namespaces| {
        let name = MpsNamespaceName::of(&uid("stray"), &"gpu-0-mps".parse().unwrap());
        let one = MpsNamespace {
            name,
            cores: 1,
            memory_mib: None,
        };
        all.insert(name, one);
    };
    let lost = |all: &mut Namespaces| {
        all.pop_first();
    };
    let other = |all: &mut Namespaces| {
        for one in all.values_mut() {
            one.cores = 0;
        }
    };
    for change in [stray as fn(&mut Namespaces), lost, other] {
        change(world.lock().namespaces.get_mut(&gpu).unwrap());
        assert_ne!(world.lock().namespaces, before);
        executor.reconcile(&world.view());
        assert_eq!(namespaces(&world, &gpu), expected);
    }
    // A claim that comes makes its own alone: what cannot be made again would keep it from that.
    lost(world.lock().namespaces.get_mut(&gpu).unwrap());
    world.prepare(&executor, &part("c", 1, "1Gi")).unwrap();
    assert_eq!(namespaces(&world, &gpu).len(), 2);
    // Nor does one that goes make those of others.
    world.unprepare(&executor, &uid("c")).unwrap();
    assert_eq!(namespaces(&world, &gpu).len(), 1);
    executor.reconcile(&world.view());
    assert_eq!(namespaces(&world, &gpu), expected);
    world.lock().server_dies(&gpu);
    let report = executor.reconcile(&world.view());
    assert_eq!(namespaces(&world, &gpu), expected);
    assert!(report.events.contains(&restarted(&gpu, &["a", "b"])));
    assert_eq!(world.lock().namespaces, before);
}

/// All that a claim has of a GPU is in one namespace: a program can use one only.
#[test]
fn shares_of_one_claim_are_added_up_and_limits_are_kept_above_requests() {
    let (world, executor, gpu) = setup_with_namespaces();
    let mut two = part("two", 60, "2Gi");
    let mut second = two.allocation.results[0].clone();
    second.request = "second".to_owned();
    second.share_id = Some("other".to_owned());
    two.allocation.results.push(second);
    world.prepare(&executor, &two).unwrap();
    assert_eq!(namespaces(&world, &gpu), [(100, Some(4096))]);
    world.unprepare(&executor, &uid("two")).unwrap();
    let limited = |cores: u32| {
        let mut claim = part("a", 30, "10Gi");
        let config = json!({"limits": {"cores": cores}, "priority": "BelowNormal"});
        claim.configs = with_config("a", config).configs;
        claim
    };
    let error = world.prepare(&executor, &limited(29)).unwrap_err();
    assert_eq!(error.category(), "bad-limit");
    let text = divvy_model::chain(&error);
    let words = "limits.cores of its MpsConfig, 29, is below the 30 percent";
    assert!(text.contains(words), "{text}");
    is_plain(&world, &gpu);
    world.prepare(&executor, &limited(50)).unwrap();
    assert_eq!(namespaces(&world, &gpu), [(50, Some(10_240))]);
}

/// Less than a MiB would be no limit for the supervisor, and never be what it lists.
#[test]
fn a_crumb_of_memory_is_a_limit_all_the_same() {
    let (world, executor, gpu) = setup_with_namespaces();
    world.prepare(&executor, &part("a", 30, "4Ki")).unwrap();
    assert_eq!(namespaces(&world, &gpu), [(30, Some(1))]);
}

/// A record that cannot be read keeps what may be its claim's, and keeps no other claim from its
/// own.
#[test]
fn lost_namespaces_are_made_again_beside_a_record_that_cannot_be_read() {
    let (world, executor, gpu) = setup_with_namespaces();
    for name in ["a", "b"] {
        let claim = part(name, 30, "1Gi");
        world.prepare(&executor, &claim).unwrap();
        world.lock().api.insert(uid(name), claim);
    }
    let before = world.lock().namespaces.clone();
    let of_a = MpsNamespaceName::of(&uid("a"), &"gpu-0-mps".parse().unwrap());
    world.lock().namespaces.get_mut(&gpu).unwrap().remove(&of_a);
    // It stays unreadable: it is of a later version, and names its GPU.
    let newer = newer_record(&world, "uid-b.json");
    tear(&world, &uid("b"), &newer);
    executor.reconcile(&world.view());
    assert_eq!(world.lock().namespaces, before);
}

#[test]
fn a_claim_that_has_its_gpu_alone_has_one_namespace_for_all_its_pods() {
    let (world, executor, gpu) = setup_with_namespaces();
    world.prepare(&executor, &own("a")).unwrap();
    assert_eq!(world.lock().mps.get(&gpu), Some(&MpsServer::NAMESPACES));
    assert_eq!(namespaces(&world, &gpu), [(50, Some(10_240))]);
    world.unprepare(&executor, &uid("a")).unwrap();
    is_plain(&world, &gpu);
}

/// Records of before are not carried out with another protocol.
#[test]
fn another_protocol_after_a_boot_is_refused_in_words() {
    let (world, executor, _) = setup();
    let claim = share("a");
    world.prepare(&executor, &claim).unwrap();
    world.reboot();
    let executor = world.start();
    set_protocol(&world, MpsProtocol::V3);
    let error = world.prepare(&executor, &claim).unwrap_err();
    assert_eq!(error.category(), "mps-unavailable");
    let text = divvy_model::chain(&error);
    assert!(text.contains("another protocol of MPS"), "{text}");
}

#[test]
fn the_server_comes_with_the_first_claim_and_goes_with_the_last() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    let server = MpsServer::equal(4, Some(1 << 14)).unwrap();
    assert_eq!(world.lock().mps.get(&gpu), Some(&server));
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    let calls = world.lock().calls;
    world.prepare(&executor, &share("b")).unwrap();
    assert!(world.lock().calls > calls);
    world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(
        world.lock().mps.get(&gpu),
        Some(&server),
        "the other needs it"
    );
    // Its own server is no process in the way.
    assert_eq!(
        world.unprepare(&executor, &uid("b")).unwrap(),
        Unprepared::Done
    );
    is_plain(&world, &gpu);
    world
        .prepare(&executor, &claim_of("w", &["gpu-0"], "t1"))
        .unwrap();
}

#[test]
fn wherever_a_crash_cuts_it_the_next_instance_leaves_no_orphan() {
    for (make, moment) in [share as fn(&str) -> Claim, own]
        .into_iter()
        .flat_map(|make| {
            [Moment::Before, Moment::During, Moment::After].map(|moment| (make, moment))
        })
    {
        for in_calls in 0..40 {
            let (world, executor, gpu) = setup();
            world.crash_in(in_calls, moment);
            let prepared = world.prepare(&executor, &make("a")).is_ok();
            if prepared {
                drop(world.unprepare(&executor, &uid("a")));
            }
            if !world.lock().dead {
                break;
            }
            world.kill();
            world.changed(&gpu).unwrap();
            let executor = world.start();
            executor.reconcile(&world.view());
            // The kubelet calls again for what it has no answer to.
            world.unprepare(&executor, &uid("a")).unwrap();
            executor.reconcile(&world.view());
            is_plain(&world, &gpu);
            world.prepare(&executor, &make("b")).unwrap();
            assert!(world.lock().mps.contains_key(&gpu), "{moment:?} {in_calls}");
        }
    }
}

#[test]
fn a_claim_with_the_whole_gpu_has_a_server_of_its_own() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &own("a")).unwrap();
    assert_eq!(world.lock().mps.get(&gpu), Some(&server_of_own()));
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    // For another pod of the claim.
    world.prepare(&executor, &own("a")).unwrap();
    assert_eq!(world.lock().mps.get(&gpu), Some(&server_of_own()));
    world.lock().api.insert(uid("a"), own("a"));
    for (device, category) in [("gpu-0", "conflict"), ("gpu-0-mps", "mode-conflict")] {
        let error = world.prepare(&executor, &claim_of("o", &[device], "t1"));
        assert_eq!(error.unwrap_err().category(), category, "{device}");
    }
    let left = world.unprepare(&executor, &uid("a")).unwrap();
    assert_eq!(
        left,
        Unprepared::Done,
        "its server is no process in the way"
    );
    is_plain(&world, &gpu);
    // Each of the next has what it asks for.
    world
        .prepare(&executor, &claim_of("w", &["gpu-0"], "t1"))
        .unwrap();
    is_plain(&world, &gpu);
    world.unprepare(&executor, &uid("w")).unwrap();
    let all = owned("all", &["gpu-0"], &[], &json!({}));
    world.prepare(&executor, &all).unwrap();
    let server = MpsServer::of_claim(None, None);
    assert_eq!(world.lock().mps.get(&gpu), Some(&server));
    world.unprepare(&executor, &uid("all")).unwrap();
    world.prepare(&executor, &share("s")).unwrap();
    assert_eq!(world.lock().mps[&gpu].slots, Some(4));
}

#[test]
fn the_server_of_a_claim_outlives_the_plugin_its_daemon_and_a_boot() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &own("a")).unwrap();
    world.lock().api.insert(uid("a"), own("a"));
    drop(executor);
    world.kill();
    let executor = world.start();
    executor.reconcile(&world.view());
    assert_eq!(world.lock().mps.get(&gpu), Some(&server_of_own()));
    world.lock().mps.clear();
    let events = executor.reconcile(&world.view()).events;
    assert_eq!(events, [restarted(&gpu, &["a"])]);
    assert_eq!(world.lock().mps.get(&gpu), Some(&server_of_own()));
    world.reboot();
    assert!(world.lock().mps.is_empty());
    let executor = world.start();
    executor.restore_cdi(Refresh::Missing);
    assert_eq!(world.lock().mps.get(&gpu), Some(&server_of_own()));
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    // It is gone from the API, and the kubelet never calls.
    world.lock().api.clear();
    world.pass(Duration::from_mins(5));
    executor.reconcile(&world.view());
    world.pass(Duration::from_mins(5));
    executor.reconcile(&world.view());
    is_plain(&world, &gpu);
}

#[test]
fn two_requests_of_a_claim_with_and_without_a_server_go_together() {
    let (world, executor, gpu) = setup();
    let mut claim = owned("two", &["gpu-0", "gpu-1"], &["served"], &json!({}));
    claim.allocation.results[0].request = "served".to_owned();
    claim.allocation.results[1].request = "plain".to_owned();
    world.prepare(&executor, &claim).unwrap();
    assert_eq!(world.lock().mps.keys().collect::<Vec<_>>(), [&gpu]);
    is_plain(&world, &world.gpu(1));
}

#[test]
fn a_daemon_that_dies_under_its_claims_is_started_again() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    world.prepare(&executor, &share("b")).unwrap();
    let server = world.lock().mps.remove(&gpu);
    let events = executor.reconcile(&world.view()).events;
    assert_eq!(world.lock().mps.get(&gpu).copied(), server);
    assert!(events.contains(&restarted(&gpu, &["a", "b"])), "{events:?}");
    // By the next claim, too.
    world.lock().mps.clear();
    world.prepare(&executor, &share("c")).unwrap();
    assert_eq!(world.lock().mps.get(&gpu).copied(), server);
}

/// Rounds come every few seconds. The server of the other GPU, which lives, is its equal.
#[test]
fn a_round_looks_at_a_gpu_whose_server_died_and_at_no_other() {
    let (world, executor, gpu) = setup();
    let other = world.gpu(1);
    let beside = owned(
        "b",
        &["gpu-1"],
        &[],
        &json!({"cores": 50, "memory": "10Gi"}),
    );
    world.prepare(&executor, &own("a")).unwrap();
    world.prepare(&executor, &beside).unwrap();
    world.lock().busy.insert(LockName::Gpu(other));
    world.lock().busy.insert(LockName::Gpu(gpu.clone()));
    assert!(!executor.tidy().left_out, "both run as noted");

    world.lock().busy.remove(&LockName::Gpu(gpu.clone()));
    world.lock().mps.remove(&gpu);
    let report = executor.tidy();
    assert_eq!(report.events, [restarted(&gpu, &["a"])]);
    assert!(!report.left_out);
}

#[test]
fn a_server_that_no_file_names_is_stopped() {
    let (world, executor, gpu) = setup();
    let other = world.gpu(1);
    world.prepare(&executor, &share("a")).unwrap();
    let server = MpsServer::equal(2, None).unwrap();
    world.lock().mps.insert(other.clone(), server);
    executor.reconcile(&world.view());
    assert_eq!(world.lock().mps.keys().collect::<Vec<_>>(), [&gpu]);
    is_plain(&world, &other);
}

#[test]
fn a_start_that_fails_or_is_unknown_fails_the_claim_and_leaves_nothing() {
    for fault in [HardwareFault::Refuses, HardwareFault::Lies] {
        let (world, executor, gpu) = setup();
        world.lock().mps_fault = Some(fault);
        let error = world.prepare(&executor, &share("a")).unwrap_err();
        assert_eq!(error.category(), "hardware", "{fault:?}");
        is_plain(&world, &gpu);
        world.prepare(&executor, &share("a")).unwrap();
    }
}

#[test]
fn a_server_that_does_not_stop_keeps_its_claim_until_it_does() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    for fault in [
        HardwareFault::Refuses,
        HardwareFault::Late {
            after: Duration::ZERO,
            succeeds: false,
        },
    ] {
        world.lock().mps_fault = Some(fault);
        drop(world.unprepare(&executor, &uid("a")));
        if !world.lock().mps.contains_key(&gpu) {
            // Tried again within the call.
            is_plain(&world, &gpu);
            world.prepare(&executor, &share("a")).unwrap();
            continue;
        }
        assert_eq!(
            mode(&world, &gpu),
            ComputeMode::ExclusiveProcess,
            "not before it"
        );
        executor.reconcile(&world.view());
        is_plain(&world, &gpu);
        world.prepare(&executor, &share("a")).unwrap();
    }
}

#[test]
fn other_slots_begin_with_the_next_server() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    slots(&executor, &gpu, 2);
    world.prepare(&executor, &share("b")).unwrap();
    assert_eq!(
        world.lock().mps[&gpu].slots,
        Some(4),
        "that of its neighbour"
    );
    for name in ["a", "b"] {
        world.unprepare(&executor, &uid(name)).unwrap();
    }
    for name in ["c", "d"] {
        world.prepare(&executor, &share(name)).unwrap();
    }
    assert_eq!(world.lock().mps[&gpu].slots, Some(2));
    let error = world.prepare(&executor, &share("e")).unwrap_err();
    assert_eq!(error.category(), "mps-full");
}

#[test]
fn shares_by_mps_exclude_every_other_use_of_the_gpu() {
    let (world, executor, _) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    world.lock().api.insert(uid("a"), share("a"));
    for device in ["gpu-0", "gpu-0-ts", "gpu-0-mig-1g10gb-19-0"] {
        let other = claim_of("o", &[device], "t1");
        let error = world.prepare(&executor, &other).unwrap_err();
        assert_eq!(error.category(), "mode-conflict", "{device}");
    }
}

#[test]
fn what_cannot_be_had_is_refused_with_the_reason() {
    let refused = |claim: &Claim, ability| {
        let (world, executor, gpu) = setup();
        let mut inventory = (*world.lock().inventory.clone().unwrap()).clone();
        inventory.system.mps = ability;
        world.lock().inventory = Some(inventory.into());
        let error = world.prepare(&executor, claim).unwrap_err();
        is_plain(&world, &gpu);
        (error.category().to_owned(), divvy_model::chain(&error))
    };
    let able = MpsAbility::Available(MpsProtocol::V2);
    let of_two = {
        let mut claim = claim_of("two", &["gpu-0-mps", "gpu-1-mps"], "t1");
        for (n, result) in claim.allocation.results.iter_mut().enumerate() {
            result.share_id = Some(format!("s{n}"));
        }
        claim
    };
    let own_of_two = owned("two", &["gpu-0", "gpu-1"], &[], &json!({}));
    let with_slice = {
        let mut claim = own("a");
        claim.configs[0].parameters["timeSlicing"] = json!({"interval": "Short"});
        claim
    };
    for (claim, ability, category, words) in [
        (
            own("a"),
            MpsAbility::SwitchedOff,
            "mps-unavailable",
            "its config asks for an MPS server, which cannot be had here: MPS is switched off",
        ),
        (
            own("a"),
            MpsAbility::OldDriver,
            "mps-unavailable",
            "remove mps from the GpuConfig",
        ),
        (
            own_of_two,
            able,
            "mps-targets",
            "its claim has MPS on device gpu-0 already",
        ),
        (
            with_slice,
            able,
            "bad-config",
            "field \"mps\" and field \"timeSlicing\" exclude each other",
        ),
        (
            share("a"),
            MpsAbility::NoProgram,
            "mps-unavailable",
            "lacks nvidia-cuda-mps-control",
        ),
        (
            share("a"),
            MpsAbility::OldDriver,
            "mps-unavailable",
            "older than R535",
        ),
        (
            share("a"),
            MpsAbility::SwitchedOff,
            "mps-unavailable",
            "mps.enabled=false",
        ),
        (
            with_config("a", json!({"limits": {"cores": 0}})),
            able,
            "bad-config",
            "\"limits.cores\" is \"0\", expected a whole number from 1 to 100",
        ),
        (
            with_config("a", json!({"limits": {"cores": 50}})),
            able,
            "mps-unequal",
            "each of 4 equal slots has 25 percent of the threads and 4096Mi",
        ),
        (
            with_config("a", json!({"limits": {"memory": "10Gi"}})),
            able,
            "mps-unequal",
            "limits it to memory 10240Mi",
        ),
        (of_two, able, "mps-targets", "device gpu-1-mps"),
    ] {
        let (found, text) = refused(&claim, ability);
        assert_eq!(found, category, "{text}");
        assert!(text.contains(words), "{text}");
    }
    let (world, executor, _) = setup();
    let equal = json!({"limits": {"cores": 25, "memory": "4Gi"}, "priority": "BelowNormal"});
    world.prepare(&executor, &with_config("a", equal)).unwrap();
}

#[test]
fn a_gpu_with_mig_mode_on_by_hand_is_refused_and_left_alone() {
    let world = mig_world("a100-40x1", 1);
    let gpu = world.gpu(0);
    let executor = world.start();
    slots(&executor, &gpu, 4);
    sim(&world).set_mig_mode(&gpu, true).ok();
    sim(&world).edit(divvy_gpu_sim::Engine::reboot);
    world.changed(&gpu).unwrap();
    for claim in [share("a"), own("b")] {
        let error = world.prepare(&executor, &claim).unwrap_err();
        assert_eq!(error.category(), "wrong-mode");
        assert_eq!(world.lock().mps.get(&gpu), None);
    }
}

#[test]
fn a_round_leaves_a_gpu_that_a_call_is_working_on() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    world.lock().mps.clear();
    world.lock().busy.insert(LockName::Gpu(gpu.clone()));
    let report = executor.reconcile(&world.view());
    assert!(report.left_out);
    assert!(
        !report
            .events
            .iter()
            .any(|e| matches!(e, Event::Failed { .. }))
    );
    assert_eq!(world.lock().mps.get(&gpu), None);
}

/// The mode was set otherwise under a claim that lingers; what it needs, it has again.
#[test]
fn a_round_starts_no_server_that_programs_can_get_round() {
    let (world, executor, gpu) = setup();
    world.prepare(&executor, &share("a")).unwrap();
    let process = ProcessOnGpu {
        pid: 7,
        gpu_instance: None,
        pod: Some("pod-a".to_owned()),
    };
    world.lock().processes.insert(gpu.clone(), vec![process]);
    let done = world.unprepare(&executor, &uid("a")).unwrap();
    assert!(matches!(done, Unprepared::Lingering(_)), "{done:?}");
    world.lock().mps.clear();
    world.lock().mps_fault = Some(HardwareFault::Refuses);
    world.prepare(&executor, &share("a")).unwrap_err();
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    sim(&world)
        .set_compute_mode(&gpu, ComputeMode::Default)
        .unwrap();
    executor.reconcile(&world.view());
    assert!(world.lock().mps.contains_key(&gpu));
    assert_eq!(mode(&world, &gpu), ComputeMode::ExclusiveProcess);
    world.lock().processes.clear();
    executor.reconcile(&world.view());
    assert_eq!(mode(&world, &gpu), ComputeMode::Default);
}
