//! The task.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::node::GpuNodeStatus;
use divvy_model::{GpuUuid, Grant};
use divvy_offer::{Ask, Outputs, Pool, Resolved, World, step};
use tokio::sync::{mpsc, watch};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::world::{Holdings, Node, State};
use super::{Fact, Health};
use crate::sinks::events::Events;
use crate::sinks::metrics::Metrics;

/// Decides what the node offers, whenever a fact comes or it is time.
pub(crate) struct Brain {
    pub(crate) world: World,
    pub(crate) facts: mpsc::UnboundedReceiver<Fact>,
    pub(crate) out: Outlets,
    pub(crate) events: Events,
    pub(crate) metrics: Metrics,
}

/// What is to be published, and what must be on disk before it is.
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
        loop {
            let at = epoch + wake_at.unwrap_or_default();
            let fact = tokio::select! {
                Some(fact) = self.facts.recv() => self.learn(&mut node, fact),
                () = sleep_until(at), if wake_at.is_some() => divvy_offer::Fact::Time,
                () = stop.cancelled() => return,
            };
            let outputs = step(&mut self.world, fact, epoch.elapsed());
            wake_at = outputs.wake_at;
            self.put_out(&node, outputs);
        }
    }

    /// Keeps the fact, and passes on what of it decides about the offer.
    fn learn(&mut self, node: &mut Node, fact: Fact) -> divvy_offer::Fact {
        use divvy_offer::Fact as Decisive;
        match fact {
            Fact::Gpus(seen) => {
                node.seen = seen;
                match node.seen.inventory.clone() {
                    Some(gpus) => Decisive::Inventory { gpus, driver_down: node.seen.down.is_some() },
                    None => Decisive::Time,
                }
            }
            Fact::Health(Health { view, book, changes }) => {
                let ordinals = node.recorded.as_ref().map(|recorded| &recorded.ordinals);
                for (change, place) in &changes {
                    let ordinal = ordinals.and_then(|known| known.of(&change.gpu));
                    self.events.health(change, *place, ordinal, view.removed.contains(&change.gpu));
                }
                (node.view, node.book) = (Some(view.clone()), book);
                Decisive::Health(view)
            }
            Fact::Policies(known) => {
                let (policies, labels) = (known.policies.clone(), known.labels.clone());
                self.events.known = Some(known.clone());
                node.policies = Some(known);
                Decisive::Policies { policies, labels }
            }
            Fact::Neighbours(uses) => {
                node.neighbours = Arc::new(uses);
                Decisive::Neighbours(node.labels())
            }
            Fact::Records(recorded) => {
                let decisive = recorded.decisive();
                self.metrics.recorded(&recorded, decisive.fenced.len());
                node.recorded = Some(Arc::new(recorded));
                Decisive::Records(decisive)
            }
            Fact::Server { version, dropped } => Decisive::Server { version, dropped },
            Fact::Dropped(features) => Decisive::Dropped(features),
            Fact::Answer(answer) => Decisive::Answer(answer),
            Fact::Conflict(conflict) => Decisive::Conflict(conflict),
        }
    }

    fn put_out(&mut self, node: &Node, outputs: Outputs) {
        if let Some(recorded) = &node.recorded {
            self.metrics.health(&node.book.book, &recorded.ordinals);
        }
        self.metrics.offer(node.seen.inventory.as_deref(), &outputs);
        if let Some(report) = node.report(&outputs) {
            set(&self.out.report, Some(report));
        }
        self.out.holdings.send_if_modified(|known| {
            let now = node.holdings();
            let changed = known.devices.held != now.devices.held || known.health != now.health;
            *known = now;
            changed
        });
        self.out.state.send_replace(node.state(&outputs));
        set(&self.out.resolved, outputs.resolved);
        set(&self.out.forget, outputs.forget);
        if outputs.ask.is_some() {
            self.out.ask.send_replace(outputs.ask);
        }
        set(&self.out.offer, Offer { pool: outputs.pool, grants: outputs.grants });
        for notice in outputs.notices {
            self.events.notice(notice);
        }
    }
}

/// Sends what has changed.
fn set<T: PartialEq>(to: &watch::Sender<T>, value: T) {
    to.send_if_modified(|known| {
        let changed = *known != value;
        *known = value;
        changed
    });
}
