//! Starting, finding again and ending of daemons: the steps of [`crate::plan`], one after the
//! other.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use divvy_host::{Driver, DriverAt, DriverRootError, HostRoot};
use divvy_model::{
    GpuTarget, GpuUuid, MigUuid, MpsNamespace, MpsNamespaceName, MpsProtocol, MpsServer,
};

mod health;
mod logs;
mod namespaces;
mod trial;

pub use self::health::Unwell;
use crate::cgroup;
use crate::control::{Control, ControlError, Launch, ServerState};
use crate::memory::{Bounds, Size};
use crate::note::{Daemon, Note};
use crate::plan::{self, Found, Step};
use crate::process::{self, Process};
use crate::{memory, shared, socket};

/// NVIDIA's programs.
const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";
/// Socket of a daemon, in its folder of sockets.
const SOCKET: &str = "control";
/// State of a server that serves, in the daemon's words.
const ACTIVE: &str = "ACTIVE";
/// Longest path of the folder of sockets with which daemons start: they fail without a word in
/// longer ones.
const LONGEST: usize = 83;

/// A command of the program takes milliseconds.
const COMMAND_WITHIN: Duration = Duration::from_secs(3);
/// Time in which daemon and server are there.
const READY_WITHIN: Duration = Duration::from_secs(8);
/// Time in which a daemon that was asked to quit may end by itself: it waits for clients that work.
const QUIT_WITHIN: Duration = Duration::from_secs(5);
/// Time in which what was killed is gone. A process that hangs in the kernel module is not.
const GONE_WITHIN: Duration = Duration::from_secs(2);
/// Pause between two looks.
const LOOK: Duration = Duration::from_millis(10);

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

/// Why a daemon could not be started or ended.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error("the NVIDIA driver cannot be found")]
    NoDriver(#[from] DriverRootError),
    #[error("the driver root {} has no {CONTROL} or no {SERVER} (install the driver's compute utilities)", .0.display())]
    NoProgram(PathBuf),
    #[error(
        "the path of the folder of sockets, {}, has {} bytes, and a daemon starts with {LONGEST} at most: choose a shorter driver name",
        .0.display(), .0.as_os_str().len()
    )]
    TooLong(PathBuf),
    #[error("{} cannot be {action}", path.display())]
    File {
        path: PathBuf,
        action: &'static str,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Control(#[from] ControlError),
    #[error("the MPS {what} was not there within {READY_WITHIN:.0?}{log}")]
    NotReady { what: &'static str, log: String },
    #[error("the MPS server has ended before it served{log}")]
    Ended { log: String },
    #[error(
        "the MPS of the driver in {} serves programs of one user alone (R535 and R550 do): update the driver",
        .0.display()
    )]
    OneUser(PathBuf),
    #[error("process {pid} of the MPS daemon could not be ended")]
    Stuck { pid: u32 },
    #[error("no MPS server with namespaces runs on {0}")]
    NoServer(GpuTarget),
    #[error("namespace {0} has clients, and limits cannot be changed under them (end them first)")]
    InUse(MpsNamespaceName),
    #[error("namespace {0} could not be ended")]
    Left(MpsNamespaceName),
    #[error("the sockets of namespace {name} are in {}, where they were not expected", found.display())]
    Elsewhere {
        name: MpsNamespaceName,
        found: PathBuf,
    },
}

/// A daemon that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    pub server: MpsServer,
    /// The partition that it sees; `None` for a whole GPU.
    pub partition: Option<MigUuid>,
    /// Its processes: the daemon and its servers.
    pub pids: Vec<u32>,
    /// Its namespaces, with protocol v3.
    pub namespaces: Vec<MpsNamespace>,
    /// Set if it does not serve.
    pub unwell: Option<Unwell>,
}

/// The daemons of a node, or of one of its GPUs.
#[derive(Debug, Default)]
pub struct State {
    pub running: BTreeMap<GpuTarget, Running>,
    /// Targets of which it cannot be said, and why.
    pub unknown: BTreeMap<GpuTarget, SupervisorError>,
}

