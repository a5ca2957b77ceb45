//! `GpuPolicy`: every file in `fixtures/policy/good` decodes, every one in `bad` is refused with the error beside it,
//! and the schema in the definition has exactly the fields that the decoder reads.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use divvy_api::crd;
use divvy_api::policy::{
    GpuMatch, GpuPolicy, GpuPolicySpec, HealthSettings, Instances, LabelSelector, MemorySize, MigSettings,
    ModeLock, NodeMatch, OfferedMode, Operator, PlacementOrder, PolicyRule, Requirement, ShareSettings,
    decode_policy,
};
use serde_json::Value;

fn fixtures(folder: &str) -> Vec<(PathBuf, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/policy").join(folder);
    let mut files: Vec<PathBuf> = fs_err::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|p| p.extension().is_some_and(|e| e == "yaml"))
        .collect();
    files.sort();
    assert!(!files.is_empty());
    let read = |path: PathBuf| {
        let value = serde_saphyr::from_slice(&fs_err::read(&path).unwrap()).unwrap();
        (path, value)
    };
    files.into_iter().map(read).collect()
}

fn set<T: Ord>(items: impl IntoIterator<Item = T>) -> BTreeSet<T> {
    items.into_iter().collect()
}

/// Every field of every type has a value, by name: a new field does not compile without a line here.
fn full() -> GpuPolicySpec {
    let expression =
        Requirement { key: "pool".into(), operator: Operator::In, values: set(["x".to_owned()]) };
    GpuPolicySpec {
        priority: 10,
        nodes: Some(NodeMatch {
            names: set(["n1".to_owned()]),
            selector: Some(LabelSelector {
                match_labels: BTreeMap::from([("zone".to_owned(), "a".to_owned())]),
                match_expressions: vec![expression],
            }),
        }),
        mode_lock: Some(ModeLock::Enabled),
        rules: vec![PolicyRule {
            name: Some("all".to_owned()),
            nodes: Some(NodeMatch { names: set(["n1".to_owned()]), selector: None }),
            gpus: Some(GpuMatch {
                uuids: set(["GPU-12345678-1234-1234-1234-123456780001".to_owned()]),
                ordinals: set([0]),
                products: set(["*H100*".to_owned()]),
                pci_addresses: set(["0000:3b:00.0".to_owned()]),
            }),
            modes: Some(set([OfferedMode::Whole, OfferedMode::Mig, OfferedMode::TimeSlicing])),
            mig: Some(MigSettings {
                profiles: Some(set(["1g.10gb".to_owned(), "1g.10gb+me".to_owned()])),
                placement_order: Some(PlacementOrder::Descending),
                instances: Some(Instances::OnDemand),
            }),
            shares: Some(ShareSettings {
                slots: Some(8),
                min_memory: Some(MemorySize::mebibytes(100)),
                min_cores: Some(5),
                reserved_memory: Some(MemorySize::mebibytes(1024)),
            }),
            health: Some(HealthSettings { evict: Some(true) }),
        }],
    }
}

#[test]
fn good_policies_decode_and_read_back_as_they_are_written() {
    for (path, object) in fixtures("good") {
        let policy = decode_policy(&object).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let mut again = object.clone();
        again["spec"] = serde_json::to_value(&policy.spec).unwrap();
        assert_eq!(decode_policy(&again).unwrap(), policy, "{}", path.display());
        if path.ends_with("full.yaml") {
            let uid = Some("11111111-2222-3333-4444-555555555555".to_owned());
            assert_eq!(policy, GpuPolicy { name: "full".to_owned(), uid, generation: Some(3), spec: full() });
        }
    }
}

#[test]
fn bad_policies_are_refused_with_the_error_beside_them() {
    for (path, object) in fixtures("bad") {
        let error = decode_policy(&object).expect_err(&path.display().to_string()).to_string();
        let expected = path.with_extension("expected");
        if std::env::var_os("DIVVY_BLESS").is_some() {
            fs_err::write(&expected, format!("{error}\n")).unwrap();
        }
        assert_eq!(error, fs_err::read_to_string(expected).unwrap().trim_end(), "{}", path.display());
    }
}

#[test]
fn the_schema_has_exactly_the_fields_and_values_that_the_decoder_reads() {
    let definition = crd::gpu_policy();
    let schema = definition.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec").unwrap();
    same_fields("spec", &serde_json::to_value(full()).unwrap(), schema);
}

/// Fields of a value with everything in it, against the properties of its schema.
fn same_fields(path: &str, value: &Value, schema: &Value) {
    match value {
        Value::Object(fields) if schema.get("additionalProperties").is_none() => {
            let properties = schema["properties"].as_object().unwrap();
            let (mut have, mut want): (Vec<_>, Vec<_>) =
                (fields.keys().collect(), properties.keys().collect());
            have.sort();
            want.sort();
            // A node match inside a rule is that of the policy, which is looked at in full there.
            if !path.ends_with("].nodes") {
                assert_eq!(have, want, "{path}");
            }
            for (name, value) in fields {
                same_fields(&format!("{path}.{name}"), value, &properties[name]);
            }
        }
        Value::Array(items) => {
            assert_eq!(schema["type"], "array", "{path}");
            for item in items {
                same_fields(&format!("{path}[]"), item, &schema["items"]);
            }
        }
        Value::String(text) => {
            if let Some(values) = schema.get("enum").and_then(Value::as_array) {
                assert!(values.iter().any(|value| value == text), "{path}");
            }
        }
        _ => {}
    }
}

#[test]
fn the_decoder_reads_every_value_that_the_schema_lists() {
    let definition = crd::gpu_policy();
    let schema = definition.pointer("/spec/versions/0/schema/openAPIV3Schema/properties/spec").unwrap();
    let values = |pointer: &str| -> Vec<String> {
        serde_json::from_value(schema.pointer(pointer).unwrap()["enum"].clone()).unwrap()
    };
    let reads = |field: &str, value: &str| {
        let rule = match field {
            "modes" => serde_json::json!({ "modes": [value] }),
            _ => serde_json::json!({ "mig": { field: value } }),
        };
        serde_json::from_value::<PolicyRule>(rule).is_ok()
    };
    let rule = "/properties/rules/items/properties";
    for (field, pointer) in [
        ("modes", format!("{rule}/modes/items")),
        ("placementOrder", format!("{rule}/mig/properties/placementOrder")),
        ("instances", format!("{rule}/mig/properties/instances")),
    ] {
        assert!(values(&pointer).iter().all(|value| reads(field, value)), "{field}");
    }
    for value in values("/properties/modeLock") {
        assert!(serde_json::from_value::<ModeLock>(value.into()).is_ok());
    }
    for value in
        values("/properties/nodes/properties/selector/properties/matchExpressions/items/properties/operator")
    {
        assert!(serde_json::from_value::<Operator>(value.into()).is_ok());
    }
}
