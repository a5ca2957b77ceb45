//! The logs of a daemon: the lines that say why, and their length.

use std::path::Path;

use crate::shared;

/// So much of the end of a log is read.
const END: u64 = 64 << 10;
/// A log grows with each question, and is in a folder of memory: above this length it is emptied.
const LONGEST: u64 = 1 << 20;
const NAMES: [&str; 2] = ["control.log", "server.log"];
/// Lines of a daemon that was asked something, which say nothing.
const OF_COMMANDS: [&str; 5] = [
    "Accepting connection...",
    "NEW UI",
    "Cmd:",
    "UI closed",
    "Removed Shm file",
];

/// Returns the last line of each log in a folder that says something, as the end of a sentence.
pub(super) fn end_of(folder: &Path) -> String {
    let last = |name: &&str| {
        let text = shared::tail(&folder.join(name), END)?;
        last_of(&text).map(str::to_owned)
    };
    let lines: Vec<String> = NAMES.iter().filter_map(last).collect();
    if lines.is_empty() {
        String::new()
    } else {
        format!(" (its log ends with: {})", lines.join(" / "))
    }
}

/// Returns the last line that says something; the end of a server rather than another, since later
/// questions to the daemon are logged, too.
fn last_of(text: &str) -> Option<&str> {
    let says = |line: &&str| !OF_COMMANDS.iter().any(|one| said(line).starts_with(one));
    let mut lines = text.lines().filter(|line| !line.is_empty()).filter(says);
    let mut ended = lines.clone().filter(|line| is_end(said(line)));
    ended.next_back().or_else(|| lines.next_back())
}

/// Returns a line without its time and process.
fn said(line: &str) -> &str {
    line.split_once("] ").map_or(line, |(_, said)| said)
}

fn is_end(said: &str) -> bool {
    said.starts_with("Server ") && said.contains(" exited with status ")
}

/// Returns whether a daemon has logged that its server with this number serves. A container
/// with its folder of sockets can have it log anything.
pub(super) fn says_ready(folder: &Path, server: u32) -> bool {
    let text = shared::tail(&folder.join("control.log"), LONGEST).unwrap_or_default();
    let ready = format!("NEW SERVER {server}: Ready");
    text.lines().any(|line| said(line) == ready)
}

/// Empties logs that are too long: a daemon goes on at their beginning.
pub(super) fn bound(folder: &Path) {
    for name in NAMES {
        let path = folder.join(name);
        if let Err(error) = shared::empty_above(&path, LONGEST) {
            tracing::warn!(path = %path.display(), %error, "failed to empty a log of MPS");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_that_says_why_is_found_among_those_of_commands() {
        let text = "[2026-11-28 03:30:41.017 Control 28789] Starting new server 7 for user 0
[2026-11-28 03:30:41.018 Control 28789] Server 7 exited with status 1
[2026-11-28 03:30:41.018 Control 28789] Removed Shm file at 
[2026-11-28 03:30:41.021 Control 28789] Accepting connection...
[2026-11-28 03:30:41.021 Control 28789] NEW UI
[2026-11-28 03:30:41.021 Control 28789] Cmd:get_default_active_thread_percentage
[2026-11-28 03:30:41.021 Control 28789] 25.0
[2026-11-28 03:30:41.021 Control 28789] UI closed
";
        let ended = "[2026-11-28 03:30:41.018 Control 28789] Server 7 exited with status 1";
        assert_eq!(last_of(text), Some(ended));
        let other = "[2026-11-28 03:30:41.018 Other 7] Failed to start : no device\n";
        assert_eq!(last_of(other), Some(other.trim()));
        assert_eq!(last_of("[T Control 7] UI closed\n"), None);
    }

    #[test]
    fn a_server_is_ready_by_its_own_number_alone() {
        let dir = tempfile::tempdir().unwrap();
        let line = "[2026-11-28 03:30:41.021 Control 28789] NEW SERVER 28799: Ready\n";
        fs_err::write(dir.path().join("control.log"), line).unwrap();
        assert!(says_ready(dir.path(), 28_799));
        assert!(!says_ready(dir.path(), 2_879));
    }

    #[test]
    fn a_log_that_is_too_long_is_emptied_and_written_on() {
        use std::io::Write;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control.log");
        // As the daemon has it open.
        let mut log = fs_err::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&path)
            .unwrap();
        let length = usize::try_from(LONGEST).unwrap();
        log.write_all(&vec![b'x'; length]).unwrap();
        bound(dir.path());
        assert_eq!(fs_err::metadata(&path).unwrap().len(), LONGEST);
        log.write_all(b"y").unwrap();
        bound(dir.path());
        assert_eq!(fs_err::metadata(&path).unwrap().len(), 0);
        log.write_all(b"z").unwrap();
        assert_eq!(fs_err::read(&path).unwrap(), b"z");
    }
}
