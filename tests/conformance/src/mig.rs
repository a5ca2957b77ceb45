//! The assertions every [`GpuDriver`] must pass about MIG. The read-only part belongs to
//! [`crate::conformance`]; [`mig_conformance`] creates and destroys, so it is for the simulator and
//! the mock library only.

use std::collections::BTreeSet;

use divvy_model::mig::{
    ComputeInstanceProfileId, GpuInstance, GpuInstanceProfile, GpuInstanceProfileId,
    MigCapabilities, Placement,
};
use divvy_model::{GpuDriver, GpuError, GpuErrorCode, GpuUuid, MigActivation, MigMode, MigUuid};

use crate::Violation;

type Instance = (GpuInstanceProfileId, Placement);

/// A check in progress: expectations, driver and findings.
struct Checks<'a> {
    driver: &'a dyn GpuDriver,
    gpu: &'a GpuUuid,
    bad: Vec<Violation>,
    /// UUIDs of all compute instances so far: none may come again.
    uuids: BTreeSet<MigUuid>,
}

impl Checks<'_> {
    fn check(&mut self, ok: bool, what: impl FnOnce() -> String) {
        if !ok {
            self.bad
                .push(Violation(format!("{}: {}", self.gpu, what())));
        }
    }

    fn refused<T: std::fmt::Debug>(
        &mut self,
        result: Result<T, GpuError>,
        code: GpuErrorCode,
        what: impl FnOnce() -> String,
    ) {
        let got = result.map_err(|error| error.code);
        let ok = matches!(&got, Err(c) if *c == code);
        self.check(ok, || {
            format!("{} is refused with {code}, got {got:?}", what())
        });
    }

    /// Without MIG mode a list of instances is refused, or empty: so R580 answers on an H200.
    fn none_live_without_mig(&mut self) {
        let living = self.driver.gpu_instances(self.gpu);
        if !living.as_ref().is_ok_and(Vec::is_empty) {
            self.refused(living, GpuErrorCode::NOT_SUPPORTED, || {
                "listing instances without MIG mode".to_owned()
            });
        }
    }

    fn answer<T>(
        &mut self,
        result: Result<T, GpuError>,
        what: impl FnOnce() -> String,
    ) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.check(false, || format!("{}: {error}", what()));
                None
            }
        }
    }

    fn capabilities_are_sound(&mut self, caps: &MigCapabilities) {
        self.check(!caps.profiles().is_empty(), || {
            "there are MIG profiles".to_owned()
        });
        let slices = caps.memory_slices();
        for profile in caps.profiles() {
            let id = profile.id;
            self.check(profile.slices > 0 && profile.multiprocessors > 0, || {
                format!("profile {id} has slices and multiprocessors")
            });
            self.check(
                profile
                    .placements
                    .iter()
                    .all(|at| at.size == profile.memory_slices() && at.end() <= slices),
                || format!("placements of profile {id} have one size and lie on the GPU"),
            );
            self.check(profile.max_instances > 0, || {
                format!("at least one instance of profile {id} fits")
            });
            self.check(
                caps.memory_bytes == 0 || profile.memory_bytes() <= caps.memory_bytes,
                || format!("profile {id} has no more memory than the GPU"),
            );
        }
        let indices: BTreeSet<_> = caps.profiles().iter().map(|p| p.index).collect();
        self.check(indices.len() == caps.profiles().len(), || {
            "profile indices are unique".to_owned()
        });
    }

    fn living_are_sound(&mut self, caps: Option<&MigCapabilities>) {
        let (driver, gpu) = (self.driver, self.gpu);
        let Some(living) = self.answer(driver.gpu_instances(gpu), || {
            "gpu_instances() answers".to_owned()
        }) else {
            return;
        };
        let ids: BTreeSet<_> = living.iter().map(|i| i.id).collect();
        self.check(
            living.is_sorted_by_key(|i| i.id) && ids.len() == living.len(),
            || "GPU instances are in order of their ids, which are unique".to_owned(),
        );
        for (at, one) in living.iter().enumerate() {
            self.check(
                !living
                    .iter()
                    .skip(at + 1)
                    .any(|o| o.placement.overlaps(one.placement)),
                || format!("nothing overlaps GPU instance {one:?}"),
            );
            if let Some(caps) = caps {
                self.check(
                    caps.placement(one.profile, one.placement.start) == Some(one.placement),
                    || format!("GPU instance {one:?} is where its profile may be"),
                );
            }
            let computes = driver.compute_instances(gpu, one.id);
            let computes = self.answer(computes, || {
                format!("compute instances of {:?} are reported", one.id)
            });
            let offered = driver.compute_profiles(gpu, one.id);
            let offered = self.answer(offered, || {
                format!("compute profiles of {:?} are reported", one.id)
            });
            for compute in computes.into_iter().flatten() {
                self.check(compute.gpu_instance == one.id, || {
                    format!("{compute:?} is where it was found")
                });
                let known = offered.iter().flatten().any(|p| p.id == compute.profile);
                self.check(known, || {
                    format!("the profile of {compute:?} is one that is offered")
                });
                let new = self.uuids.insert(compute.uuid.clone());
                self.check(new, || format!("the UUID of {compute:?} is its own"));
            }
        }
    }
}

