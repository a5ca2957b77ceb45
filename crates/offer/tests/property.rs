//! Any inventory gives a valid pool, always the same, and the loss of one GPU changes nothing but
//! that GPU. `PROPTEST_CASES` raises the number of cases.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{
    Architecture, Brand, ComputeCapability, CudaVersion, DeviceName, FabricFacts, Gpu, GpuError,
    GpuErrorCode, GpuFacts, GpuOp, GpuProblem, GpuUuid, HostTopology, Inventory, MigMode,
    NvLinkPeer, Ordinals, PciAddress, SystemFacts,
};
use divvy_offer::{
    Carved, Feature, Input, Pool, ServerFeatures, Taint, TaintEffect, carve, validate,
};
use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;

fn uuid(n: usize) -> GpuUuid {
    format!("GPU-12345678-1234-1234-1234-{n:012x}")
        .parse()
        .unwrap()
}

fn address() -> impl Strategy<Value = PciAddress> {
    (
        prop_oneof![0..4_u32, any::<u32>()],
        any::<u8>(),
        0..32_u8,
        0..8_u8,
    )
        .prop_map(|(domain, bus, device, function)| PciAddress {
            domain,
            bus,
            device,
            function,
        })
}

fn mig_mode() -> impl Strategy<Value = MigMode> {
    prop_oneof![
        Just(MigMode::Unsupported),
        (any::<bool>(), any::<bool>())
            .prop_map(|(current, pending)| MigMode::Supported { current, pending }),
    ]
}

fn link() -> impl Strategy<Value = NvLinkPeer> {
    prop_oneof![
        address().prop_map(NvLinkPeer::Gpu),
        Just(NvLinkPeer::Switch),
        any::<u32>().prop_map(NvLinkPeer::Other)
    ]
}

prop_compose! {
    fn gpu()(
        product_name in ".{0,80}",
        (brand, architecture, major, minor) in (0..20_u32, 0..16_u32, any::<u32>(), any::<u32>()),
        memory_bytes in option::of(any::<u64>()),
        multiprocessors in option::of(any::<u32>()),
        pci_address in address(),
        mig_mode in mig_mode(),
        addressing_mode in option::of(".{0,70}"),
        nvlinks in vec(link(), 0..4),
        fabric in option::of(("[0-9a-f]{0,80}", any::<u32>())),
        numa_node in option::of(any::<u32>()),
        pcie_root in option::of(".{0,70}"),
    ) -> Gpu {
        let facts = GpuFacts {
            uuid: uuid(0), // set to the key below
            minor: None,
            product_name,
            brand: Brand(brand),
            architecture: Architecture::from_nvml(architecture),
            compute_capability: ComputeCapability { major, minor },
            memory_bytes,
            memory_reserved_bytes: None,
            multiprocessors,
            pci_address,
            pci_device_id: 0,
            mig_mode,
            compute_mode: None,
            persistence: None,
            addressing_mode,
            c2c: None,
            module_id: None,
            nvlinks,
            fabric: fabric.map(|(cluster_uuid, clique_id)| FabricFacts { cluster_uuid, clique_id }),
        };
        Gpu { facts, topology: HostTopology { numa_node, pcie_root }, mig: None }
    }
}

fn taint() -> impl Strategy<Value = Taint> {
    let effect = prop_oneof![Just(TaintEffect::NoSchedule), Just(TaintEffect::NoExecute)];
    (
        "gpu[.]divvy[.]dev/[a-e]",
        option::of("[a-z0-9]{1,63}"),
        effect,
    )
        .prop_map(|(key, value, effect)| Taint { key, value, effect })
}

#[derive(Debug)]
struct World {
    inventory: Inventory,
    ordinals: Ordinals,
    taints: BTreeMap<GpuUuid, Vec<Taint>>,
    held: BTreeSet<DeviceName>,
    features: ServerFeatures,
}

impl World {
    fn carve(&self, previous: Option<&Pool>) -> Carved {
        let Self {
            inventory,
            ordinals,
            taints,
            held,
            features,
        } = self;
        let plain = Input::plain("node-1", inventory, ordinals, features);
        carve(&Input {
            taints,
            held,
            previous,
            ..plain
        })
    }
}

