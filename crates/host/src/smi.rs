//! `nvidia-smi`, for the one thing that NVML cannot do: a GPU's time slice (`nvidia-smi
//! compute-policy`).
//!
//! It is the driver's own program and needs the driver's own libraries. From a driver root that is
//! a whole root file system it is run inside that (`chroot`); from one that holds the driver's
//! files only it is run as it is, with the driver's library folders before all others. Either way
//! it is started through this program itself ([`become_other`]), so that it does not outlive a
//! plugin that is killed and act later.

use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use divvy_model::{GpuUuid, TimeSlice};
use rustix::fs::OFlags;
use rustix::mount::MountPropagationFlags;

use crate::driver::{Driver, DriverRoot, PROGRAM_DIRS};

/// Pause between two looks whether the program has ended.
const LOOK: Duration = Duration::from_millis(5);
/// First time between two looks at a child: most answer at once.
const FIRST_LOOK: Duration = Duration::from_millis(1);
/// So many times 4 KiB is more than a pipe holds (64 KiB, unless its program makes it larger).
const READS_AT_ONCE: usize = 64;
/// Time that a killed program may take to be gone. A program that hangs in the kernel module is
/// left behind.
const DIES_WITHIN: Duration = Duration::from_secs(1);
/// So many bytes of each of its two pipes are kept; the rest is read and dropped.
const MOST_TEXT: usize = 16 * 1024;

/// Where dynamic loaders are: a folder that has one is a whole root file system.
const LOADERS: [&str; 3] = [
    "lib64/ld-linux-x86-64.so.2",
    "lib/ld-linux-aarch64.so.1",
    "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2",
];

/// The program that a driver's control program starts.
const MPS_SERVER: &str = "nvidia-cuda-mps-server";

/// The first argument with which a program of divvy becomes another: see [`become_other`].
const AS_OTHER: &str = "run-as-other";

/// The same with a folder, before the others, that the program has as its `/dev/shm`.
const AS_OTHER_WITH: &str = "run-as-other-with";

/// Set when this program's `main` begins with [`become_other`].
static CAN_BECOME: AtomicBool = AtomicBool::new(false);

/// Why `nvidia-smi` did not do what it was asked to.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SmiError {
    /// The driver comes without it.
    #[error(
        "the driver root {} has no nvidia-smi, which sets time slices (install the driver's utilities)",
        .0.display()
    )]
    Absent(PathBuf),
    /// It could not be started.
    #[error("{} cannot be started", program.display())]
    Start {
        program: PathBuf,
        #[source]
        source: io::Error,
    },
    /// The GPU or its driver cannot do it.
    #[error("nvidia-smi reports that this is not supported: {0}")]
    Unsupported(String),
    /// No driver is loaded.
    #[error("nvidia-smi reports that no NVIDIA driver is loaded: {0}")]
    NoDriver(String),
    /// It refused before it changed anything.
    #[error("nvidia-smi refused ({why}): {text}")]
    Refused {
        /// Meaning of its exit code.
        why: &'static str,
        /// Its output.
        text: String,
    },
    /// It ended in an unknown way: its change may have been made.
    #[error("nvidia-smi ended with {status}: {text}")]
    Unclear {
        /// Exit code or signal.
        status: ExitStatus,
        /// Its output.
        text: String,
    },
    /// It did not end in time and was killed: what it was to do may have been done.
    #[error("nvidia-smi did not end within {0:.1?} and was killed")]
    TimedOut(Duration),
    /// An earlier run could be neither finished nor killed, and may still change the GPU.
    #[error(
        "an earlier nvidia-smi hangs and cannot be killed (the NVIDIA kernel module may need a reboot)"
    )]
    Hangs,
}

impl SmiError {
    /// Returns whether what was asked for may have been done all the same.
    pub fn is_unclear(&self) -> bool {
        matches!(self, Self::Unclear { .. } | Self::TimedOut(_))
    }
}

/// Runs `nvidia-smi`.
#[derive(Debug, Default)]
pub struct Smi {
    /// Runs that could not even be killed.
    hanging: Mutex<Vec<Child>>,
    /// A program that begins with [`become_other`].
    helper: Option<PathBuf>,
}

impl Smi {
    /// By way of this program, if its `main` begins with [`become_other`].
    pub fn new() -> Self {
        // Set before `main` starts a thread, so no ordering is needed.
        let helper = CAN_BECOME
            .load(Ordering::Relaxed)
            .then(std::env::current_exe);
        Self {
            hanging: Mutex::default(),
            helper: helper.and_then(Result::ok),
        }
    }

