//! A real API server and scheduler over nodes that are only objects: pods are bound and never run.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_e2e::api::{Api, at};
use divvy_e2e::driver::{chart, helm};
use divvy_e2e::objects::collection;
use divvy_e2e::{Cluster, Component, Extent, Gates, Options, poll};
use divvy_offer::GpuRules;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::offered::{offered, slices};
use crate::table;

/// Namespace of all pods and claims.
pub(crate) const NAMESPACE: &str = "default";
/// Time that the API server may take for what takes it milliseconds.
pub(crate) const PATIENCE: Duration = Duration::from_mins(1);

/// A node to make. GPUs are written as `h100x8`, memory is in GiB.
#[derive(Debug, Clone)]
pub(crate) struct NodeSpec {
    pub(crate) name: String,
    pub(crate) gpus: String,
    /// Forms in which they are offered.
    pub(crate) rules: GpuRules,
    pub(crate) cores: u32,
    pub(crate) memory: u32,
}

/// The control plane. Dropping it ends everything.
pub(crate) struct ControlPlane {
    pub(crate) cluster: Cluster,
    /// Number of all slices, and their bytes as JSON.
    published: (u64, u64),
}

impl ControlPlane {
    /// Starts a control plane with the chart's classes, and these nodes with their slices.
    pub(crate) fn start(
        name: &str,
        version: &str,
        (extent, gates): (Extent, Gates),
        nodes: &[NodeSpec],
    ) -> Result<Self> {
        Cluster::down(name)?;
        let cluster = Cluster::up(&Options {
            name: name.to_owned(),
            version: version.to_owned(),
            owned: true,
            extent,
            gates,
        })?;
        let mut plane = Self {
            cluster,
            published: (0, 0),
        };
        let api = plane.api();
        let namespace = format!("/api/v1/namespaces/{NAMESPACE}");
        poll("namespace", PATIENCE, || Ok(api.get(&namespace)?.is_some()))?;
        // Pods need an account, which only a controller would make.
        let account = json!({"metadata": {"name": "default"}});
        api.create(&format!("{namespace}/serviceaccounts"), &account)?;
        let chart = chart();
        let classes = [
            "template",
            "divvy",
            &chart,
            "--show-only",
            "templates/deviceclass.yaml",
        ];
        plane.cluster.apply(&helm(&plane.cluster, &classes)?)?;
        for node in nodes {
            plane.add(node)?;
        }
        Ok(plane)
    }

    pub(crate) fn api(&self) -> Api {
        self.cluster.api()
    }

    /// Returns the number of all slices, and their bytes as JSON.
    pub(crate) fn published(&self) -> (u64, u64) {
        self.published
    }

    /// Returns the resident memory of a component.
    pub(crate) fn memory(&self, of: Component) -> Result<table::Value> {
        let pid = self.cluster.component(of).pid();
        let pid = pid.with_context(|| format!("{} does not run", of.name()))?;
        let status = self.cluster.node_path(format!("/proc/{pid}/status"));
        let status = fs_err::read_to_string(status)?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let kib = line.and_then(|line| line.split_whitespace().next());
        let kib: u64 = kib.context("VmRSS of a component")?.parse()?;
        Ok(table::Value::Bytes(kib * 1024))
    }

