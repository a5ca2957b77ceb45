//! MIG devices: the compute instances as devices, for other users of NVML. SAFETY: see the parent.

use std::ffi::c_uint;

use divvy_model::GpuErrorCode;
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use super::mig::to_pointer;
use super::{Answer, put};
use crate::bridge::{self, Thing, uuid_of};

/// Most MIG devices any GPU has.
const MOST: c_uint = 8;

/// The handle of the MIG device with a UUID.
pub(super) fn by_uuid(uuid: &str) -> Answer<usize> {
    for gpu in bridge::engine()?.gpus() {
        let gpu = &gpu.facts.uuid;
        if let Some(found) = bridge::mig_devices(gpu)?
            .into_iter()
            .find(|c| c.uuid.as_str() == uuid)
        {
            return Ok(bridge::handle_to(Thing::MigDevice(gpu.clone(), found.uuid)));
        }
    }
    Err(GpuErrorCode::NOT_FOUND)
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceIsMigDeviceHandle(
    device: nvmlDevice_t,
    is: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(is, || {
            Ok(u32::from(matches!(
                bridge::thing(device.addr())?,
                Thing::MigDevice(..)
            )))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstanceId(
    device: nvmlDevice_t,
    id: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(id, || {
            Ok(bridge::mig_device(device.addr())?.1.gpu_instance.0)
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeInstanceId(
    device: nvmlDevice_t,
    id: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe { put(id, || Ok(bridge::mig_device(device.addr())?.1.id.0)) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(
    device: nvmlDevice_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    let ask = || {
        bridge::gpu(device.addr(), |_, g| {
            Ok(if g.facts.mig_mode.is_on() { MOST } else { 0 })
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(count, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: nvmlDevice_t,
    index: c_uint,
    mig_device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    let ask = || {
        let gpu = uuid_of(device.addr())?;
        bridge::ask(None, &gpu, |e| e.gpu_instances(&gpu))?;
        if index >= MOST {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        let found = bridge::mig_devices(&gpu)?.into_iter().nth(index as usize);
        Ok(to_pointer(Thing::MigDevice(
            gpu,
            found.ok_or(GpuErrorCode::NOT_FOUND)?.uuid,
        )))
    };
    // SAFETY: see `abi`.
    unsafe { put(mig_device, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    mig_device: nvmlDevice_t,
    device: *mut nvmlDevice_t,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(device, || {
            Ok(to_pointer(Thing::Gpu(
                bridge::mig_device(mig_device.addr())?.0,
            )))
        })
    }
}
