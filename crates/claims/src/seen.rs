//! The state of a GPU in hardware, as far as it was asked for.

use std::collections::BTreeMap;

use divvy_model::mig::{ComputeInstance, GpuInstance};
use divvy_model::{
    ComputeMode, GpuError, GpuOp, MigMode, MigUuid, MpsFault, MpsNamespace, MpsNamespaceName,
    MpsServer, Place, Target, TimeSlice,
};

use crate::change::{Made, Observed};
use crate::gpu_state::{GpuState, Instance, Life, MpsNote};

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
            Life::Begun | Life::Unsure => true,
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

/// An MPS server that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MpsSeen {
    /// Limits that it was started with.
    pub server: MpsServer,
    /// The partition that it sees; `None` for a whole GPU, and for one that was not asked for.
    pub partition: Option<MigUuid>,
    /// Its namespaces. `None`: not asked for, so that they count as wanted.
    pub namespaces: Option<BTreeMap<MpsNamespaceName, MpsNamespace>>,
    /// Set if it serves no new program.
    pub unwell: Option<Unwell>,
}

/// The state of an MPS server that serves no new program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unwell {
    pub fault: MpsFault,
    /// True if it certainly has no client.
    pub is_idle: bool,
    /// True if it has been so for long, as far as the supervisor knows, which may be new. A shorter
    /// fault may end by itself.
    pub is_lasting: bool,
}

impl MpsSeen {
    /// Returns the fault of a server that will not serve by itself any more: it has not for long,
    /// or was found so before, and has not served since.
    pub fn wedged(&self, noted: Option<&MpsNote>) -> Option<Unwell> {
        let was = noted.is_some_and(|noted| noted.wedged.is_some());
        self.unwell.filter(|unwell| unwell.is_lasting || was)
    }
}

/// Readings of a GPU. A part that is `None` or absent was not asked for.
#[derive(Debug, Clone, Default)]
pub struct GpuSeen {
    pub mig: Option<Result<MigMode, GpuError>>,
    /// Compute mode. `None`: not asked for, or the driver reports none.
    pub compute: Option<Result<ComputeMode, GpuError>>,
    /// Time slice that certainly is in force. `None`: not known, so it is set again.
    pub slice: Option<TimeSlice>,
    /// The MPS servers that run, or why they cannot be found out. `None`: not asked for.
    pub mps: Option<Result<BTreeMap<Target, MpsSeen>, String>>,
    /// Content of the places that were asked for.
    pub places: BTreeMap<Place, Filling>,
    /// A call that has not returned.
    pub in_flight: Option<GpuOp>,
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

impl GpuSeen {
    /// Returns a GPU that is just as its notes say: what a round finds if no one else changed it.
    pub fn as_noted(state: &GpuState) -> Self {
        Self {
            mig: state.mig.map(|mig| {
                Ok(MigMode::Supported {
                    current: mig.ours,
                    pending: mig.ours,
                })
            }),
            compute: state.compute.map(|compute| Ok(compute.ours)),
            slice: state
                .slice
                .filter(|slice| slice.sure)
                .map(|slice| slice.ours),
            mps: (!state.mps.is_empty()).then(|| {
                let servers = state.mps.iter();
                let servers = servers.map(|(target, noted)| {
                    let seen = MpsSeen {
                        server: noted.server,
                        partition: target.place().and_then(|place| state.partition_at(place)),
                        namespaces: None,
                        // The supervisor is asked for it in each round: by its note alone a server
                        // is not started anew.
                        unwell: None,
                    };
                    noted.up.then_some((*target, seen))
                });
                let known: Option<_> = servers.collect();
                known.ok_or_else(|| "a start or stop was cut short".to_owned())
            }),
            places: BTreeMap::new(),
            in_flight: None,
        }
    }

    /// Returns true if an MPS server of a target certainly runs.
    pub fn runs(&self, target: Target) -> bool {
        matches!(&self.mps, Some(Ok(running)) if running.contains_key(&target))
    }

