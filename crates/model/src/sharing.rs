//! The ways of using a target, and the kinds of devices that follow from them.

use serde::{Deserialize, Serialize};

use crate::{Mode, TargetKind};

/// A way of using a target. Every word that depends on it is a method here or of [`Form`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// By one claim.
    Exclusive,
    /// By several claims whose contexts take turns.
    TimeSliced,
    /// By several claims whose contexts run at once under an MPS server. Published only where a
    /// policy names it.
    Mps,
    /// By those with admin access, whatever others have of it (KEP-5018, ADR 3).
    Admin,
}

impl Sharing {
    /// All ways of use.
    pub const ALL: [Self; 4] = [Self::Exclusive, Self::TimeSliced, Self::Mps, Self::Admin];

    /// Returns what follows the target in a device name.
    pub fn suffix(self) -> &'static str {
        match self {
            Self::Exclusive => "",
            Self::TimeSliced => "-ts",
            Self::Mps => "-mps",
            Self::Admin => "-admin",
        }
    }

    /// Returns the value of the attribute `sharing`. A device for admins says what its GPU says.
    pub fn attribute(self) -> &'static str {
        match self {
            Self::Exclusive | Self::Admin => "exclusive",
            Self::TimeSliced => "time-slicing",
            Self::Mps => "mps",
        }
    }

    /// Returns whether several claims can use a target this way at once.
    pub fn is_shared(self) -> bool {
        match self {
            Self::TimeSliced | Self::Mps => true,
            Self::Exclusive | Self::Admin => false,
        }
    }

    /// Returns whether this use keeps others off the target and decides the mode of its GPU: all
    /// but admin access do.
    pub fn holds(self) -> bool {
        self != Self::Admin
    }
}

/// The unit in which the shares of a GPU are given out. Amounts in two units cannot be added up, so
/// the shares of a GPU have the same one.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "kebab-case")]
pub enum ShareUnit {
    /// Memory, compute and places, each by itself.
    #[default]
    Amounts,
    /// Percent of the GPU, which mean the same part of its memory and of its compute.
    Percent,
}

impl ShareUnit {
    /// Returns the unit in the words of a sentence: shares "by percent".
    pub fn in_words(self) -> &'static str {
        match self {
            Self::Amounts => "by memory, cores and slots",
            Self::Percent => "by percent",
        }
    }

    /// Returns the bytes that `percent` of `mib` are, in whole MiB and rounded down: parts that are
    /// 100 percent together are never more than all of it.
    pub fn part_of_memory(mib: u64, percent: u64) -> u64 {
        let part = u128::from(mib) * u128::from(percent) / 100;
        u64::try_from(part << 20).unwrap_or(u64::MAX)
    }
}

/// An entry of what a GPU may be published as: a kind of target with a way of use. The order is
/// that in which one is chosen where there may be only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Form {
    /// The way of use.
    pub sharing: Sharing,
    /// The kind of target.
    pub target: TargetKind,
}

impl Form {
    /// The whole GPU, for one claim.
    pub const WHOLE: Self = Self::new(TargetKind::Gpu, Sharing::Exclusive);
    /// MIG partitions, each for one claim.
    pub const PARTITIONS: Self = Self::new(TargetKind::Partition, Sharing::Exclusive);
    /// Time-sliced shares of the whole GPU.
    pub const TIME_SLICED: Self = Self::new(TargetKind::Gpu, Sharing::TimeSliced);
    /// The GPU for those with admin access.
    pub const ADMIN: Self = Self::new(TargetKind::Gpu, Sharing::Admin);

    /// MPS shares of the whole GPU.
    pub const MPS: Self = Self::new(TargetKind::Gpu, Sharing::Mps);

    /// Time-sliced shares of MIG partitions.
    pub const SHARED_PARTITIONS: Self = Self::new(TargetKind::Partition, Sharing::TimeSliced);

    /// MPS shares of MIG partitions.
    pub const MPS_PARTITIONS: Self = Self::new(TargetKind::Partition, Sharing::Mps);

