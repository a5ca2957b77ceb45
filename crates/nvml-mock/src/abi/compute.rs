//! MIG: compute instances. SAFETY: see the parent.

use std::ffi::c_uint;

use divvy_model::mig::{ComputeInstanceId, ComputeInstanceProfileId, GpuInstanceId};
use divvy_model::{GpuErrorCode, GpuOp, GpuUuid};
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstancePlacement_t,
    nvmlComputeInstanceProfileInfo_t, nvmlGpuInstance_t, nvmlReturn_t,
};

use super::mig::{gpu_instance, put_list, stale, to_pointer};
use super::{Answer, code, put};
use crate::bridge::{self, Thing};

/// Number after the highest profile number that the library of the simulated driver knows.
const COMPUTE_INSTANCE_PROFILES: c_uint = 9;

fn compute_instance(
    handle: nvmlComputeInstance_t,
) -> Answer<(GpuUuid, GpuInstanceId, ComputeInstanceId)> {
    match bridge::thing(handle.addr())? {
        Thing::ComputeInstance(gpu, inside, id) => Ok((gpu, inside, id)),
        _ => Err(GpuErrorCode::INVALID_ARGUMENT),
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
    instance: nvmlGpuInstance_t,
    index: c_uint,
    engines: c_uint,
    info: *mut nvmlComputeInstanceProfileInfo_t,
) -> nvmlReturn_t {
    let ask = || {
        if index >= COMPUTE_INSTANCE_PROFILES || engines != 0 {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        let (gpu, id) = gpu_instance(instance)?;
        let op = (index == 0).then_some(GpuOp::ComputeProfiles);
        let offered = bridge::ask(op, &gpu, |e| e.compute_profiles(&gpu, id)).map_err(stale)?;
        let p = offered
            .into_iter()
            .find(|p| p.index.0 == index)
            .ok_or(GpuErrorCode::NOT_SUPPORTED)?;
        Ok(nvmlComputeInstanceProfileInfo_t {
            id: p.id.0,
            sliceCount: p.slices,
            instanceCount: p.max_instances,
            multiprocessorCount: p.multiprocessors,
            sharedCopyEngineCount: p.shared.copy,
            sharedDecoderCount: p.shared.decoders,
            sharedEncoderCount: p.shared.encoders,
            sharedJpegCount: p.shared.jpeg,
            sharedOfaCount: p.shared.ofa,
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(info, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceCreateComputeInstance(
    instance: nvmlGpuInstance_t,
    profile: c_uint,
    compute: *mut nvmlComputeInstance_t,
) -> nvmlReturn_t {
    let create = || {
        let (gpu, inside) = gpu_instance(instance)?;
        let profile = ComputeInstanceProfileId(profile);
        let made = bridge::change(GpuOp::CreateComputeInstance, &gpu, |e| {
            e.create_compute_instance(&gpu, inside, profile)
        });
        Ok(to_pointer(Thing::ComputeInstance(
            gpu,
            inside,
            made.map_err(stale)?.id,
        )))
    };
    // SAFETY: see `abi`.
    unsafe { put(compute, create) }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlComputeInstanceDestroy(compute: nvmlComputeInstance_t) -> nvmlReturn_t {
    let destroy = || {
        let (gpu, inside, id) = compute_instance(compute)?;
        bridge::change(GpuOp::DestroyComputeInstance, &gpu, |e| {
            e.destroy_compute_instance(&gpu, inside, id)
        })
        .map_err(stale)
    };
    code(destroy())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceGetComputeInstances(
    instance: nvmlGpuInstance_t,
    profile: c_uint,
    computes: *mut nvmlComputeInstance_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    let ask = || {
        let (gpu, inside) = gpu_instance(instance)?;
        let profile = ComputeInstanceProfileId(profile);
        let offered =
            bridge::ask(None, &gpu, |e| e.compute_profiles(&gpu, inside)).map_err(stale)?;
        if offered.iter().all(|p| p.id != profile) {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        let op = offered
            .iter()
            .all(|p| p.id >= profile)
            .then_some(GpuOp::ComputeInstances);
        let living = bridge::ask(op, &gpu, |e| e.compute_instances(&gpu, inside)).map_err(stale)?;
        let of_profile = living.into_iter().filter(|c| c.profile == profile);
        Ok(of_profile
            .map(|c| to_pointer(Thing::ComputeInstance(gpu.clone(), inside, c.id)))
            .collect())
    };
    // SAFETY: see `abi`.
    unsafe { put_list(computes, count, ask()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceById(
    instance: nvmlGpuInstance_t,
    id: c_uint,
    compute: *mut nvmlComputeInstance_t,
) -> nvmlReturn_t {
    let ask = || {
        let (gpu, inside) = gpu_instance(instance)?;
        let living =
            bridge::ask(None, &gpu, |e| e.compute_instances(&gpu, inside)).map_err(stale)?;
        let found = living
            .into_iter()
            .find(|c| c.id.0 == id)
            .ok_or(GpuErrorCode::NOT_FOUND)?;
        Ok(to_pointer(Thing::ComputeInstance(gpu, inside, found.id)))
    };
    // SAFETY: see `abi`.
    unsafe { put(compute, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlComputeInstanceGetInfo_v2(
    compute: nvmlComputeInstance_t,
    info: *mut nvmlComputeInstanceInfo_t,
) -> nvmlReturn_t {
    let ask = || {
        let (gpu, inside, id) = compute_instance(compute)?;
        let living =
            bridge::ask(None, &gpu, |e| e.compute_instances(&gpu, inside)).map_err(stale)?;
        let found = living
            .into_iter()
            .find(|c| c.id == id)
            .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
        let offered =
            bridge::ask(None, &gpu, |e| e.compute_profiles(&gpu, inside)).map_err(stale)?;
        let size = offered
            .iter()
            .find(|p| p.id == found.profile)
            .map_or(0, |p| p.slices);
        Ok(nvmlComputeInstanceInfo_t {
            device: to_pointer(Thing::MigDevice(gpu.clone(), found.uuid)),
            gpuInstance: to_pointer(Thing::GpuInstance(gpu, inside)),
            id: found.id.0,
            profileId: found.profile.0,
            placement: nvmlComputeInstancePlacement_t {
                start: found.id.0,
                size,
            },
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(info, ask) }
}
