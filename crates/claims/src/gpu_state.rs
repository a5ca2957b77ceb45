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

use divvy_model::mig::{GpuInstance, GpuInstanceId};
use divvy_model::{
    BootId, Burst, CapsPromise, ClaimUid, ComputeMode, GpuUuid, Grant, MigUuid, MpsFault,
    MpsServer, Place, ShareUnit, Target, TimeSlice,
};
use serde::{Deserialize, Serialize};

use crate::change::{Made, Observed};
use crate::record::Record;
use crate::seen::GpuSeen;
use crate::stored::{self, Head, Stored};

/// A setting that we have changed, or are about to change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Changed<T> {
    /// Value before our first change: the one that is given back.
    pub found: T,
    /// Value that we set.
    pub ours: T,
    /// True if the last call that set it is known to have worked.
    pub sure: bool,
}

impl<T: Copy + PartialEq> Changed<T> {
    /// Returns the note to be on disk before a setting goes from `now` to `to`. On the way back to
    /// `found` the note stays as it is: the setting is ours until it certainly is back.
    fn before(noted: Option<Self>, now: T, to: T) -> Self {
        match noted {
            // The way back: a crash after the call and before the note is dropped costs one more
            // call that sets the same value. Dropping the note first would lose `found`.
            Some(note) if note.found == to => note,
            _ => Self {
                // The first change decides what is given back. A second one finds our own value.
                found: noted.map_or(now, |note| note.found),
                ours: to,
                sure: true,
            },
        }
    }

    /// Returns the note for a setting that is at `to` now.
    fn after(noted: Option<Self>, to: T) -> Option<Self> {
        noted.filter(|note| note.found != to)
    }

    /// Returns the note for a setting of which it is not known whether it is at what was set last.
    fn unsure(noted: Option<Self>) -> Option<Self> {
        noted.map(|note| Self {
            sure: false,
            ..note
        })
    }
}

/// An MPS server that was started, or may have been.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MpsNote {
    /// Limits that it was started with.
    pub server: MpsServer,
    /// True if the start is known to have worked. The supervisor knows the process.
    pub up: bool,
    /// Fault because of which it has not served for long, by the last look.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wedged: Option<MpsFault>,
}

impl MpsNote {
    /// Makes the note of a server that serves, as far as is known.
    pub fn new(server: MpsServer, up: bool) -> Self {
        let wedged = None;
        Self { server, up, wedged }
    }
}

/// Progress in the life of an instance of ours.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Life {
    /// Its place was empty, and it is about to be made.
    Begun,
    /// The GPU instance is there, without a compute instance.
    Half { gi: GpuInstanceId },
    /// A GPU instance and its compute instance are there.
    Whole(Made),
    /// Possibly made: the GPU's file was lost.
    Unsure,
}

/// An instance that we have made, or may have made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Instance {
    /// Claim that it was first made for. Decides nothing while a record holds the place.
    pub made_for: ClaimUid,
    pub life: Life,
    /// Open question about it, which fences the GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub doubt: Option<String>,
}

impl Instance {
    /// Returns the note after the hardware was asked; `None` if the instance is certainly gone, or
    /// was never made. A question that the hardware does not answer stays open.
    #[must_use]
    pub fn settled(self, place: Place, found: Observed) -> Option<Self> {
        let doubt = |reason: String, noted: Self| {
            Some(Self {
                doubt: Some(reason),
                ..noted
            })
        };
        let known = |life: Life, noted: Self| {
            Some(Self {
                life,
                doubt: None,
                ..noted
            })
        };
        let at = place.in_words();
        match (self.life.clone(), found) {
            // Nothing more will come of it. And we have made no compute instance of a half, with no
            // call under way: the id was given out again.
            (_, Observed::Absent) | (Life::Half { .. }, Observed::Whole(_)) => None,
            (Life::Begun, Observed::InFlight) => doubt(
                format!("the call to create a partition of {at} has not returned"),
                self,
            ),
            (Life::Begun, Observed::Uncertain(why)) => doubt(
                format!("it is uncertain whether a partition of {at} was created: {why}"),
                self,
            ),
            // Where the file was lost, nothing says whose it is.
            (_, Observed::InFlight | Observed::Uncertain(_))
            | (Life::Unsure, Observed::Half(_) | Observed::Whole(_)) => Some(self),
            // The place was empty when it was begun.
            (Life::Begun, Observed::Half(gi)) => known(Life::Half { gi }, self),
            (Life::Begun, Observed::Whole(made)) => known(Life::Whole(made), self),
            // NVML gives ids out again: a half with another id was made by another program.
            (Life::Half { gi }, Observed::Half(there)) if gi != there => None,
            (life, Observed::Half(_) | Observed::Whole(_)) => known(life, self),
        }
    }
}

