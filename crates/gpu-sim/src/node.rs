//! [`SimNode`]: one engine shared between threads, as a [`GpuDriver`].

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use divvy_model::health::{GpuEventKind, GpuEvents, GpuVitals};
use divvy_model::mig::{
    ComputeInstance, ComputeInstanceId, ComputeInstanceProfile, ComputeInstanceProfileId,
    GpuInstance, GpuInstanceId, GpuInstanceProfileId, MigCapabilities, Placement,
};
use divvy_model::{
    ComputeMode, GpuDriver, GpuError, GpuErrorCode, GpuFacts, GpuMemory, GpuOp, GpuProcess,
    GpuUuid, HostTopology, Inventory, MemoryLimit, MigActivation, MigDevice, MigMode, MigUuid,
    PciAddress, ProcessSample, SystemFacts,
};

use crate::engine::{Engine, SimGpu};
use crate::fault::{After, Begin, Fault, FaultId};
use crate::health::SimEvent;
use crate::limits::SimGroup;
use crate::spec::{SimSpec, SpecError};
use divvy_boards::Profile;

/// A simulated node. A clone is the same node, as a separate session: it gets the events from then
/// on.
pub struct SimNode {
    shared: Arc<Shared>,
    /// The number of the next event to report.
    next_event: AtomicU64,
    /// GPUs and instances whose multiprocessors were asked about, and which MIG device it was then.
    compared: Mutex<Compared>,
}

type Compared = BTreeMap<(GpuUuid, Option<GpuInstanceId>), Option<MigUuid>>;

impl Clone for SimNode {
    fn clone(&self) -> Self {
        let next_event = self.lock().engine.events_sent().into();
        Self {
            shared: self.shared.clone(),
            next_event,
            compared: Mutex::default(),
        }
    }
}

struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    engine: Engine,
    hanging: usize,
    calls: BTreeMap<GpuOp, u64>,
}

impl SimNode {
    /// A freshly booted node with these GPUs.
    pub fn new(spec: &SimSpec) -> Self {
        Self::from_engine(Engine::new(spec))
    }

    /// [`SimNode::new`] of a text such as `h100x2`.
    pub fn parse(spec: &str) -> Result<Self, SpecError> {
        Ok(Self::new(&spec.parse()?))
    }

    /// A node that goes on where `engine` is.
    pub fn from_engine(engine: Engine) -> Self {
        let next_event = engine.events_sent().into();
        let state = State {
            engine,
            hanging: 0,
            calls: BTreeMap::new(),
        };
        let shared = Shared {
            state: Mutex::new(state),
            changed: Condvar::new(),
        };
        Self {
            shared: Arc::new(shared),
            next_event,
            compared: Mutex::default(),
        }
    }

    /// Opens a session: the node itself, unless `Init` has a fault or the driver is not loaded.
    pub fn open(&self) -> Result<Self, GpuError> {
        self.call(GpuOp::Init, None, |e| e.init())?;
        Ok(self.clone())
    }

    /// Reads or changes the engine; hanging calls look at it again afterwards.
    pub fn edit<R>(&self, edit: impl FnOnce(&mut Engine) -> R) -> R {
        let result = edit(&mut self.lock().engine);
        self.shared.changed.notify_all();
        result
    }

    /// A copy of the engine as it is.
    pub fn engine(&self) -> Engine {
        self.lock().engine.clone()
    }

    /// UUIDs of all GPUs, lost ones included, in PCI order.
    pub fn uuids(&self) -> Vec<GpuUuid> {
        self.lock()
            .engine
            .gpus()
            .iter()
            .map(|g| g.facts.uuid.clone())
            .collect()
    }

    /// See [`Engine::inventory`].
    pub fn inventory(&self) -> Inventory {
        self.lock().engine.inventory()
    }

    /// Where a GPU sits in the host; nothing known about an address without a GPU.
    pub fn topology(&self, address: PciAddress) -> HostTopology {
        self.lock()
            .engine
            .topology()
            .remove(&address)
            .unwrap_or_default()
    }

    /// Sets a fault.
    pub fn fault(&self, fault: Fault) -> FaultId {
        self.edit(|e| e.set_fault(fault))
    }

    /// Lets the calls hanging in a fault go on.
    pub fn release(&self, id: FaultId) {
        self.edit(|e| e.release(Some(id)));
    }