/// Keeps the daemons of a node. Shared between threads; the steps for one target are done one after
/// the other.
#[derive(Debug)]
pub struct Supervisor {
    settings: Settings,
    locks: Mutex<BTreeMap<GpuTarget, Arc<Mutex<()>>>>,
    /// Servers that do not serve. Lost with this process: their time begins anew then.
    unwell: Mutex<BTreeMap<GpuTarget, health::Seen>>,
    /// Abilities of the driver's programs, once they were tried.
    tried: Mutex<Option<trial::Tried>>,
}

/// The files of one daemon.
struct Files {
    /// UUID of the GPU or partition that a daemon sees which is started. A daemon that runs does
    /// not look at it.
    device: String,
    /// The folder of it all.
    dir: PathBuf,
    /// The folders of sockets, which containers have mounted: of protocol v2 and of v3.
    pipes: [PathBuf; 2],
    /// The memory that its servers share with their clients: the `/dev/shm` of both.
    memory: PathBuf,
    log: PathBuf,
    note: PathBuf,
}

impl Files {
    /// Returns the folder of sockets.
    fn pipe(&self, protocol: MpsProtocol) -> &Path {
        let [v2, v3] = &self.pipes;
        match protocol {
            MpsProtocol::V2 => v2,
            MpsProtocol::V3 => v3,
        }
    }
}

