//! The partitions of a GPU: every profile at every placement, beside the whole GPU where both are offered, all of
//! them drawing on the GPU's counters.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::{attributes as attr, taints as keys};
use divvy_model::mig::{GpuInstanceProfile, MigCapabilities, PartitionName, Placement, ProfileName};
use divvy_model::{DeviceKind, DeviceName, Gpu, GpuUuid};

use crate::carve::{self, Carved, Input, Run, is_of};
use crate::counters::{Budget, RESOURCES, amounts, set_name};
use crate::whole::{Builder, describe};
use crate::{
    Capacity, CounterSet, CounterUse, Device, Feature, GpuRules, Modes, Note, OfferedMode, PlacementOrder,
    Pool, Rules, ServerFeatures, Taint,
};

/// What a node's GPUs may be cut into, and by which rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Partitioning<'a> {
    /// Profiles and placements of the GPUs that do MIG. The caller keeps the last known ones: without them a GPU's
    /// partitions are withdrawn, but for those that claims hold.
    pub capabilities: &'a BTreeMap<GpuUuid, MigCapabilities>,
    /// Rules by GPU; the default for the others.
    pub rules: &'a Rules,
    /// Memory slices that are taken by something no claim in the API stands for (an instance of somebody else, one
    /// that lingers): everything that overlaps gets the taint.
    pub occupied: &'a BTreeMap<GpuUuid, Vec<(Placement, Taint)>>,
}

/// Decides what a node publishes when its GPUs are also offered in partitions; otherwise as [`crate::carve`].
pub fn carve_partitions(input: &Input<'_>, partitioning: &Partitioning<'_>) -> Carved {
    carve::run(input, Some(partitioning))
}

/// The partitions of one GPU, and what its devices draw on.
#[derive(Debug, Default)]
pub(crate) struct Cut {
    pub(crate) counter_set: Option<CounterSet>,
    pub(crate) devices: Vec<Device>,
}

/// What a GPU's partitions mean for the device that is the whole of it.
#[derive(Debug, Default)]
pub(crate) struct WholePlan {
    pub(crate) offers_whole: bool,
    pub(crate) offers_partitions: bool,
    pub(crate) consumes: Vec<CounterUse>,
    pub(crate) taints: Vec<Taint>,
    /// Capacities that only the profiles tell.
    pub(crate) engines: Vec<(String, Capacity)>,
}

