//! MIG instances of a GPU: the partitions that divvy makes for claims. Instances of others are
//! never touched.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::mig::{ComputeInstance, ComputeInstanceId, GpuInstance, GpuInstanceId};
use divvy_model::{ClaimUid, GpuError, GpuUuid, MigUuid, Place};
use serde::{Deserialize, Serialize};

use crate::change::Change;

/// A partition that lives: a GPU instance with the compute instance that takes it whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Made {
    /// GPU instance id. NVML gives ids out again.
    pub gi: GpuInstanceId,
    /// Compute instance id, within the GPU instance.
    pub ci: ComputeInstanceId,
    /// UUID of the MIG device: new at every creation.
    pub uuid: MigUuid,
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
            (_, Observed::InFlight | Observed::Uncertain(_)) => Some(self),
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

/// A GPU instance that lives, and the compute instances in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Living {
    pub instance: GpuInstance,
    pub inside: Vec<ComputeInstance>,
}

impl Living {
    /// Returns it as a partition, if one compute instance is all that is in it.
    pub fn as_partition(&self) -> Option<Made> {
        let [one] = self.inside.as_slice() else {
            return None;
        };
        Some(Made {
            gi: self.instance.id,
            ci: one.id,
            uuid: one.uuid.clone(),
        })
    }

    /// Returns true if it is the noted instance, or what is left of it. Ids are given out again and
    /// UUIDs are not: a compute instance with another UUID in it is another owner's.
    pub fn is(&self, noted: &Life) -> bool {
        match noted {
            Life::Begun => true,
            // We have made no compute instance: with one in it, it is another owner's.
            Life::Half { gi } => self.instance.id == *gi && self.inside.is_empty(),
            Life::Whole(made) => {
                self.instance.id == made.gi
                    && (self.inside.is_empty() || self.inside.iter().any(|c| c.uuid == made.uuid))
            }
        }
    }
}

/// Content of a place, or the error that kept it from being read.
pub type Filling = Result<Option<Living>, GpuError>;

/// State of an instance whose making or removal has no recorded outcome.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observed {
    /// A call has not returned: it may still happen.
    InFlight,
    /// Nothing fills the place, and no call is under way.
    Absent,
    /// A GPU instance without a compute instance fills it.
    Half(GpuInstanceId),
    /// A whole partition fills it.
    Whole(Made),
    /// The GPU cannot be read.
    Uncertain(String),
}

/// Returns what became of an instance that was begun at an empty place, with no call under way.
pub(crate) fn observed(filling: &Filling) -> Observed {
    match filling {
        Err(error) => Observed::Uncertain(format!("its state cannot be read: {error}")),
        Ok(None) => Observed::Absent,
        Ok(Some(living)) => match living.as_partition() {
            Some(made) => Observed::Whole(made),
            None => Observed::Half(living.instance.id),
        },
    }
}

/// State of a noted instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Now {
    /// GPU instance and compute instance live.
    Whole,
    /// A part of it certainly lives, without the rest.
    Partly,
    /// It may live: it cannot be read, or a question about it is open.
    Unknown,
    /// It is certainly gone.
    Gone,
}

/// Returns the state of a noted instance by what fills its place. A place that was not asked for is
/// as noted. A place that cannot be read proves neither that the instance is gone nor that it
/// lives.
pub(crate) fn now(noted: &Instance, filling: Option<&Filling>) -> Now {
    // An open question is answered by `settled`, with no call under way, and not by this
    // comparison.
    let life = &noted.life;
    if noted.doubt.is_some() || *life == Life::Begun {
        return Now::Unknown;
    }
    match filling {
        None if matches!(life, Life::Whole(_)) => Now::Whole,
        None => Now::Partly,
        Some(Err(_)) => Now::Unknown,
        Some(Ok(None)) => Now::Gone,
        // Another owner's instance fills the place. Ours is gone, and what lives there must not
        // be removed.
        Some(Ok(Some(living))) if !living.is(life) => Now::Gone,
        Some(Ok(Some(living))) => match life {
            Life::Whole(made) if living.as_partition().as_ref() == Some(made) => Now::Whole,
            _ => Now::Partly,
        },
    }
}

