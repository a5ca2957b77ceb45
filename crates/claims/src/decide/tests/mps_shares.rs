//! MPS shares: the place that each gets at its server, and when it gets none.

use divvy_model::{
    MpsAbility, MpsFault, MpsNamespace, MpsNamespaceName, MpsPriority, MpsProtocol, MpsServer,
};
use serde_json::{Value, json};

use super::shares::share;
use super::*;
use crate::{AllocatedDevice, ConfigEntry, ConfigSource, MpsSlot};

const DEVICE: &str = "gpu-0-mps";

/// The result of a share that was granted these amounts.
fn granted(request: &str, id: &str, amounts: &[(&str, &str)]) -> AllocatedDevice {
    let amounts = amounts.iter();
    AllocatedDevice {
        consumed_capacity: amounts
            .map(|(name, amount)| ((*name).to_owned(), (*amount).to_owned()))
            .collect(),
        ..share(request, DEVICE, id)
    }
}

/// A claim of one share, with this config.
fn of(name: &str, amounts: &[(&str, &str)], config: &Value) -> Claim {
    let mut parameters = json!({"apiVersion": "divvy.dev/v1beta1", "kind": "MpsConfig"});
    for (key, value) in config.as_object().unwrap() {
        parameters[key] = value.clone();
    }
    let entry = ConfigEntry {
        source: ConfigSource::Claim,
        requests: Vec::new(),
        driver: "gpu.divvy.dev".to_owned(),
        parameters,
    };
    Claim {
        configs: vec![entry],
        ..claim(name, vec![granted("main", name, amounts)])
    }
}

fn plain(name: &str) -> Claim {
    of(name, &[("slots", "1")], &json!({}))
}

/// A node with MPS of this protocol, whose rules ask for this server.
fn node(protocol: MpsProtocol, server: Option<MpsServer>) -> World {
    let mut world = World::new();
    world.inventory.system.mps = MpsAbility::Available(protocol);
    let mut state = GpuState::default().in_boot(&world.boot);
    state.grant.mps = server;
    world.gpus.insert(gpu(0), Arc::new(Stored::Fine(state)));
    world
}

/// A node with equal slots, each of 20 GiB where there are four.
fn slots(count: u32) -> World {
    node(MpsProtocol::V2, MpsServer::equal(count, Some(80 << 10)))
}

fn namespaces() -> World {
    node(MpsProtocol::V3, Some(MpsServer::NAMESPACES))
}

/// Changes the state of the GPU.
fn change(world: &mut World, change: impl FnOnce(&mut GpuState)) {
    let Some(Stored::Fine(state)) = world.gpus.get(&gpu(0)).map(Arc::as_ref) else {
        panic!("no state")
    };
    let mut state = state.clone();
    change(&mut state);
    world.gpus.insert(gpu(0), Arc::new(Stored::Fine(state)));
}

/// Prepares a claim.
fn hold(world: &mut World, claim: &Claim) -> Vec<RecordedDevice> {
    let devices = plan(world.decide(claim)).devices;
    let record = Record::new(claim, &world.boot, devices.clone(), Phase::Prepared);
    world.keep(record);
    devices
}

fn place(world: &World, claim: &Claim) -> MpsSlot {
    plan(world.decide(claim)).devices[0].mps.unwrap()
}

#[test]
fn a_slot_is_of_the_server_that_others_have_or_that_rules_ask_for() {
    let mut world = slots(4);
    let four = MpsServer::equal(4, Some(80 << 10)).unwrap();
    assert_eq!(place(&world, &plain("a")).server, four);
    hold(&mut world, &plain("a"));
    // Other rules count from the next server on.
    let two = MpsServer::equal(2, Some(80 << 10));
    change(&mut world, |state| state.grant.mps = two);
    assert_eq!(place(&world, &plain("b")).server, four);
    // What runs counts where it has slots, and the server of a claim alone has none.
    let eight = MpsServer::equal(8, Some(80 << 10)).unwrap();
    change(&mut world, |state| {
        state.note_server(Target::Gpu, eight, true);
    });
    assert_eq!(place(&world, &plain("b")).server, eight);
    let own = MpsServer::of_claim(None, None);
    change(&mut world, |state| {
        state.note_server(Target::Gpu, own, true);
    });
    assert_eq!(place(&world, &plain("b")).server, four);
    // Without rules nothing is started.
    let (category, text) = node(MpsProtocol::V2, None).refusal(&plain("a"));
    assert_eq!(category, "mps-unavailable");
    assert!(
        text.contains("no GpuPolicy has offered its GPU in MPS shares"),
        "{text}"
    );
}

