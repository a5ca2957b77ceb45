//! The gRPC service, on a Unix socket that only root may use.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use divvy_model::{
    GpuUuid, MpsNamespace, MpsNamespaceName, MpsProtocol, MpsServer, NotOurNamespace,
};
use divvy_proto::mps::v1::supervisor_server::{Supervisor as Service, SupervisorServer};
use divvy_proto::mps::v1::{
    Daemon, Limits, Namespace, PutNamespaceRequest, PutNamespaceResponse, RemoveNamespaceRequest,
    RemoveNamespaceResponse, StartRequest, StartResponse, StateRequest, StateResponse, StopRequest,
    StopResponse,
};
use divvy_telemetry::chain;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::supervisor::Supervisor;

/// Serves until `stop`. Daemons go on after it.
pub async fn serve(
    supervisor: Arc<Supervisor>,
    socket: &Path,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    // A socket of an earlier process; two supervisors of one folder are kept apart by its lock.
    drop(fs_err::remove_file(socket));
    let listener = UnixListener::bind(socket)
        .with_context(|| format!("the socket {} cannot be made", socket.display()))?;
    fs_err::set_permissions(socket, std::fs::Permissions::from_mode(0o600))?;
    tonic::transport::Server::builder()
        .add_service(SupervisorServer::new(Answers { supervisor }))
        .serve_with_incoming_shutdown(UnixListenerStream::new(listener), stop.cancelled_owned())
        .await
        .context("the server of the socket failed")
}

struct Answers {
    supervisor: Arc<Supervisor>,
}

impl Answers {
    /// Does it on a thread of its own. A caller that goes away does not cut it short.
    async fn blocking<T: Send + 'static>(
        &self,
        what: impl FnOnce(&Supervisor) -> Result<T, crate::SupervisorError> + Send + 'static,
    ) -> Result<T, Status> {
        let supervisor = self.supervisor.clone();
        let done = tokio::task::spawn_blocking(move || what(&supervisor)).await;
        let done = done.map_err(|died| Status::internal(died.to_string()))?;
        done.map_err(|error| Status::failed_precondition(chain(&error)))
    }
}

fn gpu(text: &str) -> Result<GpuUuid, Status> {
    text.parse()
        .map_err(|_| Status::invalid_argument(format!("gpu_uuid {text:?} is no UUID of a GPU")))
}

fn name(text: &str) -> Result<MpsNamespaceName, Status> {
    text.parse()
        .map_err(|error: NotOurNamespace| Status::invalid_argument(error.to_string()))
}

fn message(namespace: MpsNamespace) -> Namespace {
    Namespace {
        name: namespace.name.to_string(),
        cores: namespace.cores,
        memory_mib: namespace.memory_mib.unwrap_or(0),
    }
}

#[tonic::async_trait]
impl Service for Answers {
    async fn state(&self, _: Request<StateRequest>) -> Result<Response<StateResponse>, Status> {
        let running = self.blocking(Supervisor::state).await?;
        let daemon = |(gpu, running): (GpuUuid, crate::supervisor::Running)| Daemon {
            gpu_uuid: gpu.to_string(),
            limits: Some(Limits {
                slots: running.server.slots.unwrap_or(0),
                cores: running.server.cores,
                memory_mib: running.server.memory_mib.unwrap_or(0),
                protocol: running.server.protocol.number(),
            }),
            pids: running.pids,
            namespaces: running.namespaces.into_iter().map(message).collect(),
        };
        let daemons = running.into_iter().map(daemon).collect();
        Ok(Response::new(StateResponse { daemons }))
    }

    async fn start(&self, asked: Request<StartRequest>) -> Result<Response<StartResponse>, Status> {
        let StartRequest { gpu_uuid, limits } = asked.into_inner();
        let gpu = gpu(&gpu_uuid)?;
        let limits = limits.ok_or_else(|| Status::invalid_argument("limits is missing"))?;
        if !(1..=100).contains(&limits.cores) {
            return Err(Status::invalid_argument("limits.cores must be 1 to 100"));
        }
        let protocol = MpsProtocol::of_number(limits.protocol);
        let server = MpsServer {
            slots: Some(limits.slots).filter(|slots| *slots > 0),
            cores: limits.cores,
            memory_mib: Some(limits.memory_mib).filter(|mib| *mib > 0),
            protocol: protocol
                .ok_or_else(|| Status::invalid_argument("limits.protocol must be 2 or 3"))?,
        };
        if server.protocol == MpsProtocol::V3 && server != MpsServer::NAMESPACES {
            return Err(Status::invalid_argument(
                "limits with protocol 3 must be none: namespaces have them",
            ));
        }
        self.blocking(move |supervisor| supervisor.start(&gpu, server))
            .await?;
        Ok(Response::new(StartResponse {}))
    }

    async fn stop(&self, asked: Request<StopRequest>) -> Result<Response<StopResponse>, Status> {
        let gpu = gpu(&asked.into_inner().gpu_uuid)?;
        self.blocking(move |supervisor| supervisor.stop(&gpu))
            .await?;
        Ok(Response::new(StopResponse {}))
    }

    async fn put_namespace(
        &self,
        asked: Request<PutNamespaceRequest>,
    ) -> Result<Response<PutNamespaceResponse>, Status> {
        let asked = asked.into_inner();
        let gpu = gpu(&asked.gpu_uuid)?;
        let wanted = asked.namespace;
        let wanted = wanted.ok_or_else(|| Status::invalid_argument("namespace is missing"))?;
        if !(1..=100).contains(&wanted.cores) {
            return Err(Status::invalid_argument("namespace.cores must be 1 to 100"));
        }
        let namespace = MpsNamespace {
            name: name(&wanted.name)?,
            cores: wanted.cores,
            memory_mib: Some(wanted.memory_mib).filter(|mib| *mib > 0),
        };
        self.blocking(move |supervisor| supervisor.put_namespace(&gpu, namespace))
            .await?;
        Ok(Response::new(PutNamespaceResponse {}))
    }

    async fn remove_namespace(
        &self,
        asked: Request<RemoveNamespaceRequest>,
    ) -> Result<Response<RemoveNamespaceResponse>, Status> {
        let asked = asked.into_inner();
        let (gpu, name) = (gpu(&asked.gpu_uuid)?, name(&asked.name)?);
        self.blocking(move |supervisor| supervisor.remove_namespace(&gpu, name))
            .await?;
        Ok(Response::new(RemoveNamespaceResponse {}))
    }
}
