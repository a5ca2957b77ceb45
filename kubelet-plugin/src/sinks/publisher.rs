//! Runs the publisher while this instance is the one to publish, and passes on what it learns of
//! the API server.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use divvy_api::names::Naming;
use divvy_controller::{PublishStatus, PublisherConfig, ServerClock};
use divvy_offer::{Fact, Feature, KubeVersion, Pool, Published, pool_name};
use divvy_telemetry::ReadyHandle;
use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::metrics::Metrics;
use crate::node::facts::{Facts, Registered};

/// Interval at which the API server's version is asked for.
const VERSION_EVERY: Duration = Duration::from_mins(10);
/// The same after a failure.
const VERSION_RETRY: Duration = Duration::from_secs(10);
/// The same while nothing can be published without it.
const FIRST_VERSION_RETRY: Duration = Duration::from_secs(1);
/// Why nothing is published, for readiness and the log.
const NVIDIA_SERVES: &str = "NVIDIA's plugin serves this node under the same driver name";
/// Partitions need more than this; whole GPUs do not.
const OLDEST: KubeVersion = KubeVersion {
    major: 1,
    minor: 34,
    patch: 0,
};

/// Publishes, or waits to be the one who does.
pub(crate) struct Publishing {
    pub(crate) client: Client,
    pub(crate) config: PublisherConfig,
    /// The clock by which the slices are accepted.
    pub(crate) clock: ServerClock,
    /// The pool to publish.
    pub(crate) desired: watch::Receiver<Option<Arc<Pool>>>,
    /// True while this instance is the one to publish.
    pub(crate) publishes: watch::Receiver<bool>,
    /// The state of the registration with the kubelet.
    pub(crate) registered: watch::Receiver<Registered>,
    /// True while NVIDIA's plugin serves the node.
    pub(crate) nvidia_serves: watch::Receiver<bool>,
    pub(crate) facts: Facts,
    pub(crate) status: watch::Sender<PublishStatus>,
    pub(crate) ready: ReadyHandle,
    pub(crate) metrics: Metrics,
}

