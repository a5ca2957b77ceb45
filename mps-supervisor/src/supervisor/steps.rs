//! The steps of [`crate::plan`], done for the daemon of one target.

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::Instant;

use divvy_model::{GpuTarget, MpsProtocol, MpsServer};

use super::error::{SupervisorError, file};
use super::files::Files;
use super::find::find;
use super::known::{
    ACTIVE, COMMAND_WITHIN, CONTROL, GONE_WITHIN, LOOK, QUIT_WITHIN, READY_WITHIN, SERVER,
};
use super::logs;
use super::programs::{Settings, listening, program};
use super::trial::Trial;
use super::wait::{wait_for, wait_until_gone};
use crate::control::{Control, Launch, ServerState};
use crate::memory::{self, Bounds};
use crate::note::{Daemon, Note};
use crate::plan::Step;
use crate::process::{self, Process};
use crate::{cgroup, shared};

/// Daemon of a target with all that its steps need.
#[derive(Clone, Copy)]
pub(super) struct Steps<'a> {
    pub(super) settings: &'a Settings,
    pub(super) trial: &'a Trial,
    pub(super) files: &'a Files,
}

impl Steps<'_> {
    pub(super) fn step(&self, target: &GpuTarget, step: Step) -> Result<(), SupervisorError> {
        tracing::info!(%target, ?step, "MPS daemon");
        match step {
            Step::Kill => return self.kill(),
            Step::Clear(protocol) => return self.clear(protocol),
            Step::Remove => return self.files.remove_all(),
            Step::Ready => return self.files.change_note(|note| note.ready = true),
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
        let done = self
            .settings
            .with_control(self.files, protocol, |control| match step {
                Step::Launch(_) => self.launch(control, protocol),
                Step::SetLimits(server) => {
                    control.set_threads(server.cores, COMMAND_WITHIN)?;
                    if let Some(mib) = server.memory_mib {
                        control.set_memory(mib, COMMAND_WITHIN)?;
                    }
                    self.files.change_note(|note| note.server = server)
                }
                Step::StartServer => self.start_server(control),
                Step::CreateServer => self.create_server(control),
                Step::Quit(_) => self.quit(control, protocol),
                Step::Kill | Step::Clear(_) | Step::Remove | Step::Ready => Ok(()),
            });
        match done {
            // The daemon outlives its driver's files. It is killed by the next step.
            Err(SupervisorError::NoDriver(_)) if matches!(step, Step::Quit(_)) => Ok(()),
            done => done,
        }
    }

    /// Starts the daemon, notes which process it is, and waits until it answers.
    fn launch(&self, control: &Control<'_>, protocol: MpsProtocol) -> Result<(), SupervisorError> {
        // Without the server's program the daemon starts, and every client fails.
        program(control.driver, SERVER)?;
        let how = match protocol {
            MpsProtocol::V2 => self.trial.for_all(self.settings, control.driver)?,
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
            log: logs::end_of(&self.files.log),
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
        note.write(&self.files.note)
            .map_err(|source| file(&self.files.note, "written", source))?;
        wait_for(|| control.greet(protocol, COMMAND_WITHIN).is_ok()).ok_or_else(not_ready)
    }

    /// Starts the server at once and not with the first client: until it has the GPU, which is in
    /// the mode for one process alone, any other process could take it. Waits until it serves by
    /// its own word: it is listed from its fork on, also where it dies a moment later.
    fn start_server(&self, control: &Control<'_>) -> Result<(), SupervisorError> {
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
                Ok(None) => logs::says_ready(&self.files.log, server),
                Err(_) => false,
            }
        };
        let waited = wait_for(serves_or_ended);
        let log = || logs::end_of(&self.files.log);
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
    fn create_server(&self, control: &Control<'_>) -> Result<(), SupervisorError> {
        control.create_server(COMMAND_WITHIN)?;
        let mut state = ServerState::Starting;
        let has_ended = || {
            state = control
                .server_state(COMMAND_WITHIN)
                .unwrap_or(ServerState::Starting);
            state != ServerState::Starting
        };
        let waited = wait_for(has_ended);
        let note = self.files.note()?;
        if waited.is_none()
            || state == ServerState::Failed
            || self
                .settings
                .servers(self.files, note.map(|note| note.daemon.pid))
                .is_empty()
        {
            return Err(SupervisorError::NotReady {
                what: "server",
                log: logs::end_of(&self.files.log),
            });
        }
        Ok(control.cap_default(COMMAND_WITHIN)?)
    }

    /// Asks the daemon to quit and waits for it. A daemon that does not is killed by the next step.
    fn quit(&self, control: &Control<'_>, protocol: MpsProtocol) -> Result<(), SupervisorError> {
        // Judged by the process: the program also fails where a server has not ended well, and
        // returns before the daemon has gone.
        let until = Instant::now() + QUIT_WITHIN;
        let asked = control.quit(protocol, QUIT_WITHIN);
        let (note, _) = find(self.settings, self.files)?;
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
    fn clear(&self, protocol: MpsProtocol) -> Result<(), SupervisorError> {
        let (log, pipe, memory) = (
            &self.files.log,
            self.files.pipe(protocol),
            &self.files.memory,
        );
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
    fn kill(&self) -> Result<(), SupervisorError> {
        let note = self.files.note()?;
        let noted = note.as_ref().and_then(|note| {
            process::read(note.daemon.pid).filter(|process| note.daemon.is(process))
        });
        let servers = self
            .settings
            .servers(self.files, noted.as_ref().map(|daemon| daemon.pid));
        // A start that was cut short has no note.
        let pipes = self.files.pipes.each_ref().map(PathBuf::as_path);
        let daemons = process::daemons(&self.settings.seen_program(CONTROL), &pipes);
        let of_unnoted = daemons
            .iter()
            .flat_map(|one| self.settings.servers(self.files, Some(one.pid)));
        let mut all: Vec<Process> = noted.into_iter().chain(daemons.iter().cloned()).collect();
        all.extend(servers.into_iter().chain(of_unnoted));
        for one in &all {
            process::kill(one)
                .map_err(|source| file(&self.files.dir, "cleared of processes", source))?;
        }
        wait_until_gone(&all, GONE_WITHIN)?;
        match fs_err::remove_file(&self.files.note) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                Err(file(&self.files.note, "removed", error))
            }
            _ => Ok(()),
        }
    }
}
