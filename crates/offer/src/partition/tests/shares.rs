//! Time-sliced shares, and GPUs that are offered in several modes.

use divvy_api::names::capacity as cap;
use divvy_model::{
    GpuTarget, MemoryCaps, MpsAbility, MpsProtocol, MpsServer, ShareUnit, TimeSlice,
};

use super::*;
use crate::{Allowed, OneMode, RequestPolicy, ShareRules};

const EVERYTHING: [Form; 3] = Form::OFFERED;

fn parts(total: Amount, default: Amount, min: Amount, step: Amount) -> Capacity {
    let allowed = Allowed::Range {
        min,
        max: None,
        step: Some(step),
    };
    Capacity {
        value: total,
        policy: Some(RequestPolicy { default, allowed }),
    }
}

/// Names of devices that nothing keeps claims away from.
fn open(pool: &Pool) -> Vec<&str> {
    let blocked = blocked(pool);
    names(pool)
        .into_iter()
        .filter(|name| !blocked.contains(name))
        .collect()
}

/// The whole GPU and MPS shares of it, on a node that can.
fn by_mps(spec: &str) -> Node {
    let mut node = Node::only(spec, &[Form::WHOLE, Form::MPS]);
    node.inventory.system.mps = MpsAbility::Available(MpsProtocol::V2);
    node.rule(|rules| {
        rules.shares.slots = 4;
        rules.held_back_mib = 1559;
    });
    node
}

#[test]
fn an_mps_share_gives_out_equal_slots_and_nothing_else() {
    let pool = by_mps("h100x1").carve(None).pool;
    assert_eq!(open(&pool), ["gpu-0", "gpu-0-mps"]);
    let whole = device(&pool, "gpu-0");
    let share = device(&pool, "gpu-0-mps");
    let mut expected = Device::new("gpu-0-mps".parse().unwrap());
    expected.attributes.clone_from(&whole.attributes);
    expected.attributes.remove("uuid");
    let said = [
        ("type", "gpu-mps"),
        ("sharing", "mps"),
        ("isolation", "none"),
        ("memoryEnforcement", "none"),
        ("computeEnforcement", "mps-server"),
        ("faultDomain", "gpu"),
    ];
    for (name, value) in said {
        let value = AttributeValue::String(value.to_owned());
        expected.attributes.insert(name.into(), value);
    }
    for (name, value) in [("slotMemoryMiB", 20_000), ("slotCores", 25)] {
        let value = AttributeValue::Int(value);
        expected.attributes.insert(name.into(), value);
    }
    let one = Amount::Count(1);
    let slots = Capacity {
        value: Amount::Count(4),
        policy: Some(RequestPolicy {
            default: one,
            allowed: Allowed::Values(vec![one]),
        }),
    };
    expected.capacity = [(cap::SLOTS.into(), slots)].into();
    expected.allow_multiple = true;
    // The mode lock: all of the GPU, as the whole one draws it.
    expected.consumes.clone_from(&whole.consumes);
    assert_eq!(share, &expected);
    assert!(!share.consumes.is_empty());
}

/// Servers with namespaces have a limit for each claim, so that a share has any size.
#[test]
fn with_namespaces_mps_shares_are_given_out_as_time_sliced_ones() {
    for (unit, capacities) in [
        (ShareUnit::Amounts, &["cores", "memory", "slots"][..]),
        (ShareUnit::Percent, &["percent"]),
    ] {
        let asked = [Form::TIME_SLICED, Form::MPS];
        let mut node = Node::only("h100x1", &asked);
        node.inventory.system.mps = MpsAbility::Available(MpsProtocol::V3);
        node.inventory.system.memory_caps = MemoryCaps::Available;
        node.rule(|rules| rules.shares.unit = unit);
        let pool = node.carve(None).pool;
        assert_eq!(open(&pool), ["gpu-0-ts", "gpu-0-mps"]);
        let sliced = device(&pool, "gpu-0-ts");
        let mut expected = Device::new("gpu-0-mps".parse().unwrap());
        expected.clone_from(sliced);
        expected.name = "gpu-0-mps".parse().unwrap();
        expected.attributes.remove("timeSlice");
        let said = [
            ("type", "gpu-mps"),
            ("sharing", "mps"),
            ("memoryEnforcement", "cgroup"),
            ("computeEnforcement", "mps-server"),
        ];
        for (name, value) in said {
            let value = AttributeValue::String(value.to_owned());
            expected.attributes.insert(name.into(), value);
        }
        assert_eq!(device(&pool, "gpu-0-mps"), &expected);
        let found: Vec<_> = expected.capacity.keys().map(AsRef::as_ref).collect();
        assert_eq!(found, capacities);
        // A server takes no more clients.
        node.rule(|rules| rules.shares.slots = 1000);
        let pool = node.carve(None).pool;
        if let Some(slots) = device(&pool, "gpu-0-mps").capacity.get(cap::SLOTS) {
            assert_eq!(slots.value, Amount::Count(48));
        }
    }
}

