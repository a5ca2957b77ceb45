//! Values of a device that are known and within the API's limits.

use divvy_api::names::attributes as attr;
use divvy_model::{
    DeviceName, Enforcement, Limits, MemoryCaps, Sharing, TargetKind, normalise_version,
};

use crate::device::{MAX_INTEGER, MAX_STRING};
use crate::{Amount, AttributeValue, Capacity, Device};

/// A value of a device that is over a limit of the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeftOut {
    pub device: DeviceName,
    /// The attribute or capacity.
    pub name: String,
    pub why: String,
}

/// Returns the attributes that say what keeps a program within a device in this use.
pub(crate) fn limits(
    target: TargetKind,
    sharing: Sharing,
    caps: MemoryCaps,
) -> [(&'static str, &'static str); 4] {
    let limits = Limits::of(target, sharing, caps);
    [
        // The older of them, in a single word: what no neighbour can reach. A cap ends no faults,
        // so that it isolates nothing.
        (
            attr::ISOLATION,
            match limits.memory {
                Enforcement::Hardware => limits.memory.attribute(),
                Enforcement::Cgroup | Enforcement::MpsServer | Enforcement::Nothing => {
                    Enforcement::Nothing.attribute()
                }
            },
        ),
        (attr::MEMORY_ENFORCEMENT, limits.memory.attribute()),
        (attr::COMPUTE_ENFORCEMENT, limits.compute.attribute()),
        (attr::FAULT_DOMAIN, limits.fault_domain),
    ]
}

/// Adds values that are known and within the API's limits; the others are noted.
pub struct Builder<'a> {
    pub device: Device,
    pub left_out: &'a mut Vec<LeftOut>,
}

impl<'a> Builder<'a> {
    pub fn new(name: DeviceName, left_out: &'a mut Vec<LeftOut>) -> Self {
        Self {
            device: Device::new(name),
            left_out,
        }
    }

    pub fn put(&mut self, name: &'static str, value: AttributeValue) {
        self.device.attributes.insert(name.into(), value);
    }

    pub fn leave_out(&mut self, name: &str, why: String) {
        self.left_out.push(LeftOut {
            device: self.device.name.clone(),
            name: name.to_owned(),
            why,
        });
    }

    pub fn limits(&mut self, target: TargetKind, sharing: Sharing) {
        // Whole GPUs and partitions: what caps the memory of shares says nothing of them.
        for (name, value) in limits(target, sharing, MemoryCaps::default()) {
            self.string(name, Some(value));
        }
    }

    pub fn string(&mut self, name: &'static str, value: Option<&str>) {
        match value {
            None | Some("") => {}
            Some(text) if text.len() <= MAX_STRING => {
                self.put(name, AttributeValue::String(text.to_owned()));
            }
            Some(text) => {
                self.leave_out(
                    name,
                    format!(
                        "{text:?} has {} bytes, the API takes {MAX_STRING}",
                        text.len()
                    ),
                );
            }
        }
    }

    pub fn version(&mut self, name: &'static str, text: &str) {
        // Strict semver, which the API requires: `535.161.07` has a zero in front, `12.4` lacks a
        // number.
        match normalise_version(text).map(|version| version.to_string()) {
            Some(version) if version.len() <= MAX_STRING => {
                self.put(name, AttributeValue::Version(version));
            }
            _ => self.leave_out(name, format!("{text:?} is not a version")),
        }
    }

    pub fn capacity(&mut self, name: &'static str, amount: Option<Amount>) {
        match amount {
            None => {}
            Some(amount) if amount.value() <= MAX_INTEGER => {
                self.device
                    .capacity
                    .insert(name.into(), Capacity::whole(amount));
            }
            Some(amount) => self.leave_out(name, format!("{} is over 63 bits", amount.value())),
        }
    }
}
