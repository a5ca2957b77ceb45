//! Steps: single changes of GPUs, how each ended, and what is remembered about it.

use std::fmt;

use divvy_model::mig::{ComputeInstanceId, GpuInstanceId, GpuInstanceProfileId, Partition, Placement};
use divvy_model::{ComputeMode, GpuError, GpuUuid, MigUuid, TimeSlice};
use serde::{Deserialize, Serialize};

use crate::Retry;

/// One change of a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "camelCase")]
pub enum Step {
    /// Bring the GPU's MIG mode to this, if it is not so already. The mode belongs to the GPU and to no claim: it is
    /// noted in the GPU's state, and neither recorded with the claim nor undone with it.
    SetMigMode {
        /// Of which GPU.
        gpu: GpuUuid,
        /// On or off.
        on: bool,
    },
    /// Bring the GPU's time slice to this. The GPU's, as MIG mode is: noted in its state, neither recorded with the
    /// claim nor undone with it; it goes back when no claim that requested it holds the GPU any more.
    SetTimeSlice {
        /// Of which GPU.
        gpu: GpuUuid,
        /// How long each context runs in turn.
        to: TimeSlice,
    },
    /// Bring the GPU's compute mode to this. The GPU's, as MIG mode is.
    SetComputeMode {
        /// Of which GPU.
        gpu: GpuUuid,
        /// Who may compute on it.
        to: ComputeMode,
    },
    /// Find the partition that lives at an exact place and that others have made. Never undone: it stays theirs.
    UsePartition(Partition),
    /// Make a partition at an exact place: a GPU instance, and in it a compute instance that takes it whole.
    CreatePartition(Partition),
}

impl Step {
    /// The step that makes a partition.
    pub fn create_partition(gpu: GpuUuid, profile: GpuInstanceProfileId, placement: Placement) -> Self {
        Self::CreatePartition(Partition { gpu, profile, placement })
    }

    /// Whether what it makes is the claim's: recorded with its intent, and undone with the claim.
    pub fn is_owned(&self) -> bool {
        matches!(self, Self::CreatePartition(_))
    }

    /// The GPU that the step is about.
    pub fn gpu(&self) -> &GpuUuid {
        match self {
            Self::SetMigMode { gpu, .. }
            | Self::SetTimeSlice { gpu, .. }
            | Self::SetComputeMode { gpu, .. } => gpu,
            Self::UsePartition(partition) | Self::CreatePartition(partition) => &partition.gpu,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::SetMigMode { gpu, on } => {
                write!(f, "turn MIG mode of {gpu} {}", if *on { "on" } else { "off" })
            }
            Self::SetTimeSlice { gpu, to } => write!(f, "set the time slice of {gpu} to {to}"),
            Self::SetComputeMode { gpu, to } => write!(f, "set compute mode of {gpu} to {to}"),
            Self::UsePartition(Partition { gpu, profile, placement: Placement { start, size } }) => {
                write!(f, "find the partition of profile {profile} at {start}+{size} on {gpu}")
            }
            Self::CreatePartition(Partition { gpu, profile, placement: Placement { start, size } }) => {
                write!(f, "create a partition of profile {profile} at {start}+{size} on {gpu}")
            }
        }
    }
}

/// What a finished step made: all that its undo needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "made", rename_all = "camelCase")]
pub enum Outcome {
    /// A GPU instance: half a partition.
    GpuInstance {
        /// GPU instance id.
        gi: GpuInstanceId,
    },
    /// A partition. The UUID is new at every creation, so ids that NVML reuses cannot be confused.
    Partition {
        /// GPU instance id.
        gi: GpuInstanceId,
        /// Compute instance id.
        ci: ComputeInstanceId,
        /// UUID of the MIG device.
        uuid: MigUuid,
    },
}

impl Outcome {
    /// The GPU instance that was made.
    pub fn gpu_instance(&self) -> GpuInstanceId {
        match self {
            Self::GpuInstance { gi } | Self::Partition { gi, .. } => *gi,
        }
    }
}

/// How far a step has come, as recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "is", rename_all = "camelCase")]
pub enum Progress {
    /// It may have begun.
    Intended {
        /// Instances that were on the GPU before: one that was not, at our exact place, is ours.
        before: Vec<GpuInstanceId>,
    },
    /// It has begun, and this has come of it so far.
    Begun {
        /// As when it was intended.
        before: Vec<GpuInstanceId>,
        /// What it made so far.
        made: Outcome,
    },
    /// It has been done.
    Done {
        /// What it made.
        outcome: Outcome,
    },
    /// It has been undone, or never happened.
    Undone,
}

/// Why a step failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Cause {
    /// What went wrong, in words.
    pub what: String,
    /// What the driver said, if it was the driver.
    #[source]
    pub source: Option<GpuError>,
    /// Whether trying again can help.
    pub retry: Retry,
}

impl Cause {
    /// A cause in words.
    pub fn new(what: impl Into<String>) -> Self {
        Self { what: what.into(), source: None, retry: Retry::Later }
    }

    /// A cause the driver gave.
    pub fn from_gpu(what: impl Into<String>, source: GpuError) -> Self {
        let retry = if source.is_transient() { Retry::Soon } else { Retry::Later };
        Self { what: what.into(), retry, source: Some(source) }
    }

    /// A cause that lasts: the hardware or its driver cannot do it.
    pub fn unsupported(what: impl Into<String>) -> Self {
        Self { what: what.into(), source: None, retry: Retry::Never }
    }

    /// The same cause, if it can pass by itself within seconds.
    #[must_use]
    pub fn passing(self) -> Self {
        Self { retry: Retry::Soon, ..self }
    }

    /// Whether it can pass by itself within seconds.
    pub fn is_passing(&self) -> bool {
        self.retry == Retry::Soon
    }
}

/// A failed step.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StepError {
    /// It did not happen and will not.
    #[error("it was not done")]
    NotDone(#[source] Cause),
    /// The outcome is unknown: a call past its deadline may still succeed.
    #[error("its outcome is not known")]
    Unknown(#[source] Cause),
}

impl StepError {
    /// What went wrong.
    pub fn cause(&self) -> &Cause {
        match self {
            Self::NotDone(cause) | Self::Unknown(cause) => cause,
        }
    }
}

/// What the hardware shows of a step whose outcome is not recorded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// A call of this process has not come back: it may still happen.
    InFlight,
    /// It did not happen, and no call is under way.
    Absent,
    /// It happened; this is what it made.
    Ours(Outcome),
    /// Something is there that may or may not be ours.
    Uncertain(String),
}
