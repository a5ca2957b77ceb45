//! Label selectors, as everywhere in Kubernetes.

use std::collections::{BTreeMap, BTreeSet};

use kube_core::{Expression, Selector, SelectorExt};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::LABEL;

/// Selects nodes by their labels. All requirements must be met; an empty selector matches every
/// node.
///
/// Kubernetes' own type takes any operator and ignores unknown fields; this one is as strict as the
/// schema.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct LabelSelector {
    /// Labels that must have exactly these values.
    #[schemars(extend("maxProperties" = 64), with = "BTreeMap<String, LabelValue>")]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub match_labels: BTreeMap<String, String>,
    /// Requirements on labels. All of them must be met.
    #[schemars(length(max = 32))]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub match_expressions: Vec<Requirement>,
}

/// The schema of a label's value.
#[derive(JsonSchema)]
#[schemars(transparent)]
struct LabelValue(
    #[schemars(length(max = 63), regex(pattern = LABEL))]
    #[expect(dead_code, reason = "a schema only")]
    String,
);

/// A requirement on one label.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("x-kubernetes-validations" = [{
    "rule": "self.operator in ['In', 'NotIn'] ? has(self.values) && size(self.values) > 0 : !has(self.values) || size(self.values) == 0",
    "message": "In and NotIn need values, Exists and DoesNotExist have none",
}]))]
pub struct Requirement {
    /// The key of the label.
    #[schemars(
        length(max = 317),
        regex(
            pattern = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
        )
    )]
    pub key: String,
    /// The comparison of the label with the values.
    pub operator: Operator,
    /// The values for In and NotIn. Exists and DoesNotExist take none.
    #[schemars(
        length(max = 64),
        inner(length(max = 63), regex(pattern = LABEL)),
        extend("x-kubernetes-list-type" = "set")
    )]
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub values: BTreeSet<String>,
}

/// The comparison of a label.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
pub enum Operator {
    /// The label has one of the values.
    In,
    /// The label has none of the values, or is absent.
    NotIn,
    /// The label is present.
    Exists,
    /// The label is absent.
    DoesNotExist,
}

impl LabelSelector {
    /// Returns whether labels match.
    pub fn matches(&self, labels: &BTreeMap<String, String>) -> bool {
        // `match_labels` and `match_expressions` are ANDed, as in Kubernetes' LabelSelector.
        let equal: Selector = self.match_labels.clone().into_iter().collect();
        equal.matches(labels)
            && self
                .match_expressions
                .iter()
                .all(|one| one.expression().matches(labels))
    }
}

impl Requirement {
    fn expression(&self) -> Expression {
        let (key, values) = (self.key.clone(), self.values.clone());
        match self.operator {
            Operator::In => Expression::In(key, values),
            Operator::NotIn => Expression::NotIn(key, values),
            Operator::Exists => Expression::Exists(key),
            Operator::DoesNotExist => Expression::DoesNotExist(key),
        }
    }

    /// Returns whether the values go with the operator.
    pub(crate) fn is_complete(&self) -> bool {
        // The rule of the schema above, for clusters whose schema is older.
        matches!(self.operator, Operator::In | Operator::NotIn) != self.values.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_selector_fits_when_every_part_does() {
        let labels = BTreeMap::from([
            ("zone".to_owned(), "a".to_owned()),
            ("gpu".to_owned(), String::new()),
        ]);
        let fits = |text: &str| {
            serde_json::from_str::<LabelSelector>(text)
                .unwrap()
                .matches(&labels)
        };
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
            one("zone", "In", r#""a","b""#)
                && !one("zone", "In", r#""b""#)
                && !one("rack", "In", r#""a""#)
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
