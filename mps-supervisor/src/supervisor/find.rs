//! The daemon of a target, as it is found.

use divvy_model::MpsProtocol;

use super::error::SupervisorError;
use super::files::Files;
use super::programs::Settings;
use crate::note::Note;
use crate::plan::{self, Found};
use crate::process;

/// Returns what is noted of a daemon, and what is found of it.
pub(super) fn find(
    settings: &Settings,
    files: &Files,
) -> Result<(Option<Note>, Found), SupervisorError> {
    let note = files.note()?;
    let process = note
        .as_ref()
        .and_then(|note| process::read(note.daemon.pid));
    let remains = files.dir.exists() || files.pipe(MpsProtocol::V3).exists();
    let found = plan::judge(note.as_ref(), process.as_ref(), remains);
    let (Found::Running(server), Some(of)) = (&found, &note) else {
        return Ok((note, found));
    };
    // A server can die, and its daemon lives on. One of protocol v3 starts no other by itself.
    let found = match server.protocol {
        _ if !settings.servers(files, Some(of.daemon.pid)).is_empty() => found,
        MpsProtocol::V2 => Found::Idle(*server),
        MpsProtocol::V3 => Found::Remains,
    };
    Ok((note, found))
}
