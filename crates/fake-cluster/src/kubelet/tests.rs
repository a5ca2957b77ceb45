//! The kubelet against a small plugin made of tonic servers.

use std::collections::BTreeSet;

use divvy_proto::dra::v1::dra_plugin_server::{DraPlugin, DraPluginServer};
use divvy_proto::dra::v1::{
    Claim, Device, NodePrepareResourceResponse, NodePrepareResourcesRequest,
    NodePrepareResourcesResponse, NodeUnprepareResourceResponse, NodeUnprepareResourcesRequest,
    NodeUnprepareResourcesResponse,
};
use divvy_proto::podresources::v1::ListPodResourcesRequest;
use divvy_proto::podresources::v1::pod_resources_lister_client::PodResourcesListerClient;
use divvy_proto::registration::registration_server::{Registration, RegistrationServer};
use divvy_proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use k8s_openapi::api::core::v1::PodSchedulingGroup;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

use super::*;
use crate::build::{
    allocated, mk_claim, mk_device, mk_pod, mk_result, mk_slice, reserved, reserved_for_group,
};

const DRIVER: &str = "gpu.divvy.dev";
const SOON: Duration = Duration::from_secs(10);

/// Answers every claim with one device; claims called `bad` fail, claims called `lost` are left
/// out, and a claim called `slow` is never answered.
#[derive(Clone, Default)]
struct Stub {
    info: PluginInfo,
    verdicts: Arc<Mutex<Vec<RegistrationStatus>>>,
    prepared: Arc<Mutex<BTreeSet<String>>>,
    calls: Arc<Mutex<Vec<String>>>,
}

#[tonic::async_trait]
impl Registration for Stub {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn notify_registration_status(
        &self,
        request: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        self.verdicts.lock().unwrap().push(request.into_inner());
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}

impl Stub {
    fn note(&self, what: &str, claims: &[Claim]) {
        let names: Vec<_> = claims.iter().map(|claim| claim.name.as_str()).collect();
        self.calls
            .lock()
            .unwrap()
            .push(format!("{what} {}", names.join(",")));
    }
}

#[tonic::async_trait]
impl DraPlugin for Stub {
    async fn node_prepare_resources(
        &self,
        request: Request<NodePrepareResourcesRequest>,
    ) -> Result<Response<NodePrepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.note("prepare", &claims);
        if claims.iter().any(|claim| claim.name == "slow") {
            std::future::pending::<()>().await;
        }
        let answered = claims
            .into_iter()
            .filter(|claim| claim.name != "lost")
            .map(|claim| {
                let device = Device {
                    request_names: vec!["gpu".into()],
                    pool_name: "n".into(),
                    device_name: "gpu-0".into(),
                    cdi_device_ids: vec![format!("gpu.divvy.dev/claim={}", claim.name)],
                    share_id: None,
                };
                let answer = if claim.name == "bad" {
                    NodePrepareResourceResponse {
                        devices: vec![],
                        error: "no such GPU".into(),
                    }
                } else {
                    self.prepared.lock().unwrap().insert(claim.uid.clone());
                    NodePrepareResourceResponse {
                        devices: vec![device],
                        error: String::new(),
                    }
                };
                (claim.uid, answer)
            });
        Ok(Response::new(NodePrepareResourcesResponse {
            claims: answered.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<NodeUnprepareResourcesRequest>,
    ) -> Result<Response<NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims;
        self.note("unprepare", &claims);
        let answered = claims.into_iter().map(|claim| {
            self.prepared.lock().unwrap().remove(&claim.uid);
            (claim.uid, NodeUnprepareResourceResponse::default())
        });
        Ok(Response::new(NodeUnprepareResourcesResponse {
            claims: answered.collect(),
        }))
    }
}

/// A kubelet in a temporary folder, its API server, and a plugin in a runtime of its own:
/// connections are tasks that outlive their server, and only end with the runtime, as they do with
/// a process.
struct Node {
    folder: tempfile::TempDir,
    api: FakeApi,
    kubelet: FakeKubelet,
    stub: Stub,
    plugin: Option<Runtime>,
}

impl Node {
    fn new(wipe_after: Duration) -> Self {
        Self::with(|config| config.wipe_after = wipe_after)
    }

    fn with(change: impl FnOnce(&mut KubeletConfig)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let api = FakeApi::new();
        let mut config = KubeletConfig::new(folder.path(), "n", api.clone());
        change(&mut config);
        let endpoint = config.plugin_dir(DRIVER).join("dra.sock");
        let kubelet = FakeKubelet::start(config).unwrap();
        let info = PluginInfo {
            r#type: "DRAPlugin".into(),
            name: DRIVER.into(),
            endpoint: endpoint.to_string_lossy().into_owned(),
            supported_versions: vec![SERVICE.to_owned()],
        };
        let stub = Stub {
            info,
            ..Stub::default()
        };
        Self {
            folder,
            api,
            kubelet,
            stub,
            plugin: None,
        }
    }

