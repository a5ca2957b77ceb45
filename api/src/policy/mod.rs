//! `GpuPolicy`: what administrators allow the GPUs of which nodes to become. Cluster-scoped; the
//! node plugins read it.
//!
//! The rule that decides about a GPU: the policies are tried in order (higher `priority` first,
//! then by name), in each of them the rules from first to last, and the first that matches node and
//! GPU decides everything. See `docs/policy.md`.

mod burst;
mod decode;
mod memory;
mod selector;

use std::collections::BTreeSet;

use divvy_model::Form;
use kube_derive::CustomResource;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use burst::{BurstSettings, Factor};
use decode::{MOST_BRIEF_IDLENESS, MOST_RULES, MOST_SLOTS};
pub use decode::{PolicyError, decode_policy};
pub use memory::{MemoryError, MemoryPart, MemoryPartError, MemorySize};
pub use selector::{LabelSelector, Operator, Requirement};

/// A label's value, as the API server checks it.
const LABEL: &str = r"^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$";
/// The name of a node.
const DNS_NAME: &str = r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$";

/// `kind` of policies.
pub const KIND: &str = "GpuPolicy";

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
    /// Its content.
    pub spec: GpuPolicySpec,
}

/// The GPUs that the policy applies to, and the modes in which they are offered.
#[derive(
    CustomResource, Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema,
)]
#[kube(
    group = "divvy.dev",
    version = "v1beta1",
    kind = "GpuPolicy",
    root = "GpuPolicyObject",
    plural = "gpupolicies",
    shortname = "gpupol",
    category = "divvy",
    crates(kube_core = "kube_core"),
    doc = "A GpuPolicy defines what the GPUs of the selected nodes may become: whole GPUs, MIG partitions, time-sliced \
           or MPS shares. Policies are evaluated by priority, then by name. The first rule that matches both node and GPU \
           decides everything about that GPU. A GPU without a matching rule is offered according to its MIG mode.",
    printcolumn(
        name = "Priority",
        type_ = "integer",
        json_path = ".spec.priority",
        description = "Policies with a higher priority are evaluated first; equal priorities are ordered by name"
    ),
    printcolumn(
        name = "Nodes",
        type_ = "string",
        json_path = ".spec.nodes.names",
        description = "Nodes that the policy selects by name"
    ),
    printcolumn(
        name = "Rules",
        type_ = "string",
        json_path = ".spec.rules[*].name",
        description = "Names of the rules"
    ),
    printcolumn(
        name = "Modes",
        type_ = "string",
        json_path = ".spec.rules[*].modes",
        description = "Modes in which the rules offer GPUs"
    ),
    printcolumn(
        name = "Mode Lock",
        type_ = "string",
        json_path = ".spec.modeLock",
        description = "Whether one GPU may be offered in several modes at once"
    ),
    printcolumn(
        name = "Age",
        type_ = "date",
        json_path = ".metadata.creationTimestamp",
        description = "Time since the policy was created"
    )
)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct GpuPolicySpec {
    /// Policies with a higher priority are evaluated first. Policies with equal priority are
    /// ordered by name.
    #[schemars(range(min = -1_000_000, max = 1_000_000))]
    pub priority: i32,
    /// The nodes that the policy applies to. If omitted, it applies to all nodes. A node matches if
    /// it is listed by name or selected by its labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeMatch>,
    /// Permission to offer one GPU in several modes at once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode_lock: Option<ModeLock>,
    /// The rules of the policy. The first rule that matches both node and GPU decides.
    #[schemars(
        length(max = MOST_RULES),
        extend("x-kubernetes-validations" = [{
            "rule": "self.all(r, !has(r.name) || self.exists_one(other, has(other.name) && other.name == r.name))",
            "message": "two rules have the same name",
        }])
    )]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub rules: Vec<PolicyRule>,
}

