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

mod moved;

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

/// Names the fields that the type does not have, of a part of an object that is decoded elsewhere;
/// `path` is its place.
pub fn known_fields<T: DeserializeOwned>(part: &Value, path: &str) -> Result<()> {
    let unknown = RefCell::default();
    // What else is wrong with it is for the decoder.
    let at = At {
        value: part,
        path: path.to_owned(),
        unknown: &unknown,
    };
    drop(T::deserialize(at));
    let unknown = unknown.into_inner();
    if !unknown.is_empty() {
        bail!("{}", unknown.join(", "));
    }
    Ok(())
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

/// Says that a text or number is no object, with the field that was probably meant by it.
fn no_object(value: &Value, fields: &[&str]) -> String {
    let field = match fields {
        [only] => Some(*only),
        fields => fields.iter().copied().find(|field| *field == "name"),
    };
    let hint = field.map_or_else(String::new, |field| {
        let value = value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned);
        format!(": write {{{field}: {value}}}")
    });
    format!("{value} where an object is wanted{hint}")
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
        of: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        let Some(object) = self.value.as_object() else {
            return match self.value {
                Value::Null | Value::Array(_) => self.deserialize_any(visitor),
                text => Err(serde::de::Error::custom(no_object(text, fields))),
            };
        };
        let mut there = Vec::new();
        for (name, value) in object {
            let at = self.field(name, value);
            if fields.contains(&name.as_str()) {
                there.push((name.as_str(), at));
                continue;
            }
            let hint = moved::hint(of, name);
            let hint = hint.unwrap_or_else(|| did_you_mean(name, fields.iter().copied()));
            self.unknown
                .borrow_mut()
                .push(format!("unknown field {:?}{hint}", at.path));
        }
        // Without those that are unknown, which are errors already: the others may hold more.
        visitor.visit_map(MapDeserializer::new(there.into_iter()))
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self.value {
            Value::Object(_) => Err(serde::de::Error::custom(
                "an object where a list is wanted: write [{…}], or - before it",
            )),
            Value::String(text) => Err(serde::de::Error::custom(format!(
                "{text:?} where a list is wanted: write [{text}]"
            ))),
            _ => self.deserialize_any(visitor),
        }
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self.value {
            Value::String(text) => visitor.visit_enum(text.as_str().into_deserializer()),
            _ => self.deserialize_any(visitor),
        }
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
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct tuple
        tuple_struct map identifier ignored_any
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
    fn a_field_of_another_place_is_named_with_that_place() {
        for (object, expected) in [
            (
                json!({"devices": {"requests": [{"name": "a", "deviceClassName": "x", "count": 2}]}}),
                "unknown field \"spec.devices.requests[0].count\" (in resource.k8s.io/v1 it is inside exactly: {…}; divvy convert does it), \
                 unknown field \"spec.devices.requests[0].deviceClassName\" (in resource.k8s.io/v1 it is inside exactly",
            ),
            (
                json!({"spec": {"devices": {}}}),
                "\"spec.spec\" (only a ResourceClaimTemplate has a second spec)",
            ),
            (
                json!({"requests": []}),
                "\"spec.requests\" (it belongs in devices)",
            ),
            (
                json!({"devices": {"requests": [{"name": "a", "exactly": {"deviceClassName": "x", "capacity": {"memory": "1Gi"}}}]}}),
                "exactly.capacity.memory\" (amounts are in capacity.requests)",
            ),
            (
                json!({"devices": {"requests": [{"name": "a", "exactly": {"deviceClassName": "x", "selectors": [{"expression": "true"}]}}]}}),
                "selectors[0].expression\" (write cel: {expression: …})",
            ),
            (
                json!({"devices": {"requests": {"name": "a"}}}),
                "spec.devices.requests: an object where a list is wanted: write [{…}]",
            ),
            (
                json!({"devices": {"requests": [{"name": "a", "exactly": {"deviceClassName": "x", "selectors": [{"cel": "true"}]}}]}}),
                "selectors[0].cel: \"true\" where an object is wanted: write {expression: true}",
            ),
        ] {
            let said = refused::<ResourceClaim>(&json!({"spec": object}));
            assert!(said.contains(expected), "{said}\n{expected}");
        }
        for (spec, expected) in [
            (
                json!({"containers": [], "resourceClaims": [{"name": "a", "source": {}}]}),
                "\"spec.resourceClaims[0].source\" (since Kubernetes 1.31",
            ),
            (
                json!({"containers": [{"name": "c", "resources": {"claims": ["gpu"]}}]}),
                "spec.containers[0].resources.claims[0]: \"gpu\" where an object is wanted: write {name: gpu}",
            ),
            (
                json!({"containers": [{"name": "c", "limits": {"nvidia.com/gpu": 1}}]}),
                "\"spec.containers[0].limits\" (it belongs in resources)",
            ),
            (
                json!({"containers": [{"name": "c", "resources": {"nvidia.com/gpu": 1}}]}),
                "nvidia.com/gpu\" (it belongs in limits)",
            ),
        ] {
            let said = refused::<Pod>(&json!({"spec": spec}));
            assert!(said.contains(expected), "{said}\n{expected}");
        }
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
