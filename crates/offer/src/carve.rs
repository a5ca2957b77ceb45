//! [`carve`]: what a node publishes, as a function of what is known about it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use divvy_api::names::attributes;
use divvy_forms::definition;
use divvy_model::mig::{MigCapabilities, Placement};
use divvy_model::{
    DeviceKind, DeviceName, Form, GpuTarget, GpuUuid, Inventory, MpsServer, Ordinals, ShareUnit,
    TargetKind, fnv1a,
};

use crate::settle::CounterSets;
use crate::taints::add;
use crate::validate::MAX_POOL_NAME;
use crate::{
    AttributeValue, CounterSet, Device, Feature, Finding, GpuRules, Pool, Rules, ServerFeatures,
    Taint, layout,
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
    /// Profiles and placements of the GPUs that do MIG. The caller keeps the last known ones:
    /// without them a GPU's partitions are withdrawn, but for those that claims hold.
    pub capabilities: &'a BTreeMap<GpuUuid, MigCapabilities>,
    /// Rules by GPU; the default for the others.
    pub rules: &'a Rules,
    /// Taints by health, fences, lingering claims and neighbours, by GPU.
    pub taints: &'a BTreeMap<GpuUuid, Vec<Taint>>,
    /// Memory slices taken by instances for which the API has no claim (foreign or lingering ones):
    /// every device that overlaps them gets the taint.
    pub occupied: &'a BTreeMap<GpuUuid, Vec<(Placement, Taint)>>,
    /// Devices that ResourceClaims in the API have allocated, prepared or not, but for those with
    /// admin access. They stay published. Empty where the API was not asked.
    pub held: &'a BTreeSet<DeviceName>,
    /// Devices that stay published, tainted, until it is known whether a claim holds them.
    pub leaving: &'a BTreeSet<DeviceName>,
    /// Devices that are in use by what is recorded on the node: the mode that a GPU is in.
    pub recorded: &'a BTreeSet<DeviceName>,
    /// GPUs whose MIG mode divvy has changed, with the mode as it was found.
    pub mig_found: &'a BTreeMap<GpuUuid, bool>,
    /// The units in which shares are published, or may be held, by GPU. A GPU whose rules have
    /// another unit now gives no new shares until these are gone: amounts in two units cannot be
    /// added up.
    pub share_units: &'a BTreeMap<GpuUuid, ShareUnit>,
    /// The MPS servers that run, by GPU: while one with slots does, shares are published as it was
    /// started.
    pub mps_servers: &'a BTreeMap<GpuTarget, MpsServer>,
    /// True while no MPS supervisor answers: none of its servers can be started or asked.
    pub mps_away: bool,
    /// The pool that was carved last: devices of GPUs that no longer answer are taken from it.
    pub previous: Option<&'a Pool>,
    /// The features that the API server can store.
    pub features: &'a ServerFeatures,
}

impl<'a> Input<'a> {
    /// GPUs without rules that cannot be cut, that nothing is wrong with and of which no claim has
    /// anything.
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
        static NOTHING_CHANGED: BTreeMap<GpuUuid, bool> = BTreeMap::new();
        static NO_UNITS: BTreeMap<GpuUuid, ShareUnit> = BTreeMap::new();
        static NO_SERVERS: BTreeMap<GpuTarget, MpsServer> = BTreeMap::new();
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
            mig_found: &NOTHING_CHANGED,
            share_units: &NO_UNITS,
            mps_servers: &NO_SERVERS,
            mps_away: false,
            previous: None,
            features,
        }
    }

    pub(crate) fn rules_of(&self, gpu: &GpuUuid) -> &'a GpuRules {
        static DEFAULT: LazyLock<GpuRules> = LazyLock::new(GpuRules::default);
        self.rules.get(gpu).unwrap_or(&DEFAULT)
    }

    /// Returns the unit of the shares of a GPU: that of those that there are, or that of its rules.
    pub(crate) fn share_unit(&self, gpu: &GpuUuid) -> ShareUnit {
        let published = self.share_units.get(gpu).copied();
        published.unwrap_or(self.rules_of(gpu).shares.unit)
    }

    /// Returns whether devices of this form are given out in a unit: shares but for equal slots.
    pub(crate) fn has_units(&self, form: Form) -> bool {
        let node = self.inventory.system.mps;
        definition(form).is_some_and(|form| form.has_units(node))
    }

    /// Returns whether a device must stay published.
    pub(crate) fn stays(&self, device: &DeviceName) -> bool {
        self.held.contains(device) || self.leaving.contains(device)
    }

    /// Devices that must stay published, each once.
    pub(crate) fn staying(&self) -> impl Iterator<Item = &'a DeviceName> + use<'a> {
        self.held.union(self.leaving)
    }
}

