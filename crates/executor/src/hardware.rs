//! The hardware of GPUs: what it shows, and single changes of it.
//!
//! Nothing here is remembered: the result of a change is read from the GPU. All calls block, none
//! is retried; the caller retries what can pass within seconds ([`Cause::is_passing`]). Changes are
//! made under the GPU's lock.

mod mig;
mod mps;
mod settings;

use std::collections::{BTreeMap, BTreeSet};

use std::time::Duration;

use divvy_gpu::{Ask, AskedMode, Cause, ChangeError, Filling, GpuSeen, Living, Observed};
use divvy_model::mig::GpuInstance;
use divvy_model::{ComputeMode, GpuDriver, GpuError, GpuErrorCode, GpuOp, GpuUuid, MigMode, Place};

use crate::InventorySource;
use crate::context::Context;

pub(crate) use self::mps::seen_on;
pub use self::mps::{ListedServers, MpsServers, NoMps, RunningServer, ServerStart};
pub use self::settings::{TimeSliceError, TimeSlices};

/// So many answers in a row that nothing is on a GPU are believed.
pub(crate) const AGREEING: usize = 3;

/// The hardware of GPUs through the driver and `nvidia-smi`.
#[derive(Clone, Copy)]
pub struct Hardware<'a> {
    /// Give it a driver whose calls have deadlines.
    pub gpus: &'a dyn GpuDriver,
    pub time_slices: &'a dyn TimeSlices,
    pub mps: &'a dyn MpsServers,
    pub inventory: &'a dyn InventorySource,
}

impl<'a> Hardware<'a> {
    pub(crate) fn of(context: &'a Context) -> Self {
        Self {
            gpus: &*context.parts.gpus,
            time_slices: &*context.parts.time_slices,
            mps: &*context.parts.mps,
            inventory: &*context.parts.inventory,
        }
    }

    /// Refuses while a call has not returned.
    pub(crate) fn nothing_in_flight(self, gpu: &GpuUuid) -> Result<(), ChangeError> {
        match self.in_flight(gpu) {
            None => Ok(()),
            Some(op) => Err(not_done(
                Cause::new(format!(
                    "an earlier call ({}) on {gpu} has not returned",
                    op.name()
                ))
                .passing(),
            )),
        }
    }

    /// Returns a call that changes the GPU and has not returned, of this process or another
    /// instance: it may still have its effect under everything that is found out or done meanwhile.
    pub fn in_flight(self, gpu: &GpuUuid) -> Option<GpuOp> {
        self.gpus.changes_in_flight(gpu).first().copied()
    }

    /// Reads the MIG mode. A GPU that had one and is said to have none may be cut.
    pub(crate) fn mig_mode(self, gpu: &GpuUuid) -> Result<MigMode, GpuError> {
        let mode = self.gpus.mig_mode(gpu)?;
        let inventory = self.inventory.inventory();
        if mode == MigMode::Unsupported
            && inventory.is_some_and(|known| known.with_mig.contains_key(gpu))
        {
            let unknown = GpuError::on_gpu(GpuOp::MigMode, GpuErrorCode::UNKNOWN, gpu);
            return Err(unknown.with_detail("it had a MIG mode before, and has none now"));
        }
        Ok(mode)
    }

    /// Returns the GPU instances that live on a GPU; none while MIG mode is off, or where the GPU
    /// or its driver is gone. An instance that is taken for gone is never removed, so that an odd
    /// answer must not do: it has to come several times in a row.
    pub(crate) fn instances(self, gpu: &GpuUuid) -> Result<Vec<GpuInstance>, GpuError> {
        for _ in 0..AGREEING {
            if let Some(listed) = self.instances_if_any_can_be(gpu)? {
                return Ok(listed);
            }
        }
        Ok(Vec::new())
    }

    /// Returns what NVML lists, or `None` where it says that nothing can live there.
    fn instances_if_any_can_be(self, gpu: &GpuUuid) -> Result<Option<Vec<GpuInstance>>, GpuError> {
        match self.gpus.gpu_instances(gpu) {
            Ok(listed) => Ok(Some(listed)),
            Err(error) if is_gone(error.code) => match self.mig_mode(gpu) {
                Ok(mode) if mode.is_on() => Err(error),
                Ok(_) => Ok(None),
                Err(mode) if is_gone(mode.code) && mode.code != GpuErrorCode::NOT_SUPPORTED => {
                    match self.gpus.list() {
                        Ok(listed) if listed.contains(gpu) => Err(mode),
                        Ok(_) => Ok(None),
                        Err(list) if list.code == GpuErrorCode::DRIVER_NOT_LOADED => Ok(None),
                        Err(list) => Err(list),
                    }
                }
                Err(mode) => Err(mode),
            },
            Err(error) => Err(error),
        }
    }

