//! The namespaces of a cluster: own network, own mounts, own processes.
//!
//! No traffic leaves them, several exist side by side, every program keeps its default paths, and
//! one kill ends all. Files in them are reached from outside as [`Namespaces::path`], Unix sockets
//! on the host's disk as they are.

use std::ffi::OsStr;
use std::io::Write as _;
use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use fs_err as fs;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde::{Deserialize, Serialize};

use crate::process::{Signal, output};
use crate::wait::{poll, wait_for};

const INIT: &str = include_str!("init.sh");

/// The namespaces of one cluster, while their first process lives.
#[derive(Debug)]
pub struct Namespaces {
    state: PathBuf,
    init: Process,
    /// Present when we made them and they are to end with us: its standard input is our hold on
    /// them.
    owner: Option<Child>,
}

/// A process of the host that is not mistaken for a later one with the same number.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Process {
    pid: u32,
    start_time: u64,
}

impl Namespaces {
    /// Makes them. `state` is an empty folder on the host's disk, which is also visible inside.
    /// `owned` ones end when this process does.
    pub fn create(state: &Path, address: &str, owned: bool) -> Result<Self> {
        for dir in ["run", "logs", "pids", "etc"] {
            fs::create_dir_all(state.join(dir))?;
        }
        let script = state.join("init.sh");
        fs::write(&script, INIT)?;
        let log = fs::File::create(state.join("logs/init.log"))?
            .into_parts()
            .0;
        let mut unshare = Command::new("unshare");
        unshare
            .args([
                "--net",
                "--mount",
                "--pid",
                "--fork",
                "--mount-proc",
                "bash",
            ])
            .arg(&script)
            .arg(state);
        unshare
            .arg(address)
            .arg(if owned { "owned" } else { "kept" });
        unshare.stdin(if owned { Stdio::piped() } else { Stdio::null() });
        unshare
            .stdout(log.try_clone()?)
            .stderr(log)
            .current_dir("/");
        // Not a child of the terminal: ^C is for the test, which then takes everything down in
        // order.
        unshare.process_group(0);
        let mut child = unshare
            .spawn()
            .context("cannot start unshare (util-linux)")?;
        let ready = state.join("ready");
        let up = poll("namespaces", Duration::from_secs(10), || {
            if let Some(status) = child.try_wait()? {
                let said = fs::read_to_string(state.join("logs/init.log"))?;
                bail!(
                    "making the namespaces needs root: {status}: {}",
                    said.trim()
                );
            }
            Ok(ready.exists())
        });
        if up.is_err() {
            let _ = child.kill();
        }
        up?;
        let init = Process::child_of(child.id())?;
        fs::write(state.join("init.json"), serde_json::to_vec(&init)?)?;
        Ok(Self {
            state: state.to_owned(),
            init,
            owner: owned.then_some(child),
        })
    }

    /// Finds those that an earlier process made; `None` if there are none or their first process is
    /// gone.
    pub fn find(state: &Path) -> Result<Option<Self>> {
        let file = state.join("init.json");
        if !file.exists() {
            return Ok(None);
        }
        let init: Process = serde_json::from_slice(&fs::read(file)?)?;
        let found = Self {
            state: state.to_owned(),
            init,
            owner: None,
        };
        Ok(found.init.is_alive().then_some(found))
    }

    /// The folder with their configuration, logs and process ids, the same path inside and outside.
    pub fn state(&self) -> &Path {
        &self.state
    }

    /// Where a file inside is for us. The path must not lead through an absolute link (`/var/run`
    /// does).
    pub fn path(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        Path::new("/proc")
            .join(self.init.pid.to_string())
            .join("root")
            .join(inside.strip_prefix("/").unwrap_or(inside))
    }

    /// A command that runs inside, in the same working directory.
    pub fn command<I, S>(&self, program: impl AsRef<OsStr>, args: I) -> Command
    where
        I: IntoIterator<Item = S>,
        S: AsRef<OsStr>,
    {
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--target={}", self.init.pid))
            .args(["--net", "--mount", "--pid"]);
        if let Ok(here) = std::env::current_dir() {
            command.arg(format!("--wdns={}", here.display()));
        }
        command.arg("--").arg(program).args(args);
        command
    }

