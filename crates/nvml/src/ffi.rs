//! The calls into NVML: all `unsafe` of this crate. Each function is one C call with Rust types,
//! raw return codes kept. A symbol the library does not have (an older driver) is
//! `FUNCTION_NOT_FOUND` with its name, never a panic: only the fallible fields of the loaded
//! library are used, not the methods of the same name.

use std::collections::BTreeSet;
use std::ffi::{CString, OsStr, c_char};
use std::mem::{ManuallyDrop, size_of};
use std::sync::Mutex;

use divvy_model::{GpuErrorCode, lock};
use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper_sys::bindings::{
    nvmlC2cModeInfo_v1_t, nvmlDevice_t, nvmlDeviceAddressingMode_t, nvmlMemory_t, nvmlPciInfo_t,
    nvmlReturn_t,
};

/// A call that did not succeed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) code: GpuErrorCode,
    /// Detail that the code cannot say: a missing symbol, the loader's message.
    pub(crate) detail: Option<String>,
}

impl Failure {
    pub(crate) fn code(code: GpuErrorCode) -> Self {
        Self { code, detail: None }
    }

    /// An answer that libraries and boards give when they have nothing to say.
    pub(crate) fn means_absent(&self) -> bool {
        // `NVML_ERROR_DEPRECATED`.
        const DEPRECATED: GpuErrorCode = GpuErrorCode(26);
        matches!(
            self.code,
            GpuErrorCode::NOT_SUPPORTED
                | GpuErrorCode::FUNCTION_NOT_FOUND
                | GpuErrorCode::NO_PERMISSION
                | GpuErrorCode::NO_DATA
                | GpuErrorCode::NOT_FOUND
                | GpuErrorCode::NOT_READY
                | GpuErrorCode::INVALID_ARGUMENT
                | GpuErrorCode::INVALID_STATE
                | GpuErrorCode::ARGUMENT_VERSION_MISMATCH
                | DEPRECATED
        )
    }

    /// A board or library that has no such thing at all: the answer will not be another later.
    pub(crate) fn is_plain_no(&self) -> bool {
        matches!(
            self.code,
            GpuErrorCode::NOT_SUPPORTED
                | GpuErrorCode::FUNCTION_NOT_FOUND
                | GpuErrorCode::INVALID_ARGUMENT
        )
    }

    /// No other question about the GPU would be answered: it is lost, or the session is over.
    pub(crate) fn is_final(&self) -> bool {
        self.code == GpuErrorCode::GPU_IS_LOST || ends_session(self.code)
    }
}

/// Codes that say that NVML has to be opened again.
pub(crate) fn ends_session(code: GpuErrorCode) -> bool {
    matches!(
        code,
        GpuErrorCode::UNINITIALIZED
            | GpuErrorCode::DRIVER_NOT_LOADED
            | GpuErrorCode::LIB_RM_VERSION_MISMATCH
    )
}

/// A GPU's handle; valid while the library is initialised.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Handle(nvmlDevice_t);

// SAFETY: the handle is an opaque value that only NVML looks behind, and NVML may be called from
// any thread.
unsafe impl Send for Handle {}
// SAFETY: as above; nothing is read through the pointer here.
unsafe impl Sync for Handle {}

