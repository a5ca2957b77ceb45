//! [`carve`]: what a node publishes, as a function of what is known about it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use divvy_api::names::attributes;
use divvy_model::mig::{MigCapabilities, PartitionName, Placement};
use divvy_model::{DeviceKind, DeviceName, Gpu, GpuUuid, Inventory, Ordinals};

use crate::modes::{Choice, fits_mig_mode};
use crate::partition::{self, Source};
use crate::settle::Sets;
use crate::taints::{Standing, Subject};
use crate::validate::MAX_POOL_NAME;
use crate::whole::{self, Links};
use crate::{
    AttributeValue, CounterSet, Device, Feature, GpuRules, Note, OfferedMode, Pool, Rules, ServerFeatures,
    Taint, admin, layout, share,
};

/// Everything the published pool depends on.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// Its GPUs now.
    pub inventory: &'a Inventory,
    /// The number of each GPU, for its name.
    pub ordinals: &'a Ordinals,
    /// Profiles and placements of the GPUs that do MIG. The caller keeps the last known ones: without them a GPU's
    /// partitions are withdrawn, but for those that claims hold.
    pub capabilities: &'a BTreeMap<GpuUuid, MigCapabilities>,
    /// Rules by GPU; the default for the others.
    pub rules: &'a Rules,
    /// What health, fences, lingering claims and neighbours say, by GPU.
    pub taints: &'a BTreeMap<GpuUuid, Vec<Taint>>,
    /// Memory slices taken by instances for which the API has no claim (foreign or lingering ones): every device that
    /// overlaps them gets the taint.
    pub occupied: &'a BTreeMap<GpuUuid, Vec<(Placement, Taint)>>,
    /// Devices that ResourceClaims in the API have allocated, prepared or not, but for those with admin access. They stay
    /// published. Empty where the API was not asked.
    pub held: &'a BTreeSet<DeviceName>,
    /// Devices that stay published, tainted, until it is known whether a claim holds them.
    pub leaving: &'a BTreeSet<DeviceName>,
    /// Devices that are in use by what is recorded on the node: the mode that a GPU is in.
    pub recorded: &'a BTreeSet<DeviceName>,
    /// What was carved last: where a device is taken from when its GPU no longer answers.
    pub previous: Option<&'a Pool>,
    /// What the API server can store.
    pub features: &'a ServerFeatures,
}

impl<'a> Input<'a> {
    /// GPUs without rules that cannot be cut, that nothing is wrong with and of which no claim has anything.
    pub fn plain(
        node: &'a str,
        inventory: &'a Inventory,
        ordinals: &'a Ordinals,
        features: &'a ServerFeatures,
    ) -> Self {
        static NO_CAPABILITIES: BTreeMap<GpuUuid, MigCapabilities> = BTreeMap::new();
        static NO_RULES: Rules = BTreeMap::new();
        static NO_TAINTS: BTreeMap<GpuUuid, Vec<Taint>> = BTreeMap::new();
        static NOTHING_OCCUPIED: BTreeMap<GpuUuid, Vec<(Placement, Taint)>> = BTreeMap::new();
        static NO_DEVICES: BTreeSet<DeviceName> = BTreeSet::new();
        Self {
            node,
            inventory,
            ordinals,
            capabilities: &NO_CAPABILITIES,
            rules: &NO_RULES,
            taints: &NO_TAINTS,
            occupied: &NOTHING_OCCUPIED,
            held: &NO_DEVICES,
            leaving: &NO_DEVICES,
            recorded: &NO_DEVICES,
            previous: None,
            features,
        }
    }

    pub(crate) fn rules_of(&self, gpu: &GpuUuid) -> &'a GpuRules {
        static DEFAULT: LazyLock<GpuRules> = LazyLock::new(GpuRules::default);
        self.rules.get(gpu).unwrap_or(&DEFAULT)
    }

    /// Whether a device must stay published.
    pub(crate) fn stays(&self, device: &DeviceName) -> bool {
        self.held.contains(device) || self.leaving.contains(device)
    }

    /// Devices that must stay published, each once.
    pub(crate) fn staying(&self) -> impl Iterator<Item = &'a DeviceName> + use<'a> {
        self.held.union(self.leaving)
    }
}

