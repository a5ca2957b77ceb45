//! In the place of NVIDIA's driver: under its name, beside its plugin never at once, and beside
//! what it has left behind.

use std::path::PathBuf;
use std::time::Duration;

use divvy_api::node::GpuNodeStatus;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_node, mk_result, reserved};
use divvy_fake_cluster::{ClaimRef, Fault as ApiFault, GpuNode};
use divvy_kubelet_plugin::Config;
use divvy_proto::dra::v1::dra_plugin_client::DraPluginClient;
use divvy_proto::dra::v1::{Claim, Device, NodePrepareResourcesRequest};
use divvy_proto::podresources::v1::{
    ClaimResource, ContainerResources, DynamicResource, PodResources,
};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::json;
use tokio::net::UnixListener;
use tonic::transport::Endpoint;

use crate::claims::rounds;
use crate::node::{DRIVER, Node, POOL, Plugin, devices, plain, wait};

const NVIDIA: &str = "gpu.nvidia.com";

/// The configuration of a plugin that stands in and looks around all the time.
fn config(node: &Node) -> Config {
    let mut config = node.config(&["--driver-name", NVIDIA]);
    config.timing.nvidia_plugin = Duration::from_millis(30);
    config.timing.neighbours = Duration::from_millis(50);
    config.timing.neighbour_drivers = Duration::from_millis(200);
    config.timing.neighbour_claims = Duration::from_millis(200);
    config
}

/// A stand-in for NVIDIA's plugin: a process that listens where it does.
struct Theirs {
    socket: PathBuf,
    _listens: UnixListener,
}

impl Theirs {
    fn start(node: &Node) -> Self {
        let folder = node.kubelet.config().registry_dir();
        fs_err::create_dir_all(&folder).unwrap();
        let socket = folder.join("gpu.nvidia.com-reg.sock");
        let listens = UnixListener::bind(&socket).unwrap();
        Self {
            socket,
            _listens: listens,
        }
    }

    /// Ends it as SIGKILL does: the file stays.
    fn kill(self) -> PathBuf {
        self.socket
    }
}

/// Puts the slice of NVIDIA's plugin there: a pool of the node's name, with the first GPU.
fn their_slice(node: &Node) {
    let uuid = node.sim.uuids().remove(0).to_string();
    let slice: ResourceSlice = serde_json::from_value(json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": { "name": "n1-gpu.nvidia.com-abcde" },
        "spec": {
            "driver": NVIDIA,
            "nodeName": "n1",
            "pool": { "name": "n1", "generation": 1, "resourceSliceCount": 1 },
            "devices": [{ "name": "gpu-0", "attributes": {
                "type": { "string": "gpu" }, "uuid": { "string": uuid } } }],
        },
    }))
    .unwrap();
    node.api.put(&slice).unwrap();
}

fn put(node: &Node, name: &str, pool: &str, device: &str) -> ClaimRef {
    let results = vec![mk_result("gpu", NVIDIA, pool, device)];
    let claim = allocated(mk_claim("default", name, NVIDIA, 1), results);
    let uid = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
    let stored = node.api.put(&reserved(claim, "pod", uid)).unwrap();
    ClaimRef::new("default", name, &stored.metadata.uid.unwrap())
}

/// A running pod that uses a device of a claim, as the kubelet lists it.
fn user(pod: &str, claim: &str, pool: &str, device: &str) -> PodResources {
    user_of(NVIDIA, pod, claim, pool, device)
}

fn user_of(driver: &str, pod: &str, claim: &str, pool: &str, device: &str) -> PodResources {
    let used = ClaimResource {
        driver_name: driver.to_owned(),
        pool_name: pool.to_owned(),
        device_name: device.to_owned(),
        ..ClaimResource::default()
    };
    let claim = DynamicResource {
        claim_name: claim.to_owned(),
        claim_namespace: "default".to_owned(),
        claim_resources: vec![used],
    };
    let container = ContainerResources {
        name: "main".to_owned(),
        dynamic_resources: vec![claim],
        ..ContainerResources::default()
    };
    PodResources {
        name: pod.to_owned(),
        namespace: "default".to_owned(),
        containers: vec![container],
    }
}

