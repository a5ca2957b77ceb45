//! Questions that only the API can answer, and when it is asked: who holds devices that leave, and
//! what an earlier process published.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_forms::Definition;
use divvy_model::mig::MigCapabilities;
use divvy_model::{DeviceKind, DeviceName, Form, GpuUuid, Ordinals, Sharing, TargetKind};

use crate::Pool;
use crate::step::Look;
use crate::withdrawal::DeviceState;
use crate::world::{Ask, World};

/// The number of times that the API is asked at the start before something is published without an
/// answer: the right to ask may be missing.
const ASK_FIRST: u32 = 5;
/// A number in device names is free again this many rounds of questions after its GPU has gone.
const ROUNDS_UNTIL_FORGOTTEN: u32 = 10;

impl World {
    /// Returns whether a first pool may be published. Claims may hold what an earlier process
    /// published and this one would not, so the API is asked first.
    pub(crate) fn may_begin(&mut self, look: &Look, plain: &Pool, now: Duration) -> bool {
        let ordinals = &look.records.ordinals;
        // A GPU without a number yet would be missing in the first pool, and come in the next.
        if look
            .inventory
            .gpus
            .keys()
            .any(|gpu| ordinals.of(gpu).is_none())
        {
            return false;
        }
        // Nothing can be missing: the API has said who holds what, or all that a process could have
        // offered is in this pool.
        if self.memory.asking.answered
            || !offers_less_than_it_may(
                ordinals,
                &self.memory.capabilities,
                plain,
                &look.forms().map(Definition::form).collect::<Vec<_>>(),
            )
        {
            return true;
        }
        // Begin without an answer at last: what records hold counts as offered before, so that it
        // is kept.
        if self.memory.asking.unanswered >= ASK_FIRST {
            for device in &look.recorded {
                self.memory
                    .devices
                    .entry(device.clone())
                    .or_insert(DeviceState::Offered);
            }
            return true;
        }
        // With the node's slices: an earlier process offered what is in them.
        self.ask_at(now, now, true);
        false
    }

