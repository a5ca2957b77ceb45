//! The GPU for admin access, beside its holders (ADR 3): a device that draws on no counters, so
//! that it is available independent of all other allocations.

use divvy_api::names::{attributes as attr, taints as keys};
use divvy_model::{DeviceKind, Form, Sharing};

use crate::{AttributeValue, Device, Taint};

/// The device beside `whole`. Its type keeps it out of every class but its own.
pub fn device(ordinal: u32, whole: &Device) -> Device {
    let mut device = Device::new(DeviceKind::of_gpu(ordinal, Sharing::Admin).device_name());
    device.attributes.clone_from(&whole.attributes);
    device.attributes.insert(
        attr::TYPE.into(),
        AttributeValue::String(Form::ADMIN.device_type().to_owned()),
    );
    device.capacity.clone_from(&whole.capacity);
    device
}

/// Its taints: those of the GPU that say more than that it is in use.
pub fn taints(of_gpu: &[Taint]) -> Vec<Taint> {
    let of_use = [
        keys::FENCED,
        keys::FOREIGN,
        keys::LINGERING,
        keys::MODE,
        keys::WITHDRAWN,
    ];
    of_gpu
        .iter()
        .filter(|taint| !of_use.contains(&taint.key.as_str()))
        .cloned()
        .collect()
}