async fn prepare(node: &Node, claim: &ClaimRef) -> Result<Vec<Device>, String> {
    let all = node.kubelet.prepare(NVIDIA, std::slice::from_ref(claim));
    all.await.unwrap().remove(&claim.uid).unwrap()
}

async fn unprepare(node: &Node, claim: &ClaimRef) -> Result<(), String> {
    let all = node.kubelet.unprepare(NVIDIA, std::slice::from_ref(claim));
    all.await.unwrap().remove(&claim.uid).unwrap()
}

/// Prepares as a kubelet that has not noticed yet that our registration is gone; the error.
async fn call(plugin: &Plugin, claim: &ClaimRef) -> String {
    let path = format!("unix:{}", plugin.config.sockets.dra.display());
    let channel = Endpoint::from_shared(path).unwrap().connect().await;
    let mut client = DraPluginClient::new(channel.unwrap());
    let claims = vec![Claim {
        namespace: claim.namespace.clone(),
        name: claim.name.clone(),
        uid: claim.uid.clone(),
    }];
    let asked = client.node_prepare_resources(NodePrepareResourcesRequest { claims });
    let mut answer = asked.await.unwrap().into_inner().claims;
    answer.remove(&claim.uid).unwrap().error
}

/// The kubelet unprepares a claim where it knows a plugin, which does not know ours.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_ends_while_nvidias_plugin_serves_is_released() {
    let node = Node::new("h100x1");
    let mut config = config(&node);
    config.timing.executor.orphan_grace = Duration::from_millis(100);
    config.timing.reconcile = Duration::from_millis(100);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let held = put(&node, "held", POOL, "gpu-0");
    prepare(&node, &held).await.unwrap();
    let _theirs = Theirs::start(&node);
    not_ready(&plugin).await;
    node.api.delete::<ResourceClaim>("default", "held").unwrap();
    wait("the end of the record", || {
        node.records().is_empty().then_some(())
    })
    .await;
    plugin.stop().await;
}

/// Regular rounds are minutes apart: the kubelet's list shows that the pod has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_pod_beside_nvidias_plugin_is_noticed_at_once() {
    let node = Node::new("h100x1");
    let mut config = config(&node);
    config.timing.executor.orphan_grace = Duration::from_millis(100);
    let logs = "var/log/pods/default_later_0b5a4a3e-9b1f-4a8e-b3f1-ba9876543210";
    fs_err::create_dir_all(config.host_root.join(logs)).unwrap();
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let held = put(&node, "held", POOL, "gpu-0");
    prepare(&node, &held).await.unwrap();
    // A second pod of the claim, which comes into its record once the kubelet's list is read.
    node.kubelet
        .set_pod_resources(vec![user("later", "held", POOL, "gpu-0")]);
    wait("the pod in the record", || {
        let texts = node.record_texts();
        texts
            .iter()
            .any(|text| text.contains("later"))
            .then_some(())
    })
    .await;
    let before = rounds(&plugin);
    let _theirs = Theirs::start(&node);
    not_ready(&plugin).await;
    wait("the round at the change of plugins", || {
        (rounds(&plugin) > before).then_some(())
    })
    .await;
    node.kubelet.set_pod_resources(Vec::new());
    node.api.delete::<ResourceClaim>("default", "held").unwrap();
    wait("the end of the record", || {
        node.records().is_empty().then_some(())
    })
    .await;
    plugin.stop().await;
}

fn of_pool(node: &Node, pool: &str) -> Vec<ResourceSlice> {
    let mut slices = node.api.list::<ResourceSlice>();
    slices.retain(|slice| slice.spec.pool.name == pool);
    slices
}

/// Devices of our pool, with the keys of their taints.
fn ours(node: &Node) -> Vec<(String, Vec<String>)> {
    devices(of_pool(node, POOL))
}

async fn published(node: &Node, names: &[(&str, bool)]) {
    let wanted: Vec<(String, Vec<String>)> = names
        .iter()
        .map(|(name, tainted)| {
            let keys = tainted.then(|| "gpu.divvy.dev/neighbour".to_owned());
            ((*name).to_owned(), keys.into_iter().collect())
        })
        .collect();
    wait("the pool", || (ours(node) == wanted).then_some(())).await;
}

fn why_not_ready(plugin: &Plugin) -> String {
    format!("{:?}", plugin.readiness.missing())
}

