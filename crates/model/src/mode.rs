//! What a GPU is used for now, and the uses themselves.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::mig::{GpuInstanceProfileId, Placement};
use crate::{ClaimUid, DeviceName, GpuUuid};

/// What a GPU is now. Decided by the first hold that lands, freed by the last (the mode lock).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// No claim holds it.
    Idle,
    /// One claim holds the whole GPU.
    Whole,
    /// Claims hold partitions.
    Partitioned,
    /// Claims hold time-sliced shares.
    TimeSliced,
    /// Claims hold MPS shares.
    Mps,
}

impl Mode {
    /// The mode as people read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Whole => "whole",
            Self::Partitioned => "partitioned",
            Self::TimeSliced => "time-sliced",
            Self::Mps => "mps",
        }
    }
}

/// How a claim uses a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HoldKind {
    /// Exclusive use of the whole GPU.
    Whole,
    /// Exclusive use of a partition.
    Partition {
        profile: GpuInstanceProfileId,
        /// Its memory slices.
        placement: Placement,
    },
    /// A time-sliced share of the whole GPU: beside other shares, and nothing else.
    Share,
    /// Admin access: sees the GPU, never changes its mode, conflicts with no other hold (KEP-5018).
    Admin,
}

impl HoldKind {
    /// The mode this use needs the GPU to be in; `None` when it is content with any.
    pub fn needs(self) -> Option<Mode> {
        match self {
            Self::Whole => Some(Mode::Whole),
            Self::Partition { .. } => Some(Mode::Partitioned),
            Self::Share => Some(Mode::TimeSliced),
            Self::Admin => None,
        }
    }
}

/// How long the contexts of a time-shared GPU run in turn, as `nvidia-smi compute-policy` counts it. The lengths
/// themselves are the driver's secret.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TimeSlice {
    /// What the driver chooses.
    Default,
    /// Short: others come soon.
    Short,
    /// In between.
    Medium,
    /// Long: fewer switches.
    Long,
}

impl TimeSlice {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 4] = [Self::Default, Self::Short, Self::Medium, Self::Long];

    /// The number that `nvidia-smi compute-policy --set-timeslice` takes.
    pub fn number(self) -> u32 {
        match self {
            Self::Default => 0,
            Self::Short => 1,
            Self::Medium => 2,
            Self::Long => 3,
        }
    }

    /// As people write and read it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Default => "Default",
            Self::Short => "Short",
            Self::Medium => "Medium",
            Self::Long => "Long",
        }
    }

    /// Reads a name back.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|slice| slice.name() == name)
    }
}

impl fmt::Display for TimeSlice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What prepare may do with a GPU: the node's policies say so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Grant {
    /// Whether it may change the MIG mode where that needs no reset. `None`: as granted before.
    pub may_change_mode: Option<bool>,
    /// The time slice of the GPU while claims have shares of it. `None`: none is set.
    pub share_time_slice: Option<TimeSlice>,
}

/// A claim's use of a device.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Hold {
    /// The claim that holds.
    pub claim: ClaimUid,
    /// The GPU held, whatever part of it.
    pub gpu: GpuUuid,
    /// The device as it was allocated.
    pub device: DeviceName,
    pub kind: HoldKind,
    /// The time slice that the claim asked for with a whole GPU, or that the GPU's shares had; `None` is content with any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<TimeSlice>,
}
