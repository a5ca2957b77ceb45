//! [`HealthBook`]: from events and polls to what is wrong with each GPU, now.
//!
//! Sick at once, well with patience: an ailment is over after [`HealthRules::good_polls`] polls in
//! a row without it and [`HealthRules::recover_after`] since it was seen last. An Xid is seen once;
//! it is over when the driver says so often enough that no recovery action is due. A driver that
//! cannot say (before R565) leaves it until the GPU was away and is back, as it is after a reset.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde::Serialize;

use super::{Ailment, FabricState, GpuEvent, GpuEventKind, GpuVitals, XidClass};
use crate::mig::GpuInstanceId;
use crate::{GpuErrorCode, GpuUuid};

/// By which rules GPUs are judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthRules {
    /// Xids that count for nothing, besides those of [`XidClass::is_harmless`].
    pub ignored_xids: BTreeSet<u32>,
    /// So many polls in a row without an ailment end it.
    pub good_polls: u32,
    /// So long after it was seen last, at the earliest.
    pub recover_after: Duration,
    /// So many polls in a row without an answer make a GPU [`Ailment::Silent`].
    pub bad_polls: u32,
    /// A lost GPU that the driver no longer knows was taken out, after so long.
    pub lost_for_good: Duration,
    /// A fault that may end by itself ([`Ailment::may_pass`]) evicts pods once it has been seen for
    /// so long.
    pub evict_after: Duration,
}

impl Default for HealthRules {
    fn default() -> Self {
        Self {
            ignored_xids: BTreeSet::new(),
            good_polls: 3,
            recover_after: Duration::from_mins(1),
            bad_polls: 3,
            lost_for_good: Duration::from_mins(10),
            evict_after: Duration::from_mins(2),
        }
    }
}

/// The time that an ailment has lasted. Times are those passed to the book.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Illness {
    /// When it was seen first.
    pub since: Duration,
    /// When it was seen last.
    pub seen: Duration,
    /// Polls without it since then.
    pub good_polls: u32,
}

/// Ailments, the gravest first.
pub type Ailments = BTreeMap<Ailment, Illness>;

/// A GPU in the book.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct GpuHealth {
    /// Ailments of the whole GPU.
    pub ailments: Ailments,
    /// Ailments of single GPU instances.
    pub partitions: BTreeMap<GpuInstanceId, Ailments>,
    /// Its last vitals.
    pub vitals: Option<GpuVitals>,
    /// Polls in a row that failed.
    pub bad_polls: u32,
    /// It was away since its last Xid: what that Xid was about is over as soon as it answers.
    pub(super) was_away: bool,
}

impl GpuHealth {
    /// Returns whether nothing is wrong, with any part of it.
    pub fn is_well(&self) -> bool {
        self.ailments.is_empty() && self.partitions.is_empty()
    }

    /// Returns the ailments that may end by themselves and have not been seen for long enough to
    /// evict pods.
    pub fn young(&self, rules: &HealthRules) -> BTreeSet<Ailment> {
        let young = self.ailments.iter().filter(|(ailment, illness)| {
            // When it was seen last and not the present: a fault that is over does not grow old
            // while it waits for its good polls.
            let lasted = illness.seen.saturating_sub(illness.since);
            ailment.may_pass() && lasted < rules.evict_after
        });
        young.map(|(ailment, _)| *ailment).collect()
    }

