//! Health of GPUs: what the driver reports ([`GpuEvent`], [`GpuVitals`]), what an Xid means
//! ([`XidClass`]), and the conclusion ([`HealthBook`]). Pure: time is a parameter. The node plugin
//! feeds the book and turns its conclusions into taints, Events, metrics and answers for the
//! kubelet.
//!
//! Facts: `nvmlDeviceGetFieldValues` field 230 (recovery action), `nvmlDeviceGetRemappedRows`,
//! `nvmlDeviceGetTotalEccErrors`, `nvmlDeviceGetGpuFabricInfoV`, `nvmlEventSetWait_v2`, and
//! NVIDIA's Xid catalog of October 2025.

mod book;
mod fabric;
mod remembered;
#[cfg(test)]
mod tests;
mod xid;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::mig::{ComputeInstanceId, GpuInstanceId};
use crate::{GpuErrorCode, GpuUuid};

pub use book::{Ailments, GpuHealth, HealthBook, HealthChange, HealthRules, Illness};
pub use fabric::{FabricFault, FabricState};
pub use remembered::Remembered;
pub use xid::XidClass;

/// The subject of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuEventKind {
    /// An Xid error.
    Xid(u32),
    /// An ECC error that could not be corrected.
    UncorrectedEcc,
    /// A memory row or page could not be replaced.
    RetirementFailure,
    /// The GPU reports that it is not available, or that another recovery action is due, which its
    /// vitals show.
    LookAgain,
    /// Anything else, by its bit in NVML.
    Other(u64),
}

/// Something a GPU reported of its own accord.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuEvent {
    /// The GPU; `None` where the driver does not say.
    pub gpu: Option<GpuUuid>,
    pub kind: GpuEventKind,
    /// The GPU instance concerned; `None` is the whole GPU.
    pub gpu_instance: Option<GpuInstanceId>,
    /// The compute instance in it.
    pub compute_instance: Option<ComputeInstanceId>,
}

/// Events that came in one wait.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuEvents {
    /// In the order in which they came.
    pub events: Vec<GpuEvent>,
    /// GPUs that are there and whose events cannot be had, and why.
    pub unmonitored: BTreeMap<GpuUuid, GpuErrorCode>,
}

/// The action that is needed before the GPU is fit again (`nvmlDeviceGpuRecoveryAction_t`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RecoveryAction {
    Nothing,
    /// Reset the GPU.
    Reset,
    /// Reboot the node.
    Reboot,
    /// Let everything that talks to other GPUs over NVLink end.
    DrainPeers,
    /// Let everything on the GPU end, then reset it.
    DrainAndReset,
    /// Recover the IMEX domain, of which the GPU is a member: memory that nodes share over NVLink.
    /// The GPU itself is fit.
    RecoverImexDomain,
    /// An action that we don't know.
    Unknown(u32),
}

impl RecoveryAction {
    /// From NVML's number.
    pub fn from_nvml(raw: u32) -> Self {
        match raw {
            0 => Self::Nothing,
            1 => Self::Reset,
            2 => Self::Reboot,
            3 => Self::DrainPeers,
            4 => Self::DrainAndReset,
            5 => Self::RecoverImexDomain,
            other => Self::Unknown(other),
        }
    }

    /// Returns whether something has to be done about the GPU itself.
    pub fn concerns_gpu(self) -> bool {
        !matches!(self, Self::Nothing | Self::RecoverImexDomain)
    }

    /// A short stable name: the value of the taint.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Reset => "reset",
            Self::Reboot => "reboot",
            Self::DrainPeers => "drain-peers",
            Self::DrainAndReset => "drain-and-reset",
            Self::RecoverImexDomain => "recover-imex-domain",
            Self::Unknown(_) => "unknown",
        }
    }
}

/// Replacement of bad memory, of rows (Ampere and later) or pages.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RowRemap {
    /// Takes effect with the next reset.
    pub pending: bool,
    /// It was not possible once: the board has to be replaced.
    pub failed: bool,
}

/// Readings of a poll of a GPU's health. Values that the driver does not report are left out.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuVitals {
    /// The action that is needed; `None` with drivers that do not say.
    pub recovery: Option<RecoveryAction>,
    pub remap: Option<RowRemap>,
    /// ECC errors since the last reset that were not corrected.
    pub uncorrected_ecc: Option<u64>,
    /// Registration with the NVLink fabric; `None` without one, and before Hopper.
    #[serde(default)]
    pub fabric: Option<FabricState>,
}

