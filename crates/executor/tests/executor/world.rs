//! A machine with GPUs, a disk, a CDI folder, an API server and a clock, which outlives the
//! executor that runs on it: the executor's process can die at any call, and power can be lost.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};
use std::time::{Duration, Instant};

use divvy_cdi::{CommonEdits, ContainerEdits};
use divvy_claims::{
    AllocatedDevice, Allocation, Attributes, Claim, ClaimRef, Phase, PodRef, Record,
    RecordedDevice, Stored, Times,
};
use divvy_executor::{
    Call, CdiDir, ClaimsApi, Clock, ClusterView, DeviceEdits, Durability, EditsError, Entry,
    Executor, ExecutorConfig, Folder, InventorySource, LockError, LockGuard, LockName, Locks,
    Lookup, MetadataDir, MpsServers, Parts, PrepareError, ProcessOnGpu, ProcessSource,
    RunningDevice, RunningServer, ServerStart, Stamp, Store, TimeSliceError, TimeSlices,
    UnprepareError, Unprepared,
};
use divvy_gpu::{ChangeError, Unwell};
use divvy_gpu_sim::SimNode;

use crate::mig_hardware::Hardware;
use crate::mig_world::{living, sim};
use divvy_model::{
    AttributeValue, ClaimUid, DeviceKind, Gpu, GpuDriver, GpuError, GpuErrorCode, GpuOp, GpuTarget,
    GpuUuid, Grant, Inventory, MigUuid, MpsAbility, MpsNamespace, MpsNamespaceName, MpsProtocol,
    MpsServer, PciAddress, Target, TimeSlice,
};

pub(crate) const DRIVER: &str = "gpu.divvy.dev";

pub(crate) mod accessors;
mod harm;
mod machine;
mod seams;

use accessors::{Far, GpuPicture, Place3, Settings, picture, place3, places_given};
pub(crate) use harm::Harm;
pub(crate) use machine::*;
use seams::TestLocks;

/// The machine as one process of it sees it: all seams.
#[derive(Clone)]
pub(crate) struct World(
    pub Arc<Mutex<Machine>>,
    Arc<Mutex<Vec<(Duration, Later)>>>,
    Arc<Mutex<Option<Later>>>,
    /// Action before a lock is taken.
    Arc<Mutex<Option<(LockName, usize, Later)>>>,
    /// Action after the records are listed.
    Arc<Mutex<Option<(usize, Later)>>>,
);

/// An action of others in the middle of a call.
type Later = Box<dyn FnOnce() + Send>;

impl World {
    pub(crate) fn new(gpus: &str, seed: u64) -> Self {
        let sim = SimNode::parse(gpus).unwrap();
        let mut inventory = sim.inventory();
        inventory.system.mps = MpsAbility::Available(MpsProtocol::V2);
        Self(
            Arc::new(Mutex::new(Machine {
                now: Duration::from_secs(1000),
                boot: 1,
                chance: Chance(seed),
                disk: BTreeMap::new(),
                writes: 0,
                cdi: BTreeMap::new(),
                metadata: BTreeMap::new(),
                hardware_fault: None,
                processes: BTreeMap::new(),
                process_error: None,
                odd_processes: None,
                api: BTreeMap::new(),
                published: Vec::new(),
                asked: BTreeMap::new(),
                api_down: false,
                look_ups: 0,
                api_takes: None,
                inventory: Some(Arc::new(inventory)),
                edits_missing: false,
                write_error: None,
                fills_up: false,
                crash: None,
                crash_at: None,
                dead: false,
                calls: 0,
                syncs: 0,
                log: Vec::new(),
                locked: BTreeSet::new(),
                sim,
                driver: None,
                is_cut: false,
                grants: 0,
                mig_late: Vec::new(),
                lands_after: None,
                slices: Some(BTreeMap::new()),
                slice_fault: None,
                mps: BTreeMap::new(),
                mps_in: BTreeMap::new(),
                namespaces: BTreeMap::new(),
                wedged: BTreeMap::new(),
                mps_looks: 0,
                no_supervisor: false,
                mps_fault: None,
                pods: BTreeMap::new(),
                among: None,
                bad_blocks: BTreeSet::new(),
                bad_disk: None,
                busy: BTreeSet::new(),
            })),
            Arc::default(),
            Arc::default(),
            Arc::default(),
            Arc::default(),
        )
    }

