//! The uses of a GPU, and the call that is made.

use divvy_model::{ClaimUid, Hold, MpsNamespace, Place, Target};

use crate::instances::Made;

/// The boot in which a claim was prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Since {
    ThisBoot,
    /// A record that was made again may be of any boot.
    Unknown,
    /// Nothing of it is there any more.
    EarlierBoot,
}

/// Phase of a claim's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Standing {
    Preparing,
    Prepared,
    /// Unprepared, and its programs may still run.
    Lingering,
    /// Being undone: its parts go by its own calls.
    Undone,
}

/// A claim's use of a GPU through one device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Use {
    pub hold: Hold,
    /// Namespace that it has of the MPS server of the whole GPU.
    pub namespace: Option<MpsNamespace>,
    /// Partition that its containers were given.
    pub given: Option<Made>,
    pub since: Since,
    pub standing: Standing,
}

impl Use {
    /// Returns the place of a partition that is ours to make.
    pub fn own_place(&self) -> Option<Place> {
        self.hold.target.place().filter(|_| !self.hold.theirs)
    }

    /// Returns whether it is of a claim that may have been prepared in this boot.
    pub(crate) fn may_be_of_this_boot(&self) -> bool {
        self.since != Since::EarlierBoot
    }

    /// Returns whether its server and namespace are to be there. A claim of an earlier boot gets
    /// them by its own call, and a claim that is being undone may have stopped its server already.
    pub(crate) fn is_served(&self) -> bool {
        self.may_be_of_this_boot() && self.standing != Standing::Undone
    }
}

/// Owner of a call: the claim that it is about, or none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Whose {
    /// The claim gets devices, with these uses of the GPU.
    Gets(ClaimUid, Vec<Use>),
    /// The claim lets devices go, with these uses of the GPU.
    LetsGo(ClaimUid, Vec<Use>),
    /// A round of reconcile.
    Round,
}

/// The uses of a GPU, and the call that is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Holds {
    /// Uses of all other claims, in whatever phase: the programs of one that lingers may still run.
    pub others: Vec<Use>,
    /// True if a record that cannot be read may hold the GPU too.
    pub unknown: bool,
    pub whose: Whose,
}

impl Holds {
    /// Returns the claim that the call is about.
    pub(crate) fn claim(&self) -> Option<&ClaimUid> {
        match &self.whose {
            Whose::Gets(claim, _) | Whose::LetsGo(claim, _) => Some(claim),
            Whose::Round => None,
        }
    }

    /// Returns the uses that the call is about.
    pub(crate) fn own(&self) -> &[Use] {
        match &self.whose {
            Whose::Gets(_, uses) | Whose::LetsGo(_, uses) => uses,
            Whose::Round => &[],
        }
    }

    /// Returns the uses that the call's claim gets.
    pub fn gets(&self) -> &[Use] {
        match &self.whose {
            Whose::Gets(_, uses) => uses,
            Whose::LetsGo(..) | Whose::Round => &[],
        }
    }

    /// Returns all uses after the call, those of its claim first.
    pub(crate) fn after(&self) -> impl Iterator<Item = &Use> + Clone {
        self.gets().iter().chain(&self.others)
    }

    /// Returns the holds after the call.
    pub(crate) fn holds_after(&self) -> impl Iterator<Item = &Hold> + Clone {
        self.after().map(|one| &one.hold)
    }

    /// Returns whether a claim whose record cannot be read may use a target, too. A claim that has
    /// a part of the GPU alone shares it with no other.
    pub(crate) fn may_be_used_by_unknown(&self, target: Target) -> bool {
        let excludes =
            |one: &Use| one.hold.target.overlaps(target) && !one.hold.sharing.is_shared();
        self.unknown && !self.own().iter().any(excludes)
    }
}
