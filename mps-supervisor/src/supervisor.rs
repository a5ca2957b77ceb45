//! Starting, finding again and ending of daemons: the steps of [`crate::plan`], one after the
//! other.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use divvy_model::{
    GpuTarget, GpuUuid, MigUuid, MpsNamespace, MpsNamespaceName, MpsProtocol, MpsServer,
};

mod error;
mod files;
mod find;
mod health;
mod known;
mod logs;
mod namespaces;
mod programs;
mod steps;
mod trial;
mod wait;

pub use self::error::SupervisorError;
use self::error::file;
use self::files::Files;
use self::find::find;
use self::health::Health;
pub use self::health::Unwell;
use self::known::LONGEST;
pub use self::programs::Settings;
use self::steps::Steps;
use self::trial::Trial;
use crate::cgroup;
use crate::plan::{self, Found, Step};

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
    health: Health,
    trial: Trial,
}

impl Supervisor {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            locks: Mutex::default(),
            health: Health::default(),
            trial: Trial::default(),
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
        let files = Files::of(&self.settings.dir, target);
        let (note, found) = find(&self.settings, &files)?;
        let (Found::Running(server), Some(note)) = (found, note) else {
            return Ok(None);
        };
        let servers = self.settings.servers(&files, Some(note.daemon.pid));
        let pids = servers.iter().map(|server| server.pid);
        let listed = self
            .health
            .ask(&self.settings, (target, &files), &note, all);
        Ok(Some(Running {
            server,
            partition: note.partition.clone(),
            pids: pids.chain([note.daemon.pid]).collect(),
            namespaces: namespaces::of_rows(listed.as_deref(), &note),
            unwell: self.health.unwell(target, &note),
        }))
    }

    /// Ends what an earlier process has left half done: daemons that are dead or not ready, with
    /// the servers that they have left. Daemons that run are kept.
    pub fn adopt(&self) -> Result<usize, SupervisorError> {
        // A daemon of a trial that hangs keeps none of the others from being found.
        if let Err(error) = trial::end_trial(&self.settings) {
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
        let alone = self.lock(target);
        let _guard = alone.lock().unwrap_or_else(PoisonError::into_inner);
        let files = Files::of(&self.settings.dir, target);
        match find(&self.settings, &files)?.1 {
            Found::Running(_) | Found::Idle(_) => Ok(true),
            // The folder stays: the containers of a daemon that has died have it mounted, and get
            // the next one there.
            Found::Remains => self.steps(&files).step(target, Step::Kill).map(|()| false),
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
        let alone = self.lock(target);
        let _guard = alone.lock().unwrap_or_else(PoisonError::into_inner);
        let mut files = Files::of(&self.settings.dir, target);
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
        let (note, found) = find(&self.settings, &files)?;
        // A daemon of a partition that was made anew since serves no client.
        let is_other = note.is_some_and(|note| note.partition.as_ref() != partition);
        let found = if is_other { Found::Remains } else { found };
        let steps = plan::start(&found, server, anew);
        for step in steps {
            if let Err(error) = self.steps(&files).step(target, step) {
                // A start that fails leaves nothing. A process that could not be ended keeps its
                // note, by which the next try knows it.
                if let Err(left) = self.steps(&files).step(target, Step::Kill) {
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
        let alone = self.lock(target);
        let _guard = alone.lock().unwrap_or_else(PoisonError::into_inner);
        let files = Files::of(&self.settings.dir, target);
        let (_, found) = find(&self.settings, &files)?;
        for step in plan::stop(&found) {
            self.steps(&files).step(target, step)?;
        }
        Ok(())
    }

    fn lock(&self, target: &GpuTarget) -> Arc<Mutex<()>> {
        let mut locks = self.locks.lock().unwrap_or_else(PoisonError::into_inner);
        locks.entry(target.clone()).or_default().clone()
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

    /// Makes a namespace, or one of another size in its place. Leaves nothing if it fails.
    pub fn put_namespace(
        &self,
        target: &GpuTarget,
        namespace: MpsNamespace,
    ) -> Result<(), SupervisorError> {
        let alone = self.lock(target);
        let _guard = alone.lock().unwrap_or_else(PoisonError::into_inner);
        let files = Files::of(&self.settings.dir, target);
        namespaces::put(&self.settings, (target, &files), namespace)
    }

    /// Ends a namespace. Clients that are left in it are ended: their claim is gone.
    pub fn remove_namespace(
        &self,
        target: &GpuTarget,
        name: MpsNamespaceName,
    ) -> Result<(), SupervisorError> {
        let alone = self.lock(target);
        let _guard = alone.lock().unwrap_or_else(PoisonError::into_inner);
        let files = Files::of(&self.settings.dir, target);
        namespaces::end(&self.settings, (target, &files), name)
    }

    /// Returns whether servers of protocol v2 can serve programs of all users, by the programs of
    /// the driver that is there now.
    pub fn serves_all_users(&self) -> Result<bool, SupervisorError> {
        self.trial.serves_all_users(&self.settings)
    }

    fn steps<'a>(&'a self, files: &'a Files) -> Steps<'a> {
        Steps {
            settings: &self.settings,
            trial: &self.trial,
            files,
        }
    }
}
