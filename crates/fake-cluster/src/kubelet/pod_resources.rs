//! The pod resources socket.

use std::io;
use std::path::Path;
use std::sync::Arc;

use divvy_proto::podresources::v1::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use divvy_proto::podresources::v1::{
    AllocatableResourcesRequest, AllocatableResourcesResponse, GetPodResourcesRequest,
    GetPodResourcesResponse, ListPodResourcesRequest, ListPodResourcesResponse,
};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::{Request, Response, Status};

use super::{Shared, remove_socket};

struct Lister(Arc<Shared>);

/// Serves on a socket, in place of an older one.
pub(super) fn serve(shared: &Arc<Shared>, socket: &Path) -> io::Result<JoinHandle<()>> {
    if let Some(folder) = socket.parent() {
        fs_err::create_dir_all(folder)?;
    }
    remove_socket(socket);
    let listener = UnixListener::bind(socket)?;
    let service = PodResourcesListerServer::new(Lister(shared.clone()));
    Ok(tokio::spawn(async move {
        let incoming = UnixListenerStream::new(listener);
        if let Err(error) = tonic::transport::Server::builder()
            .add_service(service)
            .serve_with_incoming(incoming)
            .await
        {
            tracing::error!(%error, "the pod resources service ended");
        }
    }))
}

#[tonic::async_trait]
impl PodResourcesLister for Lister {
    async fn list(
        &self,
        _: Request<ListPodResourcesRequest>,
    ) -> Result<Response<ListPodResourcesResponse>, Status> {
        let state = self.0.lock();
        let pods = state.pods.values().chain(&state.extra_pods).cloned();
        Ok(Response::new(ListPodResourcesResponse {
            pod_resources: pods.collect(),
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<AllocatableResourcesRequest>,
    ) -> Result<Response<AllocatableResourcesResponse>, Status> {
        Ok(Response::new(AllocatableResourcesResponse::default()))
    }

    async fn get(
        &self,
        _: Request<GetPodResourcesRequest>,
    ) -> Result<Response<GetPodResourcesResponse>, Status> {
        Err(Status::unimplemented("the plugin lists"))
    }
}