    /// Locks the machine. A test that locks it twice in one expression fails here, where the lock
    /// alone would wait for ever.
    pub(crate) fn lock(&self) -> MutexGuard<'_, Machine> {
        let mut began = None;
        loop {
            match self.0.try_lock() {
                Ok(machine) => return machine,
                Err(TryLockError::Poisoned(error)) => return error.into_inner(),
                Err(TryLockError::WouldBlock) => {
                    let began = began.get_or_insert_with(Instant::now);
                    let stuck = "the machine is locked already, perhaps in the same expression";
                    assert!(began.elapsed() < Duration::from_secs(30), "{stuck}");
                    std::thread::yield_now();
                }
            }
        }
    }

    /// GPUs by their number.
    pub(crate) fn gpu(&self, number: usize) -> GpuUuid {
        let machine = self.lock();
        let mut gpus: Vec<_> = machine
            .inventory
            .as_ref()
            .unwrap()
            .gpus
            .values()
            .map(|g| (g.facts.pci_address, g.facts.uuid.clone()))
            .collect();
        gpus.sort();
        gpus[number].1.clone()
    }

    fn present(&self) -> Vec<(GpuUuid, PciAddress)> {
        let machine = self.lock();
        let gpus = machine.inventory.iter().flat_map(|i| i.gpus.values());
        gpus.map(|g| (g.facts.uuid.clone(), g.facts.pci_address))
            .collect()
    }

    /// Starts the executor's process: GPUs are numbered, nothing is restored yet.
    pub(crate) fn start(&self) -> Executor {
        {
            // What an opened store does: an earlier process may have died between rename and fsync
            // of the folder.
            let mut m = self.lock();
            m.dead = false;
            for file in m.disk.values_mut() {
                file.synced = file.seen.as_ref().map(|(bytes, _)| bytes.clone());
            }
        }
        let boot = format!("boot-{}", self.lock().boot).parse().unwrap();
        let mut config = ExecutorConfig::new(DRIVER, boot);
        if let Some((dir, driver)) = self.lock().among.clone() {
            config.driver = driver.to_owned();
            config.lock_dir = Some(dir);
        }
        let seam = Arc::new(self.clone());
        if self.lock().is_cut {
            // What is refused for a while is tried again in the call: often enough.
            config.timing.look_again = Duration::from_secs(4);
        }
        let parts = Parts {
            store: seam.clone(),
            locks: Arc::new(TestLocks::new(self.clone())),
            cdi: seam.clone(),
            metadata: seam.clone(),
            edits: seam.clone(),
            gpus: Arc::new(Hardware(self.clone())),
            time_slices: seam.clone(),
            mps: seam.clone(),
            processes: seam.clone(),
            inventory: seam.clone(),
            claims: seam.clone(),
            clock: seam,
        };
        let executor = Executor::new(config, parts);
        // Nothing to crash here: written once on a fresh machine.
        let present = self.present();
        if !present.is_empty() {
            executor.number_gpus(&present, &|_, _| true).unwrap();
        }
        let is_first = self.lock().grants == 0;
        if is_first && self.lock().is_cut {
            self.grant(&executor, true);
        }
        executor
    }

    /// The node's policies let MIG mode of every GPU change, or of none.
    pub(crate) fn grant(&self, executor: &Executor, may: bool) {
        let grant = Grant {
            may_change_mode: Some(may),
            offers_partitions: Some(may),
            share_time_slice: None,
            ..Grant::default()
        };
        let all = self
            .present()
            .into_iter()
            .map(|(gpu, _)| (gpu, grant))
            .collect();
        executor.grant(&all).unwrap();
        self.lock().grants += 1;
    }

    pub(crate) fn crash_in(&self, in_calls: usize, moment: Moment) {
        self.lock().crash = Some(Crash { in_calls, moment });
    }

    pub(crate) fn no_crash(&self) {
        self.lock().crash = None;
    }

    /// The process is killed. A call that is still in the driver ends one way or the other.
    pub(crate) fn kill(&self) {
        let mut m = self.lock();
        m.dead = true;
        m.crash = None;
        for late in std::mem::take(&mut m.mig_late) {
            if m.chance.one_in(2) {
                (late.what)(&m.sim);
            }
        }
    }

    /// Power is lost: what was not synced may be gone, hardware and the CDI folder are as new.
    pub(crate) fn reboot(&self) {
        self.kill();
        let mut m = self.lock();
        m.boot += 1;
        m.now = Duration::from_secs(10);
        m.cdi.clear();
        // Not synced: their names are there, their content need not be.
        m.metadata.values_mut().for_each(Vec::clear);
        m.slices.iter_mut().for_each(BTreeMap::clear);
        m.mps.clear();
        m.mps_in.clear();
        m.wedged.clear();
        m.namespaces.clear();
        m.sim.edit(divvy_gpu_sim::Engine::reboot);
        m.processes.clear();
        m.hardware_fault = None;
        let mut disk = std::mem::take(&mut m.disk);
        for file in disk.values_mut() {
            let seen = file.seen.as_ref().map(|(bytes, _)| bytes.clone());
            if seen != file.synced && m.chance.one_in(2) {
                m.writes += 1;
                file.seen = file.synced.clone().map(|bytes| (bytes, m.writes));
            } else {
                file.synced = seen;
            }
        }
        m.disk = disk;
    }

    /// Something that happens that much later, while a call waits.
    pub(crate) fn later(&self, after: Duration, what: impl FnOnce() + Send + 'static) {
        let at = self.lock().now + after;
        self.1.lock().unwrap().push((at, Box::new(what)));
    }

    /// Something that happens right after the CDI folder is next listed.
    pub(crate) fn after_listing_cdi(&self, what: impl FnOnce() + Send + 'static) {
        *self.2.lock().unwrap() = Some(Box::new(what));
    }

    /// Something that another thread does right after the records are listed for the time after
    /// `times`.
    pub(crate) fn after_listing_records(&self, times: usize, what: impl FnOnce() + Send + 'static) {
        *self.4.lock().unwrap() = Some((times, Box::new(what)));
    }

    /// Something that another process does right before this lock is taken for the time after
    /// `times`: whatever was read until then is old.
    pub(crate) fn before_lock(
        &self,
        name: LockName,
        times: usize,
        what: impl FnOnce() + Send + 'static,
    ) {
        *self.3.lock().unwrap() = Some((name, times, Box::new(what)));
    }

    pub(crate) fn pass(&self, time: Duration) {
        let mut m = self.lock();
        m.now += time;
        m.land();
    }

    pub(crate) fn view(&self) -> ClusterView {
        let m = self.lock();
        ClusterView {
            claims: (!m.api_down).then(|| m.api.clone()),
            running: Some(BTreeSet::<RunningDevice>::new()),
            kubelet_connected_since: Some(Duration::ZERO),
        }
    }

    pub(crate) fn prepare(
        &self,
        executor: &Executor,
        claim: &Claim,
    ) -> Result<divvy_claims::Prepared, PrepareError> {
        let call = self.call(executor);
        // The kubelet has the claim from the API: as long as the call lasts the API has it too,
        // unless a test says more.
        let asked = !self.lock().api.contains_key(&claim.uid);
        if asked {
            self.lock().asked.insert(claim.uid.clone(), claim.clone());
        }
        let answer = executor.prepare(claim, &call);
        if asked {
            self.lock().asked.remove(&claim.uid);
        }
        answer
    }

    pub(crate) fn unprepare(
        &self,
        executor: &Executor,
        uid: &ClaimUid,
    ) -> Result<Unprepared, UnprepareError> {
        let call = self.call(executor);
        executor.unprepare(uid, &call)
    }

    fn call(&self, executor: &Executor) -> Call {
        self.pass(Duration::from_millis(1));
        executor.begin(Duration::from_secs(45))
    }
}

