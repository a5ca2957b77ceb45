//! Each MIG operation of [`divvy_model::GpuDriver`] as the NVML calls it takes.

use std::collections::BTreeSet;

use divvy_model::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfile, ComputeInstanceProfileId,
    GpuInstance, GpuInstanceId, GpuInstanceProfile, GpuInstanceProfileId, GpuInstanceProfileIndex,
    MigCapabilities, Placement,
};
use divvy_model::{GpuErrorCode, IdError, MigActivation, MigMode, MigUuid};

use crate::facts;
use crate::ffi::{ComputeInstanceHandle, Failure, GpuInstanceHandle, Handle, Library};

/// Far above the highest number of a profile that any NVML knows, for a library that never says
/// that there are no more.
const INDICES: u32 = 64;

/// So many numbers in a row that the library does not know are the end. A number for which a board
/// has no profile may be answered so, too.
const ENDS: u32 = 4;

/// The first driver that reports profiles and placements with MIG mode off, where the library does
/// not say so itself.
const QUERY_WITHOUT_MIG: u32 = 550;

/// So often a list is asked for whose entries cannot all be read.
const LOOKS: u32 = 3;

/// Asks by rising number until the library says several times that there are no more; numbers this
/// board has no profile for are left out. Either is asked twice: an instance of a profile that one
/// odd answer left out would not be listed, and count as gone.
fn by_index<T>(ask: impl Fn(u32) -> Result<T, Failure>) -> Result<Vec<(u32, T)>, Failure> {
    let is_none = |failure: &Failure| {
        [GpuErrorCode::INVALID_ARGUMENT, GpuErrorCode::NOT_SUPPORTED].contains(&failure.code)
    };
    let (mut found, mut ends) = (Vec::new(), 0);
    for index in 0..INDICES {
        let answer = twice(&is_none, || ask(index));
        ends = match &answer {
            Err(failure) if failure.code == GpuErrorCode::INVALID_ARGUMENT => ends + 1,
            _ => 0,
        };
        match answer {
            Ok(value) => found.push((index, value)),
            // nvml.h: INVALID_ARGUMENT is beyond the last number that the library knows,
            // NOT_SUPPORTED a profile that this board does not have.
            Err(failure) if failure.code == GpuErrorCode::INVALID_ARGUMENT => {
                if ends == ENDS {
                    break;
                }
            }
            Err(failure) if failure.code == GpuErrorCode::NOT_SUPPORTED => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(found)
}

/// Asks, and once more after a failure of this kind.
fn twice<T>(
    is_so: &dyn Fn(&Failure) -> bool,
    ask: impl Fn() -> Result<T, Failure>,
) -> Result<T, Failure> {
    ask().or_else(|failure| if is_so(&failure) { ask() } else { Err(failure) })
}

/// Reads the profiles of a GPU and their placements. The second value says whether nothing was
/// left out because of an odd answer.
pub(crate) fn capabilities(
    library: &Library,
    gpu: Handle,
) -> Result<(MigCapabilities, bool), Failure> {
    let not_supported = |detail: Option<&str>| Failure {
        code: GpuErrorCode::NOT_SUPPORTED,
        detail: detail.map(str::to_owned),
    };
    let by_itself = library.optional(
        Some(gpu),
        "MIG without MIG mode",
        library.reports_profiles_without_mig(gpu),
    )?;
    // Before R550 the driver reports profiles and placements only with MIG mode on. Libraries from
    // CUDA 12.4 on say by a field whether it does more.
    match facts::mig_mode(library, gpu)? {
        MigMode::Unsupported => return Err(not_supported(None)),
        MigMode::Supported { current: false, .. }
            if by_itself != Some(true) && !is_recent(library)? =>
        {
            return Err(not_supported(Some(
                "this driver reports MIG profiles only with MIG mode on",
            )));
        }
        MigMode::Supported { .. } => {}
    }
    // Partitions are named by it: without it they would get names that no class knows.
    let (memory, _) = facts::memory(library, gpu)?.ok_or_else(|| {
        not_supported(Some(
            "NVML does not report the GPU's memory, by which MIG profiles are named",
        ))
    })?;
    let mut profiles = Vec::new();
    let (mut unreported, mut is_whole) = (None, true);
    for (index, info) in by_index(|index| library.gpu_instance_profile(gpu, index))? {
        let id = GpuInstanceProfileId(info.id);
        let placements = library.placements(gpu, id);
        if let Err(failure) = &placements {
            // A plain no is an answer: this board has no place for the profile.
            is_whole &= failure.is_plain_no();
            unreported.get_or_insert(failure.clone());
        }
        profiles.push(GpuInstanceProfile {
            id,
            index: GpuInstanceProfileIndex(index),
            slices: info.slices,
            memory_mib: info.memory_mib,
            multiprocessors: info.multiprocessors,
            engines: info.engines,
            max_instances: info.instances,
            // Some profiles have none on some boards. Without an answer, only this profile cannot
            // be placed.
            placements: library
                .optional(Some(gpu), "placements of a MIG profile", placements)?
                .unwrap_or_default(),
            driver_name: info.name.filter(|name| !name.is_empty()),
        });
    }
    let capabilities = MigCapabilities::new(memory, profiles);
    if capabilities.profiles().is_empty() {
        return Err(
            unreported.unwrap_or_else(|| not_supported(Some("NVML reports no MIG profile")))
        );
    }
    Ok((capabilities, is_whole))
}

fn is_recent(library: &Library) -> Result<bool, Failure> {
    let version = library.driver_version()?;
    let major = version
        .split('.')
        .next()
        .and_then(|major| major.parse::<u32>().ok());
    Ok(major.is_some_and(|major| major >= QUERY_WITHOUT_MIG))
}

pub(crate) fn set_mode(library: &Library, gpu: Handle, on: bool) -> Result<MigActivation, Failure> {
    // NVML returns success also where the mode is only pending. The second status says so.
    Ok(match library.set_mig_mode(gpu, on)? {
        0 => MigActivation::Active,
        code => MigActivation::Pending(GpuErrorCode(code)),
    })
}

/// Ids of all profiles of a board, which instances are listed by; also with MIG mode off.
pub(crate) fn profile_ids(
    library: &Library,
    gpu: Handle,
) -> Result<BTreeSet<GpuInstanceProfileId>, Failure> {
    let profiles = by_index(|index| library.gpu_instance_profile(gpu, index))?;
    Ok(profiles
        .into_iter()
        .map(|(_, info)| GpuInstanceProfileId(info.id))
        .collect())
}

/// Lists what lives, and reads each. An entry that cannot be read may have been removed since,
/// which only another list shows: left out because of an odd answer, it would count as gone, and is
/// never removed.
fn listed<H, T>(
    list: &dyn Fn() -> Result<Vec<H>, Failure>,
    read: impl Fn(H) -> Result<T, Failure>,
) -> Result<Vec<T>, Failure> {
    let mut left = LOOKS;
    loop {
        left -= 1;
        match list()?.into_iter().map(&read).collect() {
            Err(failure) if Failure::is_final(&failure) => return Err(failure),
            Err(_) if left > 0 => {}
            // No code of this question says anything about what is asked for, since it is listed.
            Err(failure) => return Err(unreadable("it is listed", &failure)),
            all => return all,
        }
    }
}

pub(crate) fn gpu_instances(
    library: &Library,
    gpu: Handle,
    profiles: &BTreeSet<GpuInstanceProfileId>,
) -> Result<Vec<GpuInstance>, Failure> {
    if profiles.is_empty() {
        // No board without MIG, and no old driver with MIG mode off, has anything to list by.
        return Err(Failure::code(GpuErrorCode::NOT_SUPPORTED));
    }
    let mut living = Vec::new();
    for profile in profiles {
        let list = || library.gpu_instances(gpu, *profile);
        living.extend(listed(&list, |instance| {
            library.gpu_instance_info(instance)
        })?);
    }
    living.sort_unstable();
    living.dedup();
    Ok(living)
}

pub(crate) fn create_gpu_instance(
    library: &Library,
    gpu: Handle,
    profile: GpuInstanceProfileId,
    placement: Placement,
) -> Result<GpuInstance, Failure> {
    let instance = library.create_gpu_instance(gpu, profile, placement)?;
    library
        .gpu_instance_info(instance)
        .map_err(|failure| unreadable("it was created", &failure))
}

/// Returns the failure of a question about what exists: whatever its code would mean for the
/// operation, the thing is there.
fn unreadable(why: &str, failure: &Failure) -> Failure {
    let detail = failure.detail.as_ref();
    let detail = detail.map_or_else(String::new, |detail| format!(" ({detail})"));
    Failure {
        code: GpuErrorCode::UNKNOWN,
        detail: Some(format!(
            "{why}, and cannot be read: {}{detail}",
            failure.code
        )),
    }
}

pub(crate) fn destroy_gpu_instance(
    library: &Library,
    gpu: Handle,
    id: GpuInstanceId,
) -> Result<(), Failure> {
    let instance = library.gpu_instance_by_id(gpu, id)?;
    library.destroy_gpu_instance(instance)
}

pub(crate) fn compute_profiles(
    library: &Library,
    gpu: Handle,
    id: GpuInstanceId,
) -> Result<Vec<ComputeInstanceProfile>, Failure> {
    offered(library, library.gpu_instance_by_id(gpu, id)?)
}

fn offered(
    library: &Library,
    instance: GpuInstanceHandle,
) -> Result<Vec<ComputeInstanceProfile>, Failure> {
    let profiles = by_index(|index| library.compute_profile(instance, index))?;
    Ok(profiles.into_iter().map(|(_, profile)| profile).collect())
}

/// Ids of all profiles by which the compute instances in a GPU instance are listed.
pub(crate) fn compute_profile_ids(
    library: &Library,
    instance: GpuInstanceHandle,
) -> Result<BTreeSet<ComputeInstanceProfileId>, Failure> {
    let profiles = offered(library, instance)?.into_iter();
    Ok(profiles.map(|profile| profile.id).collect())
}

pub(crate) fn compute_instances(
    library: &Library,
    instance: GpuInstanceHandle,
    id: GpuInstanceId,
    profiles: &BTreeSet<ComputeInstanceProfileId>,
) -> Result<Vec<ComputeInstance>, Failure> {
    if profiles.is_empty() {
        // Each has at least the profile that takes it whole.
        let detail = Some("NVML reports no profile of compute instances".to_owned());
        return Err(Failure {
            code: GpuErrorCode::UNKNOWN,
            detail,
        });
    }
    let mut living = Vec::new();
    for profile in profiles {
        let list = || library.compute_instances(instance, *profile);
        living.extend(listed(&list, |compute| {
            compute_instance(library, id, compute)
        })?);
    }
    living.sort_unstable();
    living.dedup();
    Ok(living)
}

fn compute_instance(
    library: &Library,
    gpu_instance: GpuInstanceId,
    compute: ComputeInstanceHandle,
) -> Result<ComputeInstance, Failure> {
    let (id, profile, device) = library.compute_instance_info(compute)?;
    let uuid: MigUuid = library
        .uuid(device)?
        .parse()
        .map_err(|error: IdError| Failure {
            code: GpuErrorCode::UNKNOWN,
            detail: Some(error.to_string()),
        })?;
    Ok(ComputeInstance {
        id,
        gpu_instance,
        profile,
        uuid,
    })
}

pub(crate) fn create_compute_instance(
    library: &Library,
    gpu: Handle,
    id: GpuInstanceId,
    profile: ComputeInstanceProfileId,
) -> Result<ComputeInstance, Failure> {
    let instance = library.gpu_instance_by_id(gpu, id)?;
    let compute = library.create_compute_instance(instance, profile)?;
    compute_instance(library, id, compute).map_err(|failure| unreadable("it was created", &failure))
}

pub(crate) fn destroy_compute_instance(
    library: &Library,
    gpu: Handle,
    gpu_instance: GpuInstanceId,
    id: ComputeInstanceId,
) -> Result<(), Failure> {
    let instance = library.gpu_instance_by_id(gpu, gpu_instance)?;
    let compute = library.compute_instance_by_id(instance, id)?;
    library.destroy_compute_instance(compute)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn an_instance_that_is_removed_while_it_is_listed_hides_no_other() {
        let looks = Cell::new(0);
        let list = || {
            looks.set(looks.get() + 1);
            Ok(if looks.get() == 1 {
                vec![1, 2]
            } else {
                vec![2]
            })
        };
        let read = |one| match one {
            1 => Err(Failure::code(GpuErrorCode::NOT_FOUND)),
            other => Ok(other),
        };
        assert_eq!(listed(&list, read), Ok(vec![2]));
        // A lost GPU is asked no further.
        let failure = Failure::code(GpuErrorCode::GPU_IS_LOST);
        let read = |_| Err::<(), _>(failure.clone());
        assert_eq!(listed(&|| Ok(vec![1]), read), Err(failure.clone()));
    }
}