/// Settings of the GPUs that the rule matches. An omitted setting keeps the behavior that
/// applies without a policy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.mig) || !has(self.modes) || 'Mig' in self.modes",
        "message": "mig requires Mig in modes",
    },
    {
        "rule": "!has(self.shares) || has(self.modes) && ('TimeSlicing' in self.modes || 'Mps' in self.modes) || has(self.mig) && has(self.mig.sharing)",
        "message": "shares requires TimeSlicing or Mps in modes, or mig.sharing",
    },
    {
        "rule": "!has(self.mig) || !has(self.mig.sharing) || has(self.modes)",
        "message": "mig.sharing requires Mig in modes",
    },
    {
        "rule": "!has(self.mig) || !has(self.mig.sharing) || !has(self.usage) || !has(self.usage.overuse) || self.usage.overuse != 'Evict'",
        "message": "usage.overuse Evict does not go with mig.sharing: harm is judged by the memory of the whole GPU (use Report)",
    },
]))]
pub struct PolicyRule {
    /// The name by which reports and messages refer to the rule. It must be unique within the
    /// policy.
    #[schemars(length(min = 1, max = 63), regex(pattern = LABEL))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The nodes that the rule applies to, among those of the policy. If omitted, it applies to all
    /// of them. A node matches if it is listed by name or selected by its labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nodes: Option<NodeMatch>,
    /// The GPUs that the rule applies to. If omitted, it applies to all GPUs. A GPU matches if any
    /// entry of any list matches.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gpus: Option<GpuMatch>,
    /// The modes in which the GPUs are offered. If omitted, a GPU is offered as its MIG mode is
    /// set: Whole if disabled, Mig if enabled. With several modes, the first claim decides what a
    /// GPU becomes, and the GPU is open to all modes again when its last claim ends.
    #[schemars(length(min = 1, max = 4), extend("x-kubernetes-list-type" = "set"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub modes: Option<BTreeSet<OfferedMode>>,
    /// Settings for partitioning the GPUs with MIG.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigSettings>,
    /// Settings for sharing the GPUs by time-slicing or MPS. Memory and cores of a time-sliced
    /// share are accounted for, but not enforced. With drivers before R615, MPS shares are equal
    /// parts of the GPU, and of these settings slots and reservedMemory apply to them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shares: Option<ShareSettings>,
    /// Actions when a GPU becomes unhealthy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub health: Option<HealthSettings>,
    /// Actions for claims that use more than they were granted, or nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<UsageSettings>,
    /// Settings for programs that count GPUs against a quota.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quota: Option<QuotaSettings>,
}

/// Selects nodes. A node matches if it is listed by name or selected by its labels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1))]
pub struct NodeMatch {
    /// Nodes by name.
    #[schemars(
        length(min = 1, max = 512),
        inner(length(max = 253), regex(pattern = DNS_NAME)),
        extend("x-kubernetes-list-type" = "set")
    )]
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub names: BTreeSet<String>,
    /// Nodes by their labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub selector: Option<LabelSelector>,
}

/// Selects GPUs of a node. A GPU matches if any entry of any list matches.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1))]
pub struct GpuMatch {
    /// GPUs by UUID.
    #[schemars(
        length(min = 1, max = 64),
        inner(
            length(max = 40),
            regex(pattern = "^GPU-[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$")
        ),
        extend("x-kubernetes-list-type" = "set")
    )]
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub uuids: BTreeSet<String>,
    /// GPUs by the number in their device names: 3 stands for gpu-3.
    #[schemars(length(min = 1, max = 64), inner(range(max = 65_535)), extend("x-kubernetes-list-type" = "set"))]
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub ordinals: BTreeSet<u32>,
    /// GPUs by product name, ignoring case. An asterisk matches any text, as in *H100*.
    #[schemars(
        length(min = 1, max = 32),
        inner(length(min = 1, max = 128)),
        extend("x-kubernetes-list-type" = "set")
    )]
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub products: BTreeSet<String>,
    /// GPUs by PCI address, such as 0000:3b:00.0.
    #[schemars(
        length(min = 1, max = 64),
        inner(
            length(max = 16),
            regex(pattern = r"^([0-9a-fA-F]{4}|[0-9a-fA-F]{8}):[0-9a-fA-F]{2}:[01][0-9a-fA-F]\.[0-7]$")
        ),
        extend("x-kubernetes-list-type" = "set")
    )]
    #[serde(skip_serializing_if = "BTreeSet::is_empty")]
    pub pci_addresses: BTreeSet<String>,
}

/// A mode in which a GPU can be offered.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum OfferedMode {
    /// The whole GPU, for one claim.
    Whole,
    /// MIG partitions.
    Mig,
    /// Time-sliced shares.
    TimeSlicing,
    /// MPS shares: each with its part of the GPU's threads, in equal slots with drivers
    /// before R615 whose MPS serves all users, and of any size with later ones. It requires
    /// mps.enabled in divvy's chart and MIG mode disabled.
    Mps,
}

