//! Connections of a GPU: NVLink, and the fabric of its domain.

use nvml_wrapper_sys::bindings::{
    nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t,
};

use super::{Failure, Handle, Library, Pci, check, missing, no_pci, pci_of, struct_version};

/// Answer of `nvmlDeviceGetGpuFabricInfo…`, whichever version it is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Fabric {
    pub(crate) cluster_uuid: [u8; 16],
    pub(crate) status: u32,
    pub(crate) clique_id: u32,
    pub(crate) state: u8,
    /// Summary of its health; 0 before version 3.
    pub(crate) health: u8,
}

impl Library {
    pub(crate) fn nvlink_is_active(&self, gpu: Handle, link: u32) -> Result<bool, Failure> {
        let mut active = 0;
        call!(self.nvmlDeviceGetNvLinkState(gpu.0, link, &raw mut active))?;
        Ok(active != 0)
    }

    pub(crate) fn nvlink_remote_type(&self, gpu: Handle, link: u32) -> Result<u32, Failure> {
        let mut kind = 0;
        call!(self.nvmlDeviceGetNvLinkRemoteDeviceType(gpu.0, link, &raw mut kind))?;
        Ok(kind)
    }

    pub(crate) fn nvlink_remote_pci(&self, gpu: Handle, link: u32) -> Result<Pci, Failure> {
        let mut pci = no_pci();
        call!(self.nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu.0, link, &raw mut pci))?;
        pci_of(&pci)
    }

    pub(crate) fn fabric_v3(&self, gpu: Handle) -> Result<Fabric, Failure> {
        let mut info = nvmlGpuFabricInfo_v3_t {
            version: struct_version::<nvmlGpuFabricInfo_v3_t>(3),
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        call!(self.nvmlDeviceGetGpuFabricInfoV(gpu.0, &raw mut info))?;
        Ok(Fabric {
            cluster_uuid: info.clusterUuid,
            status: info.status,
            clique_id: info.cliqueId,
            state: info.state,
            health: info.healthSummary,
        })
    }

    pub(crate) fn fabric_v2(&self, gpu: Handle) -> Result<Fabric, Failure> {
        // In the larger struct of version 3, so that a library that ignores the version writes into
        // our memory; the version limits which part it fills.
        let mut info = nvmlGpuFabricInfo_v3_t {
            version: struct_version::<nvmlGpuFabricInfo_v2_t>(2),
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        call!(self.nvmlDeviceGetGpuFabricInfoV(gpu.0, &raw mut info))?;
        Ok(Fabric {
            cluster_uuid: info.clusterUuid,
            status: info.status,
            clique_id: info.cliqueId,
            state: info.state,
            health: 0,
        })
    }

    pub(crate) fn fabric_v1(&self, gpu: Handle) -> Result<Fabric, Failure> {
        let mut info = nvmlGpuFabricInfo_t {
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
        };
        call!(self.nvmlDeviceGetGpuFabricInfo(gpu.0, &raw mut info))?;
        Ok(Fabric {
            cluster_uuid: info.clusterUuid,
            status: info.status,
            clique_id: info.cliqueId,
            state: info.state,
            health: 0,
        })
    }
}
