//! Stand-in for `nvidia-cuda-mps-control` and `nvidia-cuda-mps-server`, protocols v2 and v3 (`v3`):
//! its file name says which of the two it is. For tests; it computes nothing. With protocol v2 it
//! answers as the programs of R535, R550 and R555 do (`golden`, and `cargo xtask nvidia`), and with
//! v3 by the tables of `reference/limits.md` 5.2. The server speaks to NVIDIA's own daemon, too.
//!
//! Each connection to the socket of a namespace is a client of it, and with protocol v2 each silent
//! one to the daemon's; NVIDIA's daemon answers no other caller until such a one has gone. GPUs
//! that are not in a file `gpus` beside it, if there is one, are not known to a server of v3.
//!
//! Faults are words in a file `faults` beside it.
//! - Older drivers: `no-v3`, `no-multiuser` (no daemon for all users, and other arguments than `-d`
//!   are taken for those of the command line), `no-pid-file` (the daemon writes its number into no
//!   file), `no-status` (states of servers are not known), `no-owner` (any user sets limits).
//!   `short-flag`: the flag for all users is `-M` alone.
//! - Daemon: `refuse-start` (it does not start), `slow-quit` (`quit` never ends), `refuse-limits`
//!   (the limit of threads is not taken), `hang` (no command ends), `sticky` (a namespace is not
//!   ended), `elsewhere` (the sockets of a namespace are in another folder), `refuse-clients`
//!   (clients are not listed), `refuse-lists` (servers and namespaces are not), `refuse-folder`
//!   (the sockets of a namespace are not named), `one-at-a-time` (a silent connection keeps the
//!   daemon from all others, as with NVIDIA's).
//! - Server: `server-dies` (each ends before it serves), `connects-after MS` and `serves-after MS`
//!   (milliseconds of its start), `mute` (it answers nothing), `clients N`, `fault PID` (the server
//!   with this number is in the state FAULT, for as long as the words are there).

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for tests"
)]

mod answers;
mod daemon;
mod server;
mod sockets;
mod v3;

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

const SERVER: &str = "nvidia-cuda-mps-server";
const LOOK: Duration = Duration::from_millis(5);
/// Far longer than any test.
const FOR_EVER: Duration = Duration::from_mins(10);
/// The flag of a daemon, and of its server, for all users.
const FOR_ALL: &str = "-multiuser-server";
const HELP: &str = "CUDA MPS Control for Linux/Unix.
Copyright (C) 2003 - 2024 of a stand-in.";

fn main() -> ExitCode {
    let exe = std::env::current_exe().unwrap();
    let args: Vec<String> = std::env::args().skip(1).collect();
    if exe.file_name() == Some(OsStr::new(SERVER)) {
        return match &args[..] {
            [of_v3, gpus] if of_v3 == v3::GPUS => v3::server(gpus),
            // With the flag for all users, which NVIDIA's daemon hands on.
            _ => server::run(),
        };
    }
    let is_old = has_fault("no-multiuser");
    let has_v3 = !has_fault("no-v3");
    let flag = if has_fault("short-flag") {
        "-M"
    } else {
        FOR_ALL
    };
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--as-daemon", protocol] => daemon::run(protocol, false),
        ["--as-daemon", protocol, _] => daemon::run(protocol, true),
        ["-d"] => start("2", false),
        [one, "-d"] | ["-d", one] if one == flag && !is_old => start("2", true),
        ["-p", "3", "-m", "-d"] if has_v3 => start("3", true),
        ["-p", "3", "-q"] if has_v3 => client("quit"),
        ["-p", "3", ref words @ ..] if has_v3 && !words.is_empty() => client(&words.join(" ")),
        ref others if others.is_empty() || is_old => {
            let mut commands = String::new();
            std::io::stdin().read_to_string(&mut commands).unwrap();
            client(&commands)
        }
        _ => {
            println!("{HELP}");
            ExitCode::FAILURE
        }
    }
}

