//! The note beside a daemon: which process it is, the limits of its server, and those of its
//! namespaces, which the daemon rounds. It lies outside of the folders that containers have
//! mounted, which they can write to.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::Path;

use divvy_files::{Durability, Replace};
use divvy_model::{MigUuid, MpsNamespace, MpsNamespaceName, MpsServer};
use serde::{Deserialize, Serialize};

use crate::process::Process;

/// A process that can be known again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Daemon {
    pub pid: u32,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
    /// File name of its program.
    pub program: String,
}

impl Daemon {
    /// Returns whether it is this process.
    pub fn is(&self, process: &Process) -> bool {
        (self.pid, self.start_ticks, self.program.as_str())
            == (process.pid, process.start_ticks, process.program.as_str())
    }
}

/// The note.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Note {
    pub server: MpsServer,
    /// The partition that it sees; `None` for a whole GPU.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<MigUuid>,
    pub daemon: Daemon,
    /// True once the server was there.
    pub ready: bool,
    /// Namespaces that are there with their limits. Another that the daemon lists is only begun.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub namespaces: BTreeMap<MpsNamespaceName, MpsNamespace>,
}

impl Note {
    /// Reads the note; `None` if there is none, or it cannot be understood: then nothing is known
    /// of the daemon, and what runs is killed as remains.
    pub fn read(path: &Path) -> io::Result<Option<Self>> {
        match fs_err::read(path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Writes the note, whole or not at all.
    pub fn write(&self, path: &Path) -> io::Result<()> {
        // Lazy: after a boot there are no daemons, and the folder is in memory.
        Replace::new(path, path.with_extension("new"), Durability::Lazy)
            .write(&serde_json::to_vec(self)?)
            .map(drop)
    }
}
