//! The health of the GPUs: listens for events on a thread of its own, polls vitals, keeps the
//! [`HealthBook`], and sends what comes out.

mod file;
mod schedule;
mod slots;
mod watch;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::Phase;
use divvy_executor::{Executor, HeldDevice};
use divvy_model::health::{
    GpuEvent, GpuEventKind, GpuVitals, HealthBook, HealthChange, HealthRules, XidClass,
};
use divvy_model::mig::{GpuInstance, GpuInstanceId, GpuInstanceProfileId, Placement};
use divvy_model::{ClaimUid, GpuDriver, GpuError, GpuErrorCode, GpuUuid, Target};
use divvy_offer::{HealthView, Sick, Unmonitored};
use tokio::sync::{Notify, mpsc, watch as channel};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::app::config::Timing;
use crate::claims::held::held_now;
use crate::metrics::Metrics;
use crate::node::facts::{Facts, GpusSeen, Health, HealthState, Report};
pub(crate) use file::HealthFile;
use file::StoredHealth;
use schedule::{Action, DriverState, Event, Schedule};
use watch::{Heard, listen};

/// Keeps the health of the GPUs.
pub(crate) struct HealthOwner {
    pub(crate) gpus: Arc<dyn GpuDriver>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) rules: HealthRules,
    pub(crate) timing: Timing,
    pub(crate) seen: channel::Receiver<GpusSeen>,
    pub(crate) facts: Facts,
    pub(crate) metrics: Metrics,
    /// Faults that an earlier process learnt of by events, which a later one cannot poll.
    pub(crate) file: Arc<HealthFile>,
    /// The GpuNode is a new object: GPUs that are not there any more are no part of the node.
    pub(crate) new_node: Arc<Notify>,
}

/// The answers of one GPU.
struct Polled {
    gpu: GpuUuid,
    vitals: Result<GpuVitals, GpuError>,
    /// Its GPU instances, if they were asked for and could be had.
    living: Option<BTreeSet<GpuInstanceId>>,
    /// Places of partitions that claims hold and that are not there; `None` if that could not be
    /// found out.
    gone: Option<BTreeSet<Placement>>,
}

/// A partition that a claim holds, as its record has it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Partition {
    claim: ClaimUid,
    gpu: GpuUuid,
    instance: GpuInstanceId,
    profile: GpuInstanceProfileId,
    place: Placement,
}

impl Partition {
    /// Returns all partitions of claims that are prepared: while a claim is being prepared or
    /// unprepared its partition comes and goes. `None` if the records cannot be read.
    fn all_held(executor: &Executor) -> Option<BTreeSet<Self>> {
        let held = executor.held().ok()?.into_iter();
        let prepared = held.filter(|held| held.phase == Phase::Prepared);
        let partitions = prepared
            .filter_map(|held| {
                let place = held.hold.target.place()?;
                Some(Self {
                    claim: held.claim.uid,
                    gpu: held.hold.gpu,
                    instance: held.made?.gi,
                    profile: place.profile,
                    place: place.placement,
                })
            })
            .collect();
        Some(partitions)
    }

    fn is_among(&self, living: &[GpuInstance]) -> bool {
        let wanted = (self.instance, self.profile, self.place);
        living
            .iter()
            .any(|one| (one.id, one.profile, one.placement) == wanted)
    }
}

/// Returns the GPU instances of a GPU: none if its MIG mode is off, as it may be after a reset.
/// `None` if the driver does not answer.
fn living(gpus: &dyn GpuDriver, gpu: &GpuUuid) -> Option<Vec<GpuInstance>> {
    match gpus.gpu_instances(gpu) {
        Ok(living) => Some(living),
        Err(error) if error.code == GpuErrorCode::NOT_SUPPORTED => Some(Vec::new()),
        Err(_) => None,
    }
}

/// A poll on its way.
struct Polling {
    begun: Instant,
    polled: JoinHandle<Vec<Polled>>,
}

