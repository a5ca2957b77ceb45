//! Servers and namespaces of protocol v3: they are lost when the daemon ends.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ExitCode};

use super::{LOOK, has_fault, log, pipe, server, sockets, start_server};

/// Argument of a server of this protocol before its GPUs.
pub(crate) const GPUS: &str = "--gpus";
const DEFAULT: &str = "default";

#[derive(Default)]
pub(crate) struct Servers {
    by_name: BTreeMap<String, Server>,
}

struct Server {
    child: Option<Child>,
    devices: String,
    namespaces: BTreeMap<String, Namespace>,
}

struct Namespace {
    dir: PathBuf,
    sockets: Option<UnixListener>,
    clients: Vec<UnixStream>,
    percent: Option<f64>,
    memory: Option<u64>,
}

impl Namespace {
    /// Makes its folder, or takes the one that is there.
    fn new(dir: PathBuf) -> Self {
        drop(fs_err::create_dir_all(&dir));
        let socket = dir.join("control");
        drop(fs_err::remove_file(&socket));
        let sockets = sockets::listen(&socket).ok();
        Self {
            dir,
            sockets,
            clients: Vec::new(),
            percent: None,
            memory: None,
        }
    }

    fn accept(&mut self) {
        while let Some(Ok((client, _))) = self.sockets.as_ref().map(UnixListener::accept) {
            drop(client.set_nonblocking(true));
            self.clients.push(client);
        }
        self.clients.retain(is_there);
    }
}

/// A client that has ended has closed its end.
fn is_there(client: &UnixStream) -> bool {
    match std::io::Read::read(&mut &*client, &mut [0]) {
        Ok(read) => read > 0,
        Err(error) => error.kind() == ErrorKind::WouldBlock,
    }
}

impl Server {
    fn state(&mut self) -> &'static str {
        let lives = |child: &mut Child| matches!(child.try_wait(), Ok(None)).then(|| child.id());
        match self.child.as_mut().and_then(lives).map(state_of) {
            Some("ACTIVE") => "Ready",
            Some(state) => state,
            None => "FAULT",
        }
    }
}

impl Servers {
    pub(crate) fn processes(&mut self) -> impl Iterator<Item = &mut Child> {
        self.by_name
            .values_mut()
            .filter_map(|server| server.child.as_mut())
    }

    /// Takes in the clients that have come.
    pub(crate) fn accept(&mut self) {
        let servers = self.by_name.values_mut();
        servers
            .flat_map(|server| server.namespaces.values_mut())
            .for_each(Namespace::accept);
    }

    pub(crate) fn answer(&mut self, words: &[&str]) -> String {
        self.accept();
        let answer = match *words {
            ["server" | "namespace", "list", ..] if has_fault("refuse-lists") => {
                Err("Unknown command".to_owned())
            }
            ["server", "create", name, "--uid=0", devices] => self.create(name, devices),
            ["server", "list", "--format=csv,noheader"] => Ok(self.list()),
            ["server", "delete", name] => self.delete(name, false),
            ["server", "delete", name, "--force"] => self.delete(name, true),
            ["namespace", "get", ..] if has_fault("refuse-folder") => {
                Err("Server is busy".to_owned())
            }
            ["namespace", verb, name, server, ref rest @ ..] if verb != "list" => {
                let server = server.strip_prefix("--server=").unwrap_or(server);
                match self.by_name.get_mut(server) {
                    Some(server) => server.namespace(verb, name, rest),
                    None => Err(format!("Server '{server}' does not exist")),
                }
            }
            ["namespace", "list", "--format=csv,noheader"] => Ok(self.namespaces()),
            ["client", ..] if has_fault("refuse-clients") => Err("Unknown command".to_owned()),
            ["client", "list", "--format=csv,noheader"] => Ok(self.clients()),
            _ => Err("Unknown command".to_owned()),
        };
        answer.unwrap_or_else(|refused| format!("{refused}\n"))
    }

    fn create(&mut self, name: &str, devices: &str) -> Result<String, String> {
        if self.by_name.contains_key(name) || !is_name(name) {
            return Err(format!("Server '{name}' cannot be created"));
        }
        let devices = devices.strip_prefix("--allowed-devices=");
        let devices = devices.ok_or("Unknown option")?.to_owned();
        log("server.log", "Startup");
        let dir = pipe().join(name);
        let default = Namespace::new(dir.join(DEFAULT));
        // A GPU that is not known is taken.
        let server = Server {
            child: start_server(&[GPUS, &devices]),
            devices,
            namespaces: BTreeMap::from([(DEFAULT.to_owned(), default)]),
        };
        self.by_name.insert(name.to_owned(), server);
        Ok(String::new())
    }

    fn delete(&mut self, name: &str, force: bool) -> Result<String, String> {
        let server = self.by_name.get_mut(name);
        let server = server.ok_or_else(|| format!("Server '{name}' does not exist"))?;
        let mut clients = server.namespaces.values().flat_map(|one| &one.clients);
        if clients.next().is_some() && !force {
            return Err(format!("Server '{name}' has clients"));
        }
        if let Some(child) = &mut server.child {
            drop(child.kill());
            drop(child.wait());
        }
        self.by_name.remove(name);
        drop(fs_err::remove_dir_all(pipe().join(name)));
        Ok(String::new())
    }

