//! The kubelet's plugin registration: who we are, and what the kubelet made of it.

use std::path::PathBuf;

use anyhow::Context;
use divvy_proto::registration::registration_server::{Registration, RegistrationServer};
use divvy_proto::registration::{
    InfoRequest, PluginInfo, RegistrationStatus, RegistrationStatusResponse,
};
use divvy_proto::{dra, health};
use divvy_telemetry::ReadyHandle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::serve::serve;
use crate::host::sockets::bind;
use crate::node::facts::{GpusSeen, Registered, what_is_missing};

/// The registration socket, opened when the kubelet may call this instance.
pub(crate) struct RegistrationSocket {
    pub(crate) path: PathBuf,
    /// The answers given there.
    pub(crate) registrar: Registrar,
    /// The latest state of the GPUs.
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// True while this instance holds the publisher lock.
    pub(crate) in_charge: watch::Receiver<bool>,
    /// True while NVIDIA's plugin serves the node.
    pub(crate) nvidia_serves: watch::Receiver<bool>,
    /// Says whether it is open.
    pub(crate) ready: ReadyHandle,
}

impl RegistrationSocket {
    /// Serves until `stop`, and while NVIDIA's plugin does not: the kubelet would call either of
    /// two plugins of one name.
    pub(crate) async fn serve(mut self, stop: CancellationToken) -> anyhow::Result<()> {
        while !stop.is_cancelled() {
            self.serve_once(&stop).await?;
        }
        Ok(())
    }

    /// Serves until `stop`, or until NVIDIA's plugin comes. The kubelet calls the instance that
    /// registered last, whether or not it can work: one that finds no driver, say, would take the
    /// node over from one that does. So while another instance is in charge this one waits until it
    /// can give GPUs to containers. Without another it registers at once: unprepare needs no
    /// driver.
    async fn serve_once(&mut self, stop: &CancellationToken) -> anyhow::Result<()> {
        while let Some(why) = self.must_wait() {
            self.ready.waiting(why);
            tokio::select! {
                Ok(()) = self.seen.changed() => {}
                Ok(()) = self.in_charge.changed() => {}
                Ok(()) = self.nvidia_serves.changed() => {}
                () = stop.cancelled() => return Ok(()),
            }
        }
        // The kubelet watches the folder and dials a socket as soon as it is there: from here on it
        // may call.
        let (listener, file) =
            bind(&self.path).context("the registration socket (--registry-dir) cannot be used")?;
        self.ready.ready();
        tracing::info!(registration = %self.path.display(), "listening for the kubelet");
        let router = Server::builder().add_service(RegistrationServer::new(self.registrar.clone()));
        // Gone before the server ends: the kubelet dials what it sees.
        let gone = CancellationToken::new();
        let removed = async {
            tokio::select! {
                () = stop.cancelled() => {}
                Ok(_) = self.nvidia_serves.wait_for(|serves| *serves) => {
                    tracing::warn!("NVIDIA's plugin serves this node; the kubelet is to call that one alone");
                }
            }
            file.remove();
            gone.cancel();
        };
        let served = tokio::join!(
            serve("registration", router, listener, gone.clone()),
            removed
        )
        .0;
        // The kubelet forgets a plugin whose socket is gone.
        if !stop.is_cancelled() {
            self.registrar.state.send_replace(Registered::NotYet);
        }
        served
    }

    /// Returns the reason why this instance must not register yet.
    fn must_wait(&mut self) -> Option<String> {
        if *self.nvidia_serves.borrow_and_update() {
            return Some("NVIDIA's plugin serves this node under the same driver name".to_owned());
        }
        let alone = *self.in_charge.borrow_and_update();
        let missing = what_is_missing(&self.seen.borrow_and_update()).filter(|_| !alone)?;
        Some(format!(
            "another instance serves the kubelet; this one is not ready: {missing}"
        ))
    }
}

/// Answers the kubelet on the registration socket.
#[derive(Clone)]
pub(crate) struct Registrar {
    driver: String,
    endpoint: String,
    state: watch::Sender<Registered>,
}

impl Registrar {
    /// `endpoint`: path of the DRA socket as the kubelet sees it.
    pub(crate) fn new(driver: String, endpoint: String, state: watch::Sender<Registered>) -> Self {
        Self {
            driver,
            endpoint,
            state,
        }
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
        let RegistrationStatus {
            plugin_registered,
            error,
        } = status.into_inner();
        let state = if plugin_registered {
            tracing::info!(driver = %self.driver, "registered with the kubelet");
            Registered::Yes
        } else {
            tracing::error!(driver = %self.driver, %error, "the kubelet refused the registration");
            Registered::Refused(error)
        };
        // Publishing and the publisher lock wait for this.
        self.state.send_replace(state);
        Ok(Response::new(RegistrationStatusResponse {}))
    }
}
