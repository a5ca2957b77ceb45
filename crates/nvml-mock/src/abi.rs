//! NVML's C functions. Pointers in, pointers out: everything else is in `bridge`.
//!
//! SAFETY, for every function here: `nvml.h` makes the caller promise that an out pointer is valid for a value of
//! its type, a buffer for its length, and a text for reading up to its NUL. Null is checked for, as NVML does.
//! A device handle is only a number here and is never followed.

use std::ffi::{CStr, CString, c_char, c_int, c_uint};
use std::mem::size_of;
use std::ptr;

use divvy_gpu_sim::SimGpu;
use divvy_model::{GpuErrorCode, GpuOp, MigMode, NvLinkPeer, PciAddress};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlDeviceAddressingMode_t, nvmlFieldValue_t, nvmlGpuFabricInfo_t, nvmlGpuFabricInfo_v2_t,
    nvmlGpuFabricInfo_v3_t, nvmlMemory_t, nvmlMemory_v2_t, nvmlPciInfo_t, nvmlProcessInfo_t, nvmlReturn_t,
    nvmlValue_t,
};

use crate::bridge;

type Answer<T> = Result<T, GpuErrorCode>;

fn code(answer: Answer<()>) -> nvmlReturn_t {
    match answer {
        Ok(()) => 0,
        Err(code) => code.0,
    }
}

/// Writes an answer where the caller wants it.
///
/// # Safety
/// `out` is null or valid for writing a `T`.
unsafe fn put<T>(out: *mut T, answer: impl FnOnce() -> Answer<T>) -> nvmlReturn_t {
    if out.is_null() {
        return GpuErrorCode::INVALID_ARGUMENT.0;
    }
    code(answer().map(|value| {
        // SAFETY: not null, and valid by this function's contract.
        unsafe { out.write(value) }
    }))
}

/// Writes a text with its NUL.
///
/// # Safety
/// `out` is null or valid for writing `length` characters.
unsafe fn put_text(
    out: *mut c_char,
    length: c_uint,
    answer: impl FnOnce() -> Answer<String>,
) -> nvmlReturn_t {
    if out.is_null() {
        return GpuErrorCode::INVALID_ARGUMENT.0;
    }
    code(answer().and_then(|text| {
        let text = CString::new(text).map_err(|_| GpuErrorCode::UNKNOWN)?;
        let bytes = text.as_bytes_with_nul();
        if bytes.len() > length as usize {
            return Err(GpuErrorCode::INSUFFICIENT_SIZE);
        }
        // SAFETY: not null, and valid for `length` characters by this function's contract.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out, bytes.len()) };
        Ok(())
    }))
}

/// # Safety
/// `text` is null or a text with a NUL.
unsafe fn text<'a>(text: *const c_char) -> Answer<&'a str> {
    if text.is_null() {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and with a NUL by this function's contract.
    unsafe { CStr::from_ptr(text) }.to_str().map_err(|_| GpuErrorCode::INVALID_ARGUMENT)
}

fn to_handle(number: usize) -> nvmlDevice_t {
    ptr::without_provenance_mut(number)
}

/// NVML's versioned structs say which they are: size and version number.
#[expect(clippy::cast_possible_truncation, reason = "the structs have less than 16 MiB")]
const fn struct_version<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | version << 24
}

