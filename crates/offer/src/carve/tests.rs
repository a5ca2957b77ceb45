use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{
    Architecture, Brand, ComputeCapability, CudaVersion, DeviceName, Gpu, GpuError, GpuErrorCode,
    GpuFacts, GpuOp, GpuProblem, GpuUuid, HostTopology, Inventory, MigMode, NvLinkPeer, Ordinals,
    PciAddress, SystemFacts,
};

use super::*;
use crate::{Amount, Capacity, Slice, TaintEffect, validate};

fn uuid(n: u32) -> GpuUuid {
    format!("GPU-12345678-1234-1234-1234-{n:012x}")
        .parse()
        .unwrap()
}

fn address(n: u32) -> PciAddress {
    PciAddress {
        domain: 0,
        bus: u8::try_from(n).unwrap() + 0x10,
        device: 0,
        function: 0,
    }
}

fn h100(n: u32) -> Gpu {
    Gpu {
        facts: GpuFacts {
            uuid: uuid(n),
            minor: Some(n),
            product_name: "NVIDIA H100 80GB HBM3".to_owned(),
            brand: Brand(14),
            architecture: Architecture::Hopper,
            compute_capability: ComputeCapability { major: 9, minor: 0 },
            memory_bytes: Some(85_520_809_984),
            memory_reserved_bytes: None,
            multiprocessors: Some(132),
            pci_address: address(n),
            pci_device_id: 0x2330_10de,
            mig_mode: MigMode::Supported {
                current: false,
                pending: false,
            },
            compute_mode: None,
            persistence: Some(true),
            addressing_mode: Some("HMM".to_owned()),
            c2c: Some(false),
            module_id: None,
            nvlinks: vec![NvLinkPeer::Switch],
            fabric: None,
        },
        topology: HostTopology {
            numa_node: Some(1),
            pcie_root: Some("pci0000:0f".to_owned()),
        },
        mig: None,
    }
}

/// A node to change and carve.
struct Node {
    inventory: Inventory,
    ordinals: Ordinals,
    taints: BTreeMap<GpuUuid, Vec<Taint>>,
    held: BTreeSet<DeviceName>,
    features: ServerFeatures,
}

impl Node {
    fn new(gpus: u32) -> Self {
        let system = SystemFacts {
            driver_version: "580.95.05".to_owned(),
            nvml_version: None,
            memory_caps: divvy_model::MemoryCaps::default(),
            caps_linger: false,
            mps: divvy_model::MpsAbility::default(),
            cuda_version: Some(CudaVersion {
                major: 13,
                minor: 0,
            }),
        };
        let inventory = Inventory {
            system,
            gpus: (0..gpus).map(|n| (uuid(n), h100(n))).collect(),
            problems: vec![],
            with_mig: BTreeMap::new(),
        };
        let ordinals = (0..gpus).map(|n| (uuid(n), n)).collect();
        let (taints, held) = (BTreeMap::new(), BTreeSet::new());
        Self {
            inventory,
            ordinals,
            taints,
            held,
            features: ServerFeatures::default(),
        }
    }

    fn carve(&self, previous: Option<&Pool>) -> Carved {
        let Self {
            inventory,
            ordinals,
            taints,
            held,
            features,
        } = self;
        let plain = Input::plain("n1", inventory, ordinals, features);
        let carved = carve(&Input {
            taints,
            held,
            previous,
            ..plain
        });
        assert_eq!(validate(&carved.pool), Ok(()));
        carved
    }

    fn gpu(&mut self, n: u32) -> &mut Gpu {
        self.inventory.gpus.get_mut(&uuid(n)).unwrap()
    }

    fn hold(&mut self, name: &str) {
        self.held.insert(name.parse().unwrap());
    }

    fn lose(&mut self, n: u32) {
        self.inventory.gpus.remove(&uuid(n));
    }
}

fn names(pool: &Pool) -> Vec<&str> {
    pool.devices().map(|device| device.name.as_str()).collect()
}

fn taints_of(carved: &Carved, name: &str) -> Vec<String> {
    let device = carved.pool.device(&name.parse().unwrap()).unwrap();
    device
        .taints
        .iter()
        .map(|taint| taint.key.clone())
        .collect()
}

