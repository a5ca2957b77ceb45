//! ResourceSlices.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::{
    Device, DeviceAttribute, DeviceCapacity, ResourceSlice, ResourceSliceSpec,
};
use serde_json::Value;

use super::super::quantity::Quantity;
use super::{Problems, is_label, is_qualified_name, is_semver, is_subdomain};

pub(super) fn check(problems: &mut Problems, old: Option<&Value>, new: &Value) {
    let Ok(new) = serde_json::from_value::<ResourceSlice>(new.clone()) else {
        return problems.add("spec", "Required value");
    };
    let old = old.and_then(|old| serde_json::from_value::<ResourceSlice>(old.clone()).ok());
    let spec = &new.spec;
    if let Some(old) = old.map(|old| old.spec) {
        problems.immutable("spec.driver", &old.driver, &spec.driver);
        problems.immutable("spec.pool.name", &old.pool.name, &spec.pool.name);
        problems.immutable("spec.nodeName", &old.node_name, &spec.node_name);
    }
    problems.unless(is_subdomain(&spec.driver, 63), "spec.driver", "Invalid value: must be a DNS subdomain");
    let pool_ok =
        spec.pool.name.len() <= 253 && spec.pool.name.split('/').all(|part| is_subdomain(part, 253));
    problems.unless(pool_ok, "spec.pool.name", "Invalid value: must be DNS subdomains separated by slashes");
    problems.unless(spec.pool.generation >= 0, "spec.pool.generation", "Invalid value: must not be negative");
    let counted = spec.pool.resource_slice_count > 0;
    problems.unless(counted, "spec.pool.resourceSliceCount", "Invalid value: must be greater than zero");
    node(problems, spec);
    counters(problems, spec);
    devices(problems, spec);
}

fn node(problems: &mut Problems, spec: &ResourceSliceSpec) {
    let given = [
        spec.node_name.is_some(),
        spec.node_selector.is_some(),
        spec.all_nodes.is_some(),
        spec.per_device_node_selection.is_some(),
    ];
    if given.iter().filter(|set| **set).count() != 1 {
        let names = "`nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection`";
        problems.add("spec", format!("Invalid value: exactly one of {names} is required"));
    }
    problems.unless(
        spec.node_name.as_deref() != Some(""),
        "spec.nodeName",
        "Required value: must not be empty",
    );
    problems.unless(
        spec.all_nodes != Some(false),
        "spec.allNodes",
        "Invalid value: must be either unset or true",
    );
    let per_device = spec.per_device_node_selection != Some(false);
    problems.unless(per_device, "spec.perDeviceNodeSelection", "Invalid value: must be either unset or true");
    let terms = spec.node_selector.as_ref().map_or(1, |s| s.node_selector_terms.len());
    problems.unless(
        terms == 1,
        "spec.nodeSelector.nodeSelectorTerms",
        "Invalid value: must have exactly one term",
    );
}

fn counters(problems: &mut Problems, spec: &ResourceSliceSpec) {
    let sets = spec.shared_counters.as_deref().unwrap_or_default();
    let devices = spec.devices.as_deref().unwrap_or_default();
    if !sets.is_empty() && !devices.is_empty() {
        problems.add("spec", "Invalid value: only one of `sharedCounters` or `devices` is allowed");
    }
    problems.too_many("spec.sharedCounters", sets.len(), 8);
    let mut names = BTreeSet::new();
    for (i, set) in sets.iter().enumerate() {
        let path = format!("spec.sharedCounters[{i}]");
        problems.unless(is_label(&set.name), format!("{path}.name"), "Invalid value: must be a DNS label");
        problems.unless(
            names.insert(&set.name),
            format!("{path}.name"),
            format!("Duplicate value: {}", set.name),
        );
        problems.unless(!set.counters.is_empty(), format!("{path}.counters"), "Required value");
        problems.too_many(format!("{path}.counters"), set.counters.len(), 32);
        for name in set.counters.keys() {
            problems.unless(
                is_label(name),
                format!("{path}.counters[{name}]"),
                "Invalid value: must be a DNS label",
            );
        }
    }
}

