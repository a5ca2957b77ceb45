//! `divvy slices`: the ResourceSlices that a node of a kind publishes, for programs that must know
//! them before there is such a node, and how the slices of a node differ from them. Pure.

pub mod clusterapi;
pub mod diff;
pub mod karpenter;
#[cfg(test)]
mod tests;

use anyhow::Result;
use divvy_api::names::{Naming, attributes as attr};
use divvy_controller::{slice_name, specs};
use divvy_offer::Pool;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice, ResourceSliceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Attributes that no other node has with the same value: UUIDs, and names that are made of them.
const IDENTITY: [&str; 5] = [
    attr::UUID,
    attr::PARENT_UUID,
    attr::GPU_UUID,
    attr::NVLINK_DOMAIN,
    attr::NVLINK_PAIR,
];

/// The slices of a node of a kind, without what is only of one node: UUIDs and taints.
#[derive(Debug, Clone, PartialEq)]
pub struct Template {
    /// Name of the driver.
    pub driver: String,
    /// Name of the node, which its slices have in their names.
    pub node: String,
    /// Slices in the order of their names.
    pub specs: Vec<ResourceSliceSpec>,
}

impl Template {
    /// Returns the template of what a node of this name publishes.
    pub fn of(driver: &str, node: &str, pool: &Pool) -> Self {
        Self {
            driver: driver.to_owned(),
            node: node.to_owned(),
            specs: specs(driver, node, pool)
                .into_iter()
                .map(|spec| anonymous(driver, spec))
                .collect(),
        }
    }

    /// Returns all devices.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.specs
            .iter()
            .flat_map(|spec| spec.devices.iter().flatten())
    }

    /// Returns the slices as objects of the API.
    pub fn slices(&self) -> impl Iterator<Item = ResourceSlice> {
        self.specs
            .iter()
            .enumerate()
            .map(|(index, spec)| ResourceSlice {
                metadata: ObjectMeta {
                    name: Some(slice_name(index, &self.driver, &self.node)),
                    ..ObjectMeta::default()
                },
                spec: spec.clone(),
            })
    }

    /// Returns the slices as documents of YAML.
    ///
    /// # Errors
    /// If one of them cannot be written as YAML.
    pub fn yaml(&self) -> Result<String> {
        let texts = self.slices().map(|slice| serde_saphyr::to_string(&slice));
        let texts = texts.collect::<Result<Vec<_>, _>>()?;
        Ok(texts.join("---\n"))
    }
}

/// Takes out of a slice what is only of one node, and of one moment.
pub fn anonymous(driver: &str, mut spec: ResourceSliceSpec) -> ResourceSliceSpec {
    // The generation of a pool that was written once.
    spec.pool.generation = 1;
    for device in spec.devices.iter_mut().flatten() {
        device.taints = None;
        if let Some(attributes) = &mut device.attributes {
            attributes.retain(|name, _| !IDENTITY.contains(&Naming::ours(driver, name)));
        }
    }
    spec
}
