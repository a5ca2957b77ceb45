//! MIG partitions, each for one claim.

mod device;

use divvy_model::{DeviceKind, Form};

use crate::{Definition, Device, Said, Source};

pub use device::{RESOURCES, amounts, describe, engines, identify, of_profile};

/// The form.
#[derive(Debug)]
pub(crate) struct Partition;

impl Definition for Partition {
    fn form(&self) -> Form {
        Form::PARTITIONS
    }

    fn device(&self, plain: Device, _: &Source<'_>) -> Option<Device> {
        Some(plain)
    }

    fn described(&self, _: &DeviceKind, plain: Device, _: Said) -> Device {
        plain
    }

    fn offered(&self) -> String {
        "in such partitions".to_owned()
    }
}
