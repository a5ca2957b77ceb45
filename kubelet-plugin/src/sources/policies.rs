//! The policies of administrators: watched in the API, remembered on disk, and sent together with the labels of this node
//! that they may ask for.

mod book;
mod rights;
mod watch;

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_api::policy::GpuPolicy;
use divvy_offer::Resolved;
use serde_json::{Value, json};

use crate::events::PolicyRef;

pub(crate) use rights::take_over;
pub(crate) use watch::{PolicyWatch, PolicyWiring, RETRY, WAIT};

/// What is known of policies and of the node that they are about.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KnownPolicies {
    /// Whether the cluster has the definition of `GpuPolicy`.
    pub(crate) served: bool,
    /// The policies that can be read; of one that cannot, the last version that could.
    pub(crate) policies: Vec<GpuPolicy>,
    /// Policies whose present version cannot be read, and why.
    pub(crate) bad: BTreeMap<String, String>,
    /// Labels of this node.
    pub(crate) labels: BTreeMap<String, String>,
}

impl KnownPolicies {
    /// A policy, for Events about it.
    pub(crate) fn reference(&self, name: &str) -> PolicyRef {
        let policy = self.policies.iter().find(|policy| policy.name == name);
        PolicyRef {
            name: name.to_owned(),
            uid: policy.and_then(|policy| policy.uid.clone()),
            generation: policy.and_then(|policy| policy.generation),
        }
    }
}

/// What is in force, for those who show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Effective {
    /// The policies and the node's labels.
    pub(crate) known: Arc<KnownPolicies>,
    /// What they make of the GPUs.
    pub(crate) resolved: Arc<Resolved>,
}

impl Effective {
    /// As `/debug/state` has it.
    pub(crate) fn state(&self) -> Value {
        let by = |uuid| self.resolved.by.get(uuid).map(ToString::to_string);
        let gpus = self
            .resolved
            .rules
            .iter()
            .map(|(uuid, rules)| (uuid.to_string(), json!({ "decidedBy": by(uuid), "rules": rules })));
        json!({
            "served": self.known.served,
            "policies": self.known.policies.iter().map(|policy| json!({
                "name": policy.name,
                "generation": policy.generation,
                "priority": policy.spec.priority,
            })).collect::<Vec<_>>(),
            "bad": self.known.bad,
            "nodeLabels": self.known.labels,
            "modeLock": self.resolved.mode_lock,
            "gpus": gpus.collect::<serde_json::Map<_, _>>(),
            "problems": self.resolved.problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    }
}
