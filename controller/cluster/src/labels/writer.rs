//! Reads GpuNodes and the labels of nodes, and applies what was decided, as long as this instance
//! acts.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_api::names::FIELD_MANAGER_LABELS;
use divvy_api::node::{GpuNode, GpuNodeStatus};
use divvy_telemetry::chain;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Node;
use kube::api::{Patch, PatchParams};
use kube::core::PartialObjectMeta;
use kube::runtime::reflector::{self, Store};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use serde_json::json;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use super::{Labels, Left, decide, shorten, wanted};
use crate::Clock;
use crate::metrics::Metrics;

const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;

/// Keeps the labels of nodes.
pub(crate) struct Writer {
    nodes: Api<Node>,
    found: Store<PartialObjectMeta<Node>>,
    reports: Store<GpuNode>,
    leads: watch::Receiver<Option<Duration>>,
    clock: Clock,
    every: Duration,
    metrics: Metrics,
    /// Labels of others that were logged, by node.
    logged: BTreeMap<String, Vec<Left>>,
}

impl Writer {
    /// Returns it with the watches that it reads from, which have to run beside it.
    pub(crate) fn new(
        client: &Client,
        leads: watch::Receiver<Option<Duration>>,
        clock: Clock,
        every: Duration,
        metrics: Metrics,
    ) -> (Self, impl Future<Output = ()> + use<>) {
        let (found, nodes_watch) = watch_nodes(client.clone());
        let (reports, reports_watch) = watch_reports(client.clone());
        let writer = Self {
            nodes: Api::all(client.clone()),
            found,
            reports,
            leads,
            clock,
            every,
            metrics,
            logged: BTreeMap::new(),
        };
        let watching = async {
            tokio::join!(nodes_watch, reports_watch);
        };
        (writer, watching)
    }

    /// Looks now and then, and writes what differs. Ends if a watch does.
    pub(crate) async fn run(mut self) {
        // Before all nodes and reports are known, a node without a report is one whose report has
        // not come yet.
        if self.found.wait_until_ready().await.is_err()
            || self.reports.wait_until_ready().await.is_err()
        {
            return;
        }
        let mut ticks = interval(self.every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.round().await;
        }
    }

    fn leads(&self) -> bool {
        let until = *self.leads.borrow();
        until.is_some_and(|until| self.clock.now() < until)
    }

    async fn round(&mut self) {
        if !self.leads() {
            self.metrics.show_labels(0, 0);
            return;
        }
        let reports = self.reports.state();
        let reports: BTreeMap<&str, &GpuNodeStatus> = reports
            .iter()
            .filter_map(|report| Some((report.metadata.name.as_deref()?, report.status.as_ref()?)))
            .collect();
        let (mut labelled, mut left) = (0, 0);
        let mut seen = BTreeSet::new();
        for node in self.found.state() {
            let (Some(name), Some(uid)) = (&node.metadata.name, &node.metadata.uid) else {
                continue;
            };
            seen.insert(name.clone());
            let none = Labels::new();
            let labels = node.metadata.labels.as_ref().unwrap_or(&none);
            let managed = node.metadata.managed_fields.as_deref().unwrap_or_default();
            let report = reports.get(name.as_str()).copied();
            let decision = decide(labels, managed, &wanted(report));
            left += decision.left.len();
            self.log(name, &decision.left);
            labelled += usize::from(report.is_some());
            // Each write is asked for anew: this instance may have lost the Lease meanwhile.
            if let Some(apply) = decision.apply
                && self.leads()
            {
                self.apply(name, uid, &apply).await;
            }
        }
        self.logged.retain(|node, _| seen.contains(node));
        self.metrics.show_labels(labelled, left);
    }

    /// Applies the labels of a node: those of the last time that are not among them go.
    async fn apply(&self, node: &str, uid: &str, labels: &Labels) {
        // By its UID a node that is gone is not made again by this.
        let patch = json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": {"name": node, "uid": uid, "labels": labels},
        });
        // Not by force: who wrote a label since it was read keeps it, and the next round sees whose
        // it is.
        let params = PatchParams::apply(FIELD_MANAGER_LABELS);
        match self
            .nodes
            .patch_metadata(node, &params, &Patch::Apply(&patch))
            .await
        {
            Ok(_) => tracing::info!(node, labels = labels.len(), "labelled a node"),
            Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => {
                tracing::info!(
                    node,
                    reason = status.message,
                    "the labels of a node changed; will look again"
                );
            }
            Err(error) => {
                tracing::warn!(
                    node,
                    error = chain(&error),
                    "failed to label a node, will retry"
                );
            }
        }
    }

    /// Logs labels of others, once for each value.
    fn log(&mut self, node: &str, left: &[Left]) {
        let before = self.logged.insert(node.to_owned(), left.to_vec());
        let before = before.unwrap_or_default();
        for one in left.iter().filter(|one| !before.contains(one)) {
            tracing::info!(
                node,
                label = one.name,
                theirs = one.theirs,
                ours = one.ours,
                managers = one.managers,
                "left a label as another manager wrote it; remove it to have divvy write it"
            );
        }
    }
}

/// Watches the metadata of all nodes, without what is of no use here.
fn watch_nodes(client: Client) -> (Store<PartialObjectMeta<Node>>, impl Future<Output = ()>) {
    let (store, writer) = reflector::store();
    let nodes = Api::<PartialObjectMeta<Node>>::all(client);
    let events = watcher(nodes, watcher::Config::default());
    let events = events.modify(|node| {
        shorten(&mut node.metadata.labels, &mut node.metadata.managed_fields);
        node.metadata.annotations = None;
        node.metadata.owner_references = None;
    });
    let watching = events.default_backoff().reflect(writer).for_each(|event| {
        if let Err(error) = event {
            tracing::warn!(error = chain(&error), "failed to watch Nodes");
        }
        std::future::ready(())
    });
    (store, watching)
}

/// Watches all GpuNodes, without holders and troubles.
fn watch_reports(client: Client) -> (Store<GpuNode>, impl Future<Output = ()>) {
    let (store, writer) = reflector::store();
    let events = watcher(Api::<GpuNode>::all(client), watcher::Config::default());
    let events = events.modify(|report| {
        report.metadata.managed_fields = None;
        if let Some(status) = &mut report.status {
            status.troubles = Vec::new();
            for gpu in &mut status.gpus {
                (gpu.holders, gpu.offered, gpu.taints) = (Vec::new(), Vec::new(), Vec::new());
            }
        }
    });
    let watching = events.default_backoff().reflect(writer).for_each(|event| {
        if let Err(error) = event {
            tracing::warn!(error = chain(&error), "failed to watch GpuNodes");
        }
        std::future::ready(())
    });
    (store, watching)
}
