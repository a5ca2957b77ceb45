//! The goal of a GPU, worked out from holds and permissions, and from nothing else.

use std::collections::{BTreeMap, BTreeSet};

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
    /// Makes it if it does not live, and removes its remains before.
    Make,
    /// Makes it if it is certainly gone. Nothing of it is removed: other claims hold it too.
    Join,
    /// Keeps it if it lives; does not make it again.
    Keep,
}

impl Need {
    /// Returns true if the claim of the call is to get the instance.
    pub fn is_made(self) -> bool {
        match self {
            Self::Make | Self::Join => true,
            Self::Keep => false,
        }
    }
}

/// Target state of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct GpuGoal {
    pub mig: Want<bool>,
    pub compute: Want<ComputeMode>,
    pub slice: Want<TimeSlice>,
    /// MPS servers by target: started, or left as they are.
    pub mps: BTreeMap<Target, Want<MpsServer>>,
    /// Targets whose MPS server other claims use: no call ends it, whatever runs there.
    pub served: BTreeSet<Target>,
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
    // A record that cannot be read may need what would be given back.
    let found = || if holds.unknown { None } else { Some(()) };
    GpuGoal {
        mig: mig(holds, grant, may_set_mig),
        // A claim that is added decides; the mode lock of the scheduler and `conflicts` see to it
        // that those who hold the GPU agree with it. A hold that stays keeps the mode even if it
        // was changed behind our back: reconcile does not fight an administrator.
        compute: match (compute_of(&holds.make), compute_of(&holds.keep)) {
            (Some(to), _) => Want::To(to),
            // Also before a claim gets something: a mode that could not be given back is not its.
            (None, None) => found().map_or(Want::Leave, |()| Want::Found),
            (None, Some(_)) => Want::Leave,
        },
        // The slice cannot be read back, so a hold that stays has it set again when the driver may
        // have been reloaded: `slice` looks at both lists.
        slice: match slice(holds, grant) {
            Some(to) => Want::To(to),
            // For other users of the GPU a round gives it back.
            None if holds.make.is_empty() || holds.keep.is_empty() => {
                found().map_or(Want::Leave, |()| Want::Found)
            }
            None => Want::Leave,
        },
        mps: mps(holds),
        served: holds.served.clone(),
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
/// administrator. A mode that we turned on for partitions goes back in a round only, when nothing
/// holds the GPU and no rule offers any: an unprepare does not wait for a mode to change.
fn mig(holds: &Holds, grant: Granted, may_set: bool) -> Want<bool> {
    let needs = |hold: &Hold| match hold.target {
        Target::Gpu => Some(false),
        // Instances of others come with a mode that others have set.
        Target::Partition(_) => (!hold.theirs).then_some(true),
    };
    let unused = holds.keep.is_empty() && holds.strays.is_empty() && !holds.unknown;
    match holds.make.iter().find_map(needs) {
        Some(on) if may_set => Want::To(on),
        None if holds.is_round && unused && !grant.offers_partitions => Want::Found,
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
    let mut needs: BTreeMap<Place, Need> = keep.chain(shared).map(|at| (at, Need::Keep)).collect();
    // A partition that others hold too is made again if it is certainly gone, and never removed.
    for place in holds.make.iter().filter_map(own_place) {
        let need = needs.entry(place).or_insert(Need::Make);
        if *need == Need::Keep {
            *need = Need::Join;
        }
    }
    needs
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

    /// A hold of the whole GPU, or of a partition.
    fn hold(claim: &str, target: Target, sharing: Sharing) -> Hold {
        let uuid = "GPU-12345678-1234-1234-1234-123456780001";
        Hold {
            claim: claim.parse::<ClaimUid>().unwrap(),
            gpu: uuid.parse::<GpuUuid>().unwrap(),
            target,
            sharing,
            theirs: false,
            device: "gpu-0".parse().unwrap(),
            time_slice: None,
            mps: None,
        }
    }

    /// A setting that could not be given back is not the next claim's.
    #[test]
    fn a_claim_that_needs_no_setting_has_those_of_before_given_back() {
        let whole = hold("w", Target::Gpu, Sharing::Exclusive);
        let share = hold("s", Target::Gpu, Sharing::TimeSliced);
        for (make, keep, unknown, compute, slice) in [
            (Some(&whole), None, false, Want::Found, Want::Found),
            (Some(&whole), None, true, Want::Leave, Want::Leave),
            (None, Some(&share), false, Want::Leave, Want::Found),
            (
                Some(&share),
                Some(&share),
                false,
                Want::To(ComputeMode::Default),
                Want::Leave,
            ),
            (
                Some(&share),
                None,
                false,
                Want::To(ComputeMode::Default),
                Want::Found,
            ),
        ] {
            let holds = Holds {
                make: make.into_iter().cloned().collect(),
                keep: keep.into_iter().cloned().collect(),
                unknown,
                ..Holds::default()
            };
            let goal = goal(&holds, Granted::default(), true);
            assert_eq!((goal.compute, goal.slice), (compute, slice), "{holds:?}");
        }
    }

    /// Turning the mode off may take long, which an unprepare does not wait for.
    #[test]
    fn mig_mode_goes_back_in_a_round_alone() {
        for (is_round, expected) in [(true, Want::Found), (false, Want::Leave)] {
            let holds = Holds {
                is_round,
                ..Holds::default()
            };
            let goal = goal(&holds, Granted::default(), true);
            assert_eq!(goal.mig, expected);
        }
    }

    /// A partition that others hold is never removed for a claim that joins them.
    #[test]
    fn a_partition_that_others_hold_is_joined() {
        let target = Target::Partition(place());
        let one = |claim| hold(claim, target, Sharing::TimeSliced);
        for (keep, expected) in [(vec![], Need::Make), (vec![one("a")], Need::Join)] {
            let holds = Holds {
                make: vec![one("b")],
                keep,
                ..Holds::default()
            };
            let goal = goal(&holds, Granted::default(), true);
            assert_eq!(goal.instances, [(place(), expected)].into());
        }
    }

    #[test]
    fn mig_mode_is_changed_with_permission_only() {
        let hold = hold("a", Target::Partition(place()), Sharing::Exclusive);
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
