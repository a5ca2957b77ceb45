//! [`GpuRules`]: what may be done with one GPU. A policy says it, or the node plugin's flags for
//! GPUs that no policy speaks of.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::mig::ProfileVariant;
use divvy_model::{Burst, Form, GpuFacts, GpuUuid, MemoryCaps, Offer, ShareUnit, TimeSlice};
use serde::{Deserialize, Serialize};

/// The rules of a node's GPUs; the default for one that is not here.
pub type Rules = BTreeMap<GpuUuid, GpuRules>;

/// The permissions for one GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuRules {
    /// In which modes it is offered.
    pub modes: Modes,
    /// MIG profiles offered, by name (`1g.10gb`), rare ones too; `None`: all but the rare ones.
    pub profiles: Option<BTreeSet<String>>,
    /// Profiles that are left out unless asked for (`+me`, `+me.all`, `-me`, `+gfx`) and are asked
    /// for. Without effect where [`Self::profiles`] names them.
    pub rare: BTreeSet<ProfileVariant>,
    /// The placement of a profile that the scheduler tries first.
    pub order: PlacementOrder,
    /// The rules of its shares.
    pub shares: ShareRules,
    /// Memory in MiB that is never given to shares.
    pub held_back_mib: u64,
    /// The owner of its MIG instances.
    pub instances: Instances,
    /// True if pods are evicted from it when it falls ill, not only kept away.
    pub no_execute: bool,
    /// True if an MPS server that is wedged is started anew although it has clients.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub restarts_wedged_mps: bool,
    /// The consequences for claims that use too much or nothing.
    #[serde(skip_serializing_if = "UsageRules::is_default")]
    pub usage: UsageRules,
    /// True if its memory is counted by name, for quotas.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub counts_memory: bool,
}

impl GpuRules {
    /// Returns the memory in MiB of a GPU that shares do not get: what the policy holds back, and,
    /// where the driver caps the memory of shares, what it keeps for itself. Caps that add up to
    /// more than there is would promise some of it twice.
    pub fn withheld_mib(&self, facts: &GpuFacts, caps: MemoryCaps) -> u64 {
        /// Steps in which the driver's part counts: it varies a little.
        const STEP_MIB: u64 = 64;
        let own = match caps {
            MemoryCaps::Available => facts.memory_reserved_bytes.unwrap_or(0),
            _ => 0,
        };
        let own = own.div_ceil(STEP_MIB << 20).saturating_mul(STEP_MIB);
        self.held_back_mib.saturating_add(own)
    }
}

/// The consequences for claims that use more memory than they were granted, or nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UsageRules {
    /// True if shares are marked for eviction that use so much that others lack it.
    pub evict: bool,
    /// After so many seconds without use a claim is idle, if not after the node's default.
    pub idle_after: Option<u32>,
    /// True if idle claims are marked for eviction.
    pub reclaim: bool,
    /// After so many seconds of idleness.
    pub grace: u32,
}

impl Default for UsageRules {
    fn default() -> Self {
        Self {
            evict: false,
            idle_after: None,
            reclaim: false,
            grace: 600,
        }
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
    /// The mode that fits its MIG mode now: off, whole; on, in partitions. Nothing is toggled.
    #[default]
    AsIs,
    /// In these, as far as the board and the cluster can; prepare sets the MIG mode. Empty: not at
    /// all.
    Only(BTreeSet<Form>),
}

impl From<Offer> for Modes {
    fn from(offer: Offer) -> Self {
        offer.forms().map_or(Self::AsIs, |forms| {
            Self::Only(forms.iter().copied().collect())
        })
    }
}

impl Modes {
    /// Everything that a GPU may become.
    pub fn everything() -> Self {
        Self::Only(Form::OFFERED.into())
    }
}

/// The rules of a GPU's shares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareRules {
    /// The unit in which they are given out.
    pub unit: ShareUnit,
    /// The number of shares at most. A share that asks for no memory gets this part of it. Shares
    /// by percent are as many as fit, and one that asks for none gets this part of the GPU.
    pub slots: u32,
    /// Least memory of a share in MiB. `None`: what [`Self::context_mib`] says.
    pub smallest_mib: Option<u64>,
    /// Least part of the compute in percent.
    pub smallest_cores: u32,
    /// Least part of the GPU in percent, of shares by percent. `None`: the least part with the
    /// memory that [`Self::context_mib`] says.
    pub smallest_percent: Option<u32>,
    /// The time slice while it is shared; `None`: none is set.
    pub time_slice: Option<TimeSlice>,
    /// The factor by which the memory limit of a share may be above its request.
    #[serde(skip_serializing_if = "Burst::is_none")]
    pub burst: Burst,
}

impl ShareRules {
    /// Returns the memory in MiB below which a share is of no use, whatever a claim asks for: 256
    /// hold a bare CUDA context. Where the driver caps the memory, a program that allocates a first
    /// tensor with PyTorch has taken some 600 already, and with less it would not start.
    pub fn context_mib(caps: MemoryCaps) -> u64 {
        match caps {
            MemoryCaps::Available => 1024,
            MemoryCaps::OldDriver
            | MemoryCaps::NoCalls
            | MemoryCaps::GroupsUnreadable
            | MemoryCaps::NoCgroup2
            | MemoryCaps::NoController
            | MemoryCaps::SwitchedOff
            | MemoryCaps::NoHook => 256,
        }
    }
}

impl Default for ShareRules {
    /// Sixteen: enough for notebooks and small inference, and what fits in 80 GB with the 300 to
    /// 500 MB that a CUDA context takes of each.
    fn default() -> Self {
        Self {
            unit: ShareUnit::Amounts,
            slots: 16,
            smallest_mib: None,
            smallest_cores: 0,
            smallest_percent: None,
            time_slice: None,
            burst: Burst::NONE,
        }
    }
}

/// The placement of a profile that the scheduler tries first.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PlacementOrder {
    /// From the first memory slice up: as NVIDIA's driver; better for 3g.
    #[default]
    Ascending,
    /// From the last memory slice down: keeps the place of a 4g free longer.
    Descending,
}

/// The owner of the MIG instances of a GPU.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Instances {
    /// Ours: made for a claim and removed after it. Instances of others are worked around.
    #[default]
    Ours,
    /// Managed by an administrator: existing ones are published, and none is made or removed.
    Static,
}

/// Permission to publish a GPU in several modes at once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModeLock {
    /// Where the cluster is known to keep them apart: by its version, and until a claim proves
    /// otherwise.
    #[default]
    Auto,
    /// Whatever the version is.
    On,
    Off,
}
