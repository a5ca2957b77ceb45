//! [`carve`]: what a node publishes, as a function of what is known about it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::{attributes, taints as keys};
use divvy_model::mig::PartitionName;
use divvy_model::{DeviceKind, DeviceName, GpuUuid, Inventory, Ordinals};

use crate::layout;
use crate::partition::{Cut, Partitioning};
use crate::validate::{MAX_POOL_NAME, MAX_TAINTS, is_label_key, is_label_value};
use crate::whole::{self, Links};
use crate::{AttributeValue, Device, Feature, Note, Pool, ServerFeatures, Taint};

/// Everything the published pool depends on.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Name of the node.
    pub node: &'a str,
    /// Its GPUs now.
    pub inventory: &'a Inventory,
    /// The number of each GPU, for its name.
    pub ordinals: &'a Ordinals,
    /// What health, fences, lingering claims and neighbours say, by GPU.
    pub taints: &'a BTreeMap<GpuUuid, Vec<Taint>>,
    /// Devices that any ResourceClaim in the API has allocated, prepared or not.
    pub held: &'a BTreeSet<DeviceName>,
    /// What was carved last: where a device is taken from when its GPU no longer answers.
    pub previous: Option<&'a Pool>,
    /// What the API server can store.
    pub features: &'a ServerFeatures,
}

/// What to publish, and what was left out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Carved {
    /// What to publish.
    pub pool: Pool,
    /// What was left out and why; sorted, each once.
    pub notes: Vec<Note>,
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
    run(input, None)
}

/// [`carve`] and [`crate::carve_partitions`].
pub(crate) fn run(input: &Input<'_>, partitioning: Option<&Partitioning<'_>>) -> Carved {
    let mut held_partitions: BTreeMap<u32, Vec<PartitionName>> = BTreeMap::new();
    if partitioning.is_some() {
        for name in input.held.iter().filter_map(|name| PartitionName::parse(name).ok()) {
            held_partitions.entry(name.ordinal).or_default().push(name);
        }
    }
    let mut run = Run {
        input,
        partitioning,
        held_partitions,
        notes: Vec::new(),
        devices: BTreeMap::new(),
        cuts: BTreeMap::new(),
    };
    run.gpus_that_answer();
    run.gpus_that_do_not();
    run.held_without_gpu();
    run.complete_counter_sets();
    let Run { mut notes, devices, cuts, .. } = run;
    notes.sort();
    notes.dedup();
    Carved { pool: Pool { name: pool_name(input.node), slices: layout::slices(devices, cuts) }, notes }
}

/// One run of [`carve`]: what goes in, what has come out so far. The part that knows partitions is in
/// `partition.rs`.
pub(crate) struct Run<'a> {
    pub(crate) input: &'a Input<'a>,
    pub(crate) partitioning: Option<&'a Partitioning<'a>>,
    /// Partitions that claims have, by the ordinal of their GPU.
    pub(crate) held_partitions: BTreeMap<u32, Vec<PartitionName>>,
    pub(crate) notes: Vec<Note>,
    /// Whole GPUs, by ordinal.
    pub(crate) devices: BTreeMap<u32, Device>,
    /// Partitions and counters, by ordinal.
    pub(crate) cuts: BTreeMap<u32, Cut>,
}

