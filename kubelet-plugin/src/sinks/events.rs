//! Logs what is new, and writes it as Events, in the background: on the Node, on policies, and for GPUs that fall ill on
//! claims and their pods (only the instance in charge does the last).

use std::sync::Arc;

use divvy_executor::{Executor, HeldDevice};
use divvy_model::health::HealthChange;
use divvy_model::mig::Placement;
use divvy_model::{DeviceKind, GpuUuid, HoldKind};
use divvy_offer::Notice;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::events::{EventSubject, Notifier};
use crate::sources::policies::KnownPolicies;

/// Writes in the background.
pub(crate) struct Events {
    pub(crate) executor: Arc<Executor>,
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) tasks: TaskTracker,
    /// Whether this instance is in charge.
    pub(crate) in_charge: watch::Receiver<bool>,
    /// The policies, by which Events about them name their version.
    pub(crate) known: Option<Arc<KnownPolicies>>,
}

impl Events {
    /// What the brain has decided to say.
    pub(crate) fn notice(&self, notice: Notice) {
        let notifier = self.notifier.clone();
        match notice {
            Notice::Info(text) => tracing::info!("{text}"),
            Notice::Warning(text) => tracing::warn!("{text}"),
            Notice::Fault(text) => tracing::error!("{text}"),
            Notice::Node { reason, text } => {
                tracing::warn!(reason, "{text}");
                self.tasks.spawn(async move { notifier.warn_node(reason, &text).await });
            }
            Notice::Policy { problem, text } => {
                tracing::warn!(%problem, "the rule of a GpuPolicy has no effect");
                let Some(known) = &self.known else { return };
                let policy = known.reference(&problem.rule.policy);
                self.tasks.spawn(async move {
                    notifier.warn_policy(&policy, "rule-without-effect", &problem.to_string(), &text).await;
                });
            }
        }
    }

    /// An ailment began or is over, on a GPU or at one place of it. It is over, too, once the GPU is gone for good (`removed`).
    pub(crate) fn health(
        &self,
        change: &HealthChange,
        place: Option<Placement>,
        ordinal: Option<u32>,
        removed: bool,
    ) {
        let HealthChange { gpu, ailment, over, .. } = change;
        let device = ordinal.map(|ordinal| DeviceKind::Whole { ordinal }.to_string());
        let what = subject(change, place, device.as_deref());
        let device = device.unwrap_or_else(|| gpu.to_string());
        if *over && removed {
            tracing::error!(%gpu, ailment = ailment.name(), "{what} is no longer there");
        } else if *over {
            tracing::info!(%gpu, ailment = ailment.name(), "{what} has recovered");
        } else {
            tracing::error!(%gpu, ailment = ailment.name(), "{what} {ailment}");
        }
        if !*self.in_charge.borrow() {
            return;
        }
        if *over {
            let notifier = self.notifier.clone();
            let (reason, note) = if removed {
                (
                    "gpu-removed",
                    format!("the driver no longer lists {what}, which had this fault: it {ailment}"),
                )
            } else {
                ("gpu-recovered", format!("{what} has recovered from this fault: it {ailment}"))
            };
            let action = format!("Untaint {device} {}", ailment.name());
            self.tasks.spawn(async move {
                notifier.report_device(&EventSubject::Node, removed, reason, &action, &note).await;
            });
            return;
        }
        let note = format!("{what} {ailment}: no new claim is placed on it ({})", ailment.remedy());
        self.fallen_ill(change, place, &device, note);
    }

    fn fallen_ill(&self, change: &HealthChange, place: Option<Placement>, device: &str, note: String) {
        let (notifier, executor, gpu) = (self.notifier.clone(), self.executor.clone(), change.gpu.clone());
        let reason = format!("gpu-{}", change.ailment.name());
        let (all, action) = (change.partition.is_none(), format!("Taint {device}"));
        self.tasks.spawn(async move {
            notifier.report_device(&EventSubject::Node, true, &reason, &action, &note).await;
            for held in held_on(executor, &gpu).await.iter().filter(|held| all || is_at(held, place)) {
                let note = format!("device {} of claim {}: {note}", held.hold.device, held.claim);
                let action = format!("Taint {}", held.hold.device);
                let pods = held.pods.iter().map(|pod| EventSubject::Pod(&held.claim.namespace, pod));
                for about in std::iter::once(EventSubject::Claim(&held.claim)).chain(pods) {
                    notifier.report_device(&about, true, &reason, &action, &note).await;
                }
            }
        });
    }
}

/// As it is now: a claim may have been prepared a moment ago.
async fn held_on(executor: Arc<Executor>, gpu: &GpuUuid) -> Vec<HeldDevice> {
    let read = tokio::task::spawn_blocking(move || executor.held().unwrap_or_default());
    let mut held = read.await.unwrap_or_default();
    held.retain(|held| held.hold.gpu == *gpu);
    held
}

/// The GPU or the part of it, for people.
fn subject(change: &HealthChange, place: Option<Placement>, device: Option<&str>) -> String {
    let gpu = device.map_or_else(|| change.gpu.to_string(), |device| format!("{} ({device})", change.gpu));
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
    match (held.hold.kind, place) {
        (HoldKind::Partition { placement, .. }, Some(place)) => placement.overlaps(place),
        _ => true,
    }
}
