//! [`step`]: one fact in, everything that follows from it out. Pure: time is a parameter, the next
//! wake-up an output, and what only the API knows is asked for in the outputs and comes back as a
//! fact.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_forms::{Definition, FORMS};
use divvy_model::{
    CapsPromise, DeviceKind, DeviceName, GpuUuid, Grant, Inventory, Ordinals, Sharing, TargetKind,
};

use crate::taints::{Hazards, foreign};
use crate::withdrawal::{DeviceState, Observed};
use crate::world::{Ask, Fact, Records, World};
use crate::{
    Carved, Feature, Finding, GpuRules, HealthView, Input, Modes, NodeFacts, OneMode, Pool,
    Resolved, ServerFeatures, carve, resolve, validate,
};

/// For how long an allocation of a device that was withdrawn proves nothing about the scheduler.
const WITHDRAWN_LATELY: Duration = Duration::from_mins(10);

/// The results of all facts so far.
#[derive(Debug, Clone, Default)]
pub struct Outputs {
    /// The pool that is to be published; `None` before enough is known.
    pub pool: Option<Arc<Pool>>,
    /// The policies' decisions about the GPUs.
    pub resolved: Arc<Resolved>,
    /// Everything that people should know of the offer.
    pub findings: BTreeSet<Finding>,
    /// Why a GPU may be published in one mode only.
    pub one_mode: Option<OneMode>,
    /// True if more modes than one were asked for.
    pub several_asked: bool,
    /// The changes that prepare may make, by GPU. A GPU that is not here keeps what was granted
    /// last.
    pub grants: BTreeMap<GpuUuid, Grant>,
    /// GPUs that are gone and whose number no allocation refers to.
    pub forget: BTreeSet<GpuUuid>,
    /// The API server's version that counts.
    pub kubernetes: String,
    /// The question to ask the API now. The answer is a [`Fact::Answer`].
    pub ask: Option<Ask>,
    /// When to call [`step`] with [`Fact::Time`] at the latest, if no other fact comes.
    pub wake_at: Option<Duration>,
}

/// Takes one fact in and says what follows. `now` is any clock that does not go back.
pub fn step(world: &mut World, fact: Fact, now: Duration) -> Outputs {
    world.learn(fact, now);
    let is_due = world.memory.wake_at.is_some_and(|at| at <= now);
    if std::mem::take(&mut world.memory.changed) || is_due {
        // The decision says anew when the next is due.
        world.memory.wake_at = None;
        world.decide(now);
    }
    world.outputs()
}

/// A decision: what is known of the node, and what was worked out from it on the way.
pub(crate) struct Look {
    pub(crate) inventory: Arc<Inventory>,
    pub(crate) records: Arc<Records>,
    pub(crate) resolved: Arc<Resolved>,
    pub(crate) hazards: Hazards,
    pub(crate) features: ServerFeatures,
    /// Devices in use by what is recorded. Admin access is no use.
    pub(crate) recorded: BTreeSet<DeviceName>,
    pub(crate) previous: Option<Arc<Pool>>,
}

impl Look {
    /// Returns the memory in MiB of a GPU that shares do not get.
    fn withheld_mib(&self, gpu: &GpuUuid, rules: &GpuRules) -> u64 {
        let caps = self.inventory.system.memory_caps;
        let found = self.inventory.gpus.get(gpu);
        found.map_or(rules.held_back_mib, |found| {
            rules.withheld_mib(&found.facts, caps)
        })
    }

    /// Returns whether rules offer partitions of a GPU. Without a policy it is what it was found
    /// as.
    fn offers_partitions(&self, gpu: &GpuUuid, modes: &Modes) -> bool {
        let is_on = || {
            let found = self.inventory.gpus.get(gpu);
            found.is_some_and(|found| found.facts.mig_mode.is_on())
        };
        match modes {
            Modes::AsIs => {
                let found = self.records.mig_found.get(gpu).copied();
                found.unwrap_or_else(is_on)
            }
            Modes::Only(offered) => offered
                .iter()
                .any(|form| form.target == TargetKind::Partition),
        }
    }

