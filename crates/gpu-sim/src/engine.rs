//! [`Engine`]: the state of a node's GPUs and what NVML would answer about it. No clock, threads or
//! files.

mod boards;

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::health::GpuVitals;
use divvy_model::{
    BootId, CudaVersion, Gpu, GpuError, GpuErrorCode, GpuFacts, GpuMig, GpuOp, GpuProcess, GpuUuid,
    HostTopology, Inventory, MigMode, PciAddress, SystemFacts,
};
use serde::{Deserialize, Serialize};

use crate::fault::{Begin, Fault, FaultId, Faults};
use crate::health::{SimEvent, well};
use crate::limits::SimLimits;
use crate::mig::{MigLatency, SimInstance};
use crate::nvlink::NvLinkShape;
use crate::spec::{MAX_GPUS, SimSpec};
use crate::usage::SimUsage;
use divvy_boards::{NvLinkPort, Profile, cores_per_multiprocessor};

pub(crate) use self::boards::lowest_free;

/// Simulated GPU. Tests may change any field: an unknown architecture, no minor, another size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimGpu {
    /// The board's key in [`crate::profiles`].
    pub model: String,
    /// Facts that NVML answers, but for `nvlinks`, which follow from `nvlink` and who else is
    /// there.
    pub facts: GpuFacts,
    /// Place in the host.
    pub topology: HostTopology,
    /// Its connection to other GPUs.
    pub nvlink: NvLinkShape,
    /// Fell off the bus: still there, but answers nothing but `GPU_IS_LOST`.
    #[serde(default)]
    pub lost: bool,
    /// Processes with a compute context.
    #[serde(default)]
    pub processes: BTreeSet<GpuProcess>,
    /// Others that have the GPU open (monitoring, a daemon): while there are any, MIG mode does not
    /// change.
    #[serde(default)]
    pub clients: BTreeSet<String>,
    /// Minor number that it gets with the next change of its MIG mode: some drivers register the
    /// GPU anew.
    #[serde(default)]
    pub next_minor: Option<u32>,
    /// GPU instances that live, by id.
    #[serde(default)]
    pub instances: Vec<SimInstance>,
    /// Its health.
    #[serde(default = "well")]
    pub vitals: GpuVitals,
    /// Its use.
    #[serde(default)]
    pub usage: SimUsage,
}

impl SimGpu {
    /// Returns whether it forgets what an unload forgets when no program has it open.
    pub fn forgets(&self) -> bool {
        self.facts.persistence == Some(false)
    }

    /// CUDA cores; 0 where the multiprocessors are unknown.
    pub fn cores(&self) -> u32 {
        self.facts.multiprocessors.unwrap_or(0)
            * cores_per_multiprocessor(self.facts.compute_capability)
    }
}

/// A node's GPUs, its driver, and the faults that are set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    boots: u64,
    pub(crate) node_number: u16,
    /// Ever-growing, so that a GPU added later is never mistaken for one that left.
    next_serial: u16,
    driver_loaded: bool,
    /// Driver, NVML and CUDA versions.
    pub system: SystemFacts,
    pub(crate) gpus: Vec<SimGpu>,
    faults: Faults,
    /// Time that changes of MIG take.
    #[serde(default)]
    pub latency: MigLatency,
    /// Compute instances ever made: each has a UUID of its own.
    #[serde(default)]
    pub(crate) compute_instances_made: u64,
    /// The last ones.
    #[serde(default)]
    pub(crate) events: Vec<SimEvent>,
    #[serde(default)]
    pub(crate) events_sent: u64,
    /// Limits of memory by control group.
    #[serde(default)]
    pub limits: SimLimits,
}

impl Engine {
    /// A freshly booted node with these GPUs, MIG off, driver 580.95.05.
    pub fn new(spec: &SimSpec) -> Self {
        let mut engine = Self {
            boots: 1,
            node_number: spec.node_number(),
            next_serial: 0,
            driver_loaded: true,
            system: system(
                "580.95.05",
                CudaVersion {
                    major: 13,
                    minor: 0,
                },
            ),
            gpus: Vec::new(),
            faults: Faults::default(),
            latency: MigLatency::default(),
            compute_instances_made: 0,
            events: Vec::new(),
            events_sent: 0,
            limits: SimLimits::default(),
        };
        for (profile, count) in spec.groups() {
            let baseboard = match profile.make.nvlink {
                NvLinkPort::Sxm { links } if count == 4 => Some(NvLinkShape::Mesh {
                    board: engine.next_board(),
                    links_per_peer: links / 3,
                }),
                _ => None,
            };
            for _ in 0..count {
                engine.add(profile, baseboard);
            }
        }
        engine
    }

    /// All GPUs, in PCI order.
    pub fn gpus(&self) -> &[SimGpu] {
        &self.gpus
    }

