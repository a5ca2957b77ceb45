//! The safe half of the bridge: sessions, handles and faults. `abi` is only pointers.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use divvy_gpu_sim::{After, Begin, Engine, FaultId, SimEvent, SimGpu};
use divvy_model::mig::{ComputeInstance, ComputeInstanceId, GpuInstanceId};
use divvy_model::{GpuError, GpuErrorCode, GpuOp, GpuUuid, MigUuid};

use crate::generations::Generation;
use crate::state::MockState;
use crate::trial;

/// Pause between two looks of a hanging call whether it may go on.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

/// Pause between two looks of a wait for events.
const LOOK_FOR_EVENTS: Duration = Duration::from_millis(200);

/// So far apart samples of the performance monitors have to be.
const APART: Duration = Duration::from_millis(100);

static SESSION: Mutex<Session> = Mutex::new(Session {
    users: 0,
    state: None,
    handles: Vec::new(),
    event_sets: BTreeMap::new(),
    sets_made: 0,
    gpm_samples: BTreeMap::new(),
});

struct Session {
    /// `nvmlInit` less `nvmlShutdown`.
    users: u32,
    state: Option<Arc<MockState>>,
    /// The handle of a thing is its place here plus one: the same for the life of the process.
    handles: Vec<Thing>,
    /// By number.
    event_sets: BTreeMap<u64, EventSet>,
    sets_made: u64,
    /// By number; empty until one is taken.
    gpm_samples: BTreeMap<u64, Option<GpmSample>>,
}

/// Content of a sample of the performance monitors.
#[derive(Clone, PartialEq)]
struct GpmSample {
    gpu: GpuUuid,
    instance: Option<GpuInstanceId>,
    at: Instant,
    percent: u32,
}

/// An event set: undefined after a registration that failed, fit only to be freed.
#[derive(Default)]
struct EventSet {
    /// The GPUs in it, and the number of the next event of each.
    members: BTreeMap<GpuUuid, u64>,
    is_undefined: bool,
}

/// Object that a handle stands for, whether or not it is there. Handles of one kind do for no
/// other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Thing {
    Gpu(GpuUuid),
    GpuInstance(GpuUuid, GpuInstanceId),
    ComputeInstance(GpuUuid, GpuInstanceId, ComputeInstanceId),
    /// The MIG device of one compute instance: ends with it, whatever gets its ids afterwards.
    MigDevice(GpuUuid, MigUuid),
    /// An event set, by its number.
    EventSet(u64),
    /// A sample of the performance monitors, by its number.
    GpmSample(u64),
}

fn session() -> MutexGuard<'static, Session> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

fn opened() -> Result<Arc<MockState>, GpuErrorCode> {
    let opened = trial::in_memory().map_or_else(|| open_state().map(Arc::new), Ok);
    opened.map_err(|message| {
        complain(&message);
        GpuErrorCode::UNKNOWN
    })
}

/// The engine for calls that need no session, and no driver.
pub(crate) fn beside_sessions() -> Result<Arc<Engine>, GpuErrorCode> {
    read(&state().or_else(|_| opened())?)
}

/// Fails without a session.
pub(crate) fn ready() -> Result<(), GpuErrorCode> {
    state().map(drop)
}

pub(crate) fn init() -> Result<(), GpuErrorCode> {
    let state = opened()?;
    meeting_faults(&state, GpuOp::Init, None, || {
        read(&state)?.init().map_err(|e| e.code)
    })?;
    let mut session = session();
    if session.users == 0 || session.state.is_none() {
        session.state = Some(state);
    }
    session.users += 1;
    Ok(())
}

/// Ends a session, or does nothing where there is none.
pub(crate) fn shutdown() {
    let mut session = session();
    let Some(left) = session.users.checked_sub(1) else {
        return;
    };
    session.users = left;
    if left == 0 {
        let state = session.state.take();
        session.event_sets.clear();
        session.gpm_samples.clear();
        drop(session);
        // Other processes that have the library open are not counted: this one is taken for the
        // last, unless a GPU has clients of other names.
        let forgets = |engine: &Engine| engine.gpus().iter().any(SimGpu::forgets);
        if let Some(state) = state
            && state.read().is_ok_and(|engine| forgets(&engine))
            && let Err(error) = state.edit(Engine::close)
        {
            complain(&error.to_string());
        }
    }
}

/// The engine, in an initialised session with the driver loaded.
pub(crate) fn engine() -> Result<Arc<Engine>, GpuErrorCode> {
    let engine = read(&state()?)?;
    engine.init().map_err(|e| e.code)?;
    Ok(engine)
}

/// The driver that the library is of.
pub(crate) fn generation(engine: &Engine) -> Generation {
    Generation::of(&engine.system.driver_version)
}

