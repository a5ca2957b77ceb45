//! The daemon: its life, and what it answers with protocol v2.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::process::{Child, ExitCode};
use std::time::{Duration, Instant};

use rustix::fs::{CWD, FileType, FlockOperation, Mode};
use rustix::net::sockopt::socket_peercred;

use super::answers::Limits;
use super::server::{CLIENTS, END, IS_SERVER, STATE, THREADS};
use super::{FOR_ALL, FOR_EVER, LOOK, has_fault, log, pipe, sockets, start_server, v3};

const LOCK: &str = "control_lock";
const PID_FILE: &str = "nvidia-cuda-mps-control.pid";

/// A connection to the daemon's socket.
struct Caller {
    stream: UnixStream,
    said: Vec<u8>,
}

/// Kind of a caller, as far as it has said.
enum Said {
    /// Not all of it.
    Part,
    Commands(String),
    Server,
}

impl Caller {
    fn listen(&mut self) -> Said {
        loop {
            match sockets::packet(&mut &self.stream) {
                Ok(packet) if packet.is_empty() => {
                    return Said::Commands(String::from_utf8_lossy(&self.said).into_owned());
                }
                Ok(packet) => self.said.extend(packet),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let is_server = self.said.starts_with(sockets::CREDENTIALS);
                    return if is_server { Said::Server } else { Said::Part };
                }
                // Gone without a command.
                Err(_) => return Said::Commands(String::new()),
            }
            if self.said.starts_with(sockets::CREDENTIALS) {
                return Said::Server;
            }
        }
    }
}

/// A server of protocol v2.
struct Server {
    child: Child,
    user: u32,
    /// Once it serves.
    link: Option<UnixStream>,
}

/// State of a daemon.
#[derive(Default)]
struct Daemon {
    /// Connections that have said nothing: with protocol v2 these are clients.
    silent: usize,
    limits: Limits,
    for_all: bool,
    server: Option<Server>,
    /// Set once a server of it has.
    has_failed: bool,
    /// With protocol v3.
    named: Option<v3::Servers>,
}

/// Returns whether a daemon has its files.
pub(crate) fn is_locked() -> bool {
    let Ok(file) = fs_err::File::open(pipe().join(LOCK)) else {
        return false;
    };
    rustix::fs::flock(file.file(), FlockOperation::NonBlockingLockExclusive).is_err()
}

/// Makes the files of a daemon. Returns those that it holds.
fn files() -> io::Result<(fs_err::File, [std::os::unix::net::UnixListener; 2])> {
    let open = |name: &str, mode: u32| {
        let mode = std::fs::Permissions::from_mode(mode);
        fs_err::set_permissions(pipe().join(name), mode)
    };
    let lock = fs_err::File::create(pipe().join(LOCK))?;
    rustix::fs::flock(lock.file(), FlockOperation::NonBlockingLockExclusive)?;
    open(LOCK, 0o666)?;
    for name in ["control_privileged", "log", PID_FILE] {
        drop(fs_err::remove_file(pipe().join(name)));
    }
    let sockets = [
        sockets::listen(&pipe().join("control"))?,
        sockets::listen(&pipe().join("control_privileged"))?,
    ];
    open("control", 0o666)?;
    open("control_privileged", 0o755)?;
    if !has_fault("no-pid-file") {
        // A container can have put anything there.
        drop(fs_err::write(
            pipe().join(PID_FILE),
            std::process::id().to_string(),
        ));
        drop(open(PID_FILE, 0o666));
    }
    rustix::fs::mknodat(CWD, pipe().join("log"), FileType::Fifo, Mode::empty(), 0)?;
    open("log", 0o777)?;
    Ok((lock, sockets))
}

