//! Every name of ours in the Kubernetes API and on the node. They are in one place, so that a
//! rename is one change and the documentation can be checked against it.

pub use crate::naming::Naming;

/// Driver name (`ResourceSlice.spec.driver`) unless `--driver-name` says otherwise.
pub const DRIVER: &str = "gpu.divvy.dev";
/// Name of NVIDIA's driver. Under it, divvy stands in for that driver.
pub const NVIDIA_DRIVER: &str = "gpu.nvidia.com";
/// `apiVersion` of the configs of NVIDIA's driver.
pub const NVIDIA_API_VERSION: &str = "resource.nvidia.com/v1beta1";
/// Kind of the configs of NVIDIA's driver for MIG partitions.
pub const NVIDIA_MIG_CONFIG: &str = "MigDeviceConfig";

/// API group of what users write.
pub const GROUP: &str = "divvy.dev";
/// Version of what users write.
pub const VERSION: &str = "v1beta1";
/// `apiVersion` of what users write.
pub const API_VERSION: &str = "divvy.dev/v1beta1";

/// DeviceClass of whole GPUs.
pub const CLASS_GPU: &str = "gpu.divvy.dev";
/// DeviceClass of MIG partitions.
pub const CLASS_MIG: &str = "mig.divvy.dev";
/// DeviceClass of time-sliced shares.
pub const CLASS_SHARE: &str = "share.divvy.dev";
/// DeviceClass of time-sliced shares of MIG partitions.
pub const CLASS_MIG_SHARE: &str = "mig-share.divvy.dev";
/// DeviceClass of MPS shares.
pub const CLASS_MPS: &str = "mps.divvy.dev";
/// DeviceClass of MPS shares of MIG partitions.
pub const CLASS_MIG_MPS: &str = "mig-mps.divvy.dev";
/// DeviceClass of GPUs for admin access beside their holders.
pub const CLASS_ADMIN: &str = "admin.divvy.dev";

/// Field manager of the conditions that the node plugin applies to claims.
pub const FIELD_MANAGER: &str = "divvy-kubelet-plugin";
/// Field manager of those among them that say how a device is used.
pub const FIELD_MANAGER_USAGE: &str = "divvy-kubelet-plugin-usage";
/// Reporting controller in Events.
pub const REPORTER: &str = "gpu.divvy.dev/kubelet-plugin";
/// The same, of the cluster controller.
pub const CONTROLLER: &str = "gpu.divvy.dev/cluster-controller";

/// Field manager of the labels that the cluster controller applies to nodes.
pub const FIELD_MANAGER_LABELS: &str = "divvy-cluster-controller-labels";

/// Node label that an administrator sets to get the node plugin.
pub const NODE_LABEL: &str = "divvy.dev/gpu";

