//! Every taint is decided here: [`Hazards::of`] says what facts keep claims off GPUs and parts of
//! them, [`Carving::taints`] what follows for one device.

use std::collections::BTreeMap;

use divvy_api::names::taints as keys;
use divvy_model::health::Ailment;
use divvy_model::mig::Placement;
use divvy_model::{Form, GpuUuid, Inventory, Sharing, Target, TargetKind};

use crate::carve::Carving;
use crate::health::taint;
use crate::validate::MAX_TAINTS;
use crate::world::{Records, World};
use crate::{HealthView, Instances, Resolved, Taint, TaintEffect};

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
        // Each source adds what it knows. None takes anything away, so that a GPU with two troubles
        // is free only when both are over.
        all.of_records(records, resolved);
        // A GPU that others were given weighs more than one on which they were seen, and comes
        // first in the order of uses.
        for (gpu, uses) in world.inputs.neighbours.iter().flatten() {
            if let Some(first) = uses.first() {
                all.gpu(
                    gpu,
                    Taint::no_schedule(keys::NEIGHBOUR, Some(first.label())),
                );
            }
        }
        for gpu in inventory.gpus.keys().filter(|_| world.inputs.driver_down) {
            all.gpu(gpu, Taint::no_schedule(keys::DRIVER_DOWN, None));
        }
        for conflict in &world.memory.conflicts {
            all.gpu(&conflict.of.gpu, given_twice());
        }
        all.of_health(records, inventory, health, resolved);
        all
    }

    fn gpu(&mut self, gpu: &GpuUuid, taint: Taint) {
        self.gpus.entry(gpu.clone()).or_default().push(taint);
    }

    fn place(&mut self, gpu: &GpuUuid, at: Placement, taint: Taint) {
        self.places
            .entry(gpu.clone())
            .or_default()
            .push((at, taint));
    }

    fn of_records(&mut self, records: &Records, resolved: &Resolved) {
        for held in records.held.iter().filter(|held| held.lingering) {
            let taint = Taint::no_schedule(keys::LINGERING, None);
            // A lingering partition is in the way of overlapping ones, not of its neighbours.
            match held.hold.target {
                Target::Partition(at) => self.place(&held.hold.gpu, at.placement, taint),
                Target::Gpu => self.gpu(&held.hold.gpu, taint),
            }
        }
        for (target, fault) in &records.mps_wedged {
            let taint = Taint::no_schedule(keys::MPS, Some(fault.name()));
            match target.target {
                Target::Partition(at) => self.place(&target.gpu, at.placement, taint),
                Target::Gpu => self.gpu(&target.gpu, taint),
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
        let evicts = |gpu: &GpuUuid| {
            resolved
                .rules
                .get(gpu)
                .is_some_and(|rules| rules.no_execute)
        };
        for (gpu, sick) in &health.sick {
            for ailment in &sick.gpu {
                // New pods stay away at once. Pods that run may outlast a fault that passes.
                let evicts = evicts(gpu) && !sick.young.contains(ailment);
                self.gpu(gpu, taint(*ailment, evicts));
            }
            for (place, ailment) in sick
                .partitions
                .iter()
                .flat_map(|(p, all)| all.iter().map(move |a| (p, a)))
            {
                self.place(gpu, *place, taint(*ailment, evicts(gpu)));
            }
        }
        // The driver may give the number of an instance that is gone to the next one, and
        // containers of the claim still have the device node of that number: nothing new is made
        // beside it.
        for (gpu, place) in &health.gone {
            self.gpu(gpu, Taint::no_schedule(keys::LOST, Some("partition-gone")));
            self.place(gpu, *place, taint(Ailment::Lost, evicts(gpu)));
        }
        // A GPU that is not listed any more may be lost or have been taken out. Until health has
        // found out which, it counts as lost, so that its devices do not come and go.
        for (gpu, _) in records.ordinals.iter() {
            let listed = inventory.gpus.contains_key(gpu)
                || inventory.problems.iter().any(|p| p.gpu == *gpu);
            if !listed && !health.removed.contains(gpu) && !health.sick.contains_key(gpu) {
                self.gpu(gpu, Taint::no_schedule(keys::LOST, None));
            }
        }
    }
}

/// Instances made outside divvy that are in the way: where they are published as they are, they are
/// not.
pub(crate) fn foreign<'a>(
    records: &'a Records,
    resolved: &'a Resolved,
) -> impl Iterator<Item = &'a (GpuUuid, Placement)> {
    let is_static = |gpu: &GpuUuid| {
        resolved
            .rules
            .get(gpu)
            .is_some_and(|rules| rules.instances == Instances::Static)
    };
    records
        .foreign
        .iter()
        .filter(move |(gpu, _)| !is_static(gpu))
}