/// The engine, after the faults of an operation that is on no GPU.
pub(crate) fn engine_for(op: GpuOp) -> Result<Arc<Engine>, GpuErrorCode> {
    meeting_faults(&state()?, op, None, engine)
}

/// Asks about the GPU behind a handle.
pub(crate) fn gpu<T>(
    handle: usize,
    ask: impl FnOnce(&Engine, &SimGpu) -> Result<T, GpuErrorCode>,
) -> Result<T, GpuErrorCode> {
    let engine = engine()?;
    let uuid = uuid_of(handle)?;
    let found = engine.gpus().iter().find(|g| g.facts.uuid == uuid);
    match found.ok_or(GpuErrorCode::INVALID_ARGUMENT)? {
        gpu if gpu.lost => Err(GpuErrorCode::GPU_IS_LOST),
        gpu => ask(&engine, gpu),
    }
}

/// [`gpu`], with the faults of an operation.
pub(crate) fn gpu_for<T>(
    op: GpuOp,
    handle: usize,
    ask: impl FnOnce(&Engine, &SimGpu) -> Result<T, GpuErrorCode>,
) -> Result<T, GpuErrorCode> {
    meeting_faults(&state()?, op, Some(&uuid_of(handle)?), || gpu(handle, ask))
}

/// Changes a GPU, with the faults of the operation. Half of what it takes passes before, half
/// after.
pub(crate) fn change<T>(
    op: GpuOp,
    gpu: &GpuUuid,
    change: impl FnOnce(&mut Engine) -> Result<T, GpuError>,
) -> Result<T, GpuErrorCode> {
    let state = state()?;
    meeting_faults(&state, op, Some(gpu), || {
        let half = read(&state)?.latency.of(op) / 2;
        thread::sleep(half);
        let result = state.edit(change).map_err(|_| GpuErrorCode::UNKNOWN)?;
        if result.is_ok() {
            trial::changed();
        }
        thread::sleep(half);
        result.map_err(|e| e.code)
    })
}

/// Asks the engine about a GPU, with the faults of an operation if one is given.
pub(crate) fn ask<T>(
    op: Option<GpuOp>,
    gpu: &GpuUuid,
    ask: impl FnOnce(&Engine) -> Result<T, GpuError>,
) -> Result<T, GpuErrorCode> {
    let work = || ask(&*engine()?).map_err(|e| e.code);
    match op {
        Some(op) => meeting_faults(&state()?, op, Some(gpu), work),
        None => work(),
    }
}

/// The handle of the first GPU that fits.
pub(crate) fn handle_of(
    fits: impl Fn(usize, &SimGpu) -> bool,
    none: GpuErrorCode,
) -> Result<usize, GpuErrorCode> {
    let engine = engine()?;
    let (_, gpu) = engine
        .gpus()
        .iter()
        .enumerate()
        .find(|(index, g)| fits(*index, g))
        .ok_or(none)?;
    if gpu.lost {
        return Err(GpuErrorCode::GPU_IS_LOST);
    }
    Ok(handle_to(Thing::Gpu(gpu.facts.uuid.clone())))
}

/// Ends all sessions and forgets all handles, for a test that has other GPUs from now on.
pub(crate) fn forget_all() {
    let mut session = session();
    session.users = 0;
    session.state = None;
    session.handles.clear();
    session.event_sets.clear();
    session.gpm_samples.clear();
}

/// The handle of a thing, which need not be there.
pub(crate) fn handle_to(thing: Thing) -> usize {
    let mut session = session();
    let known = session.handles.iter().position(|t| *t == thing);
    let at = known.unwrap_or_else(|| {
        session.handles.push(thing);
        session.handles.len() - 1
    });
    at + 1
}

/// Finds the object that a handle stands for.
pub(crate) fn thing(handle: usize) -> Result<Thing, GpuErrorCode> {
    // The session first: without one, no argument is looked at.
    ready()?;
    let at = handle
        .checked_sub(1)
        .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
    let session = session();
    session
        .handles
        .get(at)
        .cloned()
        .ok_or(GpuErrorCode::INVALID_ARGUMENT)
}

/// The GPU behind a GPU's handle.
pub(crate) fn uuid_of(handle: usize) -> Result<GpuUuid, GpuErrorCode> {
    match thing(handle)? {
        Thing::Gpu(uuid) => Ok(uuid),
        _ => Err(GpuErrorCode::INVALID_ARGUMENT),
    }
}

