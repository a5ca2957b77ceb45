//! The end of the plugin on a node that is no longer its own: an administrator has taken the label
//! off, so that another driver gets the GPUs. MIG modes that divvy has changed are given back, and
//! the GpuNode says what is left. In the place of NVIDIA's driver the slices go too.
//!
//! A plugin is stopped in the same way when it is updated or its pod is deleted. Then the node
//! still has its labels, and nothing of a GPU is touched.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::names::Naming;
use divvy_api::node::GpuNodeStatus;
use divvy_controller::{PublisherConfig, remove_slices};
use divvy_executor::{Event, Executor};
use divvy_offer::pool_name;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};

use crate::app::config::NodeSelector;
use crate::claims::held::held_now;
use crate::node::facts::NodeFacts;
use crate::sinks::gpu_node::{Target, last_report};

/// Time for which the API is asked for the node's labels.
const ASK_WITHIN: Duration = Duration::from_secs(2);
/// Time for which the GpuNode is written, and slices are removed.
const REPORT_WITHIN: Duration = Duration::from_secs(2);
/// Time for which MIG modes may be changed. With the drain before it, less than the grace period of
/// the pod.
const GIVE_BACK_WITHIN: Duration = Duration::from_secs(25);

/// The node, and how it was selected.
pub(crate) struct Leaving {
    pub(crate) client: Client,
    pub(crate) node: String,
    pub(crate) driver: String,
    pub(crate) selector: NodeSelector,
    /// The node as it was last seen.
    pub(crate) last: Option<Arc<NodeFacts>>,
    pub(crate) executor: Arc<Executor>,
    /// The last report on the node's GPUs, if there was one.
    pub(crate) reported: Option<GpuNodeStatus>,
    pub(crate) target: Target,
}

impl Leaving {
    /// Gives MIG modes back if the node is no longer selected. No claim is being worked on.
    pub(crate) async fn run(self) {
        if self.selector.is_empty() {
            return;
        }
        // The label may have been taken off a moment ago, and be why this process ends: the watch
        // may not have shown it yet. A node whose labels are not known is not left.
        let labels = match self.labels().await {
            Some(now) => now,
            None => match &self.last {
                Some(last) => last.labels.clone(),
                None => return,
            },
        };
        if self.selector.selects(&labels) {
            return;
        }
        tracing::info!(
            "the node no longer has the labels of this plugin; giving back MIG modes of GPUs that no claim holds"
        );
        // First, since it takes no time: a report of before would stay as it was.
        self.report().await;
        self.withdraw().await;
        let executor = self.executor;
        let given_back = tokio::task::spawn_blocking(move || executor.leave());
        // The thread cannot be stopped. A change that it has begun is noted on disk, where the next
        // plugin on this node finds it.
        match tokio::time::timeout(GIVE_BACK_WITHIN, given_back).await {
            Ok(Ok(report)) => report.events.iter().for_each(log),
            // Only a panic, which is logged.
            Ok(Err(_)) => {}
            Err(_) => tracing::warn!(
                "MIG modes were not given back in time; turn MIG mode off with `nvidia-smi -mig 0`"
            ),
        }
    }

    /// Writes the GpuNode for the last time: the plugin that would have kept it is not there any
    /// more.
    async fn report(&self) {
        let Some(reported) = &self.reported else {
            return;
        };
        // Records that cannot be read leave the holders as they were reported.
        let held: BTreeSet<String> = if let Some(held) = held_now(&self.executor).await {
            held.iter().map(|held| held.claim.uid.to_string()).collect()
        } else {
            let holders = reported.gpus.iter().flat_map(|gpu| &gpu.holders);
            holders.map(|holder| holder.uid.clone()).collect()
        };
        let last = last_report(reported, &held);
        let written = tokio::time::timeout(REPORT_WITHIN, self.target.write_last(&last)).await;
        let error = match written {
            Ok(Ok(())) => return,
            Ok(Err(error)) => crate::chain(&error),
            Err(_) => "the API server did not answer in time".to_owned(),
        };
        tracing::warn!(error, "failed to write the GpuNode, which stays as it was");
    }

    /// Removes our slices in the place of NVIDIA's driver: the kubelet wipes those of a driver
    /// without a plugin, and NVIDIA's, under the same name, may be there before it does.
    async fn withdraw(&self) {
        if !Naming::of(&self.driver).stands_in() {
            return;
        }
        let ours = pool_name(&self.node);
        let config = PublisherConfig {
            driver: self.driver.clone(),
            node_name: self.node.clone(),
        };
        let removed = remove_slices(&self.client, &config, |pool| pool == ours);
        let error = match tokio::time::timeout(REPORT_WITHIN, removed).await {
            Ok(Ok(_)) => return,
            Ok(Err(error)) => crate::chain(&error),
            Err(_) => "the API server did not answer in time".to_owned(),
        };
        tracing::warn!(error, "failed to remove our ResourceSlices");
    }

    async fn labels(&self) -> Option<BTreeMap<String, String>> {
        let nodes = Api::<Node>::all(self.client.clone());
        match tokio::time::timeout(ASK_WITHIN, nodes.get_metadata(&self.node)).await {
            Ok(Ok(node)) => Some(node.metadata.labels.unwrap_or_default()),
            Ok(Err(_)) | Err(_) => None,
        }
    }
}

fn log(event: &Event) {
    match event {
        Event::SettingsGivenBack { gpu } => tracing::info!(%gpu, "MIG mode given back"),
        Event::Failed { error, .. } => tracing::warn!(error, "failed to give MIG mode back"),
        other => tracing::info!(what = ?other, "given back"),
    }
}
