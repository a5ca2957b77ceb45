//! Why a constraint cannot be satisfied, where each request alone could be.

use std::collections::{BTreeMap, BTreeSet};

use super::ConstraintReason;
use crate::allocate::{Claim, Constraint, Kind, Mode, Prepared, Request, Search, Value};
use crate::allocated::Holder;

/// Values that are named one by one.
const NAMED: usize = 4;

/// The constraints that no choice among the devices that can be had would satisfy, with the reason.
pub(super) fn unsatisfied<'a>(
    prepared: &Prepared<'a>,
    search: &mut Search<'_, 'a>,
) -> Vec<ConstraintReason> {
    let mut reasons = Vec::new();
    for claim in &prepared.claims {
        for constraint in &claim.constraints {
            let Some(available) = available(prepared, search, claim, constraint) else {
                continue;
            };
            let problem = match constraint.kind {
                Kind::Match => no_common_value(&available),
                Kind::Distinct => too_few_values(&available),
            };
            if let Some(problem) = problem {
                let constraint = constraint.to_string();
                reasons.push(ConstraintReason {
                    claim: Holder::of(claim.object),
                    constraint,
                    problem,
                });
            }
        }
    }
    reasons
}

/// A request under a constraint: how many devices it wants, and how many it could have of each
/// value.
struct Available {
    request: String,
    wanted: usize,
    of_value: BTreeMap<String, usize>,
}

/// Counts what each request could have, were it alone; `None` where a request has alternatives: any
/// one
/// could do.
fn available<'a>(
    prepared: &Prepared<'a>,
    search: &mut Search<'_, 'a>,
    claim: &Claim<'a>,
    constraint: &Constraint<'a>,
) -> Option<Vec<Available>> {
    let mut all = Vec::new();
    for choice in &claim.requests {
        let covered: Vec<&Request<'a>> = choice
            .alternatives
            .iter()
            .filter(|r| constraint.covers(&r.name))
            .collect();
        let [request] = covered.as_slice() else {
            if covered.is_empty() {
                continue;
            }
            return None;
        };
        if choice.alternatives.len() > 1 {
            return None;
        }
        let mut of_value = BTreeMap::new();
        for index in 0..prepared.candidates.len() {
            if !matches!(search.refusal(request, index), Ok(None)) {
                continue;
            }
            for value in search.values(constraint, index).iter().flatten() {
                *of_value.entry(text(value)).or_default() += 1;
            }
        }
        let wanted = match request.mode {
            Mode::Exact(count) => count,
            Mode::All => search.wanted(request),
        };
        all.push(Available {
            request: request.name.clone(),
            wanted,
            of_value,
        });
    }
    Some(all)
}

fn text(value: &Value<'_>) -> String {
    match value {
        Value::Int(v) => v.to_string(),
        Value::Bool(v) => v.to_string(),
        Value::Text(v) | Value::Version(v) => (*v).to_owned(),
        Value::Unknown => "(of a type that cannot be compared)".to_owned(),
    }
}

/// For a match: no value has enough for every request.
fn no_common_value(available: &[Available]) -> Option<String> {
    let values: BTreeSet<&String> = available.iter().flat_map(|a| a.of_value.keys()).collect();
    let mut short = Vec::new();
    for value in &values {
        let lacking = available
            .iter()
            .find(|a| a.of_value.get(*value).copied().unwrap_or(0) < a.wanted)?;
        let has = lacking.of_value.get(*value).copied().unwrap_or(0);
        short.push(format!(
            "{value} has {has} of {} for request {:?}",
            lacking.wanted, lacking.request
        ));
    }
    let more = short.len().saturating_sub(NAMED);
    short.truncate(NAMED);
    let more = if more == 0 {
        String::new()
    } else {
        format!("; and {more} more values")
    };
    Some(format!(
        "no value has free devices for all its requests: {}{more}",
        short.join("; ")
    ))
}

/// For a distinction: fewer values than devices.
fn too_few_values(available: &[Available]) -> Option<String> {
    let values: BTreeSet<&String> = available.iter().flat_map(|a| a.of_value.keys()).collect();
    let wanted: usize = available.iter().map(|a| a.wanted).sum();
    if values.len() >= wanted {
        return None;
    }
    let named: Vec<&str> = values.iter().take(NAMED).map(|v| v.as_str()).collect();
    let more = if values.len() > NAMED { " …" } else { "" };
    Some(format!(
        "{wanted} devices must differ, but the available ones have only {} values: {}{more}",
        values.len(),
        named.join(", ")
    ))
}
