//! The calls about MIG. Handles of instances are used for one call and then looked up again by id:
//! what they point to ends with the instance.

use std::mem::{MaybeUninit, size_of};

use divvy_model::GpuErrorCode;
use divvy_model::mig::{
    ComputeInstanceId, ComputeInstanceProfile, ComputeInstanceProfileId,
    ComputeInstanceProfileIndex, Engines, GpuInstance, GpuInstanceId, GpuInstanceProfileId,
    Placement,
};
use nvml_wrapper_sys::bindings::{
    nvmlComputeInstance_t, nvmlComputeInstanceInfo_t, nvmlComputeInstanceProfileInfo_t,
    nvmlFieldValue_t, nvmlGpuInstance_t, nvmlGpuInstanceInfo_t, nvmlGpuInstancePlacement_t,
    nvmlGpuInstanceProfileInfo_t, nvmlGpuInstanceProfileInfo_v2_t, nvmlGpuInstanceProfileInfo_v3_t,
    nvmlReturn_t,
};

use super::{Failure, Handle, Library, check, missing, nonsense, struct_version, text};

/// More than any GPU has of anything: NVML writes lists without knowing how much room there is.
const ROOM: usize = 128;

/// Far more slices than any GPU has.
const MOST_SLICES: u32 = 128;

/// A living GPU instance, for the calls that follow at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct GpuInstanceHandle(nvmlGpuInstance_t);

/// A living compute instance, for the calls that follow at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ComputeInstanceHandle(nvmlComputeInstance_t);

/// NVML's description of a GPU-instance profile, whichever version of the call answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProfileInfo {
    pub(crate) id: u32,
    pub(crate) slices: u32,
    pub(crate) instances: u32,
    pub(crate) multiprocessors: u32,
    pub(crate) engines: Engines,
    pub(crate) memory_mib: u64,
    pub(crate) name: Option<String>,
}

/// The fields that the structs of all versions have, under the same names.
macro_rules! profile_info {
    ($info:expr, $name:expr) => {
        ProfileInfo {
            id: $info.id,
            slices: $info.sliceCount,
            instances: $info.instanceCount,
            multiprocessors: $info.multiprocessorCount,
            engines: Engines {
                copy: $info.copyEngineCount,
                decoders: $info.decoderCount,
                encoders: $info.encoderCount,
                jpeg: $info.jpegCount,
                ofa: $info.ofaCount,
            },
            memory_mib: $info.memorySizeMB,
            name: $name,
        }
    };
}

/// C structs of numbers and pointers, for which all bits zero is a value.
pub(super) trait Plain: Sized {
    fn zeroed() -> Self {
        // SAFETY: implemented only below, in `health` and in `usage`, for structs of numbers,
        // characters, raw pointers and unions of integers.
        unsafe { MaybeUninit::zeroed().assume_init() }
    }
}
impl Plain for nvmlComputeInstanceInfo_t {}
impl Plain for nvmlComputeInstanceProfileInfo_t {}
impl Plain for nvmlFieldValue_t {}
impl Plain for nvmlGpuInstanceInfo_t {}
impl Plain for nvmlGpuInstanceProfileInfo_t {}
impl Plain for nvmlGpuInstanceProfileInfo_v2_t {}
impl Plain for nvmlGpuInstanceProfileInfo_v3_t {}

impl Library {
    /// Field 199: whether profiles and placements can be asked for with MIG mode off.
    pub(crate) fn reports_profiles_without_mig(&self, gpu: Handle) -> Result<bool, Failure> {
        const IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE: u32 = 199;
        let mut value = nvmlFieldValue_t {
            fieldId: IS_MIG_MODE_INDEPENDENT_MIG_QUERY_CAPABLE,
            ..Plain::zeroed()
        };
        call!(self.nvmlDeviceGetFieldValues(gpu.0, 1, &raw mut value))?;
        check(value.nvmlReturn)?;
        // SAFETY: each member of the union is a number, and all its bytes are set: from zero, or by
        // NVML.
        Ok(unsafe { value.value.uiVal } == 1)
    }

