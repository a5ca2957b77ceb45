//! Feature gates that are off: the server drops their fields on write, and says nothing.

use std::collections::BTreeSet;

use serde_json::Value;

use super::json::set;

/// A gate of the API server over fields of ResourceSlices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Gate {
    /// `DRADeviceTaints`: taints of devices.
    DeviceTaints,
    /// `DRAPartitionableDevices`: shared counters, what devices consume of them, node fields per
    /// device.
    PartitionableDevices,
    /// `DRAConsumableCapacity`: `allowMultipleAllocations` and request policies.
    ConsumableCapacity,
}

impl Gate {
    const ALL: [Self; 3] = [
        Self::DeviceTaints,
        Self::PartitionableDevices,
        Self::ConsumableCapacity,
    ];

    fn slice_fields(self) -> &'static [&'static str] {
        match self {
            Self::PartitionableDevices => &["sharedCounters", "perDeviceNodeSelection"],
            Self::DeviceTaints | Self::ConsumableCapacity => &[],
        }
    }

    fn device_fields(self) -> &'static [&'static str] {
        match self {
            Self::DeviceTaints => &["taints"],
            Self::PartitionableDevices => {
                &["consumesCounters", "nodeName", "nodeSelector", "allNodes"]
            }
            Self::ConsumableCapacity => &["allowMultipleAllocations"],
        }
    }

    fn in_use(self, slice: &Value) -> bool {
        let spec = slice.get("spec");
        let has = |value: &Value, fields: &[&str]| fields.iter().any(|f| value.get(f).is_some());
        let devices = spec
            .and_then(|s| s.get("devices"))
            .and_then(Value::as_array);
        spec.is_some_and(|s| has(s, self.slice_fields()))
            || devices.into_iter().flatten().any(|device| {
                has(device, self.device_fields())
                    || (self == Self::ConsumableCapacity
                        && capacities(device).any(|c| has(c, &["requestPolicy"])))
            })
    }
}

fn capacities(device: &Value) -> impl Iterator<Item = &Value> {
    device
        .get("capacity")
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(|map| map.values())
}

/// Drops the fields of the gates that are off, unless the stored slice already uses them.
pub(crate) fn drop_fields(off: &BTreeSet<Gate>, old: Option<&Value>, slice: &mut Value) {
    for gate in Gate::ALL {
        if !off.contains(&gate) || old.is_some_and(|old| gate.in_use(old)) {
            continue;
        }
        for field in gate.slice_fields() {
            set(slice, &["spec", field], None);
        }
        let devices = slice
            .pointer_mut("/spec/devices")
            .and_then(Value::as_array_mut);
        for device in devices.into_iter().flatten() {
            for field in gate.device_fields() {
                set(device, &[field], None);
            }
            if gate == Gate::ConsumableCapacity
                && let Some(capacities) = device.get_mut("capacity").and_then(Value::as_object_mut)
            {
                capacities
                    .values_mut()
                    .for_each(|c| set(c, &["requestPolicy"], None));
            }
        }
    }
}