    /// Finds a GPU by its place in PCI order (NVML's index while none is lost).
    pub fn gpu_at(&mut self, index: usize) -> Option<&mut SimGpu> {
        self.gpus.get_mut(index)
    }

    /// Finds a GPU by UUID.
    pub fn gpu(&mut self, uuid: &GpuUuid) -> Option<&mut SimGpu> {
        self.gpus.iter_mut().find(|g| g.facts.uuid == *uuid)
    }

    /// Returns the content of `/proc/sys/kernel/random/boot_id`.
    pub fn boot_id(&self) -> BootId {
        #[expect(clippy::expect_used, reason = "the form is fixed; tested")]
        format!("00000000-0000-4000-8000-{:012x}", self.boots)
            .parse()
            .expect("a boot id")
    }

    /// The node is switched off and on: a new boot id, no processes, lost GPUs are back, and MIG
    /// mode is off where it does not survive a driver unload (Hopper and later) and as it was
    /// pending elsewhere.
    pub fn reboot(&mut self) {
        self.boots += 1;
        self.driver_loaded = true;
        for gpu in &mut self.gpus {
            gpu.lost = false;
            gpu.processes.clear();
            gpu.clients.clear();
            gpu.heal();
            gpu.unload();
        }
    }

    /// Returns whether the kernel module is loaded.
    pub fn driver_loaded(&self) -> bool {
        self.driver_loaded
    }

    /// Loads or unloads the kernel module: while it is unloaded every call answers
    /// `DRIVER_NOT_LOADED`, and what does not survive an unload is gone.
    pub fn set_driver_loaded(&mut self, loaded: bool) {
        self.driver_loaded = loaded;
        if !loaded {
            self.gpus.iter_mut().for_each(SimGpu::unload);
        }
    }

    /// The last program that has the GPUs open besides processes and clients closes them: without
    /// persistence mode, a GPU that nothing else has open forgets what an unload forgets.
    pub fn close(&mut self) {
        for gpu in &mut self.gpus {
            if gpu.forgets() && gpu.processes.is_empty() && gpu.clients.is_empty() {
                gpu.unload();
            }
        }
    }

    /// Another driver, as after an upgrade; NVML's version follows.
    pub fn set_driver_version(&mut self, version: &str, cuda: CudaVersion) {
        self.system = system(version, cuda);
    }

    /// Adds a GPU in the first free slot; `None` when the node is full. Its minor is the lowest
    /// free one.
    pub fn add_gpu(&mut self, profile: &'static Profile) -> Option<GpuUuid> {
        (self.gpus.len() < MAX_GPUS).then(|| self.add(profile, None))
    }

    /// Puts a GPU back, as [`Engine::remove_gpu`] gave it.
    pub fn insert_gpu(&mut self, gpu: SimGpu) {
        self.gpus.push(gpu);
        self.gpus.sort_by_key(|g| g.facts.pci_address);
    }

    /// Removes a GPU: from now on the driver does not know it.
    pub fn remove_gpu(&mut self, uuid: &GpuUuid) -> Option<SimGpu> {
        let at = self.gpus.iter().position(|g| g.facts.uuid == *uuid)?;
        let mut gpu = self.gpus.remove(at);
        gpu.unload();
        Some(gpu)
    }

    /// A process ends: its contexts are gone from all GPUs.
    pub fn end_process(&mut self, pid: u32) {
        for gpu in &mut self.gpus {
            gpu.processes.retain(|p| p.pid != pid);
            gpu.usage.busy.remove(&pid);
        }
    }

    /// Sets a fault. If several meet a call, the one set first acts.
    pub fn set_fault(&mut self, fault: Fault) -> FaultId {
        self.faults.set(fault)
    }

    /// Lets the calls that hang in a fault go on (all faults: `None`), and no further call hang in
    /// it.
    pub fn release(&mut self, id: Option<FaultId>) {
        self.faults.release(id);
    }

    /// Forgets a fault (all: `None`); calls hanging in it go on and do their work.
    pub fn clear_faults(&mut self, id: Option<FaultId>) {
        self.faults.clear(id);
    }

    /// Returns whether any fault is set; without one, [`Engine::begin`] changes nothing.
    pub fn has_faults(&self) -> bool {
        !self.faults.is_empty()
    }

    /// To be asked before each call: what the faults make of it. Counts the call against them.
    pub fn begin(&mut self, op: GpuOp, gpu: Option<&GpuUuid>) -> Begin {
        self.faults.begin(op, gpu)
    }

    /// Looks again at a call that [`Engine::begin`] let hang: still `Hang`, or what comes after.
    pub fn after_hang(&self, id: FaultId) -> Begin {
        self.faults.after_hang(id)
    }

    /// Opening a session.
    pub fn init(&self) -> Result<(), GpuError> {
        self.loaded(GpuOp::Init, None)
    }