fn findings(carved: &Carved) -> Vec<String> {
    carved.findings.iter().map(ToString::to_string).collect()
}

#[test]
fn a_whole_gpu_has_the_attributes_of_nvidias_driver_and_ours() {
    let carved = Node::new(1).carve(None);
    let string = |text: &str| AttributeValue::String(text.to_owned());
    let version = |text: &str| AttributeValue::Version(text.to_owned());
    let id = uuid(0).to_string();
    let expected = [
        ("addressingMode", string("HMM")),
        ("architecture", string("Hopper")),
        ("brand", string("Nvidia")),
        ("c2cEnabled", AttributeValue::Bool(false)),
        ("computeEnforcement", string("hardware")),
        ("cudaComputeCapability", version("9.0.0")),
        ("cudaDriverVersion", version("13.0.0")),
        ("driverVersion", version("580.95.5")),
        ("faultDomain", string("gpu")),
        ("gpuUUID", string(&id)),
        ("isolation", string("hardware")),
        ("memoryEnforcement", string("hardware")),
        ("nvlinkDomain", string(&id)),
        ("productName", string("NVIDIA H100 80GB HBM3")),
        ("resource.kubernetes.io/numaNode", AttributeValue::Int(1)),
        ("resource.kubernetes.io/pciBusID", string("0000:10:00.0")),
        ("resource.kubernetes.io/pcieRoot", string("pci0000:0f")),
        ("sharing", string("exclusive")),
        ("type", string("gpu")),
        ("uuid", string(&id)),
    ];
    let mut device = Device::new("gpu-0".parse().unwrap());
    device.attributes = expected.map(|(name, value)| (name.into(), value)).into();
    device.capacity = [
        ("memory", Amount::Bytes(85_520_809_984)),
        ("multiprocessors", Amount::Count(132)),
    ]
    .map(|(name, amount)| (name.into(), Capacity::whole(amount)))
    .into();
    let slices = vec![Slice {
        devices: vec![device],
        counter_sets: vec![],
    }];
    assert_eq!(
        carved,
        Carved {
            pool: Pool {
                name: "n1/divvy".to_owned(),
                slices
            },
            findings: vec![],
            kept: BTreeSet::new()
        }
    );
}

#[test]
fn what_is_unknown_is_left_out_and_what_is_over_a_limit_is_noted() {
    let mut node = Node::new(1);
    node.inventory.system.driver_version = "580.x".to_owned();
    let gpu = node.gpu(0);
    gpu.topology = HostTopology::default();
    gpu.facts.product_name = "P".repeat(65);
    gpu.facts.architecture = Architecture::Unknown(99);
    gpu.facts.memory_bytes = None;
    gpu.facts.nvlinks.clear();
    gpu.facts.addressing_mode = None;
    gpu.facts.c2c = None;
    gpu.facts.pci_address.domain = 0x10000;
    let carved = node.carve(None);
    let device = carved.pool.devices().next().unwrap();
    let attributes: Vec<_> = device.attributes.keys().map(|name| &**name).collect();
    assert_eq!(
        attributes,
        [
            "brand",
            "computeEnforcement",
            "cudaComputeCapability",
            "cudaDriverVersion",
            "faultDomain",
            "gpuUUID",
            "isolation",
            "memoryEnforcement",
            "sharing",
            "type",
            "uuid"
        ]
    );
    assert_eq!(
        device.capacity.keys().collect::<Vec<_>>(),
        ["multiprocessors"]
    );
    assert_eq!(
        findings(&carved),
        [
            "driverVersion of gpu-0 is left out: \"580.x\" is not a version".to_owned(),
            format!("productName of gpu-0 is left out: {:?} has 65 bytes, the API takes 64", "P".repeat(65)),
            "resource.kubernetes.io/pciBusID of gpu-0 is left out: 10000:10:00.0 has a domain of more than four digits".to_owned(),
        ]
    );
}

