//! The health of a driver's devices, watched as the real kubelet does: one stream on the service
//! socket.

use divvy_proto::health::v1::{
    DeviceHealth, NodeWatchResourcesRequest, NodeWatchResourcesResponse,
};
use http::uri::PathAndQuery;
use tonic::client::Grpc;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

use super::{FakeKubelet, KubeletError};

/// A stream of what a plugin says of its devices' health.
#[derive(Debug)]
pub struct HealthWatch {
    messages: Streaming<NodeWatchResourcesResponse>,
    driver: String,
}

const METHOD: &str = "NodeWatchResources";

impl FakeKubelet {
    /// Begins to watch a driver's devices, with one of [`divvy_proto::health::SERVICES`].
    pub async fn watch_health(
        &self,
        driver: &str,
        service: &str,
    ) -> Result<HealthWatch, KubeletError> {
        let failed = |status: Status| failed(driver, status);
        let path = PathAndQuery::try_from(format!("/{service}/{METHOD}"));
        let path = path.map_err(|error| failed(Status::invalid_argument(error.to_string())))?;
        let (_, channel) = self.channel(driver)?;
        let mut client = Grpc::new(channel);
        client
            .ready()
            .await
            .map_err(|error| failed(Status::unavailable(error.to_string())))?;
        // The messages of both versions are the same on the wire.
        let codec = ProstCodec::<_, NodeWatchResourcesResponse>::default();
        let answer = client
            .server_streaming(Request::new(NodeWatchResourcesRequest {}), path, codec)
            .await;
        Ok(HealthWatch {
            messages: answer.map_err(failed)?.into_inner(),
            driver: driver.to_owned(),
        })
    }
}

impl HealthWatch {
    /// The next message; `None` when the plugin has ended the stream.
    pub async fn next(&mut self) -> Result<Option<Vec<DeviceHealth>>, KubeletError> {
        let answer = self
            .messages
            .message()
            .await
            .map_err(|status| failed(&self.driver, status))?;
        Ok(answer.map(|message| message.devices))
    }
}

fn failed(driver: &str, status: Status) -> KubeletError {
    KubeletError::Call {
        driver: driver.to_owned(),
        method: METHOD,
        status: Box::new(status),
    }
}
