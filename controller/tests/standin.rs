//! In the place of NVIDIA's driver: the slices of the same pool, with other names and nothing else
//! changed.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeSet;

use divvy_allocator::{AllocatedState, Allocator, Features, Inputs, Outcome, Slices};
use divvy_api::names::{DRIVER, NVIDIA_DRIVER, Naming};
use divvy_controller::{Accepted, Target, Write, plan_sync, specs};
use divvy_gpu_sim::{Engine, mig_capabilities};
use divvy_model::Ordinals;
use divvy_offer::{GpuRules, Input, KubeVersion, Modes, Pool, ServerFeatures, carve};
use divvy_why::detail::detail;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use serde_json::{from_value, json};

/// Returns the pool of a node whose GPUs may become everything.
fn pool(gpus: &str) -> Pool {
    let engine = Engine::new(&gpus.parse().unwrap());
    let inventory = engine.inventory();
    let mut ordinals = Ordinals::default();
    let found = inventory.gpus.iter();
    ordinals.assign(found.map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)));
    let caps =
        |gpu: &divvy_gpu_sim::SimGpu| Some((gpu.facts.uuid.clone(), mig_capabilities(&gpu.model)?));
    let capabilities = engine.gpus().iter().filter_map(caps).collect();
    let all = GpuRules {
        modes: Modes::everything(),
        ..GpuRules::default()
    };
    let uuids = inventory.gpus.keys();
    let rules = uuids.map(|uuid| (uuid.clone(), all.clone())).collect();
    let features = ServerFeatures::default().observe(KubeVersion::new(1, 37, 1));
    let plain = Input::plain("n1", &inventory, &ordinals, &features);
    carve(&Input {
        capabilities: &capabilities,
        rules: &rules,
        ..plain
    })
    .pool
}

/// Returns the spec with the names of divvy.
fn with_our_names(mut spec: ResourceSliceSpec) -> ResourceSliceSpec {
    let driver = std::mem::replace(&mut spec.driver, DRIVER.to_owned());
    for device in spec.devices.iter_mut().flatten() {
        device.attributes = device.attributes.take().map(|all| {
            let all = all.into_iter();
            all.map(|(name, value)| (Naming::ours(&driver, &name).to_owned(), value))
                .collect()
        });
        device.capacity = device.capacity.take().map(|all| {
            let all = all.into_iter();
            all.map(|(name, value)| (Naming::ours(&driver, &name).to_owned(), value))
                .collect()
        });
    }
    spec
}

#[test]
fn standing_in_changes_the_names_and_nothing_else() {
    for gpus in ["h100x2", "a100-40", "t4x2", "b200", "gb10"] {
        let pool = pool(gpus);
        let as_nvidia = specs(NVIDIA_DRIVER, "n1", &pool);
        let names: BTreeSet<&str> = as_nvidia
            .iter()
            .flat_map(|spec| spec.devices.iter().flatten())
            .flat_map(|device| device.attributes.iter().flatten())
            .map(|(name, _)| name.as_str())
            .collect();
        assert!(names.contains("productName"), "{gpus}: {names:?}");
        assert!(names.contains("gpu.divvy.dev/gpuUUID"), "{gpus}: {names:?}");
        assert!(!names.contains("gpuUUID"), "{gpus}: {names:?}");
        let back: Vec<_> = as_nvidia.into_iter().map(with_our_names).collect();
        assert_eq!(back, specs(DRIVER, "n1", &pool), "{gpus}");
    }
}

/// Under NVIDIA's name another pool is NVIDIA's; under ours it was ours once.
#[test]
fn slices_of_another_pool_are_left_to_nvidias_plugin() {
    let pool = pool("t4");
    let (owner, accepted) = (OwnerReference::default(), Accepted::default());
    for (driver, deleted) in [(NVIDIA_DRIVER, 0), (DRIVER, 1)] {
        let other: ResourceSlice = from_value(json!({
            "metadata": { "name": "other" },
            "spec": { "driver": driver, "nodeName": "n1",
                "pool": { "name": "n1", "generation": 7, "resourceSliceCount": 1 } },
        }))
        .unwrap();
        let target = Target {
            driver,
            node: "n1",
            owner: &owner,
            pool: &pool,
            accepted: &accepted,
        };
        let plan = plan_sync(&[other], &target);
        let deletes = plan.writes.iter();
        let deletes = deletes.filter(|write| matches!(write, Write::Delete { .. }));
        assert_eq!((deletes.count(), plan.generation), (deleted, 1), "{driver}");
    }
}

/// Selectors and requests of a claim name attributes and capacities as they are published.
#[test]
fn a_claim_finds_names_of_both_drivers() {
    let pool = pool("h100");
    let owner = OwnerReference::default();
    let accepted = Accepted::default();
    let target = Target {
        driver: NVIDIA_DRIVER,
        node: "n1",
        owner: &owner,
        pool: &pool,
        accepted: &accepted,
    };
    let writes = plan_sync(&[], &target).writes.into_iter();
    let slices: Vec<ResourceSlice> = writes
        .filter_map(|write| match write {
            Write::Create(slice) => Some(*slice),
            Write::Update(_) | Write::Delete { .. } => None,
        })
        .collect();
    let classes = [from_value(json!({
        "metadata": { "name": "any" },
        "spec": { "selectors": [{ "cel": { "expression": "device.driver == 'gpu.nvidia.com'" } }] },
    }))
    .unwrap()];
    let node = from_value(json!({ "metadata": { "name": "n1" } })).unwrap();
    let place = |cel: &str, capacity: serde_json::Value| {
        let claim: ResourceClaim = from_value(json!({
            "metadata": { "name": "c", "namespace": "default", "uid": "c" },
            "spec": { "devices": { "requests": [{ "name": "r", "exactly": {
                "deviceClassName": "any", "allocationMode": "ExactCount", "count": 1,
                "selectors": [{ "cel": { "expression": cel } }],
                "capacity": { "requests": capacity },
            } }] } },
        }))
        .unwrap();
        let slices = Slices::new(&slices);
        let inputs = Inputs {
            slices: &slices,
            classes: &classes,
            allocated: &AllocatedState::from_claims(&[]),
            node: &node,
        };
        match Allocator::new(Features::default())
            .allocate(&inputs, &[&claim])
            .unwrap()
        {
            Outcome::DoesNotFit(why) => detail(&why),
            Outcome::Fits(allocated) => {
                let devices = allocated.results[0].devices.as_ref().unwrap();
                let result = &devices.results.as_ref().unwrap()[0];
                let consumed = result.consumed_capacity.iter().flatten();
                let consumed: Vec<&str> = consumed.map(|(name, _)| name.as_str()).collect();
                format!("{} {}", result.device, consumed.join(","))
            }
        }
    };
    let whole = "device.attributes['gpu.nvidia.com'].type == 'gpu' && \
                 device.attributes['gpu.divvy.dev'].sharing == 'exclusive' && \
                 device.capacity['gpu.nvidia.com'].memory.isGreaterThan(quantity('70Gi'))";
    assert_eq!(place(whole, json!({})), "gpu-0 ");
    let share = "device.attributes['gpu.nvidia.com'].type == 'gpu-share'";
    let some = json!({ "memory": "4Gi", "gpu.divvy.dev/cores": "5" });
    let consumed = "gpu-0-ts gpu.divvy.dev/cores,gpu.divvy.dev/slots,memory";
    assert_eq!(place(share, some), consumed);
}
