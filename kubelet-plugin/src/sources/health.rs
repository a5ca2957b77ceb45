//! The health of the GPUs: listens for events on a thread of its own, polls vitals, keeps the [`HealthBook`], and sends
//! what comes out.

mod file;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_executor::{Executor, HeldDevice};
use divvy_model::health::{
    GpuEvent, GpuEventKind, GpuVitals, HealthBook, HealthChange, HealthRules, XidClass,
};
use divvy_model::mig::{GpuInstanceId, Placement};
use divvy_model::{GpuDriver, GpuError, GpuErrorCode, GpuUuid, HoldKind};
use divvy_offer::{HealthView, Sick, Unmonitored};
use tokio::sync::{mpsc, watch as channel};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::config::Timing;
use crate::node::{Fact, Facts, Health};
use crate::sinks::metrics::Metrics;
use crate::sources::inventory::GpusSeen;
pub(crate) use file::HealthFile;
use file::StoredHealth;
use watch::{Heard, listen};

/// How long the first look may keep the first pool waiting.
const FIRST_LOOK: Duration = Duration::from_secs(2);
/// Longer than any poll takes.
const NEVER: Duration = Duration::from_hours(24);
/// Events come in bursts; the GPUs are not polled more often than this.
const AT_MOST: Duration = Duration::from_secs(1);

/// Keeps the health of the GPUs.
pub(crate) struct HealthOwner {
    pub(crate) gpus: Arc<dyn GpuDriver>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) rules: HealthRules,
    pub(crate) timing: Timing,
    pub(crate) seen: channel::Receiver<GpusSeen>,
    pub(crate) facts: Facts,
    pub(crate) metrics: Metrics,
    /// What an earlier process learnt from events, which a later one cannot poll.
    pub(crate) file: Arc<HealthFile>,
}

/// What is remembered.
#[derive(Debug, Clone, Default)]
pub(crate) struct HealthState {
    pub(crate) book: HealthBook,
    /// Where the GPU instances are that something is wrong with.
    places: BTreeMap<(GpuUuid, GpuInstanceId), Placement>,
    /// Whether anything was sent.
    sent: bool,
    /// GPUs whose events cannot be had, and why; all of them if the driver has none.
    pub(crate) unmonitored: BTreeMap<GpuUuid, GpuErrorCode>,
    pub(crate) no_events: Option<(GpuErrorCode, String)>,
}

/// The answers of one GPU.
struct Polled {
    gpu: GpuUuid,
    vitals: Result<GpuVitals, GpuError>,
    /// Its GPU instances, if they were asked for and could be had.
    living: Option<BTreeSet<GpuInstanceId>>,
}

/// A poll on its way.
struct Polling {
    begun: Instant,
    polled: JoinHandle<Vec<Polled>>,
}

/// When the poll began, and its answers once it has them all; without a poll, never. Only a panic of the driver's code leaves
/// none.
async fn ended(polling: &mut Option<Polling>) -> (Instant, Option<Vec<Polled>>) {
    match polling {
        Some(Polling { begun, polled }) => (*begun, polled.await.ok()),
        None => std::future::pending().await,
    }
}

