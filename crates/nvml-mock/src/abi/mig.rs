//! MIG: mode, profiles and GPU instances. SAFETY: see the parent.

use std::ffi::c_uint;
use std::panic::Location;
use std::ptr;

use divvy_model::mig::{GpuInstanceId, GpuInstanceProfile, GpuInstanceProfileId, Placement};
use divvy_model::{GpuErrorCode, GpuOp, GpuUuid, MigActivation};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
    nvmlReturn_t,
};

use super::{Answer, bad_argument, chars, code, plain, put, struct_version, version_of};
use crate::bridge::{self, Thing, handle_to, uuid_of};
use crate::trial::{self, Odd};

/// `NVML_GPU_INSTANCE_PROFILE_CAPS_GFX`.
const CAPS_GFX: c_uint = 2;

/// A thing's handle as the pointer that NVML calls it; never followed.
pub(super) fn to_pointer<T>(thing: Thing) -> *mut T {
    ptr::without_provenance_mut(handle_to(thing))
}

/// The GPU instance behind its handle.
pub(super) fn gpu_instance(handle: nvmlGpuInstance_t) -> Answer<(GpuUuid, GpuInstanceId)> {
    match bridge::thing(handle.addr())? {
        Thing::GpuInstance(gpu, id) => Ok((gpu, id)),
        _ => Err(GpuErrorCode::INVALID_ARGUMENT),
    }
}

/// A handle that stood for something that lived.
pub(super) fn stale(code: GpuErrorCode) -> GpuErrorCode {
    if code == GpuErrorCode::NOT_FOUND {
        GpuErrorCode::INVALID_ARGUMENT
    } else {
        code
    }
}

/// Writes a list of all that lives, and how long it is; only the length where the caller gives no
/// room.
///
/// # Safety
/// `count` is null or valid; `list` is null or has room for as many as NVML says there can be.
#[track_caller]
pub(super) unsafe fn put_list<T>(
    list: *mut T,
    count: *mut c_uint,
    answer: Answer<Vec<T>>,
) -> nvmlReturn_t {
    // Nothing that lives is left out: a list that is too short cannot be distinguished from the
    // right one.
    let odd = trial::odd(Location::caller(), true)
        .filter(|odd| !matches!(odd, Odd::WritesNothing | Odd::LeavesOut));
    // SAFETY: by this function's contract.
    unsafe { put_all(list, count, answer, odd) }
}