/// Waits for the poll that is under way and returns its start and its answers; only a panic of the
/// driver's code leaves none. Never returns if none is under way.
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
        // A thread of its own: NVML's wait for events blocks. Its gate is closed until the driver
        // may be asked.
        let gate = listen(self.gpus.clone(), out);
        let mut is_open = false;
        let epoch = Instant::now();
        let (mut kept, mut remembered) = self.recall();
        let mut schedule = Schedule::new(self.timing.health, self.timing.health_busy);
        let mut polling: Option<Polling> = None;
        let mut event = Event::Time;
        loop {
            // The driver first: whatever has happened, a released driver is not asked.
            let (driver, opens) = self.driver_state();
            if std::mem::replace(&mut is_open, opens) != opens {
                // Without the thread health is only polled, which was reported when it could not be
                // started.
                let _ = gate.send(opens);
            }
            if driver.released {
                // A released driver may be exchanged, and GPUs reset, without events.
                kept.book.all_away();
                self.remember(&kept, &mut remembered).await;
            }
            self.place_gpus(&mut kept);
            schedule.see(driver, epoch.elapsed());
            if kept.sent {
                schedule.published();
            }

            // Then everything that is due.
            let until = loop {
                match schedule.next(std::mem::replace(&mut event, Event::Time), epoch.elapsed()) {
                    Action::Poll => polling = Some(self.poll(&kept, schedule.listed())),
                    Action::Abandon => polling = None,
                    Action::PublishUnpolled => {
                        if !schedule.is_released() {
                            tracing::warn!(
                                "initial health poll timed out; publishing with what is known from before"
                            );
                        }
                        self.report(&mut kept, &[]);
                    }
                    Action::Wait(until) => break until,
                }
            };

            // Then the next event. While a GPU hangs in a poll, events of the others are heard.
            event = tokio::select! {
                Some(heard) = heard.recv() => {
                    if self.hear(&mut kept, heard, epoch.elapsed()).await {
                        Event::Heard
                    } else {
                        Event::Time
                    }
                }
                (begun, done) = ended(&mut polling) => {
                    polling = None;
                    self.looked(&mut kept, done, begun.duration_since(epoch));
                    Event::Polled { patients: kept.book.has_patients() }
                }
                () = sleep_until(epoch + until.unwrap_or_default()), if until.is_some() => Event::Time,
                Ok(()) = self.seen.changed() => continue,
                () = self.new_node.notified() => {
                    kept.slots.clear();
                    self.place_gpus(&mut kept);
                    if kept.sent {
                        self.report(&mut kept, &[]);
                    }
                    Event::Time
                }
                () = stop.cancelled() => return,
            };
            self.remember(&kept, &mut remembered).await;
        }
    }

    /// Returns the faults that an earlier process learnt of by events, and the file that has them.
    fn recall(&self) -> (HealthState, StoredHealth) {
        let remembered = self.file.load();
        let mut kept = HealthState::default();
        // Counted as found at the start: a GPU must show anew that it has recovered.
        kept.book.remember(Duration::ZERO, remembered.gpus.clone());
        kept.places = remembered
            .places
            .iter()
            .map(|(gpu, id, place)| ((gpu.clone(), *id), *place))
            .collect();
        kept.slots.clone_from(&remembered.slots);
        (kept, remembered)
    }

    /// Notes where the GPUs are.
    fn place_gpus(&self, kept: &mut HealthState) {
        let seen = self.seen.borrow();
        if let Some(inventory) = &seen.inventory {
            let listed = inventory.gpus.iter();
            let listed = listed.map(|(gpu, read)| (gpu.clone(), read.facts.pci_address));
            slots::see(&mut kept.slots, listed.collect());
        }
    }

    /// Returns the state of the driver, and whether its events can be heard.
    fn driver_state(&mut self) -> (DriverState, bool) {
        let seen = self.seen.borrow_and_update();
        let inventory = seen.inventory.as_ref();
        let listed = inventory.into_iter().flat_map(|inventory| {
            let unreadable = inventory.problems.iter().map(|problem| &problem.gpu);
            inventory.gpus.keys().chain(unreadable).cloned()
        });
        let usable = inventory.is_some() && seen.released.is_none();
        let driver = DriverState {
            usable,
            released: seen.released.is_some(),
            listed: listed.collect(),
        };
        (driver, usable && seen.problem.is_none())
    }

    /// Saves what has been learnt from events since it was last saved.
    async fn remember(&self, kept: &HealthState, saved: &mut StoredHealth) {
        // Written when it changes, not when it is reported: a restart comes at any time.
        let gpus = kept.book.remembered();
        let known = |gpu: &GpuUuid, id: &GpuInstanceId| {
            gpus.get(gpu)
                .is_some_and(|remembered| remembered.partitions.contains_key(id))
        };
        let places = kept.places.iter().filter(|((gpu, id), _)| known(gpu, id));
        let places = places
            .map(|((gpu, id), place)| (gpu.clone(), *id, *place))
            .collect();
        let memory = StoredHealth {
            gpus,
            places,
            slots: kept.slots.clone(),
        };
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

    /// Takes in what was heard. Returns whether a poll may explain it.
    async fn hear(&mut self, kept: &mut HealthState, heard: Heard, now: Duration) -> bool {
        // Phase 1: can events be heard at all? GPUs without them are reported, since a fault of
        // them is found late.
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
        // Phase 2: the places of instances, read once for all events and only if one names an
        // instance.
        let placed = events
            .events
            .iter()
            .any(|event| event.gpu_instance.is_some());
        let held = if placed {
            // Records that cannot be read leave the inventory to name the place.
            held_now(&self.executor).await.unwrap_or_default()
        } else {
            Vec::new()
        };
        for event in events.events {
            // Phase 3: event by event, each reported before the next: two may be about the same
            // fault.
            interesting |= HealthBook::is_of_interest(&self.rules, &event);
            self.count(&event);
            let event = self.placed(kept, event, &held);
            let changes = kept.book.event(&self.rules, now, &event);
            // An event that changes nothing waits for the first poll.
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
        let gpu = event
            .gpu
            .as_ref()
            .map(ToString::to_string)
            .unwrap_or_default();
        let instance = event.gpu_instance.map(|id| id.0);
        tracing::warn!(gpu, instance, xid, class = class.name(), "Xid");
        self.metrics.xid(gpu, xid, class);
    }

    /// The event of an instance whose place is not known is the whole GPU's.
    fn placed(&self, kept: &mut HealthState, event: GpuEvent, held: &[HeldDevice]) -> GpuEvent {
        let (Some(gpu), Some(id)) = (&event.gpu, event.gpu_instance) else {
            return event;
        };
        let place = self.place(gpu, id, held);
        match place {
            Some(place) => {
                kept.places.insert((gpu.clone(), id), place);
                event
            }
            None => GpuEvent {
                gpu_instance: None,
                ..event
            },
        }
    }

    /// Where a GPU instance is: by the records, which know those that were made a moment ago, or by
    /// the inventory.
    fn place(&self, gpu: &GpuUuid, id: GpuInstanceId, held: &[HeldDevice]) -> Option<Placement> {
        let recorded = held.iter().find_map(|held| match held.hold.target {
            Target::Partition(at)
                if held.hold.gpu == *gpu
                    && held.made.as_ref().is_some_and(|made| made.gi == id) =>
            {
                Some(at.placement)
            }
            _ => None,
        });
        recorded.or_else(|| {
            let seen = self.seen.borrow();
            let mig = seen.inventory.as_ref()?.gpus.get(gpu)?.mig.as_ref()?;
            mig.instances
                .iter()
                .flatten()
                .find(|instance| instance.id == id)
                .map(|instance| instance.placement)
        })
    }

    /// Begins to poll all GPUs that are listed or numbered.
    fn poll(&self, kept: &HealthState, listed: &BTreeSet<GpuUuid>) -> Polling {
        let (gpus, executor) = (self.gpus.clone(), self.executor.clone());
        // Those of before too: whatever comes back is found.
        let mut all: BTreeSet<GpuUuid> = listed.clone();
        all.extend(kept.slots.keys().cloned());
        let with_instances: BTreeSet<GpuUuid> =
            kept.places.keys().map(|(gpu, _)| gpu.clone()).collect();
        let polled = tokio::task::spawn_blocking(move || {
            let ordinals = executor.ordinals().unwrap_or_default();
            // GPUs that are not listed any more too: their answer says whether they are lost or
            // were taken out.
            all.extend(ordinals.iter().map(|(gpu, _)| gpu.clone()));
            // Records before the GPUs: a partition that is made in between is not looked for.
            let held = Partition::all_held(&executor);
            let polled = all.into_iter().map(|gpu| {
                let vitals = gpus.vitals(&gpu);
                let of_gpu: BTreeSet<&Partition> = held
                    .iter()
                    .flatten()
                    .filter(|partition| partition.gpu == gpu)
                    .collect();
                let asked = with_instances.contains(&gpu) || !of_gpu.is_empty();
                let living = asked.then(|| living(&*gpus, &gpu)).flatten();
                let gone = match &living {
                    // Without the records it is not known what claims have.
                    _ if held.is_none() => None,
                    None => of_gpu.is_empty().then(BTreeSet::new),
                    Some(living) => {
                        let mut gone = of_gpu;
                        gone.retain(|partition| !partition.is_among(living));
                        // A claim that was let go since the records were read has lost nothing.
                        let still = if gone.is_empty() {
                            Some(BTreeSet::new())
                        } else {
                            Partition::all_held(&executor)
                        };
                        still.map(|still| {
                            gone.retain(|partition| still.contains(*partition));
                            gone.into_iter().map(|partition| partition.place).collect()
                        })
                    }
                };
                let living = living
                    .filter(|_| with_instances.contains(&gpu))
                    .map(|living| living.iter().map(|instance| instance.id).collect());
                Polled {
                    gpu,
                    vitals,
                    living,
                    gone,
                }
            });
            polled.collect()
        });
        Polling {
            begun: Instant::now(),
            polled,
        }
    }

    /// Takes in the answers of a poll that began at `now`.
    fn looked(&mut self, kept: &mut HealthState, done: Option<Vec<Polled>>, now: Duration) {
        // Only a panic of the driver's code leaves nothing; the next look tries again.
        let polled = done.unwrap_or_default();
        let mut changes = Vec::new();
        for Polled {
            gpu,
            vitals,
            living,
            gone,
        } in polled
        {
            if let Some(gone) = gone {
                // Only answers replace what was known: a GPU that could not be asked keeps its lost
                // partitions.
                kept.gone.retain(|(of, _)| *of != gpu);
                kept.gone
                    .extend(gone.into_iter().map(|at| (gpu.clone(), at)));
            }
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
        let count = kept
            .no_events
            .as_ref()
            .map_or(kept.unmonitored.len(), |_| all());
        self.metrics
            .unmonitored
            .set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Publishes health changes and the current health view.
    fn report(&mut self, kept: &mut HealthState, changes: &[HealthChange]) {
        let sick = kept.book.gpus();
        // Places of instances that are well again are dropped: the driver gives their ids to
        // others.
        kept.places.retain(|(gpu, id), _| {
            sick.get(gpu)
                .is_some_and(|gpu| gpu.partitions.contains_key(id))
        });
        let changes = changes.iter().map(|change| {
            let place = change
                .partition
                .and_then(|id| kept.places.get(&(change.gpu.clone(), id)).copied());
            (change.clone(), place)
        });
        let changes = changes.collect();
        self.send(kept, Arc::new(view_of(kept, &self.rules)), changes);
    }

    fn send(
        &self,
        kept: &mut HealthState,
        view: Arc<HealthView>,
        changes: Vec<(HealthChange, Option<Placement>)>,
    ) {
        kept.sent = true;
        let health = Health {
            view,
            book: Arc::new(kept.clone()),
            changes,
        };
        // Without a brain the plugin ends.
        drop(self.facts.send(Report::Health(health).into()));
    }
}

fn view_of(kept: &HealthState, rules: &HealthRules) -> HealthView {
    let sick = kept.book.gpus().iter().filter(|(_, gpu)| !gpu.is_well());
    let sick = sick.map(|(uuid, gpu)| {
        let partitions = gpu.partitions.iter().filter_map(|(id, ailments)| {
            let place = kept.places.get(&(uuid.clone(), *id))?;
            Some((*place, ailments.keys().copied().collect()))
        });
        let sick = Sick {
            gpu: gpu.ailments.keys().copied().collect(),
            partitions: partitions.collect(),
            young: gpu.young(rules),
        };
        (uuid.clone(), sick)
    });
    let removed = kept.book.removed();
    let missing = removed.iter().filter(|gpu| kept.slots.contains_key(*gpu));
    HealthView {
        sick: sick.collect(),
        removed: removed.clone(),
        missing: missing.cloned().collect(),
        gone: kept.gone.clone(),
        unmonitored: unmonitored(kept),
    }
}

fn unmonitored(kept: &HealthState) -> BTreeMap<GpuUuid, Unmonitored> {
    let none = |code: GpuErrorCode, why: &str| Unmonitored {
        why: why.to_owned(),
        for_good: matches!(
            code,
            GpuErrorCode::NOT_SUPPORTED | GpuErrorCode::FUNCTION_NOT_FOUND
        ),
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
        Some((code, why)) => kept
            .book
            .gpus()
            .keys()
            .map(|gpu| (gpu.clone(), none(*code, why)))
            .collect(),
        None => {
            // A lost GPU is already reported as lost.
            let all = kept
                .unmonitored
                .iter()
                .filter(|(_, code)| **code != GpuErrorCode::GPU_IS_LOST);
            all.map(|(gpu, code)| (gpu.clone(), none(*code, &code.to_string())))
                .collect()
        }
    }
}
