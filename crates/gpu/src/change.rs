//! Changes of a GPU, and why they were not made.

use divvy_model::{
    ComputeMode, GpuError, MpsNamespace, MpsNamespaceName, MpsServer, Place, Target, TimeSlice,
};

/// A difference between a GPU and its goal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// Drops the note of an instance that is certainly gone. Changes the GPU's file only.
    Forget(Place),
    /// Ends the MPS server of a target, whichever runs, with its namespaces.
    StopMps(Target),
    /// Ends a namespace of the MPS server of the whole GPU, with the clients that are left in it.
    RemoveNamespace(MpsNamespaceName),
    /// Removes the noted instance of a place, as far as it was made.
    Remove(Place),
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

/// Class of retry: says if and when another attempt can help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// It can pass within seconds: tried again inside the same call.
    Soon,
    /// It can pass, but not by waiting in the call: the kubelet tries again.
    Later,
    /// Something has to be changed first.
    Never,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_says_if_it_can_pass_by_itself() {
        assert!(!Cause::new("it is so").is_passing());
        assert!(Cause::new("it is so").passing().is_passing());
        assert!(!Cause::unsupported("it cannot be").is_passing());
    }
}
