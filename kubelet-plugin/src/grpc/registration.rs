//! The kubelet's plugin registration: who we are, and what the kubelet made of it.

use std::path::PathBuf;

use anyhow::Context;
use divvy_proto::registration::registration_server::{Registration, RegistrationServer};
use divvy_proto::registration::{InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse};
use divvy_proto::{dra, health};
use divvy_telemetry::ReadyHandle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use crate::ready::what_is_missing;
use crate::servers::serve;
use crate::sockets::bind;
use crate::sources::inventory::GpusSeen;

/// What the kubelet last said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Registered {
    /// Nothing yet.
    #[default]
    NotYet,
    /// We are registered.
    Yes,
    /// It refused, and why. It tries again by itself.
    Refused(String),
}

/// The registration socket, opened when the kubelet may call this instance.
pub(crate) struct RegistrationSocket {
    pub(crate) path: PathBuf,
    /// Who answers there.
    pub(crate) registrar: Registrar,
    /// What is known of the GPUs.
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// Whether this instance holds the publisher lock.
    pub(crate) in_charge: watch::Receiver<bool>,
    /// Says whether it is open.
    pub(crate) ready: ReadyHandle,
}

impl RegistrationSocket {
    /// Serves until `stop`. The kubelet calls the instance that registered last, whether or not it can work: one that
    /// finds no driver, say, would take the node over from one that does. So while another instance is in charge this
    /// one waits until it can give GPUs to containers. Without another it registers at once: unprepare needs no driver.
    pub(crate) async fn serve(mut self, stop: CancellationToken) -> anyhow::Result<()> {
        while let Some(missing) = self.must_wait() {
            self.ready
                .waiting(format!("another instance serves the kubelet; this one is not ready: {missing}"));
            tokio::select! {
                Ok(()) = self.seen.changed() => {}
                Ok(()) = self.in_charge.changed() => {}
                () = stop.cancelled() => return Ok(()),
            }
        }
        let (listener, file) =
            bind(&self.path).context("the registration socket (--registry-dir) cannot be used")?;
        self.ready.ready();
        tracing::info!(registration = %self.path.display(), "listening for the kubelet");
        let router = Server::builder().add_service(RegistrationServer::new(self.registrar));
        // Gone before the server ends: the kubelet dials what it sees.
        let gone = CancellationToken::new();
        let removed = async {
            stop.cancelled().await;
            file.remove();
            gone.cancel();
        };
        tokio::join!(serve("registration", router, listener, gone.clone()), removed).0
    }

    /// What keeps this instance from registering.
    fn must_wait(&mut self) -> Option<String> {
        let alone = *self.in_charge.borrow_and_update();
        what_is_missing(&self.seen.borrow_and_update()).filter(|_| !alone)
    }
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
            supported_versions: [dra::SERVICE]
                .iter()
                .chain(&health::SERVICES)
                .map(ToString::to_string)
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