async fn not_ready(plugin: &Plugin) {
    wait("the reason in readiness", || {
        why_not_ready(plugin)
            .contains("NVIDIA's plugin serves this node")
            .then_some(())
    })
    .await;
}

async fn trouble(node: &Node, kind: &str, there: bool) {
    wait("the trouble in the GpuNode", || {
        let found = node.api.get::<GpuNode>("", "n1")?;
        let status: GpuNodeStatus = serde_json::from_value(found.status).ok()?;
        let is_there = status.troubles.iter().any(|trouble| trouble.kind == kind);
        (is_there == there).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_of_nvidias_driver_name_is_served_with_its_names() {
    let node = Node::new("h100x1");
    let plugin = node.start_with(config(&node));
    plugin.wait_ready().await;
    published(&node, &[("gpu-0", false)]).await;
    let slice = of_pool(&node, POOL).remove(0);
    let attributes = slice.spec.devices.unwrap().remove(0).attributes.unwrap();
    assert!(attributes.contains_key("productName"));
    assert!(attributes.contains_key("gpu.divvy.dev/gpuUUID"));
    let claim = put(&node, "c", POOL, "gpu-0");
    let answer = prepare(&node, &claim).await.unwrap().remove(0);
    assert_eq!(
        answer.cdi_device_ids,
        [format!("gpu.nvidia.com/claim={}-gpu-0", claim.uid)]
    );
    unprepare(&node, &claim).await.unwrap();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_nvidias_plugin_serves_the_node_divvy_waits_and_says_so() {
    let node = Node::new("h100x1");
    let theirs = Theirs::start(&node);
    their_slice(&node);
    let plugin = node.start_with(config(&node));
    not_ready(&plugin).await;
    trouble(&node, "nvidia-serves", true).await;
    wait("the Event", || {
        let mut events = node.api.list::<Event>().into_iter();
        events
            .any(|event| event.reason.as_deref() == Some("NvidiaPluginServes"))
            .then_some(())
    })
    .await;
    assert!(!plugin.config.sockets.registration.exists());
    assert_eq!(ours(&node), plain(&[]));
    assert_eq!(of_pool(&node, "n1").len(), 1, "theirs stay");

    let socket = theirs.kill();
    plugin.wait_ready().await;
    published(&node, &[("gpu-0", false)]).await;
    assert_eq!(of_pool(&node, "n1"), [], "nothing serves them any more");
    trouble(&node, "nvidia-serves", false).await;
    wait("the end of the socket file", || {
        (!socket.exists()).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plugin_of_nvidia_that_comes_up_gets_the_node() {
    let node = Node::new("h100x2");
    let plugin = node.start_with(config(&node));
    plugin.wait_ready().await;
    let held = put(&node, "held", POOL, "gpu-0");
    prepare(&node, &held).await.unwrap();
    let theirs = Theirs::start(&node);
    their_slice(&node);
    not_ready(&plugin).await;
    wait("the end of our pool", || {
        of_pool(&node, POOL).is_empty().then_some(())
    })
    .await;
    wait("the end of the registration", || {
        (!plugin.config.sockets.registration.exists()).then_some(())
    })
    .await;
    assert_eq!(of_pool(&node, "n1").len(), 1, "theirs stay");
    assert_eq!(node.records().len(), 1, "what is held stays held");
    let next = put(&node, "next", POOL, "gpu-1");
    let refused = call(&plugin, &next).await;
    assert!(
        refused.contains("is not prepared: NVIDIA's plugin serves this node"),
        "{refused}"
    );
    assert_eq!(call(&plugin, &held).await, "", "it has it already");
    // Deallocated and allocated anew: by then the GPU may be theirs.
    let anew = |claim: &mut ResourceClaim| {
        let allocation = claim.status.as_mut().unwrap().allocation.as_mut().unwrap();
        allocation.allocation_timestamp =
            Some(serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap());
    };
    node.api
        .modify::<ResourceClaim>(&held.namespace, &held.name, anew)
        .unwrap();
    assert_eq!(
        call(&plugin, &held).await,
        refused
            .replace("next", "held")
            .replace(&next.uid, &held.uid)
    );

    fs_err::remove_file(theirs.kill()).unwrap();
    plugin.wait_ready().await;
    published(&node, &[("gpu-1", false), ("gpu-0", false)]).await;
    unprepare(&node, &held).await.unwrap();
    assert_eq!(node.records(), Vec::<String>::new());
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_name_of_the_driver_does_not_look_for_nvidias_plugin() {
    let node = Node::new("h100x1");
    let _theirs = Theirs::start(&node);
    their_slice(&node);
    let plugin = node.start().await;
    assert_eq!(of_pool(&node, "n1").len(), 1);
    assert_eq!(ours(&node), plain(&["gpu-0"]));
    plugin.stop().await;
}

/// The claim was allocated from the pool of NVIDIA's plugin, which has ended since; its slices are
/// gone, and its device is called by the minor number.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_of_a_claim_of_nvidias_pool_is_tainted_and_not_prepared() {
    let node = Node::new("h100x2");
    let minor = |gpu: usize| {
        let gpus = node.sim.inventory().gpus;
        gpus[&node.sim.uuids()[gpu]].facts.minor.unwrap()
    };
    let theirs = put(&node, "theirs", "n1", &format!("gpu-{}", minor(1)));
    let plugin = node.start_with(config(&node));
    plugin.wait_ready().await;
    published(&node, &[("gpu-1", true), ("gpu-0", false)]).await;
    let sentence = "NVIDIA's plugin has allocated it to claim default/theirs (it is free when its pods have ended; delete them, so that they are scheduled anew)";
    wait("the Event", || {
        let mut events = node.api.list::<Event>().into_iter();
        events
            .any(|event| event.note.is_some_and(|said| said.ends_with(sentence)))
            .then_some(())
    })
    .await;

    let refused = prepare(&node, &theirs).await.unwrap_err();
    assert!(
        refused.contains("allocated while NVIDIA's plugin served it"),
        "{refused}"
    );
    unprepare(&node, &theirs).await.unwrap();
    assert_eq!(node.records(), Vec::<String>::new());
    published(&node, &[("gpu-1", true), ("gpu-0", false)]).await;

    node.api
        .delete::<ResourceClaim>("default", "theirs")
        .unwrap();
    published(&node, &[("gpu-1", false), ("gpu-0", false)]).await;
    plugin.stop().await;
}

/// Pods of NVIDIA's plugin may still run on a GPU: it is never offered without a taint, also where
/// others are slow to say so, as a kubelet that does not answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_of_nvidias_pool_is_tainted_from_the_first() {
    let node = Node::new("h100x1");
    let mut config = config(&node);
    let silent = node.dir.path().join("silent.sock");
    let _listens = UnixListener::bind(&silent).unwrap();
    config.args.pod_resources_socket = silent;
    let minor = node.sim.inventory().gpus[&node.sim.uuids()[0]].facts.minor;
    put(&node, "theirs", "n1", &format!("gpu-{}", minor.unwrap()));
    let plugin = node.start_with(config);
    published(&node, &[("gpu-0", true)]).await;
    assert_eq!(node.api.count("update", "resourceslices"), 0);
    plugin.stop().await;
}

/// An API that fails says nothing of NVIDIA's claims: that is not that there are none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_offered_before_claims_of_nvidias_plugin_are_known() {
    let node = Node::new("h100x1");
    let minor = node.sim.inventory().gpus[&node.sim.uuids()[0]].facts.minor;
    put(&node, "theirs", "n1", &format!("gpu-{}", minor.unwrap()));
    let fails = ApiFault::Status(503);
    node.api.fail_next(20, "list", "resourceclaims", fails);
    let plugin = node.start_with(config(&node));
    published(&node, &[("gpu-0", true)]).await;
    assert_eq!(node.api.count("update", "resourceslices"), 0);
    plugin.stop().await;
}

/// A pod of NVIDIA's plugin runs on; the kubelet lists its partition under the name of both
/// drivers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_with_a_device_of_nvidias_pool_keeps_its_gpu() {
    let node = Node::new("h100x2");
    let minor = node.sim.inventory().gpus[&node.sim.uuids()[0]]
        .facts
        .minor
        .unwrap();
    let device = format!("gpu-{minor}-mig-1g10gb-19-0");
    node.kubelet
        .set_pod_resources(vec![user("trainer", "theirs", "n1", &device)]);
    let plugin = node.start_with(config(&node));
    plugin.wait_ready().await;
    published(&node, &[("gpu-1", false), ("gpu-0", true)]).await;
    node.kubelet.set_pod_resources(Vec::new());
    published(&node, &[("gpu-1", false), ("gpu-0", false)]).await;
    plugin.stop().await;
}

/// The driver got NVIDIA's name while pods ran. Nothing publishes their devices any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_of_the_drivers_former_name_keeps_its_gpu() {
    let node = Node::new("h100x2");
    let former = |device: &str| user_of(DRIVER, "trainer", "former", POOL, device);
    node.kubelet.set_pod_resources(vec![former("gpu-0")]);
    let plugin = node.start_with(config(&node));
    plugin.wait_ready().await;
    for device in ["gpu-0", "gpu-0-ts", "gpu-0-mig-1g10gb-19-0"] {
        node.kubelet.set_pod_resources(vec![former(device)]);
        published(&node, &[("gpu-1", false), ("gpu-0", true)]).await;
    }
    let of_its_end = wait("the trouble", || {
        let found = node.api.get::<GpuNode>("", "n1")?;
        let status: GpuNodeStatus = serde_json::from_value(found.status).ok()?;
        let mut troubles = status.troubles.into_iter();
        troubles.find(|trouble| trouble.kind == "neighbour")
    })
    .await;
    let message =
        "divvy has allocated it to pod default/trainer under the driver name gpu.divvy.dev";
    assert!(of_its_end.why.contains(message), "{of_its_end:?}");
    let remedy = &of_its_end.remedy;
    assert!(
        remedy.contains("until the chart is installed under it again"),
        "{remedy}"
    );
    assert!(!remedy.contains("remove the label"), "{remedy}");
    node.kubelet.set_pod_resources(vec![former("gpu-0-admin")]);
    published(&node, &[("gpu-1", false), ("gpu-0", false)]).await;
    plugin.stop().await;
}

/// The node goes back to NVIDIA's driver: whichever plugin registers first, nothing of ours is
/// offered any more. An update of the plugin keeps the slices.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_given_back_has_no_slices_of_ours_left() {
    let node = Node::new("h100x1");
    let mut labelled = mk_node("n1");
    labelled.metadata.labels = Some([("divvy.dev/gpu".to_owned(), "true".to_owned())].into());
    node.api.put(&labelled).unwrap();
    let flags = [
        "--driver-name",
        NVIDIA,
        "--node-selector",
        "divvy.dev/gpu=true",
    ];
    for (given_back, slices) in [(false, 1), (true, 0)] {
        let plugin = node.start_with(node.config(&flags));
        plugin.wait_ready().await;
        published(&node, &[("gpu-0", false)]).await;
        if given_back {
            node.api.put(&mk_node("n1")).unwrap();
        }
        plugin.stop().await;
        assert_eq!(of_pool(&node, POOL).len(), slices);
    }
}

/// Both plugins have one folder.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_nvidias_plugin_stay_as_they_are() {
    let node = Node::new("h100x1");
    let folder = config(&node).plugin_dir;
    let theirs = [
        "checkpoint.json",
        "pu.lock",
        "cp.lock",
        "nvidia-cdi-hook",
        "mps/c-1/pipe/log",
    ];
    for file in theirs {
        let file = folder.join(file);
        fs_err::create_dir_all(file.parent().unwrap()).unwrap();
        fs_err::write(file, "theirs").unwrap();
    }
    let cdi = node
        .cdi_dir()
        .join("k8s.gpu.nvidia.com-claim_0b5a4a3e.yaml");
    fs_err::write(&cdi, "theirs").unwrap();
    let plugin = node.start_with(config(&node));
    plugin.wait_ready().await;
    let claim = put(&node, "c", POOL, "gpu-0");
    prepare(&node, &claim).await.unwrap();
    unprepare(&node, &claim).await.unwrap();
    plugin.stop().await;
    for file in theirs
        .map(|file| folder.join(file))
        .into_iter()
        .chain([cdi])
    {
        let text = fs_err::read_to_string(&file).unwrap();
        assert_eq!(text, "theirs", "{}", file.display());
    }
}
