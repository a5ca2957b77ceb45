//! Changes that the server makes on write: canonical quantities, defaults, no empty lists.

use divvy_model::Quantity;
use serde_json::{Value, json};

use super::error::ApiError;
use super::json::prune_empty;

/// Brings a normalised object into the form in which the server stores it. `now` stamps taints.
pub(crate) fn store_form(kind: &str, object: &mut Value, now: &str) -> Result<(), ApiError> {
    match kind {
        "ResourceSlice" => slice(object, now),
        "ResourceClaim" => claim(object.get_mut("spec")),
        "ResourceClaimTemplate" => claim(object.pointer_mut("/spec/spec")),
        _ => Ok(()),
    }
}

fn slice(object: &mut Value, now: &str) -> Result<(), ApiError> {
    let Some(spec) = object.get_mut("spec") else {
        return Ok(());
    };
    prune_empty(spec);
    for set in list(spec, "sharedCounters") {
        each(set.get_mut("counters"), |counter| {
            canonical(counter.get_mut("value"))
        })?;
    }
    for device in list(spec, "devices") {
        each(device.get_mut("capacity"), |capacity| {
            canonical(capacity.get_mut("value"))?;
            for at in [
                "default",
                "validRange/min",
                "validRange/max",
                "validRange/step",
            ] {
                canonical(capacity.pointer_mut(&format!("/requestPolicy/{at}")))?;
            }
            each(
                capacity.pointer_mut("/requestPolicy/validValues"),
                |value| canonical(Some(value)),
            )
        })?;
        for use_ in list(device, "consumesCounters") {
            each(use_.get_mut("counters"), |counter| {
                canonical(counter.get_mut("value"))
            })?;
        }
        for taint in list(device, "taints") {
            if let Some(taint) = taint.as_object_mut() {
                taint.entry("timeAdded").or_insert_with(|| json!(now));
            }
        }
    }
    Ok(())
}

fn claim(spec: Option<&mut Value>) -> Result<(), ApiError> {
    let Some(devices) = spec.and_then(|spec| spec.get_mut("devices")) else {
        return Ok(());
    };
    for request in list(devices, "requests") {
        if let Some(exactly) = request.get_mut("exactly") {
            one_request(exactly)?;
        }
        for alternative in list(request, "firstAvailable") {
            one_request(alternative)?;
        }
    }
    Ok(())
}

fn one_request(request: &mut Value) -> Result<(), ApiError> {
    if let Some(request) = request.as_object_mut() {
        let mode = request
            .entry("allocationMode")
            .or_insert_with(|| json!("ExactCount"));
        if mode == "ExactCount" {
            request.entry("count").or_insert_with(|| json!(1));
        }
    }
    each(request.pointer_mut("/capacity/requests"), |value| {
        canonical(Some(value))
    })
}

fn list<'a>(value: &'a mut Value, field: &str) -> impl Iterator<Item = &'a mut Value> {
    value
        .get_mut(field)
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
}

/// Runs `change` on every value of a map or list.
fn each(
    value: Option<&mut Value>,
    change: impl Fn(&mut Value) -> Result<(), ApiError>,
) -> Result<(), ApiError> {
    let Some(value) = value else { return Ok(()) };
    match value {
        Value::Object(map) => map.values_mut().try_for_each(change),
        Value::Array(list) => list.iter_mut().try_for_each(change),
        _ => Ok(()),
    }
}

fn canonical(value: Option<&mut Value>) -> Result<(), ApiError> {
    let Some(value) = value else { return Ok(()) };
    let text = value.as_str().unwrap_or_default().to_owned();
    let parsed = text.parse::<Quantity>().map_err(|_| {
        let hint =
            "quantities must match the regular expression '^([+-]?[0-9.]+)([eEinumkKMGTP]*[-+]?[0-9]*)$'";
        ApiError::new(400, format!("\"{text}\": {hint}"))
    })?;
    *value = Value::String(parsed.to_string());
    Ok(())
}
