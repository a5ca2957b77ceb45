//! The shares of a GPU or a partition: one device that many claims have, each with a part of its
//! memory, its compute and its places, or with a percentage of all. Accounted by the scheduler; the
//! memory is capped where the driver can. Time-sliced ones, and those by MPS where its servers have
//! namespaces.

use divvy_api::names::{attributes as attr, capacity as cap};
use divvy_model::{DeviceKind, MemoryCaps, ShareUnit, TargetKind};

use crate::builder::limits;
use crate::{
    Allowed, Amount, AttributeValue, Capacity, Device, RequestPolicy, Said, ShareRules, Source,
};

const MIB: u64 = 1 << 20;
/// Percent.
const ALL: u64 = 100;

/// Returns what caps the memory of shares. A board without memory of its own has nothing to cap,
/// and nothing is capped in partitions.
pub(crate) fn caps(from: &Source<'_>) -> MemoryCaps {
    match from.kind.form().target {
        TargetKind::Gpu if from.gpu.facts.memory_bytes.is_some() => from.system.memory_caps,
        TargetKind::Gpu | TargetKind::Partition => MemoryCaps::default(),
    }
}

/// Returns the shares of a target, with all of it that there is for them to give out. `None` if
/// nothing of its memory is.
pub(crate) fn given_out(
    plain: Device,
    from: &Source<'_>,
    said: Said,
    rules: &ShareRules,
) -> Option<Device> {
    let mib = memory_mib(&plain, from, said.caps);
    if mib == Some(0) {
        return None;
    }
    let mut device = described(from.kind, plain, said);
    let most = match said.caps {
        MemoryCaps::Available => rules.burst.percent(),
        _ => 0,
    };
    let most = AttributeValue::Int(most.into());
    device
        .attributes
        .insert(attr::MEMORY_LIMIT_MAX_PERCENT.into(), most);
    match from.unit {
        ShareUnit::Amounts => amounts(&mut device, mib, rules, said.caps),
        ShareUnit::Percent => percent(&mut device, mib, rules, said.caps),
    }
    Some(device)
}

/// Returns the memory for shares of a target, in MiB; `None` of a board without memory of its own,
/// which gives out only compute and places. Partitions have all of theirs: `reservedMemory` is of
/// GPUs that are shared as a whole.
fn memory_mib(plain: &Device, from: &Source<'_>, caps: MemoryCaps) -> Option<u64> {
    if from.kind.form().target == TargetKind::Partition {
        let memory = plain.capacity.get(cap::MEMORY)?;
        return Some(memory.value.value() / MIB);
    }
    let facts = &from.gpu.facts;
    let mib = facts.memory_bytes? / MIB;
    Some(mib.saturating_sub(from.rules.withheld_mib(facts, caps)))
}

/// Returns the shares of a target with nothing to give out: what it says for one claim alone, less
/// what is not theirs.
pub(crate) fn described(kind: &DeviceKind, plain: Device, said: Said) -> Device {
    let form = kind.form();
    let mut device = Device {
        name: kind.device_name(),
        allow_multiple: true,
        ..plain
    };
    device.capacity.clear();
    device.attributes.remove(attr::UUID);
    let own = [
        (attr::TYPE, form.device_type()),
        (attr::SHARING, kind.sharing.attribute()),
    ];
    let limits = limits(form.target, kind.sharing, said.caps);
    let slice = said
        .time_slice
        .map(|slice| (attr::TIME_SLICE, slice.name()));
    for (name, value) in own.into_iter().chain(limits).chain(slice) {
        device
            .attributes
            .insert(name.into(), AttributeValue::String(value.to_owned()));
    }
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
    // Not zero here: `given_out` makes no shares of a GPU without memory to give out.
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
