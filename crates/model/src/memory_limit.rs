//! Limits of GPU memory that the kernel driver keeps for the programs of a control group.

use serde::{Deserialize, Serialize};

/// Limit of a control group's memory on one GPU (`nvmlDeviceGetMemoryLimits_v1`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryLimit {
    /// Bytes that the programs of the group can allocate together; `None` if there is no limit.
    pub hard: Option<u64>,
    /// Bytes that are allocated.
    pub used: u64,
}

/// Ability of a node to cap the memory of a share in the kernel driver.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MemoryCaps {
    /// The driver limits the memory of control groups, and the node's groups have a controller that
    /// it does so by.
    Available,
    /// The driver is older than R615.
    #[default]
    OldDriver,
    /// The driver could, but its NVML library has no calls for it.
    NoCalls,
    /// The node's control groups cannot be read, so that it is not known if they let the driver do
    /// so.
    GroupsUnreadable,
    /// The node has control groups of version 1 alone.
    NoCgroup2,
    /// The node's control groups have neither of the controllers `dmem` and `misc`.
    NoController,
    /// An administrator has switched caps off (`memoryCaps=false`).
    SwitchedOff,
    /// No program is called when a container starts (`libraryDelivery=mounts`).
    NoHook,
}

impl MemoryCaps {
    /// First branch of the driver that caps memory.
    const FIRST_DRIVER: u32 = 615;

    /// Returns whether a driver of this version caps the memory of control groups.
    pub fn since(driver_version: &str) -> bool {
        let branch = driver_version.split('.').next();
        branch.and_then(|branch| branch.parse().ok()) >= Some(Self::FIRST_DRIVER)
    }

    /// Returns what the node lacks, for people; `None` if it lacks nothing.
    pub fn lack(self) -> Option<&'static str> {
        match self {
            Self::Available => None,
            Self::OldDriver => Some("its NVIDIA driver is older than R615"),
            Self::NoCalls => Some(
                "its libnvidia-ml.so.1 has no calls for it, although its NVIDIA driver is R615 or later",
            ),
            Self::GroupsUnreadable => Some("its control groups cannot be read"),
            Self::NoCgroup2 => Some("its control groups are of version 1"),
            Self::NoController => Some(
                "its control groups have neither the controller misc, nor dmem with the driver's memory in it",
            ),
            Self::SwitchedOff => Some("caps are switched off in divvy's chart (memoryCaps=false)"),
            Self::NoHook => Some(
                "no program of divvy is called when a container starts (libraryDelivery=mounts)",
            ),
        }
    }
}