    /// Forgets all faults; hanging calls go on.
    pub fn clear_faults(&self) {
        self.edit(|e| e.clear_faults(None));
    }

    /// Takes a GPU off the bus. Returns true if there is such a GPU.
    pub fn lose_gpu(&self, uuid: &GpuUuid) -> bool {
        self.edit(|e| e.gpu(uuid).map(|g| g.lost = true).is_some())
    }

    /// Brings a lost GPU back. Returns true if there is such a GPU.
    pub fn restore_gpu(&self, uuid: &GpuUuid) -> bool {
        self.edit(|e| e.gpu(uuid).map(|g| g.lost = false).is_some())
    }

    /// Sends an event of a GPU. Returns true if there is such a GPU.
    pub fn send_event(
        &self,
        uuid: &GpuUuid,
        kind: GpuEventKind,
        gpu_instance: Option<u32>,
    ) -> bool {
        self.edit(|e| e.send_event(uuid, kind, gpu_instance))
    }

    /// Adds a GPU while running; `None` when the node is full.
    pub fn add_gpu(&self, profile: &'static Profile) -> Option<GpuUuid> {
        self.edit(|e| e.add_gpu(profile))
    }

    /// Takes a GPU out while running.
    pub fn remove_gpu(&self, uuid: &GpuUuid) -> Option<SimGpu> {
        self.edit(|e| e.remove_gpu(uuid))
    }

    /// Opens a context of a process on a GPU. Returns true if there is such a GPU.
    pub fn start_process(&self, uuid: &GpuUuid, pid: u32) -> bool {
        self.edit(|e| {
            e.gpu(uuid)
                .map(|g| g.processes.insert(GpuProcess::new(pid, None)))
                .is_some()
        })
    }

    /// Opens a context of a process in a GPU instance. Returns true if there is such a GPU.
    pub fn start_process_in(&self, uuid: &GpuUuid, gpu_instance: GpuInstanceId, pid: u32) -> bool {
        let process = GpuProcess::new(pid, Some(gpu_instance.0));
        self.edit(|e| e.gpu(uuid).map(|g| g.processes.insert(process)).is_some())
    }

    /// See [`Engine::set_usage`].
    pub fn set_usage(&self, gpu: &GpuUuid, pid: u32, memory_bytes: Option<u64>, percent: u32) {
        self.edit(|e| e.set_usage(gpu, pid, memory_bytes, percent));
    }

    /// See [`Engine::make_foreign_instance`].
    pub fn make_foreign_instance(
        &self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        start: u32,
    ) -> Result<ComputeInstance, GpuError> {
        self.edit(|e| e.make_foreign_instance(gpu, profile, start))
    }

    /// A process ends: its contexts are gone from all GPUs.
    pub fn end_process(&self, pid: u32) {
        self.edit(|e| e.end_process(pid));
    }

    /// Counts the calls of an operation so far, failed and hanging ones included.
    pub fn calls(&self, op: GpuOp) -> u64 {
        self.lock().calls.get(&op).copied().unwrap_or(0)
    }

