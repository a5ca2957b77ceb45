//! A slice of a pool as the API has it, and the form in which two slices are compared.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::Naming;
use divvy_offer::{Allowed, Amount, AttributeValue, Capacity, Feature, Pool, RequestPolicy, Slice};
use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, Counter, CounterSet, Device,
    DeviceAttribute, DeviceCapacity, DeviceCounterConsumption, DeviceTaint, ResourcePool,
    ResourceSliceSpec,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// The specs of a pool's slices, at least one, with generation 0. Names of attributes and
/// capacities are those that the driver of this name publishes.
pub fn specs(driver: &str, node: &str, pool: &Pool) -> Vec<ResourceSliceSpec> {
    // An empty pool keeps one slice. Without any, its generation would be forgotten, and a later
    // pool begin at 1 again.
    let empty = [Slice::default()];
    let slices = if pool.slices.is_empty() {
        &empty[..]
    } else {
        &pool.slices
    };
    let naming = Naming::of(driver);
    let count = i64::try_from(slices.len()).unwrap_or(i64::MAX);
    slices
        .iter()
        .map(|slice| ResourceSliceSpec {
            driver: driver.to_owned(),
            node_name: Some(node.to_owned()),
            pool: ResourcePool {
                name: pool.name.clone(),
                generation: 0,
                resource_slice_count: count,
            },
            devices: full(slice.devices.iter().map(|it| device(it, naming)).collect()),
            shared_counters: full(
                slice
                    .counter_sets
                    .iter()
                    .map(|set| CounterSet {
                        name: set.name.clone(),
                        counters: counters(&set.counters),
                    })
                    .collect(),
            ),
            ..ResourceSliceSpec::default()
        })
        .collect()
}

fn full<T>(list: Vec<T>) -> Option<Vec<T>> {
    (!list.is_empty()).then_some(list)
}

fn full_map<T>(map: BTreeMap<String, T>) -> Option<BTreeMap<String, T>> {
    (!map.is_empty()).then_some(map)
}

fn quantity(amount: Amount) -> Quantity {
    Quantity(amount.to_string())
}

fn counters(amounts: &BTreeMap<String, Amount>) -> BTreeMap<String, Counter> {
    amounts
        .iter()
        .map(|(name, amount)| {
            (
                name.clone(),
                Counter {
                    value: quantity(*amount),
                },
            )
        })
        .collect()
}

fn device(device: &divvy_offer::Device, naming: Naming) -> Device {
    let taint = |taint: &divvy_offer::Taint| DeviceTaint {
        key: taint.key.clone(),
        value: taint.value.clone(),
        effect: taint.effect.name().to_owned(),
        time_added: None,
    };
    let consumption = |used: &divvy_offer::CounterUse| DeviceCounterConsumption {
        counter_set: used.set.clone(),
        counters: counters(&used.counters),
        ..DeviceCounterConsumption::default()
    };
    Device {
        name: device.name.to_string(),
        attributes: full_map(
            device
                .attributes
                .iter()
                .map(|(name, value)| (naming.attribute(name).into_owned(), attribute(value)))
                .collect(),
        ),
        capacity: full_map(
            device
                .capacity
                .iter()
                .map(|(name, value)| (naming.capacity(name).into_owned(), capacity(value)))
                .collect(),
        ),
        taints: full(device.taints.iter().map(taint).collect()),
        consumes_counters: full(device.consumes.iter().map(consumption).collect()),
        allow_multiple_allocations: device.allow_multiple.then_some(true),
        ..Device::default()
    }
}

fn attribute(value: &AttributeValue) -> DeviceAttribute {
    let mut to = DeviceAttribute::default();
    match value {
        AttributeValue::Bool(value) => to.bool = Some(*value),
        AttributeValue::Int(value) => to.int = Some(*value),
        AttributeValue::String(value) => to.string = Some(value.clone()),
        AttributeValue::Version(value) => to.version = Some(value.clone()),
    }
    to
}

fn capacity(capacity: &Capacity) -> DeviceCapacity {
    DeviceCapacity {
        value: quantity(capacity.value),
        request_policy: capacity.policy.as_ref().map(policy),
    }
}

fn policy(policy: &RequestPolicy) -> CapacityRequestPolicy {
    let mut to = CapacityRequestPolicy {
        default: Some(quantity(policy.default)),
        ..CapacityRequestPolicy::default()
    };
    match &policy.allowed {
        Allowed::Any => {}
        Allowed::Values(values) => {
            to.valid_values = Some(values.iter().copied().map(quantity).collect());
        }
        Allowed::Range { min, max, step } => {
            to.valid_range = Some(CapacityRequestPolicyRange {
                min: quantity(*min),
                max: max.map(quantity),
                step: step.map(quantity),
            });
        }
    }
    to
}