impl From<OfferedMode> for Form {
    fn from(mode: OfferedMode) -> Self {
        match mode {
            OfferedMode::Whole => Self::WHOLE,
            OfferedMode::Mig => Self::PARTITIONS,
            OfferedMode::TimeSlicing => Self::TIME_SLICED,
            OfferedMode::Mps => Self::MPS,
        }
    }
}

/// Permission to offer one GPU in several modes at once, so that the first claim decides which
/// one it gets: Auto (only where the cluster's Kubernetes version supports it; the default),
/// Enabled or Disabled. The first policy that applies to the node and sets this field decides.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum ModeLock {
    /// Where the cluster's version allows it.
    #[default]
    Auto,
    /// Everywhere; the administrator vouches for the scheduler. Not `On`, which YAML takes for
    /// `true`.
    Enabled,
    /// Nowhere.
    Disabled,
}

/// Settings for partitioning GPUs with MIG.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1), extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.sharing) || !has(self.instances) || self.instances != 'Static'",
        "message": "sharing does not go with instances Static: these partitions are for one claim each",
    },
]))]
pub struct MigSettings {
    /// The MIG profiles to offer, such as 1g.10gb. If omitted, all profiles are offered except the
    /// rarely needed ones (+me, +me.all, -me, +gfx). Profiles that a GPU does not support are
    /// ignored.
    #[schemars(
        length(min = 1, max = 32),
        inner(length(max = 32), regex(pattern = r"^[0-9]{1,4}g\.[0-9]{1,4}gb([+-][a-z.]+)?$")),
        extend("x-kubernetes-list-type" = "set")
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profiles: Option<BTreeSet<String>>,
    /// The order in which the placements of a profile are tried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement_order: Option<PlacementOrder>,
    /// The manager of the MIG instances of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub instances: Option<Instances>,
    /// The ways in which partitions are also offered to several claims at once. If omitted, each
    /// partition is for one claim. It requires modes with Mig. It doubles the partitions that the
    /// scheduler looks at: name the profiles.
    #[schemars(length(min = 1, max = 2), extend("x-kubernetes-list-type" = "set"))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sharing: Option<BTreeSet<PartitionSharing>>,
}

/// A way in which several claims use one partition: TimeSlicing (the settings in shares say how
/// small a share can be; none of its limits is enforced) or Mps (the settings in shares say how
/// many equal slots a partition has; its MPS server limits their compute; it needs the chart value
/// `mps.enabled`).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum PartitionSharing {
    /// Their programs run in turn.
    TimeSlicing,
    /// Their programs run at once, under an MPS server of the partition.
    Mps,
}

/// The order in which the placements of a profile are tried: Ascending (the default) starts at the
/// first memory slice, Descending at the last.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum PlacementOrder {
    /// From the first memory slice up.
    Ascending,
    /// From the last memory slice down.
    Descending,
}

/// The manager of the MIG instances of the GPU. OnDemand (the default): the driver creates and
/// destroys them. Static: the administrator does; the driver offers the instances that exist.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum Instances {
    /// The driver creates an instance when a claim needs one and destroys it with the claim.
    /// Foreign instances are left alone.
    OnDemand,
    /// The administrator: existing instances are offered; the driver neither creates nor destroys
    /// any.
    Static,
}

/// Settings for time-slicing GPUs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1), extend("x-kubernetes-validations" = [
    {
        "rule": "!has(self.unit) || self.unit != 'Percent' || !has(self.minMemory)",
        "message": "minMemory does not go with unit Percent: use minPercent",
    },
    {
        "rule": "!has(self.unit) || self.unit != 'Percent' || !has(self.minCores)",
        "message": "minCores does not go with unit Percent: use minPercent",
    },
    {
        "rule": "!has(self.minPercent) || has(self.unit) && self.unit == 'Percent'",
        "message": "minPercent requires unit Percent",
    },
    {
        "rule": "!has(self.unit) || self.unit != 'Percent' || !has(self.slots) || self.slots <= 100",
        "message": "slots must be 100 or less with unit Percent",
    },
]))]
pub struct ShareSettings {
    /// The unit in which claims request shares of the GPU.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unit: Option<ShareUnit>,
    /// The maximum number of shares of one GPU. A claim that requests no amount gets the GPU
    /// divided by this number. With unit Percent, that is all it means: there are as many shares
    /// as fit in 100 percent.
    #[schemars(range(min = 1, max = MOST_SLOTS))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slots: Option<u32>,
    /// The smallest part of the GPU that a share can get, in percent. It requires unit Percent. If
    /// omitted, it is the smallest part that has 256 MiB of memory.
    #[schemars(range(min = 1, max = 100))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_percent: Option<u32>,
    /// The smallest amount of memory that a share can get, such as 100Mi. It is rounded up to whole
    /// MiB. It requires unit Amounts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_memory: Option<MemorySize>,
    /// The smallest part of the GPU's compute capacity that a share can get, in percent. It
    /// requires unit Amounts.
    #[schemars(range(max = 100))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_cores: Option<u32>,
    /// The part of the GPU's memory that is not given to shares: an amount, such as 2Gi, or a
    /// percentage of the GPU's memory, such as 10%. It is rounded up to whole MiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reserved_memory: Option<MemoryPart>,
    /// The limits of shares above their requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub burst: Option<BurstSettings>,
    /// The time for which each program runs in turn.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<TimeSlice>,
}

