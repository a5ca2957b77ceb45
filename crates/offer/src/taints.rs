//! Every taint is decided here: [`Hazards::of`] says what facts keep claims off GPUs and parts of them, and [`Run::taints`]
//! what follows for one device. Only that a GPU was given out twice is found later, when its counters are known
//! (`settle`).

use std::collections::BTreeMap;

use divvy_api::names::taints as keys;
use divvy_model::mig::Placement;
use divvy_model::{GpuUuid, HoldKind, Inventory};

use crate::carve::Run;
use crate::health::taint;
use crate::settle::given_twice;
use crate::world::{Records, World};
use crate::{HealthView, Instances, OfferedMode, Resolved, Taint};

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
            all.gpu(&conflict.of.gpu, given_twice());
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

/// A device, as far as its taints depend on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) gpu: &'a GpuUuid,
    pub(crate) mode: OfferedMode,
    /// The memory slices of a partition, where they are known.
    pub(crate) place: Option<Placement>,
    /// A mode in which its GPU is or may be held, where nothing but a taint keeps the other modes off it.
    pub(crate) guard: Option<OfferedMode>,
    /// Whether a claim has a partition of its GPU of which it is not known where it is.
    pub(crate) unknown_held: bool,
    pub(crate) standing: Standing,
}

/// How a device is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// For claims to come.
    Offered,
    /// Only because a claim has it, or may have it.
    Withdrawn(&'static str),
    /// As it was, since its GPU cannot be read.
    Unreadable,
    /// As it was, since health says that its GPU is lost.
    AsItWas,
    /// Because a claim has it, or may have it; its GPU is gone.
    Gone,
}

impl<'a> Subject<'a> {
    /// A device of a GPU that answers.
    pub(crate) fn offered(gpu: &'a GpuUuid, mode: OfferedMode) -> Self {
        let standing = Standing::Offered;
        Self { gpu, mode, place: None, guard: None, unknown_held: false, standing }
    }

    pub(crate) fn standing(self, standing: Standing) -> Self {
        Self { standing, ..self }
    }
}

impl Run<'_> {
    /// All taints of one device.
    pub(crate) fn taints(&self, of: &Subject<'_>) -> Vec<Taint> {
        let mut all = self.input.taints.get(of.gpu).cloned().unwrap_or_default();
        let mut blocked = |key, value| all.push(Taint::no_schedule(key, value));
        match of.standing {
            Standing::Unreadable => blocked(keys::UNREADABLE, None),
            Standing::Gone => blocked(keys::LOST, None),
            Standing::Withdrawn(why) => blocked(keys::WITHDRAWN, Some(why)),
            Standing::Offered | Standing::AsItWas => {}
        }
        if let Some(other) = of.guard.filter(|other| *other != of.mode) {
            blocked(keys::MODE, Some(mode_label(other)));
        }
        if of.unknown_held {
            // What they occupy is not known, so nothing beside them can be given out.
            blocked(keys::FENCED, Some("unknown-partition-held"));
        }
        if matches!(of.standing, Standing::Offered | Standing::Withdrawn(_)) {
            let places = self.input.occupied.get(of.gpu).into_iter().flatten();
            let in_the_way = |at: &Placement| match of.place {
                Some(place) => at.overlaps(place),
                None => of.mode != OfferedMode::Mig,
            };
            all.extend(places.filter(|(at, _)| in_the_way(at)).map(|(_, taint)| taint.clone()));
        }
        all
    }
}

fn mode_label(mode: OfferedMode) -> &'static str {
    match mode {
        OfferedMode::Whole => "whole-held",
        OfferedMode::Mig => "partition-held",
        OfferedMode::TimeSlicing => "share-held",
    }
}
