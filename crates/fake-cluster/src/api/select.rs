//! Field and label selectors.

use serde_json::Value;

use super::call::Query;
use super::error::ApiError;
use super::json::text;

/// A parsed pair of selectors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Selector {
    fields: Vec<(String, bool, String)>,
    labels: Vec<Label>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Label {
    In(String, Vec<String>),
    NotIn(String, Vec<String>),
    Exists(String),
    Absent(String),
}

impl Selector {
    /// Parses both selectors of a request. `minor` is the server's minor version: some field selectors are young.
    pub(crate) fn parse(plural: &str, query: &Query, minor: u32) -> Result<Self, ApiError> {
        let mut fields = Vec::new();
        for term in query.get("fieldSelector").map(String::as_str).unwrap_or_default().split(',') {
            if term.is_empty() {
                continue;
            }
            let (key, equal, value) = if let Some((key, value)) = term.split_once("!=") {
                (key, false, value)
            } else if let Some((key, value)) = term.split_once('=') {
                (key, true, value.strip_prefix('=').unwrap_or(value))
            } else {
                return Err(ApiError::new(400, format!("invalid field selector term: {term}")));
            };
            if !field_is_indexed(plural, key, minor) {
                return Err(ApiError::new(400, format!("field label not supported: {key}")));
            }
            fields.push((format!("/{}", key.replace('.', "/")), equal, value.to_owned()));
        }
        let labels = terms(query.get("labelSelector").map(String::as_str).unwrap_or_default());
        Ok(Self { fields, labels: labels.into_iter().map(label).collect::<Result<_, _>>()? })
    }

    /// Whether the object is selected.
    pub(crate) fn matches(&self, object: &Value) -> bool {
        let labels = object.pointer("/metadata/labels");
        let label = |key: &str| labels.and_then(|l| l.get(key)).and_then(Value::as_str);
        self.fields.iter().all(|(pointer, equal, value)| (text(object, pointer) == value) == *equal)
            && self.labels.iter().all(|term| match term {
                Label::In(key, values) => label(key).is_some_and(|l| values.iter().any(|v| v == l)),
                Label::NotIn(key, values) => !label(key).is_some_and(|l| values.iter().any(|v| v == l)),
                Label::Exists(key) => label(key).is_some(),
                Label::Absent(key) => label(key).is_none(),
            })
    }
}

fn field_is_indexed(plural: &str, key: &str, minor: u32) -> bool {
    match (plural, key) {
        (_, "metadata.name" | "metadata.namespace")
        | ("resourceslices", "spec.nodeName" | "spec.driver")
        | ("pods", "spec.nodeName" | "status.phase" | "spec.schedulerName")
        | ("events", "involvedObject.name" | "involvedObject.uid" | "reason" | "type" | "regarding.name") => {
            true
        }
        ("resourceslices", "spec.pool.name") => minor >= 37,
        _ => false,
    }
}

/// Splits at the commas outside parentheses.
fn terms(selector: &str) -> Vec<&str> {
    let mut depth = 0_u32;
    selector
        .split(|c: char| {
            match c {
                '(' => depth += 1,
                ')' => depth = depth.saturating_sub(1),
                _ => {}
            }
            c == ',' && depth == 0
        })
        .map(str::trim)
        .filter(|term| !term.is_empty())
        .collect()
}

fn label(term: &str) -> Result<Label, ApiError> {
    let set = |values: &str| {
        let inner = values.trim().strip_prefix('(').and_then(|v| v.strip_suffix(')'));
        inner
            .map(|v| v.split(',').map(|s| s.trim().to_owned()).collect::<Vec<_>>())
            .ok_or_else(|| ApiError::new(400, format!("invalid label selector term: {term}")))
    };
    if let Some((key, values)) = term.split_once(" notin ") {
        return Ok(Label::NotIn(key.trim().into(), set(values)?));
    }
    if let Some((key, values)) = term.split_once(" in ") {
        return Ok(Label::In(key.trim().into(), set(values)?));
    }
    if let Some((key, value)) = term.split_once("!=") {
        return Ok(Label::NotIn(key.trim().into(), vec![value.trim().into()]));
    }
    if let Some((key, value)) = term.split_once('=') {
        let value = value.strip_prefix('=').unwrap_or(value);
        return Ok(Label::In(key.trim().into(), vec![value.trim().into()]));
    }
    Ok(match term.strip_prefix('!') {
        Some(key) => Label::Absent(key.trim().into()),
        None => Label::Exists(term.into()),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn selects(plural: &str, fields: &str, labels: &str) -> bool {
        let query = [("fieldSelector".into(), fields.into()), ("labelSelector".into(), labels.into())].into();
        let object = json!({
            "metadata": {"name": "a", "labels": {"app": "x", "tier": "1"}},
            "spec": {"nodeName": "n", "driver": "d", "pool": {"name": "p"}},
        });
        Selector::parse(plural, &query, 37).unwrap().matches(&object)
    }

    #[test]
    fn terms_of_both_selectors_are_anded() {
        assert!(selects(
            "resourceslices",
            "spec.nodeName=n,spec.driver==d,spec.pool.name=p",
            "app=x,tier in (1,2),!z"
        ));
        assert!(!selects("resourceslices", "spec.nodeName=n,spec.driver!=d", ""));
        assert!(!selects("resourceslices", "spec.nodeName=n", "app notin (x, y)"));
        assert!(!selects("pods", "metadata.name=a", "app=x,missing"));
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