pub(crate) fn run(protocol: &str, for_all: bool) -> ExitCode {
    // Its own session: the end of who started it does not end it.
    let _ = rustix::process::setsid();
    let (_lock, listeners) = files().unwrap();
    say_started();
    let mut callers: Vec<Caller> = Vec::new();
    let mut daemon = Daemon {
        for_all,
        named: (protocol == "3").then(v3::Servers::default),
        ..Daemon::default()
    };
    // Ends with its folder: a test that fails leaves none behind.
    while pipe().exists() {
        let mut came = false;
        for listener in &listeners {
            while let Ok((stream, _)) = listener.accept() {
                let waits = !has_fault("one-at-a-time");
                stream.set_nonblocking(waits).unwrap();
                drop(sockets::send(&stream, sockets::HELLO));
                let said = Vec::new();
                callers.push(Caller { stream, said });
                came = true;
            }
        }
        let mut ready = None;
        for (at, caller) in callers.iter_mut().enumerate() {
            match caller.listen() {
                Said::Part => {}
                said => {
                    ready = Some((at, said));
                    break;
                }
            }
        }
        let Some((at, said)) = ready else {
            // After what a server has said before it ended.
            daemon.look();
            if !came {
                std::thread::sleep(LOOK);
            }
            continue;
        };
        let Caller {
            stream,
            said: first,
        } = callers.remove(at);
        stream.set_nonblocking(false).unwrap();
        daemon.silent = callers.iter().filter(|one| one.said.is_empty()).count();
        match said {
            Said::Server => daemon.take_server(stream, &first),
            Said::Commands(commands) => {
                if let Some(status) = daemon.obey(&stream, &commands) {
                    return status;
                }
            }
            Said::Part => {}
        }
    }
    daemon.end_servers();
    ExitCode::SUCCESS
}

/// Logs that it has started.
fn say_started() {
    let socket = pipe().join("control");
    for line in [
        format!("Starting control daemon using socket {}", socket.display()),
        format!(
            "To connect CUDA applications to this daemon, set env CUDA_MPS_PIPE_DIRECTORY={}",
            pipe().display()
        ),
    ] {
        log("control.log", &line);
    }
}

impl Daemon {
    /// Looks after servers that have ended.
    fn look(&mut self) {
        if let Some(named) = &mut self.named {
            named.accept();
        }
        let Some(server) = &mut self.server else {
            return;
        };
        if let Ok(Some(status)) = server.child.try_wait() {
            let (pid, status) = (server.child.id(), status.code().unwrap_or(0));
            self.has_failed |= status != 0;
            let line = format!("Server {pid} exited with status {status}");
            log("control.log", &line);
            log("control.log", "Removed Shm file at ");
            self.server = None;
        }
    }

    /// Takes a server that has connected, and waits until it serves or ends: no other caller
    /// is answered in between.
    fn take_server(&mut self, stream: UnixStream, first: &[u8]) {
        let kind = match first.get(sockets::CREDENTIALS.len()..) {
            Some(rest) if !rest.is_empty() => Ok(IS_SERVER),
            _ => sockets::number(&stream),
        };
        let pid = socket_peercred(&stream).map_or(0, |peer| peer.pid.as_raw_nonzero().get());
        let Some(server) = &mut self.server else {
            return;
        };
        if kind.is_err() {
            log(
                "control.log",
                "Unable to read new connection type information",
            );
        }
        let is_it = u32::try_from(pid) == Ok(server.child.id());
        if !is_it || kind.ok() != Some(IS_SERVER) || sockets::number(&stream).is_err() {
            return;
        }
        let limits = &self.limits;
        let count = i64::try_from(limits.memory.len()).unwrap_or(0);
        let mut packets = vec![
            limits.percent.to_ne_bytes().to_vec(),
            count.to_ne_bytes().to_vec(),
        ];
        packets.extend(
            limits
                .memory
                .iter()
                .map(|limit| limit.to_ne_bytes().to_vec()),
        );
        packets.push(0i32.to_ne_bytes().to_vec());
        for packet in packets {
            drop(sockets::send(&stream, &packet));
        }
        log("control.log", &format!("NEW SERVER {pid}: Ready"));
        server.link = Some(stream);
    }

