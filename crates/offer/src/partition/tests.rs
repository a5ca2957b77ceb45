use std::collections::BTreeMap;

use divvy_gpu_sim::{Engine, mig_capabilities};
use divvy_model::mig::ProfileVariant;

use super::*;
use crate::{
    Amount, Capacity, Carved, CounterSet, CounterUse, Input, KubeVersion, Pool, Rules,
    ServerFeatures, Taint, carve, validate,
};
use divvy_api::names::taints as keys;
use divvy_model::{DeviceName, Inventory, MigMode, MpsServer, Ordinals};

const LATEST: KubeVersion = KubeVersion::new(1, 37, 1);

/// A node to change and carve.
struct Node {
    inventory: Inventory,
    ordinals: Ordinals,
    taints: BTreeMap<GpuUuid, Vec<Taint>>,
    held: BTreeSet<DeviceName>,
    features: ServerFeatures,
    capabilities: BTreeMap<GpuUuid, MigCapabilities>,
    rules: Rules,
    occupied: BTreeMap<GpuUuid, Vec<(Placement, Taint)>>,
}

impl Node {
    fn new(spec: &str) -> Self {
        let engine = Engine::new(&spec.parse().unwrap());
        let inventory = engine.inventory();
        let mut ordinals = Ordinals::default();
        ordinals.assign(
            inventory
                .gpus
                .iter()
                .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
        );
        let capabilities = engine
            .gpus()
            .iter()
            .filter_map(|gpu| Some((gpu.facts.uuid.clone(), mig_capabilities(&gpu.model)?)))
            .collect();
        Self {
            inventory,
            ordinals,
            taints: BTreeMap::new(),
            held: BTreeSet::new(),
            features: ServerFeatures::default().observe(LATEST),
            capabilities,
            rules: BTreeMap::new(),
            occupied: BTreeMap::new(),
        }
    }

    /// Every GPU whole and in partitions, where that can be.
    fn both(spec: &str) -> Self {
        Self::only(spec, &[Form::WHOLE, Form::PARTITIONS])
    }

    fn everything(spec: &str) -> Self {
        Self::only(spec, &Form::OFFERED)
    }

    fn only(spec: &str, modes: &[Form]) -> Self {
        let mut node = Self::new(spec);
        node.rule(|rules| rules.modes = Modes::Only(modes.iter().copied().collect()));
        node
    }

    fn rule(&mut self, change: impl Fn(&mut GpuRules)) {
        for uuid in self.inventory.gpus.keys() {
            change(self.rules.entry(uuid.clone()).or_default());
        }
    }

    fn mig_on(mut self) -> Self {
        for gpu in self.inventory.gpus.values_mut() {
            gpu.facts.mig_mode = MigMode::Supported {
                current: true,
                pending: true,
            };
        }
        self
    }

    fn server(mut self, minor: u32, patch: u32) -> Self {
        self.features = ServerFeatures::default().observe(KubeVersion::new(1, minor, patch));
        self
    }

    fn uuid(&self, ordinal: u32) -> GpuUuid {
        self.ordinals.gpu(ordinal).unwrap().clone()
    }

    fn hold(&mut self, name: &str) {
        self.held.insert(name.parse().unwrap());
    }

    fn carve(&self, previous: Option<&Pool>) -> Carved {
        let Self {
            inventory,
            ordinals,
            taints,
            held,
            features,
            capabilities,
            rules,
            occupied,
        } = self;
        let plain = Input::plain("n1", inventory, ordinals, features);
        let carved = carve(&Input {
            capabilities,
            rules,
            taints,
            occupied,
            held,
            previous,
            ..plain
        });
        assert_eq!(validate(&carved.pool), Ok(()));
        carved
    }

    fn input(&self) -> Input<'_> {
        Input {
            capabilities: &self.capabilities,
            rules: &self.rules,
            ..Input::plain("n1", &self.inventory, &self.ordinals, &self.features)
        }
    }

    /// The pool while these MPS servers run.
    fn carve_beside(&self, mps_servers: &BTreeMap<GpuTarget, MpsServer>) -> Pool {
        let input = Input {
            mps_servers,
            ..self.input()
        };
        carve(&input).pool
    }

    fn whole_only(&self) -> Carved {
        let Self {
            inventory,
            ordinals,
            taints,
            held,
            features,
            ..
        } = self;
        carve(&Input {
            taints,
            held,
            ..Input::plain("n1", inventory, ordinals, features)
        })
    }
}

