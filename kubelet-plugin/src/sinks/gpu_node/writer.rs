//! The task that writes the `GpuNode`: when something has changed, not more often than now and
//! then, and only while this instance is the one that publishes.

use std::sync::Arc;
use std::time::Duration;

use divvy_api::names::FIELD_MANAGER;
use divvy_api::node::{GpuNode, GpuNodeSpec, GpuNodeStatus};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Patch, PatchParams};
use kube::core::DeserializeGuard;
use kube::{Api, Client};
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep, sleep_until};
use tokio_util::sync::CancellationToken;

use super::since::Since;

/// The object in the API.
pub(crate) struct Target {
    pub(crate) client: Client,
    pub(crate) node: String,
    /// Name of our driver.
    pub(crate) driver: String,
}

/// Writes.
pub(crate) struct Writer {
    pub(crate) target: Target,
    pub(crate) reports: watch::Receiver<Option<GpuNodeStatus>>,
    pub(crate) publishes: watch::Receiver<bool>,
    /// Least time between two writes.
    pub(crate) every: Duration,
    /// Interval at which the object is looked for while nothing is to be written.
    pub(crate) look: Duration,
    /// The first pause after a write that failed; longer each time, since the definition may be
    /// missing for good.
    pub(crate) retry: Duration,
    /// Notified after an object was made that was not there.
    pub(crate) made: Arc<Notify>,
}

/// Longest pause between two attempts.
const LONGEST: Duration = Duration::from_mins(5);

impl Writer {
    /// Runs until `stop`. The object stays, as slices do; it is deleted with its Node.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let (mut written, mut reported) = (None::<GpuNodeStatus>, None::<String>);
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
                // The other instance publishes meanwhile, and writes something else.
                written = None;
            } else if let Some(report) = now.filter(|report| written.as_ref() != Some(report)) {
                tokio::select! {
                    () = sleep_until(not_before) => {}
                    // Another instance may be the one that writes now.
                    Ok(()) = self.publishes.changed() => continue,
                    () = stop.cancelled() => return,
                }
                // The newest, which may have come while the time was waited for.
                let report = self.reports.borrow_and_update().clone().unwrap_or(report);
                since.see(&report, Timestamp::now());
                match self.target.write(&report, is_there, &mut since).await {
                    Ok(is_new) => {
                        if is_new {
                            self.made.notify_one();
                        }
                        (written, reported) = (Some(report), None);
                        (is_there, pause) = (true, self.retry);
                        not_before = Instant::now() + self.every;
                    }
                    Err(error) => {
                        let problem = crate::chain(&error);
                        if reported.as_ref() != Some(&problem) {
                            tracing::warn!(problem, "failed to write the GpuNode, will retry");
                            reported = Some(problem);
                        }
                        // It may have been deleted: then it is made again at once, also if the
                        // report is as it was.
                        written = None;
                        let wait = if is_there { Duration::ZERO } else { pause };
                        pause = if is_there {
                            self.retry
                        } else {
                            (pause * 2).min(LONGEST)
                        };
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
                    if self.target.is_gone().await {
                        tracing::info!("the GpuNode was deleted; created again");
                        (written, is_there) = (None, false);
                    }
                }
                () = stop.cancelled() => return,
            }
        }
    }
}

impl Target {
    /// Writes the last report of a process, unless the object was deleted.
    pub(crate) async fn write_last(&self, report: &GpuNodeStatus) -> Result<(), kube::Error> {
        let mut since = Since::default();
        since.see(report, Timestamp::now());
        self.write(report, true, &mut since).await.map(drop)
    }

    /// A report that cannot be read is overwritten.
    fn api(&self) -> Api<DeserializeGuard<GpuNode>> {
        Api::all(self.client.clone())
    }

    /// Returns whether the API server says that there is no such object. It reads, since an idle
    /// node writes nothing.
    async fn is_gone(&self) -> bool {
        matches!(self.api().get_metadata_opt(&self.node).await, Ok(None))
    }

    /// Writes the status, and before it the object unless it exists. The answer to that has the
    /// earlier report. Returns whether there was none: then the object is new.
    async fn write(
        &self,
        report: &GpuNodeStatus,
        is_there: bool,
        since: &mut Since,
    ) -> Result<bool, kube::Error> {
        let api = self.api();
        let mut is_new = false;
        // Forced: a field that a person has edited is the plugin's again. Both instances of an
        // update write under one name, so neither is in the other's way.
        let params = PatchParams::apply(FIELD_MANAGER).force();
        // The object first, owned by the Node, then its status: a status cannot create it.
        if !is_there {
            let node = Api::<Node>::all(self.client.clone())
                .get(&self.node)
                .await?;
            let uid = node.metadata.uid.unwrap_or_default();
            let there = api
                .patch(&self.node, &params, &Patch::Apply(object(&self.node, uid)))
                .await?;
            // A report that cannot be read was there all the same.
            let earlier = there.0.ok().map(|object| object.status);
            is_new = matches!(earlier, Some(None));
            let earlier = earlier.flatten().unwrap_or_default();
            since.take_over(&earlier, Timestamp::now());
        }
        let mut object = GpuNode::new(&self.node, GpuNodeSpec {});
        object.status = Some(GpuNodeStatus {
            driver_name: self.driver.clone(),
            ..since.stamp(report, Timestamp::now())
        });
        api.patch_status(&self.node, &params, &Patch::Apply(object))
            .await
            .map(|_| is_new)
    }
}

