//! The order of what is published, and where slices break.
//!
//! The scheduler takes the first device that fits and looks at every one on the way, so the
//! forms that are few come first. Breaks are at fixed ordinals: a GPU that comes, goes or
//! gets a taint changes its own slices only, and the order of the others stays.

use std::collections::BTreeMap;

use divvy_model::TargetKind;

use crate::carve::GpuOffer;
use crate::validate::{MAX_COUNTER_SETS, MAX_DEVICES_TAINTED};
use crate::{Device, Slice};

/// GPUs whose partitions share a slice: as many as fit with every profile that is known on any
/// board (31 devices).
const GPUS_IN_SLICE: u32 = 2;
/// GPUs in a slice that has one device of each. The first of these slices has whole GPUs and the
/// shares of both kinds, so it is a third of the lower limit; that limit always: else the first
/// taint on a full slice would split it.
const ONE_EACH: u32 = MAX_DEVICES_TAINTED / 3;

/// Whole GPUs in reverse order, shares by ascending ordinal, partitions likewise, shares of
/// partitions, what is for admins, and the counter sets. Whole GPUs, shares and the first GPU's
/// partitions are one slice, in turn.
pub(crate) fn slices(cards: BTreeMap<u32, GpuOffer>) -> Vec<Slice> {
    let mut whole: BTreeMap<u32, Vec<Device>> = BTreeMap::new();
    let mut shares: BTreeMap<u32, Vec<Device>> = BTreeMap::new();
    let mut cut: BTreeMap<u32, Vec<Vec<Device>>> = BTreeMap::new();
    let mut twins: BTreeMap<u32, Vec<Vec<Device>>> = BTreeMap::new();
    let mut admins: BTreeMap<u32, Vec<Device>> = BTreeMap::new();
    let mut sets: BTreeMap<u32, Slice> = BTreeMap::new();
    let max_sets = u32::try_from(MAX_COUNTER_SETS).unwrap_or(u32::MAX);
    // Groups by fixed ordinals first. Whatever a GPU gains or loses, the groups of others stay.
    for (ordinal, card) in cards {
        let group = ordinal / ONE_EACH;
        let (mut partitions, mut beside) = (Vec::new(), Vec::new());
        for (used, devices) in card.by {
            let to = match used.target {
                TargetKind::Partition if used.sharing.is_shared() => &mut beside,
                TargetKind::Partition => &mut partitions,
                TargetKind::Gpu if !used.sharing.holds() => admins.entry(group).or_default(),
                TargetKind::Gpu if used.sharing.is_shared() => shares.entry(group).or_default(),
                TargetKind::Gpu => whole.entry(group).or_default(),
            };
            to.extend(devices);
        }
        cut.entry(ordinal / GPUS_IN_SLICE)
            .or_default()
            .push(partitions);
        twins
            .entry(ordinal / GPUS_IN_SLICE)
            .or_default()
            .push(beside);
        sets.entry(ordinal / max_sets)
            .or_default()
            .counter_sets
            .extend(card.counter_set);
    }
    // Claims for whole GPUs fill from the other end than small ones.
    for devices in whole.values_mut() {
        devices.reverse();
    }
    // The last of the whole GPUs and the first of the shares are of the same GPUs, and share a
    // slice. They share it with the first partitions that there are.
    let first = whole.entry(0).or_default();
    let beside = shares.remove(&0).unwrap_or_default();
    let nearest = cut
        .values_mut()
        .flatten()
        .find(|partitions| !partitions.is_empty());
    let fits = |partitions: &&mut Vec<Device>| {
        let few = first.len() + beside.len();
        few > 0
            && few + partitions.len() <= usize::try_from(MAX_DEVICES_TAINTED).unwrap_or(usize::MAX)
    };
    let partitions = nearest.filter(fits).map(std::mem::take).unwrap_or_default();
    *first = riffled(std::mem::take(first), beside, partitions);
    // Slices in the order in which the scheduler is to look: few forms, partitions, admins.
    // Counter sets come last: no claim asks for them.
    let few = whole.into_values().rev().chain(shares.into_values());
    let partitions = cut.into_values().flat_map(split);
    // A claim for a whole partition is not to pass the shares of the partitions before it.
    let twins = twins.into_values().flat_map(split);
    let devices = few.chain(partitions).chain(twins);
    let devices = devices.chain(admins.into_values());
    let devices = devices.map(|devices| Slice {
        devices,
        counter_sets: Vec::new(),
    });
    devices
        .filter(|slice| !slice.devices.is_empty())
        .chain(
            sets.into_values()
                .filter(|slice| !slice.counter_sets.is_empty()),
        )
        .collect()
}

/// A few whole GPUs, one of the shares, a few of the partitions, and so on: whatever a claim asks
/// for is found soon. A claim for a share that had to pass all whole GPUs would cost the scheduler
/// an evaluation of CEL for each, on each node. Whole GPUs that are taken are passed for nothing,
/// what is beside them is not; so they are the denser.
fn riffled(whole: Vec<Device>, shares: Vec<Device>, partitions: Vec<Device>) -> Vec<Device> {
    let (mut whole, mut shares) = (whole.into_iter().peekable(), shares.into_iter());
    let mut partitions = partitions.into_iter();
    let mut all: Vec<Device> = whole.next().into_iter().chain(shares.next()).collect();
    all.extend(partitions.by_ref().take(2));
    while whole.peek().is_some() {
        all.extend(whole.by_ref().take(2).chain(shares.next()));
        all.extend(partitions.by_ref().take(2));
    }
    all.extend(shares.chain(partitions));
    all
}

/// Returns one slice for neighbouring GPUs if it has room for all of them; else at least one for
/// each.
fn split(gpus: Vec<Vec<Device>>) -> Vec<Vec<Device>> {
    let max = usize::try_from(MAX_DEVICES_TAINTED).unwrap_or(usize::MAX);
    let parts = if gpus.iter().map(Vec::len).sum::<usize>() <= max {
        vec![gpus.into_iter().flatten().collect()]
    } else {
        gpus
    };
    let mut slices = Vec::new();
    for part in parts {
        let mut rest = part.into_iter().peekable();
        while rest.peek().is_some() {
            slices.push(rest.by_ref().take(max).collect());
        }
    }
    slices
}