    /// Returns what fills places of a GPU. The GPU is asked for its instances once.
    pub(crate) fn fillings(
        self,
        gpu: &GpuUuid,
        places: &BTreeSet<Place>,
    ) -> BTreeMap<Place, Filling> {
        if places.is_empty() {
            return BTreeMap::new();
        }
        // A single list for all places, so that they are of the same moment.
        let living = self.instances(gpu);
        let filling = |place: &Place| {
            let living = living.as_ref().map_err(Clone::clone)?;
            let Some(instance) = living.iter().find(|i| place.is_filled_by(i)) else {
                return Ok(None);
            };
            match self.gpus.compute_instances(gpu, instance.id) {
                Ok(inside) => Ok(Some(Living {
                    instance: *instance,
                    inside,
                })),
                // Gone since it was listed, if it is not listed any more.
                Err(error) if is_gone(error.code) => {
                    if self.instances(gpu)?.contains(instance) {
                        Err(error)
                    } else {
                        Ok(None)
                    }
                }
                Err(error) => Err(error),
            }
        };
        places
            .iter()
            .map(|place| (*place, filling(place)))
            .collect()
    }

    /// Returns what fills one place.
    pub fn filling(self, gpu: &GpuUuid, place: Place) -> Filling {
        let found = self.fillings(gpu, &BTreeSet::from([place]));
        found.into_values().next().unwrap_or(Ok(None))
    }

    /// Returns what became of an instance that was begun at an empty place.
    pub fn probe(self, gpu: &GpuUuid, place: Place) -> Observed {
        match self.in_flight(gpu) {
            Some(_) => Observed::InFlight,
            None => GpuSeen::observed(&self.filling(gpu, place)),
        }
    }

    /// Reads what is asked for, and nothing else. Readings in `known`, taken under the same locks,
    /// are not taken again. The supervisor may be asked until `until`.
    pub(crate) fn look(
        self,
        gpu: &GpuUuid,
        ask: &Ask,
        until: Duration,
        known: Option<&GpuSeen>,
    ) -> GpuSeen {
        // First: what a call sets that returns after this is read with it.
        let in_flight = || known.map_or_else(|| self.in_flight(gpu), |known| known.in_flight);
        let in_flight = ask.in_flight.then(in_flight).flatten();
        let mode = || known.and_then(|known| known.mig.clone());
        // The places that are known, and the rest of one list.
        let known_places = known.into_iter().flat_map(|known| &known.places);
        let mut places: BTreeMap<_, _> = known_places
            .filter(|(place, _)| ask.places.contains(place))
            .map(|(place, filling)| (*place, filling.clone()))
            .collect();
        let unknown = ask
            .places
            .iter()
            .filter(|place| !places.contains_key(place));
        places.append(&mut self.fillings(gpu, &unknown.copied().collect()));
        GpuSeen {
            mig: ask
                .mig
                .then(|| mode().unwrap_or_else(|| self.mig_mode(gpu))),
            mps: ask.servers.then(|| self.mps_servers(gpu, until)),
            compute: ask.compute.and_then(|asked| match asked {
                AskedMode::Now => self.compute_mode_now(gpu),
                AskedMode::Unless(wanted) => self.compute_mode_unless(gpu, wanted),
            }),
            slice: ask.slice_in_force,
            places,
            in_flight,
        }
    }

    /// Returns the compute mode, unless what the inventory has is what is wanted: it may be a
    /// minute old, which is enough while we have changed nothing.
    fn compute_mode_unless(
        self,
        gpu: &GpuUuid,
        wanted: ComputeMode,
    ) -> Option<Result<ComputeMode, GpuError>> {
        let known = self.compute_mode(gpu);
        if known.is_none_or(|known| known == wanted) {
            return known.map(Ok);
        }
        self.compute_mode_now(gpu)
    }
}

/// Returns whether a code says that a thing is not there: nothing to remove, nothing that lives.
/// With the driver unloaded, MIG mode and instances are gone too (neither outlives it). A GPU that
/// is *lost* is still the driver's: it may come back with all that was on it, unless it is reset.
fn is_gone(code: GpuErrorCode) -> bool {
    [
        GpuErrorCode::NOT_FOUND,
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::GPU_NOT_FOUND,
        GpuErrorCode::DRIVER_NOT_LOADED,
    ]
    .contains(&code)
}

fn not_done(cause: Cause) -> ChangeError {
    ChangeError::NotDone(cause)
}

/// Makes the error of a call that failed.
fn failed(what: impl Into<String>, error: GpuError) -> ChangeError {
    let certain = nothing_happened(error.code);
    let cause = Cause::from_gpu(what, error);
    if certain {
        not_done(cause)
    } else {
        ChangeError::Unknown(cause)
    }
}

/// Returns whether a call that failed with this code certainly has changed nothing.
fn nothing_happened(code: GpuErrorCode) -> bool {
    [
        // Codes of calls that were refused. Every other code, TIMEOUT before all, leaves the
        // outcome open, and the hardware is asked.
        GpuErrorCode::INVALID_ARGUMENT,
        GpuErrorCode::INSUFFICIENT_RESOURCES,
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::NO_PERMISSION,
        GpuErrorCode::NOT_FOUND,
        GpuErrorCode::FUNCTION_NOT_FOUND,
        GpuErrorCode::LIBRARY_NOT_FOUND,
        GpuErrorCode::DRIVER_NOT_LOADED,
        GpuErrorCode::LIB_RM_VERSION_MISMATCH,
        GpuErrorCode::GPU_NOT_FOUND,
    ]
    .contains(&code)
}
