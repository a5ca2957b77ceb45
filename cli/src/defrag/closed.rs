//! A node that is cordoned while pods are moved away from it.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_api::names::annotations::DEFRAG;
use divvy_fleet::Cluster;
use divvy_fleet::defrag::Plan;
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::api::{ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt as _};
use serde_json::json;
use tokio::time::{Instant, sleep};

use super::carry_out::Settings;

/// Taint that Kubernetes gives a cordoned node.
const UNSCHEDULABLE: &str = "node.kubernetes.io/unschedulable";
/// The longest time that what comes in the place of moved pods has to get a node.
const SETTLED: Duration = Duration::from_secs(30);
/// Time between looks at it.
const PAUSE: Duration = Duration::from_millis(500);
/// Attempts to open a node again.
const ATTEMPTS: usize = 5;

/// Cordons a node; returns false if it is cordoned already.
pub(super) async fn close(client: &Client, name: &str) -> Result<bool, kube::Error> {
    let nodes = Api::<Node>::all(client.clone());
    let mut attempt = 1;
    loop {
        let node = nodes.get(name).await?;
        let cordoned = node.spec.as_ref().and_then(|spec| spec.unschedulable);
        if cordoned == Some(true) {
            return Ok(false);
        }
        // Only what was read is changed: an administrator may cordon it in the same moment, and
        // what this command has not cordoned it must not open.
        let change = json!({
            "metadata": {"annotations": {DEFRAG: "true"}, "resourceVersion": node.resource_version()},
            "spec": {"unschedulable": true},
        });
        let change = Patch::Merge(&change);
        match nodes.patch(name, &PatchParams::default(), &change).await {
            Ok(_) => return Ok(true),
            Err(kube::Error::Api(status)) if status.code == 409 && attempt < ATTEMPTS => {}
            Err(error) => return Err(error),
        }
        attempt += 1;
    }
}

/// Opens a node again that this command has cordoned. An API server that does not answer is asked
/// some times: a node that stays cordoned gets no pods.
pub(super) async fn open(client: &Client, name: &str) -> Result<(), kube::Error> {
    let nodes = Api::<Node>::all(client.clone());
    let change = json!({
        "metadata": {"annotations": {DEFRAG: null}}, "spec": {"unschedulable": null},
    });
    let change = Patch::Merge(&change);
    let mut attempt = 1;
    loop {
        let opened = match nodes.get(name).await {
            Ok(node) if !is_ours(&node) => return Ok(()),
            Ok(_) => nodes.patch(name, &PatchParams::default(), &change).await,
            Err(error) => Err(error),
        };
        match opened {
            Ok(_) => return Ok(()),
            Err(kube::Error::Api(status)) if status.code == 404 => return Ok(()),
            Err(error) if attempt == ATTEMPTS => return Err(error),
            Err(_) => sleep(PAUSE).await,
        }
        attempt += 1;
    }
}

/// Opens the nodes that an earlier command has left cordoned, because it was killed.
pub(super) async fn open_all(client: &Client, cluster: &Cluster) -> Result<(), kube::Error> {
    for node in cluster.nodes.iter().filter(|node| is_ours(node)) {
        open(client, &node.name_any()).await?;
    }
    Ok(())
}

/// Returns the cluster with the nodes open that this command has cordoned.
pub(super) fn opened(mut cluster: Cluster) -> Cluster {
    for node in cluster.nodes.iter_mut().filter(|node| is_ours(node)) {
        if let Some(spec) = &mut node.spec {
            spec.unschedulable = None;
            let taints = spec.taints.iter_mut();
            taints.for_each(|taints| taints.retain(|taint| taint.key != UNSCHEDULABLE));
        }
    }
    cluster
}

fn is_ours(node: &Node) -> bool {
    node.annotations().contains_key(DEFRAG)
}

/// Controllers of pods that move: how many of their pods are on nodes, by namespace and UID.
#[derive(Debug, Default)]
pub(super) struct Moved(BTreeMap<(String, String), usize>);

impl Moved {
    /// Counts before the evictions. Controllers of a namespace that cannot be read are left out.
    pub(super) async fn of(client: &Client, plan: &Plan) -> Self {
        let mut moved = Self::default();
        for victim in plan.evict.iter().filter(|victim| victim.then.is_some()) {
            let pods = placed(client, &victim.namespace).await.unwrap_or_default();
            let is_it = |pod: &&Pod| pod.metadata.uid.as_ref() == Some(&victim.uid);
            if let Some(owner) = pods.iter().find(is_it).and_then(owner) {
                let count = pods.iter().filter(|pod| self::owner(pod) == Some(owner));
                let key = (victim.namespace.clone(), owner.to_owned());
                moved.0.insert(key, count.count());
            }
        }
        moved
    }

    /// Waits until the controllers have as many pods on nodes as before, but not for long.
    pub(super) async fn settle(&self, client: &Client, settings: &Settings<'_>) {
        let until = Instant::now() + settings.patience.min(SETTLED);
        for ((namespace, uid), before) in &self.0 {
            loop {
                let pods = placed(client, namespace).await.unwrap_or_default();
                let its = pods.iter().filter(|pod| owner(pod) == Some(uid));
                let is_over = settings.stop.is_cancelled() || Instant::now() >= until;
                if its.count() >= *before || is_over {
                    break;
                }
                sleep(PAUSE).await;
            }
        }
    }
}

/// Lists the pods of a namespace that are on nodes and not on their way out.
async fn placed(client: &Client, namespace: &str) -> Result<Vec<Pod>, kube::Error> {
    let pods = Api::<Pod>::namespaced(client.clone(), namespace);
    let mut all = pods.list(&ListParams::default()).await?.items;
    all.retain(|pod| {
        let spec = pod.spec.as_ref();
        let is_placed = spec.is_some_and(|spec| spec.node_name.is_some());
        is_placed && pod.metadata.deletion_timestamp.is_none()
    });
    Ok(all)
}

fn owner(pod: &Pod) -> Option<&str> {
    let mut owners = pod.owner_references().iter();
    let owner = owners.find(|owner| owner.controller == Some(true))?;
    Some(&owner.uid)
}