/// Attribute names (`ResourceSlice.spec.devices[].attributes`). Without a domain they live in the
/// driver's. Names and types are those of NVIDIA's driver wherever it has one, so that existing CEL
/// keeps working.
pub mod attributes {
    /// `gpu`, `mig`; shares: `gpu-share`, `mig-share`; MPS shares: `gpu-mps`; for admin access:
    /// `gpu-admin`.
    pub const TYPE: &str = "type";
    /// UUID of the device itself.
    pub const UUID: &str = "uuid";
    /// UUID of the GPU a partition is cut from.
    pub const PARENT_UUID: &str = "parentUUID";
    /// MIG profile, such as `1g.10gb`.
    pub const PROFILE: &str = "profile";
    /// Product name, such as `NVIDIA H100 80GB HBM3`.
    pub const PRODUCT_NAME: &str = "productName";
    /// Brand.
    pub const BRAND: &str = "brand";
    /// Architecture, such as `Hopper`.
    pub const ARCHITECTURE: &str = "architecture";
    /// CUDA compute capability (version).
    pub const CUDA_COMPUTE_CAPABILITY: &str = "cudaComputeCapability";
    /// Driver version (version, normalised).
    pub const DRIVER_VERSION: &str = "driverVersion";
    /// Newest CUDA version of the driver (version).
    pub const CUDA_DRIVER_VERSION: &str = "cudaDriverVersion";
    /// `HMM`, `ATS` or `None`.
    pub const ADDRESSING_MODE: &str = "addressingMode";
    /// State of NVLink-C2C to the processor (bool: on); where NVML reports it.
    pub const C2C_ENABLED: &str = "c2cEnabled";
    /// UUID of the card, on every device: for `matchAttribute` ("same card") and
    /// `distinctAttribute`.
    pub const GPU_UUID: &str = "gpuUUID";
    /// `exclusive`, `time-slicing`, `mps`.
    pub const SHARING: &str = "sharing";
    /// Time slice of shares: the one that the GPU has while it is shared (`Default`, `Short`,
    /// `Medium`, `Long`).
    pub const TIME_SLICE: &str = "timeSlice";
    /// Memory in MiB that shares by percent divide (int): 50 percent have half of it. Shares by
    /// amounts have the capacity `memory` instead.
    pub const MEMORY_MIB: &str = "memoryMiB";
    /// Memory in MiB that each slot of an MPS share has (int), with drivers before R615.
    pub const SLOT_MEMORY_MIB: &str = "slotMemoryMiB";
    /// Part of the GPU's threads that each slot of an MPS share has, in percent (int), with drivers
    /// before R615.
    pub const SLOT_CORES: &str = "slotCores";
    /// Isolation that is really enforced: `hardware`, `cooperative`, `none`.
    pub const ISOLATION: &str = "isolation";
    /// Layer that keeps a program within the memory of the device: `hardware`, `cgroup` (the
    /// driver, by the control group of the pod), or `none`, where amounts are only counted.
    pub const MEMORY_ENFORCEMENT: &str = "memoryEnforcement";
    /// The largest memory limit of a share (`limits.memory` of its config), in percent of its
    /// request (int): 100 where the policy allows none above it, and 0 where nothing keeps limits.
    pub const MEMORY_LIMIT_MAX_PERCENT: &str = "memoryLimitMaxPercent";
    /// Layer that keeps a program within the compute of the device: `hardware`, `mps-server` (the
    /// MPS server, for each process), or `none`.
    pub const COMPUTE_ENFORCEMENT: &str = "computeEnforcement";
    /// Extent of a fatal fault of a program: `partition`, or `gpu`, so all programs on the GPU that
    /// are not in partitions of their own.
    pub const FAULT_DOMAIN: &str = "faultDomain";
    /// GPUs with the same value reach each other over NVLink.
    pub const NVLINK_DOMAIN: &str = "nvlinkDomain";
    /// The two GPUs of a bridged pair have the same value.
    pub const NVLINK_PAIR: &str = "nvlinkPair";
    /// Standard attribute: PCI address.
    pub const PCI_BUS_ID: &str = "resource.kubernetes.io/pciBusID";
    /// Standard attribute: PCIe root complex.
    pub const PCIE_ROOT: &str = "resource.kubernetes.io/pcieRoot";
    /// Standard attribute: NUMA node.
    pub const NUMA_NODE: &str = "resource.kubernetes.io/numaNode";
}

/// Attributes that only the metadata of a claim's devices has: what is not known before a claim has
/// them.
pub mod metadata {
    /// Memory that a share was granted, in bytes (string).
    pub const MEMORY_GRANTED: &str = "memoryGranted";
    /// Limit of the memory of a share, in bytes (string); where the driver keeps one.
    pub const MEMORY_LIMIT: &str = "memoryLimit";
    /// Part of the GPU's compute that a share was granted, in percent (string).
    pub const CORES_GRANTED: &str = "coresGranted";
}

/// Capacity names (`ResourceSlice.spec.devices[].capacity`).
pub mod capacity {
    /// Memory in bytes.
    pub const MEMORY: &str = "memory";
    /// Streaming multiprocessors.
    pub const MULTIPROCESSORS: &str = "multiprocessors";
    /// Copy engines.
    pub const COPY_ENGINES: &str = "copyEngines";
    /// Video decoders.
    pub const DECODERS: &str = "decoders";
    /// Video encoders.
    pub const ENCODERS: &str = "encoders";
    /// JPEG engines.
    pub const JPEG_ENGINES: &str = "jpegEngines";
    /// Optical-flow engines.
    pub const OFA_ENGINES: &str = "ofaEngines";
    /// Percent of the GPU's compute, of a share. Accounted, not enforced.
    pub const CORES: &str = "cores";
    /// Places, of a share; each share takes one unless it asks for more.
    pub const SLOTS: &str = "slots";
    /// Percent of the GPU, of a share: of its memory and of its compute alike. The only capacity of
    /// shares by percent.
    pub const PERCENT: &str = "percent";
}

