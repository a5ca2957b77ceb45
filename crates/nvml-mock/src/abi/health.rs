//! Health of a GPU, and event sets. SAFETY: see the parent.

use std::ffi::{c_uint, c_ulonglong};
use std::time::Duration;

use divvy_gpu_sim::{Engine, SimGpu};
use divvy_model::health::{GpuEventKind, RecoveryAction};
use divvy_model::{Architecture, GpuErrorCode};
use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t, nvmlReturn_t};

use super::{Answer, code, gpu, put};
use crate::bridge::{self, Thing};

const DOUBLE_BIT_ECC: c_ulonglong = 0x2;
const XID_CRITICAL: c_ulonglong = 0x8;
const RETIREMENT_FAILURE: c_ulonglong = 0x800;
const RECOVERY_ACTION: c_ulonglong = 0x8000;
/// Returns the events that the simulated GPUs can send, and some kinds that are never simulated.
fn supported(engine: &Engine) -> c_ulonglong {
    let generation = bridge::generation(engine);
    let retirement = if generation.reports_retirement() {
        RETIREMENT_FAILURE
    } else {
        0
    };
    let recovery = if generation.reports_recovery() {
        RECOVERY_ACTION
    } else {
        0
    };
    0x1 | DOUBLE_BIT_ECC | XID_CRITICAL | 0x10 | retirement | recovery
}

pub(super) fn raw_action(action: RecoveryAction) -> c_uint {
    match action {
        RecoveryAction::Nothing => 0,
        RecoveryAction::Reset => 1,
        RecoveryAction::Reboot => 2,
        RecoveryAction::DrainPeers => 3,
        RecoveryAction::DrainAndReset => 4,
        RecoveryAction::RecoverImexDomain => 5,
        RecoveryAction::Unknown(raw) => raw,
    }
}

/// Before Ampere bad memory was replaced by pages.
fn retires_pages(gpu: &SimGpu) -> bool {
    matches!(
        gpu.facts.architecture,
        Architecture::Turing | Architecture::Volta
    )
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetRemappedRows(
    device: nvmlDevice_t,
    correctable: *mut c_uint,
    uncorrectable: *mut c_uint,
    pending: *mut c_uint,
    failed: *mut c_uint,
) -> nvmlReturn_t {
    let remap = gpu(device, |g| {
        let reports = !retires_pages(g) && g.instances.is_empty();
        g.vitals
            .remap
            .filter(|_| reports)
            .ok_or(GpuErrorCode::NOT_SUPPORTED)
    });
    let remap = match remap {
        Ok(remap) => remap,
        Err(code) => return code.0,
    };
    let numbers = [
        (correctable, 0),
        (uncorrectable, c_uint::from(remap.pending || remap.failed)),
        (pending, c_uint::from(remap.pending)),
        (failed, c_uint::from(remap.failed)),
    ];
    for (out, number) in numbers {
        // SAFETY: see `abi`.
        let done = unsafe { put(out, || Ok(number)) };
        if done != 0 {
            return done;
        }
    }
    0
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetRetiredPagesPendingStatus(
    device: nvmlDevice_t,
    pending: *mut c_uint,
) -> nvmlReturn_t {
    // Boards with rows say NOT_SUPPORTED; here that no page is pending, which no reader of theirs
    // may take for an answer.
    let ask = || {
        gpu(device, |g| match g.vitals.remap {
            Some(remap) => Ok((remap.pending && retires_pages(g)).into()),
            None => Err(GpuErrorCode::NOT_SUPPORTED),
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(pending, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: nvmlDevice_t,
    kind: c_uint,
    counter: c_uint,
    count: *mut c_ulonglong,
) -> nvmlReturn_t {
    const UNCORRECTED: c_uint = 1;
    const VOLATILE: c_uint = 0;
    let ask = || {
        if kind > 1 || counter > 1 {
            return Err(GpuErrorCode::INVALID_ARGUMENT);
        }
        let is_known = (kind, counter) == (UNCORRECTED, VOLATILE);
        gpu(device, |g| match g.vitals.uncorrected_ecc {
            Some(count) if is_known => Ok(count),
            Some(_) => Ok(0),
            None => Err(GpuErrorCode::NOT_SUPPORTED),
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(count, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(set, || {
            Ok(std::ptr::without_provenance_mut(bridge::make_event_set()?))
        })
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: nvmlEventSet_t) -> nvmlReturn_t {
    code(bridge::free_event_set(set.addr()))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(
    device: nvmlDevice_t,
    kinds: *mut c_ulonglong,
) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(kinds, || {
            bridge::gpu(device.addr(), |engine, _| Ok(supported(engine)))
        })
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(
    device: nvmlDevice_t,
    kinds: c_ulonglong,
    set: nvmlEventSet_t,
) -> nvmlReturn_t {
    let register = || {
        let uuid = bridge::uuid_of(device.addr())?;
        // Like the real driver: nothing is registered if a single kind cannot be.
        if kinds & !bridge::gpu(device.addr(), |engine, _| Ok(supported(engine)))? != 0 {
            return Err(GpuErrorCode::NOT_SUPPORTED);
        }
        bridge::register_events(&uuid, set.addr())
    };
    code(register())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait_v2(
    set: nvmlEventSet_t,
    data: *mut nvmlEventData_t,
    millis: c_uint,
) -> nvmlReturn_t {
    let wait = || -> Answer<nvmlEventData_t> {
        let event = bridge::wait_event(set.addr(), Duration::from_millis(millis.into()))?;
        let (kind, number) = match event.kind {
            GpuEventKind::Xid(xid) => (XID_CRITICAL, c_ulonglong::from(xid)),
            GpuEventKind::UncorrectedEcc => (DOUBLE_BIT_ECC, 0),
            GpuEventKind::RetirementFailure => (RETIREMENT_FAILURE, 0),
            GpuEventKind::LookAgain => (RECOVERY_ACTION, 0),
            GpuEventKind::Other(bit) => (bit, 0),
        };
        Ok(nvmlEventData_t {
            device: std::ptr::without_provenance_mut(bridge::handle_to(Thing::Gpu(event.gpu))),
            eventType: kind,
            eventData: number,
            gpuInstanceId: event.gpu_instance.unwrap_or(c_uint::MAX),
            computeInstanceId: event.compute_instance.unwrap_or(c_uint::MAX),
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(data, wait) }
}
