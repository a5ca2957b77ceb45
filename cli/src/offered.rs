//! What a node publishes of its GPUs under policies, worked out as the plugin does.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::policy::GpuPolicy;
use divvy_model::{Inventory, Ordinals};
use divvy_offer::{
    GpuRules, Input, KubeVersion, NodeFacts, Partitioning, Pool, Resolved, ServerFeatures, carve_partitions,
    resolve,
};

/// What is published, and what decided.
pub(crate) struct Offered {
    pub(crate) ordinals: Ordinals,
    pub(crate) resolved: Resolved,
    pub(crate) pool: Pool,
    /// What is left out, and why.
    pub(crate) notes: Vec<String>,
}

/// Of an idle node on a cluster that has everything that divvy uses.
pub(crate) fn offered(
    inventory: &Inventory,
    node: &NodeFacts<'_>,
    policies: &[GpuPolicy],
    defaults: &GpuRules,
) -> Offered {
    let mut ordinals = Ordinals::default();
    ordinals.assign(inventory.gpus.iter().map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)));
    let resolved = resolve(policies, node, inventory, &ordinals, defaults);
    let lock = resolved.mode_lock.as_ref().map(|(lock, _)| *lock).unwrap_or_default();
    let features = ServerFeatures::default().observe(KubeVersion::new(1, 37, 1)).with_mode_lock(lock);
    let capabilities = inventory
        .gpus
        .iter()
        .filter_map(|(uuid, gpu)| Some((uuid.clone(), gpu.mig.as_ref()?.capabilities.clone())))
        .collect();
    let input = Input {
        node: node.name,
        inventory,
        ordinals: &ordinals,
        taints: &BTreeMap::new(),
        held: &BTreeSet::new(),
        leaving: &BTreeSet::new(),
        recorded: &BTreeSet::new(),
        previous: None,
        features: &features,
    };
    let carved = carve_partitions(&input, &Partitioning::new(&capabilities, &resolved.rules));
    let odd = resolved.problems.iter().map(ToString::to_string);
    let notes = carved.notes.iter().map(ToString::to_string).chain(odd).collect();
    Offered { ordinals, resolved, pool: carved.pool, notes }
}