    fn list(&mut self) -> String {
        let line = |(name, server): (&String, &mut Server)| {
            let (state, devices) = (server.state(), &server.devices);
            let pid = server.child.as_ref().map_or(0, Child::id);
            let dir = pipe().join(name);
            format!("{name},0,{pid},{state},{},{devices},-\n", dir.display())
        };
        self.by_name.iter_mut().map(line).collect()
    }

    fn namespaces(&mut self) -> String {
        let mut text = String::new();
        for (server_name, server) in &mut self.by_name {
            let state = server.state();
            for (name, namespace) in &server.namespaces {
                let none = || "-".to_owned();
                // Rounded down, from 1 GiB on to whole ones.
                let memory = namespace.memory.map_or_else(none, |bytes| {
                    if bytes >= 1 << 30 {
                        format!("{}G", bytes >> 30)
                    } else {
                        format!("{}M", bytes >> 20)
                    }
                });
                let percent = namespace.percent.map_or_else(none, |p| format!("{p:.2}"));
                let dir = namespace.dir.display();
                text += &format!("{name},{server_name},{state},{memory},{percent},0,{dir}\n");
            }
        }
        text
    }

    fn clients(&self) -> String {
        let mut text = String::new();
        for (server_name, server) in &self.by_name {
            for (name, namespace) in &server.namespaces {
                for client in &namespace.clients {
                    let pid = rustix::net::sockopt::socket_peercred(client)
                        .map_or(0, |peer| peer.pid.as_raw_nonzero().get());
                    let devices = &server.devices;
                    text +=
                        &format!("{pid},{server_name},{devices},{server_name}/{name} (0),CMD\n");
                }
            }
        }
        text
    }
}

impl Server {
    fn namespace(&mut self, verb: &str, name: &str, rest: &[&str]) -> Result<String, String> {
        let missing = || format!("Namespace '{name}' does not exist");
        let there = self.namespaces.get_mut(name);
        match (verb, rest) {
            ("create", []) => {
                if there.is_some() || !is_name(name) {
                    return Err(format!("Namespace '{name}' cannot be created"));
                }
                let beside = self
                    .namespaces
                    .get(DEFAULT)
                    .and_then(|one| one.dir.parent());
                let dir = beside.unwrap_or(Path::new("/")).join(name);
                let dir = if has_fault("elsewhere") {
                    dir.with_extension("elsewhere")
                } else {
                    dir
                };
                self.namespaces.insert(name.to_owned(), Namespace::new(dir));
            }
            ("set", [limit]) => {
                let namespace = there.ok_or_else(missing)?;
                if !namespace.clients.is_empty() {
                    return Err(format!("Namespace '{name}' has clients"));
                }
                namespace.set(limit)?;
            }
            ("get", ["pipe-directory"]) => {
                return Ok(format!("{}\n", there.ok_or_else(missing)?.dir.display()));
            }
            ("delete", ["--force"] | []) => {
                let namespace = there.ok_or_else(missing)?;
                let busy = !namespace.clients.is_empty() && rest.is_empty();
                if name == DEFAULT || busy || has_fault("sticky") {
                    return Err(format!("Namespace '{name}' has clients"));
                }
                let dir = namespace.dir.clone();
                self.namespaces.remove(name);
                drop(fs_err::remove_dir_all(dir));
            }
            _ => return Err("Unknown command".to_owned()),
        }
        Ok(String::new())
    }
}

impl Namespace {
    fn set(&mut self, limit: &str) -> Result<(), String> {
        let invalid = || format!("Invalid value: {limit}");
        match limit.split_once('=') {
            Some(("--active-thread-percentage", percent)) => {
                let percent = percent.parse::<f64>().map_err(|_| invalid())?;
                if !(percent > 0.0 && percent <= 100.0) || has_fault("refuse-limits") {
                    return Err(invalid());
                }
                self.percent = Some(percent);
            }
            Some(("--pinned-memory-limit", amount)) => {
                self.memory = Some(bytes(amount).ok_or_else(invalid)?);
            }
            _ => return Err("Unknown option".to_owned()),
        }
        Ok(())
    }
}

fn is_name(name: &str) -> bool {
    let takes = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    (1..=64).contains(&name.len()) && name.chars().all(takes)
}

/// Reads `10G` or `512M`.
fn bytes(amount: &str) -> Option<u64> {
    let (number, shift) = match amount.strip_suffix('G') {
        Some(number) => (number, 30),
        None => (amount.strip_suffix('M')?, 20),
    };
    Some(number.parse::<u64>().ok()? << shift)
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

/// Returns whether a server serves. A server that dies at once is there for a moment, too.
fn has_started(server: u32) -> bool {
    let path = super::folder("CUDA_MPS_LOG_DIRECTORY").join("server.log");
    let text = fs_err::read_to_string(path).unwrap_or_default();
    let line = format!(" {server}] {}", server::STARTED);
    text.lines().any(|one| one.ends_with(&line))
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

/// The server: lives until it is killed, also when its daemon has died.
pub(crate) fn server(gpus: &str) -> ExitCode {
    if has_fault("server-dies") || !knows(gpus) {
        log(
            "server.log",
            "Server encountered a fatal exception. Shutting down",
        );
        return ExitCode::FAILURE;
    }
    log("server.log", server::STARTED);
    while pipe().exists() {
        std::thread::sleep(LOOK * 10);
    }
    ExitCode::SUCCESS
}
