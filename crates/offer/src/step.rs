//! [`step`]: one fact in, everything that follows from it out. Pure: time is a parameter, the next wake-up an output, and
//! what only the API knows is asked for in the outputs and comes back as a fact.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_model::mig::Placement;
use divvy_model::{DeviceKind, DeviceName, GpuUuid, Grant, HoldKind, Inventory, Ordinals};

use crate::taints::{Hazards, foreign};
use crate::withdrawal::{DeviceState, Observed};
use crate::world::{Ask, Fact, Records, World};
use crate::{
    Carved, Feature, HealthView, Input, Modes, NodeFacts, Note, Notice, OneMode, Pool, Resolved,
    ServerFeatures, carve, resolve, validate,
};

/// For how long an allocation of a device that was withdrawn proves nothing about the scheduler.
const WITHDRAWN_LATELY: Duration = Duration::from_mins(10);
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
    pub grants: BTreeMap<GpuUuid, Grant>,
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
pub(crate) struct Situation {
    pub(crate) inventory: Arc<Inventory>,
    pub(crate) records: Arc<Records>,
    pub(crate) resolved: Arc<Resolved>,
    pub(crate) hazards: Hazards,
    pub(crate) features: ServerFeatures,
    /// Devices in use by what is recorded. Admin access is no use.
    pub(crate) recorded: BTreeSet<DeviceName>,
    pub(crate) previous: Option<Arc<Pool>>,
}

impl Situation {
    fn carve(&self, world: &World, held: &BTreeSet<DeviceName>, leaving: &BTreeSet<DeviceName>) -> Carved {
        carve(&Input {
            node: &world.settings.node,
            inventory: &self.inventory,
            ordinals: &self.records.ordinals,
            capabilities: &world.capabilities,
            rules: &self.resolved.rules,
            taints: &self.hazards.gpus,
            occupied: &self.hazards.places,
            held,
            leaving,
            recorded: &self.recorded,
            previous: self.previous.as_deref(),
            features: &self.features,
        })
    }

    /// How long leaving devices stay published; zero where the API server drops taints, which mark them.
    pub(crate) fn leave(&self, world: &World) -> Duration {
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
    ) -> Situation {
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
        Situation {
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

    /// Moves every device to its next state.
    fn move_on(&mut self, look: &Situation, carved: &Carved, held: &BTreeSet<DeviceName>, now: Duration) {
        let offered: BTreeSet<&DeviceName> =
            claimable(&carved.pool).filter(|name| !carved.kept.contains(*name)).collect();
        let asked = self.listed.as_ref().map(|listed| listed.asked);
        let leave = look.leave(self);
        let mut withdrawn = Vec::new();
        self.devices.retain(|name, state| {
            let seen = Observed {
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
            self.devices.entry(name.clone()).or_insert(DeviceState::Offered);
        }
        // What a claim was given at the last moment, or by an earlier process, is published again.
        for name in held {
            self.devices.entry(name.clone()).or_insert(DeviceState::Kept);
        }
    }

    fn leaving(&self) -> BTreeSet<DeviceName> {
        let leaving = self.devices.iter().filter(|(_, state)| matches!(state, DeviceState::Leaving { .. }));
        leaving.map(|(name, _)| name.clone()).collect()
    }

    /// What prepare may do. Claims that have, or may have, something of what was offered earlier are served as was
    /// allowed then.
    fn grant(&mut self, look: &Situation) {
        let withdrawing: BTreeSet<u32> = self
            .devices
            .iter()
            .filter(|(_, state)| **state != DeviceState::Offered)
            .filter_map(|(name, _)| Some(DeviceKind::parse(name).ok()?.ordinal()))
            .collect();
        let grants = look.resolved.rules.iter().filter_map(|(gpu, rules)| {
            let may = matches!(rules.modes, Modes::Only(_));
            let ordinal = look.records.ordinals.of(gpu)?;
            let open = !self.asking.answered || withdrawing.contains(&ordinal);
            let grant = Grant {
                may_change_mode: (may || !open).then_some(may),
                share_time_slice: rules.shares.time_slice,
            };
            Some((gpu.clone(), grant))
        });
        self.outputs.grants = grants.collect();
    }

    /// Hands out what was decided, and says what is new.
    fn put_out(&mut self, look: &Situation, carved: Carved) {
        let mut notes: BTreeSet<Note> = carved.notes.into_iter().collect();
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
}

/// Devices that claims can hold. Nothing is in the way of admin access.
fn claimable(pool: &Pool) -> impl Iterator<Item = &DeviceName> {
    let names = pool.devices().map(|device| &device.name);
    names.filter(|name| !matches!(DeviceKind::parse(name), Ok(DeviceKind::Admin { .. })))
}
