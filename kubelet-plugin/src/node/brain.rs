//! The task.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::node::GpuNodeStatus;
use divvy_model::health::HealthChange;
use divvy_model::mig::Placement;
use divvy_model::{GpuUuid, Grant};
use divvy_offer::{Ask, Finding, HealthView, Outputs, Pool, Resolved, World, step};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::facts::{Fact, Health, Report};
use super::world::{Holdings, Node, State};
use crate::metrics::Metrics;
use crate::sinks::events::Events;

/// Decides what the node offers, whenever a fact comes or it is time.
pub(crate) struct Brain {
    pub(crate) world: World,
    pub(crate) facts: mpsc::UnboundedReceiver<Fact>,
    pub(crate) out: Outlets,
    pub(crate) events: Events,
    pub(crate) metrics: Metrics,
}

/// The pool to publish, and the grants that must be on disk before it is.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Offer {
    pub(crate) pool: Option<Arc<Pool>>,
    pub(crate) grants: BTreeMap<GpuUuid, Grant>,
}

/// Where outputs go: one writer each, the brain.
#[derive(Default)]
pub(crate) struct Outlets {
    pub(crate) offer: watch::Sender<Offer>,
    pub(crate) report: watch::Sender<Option<GpuNodeStatus>>,
    pub(crate) holdings: watch::Sender<Holdings>,
    pub(crate) forget: watch::Sender<BTreeSet<GpuUuid>>,
    pub(crate) ask: watch::Sender<Option<Ask>>,
    pub(crate) state: watch::Sender<State>,
    pub(crate) resolved: watch::Sender<Arc<Resolved>>,
}

/// The other ends.
#[derive(Clone)]
pub(crate) struct Followed {
    pub(crate) offer: watch::Receiver<Offer>,
    pub(crate) report: watch::Receiver<Option<GpuNodeStatus>>,
    pub(crate) holdings: watch::Receiver<Holdings>,
    pub(crate) forget: watch::Receiver<BTreeSet<GpuUuid>>,
    pub(crate) ask: watch::Receiver<Option<Ask>>,
    pub(crate) state: watch::Receiver<State>,
    pub(crate) resolved: watch::Receiver<Arc<Resolved>>,
}

impl Outlets {
    /// The other ends.
    pub(crate) fn follow(&self) -> Followed {
        Followed {
            offer: self.offer.subscribe(),
            report: self.report.subscribe(),
            holdings: self.holdings.subscribe(),
            forget: self.forget.subscribe(),
            ask: self.ask.subscribe(),
            state: self.state.subscribe(),
            resolved: self.resolved.subscribe(),
        }
    }
}