/// Counter names (`ResourceSlice.spec.sharedCounters[].counters`): the capacities, as DNS labels,
/// and the memory slices.
pub mod counters {
    /// Memory in bytes.
    pub const MEMORY: &str = "memory";
    /// Streaming multiprocessors.
    pub const MULTIPROCESSORS: &str = "multiprocessors";
    /// Copy engines.
    pub const COPY_ENGINES: &str = "copy-engines";
    /// Video decoders.
    pub const DECODERS: &str = "decoders";
    /// Video encoders.
    pub const ENCODERS: &str = "encoders";
    /// JPEG engines.
    pub const JPEG_ENGINES: &str = "jpeg-engines";
    /// Optical-flow engines.
    pub const OFA_ENGINES: &str = "ofa-engines";
    /// The GPU itself, where there is nothing else to count.
    pub const GPU: &str = "gpu";
    /// A memory slice; its number follows.
    pub const MEMORY_SLICE: &str = "memory-slice-";
    /// Neighbouring memory slices that are counted together; the first and the last follow.
    pub const MEMORY_SLICES: &str = "memory-slices-";
}

/// Taint keys (`ResourceSlice.spec.devices[].taints`).
pub mod taints {
    /// The GPU no longer answers.
    pub const LOST: &str = "gpu.divvy.dev/lost";
    /// The GPU answers but cannot be read.
    pub const UNREADABLE: &str = "gpu.divvy.dev/unreadable";
    /// The device is no longer offered and stays published only while a claim holds it.
    pub const WITHDRAWN: &str = "gpu.divvy.dev/withdrawn";
    /// A GPU of which it is not certain what is on it; see the Event and the node plugin's log.
    pub const FENCED: &str = "gpu.divvy.dev/fenced";
    /// Processes of a released claim still run on the GPU.
    pub const LINGERING: &str = "gpu.divvy.dev/lingering";
    /// The GPU or partition reported an Xid that it does not get over by itself; the value is its
    /// number.
    pub const XID: &str = "gpu.divvy.dev/xid";
    /// A recovery action is due: `reset`, `reboot`, `drain-peers`, `drain-and-reset`.
    pub const RECOVERY: &str = "gpu.divvy.dev/recovery";
    /// The NVLink fabric of the GPU is not ready, and CUDA fails on it: `not-started`,
    /// `in-progress`, `failed`, `unhealthy`.
    pub const FABRIC: &str = "gpu.divvy.dev/fabric";
    /// Replacement of bad memory rows is `pending` until a reset, or has `failed`.
    pub const ROW_REMAP: &str = "gpu.divvy.dev/row-remap";
    /// ECC errors were not corrected.
    pub const ECC: &str = "gpu.divvy.dev/ecc";
    /// Processes or MIG instances that no claim of ours accounts for are on the GPU.
    pub const FOREIGN: &str = "gpu.divvy.dev/foreign";
    /// The GPU is used in another mode, and the scheduler is not trusted to know.
    pub const MODE: &str = "gpu.divvy.dev/mode";
    /// Another driver or a device plugin has allocated the GPU or a part of it.
    pub const NEIGHBOUR: &str = "gpu.divvy.dev/neighbour";
    /// The MPS server of the GPU or partition is wedged, so that no new program can use it: it is
    /// in the state FAULT (`fault`), its daemon does not answer (`no-answer`), or a process holds
    /// it up (`held`).
    pub const MPS: &str = "gpu.divvy.dev/mps";
    /// The NVIDIA driver of the node is not there, is being replaced, or lacks files that
    /// containers need.
    pub const DRIVER_DOWN: &str = "gpu.divvy.dev/driver-down";
}