    /// Returns the branch of the driver: 580 of 580.95.05.
    pub(crate) fn driver_branch(&self) -> Option<u32> {
        self.system.driver_version.split('.').next()?.parse().ok()
    }

    /// See [`divvy_model::GpuDriver::list`].
    pub fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        self.loaded(GpuOp::List, None)?;
        Ok(self
            .gpus
            .iter()
            .filter(|g| !g.lost)
            .map(|g| g.facts.uuid.clone())
            .collect())
    }

    /// See [`divvy_model::GpuDriver::facts`].
    pub fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        Ok(self.facts_of(self.find(GpuOp::Facts, gpu)?))
    }

    /// See [`divvy_model::GpuDriver::mig_mode`].
    pub fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        Ok(self.find(GpuOp::MigMode, gpu)?.facts.mig_mode)
    }

    /// See [`divvy_model::GpuDriver::persistence_mode`].
    pub fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        self.ask(GpuOp::PersistenceMode, gpu, |g| {
            g.facts.persistence.ok_or(GpuErrorCode::NOT_SUPPORTED)
        })
    }

    /// See [`divvy_model::GpuDriver::processes`].
    pub fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        Ok(self
            .find(GpuOp::Processes, gpu)?
            .processes
            .iter()
            .cloned()
            .collect())
    }

    /// Facts of a GPU, faults and loss aside.
    pub fn facts_of(&self, gpu: &SimGpu) -> GpuFacts {
        let registered = gpu.vitals.fabric.is_none_or(|f| f.fault().is_none());
        GpuFacts {
            nvlinks: self.nvlinks(gpu),
            fabric: gpu.facts.fabric.clone().filter(|_| registered),
            memory_reserved_bytes: gpu.facts.memory_bytes.map(|_| gpu.usage.reserved_bytes),
            ..gpu.facts.clone()
        }
    }

    /// Where each GPU sits in the host: what sysfs would say, for readers that have no sysfs.
    pub fn topology(&self) -> BTreeMap<PciAddress, HostTopology> {
        self.gpus
            .iter()
            .map(|g| (g.facts.pci_address, g.topology.clone()))
            .collect()
    }

    /// The inventory a reader would see now, faults aside.
    pub fn inventory(&self) -> Inventory {
        let gpus = self.gpus.iter().filter(|g| !g.lost);
        Inventory {
            system: self.system_facts(),
            gpus: gpus
                .map(|g| {
                    let uuid = g.facts.uuid.clone();
                    let mig = self.mig_capabilities(&uuid).ok().map(|capabilities| {
                        let instances = self.gpu_instances(&uuid).unwrap_or_default();
                        let sole = |id| match &self.compute_instances(&uuid, id).ok()?[..] {
                            [one] => Some((id, one.uuid.clone())),
                            _ => None,
                        };
                        let uuids = instances
                            .iter()
                            .filter_map(|instance| sole(instance.id))
                            .collect();
                        GpuMig {
                            capabilities,
                            instances: Some(instances),
                            uuids,
                        }
                    });
                    (
                        uuid,
                        Gpu {
                            facts: self.facts_of(g),
                            topology: g.topology.clone(),
                            mig,
                        },
                    )
                })
                .collect(),
            problems: Vec::new(),
            with_mig: self
                .gpus
                .iter()
                .filter(|g| !g.lost && g.facts.mig_mode != MigMode::Unsupported)
                .map(|g| (g.facts.uuid.clone(), g.facts.mig_mode))
                .collect(),
        }
    }

    pub(crate) fn loaded(&self, op: GpuOp, gpu: Option<&GpuUuid>) -> Result<(), GpuError> {
        if self.driver_loaded {
            return Ok(());
        }
        Err(GpuError {
            op,
            code: GpuErrorCode::DRIVER_NOT_LOADED,
            gpu: gpu.cloned(),
            detail: None,
        })
    }

    pub(crate) fn find(&self, op: GpuOp, uuid: &GpuUuid) -> Result<&SimGpu, GpuError> {
        self.loaded(op, Some(uuid))?;
        match self.gpus.iter().find(|g| g.facts.uuid == *uuid) {
            None => Err(GpuError::on_gpu(op, GpuErrorCode::NOT_FOUND, uuid)),
            Some(gpu) if gpu.lost => Err(GpuError::on_gpu(op, GpuErrorCode::GPU_IS_LOST, uuid)),
            Some(gpu) => Ok(gpu),
        }
    }
}

fn system(driver: &str, cuda: CudaVersion) -> SystemFacts {
    SystemFacts {
        driver_version: driver.to_owned(),
        nvml_version: Some(format!("{}.{driver}", cuda.major)),
        cuda_version: Some(cuda),
        memory_caps: divvy_model::MemoryCaps::default(),
        caps_linger: false,
        mps: divvy_model::MpsAbility::default(),
    }
}