    /// Waits until at least `count` calls hang. Returns true if they do in time.
    pub fn wait_until_hanging(&self, count: usize, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut state = self.lock();
        while state.hanging < count {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic in an edit leaves a state that is at worst half edited; the test that panicked
        // has failed anyway.
        self.shared
            .state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes one call: meets the faults, hangs or waits if it must (without the lock), then asks
    /// the engine as it is by then. Half of what a change takes passes before it and half after, so
    /// that a caller who gives up or dies on the way finds it done as well as not done.
    fn call<T>(
        &self,
        op: GpuOp,
        gpu: Option<&GpuUuid>,
        work: impl FnOnce(&mut Engine) -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        let fail = |code| {
            Err(GpuError {
                op,
                code,
                gpu: gpu.cloned(),
                detail: None,
            })
        };
        let mut state = self.lock();
        *state.calls.entry(op).or_default() += 1;
        let mut begin = state.engine.begin(op, gpu);
        if let Begin::Hang(id) = begin {
            (state, begin) = self.hang(state, id);
        }
        if let Begin::Fail(code) = begin {
            return fail(code);
        }
        let half = state.engine.latency.of(op) / 2;
        state = self.wait(state, begin.delay().saturating_add(half));
        let answer = work(&mut state.engine)?;
        self.shared.changed.notify_all();
        state = self.wait(state, half);
        match begin.after() {
            Some(After::Fail(code)) => fail(code),
            Some(After::Hang(id)) => match self.hang(state, id).1 {
                Begin::Fail(code) => fail(code),
                _ => Ok(answer),
            },
            None => Ok(answer),
        }
    }

    /// Hangs until the fault lets go; what comes after.
    fn hang<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        id: FaultId,
    ) -> (MutexGuard<'a, State>, Begin) {
        let mut begin = Begin::Hang(id);
        state.hanging += 1;
        self.shared.changed.notify_all();
        while matches!(begin, Begin::Hang(_)) {
            state = self
                .shared
                .changed
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            begin = state.engine.after_hang(id);
        }
        state.hanging -= 1;
        self.shared.changed.notify_all();
        (state, begin)
    }

    fn wait<'a>(&'a self, state: MutexGuard<'a, State>, time: Duration) -> MutexGuard<'a, State> {
        if time.is_zero() {
            return state;
        }
        drop(state);
        std::thread::sleep(time);
        self.lock()
    }
}

#[deny(clippy::missing_trait_methods)]
impl GpuDriver for SimNode {
    fn system(&self) -> Result<SystemFacts, GpuError> {
        self.call(GpuOp::System, None, |e| e.system())
    }
    fn list(&self) -> Result<Vec<GpuUuid>, GpuError> {
        self.call(GpuOp::List, None, |e| e.list())
    }
    fn facts(&self, gpu: &GpuUuid) -> Result<GpuFacts, GpuError> {
        self.call(GpuOp::Facts, Some(gpu), |e| e.facts(gpu))
    }
    fn mig_mode(&self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        self.call(GpuOp::MigMode, Some(gpu), |e| e.mig_mode(gpu))
    }
    fn persistence_mode(&self, gpu: &GpuUuid) -> Result<bool, GpuError> {
        self.call(GpuOp::PersistenceMode, Some(gpu), |e| {
            e.persistence_mode(gpu)
        })
    }
    fn memory_limit(&self, gpu: &GpuUuid, cgroup: &Path) -> Result<MemoryLimit, GpuError> {
        self.call(GpuOp::MemoryLimit, Some(gpu), |e| {
            e.memory_limit(gpu, &groups(GpuOp::MemoryLimit, gpu, cgroup)?)
        })
    }
    fn set_memory_limit(
        &self,
        gpu: &GpuUuid,
        cgroup: &Path,
        hard: Option<u64>,
    ) -> Result<(), GpuError> {
        self.call(GpuOp::SetMemoryLimit, Some(gpu), |e| {
            e.set_memory_limit(gpu, &groups(GpuOp::SetMemoryLimit, gpu, cgroup)?, hard)
        })
    }
    fn processes(&self, gpu: &GpuUuid) -> Result<Vec<GpuProcess>, GpuError> {
        self.call(GpuOp::Processes, Some(gpu), |e| e.processes(gpu))
    }
    /// Nothing: it keeps nothing open.
    fn release(&self) {}

