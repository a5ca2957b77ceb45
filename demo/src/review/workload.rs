//! Workload resources: their selectors, and what their kind allows of the template.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;

use super::Findings;
use divvy_cli::manifests::{Manifests, WorkloadResource};

/// Longest name of a CronJob: its Jobs have eleven characters more.
const LONGEST_CRON_JOB: usize = 52;

impl Findings {
    pub(super) fn workload(
        &mut self,
        workload: &WorkloadResource,
        manifests: &Manifests,
        driver: &str,
    ) {
        let place = self.named(workload.kind, &workload.metadata);
        let at = format!("{place}: {}", workload.path);
        for (field, count) in workload.counts.iter().filter(|(_, count)| *count < 0) {
            let what = format!("Invalid value: {count}: must be greater than or equal to 0");
            self.refuse(&format!("{at}.{field}"), &what);
        }
        match workload.kind {
            "Job" => self.job_selector(&at, workload),
            "CronJob" => self.cron_job(&place, &at, workload),
            _ => self.selector(&at, workload),
        }
        let template = workload.template.metadata.as_ref();
        let labels = template.and_then(|meta| meta.labels.as_ref());
        self.label_values(&format!("{at}.template.labels"), labels);
        let spec = workload.template.spec.clone().unwrap_or_default();
        let at = format!("{at}.template.spec");
        self.restart_policy(&at, workload.kind, spec.restart_policy.as_deref());
        if workload.keeps_old
            && super::together::has_devices_alone(&spec, &workload.metadata, (manifests, driver))
        {
            let what = "an update makes a new pod before it ends an old one, so that it waits for ever where no GPU is free: \
                        strategy: {type: Recreate}, or rollingUpdate: {maxSurge: 0, maxUnavailable: 1}";
            self.doubt(&format!("{place}: spec.strategy"), what);
        }
        self.one_claim_for_all(&at, workload, (manifests, driver));
        self.pod_spec(&at, &spec, &workload.metadata, (manifests, driver));
    }

    /// Checks the selector of a kind that finds its pods by it.
    fn selector(&mut self, at: &str, workload: &WorkloadResource) {
        let list = format!("{at}.selector");
        let Some(selector) = &workload.selector else {
            return self.refuse(&list, "Required value");
        };
        let is_empty = |selector: &LabelSelector| {
            let labels = selector
                .match_labels
                .as_ref()
                .is_none_or(BTreeMap::is_empty);
            labels
                && selector
                    .match_expressions
                    .as_ref()
                    .is_none_or(Vec::is_empty)
        };
        if is_empty(selector) {
            let what = format!(
                "Invalid value: {{}}: empty selector is invalid for {}",
                workload.kind.to_lowercase()
            );
            return self.refuse(&list, &what);
        }
        self.label_values(
            &format!("{list}.matchLabels"),
            selector.match_labels.as_ref(),
        );
        self.template_labels(at, selector, workload);
    }

    /// Refuses a template whose pods the selector does not find.
    fn template_labels(&mut self, at: &str, selector: &LabelSelector, workload: &WorkloadResource) {
        let labels = workload
            .template
            .metadata
            .as_ref()
            .and_then(|meta| meta.labels.clone());
        let labels = labels.unwrap_or_default();
        match selects(selector, &labels) {
            Ok(true) => {}
            Ok(false) => {
                let shown = serde_json::to_string(&labels).unwrap_or_default();
                let what =
                    format!("Invalid value: {shown}: `selector` does not match template `labels`");
                self.refuse(&format!("{at}.template.metadata.labels"), &what);
            }
            Err(what) => self.refuse(&format!("{at}.selector.matchExpressions"), &what),
        }
    }

    /// Checks the selector of a Job, which the API server makes.
    fn job_selector(&mut self, at: &str, workload: &WorkloadResource) {
        match &workload.selector {
            Some(selector) if workload.manual_selector => {
                self.template_labels(at, selector, workload);
            }
            None if workload.manual_selector => {
                self.refuse(&format!("{at}.selector"), "Required value");
            }
            Some(selector) if *selector != LabelSelector::default() => {
                let what = "Invalid value: `selector` not auto-generated (leave it out)";
                self.refuse(&format!("{at}.selector"), what);
            }
            _ => {}
        }
    }

