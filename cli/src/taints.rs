//! DeviceTaintRules: administrators' taints on published devices. Pure.

use std::collections::BTreeSet;

use divvy_allocator::{Explanation, Reason};
use k8s_openapi::api::resource::v1::{DeviceTaintRule, ResourceSlice};

/// Adds the taints of these rules to the devices that they select, as the scheduler does.
pub fn taint(slices: &mut [ResourceSlice], rules: &[DeviceTaintRule]) {
    let fits = |wanted: Option<&String>, found: &str| wanted.is_none_or(|wanted| wanted == found);
    for rule in rules {
        // A rule without a selector is for no device; an empty selector is for all.
        let Some(selector) = &rule.spec.device_selector else {
            continue;
        };
        for slice in slices.iter_mut().map(|slice| &mut slice.spec) {
            let fits_slice = fits(selector.driver.as_ref(), &slice.driver)
                && fits(selector.pool.as_ref(), &slice.pool.name);
            if !fits_slice {
                continue;
            }
            let devices = slice.devices.iter_mut().flatten();
            for device in devices.filter(|device| fits(selector.device.as_ref(), &device.name)) {
                device
                    .taints
                    .get_or_insert_default()
                    .push(rule.spec.taint.clone());
            }
        }
    }
}

/// Returns the rules whose taints keep a request off devices, each with its key.
pub fn behind(explanation: &Explanation, rules: &[DeviceTaintRule]) -> BTreeSet<String> {
    let refused = explanation
        .requests
        .iter()
        .flat_map(|request| &request.refused);
    let taints: BTreeSet<&str> = refused
        .filter_map(|device| match &device.reason {
            Reason::Tainted { taint } => Some(taint.as_str()),
            _ => None,
        })
        .collect();
    let is_behind = |rule: &&DeviceTaintRule| {
        let taint = &rule.spec.taint;
        // As the reasons have it: `key=value:effect`, or `key:effect` without a value.
        let text = match taint.value.as_deref().filter(|value| !value.is_empty()) {
            Some(value) => format!("{}={value}:{}", taint.key, taint.effect),
            None => format!("{}:{}", taint.key, taint.effect),
        };
        taints.contains(text.as_str())
    };
    let name = |rule: &DeviceTaintRule| {
        let name = rule.metadata.name.as_deref().unwrap_or_default();
        format!(
            "the taint {} is of DeviceTaintRule {name}",
            rule.spec.taint.key
        )
    };
    rules.iter().filter(is_behind).map(name).collect()
}