/// The object but for its status. It goes when its Node goes.
fn object(node: &str, uid: String) -> GpuNode {
    let mut object = GpuNode::new(node, GpuNodeSpec {});
    let owner = OwnerReference {
        api_version: "v1".to_owned(),
        kind: "Node".to_owned(),
        name: node.to_owned(),
        uid,
        ..OwnerReference::default()
    };
    object.metadata.owner_references = Some(vec![owner]);
    object
}

#[cfg(test)]
mod tests {
    use divvy_fake_cluster::build::mk_node;
    use divvy_fake_cluster::{FakeApi, Fault};

    use super::*;

    /// On a clock that goes on by itself whenever nothing else happens.
    #[tokio::test(start_paused = true)]
    async fn an_instance_that_hands_over_between_writes_does_not_write() {
        let api = FakeApi::new();
        api.put(&mk_node("n1")).unwrap();
        let ((report, reports), (in_charge, publishes)) =
            (watch::channel(None), watch::channel(true));
        let every = Duration::from_secs(5);
        let writer = Writer {
            target: Target {
                client: api.client(),
                node: "n1".to_owned(),
                driver: "gpu.divvy.dev".to_owned(),
            },
            reports,
            publishes,
            every,
            look: Duration::from_hours(1),
            retry: Duration::from_secs(1),
            made: Arc::default(),
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(writer.run(stop.clone()));
        let named = |policy: &str| {
            Some(GpuNodeStatus {
                bad_policies: vec![policy.to_owned()],
                ..GpuNodeStatus::default()
            })
        };
        let count = || api.count("patch", "gpunodes/status");
        report.send_replace(named("a"));
        sleep(every / 2).await;
        assert_eq!(count(), 1);
        report.send_replace(named("b"));
        sleep(every / 4).await;
        in_charge.send_replace(false);
        sleep(every * 2).await;
        assert_eq!(count(), 1, "another instance writes it now");
        in_charge.send_replace(true);
        sleep(every * 2).await;
        assert_eq!(count(), 2);
        stop.cancel();
        task.await.unwrap();
    }

    /// An object that cannot be written is tried again at once, since it may have been deleted, and
    /// then ever less often.
    #[tokio::test(start_paused = true)]
    async fn an_object_that_cannot_be_written_is_tried_ever_less_often() {
        const FAILURES: usize = 7;
        let api = FakeApi::new();
        api.put(&mk_node("n1")).unwrap();
        let named = |policy: &str| {
            Some(GpuNodeStatus {
                bad_policies: vec![policy.to_owned()],
                ..GpuNodeStatus::default()
            })
        };
        let (report, reports) = watch::channel(named("a"));
        let (_in_charge, publishes) = watch::channel(true);
        let writer = Writer {
            target: Target {
                client: api.client(),
                node: "n1".to_owned(),
                driver: "gpu.divvy.dev".to_owned(),
            },
            reports,
            publishes,
            every: Duration::ZERO,
            look: Duration::from_hours(1),
            retry: Duration::from_secs(1),
            made: Arc::default(),
        };
        let stop = CancellationToken::new();
        let task = tokio::spawn(writer.run(stop.clone()));
        let count = || api.count("patch", "gpunodes/status");
        sleep(Duration::from_secs(1)).await;
        assert_eq!(count(), 1);
        api.fail_next(FAILURES, "patch", "gpunodes/status", Fault::Status(500));
        report.send_replace(named("b"));
        sleep(Duration::from_millis(500)).await;
        // Two at once, and each of the others after twice the pause of the one before.
        for (attempts, pause) in [(3, 1), (4, 2), (5, 4), (6, 8), (7, 16), (8, 32)] {
            assert_eq!(count(), attempts, "before a pause of {pause} s");
            sleep(Duration::from_secs(pause)).await;
        }
        assert_eq!(count(), 9);
        sleep(Duration::from_mins(10)).await;
        assert_eq!(count(), 9, "the last one worked");
        stop.cancel();
        task.await.unwrap();
    }
}
