//! Errors, each layer with its own part of the message; [`chain`] puts them together.

use std::error::Error;
use std::fmt;
use std::io;
use std::path::PathBuf;

use divvy_cdi::SpecError;
use divvy_claims::{ClaimRef, Refusal};
use divvy_gpu::{ChangeError, Retry};
use divvy_model::{ClaimUid, GpuUuid, chain};
use rustix::io::Errno;

/// Returns the remedy for an IO error of a known kind.
fn advice(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::ReadOnlyFilesystem => {
            " (it is mounted read-only: the plugin's hostPath mounts must be writable)"
        }
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            " (the node's disk is full: free some space)"
        }
        io::ErrorKind::PermissionDenied => {
            " (the plugin must run as root, and the folder must not be immutable)"
        }
        io::ErrorKind::NotFound => {
            " (the folder does not exist: check the plugin's hostPath mounts)"
        }
        _ => "",
    }
}

/// A file of the store could not be used.
#[derive(Debug, thiserror::Error)]
#[error("{what} cannot be {action}{}", advice(source))]
pub struct StoreError {
    /// The file, for people.
    pub what: String,
    /// `read`, `written`, `removed`.
    pub action: &'static str,
    /// The error of the system.
    #[source]
    pub source: io::Error,
}

impl StoreError {
    /// Returns whether the disk is full: files can still be removed.
    pub(crate) fn is_full(&self) -> bool {
        matches!(
            self.source.kind(),
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded
        )
    }

    /// Returns whether the disk does not give the content of this very file any more.
    pub(crate) fn is_bad_block(&self) -> bool {
        let bad = [Errno::IO, Errno::BADMSG, Errno::UCLEAN];
        self.source
            .raw_os_error()
            .is_some_and(|code| bad.iter().any(|bad| bad.raw_os_error() == code))
    }
}

/// A lock could not be had.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another call holds it.
    #[error(
        "another call held the lock of {lock} until the deadline (another plugin instance may hang; check its log)"
    )]
    TimedOut {
        /// The locked thing, for people.
        lock: String,
    },
    /// The lock file cannot be used.
    #[error("the lock file of {lock} cannot be used{}", advice(source))]
    Io {
        /// The locked thing, for people.
        lock: String,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
}

/// The edits of a device could not be worked out: driver files or device nodes are missing.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct EditsError {
    /// The missing thing, and the remedy.
    pub what: String,
    #[source]
    pub source: Option<Box<dyn Error + Send + Sync>>,
}

/// A CDI file could not be made.
#[derive(Debug, thiserror::Error)]
pub enum CdiError {
    /// The content is not known.
    #[error("the container edits of device {device} cannot be determined")]
    Edits {
        /// The device; `(all)` for what all share.
        device: String,
        #[source]
        source: EditsError,
    },
    /// The device's GPU is not in the inventory.
    #[error("{gpu} of device {device} does not answer")]
    NoGpu { device: String, gpu: GpuUuid },
    /// The memory of a share is to be capped, and no program would be called to do it.
    #[error(
        "the memory of device {device} is to be capped, which takes a program that the container runtime calls (set libraryDelivery=hook in divvy's chart)"
    )]
    NoCap { device: String },
    /// The document breaks a rule of CDI.
    #[error("its document is not valid CDI (a bug in divvy; please report it)")]
    Document(#[source] Box<SpecError>),
    /// The file could not be used.
    #[error("CDI file {file} in {folder} cannot be {action}{}", cdi_advice(source))]
    File {
        file: String,
        folder: String,
        /// `read`, `written`, `removed`.
        action: &'static str,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
    /// A file with the metadata of devices could not be used.
    #[error("the device metadata {} cannot be {action}{}", file.display(), advice(source))]
    Metadata {
        file: PathBuf,
        /// `read`, `written`, `removed`.
        action: &'static str,
        /// The error of the system.
        #[source]
        source: io::Error,
    },
}

fn cdi_advice(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::NotFound => {
            " (its parent folder does not exist: mount the host's CDI folder into the plugin, at the path of --cdi-dir)"
        }
        _ => advice(source),
    }
}

