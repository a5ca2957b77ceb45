//! The counters of a pool, numbered, and what its devices consume of them.
//!
//! Names and amounts are read once, when the slices are indexed: a search only adds and compares
//! numbers.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Raw;

use divvy_model::Quantity;

/// A counter of a pool.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counter<'a> {
    pub(crate) set: &'a str,
    pub(crate) name: &'a str,
    /// Amount that there is of it, in billionths.
    pub(crate) declared: i128,
}

/// Amount of a counter of its pool that a device consumes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Charge {
    /// The counter's number in the pool.
    pub(crate) counter: usize,
    /// In billionths.
    pub(crate) amount: i128,
}

/// Computes what a device consumes, each counter once, in order.
pub(crate) type Charges = Arc<[Charge]>;

/// The counters of a pool and how they are found by name.
#[derive(Debug, Default)]
pub(super) struct Table<'a> {
    pub(super) counters: Vec<Counter<'a>>,
    numbers: BTreeMap<&'a str, BTreeMap<&'a str, usize>>,
}

impl<'a> Table<'a> {
    /// The counters that the slices declare, or what is wrong with them.
    pub(super) fn read(slices: &[&'a ResourceSlice]) -> Result<Self, String> {
        let mut table = Self::default();
        for set in slices
            .iter()
            .flat_map(|s| s.spec.shared_counters.iter().flatten())
        {
            let mut numbers = BTreeMap::new();
            for (name, counter) in &set.counters {
                let declared = amount(&counter.value)
                    .map_err(|e| format!("counter {name} of counter set {}: {e}", set.name))?;
                numbers.insert(name.as_str(), table.counters.len());
                table.counters.push(Counter {
                    set: &set.name,
                    name,
                    declared,
                });
            }
            if table.numbers.insert(&set.name, numbers).is_some() {
                return Err(format!("duplicate counter set name {}", set.name));
            }
        }
        Ok(table)
    }

    /// Returns what a device consumes; `None` when it consumes nothing.
    pub(super) fn charges(&self, device: &Device) -> Result<Option<Charges>, String> {
        let mut charges: BTreeMap<usize, i128> = BTreeMap::new();
        let consumptions = device.consumes_counters.as_deref().unwrap_or_default();
        for consumption in consumptions {
            let (device, set) = (&device.name, &consumption.counter_set);
            let Some(numbers) = self.numbers.get(set.as_str()) else {
                return Err(format!(
                    "device {device} references unknown counter set {set}"
                ));
            };
            for (name, counter) in &consumption.counters {
                let Some(number) = numbers.get(name.as_str()) else {
                    return Err(format!(
                        "device {device} references unknown counter {name} in counter set {set}"
                    ));
                };
                let wanted = amount(&counter.value)
                    .map_err(|e| format!("device {device}, counter {name}: {e}"))?;
                let sum = charges.entry(*number).or_default();
                *sum = sum.saturating_add(wanted);
            }
        }
        if consumptions.is_empty() {
            return Ok(None);
        }
        Ok(Some(
            charges
                .into_iter()
                .map(|(counter, amount)| Charge { counter, amount })
                .collect(),
        ))
    }
}

/// Says whether a device of the slice has compatibility groups, which need the alpha gate
/// `DRADeviceCompatibilityGroups`.
pub(super) fn has_groups(slice: &ResourceSlice) -> bool {
    let consumed =
        super::devices(&slice.spec).flat_map(|device| device.consumes_counters.iter().flatten());
    consumed
        .flat_map(|consumption| &consumption.compatibility_groups)
        .any(|groups| !groups.is_empty())
}

/// An amount in billionths; most are small whole numbers.
fn amount(raw: &Raw) -> Result<i128, divvy_model::QuantityError> {
    match raw.0.parse::<u32>() {
        Ok(units) if !raw.0.starts_with('+') => Ok(i128::from(units) * 1_000_000_000),
        _ => raw.0.parse::<Quantity>().map(|q| q.nanos()),
    }
}
