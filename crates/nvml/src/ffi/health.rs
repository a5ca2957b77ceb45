//! The calls about health: recovery action, row remapping, ECC counters, and event sets.

use divvy_model::GpuErrorCode;
use nvml_wrapper_sys::bindings::{nvmlEventData_t, nvmlEventSet_t, nvmlFieldValue_t};

use super::mig::Plain;
use super::{Failure, Handle, Library, check, missing};

/// An event set. Has to be given back with [`Library::free_event_set`] while the library that made
/// it lives.
pub(crate) struct EventSet(nvmlEventSet_t);

// SAFETY: the set is an opaque value that only NVML looks behind, and NVML may be called from any
// thread.
unsafe impl Send for EventSet {}

impl Plain for nvmlEventData_t {}

/// NVML's words for an event.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EventData {
    pub(crate) device: Handle,
    /// Its bit.
    pub(crate) kind: u64,
    pub(crate) data: u64,
    /// `u32::MAX`: the whole GPU.
    pub(crate) gpu_instance: u32,
    pub(crate) compute_instance: u32,
}

impl Library {
    /// Field 230.
    pub(crate) fn recovery_action(&self, gpu: Handle) -> Result<u32, Failure> {
        const GET_GPU_RECOVERY_ACTION: u32 = 230;
        let mut value = nvmlFieldValue_t {
            fieldId: GET_GPU_RECOVERY_ACTION,
            ..Plain::zeroed()
        };
        call!(self.nvmlDeviceGetFieldValues(gpu.0, 1, &raw mut value))?;
        check(value.nvmlReturn)?;
        // SAFETY: each member of the union is a number, and all its bytes are set: from zero, or by
        // NVML.
        Ok(unsafe { value.value.uiVal })
    }

    /// Reads whether replaced rows wait for a reset, and whether replacing failed.
    pub(crate) fn remapped_rows(&self, gpu: Handle) -> Result<(bool, bool), Failure> {
        let (mut correctable, mut uncorrectable, mut pending, mut failed) = (0, 0, 0, 0);
        call!(self.nvmlDeviceGetRemappedRows(
            gpu.0,
            &raw mut correctable,
            &raw mut uncorrectable,
            &raw mut pending,
            &raw mut failed,
        ))?;
        Ok((pending != 0, failed != 0))
    }

    /// Reads the same for boards before Ampere: whether retired pages wait for a
    /// reboot.
    pub(crate) fn retired_pages_pending(&self, gpu: Handle) -> Result<bool, Failure> {
        let mut pending = 0;
        call!(self.nvmlDeviceGetRetiredPagesPendingStatus(gpu.0, &raw mut pending))?;
        Ok(pending != 0)
    }

    /// ECC errors since the driver was loaded or the GPU was reset that were not corrected.
    pub(crate) fn uncorrected_ecc(&self, gpu: Handle) -> Result<u64, Failure> {
        const UNCORRECTED: u32 = 1;
        const VOLATILE: u32 = 0;
        let mut count = 0;
        call!(self.nvmlDeviceGetTotalEccErrors(gpu.0, UNCORRECTED, VOLATILE, &raw mut count))?;
        Ok(count)
    }

    pub(crate) fn make_event_set(&self) -> Result<EventSet, Failure> {
        let mut set: nvmlEventSet_t = std::ptr::null_mut();
        // A set that cannot be given back is not made.
        if self.nvml.lib().nvmlEventSetFree.is_err() {
            return Err(missing("nvmlEventSetFree"));
        }
        call!(self.nvmlEventSetCreate(&raw mut set))?;
        Ok(EventSet(set))
    }

    #[expect(clippy::needless_pass_by_value, reason = "it is gone afterwards")]
    pub(crate) fn free_event_set(&self, set: EventSet) -> Result<(), Failure> {
        call!(self.nvmlEventSetFree(set.0))
    }

    /// Bits of the events a GPU can send.
    pub(crate) fn supported_events(&self, gpu: Handle) -> Result<u64, Failure> {
        let mut kinds = 0;
        call!(self.nvmlDeviceGetSupportedEventTypes(gpu.0, &raw mut kinds))?;
        Ok(kinds)
    }

    /// A failure may leave the set undefined: it is to be freed.
    pub(crate) fn register_events(
        &self,
        gpu: Handle,
        kinds: u64,
        set: &EventSet,
    ) -> Result<(), Failure> {
        call!(self.nvmlDeviceRegisterEvents(gpu.0, kinds, set.0))
    }

    /// Waits for one event; `None` if none came.
    pub(crate) fn wait_event(
        &self,
        set: &EventSet,
        millis: u32,
    ) -> Result<Option<EventData>, Failure> {
        let mut data: nvmlEventData_t = Plain::zeroed();
        match call!(self.nvmlEventSetWait_v2(set.0, &raw mut data, millis)) {
            Ok(()) => Ok(Some(EventData {
                device: Handle(data.device),
                kind: data.eventType,
                data: data.eventData,
                gpu_instance: data.gpuInstanceId,
                compute_instance: data.computeInstanceId,
            })),
            Err(failure) if failure.code == GpuErrorCode::TIMEOUT => Ok(None),
            Err(failure) => Err(failure),
        }
    }
}
