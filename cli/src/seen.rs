//! A cluster as it is now, of its API server or of a bundle: its nodes, what is published, what is
//! held and what waits. Parts that cannot be read are named, and taken for unknown.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, bail};
use divvy_fleet::waiting::shape_of;
use divvy_fleet::{Kind, Shape, pod};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceTaintRule, ResourceClaim, ResourceSlice};
use kube::{Client, Resource};
use serde::de::DeserializeOwned;

use crate::bundle::Opened;
use crate::objects;
use crate::taints::taint;

/// A cluster as far as it could be read.
#[derive(Debug, Default)]
pub struct Seen {
    nodes: Vec<Node>,
    slices: Vec<ResourceSlice>,
    /// DeviceClasses, if they could be read.
    pub classes: Option<Vec<DeviceClass>>,
    claims: Option<Vec<ResourceClaim>>,
    pods: Option<Vec<Pod>>,
    /// Remarks on what is not known.
    pub notes: Vec<String>,
}

/// A pod that waits.
#[derive(Debug, Clone, PartialEq)]
pub struct Waiting {
    /// Its claims, and what it demands of its node.
    pub shape: Shape,
    /// Its priority.
    pub priority: i32,
}

/// Meaning of a kind that cannot be read.
fn without(plural: &str) -> &'static str {
    match plural {
        "resourceclaims" => "what is held now is not known, and the run begins as if nothing was",
        "pods" => {
            "processor time and memory in use and the pods that wait are not known, and the run begins without them"
        }
        "deviceclasses" => "the classes of divvy's chart are taken",
        _ => "taints by administrators are not known",
    }
}

impl Seen {
    /// Reads the cluster of a client. Nodes and ResourceSlices must be readable.
    pub async fn of_cluster(client: &Client) -> Result<Self> {
        let mut seen = Self {
            // Claims come before pods: a pod that is newer than its claim's list only waits.
            claims: None,
            nodes: objects::all(client).await?,
            slices: objects::all(client).await?,
            ..Self::default()
        };
        seen.claims = seen.asked(client).await?;
        seen.pods = seen.asked(client).await?;
        seen.classes = seen.asked(client).await?;
        let rules: Option<Vec<DeviceTaintRule>> = seen.asked(client).await?;
        seen.finished(&rules.unwrap_or_default())
    }

    /// Reads a bundle: an archive or a folder that `divvy bundle` wrote.
    pub fn of_bundle(path: &Path) -> Result<Self> {
        let bundle = Opened::read(path)?;
        let needed = |plural: &str| format!("{}: it has no {plural}", path.display());
        let mut seen = Self {
            nodes: bundle.of("nodes")?.with_context(|| needed("nodes"))?,
            slices: bundle
                .of("resourceslices")?
                .with_context(|| needed("resourceslices"))?,
            ..Self::default()
        };
        seen.claims = seen.found("resourceclaims", &bundle)?;
        seen.classes = seen.found("deviceclasses", &bundle)?;
        let rules: Option<Vec<DeviceTaintRule>> = seen.found("devicetaintrules", &bundle)?;
        // Of the pods, a bundle has divvy's own.
        seen.unknown("pods", "a bundle has none of workloads");
        let missing = bundle.missing.iter();
        let missing = missing.filter(|what| what.contains(" of namespaces other than "));
        let missing = missing.map(|what| format!("not in the bundle: {what}"));
        seen.notes.extend(missing);
        seen.finished(&rules.unwrap_or_default())
    }

    fn finished(mut self, rules: &[DeviceTaintRule]) -> Result<Self> {
        if self.nodes.is_empty() {
            bail!("there are no nodes");
        }
        let name = |node: &Node| node.metadata.name.clone();
        self.nodes.sort_by_key(name);
        self.slices
            .sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
        taint(&mut self.slices, rules);
        let elsewhere = self.slices.iter();
        let elsewhere = elsewhere.filter(|slice| slice.spec.node_name.is_none());
        let elsewhere = elsewhere.count();
        if elsewhere > 0 {
            let note = format!("{elsewhere} ResourceSlices without a node are left out");
            self.notes.push(note);
        }
        Ok(self)
    }