    /// A connection to a port of their loopback address.
    pub(crate) fn connect_to(&self, port: u16) -> Result<TcpStream> {
        let network = fs::File::open(format!("/proc/{}/ns/net", self.init.pid))?;
        // On a thread of its own, which stays inside until it ends; a socket is of the network in
        // which it was made.
        let inside = std::thread::spawn(move || {
            move_into_link_name_space(network.as_fd(), Some(LinkNameSpaceType::Network))?;
            TcpStream::connect(("127.0.0.1", port))
        });
        let connected = inside
            .join()
            .map_err(|_| anyhow!("the thread that connects has panicked"))?;
        connected.with_context(|| format!("nothing listens on port {port} of the loopback address"))
    }

    /// Joins the networks of two: a wire between the bridges of their nodes.
    pub(crate) fn connect(&self, other: &Self) -> Result<()> {
        let ends = [self, other].map(|side| side.init.pid.to_string());
        let wire = [
            "link", "add", "wire", "netns", &ends[0], "type", "veth", "peer", "name", "wire",
            "netns", &ends[1],
        ];
        output(Command::new("ip").args(wire))?;
        for side in [self, other] {
            output(&mut side.command("ip", ["link", "set", "wire", "master", "node", "up"]))?;
        }
        Ok(())
    }

    /// Signals a process by its number inside.
    pub(crate) fn send(&self, pid: u32, signal: Signal) -> Result<()> {
        let name = match signal {
            Signal::Term => "TERM",
            Signal::Kill => "KILL",
            Signal::Stop => "STOP",
            Signal::Continue => "CONT",
        };
        output(&mut self.command("/bin/sh", ["-c", &format!("kill -{name} {pid}")])).map(drop)
    }

    /// Asks the first process to start what `run/NAME.sh` says.
    pub(crate) fn ask(&self, name: &str) -> Result<()> {
        // One short write into a fifo is whole, also beside other writers.
        let mut control = fs::OpenOptions::new()
            .write(true)
            .open(self.state.join("control"))?;
        control.write_all(format!("{name}\n").as_bytes())?;
        Ok(())
    }

    /// Returns true if a process, by its number inside, runs (one that has ended and was not reaped
    /// does not).
    pub(crate) fn is_alive(&self, pid: u32) -> bool {
        let stat = fs::read_to_string(self.path(format!("/proc/{pid}/stat"))).unwrap_or_default();
        stat.rsplit_once(") ")
            .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
    }

    /// Returns true if their first process lives.
    pub fn are_alive(&self) -> bool {
        self.init.is_alive()
    }

    /// Ends every process inside and waits until they are gone.
    pub fn end(&mut self) -> Result<()> {
        if self.init.is_alive() {
            let pid = i32::try_from(self.init.pid)
                .ok()
                .and_then(rustix::process::Pid::from_raw);
            rustix::process::kill_process(
                pid.context("no such process")?,
                rustix::process::Signal::KILL,
            )?;
        }
        if let Some(mut child) = self.owner.take() {
            child.wait()?;
        }
        poll("end of the namespaces", Duration::from_secs(20), || {
            Ok(!self.init.is_alive())
        })
    }
}

impl Process {
    fn child_of(parent: u32) -> Result<Self> {
        wait_for(
            "first process of the namespaces",
            Duration::from_secs(5),
            || {
                for entry in fs::read_dir("/proc")? {
                    let Ok(pid) = entry?.file_name().to_string_lossy().parse() else {
                        continue;
                    };
                    if let Some((ppid, start_time)) = stat(pid)
                        && ppid == parent
                    {
                        return Ok(Some(Self { pid, start_time }));
                    }
                }
                Ok(None)
            },
        )
    }

    fn is_alive(&self) -> bool {
        stat(self.pid).is_some_and(|(_, start_time)| start_time == self.start_time)
    }
}

/// Parent and start time of a process that has not ended.
fn stat(pid: u32) -> Option<(u32, u64)> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let mut fields = text.rsplit_once(") ")?.1.split(' ');
    let state = fields.next()?;
    let parent = fields.next()?.parse().ok()?;
    let start_time = fields.nth(17)?.parse().ok()?;
    (!state.starts_with(['Z', 'X'])).then_some((parent, start_time))
}
