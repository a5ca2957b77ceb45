//! The state of a GPU (`gpus/<uuid>.json`): all that was done to it, and nothing about who asked.
//! Written under the GPU's lock.
//!
//! Invariants, for the executor's `bring` too:
//! - Every instance of ours that may live is noted here. A noted one is held by a record, or is a
//!   *stray* that gets a record in place of the one that was lost.
//! - A place is looked at and found empty before its instance is noted as [`Life::Begun`], so
//!   whatever fills it afterwards is ours.
//! - `found` is on disk before a setting leaves it, and is dropped only when the setting is
//!   certainly back, or the boot is over.
//! - An MPS server is noted before it is started, and until it has certainly ended.
//! - A doubt fences the GPU until the hardware has been asked with no call in flight.

use std::collections::BTreeMap;

use divvy_model::mig::GpuInstance;
use divvy_model::{BootId, ComputeMode, Grant, MigUuid, MpsServer, Place, Target, TimeSlice};
use serde::{Deserialize, Serialize};

use crate::granted::Granted;
use crate::holds::{Since, Use};
use crate::instances::{Fence, Instance, Life};
use crate::seen::GpuSeen;
use crate::servers::{self, MpsNote};
use crate::setting::{Changed, Moment};
use crate::{compute_mode, mig_mode, time_slice};

/// State kept about a GPU. No file means the default: never touched, nothing granted.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuState {
    /// The boot in which all but the grant and MIG mode was noted: nothing else outlasts one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootId>,
    #[serde(default)]
    pub grant: Granted,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<Changed<bool>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compute: Option<Changed<ComputeMode>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slice: Option<Changed<TimeSlice>>,
    /// MPS servers, by target.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        with = "by_target"
    )]
    pub mps: BTreeMap<Target, MpsNote>,
    /// Instances of ours, by place.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub instances: BTreeMap<Place, Instance>,
}

/// A map by target as a list of pairs: names in JSON are texts.
mod by_target {
    use std::collections::BTreeMap;

    use divvy_model::Target;
    use serde::{Deserialize, Deserializer, Serializer};

    use super::MpsNote;

    pub(super) fn serialize<S: Serializer>(
        map: &BTreeMap<Target, MpsNote>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        to.collect_seq(map)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<BTreeMap<Target, MpsNote>, D::Error> {
        let pairs = Vec::<(Target, MpsNote)>::deserialize(from)?;
        Ok(pairs.into_iter().collect())
    }
}

/// A setting by its note and by the value that it is brought to: the transitions of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setting {
    Mig {
        now: bool,
        to: bool,
    },
    Compute {
        now: ComputeMode,
        to: ComputeMode,
    },
    Slice {
        now: TimeSlice,
        to: TimeSlice,
    },
    /// The time slice goes back to what was found.
    SliceBack,
}

impl GpuState {
    /// Returns the state as it counts in a boot: notes of another one are void, but for the grant
    /// and MIG mode, which Ampere GPUs keep.
    #[must_use]
    pub fn in_boot(self, boot: &BootId) -> Self {
        if self.boot.as_ref() == Some(boot) {
            return self;
        }
        Self {
            // Instances, MPS servers, compute mode and time slice end with the boot, and ids in the
            // notes may name other instances now.
            boot: Some(boot.clone()),
            grant: self.grant,
            mig: self.mig,
            ..Self::default()
        }
    }

