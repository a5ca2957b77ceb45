//! Label selectors, as everywhere in Kubernetes.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

/// Every part must fit; one without parts fits everything.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LabelSelector {
    /// Labels with these values.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub match_labels: BTreeMap<String, String>,
    /// More than equality.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<Requirement>,
}

/// One requirement on one label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Requirement {
    /// The label.
    pub key: String,
    /// How it is compared.
    pub operator: Operator,
    /// With what; empty for `Exists` and `DoesNotExist`.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub values: BTreeSet<String>,
}

/// How a label is compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Operator {
    /// Has one of the values.
    In,
    /// Has none of the values, or is not there.
    NotIn,
    /// Is there.
    Exists,
    /// Is not there.
    DoesNotExist,
}

impl LabelSelector {
    /// Whether labels fit.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        self.match_labels.iter().all(|(key, value)| labels.get(key) == Some(value))
            && self.match_expressions.iter().all(|requirement| requirement.matches(labels))
    }
}

impl Requirement {
    fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        let found = labels.get(&self.key);
        match self.operator {
            Operator::In => found.is_some_and(|value| self.values.contains(value)),
            Operator::NotIn => found.is_none_or(|value| !self.values.contains(value)),
            Operator::Exists => found.is_some(),
            Operator::DoesNotExist => found.is_none(),
        }
    }

    /// Whether the values go with the operator.
    pub(crate) fn is_complete(&self) -> bool {
        match self.operator {
            Operator::In | Operator::NotIn => !self.values.is_empty(),
            Operator::Exists | Operator::DoesNotExist => self.values.is_empty(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selector_fits_when_every_part_does() {
        let labels = BTreeMap::from([("zone".to_owned(), "a".to_owned()), ("gpu".to_owned(), String::new())]);
        let fits = |text: &str| serde_json::from_str::<LabelSelector>(text).unwrap().matches(&labels);
        let one = |key: &str, operator: &str, values: &str| {
            fits(&format!(
                r#"{{"matchExpressions":[{{"key":"{key}","operator":"{operator}","values":[{values}]}}]}}"#
            ))
        };
        assert!(fits("{}"));
        assert!(fits(r#"{"matchLabels":{"zone":"a","gpu":""}}"#));
        assert!(!fits(r#"{"matchLabels":{"zone":"a","gpu":"x"}}"#));
        assert!(!fits(r#"{"matchLabels":{"rack":""}}"#));
        assert!(
            one("zone", "In", r#""a","b""#) && !one("zone", "In", r#""b""#) && !one("rack", "In", r#""a""#)
        );
        assert!(
            one("zone", "NotIn", r#""b""#)
                && !one("zone", "NotIn", r#""a""#)
                && one("rack", "NotIn", r#""a""#)
        );
        assert!(one("gpu", "Exists", "") && !one("rack", "Exists", ""));
        assert!(one("rack", "DoesNotExist", "") && !one("gpu", "DoesNotExist", ""));
    }
}
