//! Consumable capacity: how much of a device's capacities a request consumes.
//!
//! A request names an amount or none; the device's request policy rounds it up or fills it in.
//! Everything is computed in billionths, exactly; where the scheduler counts whole or thousandth
//! units, amounts are rounded to those first, as it does.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequestPolicy, CapacityRequestPolicyRange, CapacityRequirements, Device, DeviceCapacity,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Raw;

use divvy_model::{Format, Quantity};

/// Billionths in a unit, and in a thousandth.
const ONE: i128 = 1_000_000_000;
const MILLI: i128 = 1_000_000;

/// Demand of a request for one capacity of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Demand<'a> {
    pub(crate) capacity: &'a str,
    pub(crate) amount: Quantity,
    /// Amount that the device has.
    pub(crate) total: Quantity,
}

/// Why the device can never satisfy the request, independent of other users.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Unfit<'a> {
    /// It does not have the capacity.
    Missing(&'a str),
    /// The amount breaks the policy of the capacity.
    Policy(&'a str, Quantity),
    /// There is less of the capacity than that.
    Short(Demand<'a>),
}

/// Reason why an amount cannot be computed: the capacity, and its fault.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Incomputable {
    pub(crate) capacity: String,
    pub(crate) problem: String,
}

/// Computes what the request consumes of every capacity of the device, in the order of their names.
pub(crate) fn demands<'a>(
    wanted: Option<&'a CapacityRequirements>,
    device: &'a Device,
    fractions: bool,
) -> Result<Result<Vec<Demand<'a>>, Unfit<'a>>, Incomputable> {
    static NONE: BTreeMap<String, DeviceCapacity> = BTreeMap::new();
    let capacities = device.capacity.as_ref().unwrap_or(&NONE);
    let wanted = wanted.and_then(|w| w.requests.as_ref());
    if let Some(missing) = wanted
        .into_iter()
        .flat_map(|w| w.keys())
        .find(|name| !capacities.contains_key(*name))
    {
        return Ok(Err(Unfit::Missing(missing)));
    }
    // First all amounts: one that cannot be computed is an error, whatever the others are.
    let mut demands = Vec::with_capacity(capacities.len());
    for (name, capacity) in capacities {
        let error = |problem: String| Incomputable {
            capacity: name.clone(),
            problem,
        };
        let total = read(&capacity.value).map_err(error)?;
        let asked = wanted
            .and_then(|w| w.get(name))
            .map(read)
            .transpose()
            .map_err(error)?;
        let amount =
            amount(asked, &total, capacity.request_policy.as_ref(), fractions).map_err(error)?;
        if amount.signum() < 0 {
            return Err(error(format!("{amount} is negative")));
        }
        demands.push(Demand {
            capacity: name,
            amount,
            total,
        });
    }
    for (demand, capacity) in demands.iter().zip(capacities.values()) {
        let policy = capacity.request_policy.as_ref();
        let name = demand.capacity;
        if breaks(&demand.amount, policy, fractions).map_err(|p| Incomputable {
            capacity: name.to_owned(),
            problem: p,
        })? {
            return Ok(Err(Unfit::Policy(name, demand.amount)));
        }
        if demand.amount > demand.total {
            return Ok(Err(Unfit::Short(demand.clone())));
        }
    }
    Ok(Ok(demands))
}

fn read(raw: &Raw) -> Result<Quantity, String> {
    if raw.0.is_empty() {
        // A value that was left out is zero.
        return Ok(Quantity::from_units(0, Format::DecimalSi));
    }
    raw.0
        .parse()
        .map_err(|e: divvy_model::QuantityError| e.to_string())
}

/// The amount after the policy has filled it in or rounded it up.
fn amount(
    asked: Option<Quantity>,
    total: &Quantity,
    policy: Option<&CapacityRequestPolicy>,
    fractions: bool,
) -> Result<Quantity, String> {
    let Some(asked) = asked else {
        let default = policy.and_then(|p| p.default.as_ref());
        return default.map_or_else(|| Ok(*total), read);
    };
    let Some(policy) = policy else {
        return Ok(asked);
    };
    if let Some(range) = &policy.valid_range {
        return Range::read(range, fractions)?.round_up(asked);
    }
    for value in policy.valid_values.iter().flatten() {
        let value = read(value)?;
        if asked <= value {
            return Ok(value);
        }
    }
    Ok(asked)
}