/// All devices but those for admins, which have tests of their own.
fn forms(pool: &Pool) -> impl Iterator<Item = &Device> {
    pool.devices()
        .filter(|device| !device.name.as_str().ends_with("-admin"))
}

fn names(pool: &Pool) -> Vec<&str> {
    forms(pool).map(|device| device.name.as_str()).collect()
}

fn findings(carved: &Carved) -> Vec<String> {
    carved.findings.iter().map(ToString::to_string).collect()
}

fn device<'a>(pool: &'a Pool, name: &str) -> &'a Device {
    pool.device(&name.parse().unwrap())
        .unwrap_or_else(|| panic!("no {name} in {:?}", names(pool)))
}

fn sets(pool: &Pool) -> Vec<&CounterSet> {
    pool.slices
        .iter()
        .flat_map(|slice| &slice.counter_sets)
        .collect()
}

/// Names of devices with a taint.
fn blocked(pool: &Pool) -> Vec<&str> {
    let blocked = forms(pool).filter(|device| !device.taints.is_empty());
    blocked.map(|device| device.name.as_str()).collect()
}

/// The number of devices and of counter sets in each slice.
fn shape(pool: &Pool) -> Vec<(usize, usize)> {
    pool.slices
        .iter()
        .map(|slice| (slice.devices.len(), slice.counter_sets.len()))
        .collect()
}

fn amounts_of(list: &[(&str, Amount)]) -> BTreeMap<String, Amount> {
    list.iter()
        .map(|(name, amount)| ((*name).to_owned(), *amount))
        .collect()
}

const MIB: u64 = 1 << 20;

/// The next smaller profile has fewer.
#[test]
fn a_gpu_whose_largest_profile_was_left_out_says_no_engines() {
    let mut node = Node::both("h100x1");
    let engines = |node: &Node| {
        let pool = node.carve(None).pool;
        let whole = pool.device(&"gpu-0".parse().unwrap()).unwrap();
        whole.capacity.get("copyEngines").cloned()
    };
    assert_eq!(engines(&node), Some(Capacity::whole(Amount::Count(8))));
    let caps = node.capabilities.values_mut().next().unwrap();
    let whole = caps.whole().unwrap().id;
    let others = caps.profiles().iter().filter(|profile| profile.id != whole);
    *caps = MigCapabilities::new(caps.memory_bytes, others.cloned().collect::<Vec<_>>());
    assert_eq!(engines(&node), None);
}

#[test]
fn a_partition_says_what_nvidias_driver_says_and_what_it_takes() {
    let node = Node::both("h100x1");
    let carved = node.carve(None);
    let string = |text: &str| AttributeValue::String(text.to_owned());
    let version = |text: &str| AttributeValue::Version(text.to_owned());
    let id = node.uuid(0).to_string();
    let attributes = [
        ("addressingMode", string("HMM")),
        ("architecture", string("Hopper")),
        ("brand", string("Nvidia")),
        ("c2cEnabled", AttributeValue::Bool(false)),
        ("computeEnforcement", string("hardware")),
        ("cudaComputeCapability", version("9.0.0")),
        ("cudaDriverVersion", version("13.0.0")),
        ("driverVersion", version("580.95.5")),
        ("faultDomain", string("partition")),
        ("gpuUUID", string(&id)),
        ("isolation", string("hardware")),
        ("memoryEnforcement", string("hardware")),
        ("parentUUID", string(&id)),
        ("productName", string("NVIDIA H100 80GB HBM3")),
        ("profile", string("1g.20gb")),
        ("resource.kubernetes.io/numaNode", AttributeValue::Int(0)),
        ("resource.kubernetes.io/pciBusID", string("0000:1a:00.0")),
        ("resource.kubernetes.io/pcieRoot", string("pci0000:10")),
        ("sharing", string("exclusive")),
        ("type", string("mig")),
    ];
    let capacity = [
        ("copyEngines", Amount::Count(1)),
        ("decoders", Amount::Count(1)),
        ("encoders", Amount::Count(0)),
        ("jpegEngines", Amount::Count(1)),
        ("memory", Amount::Bytes(20096 * MIB)),
        ("multiprocessors", Amount::Count(26)),
        ("ofaEngines", Amount::Count(0)),
    ];
    let counters = [("memory-slices-6-7", Amount::Count(2))];
    let mut expected = Device::new("gpu-0-mig-1g20gb-15-6".parse().unwrap());
    expected.attributes = attributes.map(|(name, value)| (name.into(), value)).into();
    expected.capacity = capacity
        .map(|(name, amount)| (name.into(), Capacity::whole(amount)))
        .into();
    expected.consumes = vec![CounterUse {
        set: "gpu-0".to_owned(),
        counters: amounts_of(&counters),
    }];
    assert_eq!(device(&carved.pool, "gpu-0-mig-1g20gb-15-6"), &expected);
    assert_eq!(findings(&carved), Vec::<String>::new());
}

