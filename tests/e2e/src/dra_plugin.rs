//! A stand-in for NVIDIA's DRA plugins: it has the name of one, publishes one device in a pool of
//! the node's name, and gives it to pods by a CDI file of its own. The programs themselves cannot
//! be had on this machine.
//!
//! It runs in this process, as the [`device plugin`](crate::device_plugin) does. A server made of
//! tonic can be registered only at a socket with an `@` in its name, so there are two registration
//! sockets: the one that the kubelet registers, and NVIDIA's fixed one, which accepts
//! connections and answers nothing. divvy looks for the second.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use divvy_api::names::NVIDIA_DRIVER;
use divvy_proto::dra::{self, v1 as api};
use divvy_proto::registration as reg;
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::cluster::Cluster;
use crate::device_plugin::PluginGpu;
use crate::wait::poll;

/// Time that the kubelet may take to register it: it dials both sockets.
const PATIENCE: Duration = Duration::from_mins(1);
/// The kubelet's folder of registration sockets.
const REGISTRY: &str = "/var/lib/kubelet/plugins_registry";
/// NVIDIA's second driver, for the channels of a ComputeDomain.
pub const COMPUTE_DOMAIN: &str = "compute-domain.nvidia.com";
/// The socket for the calls of the kubelet.
const DRA: &str = "e2e@dra.sock";
/// The folder of CDI files.
const CDI: &str = "/run/cdi";
/// Name of the one device.
pub const DEVICE: &str = "gpu-0";

/// A plugin that lives as long as this value.
#[derive(Debug)]
pub struct DraPlugin {
    runtime: Option<Runtime>,
    sockets: Vec<PathBuf>,
}

#[derive(Debug, Clone)]
struct Service {
    driver: &'static str,
    pool: String,
    gpu: PluginGpu,
    /// The folder of CDI files as this process sees it.
    cdi: PathBuf,
    /// True once the kubelet has registered it.
    is_registered: Arc<AtomicBool>,
}

impl DraPlugin {
    /// Starts NVIDIA's plugin for GPUs on a node, which gives this one out. Its slice is [`slice`].
    pub fn start(cluster: &Cluster, gpu: PluginGpu) -> Result<Self> {
        Self::start_as(cluster, NVIDIA_DRIVER, gpu)
    }

    /// Starts the plugin of a driver, which gives this device out.
    pub fn start_as(cluster: &Cluster, driver: &'static str, gpu: PluginGpu) -> Result<Self> {
        let folder = cluster.node_path(folder(driver));
        fs_err::create_dir_all(&folder)?;
        let registry = cluster.node_path(REGISTRY);
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let mut plugin = Self {
            runtime: None,
            sockets: Vec::new(),
        };
        let service = Service {
            driver,
            pool: cluster.layout().node().to_owned(),
            gpu,
            cdi: cluster.node_path(CDI),
            is_registered: Arc::default(),
        };
        let is_registered = service.is_registered.clone();
        {
            let _entered = runtime.enter();
            let calls = plugin.listen(folder.join(DRA))?;
            let calls = UnixListenerStream::new(calls);
            let server = api::dra_plugin_server::DraPluginServer::new(service.clone());
            let router = Server::builder().add_service(server);
            runtime.spawn(router.serve_with_incoming(calls));
            let fixed = plugin.listen(registry.join(format!("{driver}-reg.sock")))?;
            runtime.spawn(async move { while fixed.accept().await.is_ok() {} });
            // Last: the kubelet calls as soon as it is there.
            let registration = UnixListenerStream::new(
                plugin.listen(registry.join(format!("{driver}-e2e@reg.sock")))?,
            );
            let server = reg::registration_server::RegistrationServer::new(service);
            let router = Server::builder().add_service(server);
            runtime.spawn(router.serve_with_incoming(registration));
        }
        plugin.runtime = Some(runtime);
        // Before its slice is there: a pod whose first prepare fails waits a minute for the next.
        poll("the registration of NVIDIA's plugin", PATIENCE, || {
            Ok(is_registered.load(Ordering::Relaxed))
        })?;
        Ok(plugin)
    }

    fn listen(&mut self, socket: PathBuf) -> Result<UnixListener> {
        // Left by one that was killed.
        let _may_be_absent = fs_err::remove_file(&socket);
        let listener = UnixListener::bind(&socket)
            .with_context(|| format!("cannot listen on {}", socket.display()))?;
        self.sockets.push(socket);
        Ok(listener)
    }
}

