//! Use of GPUs. SAFETY: see the parent.

use std::ffi::{c_uint, c_ulonglong};
use std::time::{SystemTime, UNIX_EPOCH};

use divvy_model::mig::GpuInstanceId;
use divvy_model::{GpuErrorCode, GpuMemory, GpuOp, MigDevice};
use nvml_wrapper_sys::bindings::{
    nvmlDevice_t, nvmlGpmMetricsGet_t, nvmlGpmSample_t, nvmlGpmSupport_t, nvmlMemory_t,
    nvmlMemory_v2_t, nvmlProcessUtilizationSample_t, nvmlReturn_t, nvmlUtilization_t,
};

use super::{Answer, bad_argument, code, put, refused, struct_version, version_of};
use crate::bridge::{self, Thing, uuid_of};

/// Reads the memory of a GPU or a MIG device.
fn memory_of(device: nvmlDevice_t) -> Answer<GpuMemory> {
    let (gpu, part) = match bridge::thing(device.addr())? {
        Thing::MigDevice(..) => {
            let (gpu, found) = bridge::mig_device(device.addr())?;
            (
                gpu,
                Some(MigDevice {
                    gpu_instance: found.gpu_instance,
                    uuid: found.uuid,
                }),
            )
        }
        _ => (uuid_of(device.addr())?, None),
    };
    bridge::ask(Some(GpuOp::Memory), &gpu, |engine| {
        engine.memory(&gpu, part.as_ref())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo(
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_t,
) -> nvmlReturn_t {
    let ask = || {
        let GpuMemory {
            total,
            used,
            reserved,
        } = memory_of(device)?;
        let used = used + reserved;
        Ok(nvmlMemory_t {
            total,
            free: total.saturating_sub(used),
            used,
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(memory, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(
    device: nvmlDevice_t,
    memory: *mut nvmlMemory_v2_t,
) -> nvmlReturn_t {
    let version = struct_version::<nvmlMemory_v2_t>(2);
    let ask = || {
        let GpuMemory {
            total,
            used,
            reserved,
        } = memory_of(device)?;
        Ok(nvmlMemory_v2_t {
            version,
            total,
            reserved,
            free: total.saturating_sub(used + reserved),
            used,
        })
    };
    // SAFETY: see `abi`; a versioned struct has at least its version.
    unsafe {
        match version_of(memory.cast()) {
            Ok(asked) if asked == version => put(memory, ask),
            Ok(_) => GpuErrorCode::ARGUMENT_VERSION_MISMATCH.0,
            Err(code) => code.0,
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetUtilizationRates(
    device: nvmlDevice_t,
    rates: *mut nvmlUtilization_t,
) -> nvmlReturn_t {
    let ask = || {
        let gpu = uuid_of(device.addr())?;
        let percent = bridge::ask(Some(GpuOp::Utilization), &gpu, |engine| {
            engine.utilization(&gpu)
        })?;
        Ok(nvmlUtilization_t {
            gpu: percent,
            memory: 0,
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(rates, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: nvmlDevice_t,
    samples: *mut nvmlProcessUtilizationSample_t,
    count: *mut c_uint,
    since: c_ulonglong,
) -> nvmlReturn_t {
    if count.is_null() {
        return bad_argument().0;
    }
    let ask = || {
        let gpu = uuid_of(device.addr())?;
        let now = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        let now = u64::try_from(now.as_micros()).map_err(|_| GpuErrorCode::UNKNOWN)?;
        let ask = |engine: &divvy_gpu_sim::Engine| engine.process_utilization(&gpu, since, now);
        let found = bridge::ask(Some(GpuOp::ProcessUtilization), &gpu, ask)?;
        if found.is_empty() {
            Err(GpuErrorCode::NOT_FOUND)
        } else {
            Ok(found)
        }
    };
    code(ask().and_then(|found| {
        // SAFETY: see `abi`.
        let room = unsafe { count.read() } as usize;
        // SAFETY: as above.
        unsafe { count.write(c_uint::try_from(found.len()).unwrap_or(c_uint::MAX)) };
        if samples.is_null() || found.len() > room {
            return Err(GpuErrorCode::INSUFFICIENT_SIZE);
        }
        for (at, sample) in found.into_iter().enumerate() {
            let written = nvmlProcessUtilizationSample_t {
                pid: sample.pid,
                timeStamp: sample.at,
                smUtil: sample.percent,
                memUtil: 0,
                encUtil: 0,
                decUtil: 0,
            };
            // SAFETY: see `abi`; `at` is below the room that the caller has.
            unsafe { samples.add(at).write(written) };
        }
        Ok(())
    }))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpmQueryDeviceSupport(
    device: nvmlDevice_t,
    support: *mut nvmlGpmSupport_t,
) -> nvmlReturn_t {
    let ask = || {
        let has = bridge::gpu(device.addr(), |engine, gpu| Ok(engine.measures_sm(gpu)))?;
        Ok(nvmlGpmSupport_t {
            version: 1,
            isSupportedDevice: has.into(),
        })
    };
    // SAFETY: see `abi`.
    unsafe { put(support, ask) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpmSampleAlloc(sample: *mut nvmlGpmSample_t) -> nvmlReturn_t {
    // SAFETY: see `abi`.
    unsafe {
        put(sample, || {
            Ok(std::ptr::without_provenance_mut(bridge::make_gpm_sample()?))
        })
    }
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleFree(sample: nvmlGpmSample_t) -> nvmlReturn_t {
    code(bridge::free_gpm_sample(sample.addr()))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleGet(device: nvmlDevice_t, sample: nvmlGpmSample_t) -> nvmlReturn_t {
    code(bridge::take_gpm_sample(device.addr(), None, sample.addr()))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmMigSampleGet(
    device: nvmlDevice_t,
    instance: c_uint,
    sample: nvmlGpmSample_t,
) -> nvmlReturn_t {
    code(bridge::take_gpm_sample(
        device.addr(),
        Some(GpuInstanceId(instance)),
        sample.addr(),
    ))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpmMetricsGet(asked: *mut nvmlGpmMetricsGet_t) -> nvmlReturn_t {
    const SM_UTIL: c_uint = 2;
    if asked.is_null() {
        return bad_argument().0;
    }
    // SAFETY: see `abi`.
    let asked = unsafe { &mut *asked };
    if asked.version != 1 {
        return refused(GpuErrorCode::ARGUMENT_VERSION_MISMATCH);
    }
    let used = bridge::compare_gpm_samples(asked.sample1.addr(), asked.sample2.addr());
    code(used.map(|percent| {
        for metric in asked.metrics.iter_mut().take(asked.numMetrics as usize) {
            let known = metric.metricId == SM_UTIL;
            metric.nvmlReturn = if known {
                0
            } else {
                GpuErrorCode::NOT_SUPPORTED.0
            };
            metric.value = if known { percent.into() } else { 0.0 };
        }
    }))
}