/// # Safety
/// See [`put_list`].
unsafe fn put_all<T>(
    list: *mut T,
    count: *mut c_uint,
    answer: Answer<Vec<T>>,
    odd: Option<Odd>,
) -> nvmlReturn_t {
    if count.is_null() {
        return bad_argument().0;
    }
    if let Some(Odd::Fails(code) | Odd::FailsAfter(code)) = odd {
        return code;
    }
    plain(answer.and_then(|mut values| {
        match odd {
            Some(Odd::WritesNothing) => return Ok(()),
            Some(Odd::LeavesOut) => drop(values.pop()),
            _ => {}
        }
        let length = c_uint::try_from(values.len()).map_err(|_| GpuErrorCode::UNKNOWN)?;
        let noted = if odd == Some(Odd::WritesOnes) {
            c_uint::MAX
        } else {
            length
        };
        // SAFETY: not null, and valid by this function's contract.
        unsafe { count.write(noted) };
        if !list.is_null() {
            for (at, value) in values.into_iter().enumerate() {
                // SAFETY: not null, and with room by this function's contract.
                unsafe { list.add(at).write(value) };
            }
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceSetMigMode(
    device: nvmlDevice_t,
    mode: c_uint,
    activation: *mut nvmlReturn_t,
) -> nvmlReturn_t {
    let set = || {
        if mode > 1 {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        let gpu = uuid_of(device.addr())?;
        Ok(
            match bridge::change(GpuOp::SetMigMode, &gpu, |e| e.set_mig_mode(&gpu, mode == 1))? {
                MigActivation::Active => 0,
                MigActivation::Pending(code) => code.0,
            },
        )
    };
    // SAFETY: see `abi`.
    unsafe { put(activation, set) }
}

/// The profile with an index: `INVALID_ARGUMENT` for an index that no board has, `NOT_SUPPORTED`
/// for one that this board has not.
fn profile(device: nvmlDevice_t, index: c_uint) -> Answer<GpuInstanceProfile> {
    let gpu = uuid_of(device.addr())?;
    if index >= bridge::generation(&*bridge::engine()?).gpu_instance_profiles() {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
    }
    let all = bridge::ask(None, &gpu, |e| e.mig_capabilities(&gpu))?;
    let found = all.profiles().iter().find(|p| p.index.0 == index);
    found.cloned().ok_or(GpuErrorCode::NOT_SUPPORTED)
}

/// Fills the fields that all versions of the struct have in common, and those of this one.
macro_rules! profile_info {
    ($of:ident, $kind:ident { $($field:ident: $value:expr),* $(,)? }) => {
        $kind {
            id: $of.id.0,
            sliceCount: $of.slices,
            instanceCount: $of.max_instances,
            multiprocessorCount: $of.multiprocessors,
            copyEngineCount: $of.engines.copy,
            decoderCount: $of.engines.decoders,
            encoderCount: $of.engines.encoders,
            jpegCount: $of.engines.jpeg,
            ofaCount: $of.engines.ofa,
            memorySizeMB: $of.memory_mib,
            $($field: $value),*
        }
    };
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfo(
    device: nvmlDevice_t,
    index: c_uint,
    info: *mut nvmlGpuInstanceProfileInfo_t,
) -> nvmlReturn_t {
    let ask = || {
        profile(device, index)
            .map(|p| profile_info!(p, nvmlGpuInstanceProfileInfo_t { isP2pSupported: 0 }))
    };
    // SAFETY: see `abi`.
    unsafe { put(info, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfoV(
    device: nvmlDevice_t,
    index: c_uint,
    info: *mut nvmlGpuInstanceProfileInfo_v2_t,
) -> nvmlReturn_t {
    let v2 = struct_version::<nvmlGpuInstanceProfileInfo_v2_t>(2);
    let v3 = struct_version::<nvmlGpuInstanceProfileInfo_v3_t>(3);
    let knows_v3 =
        bridge::engine().is_ok_and(|engine| bridge::generation(&engine).has_profile_v3());
    let ask_v2 = || {
        profile(device, index).map(|p| {
            profile_info!(
                p,
                nvmlGpuInstanceProfileInfo_v2_t {
                    isP2pSupported: 0,
                    version: v2,
                    name: chars(p.driver_name.as_deref().unwrap_or_default()),
                }
            )
        })
    };
    let ask_v3 = || {
        profile(device, index).map(|p| {
            profile_info!(
                p,
                nvmlGpuInstanceProfileInfo_v3_t {
                    version: v3,
                    name: chars(p.driver_name.as_deref().unwrap_or_default()),
                    capabilities: if p.variant() == divvy_model::mig::ProfileVariant::Graphics {
                        CAPS_GFX
                    } else {
                        0
                    },
                }
            )
        })
    };
    // SAFETY: see `abi`; a versioned struct has at least its version, and is as large as that says.
    unsafe {
        match version_of(info.cast()) {
            Ok(asked) if asked == v2 => put(info, ask_v2),
            Ok(asked) if asked == v3 && knows_v3 => {
                put(info.cast::<nvmlGpuInstanceProfileInfo_v3_t>(), ask_v3)
            }
            Ok(_) => GpuErrorCode::ARGUMENT_VERSION_MISMATCH.0,
            Err(code) => code.0,
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstancePossiblePlacements_v2(
    device: nvmlDevice_t,
    profile: c_uint,
    placements: *mut nvmlGpuInstancePlacement_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    let ask = || {
        let gpu = uuid_of(device.addr())?;
        let all = bridge::ask(None, &gpu, |e| e.mig_capabilities(&gpu))?;
        if placements.is_null()
            && all
                .profiles()
                .first()
                .is_some_and(|first| first.id.0 == profile)
        {
            bridge::ask(Some(GpuOp::MigCapabilities), &gpu, |_| Ok(()))?;
        }
        let found = all
            .profile(GpuInstanceProfileId(profile))
            .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
        let places = found.placements.iter();
        Ok(places
            .map(|at| nvmlGpuInstancePlacement_t {
                start: at.start,
                size: at.size,
            })
            .collect())
    };
    let odd = trial::odd(Location::caller(), true);
    // SAFETY: see `abi`.
    unsafe { put_all(placements, count, ask(), odd) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstanceRemainingCapacity(
    device: nvmlDevice_t,
    profile: c_uint,
    count: *mut c_uint,
) -> nvmlReturn_t {
    let ask = || {
        let gpu = uuid_of(device.addr())?;
        let profile = GpuInstanceProfileId(profile);
        bridge::ask(None, &gpu, |e| e.gpu_instances(&gpu))?;
        let all = bridge::ask(None, &gpu, |e| e.mig_capabilities(&gpu))?;
        let found = all.profile(profile).ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
        // The number that a copy of the GPU takes.
        let mut copy = divvy_gpu_sim::Engine::clone(&*bridge::engine()?);
        let fit = found
            .placements
            .iter()
            .filter(|at| copy.create_gpu_instance(&gpu, profile, **at).is_ok());
        c_uint::try_from(fit.count()).map_err(|_| GpuErrorCode::UNKNOWN)
    };
    // SAFETY: see `abi`.
    unsafe { put(count, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceCreateGpuInstanceWithPlacement(
    device: nvmlDevice_t,
    profile: c_uint,
    placement: *const nvmlGpuInstancePlacement_t,
    instance: *mut nvmlGpuInstance_t,
) -> nvmlReturn_t {
    let create = || {
        if placement.is_null() {
            return Err(bad_argument());
        }
        // SAFETY: see `abi`.
        let at = unsafe { placement.read() };
        let at = Placement {
            start: at.start,
            size: at.size,
        };
        let gpu = uuid_of(device.addr())?;
        let profile = GpuInstanceProfileId(profile);
        let made = bridge::change(GpuOp::CreateGpuInstance, &gpu, |e| {
            e.create_gpu_instance(&gpu, profile, at)
        })?;
        Ok(to_pointer(Thing::GpuInstance(gpu, made.id)))
    };
    // SAFETY: see `abi`.
    unsafe { put(instance, create) }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpuInstanceDestroy(instance: nvmlGpuInstance_t) -> nvmlReturn_t {
    let destroy = || {
        let (gpu, id) = gpu_instance(instance)?;
        bridge::change(GpuOp::DestroyGpuInstance, &gpu, |e| {
            e.destroy_gpu_instance(&gpu, id)
        })
        .map_err(stale)
    };
    code(destroy())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstances(
    device: nvmlDevice_t,
    profile: c_uint,
    instances: *mut nvmlGpuInstance_t,
    count: *mut c_uint,
) -> nvmlReturn_t {
    let ask = || {
        let gpu = uuid_of(device.addr())?;
        let all = bridge::ask(None, &gpu, |e| e.mig_capabilities(&gpu))?;
        let profile = GpuInstanceProfileId(profile);
        all.profile(profile).ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
        let is_first = all.profiles().iter().all(|p| p.id >= profile);
        let living = bridge::ask(is_first.then_some(GpuOp::GpuInstances), &gpu, |e| {
            e.gpu_instances(&gpu)
        })?;
        let of_profile = living.into_iter().filter(|i| i.profile == profile);
        Ok(of_profile
            .map(|i| to_pointer(Thing::GpuInstance(gpu.clone(), i.id)))
            .collect())
    };
    // SAFETY: see `abi`.
    unsafe { put_list(instances, count, ask()) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstanceById(
    device: nvmlDevice_t,
    id: c_uint,
    instance: *mut nvmlGpuInstance_t,
) -> nvmlReturn_t {
    let ask = || {
        let gpu = uuid_of(device.addr())?;
        let living = bridge::ask(None, &gpu, |e| e.gpu_instances(&gpu))?;
        let found = living
            .into_iter()
            .find(|i| i.id.0 == id)
            .ok_or(GpuErrorCode::NOT_FOUND)?;
        Ok(to_pointer(Thing::GpuInstance(gpu, found.id)))
    };
    // SAFETY: see `abi`.
    unsafe { put(instance, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceGetInfo(
    instance: nvmlGpuInstance_t,
    info: *mut nvmlGpuInstanceInfo_t,
) -> nvmlReturn_t {
    let ask = || {
        let (gpu, id) = gpu_instance(instance)?;
        let living = bridge::ask(None, &gpu, |e| e.gpu_instances(&gpu))?;
        let found = living
            .into_iter()
            .find(|i| i.id == id)
            .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
        Ok(nvmlGpuInstanceInfo_t {
            device: to_pointer(Thing::Gpu(gpu)),
            id: found.id.0,
            profileId: found.profile.0,
            placement: nvmlGpuInstancePlacement_t {
                start: found.placement.start,
                size: found.placement.size,
            },
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(info, ask) }
}