/// Labels of nodes that the cluster controller writes on demand. Labels of `nvidia.com` have the
/// names and values of NVIDIA's GPU Feature Discovery (`internal/lm` of NVIDIA/k8s-device-plugin at
/// 1b826acc).
pub mod node_labels {
    /// Product of the GPUs, with dashes for blanks.
    pub const PRODUCT: &str = "nvidia.com/gpu.product";
    /// Number of GPUs.
    pub const COUNT: &str = "nvidia.com/gpu.count";
    /// Memory of each GPU in MiB.
    pub const MEMORY: &str = "nvidia.com/gpu.memory";
    /// Architecture, such as `hopper`.
    pub const FAMILY: &str = "nvidia.com/gpu.family";
    /// CUDA compute capability, the number before the point.
    pub const COMPUTE_MAJOR: &str = "nvidia.com/gpu.compute.major";
    /// The number behind the point.
    pub const COMPUTE_MINOR: &str = "nvidia.com/gpu.compute.minor";
    /// NVLink fabric of all GPUs: `<cluster>.<clique>`.
    pub const CLIQUE: &str = "nvidia.com/gpu.clique";
    /// Version of the NVIDIA driver.
    pub const DRIVER: &str = "nvidia.com/cuda.driver-version.full";
    /// Its first number.
    pub const DRIVER_MAJOR: &str = "nvidia.com/cuda.driver-version.major";
    /// Its second number.
    pub const DRIVER_MINOR: &str = "nvidia.com/cuda.driver-version.minor";
    /// Its third number; empty if it has none.
    pub const DRIVER_REVISION: &str = "nvidia.com/cuda.driver-version.revision";
    /// `true` if a GPU of the node can be cut into partitions.
    pub const MIG_CAPABLE: &str = "nvidia.com/mig.capable";
    /// NVLink domain of all GPUs of the node. Nodes with the same value reach each other over
    /// NVLink.
    pub const NVLINK_DOMAIN: &str = "divvy.dev/nvlink-domain";

    /// All of them, sorted.
    pub const ALL: [&str; 13] = [
        NVLINK_DOMAIN,
        DRIVER,
        DRIVER_MAJOR,
        DRIVER_MINOR,
        DRIVER_REVISION,
        CLIQUE,
        COMPUTE_MAJOR,
        COMPUTE_MINOR,
        COUNT,
        FAMILY,
        MEMORY,
        PRODUCT,
        MIG_CAPABLE,
    ];
}

/// Annotations that users set.
pub mod annotations {
    /// `true` on a claim, its pod or its namespace: the pod is not evicted because it is idle.
    pub const KEEP_IDLE: &str = "divvy.dev/keep-idle";
    /// Grant of the namespace's GpuQuota, on a claim: the most that the claim may be given. The
    /// cluster controller writes it, and the API server refuses an allocation without it.
    pub const QUOTA: &str = "divvy.dev/quota";
    /// `true` on a node that `divvy defrag` has cordoned while pods are moved away from it.
    pub const DEFRAG: &str = "divvy.dev/defrag";
    /// Pods that the cluster controller evicted in the last minute, on its Lease.
    pub const DEPARTURES: &str = "divvy.dev/departures";
}

/// Conditions in `ResourceClaim.status.devices[].conditions`.
pub mod conditions {
    /// Condition of a device: `True` once it is prepared on its node; `False` with a reason when
    /// the claim can never be prepared as it is.
    pub const PREPARED: &str = "Prepared";
    /// `False` while the pods of a share use more memory than it was granted.
    pub const WITHIN_GRANT: &str = "WithinGrant";
    /// `True` while nothing has used the devices of the claim for a long time.
    pub const IDLE: &str = "Idle";
    /// `True` while the policy of the GPU calls for the eviction of the claim's pods. Confirmed
    /// every few minutes, by a new `lastTransitionTime`.
    pub const RECLAIM_DUE: &str = "ReclaimDue";
}

/// Reasons of the condition `ReclaimDue`.
pub mod reclaim {
    /// Pods of a share use so much more memory than granted that others cannot get theirs.
    pub const OVER_GRANT: &str = "OverGrant";
    /// The claim is idle for too long.
    pub const IDLE: &str = "Idle";
    /// Not any more.
    pub const NOT_DUE: &str = "NotDue";
}

