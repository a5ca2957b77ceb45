//! MPS servers of GPUs and partitions, by way of the supervisor that runs them.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use divvy_gpu::{Cause, ChangeError, MpsSeen, Unwell};
use divvy_model::{
    GpuTarget, GpuUuid, MigUuid, MpsHolder, MpsNamespace, MpsNamespaceName, MpsServer, Target, lock,
};

use super::Hardware;

/// An MPS server that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningServer {
    /// Limits that it was started with.
    pub server: MpsServer,
    /// The partition that it sees; `None` for a whole GPU.
    pub partition: Option<MigUuid>,
    /// Processes of its daemon and its servers: they are no user's.
    pub pids: BTreeSet<u32>,
    /// Its namespaces that are ours.
    pub namespaces: BTreeMap<MpsNamespaceName, MpsNamespace>,
    /// Set if it serves no new program.
    pub unwell: Option<Unwell>,
}

impl RunningServer {
    /// Returns what a goal is compared with.
    pub(crate) fn seen(&self) -> MpsSeen {
        MpsSeen {
            server: self.server,
            partition: self.partition.clone(),
            namespaces: Some(self.namespaces.clone()),
            unwell: self.unwell,
        }
    }
}

/// Server that is to run.
#[derive(Debug, Clone, Copy)]
pub struct ServerStart<'a> {
    /// Its limits.
    pub server: MpsServer,
    /// The partition that it sees, where its target is one.
    pub partition: Option<&'a MigUuid>,
    /// True if a server that runs is ended first, and the new one has its sockets in the folders
    /// that containers have mounted. Otherwise nothing is done where it runs already.
    pub anew: bool,
}

/// Starts and stops MPS servers; filled by the kubelet plugin with the supervisor. Requests for a
/// target are carried out one after the other: an unanswered one is over before the next.
pub trait MpsServers: Send + Sync {
    /// Returns the servers that run, at least those of this GPU, or in words why they are not
    /// known. An answer about all leaves out those of a GPU that are not known. Not past `until`
    /// (time since boot).
    fn running(
        &self,
        of: Option<&GpuUuid>,
        until: Duration,
    ) -> Result<BTreeMap<GpuTarget, RunningServer>, String>;
    /// Returns the process that was last seen to hold up the daemon of a target.
    fn holder(&self, _target: &GpuTarget) -> Option<MpsHolder> {
        None
    }

    /// Starts the server of a target, ready for clients.
    fn start(
        &self,
        target: &GpuTarget,
        start: ServerStart<'_>,
        until: Duration,
    ) -> Result<(), ChangeError>;
    /// Ends the daemon of a target with its servers; nothing if none runs.
    fn stop(&self, target: &GpuTarget, until: Duration) -> Result<(), ChangeError>;
    /// Makes a namespace of a server that runs; nothing if it is there with this size.
    fn put_namespace(
        &self,
        target: &GpuTarget,
        namespace: MpsNamespace,
        until: Duration,
    ) -> Result<(), ChangeError>;
    /// Ends a namespace with the clients that are left in it; nothing if there is none.
    fn remove_namespace(
        &self,
        target: &GpuTarget,
        name: MpsNamespaceName,
        until: Duration,
    ) -> Result<(), ChangeError>;
}

/// A node without MPS.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoMps;

/// Returns the error of a change on a node without a supervisor. Daemons of before may run.
fn switched_off() -> ChangeError {
    ChangeError::NotDone(Cause::new(
        "MPS is switched off (chart value mps.enabled), so that no supervisor is there to do it",
    ))
}

impl MpsServers for NoMps {
    fn running(
        &self,
        _: Option<&GpuUuid>,
        _: Duration,
    ) -> Result<BTreeMap<GpuTarget, RunningServer>, String> {
        Ok(BTreeMap::new())
    }