    /// Answers commands. Returns how it ends, if it does.
    fn obey(&mut self, caller: &UnixStream, commands: &str) -> Option<ExitCode> {
        if has_fault("hang") && !commands.trim().is_empty() {
            std::thread::sleep(FOR_EVER);
        }
        let peer = socket_peercred(caller).map_or(0, |peer| peer.uid.as_raw());
        let is_owner = peer == 0 || peer == rustix::process::getuid().as_raw();
        for command in commands.lines() {
            log("control.log", &format!("Cmd:{command}"));
            self.look();
            let words: Vec<&str> = command.split_whitespace().collect();
            let answer = match (&mut self.named, &words[..]) {
                (_, ["quit", rest @ ..]) if is_owner => {
                    self.quit(rest);
                    return Some(ExitCode::SUCCESS);
                }
                (Some(named), _) => named.answer(&words),
                (None, _) => self.answer(&words, is_owner, peer),
            };
            for line in answer.lines() {
                log("control.log", line);
            }
            drop(sockets::send(caller, answer.as_bytes()));
        }
        None
    }

    fn quit(&mut self, how: &[&str]) {
        if has_fault("slow-quit") {
            std::thread::sleep(FOR_EVER);
        }
        let within = match *how {
            ["-t", seconds] => {
                log(
                    "control.log",
                    &format!("quit command issued with timeout of {seconds}"),
                );
                Duration::from_secs(seconds.parse().unwrap_or(0))
            }
            _ => FOR_EVER,
        };
        let until = Instant::now() + within;
        while let Some(server) = &mut self.server {
            let clients = server.ask(END).unwrap_or(0);
            if clients == 0 || Instant::now() >= until {
                break;
            }
            std::thread::sleep(LOOK);
        }
        self.end_servers();
        let status = u8::from(self.has_failed);
        log("control.log", &format!("Exit with status {status}"));
        for name in ["log", PID_FILE] {
            drop(fs_err::remove_file(pipe().join(name)));
        }
    }

    fn end_servers(&mut self) {
        if let Some(Server { child, .. }) = &mut self.server {
            drop(child.kill());
            drop(child.wait());
        }
        let named = self.named.as_mut().map(v3::Servers::processes);
        for server in named.into_iter().flatten() {
            drop(server.kill());
            drop(server.wait());
        }
    }

    fn answer(&mut self, words: &[&str], is_owner: bool, peer: u32) -> String {
        let said = match *words {
            [command, ..] if !is_owner && command.starts_with("set_") && !has_fault("no-owner") => {
                Ok(format!(
                    "Insufficient privileges for UID {peer}. Control deamon settings can only be modified by the user started it or by the root user."
                ))
            }
            ["quit", ..] => Ok("Not enough privilege to execute quit command".to_owned()),
            ["get_default_active_thread_percentage"] => Ok(self.percent()),
            ["set_default_active_thread_percentage", ref percent @ ..] => {
                if !has_fault("refuse-limits") {
                    let percent = percent.first().unwrap_or(&"");
                    if let Err(error) = self.limits.set_percent(percent) {
                        log("control.log", &error);
                    }
                }
                Ok(self.percent())
            }
            ["set_default_device_pinned_mem_limit", device, amount] => self
                .limits
                .set_memory(device, amount)
                .map(|()| String::new()),
            ["get_default_device_pinned_mem_limit", device] => self.limits.memory(device),
            ["start_server", "-uid", user] if user.parse::<u32>().is_ok() => {
                self.start_server(user.parse().unwrap_or(0));
                Ok(String::new())
            }
            ["start_server", ..] => {
                Ok("A user id (UID) is required to start a new server".to_owned())
            }
            ["get_server_list"] => {
                let server = self.server.as_ref();
                Ok(server.map_or_else(String::new, |server| server.child.id().to_string()))
            }
            ["ps"] if self.server.is_none() => Ok("Server not found".to_owned()),
            [command, ref rest @ ..] => return self.of_server(command, rest),
            [] => Ok("Unknown command \"\"".to_owned()),
        };
        match said {
            Ok(text) if text.is_empty() => text,
            Ok(text) => text + "\n",
            Err(error) => {
                // Its answer is in the log alone.
                log("control.log", &error);
                String::new()
            }
        }
    }