prop_compose! {
    fn world()(
        gpus in vec(gpu(), 0..80),
        numbers in Just((0..200_u32).collect::<Vec<_>>()).prop_shuffle(),
        tainted in vec((0..90_usize, vec(taint(), 0..20)), 0..10),
        problems in btree_set(0..90_usize, 0..3),
        held in vec(0..210_u32, 0..10),
        driver_version in prop_oneof!["[0-9]{1,3}[.][0-9]{2}[.][0-9]{2}", ".{0,70}"],
        (major, minor) in (any::<u32>(), any::<u32>()),
        drops in any::<bool>(),
    ) -> World {
        let gpus: BTreeMap<_, _> = gpus.into_iter().enumerate().map(|(n, mut gpu)| {
            gpu.facts.uuid = uuid(n);
            (uuid(n), gpu)
        }).collect();
        let problems = problems.into_iter().filter(|n| !gpus.contains_key(&uuid(*n))).map(|n| GpuProblem {
            gpu: uuid(n),
            error: GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::UNKNOWN, &uuid(n)),
        }).collect();
        let system = SystemFacts {
            driver_version,
            nvml_version: None,
            memory_caps: divvy_model::MemoryCaps::default(),
            caps_linger: false,
            mps: divvy_model::MpsAbility::default(),
            cuda_version: Some(CudaVersion { major, minor }),
        };
        let features = ServerFeatures::default();
        World {
            inventory: Inventory { system, gpus, problems, with_mig: BTreeMap::new() },
            ordinals: numbers.into_iter().take(90).enumerate().map(|(n, ordinal)| (uuid(n), ordinal)).collect(),
            taints: tainted.into_iter().map(|(n, taints)| (uuid(n), taints)).collect(),
            held: held.into_iter().map(|n| format!("gpu-{n}").parse().unwrap()).collect(),
            features: if drops { features.without([Feature::Taints]) } else { features },
        }
    }
}

fn cases() -> ProptestConfig {
    let cases = std::env::var("PROPTEST_CASES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(48);
    ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn any_inventory_gives_a_valid_pool_and_always_the_same(world in world()) {
        let first = world.carve(None);
        prop_assert_eq!(validate(&first.pool), Ok(()));
        prop_assert_eq!(&world.carve(None), &first);
        let again = world.carve(Some(&first.pool));
        prop_assert_eq!(validate(&again.pool), Ok(()));
        prop_assert_eq!(&world.carve(Some(&again.pool)).pool, &again.pool, "carving again changes nothing");
    }

    #[test]
    fn the_loss_of_a_gpu_changes_its_own_slice_only(
        mut world in world(),
        which in any::<prop::sample::Index>(),
    ) {
        prop_assume!(!world.inventory.gpus.is_empty());
        // Links give labels to other GPUs, which then change too: another property.
        for gpu in world.inventory.gpus.values_mut() {
            gpu.facts.nvlinks.clear();
            gpu.facts.fabric = None;
        }
        let before = world.carve(None).pool;
        let gone = which.get(&world.inventory.gpus.keys().cloned().collect::<Vec<_>>()).clone();
        world.inventory.gpus.remove(&gone);
        let after = world.carve(Some(&before)).pool;
        prop_assert_eq!(validate(&after), Ok(()));
        let rest = |pool: &Pool| -> Vec<_> {
            let of_gone = |d: &divvy_offer::Device| {
                d.attributes.get("gpuUUID") == Some(&divvy_offer::AttributeValue::String(gone.to_string()))
            };
            pool.devices().filter(|d| !of_gone(d)).cloned().collect()
        };
        prop_assert_eq!(rest(&before), rest(&after));
        let changed = after.slices.iter().filter(|slice| !before.slices.contains(slice)).count();
        prop_assert!(changed <= 1, "{} slices changed", changed);
        for device in before.devices().filter(|d| world.held.contains(&d.name)) {
            prop_assert!(after.device(&device.name).is_some(), "{} is held", device.name);
        }
    }
}
