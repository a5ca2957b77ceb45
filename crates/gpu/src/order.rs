//! The one table of the order of changes, and of which change needs which.

use divvy_model::{GpuUuid, Target};

use crate::change::Change;
use crate::{compute_mode, instances, mig_mode, namespaces, servers, time_slice};

/// Stages of a call, in their order. It is safe to stop after any change: what is gone is forgotten
/// first, since NVML gives ids out again; then ends what no claim needs; MIG mode changes only once
/// no instance is left, and instances are made only once it is on; what is started comes last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Stage {
    Forget,
    StopServer,
    EndNamespace,
    Remove,
    MigOff,
    MigOn,
    ComputeMode,
    TimeSlice,
    Create,
    StartServer,
    PutNamespace,
}

/// Stages that a stage needs, in the same part of the GPU: a change cannot succeed, or would do
/// harm, after one of these was not done.
const fn needed(stage: Stage) -> &'static [Stage] {
    use Stage::{ComputeMode, Create, MigOff, MigOn, Remove, StartServer, StopServer};
    match stage {
        // No mode changes under a server, and no partition is taken away under its own.
        Stage::Remove | Stage::MigOn | Stage::ComputeMode => &[StopServer],
        // MIG mode is not turned off under an instance that is still there.
        Stage::MigOff => &[StopServer, Remove],
        // The slices of an old instance are still taken, and there are none without MIG mode.
        Stage::Create => &[StopServer, Remove, MigOff, MigOn],
        // A server needs its partition, and a mode in which no program gets round it.
        Stage::StartServer => &[StopServer, Remove, MigOff, MigOn, ComputeMode, Create],
        Stage::PutNamespace => &[StopServer, MigOff, MigOn, ComputeMode, StartServer],
        Stage::Forget | Stage::StopServer | Stage::EndNamespace | Stage::TimeSlice => &[],
    }
}

/// Returns the stage of a change.
fn stage(change: &Change) -> Stage {
    match change {
        Change::Forget(_) => Stage::Forget,
        Change::StopMps(_) => Stage::StopServer,
        Change::RemoveNamespace(_) => Stage::EndNamespace,
        Change::Remove(_) => Stage::Remove,
        Change::SetMigMode(false) => Stage::MigOff,
        Change::SetMigMode(true) => Stage::MigOn,
        Change::SetComputeMode(_) => Stage::ComputeMode,
        Change::SetTimeSlice(_) => Stage::TimeSlice,
        Change::Create(_) => Stage::Create,
        Change::StartMps(..) | Change::RestartMps(..) => Stage::StartServer,
        Change::PutNamespace(_) => Stage::PutNamespace,
    }
}

/// Returns the part of the GPU that a change is about: a setting is about all of it.
fn part(change: &Change) -> Target {
    match change {
        Change::Forget(place) | Change::Remove(place) | Change::Create(place) => {
            Target::Partition(*place)
        }
        Change::StopMps(target) | Change::StartMps(target, _) | Change::RestartMps(target, _) => {
            *target
        }
        Change::RemoveNamespace(_)
        | Change::SetMigMode(_)
        | Change::SetComputeMode(_)
        | Change::SetTimeSlice(_)
        | Change::PutNamespace(_) => Target::Gpu,
    }
}

/// Puts changes in their order.
pub(crate) fn sort(changes: &mut [Change]) {
    changes.sort_by_key(stage);
}

/// Returns true if a change cannot succeed, or would do harm, after `failed` was not done.
pub fn needs(change: &Change, failed: &Change) -> bool {
    needed(stage(change)).contains(&stage(failed)) && part(change).overlaps(part(failed))
}

impl Change {
    /// Returns true if it ends something that keeps its part of the GPU from others: until it is
    /// done, the claim goes on holding.
    pub fn is_removal(&self) -> bool {
        let ends = [Stage::StopServer, Stage::EndNamespace, Stage::Remove];
        ends.contains(&stage(self))
    }

    /// Returns the change of a GPU in words, as in "failed to …".
    pub fn of(&self, gpu: &GpuUuid) -> String {
        match self {
            Self::Forget(place) => instances::forgotten(*place, gpu),
            Self::Remove(place) => instances::removed(*place, gpu),
            Self::Create(place) => instances::created(*place, gpu),
            Self::StopMps(target) => servers::stopped(*target, gpu),
            Self::RestartMps(target, _) => servers::restarted(*target, gpu),
            Self::StartMps(target, server) => servers::started(*target, *server, gpu),
            Self::RemoveNamespace(name) => namespaces::removed(*name, gpu),
            Self::PutNamespace(namespace) => namespaces::put(namespace, gpu),
            Self::SetMigMode(on) => mig_mode::in_words(*on, gpu),
            Self::SetComputeMode(to) => compute_mode::in_words(*to, gpu),
            Self::SetTimeSlice(to) => time_slice::in_words(*to, gpu),
        }
    }
}

#[cfg(test)]
mod tests {
    use divvy_model::{ComputeMode, MpsNamespace, MpsNamespaceName, MpsServer, Place, TimeSlice};

