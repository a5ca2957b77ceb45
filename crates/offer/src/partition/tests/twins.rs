//! Shares of partitions, time-sliced and by MPS, beside the partitions.

use divvy_api::names::capacity as cap;
use divvy_model::{GpuTarget, MpsAbility, MpsProtocol, MpsServer, ShareUnit, Target};

use super::*;

const TWINS: [Form; 2] = [Form::PARTITIONS, Form::SHARED_PARTITIONS];
const PLAIN: &str = "gpu-0-mig-3g40gb-9-4";
const TWIN: &str = "gpu-0-mig-3g40gb-9-4-ts";

fn twins(spec: &str) -> Node {
    Node::only(spec, &TWINS).mig_on()
}

#[test]
fn the_shares_of_a_partition_are_it_for_many_claims() {
    let mut node = twins("h100x1");
    node.rule(|rules| rules.shares.slots = 4);
    let pool = node.carve(None).pool;
    let (plain, twin) = (device(&pool, PLAIN), device(&pool, TWIN));
    let mut expected = plain.attributes.clone();
    for (name, value) in [
        ("type", "mig-share"),
        ("sharing", "time-slicing"),
        ("isolation", "none"),
        ("memoryEnforcement", "none"),
        ("computeEnforcement", "none"),
        ("faultDomain", "partition"),
    ] {
        expected.insert(name.into(), AttributeValue::String(value.to_owned()));
    }
    expected.insert("memoryLimitMaxPercent".into(), AttributeValue::Int(0));
    assert_eq!(twin.attributes, expected);
    assert!(twin.allow_multiple && !plain.allow_multiple);
    // Both draw the same, so that only one of them is had.
    assert!(!plain.consumes.is_empty());
    assert_eq!(twin.consumes, plain.consumes);
    let totals: Vec<_> = twin
        .capacity
        .iter()
        .map(|(name, capacity)| (name.as_ref(), capacity.value))
        .collect();
    let memory = plain.capacity[cap::MEMORY].value;
    assert_eq!(
        totals,
        [
            (cap::CORES, Amount::Count(100)),
            (cap::MEMORY, memory),
            (cap::SLOTS, Amount::Count(4))
        ]
    );
    assert!(twin.capacity.values().all(|part| part.policy.is_some()));
}

#[test]
fn by_percent_the_memory_is_that_of_the_partition() {
    let mut node = twins("h100x1");
    // Memory that is reserved on the GPU is not taken from each of its partitions.
    node.rule(|rules| {
        rules.shares.unit = ShareUnit::Percent;
        rules.held_back_mib = 79_000;
    });
    let pool = node.carve(None).pool;
    let (plain, twin) = (device(&pool, PLAIN), device(&pool, TWIN));
    let mib = i64::try_from(plain.capacity[cap::MEMORY].value.value() >> 20).unwrap();
    assert_eq!(twin.attributes["memoryMiB"], AttributeValue::Int(mib));
    let given: Vec<_> = twin.capacity.keys().map(AsRef::as_ref).collect();
    assert_eq!(given, [cap::PERCENT]);
}

#[test]
fn eight_gpus_with_shares_of_all_partitions_fit_the_api() {
    let mut modes = Form::OFFERED.to_vec();
    modes.push(Form::SHARED_PARTITIONS);
    let pool = Node::only("h100x8", &modes).carve(None).pool;
    assert_eq!(crate::validate(&pool), Ok(()));
    let all = names(&pool);
    let is_twin = |name: &&str| name.contains("-mig-") && name.ends_with("-ts");
    let is_plain = |name: &&str| name.contains("-mig-") && !name.ends_with("-ts");
    assert_eq!(all.iter().copied().filter(|n| is_twin(n)).count(), 8 * 18);
    // A claim for a partition passes none of the shares.
    let last_plain = all.iter().rposition(is_plain);
    let first_twin = all.iter().position(is_twin);
    assert!(last_plain < first_twin);
}

#[test]
fn shares_of_a_partition_stay_for_their_holder_when_the_rule_goes() {
    let mut node = twins("h100x1");
    node.hold(TWIN);
    let before = node.carve(None).pool;
    assert_eq!(blocked(&before), [""; 0]);
    node.rule(|rules| rules.modes = Modes::Only([Form::PARTITIONS].into()));
    let carved = node.carve(Some(&before));
    assert_eq!(blocked(&carved.pool), [TWIN]);
    assert_eq!(
        device(&carved.pool, TWIN).consumes,
        device(&carved.pool, PLAIN).consumes
    );
    let is_twin = |name: &&str| name.ends_with("-ts");
    assert_eq!(names(&carved.pool).into_iter().filter(is_twin).count(), 1);
}