#[test]
fn the_whole_gpu_is_as_before_but_for_its_engines_and_takes_every_counter() {
    let node = Node::both("h100x1");
    let carved = node.carve(None);
    let pairs = [
        "memory-slices-0-1",
        "memory-slices-2-3",
        "memory-slices-4-5",
        "memory-slices-6-7",
    ];
    let counters = amounts_of(&pairs.map(|name| (name, Amount::Count(2))));
    assert_eq!(
        sets(&carved.pool),
        [&CounterSet {
            name: "gpu-0".to_owned(),
            counters: counters.clone()
        }]
    );

    let mut expected = device(&node.whole_only().pool, "gpu-0").clone();
    let engines = [
        ("copyEngines", 8),
        ("decoders", 7),
        ("encoders", 0),
        ("jpegEngines", 7),
        ("ofaEngines", 1),
    ];
    expected
        .capacity
        .extend(engines.map(|(name, count)| (name.into(), Capacity::whole(Amount::Count(count)))));
    expected.consumes = vec![CounterUse {
        set: "gpu-0".to_owned(),
        counters,
    }];
    assert_eq!(device(&carved.pool, "gpu-0"), &expected);
}

#[test]
fn what_is_offered_follows_mode_policy_board_and_server() {
    let offered = |node: &Node| {
        let carved = node.carve(None);
        let whole = names(&carved.pool).contains(&"gpu-0");
        let partitions = forms(&carved.pool)
            .filter(|device| device.name.as_str() != "gpu-0")
            .count();
        (
            whole,
            partitions,
            sets(&carved.pool).len(),
            findings(&carved).len(),
        )
    };
    // (whole, partitions, counter sets, findings)
    let cases = [
        ("off, by default", Node::new("h100x1"), (true, 0, 0, 0)),
        (
            "on, by default",
            Node::new("h100x1").mig_on(),
            (false, 18, 1, 0),
        ),
        (
            "both asked for, off",
            Node::both("h100x1"),
            (true, 18, 1, 0),
        ),
        (
            "both asked for, on",
            Node::both("h100x1").mig_on(),
            (true, 18, 1, 0),
        ),
        ("Ampere both, off", Node::both("a100-40x1"), (true, 0, 0, 1)),
        (
            "Ampere both, on",
            Node::both("a100-40x1").mig_on(),
            (false, 18, 1, 1),
        ),
        ("A30, on", Node::new("a30x1").mig_on(), (false, 7, 1, 0)),
        (
            "both, scheduler too old, off",
            Node::both("h100x1").server(35, 8),
            (true, 0, 0, 1),
        ),
        (
            "both, scheduler too old, on",
            Node::both("h100x1").server(35, 8).mig_on(),
            (false, 18, 1, 1),
        ),
        (
            "both, scheduler that a claim can end, on",
            Node::both("h100x1").server(36, 1).mig_on(),
            (true, 0, 0, 1),
        ),
        (
            "as it is, scheduler that a claim can end, on",
            Node::new("h100x1").server(35, 5).mig_on(),
            (false, 0, 0, 2),
        ),
        (
            "both, just new enough",
            Node::both("h100x1").server(36, 2),
            (true, 18, 1, 0),
        ),
        (
            "no counters in the server, off",
            Node::both("h100x1").server(34, 3),
            (true, 0, 0, 1),
        ),
        (
            "no counters in the server, on",
            Node::new("h100x1").server(34, 3).mig_on(),
            (false, 0, 0, 2),
        ),
        ("no MIG", Node::both("l4x1"), (true, 0, 0, 0)),
    ];
    for (case, node, expected) in cases {
        assert_eq!(offered(&node), expected, "{case}");
    }
    let mut dropped = Node::both("h100x1");
    dropped.features = dropped.features.without([Feature::Partitions]);
    assert_eq!(offered(&dropped), (true, 0, 0, 1));
    let mut unread = Node::both("h100x1").mig_on();
    unread.capabilities.clear();
    assert_eq!(
        offered(&unread),
        (false, 0, 0, 1),
        "nothing is known of its profiles"
    );
}

