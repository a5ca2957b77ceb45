//! The published devices, in our words: a [`Pool`] of slices of devices. The publisher turns it
//! into API objects.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::attributes;
use divvy_forms::{Amount, Device};
use divvy_model::{AttributeValue, DeviceKind, DeviceName, Enforcement};
use serde::Serialize;

/// Everything one node publishes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Pool {
    /// Name of the pool; see [`crate::pool_name`].
    pub name: String,
    /// The slices, in the order in which the scheduler is to try them. None at all when there is no
    /// device.
    pub slices: Vec<Slice>,
}

impl Pool {
    /// All devices, in the order in which the scheduler tries them.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.slices.iter().flat_map(|slice| &slice.devices)
    }

    /// Returns the numbers of the GPUs whose shares are published as capped in their memory.
    pub fn capped(&self) -> BTreeSet<u32> {
        let value = AttributeValue::String(Enforcement::Cgroup.attribute().to_owned());
        let is_capped = |device: &&Device| {
            device.attributes.get(attributes::MEMORY_ENFORCEMENT) == Some(&value)
        };
        self.devices()
            .filter(is_capped)
            .filter_map(|device| Some(DeviceKind::parse(&device.name).ok()?.ordinal()))
            .collect()
    }

    /// A device by its name.
    pub fn device(&self, name: &DeviceName) -> Option<&Device> {
        self.devices().find(|device| device.name == *name)
    }
}

/// A ResourceSlice: devices or counter sets, never both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Slice {
    /// Devices, in the order in which the scheduler is to try them.
    pub devices: Vec<Device>,
    pub counter_sets: Vec<CounterSet>,
}

/// Counters that the forms of one GPU draw on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CounterSet {
    /// Name, unique in the pool.
    pub name: String,
    pub counters: BTreeMap<String, Amount>,
}
