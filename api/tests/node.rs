//! `GpuNode`: the schema in the definition has exactly the fields of the type. A field that the schema lacks would be
//! dropped by the API server; one that the type lacks would never be written.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use divvy_api::crd;
use divvy_api::node::{GpuNodeStatus, GpuStatus, Holder, Summary, Trouble, Versions};
use serde_json::Value;

/// Every field of every type has a value, by name: a new field does not compile without a line here.
fn full() -> GpuNodeStatus {
    let text = || "x".to_owned();
    let time = || Some("2026-11-21T20:00:00Z".to_owned());
    let holder = Holder {
        namespace: text(),
        name: text(),
        uid: text(),
        device: text(),
        phase: text(),
        reason: text(),
        pods: vec![text()],
        since: time(),
    };
    let trouble = Trouble {
        kind: text(),
        notice: true,
        gpu: text(),
        subject: text(),
        claim: text(),
        why: text(),
        remedy: text(),
        since: time(),
    };
    let gpu = GpuStatus {
        name: text(),
        uuid: text(),
        product: text(),
        mode: text(),
        offered: vec![text()],
        policy: text(),
        holders: vec![holder],
        taints: vec![text()],
        fence: text(),
    };
    GpuNodeStatus {
        summary: Summary { gpus: 1, free: 1, claims: 1, modes: text(), trouble: text(), since: time() },
        versions: Versions { divvy: text(), driver: text(), kubernetes: text() },
        gpus: vec![gpu],
        troubles: vec![trouble],
        bad_policies: vec![text()],
        changed: time(),
    }
}

/// Names and kinds of a value's fields, and the same of a schema.
fn same_fields(path: &str, value: &Value, schema: &Value) {
    let kind = match value {
        Value::Object(fields) => {
            assert!(schema["properties"].is_object(), "{path}: no properties");
            let properties = schema["properties"].as_object().unwrap();
            let (mut have, mut want): (Vec<_>, Vec<_>) =
                (fields.keys().collect(), properties.keys().collect());
            have.sort();
            want.sort();
            assert_eq!(have, want, "{path}");
            for (name, value) in fields {
                same_fields(&format!("{path}.{name}"), value, &properties[name]);
            }
            "object"
        }
        Value::Array(items) => {
            for item in items {
                same_fields(&format!("{path}[]"), item, &schema["items"]);
            }
            "array"
        }
        Value::String(_) => "string",
        Value::Number(_) => "integer",
        Value::Bool(_) => "boolean",
        Value::Null => "null",
    };
    assert_eq!(schema["type"], kind, "{path}");
}

#[test]
fn the_schema_has_exactly_the_fields_of_the_type() {
    let definition = crd::gpu_node();
    let schema = definition.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/status").unwrap();
    let written = serde_json::to_value(full()).unwrap();
    same_fields("status", &written, schema);
    assert_eq!(serde_json::from_value::<GpuNodeStatus>(written).unwrap(), full());
}

#[test]
fn every_column_shows_a_field_that_there_is() {
    let definition = crd::gpu_node();
    let written = serde_json::json!({ "status": full() });
    for column in definition.pointer("/spec/versions/0/additionalPrinterColumns").unwrap().as_array().unwrap()
    {
        let path = column["jsonPath"].as_str().unwrap().replace('.', "/");
        let value = written.pointer(&path).unwrap_or_else(|| panic!("{path} does not exist"));
        assert_eq!(column["type"] == "integer", value.is_number(), "{path}");
    }
}

#[test]
fn a_report_of_an_earlier_version_is_read() {
    let earlier =
        serde_json::json!({ "summary": { "gpus": 1 }, "gpus": [{ "name": "gpu-0" }], "novel": true });
    let read: GpuNodeStatus = serde_json::from_value(earlier).unwrap();
    let gpu = GpuStatus { name: "gpu-0".to_owned(), ..GpuStatus::default() };
    let summary = Summary { gpus: 1, ..Summary::default() };
    assert_eq!(read, GpuNodeStatus { summary, gpus: vec![gpu], ..GpuNodeStatus::default() });
}
