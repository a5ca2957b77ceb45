//! Devices of ours, as the API has them.

use divvy_api::names::capacity;
use divvy_model::{DeviceKind, Quantity};
use k8s_openapi::api::resource::v1::Device;

/// The kind of a device, by its name.
pub(crate) fn kind(device: &str) -> Option<DeviceKind> {
    DeviceKind::parse(&device.parse().ok()?).ok()
}

/// An attribute that is text.
pub(crate) fn text<'d>(device: &'d Device, attribute: &str) -> Option<&'d str> {
    device.attributes.as_ref()?.get(attribute)?.string.as_deref()
}

/// The memory of a device, in bytes.
pub(crate) fn memory(device: &Device) -> Option<u64> {
    amount(&device.capacity.as_ref()?.get(capacity::MEMORY)?.value.0)
}

/// A quantity in whole units.
pub(crate) fn amount(text: &str) -> Option<u64> {
    u64::try_from(text.parse::<Quantity>().ok()?.rounded_up()).ok()
}
