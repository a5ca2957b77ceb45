//! NVML's C functions. Pointers in, pointers out: everything else is in `bridge`.
//!
//! SAFETY, for every function in here and below: `nvml.h` makes the caller promise that an out
//! pointer is valid for a value of its type, a buffer for its length, and a text for reading up to
//! its NUL. Null is checked for, as NVML does: after the session ([`bad_argument`]). A device
//! handle is only a number here and is never followed.

mod compute;
mod device;
mod health;
mod limits;
mod links;
mod mig;
mod mig_devices;
mod processes;
mod system;
mod usage;

use std::ffi::{CString, c_char, c_uint};
use std::mem::size_of;
use std::panic::Location;
use std::ptr;

use divvy_gpu_sim::SimGpu;
use divvy_model::{GpuErrorCode, PciAddress};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlPciInfo_t, nvmlReturn_t};

use crate::bridge;
use crate::trial::{self, Odd};

pub(super) type Answer<T> = Result<T, GpuErrorCode>;

fn plain(answer: Answer<()>) -> nvmlReturn_t {
    match answer {
        Ok(()) => 0,
        Err(code) => refused(code),
    }
}

/// Returns the code of a call that has failed: without a session nothing was looked at (seen of
/// all functions of 525, 535, 550 and 555).
pub(super) fn refused(code: GpuErrorCode) -> nvmlReturn_t {
    bridge::ready().err().unwrap_or(code).0
}

/// Answers a call that begins a session.
#[track_caller]
pub(super) fn code_of_session(answer: Answer<()>) -> nvmlReturn_t {
    match answer {
        Ok(()) => code(Ok(())),
        Err(code) => code.0,
    }
}

/// Returns the code of a call with a wrong argument. Without a session no argument is looked at
/// (seen of 535, 550 and 555).
pub(super) fn bad_argument() -> GpuErrorCode {
    bridge::ready()
        .err()
        .unwrap_or(GpuErrorCode::INVALID_ARGUMENT)
}

/// Answers a call whose work is done.
#[track_caller]
pub(super) fn code(answer: Answer<()>) -> nvmlReturn_t {
    code_of(trial::odd(Location::caller(), false), answer)
}

/// Answers a question for the MIG mode.
#[track_caller]
pub(super) fn code_of_mode(answer: Answer<()>) -> nvmlReturn_t {
    code_of(trial::odd_mode(Location::caller()), answer)
}

fn code_of(odd: Option<Odd>, answer: Answer<()>) -> nvmlReturn_t {
    if let Some(Odd::Fails(code) | Odd::FailsAfter(code)) = odd {
        return trial::code_after(code);
    }
    trial::done();
    plain(answer)
}

/// Writes an answer where the caller wants it.
///
/// # Safety
/// `out` is null or valid for writing a `T`.
#[track_caller]
pub(super) unsafe fn put<T>(out: *mut T, answer: impl FnOnce() -> Answer<T>) -> nvmlReturn_t {
    // Another number or handle cannot be distinguished from the right one; of a struct that is zero
    // or full of ones it can be seen that nothing is right.
    let is_struct = size_of::<T>() >= 16;
    // SAFETY: by this function's contract.
    unsafe { put_odd(out, is_struct, answer) }
}

/// Writes a count where the caller wants it.
///
/// # Safety
/// `out` is null or valid for writing a number.
#[track_caller]
pub(super) unsafe fn put_count(
    out: *mut c_uint,
    answer: impl FnOnce() -> Answer<c_uint>,
) -> nvmlReturn_t {
    // SAFETY: by this function's contract.
    unsafe { put_odd(out, true, answer) }
}

