//! DeviceClasses with their extended resources, and DeviceTaintRules.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule};

use super::naming::not_a_key;
use super::{Findings, Known, MOST};
use divvy_cli::extended;

impl Findings {
    pub(super) fn class(&mut self, class: &DeviceClass, known: &Known) {
        let place = self.named_in_cluster("DeviceClass", &class.metadata);
        let at = format!("{place}: spec");
        let Some(spec) = &class.spec else { return };
        self.selectors(
            &at,
            spec.selectors.as_deref(),
            &known.attributes,
            &known.capacities,
        );
        let configs = spec.config.as_deref().unwrap_or_default();
        self.at_most(MOST, configs.len(), &format!("{at}.config"));
        for (number, config) in configs.iter().enumerate() {
            let at = format!("{at}.config[{number}].opaque");
            match &config.opaque {
                None => self.refuse(&at, "Required value"),
                Some(opaque) => {
                    // The requests that it will be for are not known.
                    self.config(&at, known.driver, opaque, std::iter::empty());
                }
            }
        }
        if let Some(name) = &spec.extended_resource_name {
            let at = format!("{at}.extendedResourceName");
            for what in not_extended(name) {
                self.refuse(&at, &format!("Invalid value: {name:?}: {what}"));
            }
        }
    }

    /// Notes names that several classes have, with the class that counts.
    pub(super) fn extended_names(&mut self, classes: &[DeviceClass]) {
        let mut by_name: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for class in classes {
            let spec = class.spec.as_ref();
            let resource = spec.and_then(|spec| spec.extended_resource_name.as_deref());
            if let (Some(resource), Some(name)) = (resource, class.metadata.name.as_deref()) {
                by_name.entry(resource).or_default().push(name);
            }
        }
        for (resource, names) in by_name.into_iter().filter(|(_, names)| names.len() > 1) {
            let newest = extended::class_of(resource, classes).unwrap_or_default();
            self.doubtful.push(format!(
                "DeviceClasses {} all have extendedResourceName {resource}: the class created last counts, here {newest}; \
                 of classes of the same second it is the first by name",
                names.join(", ")
            ));
        }
    }

    pub(super) fn taint_rule(&mut self, rule: &DeviceTaintRule, known: &Known) {
        let place = self.named_in_cluster("DeviceTaintRule", &rule.metadata);
        let taint = &rule.spec.taint;
        let at = format!("{place}: spec.taint");
        if taint.key.is_empty() {
            self.refuse(&format!("{at}.key"), "Required value");
        } else {
            self.label_key(&format!("{at}.key"), &taint.key);
        }
        match taint.effect.as_str() {
            "NoSchedule" | "NoExecute" | "None" => {}
            "" => self.refuse(&format!("{at}.effect"), "Required value"),
            other => {
                let what = format!(
                    "Unsupported value: {other:?}: supported values: \"NoExecute\", \"NoSchedule\", \"None\""
                );
                self.refuse(&format!("{at}.effect"), &what);
            }
        }
        self.selects_something(&format!("{place}: spec.deviceSelector"), rule, known);
    }

    /// Notes a rule that is for no device here, with the first part of its selector that is not
    /// met.
    fn selects_something(&mut self, at: &str, rule: &DeviceTaintRule, known: &Known) {
        type Part = fn(&(String, String, String)) -> &str;
        let Some(selector) = &rule.spec.device_selector else {
            return self.doubt(at, "a rule without it is for no device; `{}` is for all");
        };
        let mut left: Vec<_> = known.devices.iter().collect();
        let parts: [(_, &Option<String>, Part); 3] = [
            ("driver", &selector.driver, |device| &device.0),
            ("pool", &selector.pool, |device| &device.1),
            ("device", &selector.device, |device| &device.2),
        ];
        for (field, wanted, part) in parts {
            let Some(wanted) = wanted else { continue };
            let there: std::collections::BTreeSet<&str> =
                left.iter().map(|device| part(device)).collect();
            left.retain(|device| part(device) == wanted);
            if left.is_empty() {
                let there: Vec<&str> = there.into_iter().take(8).collect();
                let what = format!(
                    "{wanted:?} is none of {}: the rule is for no device here",
                    there.join(", ")
                );
                return self.doubt(&format!("{at}.{field}"), &what);
            }
        }
    }
}

/// Says why a name cannot be that of an extended resource.
fn not_extended(name: &str) -> Vec<String> {
    let mut all = Vec::new();
    if !name.contains('/') {
        all.push("a name must be a domain-prefixed path, such as 'example.com/my-prop'".to_owned());
    } else if name.contains("kubernetes.io/") {
        all.push("must not have \"kubernetes.io/\" domain".to_owned());
    }
    if name.starts_with("requests.") {
        all.push("must not have \"requests.\" prefix".to_owned());
    }
    // Quotas count it under this name.
    all.extend(not_a_key(&format!("requests.{name}")));
    all
}

#[cfg(test)]
mod tests {
    use super::not_extended;

    #[test]
    fn names_of_extended_resources_have_a_domain_that_is_not_of_kubernetes() {
        for (name, faults) in [
            ("example.com/gpu", 0),
            ("nvidia.com/mig-1g.10gb", 0),
            ("gpu", 1),
            ("requests.nvidia.com/gpu", 1),
            ("nvidia.com/gpu_a100!", 1),
            ("Nvidia.com/gpu", 1),
            ("kubernetes.io/gpu", 1),
            ("a/b/c", 1),
        ] {
            assert_eq!(
                not_extended(name).len(),
                faults,
                "{name}: {:?}",
                not_extended(name)
            );
        }
    }
}