impl Supervisor {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            locks: Mutex::default(),
            unwell: Mutex::default(),
            tried: Mutex::default(),
        }
    }

    /// Returns the daemons that run, on one GPU or on all. Each is asked at the same time as the
    /// others, so that a daemon that hangs does not add to the time of the rest. A look at all
    /// finds the servers that do not serve.
    pub fn state(&self, of: Option<&GpuUuid>) -> Result<State, SupervisorError> {
        let mut known = self.known()?;
        known.retain(|target| of.is_none_or(|gpu| target.gpu == *gpu));
        let found = std::thread::scope(|scope| {
            let asked = known
                .iter()
                .map(|target| scope.spawn(|| self.state_of(target, of.is_none())));
            // Begun all before the first is waited for.
            let asked: Vec<_> = asked.collect();
            let ended = asked.into_iter().map(std::thread::ScopedJoinHandle::join);
            ended.collect::<Vec<_>>()
        });
        let mut state = State::default();
        for (target, found) in known.into_iter().zip(found) {
            // A panic goes on in the thread that asked.
            let found = found.unwrap_or_else(|died| std::panic::resume_unwind(died));
            match found {
                Ok(found) => state.running.extend(found.map(|found| (target, found))),
                // Not known is not gone, and says nothing about the others.
                Err(error) => drop(state.unknown.insert(target, error)),
            }
        }
        Ok(state)
    }

    fn state_of(&self, target: &GpuTarget, all: bool) -> Result<Option<Running>, SupervisorError> {
        let files = self.files(target);
        let (note, found) = self.find(&files)?;
        let (Found::Running(server), Some(note)) = (found, note) else {
            return Ok(None);
        };
        let servers = self.servers(&files, Some(note.daemon.pid));
        let pids = servers.iter().map(|server| server.pid);
        let listed = self.ask(target, &files, &note, all);
        Ok(Some(Running {
            server,
            partition: note.partition.clone(),
            pids: pids.chain([note.daemon.pid]).collect(),
            namespaces: namespaces::of_rows(listed.as_deref(), &note),
            unwell: self.unwell(target, &note),
        }))
    }

    /// Ends what an earlier process has left half done: daemons that are dead or not ready, with
    /// the servers that they have left. Daemons that run are kept.
    pub fn adopt(&self) -> Result<usize, SupervisorError> {
        // A daemon of a trial that hangs keeps none of the others from being found.
        if let Err(error) = self.end_trial() {
            let error = divvy_telemetry::chain(&error);
            tracing::error!(error, "failed to end what is left of a trial of MPS");
        }
        let mut kept = 0;
        for target in self.known()? {
            match self.adopt_one(&target) {
                Ok(runs) => kept += usize::from(runs),
                // It keeps only its own GPU without a daemon.
                Err(error) => {
                    let error = divvy_telemetry::chain(&error);
                    tracing::error!(%target, error, "failed to end what is left of an MPS daemon");
                }
            }
        }
        Ok(kept)
    }

    fn adopt_one(&self, target: &GpuTarget) -> Result<bool, SupervisorError> {
        let lock = self.lock(target);
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.files(target);
        match self.find(&files)?.1 {
            Found::Running(_) | Found::Idle(_) => Ok(true),
            // The folder stays: the containers of a daemon that has died have it mounted, and get
            // the next one there.
            Found::Remains => self.step(target, &files, Step::Kill).map(|()| false),
            Found::Nothing => Ok(false),
        }
    }

    /// Starts a daemon with one server, which sees this partition where the target is one; `anew`:
    /// another one in the place of one that runs. Ends what it has started if it fails.
    pub fn start(
        &self,
        target: &GpuTarget,
        partition: Option<&MigUuid>,
        server: MpsServer,
        anew: bool,
    ) -> Result<(), SupervisorError> {
        let lock = self.lock(target);
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let mut files = self.files(target);
        if let Some(partition) = partition {
            files.device = partition.to_string();
        }
        let mut longest = files.pipe(server.protocol).to_owned();
        if server.protocol == MpsProtocol::V3 {
            longest.push(MpsNamespaceName::longest_folder());
        }
        if longest.as_os_str().len() > LONGEST {
            return Err(SupervisorError::TooLong(longest));
        }
        let (note, found) = self.find(&files)?;
        // A daemon of a partition that was made anew since serves no client.
        let is_other = note.is_some_and(|note| note.partition.as_ref() != partition);
        let found = if is_other { Found::Remains } else { found };
        let steps = plan::start(&found, server, anew);
        for step in steps {
            if let Err(error) = self.step(target, &files, step) {
                // A start that fails leaves nothing. A process that could not be ended keeps its
                // note, by which the next try knows it.
                if let Err(left) = self.step(target, &files, Step::Kill) {
                    tracing::error!(%target, %left, "failed to end what a failed start has left");
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Leaves nothing of its own on a node without daemons. Daemons that run go on.
    pub fn leave(&self) {
        if let Some(group) = &self.settings.cgroup {
            cgroup::remove(group);
        }
    }

    /// Ends a daemon with its servers.
    pub fn stop(&self, target: &GpuTarget) -> Result<(), SupervisorError> {
        let lock = self.lock(target);
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.files(target);
        let (_, found) = self.find(&files)?;
        for step in plan::stop(&found) {
            self.step(target, &files, step)?;
        }
        Ok(())
    }

    fn lock(&self, target: &GpuTarget) -> Arc<Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.entry(target.clone()).or_default().clone()
    }

    fn files(&self, target: &GpuTarget) -> Files {
        let dir = self.settings.dir.join(target.to_string());
        let pipe = |protocol: MpsProtocol| self.settings.dir.join(protocol.pipe(target));
        Files {
            device: target.gpu.to_string(),
            pipes: [MpsProtocol::V2, MpsProtocol::V3].map(pipe),
            memory: self.settings.dir.join(MpsServer::memory(target)),
            log: dir.join("log"),
            note: dir.join("daemon.json"),
            dir,
        }
    }

    /// Returns the targets that have a folder.
    fn known(&self) -> Result<Vec<GpuTarget>, SupervisorError> {
        let dir = &self.settings.dir;
        let failed = |source| file(dir, "read", source);
        let mut known = Vec::new();
        for entry in fs_err::read_dir(dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            known.extend(name.to_str().and_then(|name| name.parse().ok()));
        }
        Ok(known)
    }

    fn find(&self, files: &Files) -> Result<(Option<Note>, Found), SupervisorError> {
        let note = Note::read(&files.note).map_err(|source| file(&files.note, "read", source))?;
        let process = note
            .as_ref()
            .and_then(|note| process::read(note.daemon.pid));
        let remains = files.dir.exists() || files.pipe(MpsProtocol::V3).exists();
        let found = plan::judge(note.as_ref(), process.as_ref(), remains);
        let (Found::Running(server), Some(of)) = (&found, &note) else {
            return Ok((note, found));
        };
        // A server can die, and its daemon lives on. One of protocol v3 starts no other by itself.
        let found = match server.protocol {
            _ if !self.servers(files, Some(of.daemon.pid)).is_empty() => found,
            MpsProtocol::V2 => Found::Idle(*server),
            MpsProtocol::V3 => Found::Remains,
        };
        Ok((note, found))
    }

    fn servers(&self, files: &Files, daemon: Option<u32>) -> Vec<Process> {
        let pipes = files.pipes.each_ref().map(PathBuf::as_path);
        process::servers(daemon, &self.seen_program(SERVER), &pipes)
    }

    /// Returns where a program is seen; an empty path without a driver, which is no program's.
    fn seen_program(&self, name: &str) -> PathBuf {
        let driver = self.driver().ok();
        let seen = driver.and_then(|driver| Some(driver.root.see(&program(&driver, name).ok()?)));
        seen.unwrap_or_default()
    }

    fn driver(&self) -> Result<Driver, DriverRootError> {
        self.settings.driver.find(&self.settings.host)
    }

    fn step(&self, target: &GpuTarget, files: &Files, step: Step) -> Result<(), SupervisorError> {
        tracing::info!(%target, ?step, "MPS daemon");
        match step {
            Step::Kill => return self.kill(files),
            Step::Clear(protocol) => return self.clear(files, protocol),
            Step::Remove => return remove_all(files),
            Step::Ready => return change_note(files, |note| note.ready = true),
            Step::Quit(_)
            | Step::Launch(_)
            | Step::SetLimits(_)
            | Step::StartServer
            | Step::CreateServer => {}
        }
        let protocol = match step {
            Step::Quit(protocol) | Step::Launch(protocol) => protocol,
            Step::CreateServer => MpsProtocol::V3,
            _ => MpsProtocol::V2,
        };
        let done = self.with_control(files, protocol, |control| match step {
            Step::Launch(_) => self.launch(control, files, protocol),
            Step::SetLimits(server) => {
                control.set_threads(server.cores, COMMAND_WITHIN)?;
                if let Some(mib) = server.memory_mib {
                    control.set_memory(mib, COMMAND_WITHIN)?;
                }
                change_note(files, |note| note.server = server)
            }
            Step::StartServer => Self::start_server(control, files),
            Step::CreateServer => self.create_server(control, files),
            Step::Quit(_) => self.quit(control, files, protocol),
            Step::Kill | Step::Clear(_) | Step::Remove | Step::Ready => Ok(()),
        });
        match done {
            // The daemon outlives its driver's files. It is killed by the next step.
            Err(SupervisorError::NoDriver(_)) if matches!(step, Step::Quit(_)) => Ok(()),
            done => done,
        }
    }

    /// Does something with the program, for the daemon of a target.
    fn with_control<T>(
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
            memory: self.settings.memory.map(|_| &*files.memory),
            device: &files.device,
        })
    }

    /// Starts the daemon, notes which process it is, and waits until it answers.
    fn launch(
        &self,
        control: &Control<'_>,
        files: &Files,
        protocol: MpsProtocol,
    ) -> Result<(), SupervisorError> {
        // Without the server's program the daemon starts, and every client fails.
        program(control.driver, SERVER)?;
        let how = match protocol {
            MpsProtocol::V2 => self.for_all(control.driver)?,
            MpsProtocol::V3 => Launch::Namespaces,
        };
        control.launch(how, READY_WITHIN)?;
        // Find it. Not by a file in the folder of sockets, which containers can write, and R535
        // writes none. A socket that one of them has put there is no daemon's.
        let mut found = None;
        let is_found = || {
            found = listening(control);
            found.is_some()
        };
        let not_ready = || SupervisorError::NotReady {
            what: "daemon",
            log: logs::end_of(&files.log),
        };
        wait_for(is_found).ok_or_else(not_ready)?;
        let process: Process = found.ok_or_else(not_ready)?;
        if let Some(group) = &self.settings.cgroup {
            // Before it starts a server, which then is there too.
            cgroup::move_to(group, process.pid);
        }
        let note = Note {
            // Until limits are set, it has none.
            server: match protocol {
                MpsProtocol::V2 => MpsServer::of_claim(None, None),
                MpsProtocol::V3 => MpsServer::NAMESPACES,
            },
            partition: control.device.parse().ok(),
            namespaces: BTreeMap::new(),
            daemon: Daemon {
                pid: process.pid,
                start_ticks: process.start_ticks,
                program: process.program,
            },
            ready: false,
        };
        // Before it answers: one that does not, and cannot be killed, is known by its note.
        note.write(&files.note)
            .map_err(|source| file(&files.note, "written", source))?;
        wait_for(|| control.greet(protocol, COMMAND_WITHIN).is_ok()).ok_or_else(not_ready)
    }

    /// Starts the server at once and not with the first client: until it has the GPU, which is in
    /// the mode for one process alone, any other process could take it. Waits until it serves by
    /// its own word: it is listed from its fork on, also where it dies a moment later.
    fn start_server(control: &Control<'_>, files: &Files) -> Result<(), SupervisorError> {
        control.order("start_server -uid 0", COMMAND_WITHIN)?;
        let mut has_ended = false;
        let serves_or_ended = || {
            // No answer is none: the daemon waits for its server, too.
            let Ok(listed) = control.servers(COMMAND_WITHIN) else {
                return false;
            };
            // The daemon has forked it before it answered the order.
            let Some(server) = listed.first().copied() else {
                has_ended = true;
                return true;
            };
            match control.state_of(server, COMMAND_WITHIN) {
                Ok(Some(state)) => state == ACTIVE,
                Ok(None) => logs::says_ready(&files.log, server),
                Err(_) => false,
            }
        };
        let waited = wait_for(serves_or_ended);
        let log = || logs::end_of(&files.log);
        match waited {
            Some(()) if has_ended => Err(SupervisorError::Ended { log: log() }),
            Some(()) => Ok(()),
            None => Err(SupervisorError::NotReady {
                what: "server",
                log: log(),
            }),
        }
    }

    /// Makes the server of protocol v3 at once, for the same reason, and waits until it is ready:
    /// one that dies leaves its clients without limits.
    fn create_server(&self, control: &Control<'_>, files: &Files) -> Result<(), SupervisorError> {
        control.create_server(COMMAND_WITHIN)?;
        let mut state = ServerState::Starting;
        let has_ended = || {
            state = control
                .server_state(COMMAND_WITHIN)
                .unwrap_or(ServerState::Starting);
            state != ServerState::Starting
        };
        let waited = wait_for(has_ended);
        let note = Note::read(&files.note).map_err(|source| file(&files.note, "read", source))?;
        if waited.is_none()
            || state == ServerState::Failed
            || self
                .servers(files, note.map(|note| note.daemon.pid))
                .is_empty()
        {
            return Err(SupervisorError::NotReady {
                what: "server",
                log: logs::end_of(&files.log),
            });
        }
        Ok(control.cap_default(COMMAND_WITHIN)?)
    }

    /// Asks the daemon to quit and waits for it. A daemon that does not is killed by the next step.
    fn quit(
        &self,
        control: &Control<'_>,
        files: &Files,
        protocol: MpsProtocol,
    ) -> Result<(), SupervisorError> {
        // Judged by the process: the program also fails where a server has not ended well, and
        // returns before the daemon has gone.
        let until = Instant::now() + QUIT_WITHIN;
        let asked = control.quit(protocol, QUIT_WITHIN);
        let (note, _) = self.find(files)?;
        let gone = |note: &Note| {
            process::read(note.daemon.pid).is_none_or(|process| !note.daemon.is(&process))
        };
        let is_gone = || note.as_ref().is_none_or(gone);
        while Instant::now() < until && !is_gone() {
            std::thread::sleep(LOOK);
        }
        if !is_gone() {
            let error = asked.err().map(|error| divvy_telemetry::chain(&error));
            tracing::warn!(
                device = control.device,
                error,
                "the MPS daemon did not quit, and is killed"
            );
        }
        Ok(())
    }

    /// Makes the folders, and removes what an earlier daemon has left in the folder of sockets. The
    /// folder itself stays, and so do those of a server and its namespaces, and the memory:
    /// containers have them mounted.
    fn clear(&self, files: &Files, protocol: MpsProtocol) -> Result<(), SupervisorError> {
        let (log, pipe, memory) = (&files.log, files.pipe(protocol), &files.memory);
        if let Some(size) = self.settings.memory {
            for (dir, bounds) in [
                (pipe, Bounds::of_sockets()),
                (memory, Bounds::of_memory(size)),
            ] {
                memory::bound(dir, bounds).map_err(|source| file(dir, "mounted", source))?;
            }
        }
        fs_err::create_dir_all(log).map_err(|source| file(log, "created", source))?;
        shared::open(memory, 0o1777).map_err(|source| file(memory, "opened", source))?;
        let levels = match protocol {
            MpsProtocol::V2 => 0,
            MpsProtocol::V3 => 2,
        };
        shared::clear(pipe, levels).map_err(|source| file(pipe, "cleared", source))
    }

    /// Kills the daemon and its servers, and waits until they are gone. The daemon first: it would
    /// start another server.
    fn kill(&self, files: &Files) -> Result<(), SupervisorError> {
        let note = Note::read(&files.note).map_err(|source| file(&files.note, "read", source))?;
        let noted = note.as_ref().and_then(|note| {
            process::read(note.daemon.pid).filter(|process| note.daemon.is(process))
        });
        let servers = self.servers(files, noted.as_ref().map(|daemon| daemon.pid));
        // A start that was cut short has no note.
        let pipes = files.pipes.each_ref().map(PathBuf::as_path);
        let daemons = process::daemons(&self.seen_program(CONTROL), &pipes);
        let of_unnoted = daemons
            .iter()
            .flat_map(|one| self.servers(files, Some(one.pid)));
        let mut all: Vec<Process> = noted.into_iter().chain(daemons.iter().cloned()).collect();
        all.extend(servers.into_iter().chain(of_unnoted));
        for one in &all {
            process::kill(one)
                .map_err(|source| file(&files.dir, "cleared of processes", source))?;
        }
        wait_until_gone(&all, GONE_WITHIN)?;
        match fs_err::remove_file(&files.note) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(file(&files.note, "removed", error))
            }
            _ => Ok(()),
        }
    }
}

