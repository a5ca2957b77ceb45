//! Decodes a Kubernetes object as the API server does for kubectl: a field that the type does not
//! have is an error, and every error names its place. The types know their fields, so there is no
//! list of them here.

use std::cell::RefCell;

use anyhow::{Result, anyhow, bail};
use divvy_why::spelling::did_you_mean;
use serde::de::value::{Error, MapDeserializer, SeqDeserializer};
use serde::de::{DeserializeOwned, Deserializer, IntoDeserializer, Visitor};
use serde::forward_to_deserialize_any;
use serde_json::Value;

/// Decodes the object as a type. All unknown fields are named at once.
pub fn decode<T: DeserializeOwned>(object: &Value) -> Result<T> {
    let unknown = RefCell::default();
    let decoded = serde_path_to_error::deserialize(At {
        value: object,
        path: String::new(),
        unknown: &unknown,
    });
    let unknown = unknown.into_inner();
    if !unknown.is_empty() {
        bail!("{}", unknown.join(", "));
    }
    decoded.map_err(|error| {
        // Serde's words, less those of Rust.
        let what = error
            .inner()
            .to_string()
            .replace("i64", "a whole number")
            .replace("i32", "a whole number");
        let what = quoted(without_rust(&what));
        match error.path().to_string().as_str() {
            "." => anyhow!(what),
            path => anyhow!("{path}: {what}"),
        }
    })
}

/// Fields of a pod's spec that are often written into a container.
const OF_PODS: [&str; 8] = [
    "affinity",
    "nodeSelector",
    "resourceClaims",
    "runtimeClassName",
    "schedulerName",
    "serviceAccountName",
    "tolerations",
    "volumes",
];

/// Says whether the path is that of a container.
fn is_container(path: &str) -> bool {
    let list = path.rsplit_once('[').map_or("", |(list, _)| list);
    list.ends_with(".containers") || list.ends_with(".initContainers")
}

/// Returns serde's words for an unknown value of an enum in ours, with the value that was probably
/// meant: ``unknown variant `MIG`, expected one of `Whole`, `Mig` ``.
pub fn without_rust(error: &str) -> String {
    let Some((before, rest)) = error.split_once("unknown variant `") else {
        return error.to_owned();
    };
    let Some((value, there)) = rest.split_once("`, expected ") else {
        return error.to_owned();
    };
    let there: Vec<&str> = there.split('`').skip(1).step_by(2).collect();
    let hint = did_you_mean(value, there.iter().copied());
    format!(
        "{before}unknown value {value:?}{hint}; there are {}",
        there.join(", ")
    )
}

/// Adds how a text is written to serde's words for a number or a truth value in its place:
/// ``invalid type: integer `50`, expected a string``.
fn quoted(error: String) -> String {
    let plain = ["integer", "floating point", "boolean"];
    let value = error.strip_prefix("invalid type: ").and_then(|rest| {
        let rest = plain.iter().find_map(|kind| rest.strip_prefix(kind))?;
        rest.trim_start()
            .strip_prefix('`')?
            .strip_suffix("`, expected a string")
    });
    match value {
        Some(value) => format!("{error} (write \"{value}\")"),
        None => error,
    }
}

/// A value at its place in the object.
struct At<'v> {
    value: &'v Value,
    path: String,
    unknown: &'v RefCell<Vec<String>>,
}

impl<'v> At<'v> {
    fn child(&self, step: &str, value: &'v Value) -> Self {
        Self {
            value,
            path: format!("{}{step}", self.path),
            unknown: self.unknown,
        }
    }

    fn field(&self, name: &str, value: &'v Value) -> Self {
        let dot = if self.path.is_empty() { "" } else { "." };
        self.child(&format!("{dot}{name}"), value)
    }
}