    fn start(&self, _: &GpuTarget, _: ServerStart<'_>, _: Duration) -> Result<(), ChangeError> {
        Err(switched_off())
    }

    fn stop(&self, _: &GpuTarget, _: Duration) -> Result<(), ChangeError> {
        Err(switched_off())
    }

    fn put_namespace(
        &self,
        _: &GpuTarget,
        _: MpsNamespace,
        _: Duration,
    ) -> Result<(), ChangeError> {
        Err(switched_off())
    }

    fn remove_namespace(
        &self,
        _: &GpuTarget,
        _: MpsNamespaceName,
        _: Duration,
    ) -> Result<(), ChangeError> {
        Err(switched_off())
    }
}

/// Servers that are there once they are started, and compute nothing: a node without hardware.
#[derive(Debug, Default)]
pub struct ListedServers(Mutex<BTreeMap<GpuTarget, RunningServer>>);

impl ListedServers {
    /// Returns them.
    pub fn all(&self) -> BTreeMap<GpuTarget, RunningServer> {
        lock(&self.0).clone()
    }

    /// Ends all of them at once.
    pub fn die(&self) {
        lock(&self.0).clear();
    }

    /// Has one serve no program any more, or serve again.
    pub fn wedge(&self, target: &GpuTarget, unwell: Option<Unwell>) {
        if let Some(running) = lock(&self.0).get_mut(target) {
            running.unwell = unwell;
        }
    }

    fn namespaces(&self, target: &GpuTarget, change: impl FnOnce(&mut RunningServer)) {
        if let Some(running) = lock(&self.0).get_mut(target) {
            change(running);
        }
    }
}

impl MpsServers for ListedServers {
    fn running(
        &self,
        _: Option<&GpuUuid>,
        _: Duration,
    ) -> Result<BTreeMap<GpuTarget, RunningServer>, String> {
        Ok(self.all())
    }

    fn start(
        &self,
        target: &GpuTarget,
        start: ServerStart<'_>,
        _: Duration,
    ) -> Result<(), ChangeError> {
        let running = RunningServer {
            server: start.server,
            partition: start.partition.cloned(),
            pids: BTreeSet::new(),
            namespaces: BTreeMap::new(),
            unwell: None,
        };
        let mut all = lock(&self.0);
        if start.anew {
            all.insert(target.clone(), running);
        } else {
            all.entry(target.clone()).or_insert(running);
        }
        Ok(())
    }

    fn stop(&self, target: &GpuTarget, _: Duration) -> Result<(), ChangeError> {
        lock(&self.0).remove(target);
        Ok(())
    }

    fn put_namespace(
        &self,
        target: &GpuTarget,
        namespace: MpsNamespace,
        _: Duration,
    ) -> Result<(), ChangeError> {
        self.namespaces(target, |running| {
            running.namespaces.insert(namespace.name, namespace);
        });
        Ok(())
    }

    fn remove_namespace(
        &self,
        target: &GpuTarget,
        name: MpsNamespaceName,
        _: Duration,
    ) -> Result<(), ChangeError> {
        self.namespaces(target, |running| {
            running.namespaces.remove(&name);
        });
        Ok(())
    }
}

impl Hardware<'_> {
    /// Returns the servers that run on a GPU.
    pub(super) fn mps_servers(
        self,
        gpu: &GpuUuid,
        until: Duration,
    ) -> Result<BTreeMap<Target, MpsSeen>, String> {
        let running = self.mps.running(Some(gpu), until)?;
        Ok(seen_on(gpu, &running))
    }
}

/// Returns the servers that run on a GPU, as a goal is compared with them.
pub(crate) fn seen_on(
    gpu: &GpuUuid,
    running: &BTreeMap<GpuTarget, RunningServer>,
) -> BTreeMap<Target, MpsSeen> {
    let here = running.iter().filter(|(of, _)| of.gpu == *gpu);
    here.map(|(of, one)| (of.target, one.seen())).collect()
}