    /// Adds the instances and the MPS servers that claims of this boot were given and that are not
    /// noted: the file was lost, or is older than the records.
    pub fn add_given<'u>(&mut self, uses: impl IntoIterator<Item = &'u Use>) {
        for one in uses.into_iter().filter(|one| one.may_be_of_this_boot()) {
            if let Some(server) = one.hold.mps {
                let noted = self.mps.entry(one.hold.target);
                noted.or_insert(MpsNote::new(server, true));
            }
            // A partition of an administrator has no note: it must never be removed.
            let (Some(place), Some(made)) = (one.own_place(), &one.given) else {
                continue;
            };
            self.instances.entry(place).or_insert_with(|| Instance {
                made_for: one.hold.claim.clone(),
                life: Life::Whole(made.clone()),
                doubt: None,
            });
        }
    }

    /// Adds the places of uses without a given instance, after the file was lost: one may have been
    /// made there. The place was empty when the use was written down.
    pub fn add_unsure<'u>(&mut self, uses: impl IntoIterator<Item = &'u Use>) {
        for one in uses.into_iter().filter(|one| one.since == Since::ThisBoot) {
            if let Some(place) = one.own_place() {
                let at = place.in_words();
                self.instances.entry(place).or_insert_with(|| Instance {
                    made_for: one.hold.claim.clone(),
                    life: Life::Begun,
                    doubt: Some(format!(
                        "the GPU's file was lost while a partition of {at} may have been made"
                    )),
                });
            }
        }
    }

    /// Returns the UUID of the partition of ours at a place.
    pub fn partition_at(&self, place: Place) -> Option<MigUuid> {
        let made = self.instances.get(&place)?.life.made()?;
        Some(made.uuid.clone())
    }

    /// Returns the instances of ours in this boot.
    pub fn instances_in(&self, boot: &BootId) -> impl Iterator<Item = (Place, &Instance)> {
        let counts = self.boot.as_ref() == Some(boot);
        self.instances
            .iter()
            .filter(move |_| counts)
            .map(|(place, instance)| (*place, instance))
    }

    /// Returns the open questions about the GPU in this boot.
    pub fn fences(&self, boot: &BootId) -> impl Iterator<Item = Fence> {
        self.instances_in(boot).filter_map(|(_, instance)| {
            Some(Fence {
                claim: Some(instance.made_for.clone()),
                reason: instance.doubt.clone()?,
            })
        })
    }

    /// Returns true if a living instance is one that we have made, or may have made.
    pub fn accounts_for(&self, boot: &BootId, living: &GpuInstance) -> bool {
        self.instances_in(boot)
            .filter(|(place, _)| place.is_filled_by(living))
            .any(|(_, instance)| match &instance.life {
                // Its id is not known yet. Whatever fills the place counts as ours: it is not
                // reported as foreign while the question is open.
                Life::Begun => true,
                Life::Half { gi } => *gi == living.id,
                Life::Whole(made) => made.gi == living.id,
            })
    }

    /// Returns true if we turned MIG mode on, so that it may be turned off again without a grant.
    pub fn turned_mig_on(&self) -> bool {
        self.mig.is_some_and(|mig| mig.ours)
    }

    /// Brings notes in line with the hardware, before a difference is worked out. Drops notes of
    /// settings that it contradicts: a reboot, a reload of the driver or an administrator has
    /// changed them since, and what was found does not matter any more. While a call is in flight
    /// nothing is dropped: it may be the one that sets ours.
    pub fn correct(&mut self, seen: &GpuSeen) {
        if seen.in_flight.is_some() {
            return;
        }
        self.mig = mig_mode::corrected(self.mig, seen.mig.as_ref());
        self.compute = compute_mode::corrected(self.compute, seen.compute.as_ref());
    }

    /// Notes a step in the change of a setting.
    pub fn note_setting(&mut self, setting: Setting, at: Moment) {
        match setting {
            Setting::Mig { now, to } => self.mig = Changed::at(self.mig, now, to, at),
            Setting::Compute { now, to } => self.compute = Changed::at(self.compute, now, to, at),
            Setting::Slice { now, to } => {
                self.slice = Some(time_slice::noted(self.slice, now, to, at));
            }
            Setting::SliceBack => self.slice = time_slice::given_back(self.slice, at),
        }
    }

    /// Restores the notes of settings to their values before a change that was not made. A note
    /// that stayed would have the setting given back although it never left `found`.
    pub fn restore_settings(&mut self, before: &Self) {
        (self.mig, self.compute, self.slice) = (before.mig, before.compute, before.slice);
    }

    /// Notes that an MPS server is about to be started, or is started.
    pub fn note_server(&mut self, target: Target, server: MpsServer, up: bool) {
        self.mps.insert(target, MpsNote::new(server, up));
    }

    /// Marks an MPS server as not known: a start or stop ended in an error that leaves it open.
    pub fn doubt_server(&mut self, target: Target) {
        if let Some(noted) = self.mps.get_mut(&target) {
            noted.up = false;
        }
    }

    /// Notes which MPS servers are wedged, once it is known which run. For rounds, which report it:
    /// a call that found it first would keep it from them.
    pub fn note_wedged(&mut self, seen: &GpuSeen) {
        servers::note_wedged(&mut self.mps, seen.mps.as_ref());
    }

    /// Marks the time slice as not known, so that it is set again when it is next wanted: the
    /// driver may have been loaded anew.
    pub fn doubt_slice(&mut self) {
        self.slice = Changed::unsure(self.slice);
    }

    /// Stores the permissions of prepare.
    pub fn take(&mut self, grant: &Grant) {
        self.grant.take(grant);
    }

    /// Returns true if the grant is stored already.
    pub fn has(&self, grant: &Grant) -> bool {
        let mut taken = self.clone();
        taken.take(grant);
        taken.grant == self.grant
    }

    /// Returns true if the state says nothing, so that no file is needed for it.
    pub fn is_default(&self) -> bool {
        *self
            == Self {
                boot: self.boot.clone(),
                ..Self::default()
            }
    }
}

#[cfg(test)]
mod tests;
