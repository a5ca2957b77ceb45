//! From what is known to what is to be published: inventory, numbers, taints and holds go through `carve`, and the
//! pool goes to the publisher over a channel. Nothing here writes to the API.

mod about;
mod kept;
mod rules;
mod telling;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::names::taints as keys;
use divvy_api::node::GpuNodeStatus;
use divvy_carve::{
    Carved, Feature, GpuRules, Input, ModeLock, Note, OneMode, Partitioning, Pool, ServerFeatures,
    carve_partitions, taint_leaving, validate,
};
use divvy_executor::Executor;
use divvy_model::mig::{MigCapabilities, Placement};
use divvy_model::{ClaimUid, DeviceKind, DeviceName, GpuUuid};
use serde::Serialize;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::about::About;
use self::kept::not_static;
use self::telling::concerns_operators;
use crate::api::KubeClaims;
use crate::config::Timing;
use crate::events::Teller;
use crate::health::view::{HealthView, Holdings};
use crate::holders::{Holders, gone, leaving, offers_less_than_it_may};
use crate::inventory::Seen;
use crate::metrics::Metrics;
use crate::neighbours::Uses;
use crate::occupied::{FOREIGN_LASTS, Foreign, Places};
use crate::policy::{Effective, Known};

/// Changes of records come in bursts; one look after each is enough.
const SETTLE: Duration = Duration::from_millis(50);

/// Decides what is published whenever something it depends on changes.
pub(crate) struct Carver {
    pub(crate) node: String,
    pub(crate) driver: String,
    pub(crate) executor: Arc<Executor>,
    pub(crate) claims: Arc<KubeClaims>,
    pub(crate) foreign: Arc<Foreign>,
    /// What may be done with GPUs that no policy speaks of.
    pub(crate) rules: GpuRules,
    /// Whether a GPU may be published in several modes, where no policy says it.
    pub(crate) mode_lock: ModeLock,
    pub(crate) policies: watch::Receiver<Option<Arc<Known>>>,
    /// What the policies make of the GPUs.
    pub(crate) effective: watch::Sender<Option<Effective>>,
    /// What prepare was allowed last.
    /// What people are told of the node.
    pub(crate) reports: watch::Sender<Option<GpuNodeStatus>>,
    pub(crate) seen: watch::Receiver<Seen>,
    pub(crate) features: watch::Receiver<ServerFeatures>,
    /// GPUs that others use.
    pub(crate) neighbours: watch::Receiver<Arc<Uses>>,
    /// How the GPUs are; `None` before that is known.
    pub(crate) health: watch::Receiver<Option<Arc<HealthView>>>,
    /// Told what claims hold.
    pub(crate) held: watch::Sender<Arc<Holdings>>,
    /// Records have changed.
    pub(crate) changed: Arc<Notify>,
    /// Claims that are being worked on: what their records say is about to change.
    pub(crate) busy: Arc<dyn Fn() -> BTreeSet<ClaimUid> + Send + Sync>,
    /// Told of GPUs in trouble; in the background.
    pub(crate) teller: Arc<Teller>,
    pub(crate) told: TaskTracker,
    pub(crate) desired: watch::Sender<Option<Pool>>,
    /// What became of what was asked for.
    pub(crate) offering: watch::Sender<Offering>,
    pub(crate) metrics: Metrics,
    pub(crate) timing: Timing,
}

/// What is offered and what is not, for those who show it.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Offering {
    /// Why a GPU may be published in one mode only.
    #[serde(serialize_with = "in_words")]
    pub(crate) one_mode: Option<OneMode>,
    /// Whether more was asked for.
    pub(crate) several_asked: bool,
    /// What is left out, and why.
    pub(crate) notes: Vec<String>,
}

#[expect(clippy::ref_option, reason = "as serde calls it")]
fn in_words<S: serde::Serializer>(why: &Option<OneMode>, to: S) -> Result<S::Ok, S::Error> {
    why.as_ref().map(ToString::to_string).serialize(to)
}

