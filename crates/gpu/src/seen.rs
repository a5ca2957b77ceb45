//! The state of a GPU in hardware, as far as it was asked for, and what is asked.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{ComputeMode, GpuError, GpuOp, MigMode, Place, Target, TimeSlice};

use crate::change::Change;
use crate::goal::Goal;
use crate::instances::{self, Filling, Observed};
use crate::scope::Scope;
use crate::servers::{self, MpsSeen};
use crate::setting::Want;
use crate::state::GpuState;
use crate::{compute_mode, mig_mode, time_slice};

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

impl GpuSeen {
    /// Returns a GPU that is just as its notes say: what a round finds if no one else changed it.
    pub fn as_noted(state: &GpuState) -> Self {
        let partition = |target: Target| target.place().and_then(|place| state.partition_at(place));
        Self {
            mig: mig_mode::as_noted(state.mig),
            compute: compute_mode::as_noted(state.compute),
            slice: time_slice::as_noted(state.slice),
            mps: servers::as_noted(&state.mps, partition),
            places: BTreeMap::new(),
            in_flight: None,
        }
    }

    /// Returns true if an MPS server of a target certainly runs.
    pub fn runs(&self, target: Target) -> bool {
        matches!(&self.mps, Some(Ok(running)) if running.contains_key(&target))
    }

    /// Returns what became of an instance that was begun at an empty place, with no call under way.
    pub fn observed(filling: &Filling) -> Observed {
        instances::observed(filling)
    }
}

/// Reading of the compute mode that a call needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskedMode {
    /// The mode as it is now.
    Now,
    /// The mode as it was last read is enough where it is this one.
    Unless(ComputeMode),
}

/// Readings that a call needs: what its goal and the notes name, and nothing else. Most claims
/// change nothing, and then nothing is asked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ask {
    pub mig: bool,
    pub compute: Option<AskedMode>,
    /// The time slice that certainly is in force: it cannot be read.
    pub slice_in_force: Option<TimeSlice>,
    pub servers: bool,
    pub places: BTreeSet<Place>,
    /// True if it matters whether a call is under way: notes are not dropped as contradicted while
    /// one may still set them.
    pub in_flight: bool,
}

impl Ask {
    /// Lists what a call has to read.
    pub fn of(state: &GpuState, goal: &Goal, scope: &Scope) -> Self {
        let (is_round, holds) = (scope.is_round(), scope.holds());
        let sets_mig = match goal.mig {
            Want::To(on) => scope.permits(&Change::SetMigMode(on)),
            Want::Found => false,
        };
        let starts =
            |(target, server): (&Target, &_)| scope.permits(&Change::StartMps(*target, *server));
        let (gpu, exclusive) = (Target::Gpu, ComputeMode::ExclusiveProcess);
        let compute = match goal.compute {
            // For an MPS server it is read now: in another mode programs could get round it.
            Want::To(to) if to == exclusive => {
                let starts = goal
                    .servers
                    .get(&gpu)
                    .is_some_and(|one| starts((&gpu, one)));
                (starts || scope.permits(&Change::SetComputeMode(to))).then_some(AskedMode::Now)
            }
            Want::To(to) => scope
                .permits(&Change::SetComputeMode(to))
                // What was read last is enough while we have changed nothing.
                .then_some(match state.compute {
                    None => AskedMode::Unless(to),
                    Some(_) => AskedMode::Now,
                }),
            Want::Found => state.compute.map(|_| AskedMode::Now),
        };
        // Instances that stay as they are need not be looked at.
        let noted = state.instances.keys();
        let removed = noted.filter(|place| scope.permits(&Change::Remove(**place)));
        let wanted = goal.instances.iter();
        let made = wanted.filter(|place| scope.permits(&Change::Create(**place)));
        Self {
            // A note of ours is compared with the mode, also where nothing is to change: an
            // administrator may have set another one, which is then what was found.
            mig: sets_mig || state.mig.is_some(),
            compute,
            slice_in_force: time_slice::in_force(state.slice, holds.gets(), &holds.others),
            // A round looks for servers that no note names: a file may have been lost.
            servers: is_round || !state.mps.is_empty() || goal.servers.iter().any(starts),
            places: removed.chain(made).copied().collect(),
            in_flight: state.mig.is_some() || state.compute.is_some(),
        }
    }
}

#[cfg(test)]
mod tests {
    use divvy_model::MpsServer;

    use super::*;

    #[test]
    fn a_server_runs_if_it_is_certain_and_of_this_very_target() {
        let partition = Target::Partition("19@2+1".parse().unwrap());
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
