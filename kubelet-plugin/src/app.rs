//! Runs the plugin and stops it: calls in flight are finished, slices stay, sockets go.

use std::collections::HashMap;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use divvy_model::GpuDriver;
use divvy_telemetry::{HttpServer, MetricsRegistry, Readiness, ReadyHandle};
use tokio::task::{Id, JoinSet};
use tokio_util::sync::CancellationToken;

use crate::config::Config;
use crate::servers::{Grpc, http_servers};
use crate::sockets::remove_stale;
use crate::wiring::{Senders, Shared};

/// What the plugin needs from outside; the demo and tests put a fake API server and simulated GPUs here.
pub struct Deps {
    /// The API server.
    pub client: kube::Client,
    /// How to reach it, for connections of the threads that prepare claims; without it they share `client`.
    pub kube: Option<kube::Config>,
    /// The GPUs. May answer with errors for as long as the driver is not there.
    pub gpus: Arc<dyn GpuDriver>,
    /// Where metrics are registered.
    pub metrics: MetricsRegistry,
    /// What is ready and what is not.
    pub readiness: Readiness,
}

/// The parts that must be ready.
pub(crate) struct Ready {
    pub(crate) inventory: ReadyHandle,
    pub(crate) records: ReadyHandle,
    pub(crate) registered: ReadyHandle,
    pub(crate) slices: ReadyHandle,
    pub(crate) sockets: ReadyHandle,
}

/// The tasks that run until they are stopped, by name.
pub(crate) struct Tasks {
    running: JoinSet<()>,
    names: HashMap<Id, &'static str>,
    pub(crate) stop: CancellationToken,
}

impl Tasks {
    fn new() -> Self {
        Self { running: JoinSet::new(), names: HashMap::new(), stop: CancellationToken::new() }
    }

    pub(crate) fn add(&mut self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        let id = self.running.spawn(work).id();
        self.names.insert(id, name);
    }

    /// Waits for the first that ends, also by a panic; its name.
    async fn ended(&mut self) -> &'static str {
        let id = match self.running.join_next_with_id().await {
            Some(Ok((id, ()))) => Some(id),
            Some(Err(died)) => Some(died.id()),
            None => None,
        };
        id.and_then(|id| self.names.get(&id)).copied().unwrap_or("every task")
    }

    async fn stopped(&mut self) {
        self.stop.cancel();
        while self.running.join_next().await.is_some() {}
    }
}

/// Runs the plugin until `stop` is cancelled, or until a part of it fails for good. To be awaited in a tokio
/// runtime. From the call itself on, [`Deps::readiness`] says that it is not ready.
pub fn run(
    config: Config,
    deps: Deps,
    stop: CancellationToken,
) -> impl Future<Output = anyhow::Result<()>> + Send {
    let ready = Ready {
        inventory: deps.readiness.handle("inventory"),
        records: deps.readiness.handle("records"),
        registered: deps.readiness.handle("registered"),
        slices: deps.readiness.handle("slices"),
        sockets: deps.readiness.handle("sockets"),
    };
    run_ready(config, deps, ready, stop)
}

async fn run_ready(config: Config, deps: Deps, ready: Ready, stop: CancellationToken) -> anyhow::Result<()> {
    let all = deps.metrics.clone();
    let metrics = if config.claim_metrics { all } else { all.hiding("namespace") };
    let http = HttpServer::new(metrics, deps.readiness.clone());
    let plugin_dir = &config.plugin_dir;
    fs_err::create_dir_all(plugin_dir)
        .with_context(|| format!("--plugin-dir {} cannot be used", plugin_dir.display()))?;
    let senders = Senders::default();
    let (channels, facts) = senders.follow();
    let registered = senders.registered.clone();
    let shared = Shared::new(config, deps, channels)?;

    // Parts stop when this does: on request, or when one of them ends by itself. The servers and the claims being
    // worked on are given time to finish before it.
    let mut tasks = Tasks::new();
    let _stop_tasks = tasks.stop.clone().drop_guard();
    let mut keeper = shared.add_tasks(&mut tasks, senders, facts, &ready);
    for (server, listener) in http_servers(&shared.config, http, shared.debug()).await? {
        let until = tasks.stop.clone();
        tasks.add("the HTTP server", server.serve(listener, until.cancelled_owned()));
    }

    // Containers of running pods may start at any time: their files come first.
    keeper.before_registration().await;
    tasks.add("the reconciler of files and records", keeper.run(tasks.stop.clone()));
    remove_stale(&shared.config.sockets, &shared.config.driver_name);
    let mut servers = Grpc::bind(&shared, registered, ready.sockets.clone())?;

    let outcome = tokio::select! {
        () = stop.cancelled() => Ok(()),
        name = tasks.ended() => Err(ended_unexpectedly(name)),
        ended = servers.ended() => ended,
    };
    ready.sockets.waiting("stopping");
    drain(&shared, servers).await;
    tasks.stopped().await;
    tracing::info!("stopped; ResourceSlices stay published");
    outcome
}

/// A part that should run for ever has ended.
pub(crate) fn ended_unexpectedly(part: &str) -> anyhow::Error {
    anyhow!("{part} ended unexpectedly (a bug in divvy); the plugin exits and is restarted")
}

/// Takes no more calls, and finishes those that are being worked on.
async fn drain(shared: &Shared, mut servers: Grpc) {
    let service = &shared.service;
    tracing::info!(claims = service.running(), "stopping: waiting for running calls");
    servers.close();
    let drained = async {
        servers.finished().await;
        service.drained().await;
    };
    if tokio::time::timeout(shared.config.timing.drain, drained).await.is_err() {
        tracing::warn!(
            claims = service.running(),
            "stopping before all calls have finished; the next instance continues from their records"
        );
    }
    servers.remove();
}