/// A pool to publish, and what was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carved {
    /// The pool to publish.
    pub pool: Pool,
    /// Findings about what was left out and why; sorted, each once.
    pub findings: Vec<Finding>,
    /// Devices that are published only because claims hold them, or may.
    pub kept: BTreeSet<DeviceName>,
}

/// The pool of a node: `<node>/divvy`. Not the bare node name, which most drivers use: schedulers
/// before 1.36.4 keep counters by pool name alone. No node is called so, because a node's name has
/// no slash.
pub fn pool_name(node: &str) -> String {
    const SUFFIX: &str = "/divvy";
    if node.len() + SUFFIX.len() <= MAX_POOL_NAME {
        return format!("{node}{SUFFIX}");
    }
    // No attacker gains from a collision of names of nodes.
    let hash = fnv1a(node.bytes());
    // Room for a dash and the 16 digits of the hash.
    let kept = node
        .get(..MAX_POOL_NAME - SUFFIX.len() - 17)
        .unwrap_or_default()
        .trim_end_matches(['.', '-']);
    format!("{kept}-{hash:016x}{SUFFIX}")
}

/// Decides what a node publishes. Deterministic; whatever the input, the pool passes
/// [`crate::validate`] as long as the node's name is a node's name.
pub fn carve(input: &Input<'_>) -> Carved {
    let mut carving = Carving::new(input, BTreeMap::new());
    make(&mut carving);
    // Counters show that a GPU was given out twice once all of its devices are there. The taint
    // that follows is decided with all others, while devices are made: once more, which is rare.
    if !carving.over.is_empty() {
        carving = Carving::new(input, carving.over);
        make(&mut carving);
    }
    carving.findings.sort();
    carving.findings.dedup();
    Carved {
        pool: Pool {
            name: pool_name(input.node),
            slices: layout::slices(carving.cards),
        },
        findings: carving.findings,
        kept: carving.kept,
    }
}

/// A pool in the making: what goes in, what has come out so far. GPUs that answer are in
/// `readable.rs`, their partitions in `partition.rs`, devices that are only kept in `held.rs`,
/// counters in `settle.rs`, taints in `taints.rs`.
pub(crate) struct Carving<'a> {
    pub(crate) input: &'a Input<'a>,
    /// GPUs whose counters have shown that claims hold devices of them that exclude each other, by
    /// ordinal, and the names of these devices.
    pub(crate) given_twice: BTreeMap<u32, String>,
    /// Partitions and shares of them that claims have, or may have, by the ordinal of their GPU.
    pub(crate) held_partitions: BTreeMap<u32, Vec<DeviceKind>>,
    /// The modes in which GPUs are used or allocated, by ordinal.
    pub(crate) in_use: BTreeMap<u32, BTreeSet<Form>>,
    /// The modes in which GPUs may still be allocated.
    pub(crate) leaving: BTreeMap<u32, BTreeSet<Form>>,
    /// The modes in which GPUs are used, by what is recorded alone.
    pub(crate) recorded: BTreeMap<u32, BTreeSet<Form>>,
    pub(crate) findings: Vec<Finding>,
    /// By ordinal.
    pub(crate) cards: BTreeMap<u32, GpuOffer>,
    pub(crate) kept: BTreeSet<DeviceName>,
    /// The result that `given_twice` of the next carving is made of.
    pub(crate) over: BTreeMap<u32, String>,
}

impl<'a> Carving<'a> {
    fn new(input: &'a Input<'a>, given_twice: BTreeMap<u32, String>) -> Self {
        // Names are parsed once here: every GPU asks for its own of them.
        let mut held_partitions: BTreeMap<u32, Vec<DeviceKind>> = BTreeMap::new();
        let staying = input
            .staying()
            .filter_map(|name| DeviceKind::parse(name).ok());
        for kind in staying.filter(|kind| kind.partition().is_some()) {
            held_partitions
                .entry(kind.ordinal())
                .or_default()
                .push(kind);
        }
        Self {
            input,
            given_twice,
            held_partitions,
            in_use: modes_of(input.held.union(input.recorded)),
            leaving: modes_of(input.leaving.iter()),
            recorded: modes_of(input.recorded.iter()),
            findings: Vec::new(),
            cards: BTreeMap::new(),
            kept: BTreeSet::new(),
            over: BTreeMap::new(),
        }
    }
}

/// The devices that are published of one GPU.
#[derive(Debug, Default)]
pub(crate) struct GpuOffer {
    pub(crate) by: BTreeMap<Form, Vec<Device>>,
    pub(crate) counter_set: Option<CounterSet>,
    /// The set that the forms are to draw on if there are several; known of GPUs that
    /// answer.
    pub(crate) sets: Option<CounterSets>,
}