#[test]
fn limits_of_a_slot_are_those_of_its_server_or_none() {
    let with = |limits: Value| {
        let config = json!({"limits": limits, "priority": "BelowNormal"});
        of("a", &[("slots", "1")], &config)
    };
    for limits in [
        json!({}),
        json!({"cores": 25}),
        json!({"memory": "20Gi"}),
        json!({"cores": 25, "memory": "20Gi"}),
    ] {
        let slot = place(&slots(4), &with(limits));
        assert_eq!(slot.priority, Some(MpsPriority::BelowNormal));
        assert_eq!(slot.namespace, None);
    }
    for (limits, words) in [
        (json!({"cores": 24}), "limits it to cores 24"),
        (json!({"cores": 26}), "limits it to cores 26"),
        (json!({"memory": "19Gi"}), "limits it to memory 19456Mi"),
        (json!({"cores": 25, "memory": "21Gi"}), "memory 21504Mi"),
    ] {
        let (category, text) = slots(4).refusal(&with(limits));
        assert_eq!(category, "mps-unequal");
        assert!(text.contains(words), "{text}");
        let has = "4 equal slots has 25 percent of the threads and 20480Mi";
        assert!(text.contains(has), "{text}");
    }
    // On a board that shares its memory with the processor.
    let world = node(MpsProtocol::V2, MpsServer::equal(4, None));
    let (_, text) = world.refusal(&with(json!({"cores": 24})));
    let has = "4 equal slots has 25 percent of the threads (";
    assert!(text.contains(has), "{text}");
}

#[test]
fn as_many_claims_have_a_slot_as_there_are() {
    let mut world = slots(2);
    hold(&mut world, &plain("a"));
    let b = hold(&mut world, &plain("b"));
    assert_eq!(world.refusal(&plain("c")).0, "mps-full");
    // A claim that is let go leaves its slot. One of another GPU, or with its GPU alone, has none
    // here.
    world.records.remove(&"b".parse().unwrap());
    plan(world.decide(&plain("c")));
    for change in [
        (|device| device.gpu = gpu(1)) as fn(&mut RecordedDevice),
        |device| device.sharing = Sharing::Exclusive,
    ] {
        let mut devices = b.clone();
        change(&mut devices[0]);
        let record = Record::new(&plain("b"), &world.boot, devices, Phase::Prepared);
        let mut world = slots(2);
        hold(&mut world, &plain("a"));
        let stored = Arc::new(Stored::Fine(record));
        world.records.insert("b".parse().unwrap(), stored);
        let seen = world.seen();
        let devices = plan(slots(2).decide(&plain("c"))).devices;
        servable(&plain("c"), &devices, &seen, false).unwrap();
    }
    // Each result of a claim takes one.
    let mut two = plain("two");
    let second = granted("second", "other", &[("slots", "1")]);
    two.allocation.results.push(second);
    plan(slots(2).decide(&two));
    assert_eq!(slots(1).refusal(&two).0, "mps-full");
    let mut world = slots(2);
    hold(&mut world, &plain("a"));
    assert_eq!(world.refusal(&two).0, "mps-full");
}

#[test]
fn a_namespace_has_the_cores_and_memory_that_were_granted_or_limits_above() {
    let name = MpsNamespaceName::of(&"a".parse().unwrap(), &DEVICE.parse().unwrap());
    let thirty = [("cores", "30"), ("memory", "10Gi"), ("slots", "1")];
    let rest = [("memory", "10Gi"), ("slots", "1")];
    for (amounts, config, cores) in [
        (&thirty[..], json!({}), 30),
        (&thirty, json!({"limits": {"cores": 30}}), 30),
        (&thirty, json!({"limits": {"cores": 31}}), 31),
        (&rest, json!({}), 100),
        (&rest, json!({"limits": {"cores": 100}}), 100),
    ] {
        let slot = place(&namespaces(), &of("a", amounts, &config));
        assert_eq!(slot.server, MpsServer::NAMESPACES);
        let memory_mib = Some(10 << 10);
        let expected = MpsNamespace {
            name,
            cores,
            memory_mib,
        };
        assert_eq!(slot.namespace, Some(expected), "{amounts:?} {config}");
    }
    for (amounts, cores) in [(&thirty[..], 29), (&rest, 99)] {
        let claim = of("a", amounts, &json!({"limits": {"cores": cores}}));
        assert_eq!(namespaces().refusal(&claim).0, "bad-limit");
    }
}

