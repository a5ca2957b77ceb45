//! Vitals and events as the NVML calls they take.
//!
//! A [`Watch`] is one event set with the GPUs that are registered in it. NVML records only for sets
//! that exist, so it lives from the first wait on; it ends with its session, or when a GPU may have
//! been unbound on the way.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use divvy_model::health::{
    FabricState, GpuEvent, GpuEventKind, GpuEvents, GpuVitals, RecoveryAction, RowRemap,
};
use divvy_model::mig::{ComputeInstanceId, GpuInstanceId};
use divvy_model::{GpuErrorCode, GpuUuid};

use crate::facts;
use crate::ffi::{EventData, EventSet, Fabric, Failure, Handle, Library};

// Bits of `nvmlEventType…`.
const DOUBLE_BIT_ECC: u64 = 0x2;
const XID_CRITICAL: u64 = 0x8;
const RETIREMENT_FAILURE: u64 = 0x800;
const GPU_UNAVAILABLE: u64 = 0x4000;
const RECOVERY_ACTION: u64 = 0x8000;
/// Pause between two looks for new GPUs; tests do not wait for that.
const JOIN_EVERY: Duration = if cfg!(test) {
    Duration::from_millis(50)
} else {
    Duration::from_secs(10)
};
/// Events that are asked for, as far as the GPU has them.
const WANTED: u64 =
    DOUBLE_BIT_ECC | XID_CRITICAL | RETIREMENT_FAILURE | GPU_UNAVAILABLE | RECOVERY_ACTION;
/// So many events are taken at once; the rest come with the next call.
const AT_ONCE: usize = 64;

/// Asks the three questions about a GPU's health. Fails where none of them is answered and one of
/// them oddly: a GPU that has nothing to say to the other two does not answer either.
pub(crate) fn vitals(library: &Library, gpu: Handle) -> Result<GpuVitals, Failure> {
    let recovery = library.recovery_action(gpu);
    let remap = remap(library, gpu);
    let ecc = library.uncorrected_ecc(gpu);
    // An odd answer beside a good one says nothing of the GPU.
    if let (Err(recovery), Err(remap), Err(ecc)) = (&recovery, &remap, &ecc)
        && let Some(odd) = [recovery, remap, ecc]
            .into_iter()
            .find(|failure| !failure.means_absent())
    {
        return Err(odd.clone());
    }
    Ok(GpuVitals {
        recovery: library
            .optional(Some(gpu), "recovery action", recovery)?
            .map(RecoveryAction::from_nvml),
        remap: library.optional(Some(gpu), "remapped memory", remap)?,
        uncorrected_ecc: library.optional(Some(gpu), "ECC errors", ecc)?,
        fabric: facts::fabric(library, gpu)?.and_then(registration),
    })
}

/// Drops the answer of a GPU that belongs to no fabric.
fn registration(fabric: Fabric) -> Option<FabricState> {
    let state = FabricState {
        state: fabric.state,
        status: fabric.status,
        health: fabric.health,
    };
    (state.state != FabricState::NOT_SUPPORTED).then_some(state)
}

/// Rows from Ampere on, pages before. An Ampere GPU that does not report its rows (while it has MIG
/// instances) has no pages either, whatever it reports about them.
fn remap(library: &Library, gpu: Handle) -> Result<RowRemap, Failure> {
    const AMPERE: u32 = 7;
    match library.remapped_rows(gpu) {
        Ok((pending, failed)) => Ok(RowRemap { pending, failed }),
        Err(failure)
            if failure.means_absent() && library.architecture(gpu).is_ok_and(|a| a < AMPERE) =>
        {
            let pending = library.retired_pages_pending(gpu)?;
            Ok(RowRemap {
                pending,
                failed: false,
            })
        }
        Err(failure) => Err(failure),
    }
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
        free(library, self.set);
    }

    /// Returns whether it is time to look for GPUs that are not registered.
    pub(crate) fn is_due(&self) -> bool {
        self.joined
            .is_none_or(|joined| joined.elapsed() >= JOIN_EVERY)
    }

    /// Registers GPUs that are not yet. A GPU that refuses is remembered, does not disturb the
    /// others and is tried again: one that is lost may come back. A failure means that the set is
    /// worth nothing any more.
    pub(crate) fn join(
        &mut self,
        library: &Library,
        gpus: impl IntoIterator<Item = (Handle, GpuUuid)>,
    ) -> Result<(), Failure> {
        self.joined = Some(Instant::now());
        for (gpu, uuid) in gpus {
            let before = self.refused.get(&uuid).copied();
            if self.registered.contains_key(&uuid) {
                continue;
            }
            let registered = library
                .supported_events(gpu)
                .and_then(|kinds| match kinds & WANTED {
                    0 => Err(Failure::code(GpuErrorCode::NOT_SUPPORTED)),
                    kinds => try_out(library, gpu, kinds).map(|()| kinds),
                });
            // A registration that fails may spoil the set for all GPUs, so `try_out` has made it in
            // a set of its own first. A failure here is one of the whole set, and ends it.
            match registered {
                Ok(kinds) => {
                    library.register_events(gpu, kinds, &self.set)?;
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
        Ok(())
    }

    pub(crate) fn wait(&self, library: &Library, at_most: Duration) -> Result<GpuEvents, Failure> {
        let mut events = Vec::new();
        let mut millis = u32::try_from(at_most.as_millis()).unwrap_or(u32::MAX);
        while events.len() < AT_ONCE {
            match library.wait_event(&self.set, millis) {
                Ok(Some(data)) => events.push(self.event(library, &data)),
                Ok(None) => break,
                // Events that came before are kept; the failure will be there next time.
                Err(_) if !events.is_empty() => break,
                Err(failure) => return Err(failure),
            }
            // Wait for the first event only, and take what is there already with it.
            millis = 0;
        }
        Ok(GpuEvents {
            events,
            unmonitored: self.refused.clone(),
        })
    }

    fn event(&self, library: &Library, data: &EventData) -> GpuEvent {
        let known = self
            .registered
            .iter()
            .find(|(_, gpu)| gpu.is(data.device))
            .map(|(uuid, _)| uuid.clone());
        // A lost GPU no longer reports its UUID, so the table above comes first.
        let gpu = known.or_else(|| library.uuid(data.device).ok()?.parse().ok());
        // All bits set stand for the whole GPU.
        let inside = |id: u32| (id != u32::MAX).then_some(id);
        GpuEvent {
            gpu,
            kind: kind(data.kind, data.data),
            gpu_instance: inside(data.gpu_instance).map(GpuInstanceId),
            compute_instance: inside(data.compute_instance).map(ComputeInstanceId),
        }
    }
}

/// Registers events in a set of their own: a registration that fails may leave its set undefined,
/// fit only to be freed.
fn try_out(library: &Library, gpu: Handle, kinds: u64) -> Result<(), Failure> {
    let set = library.make_event_set()?;
    let registered = library.register_events(gpu, kinds, &set);
    free(library, set);
    registered
}

fn free(library: &Library, set: EventSet) {
    if let Err(failure) = library.free_event_set(set) {
        tracing::warn!(code = %failure.code, "an NVML event set was not freed");
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
