//! Memory slices of GPUs that are taken by something no claim in the API stands for: instances of somebody else, and
//! those of claims that were released and linger. What overlaps them is tainted.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use divvy_executor::{Executor, HeldDevice};
use divvy_model::mig::{GpuInstance, Placement};
use divvy_model::{GpuUuid, HoldKind, Inventory};
use divvy_offer::Taint;

/// What is taken on each GPU, and by which taint that is told.
#[derive(Debug, Default)]
pub(crate) struct Occupied(pub(crate) BTreeMap<GpuUuid, Vec<(Placement, Taint)>>);

impl Occupied {
    pub(crate) fn add(&mut self, gpu: &GpuUuid, placement: Placement, key: &str) {
        self.0.entry(gpu.clone()).or_default().push((placement, Taint::no_schedule(key, None)));
    }
}

/// Memory slices of GPUs.
pub(crate) type Places = Vec<(GpuUuid, Placement)>;

/// Finds what lives on the GPUs and no record accounts for.
#[derive(Debug, Default)]
pub(crate) struct Foreign {
    last: Mutex<Option<(Instant, Places)>>,
}

/// How long an answer counts: the GPUs are locked while they are asked.
pub(crate) const FOREIGN_LASTS: Duration = Duration::from_secs(1);

impl Foreign {
    /// What is there, and whether that is an answer of a moment ago. The executor is asked, under the GPUs' locks, only
    /// when an instance was there when the GPUs were last read and has no record now: it is somebody else's, or was
    /// ours and is gone.
    pub(crate) fn look(
        &self,
        executor: &Executor,
        inventory: Option<&Inventory>,
        records: &[HeldDevice],
    ) -> (Places, bool) {
        let gpus = inventory.into_iter().flat_map(|inventory| &inventory.gpus);
        let mut living = gpus
            .filter_map(|(uuid, gpu)| Some((uuid, gpu.mig.as_ref()?)))
            .flat_map(|(uuid, mig)| mig.instances.iter().map(move |instance| (uuid, instance)));
        let has_record = |gpu: &GpuUuid, instance: &GpuInstance| {
            let kind = HoldKind::Partition { profile: instance.profile, placement: instance.placement };
            records.iter().any(|record| record.hold.gpu == *gpu && record.hold.kind == kind)
        };
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if living.all(|(gpu, instance)| has_record(gpu, instance)) {
            *last = None;
            return (Vec::new(), false);
        }
        if let Some((at, found)) = &*last
            && at.elapsed() < FOREIGN_LASTS
        {
            return (found.clone(), true);
        }
        let foreign = executor.foreign().into_iter();
        let found: Places = foreign
            .flat_map(|(gpu, all)| all.into_iter().map(move |one| (gpu.clone(), one.placement)))
            .collect();
        *last = Some((Instant::now(), found.clone()));
        (found, false)
    }
}