impl Drop for DraPlugin {
    fn drop(&mut self) {
        // The kubelet notices the end by its socket.
        for socket in &self.sockets {
            let _may_be_gone = fs_err::remove_file(socket);
        }
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// Returns the slice of NVIDIA's plugin for GPUs: the pool has the node's name.
pub fn slice(node: &str, uuid: &str, product: &str) -> Value {
    let attributes = [("type", "gpu"), ("uuid", uuid), ("productName", product)];
    slice_as(NVIDIA_DRIVER, node, &attributes)
}

/// Returns the slice of a driver's plugin, with attributes of its one device.
pub fn slice_as(driver: &str, node: &str, attributes: &[(&str, &str)]) -> Value {
    let text = |(name, value): &(&str, &str)| ((*name).to_owned(), json!({"string": value}));
    let attributes: serde_json::Map<_, _> = attributes.iter().map(text).collect();
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": format!("{node}-{driver}-e2e")},
        "spec": {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
            "devices": [{"name": DEVICE, "attributes": attributes}],
        },
    })
}

/// Returns the folder of a driver's plugin; divvy as a stand-in has that of NVIDIA's.
fn folder(driver: &str) -> String {
    format!("/var/lib/kubelet/plugins/{driver}")
}

impl Service {
    fn file(&self, claim_uid: &str) -> PathBuf {
        let name = format!("k8s.{}-claim_{claim_uid}.json", self.driver);
        self.cdi.join(name)
    }

    /// Writes the CDI file of a claim, and returns the device's name in it.
    fn prepare(&self, claim_uid: &str) -> Result<String> {
        let device = format!("{claim_uid}-{DEVICE}");
        let (host, inside) = &self.gpu.node;
        let edits = json!({"deviceNodes": [{"path": inside, "hostPath": host}], "env": ["NVIDIA_VISIBLE_DEVICES=void"]});
        let kind = format!("k8s.{}/claim", self.driver);
        let spec = json!({
            "cdiVersion": "0.6.0",
            "kind": kind,
            "devices": [{"name": device, "containerEdits": edits}],
        });
        fs_err::create_dir_all(&self.cdi)?;
        fs_err::write(self.file(claim_uid), spec.to_string())?;
        Ok(format!("{kind}={device}"))
    }
}

#[tonic::async_trait]
impl reg::registration_server::Registration for Service {
    async fn get_info(
        &self,
        _: Request<reg::InfoRequest>,
    ) -> Result<Response<reg::PluginInfo>, Status> {
        Ok(Response::new(reg::PluginInfo {
            r#type: dra::PLUGIN_TYPE.to_owned(),
            name: self.driver.to_owned(),
            endpoint: format!("{}/{DRA}", folder(self.driver)),
            supported_versions: vec![dra::SERVICE.to_owned()],
        }))
    }

    async fn notify_registration_status(
        &self,
        status: Request<reg::RegistrationStatus>,
    ) -> Result<Response<reg::RegistrationStatusResponse>, Status> {
        let is_registered = status.into_inner().plugin_registered;
        self.is_registered.store(is_registered, Ordering::Relaxed);
        Ok(Response::new(reg::RegistrationStatusResponse {}))
    }
}

#[tonic::async_trait]
impl api::dra_plugin_server::DraPlugin for Service {
    async fn node_prepare_resources(
        &self,
        request: Request<api::NodePrepareResourcesRequest>,
    ) -> Result<Response<api::NodePrepareResourcesResponse>, Status> {
        let answer = |claim: &api::Claim| match self.prepare(&claim.uid) {
            Ok(id) => api::NodePrepareResourceResponse {
                devices: vec![api::Device {
                    // None: of every request.
                    request_names: Vec::new(),
                    pool_name: self.pool.clone(),
                    device_name: DEVICE.to_owned(),
                    cdi_device_ids: vec![id],
                    share_id: None,
                }],
                error: String::new(),
            },
            Err(error) => api::NodePrepareResourceResponse {
                devices: Vec::new(),
                error: format!("{error:#}"),
            },
        };
        let claims = request.into_inner().claims;
        let claims = claims
            .iter()
            .map(|claim| (claim.uid.clone(), answer(claim)));
        Ok(Response::new(api::NodePrepareResourcesResponse {
            claims: claims.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<api::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<api::NodeUnprepareResourcesResponse>, Status> {
        let claims = request.into_inner().claims.into_iter().map(|claim| {
            let _may_be_gone = fs_err::remove_file(self.file(&claim.uid));
            (claim.uid, api::NodeUnprepareResourceResponse::default())
        });
        Ok(Response::new(api::NodeUnprepareResourcesResponse {
            claims: claims.collect(),
        }))
    }
}
