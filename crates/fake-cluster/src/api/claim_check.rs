//! Validation of ResourceClaims that the API server refuses with 422, as far as drivers can run
//! into it. ResourceSlices are checked before they are written (`divvy_offer::validate`), and by
//! the real server in tests/e2e.

use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::Value;

use super::error::ApiError;

const CONDITIONS: usize = 8;

/// Checks a claim; `old` is what is stored, on updates.
pub(crate) fn check(name: &str, old: Option<&Value>, new: &Value) -> Result<(), ApiError> {
    let mut problems = Problems::default();
    claim(&mut problems, old, new);
    let list = match problems.0.as_slice() {
        [] => return Ok(()),
        [one] => one.clone(),
        many => format!("[{}]", many.join(", ")),
    };
    Err(ApiError::new(
        422,
        format!("ResourceClaim.resource.k8s.io \"{name}\" is invalid: {list}"),
    ))
}

/// Every problem found, worded as the API server does: `path: message`.
#[derive(Debug, Default)]
struct Problems(Vec<String>);

impl Problems {
    fn unless(&mut self, fine: bool, path: impl AsRef<str>, message: impl AsRef<str>) {
        if !fine {
            self.0
                .push(format!("{}: {}", path.as_ref(), message.as_ref()));
        }
    }

    fn too_many(&mut self, path: impl AsRef<str>, count: usize, max: usize) {
        self.unless(
            count <= max,
            path,
            format!("Too many: {count}: must have at most {max} items"),
        );
    }

    fn immutable<T: PartialEq>(&mut self, path: &str, old: &T, new: &T) {
        self.unless(old == new, path, "Invalid value: field is immutable");
    }
}

fn claim(problems: &mut Problems, old: Option<&Value>, new: &Value) {
    let Ok(claim) = serde_json::from_value::<ResourceClaim>(new.clone()) else {
        return problems.unless(false, "spec", "Required value");
    };
    if let Some(old) = old {
        problems.immutable("spec", &old.get("spec"), &new.get("spec"));
        let allocation = |v: &Value| v.pointer("/status/allocation").cloned();
        if let (Some(was), Some(now)) = (allocation(old), allocation(new)) {
            problems.immutable("status.allocation", &was, &now);
        }
    }
    let Some(status) = claim.status else { return };
    let results = status
        .allocation
        .and_then(|a| a.devices)
        .and_then(|d| d.results)
        .unwrap_or_default();
    for (i, device) in status.devices.unwrap_or_default().iter().enumerate() {
        let path = format!("status.devices[{i}]");
        let allocated = results.iter().any(|r| {
            (&r.driver, &r.pool, &r.device, &r.share_id)
                == (
                    &device.driver,
                    &device.pool,
                    &device.device,
                    &device.share_id,
                )
        });
        problems.unless(
            allocated,
            &path,
            "Invalid value: must be an allocated device in the claim",
        );
        let conditions = device.conditions.as_deref().unwrap_or_default();
        problems.too_many(format!("{path}.conditions"), conditions.len(), CONDITIONS);
        for (c, condition) in conditions.iter().enumerate() {
            let path = format!("{path}.conditions[{c}]");
            problems.unless(
                !condition.reason.is_empty(),
                format!("{path}.reason"),
                "Required value",
            );
            let known = matches!(condition.status.as_str(), "True" | "False" | "Unknown");
            problems.unless(known, format!("{path}.status"), "Unsupported value");
        }
    }
}