impl Publishing {
    /// Runs until `stop`. Slices stay.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut ask_version = tokio::time::Instant::now();
        let mut known = None;
        let mut may_begin = false;
        while !stop.is_cancelled() {
            if *self.nvidia_serves.borrow_and_update() {
                may_begin = false;
                self.withdraw(&mut known, &stop).await;
                continue;
            }
            if !may_begin {
                may_begin = self.registration(&stop).await;
                continue;
            }
            if !*self.publishes.borrow_and_update() {
                tokio::select! {
                    Ok(()) = self.publishes.changed() => {}
                    Ok(()) = self.nvidia_serves.changed() => {}
                    () = stop.cancelled() => {}
                }
                continue;
            }
            if let Err(error) = self.remove_leftovers().await {
                self.ready.waiting(error);
                tokio::select! {
                    () = tokio::time::sleep(FIRST_VERSION_RETRY) => {}
                    () = stop.cancelled() => {}
                }
                continue;
            }
            let child = stop.child_token();
            // A new one for each time in charge: the other instance may have written since, so
            // everything is listed anew.
            let publisher = divvy_controller::spawn(
                self.client.clone(),
                self.config.clone(),
                self.desired.clone(),
                self.clock.clone(),
                child.clone(),
            );
            let mut status = publisher.status();
            let mut published_at = None;
            loop {
                self.say_published(&mut published_at, &status.borrow());
                self.show_status(&status.borrow_and_update().clone());
                tokio::select! {
                    changed = status.changed() => if changed.is_err() { break },
                    Ok(()) = self.publishes.changed() => if !*self.publishes.borrow_and_update() { break },
                    Ok(()) = self.nvidia_serves.changed() => if *self.nvidia_serves.borrow() { break },
                    () = tokio::time::sleep_until(ask_version) => {
                        ask_version = tokio::time::Instant::now() + self.ask_server(&mut known).await;
                    }
                    () = stop.cancelled() => break,
                }
            }
            child.cancel();
            // Waited for, so that this process never has two publishers at work.
            publisher.stopped().await;
        }
    }

    /// Waits for the kubelet. Returns whether it knows this plugin; not if NVIDIA's comes or the
    /// plugin stops.
    ///
    /// A pod that is placed here before the kubelet knows us fails its first start and waits a
    /// minute or more for the next (seen on a real cluster), so devices appear only once they can
    /// be prepared.
    async fn registration(&mut self, stop: &CancellationToken) -> bool {
        self.ready.waiting(
            "the kubelet has not registered this plugin yet; publishing starts afterwards",
        );
        tokio::select! {
            Ok(_) = self.registered.wait_for(|registered| *registered == Registered::Yes) => {
                self.ready
                    .waiting("this instance has not published anything yet");
                true
            }
            Ok(()) = self.nvidia_serves.changed() => false,
            () = stop.cancelled() => false,
        }
    }

    /// Takes our pool back while NVIDIA's plugin serves the node, so that no claim is allocated
    /// from it that nothing would prepare. Returns when that plugin has ended, and to look again.
    /// The server is asked for its version all the same: the GpuNode needs it.
    async fn withdraw(&mut self, known: &mut Option<KubeVersion>, stop: &CancellationToken) {
        let ours = pool_name(&self.config.node_name);
        let removed =
            divvy_controller::remove_slices(&self.client, &self.config, |pool| pool == ours).await;
        let pause = match removed {
            Ok(slices) => {
                if slices > 0 {
                    tracing::warn!(slices, "{NVIDIA_SERVES}; removed our ResourceSlices");
                }
                self.show_status(&PublishStatus::default());
                self.ask_server(known).await
            }
            Err(error) => {
                tracing::warn!(
                    error = crate::chain(&error),
                    "failed to remove our ResourceSlices, will retry"
                );
                VERSION_RETRY
            }
        };
        self.ready.waiting(NVIDIA_SERVES);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            Ok(()) = self.nvidia_serves.changed() => {}
            () = stop.cancelled() => {}
        }
    }

    /// Removes the slices that NVIDIA's plugin has left behind: nothing serves its pool any more,
    /// and the kubelet wipes slices only where no plugin of the driver's name is left.
    async fn remove_leftovers(&self) -> Result<(), String> {
        if !Naming::of(&self.config.driver).stands_in() {
            return Ok(());
        }
        let ours = pool_name(&self.config.node_name);
        let removed =
            divvy_controller::remove_slices(&self.client, &self.config, |pool| pool != ours).await;
        match removed {
            Ok(0) => Ok(()),
            Ok(slices) => {
                tracing::info!(
                    slices,
                    "removed ResourceSlices of NVIDIA's plugin, which has ended"
                );
                Ok(())
            }
            Err(error) => Err(crate::chain(&error)),
        }
    }

    /// Says what the slices promise, each time they are accepted in full.
    fn say_published(&self, said: &mut Option<Timestamp>, status: &PublishStatus) {
        let (Some(pool), Some(at)) = (&status.published, status.published_at) else {
            return;
        };
        if said.replace(at) == Some(at) {
            return;
        }
        let published = Published {
            capped: pool.capped(),
            at: at.as_second(),
        };
        // Without a brain the plugin ends.
        drop(self.facts.send(Fact::Published(published).into()));
    }

    /// Shows how far publishing is: in metrics, in readiness and to the brain.
    fn show_status(&self, status: &PublishStatus) {
        // Metrics, then readiness, then facts: the brain may answer a dropped feature with a new
        // pool at once.
        self.metrics.in_sync.set(status.in_sync.into());
        self.metrics
            .slices
            .set(i64::try_from(status.slices).unwrap_or(i64::MAX));
        self.metrics
            .slices_bytes
            .set(i64::try_from(status.bytes).unwrap_or(i64::MAX));
        // Once accepted, trouble with a later change does not make us unready: what is published is
        // served.
        match status.last_error.as_ref().or(status.watch_error.as_ref()) {
            _ if status.published.is_some() => self.ready.ready(),
            Some(error) => self.ready.waiting(error.clone()),
            None => {}
        }
        if !status.dropped.is_empty() {
            // Without a brain the plugin ends.
            let dropped = Fact::Dropped(status.dropped.clone());
            drop(self.facts.send(dropped.into()));
        }
        self.status.send_replace(status.clone());
    }

    /// Asks what server this is; when to ask again.
    async fn ask_server(&self, known: &mut Option<KubeVersion>) -> Duration {
        match self.server(*known).await {
            Ok((version, dropped)) => {
                drop(self.facts.send(Fact::Server { version, dropped }.into()));
                *known = Some(version);
                VERSION_EVERY
            }
            Err(error) => {
                tracing::debug!(%error, "what the API server supports is not known yet");
                if known.is_none() {
                    self.ready.waiting(format!(
                        "what the API server supports is not known yet: {error}"
                    ));
                    return FIRST_VERSION_RETRY;
                }
                VERSION_RETRY
            }
        }
    }

    /// The server's version; if it is not the known one, also the features whose fields it drops. A
    /// server that refuses dry runs shows them at the first write of each feature.
    async fn server(
        &self,
        known: Option<KubeVersion>,
    ) -> Result<(KubeVersion, Option<BTreeSet<Feature>>), String> {
        let info = self
            .client
            .apiserver_version()
            .await
            .map_err(|error| crate::chain(&error))?;
        let version = KubeVersion::parse(&info.git_version).unwrap_or_else(|| {
            tracing::warn!(
                version = %info.git_version,
                "unknown version of the API server; assuming the oldest supported one"
            );
            OLDEST
        });
        if known == Some(version) {
            return Ok((version, None));
        }
        let pool = pool_name(&self.config.node_name);
        match divvy_controller::dropped_features(&self.client, &self.config, &pool).await {
            Ok(dropped) => Ok((version, Some(dropped))),
            Err(error) if matches!(error.code(), Some(400 | 422)) => {
                tracing::debug!(%error, "features are not tried before they are used");
                Ok((version, None))
            }
            Err(error) => Err(crate::chain(&error)),
        }
    }
}
