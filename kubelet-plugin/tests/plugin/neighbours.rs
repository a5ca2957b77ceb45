//! GPUs that others use: known from the kubelet, from other drivers' objects, and from NVML.

use std::path::Path;
use std::time::Duration;

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use divvy_gpu_sim::Fault;
use divvy_kubelet_plugin::{Config, SocketNames};
use divvy_model::{GpuErrorCode, GpuOp};
use divvy_proto::podresources::v1::{
    ClaimResource, ContainerDevices, ContainerResources, DynamicResource, PodResources,
};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::json;

use crate::node::{Node, POOL, Plugin, device, plain, wait};

fn used(names: &[&str], taken: &str) -> Vec<(String, Vec<String>)> {
    let keys = |name: &str| {
        if name == taken {
            vec!["gpu.divvy.dev/neighbour".to_owned()]
        } else {
            vec![]
        }
    };
    names
        .iter()
        .map(|name| ((*name).to_owned(), keys(name)))
        .collect()
}

/// A pod that a device plugin has given devices to.
fn pod_with(resource: &str, ids: &[&str]) -> PodResources {
    let devices = ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
        ..ContainerDevices::default()
    };
    let container = ContainerResources {
        name: "main".to_owned(),
        devices: vec![devices],
        ..ContainerResources::default()
    };
    PodResources {
        name: "trainer".to_owned(),
        namespace: "ml".to_owned(),
        containers: vec![container],
    }
}

/// A plugin that looks around all the time.
async fn start(node: &Node) -> Plugin {
    let mut config = node.config(&[]);
    config.timing.neighbours = Duration::from_millis(50);
    config.timing.neighbour_drivers = Duration::from_millis(200);
    config.timing.neighbour_claims = Duration::from_millis(200);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    plugin
}