/// The unit in which claims request shares of the GPU: Amounts (memory, cores and slots; the
/// default) or Percent (of the whole GPU, which means the same part of its memory and of its
/// compute capacity). A claim in the other unit does not get a share of the GPU.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum ShareUnit {
    /// Memory, compute and places, each by itself.
    Amounts,
    /// A single number for memory and compute.
    Percent,
}

/// The time slice of the GPU while it is shared: Default (what the driver chooses), Short (less
/// delay), Medium or Long (fewer switches). If omitted, none is set. Shares have it as the
/// attribute timeSlice, so that claims can select it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum TimeSlice {
    /// The driver's choice.
    Default,
    /// Less delay.
    Short,
    /// In between.
    Medium,
    /// Fewer switches.
    Long,
}

/// Actions when a GPU becomes unhealthy.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct HealthSettings {
    /// Evict pods that use an unhealthy GPU (taint effect NoExecute). Kubernetes does not evict
    /// pods that ask for it as an extended resource. The default is false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub evict: Option<bool>,
    /// Restart the MPS server of a GPU or partition when it is wedged: for 30 seconds it has been
    /// in the state FAULT, or its daemon has not answered. Programs that still use it lose their
    /// contexts. The default is false: a server in the state FAULT is restarted when its last
    /// program has ended, and one that does not answer ends with the last claim that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_wedged_mps: Option<bool>,
}

/// Actions for claims that use more than they were granted, or nothing. Claims are reported,
/// and marked with the condition ReclaimDue where the policy calls for eviction; the cluster
/// controller, if it is installed, evicts their pods. Claims with admin access are never marked.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1))]
pub struct UsageSettings {
    /// The action for a share that uses more memory than it was granted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub overuse: Option<OveruseAction>,
    /// Settings for idle claims.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle: Option<IdleSettings>,
}

/// Settings for programs that count GPUs against a quota, such as Kueue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1))]
pub struct QuotaSettings {
    /// Publish the counter memory: whole GPUs draw all of the memory of the GPU, and partitions the
    /// part that their memory slices are. If omitted, the chart value quota.counters counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub counters: Option<bool>,
}

/// The action for a share that uses more memory than it was granted: Report (a condition, Events
/// and metrics; the default) or Evict (its pods are evicted while the other shares of the GPU
/// cannot get what they were granted).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum OveruseAction {
    /// It is reported.
    Report,
    /// Its pods are evicted while it harms others.
    Evict,
}

/// Settings for idle claims. For a claim with devices on several GPUs, the longest times count,
/// and its pods are evicted only if the action is Reclaim on each of them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
#[schemars(extend("minProperties" = 1))]
pub struct IdleSettings {
    /// A claim is idle after so many seconds without any use. If omitted, the chart value
    /// usage.idleAfter counts.
    #[schemars(range(min = MOST_BRIEF_IDLENESS, max = 604_800))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub after_seconds: Option<u32>,
    /// The action for an idle claim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub action: Option<IdleAction>,
    /// The pods of an idle claim are evicted after so many seconds more without any use. The
    /// default is 600.
    #[schemars(range(max = 604_800))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grace_seconds: Option<u32>,
}

/// The action for an idle claim: Report (a condition, an Event and metrics; the default) or
/// Reclaim (its pods are evicted after the grace period).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum IdleAction {
    /// It is reported.
    Report,
    /// Its pods are evicted.
    Reclaim,
}