/// A spec for comparing: without generation and count, without what the server adds or rewrites.
/// Two specs that mean the same are equal. `timeAdded` of taints is left out: we never ask for a
/// time.
pub fn comparable_spec(spec: &ResourceSliceSpec) -> ResourceSliceSpec {
    let mut spec = spec.clone();
    spec.pool.generation = 0;
    spec.pool.resource_slice_count = 0;
    // Empty and absent mean the same to the API, and either may be what it stores.
    drop_empty(&mut spec.devices);
    drop_empty(&mut spec.shared_counters);
    for set in spec.shared_counters.iter_mut().flatten() {
        set.counters
            .values_mut()
            .for_each(|counter| rewrite(&mut counter.value));
    }
    for device in spec.devices.iter_mut().flatten() {
        drop_empty(&mut device.taints);
        drop_empty(&mut device.consumes_counters);
        if device.attributes.as_ref().is_some_and(BTreeMap::is_empty) {
            device.attributes = None;
        }
        if device.capacity.as_ref().is_some_and(BTreeMap::is_empty) {
            device.capacity = None;
        }
        if device.allow_multiple_allocations == Some(false) {
            device.allow_multiple_allocations = None;
        }
        for taint in device.taints.iter_mut().flatten() {
            taint.time_added = None;
            taint.value = taint.value.take().filter(|value| !value.is_empty());
        }
        for used in device.consumes_counters.iter_mut().flatten() {
            used.counters
                .values_mut()
                .for_each(|counter| rewrite(&mut counter.value));
        }
        for capacity in device.capacity.iter_mut().flat_map(BTreeMap::values_mut) {
            rewrite(&mut capacity.value);
            let Some(policy) = &mut capacity.request_policy else {
                continue;
            };
            policy.default.iter_mut().for_each(rewrite);
            policy.valid_values.iter_mut().flatten().for_each(rewrite);
            if let Some(range) = &mut policy.valid_range {
                rewrite(&mut range.min);
                range
                    .max
                    .iter_mut()
                    .chain(range.step.iter_mut())
                    .for_each(rewrite);
            }
        }
    }
    spec
}

fn drop_empty<T>(list: &mut Option<Vec<T>>) {
    if list.as_ref().is_some_and(Vec::is_empty) {
        *list = None;
    }
}

/// The server stores `1024Mi` as `1Gi`, and that is no change. A text that cannot be read is equal
/// to itself only.
fn rewrite(quantity: &mut Quantity) {
    if let Ok(amount) = quantity.0.parse::<divvy_model::Quantity>() {
        quantity.0 = format!("{}n", amount.nanos());
    }
}

/// Returns true if two comparable specs differ in taints and attributes of the same devices only.
pub(crate) fn differ_softly(a: &ResourceSliceSpec, b: &ResourceSliceSpec) -> bool {
    let hard = |spec: &ResourceSliceSpec| {
        let mut spec = spec.clone();
        for device in spec.devices.iter_mut().flatten() {
            // These two are read device by device. Capacity, counters and names decide what fits
            // beside what, and are seen together.
            device.taints = None;
            device.attributes = None;
        }
        spec
    };
    hard(a) == hard(b)
}

/// Keeps the times of taints that stay: the eviction controller and people count from them.
pub(crate) fn keep_taint_times(spec: &mut ResourceSliceSpec, stored: &ResourceSliceSpec) {
    let by_name: BTreeMap<&str, &Device> = stored
        .devices
        .iter()
        .flatten()
        .map(|device| (device.name.as_str(), device))
        .collect();
    for device in spec.devices.iter_mut().flatten() {
        let Some(before) = by_name.get(device.name.as_str()) else {
            continue;
        };
        for taint in device.taints.iter_mut().flatten() {
            let value = |taint: &DeviceTaint| taint.value.clone().unwrap_or_default();
            let same = |t: &&DeviceTaint| {
                t.key == taint.key && t.effect == taint.effect && value(t) == value(taint)
            };
            taint.time_added = before
                .taints
                .iter()
                .flatten()
                .find(same)
                .and_then(|t| t.time_added.clone());
        }
    }
}

/// The features whose fields were sent and are not in what was stored.
pub(crate) fn dropped(sent: &ResourceSliceSpec, stored: &ResourceSliceSpec) -> BTreeSet<Feature> {
    let used = |spec: &ResourceSliceSpec| Uses::of(spec);
    let (sent, stored) = (used(sent), used(stored));
    Feature::ALL
        .into_iter()
        .filter(|feature| sent.of_feature(*feature) > stored.of_feature(*feature))
        .collect()
}

/// Number of times each feature's fields are used.
struct Uses {
    taints: usize,
    partitions: usize,
    shares: usize,
}

impl Uses {
    fn of(spec: &ResourceSliceSpec) -> Self {
        fn len<T>(list: Option<&Vec<T>>) -> usize {
            list.map_or(0, Vec::len)
        }
        let mut uses = Self {
            taints: 0,
            partitions: len(spec.shared_counters.as_ref()),
            shares: 0,
        };
        for device in spec.devices.iter().flatten() {
            uses.taints += len(device.taints.as_ref());
            uses.partitions += len(device.consumes_counters.as_ref());
            let policies = device
                .capacity
                .iter()
                .flatten()
                .filter(|(_, c)| c.request_policy.is_some())
                .count();
            uses.shares += policies + usize::from(device.allow_multiple_allocations == Some(true));
        }
        uses
    }

    fn of_feature(&self, feature: Feature) -> usize {
        match feature {
            Feature::Taints => self.taints,
            Feature::Partitions => self.partitions,
            Feature::Shares => self.shares,
        }
    }
}