/// A device, as far as its taints depend on it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Subject<'a> {
    pub(crate) gpu: &'a GpuUuid,
    pub(crate) mode: Form,
    /// The memory slices of a partition, where they are known.
    pub(crate) place: Option<Placement>,
    /// A mode in which its GPU is or may be held, where nothing but a taint keeps the other modes
    /// off it.
    pub(crate) guard: Option<Form>,
    /// True if a claim has a partition of its GPU of which it is not known where it is.
    pub(crate) unknown_held: bool,
    pub(crate) standing: Standing,
}

/// The reason why a device is published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Standing {
    /// For claims to come.
    Offered,
    /// Only because a claim has it, or may have it.
    Withdrawn(&'static str),
    /// Published as it was, since its GPU cannot be read.
    Unreadable,
    /// Published as it was, since health says that its GPU is lost.
    AsItWas,
    /// Because a claim has it, or may have it; its GPU is gone.
    Gone,
}

impl<'a> Subject<'a> {
    /// A device of a GPU that answers.
    pub(crate) fn offered(gpu: &'a GpuUuid, mode: Form) -> Self {
        let standing = Standing::Offered;
        Self {
            gpu,
            mode,
            place: None,
            guard: None,
            unknown_held: false,
            standing,
        }
    }

    pub(crate) fn standing(self, standing: Standing) -> Self {
        Self { standing, ..self }
    }
}

/// Returns the value of the taint of a GPU that is held in a mode. The words for people have
/// spaces, which the API server refuses in a taint.
fn held_as(mode: Form) -> String {
    format!("{}-held", mode.device_type())
}

impl Carving<'_> {
    /// All taints of one device.
    pub(crate) fn taints(&self, of: &Subject<'_>) -> Vec<Taint> {
        // Hazards of the whole GPU, then those of this device alone. The order does not matter: the
        // API sorts by key and effect, and so does `one_of_each`.
        let mut all = self.input.taints.get(of.gpu).cloned().unwrap_or_default();
        let blocked = Taint::no_schedule;
        let ordinal = self.input.ordinals.of(of.gpu);
        if ordinal.is_some_and(|ordinal| self.given_twice.contains_key(&ordinal)) {
            all.push(given_twice());
        }
        match of.standing {
            Standing::Unreadable => all.push(blocked(keys::UNREADABLE, None)),
            // Pods that hold it leave where the rule of the GPU says so, as with any other fault.
            Standing::Gone => {
                let evicts = self.input.rules_of(of.gpu).no_execute;
                all.push(taint(Ailment::Lost, evicts));
            }
            Standing::Withdrawn(why) => all.push(blocked(keys::WITHDRAWN, Some(why))),
            Standing::Offered | Standing::AsItWas => {}
        }
        if let Some(other) = of.guard.filter(|other| *other != of.mode) {
            all.push(blocked(keys::MODE, Some(&held_as(other))));
        }
        // Also of a device that claims hold: a further claim of a server that runs needs the
        // supervisor as well.
        if self.input.mps_away && of.mode.sharing == Sharing::Mps {
            all.push(blocked(keys::MPS, Some("supervisor-away")));
        }
        if of.unknown_held {
            // Their places are not known, so nothing beside them can be given out.
            all.push(blocked(keys::FENCED, Some("unknown-partition-held")));
        }
        // Places matter on a GPU that answers only. On another the whole device has a taint
        // already.
        if matches!(of.standing, Standing::Offered | Standing::Withdrawn(_)) {
            let places = self.input.occupied.get(of.gpu).into_iter().flatten();
            let in_the_way = |at: &Placement| match of.place {
                Some(place) => at.overlaps(place),
                None => of.mode.target == TargetKind::Gpu,
            };
            all.extend(
                places
                    .filter(|(at, _)| in_the_way(at))
                    .map(|(_, taint)| taint.clone()),
            );
        }
        all
    }
}