    fn cron_job(&mut self, place: &str, at: &str, workload: &WorkloadResource) {
        if workload.selector.is_some() {
            let what = "Invalid value: `selector` will be auto-generated (leave it out)";
            self.refuse(&format!("{at}.selector"), what);
        }
        let name = workload.metadata.name.as_deref().unwrap_or_default();
        if name.len() > LONGEST_CRON_JOB {
            let what = format!(
                "Invalid value: {name:?}: must be no more than {LONGEST_CRON_JOB} characters"
            );
            self.refuse(&format!("{place}: metadata.name"), &what);
        }
        let schedule = workload.schedule.as_deref().unwrap_or_default();
        let fields = schedule.split_whitespace().count();
        if schedule.is_empty() {
            self.refuse(&format!("{place}: spec.schedule"), "Required value");
        } else if fields != 5 && !schedule.starts_with('@') {
            let what =
                format!("Invalid value: {schedule:?}: expected exactly 5 fields, found {fields}");
            self.refuse(&format!("{place}: spec.schedule"), &what);
        }
    }

    /// Checks the restart policy of the pods of a kind, `Pod` for one on its own.
    pub(super) fn restart_policy(&mut self, at: &str, kind: &str, policy: Option<&str>) {
        let at = format!("{at}.restartPolicy");
        let policy = policy.unwrap_or("Always");
        let allowed: &[&str] = match kind {
            "Job" | "CronJob" => &["OnFailure", "Never"],
            "Pod" => &["Always", "OnFailure", "Never"],
            _ => &["Always"],
        };
        if allowed.contains(&policy) {
            return;
        }
        let quoted: Vec<String> = allowed.iter().map(|policy| format!("{policy:?}")).collect();
        let quoted = quoted.join(", ");
        if policy == "Always" {
            self.refuse(&at, &format!("Required value: valid values: {quoted}"));
        } else {
            self.refuse(
                &at,
                &format!("Unsupported value: {policy:?}: supported values: {quoted}"),
            );
        }
    }
}

/// Says whether a selector finds pods with these labels, or what is wrong with it.
fn selects(selector: &LabelSelector, labels: &BTreeMap<String, String>) -> Result<bool, String> {
    let pairs = selector.match_labels.iter().flatten();
    let mut found = pairs
        .into_iter()
        .all(|(key, value)| labels.get(key) == Some(value));
    for one in selector.match_expressions.iter().flatten() {
        let value = labels.get(&one.key);
        let values = one.values.as_deref().unwrap_or_default();
        let is_in = value.is_some_and(|value| values.contains(value));
        match one.operator.as_str() {
            "In" | "NotIn" if values.is_empty() => {
                return Err(
                    "Required value: values must be specified when `operator` is 'In' or 'NotIn'"
                        .to_owned(),
                );
            }
            "Exists" | "DoesNotExist" if !values.is_empty() => {
                return Err("Forbidden: values may not be specified when `operator` is 'Exists' or 'DoesNotExist'".to_owned());
            }
            "In" => found &= is_in,
            "NotIn" => found &= !is_in,
            "Exists" => found &= value.is_some(),
            "DoesNotExist" => found &= value.is_none(),
            other => {
                return Err(format!(
                    "Invalid value: {other:?}: not a valid selector operator"
                ));
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn expressions_select_as_labels_do() {
        let labels = BTreeMap::from([("app".to_owned(), "a".to_owned())]);
        for (expression, expected) in [
            (
                json!({"key": "app", "operator": "In", "values": ["a", "b"]}),
                Ok(true),
            ),
            (
                json!({"key": "app", "operator": "NotIn", "values": ["a"]}),
                Ok(false),
            ),
            (
                json!({"key": "tier", "operator": "NotIn", "values": ["a"]}),
                Ok(true),
            ),
            (json!({"key": "app", "operator": "Exists"}), Ok(true)),
            (json!({"key": "app", "operator": "DoesNotExist"}), Ok(false)),
            (json!({"key": "app", "operator": "In"}), Err(())),
            (
                json!({"key": "app", "operator": "Is", "values": ["a"]}),
                Err(()),
            ),
        ] {
            let selector =
                serde_json::from_value(json!({"matchExpressions": [expression]})).unwrap();
            assert_eq!(
                selects(&selector, &labels).map_err(drop),
                expected,
                "{expression}"
            );
        }
    }
}