fn devices(problems: &mut Problems, spec: &ResourceSliceSpec) {
    let devices = spec.devices.as_deref().unwrap_or_default();
    let has_list = |a: &DeviceAttribute| {
        a.ints.is_some() || a.bools.is_some() || a.strings.is_some() || a.versions.is_some()
    };
    let costly = devices.iter().any(|d| {
        d.taints.as_ref().is_some_and(|t| !t.is_empty())
            || d.consumes_counters.as_ref().is_some_and(|c| !c.is_empty())
            || d.attributes.iter().flatten().any(|(_, a)| has_list(a))
    });
    problems.too_many("spec.devices", devices.len(), if costly { 64 } else { 128 });
    let mut names = BTreeSet::new();
    for (i, device) in devices.iter().enumerate() {
        let path = format!("spec.devices[{i}]");
        problems.unless(is_label(&device.name), format!("{path}.name"), "Invalid value: must be a DNS label");
        let unique = names.insert(&device.name);
        problems.unless(unique, format!("{path}.name"), format!("Duplicate value: \"{}\"", device.name));
        one_device(problems, &path, device, spec.per_device_node_selection.is_some());
    }
}

fn one_device(problems: &mut Problems, path: &str, device: &Device, own_node: bool) {
    let nodes = [device.node_name.is_some(), device.node_selector.is_some(), device.all_nodes.is_some()];
    let nodes = nodes.iter().filter(|set| **set).count();
    let expected = usize::from(own_node);
    problems.unless(
        nodes == expected,
        path,
        format!("Invalid value: expected {expected} node fields, found {nodes}"),
    );
    let attributes = device.attributes.iter().flatten();
    let capacity = device.capacity.iter().flatten();
    let entries = attributes.clone().count() + capacity.clone().count();
    let message =
        format!("Invalid value: {entries}: the total number of attributes and capacities must not exceed 32");
    problems.unless(entries <= 32, path, message);
    let values: usize = attributes.clone().map(|(_, a)| value_count(a)).sum();
    problems.unless(values <= 48, path, format!("Invalid value: {values}: at most 48 attribute values"));
    for (name, value) in attributes {
        let path = format!("{path}.attributes[{name}]");
        problems.unless(
            is_qualified_name(name),
            &path,
            "Invalid value: must be a C identifier or domain/identifier",
        );
        attribute(problems, &path, value);
    }
    for (name, value) in capacity {
        let path = format!("{path}.capacity[{name}]");
        problems.unless(
            is_qualified_name(name),
            &path,
            "Invalid value: must be a C identifier or domain/identifier",
        );
        policy(problems, &path, value, device.allow_multiple_allocations == Some(true));
    }
    let consumes = device.consumes_counters.as_deref().unwrap_or_default();
    problems.too_many(format!("{path}.consumesCounters"), consumes.len(), 2);
    let mut sets = BTreeSet::new();
    for (i, use_) in consumes.iter().enumerate() {
        let path = format!("{path}.consumesCounters[{i}]");
        let unique = sets.insert(&use_.counter_set);
        problems.unless(unique, &path, format!("Duplicate value: {}", use_.counter_set));
        problems.unless(!use_.counters.is_empty(), format!("{path}.counters"), "Required value");
        problems.too_many(format!("{path}.counters"), use_.counters.len(), 32);
    }
    let taints = device.taints.as_deref().unwrap_or_default();
    problems.too_many(format!("{path}.taints"), taints.len(), 16);
    for (i, taint) in taints.iter().enumerate() {
        let known = matches!(taint.effect.as_str(), "None" | "NoSchedule" | "NoExecute");
        let message = format!("Unsupported value: \"{}\"", taint.effect);
        problems.unless(known, format!("{path}.taints[{i}].effect"), message);
        problems.unless(!taint.key.is_empty(), format!("{path}.taints[{i}].key"), "Required value");
    }
    let conditions = device.binding_conditions.as_deref().unwrap_or_default();
    problems.too_many(format!("{path}.bindingConditions"), conditions.len(), 4);
    let failures = device.binding_failure_conditions.as_deref().unwrap_or_default();
    problems.too_many(format!("{path}.bindingFailureConditions"), failures.len(), 4);
    let paired = conditions.is_empty() == failures.is_empty();
    problems.unless(
        paired,
        format!("{path}.bindingConditions"),
        "Invalid value: both condition lists are needed",
    );
}

