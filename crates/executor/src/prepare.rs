//! Prepare: locks, snapshot, decision; then carry it out, or wait without any lock and look again.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{
    Claim, ClaimRef, Clash, Decision, Holder, Holders, Leaving, Living, Phase, Prepared, Record, Refusal,
    Retry, Snapshot, Stored,
};
use divvy_model::{ClaimUid, DeviceKind, DeviceName, GpuError, GpuUuid, Inventory, MigMode, Ordinals};

use crate::release::{BRIEFLY, Release};
use crate::state::{Records, Trace, Traced};
use crate::unwind::Left;
use crate::{
    Call, CdiError, Executor, Folder, LockError, LockGuard, LockName, Lookup, PrepareError, Stamp,
    StoreError, Watch,
};

/// How often a holder is asked for at the API while it is waited for.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Least time from one attempt to the next.
const BREATH: Duration = Duration::from_millis(2);

/// One attempt, made under the locks.
enum Attempt {
    Done(Prepared),
    /// Others are in the way.
    Wait(Holders),
    /// It may go better soon; this is the answer if it does not. A claim named here fences a GPU.
    Again(PrepareError, Option<ClaimUid>),
}

/// Waiting without any lock: for a change of the records (the unprepare that is waited for may reach the other plugin
/// instance: it shows in the folder), and every now and then for everything else.
struct Waiting<'a> {
    executor: &'a Executor,
    call: &'a Call,
    give_up: Duration,
    watch: Watched,
}

/// Most prepares never wait, so that the records are only watched once one does.
enum Watched {
    NotYet,
    By(Box<dyn Watch>),
    /// Nothing can be watched here.
    Never,
}

impl Waiting<'_> {
    /// What has changed up to now is no reason to look again; the stamp of the records now.
    fn forget(&mut self) -> Option<Stamp> {
        if let Watched::By(watch) = &mut self.watch {
            watch.forget();
        }
        self.executor.state.records_stamp()
    }

    /// Waits until the attempt that began at `begun`, when the records had the stamp `seen`, may go better. Fails with
    /// `why` when there is no more time for that.
    fn until_worth_another_look(
        &mut self,
        claim: &Claim,
        begun: Duration,
        seen: Option<Stamp>,
        why: PrepareError,
    ) -> Result<(), PrepareError> {
        let Executor { parts, config, state, .. } = self.executor;
        if let Watched::NotYet = self.watch {
            self.watch = parts.store.watch(Folder::Claims).map_or(Watched::Never, Watched::By);
        }
        let look_again = parts.clock.now() + config.timing.look_again;
        let mut changed = false;
        loop {
            if self.call.cancel.is_cancelled() {
                return Err(PrepareError::Cancelled { claim: claim.reference() });
            }
            let now = parts.clock.now();
            if now >= self.give_up {
                return Err(why);
            }
            // Also what happened before the watch was there.
            changed |= state.records_stamp() != seen;
            if now >= look_again || (changed && now >= begun + BREATH) {
                return Ok(());
            }
            match &mut self.watch {
                // A crowd that waits for each other must not wake at each of its own changes.
                Watched::By(_) if changed => parts.clock.sleep(BREATH),
                Watched::By(watch) => {
                    let time = look_again.min(self.give_up).saturating_sub(now);
                    changed = watch.wait(&self.call.cancel, time);
                }
                Watched::NotYet | Watched::Never => parts.clock.sleep(config.timing.poll),
            }
        }
    }
}

impl Executor {
    /// Prepares a claim and tells what the kubelet is to be answered. Blocks: everything that can pass within seconds
    /// is tried again inside the call. Calls for one claim may come at once; they take turns.
    pub fn prepare(&self, claim: &Claim, call: &Call) -> Result<Prepared, PrepareError> {
        let give_up = call.until.min(call.received + self.config.timing.hand_over);
        let mut asked = BTreeMap::new();
        let mut waiting = Waiting { executor: self, call, give_up, watch: Watched::NotYet };
        loop {
            let mut seen = self.state.records_stamp();
            let begun = self.parts.clock.now();
            let why = match self.attempt(claim, call)? {
                Attempt::Done(prepared) => return Ok(prepared),
                Attempt::Wait(holders) => self.press(claim, &holders, &mut asked, give_up)?.into(),
                Attempt::Again(why, fenced_by) => {
                    // The late call may have come back.
                    match fenced_by {
                        Some(uid) => drop(self.finish(&uid, self.parts.clock.now() + BRIEFLY)),
                        // What the attempt itself wrote and took back is no reason to try again at once.
                        None => seen = waiting.forget(),
                    }
                    why
                }
            };
            waiting.until_worth_another_look(claim, begun, seen, why)?;
        }
    }

