//! The MPS shares of a GPU or partition: one device that many claims have. Where the driver has MPS
//! of protocol v3, they are given out as time-sliced shares are, each of its own size. Before that
//! they are equal slots, since a server of protocol v2 has one limit for all of its clients: the
//! only capacity is `slots`, and a share takes one. The part of the GPU that a slot is, is in
//! attributes.

use divvy_api::names::{attributes as attr, capacity as cap};
use divvy_model::mig::PartitionName;
use divvy_model::{GpuFacts, MemoryCaps, MpsAbility, MpsProtocol, MpsServer, Sharing};

use crate::share::device::{bare, bare_of_partition};
use crate::{Allowed, Amount, AttributeValue, Capacity, Device, GpuRules, RequestPolicy};

/// Returns the server that the rules of a GPU ask for on such a node. `None` if nothing of its
/// memory is left.
pub fn server(facts: &GpuFacts, rules: &GpuRules, node: MpsAbility) -> Option<MpsServer> {
    if node.protocol() == Some(MpsProtocol::V3) {
        return Some(MpsServer::NAMESPACES);
    }
    let mib = facts.memory_bytes.map(|bytes| bytes >> 20);
    let mib = mib.map(|mib| mib.saturating_sub(rules.held_back_mib));
    MpsServer::equal(rules.shares.slots, mib)
}

/// Returns what a GPU or its node lacks for MPS; `None` if it lacks nothing.
pub fn lack(facts: &GpuFacts, node: MpsAbility) -> Option<&'static str> {
    node.lack_for(facts.architecture)
}

/// The equal slots of a GPU that is `whole` as a whole, with this server.
pub fn slots(ordinal: u32, whole: &Device, server: MpsServer) -> Device {
    // The driver's caps of memory come with R615, whose servers have no slots.
    let device = bare(ordinal, whole, Sharing::Mps, MemoryCaps::default());
    with_slots(device, server)
}

/// The equal slots of a partition that is `plain` for one claim, with this server.
pub fn slots_of_partition(name: &PartitionName, plain: &Device, server: MpsServer) -> Device {
    with_slots(bare_of_partition(name, plain, Sharing::Mps), server)
}

/// Gives out the slots of a server.
fn with_slots(mut device: Device, server: MpsServer) -> Device {
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
