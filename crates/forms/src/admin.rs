//! The GPU for those with admin access, beside its holders (ADR 3): a device that draws on no
//! counters, so that it is available independent of all other allocations.

use divvy_api::names::attributes as attr;
use divvy_model::{DeviceKind, Form};

use crate::{AttributeValue, Definition, Device, Said, Source};

/// The form.
#[derive(Debug)]
pub(crate) struct Admin;

impl Definition for Admin {
    fn form(&self) -> Form {
        Form::ADMIN
    }

    fn device(&self, plain: Device, from: &Source<'_>) -> Option<Device> {
        Some(self.described(from.kind, plain, Said::default()))
    }

    /// Says and has what the whole GPU does. Its type keeps it out of every class but its own.
    fn described(&self, kind: &DeviceKind, plain: Device, _: Said) -> Device {
        let mut device = plain;
        device.name = kind.device_name();
        let own = AttributeValue::String(Form::ADMIN.device_type().to_owned());
        device.attributes.insert(attr::TYPE.into(), own);
        device
    }

    fn offered(&self) -> String {
        format!("as {}", Form::ADMIN.name())
    }
}