async fn reported(node: &Node, what: &str) {
    wait("the Event", || {
        let events = node.api.list::<Event>().into_iter();
        let notes: Vec<_> = events
            .filter(|event| event.reason.as_deref() == Some("GpuUsedByOthers"))
            .filter_map(|event| event.note)
            .collect();
        notes.iter().any(|note| note.contains(what)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_of_the_device_plugin_is_tainted_until_its_pod_is_gone() {
    let node = Node::new("h100x3");
    let plugin = start(&node).await;
    let names = ["gpu-2", "gpu-1", "gpu-0"];
    let uuid = node.sim.uuids()[1].to_string();
    node.kubelet.set_pod_resources(vec![
        pod_with("nvidia.com/gpu", &[&uuid]),
        pod_with("rdma/hca", &["0"]),
    ]);
    wait("the taint", || {
        (node.published() == used(&names, "gpu-1")).then_some(())
    })
    .await;
    reported(
        &node,
        &format!(
            "{uuid} is not allocated to new claims: the device plugin of nvidia.com/gpu has allocated it to pod ml/trainer"
        ),
    )
    .await;
    node.kubelet.set_pod_resources(Vec::new());
    wait("the taint's end", || {
        (node.published() == plain(&names)).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_another_driver_has_allocated_is_tainted_before_its_pod_runs() {
    let node = Node::new("h100x2");
    let plugin = start(&node).await;
    let names = ["gpu-1", "gpu-0"];
    their_slice(&node);
    let theirs = vec![mk_result("gpu", "gpu.example.com", "n1", "card-7")];
    node.api
        .put(&allocated(
            mk_claim("ml", "theirs", "gpu.example.com", 1),
            theirs,
        ))
        .unwrap();
    wait("the taint", || {
        (ours(&node) == used(&names, "gpu-0")).then_some(())
    })
    .await;
    reported(
        &node,
        "the driver gpu.example.com has allocated it to claim ml/theirs",
    )
    .await;
    node.api.delete::<ResourceClaim>("ml", "theirs").unwrap();
    wait("the taint's end", || {
        (ours(&node) == plain(&names)).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// Another driver publishes the first GPU, and something else.
fn their_slice(node: &Node) {
    let uuid = node.sim.uuids().remove(0).to_string();
    let device = |name: &str, uuid: &str| json!({ "name": name, "attributes": { "uuid": { "string": uuid } } });
    let slice: ResourceSlice = serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": { "name": "theirs" },
        "spec": {
            "driver": "gpu.example.com",
            "nodeName": "n1",
            "pool": { "name": "n1", "generation": 1, "resourceSliceCount": 1 },
            "devices": [device("card-7", &uuid), device("card-8", "GPU-of-another-kind")],
        },
    }))
    .unwrap();
    node.api.put(&slice).unwrap();
}

/// Beside another driver of a GPU its claims are asked for by name and all claims seldom.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn beside_another_driver_claims_are_read_by_name_and_lists_are_few() {
    let node = Node::new("h100x2");
    their_slice(&node);
    let theirs = vec![mk_result("gpu", "gpu.example.com", "n1", "card-7")];
    node.api
        .put(&allocated(
            mk_claim("ml", "theirs", "gpu.example.com", 1),
            theirs,
        ))
        .unwrap();
    let mut config = node.config(&[]);
    config.timing.neighbours = Duration::from_millis(50);
    config.timing.neighbour_drivers = Duration::from_millis(50);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let names = ["gpu-1", "gpu-0"];
    wait("the taint", || {
        (ours(&node) == used(&names, "gpu-0")).then_some(())
    })
    .await;
    node.api.forget_requests();
    wait("looks", || {
        (node.api.count("get", "resourceclaims") > 3).then_some(())
    })
    .await;
    assert_eq!(node.api.count("list", "resourceclaims"), 0);
    node.api.delete::<ResourceClaim>("ml", "theirs").unwrap();
    wait("the taint's end", || {
        (ours(&node) == plain(&names)).then_some(())
    })
    .await;
    assert_eq!(node.api.count("list", "resourceclaims"), 0);
    plugin.stop().await;
}

/// A neighbour that has let go is noticed at the next look although devices are asked for seldom.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_neighbour_that_let_go_is_noticed_at_the_next_look() {
    let node = Node::new("h100x2");
    their_slice(&node);
    let theirs = || vec![mk_result("gpu", "gpu.example.com", "n1", "card-7")];
    node.api
        .put(&allocated(
            mk_claim("ml", "theirs", "gpu.example.com", 1),
            theirs(),
        ))
        .unwrap();
    let mut config = node.config(&[]);
    config.timing.neighbours = Duration::from_millis(50);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let names = ["gpu-1", "gpu-0"];
    wait("the taint", || {
        (ours(&node) == used(&names, "gpu-0")).then_some(())
    })
    .await;
    // While its pod runs the kubelet lists it, and the API is not asked.
    node.kubelet
        .set_pod_resources(vec![pod_of_driver("gpu.example.com", "card-7")]);
    let asked = || node.api.count("get", "resourceclaims");
    let mut before = asked();
    loop {
        tokio::time::sleep(Duration::from_millis(300)).await;
        if std::mem::replace(&mut before, asked()) == before {
            break;
        }
    }
    assert_eq!(ours(&node), used(&names, "gpu-0"));
    node.kubelet.set_pod_resources(Vec::new());
    wait("looks", || (asked() > before + 2).then_some(())).await;
    assert_eq!(ours(&node), used(&names, "gpu-0"), "allocated still");
    node.api.delete::<ResourceClaim>("ml", "theirs").unwrap();
    wait("the taint's end", || {
        (ours(&node) == plain(&names)).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_divvy_drivers_of_one_node_do_not_give_out_one_gpu_at_once() {
    const OTHER: &str = "gpu.two.example";
    let node = Node::new("h100x2");
    let first = node.start().await;
    let dir = node
        .kubelet
        .config()
        .plugin_dir(OTHER)
        .display()
        .to_string();
    let config = node.config(&["--driver-name", OTHER]);
    assert!(config.run_dir.is_some() && config.run_dir == first.config.run_dir);
    let sockets = SocketNames::new(
        OTHER,
        Path::new(&dir),
        &node.kubelet.config().registry_dir(),
        None,
    )
    .unwrap();
    let second = node.start_with(Config {
        plugin_dir: dir.into(),
        sockets,
        ..config
    });
    second.wait_ready().await;
    let theirs = vec![mk_result("gpu", OTHER, crate::node::POOL, "gpu-0")];
    let theirs = node.put(allocated(mk_claim("default", "theirs", OTHER, 1), theirs));
    let prepare = async || {
        let claims = std::slice::from_ref(&theirs);
        node.kubelet
            .prepare(OTHER, claims)
            .await
            .unwrap()
            .remove(&theirs.uid)
            .unwrap()
    };
    let ours = node.claim("ours", &["gpu-0"]);
    node.prepare(&ours).await.unwrap();
    let refused = prepare().await.unwrap_err();
    assert!(
        refused.contains("is held by driver gpu.divvy.dev, which has prepared claim default/ours"),
        "{refused}"
    );
    node.unprepare(&ours).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "ours").unwrap();
    prepare().await.unwrap();
    let late = node.claim("late", &["gpu-0"]);
    assert!(
        node.prepare(&late)
            .await
            .unwrap_err()
            .contains("is held by driver gpu.two.example")
    );
    first.stop().await;
    second.stop().await;
}

/// A pod with a claim of another driver.
fn pod_of_driver(driver: &str, device: &str) -> PodResources {
    let claim = DynamicResource {
        claim_name: "theirs".to_owned(),
        claim_namespace: "ml".to_owned(),
        claim_resources: vec![ClaimResource {
            driver_name: driver.to_owned(),
            pool_name: "n1".to_owned(),
            device_name: device.to_owned(),
            ..ClaimResource::default()
        }],
    };
    let container = ContainerResources {
        dynamic_resources: vec![claim],
        ..ContainerResources::default()
    };
    PodResources {
        name: "trainer".to_owned(),
        namespace: "ml".to_owned(),
        containers: vec![container],
    }
}

/// The slices of the driver's former name say which GPU is behind a number, until the kubelet
/// removes them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_gpu_of_a_former_name_is_that_of_its_slices_also_when_they_are_gone() {
    const FORMER: &str = "gpu.two.example";
    let node = Node::new("h100x2");
    let names = ["gpu-1", "gpu-0"];
    let uuid = node.sim.uuids().remove(1).to_string();
    let slice: ResourceSlice = serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": { "name": "former" },
        "spec": {
            "driver": FORMER,
            "nodeName": "n1",
            "pool": { "name": POOL, "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "gpu-0", "attributes": { "uuid": { "string": uuid } } }],
        },
    }))
    .unwrap();
    node.api.put(&slice).unwrap();
    let mut pod = pod_of_driver(FORMER, "gpu-0");
    pod.containers[0].dynamic_resources[0].claim_resources[0].pool_name = POOL.to_owned();
    node.kubelet.set_pod_resources(vec![pod]);
    let plugin = start(&node).await;
    wait("the taint", || {
        (ours(&node) == used(&names, "gpu-1")).then_some(())
    })
    .await;
    reported(&node, "under the driver name gpu.two.example").await;
    node.api.delete::<ResourceSlice>("", "former").unwrap();
    let lists = || node.api.count("list", "resourceslices");
    let before = lists();
    wait("looks at slices", || (lists() > before + 2).then_some(())).await;
    assert_eq!(ours(&node), used(&names, "gpu-1"));
    node.kubelet.set_pod_resources(Vec::new());
    wait("the taint's end", || {
        (ours(&node) == plain(&names)).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// Returns the devices that we publish.
fn ours(node: &Node) -> Vec<(String, Vec<String>)> {
    let slices = node.api.list::<ResourceSlice>().into_iter();
    crate::node::devices(
        slices
            .filter(|slice| slice.spec.driver == crate::node::DRIVER)
            .collect(),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_process_taints_its_gpu_and_the_first_hold_names_it() {
    let node = Node::new("h100x2");
    let plugin = start(&node).await;
    let names = ["gpu-1", "gpu-0"];
    // A container's own process is not a neighbour.
    let held = node.claim("held", &["gpu-1"]);
    node.prepare(&held).await.unwrap();
    node.sim.start_process(&node.sim.uuids()[1], 100);

    let uuid = node.sim.uuids()[0].clone();
    node.sim.start_process(&uuid, 4711);
    wait("the taint", || {
        (node.published() == used(&names, "gpu-0")).then_some(())
    })
    .await;
    reported(
        &node,
        "process 4711 computes on it without a claim of divvy",
    )
    .await;
    // A list that fails is no empty list.
    let fault = Fault::fail(GpuErrorCode::TIMEOUT).of(GpuOp::Processes);
    node.sim.fault(fault.on(&uuid));
    let lists = node.sim.calls(GpuOp::Processes) + 4;
    wait("some rounds", || {
        (node.sim.calls(GpuOp::Processes) > lists).then_some(())
    })
    .await;
    assert_eq!(node.published(), used(&names, "gpu-0"));
    node.sim.clear_faults();
    // Allocated before the taint was seen.
    let claim = node.claim("c", &["gpu-0"]);
    assert_eq!(
        node.prepare(&claim).await.unwrap_err(),
        format!(
            "device gpu-0 ({uuid}) of claim default/c (UID {}): its GPU is used by process 4711, which belongs to no claim of this driver (end the process, or remove the GPU from the driver that allocated it: a GPU belongs to one driver)",
            claim.uid
        )
    );
    assert_eq!(
        node.records(),
        [format!("{}.json", held.uid)],
        "nothing is held for it"
    );
    // It ends while the kubelet's next call waits.
    let (answer, ()) = tokio::join!(node.prepare(&claim), async {
        tokio::time::sleep(Duration::from_millis(300)).await;
        node.sim.end_process(4711);
    });
    assert_eq!(answer, Ok(vec![device(&claim, "gpu", "gpu-0")]));
    wait("the taint's end", || {
        (node.published() == plain(&names)).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// The first partition of a GPU is refused while a process computes on the whole GPU.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_partition_is_refused_while_the_whole_gpu_computes() {
    let node = Node::new("h100x1");
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    node.sim.start_process(&node.sim.uuids()[0], 4711);
    let claim = node.claim("c", &["gpu-0-mig-1g10gb-19-0"]);
    let refused = node.prepare(&claim).await.unwrap_err();
    assert!(
        refused.contains("is used by process 4711, which belongs to no claim of this driver"),
        "{refused}"
    );
    node.sim.end_process(4711);
    node.prepare(&claim).await.unwrap();
    // The next one is not the first: processes in its neighbour are the neighbour's.
    node.sim.start_process_in(
        &node.sim.uuids()[0],
        node.sim.engine().gpus()[0].instances[0].instance.id,
        100,
    );
    node.prepare(&node.claim("next", &["gpu-0-mig-1g10gb-19-1"]))
        .await
        .unwrap();
    plugin.stop().await;
}
