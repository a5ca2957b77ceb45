//! Usage of a GPU, as a driver measures it. A value that a driver does not know is an error or
//! `None`, never 0.

use serde::{Deserialize, Serialize};

use crate::MigUuid;
use crate::mig::GpuInstanceId;

/// Memory of a GPU or of a MIG device (`nvmlDeviceGetMemoryInfo_v2`), in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuMemory {
    pub total: u64,
    /// Allocated, without `reserved`. More than processes have: some belongs to none.
    pub used: u64,
    /// Kept back by the driver.
    pub reserved: u64,
}

/// A MIG device that is measured.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct MigDevice {
    /// A later instance may have the same id.
    pub gpu_instance: GpuInstanceId,
    /// Distinguishes it from a later one.
    pub uuid: MigUuid,
}

/// Use of the multiprocessors by a process (`nvmlProcessUtilizationSample_t`), as the driver writes
/// it: implausible values and processes that have ended occur.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ProcessSample {
    pub pid: u32,
    /// The driver's time, in microseconds.
    pub at: u64,
    /// Share of the time in which the process computed, in percent of the whole GPU.
    pub percent: u32,
}
