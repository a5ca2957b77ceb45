//! MPS servers of the demo's node: they are there once they are started, and compute nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Mutex;
use std::time::Duration;

use divvy_claims::ChangeError;
use divvy_executor::{MpsServers, RunningServer};
use divvy_model::{GpuUuid, MpsServer, lock};

/// The supervisor of the demo.
#[derive(Debug, Default)]
pub(super) struct Servers(Mutex<BTreeMap<GpuUuid, MpsServer>>);

impl MpsServers for Servers {
    fn running(&self, _until: Duration) -> Result<BTreeMap<GpuUuid, RunningServer>, String> {
        let running = |(gpu, server): (&GpuUuid, &MpsServer)| {
            let pids = BTreeSet::new();
            let server = *server;
            (gpu.clone(), RunningServer { server, pids })
        };
        Ok(lock(&self.0).iter().map(running).collect())
    }

    fn start(&self, gpu: &GpuUuid, server: MpsServer, _: Duration) -> Result<(), ChangeError> {
        lock(&self.0).insert(gpu.clone(), server);
        Ok(())
    }

    fn stop(&self, gpu: &GpuUuid, _: Duration) -> Result<(), ChangeError> {
        lock(&self.0).remove(gpu);
        Ok(())
    }
}
