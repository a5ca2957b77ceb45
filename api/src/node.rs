//! `GpuNode`: what a node's plugin says about its GPUs, for people and for `divvy status`. Cluster-scoped, one object per
//! node, written by that node's plugin only. Readers take unknown fields as they come: they may be older.

use serde::{Deserialize, Serialize};

/// `kind`.
pub const KIND: &str = "GpuNode";
/// Name of the resource in URLs.
pub const PLURAL: &str = "gpunodes";

/// `status`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuNodeStatus {
    /// Numbers for columns.
    pub summary: Summary,
    /// Versions in force.
    pub versions: Versions,
    /// The GPUs, by number.
    pub gpus: Vec<GpuStatus>,
    /// What is wrong or not as it could be: with the node first, then by GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<Trouble>,
    /// Policies whose present version the node cannot read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bad_policies: Vec<String>,
    /// When any of this changed last (RFC 3339).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed: Option<String>,
}

/// Numbers for columns.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Summary {
    /// GPUs known.
    pub gpus: u32,
    /// GPUs that nobody holds and that can be given out.
    pub free: u32,
    /// Claims that hold something.
    pub claims: u32,
    /// GPUs by mode, in words: `2 whole, 1 partitioned, 5 idle`.
    pub modes: String,
    /// What needs a person, in words: `bad-policy, gpu-3 lost`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub trouble: String,
    /// Since when the oldest of it is so (RFC 3339).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
}

/// Versions in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Versions {
    /// Of divvy's node plugin.
    pub divvy: String,
    /// Of the NVIDIA driver, as it writes it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub driver: String,
    /// Of the API server, as the node has seen it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kubernetes: String,
}

/// One GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuStatus {
    /// `gpu-3`.
    pub name: String,
    /// Its UUID.
    pub uuid: String,
    /// Its product, if it can be read.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub product: String,
    /// `idle`, `whole`, `partitioned`, `time-sliced`.
    pub mode: String,
    /// What it is offered as: `whole`, `partitions`, `shares`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub offered: Vec<String>,
    /// The rule that decides what it may become, if one does: `policy/rule`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub policy: String,
    /// Who holds it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<Holder>,
    /// Why it, or part of it, is not given out: keys of the taints on its devices, without the domain.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<String>,
    /// Why it is fenced, in words.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fence: String,
}

/// A claim that holds a device.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Holder {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub name: String,
    /// The claim's UID.
    pub uid: String,
    /// The device.
    pub device: String,
    /// `preparing`, `prepared`, `leaving`.
    pub phase: String,
    /// What keeps it, while it is leaving.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The pods that the claim was prepared for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
    /// When the claim was allocated (RFC 3339), if the API server tells.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
}

/// Something that is wrong with a node, a GPU or a part of it, or not as it could be.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Trouble {
    /// What, as a stable word: `lost`, `xid`, `fenced`, `lingering`, `neighbour`, `driver-down`, …
    pub kind: String,
    /// Whether nobody needs to do anything: it was asked for, or goes by itself.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub notice: bool,
    /// The GPU, as `gpu-3`; empty: the node.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gpu: String,
    /// The device, partition or policy it is about, where it is not all of the GPU or node.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// The claim concerned, as `namespace/name`.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub claim: String,
    /// Why, in words.
    pub why: String,
    /// What to do about it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// Since when (RFC 3339). It outlasts restarts of the node's plugin.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
}