/// Amounts in two units cannot be compared, by whatever sharing they were given out.
#[test]
fn no_mps_share_is_given_out_while_others_have_another_unit() {
    let mut node = by_mps("h100x1");
    let units = BTreeMap::from([(node.uuid(0), ShareUnit::Percent)]);
    for (protocol, offered) in [(MpsProtocol::V2, true), (MpsProtocol::V3, false)] {
        node.inventory.system.mps = MpsAbility::Available(protocol);
        let input = Input {
            share_units: &units,
            ..node.input()
        };
        let pool = carve(&input).pool;
        assert_eq!(open(&pool).contains(&"gpu-0-mps"), offered, "{protocol:?}");
    }
}

#[test]
fn while_an_mps_server_runs_its_slots_are_published() {
    let node = by_mps("h100x1");
    let servers = BTreeMap::from([(
        GpuTarget::whole(node.uuid(0)),
        MpsServer::equal(2, Some(80_000)).unwrap(),
    )]);
    let pool = node.carve_beside(&servers);
    let slots = &device(&pool, "gpu-0-mps").capacity[cap::SLOTS];
    assert_eq!(slots.value, Amount::Count(2));
}

/// The server of a claim that has the GPU alone says nothing about the slots of the next.
#[test]
fn the_server_of_one_claim_changes_nothing_that_is_published() {
    let node = by_mps("h100x1");
    let server = MpsServer::of_claim(Some(7), Some(1 << 30));
    let servers = BTreeMap::from([(GpuTarget::whole(node.uuid(0)), server)]);
    let pool = node.carve_beside(&servers);
    assert_eq!(pool, node.carve_beside(&BTreeMap::new()));
}

#[test]
fn an_mps_share_that_cannot_be_had_is_left_out_with_the_reason() {
    let findings = |node: &Node| {
        let carved = node.carve(None);
        assert!(!names(&carved.pool).contains(&"gpu-0-mps"));
        let said = carved.findings.iter().map(ToString::to_string);
        said.collect::<Vec<_>>().join("; ")
    };
    for (ability, words) in [
        (MpsAbility::SwitchedOff, "mps.enabled=false"),
        (MpsAbility::NoProgram, "lacks nvidia-cuda-mps-control"),
        (MpsAbility::OldDriver, "older than R535"),
    ] {
        let mut node = by_mps("h100x1");
        node.inventory.system.mps = ability;
        let said = findings(&node);
        assert!(said.contains("is not offered in MPS shares"), "{said}");
        assert!(said.contains(words), "{said}");
    }
    // MIG mode that only a reset turns off, a board of before, and a rule that does not name it.
    assert!(!findings(&by_mps("a100-40x1").mig_on()).is_empty());
    let mut everything = Node::everything("h100x1");
    everything.inventory.system.mps = MpsAbility::Available(MpsProtocol::V2);
    assert_eq!(findings(&everything), "");
    // A claim that has it keeps it published, closed to others.
    let mut held = by_mps("h100x1");
    held.hold("gpu-0-mps");
    held.inventory.system.mps = MpsAbility::NoProgram;
    let pool = held.carve(None).pool;
    assert!(names(&pool).contains(&"gpu-0-mps"));
    assert!(blocked(&pool).contains(&"gpu-0-mps"));
}

