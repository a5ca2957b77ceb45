//! The gRPC service, on a Unix socket that only root may use.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use anyhow::Context;
use divvy_model::{
    GpuTarget, GpuUuid, MigUuid, MpsNamespace, MpsNamespaceName, MpsProtocol, MpsServer,
    NotOurNamespace, ParseGpuTargetError, Target,
};
use divvy_proto::mps::v1::supervisor_server::{Supervisor as Service, SupervisorServer};
use divvy_proto::mps::v1::{
    Daemon, Limits, Namespace, ProgramsRequest, ProgramsResponse, PutNamespaceRequest,
    PutNamespaceResponse, RemoveNamespaceRequest, RemoveNamespaceResponse, StartRequest,
    StartResponse, StateRequest, StateResponse, StopRequest, StopResponse, Unknown, Unwell,
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

fn gpu(uuid: &str) -> Result<GpuUuid, Status> {
    uuid.parse()
        .map_err(|_| Status::invalid_argument(format!("gpu_uuid {uuid:?} is no UUID of a GPU")))
}

/// Reads a target.
fn target(text: &str) -> Result<GpuTarget, Status> {
    let read = text.parse();
    read.map_err(|error: ParseGpuTargetError| Status::invalid_argument(format!("target {error}")))
}

/// Reads the UUID of the partition that a daemon is to see.
fn partition(of: &GpuTarget, uuid: &str) -> Result<Option<MigUuid>, Status> {
    match of.target {
        Target::Gpu if uuid.is_empty() => Ok(None),
        Target::Gpu => Err(Status::invalid_argument(
            "partition_uuid must be empty for a whole GPU",
        )),
        Target::Partition(_) => {
            let read = uuid.parse().map(Some);
            read.map_err(|_| {
                Status::invalid_argument(format!(
                    "partition_uuid {uuid:?} is no UUID of a partition"
                ))
            })
        }
    }
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
    async fn state(&self, asked: Request<StateRequest>) -> Result<Response<StateResponse>, Status> {
        let StateRequest { gpu_uuid } = asked.into_inner();
        let of = match gpu_uuid.as_str() {
            "" => None,
            uuid => Some(gpu(uuid)?),
        };
        let state = self
            .blocking(move |supervisor| supervisor.state(of.as_ref()))
            .await?;
        let daemon = |(target, running): (GpuTarget, crate::supervisor::Running)| Daemon {
            target: target.to_string(),
            partition_uuid: running
                .partition
                .map(|uuid| uuid.to_string())
                .unwrap_or_default(),
            limits: Some(Limits {
                slots: running.server.slots.unwrap_or(0),
                cores: running.server.cores,
                memory_mib: running.server.memory_mib.unwrap_or(0),
                protocol: running.server.protocol.number(),
            }),
            pids: running.pids,
            namespaces: running.namespaces.into_iter().map(message).collect(),
            unwell: running.unwell.map(|unwell| Unwell {
                fault: unwell.fault.name().to_owned(),
                lasts_ms: u64::try_from(unwell.lasts.as_millis()).unwrap_or(u64::MAX),
                clients: unwell.clients,
                holder_pid: unwell.holder,
            }),
        };
        let unknown = state.unknown.into_iter().map(|(target, error)| Unknown {
            target: target.to_string(),
            why: chain(&error),
        });
        Ok(Response::new(StateResponse {
            daemons: state.running.into_iter().map(daemon).collect(),
            unknown: unknown.collect(),
        }))
    }

    async fn programs(
        &self,
        _: Request<ProgramsRequest>,
    ) -> Result<Response<ProgramsResponse>, Status> {
        let for_all_users = self.blocking(Supervisor::serves_all_users).await?;
        Ok(Response::new(ProgramsResponse { for_all_users }))
    }

    async fn start(&self, asked: Request<StartRequest>) -> Result<Response<StartResponse>, Status> {
        let StartRequest {
            target: of,
            limits,
            partition_uuid,
            anew,
        } = asked.into_inner();
        let target = target(&of)?;
        let partition = partition(&target, &partition_uuid)?;
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
        self.blocking(move |supervisor| {
            supervisor.start(&target, partition.as_ref(), server, anew)
        })
        .await?;
        Ok(Response::new(StartResponse {}))
    }

    async fn stop(&self, asked: Request<StopRequest>) -> Result<Response<StopResponse>, Status> {
        let target = target(&asked.into_inner().target)?;
        self.blocking(move |supervisor| supervisor.stop(&target))
            .await?;
        Ok(Response::new(StopResponse {}))
    }

    async fn put_namespace(
        &self,
        asked: Request<PutNamespaceRequest>,
    ) -> Result<Response<PutNamespaceResponse>, Status> {
        let asked = asked.into_inner();
        let target = target(&asked.target)?;
        let wanted = asked
            .namespace
            .ok_or_else(|| Status::invalid_argument("namespace is missing"))?;
        if !(1..=100).contains(&wanted.cores) {
            return Err(Status::invalid_argument("namespace.cores must be 1 to 100"));
        }
        let namespace = MpsNamespace {
            name: name(&wanted.name)?,
            cores: wanted.cores,
            memory_mib: Some(wanted.memory_mib).filter(|mib| *mib > 0),
        };
        self.blocking(move |supervisor| supervisor.put_namespace(&target, namespace))
            .await?;
        Ok(Response::new(PutNamespaceResponse {}))
    }

    async fn remove_namespace(
        &self,
        asked: Request<RemoveNamespaceRequest>,
    ) -> Result<Response<RemoveNamespaceResponse>, Status> {
        let asked = asked.into_inner();
        let (target, name) = (target(&asked.target)?, name(&asked.name)?);
        self.blocking(move |supervisor| supervisor.remove_namespace(&target, name))
            .await?;
        Ok(Response::new(RemoveNamespaceResponse {}))
    }
}