    fn unknown(&mut self, plural: &str, why: &str) {
        self.notes
            .push(format!("{plural}: {why}: {}", without(plural)));
    }

    /// Lists a kind that the answer can do without; nothing if it may not be read or is not served.
    async fn asked<K>(&mut self, client: &Client) -> Result<Option<Vec<K>>>
    where
        K: Resource<DynamicType = ()> + Clone + std::fmt::Debug + DeserializeOwned,
    {
        let error = match objects::all(client).await {
            Ok(all) => return Ok(Some(all)),
            Err(error) => error,
        };
        let why = match error.downcast_ref::<kube::Error>() {
            Some(kube::Error::Api(status)) if status.code == 403 => "you may not list them",
            Some(kube::Error::Api(status)) if status.code == 404 => "they are not served",
            _ => return Err(error),
        };
        self.unknown(&K::plural(&()), why);
        Ok(None)
    }

    fn found<K: DeserializeOwned>(
        &mut self,
        plural: &str,
        bundle: &Opened,
    ) -> Result<Option<Vec<K>>> {
        let found = bundle.of(plural)?;
        if found.is_none() {
            self.unknown(plural, "not in the bundle");
        }
        Ok(found)
    }

    /// Returns the nodes with what they publish and hold, each a kind of its own.
    pub fn kinds(&self) -> Vec<Kind> {
        let mut owner: BTreeMap<(&str, &str), &str> = BTreeMap::new();
        let mut slices: BTreeMap<&str, Vec<ResourceSlice>> = BTreeMap::new();
        for slice in &self.slices {
            if let Some(node) = &slice.spec.node_name {
                owner.insert((&slice.spec.driver, &slice.spec.pool.name), node);
                slices.entry(node).or_default().push(slice.clone());
            }
        }
        let mut held: BTreeMap<&str, Vec<ResourceClaim>> = BTreeMap::new();
        for claim in self.claims.iter().flatten() {
            let results = claim
                .status
                .iter()
                .filter_map(|status| status.allocation.as_ref()?.devices.as_ref())
                .flat_map(|devices| devices.results.iter().flatten());
            let nodes = results
                .filter_map(|of| owner.get(&(of.driver.as_str(), of.pool.as_str())))
                .collect::<std::collections::BTreeSet<_>>();
            for node in nodes {
                held.entry(node).or_default().push(claim.clone());
            }
        }
        let mut used: BTreeMap<&str, Vec<[u64; 2]>> = BTreeMap::new();
        for of in self.pods.iter().flatten().filter(|of| !pod::has_ended(of)) {
            let spec = of.spec.as_ref();
            let placed = spec.and_then(|spec| Some((spec, spec.node_name.as_deref()?)));
            if let Some((spec, node)) = placed {
                used.entry(node).or_default().push(pod::resources(spec));
            }
        }
        let kinds = self.nodes.iter().map(|node| {
            let name = node.metadata.name.clone().unwrap_or_default();
            Kind {
                count: 1,
                node: node.clone(),
                slices: slices.remove(name.as_str()).unwrap_or_default(),
                held: held.remove(name.as_str()).unwrap_or_default(),
                used: used.remove(name.as_str()).unwrap_or_default(),
                name,
            }
        });
        kinds.collect()
    }

    /// Returns the pods that wait for devices, and a remark on those that are left out.
    pub fn waiting(&self) -> (Vec<Waiting>, Option<String>) {
        let claims = self.claims.as_deref().unwrap_or_default();
        let (mut all, mut left_out) = (Vec::new(), Vec::new());
        for of in self.pods.iter().flatten().filter(|of| !pod::has_ended(of)) {
            let waits = of
                .spec
                .as_ref()
                .is_some_and(|spec| spec.node_name.is_none() && spec.resource_claims.is_some());
            if !waits {
                continue;
            }
            match shape_of(of, claims) {
                Ok(shape) => all.push(Waiting {
                    shape,
                    priority: pod::priority(of),
                }),
                Err(error) => left_out.push(error.to_string()),
            }
        }
        let note = left_out.first().map(|first| match left_out.len() {
            1 => format!("a pod that waits is left out: {first}"),
            all => format!("{all} pods that wait are left out; the first: {first}"),
        });
        (all, note)
    }
}

#[cfg(test)]
mod tests;