#[test]
fn without_mig_the_pool_is_that_of_whole_gpus() {
    let node = Node::both("l4x2,t4x1");
    assert_eq!(node.carve(None), node.whole_only());
}

/// Whole GPUs and the first partitions take turns then come the other partitions then counters.
#[test]
fn the_order_is_whole_gpus_with_partitions_then_others_then_counters() {
    let carved = Node::both("h100x2").carve(None);
    let first = "gpu-1 gpu-0-mig-1g10gb-19-0 gpu-0-mig-1g10gb-19-1 \
        gpu-0 gpu-0-mig-1g10gb-19-2 gpu-0-mig-1g10gb-19-3 \
        gpu-0-mig-1g10gb-19-4 gpu-0-mig-1g10gb-19-5 gpu-0-mig-1g10gb-19-6 \
        gpu-0-mig-1g20gb-15-0 gpu-0-mig-1g20gb-15-2 gpu-0-mig-1g20gb-15-4 gpu-0-mig-1g20gb-15-6 \
        gpu-0-mig-2g20gb-14-0 gpu-0-mig-2g20gb-14-2 gpu-0-mig-2g20gb-14-4 \
        gpu-0-mig-3g40gb-9-0 gpu-0-mig-3g40gb-9-4 gpu-0-mig-4g40gb-5-0 gpu-0-mig-7g80gb-0-0";
    let partitions = || first.split(' ').filter(|name| name.contains("-mig-"));
    let second = partitions().map(|name| name.replace("gpu-0", "gpu-1"));
    let all: Vec<String> = first.split(' ').map(str::to_owned).chain(second).collect();
    assert_eq!(names(&carved.pool), all);
    assert_eq!(shape(&carved.pool), [(20, 0), (18, 0), (2, 0), (0, 2)]);

    let mut down = Node::both("h100x1");
    down.rule(|rules| rules.order = PlacementOrder::Descending);
    let carved = down.carve(None);
    let starts: Vec<_> = names(&carved.pool)
        .into_iter()
        .filter(|name| name.contains("-14-"))
        .collect();
    assert_eq!(
        starts,
        [
            "gpu-0-mig-2g20gb-14-4",
            "gpu-0-mig-2g20gb-14-2",
            "gpu-0-mig-2g20gb-14-0"
        ]
    );
}

#[test]
fn slices_hold_two_gpus_but_for_the_first_whatever_is_published_of_them() {
    let everything = [
        ProfileVariant::Media,
        ProfileVariant::AllMedia,
        ProfileVariant::NoMedia,
        ProfileVariant::Graphics,
    ];
    let eight = Node::both("h100x8").carve(None);
    assert_eq!(
        shape(&eight.pool),
        [(26, 0), (18, 0), (36, 0), (36, 0), (36, 0), (8, 0), (0, 8)]
    );
    let mut sixteen = Node::new("a100-40x16").mig_on();
    assert_eq!(
        shape(&sixteen.carve(None).pool),
        [vec![(36, 0); 8], vec![(16, 0)], vec![(0, 8); 2]].concat()
    );
    sixteen.rule(|rules| rules.rare.extend(everything));
    assert_eq!(
        shape(&sixteen.carve(None).pool),
        [vec![(50, 0); 8], vec![(16, 0)], vec![(0, 8); 2]].concat()
    );

    let mut boards = Node::both("h100x3");
    boards.rule(|rules| rules.rare.extend(everything));
    for uuid in boards.inventory.gpus.keys() {
        boards
            .capabilities
            .insert(uuid.clone(), mig_capabilities("rtx-pro-6000").unwrap());
    }
    assert_eq!(
        shape(&boards.carve(None).pool),
        [(33, 0), (30, 0), (30, 0), (3, 0), (0, 3)]
    );
}

