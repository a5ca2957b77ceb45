//! The order of what is published, and where slices break.
//!
//! The scheduler takes the first device that fits and looks at every one on the way, so the alternatives that are
//! few come first (DESIGN section 1). Breaks are at fixed ordinals: a GPU that comes, goes or gets a taint changes
//! its own slices only, and the order of the others stays.

use std::collections::BTreeMap;

use crate::partition::Cut;
use crate::validate::{MAX_COUNTER_SETS, MAX_DEVICES_TAINTED};
use crate::{Device, Slice};

/// GPUs whose partitions share a slice: as many as fit with every profile that is known on any board (31 devices).
const GPUS_IN_SLICE: u32 = 2;

/// Whole GPUs in reverse order, then partitions by ascending ordinal, then counter sets.
pub(crate) fn slices(whole: BTreeMap<u32, Device>, cuts: BTreeMap<u32, Cut>) -> Vec<Slice> {
    let mut first: BTreeMap<u32, Slice> = BTreeMap::new();
    for (ordinal, device) in whole.into_iter().rev() {
        // The lower limit always: else the first taint on a full slice would split it.
        first.entry(ordinal / MAX_DEVICES_TAINTED).or_default().devices.push(device);
    }
    let mut slices: Vec<Slice> = first.into_values().rev().collect();

    let max_sets = u32::try_from(MAX_COUNTER_SETS).unwrap_or(u32::MAX);
    let mut sets: BTreeMap<u32, Slice> = BTreeMap::new();
    let mut groups: BTreeMap<u32, Vec<Vec<Device>>> = BTreeMap::new();
    for (ordinal, cut) in cuts {
        sets.entry(ordinal / max_sets).or_default().counter_sets.extend(cut.counter_set);
        groups.entry(ordinal / GPUS_IN_SLICE).or_default().push(cut.devices);
    }
    slices.extend(groups.into_values().flat_map(device_slices));
    slices.extend(sets.into_values().filter(|slice| !slice.counter_sets.is_empty()));
    slices
}

/// One slice for neighbouring GPUs if it has room for all of them; else at least one for each.
fn device_slices(gpus: Vec<Vec<Device>>) -> Vec<Slice> {
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
            slices.push(Slice { devices: rest.by_ref().take(max).collect(), counter_sets: Vec::new() });
        }
    }
    slices
}