impl Run<'_> {
    fn counts(&self) -> bool {
        self.input.features.supports(Feature::Partitions)
    }

    /// Whether the GPU is offered whole and in partitions at once.
    fn offers_both(&mut self, uuid: &GpuUuid, gpu: &Gpu, rules: &GpuRules) -> bool {
        let recent = self.input.features.lowest() >= Some(ServerFeatures::SEVERAL_MODES);
        let both = |asked: &BTreeSet<_>| asked.is_superset(&[OfferedMode::Whole, OfferedMode::Mig].into());
        let why = match &rules.modes {
            Modes::Only(asked) if both(asked) => {
                if !gpu.facts.architecture.toggles_mig_without_reset() {
                    "its MIG mode changes only with a reset of the GPU"
                } else if !recent {
                    "several modes of one GPU need Kubernetes 1.36.2 or later"
                } else if !self.counts() {
                    "the API server drops counters (feature gate DRAPartitionableDevices)"
                } else {
                    return true;
                }
            }
            Modes::AsIs | Modes::Only(_) => return false,
        };
        self.notes.push(Note::OneMode { gpu: uuid.clone(), why });
        false
    }

    /// Publishes the partitions of a GPU that answers.
    pub(crate) fn cut(&mut self, ordinal: u32, uuid: &GpuUuid, gpu: &Gpu, taints: &[Taint]) -> WholePlan {
        let on = gpu.facts.mig_mode.is_on();
        let Some(partitioning) = self.partitioning else {
            return WholePlan { offers_whole: !on, ..WholePlan::default() };
        };
        let no_rules = GpuRules::default();
        let rules = partitioning.rules.get(uuid).unwrap_or(&no_rules);
        let occupied = partitioning.occupied.get(uuid).map_or(&[][..], Vec::as_slice);
        let caps = partitioning.capabilities.get(uuid);
        let budget = caps.and_then(|caps| self.budget(ordinal, uuid, caps));
        let counts = self.counts();

        let both = budget.is_some() && self.offers_both(uuid, gpu, rules);
        let offers_partitions = budget.is_some() && counts && (on || both);
        if on && budget.is_some() && !counts {
            self.notes.push(Note::NoCounters { gpu: uuid.clone() });
        }
        let mut plan = WholePlan { offers_whole: !on || both, offers_partitions, ..WholePlan::default() };
        plan.taints.extend(occupied.iter().map(|(_, taint)| taint.clone()));

        let mut taints = taints.to_vec();
        let held = self.held_partitions.get(&ordinal).cloned().unwrap_or_default();
        let known = |name: &PartitionName| {
            budget.is_some() && caps.is_some_and(|caps| caps.placement(name.profile, name.start).is_some())
        };
        let lost: Vec<_> = held.iter().filter(|name| !known(name)).collect();
        if !lost.is_empty() {
            // What they occupy is not known, so nothing beside them can be given out.
            taints.push(Taint::no_schedule(keys::FENCED, Some("unknown-partition-held")));
            plan.taints.push(Taint::no_schedule(keys::FENCED, Some("unknown-partition-held")));
        } else if !held.is_empty() && !counts {
            plan.taints.push(Taint::no_schedule(keys::WITHDRAWN, Some("partition-held")));
        }
        if let (Some(caps), Some(budget)) = (caps, &budget) {
            let from = Source {
                ordinal,
                uuid,
                caps,
                budget,
                rules,
                occupied,
                held: &held,
                offers: offers_partitions,
            };
            let template = self.template(ordinal, uuid, gpu);
            self.publish_profiles(&from, &template, &taints);
            let set = self.cuts.get_mut(&ordinal).filter(|_| counts);
            if let Some(cut) = set {
                cut.counter_set = Some(budget.counter_set());
                plan.consumes.push(budget.whole());
            }
            plan.engines = engines(budget);
        }
        for name in lost {
            let why = "its profile is not known".to_owned();
            self.notes.push(Note::HeldAndWithdrawn { device: name.device_name(), why });
            let mut device = self.previous_or_bare(name, uuid);
            device.consumes.clear();
            let mut taints = taints.clone();
            taints.push(Taint::no_schedule(keys::WITHDRAWN, None));
            self.publish_partition(ordinal, uuid, device, taints);
        }
        plan
    }

    /// The GPU's counters, with notes of what was wrong with them.
    fn budget(&mut self, ordinal: u32, uuid: &GpuUuid, caps: &MigCapabilities) -> Option<Budget> {
        if caps.profiles().is_empty() {
            return None;
        }
        let budget = Budget::new(ordinal, caps);
        match &budget {
            None => self.notes.push(Note::TooManySlices {
                gpu: uuid.clone(),
                found: caps.memory_slices(),
                max: Budget::MAX_SLICES,
            }),
            Some(budget) => {
                self.notes.extend(budget.dropped.iter().map(|(counter, needed, total)| {
                    Note::CounterDropped { gpu: uuid.clone(), counter, needed: *needed, total: *total }
                }));
            }
        }
        budget
    }

    /// What all partitions of a GPU say. No `uuid`, which there is only once it lives, and no NVLink, which
    /// partitions cannot use.
    fn template(&mut self, ordinal: u32, uuid: &GpuUuid, gpu: &Gpu) -> Device {
        // Notes of values left out name the whole GPU, once.
        let mut to = Builder::new(DeviceKind::Whole { ordinal }.device_name(), &mut self.notes);
        identify(&mut to, uuid);
        describe(&mut to, gpu, &self.input.inventory.system);
        to.device
    }

    fn publish_profiles(&mut self, from: &Source<'_>, template: &Device, taints: &[Taint]) {
        for profile in from.caps.profiles() {
            let name = from.caps.name(profile);
            let asked_for = match &from.rules.profiles {
                Some(asked) => name.as_ref().is_some_and(|name| asked.contains(&name.to_string())),
                None => !profile.variant().is_rare() || from.rules.rare.contains(&profile.variant()),
            };
            let offered = from.offers && asked_for;
            if !offered && from.held.is_empty() {
                continue;
            }
            if name.is_none() && offered {
                self.notes.push(Note::UnknownProfile { gpu: from.uuid.clone(), profile: profile.id.0 });
            }
            let offered = offered && name.is_some();
            let device = of_profile(template, profile, name.as_ref());
            let label = name.map(|name| name.to_string()).unwrap_or_default();
            let mut publish = |placement: Placement| {
                self.publish_placement(from, profile, placement, offered, &label, &device, taints);
            };
            match from.rules.order {
                PlacementOrder::Ascending => profile.placements.iter().copied().for_each(&mut publish),
                PlacementOrder::Descending => profile.placements.iter().rev().copied().for_each(&mut publish),
            }
        }
    }

    #[expect(clippy::too_many_arguments, reason = "the inside of a loop, given a name")]
    fn publish_placement(
        &mut self,
        from: &Source<'_>,
        profile: &GpuInstanceProfile,
        placement: Placement,
        offered: bool,
        label: &str,
        device: &Device,
        taints: &[Taint],
    ) {
        let name = PartitionName::new(from.ordinal, label, profile.id, placement.start);
        // A profile's name changes with the driver. The device keeps the one that a claim was given.
        let held = from.held.iter().find(|held| held.is_same_partition(&name));
        if !offered && held.is_none() {
            return;
        }
        let mut device = device.clone();
        device.name = held.unwrap_or(&name).device_name();
        if self.counts() {
            device.consumes.push(from.budget.partition(profile, placement));
        }
        let overlapping = from.occupied.iter().filter(|(at, _)| at.overlaps(placement));
        let mut taints: Vec<_> = taints.iter().cloned().chain(overlapping.map(|(_, t)| t.clone())).collect();
        if !offered {
            let why = "this GPU is not offered in such partitions now".to_owned();
            self.notes.push(Note::HeldAndWithdrawn { device: device.name.clone(), why });
            taints.push(Taint::no_schedule(keys::WITHDRAWN, Some("not-offered")));
        }
        self.publish_partition(from.ordinal, from.uuid, device, taints);
    }

    pub(crate) fn publish_partition(
        &mut self,
        ordinal: u32,
        uuid: &GpuUuid,
        device: Device,
        taints: Vec<Taint>,
    ) {
        let held = self.input.held.contains(&device.name);
        if let Some(device) = self.tainted(uuid, device, taints, held) {
            self.cuts.entry(ordinal).or_default().devices.push(device);
        }
    }

    /// The partitions of a GPU that does not answer: those published last, and those that claims hold.
    pub(crate) fn last_known_partitions(&self, ordinal: u32, uuid: &GpuUuid) -> Vec<Device> {
        let Some(_) = self.partitioning else { return Vec::new() };
        let of_gpu = |name: &DeviceName| PartitionName::parse(name).is_ok_and(|name| name.ordinal == ordinal);
        let last = self.input.previous.into_iter().flat_map(Pool::devices);
        let mut devices: Vec<_> =
            last.filter(|device| of_gpu(&device.name) && is_of(device, uuid)).cloned().collect();
        for held in self.held_partitions.get(&ordinal).into_iter().flatten() {
            let name = held.device_name();
            if !devices.iter().any(|device| device.name == name) {
                devices.push(self.previous_or_bare(held, uuid));
            }
        }
        devices
    }

    fn previous_or_bare(&self, name: &PartitionName, uuid: &GpuUuid) -> Device {
        let name = name.device_name();
        let previous = self.input.previous.and_then(|previous| previous.device(&name));
        previous.filter(|device| is_of(device, uuid)).cloned().unwrap_or_else(|| {
            let mut nothing = Vec::new();
            let mut to = Builder::new(name, &mut nothing);
            identify(&mut to, uuid);
            to.device
        })
    }

    /// Keeps a held partition whose GPU is gone. Whether the name is a partition's on a known GPU.
    pub(crate) fn held_partition_without_gpu(&mut self, name: &DeviceName) -> bool {
        let input = self.input;
        let Some(partition) = self.partitioning.and_then(|_| PartitionName::parse(name).ok()) else {
            return false;
        };
        let ordinal = partition.ordinal;
        let Some(uuid) = input.ordinals.gpu(ordinal) else { return false };
        let there = self.cuts.get(&ordinal).is_some_and(|cut| cut.devices.iter().any(|d| d.name == *name));
        if !there {
            self.notes.push(Note::HeldAndGone { device: name.clone() });
            let device = self.previous_or_bare(&partition, uuid);
            let mut taints = input.taints.get(uuid).cloned().unwrap_or_default();
            taints.push(Taint::no_schedule(keys::LOST, None));
            self.publish_partition(ordinal, uuid, device, taints);
        }
        true
    }

    /// Devices that were taken over from the last pool bring the counter set they draw on; where that is gone too
    /// they draw on nothing (all of them are tainted).
    pub(crate) fn complete_counter_sets(&mut self) {
        let counts = self.counts();
        let ordinals: BTreeSet<u32> = self.devices.keys().chain(self.cuts.keys()).copied().collect();
        for ordinal in ordinals {
            let whole = self.devices.get_mut(&ordinal);
            let cut = self.cuts.get_mut(&ordinal);
            if cut.as_ref().is_some_and(|cut| cut.counter_set.is_some()) {
                continue;
            }
            let (devices, mut to) = match cut {
                Some(Cut { counter_set, devices }) => (devices.as_mut_slice(), Some(counter_set)),
                None => (&mut [][..], None),
            };
            let mut consumers: Vec<&mut Device> =
                whole.into_iter().chain(devices).filter(|device| !device.consumes.is_empty()).collect();
            if consumers.is_empty() {
                continue;
            }
            let name = set_name(ordinal);
            let slices = self.input.previous.into_iter().flat_map(|previous| &previous.slices);
            let set =
                slices.flat_map(|slice| &slice.counter_sets).find(|set| set.name == name).filter(|_| counts);
            match (set, to.take()) {
                (Some(set), Some(to)) => *to = Some(set.clone()),
                // The whole GPU alone needs no counters.
                _ => consumers.iter_mut().for_each(|device| device.consumes.clear()),
            }
        }
    }
}

