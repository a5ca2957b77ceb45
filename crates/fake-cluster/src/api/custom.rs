//! The driver's own kinds, as a server has them whose definitions of them check nothing but the
//! outer form: what gets past an old schema gets past this one.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use kube::Resource;
use kube::core::ClusterResourceScope;
use serde::{Deserialize, Serialize};
use serde_json::Value;

const GROUP: &str = "divvy.dev";
const VERSION: &str = "v1beta1";

macro_rules! custom {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $plural:literal, $default:literal) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
        #[serde(rename_all = "camelCase")]
        pub struct $name {
            #[serde(default = "api_version")]
            api_version: String,
            #[serde(default = $default)]
            kind: String,
            /// The object's metadata.
            #[serde(default)]
            pub metadata: ObjectMeta,
            /// The spec, as it was written.
            #[serde(default, skip_serializing_if = "Value::is_null")]
            pub spec: Value,
            /// The status, as it was written.
            #[serde(default, skip_serializing_if = "Value::is_null")]
            pub status: Value,
        }

        impl $name {
            /// An object of this name and spec.
            pub fn new(name: &str, spec: Value) -> Self {
                Self {
                    api_version: api_version(),
                    kind: $kind.to_owned(),
                    metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
                    spec,
                    status: Value::Null,
                }
            }
        }

        impl Resource for $name {
            type DynamicType = ();
            type Scope = ClusterResourceScope;

            fn kind((): &()) -> Cow<'_, str> {
                $kind.into()
            }
            fn group((): &()) -> Cow<'_, str> {
                GROUP.into()
            }
            fn version((): &()) -> Cow<'_, str> {
                VERSION.into()
            }
            fn plural((): &()) -> Cow<'_, str> {
                $plural.into()
            }
            fn meta(&self) -> &ObjectMeta {
                &self.metadata
            }
            fn meta_mut(&mut self) -> &mut ObjectMeta {
                &mut self.metadata
            }
        }
    };
}

custom!(
    /// Policy of administrators for GPUs.
    GpuPolicy, "GpuPolicy", "gpupolicies", "kind::<GpuPolicy>"
);
custom!(
    /// Report of a node about its GPUs.
    GpuNode, "GpuNode", "gpunodes", "kind::<GpuNode>"
);

fn api_version() -> String {
    format!("{GROUP}/{VERSION}")
}

fn kind<K: Resource<DynamicType = ()>>() -> String {
    K::kind(&()).into_owned()
}