    /// Returns the forms that the node can publish.
    pub(crate) fn forms(&self) -> impl Iterator<Item = &'static dyn Definition> {
        let node = self.inventory.system.mps;
        let forms = FORMS.iter().copied();
        forms.filter(move |form| form.node_lacks(node).is_none())
    }

    /// Returns whether the node caps the memory of shares.
    fn caps_memory(&self) -> bool {
        self.inventory.system.memory_caps.lack().is_none()
    }

    /// Returns the ways of sharing a GPU whose shares are given out in a unit.
    fn with_units(&self) -> Vec<Sharing> {
        let node = self.inventory.system.mps;
        let of_gpus = FORMS
            .iter()
            .filter(|one| one.form().target == TargetKind::Gpu);
        let with_units = of_gpus.filter(|form| form.has_units(node));
        with_units.map(|one| one.form().sharing).collect()
    }

    fn carve(
        &self,
        world: &World,
        held: &BTreeSet<DeviceName>,
        leaving: &BTreeSet<DeviceName>,
    ) -> Carved {
        carve(&Input {
            node: &world.settings.node,
            inventory: &self.inventory,
            ordinals: &self.records.ordinals,
            capabilities: &world.memory.capabilities,
            rules: &self.resolved.rules,
            taints: &self.hazards.gpus,
            occupied: &self.hazards.places,
            held,
            leaving,
            recorded: &self.recorded,
            mig_found: &self.records.mig_found,
            share_units: &world.memory.share_units,
            mps_servers: &self.records.mps_servers,
            mps_away: world.inputs.mps_away,
            previous: self.previous.as_deref(),
            features: &self.features,
        })
    }

    /// Returns how long leaving devices stay published; zero where the API server drops taints,
    /// which mark them.
    pub(crate) fn leave(&self, world: &World) -> Duration {
        if self.features.supports(Feature::Taints) {
            world.settings.leave
        } else {
            Duration::ZERO
        }
    }
}

impl World {
    /// Decides what is offered, from the facts and the memory of earlier decisions. Does nothing
    /// before enough is known.
    ///
    /// Carves up to three times, each with more that must stay published:
    ///
    /// 1. with nothing: what rules, taints and the server allow by themselves;
    /// 2. with what claims hold: which devices are offered, and which stay for their holders only;
    /// 3. with what leaves since this moment: the pool.
    fn decide(&mut self, now: Duration) {
        let known = &self.inputs;
        let (Some(inventory), Some(records), Some(health)) = (
            known.inventory.clone(),
            known.records.clone(),
            known.health.clone(),
        ) else {
            return;
        };
        // The offer depends on the server's version, and on the policies: a pool made without them
        // would withdraw partitions for the seconds until they are known.
        if known.policies.is_none()
            || known.features.lowest().is_none()
            || known.neighbours.is_none()
        {
            return;
        }
        let look = self.look(inventory, records, &health, now);
        self.follow_units(&look);

        // First carving. All that follows is measured by it: a device or a GPU that it has is not
        // missing, and a holder of a device that it has needs no special care.
        let nothing = BTreeSet::new();
        let plain = look.carve(self, &nothing, &nothing);
        if self.memory.last.pool.is_none() && !self.may_begin(&look, &plain.pool, now) {
            return;
        }
        let in_plain: BTreeSet<&DeviceName> = claimable(&plain.pool).collect();

        // Missing GPUs before holders: as long as a GPU is missing the last list of claims matters,
        // since by it its number is forgotten. A list that does not matter is dropped.
        self.track_missing_gpus(&look, &in_plain, now);
        let held = self.holders_that_matter(&in_plain);
        drop(in_plain);
        if held.is_none() {
            self.memory.listed = None;
        }
        let held = held.unwrap_or_default();

        // Second carving. A device in use decides what else its GPU may be offered as, so this has
        // to be known before any device counts as offered.
        let offered = if held.is_empty() {
            plain
        } else {
            look.carve(self, &held, &nothing)
        };

        // Every device moves once, by the second carving: by the first, devices that only their
        // holders keep would count as gone; by the third, devices that leave would count as offered
        // and never go.
        self.move_on(&look, &offered, &held, now);

        // Third carving, after the move: a device that is not offered for the first time leaves
        // from now on and has to be in this pool, tainted. The scheduler may have chosen it a
        // moment ago, and counters are charged for published devices only.
        let leaving = self.leaving();
        let carved = if leaving.is_empty() {
            offered
        } else {
            look.carve(self, &held, &leaving)
        };
        let is_due = self.note_units(&look);

        // Grants and questions depend on the states after the move.
        self.grant(&look);
        self.plan_questions(&look, &held, now);
        if is_due {
            self.memory.wake_at = Some(now);
        }
        self.conclude(&look, carved);
    }

