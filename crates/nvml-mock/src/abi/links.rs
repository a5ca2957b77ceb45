//! NVLinks and fabric. SAFETY: see the parent.

use std::ffi::c_uint;

use divvy_model::health::FabricState;
use divvy_model::{GpuErrorCode, NvLinkPeer, PciAddress};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t, nvmlGpuFabricInfo_v3_t,
    nvmlPciInfo_t, nvmlReturn_t,
};

use super::{Answer, gpu, pci_info, put, struct_version, version_of};
use crate::bridge;

fn link(device: nvmlDevice_t, link: c_uint) -> Answer<Option<NvLinkPeer>> {
    bridge::gpu(device.addr(), |engine, gpu| {
        match engine.facts_of(gpu).nvlinks.as_slice() {
            _ if link >= bridge::generation(engine).links() => Err(GpuErrorCode::INVALID_ARGUMENT),
            [] => Err(GpuErrorCode::NOT_SUPPORTED),
            peers => Ok(peers.get(link as usize).copied()),
        }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkState(
    device: nvmlDevice_t,
    number: c_uint,
    active: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe { put(active, || Ok(u32::from(link(device, number)?.is_some()))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkRemoteDeviceType(
    device: nvmlDevice_t,
    number: c_uint,
    kind: *mut c_uint,
) -> nvmlReturn_t {
    let ask = || match link(device, number)? {
        Some(NvLinkPeer::Gpu(_)) => Ok(0),
        Some(NvLinkPeer::Switch) => Ok(2),
        Some(NvLinkPeer::Other(raw)) => Ok(raw),
        None => Err(GpuErrorCode::NOT_SUPPORTED),
    };
    // SAFETY: see `abi`.
    unsafe { put(kind, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: nvmlDevice_t,
    number: c_uint,
    pci: *mut nvmlPciInfo_t,
) -> nvmlReturn_t {
    // The address NVSwitches of a baseboard have in common here; readers use a switch's kind only.
    const SWITCH: PciAddress = PciAddress {
        domain: 0,
        bus: 0x05,
        device: 0,
        function: 0,
    };
    let ask = || match link(device, number)? {
        Some(NvLinkPeer::Gpu(address)) => Ok(pci_info(address, 0)),
        Some(NvLinkPeer::Switch) => Ok(pci_info(SWITCH, 0)),
        Some(NvLinkPeer::Other(_)) | None => Err(GpuErrorCode::NOT_SUPPORTED),
    };
    // SAFETY: see `abi`.
    unsafe { put(pci, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuFabricInfo(
    device: nvmlDevice_t,
    info: *mut nvmlGpuFabricInfo_t,
) -> nvmlReturn_t {
    let ask = || {
        fabric(device).map(|f| nvmlGpuFabricInfo_t {
            clusterUuid: f.clusterUuid,
            status: f.status,
            cliqueId: f.cliqueId,
            state: f.state,
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(info, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuFabricInfoV(
    device: nvmlDevice_t,
    info: *mut nvmlGpuFabricInfo_v3_t,
) -> nvmlReturn_t {
    let v2 = struct_version::<nvmlGpuFabricInfo_v2_t>(2);
    let v3 = struct_version::<nvmlGpuFabricInfo_v3_t>(3);
    let knows_v3 = bridge::engine().is_ok_and(|engine| bridge::generation(&engine).has_fabric_v3());
    // SAFETY: see `abi`; a versioned struct has at least its version, and is as large as that says.
    unsafe {
        match version_of(info.cast()) {
            Ok(asked) if asked == v3 && knows_v3 => put(info, || fabric(device)),
            Ok(asked) if asked == v2 => put(info.cast::<nvmlGpuFabricInfo_v2_t>(), || {
                fabric(device).map(|f| nvmlGpuFabricInfo_v2_t {
                    version: v2,
                    clusterUuid: f.clusterUuid,
                    status: f.status,
                    cliqueId: f.cliqueId,
                    state: f.state,
                    healthMask: f.healthMask,
                })
            }),
            Ok(_) => GpuErrorCode::ARGUMENT_VERSION_MISMATCH.0,
            Err(code) => code.0,
        }
    }
}

fn fabric(device: nvmlDevice_t) -> Answer<nvmlGpuFabricInfo_v3_t> {
    gpu(device, |g| {
        let none = nvmlGpuFabricInfo_v3_t {
            version: struct_version::<nvmlGpuFabricInfo_v3_t>(3),
            clusterUuid: [0; 16],
            status: 0,
            cliqueId: 0,
            state: 0,
            healthMask: 0,
            healthSummary: 0,
        };
        // A member is registered, unless a test says otherwise.
        let member = g.facts.fabric.as_ref();
        let Some(registered) = g.vitals.fabric.or(member.map(|_| FabricState::READY)) else {
            return Ok(none);
        };
        let cluster = member.map_or(Ok(0), |fabric| {
            u128::from_str_radix(&fabric.cluster_uuid.replace('-', ""), 16)
        });
        let cluster = cluster.map_err(|_| GpuErrorCode::UNKNOWN)?.to_be_bytes();
        Ok(nvmlGpuFabricInfo_v3_t {
            clusterUuid: cluster,
            cliqueId: member.map_or(0, |fabric| fabric.clique_id),
            state: registered.state,
            status: registered.status,
            healthSummary: registered.health,
            ..none
        })
    })
}
