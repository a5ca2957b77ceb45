//! A machine with GPUs, a disk, a CDI folder, an API server and a clock, which outlives the executor that runs on it:
//! the executor's process can die at any call, and power can be lost.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use divvy_cdi::{CommonEdits, ContainerEdits};
use divvy_claims::{
    AllocatedDevice, Allocation, Cause, Claim, ClaimRef, Decision, InstanceId, Observed, Outcome, Phase,
    PodRef, Progress, Record, RecordedDevice, Snapshot, Step, StepError, StepState, Stored,
};
use divvy_executor::{
    Call, CdiDir, ClaimsApi, Clock, ClusterView, DeviceEdits, Durability, EditsError, Entry, Executor,
    ExecutorConfig, Folder, InventorySource, LockError, LockGuard, LockName, Locks, Lookup, MigSteps, Parts,
    PrepareError, ProcessOnGpu, ProcessSource, RunningDevice, Stamp, Steps, Store, TimeSliceError,
    TimeSlices, UnprepareError, Unprepared,
};
use divvy_gpu_sim::SimNode;

use crate::mig_hardware::Hardware;
use divvy_model::{
    ClaimUid, Gpu, GpuError, GpuErrorCode, GpuOp, GpuUuid, Inventory, MigUuid, PciAddress, TimeSlice,
};

pub(crate) const DRIVER: &str = "gpu.divvy.dev";

/// A small deterministic source of chance.
#[derive(Debug, Clone)]
pub(crate) struct Chance(pub u64);

impl Chance {
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        usize::try_from((z ^ (z >> 31)) % u64::try_from(n).unwrap()).unwrap()
    }
    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// Where in a call the process dies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moment {
    Before,
    During,
    After,
}

/// The process dies at the call `in_calls` calls from now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Crash {
    pub in_calls: usize,
    pub moment: Moment,
}

#[derive(Debug, Clone, Default)]
struct File {
    /// What processes see.
    seen: Option<(Vec<u8>, u64)>,
    /// What a loss of power leaves.
    synced: Option<Vec<u8>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Instance {
    pub id: u32,
    pub profile: u32,
    pub start: u32,
    pub size: u32,
    pub uuid: MigUuid,
}

/// A call that has timed out and is still at work in the driver.
#[derive(Debug, Clone)]
enum Late {
    Create { gpu: GpuUuid, profile: u32, start: u32, size: u32 },
    Destroy { gpu: GpuUuid, uuid: MigUuid },
}

/// What the next hardware call does instead of working.
#[derive(Debug, Clone, Copy)]
pub(crate) enum HardwareFault {
    Refuses,
    /// Does its work and answers with an error all the same.
    Lies,
    /// Times out; the driver finishes (or drops) it after a while.
    Late {
        after: Duration,
        succeeds: bool,
    },
}

pub(crate) struct Machine {
    pub now: Duration,
    pub boot: u32,
    pub chance: Chance,
    disk: BTreeMap<(Folder, String), File>,
    writes: u64,
    pub cdi: BTreeMap<String, Vec<u8>>,
    pub instances: BTreeMap<GpuUuid, Vec<Instance>>,
    late: Vec<(Duration, bool, Late)>,
    made: u32,
    pub hardware_fault: Option<HardwareFault>,
    pub processes: BTreeMap<GpuUuid, Vec<ProcessOnGpu>>,
    pub process_error: Option<GpuErrorCode>,
    /// Claims in the API that are allocated here.
    pub api: BTreeMap<ClaimUid, Claim>,
    pub api_down: bool,
    /// How long each question to the API takes.
    pub api_takes: Option<Duration>,
    pub inventory: Option<Arc<Inventory>>,
    pub edits_missing: bool,
    /// Writes into the store or the CDI folder fail so.
    pub write_error: Option<(Place, io::ErrorKind)>,
    crash: Option<Crash>,
    /// The process dies at the next call that begins so.
    pub crash_at: Option<(&'static str, Moment)>,
    /// The executor's process is dead: no call of it has any effect.
    pub dead: bool,
    pub calls: usize,
    /// Changes of the store that were synced: each costs the disk a file and a folder, or a folder.
    pub syncs: usize,
    pub log: Vec<String>,
    /// GPUs that are really cut into partitions; without them `hw` claims get instances of this file.
    pub sim: Option<SimNode>,
    /// Calls of their driver that have timed out and are still at work.
    pub mig_late: Vec<MigLate>,
    /// Time slices that are not the default; `None`: cards that have none that can be set.
    pub slices: Option<BTreeMap<GpuUuid, TimeSlice>>,
    /// What the next change of a time slice does instead.
    pub slice_fault: Option<HardwareFault>,
    /// Pods of the processes on them.
    pub pods: BTreeMap<u32, String>,
}

/// A call of the driver that comes back late.
pub(crate) struct MigLate {
    pub at: Duration,
    pub succeeds: bool,
    pub gpu: GpuUuid,
    pub op: GpuOp,
    pub what: Box<dyn FnOnce(&SimNode) + Send>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Store,
    Cdi,
}

impl Machine {
    /// Counts a call with an effect and says how far it gets. `Err`: the caller hears nothing any more.
    fn enter(&mut self, what: &str) -> Result<Option<Moment>, Dead> {
        if self.dead {
            return Err(Dead);
        }
        self.calls += 1;
        if let Some((at, moment)) = self.crash_at
            && what.starts_with(at)
        {
            self.crash_at = None;
            self.dead = true;
            self.log.push(format!("    dies {moment:?} {what}"));
            return Ok(Some(moment));
        }
        if let Some(crash) = &mut self.crash {
            if crash.in_calls == 0 {
                let moment = crash.moment;
                self.crash = None;
                self.dead = true;
                self.log.push(format!("    dies {moment:?} {what}"));
                return Ok(Some(moment));
            }
            crash.in_calls -= 1;
        }
        Ok(None)
    }

