//! Owners of the labels of a Node, as the API server keeps them in `metadata.managedFields`: an
//! apply owns what it names, any other write owns what it changes. Other fields and kinds have none
//! here.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Map, Value, json};

use super::json::set;

/// Manager of every write that is no apply.
const OTHER: &str = "other";

/// Manager, and the operation by which it owns.
type Owner = (String, String);

/// Labels by owner.
type Owners = BTreeMap<Owner, BTreeSet<String>>;

/// A write, as far as ownership goes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum By<'a> {
    /// A create, update, patch, or a helper above the API.
    Other,
    /// An apply of this object by this manager.
    Apply(&'a str, &'a Value),
}

fn labels(object: &Value) -> Map<String, Value> {
    let labels = object
        .pointer("/metadata/labels")
        .and_then(Value::as_object);
    labels.cloned().unwrap_or_default()
}

fn owners(object: &Value) -> Owners {
    let entries = object
        .pointer("/metadata/managedFields")
        .and_then(Value::as_array);
    let mut all = Owners::new();
    for entry in entries.into_iter().flatten() {
        let text = |field: &str| {
            entry
                .get(field)
                .and_then(Value::as_str)
                .unwrap_or_default()
                .to_owned()
        };
        let fields = entry
            .pointer("/fieldsV1/f:metadata/f:labels")
            .and_then(Value::as_object);
        let names = fields
            .into_iter()
            .flatten()
            .filter_map(|(name, _)| name.strip_prefix("f:"));
        all.insert(
            (text("manager"), text("operation")),
            names.map(str::to_owned).collect(),
        );
    }
    all
}

/// Returns the owner of a label that an apply would change without being its owner.
pub(crate) fn conflict(
    old: Option<&Value>,
    manager: &str,
    wanted: &Value,
) -> Option<(String, String)> {
    let old = old?;
    let (before, owners) = (labels(old), owners(old));
    labels(wanted).iter().find_map(|(name, value)| {
        let is_changed = before.get(name).is_some_and(|before| before != value);
        let owner = owners.iter().find(|((owner, operation), names)| {
            (owner != manager || operation != "Apply") && names.contains(name)
        });
        let ((owner, _), _) = owner.filter(|_| is_changed)?;
        Some((owner.clone(), format!(".metadata.labels.{name}")))
    })
}

/// Gives labels back that an apply has withdrawn and that another manager owns, too.
pub(crate) fn keep_shared(old: Option<&Value>, object: &mut Value, manager: &str) {
    let Some(old) = old else { return };
    let now = labels(object);
    let owners = owners(old);
    for (name, value) in labels(old) {
        let is_shared = owners.iter().any(|((owner, operation), names)| {
            (owner != manager || operation != "Apply") && names.contains(&name)
        });
        if is_shared && !now.contains_key(&name) {
            set(object, &["metadata", "labels", &name], Some(value));
        }
    }
}

/// Notes whose the labels of a Node are after a write.
pub(crate) fn note(old: Option<&Value>, new: &mut Value, by: By<'_>) {
    let before = old.map(labels).unwrap_or_default();
    let after = labels(new);
    let mut owners = old.map(owners).unwrap_or_default();
    let changed: BTreeSet<&String> = after
        .iter()
        .filter(|(name, value)| before.get(*name) != Some(value))
        .map(|(name, _)| name)
        .collect();
    for names in owners.values_mut() {
        names.retain(|name| after.contains_key(name) && !changed.contains(name));
    }
    match by {
        By::Other => {
            let own = owners
                .entry((OTHER.to_owned(), "Update".to_owned()))
                .or_default();
            own.extend(changed.into_iter().cloned());
        }
        By::Apply(manager, wanted) => {
            let own = labels(wanted).into_iter().map(|(name, _)| name).collect();
            owners.insert((manager.to_owned(), "Apply".to_owned()), own);
        }
    }
    let entry = |((manager, operation), names): (Owner, BTreeSet<String>)| {
        let fields: Map<String, Value> = names
            .into_iter()
            .map(|name| (format!("f:{name}"), json!({})))
            .collect();
        json!({
            "manager": manager, "operation": operation, "apiVersion": "v1", "fieldsType": "FieldsV1",
            "fieldsV1": {"f:metadata": {"f:labels": fields}},
        })
    };
    let entries: Vec<Value> = owners
        .into_iter()
        .filter(|(_, names)| !names.is_empty())
        .map(entry)
        .collect();
    let entries = (!entries.is_empty()).then_some(Value::Array(entries));
    set(new, &["metadata", "managedFields"], entries);
}
