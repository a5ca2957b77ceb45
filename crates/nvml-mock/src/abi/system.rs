//! Sessions, versions, and how a GPU's handle is had. SAFETY: see the parent.

use std::ffi::{CStr, c_char, c_int, c_uint};
use std::ptr;

use divvy_model::{GpuErrorCode, GpuOp, PciAddress};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use super::{Answer, code, put, put_count, put_text};
use crate::bridge;

/// # Safety
/// `text` is null or a text with a NUL.
unsafe fn text<'a>(text: *const c_char) -> Answer<&'a str> {
    if text.is_null() {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
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
        19 => c"In use by another client",
        23 => c"Insufficient Resources",
        15 => c"GPU is lost",
        18 => c"Driver/library version mismatch",
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
    // SAFETY: see `abi`.
    unsafe {
        put_text(version, length, || {
            bridge::engine()?
                .system
                .nvml_version
                .clone()
                .ok_or(GpuErrorCode::NOT_SUPPORTED)
        })
    }
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