/// Returns the taint of a GPU whose claims exclude each other.
fn given_twice() -> Taint {
    Taint::no_schedule(keys::FENCED, Some("given-twice"))
}

/// Returns the taint of a GPU of which prepare does not know yet what it may do.
pub(crate) fn not_granted() -> Taint {
    Taint::no_schedule(keys::FENCED, Some("not-stored"))
}

/// Adds a taint in the form that the API takes: one for each key and effect, sorted, no more than
/// [`MAX_TAINTS`]. A device that has as many already loses one that does not evict.
pub(crate) fn add(taints: &mut Vec<Taint>, taint: Taint) {
    taints.retain(|other| (&other.key, other.effect) != (&taint.key, taint.effect));
    let evicts = |taint: &Taint| taint.effect == TaintEffect::NoExecute;
    // Taints that only keep claims away go first: those that are left do that as well, and an
    // eviction has no substitute.
    while taints.len() >= MAX_TAINTS {
        let spare = taints.iter().rposition(|other| !evicts(other));
        taints.remove(spare.unwrap_or(taints.len() - 1));
    }
    taints.push(taint);
    taints.sort();
}

/// Returns the taints of a device that goes with any use of its GPU: those of the GPU that say more
/// than that it is in use.
pub(crate) fn beside_use(of_gpu: &[Taint]) -> Vec<Taint> {
    let of_use = [
        keys::FENCED,
        keys::FOREIGN,
        keys::LINGERING,
        keys::MODE,
        keys::WITHDRAWN,
    ];
    of_gpu
        .iter()
        .filter(|taint| !of_use.contains(&taint.key.as_str()))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn taint(key: &str, effect: TaintEffect) -> Taint {
        Taint {
            key: format!("gpu.divvy.dev/{key}"),
            value: None,
            effect,
        }
    }

    /// The API server refuses a slice with another value of a taint, and with it all of its
    /// devices.
    #[test]
    fn the_mode_of_a_held_gpu_is_a_value_that_a_taint_can_have() {
        let may_be = |c: char| c.is_ascii_alphanumeric() || c == '-';
        let values: BTreeSet<String> = Form::HELD.into_iter().map(held_as).collect();
        assert_eq!(values.len(), Form::HELD.len(), "{values:?}");
        for value in values {
            assert!(value.chars().all(may_be) && value.len() <= 63, "{value}");
        }
    }

    /// A GPU given out twice is fenced also where a device has all the taints it may have.
    #[test]
    fn a_gpu_given_twice_is_fenced_although_its_taints_are_full() {
        let mut taints = Vec::new();
        for n in 0..MAX_TAINTS {
            let effect = if n == MAX_TAINTS - 1 {
                TaintEffect::NoExecute
            } else {
                TaintEffect::NoSchedule
            };
            add(&mut taints, taint(&format!("t{n:02}"), effect));
        }
        assert_eq!(taints.len(), MAX_TAINTS);
        add(&mut taints, given_twice());
        assert_eq!(taints.len(), MAX_TAINTS);
        assert!(taints.contains(&given_twice()), "{taints:?}");
        let last = format!("t{:02}", MAX_TAINTS - 1);
        assert!(
            taints.contains(&taint(&last, TaintEffect::NoExecute)),
            "eviction goes on"
        );
    }

    #[test]
    fn a_key_and_effect_has_one_value_the_last() {
        let mut taints = vec![Taint::no_schedule(keys::FENCED, None)];
        add(&mut taints, given_twice());
        assert_eq!(taints, [given_twice()]);
    }
}
