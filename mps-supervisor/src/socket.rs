//! The socket of a daemon: which process listens on it.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// Kinds of sockets that a daemon may listen on: those of R535 to R555 do on the first.
const KINDS: [SocketType; 2] = [SocketType::SEQPACKET, SocketType::STREAM];

/// Returns the number of the process that listens on a socket, as the kernel knows it. It is not to
/// be believed to be the daemon's: each process that can write to the folder can listen there.
pub(crate) fn listener(path: &Path) -> io::Result<u32> {
    let peer = rustix::net::sockopt::socket_peercred(connect(path)?)?;
    u32::try_from(peer.pid.as_raw_nonzero().get()).map_err(io::Error::other)
}

/// Connects to a socket, without waiting. A link in its place is not followed, and a listener that
/// accepts no connection is not waited for.
pub fn connect(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let held = rustix::fs::open(path, flags, Mode::empty())?;
    // Of this very file, whatever takes its place, and whatever the length of its path.
    let held_at = PathBuf::from(format!("/proc/self/fd/{}", held.as_raw_fd()));
    let address = SocketAddrUnix::new(&held_at)?;
    let mut refused = Errno::PROTOTYPE;
    for kind in KINDS {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) => return Ok(socket),
            Err(Errno::PROTOTYPE) => {}
            Err(error) => {
                refused = error;
                break;
            }
        }
    }
    Err(refused.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    /// Makes a listener of a kind that takes so many connections that are not accepted.
    fn listen(path: &Path, kind: SocketType, waiting: i32) -> OwnedFd {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None).unwrap();
        rustix::net::bind(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        rustix::net::listen(&socket, waiting).unwrap();
        socket
    }

    #[test]
    fn the_process_that_listens_is_found_on_sockets_of_both_kinds() {
        let dir = tempfile::tempdir().unwrap();
        for (name, kind) in [("a", SocketType::SEQPACKET), ("b", SocketType::STREAM)] {
            let path = dir.path().join(name);
            let _listener = listen(&path, kind, 8);
            assert_eq!(listener(&path).unwrap(), std::process::id(), "{name}");
        }
    }

    #[test]
    fn a_link_a_file_and_a_listener_that_accepts_none_are_no_socket() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let _other = UnixListener::bind(at("other")).unwrap();
        std::os::unix::fs::symlink(at("other"), at("link")).unwrap();
        fs_err::write(at("file"), "7").unwrap();
        for name in ["link", "file", "missing"] {
            assert!(listener(&at(name)).is_err(), "{name}");
        }
        // Its queue is full after one.
        let _deaf = listen(&at("deaf"), SocketType::SEQPACKET, 0);
        let _first = connect(&at("deaf")).unwrap();
        let error = connect(&at("deaf")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
    }
}