#[test]
fn whole_gpus_are_listed_in_reverse_order_in_slices_of_fixed_ranges() {
    let mut node = Node::new(130);
    let before = node.carve(None).pool;
    let sizes = |pool: &Pool| {
        pool.slices
            .iter()
            .map(|slice| slice.devices.len())
            .collect::<Vec<_>>()
    };
    assert_eq!(sizes(&before), [4, 21, 21, 21, 21, 21, 21]);
    assert_eq!(names(&before)[..3], ["gpu-129", "gpu-128", "gpu-127"]);
    node.lose(70);
    let after = node.carve(Some(&before)).pool;
    let changed: Vec<_> = (0..7)
        .filter(|i| before.slices[*i] != after.slices[*i])
        .collect();
    assert_eq!(
        (sizes(&after), changed),
        (vec![4, 21, 21, 20, 21, 21, 21], vec![3])
    );
}

#[test]
fn no_gpu_is_a_pool_without_slices() {
    assert_eq!(
        Node::new(0).carve(None).pool,
        Pool {
            name: "n1/divvy".to_owned(),
            slices: vec![]
        }
    );
}

#[test]
fn a_gpu_in_mig_mode_is_not_a_whole_gpu_unless_a_claim_still_holds_it() {
    let mut node = Node::new(2);
    node.gpu(1).facts.mig_mode = MigMode::Supported {
        current: true,
        pending: true,
    };
    let carved = node.carve(None);
    assert_eq!(names(&carved.pool), ["gpu-0"]);
    assert_eq!(
        findings(&carved),
        [
            "GPU-12345678-1234-1234-1234-000000000001 is not published as a whole GPU: its MIG mode is on (turn it off \
          with `nvidia-smi -i GPU-12345678-1234-1234-1234-000000000001 -mig 0` while it is idle)"
        ]
    );
    node.hold("gpu-1");
    let carved = node.carve(None);
    assert_eq!(names(&carved.pool), ["gpu-1", "gpu-0"]);
    assert_eq!(taints_of(&carved, "gpu-1"), ["gpu.divvy.dev/withdrawn"]);
}

#[test]
fn a_gpu_that_vanished_stays_while_it_is_held_and_goes_afterwards() {
    let mut node = Node::new(2);
    let before = node.carve(None).pool;
    node.hold("gpu-0");
    node.lose(0);
    let held = node.carve(Some(&before));
    assert_eq!(taints_of(&held, "gpu-0"), ["gpu.divvy.dev/lost"]);
    assert_eq!(
        held.pool
            .device(&"gpu-0".parse().unwrap())
            .unwrap()
            .attributes,
        before.device(&"gpu-0".parse().unwrap()).unwrap().attributes
    );
    assert_eq!(
        names(&node.carve(None).pool),
        ["gpu-1", "gpu-0"],
        "also when nothing was carved before"
    );
    node.held.clear();
    assert_eq!(names(&node.carve(Some(&held.pool)).pool), ["gpu-1"]);
}

#[test]
fn a_replaced_card_does_not_inherit_the_facts_of_the_one_before() {
    let mut node = Node::new(1);
    let before = node.carve(None).pool;
    node.ordinals = [(uuid(7), 0)].into_iter().collect();
    node.lose(0);
    node.hold("gpu-0");
    let device = node
        .carve(Some(&before))
        .pool
        .devices()
        .next()
        .unwrap()
        .clone();
    assert_eq!(
        device.attributes["uuid"],
        AttributeValue::String(uuid(7).to_string())
    );
    assert!(!device.attributes.contains_key("productName"));
}

#[test]
fn a_held_device_that_is_unknown_is_noted() {
    let mut node = Node::new(0);
    node.hold("gpu-9");
    node.hold("other-1");
    let carved = node.carve(None);
    assert_eq!(carved.pool.slices, []);
    assert_eq!(
        findings(&carved),
        [
            "a claim holds gpu-9, which this version of the driver does not know: delete the claim, or run the version that published the device",
            "a claim holds other-1, which this version of the driver does not know: delete the claim, or run the version that published the device",
        ]
    );
}

