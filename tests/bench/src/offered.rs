//! Slices of a node of simulated GPUs that offers everything: carved as the plugin carves it,
//! turned into ResourceSlices as the publisher does.

use std::collections::BTreeMap;

use anyhow::Result;
use divvy_api::names::DRIVER;
use divvy_controller::{Accepted, Target, Write, plan_sync};
use divvy_gpu_sim::Engine;
use divvy_model::Ordinals;
use divvy_offer::{GpuRules, Input, KubeVersion, Modes, Pool, ServerFeatures, carve};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// Returns what a node of this name publishes of the GPUs of a text as `h100x8`, without MIG mode,
/// if it offers everything.
pub(crate) fn everything(gpus: &str, node: &str) -> Result<Pool> {
    let rules = GpuRules {
        modes: Modes::everything(),
        ..GpuRules::default()
    };
    offered(gpus, node, &rules)
}

/// Returns what a node of this name publishes of the GPUs of a text as `h100x8`, without MIG mode,
/// under one rule for all.
pub(crate) fn offered(gpus: &str, node: &str, rules: &GpuRules) -> Result<Pool> {
    let inventory = Engine::new(&gpus.parse()?).inventory();
    let mut ordinals = Ordinals::default();
    let addresses = inventory
        .gpus
        .iter()
        .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address));
    ordinals.assign(addresses);
    let capabilities: BTreeMap<_, _> = inventory
        .gpus
        .iter()
        .filter_map(|(uuid, gpu)| Some((uuid.clone(), gpu.mig.as_ref()?.capabilities.clone())))
        .collect();
    let rules = inventory
        .gpus
        .keys()
        .map(|uuid| (uuid.clone(), rules.clone()))
        .collect();
    let features = ServerFeatures::default().observe(KubeVersion::new(1, 37, 1));
    let plain = Input::plain(node, &inventory, &ordinals, &features);
    Ok(carve(&Input {
        capabilities: &capabilities,
        rules: &rules,
        ..plain
    })
    .pool)
}

/// Returns the slices of a node's pool, as the publisher first writes them.
pub(crate) fn slices(pool: &Pool, node: &str, node_uid: &str) -> Vec<ResourceSlice> {
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.to_owned(),
        uid: node_uid.to_owned(),
        controller: Some(true),
        ..OwnerReference::default()
    };
    let accepted = Accepted::default();
    let target = Target {
        driver: DRIVER,
        node,
        owner: &owner,
        pool,
        accepted: &accepted,
    };
    let writes = plan_sync(&[], &target).writes.into_iter();
    writes
        .filter_map(|write| match write {
            Write::Create(slice) | Write::Update(slice) => Some(*slice),
            Write::Delete { .. } => None,
        })
        .collect()
}