    /// Waits until something holds, looking again whenever the kubelet did something.
    async fn until(&self, holds: impl Fn(&Self) -> bool) {
        let mut wake = self.kubelet.shared.changed.subscribe();
        let wait = async {
            while !holds(self) {
                wake.changed().await.unwrap();
            }
        };
        tokio::time::timeout(SOON, wait).await.unwrap();
    }

    /// Serves the plugin, with its registration socket under this name.
    fn serve(&mut self, registration: &str) {
        let endpoint = PathBuf::from(&self.stub.info.endpoint);
        fs_err::create_dir_all(endpoint.parent().unwrap()).unwrap();
        let socket = self
            .folder
            .path()
            .join("plugins_registry")
            .join(registration);
        for path in [&endpoint, &socket] {
            remove_socket(path);
        }
        let stub = self.stub.clone();
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let entered = runtime.enter();
        let listen = |path: &Path| UnixListenerStream::new(UnixListener::bind(path).unwrap());
        let (dra, registration) = (listen(&endpoint), listen(&socket));
        drop(entered);
        runtime.spawn(async move {
            let service = DraPluginServer::new(stub.clone());
            let dra = Server::builder()
                .add_service(service)
                .serve_with_incoming(dra);
            let service = RegistrationServer::new(stub);
            let registration = Server::builder()
                .add_service(service)
                .serve_with_incoming(registration);
            tokio::try_join!(dra, registration).unwrap();
        });
        self.kill();
        self.plugin = Some(runtime);
    }