    fn attempt(&self, claim: &Claim, call: &Call) -> Result<Attempt, PrepareError> {
        let locked = |source| PrepareError::Lock { claim: claim.reference(), source };
        let stored = |source| PrepareError::Store { claim: claim.reference(), source };
        let _claim_lock = self.lock_claim(&claim.uid, call.until).map_err(locked)?;
        if let Some(tombstone) = self.state.trace(Traced::Unprepare, &claim.uid).map_err(stored)?
            && tombstone.boot == self.config.boot
            && tombstone.at >= call.received
        {
            return Err(PrepareError::Unprepared { claim: claim.reference() });
        }
        let ordinals = self.state.ordinals().map_err(stored)?;
        let own = self.state.record(&claim.uid).map_err(stored)?;
        let mut concerned = gpus_of(claim, &ordinals);
        concerned.extend(own.fine().map(Record::gpus).unwrap_or_default());
        let _gpu_locks = self.lock_gpus(&concerned, call.until).map_err(locked)?;
        let records = self.state.records().map_err(stored)?;
        let gpus = concerned.iter().map(|gpu| Ok((gpu.clone(), self.state.gpu(gpu)?)));
        let gpus = gpus.collect::<Result<BTreeMap<_, _>, StoreError>>().map_err(stored)?;
        let inventory = self.parts.inventory.inventory();
        let modes = self.modes(&concerned, inventory.as_deref());
        // What a lost record has made looks as if others had.
        let lost = matches!(own, Stored::Absent) && self.record_was_lost(&claim.uid, None);
        let living = if lost { Living::new() } else { self.living(claim, &ordinals, inventory.as_deref()) };
        let snapshot = Snapshot {
            driver: &self.config.driver,
            inventory: inventory.as_deref(),
            ordinals: &ordinals,
            records: &records,
            gpus: &gpus,
            boot: &self.config.boot,
            modes: &modes,
            living: &living,
        };
        match (self.config.decide)(claim, &snapshot) {
            Decision::Ready(_) if own.fine().is_some_and(|record| !self.partitions_live(record)) => {
                // The same answer would name what is gone: undone first (a partition that is gone is no error), then
                // made anew under the same names.
                let why = "its partitions are gone, though it was prepared".to_owned();
                let leaving = Leaving { reason: why.clone(), undoing: true };
                if let Some(record) = own.fine() {
                    let record = Record { phase: Phase::Leaving(leaving), ..record.clone() };
                    self.state.write_record(&record).map_err(stored)?;
                }
                Ok(Attempt::Again(PrepareError::Gone { claim: claim.reference() }, None))
            }
            Decision::Ready(prepared) => match own.fine().map(|record| self.ensure_cdi(record)).transpose() {
                Ok(_) => {
                    self.note_repeat(&claim.uid, call);
                    self.note_pods(claim, own.fine());
                    Ok(Attempt::Done(prepared))
                }
                Err(source) => again_if_transient(PrepareError::Cdi { claim: claim.reference(), source }),
            },
            Decision::Wait(holders) => Ok(Attempt::Wait(holders)),
            Decision::Refuse(refusal) if refusal.retry() == Retry::Soon => {
                let fenced_by = match &refusal {
                    Refusal::Fenced { gpu, .. } => {
                        let fences = gpus.get(gpu).and_then(Stored::fine).into_iter().flat_map(|s| &s.fences);
                        fences.filter_map(|fence| fence.claim.clone()).find(|uid| *uid != claim.uid)
                    }
                    _ => None,
                };
                Ok(Attempt::Again(refusal.into(), fenced_by))
            }
            Decision::Refuse(refusal) => Err(refusal.into()),
            Decision::Run(plan) => {
                let mut revived = own.fine();
                if plan.undo_first
                    && let Some(record) = revived.take()
                    && let Some(why) = self.undo_first(claim, record)?
                {
                    return Ok(Attempt::Again(why, None));
                }
                if revived.is_none()
                    && let Some(refusal) = self.strangers(claim, &plan, &records)
                {
                    return Ok(Attempt::Again(refusal.into(), None));
                }
                if let Some(refusal) = self.take_gpus(claim, &plan) {
                    self.leave_gpus(&concerned);
                    return Ok(Attempt::Again(refusal.into(), None));
                }
                match self.run(claim, plan, revived, call) {
                    Ok(prepared) => Ok(Attempt::Done(prepared)),
                    Err(error) => {
                        self.leave_gpus(&concerned);
                        again_if_transient(error)
                    }
                }
            }
        }
    }

