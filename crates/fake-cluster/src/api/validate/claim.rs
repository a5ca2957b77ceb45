//! ResourceClaims: what a scheduler, a claim controller or a driver can get wrong.

use std::collections::BTreeSet;

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::Value;

use super::{Problems, is_label};

const REQUESTS: usize = 32;
const RESERVATIONS: usize = 256;
const CONDITIONS: usize = 8;

pub(super) fn check(problems: &mut Problems, old: Option<&Value>, new: &Value) {
    let Ok(claim) = serde_json::from_value::<ResourceClaim>(new.clone()) else {
        return problems.add("spec", "Required value");
    };
    if let Some(old) = old {
        problems.immutable("spec", &old.get("spec"), &new.get("spec"));
        let allocation = |v: &Value| v.pointer("/status/allocation").cloned();
        if let (Some(was), Some(now)) = (allocation(old), allocation(new)) {
            problems.immutable("status.allocation", &was, &now);
        }
    }
    let devices = claim.spec.and_then(|spec| spec.devices).unwrap_or_default();
    let requests = devices.requests.unwrap_or_default();
    problems.too_many("spec.devices.requests", requests.len(), REQUESTS);
    let mut names = BTreeSet::new();
    for (i, request) in requests.iter().enumerate() {
        let path = format!("spec.devices.requests[{i}]");
        problems.unless(
            is_label(&request.name),
            format!("{path}.name"),
            "Invalid value: must be a DNS label",
        );
        problems.unless(names.insert(&request.name), format!("{path}.name"), "Duplicate value");
        let one = request.exactly.is_some() != request.first_available.is_some();
        problems.unless(
            one,
            &path,
            "Required value: exactly one of `exactly` or `firstAvailable` is required",
        );
    }
    let Some(status) = claim.status else { return };
    let reserved = status.reserved_for.unwrap_or_default();
    problems.too_many("status.reservedFor", reserved.len(), RESERVATIONS);
    let allowed = reserved.is_empty() || status.allocation.is_some();
    problems.unless(
        allowed,
        "status.reservedFor",
        "Forbidden: may not be specified when `allocated` is not set",
    );
    let results = status.allocation.and_then(|a| a.devices).and_then(|d| d.results).unwrap_or_default();
    for (i, device) in status.devices.unwrap_or_default().iter().enumerate() {
        let path = format!("status.devices[{i}]");
        let allocated = results.iter().any(|r| {
            (&r.driver, &r.pool, &r.device, &r.share_id)
                == (&device.driver, &device.pool, &device.device, &device.share_id)
        });
        problems.unless(allocated, &path, "Invalid value: must be an allocated device in the claim");
        let conditions = device.conditions.as_deref().unwrap_or_default();
        problems.too_many(format!("{path}.conditions"), conditions.len(), CONDITIONS);
        for (c, condition) in conditions.iter().enumerate() {
            let path = format!("{path}.conditions[{c}]");
            problems.unless(!condition.reason.is_empty(), format!("{path}.reason"), "Required value");
            let known = matches!(condition.status.as_str(), "True" | "False" | "Unknown");
            problems.unless(known, format!("{path}.status"), "Unsupported value");
        }
    }
}
