//! [`step`]: one fact in, everything that follows from it out. Pure: time is a parameter, the next wake-up an output, and
//! what only the API knows is asked for in the outputs and comes back as a fact.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_model::mig::{MigCapabilities, Placement};
use divvy_model::{DeviceKind, DeviceName, GpuUuid, HoldKind, Inventory, Ordinals};

use crate::taints::{Hazards, foreign};
use crate::withdrawal::{Seen, State};
use crate::world::{Ask, Conflict, Fact, ModeConflict, Records, World};
use crate::{
    Carved, Feature, HealthView, Input, Modes, NodeFacts, Note, Notice, OneMode, Partitioning, Pool,
    Resolved, ServerFeatures, carve_partitions, resolve, validate,
};

/// How often the API is asked at the start before something is published without an answer: the right to ask may be
/// missing.
const ASK_FIRST: u32 = 5;
/// For how long an allocation of a device that was withdrawn proves nothing about the scheduler.
const WITHDRAWN_LATELY: Duration = Duration::from_mins(10);
/// A number in device names is free again this many rounds of questions after its GPU has gone.
const ROUNDS_UNTIL_FORGOTTEN: u32 = 10;

/// What follows from all facts so far.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    /// What is to be published; `None` before enough is known.
    pub pool: Option<Arc<Pool>>,
    /// What the policies make of the GPUs.
    pub resolved: Arc<Resolved>,
    /// What is not published as it could be.
    pub notes: Arc<BTreeSet<Note>>,
    /// Why a GPU may be published in one mode only.
    pub one_mode: Option<OneMode>,
    /// Whether more modes than one were asked for.
    pub several_asked: bool,
    /// MIG instances made outside divvy that are in the way.
    pub foreign: Vec<(GpuUuid, Placement)>,
    /// Whether prepare may change the MIG mode of a GPU. One that is not here keeps what was granted last.
    pub grants: BTreeMap<GpuUuid, bool>,
    /// GPUs that are gone and whose number no allocation refers to.
    pub forget: BTreeSet<GpuUuid>,
    /// The API server's version that counts.
    pub kubernetes: String,
    /// What to ask the API now. The answer is a [`Fact::Answer`].
    pub ask: Option<Ask>,
    /// When to call [`step`] with [`Fact::Time`] at the latest, if no other fact comes.
    pub wake_at: Option<Duration>,
    /// What to log and to write as Events, each once.
    pub notices: Vec<Notice>,
}

/// Takes one fact in and says what follows. `now` is any clock that does not go back.
pub fn step(world: &mut World, fact: Fact, now: Duration) -> Outputs {
    world.learn(fact, now);
    let is_due = world.outputs.wake_at.is_some_and(|at| at <= now);
    if std::mem::take(&mut world.changed) || is_due {
        world.outputs.wake_at = None;
        world.decide(now);
    }
    let outputs = world.outputs.clone();
    world.outputs.ask = None;
    world.outputs.notices.clear();
    outputs
}

/// One decision: what is known of the node, and what was worked out from it on the way.
struct Look {
    inventory: Arc<Inventory>,
    records: Arc<Records>,
    resolved: Arc<Resolved>,
    hazards: Hazards,
    features: ServerFeatures,
    /// Devices in use by what is recorded. Admin access is no use.
    recorded: BTreeSet<DeviceName>,
    previous: Option<Arc<Pool>>,
}

impl Look {
    fn carve(&self, world: &World, held: &BTreeSet<DeviceName>, leaving: &BTreeSet<DeviceName>) -> Carved {
        let input = Input {
            node: &world.settings.node,
            inventory: &self.inventory,
            ordinals: &self.records.ordinals,
            taints: &self.hazards.gpus,
            held,
            leaving,
            recorded: &self.recorded,
            previous: self.previous.as_deref(),
            features: &self.features,
        };
        let partitioning = Partitioning {
            capabilities: &world.capabilities,
            rules: &self.resolved.rules,
            occupied: &self.hazards.places,
        };
        carve_partitions(&input, &partitioning)
    }

    /// For how long devices that leave stay: where taints are dropped nobody would see that they leave.
    fn leave(&self, world: &World) -> Duration {
        if self.features.supports(Feature::Taints) { world.settings.leave } else { Duration::ZERO }
    }
}

