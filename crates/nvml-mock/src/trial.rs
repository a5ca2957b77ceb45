//! Odd answers: a library that answers some of its calls as no good one would. A seed decides which
//! calls, and how.
//!
//! A test that makes millions of calls keeps the GPUs in the memory of the library, too: see
//! [`crate::Loaded`].

use std::cell::Cell;
use std::ffi::{CStr, c_char};
use std::fmt::Write as _;
use std::panic::Location;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use divvy_gpu_sim::Engine;
use divvy_model::GpuErrorCode;
use nvml_wrapper_sys::bindings::nvmlReturn_t;

use crate::state::MockState;

/// Codes that NVML may answer without reason.
const CODES: [GpuErrorCode; 11] = [
    GpuErrorCode::UNKNOWN,
    GpuErrorCode::NOT_SUPPORTED,
    GpuErrorCode::INSUFFICIENT_RESOURCES,
    GpuErrorCode::TIMEOUT,
    GpuErrorCode::GPU_IS_LOST,
    GpuErrorCode::IN_USE,
    GpuErrorCode::INVALID_ARGUMENT,
    GpuErrorCode::FUNCTION_NOT_FOUND,
    GpuErrorCode::NO_PERMISSION,
    GpuErrorCode::NOT_FOUND,
    GpuErrorCode::UNINITIALIZED,
];

/// So many odd answers are remembered for [`crate::Loaded::noted`].
const NOTED: usize = 400;

/// An odd answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Odd {
    /// Fails at once.
    Fails(u32),
    /// Does its work, and fails.
    FailsAfter(u32),
    /// Succeeds, and writes nothing.
    WritesNothing,
    /// Succeeds, and sets all bits of what it writes: numbers beyond all sizes, texts that are none
    /// and have no end.
    WritesOnes,
    /// Succeeds, and leaves out the last entry of a list.
    LeavesOut,
}

struct Trial {
    chance: u64,
    /// A call in so many is odd; none if 0.
    one_in: u64,
    /// A call site in so many answers every call oddly, always in the same way; none if 0.
    sites: u64,
    seed: u64,
    noted: String,
    /// Entries in `noted`.
    count: usize,
}

thread_local! {
    /// True once the call at work has changed a GPU.
    static CHANGED: Cell<bool> = const { Cell::new(false) };
}

/// Notes that the call at work has changed a GPU.
pub(crate) fn changed() {
    CHANGED.set(true);
}

/// Ends a call that answers well.
pub(crate) fn done() {
    CHANGED.set(false);
}

/// Returns the code of a call that did its work and fails: after a change none of those by which
/// nothing was done, since NVML's callers rely on these.
pub(crate) fn code_after(code: u32) -> u32 {
    const MAY_HAVE: [GpuErrorCode; 5] = [
        GpuErrorCode::UNKNOWN,
        GpuErrorCode::TIMEOUT,
        GpuErrorCode::GPU_IS_LOST,
        GpuErrorCode::IN_USE,
        GpuErrorCode::UNINITIALIZED,
    ];
    if CHANGED.take() && !MAY_HAVE.iter().any(|may| may.0 == code) {
        GpuErrorCode::UNKNOWN.0
    } else {
        code
    }
}

static IS_ODD: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicU64 = AtomicU64::new(0);
static TRIAL: Mutex<Trial> = Mutex::new(Trial {
    chance: 0,
    one_in: 0,
    sites: 0,
    seed: 0,
    noted: String::new(),
    count: 0,
});
static MEMORY: Mutex<Option<Arc<MockState>>> = Mutex::new(None);

fn trial() -> MutexGuard<'static, Trial> {
    TRIAL.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the GPUs that a test keeps in memory, if one does.
pub(crate) fn in_memory() -> Option<Arc<MockState>> {
    MEMORY
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone()
}

/// Returns the odd answer to a call, if it is to have one. Only an answer that `has_value` can be
/// another than a failure.
pub(crate) fn odd(at: &Location<'_>, has_value: bool) -> Option<Odd> {
    odd_if(at, has_value, |_, _| true)
}

/// Returns the same for the MIG mode. A library that says at every call that a GPU has none cannot
/// be distinguished from a good one of another GPU.
pub(crate) fn odd_mode(at: &Location<'_>) -> Option<Odd> {
    let none = [
        GpuErrorCode::NOT_SUPPORTED.0,
        GpuErrorCode::FUNCTION_NOT_FOUND.0,
    ];
    odd_if(at, false, |odd, always| match odd {
        Odd::Fails(code) | Odd::FailsAfter(code) => !(always && none.contains(&code)),
        Odd::WritesNothing | Odd::WritesOnes | Odd::LeavesOut => true,
    })
}