    fn percent(&self) -> String {
        format!("{:.1}", self.limits.percent)
    }

    /// Answers a command that names a server.
    fn of_server(&mut self, command: &str, rest: &[&str]) -> String {
        let asked = rest.first().and_then(|pid| pid.parse::<u32>().ok());
        let server = self.server.as_mut();
        let server = server.filter(|server| Some(server.child.id()) == asked);
        let unknown = format!("Server {} not found", asked.unwrap_or(0));
        match (command, server) {
            ("get_server_status", _) if has_fault("no-status") => {
                format!("Unknown command \"{command}\"\n")
            }
            ("get_server_status", _) if rest.is_empty() => "A server PID is required\n".to_owned(),
            ("get_client_list", _) if has_fault("refuse-clients") => "Server is busy\n".to_owned(),
            ("terminate_client", None) => format!("{unknown}\n{unknown}!\n1\n"),
            (
                "get_server_status"
                | "get_client_list"
                | "shutdown_server"
                | "get_active_thread_percentage",
                None,
            ) => unknown + "\n",
            ("get_server_status", Some(server)) => server.state() + "\n",
            ("get_client_list", Some(server)) => {
                let known = server.clients();
                let silent = (0..self.silent).map(|at| format!("{}\n", 90_000 + at));
                known.into_iter().chain(silent).collect()
            }
            ("get_active_thread_percentage", Some(server)) => server.percent() + "\n",
            ("terminate_client", Some(_)) => {
                let client = rest.get(1).unwrap_or(&"0");
                format!("Invalid process {client}!\n1\n")
            }
            ("shutdown_server", Some(server)) => {
                if !has_fault("no-status") {
                    let pid = server.child.id();
                    let line = format!("Try shutting down server {pid}, backoff is disabled");
                    log("control.log", &line);
                }
                let _ = server.ask(END);
                String::new()
            }
            _ => format!("Unknown command \"{command}\"\n"),
        }
    }

    fn start_server(&mut self, user: u32) {
        let user = if self.for_all { 0 } else { user };
        match &mut self.server {
            Some(server) if server.user == user => return,
            // One server for one user.
            Some(_) => self.end_servers(),
            None => {}
        }
        self.server =
            start_server(if self.for_all { &[FOR_ALL] } else { &[] }).map(|child| Server {
                child,
                user,
                link: None,
            });
        if let Some(server) = &self.server {
            let pid = server.child.id();
            let line = format!("Starting new server {pid} for user {user}");
            log("control.log", &line);
        }
    }
}

impl Server {
    /// Asks it for a number; the error of one that does not serve.
    fn ask(&self, what: i32) -> io::Result<i32> {
        let link = self.link.as_ref().ok_or(io::ErrorKind::NotConnected)?;
        sockets::send(link, &what.to_ne_bytes())?;
        sockets::number(link)
    }

    /// State of it, in the daemon's words.
    fn state(&self) -> String {
        let state = match self.ask(STATE) {
            Ok(0) => "FAULT",
            Ok(_) => "ACTIVE",
            Err(_) => "INITIALIZING",
        };
        state.to_owned()
    }

    fn clients(&self) -> Vec<String> {
        let count = self.ask(CLIENTS).unwrap_or(0);
        let next = || {
            self.link
                .as_ref()
                .and_then(|link| sockets::number(link).ok())
        };
        let pids = (0..count).map_while(|_| next());
        pids.map(|pid| format!("{pid}\n")).collect()
    }

    fn percent(&self) -> String {
        let asked = self.link.as_ref().and_then(|link| {
            sockets::send(link, &THREADS.to_ne_bytes()).ok()?;
            let packet = sockets::packet(&mut &*link).ok()?;
            packet.first_chunk().copied().map(f64::from_ne_bytes)
        });
        format!("{:.1}", asked.unwrap_or(0.0))
    }
}