    /// Returns the state of a noted instance. A place that was not asked for is as noted. A place
    /// that cannot be read proves neither that the instance is gone nor that it lives.
    pub(crate) fn of_noted(&self, place: Place, noted: &Instance) -> Now {
        // An open question is answered by `settled`, with no call under way, and not by this
        // comparison.
        let life = &noted.life;
        if noted.doubt.is_some() || matches!(life, Life::Begun | Life::Unsure) {
            return Now::Unknown;
        }
        match self.places.get(&place) {
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

    /// Returns what became of an instance that was begun at an empty place, with no call under way.
    pub fn observed(filling: &Filling) -> Observed {
        match filling {
            Err(error) => Observed::Uncertain(format!("its state cannot be read: {error}")),
            Ok(None) => Observed::Absent,
            Ok(Some(living)) => match living.as_partition() {
                Some(made) => Observed::Whole(made),
                None => Observed::Half(living.instance.id),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use divvy_model::GpuErrorCode;
    use divvy_model::mig::{
        ComputeInstanceId, ComputeInstanceProfileId, GpuInstanceId, GpuInstanceProfileId, Placement,
    };

    use super::*;
    use crate::{Change, GpuGoal, Need, diff};

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

    /// Returns the changes of a GPU with this note and this content of its place, if a claim needs
    /// the instance or none does.
    fn changes(
        (life, doubt): (&Life, Option<&str>),
        filling: Option<&Filling>,
        need: Option<Need>,
    ) -> Vec<Change> {
        let noted = Instance {
            made_for: "a".parse().unwrap(),
            life: life.clone(),
            doubt: doubt.map(str::to_owned),
        };
        let state = GpuState {
            instances: [(PLACE, noted)].into(),
            ..GpuState::default()
        };
        let seen = GpuSeen {
            places: filling
                .map(|filling| (PLACE, filling.clone()))
                .into_iter()
                .collect(),
            ..GpuSeen::default()
        };
        let goal = GpuGoal {
            instances: need.map(|need| (PLACE, need)).into_iter().collect(),
            ..GpuGoal::default()
        };
        diff(&state, &seen, &goal)
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
            let found = changes((&life, None), Some(&filling), None);
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
            let found = changes((&life, None), Some(&filling), None);
            let removed = [Change::Remove(PLACE, life)];
            assert_eq!(found, removed, "{filling:?}");
        }
    }

    /// An instance that may not live serves no claim. Remains are removed first, but for those that
    /// other claims hold; what cannot be read may live, and is looked at again.
    #[test]
    fn an_instance_that_is_needed_is_made_anew_unless_it_lives_whole() {
        let (id, uuid) = OURS;
        let lives = || Some(Ok(Some(living(id, &[uuid]))));
        let half_there = || Some(Ok(Some(living(id, &[]))));
        let gone = || Some(Ok(None));
        let error = GpuError::global(GpuOp::GpuInstances, GpuErrorCode::TIMEOUT);
        let unread = || Some(Err(error.clone()));
        let create = || Change::Create(PLACE);
        let forget = || Change::Forget(PLACE);
        for (life, doubt, filling, alone, joined) in [
            (whole(), None, lives(), vec![], vec![]),
            // As noted, if it was not asked for.
            (whole(), None, None, vec![], vec![]),
            (whole(), None, unread(), vec![create()], vec![create()]),
            (half(), None, unread(), vec![create()], vec![create()]),
            (
                whole(),
                None,
                gone(),
                vec![forget(), create()],
                vec![forget(), create()],
            ),
            (
                whole(),
                None,
                half_there(),
                vec![Change::Remove(PLACE, whole()), create()],
                vec![create()],
            ),
            (
                half(),
                None,
                None,
                vec![Change::Remove(PLACE, half()), create()],
                vec![create()],
            ),
            // An open question is not answered by what is there just now.
            (
                whole(),
                Some("a call hangs"),
                lives(),
                vec![create()],
                vec![create()],
            ),
            (Life::Unsure, None, lives(), vec![create()], vec![create()]),
        ] {
            for (need, expected) in [(Need::Make, alone), (Need::Join, joined)] {
                let found = changes((&life, doubt), filling.as_ref(), Some(need));
                assert_eq!(found, expected, "{need:?} {life:?} {doubt:?} {filling:?}");
            }
        }
    }

    #[test]
    fn a_server_runs_if_it_is_certain_and_of_this_very_target() {
        let partition = Target::Partition(PLACE);
        let seen = |mps| GpuSeen {
            mps,
            ..GpuSeen::default()
        };
        let server = MpsSeen {
            server: MpsServer::of_claim(None, None),
            partition: None,
            namespaces: None,
            unwell: None,
        };
        let running = seen(Some(Ok([(partition, server)].into())));
        assert!(running.runs(partition));
        assert!(!running.runs(Target::Gpu));
        assert!(!seen(None).runs(partition));
        let unknown = seen(Some(Err("the supervisor does not answer".to_owned())));
        assert!(!unknown.runs(partition));
    }
}
