//! The search's refusals as reasons with names.

use super::Reason;
use crate::allocate::{Prepared, Refusal, Request, Short, Unfit, Verdict, holders};
use crate::allocated::Uses;
use crate::pools::Gathered;
use divvy_model::{Format, Quantity};

use crate::allocate::Candidate;

/// The reason for a verdict; `None` for a device that is selected.
pub(super) fn of_verdict(request: &Request<'_>, verdict: Verdict) -> Option<Reason> {
    match verdict {
        Verdict::Rejected(place) => {
            let selector = request.selectors.get(place)?;
            let origin = selector.origin.to_string();
            let expression = selector.expression.to_owned();
            Some(Reason::SelectorFalse {
                origin,
                index: selector.index,
                expression,
            })
        }
        Verdict::NotOnNode => Some(Reason::NotOnNode),
        Verdict::FeatureOff => Some(Reason::FeatureOff),
        Verdict::Selected => None,
    }
}

/// The reason for a refusal that is not about who holds the device.
pub(super) fn of_refusal(
    prepared: &Prepared<'_>,
    pools: &[Gathered<'_>],
    request: &Request<'_>,
    candidate: &Candidate<'_>,
    refusal: &Refusal<'_>,
) -> Option<Reason> {
    let allocated = prepared.inputs.allocated;
    match refusal {
        Refusal::Taken => None,
        Refusal::Verdict(verdict) => of_verdict(request, *verdict),
        Refusal::Unfit(unfit) => Some(of_unfit(candidate, unfit)),
        Refusal::CapacityShort(demand, left) => {
            let uses = allocated.uses(candidate.driver, candidate.pool, &candidate.device.name);
            let mut by: Vec<_> = uses.into_iter().flat_map(Uses::holders).cloned().collect();
            by.sort();
            by.dedup();
            Some(Reason::CapacityShort {
                capacity: demand.capacity.to_owned(),
                wanted: demand.amount.to_string(),
                left: Quantity::from_nanos(*left, demand.total.format()).to_string(),
                by,
            })
        }
        Refusal::Counters(short) => {
            let pool = pools.get(candidate.home)?;
            let (number, left) = match short {
                Short::Counter { charge, left } => (charge.counter, *left),
                Short::Overdrawn { counter, left } => (*counter, *left),
            };
            let counter = pool.counters.get(number)?;
            let (set, name) = (counter.set.to_owned(), counter.name.to_owned());
            let by = holders(pool, allocated, number);
            Some(match short {
                Short::Counter { charge, .. } => Reason::CounterShort {
                    set,
                    counter: name,
                    wanted: text(charge.amount),
                    left: text(left),
                    by,
                },
                Short::Overdrawn { .. } => Reason::PoolOverdrawn {
                    set,
                    counter: name,
                    left: text(left),
                    by,
                },
            })
        }
        Refusal::Tainted(taint) => {
            let value = taint
                .value
                .as_deref()
                .map(|v| format!("={v}"))
                .unwrap_or_default();
            Some(Reason::Tainted {
                taint: format!("{}{value}:{}", taint.key, taint.effect),
            })
        }
        Refusal::Constraint(number) => {
            let constraint = prepared
                .claims
                .get(request.claim)?
                .constraints
                .get(*number)?;
            Some(Reason::NoSuchAttribute {
                constraint: constraint.to_string(),
            })
        }
    }
}

fn of_unfit(candidate: &Candidate<'_>, unfit: &Unfit<'_>) -> Reason {
    match unfit {
        Unfit::Missing(name) => Reason::NoSuchCapacity {
            capacity: (*name).to_owned(),
            has: candidate
                .device
                .capacity
                .iter()
                .flat_map(|all| all.keys().cloned())
                .collect(),
        },
        Unfit::Policy(name, amount) => {
            let capacity = candidate
                .device
                .capacity
                .as_ref()
                .and_then(|c| c.get(*name));
            let policy = capacity.and_then(|c| c.request_policy.as_ref());
            let range = policy
                .and_then(|p| p.valid_range.as_ref())
                .and_then(|r| r.max.as_ref());
            let values = policy
                .and_then(|p| p.valid_values.as_ref())
                .and_then(|v| v.last());
            Reason::CapacityExceeded {
                capacity: (*name).to_owned(),
                wanted: amount.to_string(),
                most: range.or(values).map(|most| most.0.clone()),
            }
        }
        Unfit::Short(demand) => Reason::CapacityExceeded {
            capacity: demand.capacity.to_owned(),
            wanted: demand.amount.to_string(),
            most: Some(demand.total.to_string()),
        },
    }
}

/// An amount of a counter: memory is large and a multiple of 1024, slices are few.
fn text(nanos: i128) -> String {
    let units = nanos / 1_000_000_000;
    let format = if units != 0 && units % 1024 == 0 {
        Format::BinarySi
    } else {
        Format::DecimalSi
    };
    Quantity::from_nanos(nanos, format).to_string()
}
