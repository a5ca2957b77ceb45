//! What a node of simulated GPUs publishes under given rules: carved as the plugin carves it, turned into
//! ResourceSlices as the publisher does.

use std::collections::BTreeMap;

use anyhow::Result;
use divvy_api::names::DRIVER;
use divvy_controller::{Accepted, Target, Write, plan_sync};
use divvy_gpu_sim::Engine;
use divvy_model::mig::MigCapabilities;
use divvy_model::{GpuUuid, Inventory, Ordinals};
use divvy_offer::{Carved, GpuRules, Input, KubeVersion, Modes, Pool, Rules, ServerFeatures, carve};
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;

/// GPUs and what may be done with them.
pub(crate) struct Offered {
    inventory: Inventory,
    ordinals: Ordinals,
    capabilities: BTreeMap<GpuUuid, MigCapabilities>,
    rules: Rules,
    features: ServerFeatures,
}

impl Offered {
    /// GPUs of a text as `h100x8`, offered as everything, with MIG mode on or off.
    pub(crate) fn everything(gpus: &str, mig_mode: bool) -> Result<Self> {
        let mut engine = Engine::new(&gpus.parse()?);
        for uuid in engine.list()? {
            if mig_mode {
                // Where that takes a reset, there is one.
                engine.set_mig_mode(&uuid, true)?;
                engine.reset_gpu(&uuid)?;
            }
        }
        let inventory = engine.inventory();
        let rules = GpuRules { modes: Modes::everything(), ..GpuRules::default() };
        let mut ordinals = Ordinals::default();
        ordinals.assign(inventory.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)));
        let of = |(uuid, gpu): (&GpuUuid, &divvy_model::Gpu)| {
            gpu.mig.as_ref().map(|mig| (uuid.clone(), mig.capabilities.clone()))
        };
        Ok(Self {
            ordinals,
            capabilities: inventory.gpus.iter().filter_map(of).collect(),
            rules: inventory.gpus.keys().map(|uuid| (uuid.clone(), rules.clone())).collect(),
            features: ServerFeatures::default().observe(KubeVersion::new(1, 37, 1)),
            inventory,
        })
    }

    /// Decides what a node of this name publishes.
    pub(crate) fn carve(&self, node: &str) -> Carved {
        let plain = Input::plain(node, &self.inventory, &self.ordinals, &self.features);
        carve(&Input { capabilities: &self.capabilities, rules: &self.rules, ..plain })
    }
}

/// The slices of a node's pool, as the publisher first writes them.
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
    let target = Target { driver: DRIVER, node, owner: &owner, pool, accepted: &accepted };
    let writes = plan_sync(&[], &target).writes.into_iter();
    writes
        .filter_map(|write| match write {
            Write::Create(slice) | Write::Update(slice) => Some(*slice),
            Write::Delete { .. } => None,
        })
        .collect()
}
