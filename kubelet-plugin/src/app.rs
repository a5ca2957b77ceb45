//! Wires the plugin together, keeps it running, and stops it: calls in flight are finished, slices stay, sockets go.

use std::sync::Arc;

use divvy_carve::{Pool, ServerFeatures, pool_name};
use divvy_host::HostRoot;
use divvy_model::GpuDriver;
use divvy_proto::dra::{v1, v1beta1};
use divvy_proto::health::{v1 as v1_health, v1alpha1 as v1alpha1_health};
use divvy_proto::registration::registration_server::RegistrationServer;
use divvy_telemetry::{HttpServer, MetricsRegistry, Readiness, ReadyHandle};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Server;

use crate::api::KubeClaims;
use crate::build::{Latest, executor, host_edits};
use crate::claim_fetch::{ClaimFetcher, Connect};
use crate::config::Config;
use crate::debug::Debug;
use crate::dra::DraServer;
use crate::error::{RunError, io_error};
use crate::events::Teller;
use crate::health::service::HealthServer;
use crate::health::{HealthFile, HealthOwner, Told};
use crate::inventory::{InventoryOwner, Seen};
use crate::metrics::Metrics;
use crate::neighbours::Neighbours;
use crate::policy::PolicyWatch;
use crate::publish::{Carver, Offering};
use crate::publisher::{Publishing, Signals};
use crate::publisher_lock::PublisherLock;
use crate::ready::watch_readiness;
use crate::reconcile::Keeper;
use crate::registration::{Registered, Registrar};
use crate::servers::{http_servers, serve};
use crate::service::{ClaimService, One};
use crate::sockets::{bind, remove_stale};
use crate::{drain, gpu_node, node_watch};

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
    /// Told what is ready and what is not.
    pub readiness: Readiness,
}

/// The parts that must be ready.
struct Ready {
    inventory: ReadyHandle,
    records: ReadyHandle,
    registered: ReadyHandle,
    slices: ReadyHandle,
    sockets: ReadyHandle,
}