/// Every MIG device of a GPU, in NVML's order: by GPU instance, then by compute instance.
pub(crate) fn mig_devices(gpu: &GpuUuid) -> Result<Vec<ComputeInstance>, GpuErrorCode> {
    let engine = engine()?;
    let found = engine
        .gpus()
        .iter()
        .find(|g| g.facts.uuid == *gpu)
        .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
    Ok(found
        .instances
        .iter()
        .flat_map(|i| i.compute.clone())
        .collect())
}

/// The compute instance behind a MIG device's handle, if it still lives.
pub(crate) fn mig_device(handle: usize) -> Result<(GpuUuid, ComputeInstance), GpuErrorCode> {
    let Thing::MigDevice(gpu, uuid) = thing(handle)? else {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
    };
    let found = mig_devices(&gpu)?.into_iter().find(|c| c.uuid == uuid);
    Ok((gpu, found.ok_or(GpuErrorCode::INVALID_ARGUMENT)?))
}

/// A new event set's handle.
pub(crate) fn make_event_set() -> Result<usize, GpuErrorCode> {
    engine()?;
    let mut session = session();
    session.sets_made += 1;
    let number = session.sets_made;
    session.event_sets.insert(number, EventSet::default());
    drop(session);
    Ok(handle_to(Thing::EventSet(number)))
}

fn event_set(handle: usize) -> Result<u64, GpuErrorCode> {
    match thing(handle)? {
        Thing::EventSet(number) => Ok(number),
        _ => Err(GpuErrorCode::INVALID_ARGUMENT),
    }
}

pub(crate) fn free_event_set(handle: usize) -> Result<(), GpuErrorCode> {
    let number = event_set(handle)?;
    session()
        .event_sets
        .remove(&number)
        .map(|_| ())
        .ok_or(GpuErrorCode::INVALID_ARGUMENT)
}

/// Events of a GPU are recorded in the set from now on.
pub(crate) fn register_events(gpu: &GpuUuid, set: usize) -> Result<(), GpuErrorCode> {
    let number = event_set(set)?;
    let next = meeting_faults(&state()?, GpuOp::Events, Some(gpu), || {
        Ok(engine()?.events_sent())
    });
    let mut session = session();
    let set = session
        .event_sets
        .get_mut(&number)
        .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
    set.is_undefined |= next == Err(GpuErrorCode::UNKNOWN);
    set.members.entry(gpu.clone()).or_insert(next?);
    Ok(())
}

/// The next event of a set, or `TIMEOUT`.
pub(crate) fn wait_event(set: usize, at_most: Duration) -> Result<SimEvent, GpuErrorCode> {
    meeting_faults(&state()?, GpuOp::Events, None, || {
        let number = event_set(set)?;
        let until = Instant::now() + at_most;
        loop {
            let engine = engine()?;
            let mut session = session();
            let set = session
                .event_sets
                .get_mut(&number)
                .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
            if set.is_undefined {
                return Err(GpuErrorCode::UNKNOWN);
            }
            let members = &mut set.members;
            let recorded = |event: &&SimEvent| {
                members
                    .get(&event.gpu)
                    .is_some_and(|next| event.number >= *next)
            };
            if let Some(event) = engine.events_from(0).find(recorded).cloned() {
                members.insert(event.gpu.clone(), event.number + 1);
                return Ok(event);
            }
            drop(session);
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(GpuErrorCode::TIMEOUT);
            }
            thread::sleep(left.min(LOOK_FOR_EVENTS));
        }
    })
}

/// A new sample's handle. Numbers that were given back are used again.
pub(crate) fn make_gpm_sample() -> Result<usize, GpuErrorCode> {
    engine()?;
    let mut session = session();
    let free = (0..u64::MAX)
        .find(|number| !session.gpm_samples.contains_key(number))
        .unwrap_or_default();
    session.gpm_samples.insert(free, None);
    drop(session);
    Ok(handle_to(Thing::GpmSample(free)))
}

fn gpm_number(handle: usize) -> Result<u64, GpuErrorCode> {
    match thing(handle)? {
        Thing::GpmSample(number) => Ok(number),
        _ => Err(GpuErrorCode::INVALID_ARGUMENT),
    }
}

pub(crate) fn free_gpm_sample(handle: usize) -> Result<(), GpuErrorCode> {
    let number = gpm_number(handle)?;
    session()
        .gpm_samples
        .remove(&number)
        .map(drop)
        .ok_or(GpuErrorCode::INVALID_ARGUMENT)
}

/// Fills a sample.
pub(crate) fn take_gpm_sample(
    device: usize,
    instance: Option<GpuInstanceId>,
    sample: usize,
) -> Result<(), GpuErrorCode> {
    let (gpu, number) = (uuid_of(device)?, gpm_number(sample)?);
    let percent = ask(Some(GpuOp::SmUtilization), &gpu, |engine| {
        engine.sm_busy(&gpu, instance)
    })?;
    let mut session = session();
    let sample = session
        .gpm_samples
        .get_mut(&number)
        .ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
    *sample = Some(GpmSample {
        gpu,
        instance,
        at: Instant::now(),
        percent,
    });
    Ok(())
}