impl Brain {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let epoch = Instant::now();
        let mut node = Node::default();
        let mut wake_at: Option<Duration> = None;
        let mut known = BTreeSet::new();
        loop {
            let at = epoch + wake_at.unwrap_or_default();
            let fact = tokio::select! {
                Some(Fact { offer, report }) = self.facts.recv() => {
                    // Before the step: its findings and reports are made of both parts.
                    if let Some(report) = report {
                        self.keep(&mut node, report);
                    }
                    offer
                }
                () = sleep_until(at), if wake_at.is_some() => divvy_offer::Fact::Time,
                () = stop.cancelled() => return,
            };
            // The only place of decision. It does not wait: no fact comes between the world that it
            // decides on and its outputs.
            let outputs = step(&mut self.world, fact, epoch.elapsed());
            wake_at = outputs.wake_at;
            let findings = node.findings(&outputs);
            self.events.findings(&known, &findings);
            self.publish_outputs(&node, outputs, &findings);
            known = findings;
        }
    }

    /// Keeps what reports show, and reports what is an occurrence and no state.
    fn keep(&mut self, node: &mut Node, report: Report) {
        match report {
            Report::Gpus(seen) => node.seen = seen,
            Report::Health(health) => self.keep_health(node, health),
            Report::Policies(known) => {
                self.events.known = Some(known.clone());
                node.policies = Some(known);
            }
            Report::Records(recorded) => {
                self.metrics.recorded(&recorded, recorded.fenced().len());
                node.recorded = Some(Arc::new(recorded));
            }
            Report::Ungranted(failed) => node.ungranted = failed,
            Report::Unwritable(why) => node.unwritable = why,
            Report::NvidiaServes(serves) => node.nvidia_serves = serves,
            Report::SupervisorAway(away) => node.supervisor_away = away,
        }
    }

    fn keep_health(&mut self, node: &mut Node, health: Health) {
        let Health {
            view,
            book,
            changes,
        } = health;
        let ordinals = node.recorded.as_ref().map(|recorded| &recorded.ordinals);
        for (change, place) in &changes {
            let ordinal = ordinals.and_then(|known| known.of(&change.gpu));
            self.events
                .health(change, *place, ordinal, view.removed.contains(&change.gpu));
        }
        // Against the view before: it is replaced below.
        for (gpu, place) in newly_gone(node.view.as_deref(), &view, &changes) {
            let ordinal = ordinals.and_then(|known| known.of(gpu));
            self.events.gone(gpu, place, ordinal);
        }
        (node.view, node.book) = (Some(view), book);
    }

    /// Hands out the results. Nothing here waits: each reader takes the newest when it can.
    fn publish_outputs(&mut self, node: &Node, outputs: Outputs, findings: &BTreeSet<Finding>) {
        // Metrics and the report first, the offer last: a reader of the new slices finds the
        // reasons for them in the GpuNode's status already on its way.
        if let Some(recorded) = &node.recorded {
            let view = node.view.clone().unwrap_or_default();
            self.metrics
                .health(&node.book.book, &view, &recorded.ordinals);
        }
        self.metrics.gone(findings);
        self.metrics.offer(node.seen.inventory.as_deref(), &outputs);
        if let Some(report) = node.report(&outputs, findings) {
            set(&self.out.report, Some(report));
        }
        // Replaced in any case, since its readers look at all of it when they wake; they are woken
        // only by what the kubelet asks about.
        self.out.holdings.send_if_modified(|known| {
            let now = node.holdings();
            let changed = known.devices.held != now.devices.held || known.health != now.health;
            *known = now;
            changed
        });
        self.out.state.send_replace(node.state(&outputs));
        set(&self.out.resolved, outputs.resolved);
        set(&self.out.forget, outputs.forget);
        // A question stays until the next: its reader takes the newest, and each gets an answer.
        if outputs.ask.is_some() {
            self.out.ask.send_replace(outputs.ask);
        }
        set(
            &self.out.offer,
            Offer {
                pool: outputs.pool,
                grants: outputs.grants,
            },
        );
    }
}

/// Returns the GPUs that are no longer in the machine, and the partitions that claims hold and that
/// are no longer there, as far as that is new. In the first view that is what was there, ill, when
/// an earlier process looked.
fn newly_gone<'a>(
    before: Option<&HealthView>,
    now: &'a HealthView,
    changes: &[(HealthChange, Option<Placement>)],
) -> Vec<(&'a GpuUuid, Option<Placement>)> {
    let is_new = |gpu: &&GpuUuid| match before {
        Some(before) => !before.removed.contains(*gpu),
        None => changes.iter().any(|(change, _)| change.gpu == **gpu),
    };
    let is_new_place =
        |place: &&(GpuUuid, Placement)| before.is_none_or(|before| !before.gone.contains(*place));
    let gpus = now.removed.iter().filter(is_new);
    let places = now.gone.iter().filter(is_new_place);
    gpus.map(|gpu| (gpu, None))
        .chain(places.map(|(gpu, at)| (gpu, Some(*at))))
        .collect()
}

/// Sends what has changed.
fn set<T: PartialEq>(to: &watch::Sender<T>, value: T) {
    to.send_if_modified(|known| {
        let changed = *known != value;
        *known = value;
        changed
    });
}
