//! The task that writes the `GpuNode`: when something has changed, not more often than now and then, and only while this
//! instance is the one that publishes.

use std::time::Duration;

use divvy_api::names::{API_VERSION, FIELD_MANAGER};
use divvy_api::node::{GpuNodeStatus, KIND};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::since::Since;
use crate::resources::gpu_nodes;

/// How long one write may take.
const ANSWER: Duration = Duration::from_secs(10);

/// Writes.
pub(crate) struct Writer {
    pub(crate) client: Client,
    pub(crate) node: String,
    pub(crate) reports: watch::Receiver<Option<GpuNodeStatus>>,
    pub(crate) publishes: watch::Receiver<bool>,
    /// Least time between two writes.
    pub(crate) every: Duration,
    /// How often it is looked whether the object is still there while nothing is to be written.
    pub(crate) look: Duration,
    /// How long to wait after a write that failed; longer each time, since the definition may be missing for good.
    pub(crate) retry: Duration,
}

/// Longest pause between two attempts.
const LONGEST: Duration = Duration::from_mins(5);

impl Writer {
    /// Runs until `stop`. The object stays, as slices do; it is deleted with its Node.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let (mut written, mut told) = (None::<GpuNodeStatus>, None::<String>);
        let mut not_before = Instant::now();
        let (mut is_there, mut pause) = (false, self.retry);
        let mut since = Since::default();
        loop {
            let now = self.reports.borrow_and_update().clone();
            // Also while another instance writes: this one may take over.
            if let Some(report) = &now {
                since.see(report, Timestamp::now());
            }
            if !*self.publishes.borrow_and_update() {
                // Whoever publishes meanwhile writes something else.
                written = None;
            } else if let Some(report) = now.filter(|report| written.as_ref() != Some(report)) {
                tokio::select! {
                    () = sleep_until(not_before) => {}
                    () = stop.cancelled() => return,
                }
                // What is newest now.
                let report = self.reports.borrow_and_update().clone().unwrap_or(report);
                since.see(&report, Timestamp::now());
                match self.write(&report, is_there, &mut since).await {
                    Ok(()) => {
                        (written, told) = (Some(report), None);
                        (is_there, pause) = (true, self.retry);
                        not_before = Instant::now() + self.every;
                    }
                    Err(problem) => {
                        if told.as_ref() != Some(&problem) {
                            tracing::warn!(problem, "failed to write the GpuNode, will retry");
                            told = Some(problem);
                        }
                        // It may have been deleted: then it is made again at once, also if the report is as it was.
                        written = None;
                        let wait = if is_there { Duration::ZERO } else { pause };
                        pause = if is_there { self.retry } else { (pause * 2).min(LONGEST) };
                        is_there = false;
                        tokio::select! {
                            () = sleep(wait) => {}
                            () = stop.cancelled() => return,
                        }
                    }
                }
                continue;
            }
            tokio::select! {
                Ok(()) = self.reports.changed() => {}
                Ok(()) = self.publishes.changed() => {}
                () = sleep(self.look), if written.is_some() => {
                    if self.is_gone().await {
                        tracing::info!("the GpuNode was deleted; created again");
                        (written, is_there) = (None, false);
                    }
                }
                () = stop.cancelled() => return,
            }
        }
    }

    /// Whether the API server says that there is no such object. A read, since an idle node writes nothing.
    async fn is_gone(&self) -> bool {
        matches!(timeout(ANSWER, gpu_nodes(&self.client).get_metadata_opt(&self.node)).await, Ok(Ok(None)))
    }

    /// Writes the status, and before it the object unless it is there. The answer to that has what was told before.
    async fn write(&self, report: &GpuNodeStatus, is_there: bool, since: &mut Since) -> Result<(), String> {
        let write = async {
            let api = gpu_nodes(&self.client);
            let params = PatchParams::apply(FIELD_MANAGER).force();
            if !is_there {
                let node = Api::<Node>::all(self.client.clone()).get(&self.node).await?;
                let uid = node.metadata.uid.unwrap_or_default();
                let there = api.patch(&self.node, &params, &Patch::Apply(object(&self.node, &uid))).await?;
                let told = there.data.get("status").cloned().unwrap_or_default();
                since.take_over(&serde_json::from_value(told).unwrap_or_default(), Timestamp::now());
            }
            let status = since.stamp(report, Timestamp::now());
            let patch = json!({ "apiVersion": API_VERSION, "kind": KIND, "metadata": { "name": self.node }, "status": status });
            api.patch_status(&self.node, &params, &Patch::Apply(patch)).await.map(drop)
        };
        match timeout(ANSWER, write).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(crate::chain(&error)),
            Err(_) => Err("timed out".to_owned()),
        }
    }
}

/// The object but for its status. It goes when its Node goes.
fn object(node: &str, uid: &str) -> Value {
    json!({
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {
            "name": node,
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": node, "uid": uid }],
        },
    })
}
