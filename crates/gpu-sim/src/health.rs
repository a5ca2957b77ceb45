//! Health of simulated GPUs, and the events they send.

use divvy_model::health::{
    FabricState, GpuEvent, GpuEventKind, GpuVitals, RecoveryAction, RowRemap,
};
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
    /// Returns it in the form of a driver's report.
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
        fabric: None,
    }
}

impl SimGpu {
    /// A reset cures what a reset can cure.
    pub(crate) fn heal(&mut self) {
        let failed = self.vitals.remap.is_some_and(|remap| remap.failed);
        self.vitals = GpuVitals {
            recovery: self.vitals.recovery.map(|_| RecoveryAction::Nothing),
            remap: self.vitals.remap.map(|_| RowRemap {
                pending: false,
                failed,
            }),
            uncorrected_ecc: self.vitals.uncorrected_ecc.map(|_| 0),
            fabric: self.vitals.fabric,
        };
    }
}

impl Engine {
    /// See [`divvy_model::GpuDriver::vitals`].
    pub fn vitals(&self, gpu: &GpuUuid) -> Result<GpuVitals, GpuError> {
        Ok(self.find(GpuOp::Vitals, gpu)?.vitals)
    }

    /// Sends an event of a GPU. Returns true if there is such a GPU.
    pub fn send_event(
        &mut self,
        gpu: &GpuUuid,
        kind: GpuEventKind,
        gpu_instance: Option<u32>,
    ) -> bool {
        if self.gpu(gpu).is_none() {
            return false;
        }
        let compute_instance = gpu_instance.map(|_| 0);
        let number = self.events_sent;
        self.events_sent += 1;
        self.events.push(SimEvent {
            number,
            gpu: gpu.clone(),
            kind,
            gpu_instance,
            compute_instance,
        });
        let surplus = self.events.len().saturating_sub(REMEMBERED);
        self.events.drain(..surplus);
        true
    }

    /// Counts the events that were sent ever: the number of the next.
    pub fn events_sent(&self) -> u64 {
        self.events_sent
    }

    /// Events from a number on.
    pub fn events_from(&self, number: u64) -> impl Iterator<Item = &SimEvent> {
        self.events
            .iter()
            .filter(move |event| event.number >= number)
    }

    /// Fails while events cannot be waited for.
    pub fn watchable(&self) -> Result<(), GpuError> {
        self.loaded(GpuOp::Events, None)
    }

    /// Sets how far a GPU's registration with its NVLink fabric is; `None` as without one. While it
    /// is not ready, the GPU is no member of its fabric.
    pub fn set_fabric(
        &mut self,
        gpu: &GpuUuid,
        fabric: Option<FabricState>,
    ) -> Result<(), GpuError> {
        let lost = GpuError::on_gpu(GpuOp::Vitals, GpuErrorCode::NOT_FOUND, gpu);
        self.gpu(gpu).ok_or(lost)?.vitals.fabric = fabric;
        Ok(())
    }

    /// Sets the recovery action that a GPU reports; `None` as with
    /// older drivers.
    pub fn set_recovery(
        &mut self,
        gpu: &GpuUuid,
        action: Option<RecoveryAction>,
    ) -> Result<(), GpuError> {
        let lost = GpuError::on_gpu(GpuOp::Vitals, GpuErrorCode::NOT_FOUND, gpu);
        self.gpu(gpu).ok_or(lost)?.vitals.recovery = action;
        Ok(())
    }
}