impl Run<'_> {
    fn is_held(&self, ordinal: u32) -> bool {
        self.input.held.contains(&DeviceKind::Whole { ordinal }.device_name())
    }

    /// The name's number, unless another GPU has it.
    fn ordinal(&mut self, gpu: &GpuUuid) -> Option<u32> {
        let Some(ordinal) = self.input.ordinals.of(gpu) else {
            self.notes.push(Note::NoOrdinal { gpu: gpu.clone() });
            return None;
        };
        match self.input.ordinals.gpu(ordinal) {
            Some(other) if other != gpu => {
                self.notes.push(Note::SameOrdinal { gpu: gpu.clone(), ordinal, other: other.clone() });
                None
            }
            _ => Some(ordinal),
        }
    }

    fn gpus_that_answer(&mut self) {
        let input = self.input;
        let domains = input.inventory.nvlink_domains();
        let pairs = input.inventory.nvlink_pairs();
        for (uuid, gpu) in &input.inventory.gpus {
            let Some(ordinal) = self.ordinal(uuid) else { continue };
            let mut taints = input.taints.get(uuid).cloned().unwrap_or_default();
            let plan = self.cut(ordinal, uuid, gpu, &taints);
            if !plan.offers_whole {
                if !self.is_held(ordinal) {
                    if !plan.offers_partitions {
                        self.notes.push(Note::MigModeOn { gpu: uuid.clone() });
                    }
                    continue;
                }
                let device = DeviceKind::Whole { ordinal }.device_name();
                self.notes.push(Note::HeldAndWithdrawn { device, why: "its MIG mode is on".to_owned() });
                taints.push(Taint::no_schedule(keys::WITHDRAWN, Some("mig-mode-on")));
            }
            let links = Links {
                domain: domains.get(uuid).map(String::as_str),
                pair: pairs.get(uuid).map(String::as_str),
            };
            let mut device =
                whole::device(ordinal, uuid, gpu, &input.inventory.system, &links, &mut self.notes);
            device.capacity.extend(plan.engines);
            device.consumes = plan.consumes;
            taints.extend(plan.taints);
            self.publish(ordinal, uuid, device, taints);
        }
    }

    /// GPUs that NVML lists and cannot read, or that only health still knows: published as they were, tainted, so
    /// that one bad minute does not withdraw them and people can see what is wrong.
    fn gpus_that_do_not(&mut self) {
        let input = self.input;
        let unreadable = input.inventory.problems.iter().map(|p| (&p.gpu, Some(p.error.to_string())));
        let lost = input
            .taints
            .iter()
            .filter(|(_, t)| t.iter().any(|t| t.effect.blocks()))
            .map(|(gpu, _)| (gpu, None));
        for (uuid, error) in unreadable.chain(lost) {
            if input.inventory.gpus.contains_key(uuid) {
                continue;
            }
            let ordinal = match error {
                // An old taint of a GPU that was taken out for good needs no note.
                None => input.ordinals.of(uuid).filter(|o| input.ordinals.gpu(*o) == Some(uuid)),
                Some(_) => self.ordinal(uuid),
            };
            let Some(ordinal) = ordinal else { continue };
            if self.devices.contains_key(&ordinal) || self.cuts.contains_key(&ordinal) {
                continue;
            }
            // What is held and was not published before (a restart) is as unreadable as what was.
            let bare = || self.is_held(ordinal).then(|| whole::bare(ordinal, uuid));
            let device = self.previous(ordinal, uuid).or_else(bare);
            let partitions = self.last_known_partitions(ordinal, uuid);
            let mut taints = input.taints.get(uuid).cloned().unwrap_or_default();
            if let Some(error) = error {
                let published = device.is_some() || !partitions.is_empty();
                self.notes.push(Note::Unreadable { gpu: uuid.clone(), error, published });
                taints.push(Taint::no_schedule(keys::UNREADABLE, None));
            }
            for partition in partitions {
                self.publish_partition(ordinal, uuid, partition, taints.clone());
            }
            if let Some(device) = device {
                self.publish(ordinal, uuid, device, taints);
            }
        }
    }

    /// A device that is allocated is never withdrawn (DESIGN section 1, "withdrawing").
    fn held_without_gpu(&mut self) {
        let input = self.input;
        for name in input.held {
            if self.held_partition_without_gpu(name) {
                continue;
            }
            let known = DeviceKind::parse(name)
                .ok()
                .and_then(|kind| match kind {
                    DeviceKind::Whole { ordinal } => Some(ordinal),
                    DeviceKind::Partition(_) | DeviceKind::Share { .. } | DeviceKind::Admin { .. } => None,
                })
                .and_then(|ordinal| Some((ordinal, input.ordinals.gpu(ordinal)?)));
            let Some((ordinal, uuid)) = known else {
                self.notes.push(Note::HeldUnknown { device: name.clone() });
                continue;
            };
            if self.devices.contains_key(&ordinal) {
                continue;
            }
            self.notes.push(Note::HeldAndGone { device: name.clone() });
            let device = self.previous(ordinal, uuid).unwrap_or_else(|| whole::bare(ordinal, uuid));
            let mut taints = input.taints.get(uuid).cloned().unwrap_or_default();
            taints.push(Taint::no_schedule(keys::LOST, None));
            self.publish(ordinal, uuid, device, taints);
        }
    }

    /// The device as it was published last, if it was this GPU's.
    fn previous(&self, ordinal: u32, uuid: &GpuUuid) -> Option<Device> {
        let device = self.input.previous?.device(&DeviceKind::Whole { ordinal }.device_name())?;
        is_of(device, uuid).then(|| device.clone())
    }

    fn publish(&mut self, ordinal: u32, uuid: &GpuUuid, device: Device, taints: Vec<Taint>) {
        let held = self.is_held(ordinal);
        if let Some(device) = self.tainted(uuid, device, taints, held) {
            self.devices.insert(ordinal, device);
        }
    }

    /// The device with its taints; `None` if it must not be given out and only a taint could say so.
    pub(crate) fn tainted(
        &mut self,
        uuid: &GpuUuid,
        mut device: Device,
        taints: Vec<Taint>,
        held: bool,
    ) -> Option<Device> {
        device.taints = self.checked(&device.name, taints);
        if !self.input.features.supports(Feature::Taints) {
            let taints = std::mem::take(&mut device.taints);
            // Held: nobody else can get it anyway, and an allocated device stays. Not held: it must not be given
            // out, and without taints leaving it out is the only way to say so.
            if let Some(taint) = taints.into_iter().find(|t| t.effect.blocks())
                && !held
            {
                self.notes.push(Note::TaintsDropped { gpu: uuid.clone(), taint: taint.key });
                return None;
            }
        }
        Some(device)
    }

    /// Taints within the API's limits, strongest first when there are too many. One that is not valid is replaced,
    /// not dropped: it keeps claims away.
    fn checked(&mut self, device: &DeviceName, taints: Vec<Taint>) -> Vec<Taint> {
        let mut checked: Vec<Taint> = taints
            .into_iter()
            .map(|taint| {
                let key = if is_label_key(&taint.key) { taint.key.clone() } else { keys::FENCED.to_owned() };
                let value = taint.value.clone().filter(|value| is_label_value(value));
                if key != taint.key || value != taint.value {
                    self.notes.push(Note::BadTaint {
                        device: device.clone(),
                        key: taint.key,
                        instead: key.clone(),
                    });
                }
                Taint { key, value, effect: taint.effect }
            })
            .collect();
        checked.sort_by(|a, b| b.effect.cmp(&a.effect).then_with(|| a.cmp(b)));
        // One taint for each key and effect: the first value stands for all.
        let mut seen = BTreeSet::new();
        checked.retain(|taint| seen.insert((taint.key.clone(), taint.effect)));
        checked.truncate(MAX_TAINTS);
        checked.sort();
        checked
    }
}

/// Whether a published device is of this card.
pub(crate) fn is_of(device: &Device, uuid: &GpuUuid) -> bool {
    matches!(device.attributes.get(attributes::GPU_UUID), Some(AttributeValue::String(text)) if text == uuid.as_str())
}

#[cfg(test)]
mod tests;
