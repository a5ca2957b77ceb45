//! Sockets of packets, as NVIDIA's programs have them.

use std::io::{self, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;

use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// First words of a daemon, and of a server.
pub(crate) const HELLO: &[u8] = b"OUTBHELL\0";
pub(crate) const CREDENTIALS: &[u8] = b"OUTBCRED\0";
/// Longest packet: what a read has no place for is lost.
const PACKET: usize = 64 << 10;

fn socket(flags: SocketFlags) -> io::Result<std::os::fd::OwnedFd> {
    let flags = SocketFlags::CLOEXEC | flags;
    let made = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    Ok(made)
}

/// Listens without waiting.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    let socket = socket(SocketFlags::NONBLOCK)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket.into())
}

pub(crate) fn connect(path: &Path) -> io::Result<UnixStream> {
    let socket = socket(SocketFlags::empty())?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket.into())
}

/// Reads a packet; an empty one is the end.
pub(crate) fn packet(from: &mut &UnixStream) -> io::Result<Vec<u8>> {
    let mut packet = vec![0; PACKET];
    let read = from.read(&mut packet)?;
    packet.truncate(read);
    Ok(packet)
}

/// Reads a packet that has a number at its beginning.
pub(crate) fn number(mut from: &UnixStream) -> io::Result<i32> {
    let packet = packet(&mut from)?;
    let bytes = packet.first_chunk().copied();
    bytes
        .map(i32::from_ne_bytes)
        .ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
}

pub(crate) fn send(mut to: &UnixStream, packet: &[u8]) -> io::Result<()> {
    to.write_all(packet)
}