    /// Returns what is known of the GPUs now, rules and taints included.
    fn look(
        &mut self,
        inventory: Arc<Inventory>,
        records: Arc<Records>,
        health: &HealthView,
        now: Duration,
    ) -> Look {
        // Rules first: the mode lock, foreign instances and evictions depend on them.
        let resolved = self.resolve(&inventory, &records.ordinals);
        let memory = &mut self.memory;
        for (uuid, mig) in inventory
            .gpus
            .iter()
            .filter_map(|(uuid, gpu)| Some((uuid, gpu.mig.as_ref()?)))
        {
            if memory.capabilities.get(uuid) != Some(&mig.capabilities) {
                memory
                    .capabilities
                    .insert(uuid.clone(), mig.capabilities.clone());
            }
        }
        memory
            .capabilities
            .retain(|uuid, _| records.ordinals.of(uuid).is_some());
        memory
            .withdrawn
            .retain(|_, at| now.saturating_sub(*at) < WITHDRAWN_LATELY);
        // Before features and taints, which depend on the conflicts that last.
        memory.end_conflicts(&records);
        let lock = resolved
            .mode_lock
            .as_ref()
            .map_or(self.settings.mode_lock, |(lock, _)| *lock);
        let conflicts = &self.memory.conflicts;
        let conflict = conflicts.iter().any(|conflict| !conflict.withdrawn);
        let hazards = Hazards::of(self, &records, &inventory, health, &resolved);
        let uses = records.held.iter().filter(|held| held.hold.sharing.holds());
        Look {
            recorded: uses.map(|held| held.hold.device.clone()).collect(),
            features: self
                .inputs
                .features
                .with_mode_lock(lock)
                .with_conflict(conflict),
            previous: self.memory.last.pool.clone(),
            inventory,
            records,
            resolved,
            hazards,
        }
    }

    /// Returns the rules that the policies make for the GPUs, and keeps them.
    fn resolve(&mut self, inventory: &Inventory, ordinals: &Ordinals) -> Arc<Resolved> {
        let Some((policies, labels)) = &self.inputs.policies else {
            return Arc::default();
        };
        let node = NodeFacts {
            name: &self.settings.node,
            labels,
        };
        let before = self.memory.last.resolved.clone();
        let mut resolved = resolve(policies, &node, inventory, ordinals, &self.settings.rules);
        resolved.keep_unread(&before, inventory);
        if resolved == *before {
            return before;
        }
        let resolved = Arc::new(resolved);
        self.memory.last.resolved = resolved.clone();
        resolved
    }