fn value_count(attribute: &DeviceAttribute) -> usize {
    fn len<T>(list: Option<&Vec<T>>) -> usize {
        list.map_or(0, Vec::len)
    }
    let a = attribute;
    let lists =
        len(a.ints.as_ref()) + len(a.bools.as_ref()) + len(a.strings.as_ref()) + len(a.versions.as_ref());
    let scalars = [a.int.is_some(), a.bool.is_some(), a.string.is_some(), a.version.is_some()];
    lists + scalars.iter().filter(|set| **set).count()
}

fn attribute(problems: &mut Problems, path: &str, value: &DeviceAttribute) {
    let a = value;
    let given = [
        a.int.is_some(),
        a.bool.is_some(),
        a.string.is_some(),
        a.version.is_some(),
        a.ints.is_some(),
        a.bools.is_some(),
        a.strings.is_some(),
        a.versions.is_some(),
    ];
    let given = given.iter().filter(|set| **set).count();
    problems.unless(
        given == 1,
        path,
        format!("Invalid value: exactly one value must be specified, found {given}"),
    );
    for text in a.string.iter().chain(a.strings.iter().flatten()) {
        problems.unless(
            text.len() <= 64,
            format!("{path}.string"),
            "Too long: may not be more than 64 bytes",
        );
    }
    for text in a.version.iter().chain(a.versions.iter().flatten()) {
        let message =
            format!("Invalid value: \"{text}\": must be a string compatible with semver.org spec 2.0.0");
        problems.unless(text.len() <= 64 && is_semver(text), format!("{path}.version"), message);
    }
}

fn policy(problems: &mut Problems, path: &str, capacity: &DeviceCapacity, shared: bool) {
    let Some(policy) = &capacity.request_policy else { return };
    let path = format!("{path}.requestPolicy");
    problems.unless(shared, &path, "Forbidden: allowMultipleAllocations must be true");
    let amount = |q: &k8s_openapi::apimachinery::pkg::api::resource::Quantity| Quantity::parse(&q.0);
    let total = amount(&capacity.value);
    let default = policy.default.as_ref().and_then(amount);
    let above = |q: Option<Quantity>| q.zip(total).is_some_and(|(q, total)| q > total);
    problems.unless(!above(default), format!("{path}.default"), "Invalid value: more than the capacity");
    match (&policy.valid_values, &policy.valid_range) {
        (Some(_), Some(_)) => problems.add(&path, "Forbidden: only one of `validValues` and `validRange`"),
        (Some(values), None) => {
            let values: Vec<_> = values.iter().map(amount).collect();
            problems.too_many(format!("{path}.validValues"), values.len(), 10);
            problems.unless(
                values.is_sorted(),
                format!("{path}.validValues"),
                "Invalid value: must be sorted",
            );
            problems.unless(
                default.is_some() && values.contains(&default),
                format!("{path}.default"),
                "Invalid value: must be one of the valid values",
            );
            problems.unless(
                !values.iter().any(|v| above(*v)),
                &path,
                "Invalid value: more than the capacity",
            );
        }
        (None, Some(range)) => {
            let (min, max) = (amount(&range.min), range.max.as_ref().and_then(amount));
            problems.unless(min.is_some(), format!("{path}.validRange.min"), "Required value");
            let within = default.is_some() && min <= default && max.is_none_or(|max| default <= Some(max));
            problems.unless(
                within,
                format!("{path}.default"),
                "Invalid value: must lie within the valid range",
            );
            problems.unless(
                !above(max),
                format!("{path}.validRange.max"),
                "Invalid value: more than the capacity",
            );
        }
        (None, None) => {}
    }
}
