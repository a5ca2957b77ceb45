//! Limits of memory by control group. SAFETY: see the parent.

use std::ffi::{CStr, OsStr, c_char, c_ulonglong};
use std::os::unix::ffi::OsStrExt;

use divvy_gpu_sim::SimGroup;
use divvy_model::{GpuErrorCode, GpuOp};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use super::{Answer, code};
use crate::bridge::{self, uuid_of};

/// `nvmlSetMemoryLimits_v1_t` of nvml.h of CUDA 13.4.
#[repr(C)]
struct SetLimits {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
struct GetLimits {
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

/// `NVML_DEVICE_MEMORY_LIMIT_MAX`.
const NO_LIMIT: c_ulonglong = c_ulonglong::MAX;

/// Reads the groups from the one whose folder is named up to the root.
///
/// # Safety
/// `path` is null or a text.
unsafe fn groups(path: *const c_char) -> Answer<Vec<SimGroup>> {
    if path.is_null() {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
    }
    // SAFETY: by this function's contract.
    let path = unsafe { CStr::from_ptr(path) };
    let path = std::path::Path::new(OsStr::from_bytes(path.to_bytes()));
    SimGroup::chain(path).map_err(|_| GpuErrorCode::OPERATING_SYSTEM)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceSetMemoryLimits_v1(
    device: nvmlDevice_t,
    limits: *mut SetLimits,
) -> nvmlReturn_t {
    let change = || {
        bridge::ready()?;
        if limits.is_null() {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        // SAFETY: not null; see `abi`.
        let limits = unsafe { limits.read() };
        let gpu = uuid_of(device.addr()).map_err(|_| GpuErrorCode::NOT_SUPPORTED)?;
        // A guarantee changes the groups above: divvy sets none.
        if limits.soft != 0 {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        // SAFETY: the caller's text; see `abi`.
        let groups = unsafe { groups(limits.name_space) }?;
        let hard = (limits.hard != NO_LIMIT).then_some(limits.hard);
        bridge::change(GpuOp::SetMemoryLimit, &gpu, |engine| {
            engine.set_memory_limit(&gpu, &groups, hard)
        })
    };
    code(change())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryLimits_v1(
    device: nvmlDevice_t,
    limits: *mut GetLimits,
) -> nvmlReturn_t {
    let ask = || {
        bridge::ready()?;
        if limits.is_null() {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        // SAFETY: not null; see `abi`.
        let asked = unsafe { limits.read() };
        let gpu = uuid_of(device.addr()).map_err(|_| GpuErrorCode::NOT_SUPPORTED)?;
        // SAFETY: the caller's text; see `abi`.
        let groups = unsafe { groups(asked.name_space) }?;
        let found = bridge::ask(Some(GpuOp::MemoryLimit), &gpu, |engine| {
            engine.memory_limit(&gpu, &groups)
        })?;
        let answer = GetLimits {
            soft: 0,
            hard: found.hard.unwrap_or(NO_LIMIT),
            used: found.used,
            ..asked
        };
        // SAFETY: not null; see `abi`.
        unsafe { limits.write(answer) };
        Ok(())
    };
    code(ask())
}
