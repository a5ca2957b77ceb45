//! Usability of a GPU behind NVSwitches: its registration with the NVLink fabric.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A GPU's registration with its NVLink fabric, as NVML reports it from Hopper on
/// (`nvmlGpuFabricInfo_v3_t`). While it is not complete, CUDA fails on the GPU with error 802
/// (system not yet initialized): the fabric manager does it when the machine or the driver starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricState {
    /// `NVML_GPU_FABRIC_STATE_*`.
    pub state: u8,
    /// Outcome of a completed registration (`nvmlReturn_t`); 0 is success.
    pub status: u32,
    /// `NVML_GPU_FABRIC_HEALTH_SUMMARY_*`; 0 where the driver does not report it (before R570).
    pub health: u8,
}

impl FabricState {
    /// A GPU that belongs to no fabric.
    pub const NOT_SUPPORTED: u8 = 0;
    /// Registration has not begun: most often the fabric manager does not run.
    pub const NOT_STARTED: u8 = 1;
    /// The fabric manager is at it, or was when it ended.
    pub const IN_PROGRESS: u8 = 2;
    /// Registration has ended, with or without success.
    pub const COMPLETED: u8 = 3;
    /// Summary of a fabric without fault.
    pub const HEALTHY: u8 = 1;
    /// Summary of a fabric that does not work. The summary 3 is limited capacity: it works.
    pub const UNHEALTHY: u8 = 2;

    /// A GPU that is registered, in a fabric without fault.
    pub const READY: Self = Self {
        state: Self::COMPLETED,
        status: 0,
        health: Self::HEALTHY,
    };

    /// Names the fault; `None` for a fabric that is ready, for a GPU without one, and for states
    /// that this version does not know.
    pub fn fault(self) -> Option<FabricFault> {
        match self.state {
            Self::NOT_STARTED => Some(FabricFault::NotStarted),
            Self::IN_PROGRESS => Some(FabricFault::InProgress),
            Self::COMPLETED if self.status != 0 => Some(FabricFault::Failed(self.status)),
            Self::COMPLETED if self.health == Self::UNHEALTHY => Some(FabricFault::Unhealthy),
            // States that this version does not know are no fault: a taint needs a reason that is
            // understood.
            _ => None,
        }
    }
}

/// Why the NVLink fabric of a GPU is not ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FabricFault {
    /// The GPU could not be registered; the code is NVML's.
    Failed(u32),
    /// The registration has not begun.
    NotStarted,
    /// The registration is not complete.
    InProgress,
    /// The GPU is registered, and the fabric does not work.
    Unhealthy,
}

impl FabricFault {
    /// A short stable name: the value of the taint.
    pub fn name(self) -> &'static str {
        match self {
            Self::Failed(_) => "failed",
            Self::NotStarted => "not-started",
            Self::InProgress => "in-progress",
            Self::Unhealthy => "unhealthy",
        }
    }
}

impl fmt::Display for FabricFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(code) => write!(
                f,
                "could not be registered with its NVLink fabric ({})",
                crate::GpuErrorCode(*code)
            ),
            Self::NotStarted => f.write_str("is not registered with its NVLink fabric"),
            Self::InProgress => f.write_str("is not yet registered with its NVLink fabric"),
            Self::Unhealthy => f.write_str("is in an unhealthy NVLink fabric"),
        }
    }
}