    /// Takes in a poll that the GPU has answered.
    fn take_in(
        &mut self,
        mut vitals: GpuVitals,
        rules: &HealthRules,
        now: Duration,
        changes: &mut Changes<'_>,
    ) {
        let known = self.vitals.as_ref().and_then(|known| known.uncorrected_ecc);
        let present = present(&vitals, known);
        // Keep the last known count if a poll lacks it: otherwise the next increase would
        // go unnoticed.
        vitals.uncorrected_ecc = vitals.uncorrected_ecc.or(known);
        self.bad_polls = 0;
        self.vitals = Some(vitals);
        for ailment in &present {
            if see(&mut self.ailments, *ailment, now) {
                changes.add(None, *ailment, false);
            }
        }
        // Events are over when the driver says that no action on the GPU is due, or after a
        // reset, which an absence stands for.
        let fit = vitals.recovery.is_some_and(|action| !action.concerns_gpu()) || self.was_away;
        let was_away = self.was_away;
        let over = good_poll(&mut self.ailments, rules, now, |a| {
            // An ailment that is read from a state ends only by an answer about that state.
            // A poll in which the driver was silent about it is no good poll for it.
            let answered = match a {
                // A driver that was exchanged for an earlier one has no answer any more.
                Ailment::Recovery(_) => vitals.recovery.is_some() || was_away,
                // A driver that was exchanged may report no fabric any more.
                Ailment::Fabric(_) => vitals.fabric.is_some() || was_away,
                // The remap waited for a reset; a GPU that has MIG instances again does not
                // report it.
                Ailment::RemapPending => vitals.remap.is_some() || was_away,
                // A failed replacement outlasts a reset, so it needs the memory's state
                // also after an absence. For the rest the poll itself is the answer: the
                // GPU is there.
                _ => vitals.remap.is_some() || !a.is_of_memory(),
            };
            // Xids and ECC errors leave no state behind, so they need `fit` too.
            !present.contains(&a) && answered && (fit || !a.is_of_a_moment())
        });
        for ailment in over {
            changes.add(None, ailment, true);
        }
        // Everything that is noted for a partition came from an event.
        for (id, ailments) in &mut self.partitions {
            let over = good_poll(ailments, rules, now, |_| fit);
            for ailment in over {
                changes.add(Some(*id), ailment, true);
            }
        }
        self.partitions.retain(|_, ailments| !ailments.is_empty());
        // The absence counts until everything that it ends has ended.
        self.was_away &= !self.is_well();
    }
}

/// Something became so, or is no longer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HealthChange {
    pub gpu: GpuUuid,
    /// The GPU instance; `None` is the whole GPU.
    pub partition: Option<GpuInstanceId>,
    pub ailment: Ailment,
    /// True if it is over.
    pub over: bool,
}

/// The book of each GPU's health.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealthBook {
    pub(super) gpus: BTreeMap<GpuUuid, GpuHealth>,
    removed: BTreeSet<GpuUuid>,
}

impl HealthBook {
    /// Every GPU that was heard of, by UUID.
    pub fn gpus(&self) -> &BTreeMap<GpuUuid, GpuHealth> {
        &self.gpus
    }

    /// GPUs that the driver knew, or that have a number, and that are not in the machine any more.
    pub fn removed(&self) -> &BTreeSet<GpuUuid> {
        &self.removed
    }

    /// Returns whether any GPU is not well, or did not answer last time.
    pub fn has_patients(&self) -> bool {
        self.gpus
            .values()
            .any(|gpu| !gpu.is_well() || gpu.bad_polls > 0)
    }

    /// Returns whether an event would change anything or calls for a poll now.
    pub fn is_of_interest(rules: &HealthRules, event: &GpuEvent) -> bool {
        match event.kind {
            GpuEventKind::Xid(xid) => {
                !rules.ignored_xids.contains(&xid) && !XidClass::of(xid).is_harmless()
            }
            GpuEventKind::UncorrectedEcc
            | GpuEventKind::RetirementFailure
            | GpuEventKind::LookAgain => true,
            GpuEventKind::Other(_) => false,
        }
    }

    /// The GPUs cannot be observed from now on: as after [`GpuErrorCode::DRIVER_NOT_LOADED`].
    pub fn all_away(&mut self) {
        // An absence only ends ailments. A GPU that is well has nothing to remember it for.
        for gpu in self.gpus.values_mut() {
            gpu.was_away |= !gpu.is_well();
        }
    }