impl<'de> IntoDeserializer<'de, Error> for At<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for At<'de> {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => number
                .deserialize_any(visitor)
                .map_err(serde::de::Error::custom),
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(items) => {
                let items = items
                    .iter()
                    .enumerate()
                    .map(|(n, item)| self.child(&format!("[{n}]"), item));
                visitor.visit_seq(SeqDeserializer::new(items))
            }
            Value::Object(fields) => {
                let fields = fields
                    .iter()
                    .map(|(name, value)| (name.as_str(), self.field(name, value)));
                visitor.visit_map(MapDeserializer::new(fields))
            }
        }
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        for (name, value) in self.value.as_object().into_iter().flatten() {
            if !fields.contains(&name.as_str()) {
                let path = self.field(name, value).path;
                let hint = match did_you_mean(name, fields.iter().copied()) {
                    none if none.is_empty()
                        && OF_PODS.contains(&name.as_str())
                        && is_container(&self.path) =>
                    {
                        " (it belongs in the pod's spec)".to_owned()
                    }
                    hint => hint,
                };
                self.unknown
                    .borrow_mut()
                    .push(format!("unknown field {path:?}{hint}"));
            }
        }
        self.deserialize_any(visitor)
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        if self.value.is_null() {
            visitor.visit_none()
        } else {
            visitor.visit_some(self)
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map enum identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Pod;
    use k8s_openapi::api::resource::v1::ResourceClaim;
    use serde_json::json;

    use super::*;

    fn refused<T: DeserializeOwned + std::fmt::Debug>(object: &Value) -> String {
        decode::<T>(object).unwrap_err().to_string()
    }

    #[test]
    fn unknown_fields_are_named_with_their_place_and_the_field_that_was_meant() {
        let request = json!({"name": "gpu", "exactly": {"deviceClasName": "x", "cuont": 2, "capacity": {"request": {}}}});
        assert_eq!(
            refused::<ResourceClaim>(&json!({"spec": {"devices": {"requests": [request]}}})),
            "unknown field \"spec.devices.requests[0].exactly.cuont\" (did you mean \"count\"?), \
             unknown field \"spec.devices.requests[0].exactly.deviceClasName\" (did you mean \"deviceClassName\"?), \
             unknown field \"spec.devices.requests[0].exactly.capacity.request\" (did you mean \"requests\"?)"
        );
        assert_eq!(
            refused::<Pod>(&json!({"spec": {"containers": [], "resourceClaim": [], "zzz": 1}})),
            "unknown field \"spec.resourceClaim\" (did you mean \"resourceClaims\"?), unknown field \"spec.zzz\""
        );
    }

    #[test]
    fn a_wrong_type_is_named_with_its_place() {
        let request = json!({"name": "gpu", "exactly": {"deviceClassName": "x", "count": "2"}});
        assert_eq!(
            refused::<ResourceClaim>(&json!({"spec": {"devices": {"requests": [request]}}})),
            "spec.devices.requests[0].exactly.count: invalid type: string \"2\", expected a whole number"
        );
    }

    #[test]
    fn what_is_free_in_the_type_stays_free() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "labels": {"any": "thing"}}, "spec": {
            "containers": [{"name": "c", "resources": {"limits": {"cpu": 1, "memory": "1Gi"}}, "ports": [{"containerPort": 80}],
                "livenessProbe": {"httpGet": {"port": "http"}}}],
            "securityContext": null,
        }});
        let pod: Pod = decode(&pod).unwrap();
        let limits = pod.spec.unwrap().containers[0]
            .resources
            .clone()
            .unwrap()
            .limits
            .unwrap();
        assert_eq!(
            (limits["cpu"].0.as_str(), limits["memory"].0.as_str()),
            ("1", "1Gi")
        );
        let config = json!({"requests": ["a"], "opaque": {"driver": "d", "parameters": {"deep": {"er": [1, {"x": null}]}}}});
        let claim: ResourceClaim =
            decode(&json!({"spec": {"devices": {"config": [config]}}})).unwrap();
        let config = claim.spec.unwrap().devices.unwrap().config.unwrap();
        assert_eq!(
            config[0].opaque.as_ref().unwrap().parameters.0,
            json!({"deep": {"er": [1, {"x": null}]}})
        );
    }
}
