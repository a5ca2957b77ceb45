//! The counter `memory`, for programs that charge a quota by the name of a counter.
//!
//! Kueue 0.19 charges a request the most that any device which fits it draws of such a counter
//! (`computeCounterCharges` in `pkg/dra/counters.go` of kubernetes-sigs/kueue at 00d42bb7). So the
//! amounts are such that all devices of one kind draw the same, and that those of a GPU add up to
//! all of it: a partition draws the part of the memory that its memory slices are, not the few MiB
//! less that programs in it can allocate.

use divvy_api::names::counters as names;

use crate::carve::GpuOffer;
use crate::{Amount, CounterSet};

/// Adds the counter to the set of a GPU with this memory in bytes, and to all that draws on the
/// set. Refuses nothing that the set would admit without it.
pub(crate) fn meter(card: &mut GpuOffer, set: &mut CounterSet, memory: u64) {
    let all = parts(set.counters.iter());
    let part = memory.checked_div(all).unwrap_or(0);
    if part == 0 {
        return;
    }
    let amount = |parts: u64| Amount::Bytes(part.saturating_mul(parts));
    for device in card.devices_mut() {
        for uses in device
            .consumes
            .iter_mut()
            .filter(|uses| uses.set == set.name)
        {
            let drawn = amount(parts(uses.counters.iter()));
            uses.counters.insert(names::MEMORY.to_owned(), drawn);
        }
    }
    set.counters.insert(names::MEMORY.to_owned(), amount(all));
}

/// Returns the number of equal parts of the memory that counters stand for: memory slices, or the
/// GPU as one.
fn parts<'a>(counters: impl Iterator<Item = (&'a String, &'a Amount)>) -> u64 {
    let is_place = |name: &str| {
        name == names::GPU
            || name.starts_with(names::MEMORY_SLICE)
            || name.starts_with(names::MEMORY_SLICES)
    };
    counters
        .filter(|(name, _)| is_place(name))
        .fold(0, |sum, (_, amount)| sum.saturating_add(amount.value()))
}
