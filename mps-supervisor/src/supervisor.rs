//! Starting, finding again and ending of daemons: the steps of [`crate::plan`], one after the other.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use divvy_host::{Driver, DriverAt, DriverRootError, HostRoot};
use divvy_model::{GpuUuid, MpsServer};

use crate::cgroup;
use crate::control::{Control, ControlError};
use crate::note::{Daemon, Note};
use crate::plan::{self, Found, Step};
use crate::process::{self, Process};

/// NVIDIA's programs.
const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";
/// File in the folder of sockets in which a daemon writes its number.
const PID_FILE: &str = "nvidia-cuda-mps-control.pid";
/// Longest path of the folder of sockets with which daemons start: they fail without a word in longer
/// ones.
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
    #[error("process {pid} of the MPS daemon could not be ended")]
    Stuck { pid: u32 },
}

/// A daemon that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Running {
    pub server: MpsServer,
    /// Its processes: the daemon and its servers.
    pub pids: Vec<u32>,
}

/// Keeps the daemons of a node. Shared between threads; the steps for one GPU are done one after the
/// other.
#[derive(Debug)]
pub struct Supervisor {
    settings: Settings,
    locks: Mutex<BTreeMap<GpuUuid, Arc<Mutex<()>>>>,
}

/// The files of one daemon.
struct Files {
    /// The folder of it all.
    dir: PathBuf,
    /// The folder of sockets, which containers have mounted.
    pipe: PathBuf,
    log: PathBuf,
    note: PathBuf,
}