#[test]
fn a_board_with_too_many_partitions_gets_slices_of_its_own() {
    let mut node = Node::both("h100x2");
    let uuid = node.uuid(0);
    let caps = &node.capabilities[&uuid];
    let first = caps.profiles().first().unwrap();
    let many = (0..10).map(|n| GpuInstanceProfile {
        id: divvy_model::mig::GpuInstanceProfileId(100 + n),
        ..first.clone()
    });
    node.capabilities
        .insert(uuid, MigCapabilities::new(caps.memory_bytes, many));
    assert_eq!(
        shape(&node.carve(None).pool),
        [(2, 0), (64, 0), (6, 0), (18, 0), (2, 0), (0, 2)]
    );
}

#[test]
fn a_change_of_one_gpu_changes_its_own_slices_only() {
    let mut node = Node::both("h100x8");
    let before = node.carve(None).pool;
    node.taints.insert(
        node.uuid(5),
        vec![Taint::no_schedule("gpu.divvy.dev/xid", Some("79"))],
    );
    let after = node.carve(Some(&before)).pool;
    let changed = |a: &Pool, b: &Pool| -> Vec<usize> {
        a.slices
            .iter()
            .zip(&b.slices)
            .enumerate()
            .filter(|(_, (a, b))| a != b)
            .map(|(i, _)| i)
            .collect()
    };
    assert_eq!(
        (after.slices.len(), changed(&before, &after)),
        (before.slices.len(), vec![0, 3, 5])
    );
    assert_eq!(blocked(&after).len(), 19);
}

#[test]
fn partitions_of_a_gpu_without_persistence_mode_are_a_notice() {
    let notices = |node: Node, persistence| {
        let mut node = node;
        for gpu in node.inventory.gpus.values_mut() {
            gpu.facts.persistence = persistence;
        }
        findings(&node.carve(None))
    };
    let said = notices(Node::both("h100x1"), Some(false));
    assert!(
        said.len() == 1 && said[0].contains("has no persistence mode"),
        "{said:?}"
    );
    for (node, persistence) in [
        (Node::both("h100x1"), Some(true)),
        // Unknown is reported as nothing, and a GPU without partitions has none to lose.
        (Node::both("h100x1"), None),
        (Node::only("h100x1", &[Form::WHOLE]), Some(false)),
    ] {
        assert_eq!(notices(node, persistence), Vec::<String>::new());
    }
}

#[test]
fn rare_profiles_are_published_only_when_asked_for() {
    let rare = |variants: &[ProfileVariant]| {
        let mut node = Node::both("h100x1");
        node.capabilities
            .insert(node.uuid(0), mig_capabilities("rtx-pro-6000").unwrap());
        node.rule(|rules| rules.rare.extend(variants.iter().copied()));
        let pool = node.carve(None).pool;
        names(&pool)
            .iter()
            .filter(|name| name.starts_with("gpu-0-mig"))
            .count()
    };
    assert_eq!(rare(&[]), 4 + 2 + 1);
    assert_eq!(rare(&[ProfileVariant::Media]), 7 + 4);
    assert_eq!(rare(&[ProfileVariant::AllMedia]), 7 + 6);
    assert_eq!(rare(&[ProfileVariant::NoMedia]), 7 + 6);
    assert_eq!(rare(&[ProfileVariant::Graphics]), 7 + 7);
}

#[test]
fn an_unknown_profile_has_the_drivers_name_or_none() {
    let with_driver_name = |driver_name: Option<&str>| {
        let mut node = Node::both("h100x1");
        let uuid = node.uuid(0);
        let caps = &node.capabilities[&uuid];
        let profiles = caps.profiles().iter().cloned().map(|mut profile| {
            if profile.id.0 == 20 {
                profile.index = divvy_model::mig::GpuInstanceProfileIndex(0x40);
                profile.driver_name = driver_name.map(str::to_owned);
            }
            profile
        });
        let caps = MigCapabilities::new(caps.memory_bytes, profiles);
        node.capabilities.insert(uuid, caps);
        node.rule(|rules| rules.rare.extend([ProfileVariant::Unknown(0x40)]));
        let carved = node.carve(None);
        (names(&carved.pool).len(), findings(&carved).len())
    };
    assert_eq!(with_driver_name(Some("MIG 1g.10gb+new")), (26, 0));
    assert_eq!(with_driver_name(None), (19, 1));
}

mod held;
mod others;
mod shares;
mod twins;
