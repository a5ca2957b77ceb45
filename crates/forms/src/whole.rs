//! The whole GPU, for one claim.

mod device;

use divvy_model::{DeviceKind, Form};

use crate::{Definition, Device, Said, Source, partition};

pub use device::{Links, bare, describe, device};

/// The form.
#[derive(Debug)]
pub(crate) struct Whole;

impl Definition for Whole {
    fn form(&self) -> Form {
        Form::WHOLE
    }

    fn device(&self, mut plain: Device, from: &Source<'_>) -> Option<Device> {
        plain
            .capacity
            .extend(from.largest.into_iter().flat_map(partition::engines));
        Some(plain)
    }

    fn described(&self, _: &DeviceKind, plain: Device, _: Said) -> Device {
        plain
    }

    fn offered(&self) -> String {
        format!("as {}", Form::WHOLE.name())
    }
}
