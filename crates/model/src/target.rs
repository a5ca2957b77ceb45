//! The part of a GPU that a device is: the whole of it, or a partition.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::GpuUuid;
use crate::mig::{GpuInstance, GpuInstanceProfileId, Placement, number};

/// A GPU or a partition of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// The whole GPU.
    Gpu,
    /// The partition at this place.
    Partition(Place),
}

impl Target {
    /// Returns the place of a partition.
    pub fn place(self) -> Option<Place> {
        match self {
            Self::Gpu => None,
            Self::Partition(place) => Some(place),
        }
    }

    /// Returns the target of a GPU as people read it.
    pub fn of(self, gpu: &GpuUuid) -> String {
        match self {
            Self::Gpu => gpu.to_string(),
            Self::Partition(place) => format!("the partition of {} on {gpu}", place.in_words()),
        }
    }

    /// Returns the target without its place.
    pub fn kind(self) -> TargetKind {
        match self {
            Self::Gpu => TargetKind::Gpu,
            Self::Partition(_) => TargetKind::Partition,
        }
    }

    /// Returns whether two targets of one GPU have a memory slice in common.
    pub fn overlaps(self, other: Self) -> bool {
        match (self, other) {
            (Self::Partition(one), Self::Partition(other)) => one.overlaps(other),
            (Self::Gpu, _) | (_, Self::Gpu) => true,
        }
    }
}

/// A target without the place of a partition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TargetKind {
    /// A whole GPU.
    Gpu,
    /// A MIG partition.
    Partition,
}

/// A profile at a placement: what a GPU instance is made of, and where. Written `19@0+1`: the
/// profile's id, the first memory slice and the number of slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Place {
    /// The profile on this board.
    pub profile: GpuInstanceProfileId,
    /// Its memory slices.
    pub placement: Placement,
}

/// A text that is not a place.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a place on a GPU (expected <profile id>@<first slice>+<slices>, as 19@0+1)")]
pub struct ParsePlaceError(pub String);

impl Place {
    /// Returns whether a living instance fills exactly this place.
    pub fn is_filled_by(self, instance: &GpuInstance) -> bool {
        self.profile == instance.profile && self.placement == instance.placement
    }

    /// Returns whether both need a memory slice that there is only once.
    pub fn overlaps(self, other: Self) -> bool {
        self.placement.overlaps(other.placement)
    }

    /// Returns the place as people read it.
    pub fn in_words(self) -> String {
        let Placement { start, size } = self.placement;
        format!("profile {} at {start}+{size}", self.profile)
    }
}

/// A target with its GPU. Written as the GPU's UUID, for a partition followed by its place:
/// `GPU-…:19@0+1`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuTarget {
    pub gpu: GpuUuid,
    pub target: Target,
}

impl GpuTarget {
    /// Makes the target that is the whole GPU.
    pub fn whole(gpu: GpuUuid) -> Self {
        let target = Target::Gpu;
        Self { gpu, target }
    }
}

impl fmt::Display for GpuTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.target {
            Target::Gpu => write!(f, "{}", self.gpu),
            Target::Partition(place) => write!(f, "{}:{place}", self.gpu),
        }
    }
}

/// A text that is not a target with its GPU.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is no GPU and no partition of one (expected GPU-<uuid> or GPU-<uuid>:<place>)")]
pub struct ParseGpuTargetError(pub String);

impl FromStr for GpuTarget {
    type Err = ParseGpuTargetError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = || {
            let (gpu, target) = match text.split_once(':') {
                Some((gpu, place)) => (gpu, Target::Partition(place.parse().ok()?)),
                None => (text, Target::Gpu),
            };
            let gpu = gpu.parse().ok()?;
            Some(Self { gpu, target })
        };
        read().ok_or_else(|| ParseGpuTargetError(text.to_owned()))
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Placement { start, size } = self.placement;
        write!(f, "{}@{start}+{size}", self.profile)
    }
}

impl FromStr for Place {
    type Err = ParsePlaceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let read = || {
            let (profile, slices) = text.split_once('@')?;
            let (start, size) = slices.split_once('+')?;
            let placement = Placement {
                start: number(start)?,
                size: number(size)?,
            };
            Some(Self {
                profile: GpuInstanceProfileId(number(profile)?),
                placement,
            })
        };
        read().ok_or_else(|| ParsePlaceError(text.to_owned()))
    }
}

impl TryFrom<String> for Place {
    type Error = ParsePlaceError;
    fn try_from(text: String) -> Result<Self, Self::Error> {
        text.parse()
    }
}

impl From<Place> for String {
    fn from(place: Place) -> Self {
        place.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_with_its_gpu_reads_back_as_written() {
        const GPU: &str = "GPU-12345678-1234-1234-1234-123456780001";
        for text in [GPU.to_owned(), format!("{GPU}:19@4+2")] {
            assert_eq!(text.parse::<GpuTarget>().unwrap().to_string(), text);
        }
        for text in [
            "GPU-1",
            "supervisor.sock",
            &format!("{GPU}:"),
            &format!("{GPU}:19"),
        ] {
            assert!(text.parse::<GpuTarget>().is_err(), "{text}");
        }
    }

    #[test]
    fn places_read_back_as_written_and_nothing_else_is_accepted() {
        let place = Place {
            profile: GpuInstanceProfileId(19),
            placement: Placement { start: 4, size: 2 },
        };
        assert_eq!(place.to_string(), "19@4+2");
        assert_eq!("19@4+2".parse(), Ok(place));
        for bad in [
            "", "19", "19@4", "19@4+", "019@4+2", "19@4+2 ", "a@4+2", "19@4:2",
        ] {
            assert_eq!(bad.parse::<Place>(), Err(ParsePlaceError(bad.to_owned())));
        }
    }
}