/// Returns what brings the instances to those that are wanted. Only instances that are noted as
/// ours are removed; no other instance is touched.
pub(crate) fn changes(
    notes: &BTreeMap<Place, Instance>,
    seen: &BTreeMap<Place, Filling>,
    want: &BTreeSet<Place>,
) -> Vec<Change> {
    let at = |place: &Place| Some(now(notes.get(place)?, seen.get(place)));
    let known = notes.keys().filter_map(|place| match at(place)? {
        Now::Gone => Some(Change::Forget(*place)),
        // The remains of an earlier instance are removed, and it is made anew as a whole.
        Now::Partly => Some(Change::Remove(*place)),
        // An instance that cannot be read may live whole: the creation below looks again.
        Now::Whole | Now::Unknown => (!want.contains(place)).then_some(Change::Remove(*place)),
    });
    let made = want.iter().filter(|place| at(place) != Some(Now::Whole));
    known
        .chain(made.map(|place| Change::Create(*place)))
        .collect()
}

/// Returns the partition of ours at a place, which was made whole and lives, as far as can be read:
/// nothing in it ends because of an answer that is missing.
pub(crate) fn may_live(
    notes: &BTreeMap<Place, Instance>,
    seen: &BTreeMap<Place, Filling>,
    place: Place,
) -> Option<MigUuid> {
    let instance = notes.get(&place)?;
    let made = instance.life.made()?;
    let lives = matches!(now(instance, seen.get(&place)), Now::Whole | Now::Unknown);
    lives.then(|| made.uuid.clone())
}

impl Life {
    /// Returns the partition, if it was made whole.
    pub fn made(&self) -> Option<&Made> {
        match self {
            Self::Whole(made) => Some(made),
            Self::Begun | Self::Half { .. } => None,
        }
    }
}

/// Returns the end of a note in words.
pub(crate) fn forgotten(place: Place, gpu: &GpuUuid) -> String {
    format!(
        "drop the note of the partition of {} on {gpu}",
        place.in_words()
    )
}

/// Returns a removal in words.
pub(crate) fn removed(place: Place, gpu: &GpuUuid) -> String {
    format!("remove the partition of {} on {gpu}", place.in_words())
}

/// Returns a creation in words.
pub(crate) fn created(place: Place, gpu: &GpuUuid) -> String {
    format!("create a partition of {} on {gpu}", place.in_words())
}

#[cfg(test)]
mod tests {
    use divvy_model::mig::{ComputeInstanceProfileId, GpuInstanceProfileId, Placement};
    use divvy_model::{GpuErrorCode, GpuOp};

    use super::*;

    const PLACE: Place = Place {
        profile: GpuInstanceProfileId(19),
        placement: Placement { start: 2, size: 1 },
    };

    /// The instance that is noted, and its UUID.
    const OURS: (u32, &str) = (7, "MIG-ours");

    /// A GPU instance with compute instances of these UUIDs.
    fn living(gi: u32, inside: &[&str]) -> Living {
        let id = GpuInstanceId(gi);
        let inside = (0..).zip(inside).map(|(ci, uuid)| ComputeInstance {
            id: ComputeInstanceId(ci),
            gpu_instance: id,
            profile: ComputeInstanceProfileId(0),
            uuid: uuid.parse().unwrap(),
        });
        let Place { profile, placement } = PLACE;
        Living {
            instance: GpuInstance {
                id,
                profile,
                placement,
            },
            inside: inside.collect(),
        }
    }

    fn whole() -> Life {
        Life::Whole(Made {
            gi: GpuInstanceId(OURS.0),
            ci: ComputeInstanceId(0),
            uuid: OURS.1.parse().unwrap(),
        })
    }

    fn half() -> Life {
        Life::Half {
            gi: GpuInstanceId(OURS.0),
        }
    }

    /// Returns the changes with this note and this content of its place, if a claim needs the
    /// instance or none does.
    fn of(
        life: &Life,
        doubt: Option<&str>,
        filling: Option<&Filling>,
        is_needed: bool,
    ) -> Vec<Change> {
        let noted = Instance {
            made_for: "a".parse().unwrap(),
            life: life.clone(),
            doubt: doubt.map(str::to_owned),
        };
        let seen = filling.map(|filling| (PLACE, filling.clone()));
        let want = is_needed.then_some(PLACE).into_iter().collect();
        changes(&[(PLACE, noted)].into(), &seen.into_iter().collect(), &want)
    }