    /// Keeps unprepares that arrived before from undoing the claim: its record tells of its first prepare only. A full
    /// disk must not keep a claim from its next pod.
    fn note_repeat(&self, uid: &ClaimUid, call: &Call) {
        let trace = Trace { boot: self.config.boot.clone(), at: call.received };
        if let Err(error) = self.state.write_trace(Traced::RepeatedPrepare, uid, &trace) {
            tracing::warn!(
                claim.uid = %uid,
                error = crate::chain(&error),
                "prepared again without a trace: an unprepare of it that is still under way may come after"
            );
        }
    }

    /// Other pods use the claim than those that the record tells. For people, and to know its processes: a full disk must
    /// not keep a claim from them.
    fn note_pods(&self, claim: &Claim, record: Option<&Record>) {
        let is_news = |record: &&Record| !claim.pods.is_empty() && record.pods != claim.pods;
        let Some(record) = record.filter(is_news) else { return };
        let record = Record { pods: claim.pods.clone(), ..record.clone() };
        if let Err(error) = self.state.write_record(&record) {
            tracing::warn!(claim.uid = %claim.uid, error = crate::chain(&error), "its new pods are not on record");
        }
    }

    /// MIG modes as they are now, of GPUs that have one.
    fn modes(
        &self,
        gpus: &BTreeSet<GpuUuid>,
        inventory: Option<&Inventory>,
    ) -> BTreeMap<GpuUuid, Result<MigMode, GpuError>> {
        let has_one = |gpu: &&GpuUuid| {
            let found = inventory.and_then(|inventory| inventory.gpus.get(gpu));
            found.is_some_and(|gpu| gpu.facts.mig_mode != MigMode::Unsupported)
        };
        gpus.iter().filter(has_one).map(|gpu| (gpu.clone(), self.parts.steps.mig_mode(gpu))).collect()
    }

    /// Undoes the claim's earlier allocation, or a prepare that a crash cut short. `Some` if that is not possible yet.
    fn undo_first(&self, claim: &Claim, record: &Record) -> Result<Option<PrepareError>, PrepareError> {
        let reference = || claim.reference();
        let device = || record.devices.first().map(|d| (d.allocated.device.clone(), d.gpu.clone()));
        match self.release(record) {
            Ok(Release::Released) => Ok(None),
            Ok(Release::Blocked { why, .. }) => Ok(device().map(|(device, _)| {
                Refusal::StillHeld { claim: reference(), device, holder: record.reference(), why }.into()
            })),
            Err(Left::Steps { reason, .. }) => Ok(device()
                .map(|(device, gpu)| Refusal::Fenced { claim: reference(), device, gpu, reason }.into())),
            Err(Left::Store(source)) => Err(PrepareError::Store { claim: reference(), source }),
            Err(Left::Cdi(source)) => Err(PrepareError::Cdi { claim: reference(), source }),
        }
    }

