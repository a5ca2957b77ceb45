//! The scope of a call: the changes that it may make, whatever the goal of all holds asks for.
//!
//! Two rules, for each part one line: nothing that another claim's hold names is removed, stopped
//! or set otherwise; and a call makes, starts and puts for its own claim, where a round repairs for
//! all.

use std::collections::BTreeMap;

use divvy_model::{ClaimUid, MpsNamespaceName, Place, Target};

use crate::change::Change;
use crate::granted::Granted;
use crate::holds::{Holds, Use, Whose};
use crate::instances::Instance;
use crate::setting::Want;
use crate::{compute_mode, mig_mode, time_slice};

/// The changes that a call may make.
#[derive(Debug, Clone)]
pub struct Scope {
    holds: Holds,
    grant: Granted,
    /// The claims that instances of ours were made for.
    made_for: BTreeMap<Place, ClaimUid>,
}

impl Scope {
    /// Makes the scope of a call on a GPU with these instances in this boot. A claim that gets
    /// something may have been refused before for its MIG mode, which may not be changed
    /// everywhere: here it counts that its devices need one.
    pub fn new(holds: Holds, grant: Granted, instances: &BTreeMap<Place, Instance>) -> Self {
        let made_for = instances.iter();
        let made_for = made_for.map(|(place, noted)| (*place, noted.made_for.clone()));
        Self {
            holds,
            grant,
            made_for: made_for.collect(),
        }
    }

    pub fn grant(&self) -> Granted {
        self.grant
    }

    pub fn is_round(&self) -> bool {
        self.holds.whose == Whose::Round
    }

    pub fn holds(&self) -> &Holds {
        &self.holds
    }

    /// Returns whether the call may make a change.
    pub fn permits(&self, change: &Change) -> bool {
        !self.harms_others(change) && self.is_for_this_call(change)
    }

    /// Returns whether other claims use the MPS server of a target, or may.
    pub fn is_server_of_others(&self, target: Target) -> bool {
        let mut others = self.holds.others.iter();
        others.any(|other| other.hold.target == target && other.hold.mps.is_some())
            || self.holds.may_be_used_by_unknown(target)
    }

    /// Returns whether a change takes something from another claim, or may.
    pub(crate) fn harms_others(&self, change: &Change) -> bool {
        let Holds {
            others, unknown, ..
        } = &self.holds;
        let any = |harms: &dyn Fn(&Use) -> bool| others.iter().any(harms);
        match change {
            Change::Remove(place) => {
                let target = Target::Partition(*place);
                any(&|other| other.hold.target == target)
                    || self.holds.may_be_used_by_unknown(target)
            }
            Change::StopMps(target) => self.is_server_of_others(*target),
            // That of a claim that is being undone is no claim's any more: a round ends it too.
            Change::RemoveNamespace(name) => {
                any(&|other| other.is_served() && is_named(other, *name))
                    || (*unknown && !self.names(*name))
            }
            Change::SetMigMode(on) => any(&|other| match other.hold.target {
                Target::Gpu => *on,
                Target::Partition(_) => !*on,
            }),
            Change::SetComputeMode(to) => {
                any(&|other| compute_mode::need(&other.hold).is_some_and(|need| need != *to))
            }
            // That of shares is the policy's, which may have changed.
            Change::SetTimeSlice(to) => {
                any(&|other| time_slice::need(&other.hold, None).is_some_and(|need| need != *to))
            }
            // A server that is wedged serves no new program; rules say if it is ended under its
            // clients.
            Change::RestartMps(..)
            | Change::Forget(_)
            | Change::Create(_)
            | Change::StartMps(..)
            | Change::PutNamespace(_) => false,
        }
    }

    /// Returns whether a change is made by this call, and not by another one.
    fn is_for_this_call(&self, change: &Change) -> bool {
        let own = self.holds.own();
        let any = |is_it: &dyn Fn(&Use) -> bool| own.iter().any(is_it);
        let is_round = self.is_round();
        let gets = matches!(self.holds.whose, Whose::Gets(..));
        match change {
            Change::Forget(_) => true,
            // An instance that no record holds stays for its own claim's call. That call also takes
            // what was made for the claim under an allocation of which no record is left.
            Change::Remove(place) => {
                any(&|one| one.own_place() == Some(*place)) || self.is_made_for_own(*place)
            }
            Change::StopMps(target) => {
                is_round
                    || any(&|one| one.hold.target.overlaps(*target))
                    || target
                        .place()
                        .is_some_and(|place| self.is_made_for_own(place))
            }
            Change::RemoveNamespace(name) => is_round || (!gets && self.names(*name)),
            Change::SetMigMode(on) => {
                let needs = any(&|one| mig_mode::need(&one.hold) == Some(*on));
                (gets && needs) || self.gives_mig_mode_back()
            }
            Change::SetComputeMode(to) => {
                (gets && any(&|one| compute_mode::need(&one.hold) == Some(*to)))
                    || (compute_mode::want(self.holds.holds_after()) == Want::Found
                        && !self.holds.unknown)
            }
            Change::SetTimeSlice(to) => {
                let of_shares = self.grant.share_time_slice;
                match time_slice::want(self.holds.holds_after(), of_shares) {
                    Want::To(_) if is_round => true,
                    Want::To(_) => {
                        gets && any(&|one| time_slice::need(&one.hold, of_shares) == Some(*to))
                    }
                    // For other users of the GPU a round gives it back.
                    Want::Found => !self.holds.unknown && (!gets || self.holds.others.is_empty()),
                }
            }
            Change::Create(place) => gets && any(&|one| one.own_place() == Some(*place)),
            Change::StartMps(target, _) | Change::RestartMps(target, _) => {
                let has_it = |one: &Use| one.hold.target == *target && one.hold.mps.is_some();
                is_round || (gets && any(&has_it))
            }
            Change::PutNamespace(namespace) => is_round || (gets && self.names(namespace.name)),
        }
    }

    /// Returns whether a MIG mode that we turned on goes back: in a round, when nothing holds the
    /// GPU and no rule offers partitions of it. An unprepare does not wait for a mode to change.
    pub fn gives_mig_mode_back(&self) -> bool {
        self.is_round()
            && self.holds.others.is_empty()
            && self.made_for.is_empty()
            && !self.holds.unknown
            && !self.grant.offers_partitions
    }

    /// Returns the namespaces of the claim of the call.
    pub(crate) fn own_namespaces(&self) -> impl Iterator<Item = MpsNamespaceName> {
        let own = self.holds.own().iter();
        own.filter_map(|one| Some(one.namespace?.name))
    }

    fn is_made_for_own(&self, place: Place) -> bool {
        let claim = self.holds.claim();
        claim.is_some() && self.made_for.get(&place) == claim
    }

    /// Returns whether the claim of the call has a namespace.
    fn names(&self, name: MpsNamespaceName) -> bool {
        self.holds.own().iter().any(|one| is_named(one, name))
    }
}

fn is_named(one: &Use, name: MpsNamespaceName) -> bool {
    one.namespace
        .is_some_and(|namespace| namespace.name == name)
}

#[cfg(test)]
mod tests;