impl HealthOwner {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let (out, mut heard) = mpsc::channel(64);
        let gate = listen(self.gpus.clone(), out);
        let mut open = false;
        let epoch = Instant::now();
        let mut kept = HealthState::default();
        let mut remembered = self.file.load();
        kept.book.remember(Duration::ZERO, remembered.gpus.clone());
        kept.places = remembered.places.iter().map(|(gpu, id, place)| ((gpu.clone(), *id), *place)).collect();
        let mut polling: Option<Polling> = None;
        let mut polled_at: Option<Instant> = None;
        let mut poll_at = epoch;
        let mut known = BTreeSet::new();
        loop {
            let (usable, released, listed) = {
                let seen = self.seen.borrow_and_update();
                let inventory = seen.inventory.as_ref();
                let listed: BTreeSet<GpuUuid> = inventory
                    .map(|i| i.gpus.keys().cloned().chain(i.problems.iter().map(|p| p.gpu.clone())).collect())
                    .unwrap_or_default();
                let open_now = inventory.is_some() && seen.problem.is_none() && seen.released.is_none();
                if std::mem::replace(&mut open, open_now) != open_now {
                    // Without the thread health is only polled, as was said when it could not be started.
                    let _ = gate.send(open_now);
                }
                (inventory.is_some() && seen.released.is_none(), seen.released.is_some(), listed)
            };
            if released {
                // A released driver may be exchanged, and GPUs reset, without events.
                kept.book.all_away();
                self.remember(&kept, &mut remembered).await;
                // What it answers is about the time before. A call that hangs goes on by itself.
                if polling.take().is_some() {
                    poll_at = Instant::now();
                }
                // Nothing is published before health is known, and on a cordoned node the driver is released at once.
                if !kept.sent {
                    self.report(&mut kept, &[]);
                }
            }
            if listed != known {
                poll_at = Instant::now();
                known = listed;
            }
            let begun = polling.as_ref().map(|polling| polling.begun);
            let first_pool_at = begun.filter(|_| !kept.sent).map(|begun| begun + FIRST_LOOK);
            tokio::select! {
                Some(heard) = heard.recv() => {
                    if self.hear(&mut kept, heard, epoch.elapsed()).await {
                        let soon = polled_at.map_or(epoch, |at| at + AT_MOST);
                        poll_at = poll_at.min(soon.max(Instant::now()));
                    }
                }
                () = sleep_until(poll_at), if usable && polling.is_none() => {
                    polling = Some(self.poll(&kept, &known));
                    // Unless something happens meanwhile, its end says when the next is due.
                    poll_at += NEVER;
                }
                // While a GPU hangs in a poll, events of the others are heard.
                (begun, done) = ended(&mut polling) => {
                    polling = None;
                    self.looked(&mut kept, done, begun.duration_since(epoch));
                    polled_at = Some(Instant::now());
                    let patients = kept.book.has_patients();
                    let wait = if patients { self.timing.health_busy } else { self.timing.health };
                    poll_at = poll_at.min(Instant::now() + wait);
                }
                () = sleep_until(first_pool_at.unwrap_or(epoch)), if first_pool_at.is_some() => {
                    tracing::warn!("initial health poll timed out; publishing with what is known from before");
                    self.report(&mut kept, &[]);
                }
                Ok(()) = self.seen.changed() => continue,
                () = stop.cancelled() => return,
            }
            self.remember(&kept, &mut remembered).await;
        }
    }

    /// Saves what has been learnt from events since it was last saved.
    async fn remember(&self, kept: &HealthState, saved: &mut StoredHealth) {
        let gpus = kept.book.remembered();
        let known = |gpu: &GpuUuid, id: &GpuInstanceId| {
            gpus.get(gpu).is_some_and(|remembered| remembered.partitions.contains_key(id))
        };
        let places = kept.places.iter().filter(|((gpu, id), _)| known(gpu, id));
        let places = places.map(|((gpu, id), place)| (gpu.clone(), *id, *place)).collect();
        let memory = StoredHealth { gpus, places };
        if memory == *saved {
            return;
        }
        let (file, to_save) = (self.file.clone(), memory.clone());
        let written = tokio::task::spawn_blocking(move || file.save(&to_save)).await;
        match written {
            Ok(Ok(())) => *saved = memory,
            Ok(Err(error)) => {
                tracing::warn!(%error, "failed to store what GPUs reported; a restart would lose it");
            }
            // Only a panic; the next change tries again.
            Err(_) => {}
        }
    }

    /// Takes in what was heard; whether to poll now.
    async fn hear(&mut self, kept: &mut HealthState, heard: Heard, now: Duration) -> bool {
        let events = match heard {
            Ok(events) => events,
            Err(error) => {
                let (code, error) = (error.code, crate::chain(&error));
                tracing::warn!(%error, "failed to subscribe to GPU events; health is only polled");
                kept.no_events = Some((code, error));
                self.report_unmonitored(kept);
                return false;
            }
        };
        kept.no_events = None;
        kept.unmonitored = events.unmonitored;
        self.report_unmonitored(kept);
        let mut interesting = false;
        let placed = events.events.iter().any(|event| event.gpu_instance.is_some());
        let held = if placed { self.held_now().await } else { Vec::new() };
        for event in events.events {
            interesting |= HealthBook::is_of_interest(&self.rules, &event);
            self.count(&event);
            let event = self.placed(kept, event, &held);
            let changes = kept.book.event(&self.rules, now, &event);
            // What changes nothing waits for the first poll.
            if kept.sent || !changes.is_empty() {
                self.report(kept, &changes);
            }
        }
        interesting
    }

    fn count(&self, event: &GpuEvent) {
        let GpuEventKind::Xid(xid) = event.kind else {
            tracing::info!(?event, "GPU event");
            return;
        };
        let class = XidClass::of(xid);
        let gpu = event.gpu.as_ref().map(ToString::to_string).unwrap_or_default();
        let instance = event.gpu_instance.map(|id| id.0);
        tracing::warn!(gpu, instance, xid, class = class.name(), "Xid");
        self.metrics.xid(gpu, xid, class);
    }

    /// The event of an instance whose place is not known is the whole GPU's.
    fn placed(&self, kept: &mut HealthState, event: GpuEvent, held: &[HeldDevice]) -> GpuEvent {
        let (Some(gpu), Some(id)) = (&event.gpu, event.gpu_instance) else { return event };
        let place = self.place(gpu, id, held);
        match place {
            Some(place) => {
                kept.places.insert((gpu.clone(), id), place);
                event
            }
            None => GpuEvent { gpu_instance: None, ..event },
        }
    }

    /// The current records, which may be newer than the last fact.
    async fn held_now(&self) -> Vec<HeldDevice> {
        let executor = self.executor.clone();
        let read = tokio::task::spawn_blocking(move || executor.held().unwrap_or_default());
        read.await.unwrap_or_default()
    }

    /// Where a GPU instance is: by the records, which know those that were made a moment ago, or by the inventory.
    fn place(&self, gpu: &GpuUuid, id: GpuInstanceId, held: &[HeldDevice]) -> Option<Placement> {
        let recorded = held.iter().find_map(|held| match held.hold.kind {
            HoldKind::Partition { placement, .. }
                if held.hold.gpu == *gpu
                    && held.made.as_ref().is_some_and(|made| made.gpu_instance == id) =>
            {
                Some(placement)
            }
            _ => None,
        });
        recorded.or_else(|| {
            let seen = self.seen.borrow();
            let mig = seen.inventory.as_ref()?.gpus.get(gpu)?.mig.as_ref()?;
            mig.instances.iter().find(|instance| instance.id == id).map(|instance| instance.placement)
        })
    }

    /// Begins to poll all GPUs that are listed or numbered.
    fn poll(&self, kept: &HealthState, listed: &BTreeSet<GpuUuid>) -> Polling {
        let (gpus, executor, listed) = (self.gpus.clone(), self.executor.clone(), listed.clone());
        let with_instances: BTreeSet<GpuUuid> = kept.places.keys().map(|(gpu, _)| gpu.clone()).collect();
        let polled = tokio::task::spawn_blocking(move || {
            let ordinals = executor.ordinals().unwrap_or_default();
            let mut all = listed;
            all.extend(ordinals.iter().map(|(gpu, _)| gpu.clone()));
            let polled = all.into_iter().map(|gpu| {
                let vitals = gpus.vitals(&gpu);
                let living = with_instances
                    .contains(&gpu)
                    .then(|| gpus.gpu_instances(&gpu).ok())
                    .flatten()
                    .map(|living| living.iter().map(|instance| instance.id).collect());
                Polled { gpu, vitals, living }
            });
            polled.collect()
        });
        Polling { begun: Instant::now(), polled }
    }

    /// Takes in the answers of a poll that began at `now`.
    fn looked(&mut self, kept: &mut HealthState, done: Option<Vec<Polled>>, now: Duration) {
        // Only a panic of the driver's code leaves nothing; the next look tries again.
        let polled = done.unwrap_or_default();
        let mut changes = Vec::new();
        for Polled { gpu, vitals, living } in polled {
            let answer = vitals.map_err(|error| error.code);
            changes.extend(kept.book.poll(&self.rules, now, &gpu, answer));
            if let Some(living) = living {
                changes.extend(kept.book.living(now, &gpu, &living));
            }
        }
        self.report(kept, &changes);
        self.count_unmonitored(kept);
    }

    /// Reports GPUs without event monitoring. Does nothing before the first poll.
    fn report_unmonitored(&mut self, kept: &mut HealthState) {
        self.count_unmonitored(kept);
        if kept.sent {
            self.report(kept, &[]);
        }
    }

    fn count_unmonitored(&self, kept: &HealthState) {
        let all = || kept.book.gpus().len();
        let count = kept.no_events.as_ref().map_or(kept.unmonitored.len(), |_| all());
        self.metrics.unmonitored.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Publishes health changes and the current health view.
    fn report(&mut self, kept: &mut HealthState, changes: &[HealthChange]) {
        let sick = kept.book.gpus();
        kept.places.retain(|(gpu, id), _| sick.get(gpu).is_some_and(|gpu| gpu.partitions.contains_key(id)));
        let changes = changes.iter().map(|change| {
            let place = change.partition.and_then(|id| kept.places.get(&(change.gpu.clone(), id)).copied());
            (change.clone(), place)
        });
        let changes = changes.collect();
        self.send(kept, Arc::new(view_of(kept)), changes);
    }

    fn send(
        &self,
        kept: &mut HealthState,
        view: Arc<HealthView>,
        changes: Vec<(HealthChange, Option<Placement>)>,
    ) {
        kept.sent = true;
        let health = Health { view, book: Arc::new(kept.clone()), changes };
        // Without a brain the plugin ends.
        drop(self.facts.send(Fact::Health(health)));
    }
}