#[test]
fn an_unreadable_gpu_stays_published_with_a_taint() {
    let mut node = Node::new(2);
    let before = node.carve(None).pool;
    node.lose(1);
    let error = GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::TIMEOUT, &uuid(1));
    node.inventory.problems = vec![GpuProblem {
        gpu: uuid(1),
        error,
    }];
    let carved = node.carve(Some(&before));
    assert_eq!(taints_of(&carved, "gpu-1"), ["gpu.divvy.dev/unreadable"]);
    let first = node.carve(None);
    assert_eq!(
        names(&first.pool),
        ["gpu-0"],
        "nothing is known about it at the start"
    );
    assert_eq!(
        findings(&first),
        [
            "GPU-12345678-1234-1234-1234-000000000001 cannot be read and is not published: NVML facts failed on \
          GPU-12345678-1234-1234-1234-000000000001: TIMEOUT (10)"
        ]
    );
}

#[test]
fn sick_gpus_are_tainted_and_the_taint_goes_with_the_sickness() {
    let mut node = Node::new(2);
    let sick = vec![Taint::no_schedule("gpu.divvy.dev/lost", Some("xid-79"))];
    node.taints.insert(uuid(0), sick.clone());
    let carved = node.carve(None);
    assert_eq!(
        carved
            .pool
            .device(&"gpu-0".parse().unwrap())
            .unwrap()
            .taints,
        sick
    );
    node.lose(0);
    let gone = node.carve(Some(&carved.pool));
    assert_eq!(
        names(&gone.pool),
        ["gpu-1", "gpu-0"],
        "health still speaks of it: people can see it"
    );
    node.taints.clear();
    assert_eq!(names(&node.carve(Some(&gone.pool)).pool), ["gpu-1"]);
}

#[test]
fn where_the_server_drops_taints_a_sick_gpu_is_left_out_unless_it_is_held() {
    let mut node = Node::new(2);
    node.taints.insert(
        uuid(0),
        vec![Taint::no_schedule("gpu.divvy.dev/lost", None)],
    );
    node.features = node.features.without([Feature::Taints]);
    let carved = node.carve(None);
    assert_eq!(
        (names(&carved.pool), taints_of(&carved, "gpu-1")),
        (vec!["gpu-1"], vec![])
    );
    assert_eq!(
        findings(&carved),
        [
            "GPU-12345678-1234-1234-1234-000000000000 is not published: it is tainted (gpu.divvy.dev/lost) and the API \
          server drops taints (feature gate DRADeviceTaints)"
        ]
    );
    node.hold("gpu-0");
    assert_eq!(names(&node.carve(None).pool), ["gpu-1", "gpu-0"]);
}

#[test]
fn there_is_one_taint_for_each_key_and_effect() {
    let mut node = Node::new(1);
    let once = |value| Taint::no_schedule("gpu.divvy.dev/xid", Some(value));
    let evicts = |value| Taint {
        effect: TaintEffect::NoExecute,
        ..once(value)
    };
    let other = Taint::no_schedule("gpu.divvy.dev/ecc", None);
    node.taints.insert(
        uuid(0),
        vec![
            once("79"),
            evicts("94"),
            once("48"),
            other.clone(),
            once("79"),
        ],
    );
    let carved = node.carve(None);
    assert_eq!(
        carved.pool.devices().next().unwrap().taints,
        [other, once("48"), evicts("94")]
    );
}

#[test]
fn a_gpu_without_a_number_has_no_name_yet() {
    let mut node = Node::new(2);
    node.ordinals = [(uuid(1), 3)].into_iter().collect();
    let carved = node.carve(None);
    assert_eq!(
        (names(&carved.pool), findings(&carved)),
        (vec!["gpu-3"], vec![])
    );
}

#[test]
fn a_pool_is_never_called_like_a_node() {
    assert_eq!(
        pool_name("worker-1.example.com"),
        "worker-1.example.com/divvy"
    );
    let long = format!("{}.example.com", "n".repeat(240));
    let name = pool_name(&long);
    assert!(
        name.len() <= 253 && name.ends_with("/divvy") && name != pool_name(&format!("{long}x")),
        "{name}"
    );
    assert_eq!(
        validate(&Pool {
            name,
            slices: vec![]
        }),
        Ok(())
    );
}
