//! The published attributes of one device, for the one who has it.

use std::collections::BTreeMap;

use divvy_api::names::attributes as attr;
use divvy_forms::whole::{self, Links};
use divvy_forms::{Builder, Said, definition, partition};
use divvy_model::{DeviceKind, DeviceName, GpuUuid, Inventory, NamedTarget, TimeSlice};

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
    let plain = match &kind.target {
        NamedTarget::Gpu { ordinal } => {
            whole::device(*ordinal, gpu, found, system, &links, &mut left_out)
        }
        NamedTarget::Partition(name) => {
            let mut to = Builder::new(device.clone(), &mut left_out);
            partition::describe(&mut to, gpu, found, system);
            let caps = found.mig.as_ref().map(|mig| &mig.capabilities);
            let profile = caps.and_then(|caps| caps.name(caps.profile(name.profile)?));
            to.string(
                attr::PROFILE,
                profile.map(|name| name.to_string()).as_deref(),
            );
            to.device
        }
    };
    let said = Said {
        time_slice: Some(time_slice.unwrap_or(TimeSlice::Default)),
        caps: system.memory_caps,
    };
    let Some(form) = definition(kind.form()) else {
        return BTreeMap::new();
    };
    let published = form.described(&kind, plain, said);
    published
        .attributes
        .into_iter()
        .map(|(name, value)| (name.into_owned(), value))
        .collect()
}
