//! Changes of a GPU, how each ended, and what the hardware shows where that is not known.

use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};
use divvy_model::{
    ComputeMode, GpuError, GpuUuid, MigUuid, MpsNamespace, MpsNamespaceName, MpsServer, Place,
    Target, TimeSlice,
};
use serde::{Deserialize, Serialize};

use crate::Retry;
use crate::gpu_state::Life;

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

/// A difference between a GPU and its goal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Drops the note of an instance that is certainly gone. Changes the GPU's file only.
    Forget(Place),
    /// Ends the MPS server of a target, whichever runs, with its namespaces.
    StopMps(Target),
    /// Ends a namespace of the MPS server of the whole GPU, with the clients that are left in it.
    RemoveNamespace(MpsNamespaceName),
    /// Removes an instance of ours, as far as it was made.
    Remove(Place, Life),
    /// Turns MIG mode on or off.
    SetMigMode(bool),
    SetComputeMode(ComputeMode),
    SetTimeSlice(TimeSlice),
    /// Makes a GPU instance at an empty place, and in it a compute instance that takes it whole.
    Create(Place),
    /// Starts an MPS server of a target. On a whole GPU nothing but its clients can compute then.
    StartMps(Target, MpsServer),
    /// Ends an MPS server that is wedged and starts another in its place, where containers find it.
    RestartMps(Target, MpsServer),
    /// Makes a namespace of the MPS server of the whole GPU, or one of another size in its place.
    PutNamespace(MpsNamespace),
}

impl Change {
    /// Returns true if it ends something that keeps its part of the GPU from others: until it is
    /// done, the claim goes on holding.
    pub fn is_removal(&self) -> bool {
        matches!(
            self,
            Self::StopMps(_) | Self::RemoveNamespace(_) | Self::Remove(..)
        )
    }

    /// Returns true if this change cannot succeed, or would do harm, after `failed` was not done.
    pub fn needs(&self, failed: &Self) -> bool {
        let partition = |place: &Place| Target::Partition(*place);
        match (self, failed) {
            // A partition is not taken away under its server, and nothing is made or started in a
            // part of the GPU that a server still has.
            (Self::Remove(place, _) | Self::Create(place), Self::StopMps(other)) => {
                partition(place).overlaps(*other)
            }
            (Self::StartMps(target, _) | Self::RestartMps(target, _), Self::StopMps(other)) => {
                target.overlaps(*other)
            }
            // A server needs its partition.
            (
                Self::StartMps(target, _) | Self::RestartMps(target, _),
                Self::Create(place) | Self::Remove(place, _),
            ) => target.overlaps(partition(place)),
            // MIG mode is not turned off under an instance that is still there. Turning it on needs
            // no instance gone.
            (Self::SetMigMode(on), Self::Remove(..)) => !on,
            // The slices of the old instance are still taken.
            (Self::Create(place), Self::Remove(other, _)) => place.overlaps(*other),
            // There are no instances without MIG mode, and no server is started in a mode in which
            // programs can get round it. No mode changes under a server.
            (Self::Create(_), Self::SetMigMode(_))
            | (
                Self::StartMps(..) | Self::RestartMps(..) | Self::PutNamespace(_),
                Self::SetMigMode(_) | Self::SetComputeMode(_),
            )
            | (Self::SetMigMode(_) | Self::SetComputeMode(_), Self::StopMps(_))
            | (
                Self::PutNamespace(_),
                Self::StopMps(_) | Self::StartMps(..) | Self::RestartMps(..),
            ) => true,
            _ => false,
        }
    }

    /// Returns the change of a GPU in words, as in "failed to …".
    pub fn of(&self, gpu: &GpuUuid) -> String {
        match self {
            Self::Forget(place) => {
                format!(
                    "drop the note of the partition of {} on {gpu}",
                    place.in_words()
                )
            }
            Self::Remove(place, _) => {
                format!("remove the partition of {} on {gpu}", place.in_words())
            }
            Self::StopMps(target) => format!("stop the MPS server of {}", target.of(gpu)),
            Self::RestartMps(target, _) => {
                format!("restart the wedged MPS server of {}", target.of(gpu))
            }
            Self::StartMps(target, server) => {
                let on = target.of(gpu);
                match server.slots {
                    Some(slots) => format!("start an MPS server with {slots} equal slots on {on}"),
                    None if server.has_namespaces() => {
                        format!("start an MPS server with namespaces on {on}")
                    }
                    None => format!("start the MPS server of a claim on {on}"),
                }
            }
            Self::RemoveNamespace(name) => {
                format!("end the namespace {name} of the MPS server of {gpu}")
            }
            Self::PutNamespace(namespace) => {
                let MpsNamespace { name, cores, .. } = namespace;
                format!(
                    "make the namespace {name} of the MPS server of {gpu}, with {cores} percent of the threads"
                )
            }
            Self::SetMigMode(on) => {
                format!("turn MIG mode of {gpu} {}", if *on { "on" } else { "off" })
            }
            Self::SetComputeMode(to) => format!("set compute mode of {gpu} to {to}"),
            Self::SetTimeSlice(to) => format!("set the time slice of {gpu} to {to}"),
            Self::Create(place) => {
                format!("create a partition of {} on {gpu}", place.in_words())
            }
        }
    }
}