    /// The GPU's time slice; `None` if the answer cannot be understood.
    pub fn time_slice(
        &self,
        driver: &Driver,
        gpu: &GpuUuid,
        within: Duration,
    ) -> Result<Option<TimeSlice>, SmiError> {
        let text = self.run(
            driver,
            &["compute-policy", "-i", gpu.as_str(), "--list"],
            within,
        )?;
        Ok(read_list(&text))
    }

    /// Sets the GPU's time slice. It holds for contexts that are made from then on, until the
    /// driver is unloaded.
    pub fn set_time_slice(
        &self,
        driver: &Driver,
        gpu: &GpuUuid,
        to: TimeSlice,
        within: Duration,
    ) -> Result<(), SmiError> {
        // In two words, as NVIDIA's DRA driver does.
        let number = to.number().to_string();
        let args = [
            "compute-policy",
            "-i",
            gpu.as_str(),
            "--set-timeslice",
            &number,
        ];
        self.run(driver, &args, within).map(drop)
    }

    /// Runs the program to its end or its deadline; returns its output if it succeeds.
    fn run(&self, driver: &Driver, args: &[&str], within: Duration) -> Result<String, SmiError> {
        // A process that hangs may still change the GPU, after the next one has.
        self.none_hangs()?;
        let mut command = self.command(driver)?;
        command
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let program = PathBuf::from(command.get_program());
        let mut child = start_program(&mut command, within).map_err(|source| SmiError::Start {
            program: program.clone(),
            source,
        })?;
        // Its pipes are read while it runs: one that has filled them would never end.
        let (mut out, mut err) = (Said::of(child.stdout.take()), Said::of(child.stderr.take()));
        let ended = wait_while(&mut child, within, || {
            out.read();
            err.read();
        });
        let Some(status) = ended.map_err(|source| SmiError::Start { program, source })? else {
            // Kill it, and remember one that cannot be killed.
            drop(child.kill());
            if !wait(&mut child, DIES_WITHIN).is_ok_and(|status| status.is_some()) {
                self.hanging
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .push(child);
            }
            return Err(SmiError::TimedOut(within));
        };
        // All that it has written is in the pipes by now. Whether they are closed does not matter:
        // a process that it left behind may hold them.
        out.read();
        err.read();
        let said = [out.text(), err.text()].concat();
        if status.success() {
            Ok(said)
        } else {
            Err(judge(status, said.trim().to_owned()))
        }
    }

    /// Fails while an earlier run is alive; forgets those that have ended since.
    fn none_hangs(&self) -> Result<(), SmiError> {
        let mut hanging = self.hanging.lock().unwrap_or_else(PoisonError::into_inner);
        hanging.retain_mut(|child| !matches!(child.try_wait(), Ok(Some(_))));
        if hanging.is_empty() {
            Ok(())
        } else {
            Err(SmiError::Hangs)
        }
    }

    fn command(&self, driver: &Driver) -> Result<Command, SmiError> {
        let root = driver.root.see(Path::new("/"));
        let program = driver
            .nvidia_smi
            .as_ref()
            .ok_or_else(|| SmiError::Absent(driver.root.host().to_owned()))?;
        let by_way_of = |root: &Path, program: &Path| match &self.helper {
            Some(helper) => {
                let mut command = Command::new(helper);
                command.arg(AS_OTHER).arg(root).arg(program);
                command
            }
            None => Command::new(program),
        };
        // Where to run it. The root of this process: as it is. A whole root file system: inside it,
        // where the program finds its libraries and `/dev`. Only files: here, with their folders
        // first.
        let here = Path::new("/");
        if root == here {
            return Ok(by_way_of(here, program));
        }
        if let (Some(_), Ok(inside), true) = (
            &self.helper,
            program.strip_prefix(&root),
            is_whole(&driver.root),
        ) {
            return Ok(by_way_of(&root, &here.join(inside)));
        }
        let folders =
            std::env::join_paths(driver.library_dirs.iter().map(|dir| driver.root.see(dir)));
        let mut command = by_way_of(here, program);
        command.env("LD_LIBRARY_PATH", folders.unwrap_or_default());
        Ok(command)
    }
}