/// Returns the path of a program inside the driver's root.
fn program(driver: &Driver, name: &str) -> Result<PathBuf, SupervisorError> {
    let root = &driver.root;
    let found = root.find_program(name);
    let found = found.map_err(|source| file(root.host(), "searched", source))?;
    found.ok_or_else(|| SupervisorError::NoProgram(root.host().to_owned()))
}

/// Removes all that is of a daemon. The folder of the note last: by it the target is known.
fn remove_all(files: &Files) -> Result<(), SupervisorError> {
    for dir in files.pipes.iter().chain([&files.memory]) {
        memory::unbound(dir).map_err(|source| file(dir, "unmounted", source))?;
    }
    remove(files.pipe(MpsProtocol::V3))?;
    remove(&files.dir)
}

fn remove(dir: &Path) -> Result<(), SupervisorError> {
    shared::remove(dir).map_err(|source| file(dir, "removed", source))
}

fn change_note(files: &Files, change: impl FnOnce(&mut Note)) -> Result<(), SupervisorError> {
    let read = Note::read(&files.note).map_err(|source| file(&files.note, "read", source))?;
    let missing = || file(&files.note, "read", ErrorKind::NotFound.into());
    let mut note = read.ok_or_else(missing)?;
    change(&mut note);
    note.write(&files.note)
        .map_err(|source| file(&files.note, "written", source))
}

