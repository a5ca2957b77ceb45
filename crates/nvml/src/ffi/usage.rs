//! The calls about use: memory, utilisation, and samples of the performance monitors (GPM).

use divvy_model::{GpuErrorCode, GpuMemory, ProcessSample};
use nvml_wrapper_sys::bindings::{
    nvmlGpmMetricsGet_t, nvmlGpmSample_t, nvmlGpmSupport_t, nvmlMemory_v2_t,
    nvmlProcessUtilizationSample_t, nvmlUtilization_t,
};

use super::mig::Plain;
use super::{Failure, Handle, Library, check, missing, struct_version};

impl Plain for nvmlGpmMetricsGet_t {}
impl Plain for nvmlProcessUtilizationSample_t {}

/// A sample. Has to be given back with [`Library::free_gpm_sample`] while the library that made it
/// lives.
pub(crate) struct GpmSample(nvmlGpmSample_t);

// SAFETY: the sample is an opaque value that only NVML looks behind, and NVML may be called from
// any thread.
unsafe impl Send for GpmSample {}

impl Library {
    /// Reads the memory of a GPU or a MIG device.
    pub(crate) fn memory_v2(&self, device: Handle) -> Result<GpuMemory, Failure> {
        let version = struct_version::<nvmlMemory_v2_t>(2);
        let mut memory = nvmlMemory_v2_t {
            version,
            total: 0,
            reserved: 0,
            free: 0,
            used: 0,
        };
        call!(self.nvmlDeviceGetMemoryInfo_v2(device.0, &raw mut memory))?;
        Ok(GpuMemory {
            total: memory.total,
            used: memory.used,
            reserved: memory.reserved,
        })
    }

    /// Percent.
    pub(crate) fn utilization(&self, gpu: Handle) -> Result<u32, Failure> {
        let mut rates = nvmlUtilization_t { gpu: 0, memory: 0 };
        call!(self.nvmlDeviceGetUtilizationRates(gpu.0, &raw mut rates))?;
        Ok(rates.gpu)
    }

    /// Asks with room for more and more until all fit.
    pub(crate) fn process_utilization(
        &self,
        gpu: Handle,
        since: u64,
    ) -> Result<Vec<ProcessSample>, Failure> {
        let mut room: u32 = 128;
        for _ in 0..4 {
            let mut list = vec![nvmlProcessUtilizationSample_t::zeroed(); room as usize];
            let mut count = room;
            let asked = call!(self.nvmlDeviceGetProcessUtilization(
                gpu.0,
                list.as_mut_ptr(),
                &raw mut count,
                since
            ));
            match asked {
                Ok(()) => {
                    let written = list.into_iter().take(count as usize);
                    let sample = |s: nvmlProcessUtilizationSample_t| ProcessSample {
                        pid: s.pid,
                        at: s.timeStamp,
                        percent: s.smUtil,
                    };
                    return Ok(written.map(sample).collect());
                }
                // Nothing has computed.
                Err(failure) if failure.code == GpuErrorCode::NOT_FOUND => return Ok(Vec::new()),
                Err(failure) if failure.code == GpuErrorCode::INSUFFICIENT_SIZE => {
                    room = count.max(room).saturating_mul(2).min(1 << 14);
                }
                Err(failure) => return Err(failure),
            }
        }
        Err(Failure::code(GpuErrorCode::INSUFFICIENT_SIZE))
    }

    /// Returns whether the GPU has performance monitors that can be sampled.
    pub(crate) fn supports_gpm(&self, gpu: Handle) -> Result<bool, Failure> {
        let mut support = nvmlGpmSupport_t {
            // Plain numbers and not `NVML_STRUCT_VERSION`: `NVML_GPM_SUPPORT_VERSION`, and below
            // `NVML_GPM_METRICS_GET_VERSION`.
            version: 1,
            isSupportedDevice: 0,
        };
        call!(self.nvmlGpmQueryDeviceSupport(gpu.0, &raw mut support))?;
        Ok(support.isSupportedDevice != 0)
    }

    /// Takes a sample of a GPU, or of one of its instances.
    pub(crate) fn gpm_sample(
        &self,
        gpu: Handle,
        instance: Option<u32>,
    ) -> Result<GpmSample, Failure> {
        // A sample that cannot be given back is not made.
        if self.nvml.lib().nvmlGpmSampleFree.is_err() {
            return Err(missing("nvmlGpmSampleFree"));
        }
        let mut sample: nvmlGpmSample_t = std::ptr::null_mut();
        call!(self.nvmlGpmSampleAlloc(&raw mut sample))?;
        let taken = match instance {
            Some(instance) => call!(self.nvmlGpmMigSampleGet(gpu.0, instance, sample)),
            None => call!(self.nvmlGpmSampleGet(gpu.0, sample)),
        };
        let sample = GpmSample(sample);
        match taken {
            Ok(()) => Ok(sample),
            Err(failure) => {
                self.free_gpm_sample(sample);
                Err(failure)
            }
        }
    }

    #[expect(clippy::needless_pass_by_value, reason = "it is gone afterwards")]
    pub(crate) fn free_gpm_sample(&self, sample: GpmSample) {
        // Nothing can be done about a buffer that is not taken back.
        drop(call!(self.nvmlGpmSampleFree(sample.0)));
    }

    /// Percent of the multiprocessors' time that was used between two samples.
    pub(crate) fn sm_utilization(
        &self,
        first: &GpmSample,
        second: &GpmSample,
    ) -> Result<f64, Failure> {
        // `NVML_GPM_METRIC_SM_UTIL`.
        const SM_UTIL: u32 = 2;
        let mut asked = nvmlGpmMetricsGet_t {
            version: 1,
            numMetrics: 1,
            sample1: first.0,
            sample2: second.0,
            ..Plain::zeroed()
        };
        let [metric, ..] = &mut asked.metrics;
        metric.metricId = SM_UTIL;
        call!(self.nvmlGpmMetricsGet(&raw mut asked))?;
        let [metric, ..] = &asked.metrics;
        check(metric.nvmlReturn)?;
        Ok(metric.value)
    }
}
