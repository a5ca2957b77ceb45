//! Sessions, versions, and how a GPU's handle is had. SAFETY: see the parent.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr;

use divvy_model::{GpuErrorCode, GpuOp, PciAddress};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use super::{Answer, bad_argument, code, code_of_session, put, put_count, put_text};
use crate::bridge;

/// # Safety
/// `text` is null or a text with a NUL.
unsafe fn text<'a>(text: *const c_char) -> Answer<&'a str> {
    if text.is_null() {
        return Err(bad_argument());
    }
    // SAFETY: not null, and with a NUL by this function's contract.
    unsafe { CStr::from_ptr(text) }
        .to_str()
        .map_err(|_| GpuErrorCode::INVALID_ARGUMENT)
}

pub(super) fn to_handle(number: usize) -> nvmlDevice_t {
    ptr::without_provenance_mut(number)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> nvmlReturn_t {
    code_of_session(bridge::init())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> nvmlReturn_t {
    code_of_session(bridge::init())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> nvmlReturn_t {
    bridge::shutdown();
    code(Ok(()))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: nvmlReturn_t) -> *const c_char {
    // Words that came with R535, and between that and R550.
    let last = || {
        let engine = bridge::beside_sessions();
        engine.map_or(0, |engine| {
            bridge::generation(&engine).last_code_with_words()
        })
    };
    match result {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"GPU access blocked by the operating system",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        22 => c"vGPU ECC not supported",
        23 => c"Insufficient Resources",
        24 => c"Invalid Frequency",
        25 => c"Argument version mismatch",
        26 => c"Requested functionality has been deprecated",
        27 if last() >= 27 => c"System is not in ready state",
        28 if last() >= 28 => c"No supported GPUs were found",
        29 if last() >= 29 => c"Resource not in correct state to perform requested operation",
        _ => c"Unknown Error",
    }
    .as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(
    version: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put_text(version, length, || {
            Ok(bridge::engine_for(GpuOp::System)?
                .system
                .driver_version
                .clone())
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetNVMLVersion(
    version: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    let ask = || {
        // The version is the library's own. Only before R535 was a session needed for it.
        let engine = bridge::beside_sessions()?;
        if !bridge::generation(&engine).has_version_beside_sessions() {
            bridge::engine()?;
        }
        let version = engine.system.nvml_version.clone();
        version.ok_or(GpuErrorCode::NOT_SUPPORTED)
    };
    if version.is_null() {
        return ask().err().unwrap_or(GpuErrorCode::INVALID_ARGUMENT).0;
    }
    // SAFETY: see `abi`.
    unsafe { put_text(version, length, ask) }
}

fn cuda_version() -> Answer<c_int> {
    let cuda = bridge::engine()?
        .system
        .cuda_version
        .ok_or(GpuErrorCode::NOT_SUPPORTED)?;
    (cuda.major * 1000 + cuda.minor * 10)
        .try_into()
        .map_err(|_| GpuErrorCode::UNKNOWN)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe { put(version, cuda_version) }
}

/// Asks libcuda, which a process has only if its loader finds it: the plugin's image has none.
/// `$DIVVY_MOCK_LIBCUDA` says that the loader found it.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> nvmlReturn_t {
    let has_cuda = || {
        std::env::var_os("DIVVY_MOCK_LIBCUDA").is_some()
            || bridge::mapped_file(|line| line.contains("/libcuda.so")).is_some()
    };
    let ask = || {
        if has_cuda() {
            cuda_version()
        } else {
            Err(GpuErrorCode::LIBRARY_NOT_FOUND)
        }
    };
    // SAFETY: see `abi`.
    unsafe { put(version, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put_count(count, || {
            let gpus = bridge::engine_for(GpuOp::List)?.gpus().len();
            gpus.try_into().map_err(|_| GpuErrorCode::UNKNOWN)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(
    index: c_uint,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    let find = || {
        bridge::handle_of(|at, _| at == index as usize, GpuErrorCode::INVALID_ARGUMENT)
            .map(to_handle)
    };
    // SAFETY: see `abi`.
    unsafe { put(device, find) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByUUID(
    uuid: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    let find = || {
        // SAFETY: see `abi`.
        let uuid = unsafe { text(uuid) }?;
        if uuid.starts_with("MIG-") {
            return super::mig_devices::by_uuid(uuid).map(to_handle);
        }
        bridge::handle_of(
            |_, g| g.facts.uuid.as_str() == uuid,
            GpuErrorCode::NOT_FOUND,
        )
        .map(to_handle)
    };
    // SAFETY: see `abi`.
    unsafe { put(device, find) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetHandleByPciBusId_v2(
    bus_id: *const c_char,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    let find = || {
        // SAFETY: see `abi`.
        let address: PciAddress = unsafe { text(bus_id) }?
            .parse()
            .map_err(|_| GpuErrorCode::INVALID_ARGUMENT)?;
        bridge::handle_of(
            |_, g| g.facts.pci_address == address,
            GpuErrorCode::NOT_FOUND,
        )
        .map(to_handle)
    };
    // SAFETY: see `abi`.
    unsafe { put(device, find) }
}
