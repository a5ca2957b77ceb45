//! Figures as they are read, before anything is attributed.

use std::collections::BTreeMap;
use std::fmt;

use divvy_claims::{ClaimRef, PodRef};
use divvy_model::{
    DeviceName, Form, GpuError, GpuErrorCode, GpuMemory, GpuProcess, MigDevice, MigUuid,
};

/// A figure, or why it is not known.
pub type Figure<T> = Result<T, Unknown>;

/// Reason why a figure is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unknown {
    /// It was not read yet.
    NotRead,
    /// The driver does not measure it on this GPU, in this mode.
    NotSupported,
    /// The reading failed, or came too late.
    Failed,
    /// The driver lists a process without its memory.
    MemoryOfProcess,
    /// A pod has several claims on the GPU, or several pods one partition: what is whose cannot be
    /// found out.
    Together,
    /// The record of the claim names no pod.
    NoPods,
    /// The claim was granted no certain amount.
    NoGrant,
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotRead => "not read yet",
            Self::NotSupported => "not measured by the driver on this GPU in this mode",
            Self::Failed => "the driver did not answer",
            Self::MemoryOfProcess => "the driver does not report the memory of a process",
            Self::Together => "claims or pods use the device together",
            Self::NoPods => "the pods of the claim are not known",
            Self::NoGrant => "nothing certain was granted",
        })
    }
}

impl From<&GpuError> for Unknown {
    fn from(error: &GpuError) -> Self {
        match error.code {
            GpuErrorCode::NOT_SUPPORTED
            | GpuErrorCode::FUNCTION_NOT_FOUND
            | GpuErrorCode::NO_PERMISSION => Self::NotSupported,
            _ => Self::Failed,
        }
    }
}

/// Figures of a GPU. Shares of time are from 0 to 1.
#[derive(Debug, Clone, PartialEq)]
pub struct GpuReading {
    /// Counts the readings of processes and memory.
    pub number: u64,
    pub processes: Figure<Vec<GpuProcess>>,
    pub memory: Figure<GpuMemory>,
    /// Share of the time in which anything computed.
    pub busy: Figure<f64>,
    /// Use of the multiprocessors.
    pub sm: Figure<f64>,
    /// Share of the time in which each process computed; a process that is missing has not.
    pub computed: Figure<BTreeMap<u32, f64>>,
    /// Partitions: by the UUIDs of their MIG devices, because a later one may have the same number.
    pub parts: BTreeMap<MigUuid, PartReading>,
}

impl Default for GpuReading {
    fn default() -> Self {
        Self {
            number: 0,
            processes: Err(Unknown::NotRead),
            memory: Err(Unknown::NotRead),
            busy: Err(Unknown::NotRead),
            sm: Err(Unknown::NotRead),
            computed: Err(Unknown::NotRead),
            parts: BTreeMap::new(),
        }
    }
}

/// Figures of a partition.
#[derive(Debug, Clone, PartialEq)]
pub struct PartReading {
    pub memory: Figure<GpuMemory>,
    pub sm: Figure<f64>,
}

impl Default for PartReading {
    fn default() -> Self {
        Self {
            memory: Err(Unknown::NotRead),
            sm: Err(Unknown::NotRead),
        }
    }
}

/// Amounts that a share was granted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Granted {
    /// Bytes.
    pub memory: Option<u64>,
    /// Bytes that it may use, at least those, where the driver keeps a limit.
    pub limit: Option<u64>,
    /// Percent of the GPU's compute.
    pub cores: Option<u64>,
}

/// A claim's hold on a device of the GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holding {
    pub claim: ClaimRef,
    pub device: DeviceName,
    pub kind: Form,
    pub pods: Vec<PodRef>,
    /// The partition that was made for it.
    pub part: Option<MigDevice>,
    pub granted: Granted,
}
