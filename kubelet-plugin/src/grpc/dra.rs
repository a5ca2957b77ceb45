//! The DRA service as a thin adapter: messages in, [`ClaimService`] calls, messages out. The
//! protocol's types go no further than this file.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_claims::PreparedDevice;
use divvy_proto::dra::v1;
use tonic::{Request, Response, Status};

use crate::claims::claim::Asked;
use crate::claims::service::ClaimService;

/// Serves the DRA protocol.
#[derive(Clone)]
pub(crate) struct DraServer(pub(crate) Arc<ClaimService>);

#[tonic::async_trait]
impl v1::dra_plugin_server::DraPlugin for DraServer {
    async fn node_prepare_resources(
        &self,
        request: Request<v1::NodePrepareResourcesRequest>,
    ) -> Result<Response<v1::NodePrepareResourcesResponse>, Status> {
        let claims = request
            .into_inner()
            .claims
            .into_iter()
            .map(|c| Asked::new(c.namespace, c.name, c.uid));
        let claims = self.0.prepare(claims.collect()).await;
        let claims = claims.into_iter().map(|(uid, result)| {
            let answer = match result {
                Ok(devices) => v1::NodePrepareResourceResponse {
                    devices: devices.into_iter().map(device_v1).collect(),
                    error: String::new(),
                },
                Err(error) => v1::NodePrepareResourceResponse {
                    devices: Vec::new(),
                    error,
                },
            };
            (uid, answer)
        });
        Ok(Response::new(v1::NodePrepareResourcesResponse {
            claims: claims.collect(),
        }))
    }

    async fn node_unprepare_resources(
        &self,
        request: Request<v1::NodeUnprepareResourcesRequest>,
    ) -> Result<Response<v1::NodeUnprepareResourcesResponse>, Status> {
        let claims = request
            .into_inner()
            .claims
            .into_iter()
            .map(|c| Asked::new(c.namespace, c.name, c.uid));
        let claims = errors(self.0.unprepare(claims.collect()).await);
        let claims = claims.map(|(uid, error)| (uid, v1::NodeUnprepareResourceResponse { error }));
        Ok(Response::new(v1::NodeUnprepareResourcesResponse {
            claims: claims.collect(),
        }))
    }
}

/// The protocol's form of an unprepare: an empty error is success.
fn errors(results: BTreeMap<String, Result<(), String>>) -> impl Iterator<Item = (String, String)> {
    results
        .into_iter()
        .map(|(uid, result)| (uid, result.err().unwrap_or_default()))
}

fn device_v1(device: PreparedDevice) -> v1::Device {
    let PreparedDevice {
        requests,
        pool,
        device,
        cdi_ids,
        share_id,
    } = device;
    v1::Device {
        request_names: requests,
        pool_name: pool,
        device_name: device.to_string(),
        cdi_device_ids: cdi_ids,
        share_id,
    }
}
