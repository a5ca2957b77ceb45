//! The calls that limit the memory of control groups (driver R615 and later), which the bindings of
//! NVML do not have yet. Declared after nvml.h of CUDA 13.4.

use std::ffi::{CString, OsStr, c_char, c_ulonglong};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use divvy_model::{GpuErrorCode, MemoryLimit};
use libloading::os::unix::{Library as Loaded, RTLD_NOW};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_t};

use super::{Failure, Handle, Library, check, missing};

/// `nvmlSetMemoryLimits_v1_t`.
#[repr(C)]
struct Set {
    /// Full path of the group's directory.
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
}

/// `nvmlGetMemoryLimits_v1_t`.
#[repr(C)]
struct Get {
    /// Full path of the group's directory.
    name_space: *const c_char,
    soft: c_ulonglong,
    hard: c_ulonglong,
    used: c_ulonglong,
}

/// `NVML_DEVICE_MEMORY_LIMIT_MAX`: no limit.
const NO_LIMIT: c_ulonglong = c_ulonglong::MAX;
const SET: &str = "nvmlDeviceSetMemoryLimits_v1";
const GET: &str = "nvmlDeviceGetMemoryLimits_v1";

type SetCall = unsafe extern "C" fn(nvmlDevice_t, *mut Set) -> nvmlReturn_t;
type GetCall = unsafe extern "C" fn(nvmlDevice_t, *mut Get) -> nvmlReturn_t;

/// The two functions, in a library that has both.
pub(super) struct Limits {
    set: SetCall,
    get: GetCall,
    /// Keeps the functions loaded.
    _library: Loaded,
}

impl Limits {
    /// Finds the functions in the library that is loaded from this path already.
    pub(super) fn find(path: &OsStr) -> Option<Self> {
        // SAFETY: the library is loaded, so that nothing of it runs now but for the counting of its
        // users.
        let library = unsafe { Loaded::open(Some(path), RTLD_NOW) }.ok()?;
        // SAFETY: the types are those of nvml.h (see above).
        let set = *unsafe { library.get::<SetCall>(SET) }.ok()?;
        // SAFETY: as above.
        let get = *unsafe { library.get::<GetCall>(GET) }.ok()?;
        Some(Self {
            set,
            get,
            _library: library,
        })
    }
}

impl Library {
    /// Returns whether the library can limit the memory of control groups.
    pub(crate) fn has_memory_limits(&self) -> bool {
        self.limits.is_some()
    }

    /// Reads the limit of a control group on a GPU.
    pub(crate) fn memory_limit(&self, gpu: Handle, cgroup: &Path) -> Result<MemoryLimit, Failure> {
        let limits = self.limits.as_ref().ok_or_else(|| missing(GET))?;
        let path = c_path(cgroup)?;
        let mut answer = Get {
            name_space: path.as_ptr(),
            soft: 0,
            hard: NO_LIMIT,
            used: 0,
        };
        // SAFETY: the function lives as long as `limits`; the handle comes from this process's
        // NVML; `answer` and the path in it are living locals.
        check(unsafe { (limits.get)(gpu.0, &raw mut answer) })?;
        Ok(MemoryLimit {
            hard: (answer.hard != NO_LIMIT).then_some(answer.hard),
            used: answer.used,
        })
    }

    /// Limits a control group on a GPU. No memory is guaranteed to it (`softLimit` 0): a guarantee
    /// is added to those of the groups above, and never taken back.
    pub(crate) fn set_memory_limit(
        &self,
        gpu: Handle,
        cgroup: &Path,
        hard: Option<u64>,
    ) -> Result<(), Failure> {
        let limits = self.limits.as_ref().ok_or_else(|| missing(SET))?;
        let path = c_path(cgroup)?;
        let mut wanted = Set {
            name_space: path.as_ptr(),
            soft: 0,
            hard: hard.unwrap_or(NO_LIMIT),
        };
        // SAFETY: as in `memory_limit`.
        check(unsafe { (limits.set)(gpu.0, &raw mut wanted) })
    }
}

fn c_path(path: &Path) -> Result<CString, Failure> {
    // A path of the kernel has no NUL in it.
    CString::new(path.as_os_str().as_bytes())
        .map_err(|_| Failure::code(GpuErrorCode::INVALID_ARGUMENT))
}
