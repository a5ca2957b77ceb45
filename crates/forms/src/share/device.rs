//! The shares of a GPU or a partition: one device that many claims have, each with a part of its
//! memory, its compute and its places, or with a percentage of all. Accounted by the scheduler; the
//! memory is capped where the driver can. Time-sliced ones, and those by MPS where its servers have
//! namespaces.

use divvy_api::names::{attributes as attr, capacity as cap};
use divvy_model::mig::PartitionName;
use divvy_model::{
    DeviceKind, GpuFacts, MemoryCaps, MpsServer, NamedTarget, ShareUnit, Sharing, TimeSlice,
};

use crate::builder::limits;
use crate::{
    Allowed, Amount, AttributeValue, Capacity, Device, GpuRules, RequestPolicy, ShareRules,
};

const MIB: u64 = 1 << 20;
/// Percent.
const ALL: u64 = 100;

/// The shares of a GPU that is `whole` as a whole, by this sharing and in this unit. `None` if
/// nothing of its memory is left for them.
pub fn device(
    (ordinal, sharing): (u32, Sharing),
    whole: &Device,
    facts: &GpuFacts,
    rules: &GpuRules,
    (unit, caps): (ShareUnit, MemoryCaps),
) -> Option<Device> {
    // A board without memory of its own has nothing to cap.
    let caps = facts
        .memory_bytes
        .map_or_else(MemoryCaps::default, |_| caps);
    let mut device = match sharing {
        Sharing::TimeSliced => described(ordinal, whole, rules.shares.time_slice, caps),
        sharing => bare(ordinal, whole, sharing, caps),
    };
    let most = match caps {
        MemoryCaps::Available => rules.shares.burst.percent(),
        _ => 0,
    };
    let most = AttributeValue::Int(most.into());
    device
        .attributes
        .insert(attr::MEMORY_LIMIT_MAX_PERCENT.into(), most);
    // Boards without memory of their own give out only compute and places.
    let mib = match facts.memory_bytes {
        Some(bytes) => Some(
            (bytes / MIB)
                .checked_sub(rules.withheld_mib(facts, caps))
                .filter(|mib| *mib > 0)?,
        ),
        None => None,
    };
    let mut shares = rules.shares;
    if sharing == Sharing::Mps {
        shares.slots = shares.slots.min(MpsServer::MOST_SLOTS);
    }
    give_out(&mut device, mib, &shares, (unit, caps));
    Some(device)
}

/// Gives out a target with so much memory.
fn give_out(
    device: &mut Device,
    mib: Option<u64>,
    rules: &ShareRules,
    (unit, caps): (ShareUnit, MemoryCaps),
) {
    match unit {
        ShareUnit::Amounts => amounts(device, mib, rules, caps),
        ShareUnit::Percent => percent(device, mib, rules, caps),
    }
}

/// The shares of a partition that is `plain` for one claim, in this unit. They have all of its
/// memory: `reservedMemory` is of GPUs that are shared as a whole. Nothing is capped in partitions,
/// and no time slice is set.
pub fn of_partition(
    name: &PartitionName,
    plain: &Device,
    rules: &ShareRules,
    unit: ShareUnit,
) -> Device {
    let mut device = bare_of_partition(name, plain, Sharing::TimeSliced);
    let most = AttributeValue::Int(0);
    device
        .attributes
        .insert(attr::MEMORY_LIMIT_MAX_PERCENT.into(), most);
    // A partition of a board that shares its memory with the processor has none of its own.
    let memory = plain.capacity.get(cap::MEMORY);
    let mib = memory.map(|memory| memory.value.value() / MIB);
    give_out(&mut device, mib, rules, (unit, MemoryCaps::default()));
    device
}

/// The same, with nothing to give out.
pub fn bare_of_partition(name: &PartitionName, plain: &Device, sharing: Sharing) -> Device {
    let kind = DeviceKind {
        target: NamedTarget::Partition(name.clone()),
        sharing,
    };
    let mut device = shares(&kind, plain, MemoryCaps::default());
    device.consumes.clone_from(&plain.consumes);
    device
}

