//! Every limit of `resource.k8s.io/v1` ResourceSlices, checked before anything is sent: the server
//! would refuse the slice with a message that names an index, and the node would have no devices
//! until an administrator reads it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_forms::{MAX_INTEGER, MAX_STRING};

use crate::{Allowed, Amount, AttributeValue, Capacity, CounterUse, Device, Pool, Slice, Taint};

// The limits of `resource.k8s.io/v1`, from its types (`k8s.io/api/resource/v1/types.go`) and their
// validation.
pub(crate) const MAX_POOL_NAME: usize = 253;
pub(crate) const MAX_TAINTS: usize = 16;
/// Devices in a slice in which any device has taints or consumes counters.
pub(crate) const MAX_DEVICES_TAINTED: u32 = 64;
const MAX_DEVICES: usize = 128;
pub(crate) const MAX_COUNTER_SETS: usize = 8;
pub(crate) const MAX_COUNTERS: usize = 32;
const MAX_CONSUMED_SETS: usize = 2;
const MAX_VALUES: usize = 32;
const MAX_ALLOWED_VALUES: usize = 10;
const MAX_SUBDOMAIN: usize = 253;
const MAX_LABEL: usize = 63;
const MAX_IDENTIFIER: usize = 32;

/// The limit that is broken.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Limit {
    /// More of something than the API takes.
    #[error("{found} {what}, the API takes {max}")]
    TooMany {
        what: &'static str,
        found: usize,
        /// The number that is allowed.
        max: usize,
    },
    /// A name or value that is not of the form the API wants.
    #[error("{text:?} is not {expected}")]
    Malformed {
        text: String,
        expected: &'static str,
    },
    /// A name that must be unique and is not.
    #[error("the {what} {name:?} is there twice")]
    Duplicate { what: &'static str, name: String },
    /// A reference to something that is not in the pool.
    #[error("the {what} {name:?} is not in the pool")]
    Unknown { what: &'static str, name: String },
    /// A request policy that contradicts itself or its capacity.
    #[error("the request policy is not valid: {0}")]
    Policy(&'static str),
    /// Devices and counter sets in one slice.
    #[error("devices and counter sets are in one slice")]
    Mixed,
}

/// A pool the API server would refuse: where, and which limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the pool cannot be published: {at}: {limit}")]
pub struct LimitError {
    /// Where: slice, device and field.
    pub at: String,
    /// The limit that is broken there.
    pub limit: Limit,
}

type Check = Result<(), Limit>;

/// Checks a pool against every limit of the API; the first broken one is the answer.
pub fn validate(pool: &Pool) -> Result<(), LimitError> {
    let at_pool = |limit| LimitError {
        at: format!("pool {:?}", pool.name),
        limit,
    };
    let ok = pool.name.len() <= MAX_POOL_NAME && pool.name.split('/').all(is_subdomain);
    form(
        ok,
        &pool.name,
        "a pool name (at most 253 characters, DNS subdomains joined by /)",
    )
    .map_err(at_pool)?;
    // Sets of all slices first: a device may draw on a set in any of them.
    let mut sets: BTreeMap<&str, &BTreeMap<String, Amount>> = BTreeMap::new();
    for set in pool.slices.iter().flat_map(|slice| &slice.counter_sets) {
        if sets.insert(&set.name, &set.counters).is_some() {
            return Err(at_pool(Limit::Duplicate {
                what: "counter set",
                name: set.name.clone(),
            }));
        }
    }
    // Then slice by slice. Names are unique in the pool, not in the slice.
    let mut names = BTreeSet::new();
    for (index, slice) in pool.slices.iter().enumerate() {
        check_slice(slice).map_err(|limit| LimitError {
            at: format!("slice {index}"),
            limit,
        })?;
        for set in &slice.counter_sets {
            check_counters(&set.name, &set.counters).map_err(|limit| LimitError {
                at: format!("counter set {:?}", set.name),
                limit,
            })?;
        }
        for device in &slice.devices {
            let at = |field: &str| format!("device {}{field}", device.name);
            if !names.insert(&device.name) {
                let limit = Limit::Duplicate {
                    what: "device",
                    name: device.name.to_string(),
                };
                return Err(LimitError {
                    at: format!("slice {index}"),
                    limit,
                });
            }
            check_device(device).map_err(|(field, limit)| LimitError {
                at: at(&field),
                limit,
            })?;
            check_consumption(&device.consumes, &sets).map_err(|limit| LimitError {
                at: at(", consumes"),
                limit,
            })?;
        }
    }
    Ok(())
}

fn form(ok: bool, text: &str, expected: &'static str) -> Check {
    if ok {
        Ok(())
    } else {
        Err(Limit::Malformed {
            text: text.to_owned(),
            expected,
        })
    }
}

fn at_most(what: &'static str, found: usize, max: usize) -> Check {
    if found <= max {
        Ok(())
    } else {
        Err(Limit::TooMany { what, found, max })
    }
}

fn check_slice(slice: &Slice) -> Check {
    if !slice.devices.is_empty() && !slice.counter_sets.is_empty() {
        return Err(Limit::Mixed);
    }
    at_most("counter sets", slice.counter_sets.len(), MAX_COUNTER_SETS)?;
    at_most("devices", slice.devices.len(), MAX_DEVICES)?;
    if slice
        .devices
        .iter()
        .any(|device| !device.taints.is_empty() || !device.consumes.is_empty())
    {
        let max = usize::try_from(MAX_DEVICES_TAINTED).unwrap_or(usize::MAX);
        at_most(
            "devices (some with taints or counters)",
            slice.devices.len(),
            max,
        )?;
    }
    Ok(())
}

fn check_counters(set: &str, counters: &BTreeMap<String, Amount>) -> Check {
    form(is_label(set), set, "a DNS label")?;
    at_most("counters", counters.len(), MAX_COUNTERS)?;
    if counters.is_empty() {
        return form(false, set, "a set with at least one counter");
    }
    for (name, amount) in counters {
        form(is_label(name), name, "a DNS label")?;
        form(
            amount.value() <= MAX_INTEGER,
            &amount.to_string(),
            "an amount of at most 63 bits",
        )?;
    }
    Ok(())
}

fn check_device(device: &Device) -> Result<(), (String, Limit)> {
    let whole = |limit| (String::new(), limit);
    at_most(
        "attributes and capacities",
        device.attributes.len() + device.capacity.len(),
        MAX_VALUES,
    )
    .map_err(whole)?;
    at_most("taints", device.taints.len(), MAX_TAINTS).map_err(whole)?;
    for (name, value) in &device.attributes {
        check_key(name)
            .and_then(|()| check_attribute(value))
            .map_err(|l| (format!(", attribute {name:?}"), l))?;
    }
    for (name, capacity) in &device.capacity {
        check_key(name)
            .and_then(|()| check_capacity(capacity, device.allow_multiple))
            .map_err(|l| (format!(", capacity {name:?}"), l))?;
    }
    for taint in &device.taints {
        check_taint(taint).map_err(|l| (format!(", taint {:?}", taint.key), l))?;
    }
    Ok(())
}

fn check_key(name: &str) -> Check {
    let ok = match name.split_once('/') {
        Some((domain, id)) => {
            domain.len() <= MAX_LABEL && is_subdomain(domain) && is_identifier(id)
        }
        None => is_identifier(name),
    };
    form(
        ok,
        name,
        "a qualified name (a C identifier of at most 32 characters, with or without a domain)",
    )
}

fn check_attribute(value: &AttributeValue) -> Check {
    match value {
        AttributeValue::Bool(_) | AttributeValue::Int(_) => Ok(()),
        AttributeValue::String(text) => {
            form(text.len() <= MAX_STRING, text, "a text of at most 64 bytes")
        }
        AttributeValue::Version(text) => form(
            text.len() <= MAX_STRING && semver::Version::parse(text).is_ok(),
            text,
            "a semantic version of at most 64 bytes",
        ),
    }
}

fn check_capacity(capacity: &Capacity, allow_multiple: bool) -> Check {
    let total = capacity.value.value();
    form(
        total <= MAX_INTEGER,
        &capacity.value.to_string(),
        "an amount of at most 63 bits",
    )?;
    let Some(policy) = &capacity.policy else {
        return Ok(());
    };
    let rule = |ok: bool, broken: &'static str| {
        if ok {
            Ok(())
        } else {
            Err(Limit::Policy(broken))
        }
    };
    let default = policy.default.value();
    rule(
        allow_multiple,
        "the device does not allow multiple allocations",
    )?;
    rule(default <= total, "the default is over the capacity")?;
    match &policy.allowed {
        Allowed::Any => Ok(()),
        Allowed::Values(values) => {
            at_most("valid values", values.len(), MAX_ALLOWED_VALUES)?;
            rule(
                values.is_sorted_by(|a, b| a.value() < b.value()),
                "the valid values do not ascend",
            )?;
            rule(
                values.iter().all(|v| v.value() <= total),
                "a valid value is over the capacity",
            )?;
            rule(
                values.iter().any(|v| v.value() == default),
                "the default is not a valid value",
            )
        }
        Allowed::Range { min, max, step } => {
            let (min, max_or_total) = (min.value(), max.map_or(total, Amount::value));
            rule(min <= default, "the default is under the minimum")?;
            rule(default <= max_or_total, "the default is over the maximum")?;
            rule(max_or_total <= total, "the maximum is over the capacity")?;
            let Some(step) = step.map(Amount::value) else {
                return Ok(());
            };
            rule(step > 0, "the step is zero")?;
            rule(
                min.saturating_add(step) <= total,
                "the minimum and one step are over the capacity",
            )?;
            rule(
                (default - min).is_multiple_of(step),
                "the default is not a number of steps above the minimum",
            )?;
            let whole_steps = max.is_none() || (max_or_total - min).is_multiple_of(step);
            rule(
                whole_steps,
                "the maximum is not a number of steps above the minimum",
            )
        }
    }
}

fn check_taint(taint: &Taint) -> Check {
    form(is_label_key(&taint.key), &taint.key, "a label key")?;
    let value = taint.value.as_deref().unwrap_or_default();
    form(is_label_value(value), value, "a label value")
}

fn check_consumption(
    uses: &[CounterUse],
    sets: &BTreeMap<&str, &BTreeMap<String, Amount>>,
) -> Check {
    at_most("counter sets consumed", uses.len(), MAX_CONSUMED_SETS)?;
    let mut seen = BTreeSet::new();
    for CounterUse { set, counters } in uses {
        if !seen.insert(set) {
            return Err(Limit::Duplicate {
                what: "counter set",
                name: set.clone(),
            });
        }
        check_counters(set, counters)?;
        let unknown = |what, name: &String| Limit::Unknown {
            what,
            name: name.clone(),
        };
        let known = sets
            .get(set.as_str())
            .ok_or_else(|| unknown("counter set", set))?;
        if let Some(name) = counters.keys().find(|name| !known.contains_key(*name)) {
            return Err(unknown("counter", name));
        }
    }
    Ok(())
}

fn is_label(text: &str) -> bool {
    let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    let ends_well = !text.starts_with('-') && !text.ends_with('-');
    (1..=MAX_LABEL).contains(&text.len()) && ends_well && text.bytes().all(inner)
}

/// A DNS subdomain. Unlike a label's 63, the API puts no limit on its parts.
fn is_subdomain(text: &str) -> bool {
    let part = |part: &str| {
        let inner = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        !part.is_empty()
            && !part.starts_with('-')
            && !part.ends_with('-')
            && part.bytes().all(inner)
    };
    text.len() <= MAX_SUBDOMAIN && text.split('.').all(part)
}

fn is_identifier(text: &str) -> bool {
    text.len() <= MAX_IDENTIFIER
        && text
            .bytes()
            .next()
            .is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// A label name: letters, digits, `-`, `_` and `.`, ends a letter or digit.
fn is_label_name(text: &str) -> bool {
    let end = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    text.len() <= MAX_LABEL
        && end(text.bytes().next())
        && end(text.bytes().last())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
}

fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && is_label_name(name),
        None => is_label_name(text),
    }
}

fn is_label_value(text: &str) -> bool {
    text.is_empty() || is_label_name(text)
}

#[cfg(test)]
mod tests;
