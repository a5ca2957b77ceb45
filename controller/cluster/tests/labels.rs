//! The labels of nodes against an API server that keeps whose a label is.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_api::names::{FIELD_MANAGER_LABELS, node_labels as names};
use divvy_cluster_controller::{Config, run};
use divvy_fake_cluster::build::mk_node;
use divvy_fake_cluster::{FakeApi, GpuNode};
use divvy_telemetry::{MetricsRegistry, Readiness};
use k8s_openapi::api::core::v1::Node;
use kube::Api;
use kube::api::{Patch, PatchParams};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(20);

struct Instance {
    metrics: MetricsRegistry,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Instance {
    fn start(api: &FakeApi, node_labels: bool) -> Self {
        let config = Config {
            driver: "gpu.divvy.dev".into(),
            namespace: "divvy".into(),
            lease: "divvy-cluster-controller".into(),
            identity: "a".into(),
            dry_run: true,
            per_minute: 5,
            node_labels,
            quota: false,
            look: Duration::from_millis(20),
            renew: Duration::from_millis(20),
        };
        let (metrics, stop) = (MetricsRegistry::new(), CancellationToken::new());
        let (registry, token, client) = (metrics.clone(), stop.clone(), api.client());
        let task = tokio::spawn(async move {
            run(config, client, &registry, &Readiness::new(), token).await;
        });
        Self {
            metrics,
            stop,
            task,
        }
    }

    fn shows(&self, line: &str) -> bool {
        self.metrics.encode().lines().any(|found| found == line)
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

fn put_report(api: &FakeApi, node: &str, products: &[&str]) {
    let gpus: Vec<_> = products
        .iter()
        .enumerate()
        .map(|(number, product)| {
            json!({
                "name": format!("gpu-{number}"), "uuid": format!("GPU-{number}"), "product": product, "mode": "idle",
                "memoryMib": 81559, "architecture": "Hopper", "computeCapability": "9.0", "migCapable": true,
                "nvlinkDomain": format!("{node}-domain"),
            })
        })
        .collect();
    let status = json!({
        "summary": {}, "versions": {"divvy": "0.1.0", "driver": "580.95.05"}, "gpus": gpus,
    });
    let mut report = GpuNode::new(node, json!({}));
    report.status = status;
    api.put(&report).unwrap();
}

fn labels(api: &FakeApi, node: &str) -> BTreeMap<String, String> {
    let node: Node = api.get("", node).unwrap();
    let mut labels = node.metadata.labels.unwrap_or_default();
    labels.retain(|name, _| names::ALL.contains(&name.as_str()));
    labels
}

async fn wait(
    api: &FakeApi,
    what: &str,
    node: &str,
    is_so: impl Fn(&BTreeMap<String, String>) -> bool,
) {
    let limit = tokio::time::Instant::now() + PATIENCE;
    while !is_so(&labels(api, node)) {
        let found = labels(api, node);
        assert!(tokio::time::Instant::now() < limit, "{what}: {found:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn is(labels: &BTreeMap<String, String>, name: &str, value: &str) -> bool {
    labels.get(name).is_some_and(|found| found == value)
}

/// Sets or removes a label as NFD's master does: by a patch that is no apply.
async fn patch(api: &FakeApi, node: &str, label: &str, value: Option<&str>) {
    let nodes = Api::<Node>::all(api.client());
    let patch = json!({"metadata": {"labels": {label: value}}});
    nodes
        .patch(node, &PatchParams::default(), &Patch::Merge(&patch))
        .await
        .unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_get_labels_of_their_gpus_and_lose_them_with_the_gpus() {
    let api = FakeApi::new();
    for node in ["n1", "n2", "bare"] {
        api.put(&mk_node(node)).unwrap();
    }
    put_report(&api, "n1", &["NVIDIA H100", "NVIDIA H100"]);
    put_report(&api, "n2", &["NVIDIA H100", "NVIDIA L4"]);
    let instance = Instance::start(&api, true);
    wait(&api, "the labels", "n1", |labels| {
        is(labels, names::PRODUCT, "NVIDIA-H100")
    })
    .await;
    assert_eq!(labels(&api, "n1")[names::NVLINK_DOMAIN], "n1-domain");
    wait(&api, "the labels of a mixed node", "n2", |labels| {
        labels.contains_key(names::DRIVER)
    })
    .await;
    assert_eq!(labels(&api, "n2").get(names::PRODUCT), None);
    // A GPU goes: then all of them.
    put_report(&api, "n1", &["NVIDIA H100"]);
    wait(&api, "the count", "n1", |labels| {
        is(labels, names::COUNT, "1")
    })
    .await;
    put_report(&api, "n1", &[]);
    wait(&api, "the removal", "n1", BTreeMap::is_empty).await;
    assert_eq!(labels(&api, "bare"), BTreeMap::new());
    let node: Node = api.get("", "n1").unwrap();
    assert!(
        node.metadata
            .labels
            .unwrap_or_default()
            .keys()
            .all(|name| !name.starts_with("nvidia.com"))
    );
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beside_feature_discovery_only_absent_labels_are_written() {
    let api = FakeApi::new();
    let mut node: Node = mk_node("n1");
    let before = node.metadata.labels.get_or_insert_default();
    before.insert(names::PRODUCT.to_owned(), "NVIDIA-H100-SHARED".to_owned());
    api.put(&node).unwrap();
    put_report(&api, "n1", &["NVIDIA H100"]);
    let instance = Instance::start(&api, true);
    wait(&api, "the absent ones", "n1", |labels| {
        labels.contains_key(names::COUNT)
    })
    .await;
    assert_eq!(labels(&api, "n1")[names::PRODUCT], "NVIDIA-H100-SHARED");
    // It comes later, too, and writes one of ours: from then on that is its own.
    patch(&api, "n1", names::COUNT, Some("7")).await;
    patch(&api, "n1", names::FAMILY, Some("theirs")).await;
    wait(&api, "both are left", "n1", |_| {
        instance.shows("divvy_node_labels_left 3")
    })
    .await;
    put_report(&api, "n1", &[]);
    wait(&api, "the removal of ours", "n1", |labels| {
        labels.len() == 3
    })
    .await;
    assert_eq!(labels(&api, "n1")[names::COUNT], "7");
    // It ends, and takes its labels along: they are absent.
    put_report(&api, "n1", &["NVIDIA H100"]);
    patch(&api, "n1", names::PRODUCT, None).await;
    wait(&api, "its product by divvy", "n1", |labels| {
        is(labels, names::PRODUCT, "NVIDIA-H100")
    })
    .await;
    let node: Node = api.get("", "n1").unwrap();
    let managers: Vec<_> = node
        .metadata
        .managed_fields
        .unwrap_or_default()
        .into_iter()
        .filter_map(|entry| entry.manager)
        .collect();
    assert!(
        managers
            .iter()
            .any(|manager| manager == FIELD_MANAGER_LABELS),
        "{managers:?}"
    );
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_switch_no_node_is_read_or_written() {
    let api = FakeApi::new();
    api.put(&mk_node("n1")).unwrap();
    put_report(&api, "n1", &["NVIDIA H100"]);
    let instance = Instance::start(&api, false);
    wait(&api, "the Lease", "n1", |_| {
        instance.shows("divvy_leader 1")
    })
    .await;
    for resource in ["nodes", "gpunodes"] {
        assert_eq!(
            api.count("list", resource) + api.count("watch", resource),
            0,
            "{resource}"
        );
    }
    assert_eq!(api.count("patch", "nodes"), 0);
    assert_eq!(labels(&api, "n1"), BTreeMap::new());
    instance.stop().await;
}