    /// Runs a call that is cut in two at most: `first` is its effect that may be lost, `second` makes it last.
    pub(crate) fn call<R>(
        &mut self,
        what: &str,
        effect: impl FnOnce(&mut Self, bool) -> R,
    ) -> Result<R, Dead> {
        match self.enter(what)? {
            None => Ok(effect(self, true)),
            Some(Moment::Before) => Err(Dead),
            Some(Moment::During) => {
                effect(self, false);
                Err(Dead)
            }
            Some(Moment::After) => {
                effect(self, true);
                Err(Dead)
            }
        }
    }

    pub(crate) fn land(&mut self) {
        let now = self.now;
        let (due, rest) = std::mem::take(&mut self.late).into_iter().partition(|(at, ..)| *at <= now);
        self.late = rest;
        self.settle_late(due);
        let (due, rest): (Vec<_>, _) =
            std::mem::take(&mut self.mig_late).into_iter().partition(|l| l.at <= now);
        self.mig_late = rest;
        for late in due.into_iter().filter(|late| late.succeeds) {
            (late.what)(self.sim.as_ref().unwrap());
        }
    }

    fn settle_late(&mut self, due: Vec<(Duration, bool, Late)>) {
        for (_, succeeds, late) in due {
            if succeeds {
                match late {
                    Late::Create { gpu, profile, start, size } => {
                        drop(self.create(&gpu, profile, start, size));
                    }
                    Late::Destroy { gpu, uuid } => self.destroy(&gpu, &uuid),
                }
            }
        }
    }

    fn create(&mut self, gpu: &GpuUuid, profile: u32, start: u32, size: u32) -> Option<Instance> {
        let on_gpu = self.instances.entry(gpu.clone()).or_default();
        if on_gpu.iter().any(|i| i.start < start + size && start < i.start + i.size) {
            return None;
        }
        // Ids are reused, as NVML does.
        let id = (1..100).find(|id| on_gpu.iter().all(|i| i.id != *id)).unwrap();
        self.made += 1;
        let uuid = format!("MIG-{:04}", self.made).parse().unwrap();
        let made = Instance { id, profile, start, size, uuid };
        on_gpu.push(made.clone());
        Some(made)
    }