/// # Safety
/// `out` is null or valid for writing a `T`.
#[track_caller]
unsafe fn put_odd<T>(
    out: *mut T,
    has_value: bool,
    answer: impl FnOnce() -> Answer<T>,
) -> nvmlReturn_t {
    if out.is_null() {
        return bad_argument().0;
    }
    let odd = trial::odd(Location::caller(), has_value);
    if let Some(Odd::Fails(code)) = odd {
        return code;
    }
    let value = match answer() {
        Ok(value) => value,
        Err(code) => return refused(code),
    };
    match odd {
        Some(Odd::FailsAfter(code)) => return trial::code_after(code),
        Some(Odd::WritesNothing | Odd::LeavesOut) => {}
        // SAFETY: not null, and valid by this function's contract.
        Some(Odd::WritesOnes) => unsafe { out.write_bytes(0xff, 1) },
        // SAFETY: as above.
        Some(Odd::Fails(_)) | None => unsafe { out.write(value) },
    }
    trial::done();
    0
}

/// Writes a text with its NUL.
///
/// # Safety
/// `out` is null or valid for writing `length` characters.
#[track_caller]
pub(super) unsafe fn put_text(
    out: *mut c_char,
    length: c_uint,
    answer: impl FnOnce() -> Answer<String>,
) -> nvmlReturn_t {
    if out.is_null() {
        return bad_argument().0;
    }
    let odd = trial::odd(Location::caller(), true);
    if let Some(Odd::Fails(code) | Odd::FailsAfter(code)) = odd {
        return code;
    }
    let text = match answer() {
        Ok(text) => text,
        Err(code) => return refused(code),
    };
    // Also of a text that needs no session.
    let write = || -> Answer<()> {
        match odd {
            Some(Odd::WritesOnes) => {
                // SAFETY: not null, and valid for `length` characters by this function's contract.
                unsafe { out.write_bytes(0xff, length as usize) };
                return Ok(());
            }
            Some(_) => return Ok(()),
            None => {}
        }
        let text = CString::new(text).map_err(|_| GpuErrorCode::UNKNOWN)?;
        let bytes = text.as_bytes_with_nul();
        if bytes.len() > length as usize {
            return Err(GpuErrorCode::INSUFFICIENT_SIZE);
        }
        // SAFETY: not null, and valid for `length` characters by this function's contract.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr().cast(), out, bytes.len()) };
        Ok(())
    };
    write().map_or_else(|code| code.0, |()| 0)
}

/// Asks about the GPU behind a handle.
pub(super) fn gpu<T>(device: nvmlDevice_t, ask: impl FnOnce(&SimGpu) -> Answer<T>) -> Answer<T> {
    bridge::gpu(device.addr(), |_, gpu| ask(gpu))
}

/// # Safety
/// `versioned` is null or points to a struct that begins with its version.
pub(super) unsafe fn version_of(versioned: *const c_uint) -> Answer<c_uint> {
    bridge::ready()?;
    if versioned.is_null() {
        return Err(GpuErrorCode::INVALID_ARGUMENT);
    }
    // SAFETY: not null, and begins with a version by this function's contract.
    Ok(unsafe { versioned.read() })
}

pub(super) fn pci_info(address: PciAddress, device_id: u32) -> nvmlPciInfo_t {
    let PciAddress {
        domain,
        bus,
        device,
        function,
    } = address;
    nvmlPciInfo_t {
        busIdLegacy: chars(&format!(
            "{:04X}:{bus:02X}:{device:02X}.{function:X}",
            domain & 0xffff
        )),
        domain,
        bus: bus.into(),
        device: device.into(),
        pciDeviceId: device_id,
        pciSubSystemId: 0,
        busId: chars(&format!("{domain:08X}:{bus:02X}:{device:02X}.{function:X}")),
    }
}

/// A text in an array, with at least one NUL after it.
pub(super) fn chars<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (slot, byte) in array.iter_mut().take(N.saturating_sub(1)).zip(text.bytes()) {
        *slot = c_char::from_ne_bytes([byte]);
    }
    array
}

/// NVML's versioned structs say which they are: size and version number.
#[expect(
    clippy::cast_possible_truncation,
    reason = "the structs have less than 16 MiB"
)]
pub(super) const fn struct_version<T>(version: u32) -> u32 {
    size_of::<T>() as u32 | version << 24
}
