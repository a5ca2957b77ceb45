//! Fills the executor's seams with the real things: files below the plugin's folder, the host,
//! NVML, the API.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use anyhow::Context;
use divvy_executor::{
    DriverProcesses, Executor, ExecutorConfig, FileCdiDir, FileLocks, FileMetadataDir, FileStore,
    InventorySource, MpsServers, NoMps, Parts, SystemClock,
};
use divvy_host::{DeviceNodes, HookProgram, HostRoot, LibraryDelivery, Smi};
use divvy_model::{GpuDriver, GpuError, GpuFacts, GpuUuid, Inventory};
use tokio::sync::{Notify, watch};

use crate::app::config::{Config, Delivery};
use crate::claims::api::KubeClaims;
use crate::host::edits::HostEdits;
use crate::host::mps::SupervisedMps;
use crate::host::time_slices::SmiSlices;
use crate::node::facts::GpusSeen;

const NO_HOOK: &str = "there is no CDI hook program: --hook-path is not given, and divvy-cdi-hook is not beside this program; with \
     --library-delivery mounts (chart value libraryDelivery) none is needed, and images lose their own LD_LIBRARY_PATH";

/// The latest inventory, for the executor's threads.
pub(crate) struct Latest {
    seen: watch::Receiver<GpusSeen>,
    gpus: Arc<dyn GpuDriver>,
    /// Asks for everything to be read again.
    refresh: Arc<Notify>,
    /// GPUs that were changed since the inventory was read.
    newer: Mutex<BTreeMap<GpuUuid, (Instant, GpuFacts)>>,
}

impl Latest {
    pub(crate) fn new(
        seen: watch::Receiver<GpusSeen>,
        gpus: Arc<dyn GpuDriver>,
        refresh: Arc<Notify>,
    ) -> Self {
        Self {
            seen,
            gpus,
            refresh,
            newer: Mutex::default(),
        }
    }

    fn newer(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, (Instant, GpuFacts)>> {
        crate::lock(&self.newer)
    }
}

impl InventorySource for Latest {
    fn inventory(&self) -> Option<Arc<Inventory>> {
        let GpusSeen {
            inventory, read_at, ..
        } = self.seen.borrow().clone();
        let mut inventory = inventory?;
        let mut newer = self.newer();
        // A full read that began after the change knows it. An earlier one may have read the GPU as
        // it was.
        newer.retain(|_, (at, _)| read_at.is_none_or(|read_at| read_at < *at));
        for (gpu, (_, facts)) in &*newer {
            if let Some(known) = Arc::make_mut(&mut inventory).gpus.get_mut(gpu) {
                known.facts = facts.clone();
            }
        }
        Some(inventory)
    }

    fn changed(&self, gpu: &GpuUuid) -> Result<(), GpuError> {
        // Read on the caller's thread, which may write a CDI file of these facts next: it cannot
        // wait for the next round of the inventory.
        let read = self.gpus.facts(gpu);
        // One that cannot be read is read with the others as soon as it answers.
        self.refresh.notify_one();
        let facts = read?;
        self.newer().insert(gpu.clone(), (Instant::now(), facts));
        Ok(())
    }
}

pub(crate) fn host_edits(config: &Config, host: &HostRoot) -> anyhow::Result<HostEdits> {
    let at = config.driver_at();
    let nodes = match &config.device_nodes {
        None => DeviceNodes::Real,
        Some(table) => {
            let unusable = "the table of --device-nodes cannot be used";
            let text = fs_err::read_to_string(table).context(unusable)?;
            DeviceNodes::from_table(&text).context(unusable)?
        }
    };
    let delivery = match config.library_delivery {
        Delivery::Mounts => LibraryDelivery::MountsOnly,
        Delivery::Hook => {
            let program = config.hook_path.as_ref().context(NO_HOOK)?;
            let installed = divvy_host::install_hook(program, &config.hook_dir)
                .context("the CDI hook cannot be installed")?;
            LibraryDelivery::Hook(HookProgram {
                path: installed.display().to_string(),
                socket: config.hook_socket().display().to_string(),
            })
        }
    };
    let edits = HostEdits::new(host.clone(), at, nodes, delivery);
    Ok(edits.with_mps(config.mps_dir.clone()))
}

/// Returns the client of the node's supervisor of MPS daemons, if there is one.
pub(crate) fn supervisor(config: &Config) -> Option<Arc<SupervisedMps>> {
    let dir = config.mps_dir.as_ref()?;
    let runtime = tokio::runtime::Handle::current();
    let clock = Arc::new(SystemClock);
    let (wedged, host) = (config.timing.mps_wedged, HostRoot::under(&config.host_root));
    let mps = SupervisedMps::new(dir, runtime, clock, wedged, host);
    Some(Arc::new(mps))
}

pub(crate) fn executor(
    config: &Config,
    host: &HostRoot,
    (gpus, mps): (&Arc<dyn GpuDriver>, Option<Arc<dyn MpsServers>>),
    edits: Arc<HostEdits>,
    claims: Arc<KubeClaims>,
    inventory: Arc<Latest>,
) -> anyhow::Result<Executor> {
    let boot = divvy_host::boot_id(host)
        .context("failed to read the node's boot ID (check --host-root)")?;
    let boot = boot
        .parse()
        .context("the node's boot ID is invalid (check --host-root)")?;
    let clock = Arc::new(SystemClock);
    let dir = &config.plugin_dir;
    // Two drivers share the folder of locks, and nothing else.
    let run_dir = config.own_run_dir();
    let unusable = |what: &str| format!("{what} in --plugin-dir {} cannot be used", dir.display());
    let mps = mps.or_else(|| supervisor(config).map(|mps| mps as Arc<dyn MpsServers>));
    let mps = mps.unwrap_or_else(|| Arc::new(NoMps));
    let pods_of = host.clone();
    let parts = Parts {
        store: Arc::new(FileStore::open(dir).with_context(|| unusable("the store of records"))?),
        // Beside the records and not in the shared folder: they are between instances of this
        // driver only.
        locks: Arc::new(
            FileLocks::open(dir.join("locks"), clock.clone())
                .with_context(|| unusable("the folder of locks"))?,
        ),
        cdi: Arc::new(FileCdiDir::new(&config.cdi_dir)),
        metadata: Arc::new(FileMetadataDir::new(run_dir.join("metadata"))),
        edits,
        gpus: gpus.clone(),
        time_slices: Arc::new(SmiSlices {
            host: host.clone(),
            at: config.driver_at(),
            smi: Smi::new(),
            inventory: inventory.clone(),
            clock: clock.clone(),
        }),
        mps,
        processes: Arc::new(DriverProcesses {
            gpus: gpus.clone(),
            pods: move |pids: &[u32]| {
                crate::host::pods::of_processes(&pods_of, pids, &BTreeMap::new())
            },
        }),
        inventory,
        claims,
        clock,
    };
    let settings = ExecutorConfig {
        timing: config.timing.executor,
        lock_dir: config.run_dir.clone(),
        extra_nodes: config.extra_nodes.clone(),
        metadata: config.device_metadata,
        ..ExecutorConfig::new(&*config.driver_name, boot)
    };
    Ok(Executor::new(settings, parts))
}
