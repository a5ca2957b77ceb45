//! The most that a claim may be given, before the scheduler has chosen: the largest of each amount
//! over all published devices that its classes and selectors may select.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClass, DeviceRequest, DeviceSelector, ResourceClaim,
};

use crate::amount::Amount;
use crate::catalogue::{Catalogue, Kind};

/// Reasons why no bound is known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unpriced {
    /// The class is not there.
    #[error("request {request}: DeviceClass {class} does not exist (kubectl get deviceclasses)")]
    NoClass {
        /// The request.
        request: String,
        /// The class.
        class: String,
    },
    /// It asks for every device that there is.
    #[error(
        "request {request}: allocationMode All has no bound that a quota could count: name a count"
    )]
    All {
        /// The request.
        request: String,
    },
    /// No published device satisfies it.
    #[error("request {request}: no published device of class {class} satisfies it")]
    Nothing {
        /// The request.
        request: String,
        /// The class.
        class: String,
    },
}

/// Parts of an exact request or an alternative.
struct Asked<'c> {
    class: &'c str,
    selectors: Option<&'c Vec<DeviceSelector>>,
    mode: Option<&'c str>,
    count: Option<i64>,
    capacity: Option<&'c CapacityRequirements>,
}

/// Returns the most that a claim may be given of our driver's devices. `None` if it asks for none
/// of them.
pub fn price(
    claim: &ResourceClaim,
    classes: &BTreeMap<String, DeviceClass>,
    catalogue: &mut Catalogue,
) -> Result<Option<Amount>, Unpriced> {
    catalogue.kinds();
    let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
    let requests = devices.into_iter().flat_map(|all| &all.requests).flatten();
    let mut sum = None;
    for request in requests {
        // An alternative without a bound gives the request none.
        let mut most: Option<Amount> = None;
        for asked in asked(request) {
            let amount = of_asked(&request.name, &asked, classes, catalogue)?;
            most = match (most, amount) {
                (Some(one), Some(other)) => Some(one.or_more(other)),
                (one, other) => one.or(other),
            };
        }
        sum = match (sum, most) {
            (Some(one), Some(other)) => Some(Amount::plus(one, other)),
            (one, other) => one.or(other),
        };
    }
    Ok(sum)
}

fn asked(request: &DeviceRequest) -> Vec<Asked<'_>> {
    let exactly = request
        .exactly
        .iter()
        .filter(|exactly| exactly.admin_access != Some(true))
        .map(|exactly| Asked {
            class: &exactly.device_class_name,
            selectors: exactly.selectors.as_ref(),
            mode: exactly.allocation_mode.as_deref(),
            count: exactly.count,
            capacity: exactly.capacity.as_ref(),
        });
    let alternatives = request.first_available.iter().flatten().map(|one| Asked {
        class: &one.device_class_name,
        selectors: one.selectors.as_ref(),
        mode: one.allocation_mode.as_deref(),
        count: one.count,
        capacity: one.capacity.as_ref(),
    });
    exactly.chain(alternatives).collect()
}

/// Returns the bound of one request; `None` if its class has no devices of ours.
fn of_asked(
    request: &str,
    asked: &Asked<'_>,
    classes: &BTreeMap<String, DeviceClass>,
    catalogue: &mut Catalogue,
) -> Result<Option<Amount>, Unpriced> {
    let (request, name) = (request.to_owned(), asked.class.to_owned());
    let Some(class) = classes.get(asked.class) else {
        return Err(Unpriced::NoClass {
            request,
            class: name,
        });
    };
    let of_class = class.spec.as_ref().and_then(|spec| spec.selectors.as_ref());
    let in_class = selected(of_class, catalogue);
    if !in_class.contains(&true) {
        return Ok(None);
    }
    if asked.mode == Some("All") {
        return Err(Unpriced::All { request });
    }
    let own = selected(asked.selectors, catalogue);
    let count = u64::try_from(asked.count.unwrap_or(1)).unwrap_or(0);
    let both = in_class.iter().zip(&own);
    catalogue
        .kinds()
        .iter()
        .zip(both)
        .filter(|(_, (of_class, own))| **of_class && **own)
        .filter_map(|(kind, _)| of_kind(kind, asked.capacity))
        .reduce(Amount::or_more)
        .map(|most| Some(most.times(count)))
        .ok_or(Unpriced::Nothing {
            request,
            class: name,
        })
}

/// Returns the amount of one device of a kind; `None` if it can never have what is asked of it.
fn of_kind(kind: &Kind, capacity: Option<&CapacityRequirements>) -> Option<Amount> {
    let consumed = divvy_allocator::consumption(capacity, &kind.reduced.device)?;
    Some(kind.amount(&consumed))
}

/// Returns of each kind whether all of the selectors that can be evaluated for kinds select it.
fn selected(selectors: Option<&Vec<DeviceSelector>>, catalogue: &mut Catalogue) -> Vec<bool> {
    let mut all = vec![true; catalogue.kinds().len()];
    let expressions = selectors
        .into_iter()
        .flatten()
        .filter_map(|selector| Some(selector.cel.as_ref()?.expression.as_str()));
    for expression in expressions {
        for (one, selects) in all.iter_mut().zip(catalogue.selected(expression)) {
            *one &= selects;
        }
    }
    all
}
