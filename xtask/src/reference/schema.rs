//! The fields of a CustomResourceDefinition.

use anyhow::{Context, Result};
use serde_json::Value;

use super::cell;

pub(super) fn page(definition: &Value) -> Result<String> {
    let text = |pointer: &str| {
        definition
            .pointer(pointer)
            .and_then(Value::as_str)
            .unwrap_or_default()
    };
    let schema = definition
        .pointer("/spec/versions/0/schema/openAPIV3Schema")
        .context("a definition without a schema")?;
    let mut rows = String::new();
    fields(schema, "", &mut rows);
    Ok(format!(
        "# {}\n\n{}\n\n`apiVersion: {}/{}`, {}; `kubectl get {}`.\n\n| field | type | meaning |\n|---|---|---|\n{rows}",
        text("/spec/names/kind"),
        description(schema),
        text("/spec/group"),
        text("/spec/versions/0/name"),
        if text("/spec/scope") == "Cluster" {
            "cluster-scoped"
        } else {
            "namespaced"
        },
        text("/spec/names/plural"),
    ))
}

fn description(schema: &Value) -> String {
    cell(
        schema
            .get("description")
            .and_then(Value::as_str)
            .unwrap_or_default(),
    )
}

fn fields(schema: &Value, path: &str, rows: &mut String) {
    let required = schema.get("required").and_then(Value::as_array);
    for (name, field) in schema
        .get("properties")
        .and_then(Value::as_object)
        .into_iter()
        .flatten()
    {
        // Kubernetes' own.
        if path.is_empty() && ["apiVersion", "kind", "metadata"].contains(&name.as_str()) {
            continue;
        }
        let path = format!("{path}{name}");
        let must = required.is_some_and(|required| required.iter().any(|one| one == name));
        let mut meaning = description(field);
        if let Some(values) = field
            .get("enum")
            .or_else(|| field.pointer("/items/enum"))
            .and_then(Value::as_array)
        {
            let values: Vec<String> = values
                .iter()
                .map(|value| format!("`{}`", plain(value)))
                .collect();
            meaning += &format!(" One of {}.", values.join(", "));
        }
        if let Some(default) = field.get("default") {
            meaning += &format!(" Default `{}`.", plain(default));
        }
        let must = if must { ", required" } else { "" };
        *rows += &format!(
            "| `{path}` | {}{must} | {} |\n",
            kind(field),
            meaning.trim()
        );
        let (inner, dots) = match (field.get("items"), field.get("additionalProperties")) {
            (Some(items), _) => (items, "[]."),
            (None, Some(values)) => (values, ".*."),
            (None, None) => (field, "."),
        };
        fields(inner, &format!("{path}{dots}"), rows);
    }
}

fn kind(field: &Value) -> String {
    let name = field.get("type").and_then(Value::as_str).unwrap_or("any");
    match (
        field.get("items"),
        field.get("additionalProperties"),
        field.get("format").and_then(Value::as_str),
    ) {
        (Some(items), ..) => format!("list of {}", kind(items)),
        (None, Some(values), _) => format!("map to {}", kind(values)),
        (None, None, Some("date-time")) => "time".to_owned(),
        _ => name.to_owned(),
    }
}

fn plain(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}