/// Returns the odd answer to a call if it can be; the second value given to `can_be` says that
/// every call of this site has the same.
fn odd_if(at: &Location<'_>, has_value: bool, can_be: impl Fn(Odd, bool) -> bool) -> Option<Odd> {
    CALLS.fetch_add(1, Ordering::Relaxed);
    if !IS_ODD.load(Ordering::Relaxed) {
        return None;
    }
    let mut trial = trial();
    let site = mixed(trial.seed ^ u64::from(at.line()) << 32 ^ at.file().len() as u64);
    let always = trial.sites > 0 && site.is_multiple_of(trial.sites);
    let dice = if always {
        mixed(site)
    } else if trial.one_in > 0 && trial.next().is_multiple_of(trial.one_in) {
        trial.next()
    } else {
        return None;
    };
    let code = CODES
        .get((dice >> 8) as usize % CODES.len())
        .map_or(GpuErrorCode::UNKNOWN.0, |code| code.0);
    let odd = match dice % 8 {
        0 | 1 if has_value => Odd::WritesNothing,
        2 if has_value => Odd::WritesOnes,
        3 if has_value => Odd::LeavesOut,
        4 | 5 => Odd::FailsAfter(code),
        _ => Odd::Fails(code),
    };
    if !can_be(odd, always) {
        return None;
    }
    if trial.count < NOTED {
        trial.count += 1;
        let file = at.file().rsplit('/').next().unwrap_or_default();
        let noted = writeln!(trial.noted, "{file}:{}: {odd:?}", at.line());
        debug_assert!(noted.is_ok(), "a text takes what is written");
    }
    Some(odd)
}

impl Trial {
    fn next(&mut self) -> u64 {
        self.chance = self.chance.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mixed(self.chance)
    }
}

/// Returns the output function of SplitMix64.
fn mixed(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Keeps these GPUs in memory from now on, in the place of a file. No session may be open.
///
/// # Safety
/// `json` is a text with a NUL.
#[unsafe(no_mangle)]
unsafe extern "C" fn divvy_mock_keep(json: *const c_char) -> nvmlReturn_t {
    // SAFETY: by this function's contract.
    let json = unsafe { CStr::from_ptr(json) };
    let Ok(engine) = serde_json::from_slice::<Engine>(json.to_bytes()) else {
        return GpuErrorCode::INVALID_ARGUMENT.0;
    };
    *MEMORY.lock().unwrap_or_else(PoisonError::into_inner) =
        Some(Arc::new(MockState::in_memory(engine)));
    crate::bridge::forget_all();
    0
}

/// Writes the GPUs as they are now, as much as there is room for, and returns how long that is.
///
/// # Safety
/// `json` is valid for `room` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn divvy_mock_kept(json: *mut c_char, room: usize) -> usize {
    let engine = in_memory().and_then(|state| state.read().ok());
    let text = engine.and_then(|engine| serde_json::to_vec(&*engine).ok());
    // SAFETY: by this function's contract.
    unsafe { put(text.unwrap_or_default().as_slice(), json, room) }
}

/// Begins a trial: one call in `one_in` answers oddly, and every call of one call site in `sites`.
/// With neither all answers are good.
#[unsafe(no_mangle)]
extern "C" fn divvy_mock_odd(seed: u64, one_in: u64, sites: u64) {
    let mut trial = trial();
    *trial = Trial {
        chance: seed,
        one_in,
        sites,
        seed,
        noted: std::mem::take(&mut trial.noted),
        count: trial.count,
    };
    IS_ODD.store(one_in > 0 || sites > 0, Ordering::Relaxed);
}

/// Returns how many calls were made so far.
#[unsafe(no_mangle)]
extern "C" fn divvy_mock_calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// Writes which odd answers were given since this was last asked; see [`divvy_mock_kept`].
///
/// # Safety
/// `text` is valid for `room` bytes.
#[unsafe(no_mangle)]
unsafe extern "C" fn divvy_mock_noted(text: *mut c_char, room: usize) -> usize {
    let mut trial = trial();
    trial.count = 0;
    let noted = std::mem::take(&mut trial.noted);
    // SAFETY: by this function's contract.
    unsafe { put(noted.as_bytes(), text, room) }
}

/// # Safety
/// `to` is valid for `room` bytes.
unsafe fn put(bytes: &[u8], to: *mut c_char, room: usize) -> usize {
    // SAFETY: by this function's contract.
    unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), to, bytes.len().min(room)) };
    bytes.len()
}
