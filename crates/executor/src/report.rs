//! Report of what reconcile and restore did, for logs, Events and metrics.

use std::error::Error;

use divvy_claims::ClaimRef;
use divvy_model::{ClaimUid, GpuUuid, MpsFault, MpsHolder, Target};
use serde::Serialize;

use crate::{LockError, UnprepareCause, chain};

/// A thing that was done, or could not be.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "event", rename_all = "camelCase")]
pub enum Event {
    /// A CDI file had vanished or was out of date.
    CdiRestored { claim: ClaimUid },
    /// The CDI file of a claim was removed because a partition of it is gone: a container that
    /// starts again must not get the device nodes of another instance.
    CdiWithdrawn { claim: ClaimUid },
    /// A record of an earlier boot was carried out again.
    ExecutedAgain { claim: ClaimUid },
    /// A prepare that a crash had cut short was taken back.
    TakenBack { claim: ClaimUid },
    /// A lingering claim let its devices go.
    Released { claim: ClaimUid },
    /// A claim that no pod uses any more, and that was never unprepared, was undone.
    OrphanUndone { claim: ClaimUid },
    /// A claim has other pods than its record had.
    PodsChanged { claim: ClaimUid },
    /// A record was made again from the API.
    Rebuilt { claim: ClaimUid },
    /// A record that could not be read, of a claim that is gone, was set aside.
    SetAside {
        claim: ClaimUid,
        /// The damage.
        reason: String,
    },
    /// A CDI file of ours without a record was removed.
    CdiRemoved { file: String },
    /// A GPU is no longer fenced.
    FenceCleared { gpu: GpuUuid },
    /// A GPU has the MIG mode, time slice or compute mode back that it had before claims needed
    /// another.
    SettingsGivenBack { gpu: GpuUuid },
    /// The MPS server of a GPU had ended under its claims or was wedged, and was started again: the
    /// programs of before have lost what they had on the GPU.
    MpsServerRestarted {
        gpu: GpuUuid,
        /// Claims that had it.
        claims: Vec<ClaimRef>,
    },
    /// An MPS server has not served for long: programs that use it have failed, and no other can
    /// connect.
    MpsServerWedged {
        gpu: GpuUuid,
        target: Target,
        fault: MpsFault,
        /// The process that holds it up, with [`MpsFault::Held`].
        holder: Option<MpsHolder>,
        /// Claims that have it.
        claims: Vec<ClaimRef>,
    },
    /// An MPS server that was wedged serves again by itself.
    MpsServerServes { gpu: GpuUuid, target: Target },
    /// A claim holds on to its devices although it should not need them; looked at again next time.
    Kept { claim: ClaimUid, why: String },
    /// Something failed; tried again next time.
    Failed {
        /// The claim that it is about, if any.
        claim: Option<ClaimUid>,
        /// The error with all causes.
        error: String,
    },
}

impl Event {
    /// Something about a claim, or about none, failed.
    pub(crate) fn failed(claim: Option<&ClaimUid>, error: &dyn Error) -> Self {
        Self::Failed {
            claim: claim.cloned(),
            error: chain(error),
        }
    }

    /// Returns the outcome of a look at a claim. A claim that another call is working on is left
    /// for the next time.
    pub(crate) fn of(claim: &ClaimUid, done: Result<Option<Self>, UnprepareCause>) -> Option<Self> {
        match done {
            Err(UnprepareCause::Lock(LockError::TimedOut { .. })) => None,
            done => done.unwrap_or_else(|error| Some(Self::failed(Some(claim), &error))),
        }
    }
}

/// Things that were done, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// An entry for each.
    pub events: Vec<Event>,
    /// True if a GPU that is due was left out, since another call was working on it: that call may
    /// have failed, so that the caller looks again soon.
    pub left_out: bool,
}

impl Report {
    /// Returns whether something failed or was left out, so that it is due again soon.
    pub fn is_open(&self) -> bool {
        let failed = |event: &Event| matches!(event, Event::Failed { .. });
        self.left_out || self.events.iter().any(failed)
    }
}
