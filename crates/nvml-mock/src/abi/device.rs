//! Facts of one GPU. SAFETY: see the parent.

use std::ffi::{c_char, c_int, c_uint};

use divvy_gpu_sim::{Engine, SimGpu};
use divvy_model::{ComputeMode, GpuErrorCode, GpuOp, MigMode};
use nvml_wrapper_sys::bindings::{
    nvmlC2cModeInfo_v1_t, nvmlDevice_t, nvmlDeviceAddressingMode_t, nvmlFieldValue_t,
    nvmlPciInfo_t, nvmlReturn_t, nvmlValue_t,
};

use super::{
    bad_argument, code, code_of_mode, gpu, pci_info, put, put_count, put_text, struct_version,
    version_of,
};
use crate::bridge::{self, Thing};

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetIndex(device: nvmlDevice_t, index: *mut c_uint) -> nvmlReturn_t {
    let ask = || {
        bridge::gpu(device.addr(), |engine, gpu| {
            let at = engine
                .gpus()
                .iter()
                .position(|g| g.facts.uuid == gpu.facts.uuid);
            at.and_then(|i| i.try_into().ok())
                .ok_or(GpuErrorCode::UNKNOWN)
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(index, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUUID(
    device: nvmlDevice_t,
    uuid: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    let ask = || match bridge::thing(device.addr())? {
        Thing::MigDevice(..) => Ok(bridge::mig_device(device.addr())?.1.uuid.to_string()),
        _ => gpu(device, |g| Ok(g.facts.uuid.to_string())),
    };
    // SAFETY: see `abi`.
    unsafe { put_text(uuid, length, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetName(
    device: nvmlDevice_t,
    name: *mut c_char,
    length: c_uint,
) -> nvmlReturn_t {
    let ask = || {
        bridge::gpu_for(GpuOp::Facts, device.addr(), |_, g| {
            Ok(g.facts.product_name.clone())
        })
    };
    // SAFETY: see `abi`.
    unsafe { put_text(name, length, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetBrand(device: nvmlDevice_t, brand: *mut c_uint) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe { put(brand, || gpu(device, |g| Ok(g.facts.brand.0))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeMode(
    device: nvmlDevice_t,
    mode: *mut c_uint,
) -> nvmlReturn_t {
    let mode_of = |g: &SimGpu| g.facts.compute_mode.ok_or(GpuErrorCode::NOT_SUPPORTED);
    // SAFETY: see `abi`.
    unsafe { put(mode, || gpu(device, |g| Ok(mode_of(g)?.to_nvml()))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPersistenceMode(
    device: nvmlDevice_t,
    mode: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(mode, || {
            bridge::gpu_for(GpuOp::PersistenceMode, device.addr(), |_, g| {
                let mode = g.facts.persistence.ok_or(GpuErrorCode::NOT_SUPPORTED);
                mode.map(c_uint::from)
            })
        })
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceSetComputeMode(device: nvmlDevice_t, mode: c_uint) -> nvmlReturn_t {
    let set = || {
        let to = ComputeMode::from_nvml(mode).ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
        let gpu = bridge::uuid_of(device.addr())?;
        bridge::change(GpuOp::SetComputeMode, &gpu, |e| {
            e.set_compute_mode(&gpu, to)
        })
    };
    code(set())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMinorNumber(
    device: nvmlDevice_t,
    minor: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(minor, || {
            gpu(device, |g| g.facts.minor.ok_or(GpuErrorCode::NOT_SUPPORTED))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPciInfo_v3(
    device: nvmlDevice_t,
    pci: *mut nvmlPciInfo_t,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(pci, || {
            gpu(device, |g| {
                Ok(pci_info(g.facts.pci_address, g.facts.pci_device_id))
            })
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetArchitecture(
    device: nvmlDevice_t,
    arch: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe { put(arch, || gpu(device, |g| Ok(g.facts.architecture.to_nvml()))) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: nvmlDevice_t,
    major: *mut c_int,
    minor: *mut c_int,
) -> nvmlReturn_t {
    let number = |n: u32| n.try_into().map_err(|_| GpuErrorCode::UNKNOWN);
    // SAFETY: see `abi`.
    let first = unsafe {
        put(major, || {
            gpu(device, |g| number(g.facts.compute_capability.major))
        })
    };
    if first != 0 {
        return first;
    }
    // SAFETY: see `abi`.
    unsafe {
        put(minor, || {
            gpu(device, |g| number(g.facts.compute_capability.minor))
        })
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNumGpuCores(
    device: nvmlDevice_t,
    cores: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put_count(cores, || {
            gpu(device, |g| match g.cores() {
                _ if g.facts.mig_mode.is_on() => Err(GpuErrorCode::NOT_SUPPORTED),
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
        bridge::gpu_for(GpuOp::MigMode, device.addr(), |_, g| {
            match g.facts.mig_mode {
                MigMode::Unsupported => Err(GpuErrorCode::NOT_SUPPORTED),
                MigMode::Supported { current, pending } => {
                    Ok((u32::from(current), u32::from(pending)))
                }
            }
        })
    };
    if current.is_null() || pending.is_null() {
        return bad_argument().0;
    }
    code_of_mode(ask().map(|(now, later)| {
        // SAFETY: see `abi`.
        unsafe {
            current.write(now);
            pending.write(later);
        }
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetModuleId(
    device: nvmlDevice_t,
    module: *mut c_uint,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(module, || {
            gpu(device, |g| {
                g.facts.module_id.ok_or(GpuErrorCode::NOT_SUPPORTED)
            })
        })
    }
}

/// Without a version, despite its name.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetC2cModeInfoV(
    device: nvmlDevice_t,
    info: *mut nvmlC2cModeInfo_v1_t,
) -> nvmlReturn_t {
    let ask = || {
        let on = gpu(device, |g| g.facts.c2c.ok_or(GpuErrorCode::NOT_SUPPORTED))?;
        Ok(nvmlC2cModeInfo_v1_t {
            isC2cEnabled: on.into(),
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(info, ask) }
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
    // SAFETY: see `abi`; a versioned struct has at least its version.
    unsafe {
        match version_of(mode.cast()) {
            Ok(asked) if asked == version => put(mode, ask),
            Ok(_) => GpuErrorCode::ARGUMENT_VERSION_MISMATCH.0,
            Err(code) => code.0,
        }
    }
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
    // The session first: without one, the count says nothing about the values.
    if let Err(code) = bridge::ready() {
        return code.0;
    }
    let (Ok(count), false) = (usize::try_from(count), values.is_null()) else {
        return bad_argument().0;
    };
    let asked = |field: u32| {
        // SAFETY: see `abi`; `values` is valid for `count` values.
        (0..count).any(|at| unsafe { (*values.add(at)).fieldId } == field)
    };
    let answer = |engine: &Engine, g: &SimGpu| {
        for at in 0..count {
            // SAFETY: as above.
            let value = unsafe { &mut *values.add(at) };
            let answer = match value.fieldId {
                MIG_QUERY_WITHOUT_MIG if engine.reports_profiles_without_mig() => {
                    Ok(u32::from(g.facts.mig_mode != MigMode::Unsupported))
                }
                RECOVERY_ACTION if bridge::generation(engine).reports_recovery() => g
                    .vitals
                    .recovery
                    .map(super::health::raw_action)
                    .ok_or(GpuErrorCode::NOT_SUPPORTED),
                _ => Err(GpuErrorCode::NOT_SUPPORTED),
            };
            value.nvmlReturn = code(answer.map(|number| {
                value.valueType = UNSIGNED_INT;
                value.value = nvmlValue_t { uiVal: number };
            }));
        }
        Ok(())
    };
    code(if asked(MIG_QUERY_WITHOUT_MIG) {
        bridge::gpu_for(GpuOp::MigCapabilities, device.addr(), answer)
    } else if asked(RECOVERY_ACTION) {
        bridge::gpu_for(GpuOp::Vitals, device.addr(), answer)
    } else {
        bridge::gpu(device.addr(), answer)
    })
}
