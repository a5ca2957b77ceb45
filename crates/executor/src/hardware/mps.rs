//! MPS servers of GPUs, by way of the supervisor that runs them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{Cause, ChangeError};
use divvy_model::{GpuUuid, MpsServer};

use super::Hardware;

/// An MPS server that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunningServer {
    /// Limits that it was started with.
    pub server: MpsServer,
    /// Processes of its daemon and its servers: they are no user's.
    pub pids: BTreeSet<u32>,
}

/// Starts and stops the MPS servers of GPUs; filled by the kubelet plugin with the supervisor. One
/// request after the other is carried out for a GPU: what was asked for and is not answered is over
/// before the next.
pub trait MpsServers: Send + Sync {
    /// Returns the servers that run, or in words why they are not known. Not past `until` (time since
    /// boot).
    fn running(&self, until: Duration) -> Result<BTreeMap<GpuUuid, RunningServer>, String>;
    /// Starts a server, ready for clients; nothing if it runs already.
    fn start(&self, gpu: &GpuUuid, server: MpsServer, until: Duration) -> Result<(), ChangeError>;
    /// Ends the daemon of a GPU with its servers; nothing if none runs.
    fn stop(&self, gpu: &GpuUuid, until: Duration) -> Result<(), ChangeError>;
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
    fn running(&self, _: Duration) -> Result<BTreeMap<GpuUuid, RunningServer>, String> {
        Ok(BTreeMap::new())
    }

    fn start(&self, _: &GpuUuid, _: MpsServer, _: Duration) -> Result<(), ChangeError> {
        Err(switched_off())
    }

    fn stop(&self, _: &GpuUuid, _: Duration) -> Result<(), ChangeError> {
        Err(switched_off())
    }
}

impl Hardware<'_> {
    /// Returns the server that runs on a GPU.
    pub(super) fn mps_server(
        self,
        gpu: &GpuUuid,
        until: Duration,
    ) -> Result<Option<MpsServer>, String> {
        let running = self.mps.running(until)?;
        Ok(running.get(gpu).map(|running| running.server))
    }

    pub(crate) fn start_mps(
        self,
        gpu: &GpuUuid,
        server: MpsServer,
        until: Duration,
    ) -> Result<(), ChangeError> {
        self.mps.start(gpu, server, until)
    }

    pub(crate) fn stop_mps(self, gpu: &GpuUuid, until: Duration) -> Result<(), ChangeError> {
        self.mps.stop(gpu, until)
    }
}