impl GpuOffer {
    pub(crate) fn add(&mut self, form: Form, device: Device) {
        self.by.entry(form).or_default().push(device);
    }

    /// Returns what claims can hold, by form, as far as there is any.
    pub(crate) fn held_as(&self) -> impl Iterator<Item = (Form, &Vec<Device>)> {
        self.by
            .iter()
            .filter(|(form, devices)| form.sharing.holds() && !devices.is_empty())
            .map(|(form, devices)| (*form, devices))
    }

    /// The same, to change.
    pub(crate) fn held_as_mut(&mut self) -> impl Iterator<Item = (Form, &mut Vec<Device>)> {
        self.by
            .iter_mut()
            .filter(|(form, devices)| form.sharing.holds() && !devices.is_empty())
            .map(|(form, devices)| (*form, devices))
    }

    /// All devices that claims can hold: of the whole GPU, then partitions.
    pub(crate) fn devices(&self) -> impl Iterator<Item = &Device> {
        let of = |target| {
            self.held_as()
                .filter(move |(used, _)| used.target == target)
                .flat_map(|(_, devices)| devices)
        };
        of(TargetKind::Gpu).chain(of(TargetKind::Partition))
    }

    /// The same, to change.
    pub(crate) fn devices_mut(&mut self) -> impl Iterator<Item = &mut Device> {
        self.held_as_mut().flat_map(|(_, devices)| devices)
    }

    pub(crate) fn has(&self, name: &DeviceName) -> bool {
        self.devices().any(|device| device.name == *name)
    }
}

/// Makes a pool: GPUs that answer, then those that do not (a GPU is in one of the two), then
/// devices that claims hold and that none of them has, then counters, for which all devices must be
/// there.
fn make(carving: &mut Carving<'_>) {
    carving.gpus_that_answer();
    carving.gpus_that_do_not();
    carving.held_without_gpu();
    carving.settle();
}

impl Carving<'_> {
    /// Returns whether a device must stay published.
    pub(crate) fn stays(&self, device: &DeviceName) -> bool {
        self.input.stays(device)
    }

    pub(crate) fn card(&mut self, ordinal: u32) -> &mut GpuOffer {
        self.cards.entry(ordinal).or_default()
    }

    /// Notes that a device is published only because a claim holds it, or may.
    pub(crate) fn keep(&mut self, device: &DeviceName, why: String) {
        if self.stays(device) {
            self.kept.insert(device.clone());
        }
        if self.input.held.contains(device) {
            self.findings.push(Finding::HeldAndWithdrawn {
                device: device.clone(),
                why,
            });
        }
    }

    /// The device with its taints; `None` if it must not be given out and only a taint could say
    /// so.
    pub(crate) fn tainted(
        &mut self,
        uuid: &GpuUuid,
        mut device: Device,
        taints: Vec<Taint>,
        stays: bool,
    ) -> Option<Device> {
        // In the API's form: one taint for each key and effect.
        device.taints = one_of_each(taints);
        if !self.input.features.supports(Feature::Taints) {
            let taints = std::mem::take(&mut device.taints);
            // Held: no other claim can get it, and an allocated device stays. Not held: it must not
            // be allocated, and without taints leaving it out is the only way.
            if let Some(taint) = taints.into_iter().next()
                && !stays
            {
                self.findings.push(Finding::TaintsDropped {
                    gpu: uuid.clone(),
                    taint: taint.key,
                });
                return None;
            }
        }
        Some(device)
    }
}

/// Returns one taint for each key and effect, sorted, no more than a device may have: the first
/// value stands for all.
fn one_of_each(mut taints: Vec<Taint>) -> Vec<Taint> {
    taints.sort();
    let mut all = Vec::new();
    // `add` replaces a taint of the same key and effect, so the first value is added last.
    for taint in taints.into_iter().rev() {
        add(&mut all, taint);
    }
    all
}

/// The modes in which devices are of their GPUs.
fn modes_of<'a>(devices: impl Iterator<Item = &'a DeviceName>) -> BTreeMap<u32, BTreeSet<Form>> {
    let mut modes: BTreeMap<u32, BTreeSet<Form>> = BTreeMap::new();
    for kind in devices.filter_map(|name| DeviceKind::parse(name).ok()) {
        if kind.sharing.holds() {
            let of_gpu = modes.entry(kind.ordinal()).or_default();
            of_gpu.insert(kind.form());
        }
    }
    modes
}

/// Returns whether a published device is of this card.
pub(crate) fn is_of(device: &Device, uuid: &GpuUuid) -> bool {
    matches!(device.attributes.get(attributes::GPU_UUID), Some(AttributeValue::String(text)) if text == uuid.as_str())
}

#[cfg(test)]
mod tests;