    fn destroy(&mut self, gpu: &GpuUuid, uuid: &MigUuid) {
        self.instances.entry(gpu.clone()).or_default().retain(|i| i.uuid != *uuid);
    }

    pub(crate) fn file(&self, folder: Folder, name: &str) -> Option<Vec<u8>> {
        self.disk.get(&(folder, name.to_owned()))?.seen.as_ref().map(|(bytes, _)| bytes.clone())
    }

    /// What a loss of power would leave.
    pub(crate) fn synced(&self, folder: Folder, name: &str) -> Option<Vec<u8>> {
        self.disk.get(&(folder, name.to_owned()))?.synced.clone()
    }

    /// Writes a file behind the executor's back.
    pub(crate) fn put(&mut self, folder: Folder, name: &str, bytes: Option<&[u8]>) {
        self.writes += 1;
        let seen = bytes.map(|b| (b.to_vec(), self.writes));
        self.disk.insert((folder, name.to_owned()), File { seen, synced: bytes.map(<[u8]>::to_vec) });
    }

    pub(crate) fn files(&self, folder: Folder) -> BTreeMap<String, Vec<u8>> {
        let here = self.disk.iter().filter(|((f, _), _)| *f == folder);
        here.filter_map(|((_, name), file)| Some((name.clone(), file.seen.clone()?.0))).collect()
    }

    pub(crate) fn records(&self) -> BTreeMap<ClaimUid, Stored<Record>> {
        let files = self.files(Folder::Claims).into_iter();
        files
            .map(|(name, bytes)| {
                (name.strip_suffix(".json").unwrap().parse().unwrap(), Record::decode(&bytes))
            })
            .collect()
    }