impl CdiError {
    /// Returns whether it can pass within seconds: the driver's files may be on their way.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Edits { .. } | Self::NoGpu { .. })
    }
}

/// A claim could not be prepared.
#[derive(Debug)]
pub struct PrepareError {
    pub claim: ClaimRef,
    pub cause: PrepareCause,
}

/// Why a claim could not be prepared.
#[derive(Debug, thiserror::Error)]
pub enum PrepareCause {
    /// It was decided not to.
    #[error(transparent)]
    Refused(Box<Refusal>),
    /// Its locks could not be had.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// An unprepare of the claim came after this prepare.
    #[error("it was unprepared while this call waited (no action required)")]
    Unprepared,
    /// No caller waits for the answer any more.
    #[error("the call was cancelled")]
    Cancelled,
    /// It was deallocated while the call waited.
    #[error("it was deallocated while this call waited (no action required)")]
    Deallocated,
    /// The API did not say whether it was allocated anew while the call waited, for this reason.
    #[error(
        "it may have been allocated again while this call waited, and the API server could not be asked: {0}"
    )]
    NotAsked(String),
    /// Its record cannot be read or was lost, and was not made again in time, and why.
    #[error("its record was lost or cannot be read, and is not rebuilt yet: {0}")]
    Lost(String),
    /// Its record or a GPU's state could not be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its CDI file could not be made.
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// A GPU could not be brought to what the claim needs.
    #[error("failed to {change}")]
    Change { change: String, source: ChangeError },
    /// It failed, and so did taking back what had been done; reconcile goes on with that.
    #[error("{} (undoing it failed too: {undo})", chain(first.as_ref()))]
    Undo {
        /// Why it failed.
        first: Box<PrepareCause>,
        /// The rest that was not undone.
        undo: String,
    },
}

impl fmt::Display for PrepareError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            PrepareCause::Refused(refusal) => refusal.fmt(f),
            _ => write!(f, "claim {} cannot be prepared", self.claim),
        }
    }
}

impl Error for PrepareError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.cause {
            PrepareCause::Refused(refusal) => refusal.source(),
            cause => Some(cause),
        }
    }
}

impl From<Refusal> for PrepareCause {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(Box::new(refusal))
    }
}

impl PrepareCause {
    fn category(&self) -> &'static str {
        match self {
            Self::Refused(refusal) => refusal.category(),
            Self::Lock(_) => "lock",
            Self::Unprepared => "unprepared",
            Self::Cancelled => "cancelled",
            Self::Deallocated => "deallocated",
            Self::NotAsked(_) => "api",
            Self::Lost(_) => "unreadable-record",
            Self::Store(_) => "store",
            Self::Cdi(_) => "cdi",
            Self::Change { source, .. } if source.cause().retry == Retry::Never => "unsupported",
            Self::Change { .. } => "hardware",
            Self::Undo { first, .. } => first.category(),
        }
    }
}

impl PrepareError {
    /// A short stable name, for metrics and conditions.
    pub fn category(&self) -> &'static str {
        self.cause.category()
    }

    /// Returns whether something has to be changed before the claim can be prepared: worth a
    /// condition on the claim.
    pub fn is_permanent(&self) -> bool {
        match &self.cause {
            PrepareCause::Refused(refusal) => refusal.retry() == Retry::Never,
            PrepareCause::Change { source, .. } => source.cause().retry == Retry::Never,
            _ => false,
        }
    }
}

/// A claim could not be unprepared. The kubelet tries again.
#[derive(Debug, thiserror::Error)]
#[error("claim UID {claim} cannot be unprepared")]
pub struct UnprepareError {
    pub claim: ClaimUid,
    #[source]
    pub cause: UnprepareCause,
}

