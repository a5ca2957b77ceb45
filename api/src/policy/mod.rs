//! `GpuPolicy`: what administrators allow the GPUs of which nodes to become. Cluster-scoped; the node plugins read it.
//!
//! Which rule decides about a GPU: the policies are tried in order (higher `priority` first, then by name), in each of
//! them the rules from first to last, and the first that matches node and GPU decides everything. See `docs/policy.md`.

mod decode;
mod memory;
mod selector;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

pub(crate) use decode::{MOST_RULES, MOST_SLOTS};
pub use decode::{PolicyError, decode_policy};
pub use memory::{MemoryError, MemorySize};
pub use selector::{LabelSelector, Operator, Requirement};

/// `kind` of policies.
pub const KIND: &str = "GpuPolicy";
/// Name of the resource in URLs.
pub const PLURAL: &str = "gpupolicies";

/// A policy as it was written, checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuPolicy {
    /// Its name.
    pub name: String,
    /// Its UID, if it comes from an API server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uid: Option<String>,
    /// Its generation, if it comes from an API server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<i64>,
    /// What it says.
    pub spec: GpuPolicySpec,
}

/// `spec` of a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct GpuPolicySpec {
    /// Policies with a higher number are tried first; among equals the name decides.
    pub priority: i32,
    /// The nodes that the policy is for; all if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeMatch>,
    /// Whether one GPU may be published in several modes at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode_lock: Option<ModeLock>,
    /// The first that matches node and GPU decides.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<PolicyRule>,
}

/// What may be done with the GPUs that it matches. What is left out is as on a node without a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct PolicyRule {
    /// For people, and where the rule is named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The nodes that the rule is for, among those of the policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeMatch>,
    /// The GPUs that the rule is for; all if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<GpuMatch>,
    /// What the GPUs are offered as; if left out, as their MIG mode is now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modes: Option<BTreeSet<OfferedMode>>,
    /// How they are cut.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigSettings>,
    /// How they are shared.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<ShareSettings>,
    /// What happens when they are sick.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<HealthSettings>,
}

/// Which nodes: those that are named *or* selected.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct NodeMatch {
    /// By name.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub names: BTreeSet<String>,
    /// By labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

/// Which GPUs of a node: those that any entry of any list fits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct GpuMatch {
    /// By UUID, `GPU-…`.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub uuids: BTreeSet<String>,
    /// By the number in the device's name: 3 for `gpu-3`.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub ordinals: BTreeSet<u32>,
    /// By product name, letter case aside; `*` stands for any text.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub products: BTreeSet<String>,
    /// By PCI address, `0000:3b:00.0`.
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub pci_addresses: BTreeSet<String>,
}

/// One of the things that a GPU can be offered as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum OfferedMode {
    /// The whole GPU, for one claim.
    Whole,
    /// MIG partitions.
    Mig,
    /// Time-sliced shares.
    TimeSlicing,
}

/// Whether one GPU may be published in several modes at once, of which the first claim decides.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum ModeLock {
    /// Where the cluster's version allows it.
    #[default]
    Auto,
    /// Everywhere; the administrator vouches for the scheduler. Not `On`, which YAML takes for `true`.
    Enabled,
    /// Nowhere.
    Disabled,
}

/// How GPUs are cut.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct MigSettings {
    /// Profiles that are offered, by name (`1g.10gb`); if left out, all but the rare ones (`+me`, `-me`, `+gfx`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profiles: Option<BTreeSet<String>>,
    /// Which placement of a profile is tried first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement_order: Option<PlacementOrder>,
    /// Whose the GPU's instances are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instances: Option<Instances>,
}

/// Which placement of a profile is tried first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum PlacementOrder {
    /// From the first memory slice up.
    Ascending,
    /// From the last memory slice down.
    Descending,
}

/// Whose a GPU's MIG instances are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Instances {
    /// The driver's: made when a claim needs one, removed with it. Instances of others are left alone.
    OnDemand,
    /// The administrator's: those that exist are offered, none is made or removed.
    Static,
}

/// How GPUs are shared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ShareSettings {
    /// How many shares one GPU has at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// The smallest memory that a share is granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_memory: Option<MemorySize>,
    /// The smallest part of the compute that a share is granted, in percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_cores: Option<u32>,
    /// Memory of the GPU that no share is granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_memory: Option<MemorySize>,
}

/// What happens when GPUs are sick.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct HealthSettings {
    /// Whether pods that use the GPU are evicted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evict: Option<bool>,
}