#[test]
fn a_share_says_what_its_gpu_is_and_gives_it_out_in_parts() {
    let node = Node::everything("h100x1");
    let pool = node.carve(None).pool;
    let whole = device(&pool, "gpu-0");
    let mut expected = Device::new("gpu-0-ts".parse().unwrap());
    expected.attributes.clone_from(&whole.attributes);
    expected.attributes.remove("uuid");
    let said = [
        ("type", "gpu-share"),
        ("sharing", "time-slicing"),
        ("isolation", "none"),
        ("memoryEnforcement", "none"),
        ("computeEnforcement", "none"),
        ("faultDomain", "gpu"),
        ("timeSlice", "Default"),
    ];
    for (name, value) in said {
        expected
            .attributes
            .insert(name.into(), AttributeValue::String(value.to_owned()));
    }
    let no_limits = AttributeValue::Int(0);
    expected
        .attributes
        .insert("memoryLimitMaxPercent".into(), no_limits);
    let mib = |n: u64| Amount::Bytes(n * MIB);
    let count = Amount::Count;
    expected.capacity = [
        (cap::MEMORY, parts(mib(81559), mib(5097), mib(256), mib(1))),
        (cap::CORES, parts(count(100), count(6), count(0), count(1))),
        (cap::SLOTS, parts(count(16), count(1), count(1), count(1))),
    ]
    .map(|(name, capacity)| (name.into(), capacity))
    .into();
    expected.consumes.clone_from(&whole.consumes);
    expected.allow_multiple = true;
    assert_eq!(device(&pool, "gpu-0-ts"), &expected);
    assert_eq!(
        sets(&pool)[0].counters,
        expected.consumes[0].counters,
        "all of the GPU, charged once"
    );
}

#[test]
fn a_share_says_the_time_slice_of_its_policy() {
    let mut node = Node::everything("h100x1");
    node.rule(|rules| rules.shares.time_slice = Some(TimeSlice::Long));
    let pool = node.carve(None).pool;
    let said = &device(&pool, "gpu-0-ts").attributes["timeSlice"];
    assert_eq!(*said, AttributeValue::String("Long".to_owned()));
    assert_eq!(device(&pool, "gpu-0").attributes.get("timeSlice"), None);
}

#[test]
fn rules_say_how_many_shares_there_are_and_how_large() {
    let with = |shares: ShareRules, held_back_mib: u64| {
        let mut node = Node::everything("l4x1");
        node.rule(|rules| {
            rules.shares = shares;
            rules.held_back_mib = held_back_mib;
        });
        let carved = node.carve(None);
        let share = carved.pool.device(&"gpu-0-ts".parse().unwrap());
        (
            share.map(|share| share.capacity.clone()),
            carved.findings.len(),
        )
    };
    let mib = |n: u64| Amount::Bytes(n * MIB);
    let total = mib(23034);
    let (capacity, _) = with(
        ShareRules {
            slots: 4,
            smallest_mib: Some(100),
            smallest_cores: 10,
            ..ShareRules::default()
        },
        0,
    );
    let capacity = capacity.unwrap();
    assert_eq!(
        capacity[cap::MEMORY],
        parts(total, mib(5758), mib(100), mib(1))
    );
    let count = Amount::Count;
    assert_eq!(
        capacity[cap::CORES],
        parts(count(100), count(25), count(10), count(1))
    );

    // What cannot be given out in steps is given out in one size; the API would refuse the range.
    let one = |amount| {
        let policy = RequestPolicy {
            default: amount,
            allowed: Allowed::Values(vec![amount]),
        };
        Capacity {
            value: amount,
            policy: Some(policy),
        }
    };
    let (capacity, _) = with(
        ShareRules {
            slots: 1,
            smallest_mib: Some(1 << 40),
            smallest_cores: 200,
            ..ShareRules::default()
        },
        34,
    );
    let capacity = capacity.unwrap();
    let expected = [
        (cap::MEMORY, one(mib(23000))),
        (cap::CORES, one(count(100))),
        (cap::SLOTS, one(count(1))),
    ];
    assert_eq!(
        capacity,
        expected
            .map(|(name, capacity)| (name.into(), capacity))
            .into()
    );
    // More shares than the memory has room for at their smallest: a claim without a request gets
    // the smallest.
    let (capacity, _) = with(
        ShareRules {
            slots: 1000,
            smallest_mib: Some(512),
            smallest_cores: 5,
            ..ShareRules::default()
        },
        0,
    );
    let capacity = capacity.unwrap();
    assert_eq!(
        capacity[cap::MEMORY],
        parts(total, mib(512), mib(512), mib(1))
    );
    assert_eq!(
        capacity[cap::CORES],
        parts(count(100), count(5), count(5), count(1))
    );
    assert_eq!(with(ShareRules::default(), 23034), (None, 1));
    assert_eq!(
        with(
            ShareRules {
                slots: 0,
                ..ShareRules::default()
            },
            0
        )
        .0
        .unwrap()[cap::SLOTS],
        one(count(1))
    );
}

