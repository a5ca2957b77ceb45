//! Abilities of the driver's programs, found by trying: neither a version nor an exit status says
//! them.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;

use divvy_host::Driver;
use divvy_model::lock;

use super::error::{SupervisorError, file};
use super::files::remove;
use super::known::{COMMAND_WITHIN, CONTROL, GONE_WITHIN, READY_WITHIN};
use super::logs;
use super::programs::{Settings, listening, program};
use super::wait::{wait_for, wait_until_gone};
use crate::control::{Control, Launch};
use crate::process;

/// Folder of the daemons that are tried. No target has such a name.
const FOLDER: &str = "trial";
/// Flags that make a daemon one for programs of all users. Drivers know one of them or none.
const FLAGS: [&str; 2] = ["-multiuser-server", "-M"];

/// The control program that was tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Program {
    device: u64,
    inode: u64,
    changed: (i64, i64),
}

/// Ability of a program.
#[derive(Debug, Clone, Copy)]
struct Tried {
    program: Program,
    for_all: Option<&'static str>,
}

impl Program {
    fn of(path: &Path) -> std::io::Result<Self> {
        let of = fs_err::metadata(path)?;
        Ok(Self {
            device: of.dev(),
            inode: of.ino(),
            changed: (of.ctime(), of.ctime_nsec()),
        })
    }
}

/// Abilities of the driver's programs, once they were tried.
#[derive(Debug, Default)]
pub(super) struct Trial(Mutex<Option<Tried>>);

impl Trial {
    /// Returns how a daemon for programs of all users is started; the error says where none can be.
    /// Each program is tried once.
    pub(super) fn for_all(
        &self,
        settings: &Settings,
        driver: &Driver,
    ) -> Result<Launch, SupervisorError> {
        let inside = program(driver, CONTROL)?;
        let path = driver.root.see(&inside);
        let now = Program::of(&path).map_err(|source| file(&path, "read", source))?;
        // Held while it is tried: two daemons in one folder would be one.
        let mut tried = lock(&self.0);
        let known = tried.filter(|tried| tried.program == now);
        let found = match known {
            Some(known) => known.for_all,
            None => try_flags(settings, driver, &inside)?,
        };
        *tried = Some(Tried {
            program: now,
            for_all: found,
        });
        found
            .map(Launch::ForAll)
            .ok_or_else(|| SupervisorError::OneUser(driver.root.host().to_owned()))
    }

    /// Returns whether servers of protocol v2 can serve programs of all users, by the programs of
    /// the driver that is there now.
    pub(super) fn serves_all_users(&self, settings: &Settings) -> Result<bool, SupervisorError> {
        match self.for_all(settings, &settings.driver()?) {
            Ok(_) => Ok(true),
            Err(SupervisorError::OneUser(_)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// Ends what a trial has left that was cut short.
pub(super) fn end_trial(settings: &Settings) -> Result<(), SupervisorError> {
    let dir = settings.dir.join(FOLDER);
    let pipe = dir.join("pipe");
    end(&process::daemons(&settings.seen_program(CONTROL), &[&pipe]))?;
    remove(&dir)
}

/// Tries the flags, and a daemon without them: where that does not start either, nothing is
/// known.
fn try_flags(
    settings: &Settings,
    driver: &Driver,
    inside: &Path,
) -> Result<Option<&'static str>, SupervisorError> {
    let dir = settings.dir.join(FOLDER);
    let (pipe, log) = (dir.join("pipe"), dir.join("log"));
    let control = Control {
        driver,
        program: inside,
        pipe: &pipe,
        log: &log,
        memory: None,
        // It sees no GPU, and starts no server.
        device: "",
    };
    end_trial(settings)?;
    let ways = FLAGS.map(Launch::ForAll).into_iter();
    let mut done = Ok(None);
    for how in ways.chain([Launch::ForOne]) {
        done = try_one(&control, how).map(|()| match how {
            Launch::ForAll(flag) => Some(flag),
            Launch::ForOne | Launch::Namespaces => None,
        });
        if done.is_ok() {
            break;
        }
    }
    // Nothing of a trial stays, whatever came of it.
    end_trial(settings)?;
    done
}

/// Starts a daemon and ends it. The error is that of one that is not there.
fn try_one(control: &Control<'_>, how: Launch) -> Result<(), SupervisorError> {
    let ours = || process::daemons(&control.driver.root.see(control.program), &[control.pipe]);
    for dir in [control.pipe, control.log] {
        remove(dir)?;
        fs_err::create_dir_all(dir).map_err(|source| file(dir, "created", source))?;
    }
    let launched = control.launch(how, READY_WITHIN);
    // By the daemon itself, whatever the program has said.
    let is_there = match &launched {
        Ok(()) => wait_for(|| listening(control).is_some()).is_some(),
        Err(_) => listening(control).is_some(),
    };
    let answers = is_there.then(|| control.ask("get_server_list", COMMAND_WITHIN));
    end(&ours())?;
    match (answers, launched) {
        (Some(answer), _) => answer.map(drop).map_err(SupervisorError::Control),
        (None, Err(error)) => Err(error.into()),
        (None, Ok(())) => Err(SupervisorError::NotReady {
            what: "daemon",
            log: logs::end_of(control.log),
        }),
    }
}

fn end(daemons: &[process::Process]) -> Result<(), SupervisorError> {
    for daemon in daemons {
        let exe = Path::new("/proc").join(daemon.pid.to_string());
        process::kill(daemon).map_err(|source| file(&exe, "ended", source))?;
    }
    wait_until_gone(daemons, GONE_WITHIN)
}