    /// None: calls block until they are done.
    fn changes_in_flight(&self, _: &GpuUuid) -> Vec<GpuOp> {
        Vec::new()
    }
    fn vitals(&self, gpu: &GpuUuid) -> Result<GpuVitals, GpuError> {
        self.call(GpuOp::Vitals, Some(gpu), |e| e.vitals(gpu))
    }
    fn wait_events(&self, at_most: Duration) -> Result<GpuEvents, GpuError> {
        self.call(GpuOp::Events, None, |e| e.watchable())?;
        let until = Instant::now() + at_most;
        let mut state = self.lock();
        loop {
            let from = self.next_event.load(Ordering::Relaxed);
            let events: Vec<_> = state
                .engine
                .events_from(from)
                .map(SimEvent::to_model)
                .collect();
            let left = until.saturating_duration_since(Instant::now());
            if !events.is_empty() || left.is_zero() {
                self.next_event
                    .store(state.engine.events_sent(), Ordering::Relaxed);
                return Ok(GpuEvents {
                    events,
                    ..GpuEvents::default()
                });
            }
            state.engine.watchable()?;
            state = self
                .shared
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
    }
    fn memory(&self, gpu: &GpuUuid, part: Option<&MigDevice>) -> Result<GpuMemory, GpuError> {
        self.call(GpuOp::Memory, Some(gpu), |e| e.memory(gpu, part))
    }
    fn utilization(&self, gpu: &GpuUuid) -> Result<u32, GpuError> {
        self.call(GpuOp::Utilization, Some(gpu), |e| e.utilization(gpu))
    }
    fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since: u64,
    ) -> Result<Vec<ProcessSample>, GpuError> {
        self.call(GpuOp::ProcessUtilization, Some(gpu), |e| {
            e.process_utilization(gpu, since, since + 1)
        })
    }
    fn sm_utilization(
        &self,
        gpu: &GpuUuid,
        part: Option<&MigDevice>,
    ) -> Result<Option<f64>, GpuError> {
        let instance = part.map(|part| part.gpu_instance);
        let percent = self.call(GpuOp::SmUtilization, Some(gpu), |e| {
            e.sm_busy(gpu, instance)
        })?;
        let uuid = part.map(|part| part.uuid.clone());
        let mut compared = self.compared.lock().unwrap_or_else(PoisonError::into_inner);
        let before = compared.insert((gpu.clone(), instance), uuid.clone());
        Ok((before == Some(uuid)).then_some(percent.into()))
    }
    fn mig_capabilities(&self, gpu: &GpuUuid) -> Result<MigCapabilities, GpuError> {
        self.call(GpuOp::MigCapabilities, Some(gpu), |e| {
            e.mig_capabilities(gpu)
        })
    }
    fn set_mig_mode(&self, gpu: &GpuUuid, on: bool) -> Result<MigActivation, GpuError> {
        self.call(GpuOp::SetMigMode, Some(gpu), |e| e.set_mig_mode(gpu, on))
    }
    fn set_compute_mode(&self, gpu: &GpuUuid, to: ComputeMode) -> Result<(), GpuError> {
        self.call(GpuOp::SetComputeMode, Some(gpu), |e| {
            e.set_compute_mode(gpu, to)
        })
    }
    fn gpu_instances(&self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        self.call(GpuOp::GpuInstances, Some(gpu), |e| e.gpu_instances(gpu))
    }
    fn create_gpu_instance(
        &self,
        gpu: &GpuUuid,
        profile: GpuInstanceProfileId,
        placement: Placement,
    ) -> Result<GpuInstance, GpuError> {
        self.call(GpuOp::CreateGpuInstance, Some(gpu), |e| {
            e.create_gpu_instance(gpu, profile, placement)
        })
    }
    fn destroy_gpu_instance(&self, gpu: &GpuUuid, id: GpuInstanceId) -> Result<(), GpuError> {
        self.call(GpuOp::DestroyGpuInstance, Some(gpu), |e| {
            e.destroy_gpu_instance(gpu, id)
        })
    }
    fn compute_profiles(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstanceProfile>, GpuError> {
        self.call(GpuOp::ComputeProfiles, Some(gpu), |e| {
            e.compute_profiles(gpu, gpu_instance)
        })
    }
    fn compute_instances(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
    ) -> Result<Vec<ComputeInstance>, GpuError> {
        self.call(GpuOp::ComputeInstances, Some(gpu), |e| {
            e.compute_instances(gpu, gpu_instance)
        })
    }
    fn create_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        profile: ComputeInstanceProfileId,
    ) -> Result<ComputeInstance, GpuError> {
        self.call(GpuOp::CreateComputeInstance, Some(gpu), |e| {
            e.create_compute_instance(gpu, gpu_instance, profile)
        })
    }
    fn destroy_compute_instance(
        &self,
        gpu: &GpuUuid,
        gpu_instance: GpuInstanceId,
        id: ComputeInstanceId,
    ) -> Result<(), GpuError> {
        self.call(GpuOp::DestroyComputeInstance, Some(gpu), |e| {
            e.destroy_compute_instance(gpu, gpu_instance, id)
        })
    }
}

impl fmt::Debug for SimNode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.lock();
        f.debug_struct("SimNode")
            .field("gpus", &state.engine.gpus().len())
            .field("hanging", &state.hanging)
            .finish()
    }
}

/// Returns a control group and those above it.
fn groups(op: GpuOp, gpu: &GpuUuid, cgroup: &Path) -> Result<Vec<SimGroup>, GpuError> {
    let missing = |_| GpuError::on_gpu(op, GpuErrorCode::OPERATING_SYSTEM, gpu);
    SimGroup::chain(cgroup).map_err(missing)
}
