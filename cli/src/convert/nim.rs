//! Claims that NIM's operator makes itself, by `claimCreationSpec` of a NIMService.

use divvy_api::names;

use super::cel::{self, NVIDIA};
use super::notes::{Notes, under};
use crate::yaml::{Map, Node};

/// Classes of NVIDIA's driver, and those of divvy.
const CLASSES: [(&str, &str); 2] = [
    (NVIDIA, names::CLASS_GPU),
    ("mig.nvidia.com", names::CLASS_MIG),
];

/// Converts the devices of all services in an object; those that cannot be stay as they are.
pub(super) fn convert(object: &mut Map, notes: &mut Notes) {
    let version = object.get("apiVersion").and_then(Node::text);
    if !version.is_some_and(|version| version.starts_with("apps.nvidia.com/")) {
        return;
    }
    let Some(spec) = object.get_mut("spec").and_then(Node::map_mut) else {
        return;
    };
    service(spec, "spec", notes);
    let services = spec.get_mut("services").and_then(Node::items_mut);
    for (number, one) in services.into_iter().flatten().enumerate() {
        let at = format!("spec.services[{number}].spec");
        if let Some(spec) = one.at_mut(&["spec"]).and_then(Node::map_mut) {
            service(spec, &at, notes);
        }
    }
}

fn service(spec: &mut Map, at: &str, notes: &mut Notes) {
    let resources = spec.get_mut("draResources").and_then(Node::items_mut);
    for (number, resource) in resources.into_iter().flatten().enumerate() {
        let at = format!("{at}.draResources[{number}].claimCreationSpec.devices");
        let devices = resource.at_mut(&["claimCreationSpec", "devices"]);
        let devices = devices.and_then(Node::items_mut);
        for (number, device) in devices.into_iter().flatten().enumerate() {
            let Some(device) = device.map_mut() else {
                continue;
            };
            let at = format!("{at}[{number}]");
            let new = notes.attempt(|notes| {
                let mut new = device.clone();
                of_device(&mut new, &at, notes);
                new
            });
            if let Some(new) = new {
                *device = new;
            }
        }
    }
}

fn of_device(device: &mut Map, at: &str, notes: &mut Notes) {
    // Without a class or driver, the operator takes those of NVIDIA.
    let class = device.get("deviceClassName").and_then(Node::text);
    let class = class.unwrap_or(NVIDIA).to_owned();
    let driver = device.get("driverName").and_then(Node::text);
    if driver.is_some_and(|driver| driver != NVIDIA) {
        return;
    }
    let Some((_, new)) = CLASSES.iter().find(|(old, _)| *old == class) else {
        if class.ends_with(".nvidia.com") {
            let what = format!(
                "divvy has no counterpart of class {class:?}: keep the pods on nodes of NVIDIA's driver"
            );
            notes.refuse(&under(at, "deviceClassName"), what);
        }
        return;
    };
    device.set("deviceClassName", *new);
    device.set("driverName", names::DRIVER);
    for list in ["attributeSelectors", "capacitySelectors"] {
        let selectors = device.get_mut(list).and_then(Node::items_mut);
        for (number, selector) in selectors.into_iter().flatten().enumerate() {
            let at = format!("{at}.{list}[{number}].key");
            let key = selector.map_mut().and_then(|map| map.get_mut("key"));
            let Some(key) = key else { continue };
            let name = key.text().unwrap_or_default();
            let plain = name.strip_prefix("gpu.nvidia.com/").unwrap_or(name);
            let is_known = if list == "attributeSelectors" {
                cel::is_attribute(plain)
            } else {
                cel::is_capacity(plain)
            };
            if !plain.contains('/') && !is_known {
                let what = format!(
                    "no device of divvy has {plain}: select by another name (docs/reference/attributes.md)"
                );
                notes.refuse(&at, what);
            } else if plain != name {
                *key = format!("{}/{plain}", names::DRIVER).into();
            }
        }
    }
    let expressions = device.get_mut("celExpressions").and_then(Node::items_mut);
    for (number, expression) in expressions.into_iter().flatten().enumerate() {
        let at = format!("{at}.celExpressions[{number}]");
        let Some(new) = expression.text().and_then(cel::rewrite) else {
            continue;
        };
        if new.is_indirect || !new.unknown.is_empty() {
            let what = "it reads names that devices of divvy do not have, or that convert cannot follow (docs/reference/attributes.md)";
            notes.refuse(&at, what);
        }
        *expression = new.expression.into();
    }
}
