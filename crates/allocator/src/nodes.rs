//! Choice of the slices and devices that are for a node.

use k8s_openapi::api::core::v1::{Node, NodeSelector, NodeSelectorRequirement, NodeSelectorTerm};
use k8s_openapi::api::resource::v1::Device;
use thiserror::Error;

/// A node selector that cannot be evaluated; fatal, as it is to the scheduler.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum NodeSelectorError {
    /// An operator that is not In, NotIn, Exists, DoesNotExist, Gt or Lt.
    #[error("{0:?} is not a valid node selector operator")]
    Operator(String),
    /// The values do not go with the operator.
    #[error("the node selector operator {0} does not take the values {1:?}")]
    Values(String, Vec<String>),
    /// A field other than `metadata.name`.
    #[error("{0:?} is not a field that a node selector can use")]
    Field(String),
}

/// A node's name.
pub(crate) fn name(node: &Node) -> &str {
    node.metadata.name.as_deref().unwrap_or_default()
}

/// Says whether one of a device's own three node fields selects the node.
pub(crate) fn device_is_for(device: &Device, node: &Node) -> Result<bool, NodeSelectorError> {
    if let Some(wanted) = &device.node_name {
        return Ok(wanted == name(node));
    }
    if device.all_nodes == Some(true) {
        return Ok(true);
    }
    device
        .node_selector
        .as_ref()
        .map_or(Ok(false), |selector| matches(selector, node))
}

/// Says whether any term of a node selector, such as an allocation's, matches the node. A mistake
/// anywhere in it is an error.
pub fn matches(selector: &NodeSelector, node: &Node) -> Result<bool, NodeSelectorError> {
    selector
        .node_selector_terms
        .iter()
        .try_fold(false, |any, term| Ok(term_matches(term, node)? || any))
}

fn term_matches(term: &NodeSelectorTerm, node: &Node) -> Result<bool, NodeSelectorError> {
    let expressions = term.match_expressions.as_deref().unwrap_or_default();
    let fields = term.match_fields.as_deref().unwrap_or_default();
    // A term without conditions selects nothing.
    let mut all = !(expressions.is_empty() && fields.is_empty());
    for requirement in expressions {
        let labels = node.metadata.labels.as_ref();
        let value = labels
            .and_then(|l| l.get(&requirement.key))
            .map(String::as_str);
        all &= requirement_holds(requirement, value)?;
    }
    for requirement in fields {
        if requirement.key != "metadata.name" {
            return Err(NodeSelectorError::Field(requirement.key.clone()));
        }
        all &= requirement_holds(requirement, Some(name(node)))?;
    }
    Ok(all)
}

fn requirement_holds(
    requirement: &NodeSelectorRequirement,
    value: Option<&str>,
) -> Result<bool, NodeSelectorError> {
    let (operator, values) = (
        requirement.operator.as_str(),
        requirement.values.as_deref().unwrap_or_default(),
    );
    let listed = || value.is_some_and(|v| values.iter().any(|listed| listed == v));
    let number = value.and_then(|text| text.parse::<i64>().ok());
    let limit = || match values {
        [limit] => limit.parse::<i64>().ok(),
        _ => None,
    };
    let holds = match operator {
        "In" => (!values.is_empty()).then(listed),
        "NotIn" => (!values.is_empty()).then(|| !listed()),
        "Exists" => values.is_empty().then_some(value.is_some()),
        "DoesNotExist" => values.is_empty().then_some(value.is_none()),
        "Gt" => limit().map(|limit| number.is_some_and(|number| number > limit)),
        "Lt" => limit().map(|limit| number.is_some_and(|number| number < limit)),
        other => return Err(NodeSelectorError::Operator(other.to_owned())),
    };
    holds.ok_or_else(|| NodeSelectorError::Values(operator.to_owned(), values.to_vec()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requirement(key: &str, operator: &str, values: &[&str]) -> NodeSelectorRequirement {
        NodeSelectorRequirement {
            key: key.to_owned(),
            operator: operator.to_owned(),
            values: Some(values.iter().map(|v| (*v).to_owned()).collect()),
        }
    }

    fn selects(expressions: Vec<NodeSelectorRequirement>) -> Result<bool, NodeSelectorError> {
        let mut node = Node::default();
        node.metadata.name = Some("n1".to_owned());
        node.metadata.labels = Some(
            [("zone", "a"), ("rank", "5")]
                .map(|(k, v)| (k.to_owned(), v.to_owned()))
                .into(),
        );
        let (fields, expressions) = expressions
            .into_iter()
            .partition(|r| r.key.starts_with("metadata."));
        let term = NodeSelectorTerm {
            match_expressions: Some(expressions),
            match_fields: Some(fields),
        };
        matches(
            &NodeSelector {
                node_selector_terms: vec![term],
            },
            &node,
        )
    }

    #[test]
    fn every_operator_decides_as_the_scheduler_does() {
        for (key, operator, values, expected) in [
            ("zone", "In", &["a", "b"][..], true),
            ("zone", "In", &["b"], false),
            ("none", "In", &["b"], false),
            ("zone", "NotIn", &["a"], false),
            ("none", "NotIn", &["a"], true),
            ("zone", "Exists", &[], true),
            ("none", "Exists", &[], false),
            ("none", "DoesNotExist", &[], true),
            ("rank", "Gt", &["4"], true),
            ("rank", "Gt", &["5"], false),
            ("rank", "Lt", &["6"], true),
            ("zone", "Lt", &["6"], false),
            ("metadata.name", "In", &["n1"], true),
            ("metadata.name", "NotIn", &["n1"], false),
        ] {
            assert_eq!(
                selects(vec![requirement(key, operator, values)]),
                Ok(expected),
                "{key} {operator}"
            );
        }
    }

    #[test]
    fn an_empty_term_selects_nothing_and_unknown_parts_are_errors() {
        assert_eq!(selects(Vec::new()), Ok(false));
        assert_eq!(
            selects(vec![requirement("zone", "Like", &["a"])]),
            Err(NodeSelectorError::Operator("Like".to_owned()))
        );
        assert_eq!(
            selects(vec![requirement("metadata.uid", "In", &["a"])]),
            Err(NodeSelectorError::Field("metadata.uid".to_owned()))
        );
    }
}
