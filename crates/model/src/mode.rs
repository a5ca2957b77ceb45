//! What a GPU is used for now, and the uses themselves.

use serde::{Deserialize, Serialize};

use crate::mig::{GpuInstanceProfileId, Placement};
use crate::{ClaimUid, DeviceName, GpuUuid};

/// What a GPU is now. Decided by the first hold that lands, freed by the last (the mode lock, DESIGN section 1).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Nobody holds it.
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
        /// Its profile.
        profile: GpuInstanceProfileId,
        /// Its memory slices.
        placement: Placement,
    },
    /// Admin access: sees the GPU, never changes its mode, conflicts with nobody (KEP-5018).
    Admin,
}

impl HoldKind {
    /// The mode this use needs the GPU to be in; `None` when it is content with any.
    pub fn needs(self) -> Option<Mode> {
        match self {
            Self::Whole => Some(Mode::Whole),
            Self::Partition { .. } => Some(Mode::Partitioned),
            Self::Admin => None,
        }
    }
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
    /// How.
    pub kind: HoldKind,
}
