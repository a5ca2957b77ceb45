//! Failures of a [`crate::GpuDriver`] call: operation, NVML's raw code, GPU.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::GpuUuid;

/// The operation that failed; one per [`crate::GpuDriver`] method, named after the NVML call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GpuOp {
    /// Loading the library and `nvmlInit_v2`.
    Init,
    /// `nvmlSystemGet…Version`.
    System,
    /// `nvmlDeviceGetCount_v2` and the UUIDs.
    List,
    /// The facts of one GPU.
    Facts,
    /// `nvmlDeviceGetMigMode`.
    MigMode,
    /// `nvmlDeviceGetPersistenceMode`.
    PersistenceMode,
    /// `nvmlDeviceGetComputeRunningProcesses`.
    Processes,
    /// `nvmlDeviceGetGpuInstanceProfileInfo` and `…PossiblePlacements_v2`.
    MigCapabilities,
    /// `nvmlDeviceSetMigMode`.
    SetMigMode,
    /// `nvmlDeviceSetComputeMode`.
    SetComputeMode,
    /// `nvmlDeviceGetGpuInstances`.
    GpuInstances,
    /// `nvmlDeviceCreateGpuInstanceWithPlacement`.
    CreateGpuInstance,
    /// `nvmlGpuInstanceDestroy`.
    DestroyGpuInstance,
    /// `nvmlGpuInstanceGetComputeInstanceProfileInfo`.
    ComputeProfiles,
    /// `nvmlGpuInstanceGetComputeInstances` and the UUIDs of their MIG devices.
    ComputeInstances,
    /// `nvmlGpuInstanceCreateComputeInstance`.
    CreateComputeInstance,
    /// `nvmlComputeInstanceDestroy`.
    DestroyComputeInstance,
    /// Recovery action, row remapping and ECC counters.
    Vitals,
    /// `nvmlEventSetWait_v2`, and what it needs.
    Events,
    /// `nvmlDeviceGetMemoryInfo_v2`.
    Memory,
    /// `nvmlDeviceGetUtilizationRates`.
    Utilization,
    /// `nvmlDeviceGetProcessUtilization`.
    ProcessUtilization,
    /// `nvmlGpmMetricsGet` of two samples.
    SmUtilization,
    /// `nvmlDeviceGetMemoryLimits_v1`.
    MemoryLimit,
    /// `nvmlDeviceSetMemoryLimits_v1`.
    SetMemoryLimit,
}

impl GpuOp {
    pub const ALL: [Self; 25] = [
        Self::Init,
        Self::System,
        Self::List,
        Self::Facts,
        Self::MigMode,
        Self::PersistenceMode,
        Self::Processes,
        Self::MigCapabilities,
        Self::SetMigMode,
        Self::SetComputeMode,
        Self::GpuInstances,
        Self::CreateGpuInstance,
        Self::DestroyGpuInstance,
        Self::ComputeProfiles,
        Self::ComputeInstances,
        Self::CreateComputeInstance,
        Self::DestroyComputeInstance,
        Self::Vitals,
        Self::Events,
        Self::Memory,
        Self::Utilization,
        Self::ProcessUtilization,
        Self::SmUtilization,
        Self::MemoryLimit,
        Self::SetMemoryLimit,
    ];

    /// Returns whether the operation changes the GPU, so that a call whose answer got lost may have
    /// had its effect.
    pub fn changes_gpu(self) -> bool {
        match self {
            Self::SetMigMode
            | Self::SetComputeMode
            | Self::CreateGpuInstance
            | Self::DestroyGpuInstance
            | Self::CreateComputeInstance
            | Self::DestroyComputeInstance => true,
            Self::Init
            | Self::System
            | Self::List
            | Self::Facts
            | Self::MigMode
            | Self::PersistenceMode
            | Self::Processes
            | Self::MigCapabilities
            | Self::GpuInstances
            | Self::ComputeProfiles
            | Self::ComputeInstances
            | Self::Vitals
            | Self::Events
            | Self::Memory
            | Self::Utilization
            | Self::ProcessUtilization
            | Self::SmUtilization
            | Self::MemoryLimit
            // It changes what a group of programs may allocate, and nothing of the GPU.
            | Self::SetMemoryLimit => false,
        }
    }

