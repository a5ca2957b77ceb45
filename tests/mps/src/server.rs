//! The server: it speaks to NVIDIA's daemon as to the stand-in's. NVIDIA's own ends without a GPU.

use std::io;
use std::os::unix::net::UnixStream;
use std::process::ExitCode;
use std::time::Duration;

use super::{FOR_EVER, LOOK, fault, has_fault, log, pipe, sockets};

/// Commands of a daemon to its server.
pub(crate) const END: i32 = 5;
pub(crate) const CLIENTS: i32 = 6;
pub(crate) const THREADS: i32 = 8;
const SET_THREADS: i32 = 9;
const MEMORY: i32 = 11;
const SET_MEMORY: i32 = 12;
pub(crate) const STATE: i32 = 17;
/// Kind of a peer, by its first number.
pub(crate) const IS_SERVER: i32 = 1;

/// The line of a server's log by which it says that it serves.
pub(crate) const STARTED: &str = "Server has started";

/// Serves until it has to end, or the daemon has died.
pub(crate) fn run() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log("server.log", &format!("Failed to start : {error}"));
            ExitCode::FAILURE
        }
    }
}

fn serve() -> io::Result<()> {
    // It is listed from here on.
    if let Some(millis) = fault("connects-after") {
        std::thread::sleep(Duration::from_millis(millis));
    }
    let daemon = sockets::connect(&pipe().join("control"))?;
    rustix::net::sockopt::set_socket_passcred(&daemon, true)?;
    sockets::packet(&mut &daemon)?;
    sockets::send(&daemon, sockets::CREDENTIALS)?;
    // The daemon answers no other caller from here on until this server has said how it is.
    if let Some(millis) = fault("serves-after") {
        std::thread::sleep(Duration::from_millis(millis));
    }
    if has_fault("server-dies") {
        let error = io::Error::other("no CUDA-capable device is detected");
        return Err(error);
    }
    for number in [IS_SERVER, 0] {
        sockets::send(&daemon, &number.to_ne_bytes())?;
    }
    let percent = limits(&daemon)?;
    log("server.log", STARTED);
    while let Ok(asked) = sockets::number(&daemon) {
        if has_fault("mute") {
            std::thread::sleep(FOR_EVER);
        }
        if !answer(&daemon, asked, percent)? {
            return Ok(());
        }
    }
    // It lives on when its daemon has died, as clients have it.
    while pipe().exists() {
        std::thread::sleep(LOOK * 10);
    }
    Ok(())
}

/// Takes its limits and logs them. Returns the one of threads.
fn limits(daemon: &UnixStream) -> io::Result<f64> {
    let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
    let percent = sockets::packet(&mut &*daemon)?;
    let percent = f64::from_ne_bytes(percent.first_chunk().copied().ok_or_else(short)?);
    let line = format!("Active Threads Percentage set to {percent:.1}");
    log("server.log", &line);
    let count = sockets::packet(&mut &*daemon)?;
    let count = i64::from_ne_bytes(count.first_chunk().copied().ok_or_else(short)?);
    for device in 0..count {
        let limit = sockets::packet(&mut &*daemon)?;
        let limit = u64::from_ne_bytes(limit.first_chunk().copied().ok_or_else(short)?);
        if limit > 0 {
            let line =
                format!("Device pinned memory limit for device {device} set to {limit:#x} bytes");
            log("server.log", &line);
        }
    }
    // Priority.
    sockets::number(daemon).map(|_| percent)
}

/// Answers; false where it ends.
fn answer(daemon: &UnixStream, asked: i32, percent: f64) -> io::Result<bool> {
    let clients = i32::try_from(fault("clients").unwrap_or(0)).unwrap_or(0);
    let send = |number: i32| sockets::send(daemon, &number.to_ne_bytes());
    match asked {
        STATE => {
            let is_faulty = has_fault(&format!("fault {}", std::process::id()));
            send(i32::from(!is_faulty))?;
        }
        CLIENTS => {
            send(clients)?;
            for at in 0..clients {
                send(90_000 + at)?;
            }
        }
        THREADS => sockets::send(daemon, &percent.to_ne_bytes())?,
        SET_THREADS => sockets::packet(&mut &*daemon).map(drop)?,
        MEMORY => {
            sockets::packet(&mut &*daemon)?;
            sockets::send(daemon, &0u64.to_ne_bytes())?;
        }
        SET_MEMORY => {
            sockets::packet(&mut &*daemon)?;
            sockets::packet(&mut &*daemon)?;
        }
        END => {
            // A daemon that does not wait for the answer has gone already.
            drop(send(clients));
            return Ok(clients > 0);
        }
        _ => {}
    }
    Ok(true)
}
