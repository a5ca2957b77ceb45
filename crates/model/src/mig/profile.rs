//! Profiles: the sizes in which a GPU gives out instances, and where they may be placed.

use std::fmt;

use serde::{Deserialize, Serialize};

/// NVML's id of a GPU-instance profile (`nvmlGpuInstanceProfileInfo_t.id`): opaque, the same on one
/// board whatever the driver, unlike the profile's name. Our key for a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuInstanceProfileId(pub u32);

impl fmt::Display for GpuInstanceProfileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// NVML's number of a kind of GPU instance (`NVML_GPU_INSTANCE_PROFILE_*`): what a profile is asked
/// for by.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuInstanceProfileIndex(pub u32);

impl GpuInstanceProfileIndex {
    /// Returns what sets the profile apart from the plain one of its size.
    pub fn variant(self) -> ProfileVariant {
        match self.0 {
            // `1_SLICE` to `6_SLICE` and, with double memory, `1_SLICE_REV2`; then `…_REV1`,
            // `…_GFX`, `…_NO_ME` and `…_ALL_ME`, as nvml.h numbers them.
            0..=6 | 9 => ProfileVariant::Plain,
            7 | 8 => ProfileVariant::Media,
            0xa..=0xc | 0x11 => ProfileVariant::Graphics,
            0xd | 0xe => ProfileVariant::NoMedia,
            0xf | 0x10 => ProfileVariant::AllMedia,
            other => ProfileVariant::Unknown(other),
        }
    }
}

/// The difference of a profile from the plain one of its size; the suffix of its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ProfileVariant {
    /// Nothing (double memory has no suffix either).
    Plain,
    /// `+me`: media engines where the plain profile has none or not all kinds; one per GPU.
    Media,
    /// `+me.all`: all media engines of the GPU.
    AllMedia,
    /// `-me`: no media engines.
    NoMedia,
    /// `+gfx`: graphics APIs.
    Graphics,
    /// A profile newer than this version.
    Unknown(u32),
}

impl ProfileVariant {
    /// The suffix of the profile's name; `None` if this version does not know it.
    pub fn suffix(self) -> Option<&'static str> {
        Some(match self {
            Self::Plain => "",
            Self::Media => "+me",
            Self::AllMedia => "+me.all",
            Self::NoMedia => "-me",
            Self::Graphics => "+gfx",
            Self::Unknown(_) => return None,
        })
    }

    /// Returns whether it is published only when asked for: every device costs the scheduler of the
    /// whole cluster.
    pub fn is_rare(self) -> bool {
        self != Self::Plain
    }

    /// Returns whether instances take from what the whole GPU has only once, so that the driver
    /// refuses a second one (or a neighbour) even where the placement is free.
    pub fn is_limited(self) -> bool {
        matches!(self, Self::Media | Self::AllMedia | Self::Unknown(_))
    }
}

/// A range of memory slices (of compute slices, for compute instances).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Placement {
    /// First slice.
    pub start: u32,
    pub size: u32,
}

impl Placement {
    /// The slice after the last.
    pub fn end(self) -> u32 {
        self.start.saturating_add(self.size)
    }

    pub fn slices(self) -> std::ops::Range<u32> {
        self.start..self.end()
    }

    /// Returns whether both need a slice that there is only once.
    pub fn overlaps(self, other: Self) -> bool {
        self.start.max(other.start) < self.end().min(other.end())
    }
}

impl fmt::Display for Placement {
    /// Writes it as nvidia-smi does: `start:size`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.start, self.size)
    }
}

/// Numbers of engines, by kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engines {
    pub copy: u32,
    pub decoders: u32,
    pub encoders: u32,
    pub jpeg: u32,
    pub ofa: u32,
}

impl Engines {
    /// Returns whether there is any engine for media.
    pub fn has_media(self) -> bool {
        self.decoders + self.encoders + self.jpeg + self.ofa > 0
    }
}

/// A size in which a GPU gives out GPU instances (`nvmlDeviceGetGpuInstanceProfileInfo` and
/// `nvmlDeviceGetGpuInstancePossiblePlacements_v2`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstanceProfile {
    /// Its id on this board.
    pub id: GpuInstanceProfileId,
    /// The number it was asked for by.
    pub index: GpuInstanceProfileIndex,
    /// Compute slices.
    pub slices: u32,
    /// Memory in MiB; 0 where memory is the host's.
    pub memory_mib: u64,
    /// Streaming multiprocessors. Not slices times a constant: some double-memory profiles have
    /// more.
    pub multiprocessors: u32,
    pub engines: Engines,
    /// The number of instances that fit, as the driver says. Wrong on the A30: see
    /// [`crate::mig::MigCapabilities::most`].
    pub max_instances: u32,
    /// Where instances may be placed, in memory slices; ascending.
    pub placements: Vec<Placement>,
    /// The driver's own name (`1g.10gb`), where its NVML is new enough to report it.
    pub driver_name: Option<String>,
}

