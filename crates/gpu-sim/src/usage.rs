//! Use of simulated GPUs: memory and multiprocessors, as tests script them.

use std::collections::BTreeMap;

use divvy_model::mig::GpuInstanceId;
use divvy_model::{
    Architecture, GpuError, GpuErrorCode, GpuMemory, GpuOp, GpuProcess, GpuUuid, MigDevice,
    ProcessSample,
};
use serde::{Deserialize, Serialize};

use crate::engine::{Engine, SimGpu};

/// So many samples of processes the driver keeps.
const RING: usize = 72;

/// Use of a GPU beside what its processes say.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SimUsage {
    /// Memory that the driver keeps back.
    pub reserved_bytes: u64,
    /// Memory in use that belongs to no process.
    pub other_bytes: u64,
    /// Percent of the GPU (of its instance, under MIG) that processes use all the time.
    pub busy: BTreeMap<u32, u32>,
    /// Samples that the driver has besides, whatever they say.
    pub samples: Vec<ProcessSample>,
}

impl SimGpu {
    fn memory_of(&self, counts: impl Fn(&GpuProcess) -> bool) -> u64 {
        self.processes
            .iter()
            .filter(|p| counts(p))
            .filter_map(|p| p.memory_bytes)
            .sum()
    }

    fn computes_whole(&self) -> Result<(), GpuErrorCode> {
        if self.facts.mig_mode.is_on() {
            Err(GpuErrorCode::NOT_SUPPORTED)
        } else {
            Ok(())
        }
    }

    fn busy(&self, counts: impl Fn(&GpuProcess) -> bool) -> u32 {
        let pids = self.processes.iter().filter(|p| counts(p)).map(|p| p.pid);
        pids.filter_map(|pid| self.usage.busy.get(&pid)).sum()
    }
}

impl Engine {
    /// A process has so much memory from now on (`None`: NVML does not say) and computes so many
    /// percent of the time, wherever it has contexts on the GPU.
    pub fn set_usage(&mut self, gpu: &GpuUuid, pid: u32, memory_bytes: Option<u64>, percent: u32) {
        let Some(gpu) = self.gpu(gpu) else { return };
        let with = |p: GpuProcess| {
            if p.pid == pid {
                GpuProcess { memory_bytes, ..p }
            } else {
                p
            }
        };
        gpu.processes = std::mem::take(&mut gpu.processes)
            .into_iter()
            .map(with)
            .collect();
        gpu.usage.busy.insert(pid, percent);
    }

    /// See [`divvy_model::GpuDriver::memory`].
    pub fn memory(&self, gpu: &GpuUuid, part: Option<&MigDevice>) -> Result<GpuMemory, GpuError> {
        let fail = |code| GpuError::on_gpu(GpuOp::Memory, code, gpu);
        let found = self.find(GpuOp::Memory, gpu)?;
        let total = found
            .facts
            .memory_bytes
            .ok_or_else(|| fail(GpuErrorCode::NOT_SUPPORTED))?;
        let Some(part) = part else {
            let used = found.memory_of(|_| true) + found.usage.other_bytes;
            return Ok(GpuMemory {
                total,
                used,
                reserved: found.usage.reserved_bytes,
            });
        };
        let is_it = |c: &divvy_model::mig::ComputeInstance| c.uuid == part.uuid;
        let living = found.instances.iter().find(|i| i.compute.iter().any(is_it));
        let instance = living
            .ok_or_else(|| fail(GpuErrorCode::NOT_FOUND))?
            .instance;
        let capabilities = self.mig_capabilities(gpu)?;
        let profile = capabilities
            .profile(instance.profile)
            .ok_or_else(|| fail(GpuErrorCode::UNKNOWN))?;
        let used = found.memory_of(|p| p.gpu_instance == Some(instance.id.0));
        Ok(GpuMemory {
            total: profile.memory_bytes(),
            used,
            reserved: 0,
        })
    }

    /// See [`divvy_model::GpuDriver::utilization`].
    pub fn utilization(&self, gpu: &GpuUuid) -> Result<u32, GpuError> {
        let found = self.find(GpuOp::Utilization, gpu)?;
        found
            .computes_whole()
            .map_err(|code| GpuError::on_gpu(GpuOp::Utilization, code, gpu))?;
        Ok(found.busy(|_| true).min(100))
    }

    /// See [`divvy_model::GpuDriver::process_utilization`]; `now` is the driver's time in
    /// microseconds.
    pub fn process_utilization(
        &self,
        gpu: &GpuUuid,
        since: u64,
        now: u64,
    ) -> Result<Vec<ProcessSample>, GpuError> {
        let op = GpuOp::ProcessUtilization;
        let found = self.find(op, gpu)?;
        found
            .computes_whole()
            .map_err(|code| GpuError::on_gpu(op, code, gpu))?;
        let there = |pid: u32| found.processes.iter().any(|p| p.pid == pid);
        let busy = found
            .usage
            .busy
            .iter()
            .filter(|(pid, percent)| **percent > 0 && there(**pid));
        let steady = busy.map(|(pid, percent)| ProcessSample {
            pid: *pid,
            at: now,
            percent: *percent,
        });
        let all = found.usage.samples.iter().copied().chain(steady);
        let mut recent: Vec<_> = all.filter(|sample| sample.at > since).collect();
        recent.sort_by_key(|sample| std::cmp::Reverse(sample.at));
        recent.truncate(RING);
        recent.sort_unstable();
        Ok(recent)
    }

    /// Percent of the multiprocessors in use, of the GPU or of one of its instances.
    pub fn sm_busy(&self, gpu: &GpuUuid, instance: Option<GpuInstanceId>) -> Result<u32, GpuError> {
        let fail = |code| GpuError::on_gpu(GpuOp::SmUtilization, code, gpu);
        let found = self.find(GpuOp::SmUtilization, gpu)?;
        if !self.measures_sm(found) {
            return Err(fail(GpuErrorCode::NOT_SUPPORTED));
        }
        let Some(id) = instance else {
            return Ok(found.busy(|_| true));
        };
        if !found.instances.iter().any(|i| i.instance.id == id) {
            return Err(fail(GpuErrorCode::NOT_FOUND));
        }
        Ok(found.busy(|p| p.gpu_instance == Some(id.0)))
    }

    /// Returns whether the GPU has performance monitors for it: since Hopper.
    pub fn measures_sm(&self, gpu: &SimGpu) -> bool {
        let architecture = gpu.facts.architecture;
        architecture >= Architecture::Hopper && !matches!(architecture, Architecture::Unknown(_))
    }
}
