//! The kubelet's plugin registration: who we are, and what the kubelet made of it.

use divvy_proto::registration::registration_server::Registration;
use divvy_proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use divvy_proto::{dra, health};
use tokio::sync::watch;
use tonic::{Request, Response, Status};

/// What the kubelet last said.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Registered {
    /// Nothing yet.
    NotYet,
    /// We are registered.
    Yes,
    /// It refused, and why. It tries again by itself.
    Refused(String),
}

/// Answers the kubelet on the registration socket.
pub(crate) struct Registrar {
    driver: String,
    endpoint: String,
    state: watch::Sender<Registered>,
}

impl Registrar {
    /// `endpoint`: path of the DRA socket as the kubelet sees it.
    pub(crate) fn new(driver: String, endpoint: String, state: watch::Sender<Registered>) -> Self {
        Self { driver, endpoint, state }
    }
}

#[tonic::async_trait]
impl Registration for Registrar {
    async fn get_info(&self, _: Request<InfoRequest>) -> Result<Response<PluginInfo>, Status> {
        Ok(Response::new(PluginInfo {
            r#type: dra::PLUGIN_TYPE.to_owned(),
            name: self.driver.clone(),
            endpoint: self.endpoint.clone(),
            supported_versions: dra::SERVICES
                .iter()
                .chain(&health::SERVICES)
                .map(|name| (*name).to_owned())
                .collect(),
        }))
    }

    async fn notify_registration_status(
        &self,
        status: Request<RegistrationStatus>,
    ) -> Result<Response<RegistrationStatusResponse>, Status> {
        let RegistrationStatus { plugin_registered, error } = status.into_inner();
        let state = if plugin_registered {
            tracing::info!(driver = %self.driver, "registered with the kubelet");
            Registered::Yes
        } else {
            tracing::error!(driver = %self.driver, %error, "the kubelet refused the registration");
            Registered::Refused(error)
        };
        self.state.send_replace(state);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
