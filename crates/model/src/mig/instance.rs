//! A partition as a possibility, and the instances that live on the hardware.

use serde::{Deserialize, Serialize};

use super::{ComputeInstanceProfileId, GpuInstanceProfileId, Placement};
use crate::{GpuUuid, MigUuid};

/// A place on a GPU that a GPU instance with one compute instance may fill. There whether or not
/// one does.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Partition {
    pub gpu: GpuUuid,
    pub profile: GpuInstanceProfileId,
    /// The memory slices.
    #[serde(flatten)]
    pub placement: Placement,
}

impl Partition {
    /// Returns whether a living instance of the same GPU fills exactly this place.
    pub fn is_filled_by(&self, instance: &GpuInstance) -> bool {
        self.profile == instance.profile && self.placement == instance.placement
    }
}

/// NVML's id of a living GPU instance. Follows from size and placement, so a later instance may
/// have it again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuInstanceId(pub u32);

/// A GPU instance that lives on a GPU now (`nvmlGpuInstanceInfo_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct GpuInstance {
    pub id: GpuInstanceId,
    pub profile: GpuInstanceProfileId,
    /// Its memory slices.
    pub placement: Placement,
}

/// NVML's id of a living compute instance, within its GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ComputeInstanceId(pub u32);

/// A compute instance that lives in a GPU instance now (`nvmlComputeInstanceInfo_t`): what a
/// container is given.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct ComputeInstance {
    pub id: ComputeInstanceId,
    /// The GPU instance it lives in.
    pub gpu_instance: GpuInstanceId,
    pub profile: ComputeInstanceProfileId,
    /// UUID of its MIG device; new at every creation, so it distinguishes a successor from the
    /// instance that was recorded.
    pub uuid: MigUuid,
}
