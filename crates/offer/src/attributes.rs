//! The published attributes of one device, for the one who has it.

use std::collections::BTreeMap;

use divvy_api::names::attributes as attr;
use divvy_forms::Builder;
use divvy_forms::admin::device as admin;
use divvy_forms::partition::device as partition;
use divvy_forms::share::device as share;
use divvy_forms::whole::device::{self as whole, Links};
use divvy_model::{DeviceKind, DeviceName, GpuUuid, Inventory, NamedTarget, Sharing, TimeSlice};

use crate::AttributeValue;

/// The attributes of a device of a GPU that answers, as they are published; of shares with the time
/// slice that they have, and without the memory that shares by percent divide and the largest
/// limit: both change with the policy, and a claim has its own. None of a GPU that does not answer.
pub fn attributes(
    device: &DeviceName,
    gpu: &GpuUuid,
    inventory: &Inventory,
    time_slice: Option<TimeSlice>,
) -> BTreeMap<String, AttributeValue> {
    let (Ok(kind), Some(found)) = (DeviceKind::parse(device), inventory.gpus.get(gpu)) else {
        return BTreeMap::new();
    };
    let (domains, pairs) = (inventory.nvlink_domains(), inventory.nvlink_pairs());
    let links = Links {
        domain: domains.get(gpu).map(String::as_str),
        pair: pairs.get(gpu).map(String::as_str),
    };
    let (system, mut left_out) = (&inventory.system, Vec::new());
    let mut whole = || whole::device(kind.ordinal(), gpu, found, system, &links, &mut left_out);
    let published = match (&kind.target, kind.sharing) {
        (NamedTarget::Gpu { .. }, Sharing::Exclusive) => whole(),
        (NamedTarget::Gpu { ordinal }, Sharing::Admin) => admin::device(*ordinal, &whole()),
        (NamedTarget::Gpu { ordinal }, Sharing::Mps) => {
            share::bare(*ordinal, &whole(), Sharing::Mps, system.memory_caps)
        }
        (NamedTarget::Gpu { ordinal }, Sharing::TimeSliced) => {
            share::described(*ordinal, &whole(), time_slice, system.memory_caps)
        }
        (NamedTarget::Partition(name), sharing) => {
            let mut to = Builder::new(device.clone(), &mut left_out);
            partition::describe(&mut to, gpu, found, system);
            let caps = found.mig.as_ref().map(|mig| &mig.capabilities);
            let profile = caps.and_then(|caps| caps.name(caps.profile(name.profile)?));
            to.string(
                attr::PROFILE,
                profile.map(|name| name.to_string()).as_deref(),
            );
            if sharing.is_shared() {
                share::bare_of_partition(name, &to.device, sharing)
            } else {
                to.device
            }
        }
    };
    published
        .attributes
        .into_iter()
        .map(|(name, value)| (name.into_owned(), value))
        .collect()
}