    /// Takes an event in.
    pub fn event(
        &mut self,
        rules: &HealthRules,
        now: Duration,
        event: &GpuEvent,
    ) -> Vec<HealthChange> {
        let Some(uuid) = event
            .gpu
            .as_ref()
            .filter(|_| Self::is_of_interest(rules, event))
        else {
            return Vec::new();
        };
        let gpu = self.gpus.entry(uuid.clone()).or_default();
        let (ailment, partition) = match event.kind {
            GpuEventKind::Xid(xid) => match XidClass::of(xid) {
                // The poll that follows reports it, if the driver can.
                XidClass::FollowUp if gpu.vitals.is_some_and(|v| v.recovery.is_some()) => {
                    return Vec::new();
                }
                // Its remedy is a reboot of the node, which spares no partition.
                XidClass::Node => (Ailment::Xid(xid), None),
                // Partitions are isolated from each other's faults: only the one that reported it
                // is ill.
                _ => (Ailment::Xid(xid), event.gpu_instance),
            },
            GpuEventKind::UncorrectedEcc => (Ailment::Ecc, event.gpu_instance),
            GpuEventKind::RetirementFailure => (Ailment::RemapFailed, None),
            // These are no faults in themselves; the poll that follows shows what is.
            GpuEventKind::LookAgain | GpuEventKind::Other(_) => return Vec::new(),
        };
        // Seen after the absence, so that the absence does not end it.
        gpu.was_away = false;
        let ailments = match partition {
            None => &mut gpu.ailments,
            Some(id) => gpu.partitions.entry(id).or_default(),
        };
        let new = see(ailments, ailment, now);
        let change = HealthChange {
            gpu: uuid.clone(),
            partition,
            ailment,
            over: false,
        };
        if new { vec![change] } else { Vec::new() }
    }

    /// Takes a poll in: the GPU's vitals, or why there are none.
    pub fn poll(
        &mut self,
        rules: &HealthRules,
        now: Duration,
        uuid: &GpuUuid,
        answer: Result<GpuVitals, GpuErrorCode>,
    ) -> Vec<HealthChange> {
        let mut changes = Changes {
            gpu: uuid,
            all: Vec::new(),
        };
        // Before a GPU gets its entry: the driver does not know this one.
        if let Err(GpuErrorCode::NOT_FOUND | GpuErrorCode::GPU_NOT_FOUND) = answer {
            self.not_found(rules, now, &mut changes);
            return changes.all;
        }
        let gpu = self.gpus.entry(uuid.clone()).or_default();
        match answer {
            Ok(vitals) => {
                self.removed.remove(uuid);
                gpu.take_in(vitals, rules, now, &mut changes);
            }
            Err(GpuErrorCode::GPU_IS_LOST) => {
                self.removed.remove(uuid);
                // A GPU that fell off the bus comes back only by a reset or a reboot, which ends
                // what was before. And it has answered: it is not silent.
                gpu.was_away = true;
                gpu.bad_polls = 0;
                if see(&mut gpu.ailments, Ailment::Lost, now) {
                    changes.add(None, Ailment::Lost, false);
                }
            }
            // It says nothing of the GPU, but with the driver the GPU's state goes.
            Err(GpuErrorCode::DRIVER_NOT_LOADED) => gpu.was_away = true,
            // Codes of the library or the driver as a whole, and a GPU that has no vitals: they say
            // nothing about this GPU, good or bad.
            Err(
                GpuErrorCode::UNINITIALIZED
                | GpuErrorCode::LIBRARY_NOT_FOUND
                | GpuErrorCode::FUNCTION_NOT_FOUND
                | GpuErrorCode::LIB_RM_VERSION_MISMATCH
                | GpuErrorCode::NOT_SUPPORTED,
            ) => {}
            // Any other code may be a hiccup of NVML, so several in a row are needed.
            Err(_) => {
                gpu.bad_polls = gpu.bad_polls.saturating_add(1);
                if gpu.bad_polls >= rules.bad_polls && see(&mut gpu.ailments, Ailment::Silent, now)
                {
                    changes.add(None, Ailment::Silent, false);
                }
            }
        }
        changes.all
    }

