//! Counters that the forms of each GPU draw on, once it is known what is published of it.

use std::collections::BTreeMap;

use divvy_api::names::counters as names;
use divvy_model::{Form, GpuUuid, TargetKind};

use crate::carve::{Carving, GpuOffer};
use crate::counters::{Budget, set_name};
use crate::lean::lean;
use crate::meter::meter;
use crate::{Amount, CounterSet, CounterUse, Device, Feature, Finding, Input};

/// The counter sets that a GPU can have.
#[derive(Debug)]
pub(crate) struct CounterSets {
    /// The set of a GPU that is cut.
    cut: Option<CounterSet>,
    /// The set of a GPU that is not cut, and is offered in several modes all the same: there is
    /// only the GPU to count.
    plain: CounterSet,
}

impl CounterSets {
    pub(crate) fn new(ordinal: u32, budget: Option<&Budget>) -> Self {
        let counters = BTreeMap::from([(names::GPU.to_owned(), Amount::Count(1))]);
        Self {
            cut: budget.map(Budget::counter_set),
            plain: CounterSet {
                name: set_name(ordinal),
                counters,
            },
        }
    }
}

impl Carving<'_> {
    /// Gives each GPU its counter set, if it is published in more than one shape.
    pub(crate) fn settle(&mut self) {
        for (ordinal, card) in &mut self.cards {
            let counted = counted_memory(self.input, *ordinal);
            let mut set = counter_set(self.input, *ordinal, card, counted.is_some());
            // The set first: what devices consume of it is checked against it.
            consume(card, set.as_ref());
            // Devices of a GPU that does not answer bring what they draw along.
            if let (Some(set), Some(memory)) = (&mut set, counted)
                && card.sets.is_some()
            {
                meter(card, set, memory);
            }
            card.counter_set = set;
            // By the API's holders alone: what leaves may be held, but need not be.
            let over = over_allocated(card, |device| self.input.held.contains(&device.name));
            if let Some(over) = over {
                self.over.insert(*ordinal, over);
            }
            if let Some(devices) = self.given_twice.get(ordinal) {
                // A counter below zero makes every device of the pool that draws on any
                // unschedulable. The taints of this GPU keep claims off it instead.
                self.findings.push(Finding::GivenTwice {
                    gpu: *ordinal,
                    devices: devices.clone(),
                    claims: Vec::new(),
                });
                consume(card, None);
                card.counter_set = None;
            }
        }
    }
}

/// Returns the memory in bytes of a GPU whose rules have it counted by name.
fn counted_memory(input: &Input<'_>, ordinal: u32) -> Option<u64> {
    let of_ordinal = |uuid: &&GpuUuid| input.ordinals.of(uuid) == Some(ordinal);
    let uuid = input.inventory.gpus.keys().find(of_ordinal)?;
    let gpu = input.inventory.gpus.get(uuid)?;
    let is_counted = input.rules_of(uuid).counts_memory;
    gpu.facts.memory_bytes.filter(|_| is_counted)
}

/// Returns the set that the devices of a GPU draw on. A GPU with a single shape needs none, unless
/// its memory is to be counted.
fn counter_set(
    input: &Input<'_>,
    ordinal: u32,
    card: &mut GpuOffer,
    is_counted: bool,
) -> Option<CounterSet> {
    // Partitions exclude each other, too, where their places overlap.
    let several = card.held_as().count() > 1
        || is_counted && card.held_as().next().is_some()
        || card
            .held_as()
            .any(|(used, _)| used.target == TargetKind::Partition);
    if !several || !input.features.supports(Feature::Partitions) {
        return None;
    }
    let Some(sets) = &card.sets else {
        // Devices that were taken over from the last pool bring the set they draw on.
        let name = set_name(ordinal);
        let slices = input.previous.into_iter().flat_map(|last| &last.slices);
        let mut sets = slices.flat_map(|slice| &slice.counter_sets);
        let draws = card.devices().any(|device| !device.consumes.is_empty());
        return sets.find(|set| set.name == name && draws).cloned();
    };
    let cut = |(used, devices): (&Form, &Vec<Device>)| {
        used.target == TargetKind::Partition && devices.iter().any(|d| !d.consumes.is_empty())
    };
    if card.by.iter().any(cut) {
        sets.cut.as_ref().map(|full| lean_all(full, &mut card.by))
    } else {
        Some(sets.plain.clone())
    }
}

/// Makes the counters of partitions and of the shares of them as few as refuse the same: together,
/// since they draw on one set.
fn lean_all(full: &CounterSet, by: &mut BTreeMap<Form, Vec<Device>>) -> CounterSet {
    let each = by.extract_if(.., |form, _| form.target == TargetKind::Partition);
    let (mut counts, mut all) = (Vec::new(), Vec::new());
    for (form, devices) in each {
        counts.push((form, devices.len()));
        all.extend(devices);
    }
    let set = lean(full, &mut all);
    let mut rest = all.into_iter();
    for (form, count) in counts {
        by.insert(form, rest.by_ref().take(count).collect());
    }
    set
}

/// Writes what devices draw on a set: of a GPU that answers, everything that uses it as a whole
/// draws all there is. Without a set nothing draws on any.
fn consume(card: &mut GpuOffer, set: Option<&CounterSet>) {
    let Some(set) = set else {
        for device in card.devices_mut() {
            device.consumes.clear();
        }
        return;
    };
    if card.sets.is_none() {
        return;
    }
    let everything = CounterUse {
        set: set.name.clone(),
        counters: set.counters.clone(),
    };
    let whole = card.held_as_mut();
    for (_, devices) in whole.filter(|(used, _)| used.target == TargetKind::Gpu) {
        for device in devices {
            device.consumes = vec![everything.clone()];
        }
    }
}

/// The devices of a GPU that claims have and that it cannot be at once, by the counters.
fn over_allocated(card: &GpuOffer, held: impl Fn(&Device) -> bool) -> Option<String> {
    let set = card.counter_set.as_ref()?;
    let mut used: BTreeMap<&str, u64> = BTreeMap::new();
    let of_claims: Vec<&Device> = card.devices().filter(|device| held(device)).collect();
    for (counter, amount) in of_claims
        .iter()
        .flat_map(|d| &d.consumes)
        .flat_map(|u| &u.counters)
    {
        let used = used.entry(counter).or_default();
        *used = used.saturating_add(amount.value());
    }
    let over =
        |(counter, amount): (&String, &Amount)| used.get(counter.as_str()) > Some(&amount.value());
    if !set.counters.iter().any(over) {
        return None;
    }
    Some(
        of_claims
            .iter()
            .map(|device| device.name.as_str())
            .collect::<Vec<_>>()
            .join(", "),
    )
}