impl World {
    fn decide(&mut self, now: Duration) {
        let (Some(inventory), Some(records), Some(health)) =
            (self.inventory.clone(), self.records.clone(), self.health.clone())
        else {
            return;
        };
        // What may be offered depends on the server's version, and on the policies: a pool made without them would
        // withdraw partitions for the seconds until they are known.
        if self.policies.is_none() || self.features.lowest().is_none() {
            return;
        }
        let look = self.look(inventory, records, &health, now);
        let nothing = BTreeSet::new();
        let plain = look.carve(self, &nothing, &nothing);
        if self.outputs.pool.is_none() && !self.may_begin(&look, &plain.pool, now) {
            return;
        }
        let in_plain: BTreeSet<&DeviceName> = claimable(&plain.pool).collect();
        self.see_gone(&look, &in_plain, now);
        let held = self.held_now(&in_plain);
        drop(in_plain);
        let offered = if held.is_empty() { plain } else { look.carve(self, &held, &nothing) };
        self.move_on(&look, &offered, &held, now);
        let leaving = self.leaving();
        let carved = if leaving.is_empty() { offered } else { look.carve(self, &held, &leaving) };
        self.grant(&look);
        self.plan_questions(&look, &held, now);
        self.put_out(&look, carved);
    }

    /// What is known of the GPUs now, rules and taints included.
    fn look(
        &mut self,
        inventory: Arc<Inventory>,
        records: Arc<Records>,
        health: &HealthView,
        now: Duration,
    ) -> Look {
        let resolved = self.resolve(&inventory, &records.ordinals);
        for (uuid, mig) in inventory.gpus.iter().filter_map(|(uuid, gpu)| Some((uuid, gpu.mig.as_ref()?))) {
            if self.capabilities.get(uuid) != Some(&mig.capabilities) {
                self.capabilities.insert(uuid.clone(), mig.capabilities.clone());
            }
        }
        self.capabilities.retain(|uuid, _| records.ordinals.of(uuid).is_some());
        self.withdrawn.retain(|_, at| now.saturating_sub(*at) < WITHDRAWN_LATELY);
        self.end_conflicts(&records);
        let lock = resolved.mode_lock.as_ref().map_or(self.settings.mode_lock, |(lock, _)| *lock);
        let conflict = self.conflicts.iter().any(|conflict| !conflict.withdrawn);
        let hazards = Hazards::of(self, &records, &inventory, health, &resolved);
        let uses = records.held.iter().filter(|held| held.hold.kind != HoldKind::Admin);
        Look {
            recorded: uses.map(|held| held.hold.device.clone()).collect(),
            features: self.features.with_mode_lock(lock).with_conflict(conflict),
            previous: self.outputs.pool.clone(),
            inventory,
            records,
            resolved,
            hazards,
        }
    }

    /// What the policies make of the GPUs; said where it is new.
    fn resolve(&mut self, inventory: &Inventory, ordinals: &Ordinals) -> Arc<Resolved> {
        let Some((policies, labels)) = &self.policies else { return Arc::default() };
        let node = NodeFacts { name: &self.settings.node, labels };
        let before = self.outputs.resolved.clone();
        let mut resolved = resolve(policies, &node, inventory, ordinals, &self.settings.rules);
        resolved.keep_unread(&before, inventory);
        if resolved == *before {
            return before;
        }
        self.outputs.notices.extend(Notice::of_rules(&before, &resolved, &self.settings.node));
        self.outputs.resolved = Arc::new(resolved);
        self.outputs.resolved.clone()
    }

    /// Forgets conflicts that are over: the claim does not have its device any more, or is served after all, or what used
    /// the GPU is gone. Its record may be read a moment after the conflict is reported.
    fn end_conflicts(&mut self, records: &Records) {
        let listed = self.listed.as_ref();
        self.conflicts.retain_mut(|conflict| {
            let Conflict { of: ModeConflict { claim, device, gpu, .. }, since, .. } = &*conflict;
            let has_it = listed.is_none_or(|listed| {
                listed.asked < *since
                    || listed.holders.get(device).is_some_and(|claims| claims.contains(claim))
            });
            let mut on_it = records.held.iter().filter(|held| {
                held.hold.gpu == *gpu && held.hold.kind != HoldKind::Admin && held.hold.device != *device
            });
            let is_served = records.held.iter().any(|held| held.hold.claim == claim.uid);
            let in_use = on_it.any(|held| held.hold.claim != claim.uid);
            let was_in_use = conflict.in_use;
            conflict.in_use |= in_use;
            has_it && !is_served && (in_use || !was_in_use)
        });
    }

