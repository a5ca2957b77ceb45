//! The safe half of the bridge: sessions, handles and faults. `abi` is only pointers.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use divvy_gpu_sim::{Begin, Engine, SimGpu};
use divvy_model::{GpuErrorCode, GpuOp, GpuUuid};

use crate::state::MockState;

/// How often a hanging call looks whether it may go on.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

static SESSION: Mutex<Session> = Mutex::new(Session { users: 0, state: None, handles: Vec::new() });

struct Session {
    /// `nvmlInit` less `nvmlShutdown`.
    users: u32,
    state: Option<Arc<MockState>>,
    /// A GPU's handle is its place here plus one: the same for the life of the process.
    handles: Vec<GpuUuid>,
}

fn session() -> MutexGuard<'static, Session> {
    SESSION.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn init() -> Result<(), GpuErrorCode> {
    let state = match open_state() {
        Ok(state) => Arc::new(state),
        Err(message) => {
            complain(&message);
            return Err(GpuErrorCode::UNKNOWN);
        }
    };
    meet_faults(&state, GpuOp::Init, None)?;
    read(&state)?.init().map_err(|e| e.code)?;
    let mut session = session();
    if session.users == 0 || session.state.is_none() {
        session.state = Some(state);
    }
    session.users += 1;
    Ok(())
}

pub(crate) fn shutdown() -> Result<(), GpuErrorCode> {
    let mut session = session();
    session.users = session.users.checked_sub(1).ok_or(GpuErrorCode::UNINITIALIZED)?;
    if session.users == 0 {
        session.state = None;
    }
    Ok(())
}

/// The engine, in an initialised session with the driver loaded.
pub(crate) fn engine() -> Result<Arc<Engine>, GpuErrorCode> {
    let engine = read(&state()?)?;
    engine.init().map_err(|e| e.code)?;
    Ok(engine)
}

/// The engine, after the faults of an operation that is on no GPU.
pub(crate) fn engine_for(op: GpuOp) -> Result<Arc<Engine>, GpuErrorCode> {
    meet_faults(&state()?, op, None)?;
    engine()
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

/// [`gpu`], after the faults of an operation.
pub(crate) fn gpu_for<T>(
    op: GpuOp,
    handle: usize,
    ask: impl FnOnce(&Engine, &SimGpu) -> Result<T, GpuErrorCode>,
) -> Result<T, GpuErrorCode> {
    meet_faults(&state()?, op, Some(&uuid_of(handle)?))?;
    gpu(handle, ask)
}

/// The handle of the first GPU that fits.
pub(crate) fn handle_of(
    fits: impl Fn(usize, &SimGpu) -> bool,
    none: GpuErrorCode,
) -> Result<usize, GpuErrorCode> {
    let engine = engine()?;
    let (_, gpu) = engine.gpus().iter().enumerate().find(|(index, g)| fits(*index, g)).ok_or(none)?;
    if gpu.lost {
        return Err(GpuErrorCode::GPU_IS_LOST);
    }
    let mut session = session();
    let known = session.handles.iter().position(|uuid| *uuid == gpu.facts.uuid);
    let at = known.unwrap_or_else(|| {
        session.handles.push(gpu.facts.uuid.clone());
        session.handles.len() - 1
    });
    Ok(at + 1)
}

fn uuid_of(handle: usize) -> Result<GpuUuid, GpuErrorCode> {
    let at = handle.checked_sub(1).ok_or(GpuErrorCode::INVALID_ARGUMENT)?;
    session().handles.get(at).cloned().ok_or(GpuErrorCode::INVALID_ARGUMENT)
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

/// Fails or hangs if a fault says so. Changes the file only where a fault counts the call.
fn meet_faults(state: &Arc<MockState>, op: GpuOp, gpu: Option<&GpuUuid>) -> Result<(), GpuErrorCode> {
    if !read(state)?.has_faults() {
        return Ok(());
    }
    let mut begin = state.edit(|engine| engine.begin(op, gpu)).map_err(|_| GpuErrorCode::UNKNOWN)?;
    while let Begin::Hang(id) = begin {
        thread::sleep(LOOK_AGAIN);
        begin = read(state)?.after_hang(id);
    }
    match begin {
        Begin::Fail(code) => Err(code),
        Begin::Work | Begin::Hang(_) => Ok(()),
    }
}

fn open_state() -> Result<MockState, String> {
    let path = match std::env::var_os("DIVVY_MOCK_STATE") {
        Some(path) => PathBuf::from(path),
        None => own_path().ok_or("set DIVVY_MOCK_STATE: the library's own path is not known")?,
    };
    let gpus = std::env::var("DIVVY_MOCK_GPUS").unwrap_or_else(|_| "h100x2".to_owned());
    let gpus = gpus.parse().map_err(|error| format!("DIVVY_MOCK_GPUS: {error}"))?;
    MockState::open_or_create(&path, &gpus).map_err(|error| {
        let cause = std::error::Error::source(&error).map(|c| format!(": {c}")).unwrap_or_default();
        format!("{error}{cause}")
    })
}

/// `<library>.json`, the library being the file that this code is mapped from.
fn own_path() -> Option<PathBuf> {
    let here = own_path as *const () as usize;
    let maps = fs_err::read_to_string("/proc/self/maps").ok()?;
    let library = maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (from, to) = range.split_once('-')?;
        let range = usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?;
        range.contains(&here).then(|| rest.find('/').and_then(|at| rest.get(at..))).flatten()
    })?;
    Some(PathBuf::from(format!("{library}.json")))
}

#[expect(clippy::print_stderr, reason = "a library whose ABI has only numbers for errors has no other way")]
fn complain(message: &str) {
    eprintln!("divvy-nvml-mock: {message}");
}
