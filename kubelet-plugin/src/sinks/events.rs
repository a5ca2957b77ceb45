//! Logs what is new, and writes it as Events, in the background: on the Node, on policies, and for
//! GPUs that fall ill on claims and their pods (only the instance in charge does the last). The
//! reasons of Events are those of the table of findings.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::PodRef;
use divvy_executor::{Executor, HeldDevice};
use divvy_model::health::HealthChange;
use divvy_model::mig::Placement;
use divvy_model::{DeviceKind, GpuUuid, Target};
use divvy_offer::{Event, Finding, News, Severity, news};
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::claims::fetch::ClaimFetcher;
use crate::claims::held::held_now;
use crate::node::facts::KnownPolicies;
use crate::sinks::notifier::{EventSubject, Notifier};

/// Time within which a claim is read for an Event about it.
const LOOK_WITHIN: Duration = Duration::from_secs(5);

/// Writes in the background.
pub(crate) struct Events {
    pub(crate) executor: Arc<Executor>,
    /// Reads claims, by which pods that are gone are found out.
    pub(crate) fetcher: Arc<ClaimFetcher>,
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) tasks: TaskTracker,
    /// True while this instance is in charge.
    pub(crate) in_charge: watch::Receiver<bool>,
    /// The policies, by which Events about them name their version.
    pub(crate) known: Option<Arc<KnownPolicies>>,
}

impl Events {
    /// Logs what began and what ended between two lists of findings, and writes Events about what
    /// began, as far as their table says so.
    pub(crate) fn findings(&self, before: &BTreeSet<Finding>, now: &BTreeSet<Finding>) {
        for news in news(before, now) {
            match news {
                News::Began(finding) => self.began(finding),
                News::Ended(finding) => {
                    if let Some(text) = finding.ended() {
                        tracing::info!("{text}");
                    }
                }
            }
        }
    }

    fn began(&self, finding: &Finding) {
        // The log first: an Event may be dropped by the API server, or not be allowed.
        let shown = finding.shown();
        if shown.in_log {
            let kind = shown.kind;
            match shown.severity {
                Severity::Bug => tracing::error!(kind, "{finding}"),
                Severity::Trouble | Severity::Notice => tracing::warn!(kind, "{finding}"),
                Severity::Info => tracing::info!(kind, "{finding}"),
            }
        }
        // In the background: a slow API server must not hold up the next decision.
        let (notifier, text) = (self.notifier.clone(), finding.to_string());
        match (shown.event, finding) {
            (Some(Event::Node(reason)), _) => {
                self.tasks
                    .spawn(async move { notifier.warn_node(reason, &text).await });
            }
            (Some(Event::Policy(reason)), Finding::RuleWithoutEffect(problem)) => {
                let Some(known) = &self.known else { return };
                let policy = known.reference(&problem.rule.policy);
                self.tasks.spawn(async move {
                    let note = format!("node {}: {text}", notifier.node);
                    notifier.warn_policy(&policy, reason, &text, &note).await;
                });
            }
            // Written by the task that observes it.
            _ => {}
        }
    }

    /// An ailment began or is over, on a GPU or at one place of it. It is over, too, once the GPU
    /// is gone for good (`removed`).
    pub(crate) fn health(
        &self,
        change: &HealthChange,
        place: Option<Placement>,
        ordinal: Option<u32>,
        removed: bool,
    ) {
        let HealthChange {
            gpu, ailment, over, ..
        } = change;
        let device = ordinal.map(|ordinal| DeviceKind::whole(ordinal).to_string());
        let what = subject(change, place, device.as_deref());
        let device = device.unwrap_or_else(|| gpu.to_string());
        if *over && removed {
            tracing::error!(%gpu, ailment = ailment.name(), "{what} is no longer there");
        } else if *over {
            tracing::info!(%gpu, ailment = ailment.name(), "{what} has recovered");
        } else {
            tracing::error!(%gpu, ailment = ailment.name(), "{what} {ailment}");
        }
        // Both instances of an update see the fault and log it. Only one writes Events.
        if !*self.in_charge.borrow() {
            return;
        }
        // A GPU that is gone is reported as such (see [`Self::gone`]).
        if *over && !removed {
            let notifier = self.notifier.clone();
            let note = format!("{what} has recovered from this fault: it {ailment}");
            let action = format!("Untaint {device} {}", ailment.name());
            self.tasks.spawn(async move {
                notifier
                    .report_device(&EventSubject::Node, false, "gpu-recovered", &action, &note)
                    .await;
            });
        }
        if *over {
            return;
        }
        let note = format!(
            "{what} {ailment}: no new claim is placed on it ({})",
            ailment.remedy()
        );
        self.fallen_ill(change, place, &device, note);
    }

    /// Reports a GPU that the driver no longer lists, or a partition that a claim holds and that is
    /// no longer there (`place`).
    pub(crate) fn gone(&self, gpu: &GpuUuid, place: Option<Placement>, ordinal: Option<u32>) {
        let device = ordinal.map(|ordinal| DeviceKind::whole(ordinal).to_string());
        let device = device.unwrap_or_else(|| gpu.to_string());
        let (finding, note) = match place {
            None => (
                Finding::Removed { gpu: gpu.clone() },
                format!(
                    "the driver no longer lists {gpu} ({device}): claims that hold it have lost it (delete their pods)"
                ),
            ),
            Some(at) => (
                Finding::PartitionGone {
                    gpu: gpu.clone(),
                    at,
                },
                format!(
                    "the MIG instance of {gpu} ({device}) at memory slices {at} is gone although a claim holds it (delete the pods of the claim): no new claim is placed on the GPU until it is released"
                ),
            ),
        };
        let reason = finding.reason();
        tracing::error!(%gpu, reason, "{note}");
        if *self.in_charge.borrow() {
            self.notify_holders(gpu.clone(), place, reason, &device, note);
        }
    }