pub(crate) fn result(device: usize, admin_access: bool) -> AllocatedDevice {
    AllocatedDevice {
        request: "main".to_owned(),
        pool: "node-a-gpus".to_owned(),
        device: format!("gpu-{device}").parse().unwrap(),
        share_id: None,
        admin_access,
        consumed_capacity: BTreeMap::new(),
    }
}

pub(crate) fn claim(name: &str, devices: &[usize], allocated_at: &str) -> Claim {
    Claim {
        uid: format!("uid-{name}").parse().unwrap(),
        namespace: "ns".to_owned(),
        name: name.to_owned(),
        pod_claim_name: None,
        classes: BTreeMap::new(),
        times: Times::default(),
        allocation: Allocation {
            allocated_at: Some(allocated_at.to_owned()),
            results: devices.iter().map(|d| result(*d, false)).collect(),
        },
        configs: Vec::new(),
        pods: vec![PodRef {
            name: format!("{name}-pod"),
            uid: format!("pod-{name}"),
        }],
    }
}

/// An allocation, how far it is, and the places of the partitions that it was given.
type Recorded = (Allocation, Phase, Vec<(GpuUuid, Place3)>);

/// Everything that must not depend on how the machine got there. Names that hardware gives anew
/// each time are left out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FinalState {
    pub records: BTreeMap<ClaimUid, Recorded>,
    pub cdi: BTreeMap<String, String>,
    /// Claims and requests that have metadata.
    pub metadata: BTreeSet<(ClaimUid, String)>,
    /// Places of GPU instances, each with the number of compute instances in it.
    pub instances: BTreeMap<GpuUuid, Vec<(Place3, usize)>>,
    /// GPUs whose files say more than what is granted.
    pub gpu_states: BTreeMap<GpuUuid, KeptOfGpu>,
}