    /// Moves every device to its next state.
    fn move_on(
        &mut self,
        look: &Look,
        carved: &Carved,
        held: &BTreeSet<DeviceName>,
        now: Duration,
    ) {
        let offered: BTreeSet<&DeviceName> = claimable(&carved.pool)
            .filter(|name| !carved.kept.contains(*name))
            .collect();
        let leave = look.leave(self);
        let memory = &mut self.memory;
        let asked = memory.listed.as_ref().map(|listed| listed.asked);
        // Devices that are known take their next state; the states of new ones are added below, so
        // that none moves twice in a step.
        let mut withdrawn = Vec::new();
        memory.devices.retain(|name, state| {
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
        memory
            .withdrawn
            .extend(withdrawn.into_iter().map(|name| (name, now)));
        for name in offered {
            memory
                .devices
                .entry(name.clone())
                .or_insert(DeviceState::Offered);
        }
        // Devices that a claim was given at the last moment, or by an earlier process, are
        // published again.
        for name in held {
            memory
                .devices
                .entry(name.clone())
                .or_insert(DeviceState::Kept);
        }
    }

    /// Forgets the units of shares that are gone, and takes up those that an earlier process
    /// published in another unit than the rules now have: claims may hold them.
    fn follow_units(&mut self, look: &Look) {
        let begins = self.memory.last.pool.is_none();
        let shares = look.with_units();
        for (gpu, rules) in &look.resolved.rules {
            let Some(ordinal) = look.records.ordinals.of(gpu) else {
                continue;
            };
            // Only before the first pool. Later the memory knows what this process has published
            // itself.
            let earlier = look.records.share_units.get(gpu).filter(|_| begins);
            if let Some(unit) = earlier.filter(|unit| **unit != rules.shares.unit) {
                self.memory.share_units.insert(gpu.clone(), *unit);
                for sharing in &shares {
                    let name = DeviceKind::of_gpu(ordinal, *sharing).device_name();
                    let state = self.memory.devices.entry(name);
                    state.or_insert(DeviceState::Offered);
                }
            } else if !self.memory.has_shares(ordinal, &shares) {
                self.memory.share_units.remove(gpu);
            }
        }
    }

    /// Notes the unit of shares that are published now. It stays until they are gone, whatever the
    /// rules say. Returns whether some have gone just now that come back in another unit.
    fn note_units(&mut self, look: &Look) -> bool {
        let mut come_back = false;
        let shares = look.with_units();
        for (gpu, rules) in &look.resolved.rules {
            let Some(ordinal) = look.records.ordinals.of(gpu) else {
                continue;
            };
            let unit = rules.shares.unit;
            if self.memory.has_shares(ordinal, &shares) {
                self.memory.share_units.entry(gpu.clone()).or_insert(unit);
            } else {
                come_back |= self
                    .memory
                    .share_units
                    .get(gpu)
                    .is_some_and(|earlier| *earlier != unit);
            }
        }
        come_back
    }

    fn leaving(&self) -> BTreeSet<DeviceName> {
        let leaving = self
            .memory
            .devices
            .iter()
            .filter(|(_, state)| matches!(state, DeviceState::Leaving { .. }));
        leaving.map(|(name, _)| name.clone()).collect()
    }

    /// Works out what prepare may do. Claims that have, or may have, something of what was offered
    /// earlier are served as was allowed then.
    fn grant(&mut self, look: &Look) {
        let withdrawing: BTreeSet<u32> = self
            .memory
            .devices
            .iter()
            .filter(|(_, state)| **state != DeviceState::Offered)
            .filter_map(|(name, _)| Some(DeviceKind::parse(name).ok()?.ordinal()))
            .collect();
        self.follow_caps(look);
        // While anything of a GPU is withdrawn, or may be held from before this process, "no" is
        // not said: a claim that has it is served as was allowed when it was offered.
        let grants = look.resolved.rules.iter().filter_map(|(gpu, rules)| {
            let may = matches!(rules.modes, Modes::Only(_));
            let ordinal = look.records.ordinals.of(gpu)?;
            let open = !self.memory.asking.answered || withdrawing.contains(&ordinal);
            let offers = look.offers_partitions(gpu, &rules.modes);
            let mut grant = Grant {
                may_change_mode: (may || !open).then_some(may),
                offers_partitions: (offers || !open).then_some(offers),
                share_unit: self.memory.share_units.get(gpu).copied(),
                share_reserved_mib: look.withheld_mib(gpu, rules),
                share_burst: rules.shares.burst,
                caps: self.caps_promise(look, gpu),
                ..Grant::default()
            };
            let facts = look.inventory.gpus.get(gpu).map(|found| &found.facts);
            for form in FORMS {
                form.grant(rules, facts, look.inventory.system.mps, &mut grant);
            }
            Some((gpu.clone(), grant))
        });
        let grants = grants.collect();
        self.memory.last.grants = grants;
    }

    /// Follows the promise to cap memory: it lasts as long as slices in the API say so, whatever
    /// the driver can do meanwhile.
    fn follow_caps(&mut self, look: &Look) {
        let memory = &mut self.memory;
        if look.caps_memory() {
            // Slices of before say nothing about those that promise it from now on.
            (memory.published, memory.uncapped) = (None, BTreeMap::new());
        }
        let Some(published) = &memory.published else {
            return;
        };
        for gpu in look.resolved.rules.keys() {
            let ordinal = look.records.ordinals.of(gpu);
            if ordinal.is_some_and(|ordinal| !published.capped.contains(&ordinal)) {
                memory.uncapped.entry(gpu.clone()).or_insert(published.at);
            }
        }
    }

    /// Returns the promise to cap the memory of shares of a GPU.
    fn caps_promise(&self, look: &Look, gpu: &GpuUuid) -> Option<CapsPromise> {
        if look.caps_memory() {
            return Some(CapsPromise::Given);
        }
        let at = *self.memory.uncapped.get(gpu)?;
        Some(CapsPromise::Ended { at })
    }

    /// Keeps the results of a decision.
    fn conclude(&mut self, look: &Look, carved: Carved) {
        // Findings before the pool: a pool that is not valid adds one, and the others are true of
        // it too.
        let mut findings: BTreeSet<Finding> = carved.findings.into_iter().collect();
        self.memory.name_claims(&look.records, &mut findings);
        let last = &mut self.memory.last;
        last.several_asked = findings
            .iter()
            .any(|one| matches!(one, Finding::OneMode { .. }));
        last.one_mode = look.features.one_mode();
        let why = last.one_mode.clone().filter(|_| last.several_asked);
        findings.extend(why.map(|why| Finding::OneModeForEach { why }));
        let foreign = foreign(&look.records, &look.resolved).cloned();
        findings.extend(foreign.map(|(gpu, at)| Finding::ForeignInstance { gpu, at }));
        // A pool that the API server would refuse in part is worse than the one before.
        if last.pool.as_deref() != Some(&carved.pool) {
            match validate(&carved.pool) {
                Ok(()) => last.pool = Some(Arc::new(carved.pool)),
                Err(error) => {
                    let error = error.to_string();
                    findings.insert(Finding::OverLimit { error });
                }
            }
        }
        last.findings = findings;
    }

    /// Returns the results of the last decision, and a question, once.
    fn outputs(&mut self) -> Outputs {
        let memory = &mut self.memory;
        let lowest = self.inputs.features.lowest();
        let last = &memory.last;
        let mut findings = last.resolved.findings();
        findings.extend(last.findings.iter().cloned());
        for (gpu, uses) in self.inputs.neighbours.iter().flatten() {
            findings.extend(uses.iter().map(|used| Finding::Neighbour {
                gpu: gpu.clone(),
                used: used.clone(),
            }));
        }
        Outputs {
            pool: last.pool.clone(),
            resolved: last.resolved.clone(),
            findings,
            one_mode: last.one_mode.clone(),
            several_asked: last.several_asked,
            grants: last.grants.clone(),
            forget: memory.forget.clone(),
            kubernetes: lowest
                .map(|version| version.to_string())
                .unwrap_or_default(),
            ask: memory.ask.take(),
            wake_at: memory.wake_at,
        }
    }
}

impl Resolved {
    /// Returns what people should know of the rules: also before there is a pool.
    fn findings(&self) -> BTreeSet<Finding> {
        let decides = self.by.iter().map(|(gpu, by)| Finding::RuleDecides {
            gpu: gpu.clone(),
            by: by.clone(),
        });
        let problems = self.problems.iter().cloned();
        decides
            .chain(problems.map(Finding::RuleWithoutEffect))
            .collect()
    }
}

/// Devices that claims can hold. Nothing is in the way of admin access.
fn claimable(pool: &Pool) -> impl Iterator<Item = &DeviceName> {
    let names = pool.devices().map(|device| &device.name);
    names.filter(|name| !DeviceKind::parse(name).is_ok_and(|kind| !kind.sharing.holds()))
}