/// Why a claim could not be unprepared.
#[derive(Debug, thiserror::Error)]
pub enum UnprepareCause {
    /// Its locks could not be had.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// Its record or a GPU's state could not be used.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something still uses its devices, and its record could not be made to say so. It holds them
    /// all the same.
    #[error("{reason}, and this could not be recorded")]
    CannotLinger {
        /// The obstacle.
        reason: String,
        /// Why it could not be written.
        #[source]
        source: StoreError,
    },
    /// Its CDI file could not be removed.
    #[error(transparent)]
    Cdi(#[from] CdiError),
}

impl UnprepareError {
    /// A short stable name, for metrics.
    pub fn category(&self) -> &'static str {
        match self.cause {
            UnprepareCause::Lock(_) => "lock",
            UnprepareCause::Store(_) | UnprepareCause::CannotLinger { .. } => "store",
            UnprepareCause::Cdi(_) => "cdi",
        }
    }
}

#[cfg(test)]
mod tests {
    use divvy_claims::Cause;

    use super::*;

    fn store(kind: io::ErrorKind) -> StoreError {
        StoreError {
            what: "the record of claim UID a".to_owned(),
            action: "written",
            source: kind.into(),
        }
    }

    #[test]
    fn errors_of_files_say_how_to_mend_them() {
        let said = |kind| store(kind).to_string();
        let plain = "the record of claim UID a cannot be written";
        assert_eq!(said(io::ErrorKind::Interrupted), plain);
        let advice = [
            (
                io::ErrorKind::PermissionDenied,
                "the plugin must run as root, and the folder must not be immutable",
            ),
            (
                io::ErrorKind::NotFound,
                "the folder does not exist: check the plugin's hostPath mounts",
            ),
            (
                io::ErrorKind::QuotaExceeded,
                "the node's disk is full: free some space",
            ),
        ];
        for (kind, advice) in advice {
            assert_eq!(said(kind), format!("{plain} ({advice})"));
        }
        assert!(store(io::ErrorKind::QuotaExceeded).is_full());
    }

    #[test]
    fn errors_of_a_change_have_the_category_of_their_cause() {
        let failed = |retry| {
            let source = ChangeError::NotDone(Cause {
                retry,
                ..Cause::new("refused")
            });
            let change = "make it".to_owned();
            PrepareCause::Change { change, source }
        };
        let of = |cause: PrepareCause| {
            let claim = ClaimRef {
                uid: "uid-a".parse().unwrap(),
                namespace: "ns".to_owned(),
                name: "a".to_owned(),
            };
            let error = PrepareError { claim, cause };
            (error.category(), error.is_permanent())
        };
        assert_eq!(of(failed(Retry::Never)), ("unsupported", true));
        assert_eq!(of(failed(Retry::Later)), ("hardware", false));
        let undone = PrepareCause::Undo {
            first: Box::new(failed(Retry::Soon)),
            undo: "it is stuck".to_owned(),
        };
        assert_eq!(of(undone), ("hardware", false));
        assert_eq!(of(PrepareCause::Unprepared), ("unprepared", false));
    }

    #[test]
    fn errors_of_an_unprepare_have_the_category_of_their_cause() {
        let of = |cause: UnprepareCause| {
            let claim = "uid-a".parse().unwrap();
            UnprepareError { claim, cause }.category()
        };
        let full = || store(io::ErrorKind::StorageFull);
        assert_eq!(of(full().into()), "store");
        let lingers = UnprepareCause::CannotLinger {
            reason: "process 7".to_owned(),
            source: full(),
        };
        assert_eq!(of(lingers), "store");
        let lock = "claim UID uid-a".to_owned();
        assert_eq!(of(LockError::TimedOut { lock }.into()), "lock");
        let device = "gpu-0".to_owned();
        assert_eq!(of(CdiError::NoCap { device }.into()), "cdi");
    }
}
