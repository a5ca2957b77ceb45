//! Which counters the alternatives of each GPU draw on, once it is known what is published of it.

use std::collections::BTreeMap;

use divvy_api::names::{counters as names, taints as keys};

use crate::carve::{GpuOffer, Run};
use crate::counters::{Budget, set_name};
use crate::lean::lean;
use crate::{Amount, CounterSet, CounterUse, Device, Feature, Note, Taint};

/// The counter sets that a GPU can have.
#[derive(Debug)]
pub(crate) struct Sets {
    /// Of a GPU that is cut.
    cut: Option<CounterSet>,
    /// Of one that is not, and is offered in several modes all the same: there is only the GPU to count.
    plain: CounterSet,
}

impl Sets {
    pub(crate) fn new(ordinal: u32, budget: Option<&Budget>) -> Self {
        let counters = BTreeMap::from([(names::GPU.to_owned(), Amount::Count(1))]);
        Self { cut: budget.map(Budget::counter_set), plain: CounterSet { name: set_name(ordinal), counters } }
    }
}

impl Run<'_> {
    /// Gives each GPU its counter set, if it is published in more than one shape.
    pub(crate) fn settle(&mut self) {
        let counts = self.input.features.supports(Feature::Partitions);
        let previous = self.input.previous;
        for (ordinal, card) in &mut self.cards {
            let several = !card.partitions.is_empty() || (card.whole.is_some() && card.share.is_some());
            let set = match (&card.sets, several && counts) {
                (_, false) => None,
                (Some(sets), true) => {
                    let cut = card.partitions.iter().any(|partition| !partition.consumes.is_empty());
                    if cut {
                        sets.cut.as_ref().map(|full| lean(full, &mut card.partitions))
                    } else {
                        Some(sets.plain.clone())
                    }
                }
                (None, true) => {
                    // Devices that were taken over from the last pool bring the set they draw on.
                    let name = set_name(*ordinal);
                    let sets = previous.into_iter().flat_map(|previous| &previous.slices);
                    let mut sets = sets.flat_map(|slice| &slice.counter_sets);
                    sets.find(|set| set.name == name && card.devices().any(|d| !d.consumes.is_empty()))
                        .cloned()
                }
            };
            match &set {
                None => card.devices_mut().for_each(|device| device.consumes.clear()),
                Some(set) if card.sets.is_some() => {
                    let everything = CounterUse { set: set.name.clone(), counters: set.counters.clone() };
                    for device in card.whole.iter_mut().chain(&mut card.share) {
                        device.consumes = vec![everything.clone()];
                    }
                }
                Some(_) => {}
            }
            card.counter_set = set;
            if let Some(over) = over_allocated(card, |device| self.input.held.contains(&device.name)) {
                // One counter below zero makes every device of the pool that draws on any unschedulable.
                self.notes.push(Note::GivenTwice { gpu: *ordinal, devices: over, claims: Vec::new() });
                card.counter_set = None;
                card.devices_mut().for_each(|device| device.consumes.clear());
                fence(card, self.input.features.supports(Feature::Taints), |device| {
                    self.input.stays(&device.name)
                });
            }
        }
    }
}

/// The taint of a GPU whose claims exclude each other.
pub(crate) fn given_twice() -> Taint {
    Taint::no_schedule(keys::FENCED, Some("given-twice"))
}

/// Keeps claims off everything of a GPU: by a taint, or by leaving out what no claim holds.
fn fence(card: &mut GpuOffer, taints: bool, held: impl Fn(&Device) -> bool) {
    if !taints {
        card.whole.take_if(|device| !held(device));
        card.share.take_if(|device| !held(device));
        card.partitions.retain(|device| held(device));
        return;
    }
    let taint = given_twice();
    for device in card.devices_mut() {
        // One taint for each key and effect.
        device.taints.retain(|other| (&other.key, other.effect) != (&taint.key, taint.effect));
        device.taints.push(taint.clone());
        device.taints.sort();
    }
}

/// The devices of a GPU that claims have and that it cannot be at once, by the counters.
fn over_allocated(card: &GpuOffer, held: impl Fn(&Device) -> bool) -> Option<String> {
    let set = card.counter_set.as_ref()?;
    let mut used: BTreeMap<&str, u64> = BTreeMap::new();
    let of_claims: Vec<&Device> = card.devices().filter(|device| held(device)).collect();
    for (counter, amount) in of_claims.iter().flat_map(|d| &d.consumes).flat_map(|u| &u.counters) {
        let used = used.entry(counter).or_default();
        *used = used.saturating_add(amount.value());
    }
    let over = |(counter, amount): (&String, &Amount)| used.get(counter.as_str()) > Some(&amount.value());
    if !set.counters.iter().any(over) {
        return None;
    }
    Some(of_claims.iter().map(|device| device.name.as_str()).collect::<Vec<_>>().join(", "))
}
