//! DeviceTaintRules behind the taints that keep a request off devices.

use std::collections::BTreeSet;

use divvy_allocator::{Explanation, Reason};
use k8s_openapi::api::resource::v1::DeviceTaintRule;

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