impl Handle {
    /// Returns whether it is the same handle.
    pub(crate) fn is(self, other: Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

/// PCI information: the address as text and by numbers, and the device id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pci {
    pub(crate) bus_id: String,
    pub(crate) domain: u32,
    pub(crate) bus: u32,
    pub(crate) device: u32,
    pub(crate) device_id: u32,
}

/// The loaded, initialised library. Shut down and unloaded when dropped.
pub(crate) struct Library {
    // Dropping `Nvml` panics when the library has no `nvmlShutdown`; see `Drop` below.
    nvml: ManuallyDrop<Nvml>,
    /// The calls for limits of memory, of a library that has them.
    limits: Option<limits::Limits>,
    /// Questions to which an odd code was the answer, with GPU and code: each is logged once.
    odd: Mutex<BTreeSet<(&'static str, Option<usize>, u32)>>,
    /// Sees every call, and answers one in the place of the library.
    #[cfg(test)]
    pub(crate) trial: trial::Trial,
}

impl Drop for Library {
    fn drop(&mut self) {
        if self.nvml.lib().nvmlShutdown.is_ok() {
            // SAFETY: dropped once, here; `self.nvml` cannot be used afterwards. `Handle`s that are
            // left are plain numbers, which only methods of a living `Library` pass on.
            unsafe { ManuallyDrop::drop(&mut self.nvml) };
        }
    }
}

/// Calls a function of the library; `FUNCTION_NOT_FOUND` if it has none of that name.
macro_rules! call {
    ($self:ident.$name:ident($($arg:expr),* $(,)?)) => {
        match &$self.nvml.lib().$name {
            Ok(function) => {
                #[cfg(test)]
                let answered = $self.trial.answer(stringify!($name));
                #[cfg(not(test))]
                let answered = None;
                match answered {
                    Some(code) => check(code),
                    // SAFETY: the signature is NVML's (nvml-wrapper-sys is generated from its
                    // header), the library is initialised while `self` lives, a handle comes from
                    // this process's NVML, and every pointer is to a living local of the type and
                    // length that the call expects.
                    None => check(unsafe { function($($arg),*) }),
                }
            }
            Err(_) => Err(missing(stringify!($name))),
        }
    };
}

mod health;
mod limits;
mod links;
mod mig;
mod processes;
#[cfg(test)]
pub(crate) mod trial;
mod usage;

pub(crate) use health::{EventData, EventSet};
pub(crate) use links::Fabric;
pub(crate) use mig::{ComputeInstanceHandle, GpuInstanceHandle};
pub(crate) use usage::GpmSample;

fn check(code: nvmlReturn_t) -> Result<(), Failure> {
    if code == 0 {
        Ok(())
    } else {
        Err(Failure::code(GpuErrorCode(code)))
    }
}

fn missing(symbol: &str) -> Failure {
    Failure {
        code: GpuErrorCode::FUNCTION_NOT_FOUND,
        detail: Some(format!(
            "the library has no {symbol}: the driver is too old"
        )),
    }
}

/// NVML's versioned structs say which they are: size and version number.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the structs have less than 16 MiB"
)]
const fn struct_version<T>(version: u32) -> u32 {
    // `NVML_STRUCT_VERSION` of nvml.h.
    size_of::<T>() as u32 | version << 24
}

/// Returns the failure of a call that succeeded with what cannot be.
fn nonsense(what: impl Into<String>) -> Failure {
    Failure {
        code: GpuErrorCode::UNKNOWN,
        detail: Some(format!("NVML answered with {}", what.into())),
    }
}