#[test]
fn where_the_scheduler_is_old_partitions_have_no_shares() {
    let carved = twins("h100x1").server(35, 8).carve(None);
    assert!(
        names(&carved.pool)
            .iter()
            .all(|name| !name.ends_with("-ts"))
    );
    assert!(carved.pool.device(&PLAIN.parse().unwrap()).is_some());
    assert_eq!(findings(&carved).len(), 1, "{:?}", findings(&carved));
}

/// Partitions in MPS shares too, on a node whose driver has this protocol.
fn by_mps(spec: &str, protocol: MpsProtocol) -> Node {
    let modes = [
        Form::PARTITIONS,
        Form::SHARED_PARTITIONS,
        Form::MPS_PARTITIONS,
    ];
    let mut node = Node::only(spec, &modes).mig_on();
    node.inventory.system.mps = MpsAbility::Available(protocol);
    node.rule(|rules| rules.shares.slots = 4);
    node
}

const BY_MPS: &str = "gpu-0-mig-3g40gb-9-4-mps";

/// Whatever the driver has for whole GPUs: namespaces of partitions are not documented.
#[test]
fn mps_shares_of_a_partition_are_equal_slots_with_each_driver() {
    for protocol in [MpsProtocol::V2, MpsProtocol::V3] {
        let pool = by_mps("h100x1", protocol).carve(None).pool;
        let (plain, twin) = (device(&pool, PLAIN), device(&pool, BY_MPS));
        let text = |name: &str| twin.attributes[name].clone();
        for (name, value) in [
            ("type", "mig-mps"),
            ("sharing", "mps"),
            ("memoryEnforcement", "none"),
            ("computeEnforcement", "mps-server"),
            ("faultDomain", "partition"),
            ("profile", "3g.40gb"),
        ] {
            assert_eq!(text(name), AttributeValue::String(value.to_owned()));
        }
        let mib = plain.capacity[cap::MEMORY].value.value() >> 20;
        let slot = i64::try_from(mib / 4).unwrap();
        assert_eq!(text("slotMemoryMiB"), AttributeValue::Int(slot));
        assert_eq!(text("slotCores"), AttributeValue::Int(25));
        let given: Vec<_> = twin.capacity.iter().collect();
        let [(name, slots)] = given.as_slice() else {
            panic!("{given:?}");
        };
        assert_eq!((name.as_ref(), slots.value), (cap::SLOTS, Amount::Count(4)));
        assert!(twin.allow_multiple);
        assert_eq!(twin.consumes, plain.consumes);
        // The time-sliced shares of the same place are there too.
        assert_eq!(device(&pool, TWIN).consumes, plain.consumes);
    }
}

#[test]
fn the_slots_of_a_server_in_a_partition_are_published_while_it_runs() {
    let node = by_mps("h100x1", MpsProtocol::V2);
    let running = |place: &str, server| {
        let target = GpuTarget {
            gpu: node.uuid(0),
            target: Target::Partition(place.parse().unwrap()),
        };
        BTreeMap::from([(target, server)])
    };
    let slots = |servers: &BTreeMap<GpuTarget, MpsServer>, name: &str| {
        let pool = node.carve_beside(servers);
        device(&pool, name).capacity[cap::SLOTS].value
    };
    let two = running("9@4+4", MpsServer::equal(2, Some(40_000)).unwrap());
    assert_eq!(slots(&two, BY_MPS), Amount::Count(2));
    assert_eq!(slots(&two, "gpu-0-mig-3g40gb-9-0-mps"), Amount::Count(4));
    // The server of a claim that has the partition alone says nothing about slots.
    let alone = running("9@4+4", MpsServer::of_claim(Some(7), None));
    assert_eq!(slots(&alone, BY_MPS), Amount::Count(4));
}

#[test]
fn partitions_have_no_mps_shares_where_the_node_lacks_mps() {
    let mut node = by_mps("h100x1", MpsProtocol::V2);
    node.inventory.system.mps = MpsAbility::SwitchedOff;
    let carved = node.carve(None);
    assert!(
        names(&carved.pool)
            .iter()
            .all(|name| !name.ends_with("-mps"))
    );
    assert!(carved.pool.device(&TWIN.parse().unwrap()).is_some());
    let said = findings(&carved).join("; ");
    assert!(said.contains("mps.enabled=false"), "{said}");
}

#[test]
fn eight_gpus_with_partitions_shared_in_both_ways_fit_the_api() {
    let mut modes = Form::OFFERED.to_vec();
    modes.extend([Form::SHARED_PARTITIONS, Form::MPS_PARTITIONS]);
    let mut node = Node::only("h100x8", &modes);
    node.inventory.system.mps = MpsAbility::Available(MpsProtocol::V2);
    let pool = node.carve(None).pool;
    assert_eq!(crate::validate(&pool), Ok(()));
    let all = names(&pool);
    let twins = all.iter().filter(|name| name.ends_with("-mps"));
    assert_eq!(twins.count(), 8 * 18);
}
