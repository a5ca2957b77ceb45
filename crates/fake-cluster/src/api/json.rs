//! Small helpers over JSON values: objects are kept untyped, as the server's storage does.

use serde_json::{Map, Value};

/// The string at a JSON pointer, or "" where there is none.
pub(crate) fn text<'a>(value: &'a Value, pointer: &str) -> &'a str {
    value.pointer(pointer).and_then(Value::as_str).unwrap_or("")
}

/// Sets or (with `None`) removes the value at a path of object keys.
pub(crate) fn set(value: &mut Value, path: &[&str], new: Option<Value>) {
    let Some((first, rest)) = path.split_first() else {
        return;
    };
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    let Some(map) = value.as_object_mut() else {
        return;
    };
    match (rest.is_empty(), new) {
        (true, Some(new)) => {
            map.insert((*first).to_owned(), new);
        }
        (true, None) => {
            map.remove(*first);
        }
        (false, None) if !map.contains_key(*first) => {}
        (false, new) => set(
            map.entry((*first).to_owned()).or_insert(Value::Null),
            rest,
            new,
        ),
    }
}

/// Copies the value at a path from one object to another; absent there means absent here.
pub(crate) fn copy(from: &Value, to: &mut Value, path: &[&str]) {
    let mut found = Some(from);
    for key in path {
        found = found.and_then(|v| v.get(key));
    }
    set(to, path, found.cloned());
}

/// Removes empty lists and maps below `value`: the server's storage format does not keep them.
pub(crate) fn prune_empty(value: &mut Value) {
    match value {
        Value::Object(map) => {
            map.values_mut().for_each(prune_empty);
            map.retain(|_, v| !is_empty(v));
        }
        Value::Array(list) => list.iter_mut().for_each(prune_empty),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Object(map) => map.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Null => true,
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}