    /// Whether a first pool may be published. Claims may hold what an earlier process published and this one would not,
    /// so the API is asked first.
    fn may_begin(&mut self, look: &Look, plain: &Pool, now: Duration) -> bool {
        let ordinals = &look.records.ordinals;
        if look.inventory.gpus.keys().any(|gpu| ordinals.of(gpu).is_none()) {
            return false;
        }
        if self.asking.answered || !offers_less_than_it_may(ordinals, &self.capabilities, plain) {
            return true;
        }
        if self.asking.unanswered >= ASK_FIRST {
            for device in &look.recorded {
                self.devices.entry(device.clone()).or_insert(State::Offered);
            }
            return true;
        }
        self.ask_at(now, now, true);
        false
    }

    /// Notes numbered GPUs that NVML does not list and that have no device. Their numbers are free again when no
    /// allocation can refer to them any more.
    fn see_gone(&mut self, look: &Look, in_plain: &BTreeSet<&DeviceName>, now: Duration) {
        let numbers = |devices: &mut dyn Iterator<Item = &DeviceName>| -> BTreeSet<u32> {
            devices.filter_map(|name| Some(DeviceKind::parse(name).ok()?.ordinal())).collect()
        };
        let published = numbers(&mut in_plain.iter().copied());
        let listed = |gpu: &GpuUuid| {
            look.inventory.gpus.contains_key(gpu) || look.inventory.problems.iter().any(|p| p.gpu == *gpu)
        };
        let gone: BTreeMap<GpuUuid, u32> = look
            .records
            .ordinals
            .iter()
            .filter(|(gpu, ordinal)| !listed(gpu) && !published.contains(ordinal))
            .map(|(gpu, ordinal)| (gpu.clone(), ordinal))
            .collect();
        self.gone.retain(|gpu, _| gone.contains_key(gpu));
        for gpu in gone.keys() {
            self.gone.entry(gpu.clone()).or_insert(now);
        }
        let held = self.listed.iter().flat_map(|listed| listed.holders.keys());
        let referred = numbers(&mut self.devices.keys().chain(held));
        let asked = self.listed.as_ref().map(|listed| listed.asked);
        let patience = self.patience();
        let may_go = |gpu: &&GpuUuid| {
            let due = self.gone.get(*gpu).map(|since| since.saturating_add(patience));
            asked.zip(due).is_some_and(|(asked, due)| asked >= due)
                && gone.get(*gpu).is_some_and(|ordinal| !referred.contains(ordinal))
        };
        let earlier = self.outputs.forget.iter().filter(|gpu| gone.contains_key(*gpu));
        self.outputs.forget = earlier.chain(gone.keys().filter(may_go)).cloned().collect();
    }

    fn patience(&self) -> Duration {
        self.settings.ask_again * ROUNDS_UNTIL_FORGOTTEN
    }

    /// What claims have by the last list, for as long as that matters.
    fn held_now(&mut self, in_plain: &BTreeSet<&DeviceName>) -> BTreeSet<DeviceName> {
        let Some(listed) = &self.listed else { return BTreeSet::new() };
        let withdrawing =
            self.devices.iter().any(|(name, state)| *state != State::Offered || !in_plain.contains(name));
        let matters = withdrawing
            || !self.conflicts.is_empty()
            || !self.gone.is_empty()
            || listed.holders.keys().any(|device| !in_plain.contains(device));
        if matters {
            return listed.devices();
        }
        self.listed = None;
        BTreeSet::new()
    }

    /// Moves every device to its next state.
    fn move_on(&mut self, look: &Look, carved: &Carved, held: &BTreeSet<DeviceName>, now: Duration) {
        let offered: BTreeSet<&DeviceName> =
            claimable(&carved.pool).filter(|name| !carved.kept.contains(*name)).collect();
        let asked = self.listed.as_ref().map(|listed| listed.asked);
        let leave = look.leave(self);
        let mut withdrawn = Vec::new();
        self.devices.retain(|name, state| {
            let seen = Seen {
                offered: offered.contains(name),
                listed: asked.map(|asked| (asked, held.contains(name))),
                leave,
                now,
            };
            match state.next(&seen) {
                Some(next) => *state = next,
                None => withdrawn.push(name.clone()),
            }
            seen.offered || !withdrawn.contains(name)
        });
        self.withdrawn.extend(withdrawn.into_iter().map(|name| (name, now)));
        for name in offered {
            self.devices.entry(name.clone()).or_insert(State::Offered);
        }
        // What a claim was given at the last moment, or by an earlier process, is published again.
        for name in held {
            self.devices.entry(name.clone()).or_insert(State::Kept);
        }
    }

