//! The health of a driver's devices, watched as the real kubelet does: one stream on the service socket.

use divvy_proto::health::{v1, v1alpha1};
use prost::Message;
use tonic::Streaming;

use super::{FakeKubelet, KubeletError};

/// A stream of what a plugin says of its devices' health.
#[derive(Debug)]
pub struct HealthWatch {
    messages: Messages,
    driver: String,
}

#[derive(Debug)]
enum Messages {
    V1(Streaming<v1::NodeWatchResourcesResponse>),
    V1Alpha1(Streaming<v1alpha1::NodeWatchResourcesResponse>),
}

const METHOD: &str = "NodeWatchResources";

impl FakeKubelet {
    /// Begins to watch a driver's devices, with one of [`divvy_proto::health::SERVICES`].
    pub async fn watch_health(&self, driver: &str, service: &str) -> Result<HealthWatch, KubeletError> {
        let (_, channel) = self.channel(driver)?;
        let call = |status: tonic::Status| KubeletError::Call {
            driver: driver.to_owned(),
            method: METHOD,
            status: Box::new(status),
        };
        let messages = if service == "v1.DRAResourceHealth" {
            let mut client = v1::dra_resource_health_client::DraResourceHealthClient::new(channel);
            let answer = client.node_watch_resources(v1::NodeWatchResourcesRequest {}).await;
            Messages::V1(answer.map_err(call)?.into_inner())
        } else {
            let mut client = v1alpha1::dra_resource_health_client::DraResourceHealthClient::new(channel);
            let answer = client.node_watch_resources(v1alpha1::NodeWatchResourcesRequest {}).await;
            Messages::V1Alpha1(answer.map_err(call)?.into_inner())
        };
        Ok(HealthWatch { messages, driver: driver.to_owned() })
    }
}

impl HealthWatch {
    /// The next message; `None` when the plugin has ended the stream.
    pub async fn next(&mut self) -> Result<Option<Vec<v1::DeviceHealth>>, KubeletError> {
        let answer = match &mut self.messages {
            Messages::V1(messages) => messages.message().await.map(|m| m.map(|m| m.devices)),
            // The messages of both versions are the same on the wire.
            Messages::V1Alpha1(messages) => messages.message().await.map(|m| {
                let devices = m?.devices.into_iter();
                Some(devices.filter_map(|d| v1::DeviceHealth::decode(&*d.encode_to_vec()).ok()).collect())
            }),
        };
        answer.map_err(|status| KubeletError::Call {
            driver: self.driver.clone(),
            method: METHOD,
            status: Box::new(status),
        })
    }
}