    /// The driver does not know the GPU. A GPU that was lost before may come back after a reset;
    /// any other was taken out.
    fn not_found(&mut self, rules: &HealthRules, now: Duration, changes: &mut Changes<'_>) {
        let lost = self
            .gpus
            .get(changes.gpu)
            .and_then(|gpu| gpu.ailments.get(&Ailment::Lost));
        if lost.is_some_and(|lost| now < lost.seen.saturating_add(rules.lost_for_good)) {
            return;
        }
        self.removed.insert(changes.gpu.clone());
        let gone = self.gpus.remove(changes.gpu).unwrap_or_default();
        for ailment in gone.ailments.into_keys() {
            changes.add(None, ailment, true);
        }
        // Its partitions went with it.
        for (id, ailments) in gone.partitions {
            for ailment in ailments.into_keys() {
                changes.add(Some(id), ailment, true);
            }
        }
    }

    /// At this time only these GPU instances lived: what was wrong with others before went with
    /// them.
    pub fn living(
        &mut self,
        at: Duration,
        uuid: &GpuUuid,
        living: &BTreeSet<GpuInstanceId>,
    ) -> Vec<HealthChange> {
        let mut changes = Changes {
            gpu: uuid,
            all: Vec::new(),
        };
        if let Some(gpu) = self.gpus.get_mut(uuid) {
            gpu.partitions.retain(|id, ailments| {
                // The list may be older than an event of an instance that was made since: its
                // ailment stays until a later list.
                let lives =
                    living.contains(id) || ailments.values().any(|illness| illness.seen > at);
                if !lives {
                    for ailment in ailments.keys() {
                        changes.add(Some(*id), *ailment, true);
                    }
                }
                lives
            });
        }
        changes.all
    }
}

struct Changes<'a> {
    gpu: &'a GpuUuid,
    all: Vec<HealthChange>,
}

impl Changes<'_> {
    fn add(&mut self, partition: Option<GpuInstanceId>, ailment: Ailment, over: bool) {
        self.all.push(HealthChange {
            gpu: self.gpu.clone(),
            partition,
            ailment,
            over,
        });
    }
}

/// Returns what the vitals say is wrong.
fn present(now: &GpuVitals, ecc_before: Option<u64>) -> BTreeSet<Ailment> {
    let mut present = BTreeSet::new();
    if let Some(action) = now.recovery.filter(|action| action.concerns_gpu()) {
        present.insert(Ailment::Recovery(action));
    }
    if let Some(fault) = now.fabric.and_then(FabricState::fault) {
        present.insert(Ailment::Fabric(fault));
    }
    if let Some(remap) = now.remap {
        if remap.failed {
            present.insert(Ailment::RemapFailed);
        }
        if remap.pending {
            present.insert(Ailment::RemapPending);
        }
    }
    // Errors that were counted before the first poll are not reported.
    if let (Some(now), Some(before)) = (now.uncorrected_ecc, ecc_before)
        && now > before
    {
        present.insert(Ailment::Ecc);
    }
    present
}

/// Notes an ailment; whether it is new.
fn see(ailments: &mut Ailments, ailment: Ailment, now: Duration) -> bool {
    let new = !ailments.contains_key(&ailment);
    let illness = ailments.entry(ailment).or_insert(Illness {
        since: now,
        seen: now,
        good_polls: 0,
    });
    illness.seen = now;
    illness.good_polls = 0;
    new
}

/// Counts a good poll for the ailments that it counts for; those that are over.
fn good_poll(
    ailments: &mut Ailments,
    rules: &HealthRules,
    now: Duration,
    counts: impl Fn(Ailment) -> bool,
) -> Vec<Ailment> {
    let mut over = Vec::new();
    ailments.retain(|ailment, illness| {
        if !counts(*ailment) {
            return true;
        }
        // Both conditions: polls alone could come within seconds of the fault, when each event
        // calls for one.
        illness.good_polls = illness.good_polls.saturating_add(1);
        let well = illness.good_polls >= rules.good_polls
            && now >= illness.seen.saturating_add(rules.recover_after);
        if well {
            over.push(*ailment);
        }
        !well
    });
    over
}
