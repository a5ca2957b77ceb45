//! What only the API knows, and when it is asked: who holds devices that leave, and what an earlier process published.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_model::mig::MigCapabilities;
use divvy_model::{DeviceKind, DeviceName, GpuUuid, Ordinals};

use crate::Pool;
use crate::step::Situation;
use crate::withdrawal::DeviceState;
use crate::world::{Ask, World};

/// How often the API is asked at the start before something is published without an answer: the right to ask may be
/// missing.
const ASK_FIRST: u32 = 5;
/// A number in device names is free again this many rounds of questions after its GPU has gone.
const ROUNDS_UNTIL_FORGOTTEN: u32 = 10;

impl World {
    /// Whether a first pool may be published. Claims may hold what an earlier process published and this one would not,
    /// so the API is asked first.
    pub(crate) fn may_begin(&mut self, look: &Situation, plain: &Pool, now: Duration) -> bool {
        let ordinals = &look.records.ordinals;
        if look.inventory.gpus.keys().any(|gpu| ordinals.of(gpu).is_none()) {
            return false;
        }
        if self.asking.answered || !offers_less_than_it_may(ordinals, &self.capabilities, plain) {
            return true;
        }
        if self.asking.unanswered >= ASK_FIRST {
            for device in &look.recorded {
                self.devices.entry(device.clone()).or_insert(DeviceState::Offered);
            }
            return true;
        }
        self.ask_at(now, now, true);
        false
    }

    /// Notes numbered GPUs that NVML does not list and that have no device. Their numbers are free again when no
    /// allocation can refer to them any more.
    pub(crate) fn see_gone(&mut self, look: &Situation, in_plain: &BTreeSet<&DeviceName>, now: Duration) {
        let numbers = |devices: &mut dyn Iterator<Item = &DeviceName>| -> BTreeSet<u32> {
            devices.filter_map(|name| Some(DeviceKind::parse(name).ok()?.ordinal())).collect()
        };
        let listed = |gpu: &GpuUuid| {
            look.inventory.gpus.contains_key(gpu) || look.inventory.problems.iter().any(|p| p.gpu == *gpu)
        };
        if look.records.ordinals.iter().all(|(gpu, _)| listed(gpu)) {
            self.gone.clear();
            self.outputs.forget.clear();
            return;
        }
        let published = numbers(&mut in_plain.iter().copied());
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

    pub(crate) fn patience(&self) -> Duration {
        self.settings.ask_again * ROUNDS_UNTIL_FORGOTTEN
    }

    /// What claims have by the last list, for as long as that matters.
    pub(crate) fn held_now(&mut self, in_plain: &BTreeSet<&DeviceName>) -> BTreeSet<DeviceName> {
        let Some(listed) = &self.listed else { return BTreeSet::new() };
        let withdrawing = self
            .devices
            .iter()
            .any(|(name, state)| *state != DeviceState::Offered || !in_plain.contains(name));
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

    /// When the API is to be asked next who holds what.
    pub(crate) fn plan_questions(&mut self, look: &Situation, held: &BTreeSet<DeviceName>, now: Duration) {
        let asked = self.listed.as_ref().map(|listed| listed.asked);
        let again = asked.map_or(now, |asked| asked.saturating_add(self.settings.ask_again));
        let unless_asked = |at: Duration| if asked.is_some_and(|asked| asked >= at) { again } else { at };
        let leave = look.leave(self);
        let leaving = self.devices.values().filter_map(|state| state.may_be_asked_about_at(leave));
        // While claims use them here, the API need not be asked: all nodes that a policy has changed would list all
        // claims of the cluster again and again while their pods run.
        let kept = self.devices.iter().filter(|(name, state)| {
            let idle = !look.recorded.contains(*name);
            idle && (**state == DeviceState::Kept
                || (held.contains(*name) && look.features.one_mode().is_some()))
        });
        let conflicts = self.conflicts.iter().map(|conflict| unless_asked(conflict.since));
        let patience = self.patience();
        let gone = self.gone.iter().filter(|(gpu, _)| !self.outputs.forget.contains(*gpu));
        let gone = gone.map(|(_, since)| unless_asked(since.saturating_add(patience)));
        // Began without an answer: claims may have what an earlier process published.
        let failed = self.asking.failed.filter(|_| !self.asking.answered);
        let first = failed.map(|failed| failed.saturating_add(self.settings.ask_again));
        let at = leaving.chain(kept.map(|_| again)).chain(conflicts).chain(gone).chain(first).min();
        if let Some(at) = at {
            self.ask_at(at, now, false);
        }
    }

    /// Asks now, or wakes up then.
    pub(crate) fn ask_at(&mut self, at: Duration, now: Duration, slices: bool) {
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
