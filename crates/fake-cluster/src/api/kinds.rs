//! The resources that the fake server knows.

use k8s_openapi::api::{coordination, core, events, resource};
use kube::Resource;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::custom::{GpuNode, GpuPolicy};

/// Types that the typed helpers accept: the Kubernetes types and derived custom resources.
pub trait Object: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone {}
impl<K: Resource<DynamicType = ()> + Serialize + DeserializeOwned + Clone> Object for K {}

/// Group and plural name; the version does not matter to storage.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Res {
    pub(crate) group: String,
    pub(crate) plural: String,
}

impl Res {
    pub(crate) fn of<K: Object>() -> Self {
        Self {
            group: K::group(&()).into_owned(),
            plural: K::plural(&()).into_owned(),
        }
    }
}

/// A served resource.
#[derive(Debug, Clone)]
pub(crate) struct Kind {
    pub(crate) res: Res,
    pub(crate) version: String,
    /// Name in `kind:`.
    pub(crate) name: String,
    pub(crate) namespaced: bool,
    /// Has a status subresource, so that writes to the object leave the status alone.
    pub(crate) status: bool,
    /// Through the typed form and back: refuses wrong types, drops unknown fields, fills in kind
    /// and version.
    pub(crate) normalize: fn(Value) -> Result<Value, serde_json::Error>,
}

impl Kind {
    pub(crate) fn of<K: Object>(namespaced: bool, status: bool) -> Self {
        Self {
            res: Res::of::<K>(),
            version: K::version(&()).into_owned(),
            name: K::kind(&()).into_owned(),
            namespaced,
            status,
            normalize: |value| serde_json::to_value(serde_json::from_value::<K>(value)?),
        }
    }

    pub(crate) fn api_version(&self) -> String {
        if self.res.group.is_empty() {
            self.version.clone()
        } else {
            format!("{}/{}", self.res.group, self.version)
        }
    }

    /// Returns the resource's name in the server's messages.
    pub(crate) fn qualified(&self) -> String {
        if self.res.group.is_empty() {
            self.res.plural.clone()
        } else {
            format!("{}.{}", self.res.plural, self.res.group)
        }
    }
}

/// Resources that are served from the start: Kubernetes' own, and the driver's definitions as if
/// its chart were installed. Others are registered by the caller.
pub(crate) fn builtin() -> Vec<Kind> {
    vec![
        Kind::of::<core::v1::Node>(false, true),
        Kind::of::<core::v1::Namespace>(false, true),
        Kind::of::<core::v1::Pod>(true, true),
        Kind::of::<core::v1::Event>(true, false),
        Kind::of::<events::v1::Event>(true, false),
        Kind::of::<coordination::v1::Lease>(true, false),
        Kind::of::<resource::v1::ResourceSlice>(false, false),
        Kind::of::<resource::v1::ResourceClaim>(true, true),
        Kind::of::<resource::v1::ResourceClaimTemplate>(true, false),
        Kind::of::<resource::v1::DeviceClass>(false, false),
        Kind::of::<resource::v1::DeviceTaintRule>(false, true),
        Kind::of::<GpuPolicy>(false, false),
        Kind::of::<GpuNode>(false, true),
    ]
}
