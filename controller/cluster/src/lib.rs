//! The cluster controller evicts pods, which is the one thing that no node plugin may do: the pods
//! of claims that a GpuPolicy calls to reclaim, because they use too much of a shared GPU, or
//! nothing for too long. It is installed on demand; without it such claims are only reported.
//!
//! Node plugins decide what is due and say so in conditions of claims (`ReclaimDue`). Here it is
//! decided, by pure functions, which pods that concerns (`due`), whether each may go (`verdict`)
//! and when (`limits`); `reclaim` reads and evicts. On demand it also labels nodes with what their
//! GpuNodes say (`labels`), and lets claims through that fit the GpuQuota of their namespace
//! (`quota`). A single instance acts (`lease` decides, `election` reads and writes).

mod due;
mod election;
mod labels;
mod lease;
mod limits;
mod metrics;
mod quota;
mod reclaim;
#[cfg(test)]
mod tests;
mod verdict;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use divvy_telemetry::{MetricsRegistry, Readiness};
use futures::StreamExt;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::labels::Writer;
use crate::lease::Election;
use crate::metrics::Metrics;
use crate::quota::Keeper;
use crate::reclaim::Reclaimer;

/// The settings of one instance.
#[derive(Debug, Clone)]
pub struct Config {
    /// Driver name in claims.
    pub driver: String,
    pub namespace: String,
    /// Name of the Lease.
    pub lease: String,
    /// Name of this instance: that of its pod.
    pub identity: String,
    /// Report what would be evicted, and evict nothing.
    pub dry_run: bool,
    /// Most pods evicted in any minute.
    pub per_minute: usize,
    /// Label nodes with what their GpuNodes say.
    pub node_labels: bool,
    /// Let claims through as the GpuQuota of their namespace allows.
    pub quota: bool,
    /// Time between two looks at claims, and at labels. Quotas are looked at ten times as often,
    /// where something has changed.
    pub look: Duration,
    /// Time between two attempts to renew the Lease, or to get it.
    pub renew: Duration,
}

/// The API server must begin to answer within this. With [`lease::RENEW_DEADLINE`] it is what a
/// Lease lasts: no request of an instance that has lost the Lease is under way when another one
/// begins.
const ANSWER: Duration = Duration::from_secs(5);

/// Time since the process started: it only grows.
#[derive(Debug, Clone, Copy)]
struct Clock(Instant);

impl Clock {
    fn now(self) -> Duration {
        self.0.elapsed()
    }
}

/// Runs until `stop`, then gives the Lease back.
pub async fn run(
    config: Config,
    client: Client,
    registry: &MetricsRegistry,
    readiness: &Readiness,
    stop: CancellationToken,
) {
    let client =
        divvy_controller::with_deadline(client, ANSWER, divvy_controller::ServerClock::default());
    let clock = Clock(Instant::now());
    let metrics = Metrics::new(registry);
    let ready = readiness.handle("claims");
    let (claims, watching) = watch_claims(client.clone());
    let (leads, leading) = watch::channel(None);

    let election = Election::new(&config.lease, &config.identity);
    let leases = Api::<Lease>::namespaced(client.clone(), &config.namespace);
    let elected = CancellationToken::new();
    let task = election::run(
        leases,
        election,
        clock,
        (leads, metrics.leader.clone()),
        config.renew,
        elected.clone(),
    );
    let task = tokio::spawn(task);

    // Boxed: it is large, and mostly not there.
    let labelling: Pin<Box<dyn Future<Output = ()> + Send>> = if config.node_labels {
        let (leading, metrics) = (leading.clone(), metrics.clone());
        let (writer, watching) = Writer::new(&client, leading, clock, config.look, metrics);
        Box::pin(async {
            tokio::select! {
                () = watching => {}
                () = writer.run() => {}
            }
        })
    } else {
        Box::pin(std::future::pending())
    };
    let keeping: Pin<Box<dyn Future<Output = ()> + Send>> = if config.quota {
        let keeper = Keeper::new(
            &config,
            client.clone(),
            claims.clone(),
            leading.clone(),
            clock,
            &metrics,
        );
        Box::pin(keeper.run())
    } else {
        Box::pin(std::future::pending())
    };
    let work = async {
        // Fails only if the watch has ended.
        if claims.wait_until_ready().await.is_ok() {
            ready.ready();
            Reclaimer::new(&config, client, claims, leading, clock, metrics)
                .run()
                .await;
        }
    };
    tokio::select! {
        () = stop.cancelled() => {}
        () = watching => {}
        () = labelling => {}
        () = keeping => {}
        () = work => {}
    }
    // Nothing is being written any more: another instance may begin.
    elected.cancel();
    drop(task.await);
}

/// Watches all claims of the cluster, without the fields that are of no use here.
fn watch_claims(client: Client) -> (Store<ResourceClaim>, impl Future<Output = ()>) {
    let (store, writer) = reflector::store();
    let events = watcher(
        Api::<ResourceClaim>::all(client),
        watcher::Config::default(),
    );
    let events = events.modify(|claim| {
        claim.metadata.managed_fields = None;
        claim.spec = None;
    });
    let watching = events.default_backoff().reflect(writer).for_each(|event| {
        if let Err(error) = event {
            tracing::warn!(
                error = divvy_telemetry::chain(&error),
                "failed to watch ResourceClaims"
            );
        }
        std::future::ready(())
    });
    (store, watching)
}

/// Claims, as the store shares them.
type Claims = Vec<Arc<ResourceClaim>>;
