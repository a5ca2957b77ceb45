//! The goal of a GPU: the wants of its parts, of all uses after a call, and of nothing else.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{
    ComputeMode, MpsNamespace, MpsNamespaceName, MpsServer, Place, Target, TimeSlice,
};

use crate::holds::Use;
use crate::scope::Scope;
use crate::servers::MpsNote;
use crate::setting::Want;
use crate::{compute_mode, mig_mode, namespaces, servers, time_slice};

/// Target state of a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Goal {
    pub mig: Want<bool>,
    pub compute: Want<ComputeMode>,
    pub slice: Want<TimeSlice>,
    /// MPS servers by target. Any other one ends.
    pub servers: BTreeMap<Target, MpsServer>,
    /// True if an MPS server that is wedged is started anew although it has clients.
    pub restarts_wedged: bool,
    /// Namespaces of the MPS server of the whole GPU, while one is wanted.
    pub namespaces: BTreeMap<MpsNamespaceName, MpsNamespace>,
    /// Places of instances of ours. A noted one that is not named here goes.
    pub instances: BTreeSet<Place>,
}

impl Goal {
    /// Works out the goal from the uses after a call. It depends on uses, permissions and the noted
    /// servers alone, never on the hardware: two calls with the same uses bring the GPU to the same
    /// place, whatever a crash left.
    pub fn of(scope: &Scope, noted: &BTreeMap<Target, MpsNote>) -> Self {
        let (holds, grant) = (scope.holds(), scope.grant());
        let held = holds.holds_after();
        Self {
            mig: mig_mode::want(held.clone()),
            compute: compute_mode::want(held.clone()),
            slice: time_slice::want(held, grant.share_time_slice),
            servers: servers::want(holds.gets(), &holds.others, noted),
            // A round alone: it reports whose programs are hit.
            restarts_wedged: grant.restarts_wedged_mps && scope.is_round(),
            namespaces: namespaces::want(holds.after()),
            instances: holds.after().filter_map(Use::own_place).collect(),
        }
    }
}