    /// All that a GPU is offered as where everything is asked for. MPS and shares of partitions are
    /// not among it: a rule has to name them.
    pub const OFFERED: [Self; 3] = [Self::WHOLE, Self::PARTITIONS, Self::TIME_SLICED];

    /// All that claims can hold of a GPU.
    pub const HELD: [Self; 6] = [
        Self::WHOLE,
        Self::PARTITIONS,
        Self::TIME_SLICED,
        Self::SHARED_PARTITIONS,
        Self::MPS,
        Self::MPS_PARTITIONS,
    ];

    /// Returns the use of such targets.
    pub const fn new(target: TargetKind, sharing: Sharing) -> Self {
        Self { sharing, target }
    }

    /// Returns whether this version publishes such devices.
    pub fn is_published(self) -> bool {
        self == Self::ADMIN || Self::HELD.contains(&self)
    }

    /// Returns the mode that a GPU is in while it is used so; `None` for use that goes with any.
    pub fn mode(self) -> Option<Mode> {
        match (self.target, self.sharing) {
            (_, Sharing::Admin) => None,
            (TargetKind::Partition, _) => Some(Mode::Partitioned),
            (TargetKind::Gpu, Sharing::Exclusive) => Some(Mode::Whole),
            (TargetKind::Gpu, Sharing::TimeSliced) => Some(Mode::TimeSliced),
            (TargetKind::Gpu, Sharing::Mps) => Some(Mode::Mps),
        }
    }

    /// Returns the value of the attribute `type`.
    pub fn device_type(self) -> &'static str {
        match (self.target, self.sharing) {
            (TargetKind::Gpu, Sharing::Exclusive) => "gpu",
            (TargetKind::Gpu, Sharing::TimeSliced) => "gpu-share",
            // Not that of time-sliced shares: a class that selects those must not get these.
            (TargetKind::Gpu, Sharing::Mps) => "gpu-mps",
            (TargetKind::Gpu, Sharing::Admin) => "gpu-admin",
            (TargetKind::Partition, Sharing::Exclusive) => "mig",
            (TargetKind::Partition, Sharing::TimeSliced) => "mig-share",
            (TargetKind::Partition, Sharing::Mps) => "mig-mps",
            (TargetKind::Partition, Sharing::Admin) => "mig-admin",
        }
    }

    /// Returns the word for one such device.
    pub fn noun(self) -> &'static str {
        match (self.target, self.sharing) {
            (TargetKind::Gpu, Sharing::Exclusive) => "whole",
            (TargetKind::Partition, Sharing::Exclusive) => "partition",
            (_, Sharing::TimeSliced) => "share",
            (_, Sharing::Mps) => "MPS share",
            (_, Sharing::Admin) => "admin",
        }
    }

    /// Returns the word for all such devices of a GPU.
    pub fn nouns(self) -> &'static str {
        match (self.target, self.sharing) {
            (TargetKind::Gpu, Sharing::Exclusive) => "whole",
            (TargetKind::Partition, Sharing::Exclusive) => "partitions",
            (TargetKind::Gpu, Sharing::TimeSliced) => "shares",
            (TargetKind::Gpu, Sharing::Mps) => "MPS shares",
            // A claim for shares of GPUs gets none of these.
            (TargetKind::Partition, Sharing::TimeSliced) => "shares of partitions",
            (TargetKind::Partition, Sharing::Mps) => "MPS shares of partitions",
            (_, Sharing::Admin) => "admin",
        }
    }

    /// Returns the words for all such devices of a GPU that distinguish them from all others.
    pub fn name(self) -> &'static str {
        match (self.target, self.sharing) {
            (TargetKind::Gpu, Sharing::TimeSliced) => "time-sliced shares",
            (TargetKind::Partition, Sharing::TimeSliced) => "time-sliced shares of partitions",
            (_, Sharing::Exclusive | Sharing::Mps | Sharing::Admin) => self.nouns(),
        }
    }
}