    fn add(&mut self, node: &NodeSpec) -> Result<()> {
        let (api, name) = (self.api(), &node.name);
        let room = json!({
            "cpu": node.cores.to_string(),
            "memory": format!("{}Gi", node.memory),
            "pods": "250",
        });
        let object = json!({
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}},
            "status": {
                "capacity": room,
                "allocatable": room,
                "conditions": [{"type": "Ready", "status": "True", "reason": "Object"}],
            },
        });
        let stored = api.create("/api/v1/nodes", &object)?;
        // Every new node has a taint that a controller removes when the node is Ready.
        let change = json!({"spec": {"taints": null}});
        api.patch(&format!("/api/v1/nodes/{name}"), &change)?;
        let uid = at(&stored, "metadata.uid").as_str();
        let uid = uid.context("a stored node has no UID")?;
        for slice in slices(&offered(&node.gpus, name, &node.rules)?, name, uid) {
            let slice = serde_json::to_value(&slice)?;
            let (count, bytes) = self.published;
            let of_it = u64::try_from(slice.to_string().len())?;
            self.published = (count + 1, bytes + of_it);
            api.create("/apis/resource.k8s.io/v1/resourceslices", &slice)?;
        }
        Ok(())
    }

    /// Returns the objects of a list as the API server has them.
    pub(crate) fn all<T: DeserializeOwned>(&self, path: &str) -> Result<Vec<T>> {
        let all = self.api().list(path)?;
        let all = all.into_iter().map(serde_json::from_value);
        all.collect::<Result<_, _>>()
            .with_context(|| format!("an object of {path} cannot be read"))
    }

    /// Creates a pod and its claims.
    pub(crate) fn create(&self, name: &str, claims: &[Value], resources: [u64; 2]) -> Result<()> {
        self.create_with(name, claims, resources, &BTreeMap::new())
    }

    /// Creates a pod and its claims. For extended resources the scheduler makes one more.
    pub(crate) fn create_with(
        &self,
        name: &str,
        claims: &[Value],
        resources: [u64; 2],
        extended: &BTreeMap<String, u64>,
    ) -> Result<()> {
        self.create_of(name, claims, resources, extended, None)
    }

    /// Creates a pod of a PriorityClass and its claims.
    pub(crate) fn create_of(
        &self,
        name: &str,
        claims: &[Value],
        resources: [u64; 2],
        extended: &BTreeMap<String, u64>,
        class: Option<&str>,
    ) -> Result<()> {
        let (mut named, mut used) = (Vec::new(), Vec::new());
        for (number, spec) in claims.iter().enumerate() {
            let claim = claim_name(name, number);
            let object = json!({"metadata": {"name": claim}, "spec": spec});
            self.api().create(&path("ResourceClaim")?, &object)?;
            used.push(json!({"name": claim}));
            named.push(json!({"name": claim, "resourceClaimName": claim}));
        }
        let [cores, memory] = resources;
        let requests = json!({"cpu": format!("{cores}m"), "memory": memory.to_string()});
        let limits = extended.iter();
        let limits = limits.map(|(name, count)| (name.clone(), count.to_string()));
        let limits: BTreeMap<String, String> = limits.collect();
        let pod = json!({
            "metadata": {"name": name},
            "spec": {
                "resourceClaims": named,
                "priorityClassName": class,
                "containers": [{
                    "name": "main",
                    "image": "none",
                    "resources": {"claims": used, "requests": requests, "limits": limits},
                }],
                "automountServiceAccountToken": false,
            },
        });
        self.api().create(&path("Pod")?, &pod).map(drop)
    }

    /// Ends a pod and its claims, and returns when the API server has none of them.
    pub(crate) fn end(&self, name: &str, claims: usize) -> Result<()> {
        let (api, now) = (self.api(), json!({"gracePeriodSeconds": 0}));
        let claims = self.claims(name, claims)?;
        let pod = format!("{}/{name}", path("Pod")?);
        api.delete(&pod, &now)?;
        let mut gone = vec![pod];
        for claim in claims {
            // The controller of claims would do this: there is none here.
            api.patch(&claim, &json!({"metadata": {"finalizers": null}}))?;
            api.delete(&claim, &now)?;
            gone.push(claim);
        }
        for path in gone {
            poll("end of a pod and its claims", PATIENCE, || {
                Ok(api.get(&path)?.is_none())
            })?;
        }
        Ok(())
    }

    /// Returns the paths of a pod's claims; the scheduler's own comes last.
    fn claims(&self, name: &str, claims: usize) -> Result<Vec<String>> {
        let all = path("ResourceClaim")?;
        let own = (0..claims).map(|number| format!("{all}/{}", claim_name(name, number)));
        let mut paths: Vec<String> = own.collect();
        let pod = self.api().get(&format!("{}/{name}", path("Pod")?))?;
        let pod = pod.context("the pod is gone")?;
        let made = at(&pod, "status.extendedResourceClaimStatus.resourceClaimName");
        paths.extend(made.as_str().map(|name| format!("{all}/{name}")));
        Ok(paths)
    }

    /// Returns the devices that a pod's claims have, in their order.
    pub(crate) fn devices(&self, name: &str, claims: usize) -> Result<Vec<String>> {
        let mut all = Vec::new();
        for claim in self.claims(name, claims)? {
            let claim = self.api().get(&claim)?.context("a claim is gone")?;
            let results = at(&claim, "status.allocation.devices.results");
            let results = results.as_array().into_iter().flatten();
            let named = results.filter_map(|result| at(result, "device").as_str());
            all.extend(named.map(str::to_owned));
        }
        Ok(all)
    }
}

/// Returns the path of all objects of a kind.
pub(crate) fn path(kind: &str) -> Result<String> {
    collection(kind, NAMESPACE).with_context(|| format!("unknown kind {kind}"))
}

fn claim_name(pod: &str, number: usize) -> String {
    format!("{pod}-{number}")
}