/// Caps that add up to more than the card has would promise some of it twice.
#[test]
fn what_the_driver_keeps_is_not_shared_where_memory_is_capped() {
    let memory = |caps: MemoryCaps, reserved: Option<u64>, held_back_mib: u64| {
        let mut node = Node::everything("l4x1");
        node.rule(|rules| {
            rules.held_back_mib = held_back_mib;
            rules.shares.burst = "1.5x".parse().unwrap();
        });
        node.inventory.system.memory_caps = caps;
        for gpu in node.inventory.gpus.values_mut() {
            gpu.facts.memory_reserved_bytes = reserved;
        }
        let share = device(&node.carve(None).pool, "gpu-0-ts").clone();
        let most = share.attributes["memoryLimitMaxPercent"].clone();
        (share.capacity[cap::MEMORY].value, most)
    };
    let mib = |n: u64| Amount::Bytes(n * MIB);
    let most = AttributeValue::Int;
    let (capped, old) = (MemoryCaps::Available, MemoryCaps::OldDriver);
    for (caps, reserved, held_back, expected) in [
        (old, Some(550 * MIB), 0, (mib(23034), most(0))),
        (capped, None, 0, (mib(23034), most(150))),
        // In steps, so that a driver that needs a little more or less changes nothing.
        (capped, Some(550 * MIB), 0, (mib(23034 - 576), most(150))),
        (capped, Some(570 * MIB), 0, (mib(23034 - 576), most(150))),
        (capped, Some(577 * MIB), 0, (mib(23034 - 640), most(150))),
        (
            capped,
            Some(550 * MIB),
            1024,
            (mib(23034 - 1600), most(150)),
        ),
    ] {
        assert_eq!(
            memory(caps, reserved, held_back),
            expected,
            "{caps:?} {reserved:?} {held_back}"
        );
    }
}

/// The shares of the first GPU by percent, under these rules.
fn by_percent(gpus: &str, shares: ShareRules, held_back_mib: u64) -> Device {
    let mut node = Node::everything(gpus);
    node.rule(|rules| {
        rules.shares = ShareRules {
            unit: ShareUnit::Percent,
            ..shares
        };
        rules.held_back_mib = held_back_mib;
    });
    device(&node.carve(None).pool, "gpu-0-ts").clone()
}

#[test]
fn shares_by_percent_have_one_capacity_of_a_hundred_on_any_gpu() {
    let count = Amount::Count;
    let percent = |default: u64, min: u64| {
        let part = parts(count(100), count(default), count(min), count(1));
        BTreeMap::from([(cap::PERCENT.into(), part)])
    };
    let two = || ShareRules {
        slots: 2,
        ..ShareRules::default()
    };
    // 256 MiB are more than a percent of an L4, and less than one of an H200.
    for (gpus, mib, min) in [("l4x1", 23034, 2), ("h200x1", 143_771, 1)] {
        let share = by_percent(gpus, two(), 0);
        assert_eq!(share.capacity, percent(50, min), "{gpus}");
        assert_eq!(share.attributes["memoryMiB"], AttributeValue::Int(mib));
        assert!(share.allow_multiple && !share.consumes.is_empty());
    }
    let share = by_percent("l4x1", two(), 3034);
    assert_eq!(share.attributes["memoryMiB"], AttributeValue::Int(20000));
    // The default share of sixteen, of a hundred, of more than there are; and the least.
    let of = |slots, smallest_percent| {
        let rules = ShareRules {
            slots,
            smallest_percent,
            ..ShareRules::default()
        };
        by_percent("h200x1", rules, 0).capacity
    };
    assert_eq!(of(16, None), percent(6, 1));
    assert_eq!(of(100, None), percent(1, 1));
    assert_eq!(of(1000, Some(0)), percent(1, 1));
    assert_eq!(of(16, Some(10)), percent(10, 10));
    let all = RequestPolicy {
        default: count(100),
        allowed: Allowed::Values(vec![count(100)]),
    };
    assert_eq!(of(16, Some(100))[cap::PERCENT].policy, Some(all));
}