/// The text in a buffer that NVML filled, up to the first NUL.
fn text(buffer: &[c_char]) -> Result<String, Failure> {
    let end = buffer.iter().position(|c| *c == 0);
    let text = end.and_then(|end| buffer.get(..end));
    let text = text.ok_or_else(|| nonsense("a text without an end"))?;
    let bytes: Vec<u8> = text.iter().flat_map(|c| c.to_ne_bytes()).collect();
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// [`text`], for what cannot be empty.
fn some_text(buffer: &[c_char]) -> Result<String, Failure> {
    text(buffer).and_then(|text| match text.as_str() {
        "" => Err(nonsense("an empty text")),
        _ => Ok(text),
    })
}

// `NVML_DEVICE_NAME_V2_BUFFER_SIZE` and `…_UUID_V2_…`: the largest of those for these texts.
const TEXT: u32 = 96;

/// Far more GPUs than any machine has.
const MOST_GPUS: u32 = 1024;

fn buffer() -> [c_char; TEXT as usize] {
    [0; TEXT as usize]
}

impl Library {
    /// Loads the library and initialises it (`nvmlInit_v2`).
    pub(crate) fn open(path: &OsStr) -> Result<Self, Failure> {
        match Nvml::builder().lib_path(path).init() {
            Ok(nvml) => Ok(Self {
                nvml: ManuallyDrop::new(nvml),
                limits: limits::Limits::find(path),
                odd: Mutex::default(),
                #[cfg(test)]
                trial: trial::Trial::default(),
            }),
            Err(NvmlError::LibloadingError(error)) => Err(Failure {
                code: GpuErrorCode::LIBRARY_NOT_FOUND,
                detail: Some(error.to_string()),
            }),
            // A library that is found and is no NVML.
            Err(NvmlError::FailedToLoadSymbol(_)) => Err(missing("nvmlInit_v2")),
            // The code again: the wrapper's enum has names only for some.
            Err(NvmlError::UnexpectedVariant(code)) => Err(Failure::code(GpuErrorCode(code))),
            Err(other) => Err(Failure::code(GpuErrorCode(other.into()))),
        }
    }

    /// The answer to a question that the GPU is usable without: `None` where there is none. Only a
    /// failure that is final remains one; any other odd code costs this fact, and is logged.
    pub(crate) fn optional<T>(
        &self,
        gpu: Option<Handle>,
        question: &'static str,
        answer: Result<T, Failure>,
    ) -> Result<Option<T>, Failure> {
        match answer {
            Ok(value) => Ok(Some(value)),
            Err(failure) if failure.is_final() => Err(failure),
            Err(failure) => {
                let key = (question, gpu.map(|gpu| gpu.0.addr()), failure.code.0);
                let is_new = || lock(&self.odd).insert(key);
                if !failure.means_absent() && is_new() {
                    let gpu = gpu.and_then(|gpu| self.uuid(gpu).ok());
                    tracing::warn!(gpu, question, code = %failure.code, "NVML does not answer as it should: left out");
                }
                Ok(None)
            }
        }
    }

    pub(crate) fn driver_version(&self) -> Result<String, Failure> {
        let mut buffer = buffer();
        call!(self.nvmlSystemGetDriverVersion(buffer.as_mut_ptr(), TEXT))?;
        some_text(&buffer)
    }

    pub(crate) fn nvml_version(&self) -> Result<String, Failure> {
        let mut buffer = buffer();
        call!(self.nvmlSystemGetNVMLVersion(buffer.as_mut_ptr(), TEXT))?;
        some_text(&buffer)
    }

    /// The first version of the call: the second asks libcuda, which the loader does not find in
    /// the plugin's image.
    pub(crate) fn cuda_version(&self) -> Result<u32, Failure> {
        let mut version = 0;
        call!(self.nvmlSystemGetCudaDriverVersion(&raw mut version))?;
        Ok(u32::try_from(version).unwrap_or(0))
    }

    pub(crate) fn count(&self) -> Result<u32, Failure> {
        let mut count = 0;
        call!(self.nvmlDeviceGetCount_v2(&raw mut count))?;
        if count > MOST_GPUS {
            return Err(nonsense(format!("{count} GPUs")));
        }
        Ok(count)
    }

    pub(crate) fn handle_by_index(&self, index: u32) -> Result<Handle, Failure> {
        let mut device: nvmlDevice_t = std::ptr::null_mut();
        call!(self.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device))?;
        Ok(Handle(device))
    }

    pub(crate) fn handle_by_uuid(&self, uuid: &str) -> Result<Handle, Failure> {
        let uuid = CString::new(uuid).map_err(|_| Failure::code(GpuErrorCode::INVALID_ARGUMENT))?;
        let mut device: nvmlDevice_t = std::ptr::null_mut();
        call!(self.nvmlDeviceGetHandleByUUID(uuid.as_ptr(), &raw mut device))?;
        Ok(Handle(device))
    }

    pub(crate) fn uuid(&self, gpu: Handle) -> Result<String, Failure> {
        let mut buffer = buffer();
        call!(self.nvmlDeviceGetUUID(gpu.0, buffer.as_mut_ptr(), TEXT))?;
        some_text(&buffer)
    }

    pub(crate) fn name(&self, gpu: Handle) -> Result<String, Failure> {
        let mut buffer = buffer();
        call!(self.nvmlDeviceGetName(gpu.0, buffer.as_mut_ptr(), TEXT))?;
        some_text(&buffer)
    }

    pub(crate) fn brand(&self, gpu: Handle) -> Result<u32, Failure> {
        let mut brand = 0;
        call!(self.nvmlDeviceGetBrand(gpu.0, &raw mut brand))?;
        Ok(brand)
    }

    pub(crate) fn compute_mode(&self, gpu: Handle) -> Result<u32, Failure> {
        let mut mode = 0;
        call!(self.nvmlDeviceGetComputeMode(gpu.0, &raw mut mode))?;
        Ok(mode)
    }

    pub(crate) fn set_compute_mode(&self, gpu: Handle, to: u32) -> Result<(), Failure> {
        call!(self.nvmlDeviceSetComputeMode(gpu.0, to))
    }

    pub(crate) fn persistence_mode(&self, gpu: Handle) -> Result<bool, Failure> {
        let mut mode = 0;
        call!(self.nvmlDeviceGetPersistenceMode(gpu.0, &raw mut mode))?;
        Ok(mode != 0)
    }

    pub(crate) fn minor(&self, gpu: Handle) -> Result<u32, Failure> {
        let mut minor = 0;
        call!(self.nvmlDeviceGetMinorNumber(gpu.0, &raw mut minor))?;
        Ok(minor)
    }

    pub(crate) fn architecture(&self, gpu: Handle) -> Result<u32, Failure> {
        let mut architecture = 0;
        call!(self.nvmlDeviceGetArchitecture(gpu.0, &raw mut architecture))?;
        Ok(architecture)
    }

    pub(crate) fn compute_capability(&self, gpu: Handle) -> Result<(u32, u32), Failure> {
        let (mut major, mut minor) = (0, 0);
        call!(self.nvmlDeviceGetCudaComputeCapability(gpu.0, &raw mut major, &raw mut minor))?;
        Ok((
            u32::try_from(major).unwrap_or(0),
            u32::try_from(minor).unwrap_or(0),
        ))
    }

    pub(crate) fn cores(&self, gpu: Handle) -> Result<u32, Failure> {
        let mut cores = 0;
        call!(self.nvmlDeviceGetNumGpuCores(gpu.0, &raw mut cores))?;
        Ok(cores)
    }

    /// Total bytes.
    pub(crate) fn memory_v1(&self, gpu: Handle) -> Result<u64, Failure> {
        let mut memory = nvmlMemory_t {
            total: 0,
            free: 0,
            used: 0,
        };
        call!(self.nvmlDeviceGetMemoryInfo(gpu.0, &raw mut memory))?;
        Ok(memory.total)
    }

    pub(crate) fn pci(&self, gpu: Handle) -> Result<Pci, Failure> {
        let mut pci = no_pci();
        call!(self.nvmlDeviceGetPciInfo_v3(gpu.0, &raw mut pci))?;
        pci_of(&pci)
    }

    /// Current and pending mode.
    pub(crate) fn mig_mode(&self, gpu: Handle) -> Result<(u32, u32), Failure> {
        let (mut current, mut pending) = (0, 0);
        call!(self.nvmlDeviceGetMigMode(gpu.0, &raw mut current, &raw mut pending))?;
        Ok((current, pending))
    }

    pub(crate) fn module_id(&self, gpu: Handle) -> Result<u32, Failure> {
        let mut module = 0;
        call!(self.nvmlDeviceGetModuleId(gpu.0, &raw mut module))?;
        Ok(module)
    }

    pub(crate) fn addressing_mode(&self, gpu: Handle) -> Result<u32, Failure> {
        let version = struct_version::<nvmlDeviceAddressingMode_t>(1);
        let mut mode = nvmlDeviceAddressingMode_t { version, value: 0 };
        call!(self.nvmlDeviceGetAddressingMode(gpu.0, &raw mut mode))?;
        Ok(mode.value)
    }

    pub(crate) fn c2c_enabled(&self, gpu: Handle) -> Result<bool, Failure> {
        let mut info = nvmlC2cModeInfo_v1_t { isC2cEnabled: 0 };
        call!(self.nvmlDeviceGetC2cModeInfoV(gpu.0, &raw mut info))?;
        Ok(info.isC2cEnabled != 0)
    }
}

fn no_pci() -> nvmlPciInfo_t {
    nvmlPciInfo_t {
        busIdLegacy: [0; 16],
        domain: 0,
        bus: 0,
        device: 0,
        pciDeviceId: 0,
        pciSubSystemId: 0,
        busId: [0; 32],
    }
}

fn pci_of(pci: &nvmlPciInfo_t) -> Result<Pci, Failure> {
    Ok(Pci {
        bus_id: text(&pci.busId)?,
        domain: pci.domain,
        bus: pci.bus,
        device: pci.device,
        device_id: pci.pciDeviceId,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_has_an_end_and_a_name_has_letters() {
        assert_eq!(some_text(&[65, 0, 66]).unwrap(), "A");
        assert_eq!(text(&[0; 4]).unwrap(), "");
        for byte in [0, 0xff] {
            let buffer = [c_char::from_ne_bytes([byte]); 4];
            let error = some_text(&buffer).unwrap_err();
            assert_eq!(error.code, GpuErrorCode::UNKNOWN);
        }
    }
}