/// Environment variables in containers.
pub mod env {
    /// Folder in which programs find the sockets of their MPS server.
    pub const MPS_PIPE_DIRECTORY: &str = "CUDA_MPS_PIPE_DIRECTORY";
    /// Limit of memory of each MPS client, by the number of its GPU in the container: `0=10240M`.
    pub const MPS_PINNED_MEMORY: &str = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
    /// Priority of MPS clients: 0 is normal, 1 below normal.
    pub const MPS_PRIORITY: &str = "CUDA_MPS_CLIENT_PRIORITY";

    /// Set to `void`, so that a container runtime of NVIDIA's injects nothing by itself.
    pub const NVIDIA_VISIBLE_DEVICES: &str = "NVIDIA_VISIBLE_DEVICES";

    /// UUID of a MIG partition: `DIVVY_MIG_UUID_`, and the device's name in capitals with
    /// underscores.
    pub fn mig_uuid(device: &str) -> String {
        format!("DIVVY_MIG_UUID_{}", in_capitals(device))
    }

    /// `true` where a MIG partition was made by the node's administrator and outlives the claim:
    /// `DIVVY_MIG_STATIC_`, and the device's name in capitals with underscores.
    pub fn mig_static(device: &str) -> String {
        format!("DIVVY_MIG_STATIC_{}", in_capitals(device))
    }

    /// Memory that the shares of a device were granted, in bytes: `DIVVY_MEMORY_`, and the device's
    /// name in capitals with underscores (`DIVVY_MEMORY_GPU_0_TS`). Several shares of it for one
    /// request are added up. It is enforced where the limit below is there; elsewhere programs have
    /// to limit themselves.
    pub fn share_memory(device: &str) -> String {
        format!("DIVVY_MEMORY_{}", in_capitals(device))
    }

    /// Limit of the memory of the shares of a device, in bytes, where the driver keeps one:
    /// `DIVVY_MEMORY_LIMIT_`, and the device's name as for the memory. It is what was granted, or
    /// what the claim's config sets above it. Added up as that is.
    pub fn share_memory_limit(device: &str) -> String {
        format!("DIVVY_MEMORY_LIMIT_{}", in_capitals(device))
    }

    /// Percent of the GPU's compute that the shares of a device were granted: `DIVVY_CORES_`, and
    /// the device's name as for the memory. Added up and enforced as little as that.
    pub fn share_cores(device: &str) -> String {
        format!("DIVVY_CORES_{}", in_capitals(device))
    }

    /// Returns what one share was granted of the memory and the compute of its device, and the
    /// limit of its memory, under names that no other share has, since a container may have shares
    /// of one device through several claims or requests, and the variables above then carry those
    /// of one: `DIVVY_SHARE_MEMORY_<DEVICE>_<SHARE ID>` and
    /// `DIVVY_SHARE_MEMORY_LIMIT_<DEVICE>_<SHARE ID>` in bytes,
    /// `DIVVY_SHARE_CORES_<DEVICE>_<SHARE ID>` in percent.
    pub fn one_share(device: &str, share_id: &str) -> [String; 3] {
        let name = |what: &str| {
            format!(
                "DIVVY_SHARE_{what}_{}_{}",
                in_capitals(device),
                in_capitals(share_id)
            )
        };
        ["MEMORY", "MEMORY_LIMIT", "CORES"].map(name)
    }

    fn in_capitals(device: &str) -> String {
        device.replace('-', "_").to_ascii_uppercase()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn composed_names_are_made_of_their_parts() {
        assert_eq!(API_VERSION, format!("{GROUP}/{VERSION}"));
        assert_eq!(env::share_memory("gpu-0-ts"), "DIVVY_MEMORY_GPU_0_TS");
        assert_eq!(env::share_cores("gpu-0-ts"), "DIVVY_CORES_GPU_0_TS");
        for key in [
            taints::LOST,
            taints::WITHDRAWN,
            taints::FENCED,
            taints::LINGERING,
            taints::FOREIGN,
            taints::NEIGHBOUR,
            taints::MPS,
            taints::DRIVER_DOWN,
        ] {
            assert!(key.starts_with(DRIVER), "{key}");
        }
    }
}