/// Returns the daemon that listens on the socket of a program's folder: a process that says so, and
/// that `/proc` shows to be one.
fn listening(control: &Control<'_>) -> Option<Process> {
    let pid = socket::listener(&control.pipe.join(SOCKET)).ok()?;
    let daemons = process::daemons(&control.driver.root.see(control.program), &[control.pipe]);
    daemons.into_iter().find(|daemon| daemon.pid == pid)
}

/// Waits until processes have ended. A process that hangs in the kernel module has not.
fn wait_until_gone(all: &[Process], within: Duration) -> Result<(), SupervisorError> {
    let until = Instant::now() + within;
    loop {
        match all.iter().find(|one| process::lives(one)) {
            None => return Ok(()),
            Some(one) if Instant::now() >= until => {
                return Err(SupervisorError::Stuck { pid: one.pid });
            }
            Some(_) => std::thread::sleep(LOOK),
        }
    }
}

fn wait_for(mut is_so: impl FnMut() -> bool) -> Option<()> {
    let until = Instant::now() + READY_WITHIN;
    loop {
        if is_so() {
            return Some(());
        }
        if Instant::now() >= until {
            return None;
        }
        std::thread::sleep(LOOK);
    }
}

fn file(path: &Path, action: &'static str, source: io::Error) -> SupervisorError {
    SupervisorError::File {
        path: path.to_owned(),
        action,
        source,
    }
}