fn folder(variable: &str) -> PathBuf {
    PathBuf::from(std::env::var_os(variable).unwrap_or_else(|| "/tmp/nvidia-mps".into()))
}

fn pipe() -> PathBuf {
    folder("CUDA_MPS_PIPE_DIRECTORY")
}

fn faults() -> String {
    let file = std::env::current_exe().unwrap().with_file_name("faults");
    fs_err::read_to_string(file).unwrap_or_default()
}

fn has_fault(fault: &str) -> bool {
    faults().lines().any(|line| line == fault)
}

/// Returns the number after a fault word.
fn fault(word: &str) -> Option<u64> {
    let faults = faults();
    let mut numbers = faults.lines().filter_map(|line| {
        let (name, number) = line.split_once(' ')?;
        number.parse().ok().filter(|_| name == word)
    });
    numbers.next()
}

fn log(file: &str, line: &str) {
    let path = folder("CUDA_MPS_LOG_DIRECTORY").join(file);
    let opened = fs_err::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path);
    if let Ok(mut file) = opened {
        let who = if file.path().ends_with("control.log") {
            "Control"
        } else {
            "Other"
        };
        let own = std::process::id();
        let text = format!("[2026-11-26 12:00:00.000 {who} {own:5}] {line}\n");
        drop(file.write_all(text.as_bytes()));
    }
}

/// `-d`: goes on in the background once the daemon answers.
fn start(protocol: &str, for_all: bool) -> ExitCode {
    if daemon::is_locked() {
        println!("An instance of this daemon is already running");
        return ExitCode::FAILURE;
    }
    if has_fault("refuse-start") {
        log("control.log", "Failed to initialize MPS control daemon");
        return ExitCode::FAILURE;
    }
    drop(fs_err::remove_file(pipe().join("control")));
    let started = Command::new(std::env::current_exe().unwrap())
        .args(["--as-daemon", protocol])
        .args(for_all.then_some("for-all"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut child = started.unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until && child.try_wait().unwrap().is_none() {
        // Its last file.
        if pipe().join("log").exists() && sockets::connect(&pipe().join("control")).is_ok() {
            return ExitCode::SUCCESS;
        }
        std::thread::sleep(LOOK);
    }
    ExitCode::FAILURE
}

/// Gives commands to the daemon.
fn client(commands: &str) -> ExitCode {
    let Ok(daemon) = sockets::connect(&pipe().join("control")) else {
        eprintln!("Cannot find MPS control daemon process");
        return ExitCode::FAILURE;
    };
    match spoken(&daemon, commands) {
        Ok(answer) => {
            print!("{answer}");
            ExitCode::SUCCESS
        }
        Err(_) => ExitCode::FAILURE,
    }
}

fn spoken(daemon: &UnixStream, commands: &str) -> std::io::Result<String> {
    let mut answer = Vec::new();
    sockets::packet(&mut &*daemon)?;
    if !commands.is_empty() {
        sockets::send(daemon, commands.as_bytes())?;
    }
    daemon.shutdown(Shutdown::Write)?;
    loop {
        match sockets::packet(&mut &*daemon)? {
            packet if packet.is_empty() => break,
            packet => answer.extend(packet),
        }
    }
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Starts a server.
fn start_server(args: &[&str]) -> Option<Child> {
    let program = std::env::current_exe().unwrap().with_file_name(SERVER);
    let mut command = Command::new(program);
    command
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    // Its file was copied a moment ago, and a child of the copying process may have it open still.
    let mut started = command.spawn();
    while started
        .as_ref()
        .is_err_and(|error| error.kind() == std::io::ErrorKind::ExecutableFileBusy)
    {
        std::thread::sleep(LOOK);
        started = command.spawn();
    }
    let failed = |error| {
        let line = format!("Failed to start the server: {error}");
        log("control.log", &line);
    };
    started.map_err(failed).ok()
}
