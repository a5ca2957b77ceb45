//! Claims that are reserved for a PodGroup: their status names none of its pods, so the kubelet's
//! list does.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_fake_cluster::build::{allocated, mk_claim, mk_pod, mk_result, reserved_for_group};
use k8s_openapi::api::core::v1::{Container, PodSchedulingGroup};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use crate::node::{DRIVER, Node, POOL, Plugin, device, wait};
use crate::usage::{GIB, belongs, events, pod_uid, shows, value};

const GROUP: &str = "train";

/// A plugin that looks around all the time.
async fn start(node: &Node) -> Plugin {
    let mut config = node.config(&["--offer", "everything"]);
    config.timing.neighbours = Duration::from_millis(50);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    plugin
}

/// Starts a pod of the group, as a kubelet does, which makes a folder for its logs; with a process
/// of its number. The pod has as many containers, each with the claim.
async fn start_pod(node: &Node, pod: u32, claim: &str) {
    let name = format!("worker-{pod}");
    let mut object = mk_pod("default", &name, Some("n1"), &[claim]);
    object.metadata.uid = Some(pod_uid(pod));
    let group = PodSchedulingGroup {
        pod_group_name: Some(GROUP.to_owned()),
    };
    let spec = object.spec.as_mut().unwrap();
    spec.scheduling_group = Some(group);
    let main = spec.containers.first().cloned().unwrap();
    for number in 1..pod {
        spec.containers.push(Container {
            name: format!("beside-{number}"),
            ..main.clone()
        });
    }
    assert_eq!(
        node.api.put(&object).unwrap().metadata.uid,
        Some(pod_uid(pod))
    );
    let logs = format!("host/var/log/pods/default_{name}_{}", pod_uid(pod));
    fs_err::create_dir_all(node.dir.path().join(logs)).unwrap();
    node.kubelet.start_pod("default", &name).await.unwrap();
    node.sim
        .start_process(&node.sim.uuids().swap_remove(0), pod);
    belongs(node, pod, pod);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn use_of_a_pod_groups_claim_is_shown_for_the_kubelets_pods() {
    let node = Node::new("l4x1");
    let plugin = start(&node).await;
    let gpu = node.sim.uuids().remove(0);
    let mut result = mk_result("gpu", DRIVER, POOL, "gpu-0-ts");
    let granted = [("memory", "4Gi"), ("cores", "25"), ("slots", "1")];
    let granted = granted.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned())));
    result.share_id = Some("s-1".to_owned());
    result.consumed_capacity = Some(BTreeMap::from(granted));
    let claim = allocated(mk_claim("default", "c", DRIVER, 1), vec![result]);
    node.api.put(&reserved_for_group(claim, GROUP)).unwrap();

    for (pod, gib, percent) in [(1, 3, 50), (2, 1, 10)] {
        start_pod(&node, pod, "c").await;
        node.sim.set_usage(&gpu, pod, Some(gib * GIB), percent);
        let name = format!("pod=\"worker-{pod}\"");
        let labels = ["claim=\"c\"", &name];
        let gib = f64::from(u32::try_from(gib).unwrap());
        shows(
            &plugin,
            "divvy_claim_memory_used_bytes",
            &labels,
            gib * f64::from(1 << 30),
        )
        .await;
        let by_process = [&labels[..], &["source=\"process\""]].concat();
        shows(
            &plugin,
            "divvy_claim_utilization_ratio",
            &by_process,
            f64::from(percent) / 100.0,
        )
        .await;
        shows(
            &plugin,
            "divvy_gpu_memory_unattributed_bytes",
            &[gpu.as_str()],
            0.0,
        )
        .await;
    }
    // The one container that has the claim must be it; of two it may be either.
    let used = |labels: &[&str]| value(&plugin, "divvy_claim_memory_used_bytes", labels);
    wait("the container", || {
        used(&["worker-1", "container=\"main\""])
    })
    .await;
    assert_eq!(used(&["worker-2", "container="]), None);
    wait("the metric for autoscalers", || {
        value(&plugin, "divvy_pod_gpu_utilization_ratio", &["worker-2"])
    })
    .await;
    shows(&plugin, "divvy_claim_overuse", &["claim=\"c\""], 0.0).await;
    let tainted: Vec<_> = node
        .published()
        .into_iter()
        .filter(|(_, taints)| !taints.is_empty())
        .collect();
    assert_eq!(tainted, [], "processes of claims are no neighbours");

    // Reported to all of its pods.
    node.sim.set_usage(&gpu, 2, Some(2 * GIB), 10);
    wait("the Events", || {
        (events(&node, "MemoryOverGrant") == ["Pod", "Pod", "ResourceClaim"]).then_some(())
    })
    .await;
    // One of them ends.
    node.sim.end_process(1);
    node.kubelet.stop_pod(&pod_uid(1)).await.unwrap();
    wait("the end of its series", || {
        value(&plugin, "divvy_claim_memory_used_bytes", &["worker-1"])
            .is_none()
            .then_some(())
    })
    .await;
    shows(
        &plugin,
        "divvy_claim_memory_used_bytes",
        &["worker-2"],
        2.0 * f64::from(1 << 30),
    )
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_groups_admin_processes_are_not_foreign_to_the_first_hold() {
    let node = Node::new("h100x1");
    let plugin = start(&node).await;
    let mut result = mk_result("gpu", DRIVER, POOL, "gpu-0");
    result.admin_access = Some(true);
    let monitor = allocated(mk_claim("default", "monitor", DRIVER, 1), vec![result]);
    node.api.put(&reserved_for_group(monitor, GROUP)).unwrap();
    start_pod(&node, 1, "monitor").await;
    node.sim.set_usage(&node.sim.uuids()[0], 1, Some(GIB), 0);
    shows(
        &plugin,
        "divvy_claim_memory_used_bytes",
        &["pod=\"worker-1\""],
        f64::from(1 << 30),
    )
    .await;

    let claim = node.claim("c", &["gpu-0"]);
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-0")])
    );
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    assert_eq!(
        node.records().len(),
        1,
        "the monitor's processes keep no claim from leaving"
    );
    plugin.stop().await;
}
