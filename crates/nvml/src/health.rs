//! Vitals and events as the NVML calls they take.
//!
//! A [`Watch`] is one event set with the GPUs that are registered in it. NVML records only for sets that exist, so it
//! lives from the first wait on; it ends with its session, or when a GPU may have been unbound on the way.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use divvy_model::health::{GpuEvent, GpuEventKind, GpuEvents, GpuVitals, RecoveryAction, RowRemap};
use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};
use divvy_model::{GpuErrorCode, GpuUuid};

use crate::ffi::{EventData, EventSet, Failure, Handle, Library, optional};

const DOUBLE_BIT_ECC: u64 = 0x2;
const XID_CRITICAL: u64 = 0x8;
const RETIREMENT_FAILURE: u64 = 0x800;
const GPU_UNAVAILABLE: u64 = 0x4000;
const RECOVERY_ACTION: u64 = 0x8000;
/// How often new GPUs are looked for; tests do not wait for that.
const JOIN_EVERY: Duration = if cfg!(test) { Duration::from_millis(50) } else { Duration::from_secs(10) };
/// What is asked for, as far as the GPU has it.
const WANTED: u64 = DOUBLE_BIT_ECC | XID_CRITICAL | RETIREMENT_FAILURE | GPU_UNAVAILABLE | RECOVERY_ACTION;
/// So many events are taken at once; the rest come with the next call.
const AT_ONCE: usize = 64;

pub(crate) fn vitals(library: &Library, gpu: Handle) -> Result<GpuVitals, Failure> {
    let recovery = optional(library.recovery_action(gpu))?.map(RecoveryAction::from_nvml);
    let remap = match optional(library.remapped_rows(gpu))? {
        Some((pending, failed)) => Some(RowRemap { pending, failed }),
        None => {
            optional(library.retired_pages_pending(gpu))?.map(|pending| RowRemap { pending, failed: false })
        }
    };
    Ok(GpuVitals { recovery, remap, uncorrected_ecc: optional(library.uncorrected_ecc(gpu))? })
}

/// An event set and who is in it.
pub(crate) struct Watch {
    set: EventSet,
    registered: BTreeMap<GpuUuid, Handle>,
    refused: BTreeMap<GpuUuid, GpuErrorCode>,
    joined: Option<Instant>,
}

impl Watch {
    pub(crate) fn begin(library: &Library) -> Result<Self, Failure> {
        Ok(Self {
            set: library.make_event_set()?,
            registered: BTreeMap::new(),
            refused: BTreeMap::new(),
            joined: None,
        })
    }

    pub(crate) fn end(self, library: &Library) {
        if let Err(failure) = library.free_event_set(self.set) {
            tracing::warn!(code = %failure.code, "an NVML event set was not freed");
        }
    }

    /// Whether it is time to look for GPUs that are not registered.
    pub(crate) fn is_due(&self) -> bool {
        self.joined.is_none_or(|joined| joined.elapsed() >= JOIN_EVERY)
    }

    /// Registers GPUs that are not yet. One that refuses is remembered and does not disturb the others; it is tried again,
    /// unless it has no events at all: one that is lost may come back.
    pub(crate) fn join(&mut self, library: &Library, gpus: impl IntoIterator<Item = (Handle, GpuUuid)>) {
        self.joined = Some(Instant::now());
        for (gpu, uuid) in gpus {
            let before = self.refused.get(&uuid).copied();
            if self.registered.contains_key(&uuid) || before == Some(GpuErrorCode::NOT_SUPPORTED) {
                continue;
            }
            let registered = library.supported_events(gpu).and_then(|kinds| match kinds & WANTED {
                0 => Err(Failure::code(GpuErrorCode::NOT_SUPPORTED)),
                kinds => library.register_events(gpu, kinds, &self.set),
            });
            match registered {
                Ok(()) => {
                    self.refused.remove(&uuid);
                    self.registered.insert(uuid, gpu);
                }
                Err(failure) => {
                    if before != Some(failure.code) {
                        tracing::warn!(%uuid, code = %failure.code, "events of a GPU cannot be watched");
                    }
                    self.refused.insert(uuid, failure.code);
                }
            }
        }
    }

    pub(crate) fn wait(&self, library: &Library, at_most: Duration) -> Result<GpuEvents, Failure> {
        let mut events = Vec::new();
        let mut millis = u32::try_from(at_most.as_millis()).unwrap_or(u32::MAX);
        while events.len() < AT_ONCE {
            match library.wait_event(&self.set, millis) {
                Ok(Some(data)) => events.push(self.told(library, &data)),
                Ok(None) => break,
                // What came before is not thrown away; the failure will be there next time.
                Err(_) if !events.is_empty() => break,
                Err(failure) => return Err(failure),
            }
            millis = 0;
        }
        Ok(GpuEvents { events, unmonitored: self.refused.clone() })
    }

    fn told(&self, library: &Library, data: &EventData) -> GpuEvent {
        let known = self.registered.iter().find(|(_, gpu)| gpu.is(data.device)).map(|(uuid, _)| uuid.clone());
        // A lost GPU no longer tells its UUID, so that the table above is asked first.
        let gpu = known.or_else(|| library.uuid(data.device).ok()?.parse().ok());
        let inside = |id: u32| (id != u32::MAX).then_some(id);
        GpuEvent {
            gpu,
            kind: kind(data.kind, data.data),
            gpu_instance: inside(data.gpu_instance).map(GpuInstanceId),
            compute_instance: inside(data.compute_instance).map(ComputeInstanceId),
        }
    }
}

fn kind(bit: u64, data: u64) -> GpuEventKind {
    match bit {
        XID_CRITICAL => GpuEventKind::Xid(u32::try_from(data).unwrap_or(u32::MAX)),
        DOUBLE_BIT_ECC => GpuEventKind::UncorrectedEcc,
        RETIREMENT_FAILURE => GpuEventKind::RetirementFailure,
        GPU_UNAVAILABLE | RECOVERY_ACTION => GpuEventKind::LookAgain,
        other => GpuEventKind::Other(other),
    }
}