/// Says whether the amount is one that the policy does not allow.
fn breaks(
    amount: &Quantity,
    policy: Option<&CapacityRequestPolicy>,
    fractions: bool,
) -> Result<bool, String> {
    let Some(policy) = policy else {
        return Ok(false);
    };
    if let Some(default) = &policy.default
        && read(default)? == *amount
    {
        return Ok(false);
    }
    if let Some(range) = &policy.valid_range {
        return Ok(!Range::read(range, fractions)?.allows(amount));
    }
    let Some(values) = policy.valid_values.as_ref().filter(|v| !v.is_empty()) else {
        return Ok(false);
    };
    for value in values {
        if read(value)? == *amount {
            return Ok(false);
        }
    }
    Ok(true)
}

/// A valid range, in the units in which the scheduler computes it.
struct Range {
    min: Quantity,
    max: Option<Quantity>,
    /// In units, never zero; with the format of what is rounded to it.
    step: Option<(i128, Format)>,
    unit: i128,
}

impl Range {
    fn read(range: &CapacityRequestPolicyRange, fractions: bool) -> Result<Self, String> {
        let min = read(&range.min)?;
        let max = range.max.as_ref().map(read).transpose()?;
        let step = range.step.as_ref().map(read).transpose()?;
        let in_millis =
            |q: &Quantity| q.nanos() % MILLI == 0 && i64::try_from(q.nanos() / MILLI).is_ok();
        let thousandths = fractions
            && [Some(&min), max.as_ref(), step.as_ref()]
                .into_iter()
                .flatten()
                .all(in_millis)
            && step.as_ref().is_none_or(|s| s.nanos() >= MILLI);
        let unit = if thousandths { MILLI } else { ONE };
        let step = match step {
            None => None,
            Some(step) if step.signum() > 0 => Some((in_units(&step, unit), step.format())),
            Some(step) => {
                return Err(format!(
                    "the step {step} of its valid range is not positive"
                ));
            }
        };
        Ok(Self {
            min,
            max,
            step,
            unit,
        })
    }

    fn round_up(&self, asked: Quantity) -> Result<Quantity, String> {
        if asked < self.min {
            return Ok(self.min);
        }
        let Some((step, format)) = self.step else {
            return Ok(asked);
        };
        let beyond = |q: &Quantity| {
            format!("the request {q} is not representable in the steps of its valid range")
        };
        if self.unit == MILLI && asked.nanos() % MILLI != 0 {
            return Err(beyond(&asked));
        }
        let (min, wanted) = (in_units(&self.min, self.unit), in_units(&asked, self.unit));
        let over = wanted - min;
        let steps = over / step + i128::from(over % step > 0);
        let rounded = steps.checked_mul(step).and_then(|s| s.checked_add(min));
        let rounded =
            rounded.filter(|r| i64::try_from(*r).is_ok() && i64::try_from(wanted).is_ok());
        let nanos = rounded
            .and_then(|r| r.checked_mul(self.unit))
            .ok_or_else(|| beyond(&asked))?;
        Ok(Quantity::from_nanos(nanos, format))
    }

    fn allows(&self, amount: &Quantity) -> bool {
        if self.max.as_ref().is_some_and(|max| amount > max) {
            return false;
        }
        let Some((step, _)) = self.step else {
            return true;
        };
        if self.unit == MILLI && amount.nanos() % MILLI != 0 {
            return false;
        }
        (in_units(amount, self.unit) - in_units(&self.min, self.unit)) % step == 0
    }
}

/// The amount in units, rounded away from zero as Kubernetes does.
fn in_units(quantity: &Quantity, unit: i128) -> i128 {
    let (whole, rest) = (quantity.nanos() / unit, quantity.nanos() % unit);
    if rest == 0 {
        whole
    } else {
        whole + rest.signum()
    }
}

#[cfg(test)]
mod tests;
