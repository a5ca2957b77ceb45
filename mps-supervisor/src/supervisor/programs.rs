//! NVIDIA's programs on the node, and their processes.

use std::path::PathBuf;

use divvy_host::{Driver, DriverAt, DriverRootError, HostRoot};
use divvy_model::MpsProtocol;

use super::error::{SupervisorError, file};
use super::files::Files;
use super::known::{CONTROL, SERVER, SOCKET};
use crate::control::Control;
use crate::memory::Size;
use crate::process::{self, Process};
use crate::socket;

/// Settings of a [`Supervisor`].
#[derive(Debug, Clone)]
pub struct Settings {
    /// Folder with one folder for each daemon, and the socket.
    pub dir: PathBuf,
    /// The node, as this process sees it.
    pub host: HostRoot,
    /// Where the driver is looked for, at each start anew: it may come later, or be replaced.
    pub driver: DriverAt,
    /// Control group for the daemons, so that they outlive the container of the supervisor. `None`:
    /// they stay in its own.
    pub cgroup: Option<PathBuf>,
    /// Size of the memory that a server shares with its clients; all that containers can write is
    /// then mounted, and bounded. `None`: it is in folders, for a process that may not mount.
    pub memory: Option<Size>,
}

impl Settings {
    pub(super) fn driver(&self) -> Result<Driver, DriverRootError> {
        self.driver.find(&self.host)
    }

    /// Returns where a program is seen; an empty path without a driver, which is no program's.
    pub(super) fn seen_program(&self, name: &str) -> PathBuf {
        let driver = self.driver().ok();
        let seen = driver.and_then(|driver| Some(driver.root.see(&program(&driver, name).ok()?)));
        seen.unwrap_or_default()
    }

    pub(super) fn servers(&self, files: &Files, daemon: Option<u32>) -> Vec<Process> {
        let pipes = files.pipes.each_ref().map(PathBuf::as_path);
        process::servers(daemon, &self.seen_program(SERVER), &pipes)
    }

    /// Does something with the program, for the daemon of a target.
    pub(super) fn with_control<T>(
        &self,
        files: &Files,
        protocol: MpsProtocol,
        what: impl FnOnce(&Control<'_>) -> Result<T, SupervisorError>,
    ) -> Result<T, SupervisorError> {
        let driver = self.driver()?;
        let program = program(&driver, CONTROL)?;
        what(&Control {
            driver: &driver,
            program: &program,
            pipe: files.pipe(protocol),
            log: &files.log,
            memory: self.memory.map(|_| &*files.memory),
            device: &files.device,
        })
    }
}

/// Returns the path of a program inside the driver's root.
pub(super) fn program(driver: &Driver, name: &str) -> Result<PathBuf, SupervisorError> {
    let root = &driver.root;
    let found = root.find_program(name);
    let found = found.map_err(|source| file(root.host(), "searched", source))?;
    found.ok_or_else(|| SupervisorError::NoProgram(root.host().to_owned()))
}

/// Returns the daemon that listens on the socket of a program's folder: a process that says so, and
/// that `/proc` shows to be one.
pub(super) fn listening(control: &Control<'_>) -> Option<Process> {
    let pid = socket::listener(&control.pipe.join(SOCKET)).ok()?;
    let daemons = process::daemons(&control.driver.root.see(control.program), &[control.pipe]);
    daemons.into_iter().find(|daemon| daemon.pid == pid)
}