impl Supervisor {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            locks: Mutex::default(),
        }
    }

    /// Returns the daemons that run, by GPU.
    pub fn state(&self) -> Result<BTreeMap<GpuUuid, Running>, SupervisorError> {
        let mut running = BTreeMap::new();
        for gpu in self.known()? {
            let files = self.files(&gpu);
            let (note, found) = Self::find(&files)?;
            if let (Found::Running(server), Some(note)) = (found, note) {
                let servers = self.servers(&files, Some(note.daemon.pid));
                let pids = servers.iter().map(|server| server.pid);
                let pids = pids.chain([note.daemon.pid]).collect();
                running.insert(gpu, Running { server, pids });
            }
        }
        Ok(running)
    }

    /// Ends what an earlier process has left half done: daemons that are dead or not ready, with the
    /// servers that they have left. Daemons that run are kept.
    pub fn adopt(&self) -> Result<usize, SupervisorError> {
        let mut kept = 0;
        for gpu in self.known()? {
            let lock = self.lock(&gpu);
            let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
            let files = self.files(&gpu);
            match Self::find(&files)?.1 {
                Found::Running(_) => kept += 1,
                // The folder stays: the containers of a daemon that has died have it mounted, and get
                // the next one there.
                Found::Remains => self.step(&gpu, &files, Step::Kill)?,
                Found::Nothing => {}
            }
        }
        Ok(kept)
    }

    /// Starts a daemon with one server. Ends what it has started if it fails.
    pub fn start(&self, gpu: &GpuUuid, server: MpsServer) -> Result<(), SupervisorError> {
        let lock = self.lock(gpu);
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.files(gpu);
        if files.pipe.as_os_str().len() > LONGEST {
            return Err(SupervisorError::TooLong(files.pipe));
        }
        let (_, found) = Self::find(&files)?;
        let steps = plan::start(&found, server);
        for step in steps {
            if let Err(error) = self.step(gpu, &files, step) {
                // A start that fails leaves nothing.
                if let Err(left) = self.step(gpu, &files, Step::Kill) {
                    tracing::error!(%gpu, %left, "failed to end what a failed start has left");
                }
                drop(fs_err::remove_file(&files.note));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Ends a daemon with its servers.
    pub fn stop(&self, gpu: &GpuUuid) -> Result<(), SupervisorError> {
        let lock = self.lock(gpu);
        let _guard = lock.lock().unwrap_or_else(PoisonError::into_inner);
        let files = self.files(gpu);
        let (_, found) = Self::find(&files)?;
        for step in plan::stop(&found) {
            self.step(gpu, &files, step)?;
        }
        Ok(())
    }

    fn lock(&self, gpu: &GpuUuid) -> Arc<Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.entry(gpu.clone()).or_default().clone()
    }

    fn files(&self, gpu: &GpuUuid) -> Files {
        let dir = self.settings.dir.join(gpu.as_str());
        Files {
            pipe: dir.join("pipe"),
            log: dir.join("log"),
            note: dir.join("daemon.json"),
            dir,
        }
    }

    /// Returns the GPUs that have a folder.
    fn known(&self) -> Result<Vec<GpuUuid>, SupervisorError> {
        let dir = &self.settings.dir;
        let failed = |source| file(dir, "read", source);
        let mut known = Vec::new();
        for entry in fs_err::read_dir(dir).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            known.extend(name.to_str().and_then(|name| name.parse().ok()));
        }
        Ok(known)
    }

    fn find(files: &Files) -> Result<(Option<Note>, Found), SupervisorError> {
        let note = Note::read(&files.note).map_err(|source| file(&files.note, "read", source))?;
        let process = note
            .as_ref()
            .and_then(|note| process::read(note.daemon.pid));
        let found = plan::judge(note.as_ref(), process.as_ref(), files.dir.exists());
        Ok((note, found))
    }

    fn servers(&self, files: &Files, daemon: Option<u32>) -> Vec<Process> {
        let driver = self.driver().ok();
        let server = driver.and_then(|driver| {
            let inside = program(&driver, SERVER).ok()?;
            Some(driver.root.see(&inside))
        });
        process::servers(daemon, &server.unwrap_or_default(), &files.pipe)
    }

    fn driver(&self) -> Result<Driver, DriverRootError> {
        self.settings.driver.find(&self.settings.host)
    }

    fn step(&self, gpu: &GpuUuid, files: &Files, step: Step) -> Result<(), SupervisorError> {
        tracing::info!(%gpu, ?step, "MPS daemon");
        match step {
            Step::Kill => return self.kill(files),
            Step::Clear => return clear(files),
            Step::Remove => {
                return match fs_err::remove_dir_all(&files.dir) {
                    Err(error) if error.kind() != ErrorKind::NotFound => {
                        Err(file(&files.dir, "removed", error))
                    }
                    _ => Ok(()),
                };
            }
            Step::Quit | Step::Launch | Step::SetLimits(_) | Step::StartServer | Step::Ready => {}
        }
        let driver = match self.driver() {
            // The daemon outlives its driver's files. It is killed by the next step.
            Err(_) if step == Step::Quit => return Ok(()),
            driver => driver?,
        };
        let program = program(&driver, CONTROL)?;
        let control = Control {
            driver: &driver,
            program: &program,
            pipe: &files.pipe,
            log: &files.log,
            gpu: gpu.as_str(),
        };
        match step {
            Step::Launch => self.launch(&control, files),
            Step::SetLimits(server) => {
                control.set_threads(server.cores, COMMAND_WITHIN)?;
                if let Some(mib) = server.memory_mib {
                    control.set_memory(mib, COMMAND_WITHIN)?;
                }
                change_note(files, |note| note.server = server)
            }
            Step::StartServer => Self::start_server(&control, files),
            Step::Ready => change_note(files, |note| note.ready = true),
            Step::Quit => Self::quit(&control, files),
            Step::Kill | Step::Clear | Step::Remove => Ok(()),
        }
    }

    /// Starts the daemon, waits until it answers, and notes which process it is.
    fn launch(&self, control: &Control<'_>, files: &Files) -> Result<(), SupervisorError> {
        // Without the server's program the daemon starts, and every client fails.
        program(control.driver, SERVER)?;
        control.launch(READY_WITHIN)?;
        let answers = || control.ask("get_default_active_thread_percentage", COMMAND_WITHIN);
        wait_for(|| pid_in(files).is_some() && answers().is_ok()).ok_or_else(|| {
            SupervisorError::NotReady {
                what: "daemon",
                log: log_of(files),
            }
        })?;
        let process = pid_in(files).and_then(process::read);
        let process = process.ok_or_else(|| SupervisorError::NotReady {
            what: "daemon",
            log: log_of(files),
        })?;
        if let Some(group) = &self.settings.cgroup {
            // Before it starts a server, which then is there too.
            cgroup::move_to(group, process.pid);
        }
        let note = Note {
            // Until limits are set, it has none.
            server: MpsServer::of_claim(None, None),
            daemon: Daemon {
                pid: process.pid,
                start_ticks: process.start_ticks,
                program: process.program,
            },
            ready: false,
        };
        note.write(&files.note)
            .map_err(|source| file(&files.note, "written", source))
    }

    /// Starts the server at once and not with the first client: until it has the GPU, which is in the
    /// mode for one process alone, any other process could take it.
    fn start_server(control: &Control<'_>, files: &Files) -> Result<(), SupervisorError> {
        control.order("start_server -uid 0", COMMAND_WITHIN)?;
        let lives = |pids: Vec<u32>| pids.into_iter().any(|pid| process::read(pid).is_some());
        wait_for(|| control.servers(COMMAND_WITHIN).is_ok_and(lives)).ok_or_else(|| {
            SupervisorError::NotReady {
                what: "server",
                log: log_of(files),
            }
        })
    }

    /// Asks the daemon to quit and waits for it. A daemon that does not is killed by the next step.
    fn quit(control: &Control<'_>, files: &Files) -> Result<(), SupervisorError> {
        let seconds = QUIT_WITHIN.as_secs();
        if let Err(error) = control.ask(&format!("quit -t {seconds}"), QUIT_WITHIN) {
            tracing::warn!(gpu = control.gpu, %error, "the MPS daemon did not quit, and is killed");
            return Ok(());
        }
        let (note, _) = Self::find(files)?;
        let gone = |note: &Note| {
            process::read(note.daemon.pid).is_none_or(|process| !note.daemon.is(&process))
        };
        let until = Instant::now() + QUIT_WITHIN;
        while Instant::now() < until && !note.as_ref().is_none_or(gone) {
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    /// Kills the daemon and its servers, and waits until they are gone. The daemon first: it would
    /// start another server.
    fn kill(&self, files: &Files) -> Result<(), SupervisorError> {
        let note = Note::read(&files.note).map_err(|source| file(&files.note, "read", source))?;
        let noted = note.as_ref().and_then(|note| {
            process::read(note.daemon.pid).filter(|process| note.daemon.is(process))
        });
        // A start that was cut short has no note; the folder of sockets then was in no container, and
        // its file of the number is the daemon's own.
        let unnoted = || {
            let found = pid_in(files).and_then(process::read)?;
            let driver = self.driver().ok()?;
            let control = program(&driver, CONTROL).ok()?;
            let name = control.file_name()?.to_string_lossy().into_owned();
            (found.program == name).then_some(found)
        };
        let daemon = noted.or_else(|| if note.is_none() { unnoted() } else { None });
        let servers = self.servers(files, daemon.as_ref().map(|daemon| daemon.pid));
        let all: Vec<Process> = daemon.into_iter().chain(servers).collect();
        for one in &all {
            process::kill(one)
                .map_err(|source| file(&files.dir, "cleared of processes", source))?;
        }
        let until = Instant::now() + GONE_WITHIN;
        loop {
            match all.iter().find(|one| process::lives(one)) {
                None => break,
                Some(one) if Instant::now() >= until => {
                    return Err(SupervisorError::Stuck { pid: one.pid });
                }
                Some(_) => std::thread::sleep(LOOK),
            }
        }
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

/// Makes the folders, and removes what an earlier daemon has left in the folder of sockets. The
/// folder itself stays.
fn clear(files: &Files) -> Result<(), SupervisorError> {
    for dir in [&files.pipe, &files.log] {
        fs_err::create_dir_all(dir).map_err(|source| file(dir, "created", source))?;
    }
    // Programs of all users reach the sockets in it.
    let open = std::fs::Permissions::from_mode(0o755);
    fs_err::set_permissions(&files.pipe, open)
        .map_err(|source| file(&files.pipe, "opened", source))?;
    let failed = |source| file(&files.pipe, "cleared", source);
    for entry in fs_err::read_dir(&files.pipe).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let is_dir = entry.file_type().map_err(failed)?.is_dir();
        let removed = if is_dir {
            fs_err::remove_dir_all(entry.path())
        } else {
            fs_err::remove_file(entry.path())
        };
        removed.map_err(failed)?;
    }
    Ok(())
}

fn change_note(files: &Files, change: impl FnOnce(&mut Note)) -> Result<(), SupervisorError> {
    let read = Note::read(&files.note).map_err(|source| file(&files.note, "read", source))?;
    let missing = || file(&files.note, "read", ErrorKind::NotFound.into());
    let mut note = read.ok_or_else(missing)?;
    change(&mut note);
    note.write(&files.note)
        .map_err(|source| file(&files.note, "written", source))
}

fn pid_in(files: &Files) -> Option<u32> {
    let text = fs_err::read_to_string(files.pipe.join(PID_FILE)).ok()?;
    text.trim().parse().ok()
}

/// Returns the last lines of the daemon's logs, as the end of a sentence.
fn log_of(files: &Files) -> String {
    let last = |name: &str| {
        let text = fs_err::read_to_string(files.log.join(name)).ok()?;
        text.lines().last().map(str::to_owned)
    };
    let lines: Vec<String> = ["control.log", "server.log"]
        .into_iter()
        .filter_map(last)
        .collect();
    if lines.is_empty() {
        String::new()
    } else {
        format!(" (its log ends with: {})", lines.join(" / "))
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
