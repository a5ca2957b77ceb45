//! Servers: gRPC on the sockets, HTTP on the addresses of the config.

use anyhow::Context;
use divvy_proto::dra::v1;
use divvy_proto::health::{v1 as v1_health, v1alpha1 as v1alpha1_health};
use divvy_telemetry::{HttpServer, ReadyHandle};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::app::config::Config;
use crate::app::supervise::ended_unexpectedly;
use crate::app::wiring::Shared;
use crate::grpc::dra::DraServer;
use crate::grpc::health::HealthServer;
use crate::grpc::registration::{Registrar, RegistrationSocket};
use crate::grpc::serve::serve;
use crate::host::sockets::{SocketFile, bind};
use crate::node::facts::Registered;
use crate::sinks::debug::Debug;

/// The servers that the kubelet calls, and their sockets.
pub(crate) struct Grpc {
    running: JoinSet<anyhow::Result<()>>,
    stop: CancellationToken,
    dra: Option<SocketFile>,
}

impl Grpc {
    /// Binds the socket of claims, and begins to serve. The other is opened when the kubelet may
    /// call.
    pub(crate) fn bind(
        shared: &Shared,
        registered: watch::Sender<Registered>,
        ready: ReadyHandle,
    ) -> anyhow::Result<Self> {
        let names = &shared.config.sockets;
        // Bound before registration, which names it to the kubelet.
        let (dra_listener, dra) =
            bind(&names.dra).context("the DRA socket (--plugin-dir) cannot be used")?;
        let stop = CancellationToken::new();
        let health = HealthServer {
            pool: shared.claims.pool.clone(),
            holdings: shared.channels.followed.holdings.clone(),
            stop: stop.clone(),
        };
        let service = &shared.service;
        let router = Server::builder()
            .add_service(v1::dra_plugin_server::DraPluginServer::new(DraServer(
                service.clone(),
            )))
            .add_service(
                v1_health::dra_resource_health_server::DraResourceHealthServer::new(health.clone()),
            )
            .add_service(
                v1alpha1_health::dra_resource_health_server::DraResourceHealthServer::new(health),
            );
        let driver = shared.config.driver_name.clone();
        let registration = RegistrationSocket {
            path: names.registration.clone(),
            registrar: Registrar::new(driver, names.dra.display().to_string(), registered),
            seen: shared.channels.seen.clone(),
            in_charge: shared.channels.in_charge.clone(),
            nvidia_serves: shared.channels.nvidia_serves.clone(),
            ready,
        };
        let mut running = JoinSet::new();
        running.spawn(serve("DRA", router, dra_listener, stop.clone()));
        running.spawn(registration.serve(stop.clone()));
        tracing::info!(
            node = %shared.config.node_name, driver = %shared.config.driver_name,
            dra = %names.dra.display(), "listening"
        );
        Ok(Self {
            running,
            stop,
            dra: Some(dra),
        })
    }

    /// Waits until one of them ends.
    pub(crate) async fn ended(&mut self) -> anyhow::Result<()> {
        let ended = self.running.join_next().await;
        ended
            .and_then(Result::ok)
            .unwrap_or(Err(ended_unexpectedly("a server")))
    }

    /// Takes no more calls: the kubelet is to find another instance.
    pub(crate) fn close(&self) {
        self.stop.cancel();
    }

    /// Waits until all calls are answered.
    pub(crate) async fn finished(&mut self) {
        while self.running.join_next().await.is_some() {}
    }

    /// Removes the socket of claims.
    pub(crate) fn remove(&mut self) {
        if let Some(file) = self.dra.take() {
            file.remove();
        }
    }
}

/// Metrics and readiness are open to all clients; the claims are served where `config` permits, by
/// default only to processes of this host or pod.
pub(crate) async fn http_servers(
    config: &Config,
    server: HttpServer,
    debug: Debug,
) -> anyhow::Result<Vec<(HttpServer, TcpListener)>> {
    let with_state = server.clone().debug_state(move || debug.state());
    // State names claims and pods. The address of the probes serves it too only if it is a loopback
    // address and no other is given.
    let open = if config.http_serves_state() {
        with_state.clone()
    } else {
        server
    };
    let mut servers = Vec::new();
    for (flag, addresses, server) in [
        ("--http", &config.http, open),
        ("--debug-http", &config.debug_http, with_state),
    ] {
        let Some(first) = addresses.first() else {
            continue;
        };
        let bound = TcpListener::bind(&**addresses).await;
        let listener = bound.with_context(|| format!("{flag} {first} cannot be used"))?;
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, state = server.serves_state(), "serving /metrics, /healthz and /readyz");
        }
        servers.push((server, listener));
    }
    Ok(servers)
}