/// Checks everything that can be checked without changing the GPU, also on real ones.
pub(crate) fn read_only(driver: &dyn GpuDriver, gpu: &GpuUuid, mode: MigMode) -> Vec<Violation> {
    let mut checks = Checks {
        driver,
        gpu,
        bad: Vec::new(),
        uuids: BTreeSet::new(),
    };
    let caps = driver.mig_capabilities(gpu);
    if mode == MigMode::Unsupported {
        checks.refused(caps, GpuErrorCode::NOT_SUPPORTED, || {
            "asking what it can be cut into".to_owned()
        });
    } else {
        let caps = match caps {
            Ok(caps) => {
                checks.capabilities_are_sound(&caps);
                let same = driver.mig_capabilities(gpu).as_ref() == Ok(&caps);
                checks.check(same, || "mig_capabilities() is stable".to_owned());
                Some(caps)
            }
            // Placements are reported to root only, and by older drivers only with MIG mode on.
            Err(error) if error.code == GpuErrorCode::NO_PERMISSION => None,
            Err(error) if error.code == GpuErrorCode::NOT_SUPPORTED && !mode.is_on() => None,
            Err(error) => {
                checks.check(false, || format!("mig_capabilities() answers: {error}"));
                None
            }
        };
        if mode.is_on() {
            checks.living_are_sound(caps.as_ref());
            return checks.bad;
        }
    }
    checks.none_live_without_mig();
    checks.bad
}

/// Creates and destroys every profile at every placement, and whatever must be refused. The GPU
/// must be idle, do MIG, and either toggle MIG mode at once or have it on; it is left as it was
/// found.
pub fn mig_conformance(driver: &dyn GpuDriver, gpu: &GpuUuid) -> Vec<Violation> {
    let mut checks = Checks {
        driver,
        gpu,
        bad: Vec::new(),
        uuids: BTreeSet::new(),
    };
    let Some(mode) = checks.answer(driver.mig_mode(gpu), || "mig_mode() answers".to_owned()) else {
        return checks.bad;
    };
    if !mode.is_on() && !toggle(&mut checks, true) {
        return checks.bad;
    }
    if let Some(caps) = checks.answer(driver.mig_capabilities(gpu), || {
        "MIG capabilities".to_owned()
    }) {
        checks.capabilities_are_sound(&caps);
        let empty = driver.gpu_instances(gpu) == Ok(Vec::new());
        checks.check(empty, || "no instance lives before the checks".to_owned());
        bad_arguments(&mut checks, &caps);
        for (profile, placement) in caps.placements() {
            one_life(&mut checks, profile, placement, &caps);
        }
        for profile in caps.profiles() {
            as_many_as_fit(&mut checks, profile, &caps);
        }
        let empty = driver.gpu_instances(gpu) == Ok(Vec::new());
        checks.check(empty, || "no instance lives after the checks".to_owned());
    }
    if !mode.is_on() {
        toggle(&mut checks, false);
    }
    checks.bad
}

/// Returns true if the mode could be set.
fn toggle(checks: &mut Checks<'_>, on: bool) -> bool {
    let (driver, gpu) = (checks.driver, checks.gpu);
    if on {
        let create = driver.create_gpu_instance(
            gpu,
            GpuInstanceProfileId(0),
            Placement { start: 0, size: 8 },
        );
        checks.refused(create, GpuErrorCode::NOT_SUPPORTED, || {
            "an instance without MIG mode".to_owned()
        });
        checks.none_live_without_mig();
    }
    for _twice_is_no_change in 0..2 {
        let set = driver.set_mig_mode(gpu, on).map_err(|e| e.code);
        checks.check(set == Ok(MigActivation::Active), || {
            format!("MIG mode can be set to {on}, got {set:?}")
        });
    }
    let mode = driver.mig_mode(gpu).map_err(|e| e.code);
    let expected = Ok(MigMode::Supported {
        current: on,
        pending: on,
    });
    checks.check(mode == expected, || {
        format!("MIG mode is {on} after it was set, got {mode:?}")
    });
    mode == expected
}