    /// Sets the mode; returns what became of it at once: 0, or why the mode is only pending.
    pub(crate) fn set_mig_mode(&self, gpu: Handle, on: bool) -> Result<nvmlReturn_t, Failure> {
        let mut activation = 0;
        call!(self.nvmlDeviceSetMigMode(gpu.0, u32::from(on), &raw mut activation))?;
        Ok(activation)
    }

    /// The newest version of the call that has an answer; what version 1 says where none has.
    pub(crate) fn gpu_instance_profile(
        &self,
        gpu: Handle,
        index: u32,
    ) -> Result<ProfileInfo, Failure> {
        let v3 = || self.gpu_instance_profile_v3(gpu, index);
        let v2 = || self.gpu_instance_profile_v2(gpu, index);
        // An error may be of the version of the struct alone, which the code does not show. Only a
        // final one is not asked again.
        let or_older = |failure: Failure, older: &dyn Fn() -> Result<ProfileInfo, Failure>| {
            if failure.is_final() {
                Err(failure)
            } else {
                older()
            }
        };
        v3().or_else(|f| or_older(f, &v2))
            .or_else(|f| or_older(f, &|| self.gpu_instance_profile_v1(gpu, index)))
    }

    fn gpu_instance_profile_v3(&self, gpu: Handle, index: u32) -> Result<ProfileInfo, Failure> {
        let version = struct_version::<nvmlGpuInstanceProfileInfo_v3_t>(3);
        let mut info = nvmlGpuInstanceProfileInfo_v3_t {
            version,
            ..Plain::zeroed()
        };
        // The same function serves both versions and takes a pointer to the older struct.
        let older = (&raw mut info).cast();
        call!(self.nvmlDeviceGetGpuInstanceProfileInfoV(gpu.0, index, older))?;
        possible_slices(info.sliceCount)?;
        Ok(profile_info!(info, Some(text(&info.name)?)))
    }

    fn gpu_instance_profile_v2(&self, gpu: Handle, index: u32) -> Result<ProfileInfo, Failure> {
        let version = struct_version::<nvmlGpuInstanceProfileInfo_v2_t>(2);
        let mut info = nvmlGpuInstanceProfileInfo_v2_t {
            version,
            ..Plain::zeroed()
        };
        call!(self.nvmlDeviceGetGpuInstanceProfileInfoV(gpu.0, index, &raw mut info))?;
        possible_slices(info.sliceCount)?;
        Ok(profile_info!(info, Some(text(&info.name)?)))
    }

    fn gpu_instance_profile_v1(&self, gpu: Handle, index: u32) -> Result<ProfileInfo, Failure> {
        let mut info = nvmlGpuInstanceProfileInfo_t::zeroed();
        call!(self.nvmlDeviceGetGpuInstanceProfileInfo(gpu.0, index, &raw mut info))?;
        possible_slices(info.sliceCount)?;
        Ok(profile_info!(info, None))
    }