/// The use between two samples of one thing.
pub(crate) fn compare_gpm_samples(first: usize, second: usize) -> Result<u32, GpuErrorCode> {
    let numbers = (gpm_number(first)?, gpm_number(second)?);
    let session = session();
    let taken = |number| session.gpm_samples.get(&number).cloned().flatten();
    let (Some(first), Some(second)) = (taken(numbers.0), taken(numbers.1)) else {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
    };
    let apart = second
        .at
        .checked_duration_since(first.at)
        .unwrap_or_default();
    let same = (&first.gpu, first.instance) == (&second.gpu, second.instance);
    if same && apart >= APART {
        Ok(second.percent)
    } else {
        Err(GpuErrorCode::INVALID_ARGUMENT)
    }
}

fn state() -> Result<Arc<MockState>, GpuErrorCode> {
    session().state.clone().ok_or(GpuErrorCode::UNINITIALIZED)
}

fn read(state: &Arc<MockState>) -> Result<Arc<Engine>, GpuErrorCode> {
    state.read().map_err(|error| {
        complain(&format!("{error}"));
        GpuErrorCode::UNKNOWN
    })
}

/// Does the work of a call, or what a fault makes of it. Changes the file only where a fault counts
/// the call.
fn meeting_faults<T>(
    state: &Arc<MockState>,
    op: GpuOp,
    gpu: Option<&GpuUuid>,
    work: impl FnOnce() -> Result<T, GpuErrorCode>,
) -> Result<T, GpuErrorCode> {
    if !read(state)?.has_faults() {
        return work();
    }
    let mut begin = state
        .edit(|engine| engine.begin(op, gpu))
        .map_err(|_| GpuErrorCode::UNKNOWN)?;
    if let Begin::Hang(id) = begin {
        begin = hang(state, id)?;
    }
    if let Begin::Fail(code) = begin {
        return Err(code);
    }
    thread::sleep(begin.delay());
    let answer = work()?;
    match begin.after() {
        Some(After::Fail(code)) => Err(code),
        Some(After::Hang(id)) => match hang(state, id)? {
            Begin::Fail(code) => Err(code),
            _ => Ok(answer),
        },
        None => Ok(answer),
    }
}

/// Hangs until the fault lets go; what comes after.
fn hang(state: &Arc<MockState>, id: FaultId) -> Result<Begin, GpuErrorCode> {
    loop {
        thread::sleep(LOOK_AGAIN);
        match read(state)?.after_hang(id) {
            Begin::Hang(_) => {}
            begin => return Ok(begin),
        }
    }
}

fn open_state() -> Result<MockState, String> {
    let path = match std::env::var_os("DIVVY_MOCK_STATE") {
        Some(path) => PathBuf::from(path),
        None => own_path().ok_or("set DIVVY_MOCK_STATE: the library's own path is not known")?,
    };
    let gpus = std::env::var("DIVVY_MOCK_GPUS").unwrap_or_else(|_| "h100x2".to_owned());
    let gpus = gpus
        .parse()
        .map_err(|error| format!("DIVVY_MOCK_GPUS: {error}"))?;
    MockState::open_or_create(&path, &gpus).map_err(|error| {
        let cause = std::error::Error::source(&error)
            .map(|c| format!(": {c}"))
            .unwrap_or_default();
        format!("{error}{cause}")
    })
}

/// `<library>.json`, the library being the file that this code is mapped from.
fn own_path() -> Option<PathBuf> {
    let here = own_path as *const () as usize;
    let holds_us = |line: &str| {
        let (from, to) = line.split_once(' ')?.0.split_once('-')?;
        let range = usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?;
        Some(range.contains(&here))
    };
    let library = mapped_file(|line| holds_us(line).unwrap_or_default())?;
    Some(PathBuf::from(format!("{library}.json")))
}

/// The file of the first mapping of this process whose line in `/proc/self/maps` fits.
pub(crate) fn mapped_file(fits: impl Fn(&str) -> bool) -> Option<String> {
    let maps = fs_err::read_to_string("/proc/self/maps").ok()?;
    let line = maps.lines().find(|line| fits(line))?;
    line.find('/')
        .and_then(|at| line.get(at..))
        .map(str::to_owned)
}

#[expect(
    clippy::print_stderr,
    reason = "a library whose ABI has only numbers for errors has no other way"
)]
fn complain(message: &str) {
    eprintln!("divvy-nvml-mock: {message}");
}
