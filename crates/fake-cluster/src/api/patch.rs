//! Merge patch, and server-side apply good enough for one owner per field.

use serde_json::{Map, Value};

/// Lists that are merged by key, by the name of the field that holds them.
const LIST_KEYS: [(&str, &[&str]); 5] = [
    ("conditions", &["type"]),
    ("reservedFor", &["uid"]),
    ("ownerReferences", &["uid"]),
    ("containers", &["name"]),
    ("resourceClaimStatuses", &["name"]),
];

/// Keys of `status.devices` of a ResourceClaim.
const DEVICE_STATUS_KEYS: &[&str] = &["driver", "pool", "device", "shareID"];

/// JSON merge patch (RFC 7386): null removes, lists are replaced.
pub(crate) fn merge(target: &mut Value, patch: &Value) {
    let Value::Object(changes) = patch else {
        *target = patch.clone();
        return;
    };
    with_object(target, |map| {
        for (key, change) in changes {
            if change.is_null() {
                map.remove(key);
            } else {
                merge(map.entry(key.clone()).or_insert(Value::Null), change);
            }
        }
    });
}

/// Server-side apply: what this owner applied before and no longer applies goes away, the rest is
/// merged.
pub(crate) fn apply(target: &mut Value, before: Option<&Value>, wanted: &Value) {
    if let Some(before) = before {
        withdraw(target, before, Some(wanted), "");
    }
    lay_over(target, wanted, "");
}

/// A field that another owner applied and that `wanted` would change, as a dotted path.
pub(crate) fn conflict(theirs: &Value, wanted: &Value, path: &str) -> Option<String> {
    match (theirs, wanted) {
        (Value::Object(theirs), Value::Object(wanted)) => theirs.iter().find_map(|(key, value)| {
            let at = format!("{path}.{key}");
            // Names and versions of the object itself are not owned fields.
            if matches!(
                at.as_str(),
                ".metadata.name" | ".metadata.namespace" | ".apiVersion" | ".kind"
            ) {
                return None;
            }
            wanted
                .get(key)
                .and_then(|wanted| conflict(value, wanted, &at))
        }),
        // Lists merged by key are not followed: each owner has entries of its own there.
        (Value::Array(_), Value::Array(_)) if list_keys(path).is_some() => None,
        (theirs, wanted) => (theirs != wanted).then(|| path.to_owned()),
    }
}

/// Runs `change` on the map in `value`, which becomes an empty map first if it is anything else.
fn with_object(value: &mut Value, change: impl FnOnce(&mut Map<String, Value>)) {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    if let Some(map) = value.as_object_mut() {
        change(map);
    }
}

/// The merge keys of the list at a path such as `.status.devices`.
fn list_keys(path: &str) -> Option<&'static [&'static str]> {
    if path == ".status.devices" {
        return Some(DEVICE_STATUS_KEYS);
    }
    let field = path.rsplit('.').next()?;
    LIST_KEYS
        .iter()
        .find(|(name, _)| *name == field)
        .map(|(_, keys)| *keys)
}

fn same_entry(a: &Value, b: &Value, keys: &[&str]) -> bool {
    keys.iter().all(|key| a.get(key) == b.get(key))
}

fn withdraw(target: &mut Value, before: &Value, wanted: Option<&Value>, path: &str) {
    match (target, before) {
        (Value::Object(target), Value::Object(before)) => {
            for (key, was) in before {
                let now = wanted.and_then(|w| w.get(key));
                let at = format!("{path}.{key}");
                let nested = was.is_object() || list_keys(&at).is_some();
                if nested && let Some(inner) = target.get_mut(key) {
                    withdraw(inner, was, now, &at);
                    let emptied = inner.as_object().is_some_and(Map::is_empty)
                        || inner.as_array().is_some_and(Vec::is_empty);
                    if now.is_none() && emptied {
                        target.remove(key);
                    }
                } else if now.is_none() {
                    target.remove(key);
                }
            }
        }
        (Value::Array(target), Value::Array(before)) => {
            let Some(keys) = list_keys(path) else { return };
            let kept = wanted.and_then(Value::as_array);
            target.retain(|entry| {
                let ours = before.iter().any(|b| same_entry(entry, b, keys));
                !ours || kept.is_some_and(|kept| kept.iter().any(|k| same_entry(entry, k, keys)))
            });
        }
        _ => {}
    }
}

fn lay_over(target: &mut Value, wanted: &Value, path: &str) {
    match wanted {
        Value::Object(wanted) => with_object(target, |map| {
            for (key, value) in wanted {
                lay_over(
                    map.entry(key.clone()).or_insert(Value::Null),
                    value,
                    &format!("{path}.{key}"),
                );
            }
        }),
        Value::Array(wanted) => match (target.as_array_mut(), list_keys(path)) {
            (Some(list), Some(keys)) => {
                for entry in wanted {
                    match list.iter_mut().find(|old| same_entry(old, entry, keys)) {
                        Some(old) => lay_over(old, entry, &format!("{path}.*")),
                        None => list.push(entry.clone()),
                    }
                }
            }
            _ => *target = Value::Array(wanted.clone()),
        },
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {
            *target = wanted.clone();
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_merge_patch_removes_nulls_and_replaces_lists() {
        let mut object = json!({"a": {"b": 1, "c": 2}, "l": [1, 2]});
        merge(&mut object, &json!({"a": {"b": null, "d": 3}, "l": [9]}));
        assert_eq!(object, json!({"a": {"c": 2, "d": 3}, "l": [9]}));
    }

    #[test]
    fn apply_removes_what_its_owner_no_longer_wants_and_keeps_the_rest() {
        let mut object = json!({"spec": {"x": 1, "theirs": true, "devices": [{"name": "a"}]}});
        let before = json!({"spec": {"x": 1, "devices": [{"name": "a"}]}});
        apply(
            &mut object,
            Some(&before),
            &json!({"spec": {"devices": [{"name": "b"}]}}),
        );
        assert_eq!(
            object,
            json!({"spec": {"theirs": true, "devices": [{"name": "b"}]}})
        );
    }

    #[test]
    fn claim_device_statuses_of_two_drivers_live_side_by_side() {
        let entry = |driver: &str, data: u32| json!({"driver": driver, "pool": "p", "device": "d", "data": data});
        let mut object = json!({"status": {"devices": [entry("other", 1), entry("ours", 1)]}});
        let before = json!({"status": {"devices": [entry("ours", 1)]}});
        apply(
            &mut object,
            Some(&before),
            &json!({"status": {"devices": [entry("ours", 2)]}}),
        );
        assert_eq!(
            object,
            json!({"status": {"devices": [entry("other", 1), entry("ours", 2)]}})
        );
        apply(
            &mut object,
            Some(&json!({"status": {"devices": [entry("ours", 2)]}})),
            &json!({}),
        );
        assert_eq!(object, json!({"status": {"devices": [entry("other", 1)]}}));
    }

    #[test]
    fn a_field_of_another_owner_is_a_conflict_only_when_it_changes() {
        let theirs = json!({"metadata": {"name": "n"}, "spec": {"x": 1, "y": 2}});
        assert_eq!(conflict(&theirs, &json!({"spec": {"x": 1}}), ""), None);
        assert_eq!(
            conflict(&theirs, &json!({"spec": {"y": 3}}), ""),
            Some(".spec.y".into())
        );
    }
}