impl Smi {
    /// Returns the command of another program of a driver, by its path inside the driver's root,
    /// with no variables but those by which it finds the driver's programs and libraries. It runs
    /// inside the root of the node where the driver is there, and here where the driver has a root
    /// of its own: the node's files are not in that. With a folder `memory`, it and what it starts
    /// have that as their `/dev/shm`, and no other process: where this program can become another.
    pub fn program(&self, driver: &Driver, inside: &Path, memory: Option<&Path>) -> Command {
        let root = &driver.root;
        if root.host() == Path::new("/") && is_whole(root) {
            let mut command = self.inside(&root.see(Path::new("/")), inside, memory);
            let top = Path::new("/");
            let programs = std::env::join_paths(program_folders(root, inside, |dir| top.join(dir)));
            command
                .env_clear()
                .env("PATH", programs.unwrap_or_default());
            return command;
        }
        let program = root.see(inside);
        let libraries = driver.library_dirs.iter().map(|dir| root.see(dir));
        let libraries = std::env::join_paths(libraries).unwrap_or_default();
        let programs = program_folders(root, inside, |dir| root.see(dir)).into_iter();
        // Those of this root come last.
        let programs = programs.chain(["/usr/bin", "/bin"].map(PathBuf::from));
        let programs = std::env::join_paths(programs).unwrap_or_default();
        let mut command = self.inside(Path::new("/"), &program, memory);
        command
            .env_clear()
            .env("PATH", programs)
            .env("LD_LIBRARY_PATH", libraries);
        command
    }

    /// Another program of this root, run inside it where this program can.
    pub(crate) fn inside(&self, root: &Path, program: &Path, memory: Option<&Path>) -> Command {
        match &self.helper {
            Some(helper) => {
                let mut command = Command::new(helper);
                match memory {
                    Some(memory) => command.arg(AS_OTHER_WITH).arg(memory),
                    None => command.arg(AS_OTHER),
                };
                command.arg(root).arg(Path::new("/").join(program));
                command
            }
            None => Command::new(root.join(program)),
        }
    }
}

/// Returns the folders in which a program of a driver looks for others, as it sees them, each once:
/// that of the MPS server first, which the control program starts by its name alone, then its own,
/// then all in which divvy looks. Debian has the server in `/usr/sbin`, away from the control
/// program.
fn program_folders(
    root: &DriverRoot,
    inside: &Path,
    as_seen: impl Fn(&Path) -> PathBuf,
) -> Vec<PathBuf> {
    let server = root.find_program(MPS_SERVER).ok().flatten();
    let first = [server.as_deref(), Some(inside)];
    let first = first.into_iter().flatten().filter_map(Path::parent);
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in first.chain(PROGRAM_DIRS.iter().map(Path::new)) {
        let folder = as_seen(folder);
        if !folders.contains(&folder) {
            folders.push(folder);
        }
    }
    folders
}

/// Returns whether programs can run with this folder as their root and find GPUs there. Links lead
/// where they do in that root: what they lead to in ours is there on a developer's machine, and not
/// in an image.
fn is_whole(root: &DriverRoot) -> bool {
    let has = |path: &str| {
        root.resolve(Path::new(path))
            .is_ok_and(|found| found.is_some())
    };
    has("dev/nvidiactl") && LOADERS.iter().any(|loader| has(loader))
}

/// Starts a program; one that is just being installed is waited for.
pub fn start_program(command: &mut Command, within: Duration) -> io::Result<Child> {
    let until = Instant::now() + within;
    loop {
        match command.spawn() {
            Err(error)
                if error.kind() == io::ErrorKind::ExecutableFileBusy
                    && Instant::now() + LOOK < until =>
            {
                std::thread::sleep(LOOK);
            }
            other => return other,
        }
    }
}

/// Waits for a process to end; `None` if it has not in time.
pub(crate) fn wait(child: &mut Child, within: Duration) -> io::Result<Option<ExitStatus>> {
    wait_while(child, within, || {})
}

/// Waits as [`wait`] does, and does something between two looks.
pub fn wait_while(
    child: &mut Child,
    within: Duration,
    mut meanwhile: impl FnMut(),
) -> io::Result<Option<ExitStatus>> {
    let until = Instant::now() + within;
    let mut pause = FIRST_LOOK;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(None);
        }
        meanwhile();
        std::thread::sleep(left.min(pause));
        pause = (pause * 2).min(LOOK);
    }
}

/// A pipe of a program, and the beginning of what came through it.
struct Said<P> {
    pipe: Option<P>,
    kept: Vec<u8>,
}

impl<P: Read + AsFd> Said<P> {
    /// Takes a pipe. A pipe that cannot be made not to block is not read at all.
    fn of(pipe: Option<P>) -> Self {
        let pipe = pipe.filter(|pipe| {
            let flags = rustix::fs::fcntl_getfl(pipe);
            flags
                .and_then(|flags| rustix::fs::fcntl_setfl(pipe, flags | OFlags::NONBLOCK))
                .is_ok()
        });
        Self {
            pipe,
            kept: Vec::new(),
        }
    }