#[test]
fn half_of_a_gpu_is_never_more_than_half_of_its_memory() {
    for (mib, parts) in [
        (23034, vec![50, 50]),
        (81559, vec![33, 33, 34]),
        (7, vec![1; 100]),
    ] {
        let of = |percent: &u64| ShareUnit::part_of_memory(mib, *percent);
        let together: u64 = parts.iter().map(of).sum();
        assert!(together <= mib << 20, "{mib}");
    }
    assert_eq!(ShareUnit::part_of_memory(23034, 50), 11517 << 20);
    assert_eq!(ShareUnit::part_of_memory(23033, 50), 11516 << 20);
}

#[test]
fn each_kind_is_found_after_a_few_devices_of_the_others() {
    let pool = Node::everything("h100x8").carve(None).pool;
    let first = names(&pool)
        .into_iter()
        .take(14)
        .collect::<Vec<_>>()
        .join(" ");
    let expected = "gpu-7 gpu-0-ts gpu-0-mig-1g10gb-19-0 gpu-0-mig-1g10gb-19-1 \
        gpu-6 gpu-5 gpu-1-ts gpu-0-mig-1g10gb-19-2 gpu-0-mig-1g10gb-19-3 \
        gpu-4 gpu-3 gpu-2-ts gpu-0-mig-1g10gb-19-4 gpu-0-mig-1g10gb-19-5";
    assert_eq!(first, expected);
    let shapes = [(34, 0), (18, 0), (36, 0), (36, 0), (36, 0), (8, 0), (0, 8)];
    assert_eq!(shape(&pool), shapes);
    // Partitions alone have nothing to take turns with.
    let pool = Node::only("h100x2", &[Form::PARTITIONS]).carve(None).pool;
    assert_eq!(shape(&pool), [(36, 0), (2, 0), (0, 2)]);
}

#[test]
fn a_gpu_without_mig_counts_itself_once_in_several_modes() {
    let pool = Node::everything("l4x1").carve(None).pool;
    let itself = amounts_of(&[("gpu", Amount::Count(1))]);
    assert_eq!(names(&pool), ["gpu-0", "gpu-0-ts"]);
    assert_eq!(
        sets(&pool),
        [&CounterSet {
            name: "gpu-0".to_owned(),
            counters: itself.clone()
        }]
    );
    let uses = vec![CounterUse {
        set: "gpu-0".to_owned(),
        counters: itself,
    }];
    assert!(forms(&pool).all(|device| device.consumes == uses));

    let shared = |minor| {
        Node::only("l4x1", &[Form::TIME_SLICED])
            .server(minor, 0)
            .carve(None)
            .pool
    };
    let pool = shared(35);
    assert_eq!(
        (names(&pool), sets(&pool).len()),
        (vec!["gpu-0-ts"], 0),
        "one mode needs no counters"
    );
    assert!(device(&pool, "gpu-0-ts").consumes.is_empty());
    assert!(
        names(&shared(34)).is_empty(),
        "a scheduler of 1.34 compares with the wrong device"
    );
    // Before Hopper MIG mode stays as it is; the other two share a card all the same.
    let pool = Node::everything("a100-40x1").carve(None).pool;
    assert_eq!(
        (names(&pool), sets(&pool).len()),
        (vec!["gpu-0", "gpu-0-ts"], 1)
    );
}

#[test]
fn a_server_that_drops_fields_of_shares_gets_none_and_a_note() {
    let mut node = Node::everything("h100x1");
    node.features = node.features.without([Feature::Shares]);
    let carved = node.carve(None);
    assert!(!names(&carved.pool).iter().any(|name| name.ends_with("-ts")));
    assert!(
        names(&carved.pool).contains(&"gpu-0")
            && names(&carved.pool).contains(&"gpu-0-mig-1g10gb-19-0")
    );
    let why = "is not offered in shares: they need Kubernetes 1.35 or later with the feature gate \
               DRAConsumableCapacity (on by default from 1.36)";
    assert_eq!(
        findings(&carved)
            .iter()
            .filter(|note| note.ends_with(why))
            .count(),
        1
    );
}