/// Why a change was not made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{what}")]
pub struct Cause {
    /// Description for people.
    pub what: String,
    /// Error of the driver, where it was the driver.
    #[source]
    pub source: Option<GpuError>,
    /// Class of retry: it says if and when another attempt can help.
    pub retry: Retry,
}

impl Cause {
    /// Makes a cause in words.
    pub fn new(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            source: None,
            // Without an error of the driver nothing says that it passes by itself.
            retry: Retry::Later,
        }
    }

    /// Makes a cause from an error of the driver.
    pub fn from_gpu(what: impl Into<String>, source: GpuError) -> Self {
        let retry = if source.is_transient() {
            Retry::Soon
        } else {
            Retry::Later
        };
        Self {
            what: what.into(),
            retry,
            source: Some(source),
        }
    }

    /// Makes a cause that lasts: the hardware or its driver cannot do it.
    pub fn unsupported(what: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            source: None,
            retry: Retry::Never,
        }
    }

    /// Returns the same cause, as one that can pass by itself within seconds.
    #[must_use]
    pub fn passing(self) -> Self {
        Self {
            retry: Retry::Soon,
            ..self
        }
    }

    /// Returns true if it can pass by itself within seconds.
    pub fn is_passing(&self) -> bool {
        self.retry == Retry::Soon
    }
}

/// A change that failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    /// It did not happen and will not.
    #[error("it was not done")]
    NotDone(#[source] Cause),
    /// The outcome is unknown: a call past its deadline may still succeed.
    #[error("its outcome is not known")]
    Unknown(#[source] Cause),
}

impl ChangeError {
    /// Returns the cause.
    pub fn cause(&self) -> &Cause {
        match self {
            Self::NotDone(cause) | Self::Unknown(cause) => cause,
        }
    }
}

/// A change that could not be made, in a list that went on past it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stuck {
    pub change: Change,
    pub error: ChangeError,
}

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

#[cfg(test)]
mod tests {
    use super::*;

    /// A partition has a server of its own: what fails beside it does not count.
    #[test]
    fn a_server_and_its_partition_need_each_other_and_no_neighbours() {
        let [one, other] = ["19@0+1", "19@1+1"].map(|place| place.parse::<Place>().unwrap());
        let server = MpsServer::equal(4, Some(9_728)).unwrap();
        let stop = |place| Change::StopMps(Target::Partition(place));
        let start = |place| Change::StartMps(Target::Partition(place), server);
        let remove = |place| Change::Remove(place, Life::Begun);
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
            assert_eq!(change.needs(&failed), expected, "{change:?} {failed:?}");
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
            assert_eq!(put.needs(&failed), start.needs(&failed), "{failed:?}");
        }
        assert!(put.needs(&start));
    }

    /// The slices of an instance that is still there are taken, and MIG mode is not turned off
    /// under it.
    #[test]
    fn what_an_instance_is_in_the_way_of_waits_for_its_end() {
        let [one, over, beside] =
            ["9@0+4", "19@3+1", "19@4+1"].map(|place| place.parse::<Place>().unwrap());
        let failed = Change::Remove(one, Life::Begun);
        for (change, expected) in [
            (Change::Create(over), true),
            (Change::Create(beside), false),
            (Change::SetMigMode(false), true),
            (Change::SetMigMode(true), false),
            (Change::SetTimeSlice(TimeSlice::Long), false),
        ] {
            assert_eq!(change.needs(&failed), expected, "{change:?}");
        }
        assert!(Change::Create(one).needs(&Change::SetMigMode(true)));
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
            (
                Change::Remove(place, Life::Begun),
                "remove the partition of",
                "on GPU-",
            ),
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

    #[test]
    fn a_cause_says_if_it_can_pass_by_itself() {
        assert!(!Cause::new("it is so").is_passing());
        assert!(Cause::new("it is so").passing().is_passing());
        assert!(!Cause::unsupported("it cannot be").is_passing());
    }
}