fn view_of(kept: &HealthState) -> HealthView {
    let sick = kept.book.gpus().iter().filter(|(_, gpu)| !gpu.is_well());
    let sick = sick.map(|(uuid, gpu)| {
        let partitions = gpu.partitions.iter().filter_map(|(id, ailments)| {
            let place = kept.places.get(&(uuid.clone(), *id))?;
            Some((*place, ailments.keys().copied().collect()))
        });
        let sick = Sick { gpu: gpu.ailments.keys().copied().collect(), partitions: partitions.collect() };
        (uuid.clone(), sick)
    });
    HealthView { sick: sick.collect(), removed: kept.book.removed().clone(), unmonitored: unmonitored(kept) }
}

fn unmonitored(kept: &HealthState) -> BTreeMap<GpuUuid, Unmonitored> {
    let none = |code: GpuErrorCode, why: &str| Unmonitored {
        why: why.to_owned(),
        for_good: matches!(code, GpuErrorCode::NOT_SUPPORTED | GpuErrorCode::FUNCTION_NOT_FOUND),
    };
    match &kept.no_events {
        // The driver is away, which is reported as such.
        Some((
            GpuErrorCode::DRIVER_NOT_LOADED
            | GpuErrorCode::UNINITIALIZED
            | GpuErrorCode::LIBRARY_NOT_FOUND
            | GpuErrorCode::LIB_RM_VERSION_MISMATCH,
            _,
        )) => BTreeMap::new(),
        Some((code, why)) => kept.book.gpus().keys().map(|gpu| (gpu.clone(), none(*code, why))).collect(),
        None => {
            // A lost GPU is already reported as lost.
            let all = kept.unmonitored.iter().filter(|(_, code)| **code != GpuErrorCode::GPU_IS_LOST);
            all.map(|(gpu, code)| (gpu.clone(), none(*code, &code.to_string()))).collect()
        }
    }
}