fn bad_arguments(checks: &mut Checks<'_>, caps: &MigCapabilities) {
    let (driver, gpu) = (checks.driver, checks.gpu);
    let slices = caps.memory_slices();
    let unknown = GpuInstanceProfileId(4711);
    let create = driver.create_gpu_instance(gpu, unknown, Placement { start: 0, size: 1 });
    checks.refused(create, GpuErrorCode::INVALID_ARGUMENT, || {
        "an unknown profile".to_owned()
    });
    for profile in caps.profiles() {
        let size = profile.memory_slices();
        let wrong = (0..=slices).find(|start| caps.placement(profile.id, *start).is_none());
        let wrong = wrong.unwrap_or(slices);
        for placement in [
            Placement { start: wrong, size },
            Placement {
                start: 0,
                size: size + 1,
            },
        ] {
            let create = driver.create_gpu_instance(gpu, profile.id, placement);
            checks.refused(create, GpuErrorCode::INVALID_ARGUMENT, || {
                format!("profile {} at {placement}", profile.id)
            });
        }
    }
    let gone = divvy_model::mig::GpuInstanceId(4711);
    let results = [
        driver.destroy_gpu_instance(gpu, gone),
        driver.compute_profiles(gpu, gone).map(|_| ()),
        driver.compute_instances(gpu, gone).map(|_| ()),
        driver
            .create_compute_instance(gpu, gone, ComputeInstanceProfileId(0))
            .map(|_| ()),
        driver.destroy_compute_instance(gpu, gone, divvy_model::mig::ComputeInstanceId(0)),
    ];
    for result in results {
        checks.refused(result, GpuErrorCode::NOT_FOUND, || {
            "a GPU instance that is not there".to_owned()
        });
    }
}

fn create(checks: &mut Checks<'_>, (profile, placement): Instance) -> Option<GpuInstance> {
    let (driver, gpu) = (checks.driver, checks.gpu);
    let what = || format!("profile {profile} is created at {placement}");
    let made = checks.answer(driver.create_gpu_instance(gpu, profile, placement), what)?;
    checks.check(
        (made.profile, made.placement) == (profile, placement),
        || format!("profile {profile} at {placement} is what was created, got {made:?}"),
    );
    Some(made)
}

fn destroy(checks: &mut Checks<'_>, instance: GpuInstance) {
    let (driver, gpu) = (checks.driver, checks.gpu);
    let gone = driver.destroy_gpu_instance(gpu, instance.id);
    checks.answer(gone, || format!("{instance:?} is destroyed"));
    let again = driver.destroy_gpu_instance(gpu, instance.id);
    checks.refused(again, GpuErrorCode::NOT_FOUND, || {
        format!("{instance:?} destroyed twice")
    });
}

/// Follows an instance from its creation to its end, with everything that must be refused
/// meanwhile.
fn one_life(
    checks: &mut Checks<'_>,
    profile: &GpuInstanceProfile,
    placement: Placement,
    caps: &MigCapabilities,
) {
    let (driver, gpu) = (checks.driver, checks.gpu);
    let Some(made) = create(checks, (profile.id, placement)) else {
        return;
    };
    let listed = driver.gpu_instances(gpu).map_err(|e| e.code);
    checks.check(listed.as_ref() == Ok(&vec![made]), || {
        format!("{made:?} lives alone, got {listed:?}")
    });
    for (other, there) in caps
        .placements()
        .filter(|(_, there)| there.overlaps(placement))
    {
        let second = driver.create_gpu_instance(gpu, other.id, there);
        checks.refused(second, GpuErrorCode::INSUFFICIENT_RESOURCES, || {
            format!("profile {} at {there} over {made:?}", other.id)
        });
    }
    compute_life(checks, profile, made);
    destroy(checks, made);
}

