//! Kubernetes manifests from YAML files: the kinds that matter for claims, typed; anything else is named and refused,
//! rather than silently left out.

use anyhow::{Context, Result, bail};
use divvy_api::names;
use divvy_api::policy::{self, GpuPolicy};
use k8s_openapi::api::apps::v1::Deployment;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceClaimTemplate};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The objects of a manifest, in the order of the file.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Manifests {
    pub(crate) namespaces: Vec<Namespace>,
    pub(crate) classes: Vec<DeviceClass>,
    pub(crate) templates: Vec<ResourceClaimTemplate>,
    pub(crate) claims: Vec<ResourceClaim>,
    pub(crate) pods: Vec<Pod>,
    pub(crate) deployments: Vec<Deployment>,
    pub(crate) policies: Vec<GpuPolicy>,
}

impl Manifests {
    /// Reads all documents of a YAML (or JSON) text; `name` says where it came from.
    pub(crate) fn parse(name: &str, text: &str) -> Result<Self> {
        let documents: Vec<Value> =
            serde_saphyr::from_multiple(text).with_context(|| format!("{name} is not YAML"))?;
        let mut manifests = Self::default();
        for (number, document) in documents.into_iter().enumerate() {
            if !document.is_null() {
                manifests.add(document).with_context(|| format!("{name}, document {}", number + 1))?;
            }
        }
        if manifests == Self::default() {
            bail!("{name}: no objects in it");
        }
        Ok(manifests)
    }

    /// Whether anybody in it wants a device.
    pub(crate) fn has_users(&self) -> bool {
        !(self.claims.is_empty() && self.pods.is_empty() && self.deployments.is_empty())
    }

    fn add(&mut self, document: Value) -> Result<()> {
        let text = |key: &str| document.get(key).and_then(Value::as_str).unwrap_or_default().to_owned();
        let (version, kind) = (text("apiVersion"), text("kind"));
        match (version.as_str(), kind.as_str()) {
            ("v1", "Namespace") => self.namespaces.push(typed(document)?),
            ("v1", "Pod") => self.pods.push(typed(document)?),
            ("apps/v1", "Deployment") => self.deployments.push(typed(document)?),
            ("resource.k8s.io/v1", "DeviceClass") => self.classes.push(typed(document)?),
            ("resource.k8s.io/v1", "ResourceClaim") => self.claims.push(typed(document)?),
            ("resource.k8s.io/v1", "ResourceClaimTemplate") => self.templates.push(typed(document)?),
            (names::API_VERSION, policy::KIND) => self.policies.push(policy::decode_policy(&document)?),
            ("v1", "List") => {
                for item in document.get("items").and_then(Value::as_array).cloned().unwrap_or_default() {
                    self.add(item)?;
                }
            }
            (version, kind) if version.starts_with("resource.k8s.io/") => bail!(
                "{kind} of {version} is not read here: write resource.k8s.io/v1 (served since Kubernetes 1.34)"
            ),
            (version, kind) => bail!(
                "{kind} of {version:?} is not read here: expected Namespace, Pod, Deployment, DeviceClass, \
                 ResourceClaim, ResourceClaimTemplate or GpuPolicy"
            ),
        }
        Ok(())
    }
}

fn typed<T: DeserializeOwned>(document: Value) -> Result<T> {
    let name = document.pointer("/metadata/name").and_then(Value::as_str).unwrap_or("(no name)").to_owned();
    let kind = document.get("kind").and_then(Value::as_str).unwrap_or_default().to_owned();
    serde_json::from_value(document).with_context(|| format!("{kind} {name}"))
}

#[cfg(test)]
mod tests {
    use super::Manifests;

    #[test]
    fn documents_are_sorted_by_kind_and_strangers_are_named() {
        let text = "apiVersion: v1\nkind: Pod\nmetadata: {name: p}\n---\n# nothing\n---\napiVersion: v1\nkind: List\nitems:\n- {apiVersion: resource.k8s.io/v1, kind: ResourceClaim, metadata: {name: c}}\n";
        let read = Manifests::parse("x.yaml", text).unwrap();
        assert_eq!((read.pods.len(), read.claims.len()), (1, 1));
        let error = Manifests::parse("x.yaml", "apiVersion: v1\nkind: Service\n").unwrap_err();
        assert!(
            format!("{error:#}").starts_with("x.yaml, document 1: Service of \"v1\" is not read here"),
            "{error:#}"
        );
        let old = "apiVersion: resource.k8s.io/v1beta1\nkind: ResourceClaim\n";
        assert!(
            format!("{:#}", Manifests::parse("x", old).unwrap_err()).contains("write resource.k8s.io/v1")
        );
        assert!(Manifests::parse("empty.yaml", "---\n").is_err());
    }
}
