//! The MPS shares of a GPU or partition: one device that many claims have. Where the driver has MPS
//! of protocol v3, they are given out as time-sliced shares are, each of its own size. Before that
//! they are equal slots, since a server of protocol v2 has one limit for all of its clients: the
//! only capacity is `slots`, and a share takes one. The part of the GPU that a slot is, is in
//! attributes.

use divvy_api::names::{attributes as attr, capacity as cap};
use divvy_model::{GpuFacts, MpsAbility, MpsProtocol, MpsServer};

use crate::{Allowed, Amount, AttributeValue, Capacity, Device, GpuRules, RequestPolicy};

/// Returns the server that the rules of a GPU ask for on such a node. `None` if nothing of its
/// memory is left.
pub(crate) fn server(facts: &GpuFacts, rules: &GpuRules, node: MpsAbility) -> Option<MpsServer> {
    if node.protocol() == Some(MpsProtocol::V3) {
        return Some(MpsServer::NAMESPACES);
    }
    let mib = facts.memory_bytes.map(|bytes| bytes >> 20);
    let mib = mib.map(|mib| mib.saturating_sub(rules.held_back_mib));
    MpsServer::equal(rules.shares.slots, mib)
}

/// Returns the memory of a partition in MiB. A board that shares its memory with the processor has
/// partitions without any of their own.
pub(crate) fn memory_mib(plain: &Device) -> Option<u64> {
    let memory = plain.capacity.get(cap::MEMORY)?;
    Some(memory.value.value() >> 20)
}

/// Gives out the slots of a server.
pub(crate) fn with_slots(mut device: Device, server: MpsServer) -> Device {
    let mib = server.memory_mib.and_then(|mib| i64::try_from(mib).ok());
    let parts = [
        (attr::SLOT_MEMORY_MIB, mib),
        (attr::SLOT_CORES, Some(i64::from(server.cores))),
    ];
    for (name, value) in parts {
        let value = value.map(AttributeValue::Int);
        device
            .attributes
            .extend(value.map(|value| (name.into(), value)));
    }
    let one = Amount::Count(1);
    let slots = Capacity {
        value: Amount::Count(server.places().into()),
        // A claim that asks for two slots would get a client with the limits of one.
        policy: Some(RequestPolicy {
            default: one,
            allowed: Allowed::Values(vec![one]),
        }),
    };
    device.capacity.insert(cap::SLOTS.into(), slots);
    device
}
