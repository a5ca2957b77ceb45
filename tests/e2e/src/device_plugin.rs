//! A stand-in for NVIDIA's device plugin: it gives GPUs of the node to pods that ask for an
//! extended resource, and knows nothing of divvy.
//!
//! It runs in this process: all that kubelet and plugin share is a folder of sockets, which both
//! reach.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::pin::Pin;

use anyhow::{Context, Result};
use divvy_proto::deviceplugin::v1beta1 as api;
use tokio::net::UnixListener;
use tokio::runtime::{Builder, Runtime};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Endpoint, Server};
use tonic::{Request, Response, Status};

use crate::cluster::Cluster;

/// The folder of device plugins' sockets, on the node.
const SOCKETS: &str = "/var/lib/kubelet/device-plugins";
/// The kubelet's dial sends the path as `:authority`; with an `@` in it that can be parsed.
const OWN: &str = "nvidia@e2e.sock";

/// A GPU as the stand-in gives it out.
#[derive(Debug, Clone)]
pub struct PluginGpu {
    /// Its UUID, which is its device id.
    pub uuid: String,
    /// Its device node, on the node and in the container.
    pub node: (String, String),
}

/// A device plugin that lives as long as this value.
#[derive(Debug)]
pub struct DevicePlugin {
    runtime: Option<Runtime>,
    socket: PathBuf,
}

#[derive(Debug, Clone)]
struct Service {
    gpus: Vec<PluginGpu>,
}

impl DevicePlugin {
    /// Registers a plugin that gives these GPUs out under this resource name.
    pub fn start(cluster: &Cluster, resource: &str, gpus: Vec<PluginGpu>) -> Result<Self> {
        let folder = cluster.node_path(SOCKETS);
        let (socket, kubelet) = (folder.join(OWN), folder.join("kubelet.sock"));
        let runtime = Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let listener = {
            let _entered = runtime.enter();
            UnixListener::bind(&socket)
                .with_context(|| format!("cannot listen on {}", socket.display()))?
        };
        let service = api::device_plugin_server::DevicePluginServer::new(Service { gpus });
        runtime.spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(UnixListenerStream::new(listener)),
        );
        let plugin = Self {
            runtime: Some(runtime),
            socket,
        };
        plugin.register(format!("unix:{}", kubelet.display()), resource)?;
        Ok(plugin)
    }

    fn register(&self, kubelet: String, resource: &str) -> Result<()> {
        let request = api::RegisterRequest {
            version: "v1beta1".to_owned(),
            endpoint: OWN.to_owned(),
            resource_name: resource.to_owned(),
            options: None,
        };
        let register = async {
            let channel = Endpoint::from_shared(kubelet)?.connect().await?;
            let mut client = api::registration_client::RegistrationClient::new(channel);
            client
                .register(request)
                .await
                .context("the kubelet refuses the device plugin")?;
            Ok(())
        };
        self.runtime
            .as_ref()
            .context("the plugin has ended")?
            .block_on(register)
    }
}

impl Drop for DevicePlugin {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
        // The kubelet removes sockets, too, when it starts.
        let _may_be_gone = fs_err::remove_file(&self.socket);
    }
}

#[tonic::async_trait]
impl api::device_plugin_server::DevicePlugin for Service {
    async fn get_device_plugin_options(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<api::DevicePluginOptions>, Status> {
        Ok(Response::new(api::DevicePluginOptions::default()))
    }

    type ListAndWatchStream =
        Pin<Box<dyn tokio_stream::Stream<Item = Result<api::ListAndWatchResponse, Status>> + Send>>;

    async fn list_and_watch(
        &self,
        _: Request<api::Empty>,
    ) -> Result<Response<Self::ListAndWatchStream>, Status> {
        let device = |gpu: &PluginGpu| api::Device {
            id: gpu.uuid.clone(),
            health: "Healthy".to_owned(),
        };
        let all = api::ListAndWatchResponse {
            devices: self.gpus.iter().map(device).collect(),
        };
        // Nothing ever changes: the stream is open until the plugin ends.
        Ok(Response::new(Box::pin(
            tokio_stream::once(Ok(all)).chain(tokio_stream::pending()),
        )))
    }

    async fn allocate(
        &self,
        request: Request<api::AllocateRequest>,
    ) -> Result<Response<api::AllocateResponse>, Status> {
        let answer = |ids: &[String]| {
            let given = self.gpus.iter().filter(|gpu| ids.contains(&gpu.uuid));
            let devices = given.map(|gpu| api::DeviceSpec {
                host_path: gpu.node.0.clone(),
                container_path: gpu.node.1.clone(),
                permissions: "rw".to_owned(),
            });
            let envs = BTreeMap::from([("NVIDIA_VISIBLE_DEVICES".to_owned(), ids.join(","))]);
            api::ContainerAllocateResponse {
                envs,
                devices: devices.collect(),
            }
        };
        let asked = request.into_inner().container_requests;
        let container_responses = asked
            .iter()
            .map(|container| answer(&container.device_ids))
            .collect();
        Ok(Response::new(api::AllocateResponse {
            container_responses,
        }))
    }
}
