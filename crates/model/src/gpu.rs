//! Facts that NVML knows of a machine and its GPUs, in our words. Values we don't know stay visible
//! as `Unknown`.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{GpuUuid, MemoryCaps, MpsAbility, PciAddress};

/// Facts about the machine's driver (`nvmlSystemGet…`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SystemFacts {
    /// Driver version as NVML writes it, such as `580.95.05`. See [`crate::normalise_version`].
    pub driver_version: String,
    /// NVML's own version, such as `13.580.95.05`; `None` if it does not say.
    pub nvml_version: Option<String>,
    /// Newest CUDA version the driver supports; `None` if it does not say.
    pub cuda_version: Option<CudaVersion>,
    /// Ability to cap the memory of shares. NVML knows if the driver can; the node plugin adds
    /// what else the node lacks.
    #[serde(default)]
    pub memory_caps: MemoryCaps,
    /// True if the driver keeps limits of control groups that are gone (it caps by the controller
    /// `misc`), so that one may be in the way of a later group.
    #[serde(default)]
    pub caps_linger: bool,
    /// Ability to share GPUs by MPS. The node plugin works it out.
    #[serde(default)]
    pub mps: MpsAbility,
}

/// A CUDA version (`nvmlSystemGetCudaDriverVersion`: 12040 is 12.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CudaVersion {
    pub major: u32,
    pub minor: u32,
}

impl CudaVersion {
    /// From NVML's number: `1000 * major + 10 * minor`.
    pub fn from_nvml(raw: u32) -> Self {
        Self {
            major: raw / 1000,
            minor: raw % 1000 / 10,
        }
    }
}

impl fmt::Display for CudaVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// CUDA compute capability (`nvmlDeviceGetCudaComputeCapability`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ComputeCapability {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for ComputeCapability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// GPU architecture (`nvmlDeviceGetArchitecture`). Ordered as released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Architecture {
    Kepler,
    Maxwell,
    Pascal,
    Volta,
    Turing,
    Ampere,
    Ada,
    Hopper,
    Blackwell,
    Rubin,
    /// A number this version does not know, or NVML's own "unknown".
    Unknown(u32),
}

impl Architecture {
    /// From NVML's number (`NVML_DEVICE_ARCH_*`).
    pub fn from_nvml(raw: u32) -> Self {
        match raw {
            2 => Self::Kepler,
            3 => Self::Maxwell,
            4 => Self::Pascal,
            5 => Self::Volta,
            6 => Self::Turing,
            7 => Self::Ampere,
            8 => Self::Ada,
            9 => Self::Hopper,
            10 => Self::Blackwell,
            13 => Self::Rubin,
            other => Self::Unknown(other),
        }
    }

    /// NVML's number.
    pub fn to_nvml(self) -> u32 {
        match self {
            Self::Kepler => 2,
            Self::Maxwell => 3,
            Self::Pascal => 4,
            Self::Volta => 5,
            Self::Turing => 6,
            Self::Ampere => 7,
            Self::Ada => 8,
            Self::Hopper => 9,
            Self::Blackwell => 10,
            Self::Rubin => 13,
            Self::Unknown(raw) => raw,
        }
    }

    /// The name as NVIDIA's DRA driver publishes it; `None` for an unknown number (it is left out,
    /// not invented).
    pub fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::Kepler => "Kepler",
            Self::Maxwell => "Maxwell",
            Self::Pascal => "Pascal",
            Self::Volta => "Volta",
            Self::Turing => "Turing",
            Self::Ampere => "Ampere",
            Self::Ada => "Ada Lovelace",
            Self::Hopper => "Hopper",
            Self::Blackwell => "Blackwell",
            Self::Rubin => "Rubin",
            Self::Unknown(_) => return None,
        })
    }

    /// Returns whether MIG mode changes at once, without a GPU reset (Hopper and later).
    pub fn toggles_mig_without_reset(self) -> bool {
        // `Unknown` sorts behind all others, so it has to be excluded: a GPU that does need a reset
        // would stay with a pending mode.
        !matches!(self, Self::Unknown(_)) && self >= Self::Hopper
    }
}

/// GPU brand (`nvmlDeviceGetBrand`), kept as NVML's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Brand(pub u32);

impl Brand {
    /// The name as NVIDIA's DRA driver publishes it; `None` for an unknown number.
    pub fn name(self) -> Option<&'static str> {
        // Indexed by `nvmlBrandType_t`, which has no gaps up to 16.
        const NAMES: [&str; 17] = [
            "Unknown",
            "Quadro",
            "Tesla",
            "NVS",
            "Grid",
            "GeForce",
            "Titan",
            "NvidiaVApps",
            "NvidiaVPC",
            "NvidiaVCS",
            "NvidiaVWS",
            "NvidiaCloudGaming",
            "QuadroRTX",
            "NvidiaRTX",
            "Nvidia",
            "GeForceRTX",
            "TitanRTX",
        ];
        usize::try_from(self.0)
            .ok()
            .and_then(|i| NAMES.get(i).copied())
    }
}

/// MIG mode (`nvmlDeviceGetMigMode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigMode {
    /// The GPU cannot do MIG (NVML answers NOT_SUPPORTED).
    Unsupported,
    /// MIG is possible; `current` now, `pending` after the next reset. Equal unless a change waits.
    Supported {
        /// True if MIG mode is on now.
        current: bool,
        /// True if MIG mode will be on after the next reset.
        pending: bool,
    },
}