#[test]
fn an_old_scheduler_gets_one_mode_for_each_gpu_by_what_is_held() {
    let offered = |node: Node| {
        let carved = node.carve(None);
        let modes: BTreeSet<_> = names(&carved.pool).into_iter().map(mode_of).collect();
        let one: Vec<_> = carved
            .findings
            .iter()
            .filter_map(|note| match note {
                Finding::OneMode { mode, why, .. } => Some((*mode, why.clone())),
                _ => None,
            })
            .collect();
        (
            modes.into_iter().collect::<Vec<_>>(),
            blocked(&carved.pool).len(),
            one,
        )
    };
    let old = || Node::only("h100x1", &EVERYTHING).server(35, 8);
    let why = OneMode::TooOld {
        found: KubeVersion::new(1, 35, 8),
        needed: KubeVersion::new(1, 36, 2),
    };
    let one = |mode| (vec![mode], 0, vec![(mode, why.clone())]);
    assert_eq!(offered(old()), one(Form::WHOLE));
    assert_eq!(offered(old().mig_on()), one(Form::PARTITIONS));
    let held = |name: &str| {
        let mut node = old();
        node.hold(name);
        node
    };
    assert_eq!(offered(held("gpu-0-ts")), one(Form::TIME_SLICED));
    assert_eq!(
        offered(held("gpu-0-mig-1g10gb-19-3")),
        one(Form::PARTITIONS)
    );
    // Given out in two modes already: one goes on, the other is kept, and neither is given out
    // again.
    let mut twice = held("gpu-0-ts");
    twice.hold("gpu-0");
    let (modes, blocked, one) = offered(twice);
    assert_eq!(
        (modes, blocked, one.len()),
        (vec![Form::WHOLE, Form::TIME_SLICED], 2, 1)
    );
}

fn mode_of(name: &str) -> Form {
    match name {
        name if name.ends_with("-ts") => Form::TIME_SLICED,
        name if name.contains("-mig-") => Form::PARTITIONS,
        _ => Form::WHOLE,
    }
}

/// A held share stays when shares are no longer offered and keeps the others off its GPU.
#[test]
fn a_held_share_stays_and_keeps_the_others_off_its_gpu() {
    let mut node = Node::everything("h100x2");
    let before = node.carve(None).pool;
    node.hold("gpu-1-ts");
    node.rules.clear();
    let carved = node.carve(Some(&before));
    assert_eq!(names(&carved.pool), ["gpu-1", "gpu-1-ts", "gpu-0"]);
    assert_eq!(
        (open(&carved.pool), carved.kept.len()),
        (vec!["gpu-1", "gpu-0"], 1)
    );
    let share = device(&carved.pool, "gpu-1-ts");
    assert_eq!(
        share.taints,
        [Taint::no_schedule(keys::WITHDRAWN, Some("not-offered"))]
    );
    assert_eq!(
        sets(&carved.pool).len(),
        1,
        "the counters keep the whole GPU from being given out"
    );
    assert_eq!(device(&carved.pool, "gpu-1").consumes, share.consumes);

    // A scheduler that does not count shares correctly needs taints.
    let old = node.server(36, 1).carve(Some(&before)).pool;
    assert_eq!(
        (names(&old), open(&old)),
        (vec!["gpu-1", "gpu-1-ts", "gpu-0"], vec!["gpu-0"])
    );
    assert_eq!(
        device(&old, "gpu-1").taints,
        [Taint::no_schedule(keys::MODE, Some("gpu-share-held"))]
    );
}

#[test]
fn a_gpu_given_twice_gives_nothing_out_and_no_counter_is_negative() {
    let mut node = Node::everything("h100x2");
    node.hold("gpu-0-ts");
    node.hold("gpu-0-mig-1g10gb-19-3");
    let carved = node.carve(None);
    assert!(
        open(&carved.pool)
            .iter()
            .all(|name| name.starts_with("gpu-1"))
    );
    assert_eq!(open(&carved.pool).len(), 20);
    assert_eq!(
        sets(&carved.pool)
            .iter()
            .map(|set| set.name.as_str())
            .collect::<Vec<_>>(),
        ["gpu-1"]
    );
    assert_eq!(
        findings(&carved),
        [
            "claims hold gpu-0-ts, gpu-0-mig-1g10gb-19-3, which exclude each other on one GPU: no part of gpu-0 \
          is allocated until one of the claims is released"
        ]
    );
    node.features = node.features.without([Feature::Taints]);
    let left = node.carve(None).pool;
    let of_gpu_0: Vec<_> = names(&left)
        .into_iter()
        .filter(|name| name.starts_with("gpu-0"))
        .collect();
    assert_eq!(of_gpu_0, ["gpu-0-ts", "gpu-0-mig-1g10gb-19-3"]);
}
