//! The symbols of the library that serve each operation: a test loads the library and looks for
//! each.

use divvy_model::GpuOp;

/// The symbols an operation of [`divvy_model::GpuDriver`] needs. The first is the one that meets
/// the faults set for the operation, once per call. (Reading facts and capabilities calls
/// `nvmlDeviceGetMigMode` too, listing compute instances asks for their profiles: so they meet
/// faults of those. An id that is looked up and not found meets none.)
pub fn symbols(op: GpuOp) -> &'static [&'static str] {
    match op {
        GpuOp::Init => &[
            "nvmlInit_v2",
            "nvmlInitWithFlags",
            "nvmlShutdown",
            "nvmlErrorString",
        ],
        GpuOp::System => &[
            "nvmlSystemGetDriverVersion",
            "nvmlSystemGetNVMLVersion",
            "nvmlSystemGetCudaDriverVersion",
        ],
        GpuOp::List => &[
            "nvmlDeviceGetCount_v2",
            "nvmlDeviceGetHandleByIndex_v2",
            "nvmlDeviceGetUUID",
        ],
        GpuOp::Facts => &[
            "nvmlDeviceGetName",
            "nvmlDeviceGetHandleByUUID",
            "nvmlDeviceGetBrand",
            "nvmlDeviceGetComputeMode",
            "nvmlDeviceGetMinorNumber",
            "nvmlDeviceGetPciInfo_v3",
            "nvmlDeviceGetArchitecture",
            "nvmlDeviceGetCudaComputeCapability",
            "nvmlDeviceGetMemoryInfo",
            "nvmlDeviceGetMemoryInfo_v2",
            "nvmlDeviceGetNumGpuCores",
            "nvmlDeviceGetModuleId",
            "nvmlDeviceGetAddressingMode",
            "nvmlDeviceGetC2cModeInfoV",
            "nvmlDeviceGetNvLinkState",
            "nvmlDeviceGetNvLinkRemoteDeviceType",
            "nvmlDeviceGetNvLinkRemotePciInfo_v2",
            "nvmlDeviceGetGpuFabricInfo",
            "nvmlDeviceGetGpuFabricInfoV",
        ],
        GpuOp::MigMode => &["nvmlDeviceGetMigMode"],
        GpuOp::PersistenceMode => &["nvmlDeviceGetPersistenceMode"],
        GpuOp::Processes => &[
            "nvmlDeviceGetComputeRunningProcesses_v3",
            "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        ],
        GpuOp::MigCapabilities => &[
            // Only when it is asked for field 199.
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetGpuInstanceProfileInfo",
            "nvmlDeviceGetGpuInstanceProfileInfoV",
            // For the first profile this one meets faults, too.
            "nvmlDeviceGetGpuInstancePossiblePlacements_v2",
        ],
        GpuOp::SetMigMode => &["nvmlDeviceSetMigMode"],
        GpuOp::SetComputeMode => &["nvmlDeviceSetComputeMode"],
        // Only for the first profile.
        GpuOp::GpuInstances => &["nvmlDeviceGetGpuInstances", "nvmlGpuInstanceGetInfo"],
        GpuOp::CreateGpuInstance => &["nvmlDeviceCreateGpuInstanceWithPlacement"],
        GpuOp::DestroyGpuInstance => &["nvmlGpuInstanceDestroy", "nvmlDeviceGetGpuInstanceById"],
        // Only for the first profile.
        GpuOp::ComputeProfiles => &["nvmlGpuInstanceGetComputeInstanceProfileInfo"],
        // Only for the first profile.
        GpuOp::ComputeInstances => &[
            "nvmlGpuInstanceGetComputeInstances",
            "nvmlComputeInstanceGetInfo_v2",
        ],
        GpuOp::CreateComputeInstance => &["nvmlGpuInstanceCreateComputeInstance"],
        GpuOp::DestroyComputeInstance => &[
            "nvmlComputeInstanceDestroy",
            "nvmlGpuInstanceGetComputeInstanceById",
        ],
        GpuOp::Vitals => &[
            // Only when it is asked for field 230.
            "nvmlDeviceGetFieldValues",
            "nvmlDeviceGetRemappedRows",
            "nvmlDeviceGetRetiredPagesPendingStatus",
            "nvmlDeviceGetTotalEccErrors",
        ],
        GpuOp::Events => &[
            "nvmlEventSetWait_v2",
            "nvmlEventSetCreate",
            "nvmlEventSetFree",
            "nvmlDeviceGetSupportedEventTypes",
            "nvmlDeviceRegisterEvents",
        ],
        GpuOp::Memory => &["nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetHandleByUUID"],
        GpuOp::Utilization => &["nvmlDeviceGetUtilizationRates"],
        GpuOp::ProcessUtilization => &["nvmlDeviceGetProcessUtilization"],
        GpuOp::SmUtilization => &[
            // And the next, whichever is asked.
            "nvmlGpmSampleGet",
            "nvmlGpmMigSampleGet",
            "nvmlGpmQueryDeviceSupport",
            "nvmlGpmSampleAlloc",
            "nvmlGpmSampleFree",
            "nvmlGpmMetricsGet",
        ],
        GpuOp::MemoryLimit => &["nvmlDeviceGetMemoryLimits_v1"],
        GpuOp::SetMemoryLimit => &["nvmlDeviceSetMemoryLimits_v1"],
    }
}

/// Exported for other users of NVML, or for what an older driver lacks; no operation of ours needs
/// them.
pub const ALSO: &[&str] = &[
    "nvmlSystemGetCudaDriverVersion_v2",
    "nvmlDeviceGetComputeRunningProcesses_v2",
    "nvmlDeviceGetMPSComputeRunningProcesses_v2",
    "nvmlDeviceGetHandleByPciBusId_v2",
    "nvmlDeviceGetIndex",
    "nvmlDeviceGetGpuInstanceRemainingCapacity",
    "nvmlDeviceIsMigDeviceHandle",
    "nvmlDeviceGetGpuInstanceId",
    "nvmlDeviceGetComputeInstanceId",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
    "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
];
