//! Field selectors, and those of labels by value.

use serde_json::Value;

use super::call::Query;
use super::error::ApiError;
use super::json::text;

/// Labels and fields that an object must have. Selectors of sets of labels are refused: none of our
/// programs sends one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    fields: Vec<(String, bool, String)>,
}

impl Selector {
    /// Parses the selector of a request. `minor` is the server's minor version: some field
    /// selectors are young.
    pub(crate) fn parse(plural: &str, query: &Query, minor: u32) -> Result<Self, ApiError> {
        let mut fields = Vec::new();
        for term in query
            .get("fieldSelector")
            .map(String::as_str)
            .unwrap_or_default()
            .split(',')
        {
            if term.is_empty() {
                continue;
            }
            let (key, equal, value) = if let Some((key, value)) = term.split_once("!=") {
                (key, false, value)
            } else if let Some((key, value)) = term.split_once('=') {
                (key, true, value.strip_prefix('=').unwrap_or(value))
            } else {
                return Err(ApiError::new(
                    400,
                    format!("invalid field selector term: {term}"),
                ));
            };
            if !field_is_indexed(plural, key, minor) {
                return Err(ApiError::new(
                    400,
                    format!("field label not supported: {key}"),
                ));
            }
            fields.push((
                format!("/{}", key.replace('.', "/")),
                equal,
                value.to_owned(),
            ));
        }
        let labels = query
            .get("labelSelector")
            .map(String::as_str)
            .unwrap_or_default();
        for term in labels.split(',').filter(|term| !term.is_empty()) {
            let equal = term
                .split_once('=')
                .filter(|(key, _)| !key.contains(['!', ' ', '(']));
            let Some((key, value)) = equal else {
                let message = format!(
                    "the fake API server knows only KEY=VALUE as label selectors, not {term}"
                );
                return Err(ApiError::new(400, message));
            };
            let key = key.replace('~', "~0").replace('/', "~1");
            fields.push((format!("/metadata/labels/{key}"), true, value.to_owned()));
        }
        Ok(Self { fields })
    }

    /// Returns true if the object is selected.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        self.fields
            .iter()
            .all(|(pointer, equal, value)| (text(object, pointer) == value) == *equal)
    }
}

fn field_is_indexed(plural: &str, key: &str, minor: u32) -> bool {
    match (plural, key) {
        (_, "metadata.name" | "metadata.namespace")
        | ("resourceslices", "spec.nodeName" | "spec.driver")
        | ("pods", "spec.nodeName" | "status.phase" | "spec.schedulerName")
        | (
            "events",
            "involvedObject.name" | "involvedObject.uid" | "reason" | "type" | "regarding.name",
        ) => true,
        ("resourceslices", "spec.pool.name") => minor >= 37,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn selects(plural: &str, fields: &str) -> bool {
        let query = [("fieldSelector".into(), fields.into())].into();
        let object = json!({
            "metadata": {"name": "a"},
            "spec": {"nodeName": "n", "driver": "d", "pool": {"name": "p"}},
        });
        Selector::parse(plural, &query, 37)
            .unwrap()
            .matches(&object)
    }

    #[test]
    fn all_terms_must_hold() {
        assert!(selects(
            "resourceslices",
            "spec.nodeName=n,spec.driver==d,spec.pool.name=p"
        ));
        assert!(!selects("resourceslices", "spec.nodeName=n,spec.driver!=d"));
        assert!(selects("pods", "metadata.name=a"));
        let labels = |labels: &str| {
            let query = [("labelSelector".into(), labels.into())].into();
            let object = json!({ "metadata": { "labels": { "a.io/b": "x", "c": "y" } } });
            Selector::parse("pods", &query, 37).map(|selector| selector.matches(&object))
        };
        assert_eq!(labels("a.io/b=x,c=y").ok(), Some(true));
        assert_eq!(labels("a.io/b=x,c=z").ok(), Some(false));
        for set in ["a!=x", "a in (x)", "a"] {
            assert_eq!(labels(set).unwrap_err().code, 400, "{set}");
        }
    }

    #[test]
    fn a_field_selector_the_server_does_not_index_is_refused() {
        let query = |key: &str| [("fieldSelector".into(), format!("{key}=x"))].into();
        let refused = Selector::parse("resourceslices", &query("spec.pool.name"), 36).unwrap_err();
        assert_eq!(
            (refused.code, refused.message.as_str()),
            (400, "field label not supported: spec.pool.name")
        );
        Selector::parse("pods", &query("spec.driver"), 37).unwrap_err();
    }
}
