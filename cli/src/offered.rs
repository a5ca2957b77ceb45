//! Devices that a node publishes of its GPUs under policies, worked out as the plugin does.

use divvy_api::policy::GpuPolicy;
use divvy_model::{Inventory, MpsAbility, Ordinals};
use divvy_offer::{
    GpuRules, Input, KubeVersion, NodeFacts, Pool, Resolved, ServerFeatures, carve, resolve,
};

/// Devices that are published, and the rules that decided.
pub struct Offered {
    pub ordinals: Ordinals,
    pub resolved: Resolved,
    pub pool: Pool,
    /// Devices that are left out, with the reason.
    pub notes: Vec<String>,
    /// Policies that decide nothing about the node, each with a sentence that says so.
    pub idle: Vec<String>,
}

/// Abilities of a node and its cluster that are taken for granted.
#[derive(Debug, Clone, Copy)]
pub struct Granted {
    pub kubernetes: KubeVersion,
    /// The chart's `mps.enabled`, on a node with all that its driver comes with.
    pub mps: bool,
}

impl Default for Granted {
    /// Everything that divvy uses.
    fn default() -> Self {
        Self {
            kubernetes: KubeVersion::new(1, 37, 1),
            mps: true,
        }
    }
}

/// Works it out for an idle node on a cluster that has everything that divvy uses.
pub fn offered(
    inventory: &Inventory,
    node: &NodeFacts<'_>,
    policies: &[GpuPolicy],
    defaults: &GpuRules,
) -> Offered {
    offered_with(inventory, node, policies, defaults, Granted::default())
}

/// Works it out for an idle node.
pub fn offered_with(
    inventory: &Inventory,
    node: &NodeFacts<'_>,
    policies: &[GpuPolicy],
    defaults: &GpuRules,
    granted: Granted,
) -> Offered {
    let mut able = inventory.clone();
    let driver = &inventory.system.driver_version;
    able.system.mps = MpsAbility::of_node(driver, granted.mps, true, None);
    let inventory = &able;
    let mut ordinals = Ordinals::default();
    ordinals.assign(
        inventory
            .gpus
            .iter()
            .map(|(uuid, gpu)| (uuid.clone(), gpu.facts.pci_address)),
    );
    let resolved = resolve(policies, node, inventory, &ordinals, defaults);
    let lock = resolved
        .mode_lock
        .as_ref()
        .map(|(lock, _)| *lock)
        .unwrap_or_default();
    let features = ServerFeatures::default()
        .observe(granted.kubernetes)
        .with_mode_lock(lock);
    let capabilities = inventory
        .gpus
        .iter()
        .filter_map(|(uuid, gpu)| Some((uuid.clone(), gpu.mig.as_ref()?.capabilities.clone())))
        .collect();
    let plain = Input::plain(node.name, inventory, &ordinals, &features);
    let carved = carve(&Input {
        capabilities: &capabilities,
        rules: &resolved.rules,
        ..plain
    });
    let odd = resolved.problems.iter().map(ToString::to_string);
    let idle = policies.iter().filter(|policy| {
        let sets_lock = resolved
            .mode_lock
            .as_ref()
            .is_some_and(|(_, by)| *by == policy.name);
        !sets_lock && resolved.by.values().all(|rule| rule.policy != policy.name)
    });
    let idle: Vec<String> = idle
        .map(|policy| without_effect(&policy.name, node))
        .collect();
    let notes = carved
        .findings
        .iter()
        .map(ToString::to_string)
        .chain(odd)
        .chain(idle.iter().cloned())
        .map(|note| by_number(note, &ordinals))
        .collect();
    Offered {
        ordinals,
        resolved,
        pool: carved.pool,
        notes,
        idle,
    }
}

/// Names GPUs by their numbers, as the names of devices do, in place of UUIDs.
fn by_number(note: String, ordinals: &Ordinals) -> String {
    ordinals.iter().fold(note, |note, (uuid, number)| {
        note.replace(uuid.as_str(), &format!("gpu-{number}"))
    })
}

fn without_effect(policy: &str, node: &NodeFacts<'_>) -> String {
    let labels: Vec<String> = node
        .labels
        .iter()
        .map(|(key, value)| format!("{key}={value}"))
        .collect();
    let labels = if labels.is_empty() {
        "none".to_owned()
    } else {
        labels.join(", ")
    };
    format!(
        "GpuPolicy {policy} has no effect on node {} (labels: {labels}): its nodes or gpus do not match, or other rules \
         come first; --node-label gives the node another label, and divvy inventory --policy another --node-name, too",
        node.name
    )
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use divvy_gpu_sim::SimNode;

    use super::*;
    use crate::manifests::Manifests;

    #[test]
    fn a_policy_for_other_nodes_is_noted() {
        let inventory = SimNode::parse("h100x2").unwrap().inventory();
        let notes = |spec: &str, name: &str| {
            let text = format!(
                "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {{name: p}}\nspec: {{{spec}}}\n"
            );
            let policies = Manifests::parse("x", &text).unwrap().policies;
            let labels = BTreeMap::from([("pool".to_owned(), "training".to_owned())]);
            offered(
                &inventory,
                &NodeFacts {
                    name,
                    labels: &labels,
                },
                &policies,
                &GpuRules::default(),
            )
            .notes
        };
        let of_seven = "nodes: {names: [node-7]}, rules: [{modes: [Whole]}]";
        assert_eq!(notes(of_seven, "node-7"), Vec::<String>::new());
        let on_another = notes(of_seven, "node-8");
        assert!(
            on_another[0]
                .starts_with("GpuPolicy p has no effect on node node-8 (labels: pool=training)"),
            "{on_another:?}"
        );
        assert_eq!(
            notes("modeLock: Disabled, rules: []", "node-7"),
            Vec::<String>::new()
        );
        assert_eq!(
            notes("rules: [{gpus: {ordinals: [9]}, modes: [Whole]}]", "node-7").len(),
            1
        );
    }
}
