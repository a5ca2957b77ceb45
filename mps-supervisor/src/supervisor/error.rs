//! Why a daemon could not be started or ended.

use std::io;
use std::path::{Path, PathBuf};

use divvy_host::DriverRootError;
use divvy_model::{GpuTarget, MpsNamespaceName};

use super::known::{CONTROL, LONGEST, READY_WITHIN, SERVER};
use crate::control::ControlError;

/// Why a daemon could not be started or ended.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error("the NVIDIA driver cannot be found")]
    NoDriver(#[from] DriverRootError),
    #[error("the driver root {} has no {CONTROL} or no {SERVER} (install the driver's compute utilities)", .0.display())]
    NoProgram(PathBuf),
    #[error(
        "the path of the folder of sockets, {}, has {} bytes, and a daemon starts with {LONGEST} at most: choose a shorter driver name",
        .0.display(), .0.as_os_str().len()
    )]
    TooLong(PathBuf),
    #[error("{} cannot be {action}", path.display())]
    File {
        path: PathBuf,
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("the MPS {what} was not there within {READY_WITHIN:.0?}{log}")]
    NotReady { what: &'static str, log: String },
    #[error("the MPS server has ended before it served{log}")]
    Ended { log: String },
    #[error(
        "the MPS of the driver in {} serves programs of one user alone (R535 and R550 do): update the driver",
        .0.display()
    )]
    OneUser(PathBuf),
    #[error("process {pid} of the MPS daemon could not be ended")]
    Stuck { pid: u32 },
    #[error("no MPS server with namespaces runs on {0}")]
    NoServer(GpuTarget),
    #[error("namespace {0} has clients, and limits cannot be changed under them (end them first)")]
    InUse(MpsNamespaceName),
    #[error("namespace {0} could not be ended")]
    Left(MpsNamespaceName),
    #[error("the sockets of namespace {name} are in {}, where they were not expected", found.display())]
    Elsewhere {
        name: MpsNamespaceName,
        found: PathBuf,
    },
}

pub(super) fn file(path: &Path, action: &'static str, source: io::Error) -> SupervisorError {
    SupervisorError::File {
        path: path.to_owned(),
        action,
        source,
    }
}