    fn leaving(&self) -> BTreeSet<DeviceName> {
        let leaving = self.devices.iter().filter(|(_, state)| matches!(state, State::Leaving { .. }));
        leaving.map(|(name, _)| name.clone()).collect()
    }

    /// What prepare may do. Claims that have, or may have, something of what was offered earlier are served as was
    /// allowed then.
    fn grant(&mut self, look: &Look) {
        let withdrawing: BTreeSet<u32> = self
            .devices
            .iter()
            .filter(|(_, state)| **state != State::Offered)
            .filter_map(|(name, _)| Some(DeviceKind::parse(name).ok()?.ordinal()))
            .collect();
        let grants = look.resolved.rules.iter().filter_map(|(gpu, rules)| {
            let may = matches!(rules.modes, Modes::Only(_));
            let ordinal = look.records.ordinals.of(gpu)?;
            let open = !self.asking.answered || withdrawing.contains(&ordinal);
            (may || !open).then(|| (gpu.clone(), may))
        });
        self.outputs.grants = grants.collect();
    }

    /// When the API is to be asked next who holds what.
    fn plan_questions(&mut self, look: &Look, held: &BTreeSet<DeviceName>, now: Duration) {
        let asked = self.listed.as_ref().map(|listed| listed.asked);
        let again = asked.map_or(now, |asked| asked.saturating_add(self.settings.ask_again));
        let unless_asked = |at: Duration| if asked.is_some_and(|asked| asked >= at) { again } else { at };
        let leave = look.leave(self);
        let leaving = self.devices.values().filter_map(|state| state.may_be_asked_about_at(leave));
        // While claims use them here, the API need not be asked: all nodes that a policy has changed would list all
        // claims of the cluster again and again while their pods run.
        let kept = self.devices.iter().filter(|(name, state)| {
            let idle = !look.recorded.contains(*name);
            idle && (**state == State::Kept || (held.contains(*name) && look.features.one_mode().is_some()))
        });
        let conflicts = self.conflicts.iter().map(|conflict| unless_asked(conflict.since));
        let patience = self.patience();
        let gone = self.gone.iter().filter(|(gpu, _)| !self.outputs.forget.contains(*gpu));
        let gone = gone.map(|(_, since)| unless_asked(since.saturating_add(patience)));
        let at = leaving.chain(kept.map(|_| again)).chain(conflicts).chain(gone).min();
        if let Some(at) = at {
            self.ask_at(at, now, false);
        }
    }

    /// Asks now, or wakes up then.
    fn ask_at(&mut self, at: Duration, now: Duration, slices: bool) {
        if self.asking.since.is_some() {
            return;
        }
        let at = self.asking.failed.map_or(at, |failed| at.max(failed.saturating_add(self.settings.retry)));
        if at <= now {
            self.asking.since = Some(now);
            self.outputs.ask = Some(Ask { slices });
        } else {
            self.outputs.wake_at = Some(at);
        }
    }

    /// Hands out what was decided, and says what is new.
    fn put_out(&mut self, look: &Look, carved: Carved) {
        // A new GPU has its number in a moment.
        let has_number = |note: &Note| !matches!(note, Note::NoOrdinal { .. });
        let mut notes: BTreeSet<Note> = carved.notes.into_iter().filter(has_number).collect();
        self.name_claims(&look.records, &mut notes);
        let out = &mut self.outputs;
        out.several_asked = notes.iter().any(|note| matches!(note, Note::OneMode { .. }));
        out.one_mode = look.features.one_mode();
        out.kubernetes = look.features.lowest().map(|version| version.to_string()).unwrap_or_default();
        out.foreign = foreign(&look.records, &look.resolved).cloned().collect();
        let one_mode = out.one_mode.clone().filter(|_| out.several_asked);
        out.notices.extend(self.said.foreign(&out.foreign));
        out.notices.extend(self.said.one_mode(one_mode));
        out.notices.extend(self.said.notes(&notes));
        out.notes = Arc::new(notes);
        if out.pool.as_deref() == Some(&carved.pool) {
            return;
        }
        match validate(&carved.pool) {
            Ok(()) => out.pool = Some(Arc::new(carved.pool)),
            Err(error) => out.notices.push(Notice::fault(&error)),
        }
    }