    /// A short stable name, for messages and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Init => "init",
            Self::System => "system",
            Self::List => "list",
            Self::Facts => "facts",
            Self::MigMode => "mig_mode",
            Self::PersistenceMode => "persistence_mode",
            Self::Processes => "processes",
            Self::MigCapabilities => "mig_capabilities",
            Self::SetMigMode => "set_mig_mode",
            Self::SetComputeMode => "set_compute_mode",
            Self::GpuInstances => "gpu_instances",
            Self::CreateGpuInstance => "create_gpu_instance",
            Self::DestroyGpuInstance => "destroy_gpu_instance",
            Self::ComputeProfiles => "compute_profiles",
            Self::ComputeInstances => "compute_instances",
            Self::CreateComputeInstance => "create_compute_instance",
            Self::DestroyComputeInstance => "destroy_compute_instance",
            Self::Vitals => "vitals",
            Self::Events => "events",
            Self::Memory => "memory",
            Self::Utilization => "utilization",
            Self::ProcessUtilization => "process_utilization",
            Self::SmUtilization => "sm_utilization",
            Self::MemoryLimit => "memory_limit",
            Self::SetMemoryLimit => "set_memory_limit",
        }
    }
}

/// NVML's return code (`nvmlReturn_t`), kept raw. Zero never appears in an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct GpuErrorCode(pub u32);

impl GpuErrorCode {
    pub const UNINITIALIZED: Self = Self(1);
    pub const INVALID_ARGUMENT: Self = Self(2);
    pub const NOT_SUPPORTED: Self = Self(3);
    pub const NO_PERMISSION: Self = Self(4);
    pub const NOT_FOUND: Self = Self(6);
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    pub const DRIVER_NOT_LOADED: Self = Self(9);
    pub const TIMEOUT: Self = Self(10);
    pub const LIBRARY_NOT_FOUND: Self = Self(12);
    pub const FUNCTION_NOT_FOUND: Self = Self(13);
    pub const GPU_IS_LOST: Self = Self(15);
    pub const RESET_REQUIRED: Self = Self(16);
    pub const OPERATING_SYSTEM: Self = Self(17);
    pub const LIB_RM_VERSION_MISMATCH: Self = Self(18);
    pub const IN_USE: Self = Self(19);
    pub const MEMORY: Self = Self(20);
    pub const NO_DATA: Self = Self(21);
    pub const INSUFFICIENT_RESOURCES: Self = Self(23);
    pub const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
    pub const NOT_READY: Self = Self(27);
    pub const GPU_NOT_FOUND: Self = Self(28);
    pub const INVALID_STATE: Self = Self(29);
    pub const UNKNOWN: Self = Self(999);

    /// NVML's name of the code, or `None` for one we don't know.
    pub fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::UNINITIALIZED => "UNINITIALIZED",
            Self::INVALID_ARGUMENT => "INVALID_ARGUMENT",
            Self::NOT_SUPPORTED => "NOT_SUPPORTED",
            Self::NO_PERMISSION => "NO_PERMISSION",
            Self::NOT_FOUND => "NOT_FOUND",
            Self::INSUFFICIENT_SIZE => "INSUFFICIENT_SIZE",
            Self::DRIVER_NOT_LOADED => "DRIVER_NOT_LOADED",
            Self::TIMEOUT => "TIMEOUT",
            Self::LIBRARY_NOT_FOUND => "LIBRARY_NOT_FOUND",
            Self::FUNCTION_NOT_FOUND => "FUNCTION_NOT_FOUND",
            Self::GPU_IS_LOST => "GPU_IS_LOST",
            Self::RESET_REQUIRED => "RESET_REQUIRED",
            Self::OPERATING_SYSTEM => "OPERATING_SYSTEM",
            Self::LIB_RM_VERSION_MISMATCH => "LIB_RM_VERSION_MISMATCH",
            Self::IN_USE => "IN_USE",
            Self::MEMORY => "MEMORY",
            Self::NO_DATA => "NO_DATA",
            Self::INSUFFICIENT_RESOURCES => "INSUFFICIENT_RESOURCES",
            Self::ARGUMENT_VERSION_MISMATCH => "ARGUMENT_VERSION_MISMATCH",
            Self::NOT_READY => "NOT_READY",
            Self::GPU_NOT_FOUND => "GPU_NOT_FOUND",
            Self::INVALID_STATE => "INVALID_STATE",
            Self::UNKNOWN => "UNKNOWN",
            _ => return None,
        })
    }
}

