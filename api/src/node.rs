//! `GpuNode`: what a node's plugin says about its GPUs, for people and for `divvy status`.
//! Cluster-scoped, one object per node, written by that node's plugin only. Readers take unknown
//! fields as they come: they may be older.

use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// `kind`.
pub const KIND: &str = "GpuNode";

/// A report has no `spec`: nothing can be requested of a node.
#[derive(
    CustomResource, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "divvy.dev",
    version = "v1beta1",
    kind = "GpuNode",
    plural = "gpunodes",
    shortname = "gpun",
    category = "divvy",
    no_spec,
    status = "GpuNodeStatus",
    crates(kube_core = "kube_core"),
    doc = "A GpuNode reports what the GPUs of one node are used for, which claims hold them, and what is wrong with them. \
           It is written by the divvy plugin of the node; changes by others are overwritten.",
    printcolumn(
        name = "GPUs",
        type_ = "integer",
        json_path = ".status.summary.gpus",
        description = "Number of GPUs"
    ),
    printcolumn(
        name = "Free",
        type_ = "integer",
        json_path = ".status.summary.free",
        description = "Number of GPUs that no claim holds and that can be allocated"
    ),
    printcolumn(
        name = "Claims",
        type_ = "integer",
        json_path = ".status.summary.claims",
        description = "Number of claims that hold a device"
    ),
    printcolumn(
        name = "Modes",
        type_ = "string",
        json_path = ".status.summary.modes",
        description = "Number of GPUs in each mode"
    ),
    printcolumn(
        name = "Trouble",
        type_ = "string",
        json_path = ".status.summary.trouble",
        description = "Problems that need attention"
    ),
    printcolumn(
        name = "Since",
        type_ = "date",
        json_path = ".status.summary.since",
        description = "Time since the oldest of these problems began"
    ),
    printcolumn(
        name = "Driver",
        type_ = "string",
        json_path = ".status.versions.driver",
        description = "Version of the NVIDIA driver"
    ),
    printcolumn(
        name = "Changed",
        type_ = "date",
        json_path = ".status.changed",
        description = "Time since the last change of this report"
    ),
    printcolumn(
        name = "Divvy",
        type_ = "string",
        json_path = ".status.versions.divvy",
        description = "Version of the divvy plugin",
        priority = 1
    ),
    printcolumn(
        name = "Kubernetes",
        type_ = "string",
        json_path = ".status.versions.kubernetes",
        description = "Version of the API server",
        priority = 1
    )
)]
pub struct GpuNodeSpec {}

/// The state of the node's GPUs as last observed.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuNodeStatus {
    /// The name under which the node's plugin is registered as a DRA driver.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub driver_name: String,
    /// The figures shown by kubectl get.
    pub summary: Summary,
    /// The versions in use.
    pub versions: Versions,
    /// The enforcement of the memory of shares on this node: capped by the driver, or counted and
    /// not enforced, with what the node lacks.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub share_memory: String,
    /// The GPUs, ordered by number.
    pub gpus: Vec<GpuStatus>,
    /// Problems and deviations, those of the node first, then by GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub troubles: Vec<Trouble>,
    /// The names of policies whose current version the node cannot read.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub bad_policies: Vec<String>,
    /// When this report last changed.
    #[schemars(extend("format" = "date-time"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed: Option<String>,
}

/// The figures shown by kubectl get.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Summary {
    /// The number of GPUs.
    pub gpus: u32,
    /// The number of GPUs that no claim holds and that can be allocated.
    pub free: u32,
    /// The number of claims that hold a device.
    pub claims: u32,
    /// The number of GPUs in each mode, such as: 2 whole, 1 partitioned, 5 idle.
    pub modes: String,
    /// The problems that need attention, such as: bad-policy, gpu-3 lost.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub trouble: String,
    /// When the oldest of these problems began.
    #[schemars(extend("format" = "date-time"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
}

/// The versions in use.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Versions {
    /// The version of the divvy plugin.
    pub divvy: String,
    /// The version of the NVIDIA driver, as the driver writes it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub driver: String,
    /// The newest CUDA version of that driver.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub cuda: String,
    /// The version of the API server that the node last saw.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub kubernetes: String,
}

/// A GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct GpuStatus {
    /// The name that begins the names of its devices, such as gpu-3.
    pub name: String,
    /// The UUID of the GPU.
    pub uuid: String,
    /// The product name, if it can be read.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub product: String,
    /// The total memory in MiB, if the driver reports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_mib: Option<u64>,
    /// The architecture, such as Hopper, if it is known.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub architecture: String,
    /// The CUDA compute capability, such as 9.0.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub compute_capability: String,
    /// True if the GPU can be cut into MIG partitions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig_capable: Option<bool>,
    /// The NVLink domain: GPUs with the same value reach each other over NVLink. It is empty
    /// without NVLink.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub nvlink_domain: String,
    /// The NVLink fabric beyond the node that the GPU is in, as cluster.clique.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fabric: String,
    /// The current mode of the GPU: idle, whole, partitioned, time-sliced or mps.
    pub mode: String,
    /// The kinds of devices that the GPU is offered as: whole, partitions, shares, MPS shares,
    /// shares of partitions.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub offered: Vec<String>,
    /// The policy rule that decides what the GPU may become, as policy/rule. It is empty if no rule
    /// matches.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub policy: String,
    /// The claims that hold devices of the GPU.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub holders: Vec<Holder>,
    /// The taints that keep the GPU, or a part of it, from being allocated: keys without their
    /// domain.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub taints: Vec<String>,
    /// Why the GPU is fenced, as text.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub fence: String,
}

/// A claim that holds a device.
#[derive(
    Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "camelCase", default)]
pub struct Holder {
    /// The namespace of the claim.
    pub namespace: String,
    /// The name of the claim.
    pub name: String,
    /// The UID of the claim.
    pub uid: String,
    /// The name of the device.
    pub device: String,
    /// The phase of the claim: preparing, prepared or leaving.
    pub phase: String,
    /// The reason why a leaving claim does not end.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub reason: String,
    /// The names of the pods that the claim was prepared for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pods: Vec<String>,
    /// When the claim was allocated, if known.
    #[schemars(extend("format" = "date-time"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
}

/// A problem or deviation of the node, a GPU or a part of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct Trouble {
    /// The type of the problem, a stable word such as lost, xid, fenced, lingering, neighbour or
    /// driver-down.
    pub kind: String,
    /// True if no action is needed, because the state was requested or ends by itself.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub notice: bool,
    /// The GPU, such as gpu-3. It is empty if the whole node is affected.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub gpu: String,
    /// The device, partition or policy concerned, if it is not the whole GPU or node.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subject: String,
    /// The claim concerned, as namespace/name.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub claim: String,
    /// The cause, as text.
    pub why: String,
    /// The remedy for the problem.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub remedy: String,
    /// When the problem began. The time is kept across restarts of the plugin.
    #[schemars(extend("format" = "date-time"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
}