    /// Ends it like kill -9: the socket files stay.
    fn kill(&mut self) {
        if let Some(runtime) = self.plugin.take() {
            runtime.shutdown_background();
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The kubelet dials the percent-encoded path as `:authority`; tests/e2e shows with a real one that
/// the `@` is needed.
#[tokio::test]
async fn a_tonic_server_needs_a_socket_name_with_an_at_sign() {
    let mut node = Node::new(SOON);
    node.serve("gpu.divvy.dev-reg.sock");
    node.until(|node| !node.kubelet.refused().is_empty()).await;
    let why = "GetInfo: a server made of tonic refuses the kubelet's `:authority` of a socket without `@` in its name";
    assert_eq!(
        node.kubelet.refused(),
        [format!("gpu.divvy.dev-reg.sock: {why}")]
    );
    assert_eq!(
        *node.stub.verdicts.lock().unwrap(),
        [],
        "the plugin never hears of it"
    );

    let mut node = Node::new(SOON);
    node.serve("gpu.divvy.dev@reg.sock");
    let plugin = node.kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    assert_eq!(
        (plugin.service.as_str(), &plugin.endpoint),
        ("v1.DRAPlugin", &node.stub.info.endpoint)
    );
    let verdict = RegistrationStatus {
        plugin_registered: true,
        error: String::new(),
    };
    node.until(|node| !node.stub.verdicts.lock().unwrap().is_empty())
        .await;
    assert_eq!(*node.stub.verdicts.lock().unwrap(), [verdict]);
}

#[tokio::test]
async fn a_plugin_without_a_known_service_is_refused_with_a_reason() {
    let mut node = Node::new(SOON);
    node.stub.info.supported_versions = vec!["v9.DRAPlugin".into()];
    node.serve("x@reg.sock");
    node.until(|node| !node.stub.verdicts.lock().unwrap().is_empty())
        .await;
    node.kubelet
        .wait_registered(DRIVER, Duration::ZERO)
        .await
        .unwrap_err();
    let verdicts = node.stub.verdicts.lock().unwrap().clone();
    let why = "no service of the plugin is supported: it offers [v9.DRAPlugin]";
    assert!(
        verdicts[0].error.starts_with(why) && !verdicts[0].plugin_registered,
        "{verdicts:?}"
    );
}

#[tokio::test]
async fn prepare_returns_each_claims_answer_and_refuses_incomplete_ones() {
    let mut node = Node::new(SOON);
    node.serve("gpu.divvy.dev@reg.sock");
    node.kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    let claims = [
        ClaimRef::new("ns", "good", "u1"),
        ClaimRef::new("ns", "bad", "u2"),
    ];
    let answers = node.kubelet.prepare(DRIVER, &claims).await.unwrap();
    assert_eq!(
        answers["u1"].as_ref().unwrap()[0].cdi_device_ids,
        ["gpu.divvy.dev/claim=good"]
    );
    assert_eq!(answers["u2"], Err("no such GPU".into()));
    let lost = node
        .kubelet
        .prepare(DRIVER, &[ClaimRef::new("ns", "lost", "u3")])
        .await
        .unwrap_err();
    let expected =
        "NodePrepareResources of driver gpu.divvy.dev answered for claims [] instead of [\"u3\"]";
    assert_eq!(lost.to_string(), expected);
    node.kubelet.unprepare(DRIVER, &claims).await.unwrap();
    assert!(node.stub.prepared.lock().unwrap().is_empty());
    let error = node.kubelet.prepare("other", &claims).await.unwrap_err();
    assert_eq!(error.to_string(), "no plugin of driver other is registered");
}

#[tokio::test]
async fn a_call_without_answer_ends_at_the_deadline() {
    let mut node = Node::with(|config| config.deadline = Duration::from_millis(50));
    node.serve("gpu.divvy.dev@reg.sock");
    node.kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    let late = node
        .kubelet
        .prepare(DRIVER, &[ClaimRef::new("ns", "slow", "u1")])
        .await
        .unwrap_err();
    assert_eq!(
        late.to_string(),
        "NodePrepareResources of driver gpu.divvy.dev did not answer within 50ms"
    );
}

#[tokio::test]
async fn a_claim_of_two_pods_is_prepared_once_and_let_go_with_the_last() {
    let mut node = Node::new(SOON);
    node.serve("gpu.divvy.dev@reg.sock");
    node.kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    let uid = |name: &str| {
        node.api
            .put(&mk_pod("ns", name, Some("n"), &["c"]))
            .unwrap()
            .metadata
            .uid
            .unwrap()
    };
    let (a, b) = (uid("a"), uid("b"));
    let claim = allocated(
        mk_claim("ns", "c", DRIVER, 1),
        vec![mk_result("gpu", DRIVER, "n", "gpu-0")],
    );
    node.api.put(&reserved(claim, "a", &a)).unwrap();
    let got = node.kubelet.start_pod("ns", "a").await.unwrap();
    assert_eq!(
        got,
        [("main".to_owned(), vec!["gpu.divvy.dev/claim=c".to_owned()])].into()
    );
    let early = node.kubelet.start_pod("ns", "b").await.unwrap_err();
    assert_eq!(
        early.to_string(),
        "pod ns/b: ResourceClaim ns/c is not reserved for the pod"
    );
    node.api
        .modify("ns", "c", |c: &mut ResourceClaim| {
            *c = reserved(c.clone(), "b", &b);
        })
        .unwrap();
    assert_eq!(node.kubelet.start_pod("ns", "b").await.unwrap(), got);
    let channel = Endpoint::from_shared(format!(
        "unix:{}",
        node.kubelet.config().pod_resources_socket().display()
    ));
    let mut lister = PodResourcesListerClient::connect(channel.unwrap())
        .await
        .unwrap();
    let pods = lister
        .list(ListPodResourcesRequest {})
        .await
        .unwrap()
        .into_inner()
        .pod_resources;
    let devices = pods.iter().map(|p| {
        p.containers[0].dynamic_resources[0].claim_resources[0]
            .device_name
            .as_str()
    });
    assert_eq!(devices.collect::<Vec<_>>(), ["gpu-0", "gpu-0"]);
    node.kubelet.stop_pod(&a).await.unwrap();
    node.kubelet.stop_pod(&b).await.unwrap();
    assert_eq!(
        *node.stub.calls.lock().unwrap(),
        ["prepare c", "unprepare c"]
    );
}

#[tokio::test]
async fn a_claim_of_a_pod_group_is_for_the_pods_of_that_group() {
    let mut node = Node::new(SOON);
    node.serve("gpu.divvy.dev@reg.sock");
    node.kubelet.wait_registered(DRIVER, SOON).await.unwrap();
    for (name, group) in [("a", "train"), ("b", "other")] {
        let mut pod = mk_pod("ns", name, Some("n"), &["c"]);
        let group = PodSchedulingGroup {
            pod_group_name: Some(group.to_owned()),
        };
        pod.spec.as_mut().unwrap().scheduling_group = Some(group);
        node.api.put(&pod).unwrap();
    }
    let claim = allocated(
        mk_claim("ns", "c", DRIVER, 1),
        vec![mk_result("gpu", DRIVER, "n", "gpu-0")],
    );
    node.api.put(&reserved_for_group(claim, "train")).unwrap();
    node.kubelet.start_pod("ns", "a").await.unwrap();
    let refused = node.kubelet.start_pod("ns", "b").await.unwrap_err();
    assert_eq!(
        refused.to_string(),
        "pod ns/b: ResourceClaim ns/c is not reserved for the pod"
    );
}

#[tokio::test]
async fn slices_go_when_the_kubelet_restarts_and_when_the_plugin_stays_away() {
    let mut node = Node::new(Duration::from_millis(100));
    let slice = || mk_slice("s", DRIVER, "n", vec![mk_device("gpu-0")]);
    let wiped = |view: &crate::View<'_>| view.list::<ResourceSlice>().is_empty();
    node.serve("gpu.divvy.dev@reg.sock");
    let connected = |plugins: &[Plugin]| plugins.iter().any(|p| p.connected).then_some(());
    node.kubelet.wait_for(connected, SOON).await.unwrap();
    node.api.put(&slice()).unwrap();
    node.kubelet.restart();
    assert!(node.api.list::<ResourceSlice>().is_empty(), "wiped at once");
    node.kubelet.wait_for(connected, SOON).await.unwrap();
    node.api.put(&slice()).unwrap();
    node.kill();
    node.api.wait_until(wiped, SOON).await.unwrap();
    node.serve("gpu.divvy.dev@reg.sock");
    node.kubelet.wait_for(connected, SOON).await.unwrap();
}
