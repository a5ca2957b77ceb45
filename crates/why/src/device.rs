//! Devices of ours, as the API has them.

use std::collections::BTreeMap;

use divvy_api::names::{attributes, capacity};
use divvy_model::{DeviceKind, Quantity, ShareUnit};
use k8s_openapi::api::resource::v1::Device;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Amount;

use crate::driver::own;

/// The kind of a device, by its name.
pub fn kind(device: &str) -> Option<DeviceKind> {
    DeviceKind::parse(&device.parse().ok()?).ok()
}

/// An attribute that is text.
pub fn text<'d>(device: &'d Device, attribute: &str) -> Option<&'d str> {
    own(device.attributes.as_ref()?, attribute)?
        .string
        .as_deref()
}

/// An attribute that is a number.
pub fn number(device: &Device, attribute: &str) -> Option<u64> {
    let found = own(device.attributes.as_ref()?, attribute)?;
    u64::try_from(found.int?).ok()
}

/// The memory of a device, in bytes: its capacity, or what its shares by percent divide.
pub fn memory(device: &Device) -> Option<u64> {
    let counted = || amount(&own(device.capacity.as_ref()?, capacity::MEMORY)?.value.0);
    let divided = || number(device, attributes::MEMORY_MIB)?.checked_mul(1 << 20);
    counted().or_else(divided)
}

/// The percent of its GPU that a share was granted, if it is given out so.
pub fn percent(consumed: &BTreeMap<String, Amount>) -> Option<u64> {
    amount(&own(consumed, capacity::PERCENT)?.0)
}

/// Returns the memory in bytes and the threads in percent that a slot of MPS shares has.
pub fn slot(device: &Device) -> (Option<u64>, Option<u64>) {
    let memory = number(device, attributes::SLOT_MEMORY_MIB);
    (
        memory.and_then(|mib| mib.checked_mul(1 << 20)),
        number(device, attributes::SLOT_CORES),
    )
}

/// The memory that a share was granted of a device, in bytes: as counted, the part that its
/// percent are, or that of its MPS slots.
pub fn share_memory(device: Option<&Device>, consumed: &BTreeMap<String, Amount>) -> Option<u64> {
    let Some(percent) = percent(consumed) else {
        let counted = own(consumed, capacity::MEMORY);
        let of_slots = || {
            let slots = amount(&own(consumed, capacity::SLOTS)?.0)?;
            slot(device?).0?.checked_mul(slots)
        };
        return counted.map_or_else(of_slots, |memory| amount(&memory.0));
    };
    Some(ShareUnit::part_of_memory(memory(device?)? >> 20, percent))
}

/// A quantity in whole units.
pub fn amount(text: &str) -> Option<u64> {
    u64::try_from(text.parse::<Quantity>().ok()?.rounded_up()).ok()
}

/// Bytes as people say them: `80 GiB`, `512 MiB`.
pub fn bytes(amount: u64) -> String {
    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;
    match amount {
        a if a >= GIB => {
            // Integers only: tenths, rounded to the nearest.
            let tenths = (u128::from(a) * 10 + u128::from(GIB) / 2) / u128::from(GIB);
            if tenths % 10 == 0 {
                format!("{} GiB", tenths / 10)
            } else {
                format!("{}.{} GiB", tenths / 10, tenths % 10)
            }
        }
        a if a >= MIB => format!("{} MiB", a / MIB),
        a => format!("{a} B"),
    }
}
