//! A stand-in for `nvidia-cuda-mps-control` and `nvidia-cuda-mps-server`, protocols v2 and v3
//! (`v3`), by the tables of `reference/limits.md` 5.1 and 5.2: which of the two it is, its file
//! name says. For tests; it computes nothing. Each connection to the socket of a namespace is a
//! client of it, and with protocol v2 each one to the daemon's that says nothing. GPUs that are not
//! in a file `gpus` beside it, if there is one, are not known to a server.
//!
//! Faults are words in a file `faults` beside it: `refuse-start` (the daemon does not start),
//! `server-dies` (each server ends at once), `slow-quit` (`quit` never ends), `refuse-limits` (the
//! limit of threads is refused), `hang` (no command ends), `no-v3` (an older driver), `sticky` (a
//! namespace is not ended), `refuse-clients` (clients are not listed), `fault PID` (the server with
//! this number is in the state FAULT, for as long as the words are there), `no-pid-file` (the
//! daemon writes its number nowhere, as that of R535), `elsewhere` (the sockets of a namespace are
//! in another folder), `one-at-a-time` (a connection that says nothing keeps the daemon from all
//! others, as with NVIDIA's).

#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a program for tests"
)]

mod v3;

use std::ffi::OsStr;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use divvy_mps_supervisor::socket;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

const SERVER: &str = "nvidia-cuda-mps-server";
const LOOK: Duration = Duration::from_millis(5);
/// Far longer than any test.
const FOR_EVER: Duration = Duration::from_mins(10);

fn main() -> ExitCode {
    let exe = std::env::current_exe().unwrap();
    let args: Vec<String> = std::env::args().skip(1).collect();
    if exe.file_name() == Some(OsStr::new(SERVER)) {
        return server(args.first().map_or("", |gpus| gpus.as_str()));
    }
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--as-daemon", protocol] => daemon(protocol),
        ["-M", "-d"] | ["-d", "-M"] | ["-d"] => start("2"),
        ["-p", "3", ..] if has_fault("no-v3") => {
            println!("nvidia-cuda-mps-control: invalid option -- 'p'");
            ExitCode::FAILURE
        }
        ["-p", "3", "-m", "-d"] => start("3"),
        ["-p", "3", "-q"] => client("quit"),
        ["-p", "3", ref words @ ..] if !words.is_empty() => client(&words.join(" ")),
        [] => {
            let mut commands = String::new();
            std::io::stdin().read_to_string(&mut commands).unwrap();
            client(&commands)
        }
        _ => {
            eprintln!("unknown arguments: {args:?}");
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

fn has_fault(fault: &str) -> bool {
    let file = std::env::current_exe().unwrap().with_file_name("faults");
    fs_err::read_to_string(file).is_ok_and(|text| text.lines().any(|line| line == fault))
}

fn log(file: &str, line: &str) {
    let path = folder("CUDA_MPS_LOG_DIRECTORY").join(file);
    let opened = fs_err::OpenOptions::new()
        .create(true)
        .append(true)
        .open(path);
    if let Ok(mut file) = opened {
        drop(writeln!(
            file,
            "[2026-11-26 12:00:00.000 {}] {line}",
            std::process::id()
        ));
    }
}

/// `-d`: goes on in the background once the daemon answers.
fn start(protocol: &str) -> ExitCode {
    let socket = pipe().join("control");
    if socket::connect(&socket).is_ok() {
        println!("An instance of this daemon is already running");
        return ExitCode::FAILURE;
    }
    if has_fault("refuse-start") {
        log("control.log", "Failed to initialize MPS control daemon");
        return ExitCode::FAILURE;
    }
    drop(fs_err::remove_file(&socket));
    let started = Command::new(std::env::current_exe().unwrap())
        .args(["--as-daemon", protocol])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn();
    let mut child = started.unwrap();
    let until = Instant::now() + Duration::from_secs(5);
    while Instant::now() < until && child.try_wait().unwrap().is_none() {
        if socket::connect(&socket).is_ok() {
            return ExitCode::SUCCESS;
        }
        std::thread::sleep(LOOK);
    }
    ExitCode::FAILURE
}

/// Gives commands to the daemon.
fn client(commands: &str) -> ExitCode {
    let Ok(daemon) = socket::connect(&pipe().join("control")) else {
        println!("Cannot find MPS control daemon process");
        return ExitCode::FAILURE;
    };
    let mut daemon = UnixStream::from(daemon);
    let mut answer = Vec::new();
    let spoken = daemon
        .set_nonblocking(false)
        .and_then(|()| daemon.write_all(commands.as_bytes()))
        .and_then(|()| daemon.shutdown(Shutdown::Write))
        .and_then(|()| packets(&mut daemon, &mut answer));
    print!("{}", String::from_utf8_lossy(&answer));
    if spoken.is_ok() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// Longest packet: what a read has no place for is lost.
const PACKET: usize = 64 << 10;

/// Reads packets to their end.
fn packets(from: &mut UnixStream, into: &mut Vec<u8>) -> std::io::Result<()> {
    let mut packet = vec![0; PACKET];
    loop {
        match from.read(&mut packet)? {
            0 => return Ok(()),
            read => into.extend(packet.iter().take(read)),
        }
    }
}

/// Listens on a socket of the kind that NVIDIA's daemons have, without waiting.
fn listen(path: &Path) -> std::io::Result<UnixListener> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let kind = SocketType::SEQPACKET;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, kind, flags, None)?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket.into())
}