fn compute_life(checks: &mut Checks<'_>, profile: &GpuInstanceProfile, made: GpuInstance) {
    let (driver, gpu) = (checks.driver, checks.gpu);
    let offered = driver.compute_profiles(gpu, made.id);
    let Some(offered) = checks.answer(offered, || format!("compute profiles of {made:?}")) else {
        return;
    };
    let Some(whole) = profile.whole_compute_profile(&offered) else {
        checks.check(false, || {
            format!("one compute instance can take all of {made:?}: {offered:?}")
        });
        return;
    };
    let unknown = driver.create_compute_instance(gpu, made.id, ComputeInstanceProfileId(4711));
    checks.refused(unknown, GpuErrorCode::INVALID_ARGUMENT, || {
        "an unknown compute profile".to_owned()
    });
    for offer in &offered {
        let most = made_of(checks, made, offer.id, offer.max_instances);
        checks.check(most == Some(offer.max_instances), || {
            format!("as many as said of {offer:?} fit into {made:?}, got {most:?}")
        });
    }
    // The same id again, under a new UUID.
    made_of(checks, made, whole.id, 1);
}

/// Creates compute instances until there is no room, and destroys them; how many there were.
fn made_of(
    checks: &mut Checks<'_>,
    inside: GpuInstance,
    profile: ComputeInstanceProfileId,
    most: u32,
) -> Option<u32> {
    let (driver, gpu) = (checks.driver, checks.gpu);
    let mut living = Vec::new();
    for _ in 0..most {
        let made = driver.create_compute_instance(gpu, inside.id, profile);
        let made = checks.answer(made, || {
            format!("compute profile {profile:?} in {inside:?}")
        })?;
        checks.check(
            (made.gpu_instance, made.profile) == (inside.id, profile) && made.id.0 < 8,
            || format!("{made:?} is what was created in {inside:?}"),
        );
        let new = checks.uuids.insert(made.uuid.clone());
        checks.check(new, || {
            format!("the UUID of {made:?} was never given before")
        });
        living.push(made);
    }
    let more = driver.create_compute_instance(gpu, inside.id, profile);
    checks.refused(more, GpuErrorCode::INSUFFICIENT_RESOURCES, || {
        format!("one more of compute profile {profile:?} in {inside:?}")
    });
    let listed = driver.compute_instances(gpu, inside.id).map_err(|e| e.code);
    checks.check(listed.as_ref() == Ok(&living), || {
        format!("{living:?} are listed, got {listed:?}")
    });
    let early = driver.destroy_gpu_instance(gpu, inside.id);
    checks.refused(early, GpuErrorCode::IN_USE, || {
        format!("{inside:?} destroyed before what is in it")
    });
    for compute in &living {
        let gone = driver.destroy_compute_instance(gpu, inside.id, compute.id);
        checks.answer(gone, || format!("{compute:?} is destroyed"));
        let again = driver.destroy_compute_instance(gpu, inside.id, compute.id);
        checks.refused(again, GpuErrorCode::NOT_FOUND, || {
            format!("{compute:?} destroyed twice")
        });
    }
    u32::try_from(living.len()).ok()
}

/// Creates as many instances of a profile as there is room for, no more, with ids of their own; a
/// limited one only so often.
fn as_many_as_fit(checks: &mut Checks<'_>, profile: &GpuInstanceProfile, caps: &MigCapabilities) {
    let (driver, gpu) = (checks.driver, checks.gpu);
    let mut living: Vec<GpuInstance> = Vec::new();
    for placement in &profile.placements {
        match driver.create_gpu_instance(gpu, profile.id, *placement) {
            Ok(made) => living.push(made),
            Err(error) => checks.check(error.code == GpuErrorCode::INSUFFICIENT_RESOURCES, || {
                format!(
                    "one too many of profile {} lacks resources: {error}",
                    profile.id
                )
            }),
        }
    }
    let most = caps.most(profile);
    checks.check(u32::try_from(living.len()) == Ok(most), || {
        format!(
            "{most} instances of profile {} fit, got {living:?}",
            profile.id
        )
    });
    living.sort_unstable();
    let listed = driver.gpu_instances(gpu).map_err(|e| e.code);
    checks.check(listed.as_ref() == Ok(&living), || {
        format!("{living:?} are listed, got {listed:?}")
    });
    let ids: BTreeSet<_> = living.iter().map(|i| i.id).collect();
    checks.check(ids.len() == living.len(), || {
        format!("each of {living:?} has an id of its own")
    });
    for instance in living {
        destroy(checks, instance);
    }
}
