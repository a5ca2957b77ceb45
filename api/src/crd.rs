//! The CustomResourceDefinitions of [`GpuNode`], [`GpuPolicyObject`] and [`GpuQuota`], derived from
//! their types. `cargo xtask crds` writes them into the chart. No program of a node contains them.

use kube_core::CustomResourceExt;
use serde_json::{Error, Value, json};

use crate::node::GpuNode;
use crate::policy::GpuPolicyObject;
use crate::quota::{self, GpuQuota};

/// All definitions, with the name of their file in the chart.
pub fn all() -> Result<Vec<(&'static str, Value)>, Error> {
    let mut all = vec![
        ("gpunodes.yaml", serde_json::to_value(GpuNode::crd())?),
        (
            "gpupolicies.yaml",
            serde_json::to_value(GpuPolicyObject::crd())?,
        ),
        (
            "gpuquotas.yaml",
            one_a_namespace(serde_json::to_value(GpuQuota::crd())?),
        ),
    ];
    for (_, definition) in &mut all {
        definition
            .pointer_mut("/spec/versions/0/schema/openAPIV3Schema")
            .into_iter()
            .for_each(tidy);
    }
    Ok(all)
}

/// Refuses every name of a quota but one.
fn one_a_namespace(mut definition: Value) -> Value {
    let schema = definition.pointer_mut("/spec/versions/0/schema/openAPIV3Schema");
    if let Some(schema) = schema.and_then(Value::as_object_mut) {
        let name = quota::NAME;
        let rule = json!([{
            "rule": format!("self.metadata.name == '{name}'"),
            "message": format!("a namespace has one GpuQuota, and its name is {name}: change that one"),
        }]);
        schema.insert("x-kubernetes-validations".to_owned(), rule);
    }
    definition
}

/// Adapts what schemars derives to what Kubernetes does with it.
fn tidy(schema: &mut Value) {
    let Some(fields) = schema.as_object_mut() else {
        return;
    };
    // Without it, the API server drops a null, as if the field had been left out.
    fields.remove("nullable");
    fields.remove("title");
    // The API server knows no unsigned integers; the limits say what they mean.
    let unsigned = fields
        .get("format")
        .is_some_and(|format| format == "uint32");
    if unsigned {
        fields.insert("format".to_owned(), "int64".into());
    }
    // Defaults of a report go: the server shall not fill in what a plugin did not write. The
    // priority of a policy keeps its own.
    if unsigned || fields.get("type").is_none_or(|kind| kind != "integer") {
        fields.remove("default");
    }
    // Lines of a comment.
    if let Some(Value::String(text)) = fields.get_mut("description") {
        *text = text.replace('\n', " ");
    }
    for part in ["items", "additionalProperties"] {
        fields.get_mut(part).into_iter().for_each(tidy);
    }
    let properties = fields.get_mut("properties").and_then(Value::as_object_mut);
    properties
        .into_iter()
        .flat_map(|properties| properties.values_mut())
        .for_each(tidy);
}