/// A program can use one namespace.
#[test]
fn shares_of_a_claim_of_one_gpu_have_a_namespace_together() {
    let amounts = |cores, memory| [("cores", cores), ("memory", memory), ("slots", "1")];
    let mut two = of("a", &amounts("30", "10Gi"), &json!({}));
    let results = &mut two.allocation.results;
    results.push(granted("second", "s2", &amounts("45", "2Gi")));
    for device in plan(namespaces().decide(&two)).devices {
        let namespace = device.mps.unwrap().namespace.unwrap();
        assert_eq!(
            (namespace.cores, namespace.memory_mib),
            (75, Some(12 << 10))
        );
    }
    let results = &mut two.allocation.results;
    results.push(granted("third", "s3", &amounts("45", "512Ki")));
    for device in plan(namespaces().decide(&two)).devices {
        let namespace = device.mps.unwrap().namespace.unwrap();
        // Less than a MiB counts as one, and more than the GPU has is all of it.
        let all = (100, Some((12 << 10) + 1));
        assert_eq!((namespace.cores, namespace.memory_mib), all);
    }
}

#[test]
fn a_claim_has_mps_of_one_gpu() {
    let mut world = slots(4);
    let other = world.gpus[&gpu(0)].clone();
    world.gpus.insert(gpu(1), other);
    let mut two = plain("a");
    let second = AllocatedDevice {
        device: "gpu-1-mps".parse().unwrap(),
        ..granted("second", "s2", &[("slots", "1")])
    };
    two.allocation.results.push(second);
    assert_eq!(world.refusal(&two).0, "mps-targets");
    // A share in time beside it is not served by it.
    let mut beside = plain("a");
    beside.configs.clear();
    let second = share("second", "gpu-1-ts", "s2");
    beside.allocation.results.push(second);
    assert_eq!(plan(world.decide(&beside)).devices.len(), 2);
}

/// Its container could not connect. The first claim gets another server, and one of before a boot
/// is no more.
#[test]
fn no_claim_shares_a_server_that_is_wedged() {
    let mut world = slots(4);
    hold(&mut world, &plain("a"));
    let server = MpsServer::equal(4, Some(80 << 10)).unwrap();
    let wedge = |state: &mut GpuState| {
        state.note_server(Target::Gpu, server, true);
        state.mps.get_mut(&Target::Gpu).unwrap().wedged = Some(MpsFault::NoAnswer);
    };
    change(&mut world, wedge);
    let (category, text) = world.refusal(&plain("b"));
    assert_eq!(category, "mps-wedged");
    assert!(
        text.contains("does not answer, and no program can connect to it"),
        "{text}"
    );
    assert!(matches!(world.decide(&plain("a")), Decision::Ready(_)));
    change(&mut world, |state| {
        state.boot = Some("boot-0".parse().unwrap());
    });
    plan(world.decide(&plain("b")));
    let mut alone = slots(4);
    change(&mut alone, wedge);
    plan(alone.decide(&plain("b")));
}

/// A claim keeps the protocol that its server has.
#[test]
fn another_protocol_than_that_of_the_node_is_refused() {
    let mut world = slots(4);
    let devices = hold(&mut world, &plain("a"));
    let seen = |protocol| {
        let mut world = slots(4);
        world.inventory.system.mps = MpsAbility::Available(protocol);
        world
    };
    let same = seen(MpsProtocol::V2);
    servable(&plain("a"), &devices, &same.seen(), true).unwrap();
    let other = seen(MpsProtocol::V3);
    let refused = servable(&plain("a"), &devices, &other.seen(), true).unwrap_err();
    assert!(
        refused.to_string().contains("another protocol of MPS"),
        "{refused}"
    );
}
