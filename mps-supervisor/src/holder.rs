//! The process that a daemon waits for. A daemon serves one connection to its socket after the
//! other, and every user of the node can connect: one that says nothing stops it for all.

use std::os::fd::RawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::net::SocketAddrUnix;
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::note::Daemon;
use crate::process;

/// Returns the number of the process at the other end of the connection from which a daemon reads
/// just now. `None`: it waits for something else, or what it does cannot be seen.
pub(crate) fn of(daemon: &Daemon, pipe: &Path) -> Option<u32> {
    let held = pidfd_open(
        Pid::from_raw(i32::try_from(daemon.pid).ok()?)?,
        PidfdFlags::empty(),
    )
    .ok()?;
    // Looked at only now: the number may have been given out again.
    process::read(daemon.pid).filter(|process| daemon.is(process))?;
    let tasks = fs_err::read_dir(PathBuf::from(format!("/proc/{}/task", daemon.pid))).ok()?;
    let reads = tasks.flatten().filter_map(|task| {
        let text = fs_err::read_to_string(task.path().join("syscall")).ok()?;
        first_argument(&text)
    });
    // A call whose first argument is no file, or another file, is no wait for a connection.
    let mut peers = reads.filter_map(|file| {
        let connection = pidfd_getfd(&held, file, PidfdGetfdFlags::empty()).ok()?;
        let own = rustix::net::getsockname(&connection).ok()?;
        let own = SocketAddrUnix::try_from(own).ok()?;
        let path = Path::new(std::ffi::OsStr::from_bytes(own.path_bytes()?));
        let peer = rustix::net::sockopt::socket_peercred(&connection).ok()?;
        let peer = u32::try_from(peer.pid.as_raw_nonzero().get()).ok()?;
        (path.parent() == Some(pipe)).then_some(peer)
    });
    peers.find(|peer| is_other(*peer, daemon))
}

/// Returns whether a process is neither the daemon, nor of it, nor a command of this process.
fn is_other(pid: u32, daemon: &Daemon) -> bool {
    let ours = [daemon.pid, std::process::id()];
    !ours.contains(&pid) && process::read(pid).is_none_or(|process| !ours.contains(&process.parent))
}

/// Reads the first argument of the call in which a thread is, as a file's number: the text has the
/// number of the call and its arguments in hexadecimal digits.
fn first_argument(text: &str) -> Option<RawFd> {
    let argument = text.split_whitespace().nth(1)?.strip_prefix("0x")?;
    RawFd::from_str_radix(argument, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_argument_of_a_call_is_read_as_a_file() {
        let call = "47 0x5 0x7ffc1 0x0 0x0 0x0 0x0 0x7ffc0 0x7f00\n";
        for (text, expected) in [
            (call, Some(5)),
            ("7 0x7ffc12345678 0x1 0xffffffff\n", None),
            ("running\n", None),
            ("-1 0x7ffc0 0x7f00\n", Some(0x7ffc0)),
            ("", None),
        ] {
            assert_eq!(first_argument(text), expected, "{text}");
        }
    }
}
