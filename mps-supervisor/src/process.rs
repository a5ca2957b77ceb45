//! Processes as `/proc` shows them.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open, pidfd_send_signal};

/// A process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    pub pid: u32,
    /// Number of its parent.
    pub parent: u32,
    /// Start time in clock ticks since boot: with the number it names one process.
    pub start_ticks: u64,
    /// File name of its program.
    pub program: String,
}

/// Reads a process; `None` if there is none that lives. A process that has ended and was not waited
/// for does not live.
pub fn read(pid: u32) -> Option<Process> {
    let folder = PathBuf::from(format!("/proc/{pid}"));
    let (parent, start_ticks) = stat(&fs_err::read_to_string(folder.join("stat")).ok()?)?;
    let program = fs_err::read_link(folder.join("exe")).ok()?;
    // Linux says so of a file that was removed, as by an upgrade.
    let name = program.file_name()?.to_string_lossy().into_owned();
    let name = name.trim_end_matches(" (deleted)").to_owned();
    Some(Process {
        pid,
        parent,
        start_ticks,
        program: name,
    })
}

/// Reads parent and start time from the text of `stat`. The name of the program, in parentheses,
/// can have any character in it.
fn stat(text: &str) -> Option<(u32, u64)> {
    let (_, rest) = text.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    if ["Z", "X"].contains(&state) {
        return None;
    }
    let parent = fields.next()?.parse().ok()?;
    // The 22nd field of all; state is the third and parent the fourth.
    Some((parent, fields.nth(17)?.parse().ok()?))
}

/// A file that programs are started from: device and inode. A path says less, since containers have
/// paths of their own.
type File = (u64, u64);

fn file(path: &Path) -> Option<File> {
    let of = fs_err::metadata(path).ok()?;
    Some((of.dev(), of.ino()))
}

/// Programs that were started for one of some folders of sockets. None of them is in a container
/// with a process namespace of its own: such a process can have any environment and, where the
/// driver is mounted, this program too.
struct StartedFor {
    program: Option<File>,
    namespace: Option<File>,
    variables: Vec<Vec<u8>>,
}

impl StartedFor {
    fn new(program: &Path, pipes: &[&Path]) -> Self {
        let variable =
            |pipe: &&Path| [b"CUDA_MPS_PIPE_DIRECTORY=", pipe.as_os_str().as_bytes()].concat();
        Self {
            program: file(program),
            namespace: file(Path::new("/proc/self/ns/pid")),
            variables: pipes.iter().map(variable).collect(),
        }
    }

    /// Returns whether a process is one. The environment last: to read it is to read the memory of
    /// the process, which one of a container could keep from being read.
    fn has(&self, process: &Process) -> bool {
        let folder = PathBuf::from(format!("/proc/{}", process.pid));
        let is = |name: &str, wanted: Option<File>| {
            wanted.is_some() && file(&folder.join(name)) == wanted
        };
        if !is("ns/pid", self.namespace) || !is("exe", self.program) {
            return false;
        }
        let environ = fs_err::read(folder.join("environ")).unwrap_or_default();
        let mut variables = environ.split(|byte| *byte == 0);
        variables.any(|one| self.variables.iter().any(|ours| ours == one))
    }
}

/// Returns the daemons of these folders of sockets, by the file of the control program: also those
/// without a note. A command of the program that runs is a child of this process, and none.
pub fn daemons(program: &Path, pipes: &[&Path]) -> Vec<Process> {
    let wanted = StartedFor::new(program, pipes);
    let is_other = |process: &Process| process.parent != std::process::id();
    let all = all().into_iter().filter_map(read);
    all.filter(|process| is_other(process) && wanted.has(process))
        .collect()
}

/// Returns the servers of a daemon: its children, and processes of this program that were started
/// for one of these folders of sockets, since a daemon that dies leaves them behind.
pub fn servers(daemon: Option<u32>, program: &Path, pipes: &[&Path]) -> Vec<Process> {
    let wanted = StartedFor::new(program, pipes);
    all()
        .into_iter()
        .filter_map(read)
        .filter(|process| Some(process.pid) != daemon)
        .filter(|process| daemon == Some(process.parent) || wanted.has(process))
        .collect()
}

fn all() -> BTreeSet<u32> {
    let entries = fs_err::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect()
}

/// Returns whether this very process lives.
pub fn lives(process: &Process) -> bool {
    read(process.pid).is_some_and(|now| now.start_ticks == process.start_ticks)
}

/// Kills this very process, if it lives.
pub fn kill(process: &Process) -> io::Result<()> {
    let pid = i32::try_from(process.pid).ok().and_then(Pid::from_raw);
    let Some(pid) = pid else { return Ok(()) };
    let killed = match pidfd_open(pid, PidfdFlags::empty()) {
        // Looked at only now: whatever gets the number after this is not what is signalled.
        Ok(held) if lives(process) => pidfd_send_signal(held, Signal::KILL),
        // A kernel before 5.3.
        Err(Errno::NOSYS) if lives(process) => kill_process(pid, Signal::KILL),
        Ok(_) | Err(Errno::NOSYS) => Ok(()),
        Err(error) => Err(error),
    };
    match killed {
        // Gone in between.
        Err(Errno::SRCH) => Ok(()),
        killed => Ok(killed?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_read_with_its_parent_and_start_time() {
        let own = read(std::process::id()).unwrap();
        assert_eq!(own.parent, std::os::unix::process::parent_id());
        assert!(own.start_ticks > 0 && lives(&own), "{own:?}");
        let another = Process {
            start_ticks: own.start_ticks + 1,
            ..own
        };
        assert!(!lives(&another), "its number alone is not enough");
    }

    #[test]
    fn a_name_with_parentheses_and_a_dead_process_are_read() {
        let line = |state: &str| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4194560 9 0 0 0 0 0 0 0 20 0 1 0 5150 1 1 1")
        };
        assert_eq!(stat(&line("S")), Some((1, 5150)));
        assert_eq!(stat(&line("Z")), None);
        assert_eq!(stat("7 (a"), None);
    }
}