    /// Which claims have been given one GPU twice. The claim that was refused at prepare has no record.
    fn name_claims(&self, records: &Records, notes: &mut BTreeSet<Note>) {
        for conflict in &self.conflicts {
            let Some(gpu) = records.ordinals.of(&conflict.of.gpu) else { continue };
            let is_noted = |note: &Note| matches!(note, Note::GivenTwice { gpu: known, .. } if *known == gpu);
            if !notes.iter().any(is_noted) {
                let devices = format!("{}, {}", conflict.of.device, conflict.of.held);
                notes.insert(Note::GivenTwice { gpu, devices, claims: Vec::new() });
            }
        }
        *notes = std::mem::take(notes)
            .into_iter()
            .map(|note| match note {
                Note::GivenTwice { gpu, devices, .. } => {
                    Note::GivenTwice { gpu, devices, claims: self.claims_on(records, gpu) }
                }
                other => other,
            })
            .collect();
    }

    /// The claims that have a GPU or a part of it, each with its device: by the API, by records, and by what was refused.
    fn claims_on(&self, records: &Records, ordinal: u32) -> Vec<String> {
        let of_it =
            |device: &DeviceName| DeviceKind::parse(device).is_ok_and(|kind| kind.ordinal() == ordinal);
        let listed = self.listed.iter().flat_map(|listed| &listed.holders);
        let listed =
            listed.flat_map(|(device, claims)| claims.iter().map(move |claim| (&claim.name, device)));
        let recorded = records.held.iter().filter(|held| held.hold.kind != HoldKind::Admin);
        let recorded = recorded.map(|held| (&held.claim, &held.hold.device));
        let conflicts = self.conflicts.iter().map(|conflict| &conflict.of);
        let refused = conflicts.flat_map(|of| [(&of.claim.name, &of.device), (&of.holder.name, &of.held)]);
        let all: BTreeSet<_> =
            listed.chain(recorded).chain(refused).filter(|(_, device)| of_it(device)).collect();
        let is_refused =
            |claim: &String| self.conflicts.iter().any(|conflict| conflict.of.claim.name == *claim);
        all.into_iter()
            .map(|(claim, device)| {
                let refused = if is_refused(claim) { ", refused at prepare" } else { "" };
                format!("{claim} has {device}{refused}")
            })
            .collect()
    }
}

/// Devices that claims can hold. Nothing is in the way of admin access.
fn claimable(pool: &Pool) -> impl Iterator<Item = &DeviceName> {
    let names = pool.devices().map(|device| &device.name);
    names.filter(|name| !matches!(DeviceKind::parse(name), Ok(DeviceKind::Admin { .. })))
}

/// Whether a numbered GPU is not offered as all that it may have been offered as. It may be held as such from before this
/// process began.
fn offers_less_than_it_may(
    ordinals: &Ordinals,
    capabilities: &BTreeMap<GpuUuid, MigCapabilities>,
    pool: &Pool,
) -> bool {
    let kinds: BTreeSet<_> = pool.devices().filter_map(|d| DeviceKind::parse(&d.name).ok()).collect();
    let partitions: BTreeSet<_> = kinds
        .iter()
        .filter_map(|kind| match kind {
            DeviceKind::Partition(name) if !name.is_static => Some((name.ordinal, name.profile, name.start)),
            _ => None,
        })
        .collect();
    // Each of them: a policy may have left out profiles only.
    let cut = |gpu: &GpuUuid, ordinal: u32| {
        let profiles = capabilities.get(gpu).into_iter().flat_map(MigCapabilities::profiles);
        let mut places = profiles.flat_map(|p| p.placements.iter().map(|place| (p.id, place.start)));
        places.all(|(profile, start)| partitions.contains(&(ordinal, profile, start)))
    };
    ordinals.iter().any(|(gpu, ordinal)| {
        !kinds.contains(&DeviceKind::Whole { ordinal })
            || !kinds.contains(&DeviceKind::Share { ordinal })
            || !cut(gpu, ordinal)
    })
}