    /// Ids are given out again, and UUIDs are not.
    #[test]
    fn an_instance_of_another_owner_is_left_alone_and_its_note_forgotten() {
        let (id, uuid) = OURS;
        for (life, there) in [
            (whole(), living(id, &["MIG-other"])),
            (whole(), living(id + 1, &["MIG-other"])),
            (whole(), living(id + 1, &[])),
            (half(), living(id, &["MIG-other"])),
            (half(), living(id + 1, &[])),
            (half(), living(id + 1, &["MIG-other"])),
        ] {
            assert!(!there.is(&life), "{there:?} {life:?}");
            let filling = Ok(Some(there));
            let found = of(&life, None, Some(&filling), false);
            assert_eq!(found, [Change::Forget(PLACE)], "{filling:?} {life:?}");
        }
        // The other half of the rule: it is ours, so it goes with the claim.
        for (life, there) in [
            (whole(), living(id, &[uuid])),
            (whole(), living(id, &[])),
            (half(), living(id, &[])),
        ] {
            assert!(there.is(&life), "{there:?} {life:?}");
            let filling = Ok(Some(there));
            let found = of(&life, None, Some(&filling), false);
            assert_eq!(found, [Change::Remove(PLACE)], "{filling:?}");
        }
    }

    /// An instance that may not live serves no claim. An instance that cannot be read may live, and
    /// is looked at again.
    #[test]
    fn an_instance_that_is_needed_is_made_anew_unless_it_lives_whole() {
        let (id, uuid) = OURS;
        let error = GpuError::global(GpuOp::GpuInstances, GpuErrorCode::TIMEOUT);
        let lives: Option<Filling> = Some(Ok(Some(living(id, &[uuid]))));
        let half_there = Some(Ok(Some(living(id, &[]))));
        let gone = Some(Ok(None));
        let unread = Some(Err(error));
        let remove = Change::Remove(PLACE);
        let create = Change::Create(PLACE);
        for (life, doubt, filling, expected) in [
            (whole(), None, &lives, vec![]),
            // As noted, if it was not asked for.
            (whole(), None, &None, vec![]),
            (whole(), None, &unread, vec![create.clone()]),
            (half(), None, &unread, vec![create.clone()]),
            (
                whole(),
                None,
                &gone,
                vec![Change::Forget(PLACE), create.clone()],
            ),
            (
                whole(),
                None,
                &half_there,
                vec![remove.clone(), create.clone()],
            ),
            (half(), None, &None, vec![remove.clone(), create.clone()]),
            // An open question is not answered by what is there just now.
            (whole(), Some("a call hangs"), &lives, vec![create.clone()]),
            (Life::Begun, None, &lives, vec![create.clone()]),
        ] {
            let found = of(&life, doubt, filling.as_ref(), true);
            assert_eq!(found, expected, "{life:?} {doubt:?} {filling:?}");
        }
    }

    #[test]
    fn a_partition_may_live_unless_a_part_of_it_is_certainly_gone() {
        let (id, uuid) = OURS;
        let error = GpuError::global(GpuOp::GpuInstances, GpuErrorCode::TIMEOUT);
        let instance = |life| Instance {
            made_for: "a".parse().unwrap(),
            life,
            doubt: None,
        };
        for (life, filling, expected) in [
            (whole(), None, true),
            (whole(), Some(Ok(Some(living(id, &[uuid])))), true),
            (whole(), Some(Err(error)), true),
            (whole(), Some(Ok(Some(living(id, &[])))), false),
            (whole(), Some(Ok(None)), false),
            (half(), None, false),
            (Life::Begun, None, false),
        ] {
            let notes = [(PLACE, instance(life.clone()))].into();
            let seen = filling.clone().map(|filling| (PLACE, filling));
            let lives = may_live(&notes, &seen.into_iter().collect(), PLACE);
            assert_eq!(lives.is_some(), expected, "{life:?} {filling:?}");
        }
    }
}
