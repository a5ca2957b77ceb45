//! How simulated GPUs are, and the events they send.

use divvy_model::health::{GpuEvent, GpuEventKind, GpuVitals, RecoveryAction, RowRemap};
use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};
use divvy_model::{GpuError, GpuErrorCode, GpuOp, GpuUuid};
use serde::{Deserialize, Serialize};

use crate::engine::{Engine, SimGpu};

/// So many events are remembered: more than anyone lets pile up.
const REMEMBERED: usize = 256;

/// An event as it was sent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SimEvent {
    /// Counts up.
    pub number: u64,
    pub gpu: GpuUuid,
    pub kind: GpuEventKind,
    /// Where; `None` is the whole GPU.
    #[serde(default)]
    pub gpu_instance: Option<u32>,
    /// Where in that.
    #[serde(default)]
    pub compute_instance: Option<u32>,
}

impl SimEvent {
    /// As a driver reports it.
    pub fn to_model(&self) -> GpuEvent {
        GpuEvent {
            gpu: Some(self.gpu.clone()),
            kind: self.kind,
            gpu_instance: self.gpu_instance.map(GpuInstanceId),
            compute_instance: self.compute_instance.map(ComputeInstanceId),
        }
    }
}

/// Nothing is wrong.
pub(crate) fn well() -> GpuVitals {
    GpuVitals {
        recovery: Some(RecoveryAction::Nothing),
        remap: Some(RowRemap::default()),
        uncorrected_ecc: Some(0),
    }
}

impl SimGpu {
    /// A reset cures what a reset can cure.
    pub(crate) fn heal(&mut self) {
        let failed = self.vitals.remap.is_some_and(|remap| remap.failed);
        self.vitals = GpuVitals {
            recovery: self.vitals.recovery.map(|_| RecoveryAction::Nothing),
            remap: self.vitals.remap.map(|_| RowRemap { pending: false, failed }),
            uncorrected_ecc: self.vitals.uncorrected_ecc.map(|_| 0),
        };
    }
}

impl Engine {
    /// See [`divvy_model::GpuDriver::vitals`].
    pub fn vitals(&self, gpu: &GpuUuid) -> Result<GpuVitals, GpuError> {
        Ok(self.find(GpuOp::Vitals, gpu)?.vitals)
    }

    /// A GPU sends an event. Whether there is such a GPU.
    pub fn send_event(&mut self, gpu: &GpuUuid, kind: GpuEventKind, gpu_instance: Option<u32>) -> bool {
        if self.gpu(gpu).is_none() {
            return false;
        }
        let compute_instance = gpu_instance.map(|_| 0);
        let number = self.events_sent;
        self.events_sent += 1;
        self.events.push(SimEvent { number, gpu: gpu.clone(), kind, gpu_instance, compute_instance });
        let surplus = self.events.len().saturating_sub(REMEMBERED);
        self.events.drain(..surplus);
        true
    }

    /// How many events were sent ever: the number of the next.
    pub fn events_sent(&self) -> u64 {
        self.events_sent
    }

    /// Events from a number on.
    pub fn events_from(&self, number: u64) -> impl Iterator<Item = &SimEvent> {
        self.events.iter().filter(move |event| event.number >= number)
    }

    /// Whether events can be waited for now.
    pub fn watchable(&self) -> Result<(), GpuError> {
        self.loaded(GpuOp::Events, None)
    }

    /// What a GPU would have to say to nvidia-smi's question for a recovery action; `None` as with older drivers.
    pub fn set_recovery(&mut self, gpu: &GpuUuid, action: Option<RecoveryAction>) -> Result<(), GpuError> {
        let lost = GpuError::on_gpu(GpuOp::Vitals, GpuErrorCode::NOT_FOUND, gpu);
        self.gpu(gpu).ok_or(lost)?.vitals.recovery = action;
        Ok(())
    }
}
