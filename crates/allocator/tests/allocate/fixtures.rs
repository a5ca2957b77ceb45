//! Devices with counters and capacities, claims with constraints.

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, CapacityRequirements, Counter, CounterSet,
    DeviceCapacity, DeviceConstraint, DeviceCounterConsumption, DeviceRequestAllocationResult,
    ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Raw;

use super::*;

pub(super) fn raw(text: &str) -> Raw {
    Raw(text.to_owned())
}

/// `{memory=10Gi,slots=1}` of a share; nothing for a whole device.
pub(super) fn amounts(result: &DeviceRequestAllocationResult) -> String {
    assert!(
        result.share_id.is_some() || result.consumed_capacity.is_none(),
        "{result:?}"
    );
    let Some(consumed) = &result.consumed_capacity else {
        return String::new();
    };
    let all: Vec<String> = consumed
        .iter()
        .map(|(name, amount)| format!("{name}={}", amount.0))
        .collect();
    format!("{{{}}}", all.join(","))
}

pub(super) fn allocated(mut claim: ResourceClaim, result: AllocationResult) -> ResourceClaim {
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(result),
        ..ResourceClaimStatus::default()
    });
    claim
}

fn counters(amounts: &[(&str, &str)]) -> std::collections::BTreeMap<String, Counter> {
    amounts
        .iter()
        .map(|(name, value)| ((*name).to_owned(), Counter { value: raw(value) }))
        .collect()
}

/// The device consuming these counters of a set, beside what it consumes already.
pub(super) fn drawing(mut device: Device, set: &str, amounts: &[(&str, &str)]) -> Device {
    device
        .consumes_counters
        .get_or_insert_default()
        .push(DeviceCounterConsumption {
            counter_set: set.to_owned(),
            counters: counters(amounts),
            ..DeviceCounterConsumption::default()
        });
    device
}

/// A slice that declares counter sets and nothing else.
pub(super) fn sets(sets: &[(&str, &[(&str, &str)])]) -> ResourceSlice {
    let sets = sets.iter().map(|(name, amounts)| CounterSet {
        name: (*name).to_owned(),
        counters: counters(amounts),
    });
    with(slice_of(Vec::new()), |s| {
        s.metadata.name = Some("slice-0-counters".to_owned());
        s.spec.devices = None;
        s.spec.shared_counters = Some(sets.collect());
    })
}

/// The slices as one pool.
pub(super) fn one_pool(slices: Vec<ResourceSlice>) -> Vec<ResourceSlice> {
    let count = i64::try_from(slices.len()).unwrap();
    let numbered = slices.into_iter().enumerate();
    numbered
        .map(|(index, slice)| {
            with(slice, |s| {
                s.metadata.name = Some(format!("slice-{index}"));
                s.spec.pool.resource_slice_count = count;
            })
        })
        .collect()
}

/// A capacity without a policy.
pub(super) fn amount(value: &str) -> DeviceCapacity {
    DeviceCapacity {
        value: raw(value),
        request_policy: None,
    }
}

/// A capacity of which a request gets `default`, or a multiple of `step` from `min` to `max`.
pub(super) fn ranged(
    value: &str,
    default: &str,
    min: &str,
    max: &str,
    step: &str,
) -> DeviceCapacity {
    let optional = |text: &str| (!text.is_empty()).then(|| raw(text));
    let range = CapacityRequestPolicyRange {
        min: raw(min),
        max: optional(max),
        step: optional(step),
    };
    let policy = CapacityRequestPolicy {
        default: optional(default),
        valid_range: Some(range),
        valid_values: None,
    };
    DeviceCapacity {
        value: raw(value),
        request_policy: Some(policy),
    }
}

/// A capacity of which a request gets one of `values`.
pub(super) fn listed(value: &str, default: &str, values: &[&str]) -> DeviceCapacity {
    let policy = CapacityRequestPolicy {
        default: Some(raw(default)),
        valid_range: None,
        valid_values: Some(values.iter().map(|v| raw(v)).collect()),
    };
    DeviceCapacity {
        value: raw(value),
        request_policy: Some(policy),
    }
}

pub(super) fn having(mut device: Device, capacities: &[(&str, DeviceCapacity)]) -> Device {
    device.capacity = Some(
        capacities
            .iter()
            .map(|(name, c)| ((*name).to_owned(), c.clone()))
            .collect(),
    );
    device
}

/// The device, open to several claims.
pub(super) fn shared(device: Device, capacities: &[(&str, DeviceCapacity)]) -> Device {
    Device {
        allow_multiple_allocations: Some(true),
        ..having(device, capacities)
    }
}

/// Capacities that a request wants.
pub(super) fn requirements(amounts: &[(&str, &str)]) -> CapacityRequirements {
    let requests = amounts
        .iter()
        .map(|(name, value)| ((*name).to_owned(), raw(value)));
    CapacityRequirements {
        requests: Some(requests.collect()),
    }
}

pub(super) fn wanting(
    name: &str,
    class: &str,
    count: i64,
    amounts: &[(&str, &str)],
) -> DeviceRequest {
    exact(name, class, |r| {
        r.count = Some(count);
        r.capacity = Some(requirements(amounts));
    })
}

fn constrained(
    mut claim: ResourceClaim,
    attribute: &str,
    requests: &[&str],
    set: fn(&mut DeviceConstraint, String),
) -> ResourceClaim {
    let requests = requests.iter().map(|r| (*r).to_owned()).collect();
    let mut constraint = DeviceConstraint {
        requests: Some(requests),
        ..DeviceConstraint::default()
    };
    set(&mut constraint, attribute.to_owned());
    let devices = claim
        .spec
        .as_mut()
        .and_then(|s| s.devices.as_mut())
        .unwrap();
    devices.constraints.get_or_insert_default().push(constraint);
    claim
}

/// The claim with its devices alike in an attribute; no requests means all.
pub(super) fn matching(claim: ResourceClaim, attribute: &str, requests: &[&str]) -> ResourceClaim {
    constrained(claim, attribute, requests, |c, a| {
        c.match_attribute = Some(a);
    })
}

/// The claim with its devices different in an attribute.
pub(super) fn differing(claim: ResourceClaim, attribute: &str, requests: &[&str]) -> ResourceClaim {
    constrained(claim, attribute, requests, |c, a| {
        c.distinct_attribute = Some(a);
    })
}

/// The device with an attribute.
pub(super) fn with_attribute(mut device: Device, name: &str, attribute: DeviceAttribute) -> Device {
    device
        .attributes
        .get_or_insert_default()
        .insert(name.to_owned(), attribute);
    device
}

pub(super) fn text(value: &str) -> DeviceAttribute {
    DeviceAttribute {
        string: Some(value.to_owned()),
        ..DeviceAttribute::default()
    }
}