    /// Reads what is there, without waiting for more: at most what a pipe holds at once, so that
    /// a program that never stops talking is still looked at.
    fn read(&mut self) {
        let Some(pipe) = &mut self.pipe else { return };
        let mut part = [0; 4096];
        for _ in 0..READS_AT_ONCE {
            match pipe.read(&mut part) {
                Ok(0) => {
                    self.pipe = None;
                    return;
                }
                Ok(count) => {
                    let room = MOST_TEXT.saturating_sub(self.kept.len());
                    self.kept.extend(part.iter().take(count.min(room)));
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // Nothing more now.
                Err(_) => return,
            }
        }
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.kept).into_owned()
    }
}

/// Translates an exit code (`man nvidia-smi`, "return value").
fn judge(status: ExitStatus, text: String) -> SmiError {
    let refused = |why| SmiError::Refused {
        why,
        text: text.clone(),
    };
    match status.code() {
        Some(2) => {
            refused("it does not know the arguments; drivers before 455 cannot set a time slice")
        }
        // 3: by the GPU; 13: by the driver's library.
        Some(3 | 13) => SmiError::Unsupported(text),
        Some(4) => refused("no permission: the plugin must run as root"),
        Some(6) => refused("it does not find the GPU"),
        Some(8) => refused("the GPU's power cables are not attached"),
        Some(9) => SmiError::NoDriver(text),
        Some(12) => refused("it does not find libnvidia-ml.so.1"),
        Some(15) => refused("the GPU has fallen off the bus"),
        // The code of this program as the helper, and that of a loader that lacks a library.
        Some(HELPER_FAILED) => refused("it could not be run inside the driver root"),
        Some(127) => refused("it could not be run"),
        // 10 (interrupts) and 14 (infoROM) are faults of a GPU, 255 is anything else.
        Some(_) | None => SmiError::Unclear { status, text },
    }
}

/// Finds `Timeslice` and its value, however the table around them is drawn.
fn read_list(text: &str) -> Option<TimeSlice> {
    let line = text
        .lines()
        .find(|line| line.to_ascii_lowercase().contains("timeslice"))?;
    let mut words = line.split(|c: char| !c.is_ascii_alphanumeric());
    words.find_map(|word| {
        TimeSlice::ALL
            .into_iter()
            .find(|slice| slice.name().eq_ignore_ascii_case(word))
    })
}

/// Exit code of a helper that did not get as far as the program.
const HELPER_FAILED: i32 = 126;

/// Serves the first lines of a program's `main`: if its arguments are `run-as-other ROOT PROGRAM …`
/// or `run-as-other-with MEMORY ROOT PROGRAM …`, becomes that program with that root and memory,
/// which dies with the one that started it, and does not come back; the exit code if that fails.
/// `None` if the arguments are others.
pub fn become_other(args: impl IntoIterator<Item = OsString>) -> Option<u8> {
    CAN_BECOME.store(true, Ordering::Relaxed);
    let mut args = args.into_iter().skip(1);
    let first = args.next()?;
    let memory = match first.to_str()? {
        AS_OTHER => None,
        AS_OTHER_WITH => Some(PathBuf::from(args.next()?)),
        _ => return None,
    };
    let (root, program) = (PathBuf::from(args.next()?), args.next()?);
    let entered = enter(&root, memory.as_deref());
    let error = match entered {
        Ok(()) => Command::new(&program).args(args).exec(),
        Err(error) => error.into(),
    };
    let text = format!(
        "cannot run {} in {}: {error}\n",
        program.display(),
        root.display()
    );
    drop(io::Write::write_all(&mut io::stderr(), text.as_bytes()));
    u8::try_from(HELPER_FAILED).ok()
}

/// Makes this process one that dies with the one that started it, with this `/dev/shm` and root.
fn enter(root: &Path, memory: Option<&Path>) -> rustix::io::Result<()> {
    // First the signal: from here on it dies with the process that started it.
    rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::KILL))?;
    if let Some(memory) = memory {
        // In mounts of its own: those of others come to it, and its own go nowhere.
        #[expect(
            deprecated,
            reason = "unsafe for open files alone, which are not unshared; this process has one thread"
        )]
        rustix::thread::unshare(rustix::thread::UnshareFlags::NEWNS)?;
        let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
        rustix::mount::mount_change("/", flags)?;
        rustix::mount::mount_bind(memory, root.join("dev/shm"))?;
    }
    if root != Path::new("/") {
        rustix::process::chroot(root)?;
        // Without it, the working directory would stay outside of the new root.
        rustix::process::chdir("/")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