    fn fallen_ill(
        &self,
        change: &HealthChange,
        place: Option<Placement>,
        device: &str,
        note: String,
    ) {
        let place = place.filter(|_| change.partition.is_some());
        let finding = Finding::Ill {
            gpu: change.gpu.clone(),
            place,
            ailment: change.ailment,
        };
        let reason = finding.reason();
        self.notify_holders(change.gpu.clone(), place, reason, device, note);
    }

    /// Writes an Event on the node, and on the claims and pods that hold the GPU or the part of it.
    fn notify_holders(
        &self,
        gpu: GpuUuid,
        place: Option<Placement>,
        reason: String,
        device: &str,
        note: String,
    ) {
        let (notifier, executor) = (self.notifier.clone(), self.executor.clone());
        let fetcher = self.fetcher.clone();
        let action = format!("Taint {device}");
        self.tasks.spawn(async move {
            notifier
                .report_device(&EventSubject::Node, true, &reason, &action, &note)
                .await;
            // The node's Event before those of claims and pods: it is one, and they may be many.
            let Some(held) = held_now(&executor).await else {
                tracing::warn!(%gpu, %note, "no Event on the claims that hold the GPU: their records cannot be read");
                return;
            };
            for held in held
                .iter()
                .filter(|held| held.hold.gpu == gpu && is_at(held, place))
            {
                let pods = living_pods(&fetcher, held).await;
                let note = format!(
                    "device {} of claim {}: {note}",
                    held.hold.device, held.claim
                );
                let action = format!("Taint {}", held.hold.device);
                let pods = pods
                    .iter()
                    .map(|pod| EventSubject::Pod(&held.claim.namespace, pod));
                for about in std::iter::once(EventSubject::Claim(&held.claim)).chain(pods) {
                    notifier
                        .report_device(&about, true, &reason, &action, &note)
                        .await;
                }
            }
        });
    }
}

/// Returns the pods on record that still have the claim. A record keeps a pod of several until the
/// next round of reconcile, and an Event about a pod that is gone is noise.
async fn living_pods(fetcher: &Arc<ClaimFetcher>, held: &HeldDevice) -> Vec<PodRef> {
    let (fetcher, claim) = (fetcher.clone(), held.claim.clone());
    let read = tokio::task::spawn_blocking(move || fetcher.look(&claim, LOOK_WITHIN)).await;
    match read {
        Ok(Ok(found)) => still_reserved(&held.pods, found.as_ref()),
        // A claim that cannot be read leaves the record as the only answer.
        Ok(Err(_)) | Err(_) => held.pods.clone(),
    }
}

/// Returns those of the pods that a claim is reserved for. A claim that is gone has none, and one
/// that is reserved for anything but pods (a PodGroup) does not name them.
fn still_reserved(pods: &[PodRef], claim: Option<&ResourceClaim>) -> Vec<PodRef> {
    let status = claim.and_then(|claim| claim.status.as_ref());
    let consumers = status.and_then(|status| status.reserved_for.as_deref());
    let consumers = consumers.unwrap_or_default();
    let mut pods = pods.to_vec();
    if consumers.iter().all(|consumer| consumer.resource == "pods") {
        pods.retain(|pod| consumers.iter().any(|consumer| consumer.uid == pod.uid));
    }
    pods
}

/// The GPU or the part of it, for people.
fn subject(change: &HealthChange, place: Option<Placement>, device: Option<&str>) -> String {
    let gpu = device.map_or_else(
        || change.gpu.to_string(),
        |device| format!("{} ({device})", change.gpu),
    );
    match (change.partition, place) {
        (None, _) => gpu,
        (Some(id), None) => format!("GPU instance {} of {gpu}", id.0),
        (Some(id), Some(place)) => format!(
            "GPU instance {} of {gpu} at memory slices {}..{}",
            id.0,
            place.start,
            place.end().saturating_sub(1)
        ),
    }
}

fn is_at(held: &HeldDevice, place: Option<Placement>) -> bool {
    match (held.hold.target, place) {
        (Target::Partition(at), Some(place)) => at.placement.overlaps(place),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use divvy_fake_cluster::build::{mk_claim, reserved, reserved_for_group};

    use super::*;

    #[test]
    fn pods_that_no_longer_have_the_claim_are_left_out() {
        let pod = |name: &str| PodRef {
            name: name.to_owned(),
            uid: format!("uid-{name}"),
        };
        let pods = [pod("gone"), pod("runs")];
        let claim = || mk_claim("default", "c", "gpu.divvy.dev", 1);
        let of_runs = reserved(claim(), "runs", "uid-runs");
        assert_eq!(still_reserved(&pods, Some(&of_runs)), [pod("runs")]);
        assert_eq!(still_reserved(&pods, Some(&claim())), []);
        assert_eq!(still_reserved(&pods, None), []);
        // Another pod of the name.
        let again = reserved(claim(), "gone", "uid-again");
        assert_eq!(still_reserved(&pods, Some(&again)), []);
        // The pods of a group are not named.
        let of_group = reserved_for_group(claim(), "g");
        assert_eq!(still_reserved(&pods, Some(&of_group)), pods);
    }
}
