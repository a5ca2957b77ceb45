//! The time-sliced shares of a GPU: one device that many claims have, each with a part of its memory, its compute and
//! its places. Accounted by the scheduler, not enforced.

use divvy_api::names::{attributes as attr, capacity as cap};
use divvy_model::{DeviceKind, GpuFacts, TimeSlice};

use crate::{Allowed, Amount, AttributeValue, Capacity, Device, GpuRules, RequestPolicy};

const MIB: u64 = 1 << 20;
/// Percent.
const ALL_CORES: u64 = 100;

/// The shares of a GPU that is `whole` as a whole. `None` if nothing of its memory is left for them.
pub(crate) fn device(ordinal: u32, whole: &Device, facts: &GpuFacts, rules: &GpuRules) -> Option<Device> {
    let slots = u64::from(rules.shares.slots.max(1));
    let mut device = described(ordinal, whole, rules.shares.time_slice);
    // Of boards without memory of their own only compute and places are given out.
    if let Some(bytes) = facts.memory_bytes {
        let mib = (bytes / MIB).checked_sub(rules.held_back_mib).filter(|mib| *mib > 0)?;
        let smallest = rules.shares.smallest_mib.max(1);
        let part = parts(mib, smallest, mib / slots, |mib| Amount::Bytes(mib.saturating_mul(MIB)));
        device.capacity.insert(cap::MEMORY.into(), part);
    }
    let cores = parts(ALL_CORES, rules.shares.smallest_cores.into(), ALL_CORES / slots, Amount::Count);
    device.capacity.insert(cap::CORES.into(), cores);
    device.capacity.insert(cap::SLOTS.into(), parts(slots, 1, 1, Amount::Count));
    Some(device)
}

/// The same, with nothing to give out.
pub(crate) fn described(ordinal: u32, whole: &Device, time_slice: Option<TimeSlice>) -> Device {
    let mut device = bare(ordinal, whole);
    let slice = time_slice.unwrap_or(TimeSlice::Default);
    device.attributes.insert(attr::TIME_SLICE.into(), AttributeValue::String(slice.name().to_owned()));
    device
}

/// The same, with what `whole` says alone.
pub(crate) fn bare(ordinal: u32, whole: &Device) -> Device {
    let mut device = Device::new(DeviceKind::Share { ordinal }.device_name());
    device.allow_multiple = true;
    device.attributes.clone_from(&whole.attributes);
    device.attributes.remove(attr::UUID);
    for (name, value) in
        [(attr::TYPE, "gpu-share"), (attr::SHARING, "time-slicing"), (attr::ISOLATION, "none")]
    {
        device.attributes.insert(name.into(), AttributeValue::String(value.to_owned()));
    }
    device
}

/// A capacity granted from `smallest` up in steps of one. A claim without a request gets `default`, and a claim that
/// requests less than the smallest gets the smallest.
fn parts(total: u64, smallest: u64, default: u64, amount: impl Fn(u64) -> Amount) -> Capacity {
    // The API wants room for one step above the least.
    let policy = if smallest < total {
        let range = Allowed::Range { min: amount(smallest), max: None, step: Some(amount(1)) };
        RequestPolicy { default: amount(default.clamp(smallest, total)), allowed: range }
    } else {
        RequestPolicy { default: amount(total), allowed: Allowed::Values(vec![amount(total)]) }
    };
    Capacity { value: amount(total), policy: Some(policy) }
}