/// What to publish, and what was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carved {
    /// What to publish.
    pub pool: Pool,
    /// What was left out and why; sorted, each once.
    pub notes: Vec<Note>,
    /// Devices that are published only because claims hold them, or may.
    pub kept: BTreeSet<DeviceName>,
}

/// The pool of a node: `<node>/divvy`. Not the bare node name, which most drivers use: schedulers before 1.36.4 keep
/// counters by pool name alone. No node is called so, because a node's name has no slash.
pub fn pool_name(node: &str) -> String {
    const SUFFIX: &str = "/divvy";
    if node.len() + SUFFIX.len() <= MAX_POOL_NAME {
        return format!("{node}{SUFFIX}");
    }
    // FNV-1a: stable between versions, and no attacker gains from a collision of own node names.
    let hash = node
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
    let kept = node.get(..MAX_POOL_NAME - SUFFIX.len() - 17).unwrap_or_default().trim_end_matches(['.', '-']);
    format!("{kept}-{hash:016x}{SUFFIX}")
}

/// Decides what a node publishes. Deterministic; whatever the input, the pool passes [`crate::validate`] as long as
/// the node's name is a node's name.
pub fn carve(input: &Input<'_>) -> Carved {
    let mut held_partitions: BTreeMap<u32, Vec<PartitionName>> = BTreeMap::new();
    for name in input.staying().filter_map(|name| PartitionName::parse(name).ok()) {
        held_partitions.entry(name.ordinal).or_default().push(name);
    }
    let mut run = Run {
        input,
        held_partitions,
        in_use: modes_of(input.held.union(input.recorded)),
        leaving: modes_of(input.leaving.iter()),
        recorded: modes_of(input.recorded.iter()),
        notes: Vec::new(),
        cards: BTreeMap::new(),
        kept: BTreeSet::new(),
    };
    run.gpus_that_answer();
    run.gpus_that_do_not();
    run.held_without_gpu();
    run.settle();
    let Run { mut notes, cards, kept, .. } = run;
    notes.sort();
    notes.dedup();
    Carved { pool: Pool { name: pool_name(input.node), slices: layout::slices(cards) }, notes, kept }
}

/// One run of [`carve`]: what goes in, what has come out so far. Partitions are in `partition.rs`, what is
/// only kept in `held.rs`, counters in `settle.rs`.
pub(crate) struct Run<'a> {
    pub(crate) input: &'a Input<'a>,
    /// Partitions that claims have, or may have, by the ordinal of their GPU.
    pub(crate) held_partitions: BTreeMap<u32, Vec<PartitionName>>,
    /// The modes in which GPUs are used or allocated, by ordinal.
    pub(crate) in_use: BTreeMap<u32, BTreeSet<OfferedMode>>,
    /// The modes in which GPUs may still be allocated.
    pub(crate) leaving: BTreeMap<u32, BTreeSet<OfferedMode>>,
    /// The modes in which GPUs are used, by what is recorded alone.
    pub(crate) recorded: BTreeMap<u32, BTreeSet<OfferedMode>>,
    pub(crate) notes: Vec<Note>,
    /// By ordinal.
    pub(crate) cards: BTreeMap<u32, GpuOffer>,
    pub(crate) kept: BTreeSet<DeviceName>,
}

/// What is published of one GPU.
#[derive(Debug, Default)]
pub(crate) struct GpuOffer {
    pub(crate) whole: Option<Device>,
    pub(crate) share: Option<Device>,
    pub(crate) partitions: Vec<Device>,
    pub(crate) admin: Option<Device>,
    pub(crate) counter_set: Option<CounterSet>,
    /// The set that the alternatives are to draw on if there are several; known of GPUs that answer.
    pub(crate) sets: Option<Sets>,
}