/// An open question about a GPU: nothing new may be put on it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Fence {
    /// The claim whose instance is in doubt. `None`: the GPU's own file cannot be read.
    pub claim: Option<ClaimUid>,
    /// The question, in words.
    pub reason: String,
}

/// Permissions that the node's policies give to prepare, as last granted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Granted {
    /// True if MIG mode may be changed where that needs no reset. A mode that we turned on is
    /// turned off again for another use, whatever this says.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub may_change_mode: bool,
    /// True if a rule offers partitions of the GPU: while none does, a MIG mode that we turned on
    /// is given back once nothing is held.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub offers_partitions: bool,
    /// Time slice of the GPU while claims have shares of it. `None`: none is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_time_slice: Option<TimeSlice>,
    /// The unit in which shares of the GPU were last published: claims may hold some, also after a
    /// restart. `None`: there were none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub share_unit: Option<ShareUnit>,
    /// Memory in MiB that shares do not get.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub share_reserved_mib: u64,
    /// Factor by which the memory limit of a share may be above its request.
    #[serde(default, skip_serializing_if = "Burst::is_none")]
    pub share_burst: Burst,
    /// The MPS server that was last granted: claims may hold its slots, also after a restart.
    /// `None`: none was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps: Option<MpsServer>,
    /// The equal slots of a partition with MPS shares, as they were last granted. `None`: none
    /// were.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mps_slots_in_partitions: Option<u32>,
    /// True if an MPS server that is wedged is started anew also while it has clients.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarts_wedged_mps: bool,
    /// Promise that the memory of shares of the GPU is capped, also after a restart.
    #[serde(default, skip_serializing_if = "CapsPromise::is_never")]
    pub caps: CapsPromise,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}

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

const VERSION: u32 = 1;

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

