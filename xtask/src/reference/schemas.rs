//! JSON schemas of the opaque configs and of GpuPolicy, for editors and for checks of manifests.

use anyhow::{Context, Result};
use divvy_api::names::API_VERSION;
use divvy_model::{MpsPriority, TimeSlice};
use serde_json::{Map, Value, json};

use super::configs::{FIELDS, examples};

/// Version of JSON Schema that editors know.
const DIALECT: &str = "http://json-schema.org/draft-07/schema#";

/// Returns the schemas by the names of their files.
pub(super) fn all() -> Result<Vec<(String, Value)>> {
    let mut files = Vec::new();
    for (what, configs) in examples()? {
        let kind = configs.first().context("a kind without an example")?.kind;
        let mut properties = json!({
            "apiVersion": {"const": API_VERSION},
            "kind": {"const": kind.name()},
        });
        let values: Vec<Value> = configs
            .iter()
            .map(divvy_api::DeviceConfig::to_value)
            .collect();
        for (field, meaning) in FIELDS {
            let pointer = format!("/{}", field.replace('.', "/"));
            if values.iter().any(|value| value.pointer(&pointer).is_some()) {
                put(&mut properties, field, meaning)?;
            }
        }
        let schema = json!({
            "$schema": DIALECT,
            "title": kind.name(),
            "description": format!("Config of a claim or class, for {what}."),
            "type": "object",
            "required": ["apiVersion", "kind"],
            "additionalProperties": false,
            "properties": properties,
        });
        files.push((format!("{}.json", kind.name()), schema));
    }
    for (file, definition) in divvy_api::crd::all()? {
        if file.starts_with("gpupolicies") {
            let schema = definition.pointer("/spec/versions/0/schema/openAPIV3Schema");
            let mut schema = schema.context("a CRD without a schema")?.clone();
            if let Some(fields) = schema.as_object_mut() {
                fields.insert("$schema".to_owned(), DIALECT.into());
            }
            files.push(("GpuPolicy.json".to_owned(), schema));
        }
    }
    Ok(files)
}

/// Puts a field into the properties, with the objects that it is in.
fn put(properties: &mut Value, field: &str, meaning: &str) -> Result<()> {
    let plain = meaning.split_whitespace().collect::<Vec<_>>().join(" ");
    let mut at = properties.as_object_mut().context("properties")?;
    let mut steps = field.split('.').peekable();
    while let Some(step) = steps.next() {
        if steps.peek().is_none() {
            let mut schema = leaf(field);
            schema.insert("description".to_owned(), without_links(&plain).into());
            at.insert(step.to_owned(), schema.into());
            return Ok(());
        }
        let inner = at
            .entry(step)
            .or_insert_with(|| object().into())
            .pointer_mut("/properties");
        at = inner
            .and_then(Value::as_object_mut)
            .context("a field below one that is no object")?;
    }
    Ok(())
}

fn object() -> Map<String, Value> {
    let empty = json!({"type": "object", "additionalProperties": false, "properties": {}});
    empty.as_object().cloned().unwrap_or_default()
}

/// Returns what a field can be.
fn leaf(field: &str) -> Map<String, Value> {
    let schema = match field {
        "timeSlicing.interval" => json!({"enum": TimeSlice::ALL.map(TimeSlice::name)}),
        "priority" => json!({"enum": MpsPriority::ALL.map(MpsPriority::name)}),
        "limits.cores" | "mps.limits.cores" => {
            json!({"type": "integer", "minimum": 1, "maximum": 100})
        }
        "extraNodes" => json!({"type": "array", "items": {"type": "string", "pattern": "^/dev/"}}),
        "mps" => return object(),
        _ => json!({"type": "string", "examples": ["16Gi"]}),
    };
    schema.as_object().cloned().unwrap_or_default()
}

/// Returns a text with the words of its links alone.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once('[') {
        plain += before;
        let link = after.split_once("](");
        let link = link.and_then(|(words, link)| Some((words, link.split_once(')')?.1)));
        if let Some((words, behind)) = link {
            plain += words;
            rest = behind;
        } else {
            plain.push('[');
            rest = after;
        }
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use divvy_api::decode;

    use super::*;

    /// Sets a field of a config.
    fn with(kind: &Value, pointer: &str, value: Value) -> Value {
        let mut config = json!({"apiVersion": API_VERSION, "kind": kind});
        let steps: Vec<&str> = pointer.split('.').collect();
        let (last, above) = steps.split_last().unwrap();
        let mut at = &mut config;
        for step in above {
            at = at
                .as_object_mut()
                .unwrap()
                .entry(*step)
                .or_insert(json!({}));
        }
        at[*last] = value;
        config
    }

    /// Returns a value that a kind with the field takes.
    fn plausible(field: &str) -> Value {
        let schema = Value::from(leaf(field));
        let found = ["/enum/0", "/minimum", "/examples/0"].map(|at| schema.pointer(at));
        let found = found.into_iter().flatten().next().cloned();
        match field {
            "mps" => json!({}),
            "extraNodes" => json!(["/dev/gdrdrv"]),
            _ => found.unwrap(),
        }
    }

    #[test]
    fn the_schemas_take_and_refuse_what_the_decoder_does() {
        let mut fields = 0;
        for (file, schema) in all().unwrap() {
            if file == "GpuPolicy.json" {
                assert!(
                    schema
                        .pointer("/properties/spec/properties/rules")
                        .is_some()
                );
                continue;
            }
            let kind = &schema["properties"]["kind"]["const"];
            assert!(decode(&with(kind, "unknown", json!(1))).is_err(), "{file}");
            for (field, _) in FIELDS {
                let pointer = format!("/properties/{}", field.replace('.', "/properties/"));
                let Some(found) = schema.pointer(&pointer) else {
                    let config = with(kind, field, plausible(field));
                    assert!(decode(&config).is_err(), "{file} {field}");
                    continue;
                };
                fields += 1;
                for value in found["enum"].as_array().into_iter().flatten() {
                    decode(&with(kind, field, value.clone())).unwrap();
                }
                if let (Some(least), Some(most)) =
                    (found["minimum"].as_i64(), found["maximum"].as_i64())
                {
                    for (value, taken) in [
                        (least, true),
                        (most, true),
                        (least - 1, false),
                        (most + 1, false),
                    ] {
                        let config = with(kind, field, json!(value));
                        assert_eq!(decode(&config).is_ok(), taken, "{file} {field} {value}");
                    }
                }
                if let Some(example) = found.pointer("/examples/0") {
                    decode(&with(kind, field, example.clone())).unwrap();
                }
            }
        }
        assert!(fields > 10, "{fields}");
    }
}