impl GpuOffer {
    /// All devices that claims can hold.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &Device> {
        self.whole.iter().chain(&self.share).chain(&self.partitions)
    }

    /// The same, to change.
    pub(crate) fn devices_mut(&mut self) -> impl Iterator<Item = &mut Device> {
        self.whole.iter_mut().chain(&mut self.share).chain(&mut self.partitions)
    }

    pub(crate) fn has(&self, name: &DeviceName) -> bool {
        self.devices().any(|device| device.name == *name)
    }
}

impl Run<'_> {
    /// Whether a device must stay published.
    pub(crate) fn stays(&self, device: &DeviceName) -> bool {
        self.input.stays(device)
    }

    pub(crate) fn card(&mut self, ordinal: u32) -> &mut GpuOffer {
        self.cards.entry(ordinal).or_default()
    }

    fn gpus_that_answer(&mut self) {
        let input = self.input;
        let domains = input.inventory.nvlink_domains();
        let pairs = input.inventory.nvlink_pairs();
        for (uuid, gpu) in &input.inventory.gpus {
            // A new GPU has its number in a moment.
            let Some(ordinal) = input.ordinals.of(uuid) else { continue };
            let links = Links {
                domain: domains.get(uuid).map(String::as_str),
                pair: pairs.get(uuid).map(String::as_str),
            };
            self.gpu(&ReadableGpu { ordinal, uuid, gpu }, &links);
        }
    }

    /// Publishes the alternatives of a GPU that answers.
    fn gpu(&mut self, one: &ReadableGpu<'_>, links: &Links<'_>) {
        let ReadableGpu { ordinal, uuid, gpu } = *one;
        let system = &self.input.inventory.system;
        let rules = self.input.rules_of(uuid);
        let caps = self.input.capabilities.get(uuid);
        let budget = caps.and_then(|caps| self.budget(ordinal, uuid, caps));
        let choice = self.choose(one, rules, budget.is_some());
        let lost = self.lost_partitions(ordinal, if budget.is_some() { caps } else { None });
        let (guard, unknown_held) = (choice.guard, !lost.is_empty());
        let subject = |mode| Subject { guard, unknown_held, ..Subject::offered(uuid, mode) };

        let mut whole = whole::device(ordinal, uuid, gpu, system, links, &mut self.notes);
        let share = share::device(ordinal, &whole, &gpu.facts, rules);
        if share.is_none() && choice.offers(OfferedMode::TimeSlicing) {
            self.notes.push(Note::NothingToShare { gpu: uuid.clone() });
        }
        let admin = admin::device(ordinal, &whole);
        if let Some(budget) = &budget {
            whole.capacity.extend(partition::engines(budget));
        }
        if let (Some(caps), Some(budget)) = (caps, &budget) {
            let offers = choice.offers(OfferedMode::Mig);
            let subject = subject(OfferedMode::Mig);
            self.partitions(&Source { one, caps, budget, rules, subject, offers });
        }
        for name in lost {
            let kind = DeviceKind::Partition(name);
            self.publish_kept(&kind, "its profile is unknown", subject(OfferedMode::Mig));
        }
        let shares = DeviceKind::Share { ordinal };
        if share.is_none() && self.stays(&shares.device_name()) {
            let why = "its rule reserves all of the GPU's memory";
            self.publish_kept(&shares, why, subject(OfferedMode::TimeSlicing));
        }
        if let Some(whole) = self.alternative(one, whole, &choice, subject(OfferedMode::Whole)) {
            self.card(ordinal).whole = Some(whole);
        }
        let share =
            share.and_then(|share| self.alternative(one, share, &choice, subject(OfferedMode::TimeSlicing)));
        if let Some(share) = share {
            self.card(ordinal).share = Some(share);
        }
        let Some(card) = self.cards.get_mut(&ordinal) else { return };
        card.sets = Some(Sets::new(ordinal, budget.as_ref()));
        // A GPU that is there for one claim as a whole can be had with admin access as it is.
        if card.share.is_some() || !card.partitions.is_empty() {
            let given = self.input.taints.get(uuid).map_or(&[][..], Vec::as_slice);
            let admin = self.tainted(uuid, admin, admin::taints(given), false);
            self.card(ordinal).admin = admin;
        }
    }

    /// The whole GPU or its shares, if they are offered or held.
    fn alternative(
        &mut self,
        one: &ReadableGpu<'_>,
        device: Device,
        choice: &Choice,
        mut subject: Subject<'_>,
    ) -> Option<Device> {
        let (stays, mode) = (self.stays(&device.name), subject.mode);
        if !choice.offers(mode) {
            if !stays {
                return None;
            }
            let on = one.gpu.facts.mig_mode.is_on();
            let (why, value) = if fits_mig_mode(mode, on) {
                (format!("this GPU is currently not offered as {}", mode.name()), "not-offered")
            } else {
                ("its MIG mode is on".to_owned(), "mig-mode-on")
            };
            self.keep(&device.name, why);
            subject.standing = Standing::Withdrawn(value);
        }
        self.tainted(one.uuid, device, self.taints(&subject), stays)
    }

    /// Notes that a device is published only because a claim holds it, or may.
    pub(crate) fn keep(&mut self, device: &DeviceName, why: String) {
        if self.stays(device) {
            self.kept.insert(device.clone());
        }
        if self.input.held.contains(device) {
            self.notes.push(Note::HeldAndWithdrawn { device: device.clone(), why });
        }
    }

    /// The device with its taints; `None` if it must not be given out and only a taint could say so.
    pub(crate) fn tainted(
        &mut self,
        uuid: &GpuUuid,
        mut device: Device,
        taints: Vec<Taint>,
        stays: bool,
    ) -> Option<Device> {
        device.taints = one_of_each(taints);
        if !self.input.features.supports(Feature::Taints) {
            let taints = std::mem::take(&mut device.taints);
            // Held: no other claim can get it, and an allocated device stays. Not held: it must not be allocated, and without
            // taints leaving it out is the only way.
            if let Some(taint) = taints.into_iter().next()
                && !stays
            {
                self.notes.push(Note::TaintsDropped { gpu: uuid.clone(), taint: taint.key });
                return None;
            }
        }
        Some(device)
    }
}

