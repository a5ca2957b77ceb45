//! What keeps claims off GPUs and parts of them: every taint that is decided by facts about a GPU.

use std::collections::BTreeMap;

use divvy_api::names::taints as keys;
use divvy_model::mig::Placement;
use divvy_model::{GpuUuid, HoldKind, Inventory};

use crate::health::taint;
use crate::settle::given_twice;
use crate::world::{Records, World};
use crate::{HealthView, Instances, Resolved, Taint};

/// Taints of GPUs as a whole, and of memory slices.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Hazards {
    pub(crate) gpus: BTreeMap<GpuUuid, Vec<Taint>>,
    pub(crate) places: BTreeMap<GpuUuid, Vec<(Placement, Taint)>>,
}

impl Hazards {
    /// Works them all out.
    pub(crate) fn of(
        world: &World,
        records: &Records,
        inventory: &Inventory,
        health: &HealthView,
        resolved: &Resolved,
    ) -> Self {
        let mut all = Self::default();
        all.of_records(records, resolved);
        for (gpu, value) in &world.neighbours {
            all.gpu(gpu, Taint::no_schedule(keys::NEIGHBOUR, Some(value)));
        }
        for gpu in inventory.gpus.keys().filter(|_| world.driver_down) {
            all.gpu(gpu, Taint::no_schedule(keys::DRIVER_DOWN, None));
        }
        for conflict in &world.conflicts {
            all.gpu(&conflict.gpu, given_twice());
        }
        all.of_health(records, inventory, health, resolved);
        all
    }

    fn gpu(&mut self, gpu: &GpuUuid, taint: Taint) {
        self.gpus.entry(gpu.clone()).or_default().push(taint);
    }

    fn place(&mut self, gpu: &GpuUuid, at: Placement, taint: Taint) {
        self.places.entry(gpu.clone()).or_default().push((at, taint));
    }

    fn of_records(&mut self, records: &Records, resolved: &Resolved) {
        for held in records.held.iter().filter(|held| held.lingering) {
            let taint = Taint::no_schedule(keys::LINGERING, None);
            // What lingers in a partition is in the way of what overlaps it, not of its neighbours.
            match held.hold.kind {
                HoldKind::Partition { placement, .. } => self.place(&held.hold.gpu, placement, taint),
                HoldKind::Whole | HoldKind::Share | HoldKind::Admin => self.gpu(&held.hold.gpu, taint),
            }
        }
        for gpu in &records.fenced {
            self.gpu(gpu, Taint::no_schedule(keys::FENCED, None));
        }
        for (gpu, at) in foreign(records, resolved) {
            self.place(gpu, *at, Taint::no_schedule(keys::FOREIGN, None));
        }
    }

    fn of_health(
        &mut self,
        records: &Records,
        inventory: &Inventory,
        health: &HealthView,
        resolved: &Resolved,
    ) {
        let evicts = |gpu: &GpuUuid| resolved.rules.get(gpu).is_some_and(|rules| rules.no_execute);
        for (gpu, sick) in &health.sick {
            for ailment in &sick.gpu {
                self.gpu(gpu, taint(*ailment, evicts(gpu)));
            }
            for (place, ailment) in
                sick.partitions.iter().flat_map(|(p, all)| all.iter().map(move |a| (p, a)))
            {
                self.place(gpu, *place, taint(*ailment, evicts(gpu)));
            }
        }
        // A GPU that is not listed any more may be lost or have been taken out. Until health has found out which, it
        // counts as lost, so that its devices do not come and go.
        for (gpu, _) in records.ordinals.iter() {
            let listed = inventory.gpus.contains_key(gpu) || inventory.problems.iter().any(|p| p.gpu == *gpu);
            if !listed && !health.removed.contains(gpu) && !health.sick.contains_key(gpu) {
                self.gpu(gpu, Taint::no_schedule(keys::LOST, None));
            }
        }
    }
}

/// Instances made outside divvy that are in the way: where they are published as they are, they are not.
pub(crate) fn foreign<'a>(
    records: &'a Records,
    resolved: &'a Resolved,
) -> impl Iterator<Item = &'a (GpuUuid, Placement)> {
    let is_static =
        |gpu: &GpuUuid| resolved.rules.get(gpu).is_some_and(|rules| rules.instances == Instances::Static);
    records.foreign.iter().filter(move |(gpu, _)| !is_static(gpu))
}