impl MigMode {
    /// Returns whether MIG mode is on now.
    pub fn is_on(self) -> bool {
        matches!(self, Self::Supported { current: true, .. })
    }
}

/// The rule for compute contexts on a GPU (`nvmlDeviceGetComputeMode`; `nvidia-smi -c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum ComputeMode {
    /// Any number of processes.
    Default,
    /// A single process at a time: an MPS daemon wants this, and leaves it behind.
    ExclusiveProcess,
    /// No process at all.
    Prohibited,
}

impl ComputeMode {
    /// From NVML's number; `None` for one this version does not know.
    pub fn from_nvml(raw: u32) -> Option<Self> {
        match raw {
            0 => Some(Self::Default),
            // 1 is EXCLUSIVE_THREAD, which drivers treat as the other since CUDA 4.
            1 | 3 => Some(Self::ExclusiveProcess),
            2 => Some(Self::Prohibited),
            _ => None,
        }
    }

    /// NVML's number.
    pub fn to_nvml(self) -> u32 {
        match self {
            Self::Default => 0,
            Self::Prohibited => 2,
            Self::ExclusiveProcess => 3,
        }
    }
}

impl fmt::Display for ComputeMode {
    /// Writes it as `nvidia-smi -c` takes it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Default => "DEFAULT",
            Self::ExclusiveProcess => "EXCLUSIVE_PROCESS",
            Self::Prohibited => "PROHIBITED",
        })
    }
}

/// Another end of an active NVLink (`nvmlDeviceGetNvLinkRemotePciInfo_v2`, `…RemoteDeviceType`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum NvLinkPeer {
    /// Another GPU, directly.
    Gpu(PciAddress),
    /// An NVSwitch: all GPUs behind it reach each other.
    Switch,
    /// Anything else (an NPU), or a kind we don't know.
    Other(u32),
}

/// Fabric membership (`nvmlDeviceGetGpuFabricInfoV`), only once registration is complete.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FabricFacts {
    /// Cluster UUID of the NVLink fabric.
    pub cluster_uuid: String,
    /// Clique within the cluster.
    pub clique_id: u32,
}

/// A process with a context on a GPU (`nvmlDeviceGetComputeRunningProcesses_v3`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GpuProcess {
    /// Process id as the driver sees it (host PID namespace).
    pub pid: u32,
    /// GPU instance the context is in; `None` outside MIG.
    pub gpu_instance: Option<u32>,
    /// The compute instance in that.
    #[serde(default)]
    pub compute_instance: Option<u32>,
    /// Memory of its contexts in bytes, those themselves included; `None` where the driver does not
    /// say (without the rights, and on some systems).
    #[serde(default)]
    pub memory_bytes: Option<u64>,
}

impl GpuProcess {
    /// A process whose memory is not known, in the only compute instance of a GPU instance if that
    /// is given.
    pub fn new(pid: u32, gpu_instance: Option<u32>) -> Self {
        Self {
            pid,
            gpu_instance,
            compute_instance: gpu_instance.map(|_| 0),
            memory_bytes: None,
        }
    }
}

/// Facts about one GPU that do not change while it is bound to the driver, except
/// [`GpuFacts::mig_mode`], [`GpuFacts::compute_mode`] and [`GpuFacts::persistence`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuFacts {
    pub uuid: GpuUuid,
    /// Minor number of `/dev/nvidia<minor>`; `None` if NVML does not report it (some WSL and vGPU
    /// set-ups).
    pub minor: Option<u32>,
    /// Name, such as `NVIDIA H100 80GB HBM3`.
    pub product_name: String,
    pub brand: Brand,
    pub architecture: Architecture,
    /// CUDA compute capability.
    pub compute_capability: ComputeCapability,
    /// Total memory in bytes; `None` where NVML says NOT_SUPPORTED (coherent integrated GPUs).
    pub memory_bytes: Option<u64>,
    /// The part of it in bytes that the driver keeps for itself; `None` if it is not known.
    #[serde(default)]
    pub memory_reserved_bytes: Option<u64>,
    /// Streaming multiprocessors of the whole GPU; `None` if unknown. NVML does not count them
    /// while MIG mode is on: an inventory has what it knew before then, or those of the largest
    /// profile.
    pub multiprocessors: Option<u32>,
    pub pci_address: PciAddress,
    /// `device << 16 | vendor`, as NVML's `pciDeviceId`.
    pub pci_device_id: u32,
    pub mig_mode: MigMode,
    /// The rule for compute contexts on it; `None` if NVML does not say.
    #[serde(default)]
    pub compute_mode: Option<ComputeMode>,
    /// Persistence mode (`nvmlDeviceGetPersistenceMode`): without it the kernel module forgets the
    /// partitions of the GPU, and on Hopper its MIG mode, when the last program closes it; `None`
    /// if NVML does not say.
    #[serde(default)]
    pub persistence: Option<bool>,
    /// `HMM`, `ATS` or `None`; `None` (the Option) if NVML has nothing to say.
    pub addressing_mode: Option<String>,
    /// State of NVLink-C2C to the processor (`nvmlDeviceGetC2cModeInfoV`); `None` if NVML does not
    /// say.
    #[serde(default)]
    pub c2c: Option<bool>,
    /// Module number on a baseboard (`nvmlDeviceGetModuleId`).
    pub module_id: Option<u32>,
    /// Active NVLinks, sorted; several links to one peer appear once each.
    pub nvlinks: Vec<NvLinkPeer>,
    /// NVLink fabric, if registered.
    pub fabric: Option<FabricFacts>,
}