/// Progress of a change of a setting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// The change is about to be made: written before the call.
    Before,
    /// The call has returned without an error.
    Done,
    /// The outcome is not known: the call has not returned, or ended in an error that leaves it
    /// open.
    Unknown,
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

    /// Adds the instances and the MPS server that records of this boot were given and that are not
    /// noted: the file was lost, or is older than the records.
    pub fn add_given<'a>(
        &mut self,
        gpu: &GpuUuid,
        boot: &BootId,
        records: impl IntoIterator<Item = &'a Record>,
    ) {
        for record in records.into_iter().filter(|r| r.may_be_of(boot)) {
            for device in record.devices.iter().filter(|device| device.gpu == *gpu) {
                if let Some(slot) = device.mps {
                    let server = slot.server;
                    let noted = self.mps.entry(device.target);
                    noted.or_insert(MpsNote::new(server, true));
                }
                // A partition of an administrator has no note: it must never be removed.
                let (Some(place), Some(made)) = (device.own_place(), &device.given) else {
                    continue;
                };
                self.instances.entry(place).or_insert_with(|| Instance {
                    made_for: record.uid.clone(),
                    life: Life::Whole(made.clone()),
                    doubt: None,
                });
            }
        }
    }

    /// Adds the places of records without a given instance, after the file was lost: one may have
    /// been made there.
    pub fn add_unsure<'a>(
        &mut self,
        gpu: &GpuUuid,
        boot: &BootId,
        records: impl IntoIterator<Item = &'a Record>,
    ) {
        for record in records.into_iter().filter(|record| record.boot == *boot) {
            for device in record.devices.iter().filter(|device| device.gpu == *gpu) {
                if let Some(place) = device.own_place() {
                    let at = place.in_words();
                    self.instances.entry(place).or_insert_with(|| Instance {
                        made_for: record.uid.clone(),
                        life: Life::Unsure,
                        doubt: Some(format!(
                            "the GPU's file was lost while a partition of {at} may have been made"
                        )),
                    });
                }
            }
        }
    }

    /// Returns the UUID of the partition of ours at a place.
    pub fn partition_at(&self, place: Place) -> Option<MigUuid> {
        match &self.instances.get(&place)?.life {
            Life::Whole(made) => Some(made.uuid.clone()),
            Life::Begun | Life::Half { .. } | Life::Unsure => None,
        }
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
                Life::Begun | Life::Unsure => true,
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
        if let (Some(note), Some(Ok(mode))) = (self.mig, &seen.mig)
            // Giving `found` back now would undo a change that an administrator made after us.
            && mode.is_on() != note.ours
        {
            self.mig = None;
        }
        if let (Some(note), Some(Ok(now))) = (self.compute, &seen.compute)
            && *now != note.ours
        {
            self.compute = None;
        }
    }

    /// Notes a step in the change of a setting.
    pub fn note_setting(&mut self, setting: Setting, at: Moment) {
        fn next<T: Copy + PartialEq>(
            noted: Option<Changed<T>>,
            (now, to): (T, T),
            at: Moment,
        ) -> Option<Changed<T>> {
            match at {
                Moment::Before => Some(Changed::before(noted, now, to)),
                Moment::Done => Changed::after(noted, to),
                Moment::Unknown => Changed::unsure(noted),
            }
        }
        match setting {
            Setting::Mig { now, to } => self.mig = next(self.mig, (now, to), at),
            Setting::Compute { now, to } => self.compute = next(self.compute, (now, to), at),
            // Unlike the other two it cannot be read back: the note stays, also of a slice that is
            // the one that was found, so that it is known to be set.
            // A slice that is not known to be set, since the call was cut short or failed, is set
            // again: setting it twice does no harm.
            Setting::Slice { now, to } => {
                let found = self.slice.map_or(now, |slice| slice.found);
                self.slice = Some(Changed {
                    found,
                    ours: to,
                    sure: at == Moment::Done,
                });
            }
            Setting::SliceBack => match at {
                // If the call is cut short, the note still names ours, and the next round gives it
                // back again, or sets it again for a claim whose release was cut short with it.
                Moment::Before | Moment::Unknown => self.doubt_slice(),
                Moment::Done => self.slice = None,
            },
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
        let Some(Ok(running)) = &seen.mps else {
            return;
        };
        for (target, noted) in &mut self.mps {
            // A server that has ended is not wedged.
            let found = running
                .get(target)
                .and_then(|found| found.wedged(Some(&*noted)));
            noted.wedged = found.map(|unwell| unwell.fault);
        }
    }

    /// Marks the time slice as not known, so that it is set again when it is next wanted: the
    /// driver may have been loaded anew.
    pub fn doubt_slice(&mut self) {
        self.slice = Changed::unsure(self.slice);
    }

    /// Stores the permissions of prepare. A part that the grant leaves open (no policy read yet)
    /// stays as it was granted last.
    pub fn take(&mut self, grant: &Grant) {
        self.grant = Granted {
            may_change_mode: grant.may_change_mode.unwrap_or(self.grant.may_change_mode),
            offers_partitions: grant
                .offers_partitions
                .unwrap_or(self.grant.offers_partitions),
            share_time_slice: grant.share_time_slice,
            share_unit: grant.share_unit,
            share_reserved_mib: grant.share_reserved_mib,
            share_burst: grant.share_burst,
            mps: grant.mps.or(self.grant.mps),
            mps_slots_in_partitions: grant
                .mps_slots_in_partitions
                .or(self.grant.mps_slots_in_partitions),
            restarts_wedged_mps: grant.restarts_wedged_mps,
            caps: self.grant.caps.then(grant.caps),
        };
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

    /// Returns the bytes of the file.
    pub fn encode(&self) -> Vec<u8> {
        stored::encode(VERSION, &Head::default(), self)
    }

    /// Reads the bytes of a file.
    pub fn decode(bytes: &[u8]) -> Stored<Self> {
        stored::decode(VERSION, bytes)
    }
}

#[cfg(test)]
mod tests;