/// One taint for each key and effect, sorted: the first value stands for all.
fn one_of_each(mut taints: Vec<Taint>) -> Vec<Taint> {
    taints.sort();
    let mut seen = BTreeSet::new();
    taints.retain(|taint| seen.insert((taint.key.clone(), taint.effect)));
    taints
}

/// A GPU that answers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ReadableGpu<'a> {
    pub(crate) ordinal: u32,
    pub(crate) uuid: &'a GpuUuid,
    pub(crate) gpu: &'a Gpu,
}

/// The modes in which devices are of their GPUs.
fn modes_of<'a>(devices: impl Iterator<Item = &'a DeviceName>) -> BTreeMap<u32, BTreeSet<OfferedMode>> {
    let mut modes: BTreeMap<u32, BTreeSet<OfferedMode>> = BTreeMap::new();
    for kind in devices.filter_map(|name| DeviceKind::parse(name).ok()) {
        let mode = match kind {
            DeviceKind::Whole { .. } => OfferedMode::Whole,
            DeviceKind::Partition(_) => OfferedMode::Mig,
            DeviceKind::Share { .. } => OfferedMode::TimeSlicing,
            DeviceKind::Admin { .. } => continue,
        };
        modes.entry(kind.ordinal()).or_default().insert(mode);
    }
    modes
}

/// Whether a published device is of this card.
pub(crate) fn is_of(device: &Device, uuid: &GpuUuid) -> bool {
    matches!(device.attributes.get(attributes::GPU_UUID), Some(AttributeValue::String(text)) if text == uuid.as_str())
}

#[cfg(test)]
mod tests;
