//! The labels by which the DaemonSet of the plugin selects its nodes.

use std::collections::BTreeMap;
use std::str::FromStr;

/// A selector of nodes, as `kubectl -l` takes it: `key=value` and `key!=value`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeSelector(Vec<Requirement>);

/// A label with a value that a node must have, or must not have.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Requirement {
    key: String,
    value: String,
    /// True for `=`, false for `!=`.
    equal: bool,
}

impl NodeSelector {
    /// Returns whether nodes are selected by labels at all.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a node with these labels is selected.
    pub(crate) fn selects(&self, labels: &BTreeMap<String, String>) -> bool {
        self.0
            .iter()
            .all(|wanted| (labels.get(&wanted.key) == Some(&wanted.value)) == wanted.equal)
    }
}

impl FromStr for NodeSelector {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let requirement = |text: &str| {
            let parts = text.split_once("!=").map(|parts| (parts, false));
            let parts = parts.or_else(|| text.split_once('=').map(|parts| (parts, true)));
            match parts {
                Some(((key, value), equal)) if !key.trim().is_empty() => Ok(Requirement {
                    key: key.trim().to_owned(),
                    value: value.trim().to_owned(),
                    equal,
                }),
                _ => Err(format!(
                    "{text:?} is no requirement; expected key=value or key!=value, separated by commas"
                )),
            }
        };
        text.split(',')
            .map(str::trim)
            .filter(|text| !text.is_empty())
            .map(requirement)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_selected_while_it_has_all_labels_and_none_that_is_excluded() {
        let selects = |selector: &str, labels: &[(&str, &str)]| {
            let labels = labels
                .iter()
                .map(|(k, v)| ((*k).to_owned(), (*v).to_owned()));
            let selector: NodeSelector = selector.parse().unwrap();
            selector.selects(&labels.collect())
        };
        let on = ("divvy.dev/gpu", "true");
        assert!(selects("", &[]) && selects("", &[on]));
        assert!(selects("divvy.dev/gpu=true", &[on]));
        assert!(!selects("divvy.dev/gpu=true", &[]));
        assert!(!selects(
            "divvy.dev/gpu=true",
            &[("divvy.dev/gpu", "false")]
        ));
        assert!(!selects("divvy.dev/gpu=true, rack=1", &[on]));
        assert!(selects("divvy.dev/gpu!=false", &[]));
        assert!(!selects(
            "divvy.dev/gpu!=false",
            &[("divvy.dev/gpu", "false")]
        ));
        assert!("divvy.dev/gpu".parse::<NodeSelector>().is_err());
        assert!("=true".parse::<NodeSelector>().is_err());
    }
}