/// Runs the plugin until `stop` is cancelled, or until a part of it fails for good. To be awaited in a tokio
/// runtime. From the call itself on, [`Deps::readiness`] says that it is not ready.
pub fn run(
    config: Config,
    deps: Deps,
    stop: CancellationToken,
) -> impl Future<Output = Result<(), RunError>> + Send {
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
) -> Result<(), RunError> {
    let Deps { client, kube, gpus, metrics: registry, readiness } = deps;
    let metrics = Metrics::new(&registry);
    let host = HostRoot::under(&config.host_root);
    let plugin_dir = &config.plugin_dir;
    fs_err::create_dir_all(plugin_dir).map_err(io_error(format!("--plugin-dir {}", plugin_dir.display())))?;

    let (seen_tx, seen) = watch::channel(Seen::default());
    let edits = Arc::new(host_edits(&config, &host)?);
    let connect =
        kube.map_or_else(|| Connect::Shared(client.clone()), |config| Connect::Own(Box::new(config)));
    let fetcher = Arc::new(ClaimFetcher::new(connect, config.timing.get));
    let claims = Arc::new(KubeClaims {
        fetcher: fetcher.clone(),
        client: client.clone(),
        driver: config.driver_name.clone(),
        pool: pool_name(&config.node_name),
        runtime: tokio::runtime::Handle::current(),
    });
    let refresh = Arc::new(Notify::new());
    let latest = Latest { seen: seen_tx.clone(), gpus: gpus.clone(), refresh: refresh.clone() };
    let executor = Arc::new(executor(&config, &host, &gpus, edits.clone(), claims.clone(), latest)?);

    // Parts stop when this does: on request, or when one of them ends by itself. The servers and the claims being
    // worked on are given time to finish before it.
    let parts_stop = CancellationToken::new();
    let _stop_parts = parts_stop.clone().drop_guard();
    let mut parts = JoinSet::<&'static str>::new();
    let (node_tx, node) = watch::channel(None);
    let labels = node.clone();
    part(
        &mut parts,
        "the node watch",
        node_watch::run(client.clone(), config.node_name.clone(), node_tx, parts_stop.clone()),
    );

    let (changed, lingers) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let teller = Arc::new(Teller::new(client.clone(), &config.driver_name, &config.node_name));
    let told = TaskTracker::new();
    let (features_tx, features) = watch::channel(ServerFeatures::default());
    let service = Arc::new(ClaimService::new(One {
        driver: config.driver_name.clone(),
        pool: claims.pool.clone(),
        executor: executor.clone(),
        fetcher,
        teller: teller.clone(),
        metrics: metrics.clone(),
        budget: config.timing.call,
        changed: changed.clone(),
        lingers: lingers.clone(),
        features: features_tx.clone(),
        refresh: refresh.clone(),
        after: told.clone(),
    }));
    let (holds, works) = (executor.clone(), service.clone());
    let owner = InventoryOwner {
        gpus: gpus.clone(),
        host: host.clone(),
        timing: config.timing,
        seen: seen_tx,
        refresh,
        edits: edits.clone(),
        node,
        release_file: drain::file_in(plugin_dir),
        in_use: Arc::new(move || works.running() > 0 || holds.held().map_or(true, |held| !held.is_empty())),
        teller: teller.clone(),
        told: told.clone(),
    };
    part(&mut parts, "the inventory", owner.run(parts_stop.clone()));

    let (registered_tx, registered) = watch::channel(Registered::NotYet);
    let (in_charge_tx, in_charge) = watch::channel(false);
    let (desired_tx, desired) = watch::channel(None::<Pool>);
    let (uses_tx, neighbours) = watch::channel(Arc::default());
    let health_gpus = gpus.clone();
    let look_around = Neighbours {
        gpus,
        executor: executor.clone(),
        claims: claims.clone(),
        config: config.clone(),
        seen: seen.clone(),
        publishes: in_charge.clone(),
        uses: uses_tx,
        teller: teller.clone(),
        told: told.clone(),
    };
    part(&mut parts, "the look for neighbours", look_around.run(parts_stop.clone()));
    let (health_tx, health) = watch::channel(None);
    let (book_tx, health_book) = watch::channel(Arc::default());
    let (held_tx, held) = watch::channel(Arc::default());
    let health_owner = HealthOwner {
        gpus: health_gpus,
        executor: executor.clone(),
        rules: config.health.clone(),
        timing: config.timing,
        seen: seen.clone(),
        held: held.clone(),
        view: health_tx,
        book: book_tx,
        told: Told {
            executor: executor.clone(),
            teller: teller.clone(),
            tasks: told.clone(),
            in_charge: in_charge.clone(),
        },
        metrics: metrics.clone(),
        file: Arc::new(HealthFile::new(plugin_dir, executor.boot().clone())),
    };
    part(&mut parts, "the health watch", health_owner.run(parts_stop.clone()));
    let (policy_watch, policies) = PolicyWatch::new(
        &client,
        (&config.node_name, labels),
        plugin_dir,
        &config.timing,
        (teller.clone(), told.clone()),
        metrics.clone(),
    );
    part(&mut parts, "the policy watch", policy_watch.run(parts_stop.clone()));
    let (effective_tx, effective) = watch::channel(None);
    let (offering_tx, offering) = watch::channel(Offering::default());
    let (reports_tx, reports) = watch::channel(None);
    let writer = gpu_node::Writer {
        client: client.clone(),
        node: config.node_name.clone(),
        reports,
        publishes: in_charge.clone(),
        every: config.timing.gpu_node,
        retry: config.timing.policy_retry,
    };
    part(&mut parts, "the GpuNode", writer.run(parts_stop.clone()));
    crate::policy::take_over(plugin_dir, &executor);
    let busy = service.clone();
    let carver = Carver {
        node: config.node_name.clone(),
        driver: config.driver_name.clone(),
        executor: executor.clone(),
        claims: claims.clone(),
        foreign: Arc::default(),
        rules: config.gpu_rules(),
        mode_lock: config.mode_lock,
        policies,
        effective: effective_tx,
        reports: reports_tx,
        seen: seen.clone(),
        features,
        neighbours: neighbours.clone(),
        health: health.clone(),
        held: held_tx,
        changed: changed.clone(),
        busy: Arc::new(move || busy.busy()),
        teller: teller.clone(),
        told,
        desired: desired_tx,
        offering: offering_tx,
        metrics: metrics.clone(),
        timing: config.timing,
    };
    part(&mut parts, "the carver", carver.run(parts_stop.clone()));
    let (publisher, status) = Publishing::new(
        client,
        &config,
        Signals { desired, publishes: in_charge.clone(), registered: registered.clone() },
        features_tx,
        ready.slices,
        metrics.clone(),
    );
    part(&mut parts, "the publisher", publisher.run(parts_stop.clone()));
    let lock = PublisherLock::new(plugin_dir);
    let poll = config.timing.publisher_poll;
    part(
        &mut parts,
        "the publisher lock",
        lock.run(registered.clone(), in_charge_tx, poll, parts_stop.clone()),
    );

    let mut keeper = Keeper {
        executor: executor.clone(),
        edits,
        claims: claims.clone(),
        config: config.clone(),
        seen: seen.clone(),
        registered: registered.clone(),
        publishes: in_charge.clone(),
        changed,
        lingers,
        teller: teller.clone(),
        metrics: metrics.clone(),
        records: ready.records,
    };
    watch_readiness(
        &mut parts,
        (ready.inventory, ready.registered),
        &metrics,
        seen.clone(),
        registered.clone(),
        in_charge.clone(),
        &parts_stop,
    );
    let debug = Debug {
        config: config.clone(),
        executor,
        seen,
        neighbours,
        registered,
        publishes: in_charge,
        published: status,
        health: health_book,
        service: service.clone(),
        effective,
        offering,
    };
    for (server, listener) in http_servers(&config, HttpServer::new(registry, readiness), debug).await? {
        let until = parts_stop.clone();
        part(&mut parts, "the HTTP server", async move {
            if let Err(error) = server.serve(listener, until.cancelled_owned()).await {
                tracing::error!(%error, "HTTP server failed");
            }
        });
    }

    // Containers of running pods may start at any time: their files come first.
    keeper.before_registration().await;
    part(&mut parts, "the keeper", keeper.run(parts_stop.clone()));

    let names = &config.sockets;
    remove_stale(names, &config.driver_name);
    let (dra_listener, dra_file) = bind(&names.dra).map_err(io_error("the DRA socket (--plugin-dir)"))?;
    let (reg_listener, reg_file) =
        bind(&names.registration).map_err(io_error("the registration socket (--registry-dir)"))?;
    let endpoint = names.dra.display().to_string();
    let registrar = Registrar::new(config.driver_name.clone(), endpoint, registered_tx);
    let servers_stop = CancellationToken::new();
    let dra = Server::builder()
        .add_service(v1::dra_plugin_server::DraPluginServer::new(DraServer(service.clone())))
        .add_service(v1beta1::dra_plugin_server::DraPluginServer::new(DraServer(service.clone())));
    let health = HealthServer { pool: claims.pool.clone(), health, held, stop: servers_stop.clone() };
    let dra = dra
        .add_service(v1_health::dra_resource_health_server::DraResourceHealthServer::new(health.clone()))
        .add_service(v1alpha1_health::dra_resource_health_server::DraResourceHealthServer::new(health));
    let registration = Server::builder().add_service(RegistrationServer::new(registrar));
    let mut servers = JoinSet::new();
    servers.spawn(serve("DRA", dra, dra_listener, servers_stop.clone()));
    servers.spawn(serve("registration", registration, reg_listener, servers_stop.clone()));
    ready.sockets.ready();
    tracing::info!(
        node = %config.node_name, driver = %config.driver_name,
        dra = %names.dra.display(), registration = %names.registration.display(), "listening"
    );

    let outcome = tokio::select! {
        () = stop.cancelled() => Ok(()),
        Some(ended) = parts.join_next() => Err(RunError::Ended(ended.unwrap_or("a part of the plugin"))),
        Some(ended) = servers.join_next() => ended.unwrap_or(Err(RunError::Ended("a server"))),
    };
    tracing::info!(claims = service.running(), "stopping: finishing what is being worked on");
    ready.sockets.waiting("stopping");
    reg_file.remove();
    servers_stop.cancel();
    let drained = async {
        while servers.join_next().await.is_some() {}
        service.drained().await;
    };
    if tokio::time::timeout(config.timing.drain, drained).await.is_err() {
        tracing::warn!(
            claims = service.running(),
            "stopping although work is not finished; its records tell the next instance"
        );
    }
    dra_file.remove();
    parts_stop.cancel();
    while parts.join_next().await.is_some() {}
    tracing::info!("stopped; ResourceSlices stay published");
    outcome
}

/// Adds a part that should run until it is stopped. Its name comes back when it ends.
pub(crate) fn part(
    parts: &mut JoinSet<&'static str>,
    name: &'static str,
    work: impl Future<Output = ()> + Send + 'static,
) {
    parts.spawn(async move {
        work.await;
        name
    });
}