    /// By the profile's id, not its index. Root only.
    pub(crate) fn placements(
        &self,
        gpu: Handle,
        profile: GpuInstanceProfileId,
    ) -> Result<Vec<Placement>, Failure> {
        let none = std::ptr::null_mut();
        let mut count = 0;
        call!(self.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
            gpu.0,
            profile.0,
            none,
            &raw mut count
        ))?;
        // At least what was announced. More costs nothing, and the call writes without a check.
        let mut list = vec![nvmlGpuInstancePlacement_t { start: 0, size: 0 }; listed(count)?];
        let out = list.as_mut_ptr();
        call!(self.nvmlDeviceGetGpuInstancePossiblePlacements_v2(
            gpu.0,
            profile.0,
            out,
            &raw mut count
        ))?;
        listed(count)?;
        list.truncate(count as usize);
        list.into_iter().map(place).collect()
    }

    /// Instances of one profile.
    pub(crate) fn gpu_instances(
        &self,
        gpu: Handle,
        profile: GpuInstanceProfileId,
    ) -> Result<Vec<GpuInstanceHandle>, Failure> {
        let mut list: Vec<nvmlGpuInstance_t> = vec![std::ptr::null_mut(); ROOM];
        let mut count = 0;
        call!(self.nvmlDeviceGetGpuInstances(gpu.0, profile.0, list.as_mut_ptr(), &raw mut count))?;
        listed(count)?;
        list.truncate(count as usize);
        Ok(list.into_iter().map(GpuInstanceHandle).collect())
    }

    pub(crate) fn gpu_instance_by_id(
        &self,
        gpu: Handle,
        id: GpuInstanceId,
    ) -> Result<GpuInstanceHandle, Failure> {
        let mut instance: nvmlGpuInstance_t = std::ptr::null_mut();
        call!(self.nvmlDeviceGetGpuInstanceById(gpu.0, id.0, &raw mut instance))?;
        Ok(GpuInstanceHandle(instance))
    }

    pub(crate) fn gpu_instance_info(
        &self,
        instance: GpuInstanceHandle,
    ) -> Result<GpuInstance, Failure> {
        let mut info = nvmlGpuInstanceInfo_t::zeroed();
        call!(self.nvmlGpuInstanceGetInfo(instance.0, &raw mut info))?;
        Ok(GpuInstance {
            id: GpuInstanceId(info.id),
            profile: GpuInstanceProfileId(info.profileId),
            placement: place(info.placement)?,
        })
    }

    pub(crate) fn create_gpu_instance(
        &self,
        gpu: Handle,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstanceHandle, Failure> {
        let at = nvmlGpuInstancePlacement_t {
            start: placement.start,
            size: placement.size,
        };
        let mut instance: nvmlGpuInstance_t = std::ptr::null_mut();
        call!(self.nvmlDeviceCreateGpuInstanceWithPlacement(
            gpu.0,
            profile.0,
            &raw const at,
            &raw mut instance
        ))?;
        Ok(GpuInstanceHandle(instance))
    }

    pub(crate) fn destroy_gpu_instance(&self, instance: GpuInstanceHandle) -> Result<(), Failure> {
        call!(self.nvmlGpuInstanceDestroy(instance.0))
    }

    pub(crate) fn compute_profile(
        &self,
        instance: GpuInstanceHandle,
        index: u32,
    ) -> Result<ComputeInstanceProfile, Failure> {
        const ENGINES_SHARED: u32 = 0;
        let mut info = nvmlComputeInstanceProfileInfo_t::zeroed();
        call!(self.nvmlGpuInstanceGetComputeInstanceProfileInfo(
            instance.0,
            index,
            ENGINES_SHARED,
            &raw mut info
        ))?;
        possible_slices(info.sliceCount)?;
        Ok(ComputeInstanceProfile {
            id: ComputeInstanceProfileId(info.id),
            index: ComputeInstanceProfileIndex(index),
            slices: info.sliceCount,
            multiprocessors: info.multiprocessorCount,
            max_instances: info.instanceCount,
            shared: Engines {
                copy: info.sharedCopyEngineCount,
                decoders: info.sharedDecoderCount,
                encoders: info.sharedEncoderCount,
                jpeg: info.sharedJpegCount,
                ofa: info.sharedOfaCount,
            },
        })
    }

    /// Compute instances of one profile.
    pub(crate) fn compute_instances(
        &self,
        instance: GpuInstanceHandle,
        profile: ComputeInstanceProfileId,
    ) -> Result<Vec<ComputeInstanceHandle>, Failure> {
        let mut list: Vec<nvmlComputeInstance_t> = vec![std::ptr::null_mut(); ROOM];
        let mut count = 0;
        call!(self.nvmlGpuInstanceGetComputeInstances(
            instance.0,
            profile.0,
            list.as_mut_ptr(),
            &raw mut count
        ))?;
        listed(count)?;
        list.truncate(count as usize);
        Ok(list.into_iter().map(ComputeInstanceHandle).collect())
    }

    pub(crate) fn compute_instance_by_id(
        &self,
        instance: GpuInstanceHandle,
        id: ComputeInstanceId,
    ) -> Result<ComputeInstanceHandle, Failure> {
        let mut compute: nvmlComputeInstance_t = std::ptr::null_mut();
        call!(self.nvmlGpuInstanceGetComputeInstanceById(instance.0, id.0, &raw mut compute))?;
        Ok(ComputeInstanceHandle(compute))
    }

    /// Id, profile, and the MIG device, whose UUID is the compute instance's.
    pub(crate) fn compute_instance_info(
        &self,
        compute: ComputeInstanceHandle,
    ) -> Result<(ComputeInstanceId, ComputeInstanceProfileId, Handle), Failure> {
        let mut info = nvmlComputeInstanceInfo_t::zeroed();
        call!(self.nvmlComputeInstanceGetInfo_v2(compute.0, &raw mut info))?;
        if info.device.is_null() {
            let detail = Some("a compute instance has no MIG device".to_owned());
            return Err(Failure {
                code: GpuErrorCode::UNKNOWN,
                detail,
            });
        }
        Ok((
            ComputeInstanceId(info.id),
            ComputeInstanceProfileId(info.profileId),
            Handle(info.device),
        ))
    }

    pub(crate) fn create_compute_instance(
        &self,
        instance: GpuInstanceHandle,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstanceHandle, Failure> {
        let mut compute: nvmlComputeInstance_t = std::ptr::null_mut();
        call!(self.nvmlGpuInstanceCreateComputeInstance(instance.0, profile.0, &raw mut compute))?;
        Ok(ComputeInstanceHandle(compute))
    }

    pub(crate) fn destroy_compute_instance(
        &self,
        compute: ComputeInstanceHandle,
    ) -> Result<(), Failure> {
        call!(self.nvmlComputeInstanceDestroy(compute.0))
    }
}

/// Returns how much room a list takes that NVML says is so long.
fn listed(count: u32) -> Result<usize, Failure> {
    if count as usize > ROOM {
        return Err(nonsense(format!("a list of {count} entries")));
    }
    Ok(ROOM)
}

/// Reads a place on a GPU.
fn place(at: nvmlGpuInstancePlacement_t) -> Result<Placement, Failure> {
    if !(1..=MOST_SLICES).contains(&at.size) || at.start > MOST_SLICES {
        return Err(nonsense(format!(
            "a place of {} slices from {} on",
            at.size, at.start
        )));
    }
    Ok(Placement {
        start: at.start,
        size: at.size,
    })
}

/// Refuses the slices of a profile that no profile has.
fn possible_slices(slices: u32) -> Result<(), Failure> {
    if (1..=MOST_SLICES).contains(&slices) {
        Ok(())
    } else {
        Err(nonsense(format!("a profile of {slices} slices")))
    }
}

/// The sizes that NVML reads from the version of a struct; a struct of another size would be
/// refused everywhere.
const _: () = assert!(size_of::<nvmlGpuInstanceProfileInfo_v2_t>() == 152);
const _: () = assert!(size_of::<nvmlGpuInstanceProfileInfo_v3_t>() == 152);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_places_and_profiles_beyond_all_sizes_are_no_answers() {
        assert_eq!(listed(0).unwrap(), ROOM);
        assert_eq!(listed(u32::MAX).unwrap_err().code, GpuErrorCode::UNKNOWN);
        for (start, size) in [(0, 0), (u32::MAX, 1), (0, u32::MAX)] {
            let at = nvmlGpuInstancePlacement_t { start, size };
            assert_eq!(place(at).unwrap_err().code, GpuErrorCode::UNKNOWN);
        }
        for slices in [0, u32::MAX] {
            let error = possible_slices(slices).unwrap_err();
            assert_eq!(error.code, GpuErrorCode::UNKNOWN);
        }
    }
}
