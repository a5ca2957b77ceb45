//! [`carve`]: what a node publishes, as a function of what is known about it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_api::names::{attributes, taints as keys};
use divvy_model::{DeviceKind, DeviceName, GpuUuid, Inventory, Ordinals};

use crate::validate::{MAX_DEVICES_TAINTED, MAX_POOL_NAME, MAX_TAINTS, is_label_key, is_label_value};
use crate::whole::{self, Links};
use crate::{AttributeValue, Device, Feature, Note, Pool, ServerFeatures, Slice, Taint};

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
    let mut run = Run { input, notes: Vec::new(), devices: BTreeMap::new() };
    run.gpus_that_answer();
    run.gpus_that_do_not();
    run.held_without_gpu();
    let Run { mut notes, devices, .. } = run;
    notes.sort();
    notes.dedup();
    Carved { pool: Pool { name: pool_name(input.node), slices: slices(devices) }, notes }
}

/// Whole GPUs in reverse order, in slices of a fixed range of ordinals each: a GPU that comes, goes or gets a taint
/// changes its own slice only, and the order of the others stays.
fn slices(devices: BTreeMap<u32, Device>) -> Vec<Slice> {
    let mut slices: BTreeMap<u32, Slice> = BTreeMap::new();
    for (ordinal, device) in devices.into_iter().rev() {
        // The lower limit always: else the first taint on a full slice would split it.
        slices.entry(ordinal / MAX_DEVICES_TAINTED).or_default().devices.push(device);
    }
    slices.into_values().rev().collect()
}

struct Run<'a> {
    input: &'a Input<'a>,
    notes: Vec<Note>,
    devices: BTreeMap<u32, Device>,
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
            if gpu.facts.mig_mode.is_on() {
                if !self.is_held(ordinal) {
                    self.notes.push(Note::MigModeOn { gpu: uuid.clone() });
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
            let device = whole::device(ordinal, uuid, gpu, &input.inventory.system, &links, &mut self.notes);
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
            if self.devices.contains_key(&ordinal) {
                continue;
            }
            let device = self.previous(ordinal, uuid);
            if let Some(error) = &error {
                let published = device.is_some();
                self.notes.push(Note::Unreadable { gpu: uuid.clone(), error: error.clone(), published });
            }
            if let Some(device) = device {
                let mut taints = input.taints.get(uuid).cloned().unwrap_or_default();
                if error.is_some() {
                    taints.push(Taint::no_schedule(keys::UNREADABLE, None));
                }
                self.publish(ordinal, uuid, device, taints);
            }
        }
    }

    /// A device that is allocated is never withdrawn (DESIGN section 1, "withdrawing").
    fn held_without_gpu(&mut self) {
        let input = self.input;
        for name in input.held {
            let known = DeviceKind::parse(name)
                .ok()
                .map(DeviceKind::ordinal)
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
        match device.attributes.get(attributes::GPU_UUID) {
            Some(AttributeValue::String(text)) if text == uuid.as_str() => Some(device.clone()),
            _ => None,
        }
    }

    fn publish(&mut self, ordinal: u32, uuid: &GpuUuid, mut device: Device, taints: Vec<Taint>) {
        device.taints = self.checked(&device.name, taints);
        if !self.input.features.supports(Feature::Taints) {
            let taints = std::mem::take(&mut device.taints);
            // Held: nobody else can get it anyway, and an allocated device stays. Not held: it must not be given
            // out, and without taints leaving it out is the only way to say so.
            if let Some(taint) = taints.into_iter().find(|t| t.effect.blocks())
                && !self.is_held(ordinal)
            {
                self.notes.push(Note::TaintsDropped { gpu: uuid.clone(), taint: taint.key });
                return;
            }
        }
        self.devices.insert(ordinal, device);
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

#[cfg(test)]
mod tests;