/// Gives out memory, compute and places, each by itself.
fn amounts(device: &mut Device, mib: Option<u64>, rules: &ShareRules, caps: MemoryCaps) {
    let slots = u64::from(rules.slots.max(1));
    if let Some(mib) = mib {
        let context = || ShareRules::context_mib(caps);
        let smallest = rules.smallest_mib.unwrap_or_else(context).max(1);
        let part = parts(mib, smallest, mib / slots, |mib| {
            Amount::Bytes(mib.saturating_mul(MIB))
        });
        device.capacity.insert(cap::MEMORY.into(), part);
    }
    let cores = parts(ALL, rules.smallest_cores.into(), ALL / slots, Amount::Count);
    device.capacity.insert(cap::CORES.into(), cores);
    device
        .capacity
        .insert(cap::SLOTS.into(), parts(slots, 1, 1, Amount::Count));
}

/// Gives out percent alone: memory and compute beside it would be counted a second time, and a
/// capacity without a policy goes to the first claim as a whole. The memory that the percent are of
/// is an attribute.
fn percent(device: &mut Device, mib: Option<u64>, rules: &ShareRules, caps: MemoryCaps) {
    if let Some(mib) = mib.and_then(|mib| i64::try_from(mib).ok()) {
        device
            .attributes
            .insert(attr::MEMORY_MIB.into(), AttributeValue::Int(mib));
    }
    // Not zero here: `device` makes no shares of a GPU without memory to give out.
    let for_context = |mib: u64| (ShareRules::context_mib(caps) * ALL).div_ceil(mib);
    let smallest = match rules.smallest_percent {
        Some(percent) => percent.into(),
        None => mib.map_or(1, for_context),
    };
    let part = ALL / u64::from(rules.slots.max(1));
    let smallest = smallest.clamp(1, ALL);
    device.capacity.insert(
        cap::PERCENT.into(),
        parts(ALL, smallest, part, Amount::Count),
    );
}

/// The same, with nothing to give out.
pub fn described(
    ordinal: u32,
    whole: &Device,
    time_slice: Option<TimeSlice>,
    caps: MemoryCaps,
) -> Device {
    let mut device = bare(ordinal, whole, Sharing::TimeSliced, caps);
    let slice = time_slice.unwrap_or(TimeSlice::Default);
    device.attributes.insert(
        attr::TIME_SLICE.into(),
        AttributeValue::String(slice.name().to_owned()),
    );
    device
}

/// The shares of a GPU in this way, with what `whole` says alone.
pub fn bare(ordinal: u32, whole: &Device, sharing: Sharing, caps: MemoryCaps) -> Device {
    shares(&DeviceKind::of_gpu(ordinal, sharing), whole, caps)
}

/// Returns the shares of a target, with what it says for one claim alone.
fn shares(kind: &DeviceKind, exclusive: &Device, caps: MemoryCaps) -> Device {
    let form = kind.form();
    let mut device = Device::new(kind.device_name());
    device.allow_multiple = true;
    device.attributes.clone_from(&exclusive.attributes);
    device.attributes.remove(attr::UUID);
    let own = [
        (attr::TYPE, form.device_type()),
        (attr::SHARING, kind.sharing.attribute()),
    ];
    let limits = limits(form.target, kind.sharing, caps);
    for (name, value) in own.into_iter().chain(limits) {
        device
            .attributes
            .insert(name.into(), AttributeValue::String(value.to_owned()));
    }
    device
}

/// A capacity granted from `smallest` up in steps of one. A claim without a request gets `default`,
/// and a claim that requests less than the smallest gets the smallest.
fn parts(total: u64, smallest: u64, default: u64, amount: impl Fn(u64) -> Amount) -> Capacity {
    // The API wants room for one step above the least.
    let policy = if smallest < total {
        let range = Allowed::Range {
            min: amount(smallest),
            max: None,
            step: Some(amount(1)),
        };
        RequestPolicy {
            // The API wants the default within the range.
            default: amount(default.clamp(smallest, total)),
            allowed: range,
        }
    } else {
        RequestPolicy {
            default: amount(total),
            allowed: Allowed::Values(vec![amount(total)]),
        }
    };
    Capacity {
        value: amount(total),
        policy: Some(policy),
    }
}
