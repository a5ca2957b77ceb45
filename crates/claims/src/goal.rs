//! The goal of a GPU, worked out from holds and permissions, and from nothing else.

use std::collections::BTreeMap;

use divvy_model::{
    ComputeMode, Hold, MpsNamespace, MpsNamespaceName, MpsServer, Place, Sharing, Target, TimeSlice,
};

use crate::gpu_state::Granted;
use crate::holds::{Ends, Holds, own_place};

/// The wanted value of a setting.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Want<T> {
    /// Leaves the setting alone.
    #[default]
    Leave,
    /// Gives back the value from before our first change.
    Found,
    To(T),
}

/// The need for an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    /// Makes it if it does not live.
    Make,
    /// Keeps it if it lives; does not make it again.
    Keep,
}

/// Target state of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuGoal {
    pub mig: Want<bool>,
    pub compute: Want<ComputeMode>,
    pub slice: Want<TimeSlice>,
    /// MPS servers by target: started, or left as they are.
    pub mps: BTreeMap<Target, Want<MpsServer>>,
    /// MPS servers of targets that are not named end where they overlap with these.
    pub ends_mps: Vec<Target>,
    /// True if an MPS server that is wedged is started anew although it has clients.
    pub restarts_wedged_mps: bool,
    /// Namespaces of the MPS server of the whole GPU, while one is wanted.
    pub namespaces: BTreeMap<MpsNamespaceName, MpsNamespace>,
    /// Namespaces that end, if they are not named above.
    pub ends: Ends,
    /// Instances of ours. A noted one that is not named here is removed.
    pub instances: BTreeMap<Place, Need>,
}

impl GpuGoal {
    /// Returns true if a claim is to get something: then the first change that fails ends the call.
    /// Removals and give-backs alone go on past a failure, so that one stuck instance does not keep
    /// the others.
    pub fn makes(&self) -> bool {
        self.instances.values().any(|need| *need == Need::Make)
            || matches!(self.mig, Want::To(_))
            || matches!(self.compute, Want::To(_))
            || matches!(self.slice, Want::To(_))
            || self.starts_mps()
    }

    /// Returns true if an MPS server is wanted.
    pub fn starts_mps(&self) -> bool {
        let mut servers = self.mps.values();
        servers.any(|want| matches!(want, Want::To(_)))
    }
}

/// Works out the goal of a GPU.
///
/// `may_set_mig` says if MIG mode may be changed for the claim, by grant or because it is ours.
///
/// Invariants:
/// - A call makes for its own claim only and removes for its own claim only: everything that
///   another claim has is in the goal as it is.
/// - The goal depends on holds and permissions alone, never on the hardware or on history. Two
///   calls with the same holds bring the GPU to the same place, whatever a crash left.
/// - While a record cannot be read (`unknown`), nothing is given back: it may need the setting.
/// - A setting goes back to what was found only while nothing that is made or kept needs it.
pub fn goal(holds: &Holds, grant: Granted, may_set_mig: bool) -> GpuGoal {
    let making = !holds.make.is_empty();
    // A record that cannot be read may need what would be given back.
    let found = || if holds.unknown { None } else { Some(()) };
    GpuGoal {
        mig: mig(holds, grant, may_set_mig),
        // A claim that is added decides; the mode lock of the scheduler and `conflicts` see to it
        // that those who hold the GPU agree with it. A hold that stays keeps the mode even if it
        // was changed behind our back: reconcile does not fight an administrator.
        compute: match (compute_of(&holds.make), compute_of(&holds.keep)) {
            (Some(to), _) => Want::To(to),
            (None, None) if !making => found().map_or(Want::Leave, |()| Want::Found),
            (None, _) => Want::Leave,
        },
        // The slice cannot be read back, so a hold that stays has it set again when the driver may
        // have been reloaded: `slice` looks at both lists.
        slice: match slice(holds, grant) {
            Some(to) => Want::To(to),
            None if !making => found().map_or(Want::Leave, |()| Want::Found),
            None => Want::Leave,
        },
        mps: mps(holds),
        // A record that cannot be read may be of a user of one of them.
        ends_mps: found().map_or_else(Vec::new, |()| holds.about.clone()),
        // A round alone: it reports whose programs are hit.
        restarts_wedged_mps: grant.restarts_wedged_mps && holds.is_round,
        namespaces: holds.namespaces.clone(),
        ends: holds.leaves_namespaces.clone(),
        instances: instances(holds),
    }
}

/// Works out the wanted MIG mode. It follows from what the call makes and never from what is held:
/// turning it off is left to the next use that needs it off, and a round does not fight an
/// administrator. A mode that we turned on for partitions goes back only when nothing holds the GPU
/// and no rule offers any.
fn mig(holds: &Holds, grant: Granted, may_set: bool) -> Want<bool> {
    let needs = |hold: &Hold| match hold.target {
        Target::Gpu => Some(false),
        // Instances of others come with a mode that others have set.
        Target::Partition(_) => (!hold.theirs).then_some(true),
    };
    let unused = holds.keep.is_empty() && holds.strays.is_empty() && !holds.unknown;
    match holds.make.iter().find_map(needs) {
        Some(on) if may_set => Want::To(on),
        None if holds.make.is_empty() && unused && !grant.offers_partitions => Want::Found,
        // Without permission the mode stays; `servable` has refused the claim if it is the wrong
        // one.
        Some(_) | None => Want::Leave,
    }
}