/// Asks about the GPU behind a handle.
fn gpu<T>(device: nvmlDevice_t, ask: impl FnOnce(&SimGpu) -> Answer<T>) -> Answer<T> {
    bridge::gpu(device.addr(), |_, gpu| ask(gpu))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    code(bridge::init())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> nvmlReturn_t {
    code(bridge::init())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    code(bridge::shutdown())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    match result {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        6 => c"Not Found",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        15 => c"GPU is lost",
        18 => c"Driver/library version mismatch",
        _ => c"Unknown Error",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe {
        put_text(version, length, || Ok(bridge::engine_for(GpuOp::System)?.system.driver_version.clone()))
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe { put_text(version, length, || Ok(bridge::engine()?.system.nvml_version.clone())) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe {
        put(version, || {
            let cuda = bridge::engine()?.system.cuda_version;
            (cuda.major * 1000 + cuda.minor * 10).try_into().map_err(|_| GpuErrorCode::UNKNOWN)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe {
        put(count, || {
            let gpus = bridge::engine_for(GpuOp::List)?.gpus().len();
            gpus.try_into().map_err(|_| GpuErrorCode::UNKNOWN)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut nvmlDevice_t) -> nvmlReturn_t {
    let find =
        || bridge::handle_of(|at, _| at == index as usize, GpuErrorCode::INVALID_ARGUMENT).map(to_handle);
    // SAFETY: see the module.
    unsafe { put(device, find) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    let find = || {
        // SAFETY: see the module.
        let uuid = unsafe { text(uuid) }?;
        bridge::handle_of(|_, g| g.facts.uuid.as_str() == uuid, GpuErrorCode::NOT_FOUND).map(to_handle)
    };
    // SAFETY: see the module.
    unsafe { put(device, find) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    bus_id: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    let find = || {
        // SAFETY: see the module.
        let address: PciAddress =
            unsafe { text(bus_id) }?.parse().map_err(|_| GpuErrorCode::INVALID_ARGUMENT)?;
        bridge::handle_of(|_, g| g.facts.pci_address == address, GpuErrorCode::NOT_FOUND).map(to_handle)
    };
    // SAFETY: see the module.
    unsafe { put(device, find) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: *mut c_uint) -> nvmlReturn_t {
    let ask = || {
        bridge::gpu(device.addr(), |engine, gpu| {
            let at = engine.gpus().iter().position(|g| g.facts.uuid == gpu.facts.uuid);
            at.and_then(|i| i.try_into().ok()).ok_or(GpuErrorCode::UNKNOWN)
        })
    };
    // SAFETY: see the module.
    unsafe { put(index, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(
    device: nvmlDevice_t,
    uuid: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe { put_text(uuid, length, || gpu(device, |g| Ok(g.facts.uuid.to_string()))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(
    device: nvmlDevice_t,
    name: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    let ask = || bridge::gpu_for(GpuOp::Facts, device.addr(), |_, g| Ok(g.facts.product_name.clone()));
    // SAFETY: see the module.
    unsafe { put_text(name, length, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetBrand(device: nvmlDevice_t, brand: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe { put(brand, || gpu(device, |g| Ok(g.facts.brand.0))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMinorNumber(device: nvmlDevice_t, minor: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe { put(minor, || gpu(device, |g| g.facts.minor.ok_or(GpuErrorCode::NOT_SUPPORTED))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(device: nvmlDevice_t, pci: *mut nvmlPciInfo_t) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe { put(pci, || gpu(device, |g| Ok(pci_info(g.facts.pci_address, g.facts.pci_device_id)))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetArchitecture(device: nvmlDevice_t, arch: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe { put(arch, || gpu(device, |g| Ok(g.facts.architecture.to_nvml()))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: nvmlDevice_t,
    major: *mut c_int,
    minor: *mut c_int,
) -> nvmlReturn_t {
    let number = |n: u32| n.try_into().map_err(|_| GpuErrorCode::UNKNOWN);
    // SAFETY: see the module.
    let first = unsafe { put(major, || gpu(device, |g| number(g.facts.compute_capability.major))) };
    if first != 0 {
        return first;
    }
    // SAFETY: see the module.
    unsafe { put(minor, || gpu(device, |g| number(g.facts.compute_capability.minor))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_t,
) -> nvmlReturn_t {
    let ask = || {
        let total = gpu(device, |g| g.facts.memory_bytes.ok_or(GpuErrorCode::NOT_SUPPORTED))?;
        Ok(nvmlMemory_t { total, free: total, used: 0 })
    };
    // SAFETY: see the module.
    unsafe { put(memory, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    let version = struct_version::<nvmlMemory_v2_t>(2);
    let ask = || {
        let total = gpu(device, |g| g.facts.memory_bytes.ok_or(GpuErrorCode::NOT_SUPPORTED))?;
        Ok(nvmlMemory_v2_t { version, total, reserved: 0, free: total, used: 0 })
    };
    // SAFETY: see the module; a versioned struct has at least its version.
    unsafe {
        match version_of(memory.cast()) {
            Ok(asked) if asked == version => put(memory, ask),
            Ok(_) => GpuErrorCode::ARGUMENT_VERSION_MISMATCH.0,
            Err(code) => code.0,
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNumGpuCores(device: nvmlDevice_t, cores: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe {
        put(cores, || {
            gpu(device, |g| match g.cores() {
                0 => Err(GpuErrorCode::NOT_SUPPORTED),
                cores => Ok(cores),
            })
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: nvmlDevice_t,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> nvmlReturn_t {
    let ask = || {
        bridge::gpu_for(GpuOp::MigMode, device.addr(), |_, g| match g.facts.mig_mode {
            MigMode::Unsupported => Err(GpuErrorCode::NOT_SUPPORTED),
            MigMode::Supported { current, pending } => Ok((u32::from(current), u32::from(pending))),
        })
    };
    if current.is_null() || pending.is_null() {
        return GpuErrorCode::INVALID_ARGUMENT.0;
    }
    code(ask().map(|(now, later)| {
        // SAFETY: see the module.
        unsafe {
            current.write(now);
            pending.write(later);
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetModuleId(device: nvmlDevice_t, module: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe { put(module, || gpu(device, |g| g.facts.module_id.ok_or(GpuErrorCode::NOT_SUPPORTED))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetAddressingMode(
    device: nvmlDevice_t,
    mode: *mut nvmlDeviceAddressingMode_t,
) -> nvmlReturn_t {
    let version = struct_version::<nvmlDeviceAddressingMode_t>(1);
    let ask = || {
        let value = gpu(device, |g| match g.facts.addressing_mode.as_deref() {
            Some("None") => Ok(0),
            Some("HMM") => Ok(1),
            Some("ATS") => Ok(2),
            _ => Err(GpuErrorCode::NOT_SUPPORTED),
        })?;
        Ok(nvmlDeviceAddressingMode_t { version, value })
    };
    // SAFETY: see the module; a versioned struct has at least its version.
    unsafe {
        match version_of(mode.cast()) {
            Ok(asked) if asked == version => put(mode, ask),
            Ok(_) => GpuErrorCode::ARGUMENT_VERSION_MISMATCH.0,
            Err(code) => code.0,
        }
    }
}

/// Highest number of links NVML 13 knows.
const MAX_LINKS: c_uint = 36;

fn link(device: nvmlDevice_t, link: c_uint) -> Answer<Option<NvLinkPeer>> {
    if link >= MAX_LINKS {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
    }
    bridge::gpu(device.addr(), |engine, gpu| match engine.facts_of(gpu).nvlinks.as_slice() {
        [] => Err(GpuErrorCode::NOT_SUPPORTED),
        peers => Ok(peers.get(link as usize).copied()),
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkState(
    device: nvmlDevice_t,
    number: c_uint,
    active: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see the module.
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
    // SAFETY: see the module.
    unsafe { put(kind, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: nvmlDevice_t,
    number: c_uint,
    pci: *mut nvmlPciInfo_t,
) -> nvmlReturn_t {
    // The address NVSwitches of a baseboard have in common here; readers use a switch's kind only.
    const SWITCH: PciAddress = PciAddress { domain: 0, bus: 0x05, device: 0, function: 0 };
    let ask = || match link(device, number)? {
        Some(NvLinkPeer::Gpu(address)) => Ok(pci_info(address, 0)),
        Some(NvLinkPeer::Switch) => Ok(pci_info(SWITCH, 0)),
        Some(NvLinkPeer::Other(_)) | None => Err(GpuErrorCode::NOT_SUPPORTED),
    };
    // SAFETY: see the module.
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
    // SAFETY: see the module.
    unsafe { put(info, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuFabricInfoV(
    device: nvmlDevice_t,
    info: *mut nvmlGpuFabricInfo_v3_t,
) -> nvmlReturn_t {
    let v2 = struct_version::<nvmlGpuFabricInfo_v2_t>(2);
    // SAFETY: see the module; a versioned struct has at least its version, and is as large as that says.
    unsafe {
        match version_of(info.cast()) {
            Ok(asked) if asked == struct_version::<nvmlGpuFabricInfo_v3_t>(3) => put(info, || fabric(device)),
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
        let Some(fabric) = &g.facts.fabric else { return Ok(none) };
        let number = u128::from_str_radix(&fabric.cluster_uuid.replace('-', ""), 16);
        let cluster = number.map_err(|_| GpuErrorCode::UNKNOWN)?.to_be_bytes();
        Ok(nvmlGpuFabricInfo_v3_t {
            clusterUuid: cluster,
            cliqueId: fabric.clique_id,
            state: 3,
            healthSummary: 1,
            ..none
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    let ask = bridge::gpu_for(GpuOp::Processes, device.addr(), |_, g| {
        Ok(g.processes.iter().map(|p| (p.pid, p.gpu_instance)).collect::<Vec<_>>())
    });
    // SAFETY: see the module.
    unsafe { put_processes(count, infos, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: see the module.
    unsafe { put_processes(count, infos, gpu(device, |_| Ok(Vec::new()))) }
}

/// # Safety
/// `count` is null or valid; `infos` is null or valid for `*count` processes.
unsafe fn put_processes(
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
    answer: Answer<Vec<(u32, Option<u32>)>>,
) -> nvmlReturn_t {
    const NOT_AVAILABLE: u64 = u64::MAX;
    if count.is_null() {
        return GpuErrorCode::INVALID_ARGUMENT.0;
    }
    code(answer.and_then(|processes| {
        // SAFETY: valid by this function's contract.
        let room = unsafe { count.read() } as usize;
        let needed = c_uint::try_from(processes.len()).map_err(|_| GpuErrorCode::UNKNOWN)?;
        // SAFETY: as above.
        unsafe { count.write(needed) };
        if processes.len() > room {
            return Err(GpuErrorCode::INSUFFICIENT_SIZE);
        }
        if infos.is_null() && !processes.is_empty() {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        for (at, (pid, gpu_instance)) in processes.into_iter().enumerate() {
            let info = nvmlProcessInfo_t {
                pid,
                usedGpuMemory: NOT_AVAILABLE,
                gpuInstanceId: gpu_instance.unwrap_or(u32::MAX),
                computeInstanceId: if gpu_instance.is_some() { 0 } else { u32::MAX },
            };
            // SAFETY: `at` is below `room`, for which `infos` is valid by this function's contract.
            unsafe { infos.add(at).write(info) };
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: nvmlDevice_t,
    count: c_int,
    values: *mut nvmlFieldValue_t,
) -> nvmlReturn_t {
    const MIG_QUERY_WITHOUT_MIG: u32 = 199;
    const RECOVERY_ACTION: u32 = 230;
    const UNSIGNED_INT: u32 = 1;
    let (Ok(count), false) = (usize::try_from(count), values.is_null()) else {
        return GpuErrorCode::INVALID_ARGUMENT.0;
    };
    code(gpu(device, |g| {
        for at in 0..count {
            // SAFETY: see the module; `values` is valid for `count` values.
            let value = unsafe { &mut *values.add(at) };
            let answer = match value.fieldId {
                MIG_QUERY_WITHOUT_MIG => Ok(u32::from(g.facts.mig_mode != MigMode::Unsupported)),
                RECOVERY_ACTION => Ok(0),
                _ => Err(GpuErrorCode::NOT_SUPPORTED),
            };
            value.nvmlReturn = code(answer.map(|number| {
                value.valueType = UNSIGNED_INT;
                value.value = nvmlValue_t { uiVal: number };
            }));
        }
        Ok(())
    }))
}

/// # Safety
/// `versioned` is null or points to a struct that begins with its version.
unsafe fn version_of(versioned: *const c_uint) -> Answer<c_uint> {
    if versioned.is_null() {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and begins with a version by this function's contract.
    Ok(unsafe { versioned.read() })
}

fn pci_info(address: PciAddress, device_id: u32) -> nvmlPciInfo_t {
    let PciAddress { domain, bus, device, function } = address;
    nvmlPciInfo_t {
        busIdLegacy: chars(&format!("{:04X}:{bus:02X}:{device:02X}.{function:X}", domain & 0xffff)),
        domain,
        bus: bus.into(),
        device: device.into(),
        pciDeviceId: device_id,
        pciSubSystemId: 0,
        busId: chars(&format!("{domain:08X}:{bus:02X}:{device:02X}.{function:X}")),
    }
}

/// A text in an array, with at least one NUL after it.
fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (slot, byte) in array.iter_mut().take(N.saturating_sub(1)).zip(text.bytes()) {
        *slot = byte.cast_signed();
    }
    array
}
