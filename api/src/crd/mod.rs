//! The CustomResourceDefinitions as values. `cargo xtask crds` writes them into the chart; tests hold them against
//! the types that decode the objects. No program of a node contains them.

mod node;
mod policy;

use serde_json::{Map, Value, json};

use crate::names::{GROUP, VERSION};

pub use node::gpu_node;
pub use policy::gpu_policy;

/// All definitions, with the name of their file in the chart.
pub fn all() -> Vec<(&'static str, Value)> {
    vec![("gpunodes.yaml", gpu_node()), ("gpupolicies.yaml", gpu_policy())]
}

/// Names of one kind.
struct Names {
    kind: &'static str,
    plural: &'static str,
    singular: &'static str,
    short: &'static str,
}

/// A cluster-scoped definition with one version.
fn definition(names: &Names, schema: &Value, columns: &[Value], status: bool) -> Value {
    let mut version = json!({
        "name": VERSION,
        "served": true,
        "storage": true,
        "additionalPrinterColumns": columns,
        "schema": { "openAPIV3Schema": schema },
    });
    if let (true, Some(version)) = (status, version.as_object_mut()) {
        version.insert("subresources".to_owned(), json!({ "status": {} }));
    }
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": { "name": format!("{}.{GROUP}", names.plural) },
        "spec": {
            "group": GROUP,
            "names": {
                "kind": names.kind,
                "listKind": format!("{}List", names.kind),
                "plural": names.plural,
                "singular": names.singular,
                "shortNames": [names.short],
                "categories": ["divvy"],
            },
            "scope": "Cluster",
            "versions": [version],
        },
    })
}

fn column(name: &str, kind: &str, path: &str, description: &str) -> Value {
    json!({ "name": name, "type": kind, "jsonPath": path, "description": description })
}

/// A value with more of its schema: `with(text(…), json!({ "maxLength": 63 }))`.
fn with(mut schema: Value, more: Value) -> Value {
    if let (Some(schema), Value::Object(more)) = (schema.as_object_mut(), more) {
        schema.extend(more);
    }
    schema
}

fn object(description: &str, properties: Value) -> Value {
    let properties = Value::Object(Map::from_iter([("properties".to_owned(), properties)]));
    with(json!({ "type": "object", "description": description }), properties)
}

fn text(description: &str) -> Value {
    json!({ "type": "string", "description": description })
}

fn one_of(description: &str, values: &[&str]) -> Value {
    json!({ "type": "string", "description": description, "enum": values })
}

fn number(description: &str, least: i64, most: i64) -> Value {
    json!({ "type": "integer", "format": "int64", "description": description, "minimum": least, "maximum": most })
}

/// A list in which nothing is twice.
fn set(description: &str, most: usize, item: &Value) -> Value {
    json!({
        "type": "array",
        "description": description,
        "minItems": 1,
        "maxItems": most,
        "x-kubernetes-list-type": "set",
        "items": item,
    })
}

fn rule(rule: &str, message: &str) -> Value {
    json!({ "rule": rule, "message": message })
}
