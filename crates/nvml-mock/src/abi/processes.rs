//! Processes on a GPU. SAFETY: see the parent.

use std::ffi::c_uint;
use std::mem::size_of;

use divvy_model::{GpuErrorCode, GpuOp, GpuProcess};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlProcessInfo_t, nvmlProcessInfo_v2_t, nvmlReturn_t,
};

use super::{Answer, bad_argument, code};
use crate::bridge;

type Processes = Vec<GpuProcess>;

fn of_compute(device: nvmlDevice_t) -> Answer<Processes> {
    bridge::gpu_for(GpuOp::Processes, device.addr(), |_, g| {
        Ok(g.processes.iter().cloned().collect())
    })
}

fn of_mps(device: nvmlDevice_t) -> Answer<Processes> {
    bridge::gpu(device.addr(), |_, _| Ok(Vec::new()))
}

/// Bytes from one entry to the next in lists of version 3.
fn size_v3() -> usize {
    const CONFIDENTIAL_MEMORY: usize = size_of::<u64>();
    let long =
        bridge::engine().is_ok_and(|engine| bridge::generation(&engine).has_long_processes());
    size_of::<nvmlProcessInfo_t>() + if long { CONFIDENTIAL_MEMORY } else { 0 }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe { put_processes(count, infos, size_v3(), of_compute(device)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe { put_processes(count, infos, size_v3(), of_mps(device)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_v2_t,
) -> nvmlReturn_t {
    // SAFETY: see `abi`; the structs are the same.
    unsafe {
        put_processes(
            count,
            infos.cast(),
            size_of::<nvmlProcessInfo_v2_t>(),
            of_compute(device),
        )
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
    device: nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_v2_t,
) -> nvmlReturn_t {
    // SAFETY: see `abi`; the structs are the same.
    unsafe {
        put_processes(
            count,
            infos.cast(),
            size_of::<nvmlProcessInfo_v2_t>(),
            of_mps(device),
        )
    }
}

/// # Safety
/// `count` is null or valid; `infos` is null or valid for `*count` entries of `size` bytes.
unsafe fn put_processes(
    count: *mut c_uint,
    infos: *mut nvmlProcessInfo_t,
    size: usize,
    answer: Answer<Processes>,
) -> nvmlReturn_t {
    const NOT_AVAILABLE: u64 = u64::MAX;
    if count.is_null() {
        return bad_argument().0;
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
        for (at, process) in processes.into_iter().enumerate() {
            let info = nvmlProcessInfo_t {
                pid: process.pid,
                usedGpuMemory: process.memory_bytes.unwrap_or(NOT_AVAILABLE),
                gpuInstanceId: process.gpu_instance.unwrap_or(u32::MAX),
                computeInstanceId: process.compute_instance.unwrap_or(u32::MAX),
            };
            // SAFETY: `at` is below `room`, for which `infos` is valid by this function's contract;
            // each size is a multiple of the struct's alignment.
            unsafe {
                let entry = infos.byte_add(at * size);
                entry.write(info);
                entry
                    .add(1)
                    .cast::<u8>()
                    .write_bytes(0, size - size_of::<nvmlProcessInfo_t>());
            }
        }
        Ok(())
    }))
}