/// What is remembered from one look to the next.
#[derive(Default)]
struct Memory {
    /// Already logged.
    notes: BTreeSet<Note>,
    problem: Option<String>,
    /// Whether to look again soon: something was taken for what it was a moment ago.
    look_soon: bool,
    /// Instances of others, already told.
    foreign: BTreeSet<(GpuUuid, Placement)>,
    /// What GPUs can be cut into, as last told.
    capabilities: BTreeMap<GpuUuid, MigCapabilities>,
    /// GPUs with a number that are not there and not published, since when.
    gone: BTreeMap<GpuUuid, Instant>,
    /// Devices that are published only because a claim holds them or did a moment ago.
    withdrawn: BTreeSet<DeviceName>,
    /// For the node's report.
    about: Option<About>,
    /// Whether a device is published only because a claim holds it, or may.
    keeps_withdrawn: bool,
    /// Whether pods leave a GPU that falls ill, by its last rules: one that is lost has none.
    evicts: BTreeMap<GpuUuid, bool>,
    holders: Holders,
    /// When what an earlier process began to withdraw may go; `None` before that is known.
    settled_at: Option<Instant>,
    /// Whether a GPU was given out in two modes, already looked into.
    conflict: bool,
    /// Why there is one mode for each GPU, as last told.
    one_mode: Option<OneMode>,
}