    fn change(&mut self, folder: Folder, name: &str, bytes: Option<&[u8]>, synced: bool) {
        self.writes += 1;
        self.syncs += usize::from(synced);
        let serial = self.writes;
        let file = self.disk.entry((folder, name.to_owned())).or_default();
        file.seen = bytes.map(|b| (b.to_vec(), serial));
        if synced {
            file.synced = bytes.map(<[u8]>::to_vec);
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Dead;

impl From<Dead> for io::Error {
    fn from(_: Dead) -> Self {
        io::Error::other("the process is dead")
    }
}

impl From<Dead> for StepError {
    fn from(_: Dead) -> Self {
        StepError::Unknown(Cause::new("the process is dead"))
    }
}

/// The machine as one process of it sees it: all seams.
#[derive(Clone)]
pub(crate) struct World(
    pub Arc<Mutex<Machine>>,
    Arc<Mutex<Vec<(Duration, Later)>>>,
    Arc<Mutex<Option<Later>>>,
);

/// What happens while somebody waits.
type Later = Box<dyn FnOnce() + Send>;

impl World {
    pub(crate) fn new(gpus: &str, seed: u64) -> Self {
        let inventory = SimNode::parse(gpus).unwrap().inventory();
        Self(
            Arc::new(Mutex::new(Machine {
                now: Duration::from_secs(1000),
                boot: 1,
                chance: Chance(seed),
                disk: BTreeMap::new(),
                writes: 0,
                cdi: BTreeMap::new(),
                instances: BTreeMap::new(),
                late: Vec::new(),
                made: 0,
                hardware_fault: None,
                processes: BTreeMap::new(),
                process_error: None,
                api: BTreeMap::new(),
                api_down: false,
                api_takes: None,
                inventory: Some(Arc::new(inventory)),
                edits_missing: false,
                write_error: None,
                crash: None,
                crash_at: None,
                dead: false,
                calls: 0,
                syncs: 0,
                log: Vec::new(),
                sim: None,
                mig_late: Vec::new(),
                slices: Some(BTreeMap::new()),
                slice_fault: None,
                pods: BTreeMap::new(),
            })),
            Arc::default(),
            Arc::default(),
        )
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, Machine> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
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
        gpus.map(|g| (g.facts.uuid.clone(), g.facts.pci_address)).collect()
    }

    /// Starts the executor's process: GPUs are numbered, nothing is restored yet.
    pub(crate) fn start(&self) -> Executor {
        {
            // What an opened store does: an earlier process may have died between rename and fsync of the folder.
            let mut m = self.lock();
            m.dead = false;
            for file in m.disk.values_mut() {
                file.synced = file.seen.as_ref().map(|(bytes, _)| bytes.clone());
            }
        }
        let boot = format!("boot-{}", self.lock().boot).parse().unwrap();
        let mut config = ExecutorConfig::new(DRIVER, boot);
        let seam = Arc::new(self.clone());
        let steps: Arc<dyn Steps> = if self.lock().sim.is_some() {
            config.toggle_mig = true;
            // What is refused for a while is tried again in the call: often enough.
            config.timing.look_again = Duration::from_secs(4);
            Arc::new(MigSteps::new(Arc::new(Hardware(self.clone()))))
        } else {
            config.decide = with_partitions;
            seam.clone()
        };
        let parts = Parts {
            store: seam.clone(),
            locks: Arc::new(TestLocks::default()),
            cdi: seam.clone(),
            edits: seam.clone(),
            steps,
            time_slices: seam.clone(),
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
        executor
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
        let late = std::mem::take(&mut m.late);
        let chosen = late.into_iter().map(|(at, _, late)| (at, m.chance.one_in(2), late)).collect();
        m.settle_late(chosen);
        for late in std::mem::take(&mut m.mig_late) {
            if m.chance.one_in(2) {
                (late.what)(m.sim.as_ref().unwrap());
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
        m.instances.clear();
        m.slices.iter_mut().for_each(BTreeMap::clear);
        if let Some(sim) = &m.sim {
            sim.edit(divvy_gpu_sim::Engine::reboot);
        }
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

    /// Something that happens that much later, while somebody waits.
    pub(crate) fn later(&self, after: Duration, what: impl FnOnce() + Send + 'static) {
        let at = self.lock().now + after;
        self.1.lock().unwrap().push((at, Box::new(what)));
    }

    /// Something that happens right after the CDI folder is next listed.
    pub(crate) fn after_listing_cdi(&self, what: impl FnOnce() + Send + 'static) {
        *self.2.lock().unwrap() = Some(Box::new(what));
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
        executor.prepare(claim, &call)
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

/// As `decide`, and claims whose name begins with `hw` also get the two halves of each of their GPUs as partitions.
fn with_partitions(claim: &Claim, seen: &Snapshot<'_>) -> Decision {
    let mut decision = divvy_claims::decide(claim, seen);
    if claim.name.starts_with("hw")
        && let Decision::Run(plan) = &mut decision
    {
        let half =
            |gpu: &GpuUuid, start| Step::CreatePartition { gpu: gpu.clone(), profile: 9, start, size: 4 };
        let exclusive = plan.devices.iter().filter(|d| d.kind.needs().is_some());
        let hardware: Vec<_> = exclusive.flat_map(|d| [half(&d.gpu, 0), half(&d.gpu, 4)]).collect();
        plan.steps.splice(0..0, hardware);
    }
    decision
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
        allocation: Allocation {
            allocated_at: Some(allocated_at.to_owned()),
            results: devices.iter().map(|d| result(*d, false)).collect(),
        },
        configs: Vec::new(),
        pods: vec![PodRef { name: format!("{name}-pod"), uid: format!("pod-{name}") }],
    }
}

/// Locks of one process with one thread: one that is not free would never be.
#[derive(Default)]
struct TestLocks(Arc<Mutex<BTreeSet<LockName>>>);

struct Held(Arc<Mutex<BTreeSet<LockName>>>, LockName);

impl Drop for Held {
    fn drop(&mut self) {
        self.0.lock().unwrap().remove(&self.1);
    }
}

impl Locks for TestLocks {
    fn acquire(&self, name: &LockName, _until: Duration) -> Result<LockGuard, LockError> {
        let mut held = self.0.lock().unwrap();
        assert!(held.iter().all(|h| h < name), "{name} is taken after {held:?}");
        assert!(held.insert(name.clone()), "{name} is locked twice");
        Ok(Box::new(Held(self.0.clone(), name.clone())))
    }
}

/// From a full disk files can be removed; from a folder that is mounted read-only they cannot.
fn removable(m: &mut Machine, place: Place) -> io::Result<()> {
    match m.write_error {
        Some((_, io::ErrorKind::StorageFull)) => Ok(()),
        _ => checked(m, place),
    }
}

fn checked(m: &mut Machine, place: Place) -> io::Result<()> {
    match m.write_error {
        Some((at, kind)) if at == place => Err(kind.into()),
        _ => Ok(()),
    }
}

impl Store for World {
    fn list(&self, folder: Folder) -> io::Result<Vec<Entry>> {
        let m = self.lock();
        if m.dead {
            return Err(Dead.into());
        }
        let here = m.disk.iter().filter(|((f, _), _)| *f == folder);
        let entry = |((_, name), file): (&(Folder, String), &File)| {
            Some(Entry { name: name.clone(), stamp: Stamp(file.seen.as_ref()?.1, 0, 0) })
        };
        Ok(here.filter_map(entry).collect())
    }
    fn stamp(&self, _folder: Folder) -> io::Result<Stamp> {
        Ok(Stamp(self.lock().writes, 0, 0))
    }
    fn file_stamp(&self, folder: Folder, name: &str) -> io::Result<Option<Stamp>> {
        let m = self.lock();
        if m.dead {
            return Err(Dead.into());
        }
        let file = m.disk.get(&(folder, name.to_owned()));
        Ok(file.and_then(|file| Some(Stamp(file.seen.as_ref()?.1, 0, 0))))
    }
    fn read(&self, folder: Folder, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut m = self.lock();
        Ok(m.call(&format!("read {}/{name}", folder.name()), |m, _| m.file(folder, name))?)
    }
    fn write(&self, folder: Folder, name: &str, bytes: &[u8], durability: Durability) -> io::Result<()> {
        let mut m = self.lock();
        checked(&mut m, Place::Store)?;
        Ok(m.call(&format!("write {}/{name}", folder.name()), |m, whole| {
            // Cut short: only the temporary file is there, or it has its name but the folder is not synced.
            if whole || m.chance.one_in(2) {
                m.change(folder, name, Some(bytes), whole && durability == Durability::Synced);
            }
        })?)
    }
    fn remove(&self, folder: Folder, name: &str, durability: Durability) -> io::Result<bool> {
        let mut m = self.lock();
        removable(&mut m, Place::Store)?;
        Ok(m.call(&format!("remove {}/{name}", folder.name()), |m, whole| {
            let was_there = m.file(folder, name).is_some();
            m.change(folder, name, None, whole && durability == Durability::Synced);
            was_there
        })?)
    }
}

impl CdiDir for World {
    fn list(&self) -> io::Result<Vec<String>> {
        let listed = self.lock().call("list cdi", |m, _| m.cdi.keys().cloned().collect())?;
        let after = self.2.lock().unwrap().take();
        if let Some(after) = after {
            after();
        }
        Ok(listed)
    }
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        let mut m = self.lock();
        Ok(m.call("read cdi", |m, _| m.cdi.get(name).cloned())?)
    }
    fn exists(&self, name: &str) -> io::Result<bool> {
        let mut m = self.lock();
        Ok(m.call("look at cdi", |m, _| m.cdi.contains_key(name))?)
    }
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let mut m = self.lock();
        checked(&mut m, Place::Cdi)?;
        Ok(m.call(&format!("write {name}"), |m, whole| {
            if whole {
                m.cdi.insert(name.to_owned(), bytes.to_vec());
            }
        })?)
    }
    fn remove(&self, name: &str) -> io::Result<bool> {
        let mut m = self.lock();
        removable(&mut m, Place::Cdi)?;
        Ok(m.call(&format!("remove {name}"), |m, _| m.cdi.remove(name).is_some())?)
    }
    fn place(&self) -> String {
        "/var/run/cdi".to_owned()
    }
}

fn place_of(step: &Step) -> (GpuUuid, u32, u32, u32) {
    match step {
        Step::CreatePartition { gpu, profile, start, size } => (gpu.clone(), *profile, *start, *size),
        _ => panic!("not a step of these tests"),
    }
}

fn outcome_of(made: &Instance) -> Outcome {
    Outcome::Partition { gi: InstanceId(made.id), ci: InstanceId(0), uuid: made.uuid.clone() }
}

impl Steps for World {
    fn before(&self, step: &Step) -> Result<Vec<InstanceId>, StepError> {
        let (gpu, ..) = place_of(step);
        let mut m = self.lock();
        m.land();
        Ok(m.call("look before the step", |m, _| {
            m.instances.get(&gpu).into_iter().flatten().map(|i| InstanceId(i.id)).collect()
        })?)
    }
    fn apply(
        &self,
        step: &Step,
        until: Duration,
        _so_far: &mut dyn FnMut(Outcome),
    ) -> Result<Outcome, StepError> {
        let (gpu, profile, start, size) = place_of(step);
        let mut m = self.lock();
        m.land();
        let fault = m.hardware_fault.take();
        m.call(&step.to_string(), |m, whole| match fault {
            // The process dies while the call is in the driver.
            None if !whole && m.chance.one_in(2) => Err(Dead.into()),
            None => match m.create(&gpu, profile, start, size) {
                Some(made) => Ok(outcome_of(&made)),
                None => Err(StepError::NotDone(Cause::from_gpu(
                    "there is no room",
                    GpuError::on_gpu(GpuOp::Facts, GpuErrorCode::INSUFFICIENT_RESOURCES, &gpu),
                ))),
            },
            Some(HardwareFault::Refuses | HardwareFault::Lies) => {
                Err(StepError::NotDone(Cause::new("the driver refused")))
            }
            Some(HardwareFault::Late { after, succeeds }) => {
                m.now = (m.now + Duration::from_secs(10)).min(until);
                let late = Late::Create { gpu: gpu.clone(), profile, start, size };
                m.late.push((m.now + after, succeeds, late));
                Err(StepError::Unknown(Cause::new("no answer within 10 s")))
            }
        })?
    }
    fn probe(&self, step: &Step, before: &[InstanceId]) -> Observed {
        let (gpu, profile, start, size) = place_of(step);
        let mut m = self.lock();
        m.land();
        let call = m.call("probe", |m, _| {
            if m.late.iter().any(
                |(_, _, l)| matches!(l, Late::Create { gpu: g, start: s, .. } if *g == gpu && *s == start),
            ) {
                return Observed::InFlight;
            }
            let on_gpu = m.instances.get(&gpu).cloned().unwrap_or_default();
            let here: Vec<_> =
                on_gpu.iter().filter(|i| i.start < start + size && start < i.start + i.size).collect();
            match here.as_slice() {
                [] => Observed::Absent,
                [one]
                    if (one.start, one.size, one.profile) == (start, size, profile)
                        && !before.contains(&InstanceId(one.id)) =>
                {
                    Observed::Ours(outcome_of(one))
                }
                other => Observed::Uncertain(format!("{other:?} is there")),
            }
        });
        call.unwrap_or(Observed::InFlight)
    }
    fn living(&self, step: &Step) -> Result<Option<Outcome>, GpuError> {
        Ok(self.filling(step))
    }
    fn undo(&self, step: &Step, outcome: &Outcome) -> Result<(), StepError> {
        let (gpu, ..) = place_of(step);
        let Outcome::Partition { uuid, .. } = outcome else { return Ok(()) };
        let mut m = self.lock();
        m.land();
        let fault = m.hardware_fault.take();
        m.call(&format!("undo: {step}"), |m, whole| match fault {
            None if !whole && m.chance.one_in(2) => Err(Dead.into()),
            None if m
                .late
                .iter()
                .any(|(_, _, l)| matches!(l, Late::Destroy { uuid: u, .. } if u == uuid)) =>
            {
                Err(StepError::NotDone(Cause::new("an earlier call to remove it has not come back")))
            }
            None => {
                m.destroy(&gpu, uuid);
                Ok(())
            }
            Some(HardwareFault::Refuses | HardwareFault::Lies) => {
                Err(StepError::NotDone(Cause::new("the driver refused")))
            }
            Some(HardwareFault::Late { after, succeeds }) => {
                m.now += Duration::from_secs(10);
                let at = m.now + after;
                m.late.push((at, succeeds, Late::Destroy { gpu: gpu.clone(), uuid: uuid.clone() }));
                Err(StepError::Unknown(Cause::new("no answer within 10 s")))
            }
        })?
    }
}

impl TimeSlices for World {
    fn read(&self, gpu: &GpuUuid, _until: Duration) -> Result<Option<TimeSlice>, TimeSliceError> {
        let mut m = self.lock();
        if m.slices.is_none() {
            return Err(TimeSliceError::Unsupported(format!("{gpu} (a Tesla P4) has none")));
        }
        let read = m.call("read the time slice", |m, _| m.slices.as_ref()?.get(gpu).copied());
        read.map(|slice| Some(slice.unwrap_or(TimeSlice::Default)))
            .map_err(|dead| StepError::from(dead).into())
    }
    fn set(&self, gpu: &GpuUuid, to: TimeSlice, _until: Duration) -> Result<(), TimeSliceError> {
        let mut m = self.lock();
        let fault = m.slice_fault.take();
        let done = |m: &mut Machine| {
            let slices = m.slices.as_mut().unwrap();
            slices.remove(gpu);
            slices.extend((to != TimeSlice::Default).then(|| (gpu.clone(), to)));
        };
        let refused = || StepError::NotDone(Cause::new("nvidia-smi has no permission"));
        let unknown = || StepError::Unknown(Cause::new("nvidia-smi did not come back within 10 s"));
        let told = m.call("set the time slice", |m, whole| match fault {
            None if !whole && m.chance.one_in(2) => Err(StepError::from(Dead)),
            None => {
                done(m);
                Ok(())
            }
            Some(HardwareFault::Refuses) => Err(refused()),
            Some(HardwareFault::Late { succeeds: false, .. }) => Err(unknown()),
            Some(HardwareFault::Lies | HardwareFault::Late { .. }) => {
                done(m);
                Err(unknown())
            }
        });
        Ok(told.unwrap_or_else(|dead| Err(dead.into()))?)
    }
}

impl World {
    fn filling(&self, step: &Step) -> Option<Outcome> {
        let (gpu, profile, start, size) = place_of(step);
        let m = self.lock();
        let mut on_gpu = m.instances.get(&gpu)?.iter();
        on_gpu.find(|i| (i.start, i.size, i.profile) == (start, size, profile)).map(outcome_of)
    }
}

impl DeviceEdits for World {
    fn common(&self) -> Result<CommonEdits, EditsError> {
        if self.lock().edits_missing {
            let what = "libcuda.so is not below the driver root (is the driver installed? see --driver-root)"
                .to_owned();
            return Err(EditsError { what, source: None });
        }
        Ok(CommonEdits::new(ContainerEdits::env(["NVIDIA_VISIBLE_DEVICES=void"])).unwrap())
    }
    fn device(
        &self,
        gpu: &Gpu,
        _: &RecordedDevice,
        steps: &[StepState],
    ) -> Result<ContainerEdits, EditsError> {
        let made = steps.iter().filter(|s| matches!(s.progress, Progress::Done { .. })).count();
        Ok(ContainerEdits::env([format!("GPU={}", gpu.facts.uuid), format!("PARTITIONS={made}")]))
    }
}

impl ProcessSource for World {
    fn on_gpu(&self, gpu: &GpuUuid) -> Result<Vec<ProcessOnGpu>, GpuError> {
        let m = self.lock();
        let error = |code| GpuError::on_gpu(GpuOp::Processes, code, gpu);
        if m.dead {
            return Err(error(GpuErrorCode::UNKNOWN));
        }
        match m.process_error {
            Some(code) => Err(error(code)),
            None if m.sim.is_some() => {
                let found = m.sim.as_ref().unwrap().engine().processes(gpu)?;
                let process = |p: divvy_model::GpuProcess| ProcessOnGpu {
                    pid: p.pid,
                    gpu_instance: p.gpu_instance,
                    pod: m.pods.get(&p.pid).cloned(),
                };
                Ok(found.into_iter().map(process).collect())
            }
            None => Ok(m.processes.get(gpu).cloned().unwrap_or_default()),
        }
    }
}

impl InventorySource for World {
    fn inventory(&self) -> Option<Arc<Inventory>> {
        self.lock().inventory.clone()
    }
}

impl ClaimsApi for World {
    fn look_up(&self, uid: &ClaimUid, _: Option<&ClaimRef>, until: Duration) -> Lookup {
        let mut m = self.lock();
        if let Some(takes) = m.api_takes {
            let late = m.now + takes > until;
            m.now = (m.now + takes).min(until.max(m.now));
            if late {
                return Lookup::Unknown("no answer in time".to_owned());
            }
        }
        if m.api_down {
            return Lookup::Unknown("connection refused".to_owned());
        }
        m.api.get(uid).map_or(Lookup::Gone, |claim| Lookup::Found(Box::new(claim.clone())))
    }
}

impl Clock for World {
    fn now(&self) -> Duration {
        self.lock().now
    }
    fn sleep(&self, time: Duration) {
        self.pass(time);
        let now = self.lock().now;
        let due: Vec<_> = self.1.lock().unwrap().extract_if(.., |(at, _)| *at <= now).collect();
        for (_, what) in due {
            what();
        }
    }
}

/// Everything that must not depend on how the machine got there. Names that hardware gives anew each time are left out.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FinalState {
    pub records: BTreeMap<ClaimUid, (Allocation, Phase, Vec<Step>)>,
    pub cdi: BTreeMap<String, String>,
    pub instances: BTreeMap<GpuUuid, Vec<(u32, u32, u32)>>,
    pub gpu_states: BTreeMap<String, Vec<u8>>,
}

pub(crate) fn final_state(world: &World) -> FinalState {
    let m = world.lock();
    let records = m.records().into_iter().map(|(uid, stored)| match stored {
        Stored::Fine(r) => (uid, (r.allocation(), r.phase, r.steps.into_iter().map(|s| s.step).collect())),
        other => panic!("{other:?}"),
    });
    let places = |list: &Vec<Instance>| {
        let mut places: Vec<_> = list.iter().map(|i| (i.profile, i.start, i.size)).collect();
        places.sort_unstable();
        places
    };
    FinalState {
        records: records.collect(),
        cdi: m.cdi.iter().map(|(n, b)| (n.clone(), String::from_utf8(b.clone()).unwrap())).collect(),
        instances: m
            .instances
            .iter()
            .filter(|(_, l)| !l.is_empty())
            .map(|(g, l)| (g.clone(), places(l)))
            .collect(),
        gpu_states: m.files(Folder::Gpus),
    }
}