    use super::*;

    /// A partition has a server of its own: what fails beside it does not count.
    #[test]
    fn a_server_and_its_partition_need_each_other_and_no_neighbours() {
        let [one, other] = ["19@0+1", "19@1+1"].map(|place| place.parse::<Place>().unwrap());
        let server = MpsServer::equal(4, Some(9_728)).unwrap();
        let stop = |place| Change::StopMps(Target::Partition(place));
        let start = |place| Change::StartMps(Target::Partition(place), server);
        let remove = |place| Change::Remove(place);
        for (change, failed, expected) in [
            (remove(one), stop(one), true),
            (remove(one), stop(other), false),
            (Change::Create(one), stop(one), true),
            (Change::Create(one), stop(other), false),
            (Change::Create(one), Change::StopMps(Target::Gpu), true),
            (start(one), Change::Create(one), true),
            (start(one), Change::Create(other), false),
            (start(one), stop(other), false),
            (start(one), remove(one), true),
            (Change::SetMigMode(false), stop(one), true),
        ] {
            assert_eq!(needs(&change, &failed), expected, "{change:?} {failed:?}");
        }
    }

    /// A namespace is not asked for where its server was not started, for whatever reason.
    #[test]
    fn a_namespace_needs_all_that_its_server_needs() {
        let put = Change::PutNamespace(MpsNamespace {
            name: MpsNamespaceName::of(&"a".parse().unwrap(), &"gpu-0-mps".parse().unwrap()),
            cores: 10,
            memory_mib: None,
        });
        let start = Change::StartMps(Target::Gpu, MpsServer::NAMESPACES);
        for failed in [
            Change::StopMps(Target::Gpu),
            Change::SetMigMode(false),
            Change::SetComputeMode(ComputeMode::ExclusiveProcess),
            Change::SetTimeSlice(TimeSlice::Long),
        ] {
            assert_eq!(needs(&put, &failed), needs(&start, &failed), "{failed:?}");
        }
        assert!(needs(&put, &start));
    }

    /// The slices of an instance that is still there are taken, and MIG mode is not turned off
    /// under it.
    #[test]
    fn what_an_instance_is_in_the_way_of_waits_for_its_end() {
        let [one, over, beside] =
            ["9@0+4", "19@3+1", "19@4+1"].map(|place| place.parse::<Place>().unwrap());
        let failed = Change::Remove(one);
        for (change, expected) in [
            (Change::Create(over), true),
            (Change::Create(beside), false),
            (Change::SetMigMode(false), true),
            (Change::SetMigMode(true), false),
            (Change::SetTimeSlice(TimeSlice::Long), false),
        ] {
            assert_eq!(needs(&change, &failed), expected, "{change:?}");
        }
        assert!(needs(&Change::Create(one), &Change::SetMigMode(true)));
    }

    #[test]
    fn a_change_is_said_as_the_end_of_failed_to() {
        let gpu: GpuUuid = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
        let place: Place = "19@0+1".parse().unwrap();
        let name = MpsNamespaceName::of(&"a".parse().unwrap(), &"gpu-0-mps".parse().unwrap());
        let namespace = MpsNamespace {
            name,
            cores: 30,
            memory_mib: None,
        };
        let slots = MpsServer::equal(4, None).unwrap();
        let own = MpsServer::of_claim(None, None);
        let start = |server| Change::StartMps(Target::Gpu, server);
        for (change, begin, part) in [
            (
                Change::Forget(place),
                "drop the note of the partition of",
                "profile 19 at 0+1",
            ),
            (Change::Remove(place), "remove the partition of", "on GPU-"),
            (Change::Create(place), "create a partition of", "on GPU-"),
            (
                Change::StopMps(Target::Gpu),
                "stop the MPS server of",
                "GPU-",
            ),
            (start(slots), "start an MPS server with", "4 equal slots on"),
            (
                start(MpsServer::NAMESPACES),
                "start an MPS server with",
                "namespaces on",
            ),
            (start(own), "start the MPS server of a claim", "on GPU-"),
            (
                Change::RestartMps(Target::Gpu, own),
                "restart the wedged MPS server of",
                "GPU-",
            ),
            (
                Change::PutNamespace(namespace),
                "make the namespace c_",
                "30 percent",
            ),
            (
                Change::RemoveNamespace(name),
                "end the namespace c_",
                "GPU-",
            ),
            (Change::SetMigMode(true), "turn MIG mode of", "on"),
            (Change::SetMigMode(false), "turn MIG mode of", "off"),
            (
                Change::SetComputeMode(ComputeMode::Default),
                "set compute mode of",
                "to",
            ),
            (
                Change::SetTimeSlice(TimeSlice::Long),
                "set the time slice of",
                "Long",
            ),
        ] {
            let text = change.of(&gpu);
            assert!(text.starts_with(begin) && text.contains(part), "{text}");
            let is_removal = ["remove", "stop", "end"];
            let says = is_removal.iter().any(|verb| text.starts_with(verb));
            assert_eq!(change.is_removal(), says, "{text}");
        }
    }
}