    /// Sees to it that holders who may go do go. No lock is held. An error if one of them will not; else the refusal
    /// that tells whom the claim waited for in vain.
    fn press(
        &self,
        claim: &Claim,
        wanted: &Holders,
        asked: &mut BTreeMap<ClaimUid, Duration>,
        until: Duration,
    ) -> Result<Refusal, PrepareError> {
        let mut why = None;
        // For all together: of a crowd of holders that others are at work on, none is waited for longer than of one.
        let at_work = self.parts.clock.now() + BRIEFLY;
        for holder in &wanted.holders {
            let (uid, name) = match holder {
                Holder::Record { claim, .. } => (&claim.uid, Some(claim)),
                Holder::Unreadable { claim, .. } => (claim, None),
            };
            let now = self.parts.clock.now();
            let ask = asked.get(uid).is_none_or(|last| now >= *last + ASK_AGAIN);
            match holder {
                Holder::Record { claim: holder, device, leaving, clash } => {
                    if ask && leaving.is_none() {
                        asked.insert(uid.clone(), now);
                        if let Lookup::Found(found) = self.parts.claims.look_up(uid, name, until)
                            && found.allocates(device)
                        {
                            return Err(in_use(claim, wanted, holder, device, *clash).into());
                        }
                    }
                    // Only finishes what was unprepared or cut short; a live holder is left alone.
                    drop(self.finish(uid, at_work));
                    why.get_or_insert_with(|| Refusal::StillHeld {
                        claim: claim.reference(),
                        device: wanted.device.clone(),
                        holder: holder.clone(),
                        why: leaving.clone().unwrap_or_else(|| "it has not been unprepared yet".to_owned()),
                    });
                }
                Holder::Unreadable { reason, .. } => {
                    if ask {
                        asked.insert(uid.clone(), now);
                        match self.parts.claims.look_up(uid, name, until) {
                            Lookup::Found(found) => drop(self.rebuild(uid, Some(&found))),
                            Lookup::Gone => drop(self.rebuild(uid, None)),
                            Lookup::Unknown(_) => {}
                        }
                    }
                    why.get_or_insert_with(|| Refusal::UnreadableHolder {
                        claim: claim.reference(),
                        device: wanted.device.clone(),
                        gpu: wanted.gpu.clone(),
                        holder: uid.to_string(),
                        reason: reason.clone(),
                    });
                }
            }
        }
        Ok(why.unwrap_or(Refusal::NoInventory))
    }

    pub(crate) fn lock_claim(&self, uid: &ClaimUid, until: Duration) -> Result<LockGuard, LockError> {
        self.parts.locks.acquire(&LockName::Claim(uid.clone()), until)
    }

    /// In UUID order, after the claim's: nobody waits for somebody who waits for him.
    pub(crate) fn lock_gpus(
        &self,
        gpus: &BTreeSet<GpuUuid>,
        until: Duration,
    ) -> Result<Vec<LockGuard>, LockError> {
        gpus.iter().map(|gpu| self.parts.locks.acquire(&LockName::Gpu(gpu.clone()), until)).collect()
    }

    /// All records that can be read and are not this claim's.
    pub(crate) fn others<'a>(records: &'a Records, uid: &'a ClaimUid) -> impl Iterator<Item = &'a Record> {
        records.iter().filter(move |(other, _)| *other != uid).filter_map(|(_, stored)| stored.fine())
    }

    /// Whether the claim has a record that says it is prepared.
    pub(crate) fn is_prepared(stored: &Stored<Record>) -> bool {
        stored.fine().is_some_and(|record| record.phase == Phase::Prepared)
    }
}

/// What a claim is told of a holder that is in use.
fn in_use(claim: &Claim, wanted: &Holders, holder: &ClaimRef, held: &DeviceName, clash: Clash) -> Refusal {
    let (claim, device, gpu) = (claim.reference(), wanted.device.clone(), wanted.gpu.clone());
    let (holder, held) = (holder.clone(), held.clone());
    match clash {
        Clash::Device => Refusal::HeldByLiveClaim { claim, device, holder, held },
        Clash::Mode => Refusal::ModeConflict { claim, device, gpu, holder, held },
        Clash::TimeSlice { wanted, found } => {
            Refusal::TimeSliceConflict { claim, device, gpu, wanted, holder, found }
        }
    }
}

/// Missing driver files or device nodes may be on their way; nothing has been left behind.
fn again_if_transient(error: PrepareError) -> Result<Attempt, PrepareError> {
    match &error {
        PrepareError::Cdi { source, .. } if CdiError::is_transient(source) => Ok(Attempt::Again(error, None)),
        PrepareError::Step { source, .. } if source.cause().soon => Ok(Attempt::Again(error, None)),
        _ => Err(error),
    }
}

/// GPUs the claim's devices are on, as far as names can be resolved.
pub(crate) fn gpus_of(claim: &Claim, ordinals: &Ordinals) -> BTreeSet<GpuUuid> {
    let kinds = claim.allocation.results.iter().filter_map(|r| DeviceKind::parse(&r.device).ok());
    kinds.filter_map(|kind| ordinals.gpu(kind.ordinal()).cloned()).collect()
}
