//! Runs the plugin and stops it: calls in flight are finished, slices stay, sockets go.

use std::time::Duration;

use anyhow::Context;
use divvy_telemetry::HttpServer;
use tokio_util::sync::CancellationToken;

use crate::app::config::Config;
use crate::app::ready::Ready;
use crate::app::servers::{Grpc, http_servers};
use crate::app::supervise::{Tasks, ended_unexpectedly};
use crate::app::wiring::{Deps, Senders, Shared};
use crate::host::sockets::remove_stale;
use crate::sources::nvidia_plugin::NvidiaPlugin;

/// Time limit for running calls when the plugin stops.
const DRAIN: Duration = Duration::from_secs(20);

/// Runs the plugin until `stop` is cancelled, or until a part of it fails for good. To be awaited
/// in a tokio runtime. From the call itself on, [`Deps::readiness`] says that it is not ready.
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

async fn run_ready(
    config: Config,
    deps: Deps,
    ready: Ready,
    stop: CancellationToken,
) -> anyhow::Result<()> {
    let all = deps.metrics.clone();
    let metrics = if config.claim_metrics {
        all
    } else {
        all.hiding("namespace")
    };
    let http = HttpServer::new(metrics, deps.readiness.clone());
    let plugin_dir = &config.plugin_dir;
    fs_err::create_dir_all(plugin_dir)
        .with_context(|| format!("--plugin-dir {} cannot be used", plugin_dir.display()))?;
    // Channels before tasks: each task gets its ends when it is made, so that no first value is
    // missed.
    let senders = Senders::default();
    let (channels, facts) = senders.follow();
    let registered = senders.registered.clone();
    // Before all tasks: what they do first depends on it.
    let mut nvidia = NvidiaPlugin::new(&config);
    senders.nvidia_serves.send_replace(nvidia.look().await);
    let shared = Shared::new(config, deps, channels)?;

    // Parts stop when this does: on request, or when one of them ends by itself. The servers and
    // the claims being worked on are given time to finish before it.
    let mut tasks = Tasks::new();
    let _stop_tasks = tasks.stop.clone().drop_guard();
    let mut keeper = shared.add_tasks(&mut tasks, senders, facts, nvidia, &ready);
    for (server, listener) in http_servers(&shared.config, http, shared.debug()).await? {
        let until = tasks.stop.clone();
        tasks.add(
            "the HTTP server",
            server.serve(listener, until.cancelled_owned()),
        );
    }

    // Containers of running pods may start at any time: their files come first.
    keeper.before_registration().await;
    tasks.add(
        "the reconciler of files and records",
        keeper.run(tasks.stop.clone()),
    );
    remove_stale(&shared.config.sockets, &shared.config.driver_name);
    // Last of the start: once the registration socket is there, the kubelet may call at any time.
    let mut servers = Grpc::bind(&shared, registered, ready.sockets.clone())?;

    let outcome = tokio::select! {
        () = stop.cancelled() => Ok(()),
        name = tasks.ended() => Err(ended_unexpectedly(name)),
        ended = servers.ended() => ended,
    };
    ready.sockets.waiting("stopping");
    // Calls end before tasks: a prepare that still runs reads the inventory, which a task keeps.
    drain(&shared, servers).await;
    tasks.stopped().await;
    // Last: no call and no round of this process works on a GPU any more.
    if outcome.is_ok() {
        // Boxed: it would make the future of the whole run larger.
        Box::pin(shared.leaving().run()).await;
    }
    tracing::info!("stopped; ResourceSlices stay published");
    outcome
}

/// Takes no more calls, and finishes those that are being worked on.
async fn drain(shared: &Shared, mut servers: Grpc) {
    let service = &shared.service;
    tracing::info!(
        claims = service.running(),
        "stopping: waiting for running calls"
    );
    // Close first: the registration socket goes, and the kubelet turns to the other instance of an
    // update while calls of this one finish.
    servers.close();
    let drained = async {
        servers.finished().await;
        service.drained().await;
    };
    if tokio::time::timeout(DRAIN, drained).await.is_err() {
        tracing::warn!(
            claims = service.running(),
            "stopping before all calls have finished; the next instance continues from their records"
        );
    }
    servers.remove();
}