impl fmt::Display for GpuErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => write!(f, "{name} ({})", self.0),
            None => write!(f, "code {}", self.0),
        }
    }
}

/// A failed [`crate::GpuDriver`] call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("NVML {} failed{}: {code}{}", .op.name(), on(.gpu.as_ref()), hint(*.code, .detail.as_deref()))]
pub struct GpuError {
    /// The operation that was called.
    pub op: GpuOp,
    /// NVML's code.
    pub code: GpuErrorCode,
    /// The GPU concerned, if one.
    pub gpu: Option<GpuUuid>,
    /// Details that the code cannot say: the missing symbol, the library path, the loader's
    /// message.
    pub detail: Option<String>,
}

fn on(gpu: Option<&GpuUuid>) -> String {
    gpu.map(|g| format!(" on {g}")).unwrap_or_default()
}

fn hint(code: GpuErrorCode, detail: Option<&str>) -> String {
    let advice = match code {
        GpuErrorCode::DRIVER_NOT_LOADED => "the NVIDIA kernel module is not loaded",
        GpuErrorCode::LIBRARY_NOT_FOUND => "check --driver-root and --nvml-library",
        GpuErrorCode::LIB_RM_VERSION_MISMATCH => {
            "the library and the loaded kernel module differ: reboot or reload the module"
        }
        GpuErrorCode::NO_PERMISSION => "root is needed",
        GpuErrorCode::OPERATING_SYSTEM => "the device cgroup may block the GPU",
        _ => "",
    };
    match (detail, advice) {
        (None, "") => String::new(),
        (Some(d), "") => format!(" ({d})"),
        (None, a) => format!(" ({a})"),
        (Some(d), a) => format!(" ({d}; {a})"),
    }
}

impl GpuError {
    /// An error of an operation on one GPU.
    pub fn on_gpu(op: GpuOp, code: GpuErrorCode, gpu: &GpuUuid) -> Self {
        Self {
            op,
            code,
            gpu: Some(gpu.clone()),
            detail: None,
        }
    }

    /// An error of an operation on the whole machine.
    pub fn global(op: GpuOp, code: GpuErrorCode) -> Self {
        Self {
            op,
            code,
            gpu: None,
            detail: None,
        }
    }

    /// The same error with what the code cannot say.
    #[must_use]
    pub fn with_detail(self, detail: impl Into<String>) -> Self {
        Self {
            detail: Some(detail.into()),
            ..self
        }
    }

    /// Returns whether a repetition may help: the cause can pass by itself within seconds.
    pub fn is_transient(&self) -> bool {
        // `DRIVER_NOT_LOADED` and `UNINITIALIZED` are met while the driver is replaced, `IN_USE`
        // while another program has the GPU open. `UNKNOWN` is counted in because NVML uses it for
        // passing faults too; callers bound their retries.
        matches!(
            self.code,
            GpuErrorCode::TIMEOUT
                | GpuErrorCode::IN_USE
                | GpuErrorCode::NOT_READY
                | GpuErrorCode::UNKNOWN
                | GpuErrorCode::DRIVER_NOT_LOADED
                | GpuErrorCode::UNINITIALIZED
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_operation_gpu_code_and_what_to_do() {
        let gpu: GpuUuid = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
        assert_eq!(
            GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::GPU_IS_LOST, &gpu).to_string(),
            "NVML facts failed on GPU-12345678-1234-1234-1234-123456780001: GPU_IS_LOST (15)"
        );
        assert_eq!(
            GpuError::global(GpuOp::Init, GpuErrorCode::LIBRARY_NOT_FOUND)
                .with_detail("/x/libnvidia-ml.so.1")
                .to_string(),
            "NVML init failed: LIBRARY_NOT_FOUND (12) (/x/libnvidia-ml.so.1; check --driver-root and --nvml-library)"
        );
        assert_eq!(
            GpuError::global(GpuOp::List, GpuErrorCode(4711)).to_string(),
            "NVML list failed: code 4711"
        );
    }
}
