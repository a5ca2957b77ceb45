//! Tells people what is wrong: Events on the Node, on claims and on their pods. Only the instance in charge does.

use std::sync::Arc;

use divvy_executor::{Executor, HeldDevice};
use divvy_model::health::HealthChange;
use divvy_model::mig::Placement;
use divvy_model::{DeviceKind, HoldKind};
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

use crate::events::{About, Teller};

/// Tells, in the background.
pub(crate) struct Told {
    pub(crate) executor: Arc<Executor>,
    pub(crate) teller: Arc<Teller>,
    pub(crate) tasks: TaskTracker,
    /// Whether this instance is in charge.
    pub(crate) in_charge: watch::Receiver<bool>,
}

impl Told {
    /// Something became so, or is over, on a GPU or at one place of it.
    pub(super) fn change(&self, change: &HealthChange, place: Option<Placement>, ordinal: Option<u32>) {
        let HealthChange { gpu, partition, ailment, over } = change;
        let device = ordinal.map(|ordinal| DeviceKind::Whole { ordinal }.to_string());
        let name = device.as_ref().map(|device| format!(" ({device})"));
        let device = device.unwrap_or_else(|| gpu.to_string());
        let what = match (partition, place) {
            (None, _) => format!("{gpu}{}", name.unwrap_or_default()),
            (Some(id), None) => format!("GPU instance {} of {gpu}{}", id.0, name.unwrap_or_default()),
            (Some(id), Some(place)) => format!(
                "GPU instance {} of {gpu}{} at memory slices {}..{}",
                id.0,
                name.unwrap_or_default(),
                place.start,
                place.end().saturating_sub(1)
            ),
        };
        let reason = format!("gpu-{}", ailment.name());
        if *over {
            tracing::info!(%gpu, ailment = ailment.name(), "{what} has recovered");
        } else {
            tracing::error!(%gpu, ailment = ailment.name(), "{what} {ailment}");
        }
        if !*self.in_charge.borrow() {
            return;
        }
        let teller = self.teller.clone();
        if *over {
            let note = format!("{what} has recovered: it no longer counts as one that {ailment}");
            let action = format!("Untaint {device} {}", ailment.name());
            self.tasks.spawn(async move {
                teller.tell_of_device(&About::Node, false, "gpu-recovered", &action, &note).await;
            });
            return;
        }
        let note = format!("{what} {ailment}: nothing new is placed on it ({})", ailment.remedy());
        let (executor, gpu, all) = (self.executor.clone(), gpu.clone(), partition.is_none());
        self.tasks.spawn(async move {
            teller.tell_of_device(&About::Node, true, &reason, &format!("Taint {device}"), &note).await;
            // As it is now: a claim may have been prepared a moment ago.
            let read = tokio::task::spawn_blocking(move || executor.held().unwrap_or_default());
            let held = read.await.unwrap_or_default().into_iter();
            for held in held.filter(|held| held.hold.gpu == gpu && (all || is_at(held, place))) {
                let note = format!("device {} of claim {}: {note}", held.hold.device, held.claim);
                let action = format!("Taint {}", held.hold.device);
                let pods = held.pods.iter().map(|pod| About::Pod(&held.claim.namespace, pod));
                for about in std::iter::once(About::Claim(&held.claim)).chain(pods) {
                    teller.tell_of_device(&about, true, &reason, &action, &note).await;
                }
            }
        });
    }
}

fn is_at(held: &HeldDevice, place: Option<Placement>) -> bool {
    match (held.hold.kind, place) {
        (HoldKind::Partition { placement, .. }, Some(place)) => placement.overlaps(place),
        _ => true,
    }
}