/// Works out the MPS servers. Like the time slice they are looked at for what is kept too: a server
/// that has died is started again for those who hold a place at it. Nothing else may run beside it.
fn mps(holds: &Holds) -> BTreeMap<Target, Want<MpsServer>> {
    let users = holds.make.iter().chain(&holds.keep);
    let used = users.filter(|hold| hold.mps.is_some());
    // Users of an earlier boot get theirs by their own calls, and those that are undone stop it so.
    let left = used.map(|hold| (hold.target, Want::Leave));
    let wanted = holds.servers.iter();
    let wanted = wanted.map(|(target, server)| (*target, Want::To(*server)));
    // A server that is wanted wins over one that is left as it is.
    left.chain(wanted).collect()
}

/// Returns the compute mode that holds of a whole GPU need: more than one process computes where
/// shares are, and one server alone where MPS is.
fn compute_of(holds: &[Hold]) -> Option<ComputeMode> {
    holds
        .iter()
        .find_map(|hold| match (hold.target, hold.sharing) {
            // The compute mode is of the GPU: in MIG mode programs of other partitions run beside.
            (Target::Gpu, _) if hold.mps.is_some() => Some(ComputeMode::ExclusiveProcess),
            (Target::Gpu, Sharing::TimeSliced) => Some(ComputeMode::Default),
            _ => None,
        })
}

/// Returns the time slice of a GPU: that of the claim that has it whole, or of the policy while
/// claims have shares of it.
fn slice(holds: &Holds, grant: Granted) -> Option<TimeSlice> {
    let all = holds.make.iter().chain(&holds.keep);
    all.filter(|hold| hold.target == Target::Gpu)
        .find_map(|hold| match hold.sharing {
            Sharing::Exclusive => hold.time_slice,
            Sharing::TimeSliced => grant.share_time_slice,
            Sharing::Mps | Sharing::Admin => None,
        })
}

fn instances(holds: &Holds) -> BTreeMap<Place, Need> {
    // Strays stay: the claim that they were made for gets a record again, or reconcile removes them
    // on that claim's behalf.
    let keep = holds.keep.iter().filter_map(own_place);
    let keep = keep.chain(holds.strays.iter().copied());
    // A record that cannot be read may be of another user of a shared partition.
    let shared = holds.leaves_shared.iter().copied();
    let shared = shared.filter(|_| holds.unknown);
    let make = holds.make.iter().filter_map(own_place);
    keep.chain(shared)
        // `Make` comes last and wins over `Keep` at the same place: a partition that is shared and
        // gone is made again for the claim that is added.
        .map(|place| (place, Need::Keep))
        .chain(make.map(|place| (place, Need::Make)))
        .collect()
}

#[cfg(test)]
mod tests {
    use divvy_model::mig::{GpuInstanceProfileId, Placement};
    use divvy_model::{ClaimUid, GpuUuid};

    use super::*;

    fn place() -> Place {
        Place {
            profile: GpuInstanceProfileId(9),
            placement: Placement { start: 4, size: 4 },
        }
    }

    /// The first change that fails ends a call that makes something, and no other.
    #[test]
    fn a_goal_makes_something_if_any_part_of_it_is_to_be() {
        let server = MpsServer::NAMESPACES;
        let goal = GpuGoal::default;
        for goal in [
            GpuGoal {
                instances: [(place(), Need::Make)].into(),
                ..goal()
            },
            GpuGoal {
                mig: Want::To(false),
                ..goal()
            },
            GpuGoal {
                compute: Want::To(ComputeMode::Default),
                ..goal()
            },
            GpuGoal {
                slice: Want::To(TimeSlice::Long),
                ..goal()
            },
            GpuGoal {
                mps: [(Target::Gpu, Want::To(server))].into(),
                ..goal()
            },
        ] {
            assert!(goal.makes(), "{goal:?}");
            assert_eq!(goal.starts_mps(), !goal.mps.is_empty());
        }
        for goal in [
            goal(),
            GpuGoal {
                instances: [(place(), Need::Keep)].into(),
                mig: Want::Found,
                compute: Want::Found,
                slice: Want::Found,
                mps: [(Target::Gpu, Want::Found)].into(),
                ..goal()
            },
        ] {
            assert!(!goal.makes() && !goal.starts_mps(), "{goal:?}");
        }
    }

    #[test]
    fn mig_mode_is_changed_with_permission_only() {
        let claim: ClaimUid = "a".parse().unwrap();
        let uuid = "GPU-12345678-1234-1234-1234-123456780001";
        let hold = Hold {
            claim,
            gpu: uuid.parse::<GpuUuid>().unwrap(),
            target: Target::Partition(place()),
            sharing: Sharing::Exclusive,
            theirs: false,
            device: "gpu-0-mig-3g40gb-9-4".parse().unwrap(),
            time_slice: None,
            mps: None,
        };
        let holds = Holds {
            make: vec![hold],
            ..Holds::default()
        };
        for (may_set, expected) in [(true, Want::To(true)), (false, Want::Leave)] {
            let goal = goal(&holds, Granted::default(), may_set);
            assert_eq!(goal.mig, expected, "{may_set}");
        }
    }
}