/// One GPU, while its partitions are made.
struct Source<'a> {
    ordinal: u32,
    uuid: &'a GpuUuid,
    caps: &'a MigCapabilities,
    budget: &'a Budget,
    rules: &'a GpuRules,
    occupied: &'a [(Placement, Taint)],
    held: &'a [PartitionName],
    offers: bool,
}

fn identify(to: &mut Builder<'_>, gpu: &GpuUuid) {
    to.string(attr::TYPE, Some("mig"));
    to.string(attr::PARENT_UUID, Some(gpu.as_str()));
    to.string(attr::GPU_UUID, Some(gpu.as_str()));
    to.string(attr::SHARING, Some("exclusive"));
    to.string(attr::ISOLATION, Some("hardware"));
}

/// What all partitions of a profile say.
fn of_profile(template: &Device, profile: &GpuInstanceProfile, name: Option<&ProfileName>) -> Device {
    let mut nothing = Vec::new();
    let mut to = Builder { device: template.clone(), notes: &mut nothing };
    to.string(attr::PROFILE, name.map(ToString::to_string).as_deref());
    for ((_, capacity), amount) in RESOURCES.iter().zip(amounts(profile)) {
        // Memory that is the host's is not the partition's; of engines, none is an answer.
        let shared = *capacity == divvy_api::names::capacity::MEMORY && amount.value() == 0;
        to.capacity(capacity, (!shared).then_some(amount));
    }
    to.device
}

/// The engines of a whole GPU, which NVML tells only of its profiles.
fn engines(budget: &Budget) -> Vec<(String, Capacity)> {
    use divvy_api::names::capacity as cap;
    RESOURCES
        .iter()
        .zip(budget.largest)
        .filter(|((_, capacity), _)| ![cap::MEMORY, cap::MULTIPROCESSORS].contains(capacity))
        .map(|((_, capacity), amount)| ((*capacity).to_owned(), Capacity::whole(amount)))
        .collect()
}

#[cfg(test)]
mod tests;
