//! Runs the publisher while this instance is the one to publish, and passes on what it learns of
//! the API server.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_controller::{PublishStatus, PublisherConfig};
use divvy_offer::{Fact, Feature, KubeVersion, Pool, pool_name};
use divvy_telemetry::ReadyHandle;
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
    /// The pool to publish.
    pub(crate) desired: watch::Receiver<Option<Pool>>,
    /// True while this instance is the one to publish.
    pub(crate) publishes: watch::Receiver<bool>,
    /// The state of the registration with the kubelet.
    pub(crate) registered: watch::Receiver<Registered>,
    pub(crate) facts: Facts,
    pub(crate) status: watch::Sender<PublishStatus>,
    pub(crate) ready: ReadyHandle,
    pub(crate) metrics: Metrics,
}

impl Publishing {
    /// Runs until `stop`. Slices stay.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        // A pod that is placed here before the kubelet knows us fails its first start and waits a
        // minute or more for the next (seen on a real cluster), so devices appear only once they
        // can be prepared.
        self.ready.waiting(
            "the kubelet has not registered this plugin yet; publishing starts afterwards",
        );
        tokio::select! {
            _ = self.registered.wait_for(|registered| *registered == Registered::Yes) => {}
            () = stop.cancelled() => return,
        }
        self.ready
            .waiting("this instance has not published anything yet");
        let mut ask_version = tokio::time::Instant::now();
        let mut known = None;
        while !stop.is_cancelled() {
            if !*self.publishes.borrow_and_update() {
                tokio::select! {
                    Ok(()) = self.publishes.changed() => {}
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
                child.clone(),
            );
            let mut status = publisher.status();
            loop {
                self.show_status(&status.borrow_and_update().clone());
                tokio::select! {
                    changed = status.changed() => if changed.is_err() { break },
                    Ok(()) = self.publishes.changed() => if !*self.publishes.borrow_and_update() { break },
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