impl Carver {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut memory = Memory::default();
        loop {
            let mut again = self.look(&mut memory).await;
            self.report(&memory);
            if memory.look_soon {
                again = Some(again.map_or(FOREIGN_LASTS, |again| again.min(FOREIGN_LASTS)));
            }
            tokio::select! {
                Ok(()) = self.seen.changed() => {}
                Ok(()) = self.features.changed() => {}
                Ok(()) = self.neighbours.changed() => {}
                Ok(()) = self.health.changed() => {}
                Ok(()) = self.policies.changed() => {}
                () = self.changed.notified() => tokio::time::sleep(SETTLE).await,
                () = tokio::time::sleep(again.unwrap_or_default()), if again.is_some() => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Decides once; after how long to look again even if nothing is told to change.
    async fn look(&mut self, memory: &mut Memory) -> Option<Duration> {
        let features = self.features.borrow_and_update().clone();
        // What may be offered depends on the server's version: a first pool made without it would withdraw partitions
        // for the seconds until it is known.
        features.lowest()?;
        self.neighbours.mark_unchanged();
        // So may what the policies allow.
        let policies = self.policies.borrow_and_update().clone()?;
        let Seen { inventory, down, .. } = self.seen.borrow_and_update().clone();
        let mut kept = match self.kept(inventory.as_ref(), down.is_some(), memory).await {
            Ok(kept) => kept,
            Err(problem) => {
                if memory.problem.as_ref() != Some(&problem) {
                    tracing::error!(error = %problem, "what is published cannot be decided; tried again by itself");
                    memory.problem = Some(problem);
                }
                return Some(self.timing.driver_retry);
            }
        };
        memory.problem = None;
        memory.look_soon = kept.look_soon;
        self.metrics.records(kept.phases);
        self.metrics.fenced.set(i64::try_from(kept.fenced).unwrap_or(i64::MAX));
        self.metrics.held(&kept.held);
        let records = kept.held.clone();
        let held = Holdings { devices: std::mem::take(&mut kept.held), ordinals: kept.ordinals.clone() };
        self.held.send_if_modified(|known| {
            let changed = **known != held;
            *known = Arc::new(held);
            changed
        });
        memory.about = Some(About {
            inventory: inventory.clone(),
            ordinals: kept.ordinals.clone(),
            records,
            lingering: std::mem::take(&mut kept.lingering),
            fences: std::mem::take(&mut kept.fences),
            newer: std::mem::take(&mut kept.newer),
            foreign: Places::new(),
            kubernetes: features.lowest().map(|version| version.to_string()).unwrap_or_default(),
        });
        let inventory = inventory?;
        // As with the version: a GPU may have been ill before this process began.
        let health = self.health.borrow_and_update().clone()?;
        self.metrics.gpus.set(i64::try_from(inventory.gpus.len()).unwrap_or(i64::MAX));
        let previous = self.desired.borrow().clone();
        for (uuid, mig) in inventory.gpus.iter().filter_map(|(uuid, gpu)| Some((uuid, gpu.mig.as_ref()?))) {
            if memory.capabilities.get(uuid) != Some(&mig.capabilities) {
                memory.capabilities.insert(uuid.clone(), mig.capabilities.clone());
            }
        }
        memory.capabilities.retain(|uuid, _| kept.ordinals.of(uuid).is_some());
        let capabilities = memory.capabilities.clone();
        let resolved = self.resolved(policies, &inventory, &kept.ordinals);
        memory.evicts.extend(resolved.rules.iter().map(|(uuid, rules)| (uuid.clone(), rules.no_execute)));
        memory.evicts.retain(|uuid, _| kept.ordinals.of(uuid).is_some());
        kept.add_health(&health, &inventory, |gpu| memory.evicts.get(gpu) == Some(&true));
        let lock = resolved.mode_lock.as_ref().map_or(self.mode_lock, |(lock, _)| *lock);
        let features = features.with_mode_lock(lock);
        let foreign = not_static(kept.foreign, &resolved);
        self.tell_foreign(memory, &foreign);
        if let Some(about) = &mut memory.about {
            about.foreign.clone_from(&foreign);
        }
        for (gpu, placement) in &foreign {
            kept.occupied.add(gpu, *placement, keys::FOREIGN);
        }
        let stuck = BTreeSet::new();
        let partitioning = Partitioning {
            capabilities: &capabilities,
            rules: &resolved.rules,
            occupied: &kept.occupied.0,
            stuck: &stuck,
        };
        let carve_with = |held: &BTreeSet<DeviceName>| {
            let input = Input {
                node: &self.node,
                inventory: &inventory,
                ordinals: &kept.ordinals,
                taints: &kept.taints,
                held,
                recorded: &kept.recorded,
                previous: previous.as_ref(),
                features: &features,
            };
            carve_partitions(&input, &partitioning)
        };
        let offered = carve_with(&BTreeSet::new());
        let gone = gone(&kept.ordinals, &inventory, &offered.pool);
        let now = Instant::now();
        memory.gone.retain(|gpu, _| gone.contains(gpu));
        for gpu in &gone {
            memory.gone.entry(gpu.clone()).or_insert(now);
        }
        let unsure =
            || !memory.holders.asked && offers_less_than_it_may(&kept.ordinals, &capabilities, &offered.pool);
        let unsure = unsure();
        let published = previous.iter().flat_map(Pool::devices).map(|device| device.name.clone()).collect();
        let leaving = leaving(&published, &offered.pool, &kept.ordinals, &inventory);
        self.grant(memory, &resolved, &kept.ordinals, &leaving);
        if previous.is_none() && unsure && memory.settled_at.is_none() {
            memory.settled_at = match self.begun_to_leave().await {
                // An earlier process began to withdraw something, perhaps a moment ago: what it published stays as it is
                // until everybody has seen those taints.
                Some(begun) if begun.iter().any(|device| offered.pool.device(device).is_none()) => {
                    Some(now + self.timing.leave)
                }
                None if memory.holders.asks_first() => {
                    memory.holders.unanswered();
                    return Some(self.timing.driver_retry);
                }
                Some(_) | None => Some(now),
            };
        }
        if let Some(wait) =
            memory.settled_at.and_then(|at| at.checked_duration_since(now)).filter(|w| !w.is_zero())
        {
            return Some(wait);
        }
        // Where taints are dropped nobody would see that they leave.
        let told = if features.supports(Feature::Taints) { leaving } else { BTreeSet::new() };
        let fresh = memory.holders.leave(told, now, self.timing.leave);
        if let Some(previous) = previous.as_ref().filter(|_| !fresh.is_empty() && gone.is_empty()) {
            let leaving = memory.holders.all_leaving();
            memory.withdrawn.clone_from(&leaving);
            let pool = taint_leaving(previous, &offered.pool, &leaving);
            self.publish(memory, Carved { pool, ..offered }, &features);
            return Some(self.timing.leave);
        }
        // Something known is not offered any more: if a claim holds it, it must stay published. Who holds what is
        // only asked then, since the answer is a list of all claims.
        let there = |device: &DeviceName| offered.pool.device(device).is_some();
        let known = previous.iter().flat_map(Pool::devices).map(|device| &device.name).chain(&kept.recorded);
        // Admin access holds nothing.
        let is_admin = |name: &DeviceName| matches!(DeviceKind::parse(name), Ok(DeviceKind::Admin { .. }));
        let vanished: BTreeSet<DeviceName> =
            known.filter(|device| !there(device) && !is_admin(device)).cloned().collect();
        let conflict = features.conflict() && !memory.conflict;
        memory.conflict = features.conflict();
        if conflict {
            memory.holders.held = None;
        }
        if gone.is_empty() && !memory.keeps_withdrawn && !conflict && vanished.is_empty() && !unsure {
            memory.holders.held = None;
            memory.withdrawn.clear();
            self.publish(memory, offered, &features);
            return None;
        }
        let held = self.held(&mut memory.holders, now, &vanished, &kept.recorded).await;
        let Some(held) = held else {
            // Nothing is withdrawn before it is known who holds it; nothing new of it is given out either.
            let carved = match &previous {
                None if memory.holders.asks_first() => return Some(self.timing.driver_retry),
                None => carve_with(&kept.recorded),
                Some(previous) => {
                    let names: BTreeSet<_> = previous.devices().map(|device| device.name.clone()).collect();
                    let vanished = names.iter().filter(|device| !there(device)).cloned();
                    memory.withdrawn.extend(vanished);
                    Carved { pool: taint_leaving(previous, &offered.pool, &names), ..offered }
                }
            };
            self.publish(memory, carved, &features);
            return Some(self.timing.withdrawn);
        };
        let carved = carve_with(&held);
        memory.keeps_withdrawn = carved.pool != offered.pool;
        memory.withdrawn.clone_from(&carved.kept);
        let settled = gone.is_empty() && !memory.keeps_withdrawn;
        let again = !(settled && kept.recorded.iter().all(there));
        self.publish(memory, carved, &features);
        again.then_some(self.timing.withdrawn)
    }

    fn publish(&self, memory: &mut Memory, carved: Carved, features: &ServerFeatures) {
        let Carved { pool, notes, .. } = carved;
        let notes: BTreeSet<Note> = notes.into_iter().collect();
        self.tell_one_mode(memory, &notes, features);
        for note in notes.difference(&memory.notes) {
            tracing::warn!(%note, "not published as it could be");
            if let Some(reason) = concerns_operators(note) {
                let (teller, note) = (self.teller.clone(), note.to_string());
                self.told.spawn(async move { teller.warn_node(reason, &note).await });
            }
        }
        memory.notes = notes;
        if let Err(error) = validate(&pool) {
            tracing::error!(error = %crate::chain(&error), "the pool breaks a limit of the API and is not published (a fault of divvy)");
            return;
        }
        self.metrics.devices.set(i64::try_from(pool.devices().count()).unwrap_or(i64::MAX));
        self.desired.send_if_modified(|desired| {
            let changed = desired.as_ref() != Some(&pool);
            if changed {
                tracing::info!(pool = %pool.name, devices = pool.devices().count(), "pool to be published has changed");
                *desired = Some(pool);
            }
            changed
        });
    }
}
