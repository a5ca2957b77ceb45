//! Fewer counters that refuse the same.
//!
//! The scheduler looks up every counter of every device of a node, for each node and each pod: with
//! partitions that is a large part of what it does (`docs/scheduler-cost.md`). [`crate::counters`]
//! counts all that the hardware has; of what a GPU in fact publishes, most of it never refuses
//! anything. Called when it is known what is published.

use std::collections::BTreeMap;

use divvy_api::names::counters as names;

use crate::{Amount, CounterSet, CounterUse, Device};

/// The set with what `partitions` need of it, and the partitions changed to draw on that. Any of
/// them can be had at once that could be before, and no others; something that takes the whole set
/// excludes each of them as before.
pub(crate) fn lean(set: &CounterSet, partitions: &mut [Device]) -> CounterSet {
    let slices = slices_of(&set.counters);
    let placed: Vec<Placed<'_>> = partitions
        .iter()
        .filter_map(|device| Placed::of(device, set))
        .collect();
    // Judge by the partitions as they draw on the full set, before any of them is changed.
    let rule = Rule {
        blocks: blocks(slices.end, &placed),
        // A counter by number stays only if partitions that do not overlap can need more of it than
        // there is. Else the slices refuse first.
        numbers: set
            .counters
            .iter()
            .filter(|(name, _)| slice(name).is_none())
            .filter(|(name, total)| most_at_once(slices.end, &placed, name) > total.value())
            .map(|(name, _)| name.clone())
            .collect(),
    };
    // The same rule for the devices and for the set: a device must not name a counter that the set
    // lacks.
    for device in partitions {
        for uses in device
            .consumes
            .iter_mut()
            .filter(|uses| uses.set == set.name)
        {
            uses.counters = rule.applied(&uses.counters);
        }
    }
    CounterSet {
        name: set.name.clone(),
        counters: rule.applied(&set.counters),
    }
}

/// Memory slices from one on, up to and without another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Span {
    start: u32,
    end: u32,
}

impl Span {
    fn len(self) -> u32 {
        self.end.saturating_sub(self.start)
    }

    fn within(self, other: Self) -> Self {
        Self {
            start: self.start.max(other.start),
            end: self.end.min(other.end),
        }
    }
}

/// A partition, and what it takes.
struct Placed<'a> {
    at: Span,
    counters: &'a BTreeMap<String, Amount>,
}

impl<'a> Placed<'a> {
    /// `None` if it draws on nothing of the set: it is not known where it is.
    fn of(device: &'a Device, set: &CounterSet) -> Option<Self> {
        let CounterUse { counters, .. } =
            device.consumes.iter().find(|uses| uses.set == set.name)?;
        Some(Self {
            at: slices_of(counters),
            counters,
        })
    }
}

/// The counters that remain in the end.
struct Rule {
    /// Neighbouring slices that are counted together.
    blocks: Vec<Span>,
    /// Counters by number that refuse something.
    numbers: Vec<String>,
}

impl Rule {
    fn applied(&self, counters: &BTreeMap<String, Amount>) -> BTreeMap<String, Amount> {
        let at = slices_of(counters);
        let by_number = self
            .numbers
            .iter()
            .filter_map(|name| Some((name.clone(), *counters.get(name)?)));
        let by_block = self.blocks.iter().filter_map(|block| {
            let taken = at.within(*block).len();
            (taken > 0).then(|| (block_name(*block), Amount::Count(taken.into())))
        });
        by_number.chain(by_block).collect()
    }
}

fn block_name(block: Span) -> String {
    let last = block.end.saturating_sub(1);
    if block.len() <= 1 {
        return format!("{}{last}", names::MEMORY_SLICE);
    }
    format!("{}{}-{last}", names::MEMORY_SLICES, block.start)
}

/// The number of a memory slice, by the name of its counter.
fn slice(counter: &str) -> Option<u32> {
    counter.strip_prefix(names::MEMORY_SLICE)?.parse().ok()
}

/// The slices that counters are of. They are neighbours: that is what placements are.
fn slices_of(counters: &BTreeMap<String, Amount>) -> Span {
    let numbers = || counters.keys().filter_map(|name| slice(name));
    let end = numbers().max().map_or(0, |last| last.saturating_add(1));
    Span {
        start: numbers().min().unwrap_or(0),
        end,
    }
}

/// The slices in blocks, each as large as it may be where the one before ends.
fn blocks(slices: u32, placed: &[Placed<'_>]) -> Vec<Span> {
    let mut blocks = Vec::new();
    let mut start = 0;
    while start < slices {
        let fits = |end: &u32| separates(Span { start, end: *end }, placed);
        // A single slice can always be counted.
        let end = (start + 1..=slices).rev().find(fits).unwrap_or(start + 1);
        blocks.push(Span { start, end });
        start = end;
    }
    blocks
}

/// Returns whether a count of a block's slices refuses whatever overlaps in it: two that do need
/// more than there is. Partitions that do not overlap need no more than there is in any case.
fn separates(block: Span, placed: &[Placed<'_>]) -> bool {
    let inside: Vec<Span> = placed
        .iter()
        .map(|p| p.at.within(block))
        .filter(|at| at.len() > 0)
        .collect();
    let mut rest = inside.as_slice();
    while let Some((one, others)) = rest.split_first() {
        let overlap = |other: &&Span| one.within(**other).len() > 0;
        // Two that overlap, and whose slices in the block are no more than it has, would both be
        // admitted.
        if others
            .iter()
            .filter(overlap)
            .any(|other| one.len() + other.len() <= block.len())
        {
            return false;
        }
        rest = others;
    }
    true
}

/// The most of a counter that partitions need which do not overlap.
fn most_at_once(slices: u32, placed: &[Placed<'_>], counter: &str) -> u64 {
    // most[end]: within the slices before `end`.
    let mut most: Vec<u64> = vec![0];
    for end in 1..=slices {
        let before = most.last().copied().unwrap_or(0);
        let ending = placed.iter().filter(|p| p.at.end == end).map(|p| {
            let free = usize::try_from(p.at.start)
                .ok()
                .and_then(|start| most.get(start).copied());
            free.unwrap_or(0)
                .saturating_add(p.counters.get(counter).map_or(0, |amount| amount.value()))
        });
        let best = ending.max().unwrap_or(0).max(before);
        most.push(best);
    }
    most.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests;