/// State of a server, in the daemon's words.
fn state_of(server: u32) -> &'static str {
    if has_fault(&format!("fault {server}")) {
        "FAULT"
    } else if has_started(server) {
        "ACTIVE"
    } else {
        "INITIALIZING"
    }
}

/// A connection to the daemon's socket.
struct Caller {
    stream: UnixStream,
    said: Vec<u8>,
}

impl Caller {
    /// Reads on. Returns the commands once all are there.
    fn commands(&mut self) -> Option<String> {
        match packets(&mut self.stream, &mut self.said) {
            Ok(()) => Some(String::from_utf8_lossy(&self.said).into_owned()),
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => None,
            // Gone without a command.
            Err(_) => Some(String::new()),
        }
    }
}

/// State of a daemon.
struct Daemon {
    /// Connections that have said nothing: with protocol v2 these are clients.
    clients: usize,
    percent: f64,
    memory: Option<u64>,
    servers: Vec<Child>,
    /// With protocol v3.
    named: Option<v3::Servers>,
}

fn daemon(protocol: &str) -> ExitCode {
    // Its own session: the end of who started it does not end it.
    let _ = rustix::process::setsid();
    let socket = pipe().join("control");
    let listener = listen(&socket).unwrap();
    let file = pipe().join("nvidia-cuda-mps-control.pid");
    if !has_fault("no-pid-file") {
        // A container can have put anything there.
        drop(fs_err::write(&file, std::process::id().to_string()));
    }
    log(
        "control.log",
        &format!("Starting control daemon using socket {}", socket.display()),
    );
    let mut callers: Vec<Caller> = Vec::new();
    let mut daemon = Daemon {
        clients: 0,
        percent: 100.0,
        memory: None,
        servers: Vec::new(),
        named: (protocol == "3").then(v3::Servers::default),
    };
    // Ends with its folder: a test that fails leaves none behind.
    while pipe().exists() {
        if let Some(named) = &mut daemon.named {
            named.accept();
        }
        let mut came = false;
        while let Ok((stream, _)) = listener.accept() {
            stream.set_nonblocking(!has_fault("one-at-a-time")).unwrap();
            let said = Vec::new();
            callers.push(Caller { stream, said });
            came = true;
        }
        let mut ready = None;
        for (at, caller) in callers.iter_mut().enumerate() {
            if let Some(commands) = caller.commands() {
                ready = Some((at, commands));
                break;
            }
        }
        let Some((at, commands)) = ready else {
            if !came {
                std::thread::sleep(LOOK);
            }
            continue;
        };
        let mut caller = callers.remove(at).stream;
        caller.set_nonblocking(false).unwrap();
        daemon.clients = callers.iter().filter(|one| one.said.is_empty()).count();
        if has_fault("hang") && !commands.trim().is_empty() {
            std::thread::sleep(FOR_EVER);
        }
        for command in commands.lines().filter(|line| !line.trim().is_empty()) {
            log("control.log", &format!("Cmd:{command}"));
            let words: Vec<&str> = command.split_whitespace().collect();
            if words.first() == Some(&"quit") {
                if has_fault("slow-quit") {
                    std::thread::sleep(FOR_EVER);
                }
                daemon.end_servers();
                drop(fs_err::remove_file(&file));
                drop(fs_err::remove_file(&socket));
                return ExitCode::SUCCESS;
            }
            let answer = match &mut daemon.named {
                Some(named) => named.answer(&words),
                None => daemon.answer(&words),
            };
            drop(caller.write_all(answer.as_bytes()));
        }
    }
    daemon.end_servers();
    ExitCode::SUCCESS
}

