//! The amount that a claim was given, from its allocation.

use std::collections::BTreeMap;

use divvy_model::Quantity;
use k8s_openapi::api::resource::v1::{DeviceRequestAllocationResult, ResourceClaim};

use crate::amount::Amount;
use crate::catalogue::Catalogue;

/// A device of a claim that is not published, so that its amount is not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("device {device} of pool {pool} is not published now")]
pub struct Uncharged {
    /// Its pool.
    pub pool: String,
    /// Its name.
    pub device: String,
}

/// Returns the amount that a claim was given of the devices of our driver. `None` if it is not
/// allocated. Admin access takes nothing from others.
pub fn charge(claim: &ResourceClaim, catalogue: &Catalogue) -> Option<Result<Amount, Uncharged>> {
    let allocation = claim.status.as_ref()?.allocation.as_ref()?;
    let results = allocation.devices.iter().flat_map(|all| &all.results);
    let amounts = results
        .flatten()
        .filter(|result| is_charged(result, &catalogue.driver))
        .map(|result| of_result(result, catalogue));
    Some(amounts.sum())
}

/// Returns whether a result is of our driver and reserves something.
pub(crate) fn is_charged(result: &DeviceRequestAllocationResult, driver: &str) -> bool {
    result.driver == driver && result.admin_access != Some(true)
}

fn of_result(
    result: &DeviceRequestAllocationResult,
    catalogue: &Catalogue,
) -> Result<Amount, Uncharged> {
    let kind = catalogue.kind(&result.pool, &result.device);
    let kind = kind.ok_or_else(|| Uncharged {
        pool: result.pool.clone(),
        device: result.device.clone(),
    })?;
    let consumed: BTreeMap<_, _> = result
        .consumed_capacity
        .iter()
        .flatten()
        .filter_map(|(name, amount)| Some((name.clone(), amount.0.parse::<Quantity>().ok()?)))
        .collect();
    Ok(kind.amount(&consumed))
}