impl GpuInstanceProfile {
    /// Returns what sets it apart from the plain profile of its size.
    pub fn variant(&self) -> ProfileVariant {
        self.index.variant()
    }

    /// Memory slices of an instance.
    pub fn memory_slices(&self) -> u32 {
        self.placements
            .iter()
            .map(|placement| placement.size)
            .max()
            .unwrap_or(0)
    }

    /// Memory in bytes.
    pub fn memory_bytes(&self) -> u64 {
        self.memory_mib.saturating_mul(1 << 20)
    }

    /// The compute-instance profile that takes the whole instance: as many slices and, of those,
    /// the most multiprocessors. (By slices alone, a double-memory instance that has more
    /// multiprocessors than its slices say would lose some of them.)
    pub fn whole_compute_profile<'a>(
        &self,
        offered: &'a [ComputeInstanceProfile],
    ) -> Option<&'a ComputeInstanceProfile> {
        offered
            .iter()
            .filter(|profile| {
                profile.slices == self.slices && profile.multiprocessors <= self.multiprocessors
            })
            .min_by_key(|profile| (std::cmp::Reverse(profile.multiprocessors), profile.index))
    }
}

/// NVML's id of a compute-instance profile within a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ComputeInstanceProfileId(pub u32);

/// NVML's number of a kind of compute instance (`NVML_COMPUTE_INSTANCE_PROFILE_*`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ComputeInstanceProfileIndex(pub u32);

/// A size in which a GPU instance gives out compute instances
/// (`nvmlGpuInstanceGetComputeInstanceProfileInfo`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstanceProfile {
    pub id: ComputeInstanceProfileId,
    /// The number it was asked for by.
    pub index: ComputeInstanceProfileIndex,
    /// Compute slices.
    pub slices: u32,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// The number that fits into the GPU instance.
    pub max_instances: u32,
    /// Engines, shared with the other compute instances of the GPU instance.
    pub shared: Engines,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn placements_overlap_when_they_share_a_slice() {
        let at = |start, size| Placement { start, size };
        assert!(
            at(0, 4).overlaps(at(3, 1))
                && at(3, 1).overlaps(at(0, 4))
                && at(2, 2).overlaps(at(2, 2))
        );
        assert!(
            !at(0, 4).overlaps(at(4, 4))
                && !at(4, 4).overlaps(at(0, 4))
                && !at(0, 4).overlaps(at(2, 0))
        );
        assert_eq!(
            (at(4, 2).slices(), at(4, 2).to_string()),
            (4..6, "4:2".to_owned())
        );
    }

    #[test]
    fn an_index_of_a_newer_driver_is_unknown_and_rare() {
        let variant = |n| GpuInstanceProfileIndex(n).variant();
        assert_eq!([0, 4, 9].map(variant), [ProfileVariant::Plain; 3]);
        assert_eq!([7, 8].map(variant), [ProfileVariant::Media; 2]);
        assert_eq!(
            (
                variant(0x12),
                variant(0x12).is_rare(),
                variant(0x12).suffix()
            ),
            (ProfileVariant::Unknown(0x12), true, None)
        );
    }

    #[test]
    fn the_compute_instance_fills_a_double_memory_instance() {
        let ci = |index, slices, multiprocessors| ComputeInstanceProfile {
            id: ComputeInstanceProfileId(index),
            index: ComputeInstanceProfileIndex(index),
            slices,
            multiprocessors,
            max_instances: 1,
            shared: Engines::default(),
        };
        let double = GpuInstanceProfile {
            id: GpuInstanceProfileId(15),
            index: GpuInstanceProfileIndex(9),
            slices: 1,
            memory_mib: 68608,
            multiprocessors: 30,
            engines: Engines::default(),
            max_instances: 4,
            placements: vec![],
            driver_name: None,
        };
        let offered = [ci(0, 1, 18), ci(7, 1, 30), ci(1, 2, 30), ci(9, 1, 36)];
        assert_eq!(double.whole_compute_profile(&offered), Some(&offered[1]));
        assert_eq!(
            double.whole_compute_profile(&offered[..1]),
            Some(&offered[0])
        );
        assert_eq!(double.whole_compute_profile(&offered[2..]), None);
    }
}