impl Daemon {
    fn end_servers(&mut self) {
        let named = self.named.as_mut().map(v3::Servers::processes);
        for server in self.servers.iter_mut().chain(named.into_iter().flatten()) {
            drop(server.kill());
            drop(server.wait());
        }
    }

    fn answer(&mut self, words: &[&str]) -> String {
        match *words {
            ["get_default_active_thread_percentage"] => format!("{:.1}\n", self.percent),
            ["set_default_active_thread_percentage", percent] => match percent.parse::<f64>() {
                Ok(percent) if percent > 0.0 && percent <= 100.0 && !has_fault("refuse-limits") => {
                    self.percent = percent;
                    format!("{percent:.1}\n")
                }
                _ => "Invalid active thread percentage\n".to_owned(),
            },
            ["set_default_device_pinned_mem_limit", device, amount] => {
                match bytes(amount) {
                    // By UUID it is taken, and ignored.
                    Some(_) if device.parse::<u32>().is_err() => String::new(),
                    Some(bytes) => {
                        self.memory = Some(bytes);
                        String::new()
                    }
                    None => "Invalid device memory limit\n".to_owned(),
                }
            }
            ["get_default_device_pinned_mem_limit", _] => match self.memory {
                // Rounded down, from 1 GiB on to whole ones.
                Some(bytes) if bytes >= 1 << 30 => format!("{}G\n", bytes >> 30),
                Some(bytes) => format!("{}M\n", bytes >> 20),
                None => "0M\n".to_owned(),
            },
            ["start_server", "-uid", _] => {
                self.start_server();
                String::new()
            }
            ["get_server_list"] => {
                self.servers
                    .retain_mut(|server| matches!(server.try_wait(), Ok(None)));
                let pids = self
                    .servers
                    .iter()
                    .map(|server| format!("{}\n", server.id()));
                pids.collect()
            }
            ["get_server_status", server] => match server.parse() {
                Ok(server) => format!("{}\n", state_of(server)),
                Err(_) => "Server does not exist\n".to_owned(),
            },
            ["get_client_list", _] if has_fault("refuse-clients") => "Server is busy\n".to_owned(),
            ["get_client_list", _] => (0..self.clients).fold(String::new(), |text, at| {
                text + &format!("{}\n", 90_000 + at)
            }),
            ["terminate_client", _, _] => "0\n".to_owned(),
            _ => "Unknown command\n".to_owned(),
        }
    }

    fn start_server(&mut self) {
        log("server.log", "Startup");
        log(
            "server.log",
            &format!("Active Threads Percentage set to {:.1}", self.percent),
        );
        if let Some(bytes) = self.memory {
            let line = format!("Device pinned memory limit for device 0 set to {bytes:#x} bytes");
            log("server.log", &line);
        }
        self.servers.extend(start_server(""));
    }
}

/// Starts a server for GPUs; none are all.
fn start_server(gpus: &str) -> Option<Child> {
    let program = std::env::current_exe().unwrap().with_file_name(SERVER);
    let mut command = Command::new(program);
    command
        .arg(gpus)
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

/// Returns whether the driver knows all of these GPUs.
fn knows(gpus: &str) -> bool {
    let file = std::env::current_exe().unwrap().with_file_name("gpus");
    let Ok(known) = fs_err::read_to_string(file) else {
        return true;
    };
    let asked = gpus.split(',').filter(|gpu| !gpu.is_empty());
    asked
        .into_iter()
        .all(|gpu| known.lines().any(|line| line == gpu))
}

/// Reads `10G` or `512M`.
fn bytes(amount: &str) -> Option<u64> {
    let (number, shift) = match amount.strip_suffix('G') {
        Some(number) => (number, 30),
        None => (amount.strip_suffix('M')?, 20),
    };
    Some(number.parse::<u64>().ok()? << shift)
}

/// The line of a server's log by which it says that it serves.
const STARTED: &str = "Server has started";

/// Returns whether a server serves. A server that dies at once is there for a moment, too.
fn has_started(server: u32) -> bool {
    let path = folder("CUDA_MPS_LOG_DIRECTORY").join("server.log");
    let text = fs_err::read_to_string(path).unwrap_or_default();
    let line = format!(" {server}] {STARTED}");
    text.lines().any(|one| one.ends_with(&line))
}

/// The server: lives until it is killed, also when its daemon has died.
fn server(gpus: &str) -> ExitCode {
    if has_fault("server-dies") || !knows(gpus) {
        log(
            "server.log",
            "Server encountered a fatal exception. Shutting down",
        );
        return ExitCode::FAILURE;
    }
    log("server.log", STARTED);
    while pipe().exists() {
        std::thread::sleep(LOOK * 10);
    }
    ExitCode::SUCCESS
}
