//! The files of one daemon.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use divvy_model::{GpuTarget, MpsProtocol, MpsServer};

use super::error::{SupervisorError, file};
use crate::note::Note;
use crate::{memory, shared};

/// The files of one daemon.
pub(super) struct Files {
    /// UUID of the GPU or partition that a daemon sees which is started. A daemon that runs does
    /// not look at it.
    pub(super) device: String,
    /// The folder of it all.
    pub(super) dir: PathBuf,
    /// The folders of sockets, which containers have mounted: of protocol v2 and of v3.
    pub(super) pipes: [PathBuf; 2],
    /// The memory that its servers share with their clients: the `/dev/shm` of both.
    pub(super) memory: PathBuf,
    pub(super) log: PathBuf,
    pub(super) note: PathBuf,
}

impl Files {
    /// Returns those of a target, in the folder of all.
    pub(super) fn of(all: &Path, target: &GpuTarget) -> Self {
        let dir = all.join(target.to_string());
        let pipe = |protocol: MpsProtocol| all.join(protocol.pipe(target));
        Self {
            device: target.gpu.to_string(),
            pipes: [MpsProtocol::V2, MpsProtocol::V3].map(pipe),
            memory: all.join(MpsServer::memory(target)),
            log: dir.join("log"),
            note: dir.join("daemon.json"),
            dir,
        }
    }

    /// Returns the folder of sockets.
    pub(super) fn pipe(&self, protocol: MpsProtocol) -> &Path {
        let [v2, v3] = &self.pipes;
        match protocol {
            MpsProtocol::V2 => v2,
            MpsProtocol::V3 => v3,
        }
    }

    /// Reads the note.
    pub(super) fn note(&self) -> Result<Option<Note>, SupervisorError> {
        Note::read(&self.note).map_err(|source| file(&self.note, "read", source))
    }

    /// Changes the note, which must be there.
    pub(super) fn change_note(
        &self,
        change: impl FnOnce(&mut Note),
    ) -> Result<(), SupervisorError> {
        let read = self.note()?;
        let missing = || file(&self.note, "read", ErrorKind::NotFound.into());
        let mut note = read.ok_or_else(missing)?;
        change(&mut note);
        note.write(&self.note)
            .map_err(|source| file(&self.note, "written", source))
    }

    /// Removes all that is of a daemon. The folder of the note last: by it the target is known.
    pub(super) fn remove_all(&self) -> Result<(), SupervisorError> {
        for dir in self.pipes.iter().chain([&self.memory]) {
            memory::unbound(dir).map_err(|source| file(dir, "unmounted", source))?;
        }
        remove(self.pipe(MpsProtocol::V3))?;
        remove(&self.dir)
    }
}

pub(super) fn remove(dir: &Path) -> Result<(), SupervisorError> {
    shared::remove(dir).map_err(|source| file(dir, "removed", source))
}
