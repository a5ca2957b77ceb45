//! [`GpuRules`]: what may be done with one GPU. A policy says it, or the node plugin's flags for GPUs that no policy
//! speaks of.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::mig::ProfileVariant;
use divvy_model::{GpuUuid, TimeSlice};
use serde::{Deserialize, Serialize};

/// The rules of a node's GPUs; the default for one that is not here.
pub type Rules = BTreeMap<GpuUuid, GpuRules>;

/// What may be done with one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRules {
    /// In which modes it is offered.
    pub modes: Modes,
    /// MIG profiles offered, by name (`1g.10gb`), rare ones too; `None`: all but the rare ones.
    pub profiles: Option<BTreeSet<String>>,
    /// Profiles that are left out unless asked for (`+me`, `+me.all`, `-me`, `+gfx`) and are asked for. Without effect
    /// where [`Self::profiles`] names them.
    pub rare: BTreeSet<ProfileVariant>,
    /// Which placement of a profile the scheduler tries first.
    pub order: PlacementOrder,
    /// How it is shared.
    pub shares: ShareRules,
    /// Memory in MiB that is never given to shares.
    pub held_back_mib: u64,
    /// Whose its MIG instances are.
    pub instances: Instances,
    /// Whether pods are evicted from it when it falls ill, not only kept away.
    pub no_execute: bool,
    /// What happens to claims that use too much or nothing.
    #[serde(skip_serializing_if = "UsageRules::is_default")]
    pub usage: UsageRules,
}

/// What happens to claims that use more memory than they were granted, or nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageRules {
    /// Whether shares are marked for eviction that use so much that others lack it.
    pub evict: bool,
    /// After so many seconds without use a claim is idle, if not after the node's default.
    pub idle_after: Option<u32>,
    /// Whether idle claims are marked for eviction.
    pub reclaim: bool,
    /// After so many seconds of idleness.
    pub grace: u32,
}

impl Default for UsageRules {
    fn default() -> Self {
        Self { evict: false, idle_after: None, reclaim: false, grace: 600 }
    }
}

impl UsageRules {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// In which modes a GPU is offered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Modes {
    /// As its MIG mode is now: off, whole; on, in partitions. Nothing is toggled.
    #[default]
    AsIs,
    /// In these, as far as the board and the cluster can; prepare sets the MIG mode. Empty: not at all.
    Only(BTreeSet<OfferedMode>),
}

impl Modes {
    /// Everything that a GPU may become.
    pub fn everything() -> Self {
        Self::Only(OfferedMode::ALL.into())
    }
}

/// A mode that can be offered. In the order in which one is chosen where there may be only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum OfferedMode {
    /// To one claim.
    Whole,
    /// In MIG partitions.
    Mig,
    /// In time-sliced shares.
    TimeSlicing,
}

impl OfferedMode {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Whole, Self::Mig, Self::TimeSlicing];

    /// As people read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Whole => "whole",
            Self::Mig => "partitions",
            Self::TimeSlicing => "time-sliced shares",
        }
    }
}

/// How a GPU is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareRules {
    /// How many shares there are at most. A share that asks for no memory gets this part of it.
    pub slots: u32,
    /// Least memory of a share in MiB.
    pub smallest_mib: u64,
    /// Least part of the compute in percent.
    pub smallest_cores: u32,
    /// The time slice while it is shared; `None`: none is set.
    pub time_slice: Option<TimeSlice>,
}

impl Default for ShareRules {
    /// Sixteen: enough for notebooks and small inference, and what fits in 80 GB with the 300 to 500 MB that a CUDA
    /// context takes of each. Less than 256 MiB holds no context, whatever a claim asks for.
    fn default() -> Self {
        Self { slots: 16, smallest_mib: 256, smallest_cores: 0, time_slice: None }
    }
}

/// Which placement of a profile the scheduler tries first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementOrder {
    /// From the first memory slice up: as NVIDIA's driver; better for 3g.
    #[default]
    Ascending,
    /// From the last memory slice down: keeps the place of a 4g free longer.
    Descending,
}

/// Whose the MIG instances of a GPU are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Instances {
    /// Ours: made for a claim and removed after it. Those of others are worked around.
    #[default]
    Ours,
    /// Managed by an administrator: existing ones are published, and none is made or removed.
    Static,
}

/// Whether a GPU may be published in several modes at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModeLock {
    /// Where the cluster is known to keep them apart: by its version, and until a claim proves otherwise.
    #[default]
    Auto,
    /// Whatever the version is.
    On,
    Off,
}