/// State that is kept of a GPU, without names that are given anew each time.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct KeptOfGpu {
    /// MIG mode only where partitions are held: off is lazy, an idle GPU may be left on.
    pub settings: Settings,
    /// Claims and places of whole instances.
    pub noted: Vec<(ClaimUid, Place3)>,
    /// Notes of instances that are not whole, and open questions.
    pub unsettled: usize,
}

fn kept_of(picture: GpuPicture) -> KeptOfGpu {
    let (whole, begun): (Vec<_>, Vec<_>) = picture
        .noted
        .into_iter()
        .partition(|note| matches!(note.far, Far::Whole(_)));
    let mut settings = picture.settings;
    if whole.is_empty() {
        settings.mig = None;
    }
    KeptOfGpu {
        settings,
        unsettled: begun.len() + picture.open.len(),
        noted: whole
            .into_iter()
            .map(|note| (note.made_for, place3(&note.place)))
            .collect(),
    }
}

pub(crate) fn final_state(world: &World) -> FinalState {
    let gpus: BTreeSet<_> = sim(world).uuids().into_iter().collect();
    let on = |gpu: &GpuUuid| {
        let mut places: Vec<_> = living(world, gpu)
            .into_iter()
            .map(|(i, inside)| {
                let place = (i.profile.0, i.placement.start, i.placement.size);
                (place, inside.len())
            })
            .collect();
        places.sort_unstable();
        places
    };
    let instances: BTreeMap<_, _> = gpus
        .iter()
        .map(|gpu| (gpu.clone(), on(gpu)))
        .filter(|(_, on)| !on.is_empty())
        .collect();
    let kept = gpus
        .iter()
        .map(|gpu| (gpu.clone(), kept_of(picture(world, gpu))));
    let kept = kept
        .filter(|(_, kept)| *kept != KeptOfGpu::default())
        .collect();
    let m = world.lock();
    let records = m.records().into_iter().map(|(uid, stored)| match stored {
        Stored::Fine(r) => {
            let places = places_given(&r);
            (uid, (r.allocation(), r.phase, places))
        }
        other => panic!("{other:?}"),
    });
    FinalState {
        records: records.collect(),
        cdi: m
            .cdi
            .iter()
            .map(|(n, b)| (n.clone(), String::from_utf8(b.clone()).unwrap()))
            .collect(),
        metadata: m.metadata.keys().cloned().collect(),
        instances,
        gpu_states: kept,
    }
}