    /// Notes numbered GPUs that NVML does not list and that have no device. Their numbers are free
    /// again when no allocation can refer to them any more.
    pub(crate) fn track_missing_gpus(
        &mut self,
        look: &Look,
        in_plain: &BTreeSet<&DeviceName>,
        now: Duration,
    ) {
        let numbers = |devices: &mut dyn Iterator<Item = &DeviceName>| -> BTreeSet<u32> {
            devices
                .filter_map(|name| Some(DeviceKind::parse(name).ok()?.ordinal()))
                .collect()
        };
        let listed = |gpu: &GpuUuid| {
            look.inventory.gpus.contains_key(gpu)
                || look.inventory.problems.iter().any(|p| p.gpu == *gpu)
        };
        // The usual case costs one pass: nothing is missing.
        if look.records.ordinals.iter().all(|(gpu, _)| listed(gpu)) {
            self.memory.gone.clear();
            self.memory.forget.clear();
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
        self.memory.gone.retain(|gpu, _| gone.contains_key(gpu));
        for gpu in gone.keys() {
            self.memory.gone.entry(gpu.clone()).or_insert(now);
        }
        let held = self
            .memory
            .listed
            .iter()
            .flat_map(|listed| listed.holders.keys());
        let referred = numbers(&mut self.memory.devices.keys().chain(held));
        let asked = self.memory.listed.as_ref().map(|listed| listed.asked);
        let patience = self.patience();
        // A number is free only by a list that was asked for after the wait, and only if neither
        // that list nor a published device refers to it. Else a new GPU would inherit an
        // allocation.
        let may_go = |gpu: &&GpuUuid| {
            let due = self
                .memory
                .gone
                .get(*gpu)
                .map(|since| since.saturating_add(patience));
            asked.zip(due).is_some_and(|(asked, due)| asked >= due)
                && gone
                    .get(*gpu)
                    .is_some_and(|ordinal| !referred.contains(ordinal))
        };
        // Once free it stays free until the records have forgotten it, also when the list is
        // dropped.
        let earlier = self
            .memory
            .forget
            .iter()
            .filter(|gpu| gone.contains_key(*gpu));
        self.memory.forget = earlier.chain(gone.keys().filter(may_go)).cloned().collect();
    }

    pub(crate) fn patience(&self) -> Duration {
        self.settings.ask_again * ROUNDS_UNTIL_FORGOTTEN
    }

    /// Returns what claims have by the last list; `None` if there is none, or nothing of it
    /// matters: as long as every device is offered, holders are the scheduler's business alone.
    pub(crate) fn holders_that_matter(
        &self,
        in_plain: &BTreeSet<&DeviceName>,
    ) -> Option<BTreeSet<DeviceName>> {
        let memory = &self.memory;
        let listed = memory.listed.as_ref()?;
        let withdrawing = memory
            .devices
            .iter()
            .any(|(name, state)| *state != DeviceState::Offered || !in_plain.contains(name));
        let matters = withdrawing
            || !memory.conflicts.is_empty()
            || !memory.gone.is_empty()
            || listed
                .holders
                .keys()
                .any(|device| !in_plain.contains(device));
        matters.then(|| listed.devices())
    }

    /// When the API is to be asked next who holds what.
    pub(crate) fn plan_questions(
        &mut self,
        look: &Look,
        held: &BTreeSet<DeviceName>,
        now: Duration,
    ) {
        let asked = self.memory.listed.as_ref().map(|listed| listed.asked);
        let again = asked.map_or(now, |asked| asked.saturating_add(self.settings.ask_again));
        // A list that was asked for after the moment answers the question as of then; the next one
        // is only for what has changed since.
        let unless_asked = |at: Duration| {
            if asked.is_some_and(|asked| asked >= at) {
                again
            } else {
                at
            }
        };
        let leave = look.leave(self);
        let leaving = self
            .memory
            .devices
            .values()
            .filter_map(|state| state.may_be_asked_about_at(leave));
        // While claims use them here, the API need not be asked: all nodes that a policy has
        // changed would list all claims of the cluster again and again while their pods run.
        let kept = self.memory.devices.iter().filter(|(name, state)| {
            let idle = !look.recorded.contains(*name);
            idle && (**state == DeviceState::Kept
                || (held.contains(*name) && look.features.one_mode().is_some()))
        });
        let conflicts = self
            .memory
            .conflicts
            .iter()
            .map(|conflict| unless_asked(conflict.since));
        let patience = self.patience();
        let gone = self
            .memory
            .gone
            .iter()
            .filter(|(gpu, _)| !self.memory.forget.contains(*gpu));
        let gone = gone.map(|(_, since)| unless_asked(since.saturating_add(patience)));
        // Began without an answer: claims may have what an earlier process published.
        let failed = self
            .memory
            .asking
            .failed
            .filter(|_| !self.memory.asking.answered);
        let first = failed.map(|failed| failed.saturating_add(self.settings.ask_again));
        let at = leaving
            .chain(kept.map(|_| again))
            .chain(conflicts)
            .chain(gone)
            .chain(first)
            .min();
        if let Some(at) = at {
            self.ask_at(at, now, false);
        }
    }

    /// Asks now, or wakes up then.
    pub(crate) fn ask_at(&mut self, at: Duration, now: Duration, slices: bool) {
        // A single question at a time: its answer leads to the next decision, which asks again if
        // it must.
        if self.memory.asking.since.is_some() {
            return;
        }
        // After a failure never before `retry`, however urgent it is: all nodes ask the same
        // server.
        let at = self.memory.asking.failed.map_or(at, |failed| {
            at.max(failed.saturating_add(self.settings.retry))
        });
        if at <= now {
            self.memory.asking.since = Some(now);
            self.memory.ask = Some(Ask { slices });
        } else {
            self.memory.wake_at = Some(at);
        }
    }
}

/// Returns whether a numbered GPU is not offered as all that it may have been offered as. It may be
/// held as such from before this process began, in one of these forms.
fn offers_less_than_it_may(
    ordinals: &Ordinals,
    capabilities: &BTreeMap<GpuUuid, MigCapabilities>,
    pool: &Pool,
    forms: &[Form],
) -> bool {
    let kinds: BTreeSet<_> = pool
        .devices()
        .filter_map(|d| DeviceKind::parse(&d.name).ok())
        .collect();
    let partitions: BTreeSet<_> = kinds
        .iter()
        .filter_map(|kind| Some((kind.partition()?, kind.sharing)))
        .filter(|(name, _)| !name.is_static)
        .map(|(name, sharing)| (name.ordinal, name.profile, name.start, sharing))
        .collect();
    // Each of them: a policy may have left out profiles only.
    let cut = |gpu: &GpuUuid, ordinal: u32, sharing: Sharing| {
        let profiles = capabilities
            .get(gpu)
            .into_iter()
            .flat_map(MigCapabilities::profiles);
        let mut places =
            profiles.flat_map(|p| p.placements.iter().map(|place| (p.id, place.start)));
        places.all(|(profile, start)| partitions.contains(&(ordinal, profile, start, sharing)))
    };
    ordinals.iter().any(|(gpu, ordinal)| {
        forms
            .iter()
            .filter(|form| form.sharing.holds())
            .any(|offered| match offered.target {
                TargetKind::Gpu => !kinds.contains(&DeviceKind::of_gpu(ordinal, offered.sharing)),
                TargetKind::Partition => !cut(gpu, ordinal, offered.sharing),
            })
    })
}