/// A fault of a GPU or a partition. Ordered by gravity.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Ailment {
    /// It fell off the bus.
    Lost,
    /// A recovery action is due.
    Recovery(RecoveryAction),
    /// Its NVLink fabric is not ready: CUDA fails on it.
    Fabric(FabricFault),
    /// Bad memory could not be replaced.
    RemapFailed,
    /// An Xid that the GPU does not get over by itself.
    Xid(u32),
    /// ECC errors that could not be corrected.
    Ecc,
    /// Replaced memory rows wait for a reset.
    RemapPending,
    /// It does not answer, again and again.
    Silent,
}

impl Ailment {
    /// An ailment of each name.
    pub const NAMES: [&str; 8] = [
        "lost",
        "recovery",
        "fabric",
        "row-remap-failed",
        "xid",
        "ecc",
        "row-remap-pending",
        "silent",
    ];

    /// A short stable name, for metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Recovery(_) => "recovery",
            Self::Fabric(_) => "fabric",
            Self::RemapFailed => "row-remap-failed",
            Self::Xid(_) => "xid",
            Self::Ecc => "ecc",
            Self::RemapPending => "row-remap-pending",
            Self::Silent => "silent",
        }
    }

    pub fn remedy(self) -> &'static str {
        match self {
            Self::Lost => {
                "reset the GPU or reboot the node (docs/maintenance.md); if it stays lost, check the board"
            }
            Self::Recovery(RecoveryAction::Reboot) => "drain and reboot the node",
            Self::Recovery(RecoveryAction::DrainPeers) => {
                "let the pods that use its NVLink peers end"
            }
            Self::Fabric(FabricFault::Unhealthy) => {
                "check the NVSwitches and NVLinks (`nvidia-smi nvlink --status`, `dmesg | grep -i sxid`)"
            }
            Self::Fabric(_) => {
                "check that the fabric manager runs and is of the driver's version (`systemctl status nvidia-fabricmanager`); until then CUDA fails on the GPU with error 802"
            }
            Self::RemapFailed => "have the board replaced",
            Self::Silent => {
                "check for a hanging driver (`dmesg`), then reset the GPU or reboot the node (docs/maintenance.md)"
            }
            Self::Recovery(_) | Self::Xid(_) | Self::Ecc | Self::RemapPending => {
                "drain the node, then reset the GPU or reboot (docs/maintenance.md)"
            }
        }
    }

    /// Known from the replacement of memory, which a GPU does not report while it has MIG
    /// instances: no answer does not end it.
    pub(crate) fn is_of_memory(self) -> bool {
        matches!(self, Self::RemapFailed | Self::RemapPending)
    }

    /// A process that starts later may be unable to read it.
    pub(crate) fn outlasts_process(self) -> bool {
        self.is_of_a_moment() || self.is_of_memory()
    }

    /// Returns whether it comes and goes without a fault of the GPU: a restart of the fabric
    /// manager registers the GPUs anew.
    pub fn may_pass(self) -> bool {
        matches!(
            self,
            Self::Fabric(FabricFault::NotStarted | FabricFault::InProgress)
        )
    }

    /// Known from an event and not from a state that can be read: its end has to be concluded.
    pub(crate) fn is_of_a_moment(self) -> bool {
        matches!(self, Self::Xid(_) | Self::Ecc)
    }
}

impl fmt::Display for Ailment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("fell off the bus"),
            Self::Recovery(RecoveryAction::Unknown(raw)) => {
                write!(f, "needs recovery action {raw}")
            }
            Self::Recovery(action) => write!(f, "needs recovery: {}", action.name()),
            Self::Fabric(fault) => fault.fmt(f),
            Self::RemapFailed => f.write_str("failed to remap bad memory rows"),
            Self::Xid(number) => write!(
                f,
                "reported Xid {number} ({})",
                XidClass::of(*number).name()
            ),
            Self::Ecc => f.write_str("had uncorrectable ECC errors"),
            Self::RemapPending => f.write_str("needs a reset to apply remapped memory rows"),
            Self::Silent => f.write_str("does not answer"),
        }
    }
}
