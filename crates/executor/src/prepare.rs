//! Prepare: locks, snapshot, decision; then carry it out, or wait without any lock and look again.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{
    Claim, Decision, Holder, Holders, Leaving, OtherClaim, Phase, Plan, Prepared, ProcessOnGpu, Record,
    Refusal, Retry, Snapshot, Stored, Why,
};
use divvy_model::mig::PartitionName;
use divvy_model::{ClaimUid, DeviceKind, GpuError, GpuUuid, Inventory, MigMode, Ordinals};

use crate::run::Before;
use crate::state::{Gpus, Records};
use crate::unprepare::BRIEFLY;
use crate::unwind::LeftBehind;
use crate::{
    Call, Event, Executor, ExecutorConfig, LockError, LockGuard, LockName, Lookup, PrepareCause,
    PrepareError, StoreError,
};

/// How often a holder is asked for at the API while it is waited for.
const ASK_AGAIN: Duration = Duration::from_secs(2);
/// A call that has waited this long for its locks reads its claim again.
const STALE_AFTER: Duration = Duration::from_secs(1);

/// One attempt, made under the locks.
enum Attempt {
    Done(Prepared),
    /// The claim's record was rebuilt: decided again.
    MadeAgain,
    /// The call has waited, and the claim may have been allocated anew since: looked up without any lock.
    LookUp,
    /// Others are in the way.
    Wait(Holders),
    /// It may go better soon; this is the answer if it does not.
    Again(PrepareCause, Option<Blocker>),
}

/// What fences a GPU.
enum Blocker {
    Claim(ClaimUid),
    Gpu(GpuUuid),
}

impl Executor {
    /// Prepares a claim and returns the answer for the kubelet. Blocks: everything that can pass within seconds is retried
    /// inside the call. Calls for one claim may come at once; they take turns.
    pub fn prepare(&self, claim: &Claim, call: &Call) -> Result<Prepared, PrepareError> {
        self.try_until_done(claim, call).map_err(|cause| PrepareError { claim: claim.reference(), cause })
    }

    fn try_until_done(&self, claim: &Claim, call: &Call) -> Result<Prepared, PrepareCause> {
        let give_up = call.give_up(self.config.timing.hand_over);
        let mut claim = Cow::Borrowed(claim);
        let mut asked = BTreeMap::new();
        // What the claim has allocated was read just before the call.
        let mut is_fresh = true;
        loop {
            let mut seen = self.state.records_stamp();
            let begun = self.parts.clock.now();
            let why = match self.attempt(&claim, call, is_fresh)? {
                Attempt::Done(prepared) => return Ok(prepared),
                Attempt::MadeAgain => PrepareCause::Lost(
                    "it is unreadable again right after it was rebuilt (check the disk of the node)".into(),
                ),
                // It may have been deallocated while the call waited, and allocated anew.
                Attempt::LookUp => {
                    match self.parts.claims.look_up(&claim.uid, Some(&claim.reference()), give_up) {
                        Lookup::Found(now) => {
                            claim = Cow::Owned(*now);
                            is_fresh = true;
                            continue;
                        }
                        Lookup::Gone => return Err(PrepareCause::Deallocated),
                        Lookup::Unknown(why) => PrepareCause::NotAsked(why),
                    }
                }
                Attempt::Wait(holders) => self.press(&claim, &holders, &mut asked, give_up)?.into(),
                Attempt::Again(why, blocker) => {
                    let until = self.parts.clock.now() + BRIEFLY;
                    match blocker {
                        // The late call may have come back.
                        Some(Blocker::Claim(uid)) => drop(self.finish(&uid, until)),
                        Some(Blocker::Gpu(gpu)) => self.repair_gpu(&gpu),
                        // Ignore changes made by this attempt, or it would retry immediately.
                        None => seen = self.state.records_stamp(),
                    }
                    why
                }
            };
            self.wait_for_change(call, begun, seen, why)?;
            is_fresh = false;
        }
    }

    /// What a claim's prepare depends on. Under the locks of the GPUs concerned.
    pub(crate) fn look<'a>(
        &'a self,
        claim: &Claim,
        ordinals: &'a Ordinals,
        concerned: &BTreeSet<GpuUuid>,
    ) -> Result<Snapshot<'a>, StoreError> {
        let inventory = self.parts.inventory.inventory();
        let modes = self.modes(concerned, inventory.as_deref());
        let living = self.living(claim, ordinals, inventory.as_deref());
        let (records, mut gpus) = (self.state.records()?, self.state.gpus()?);
        for gpu in concerned {
            gpus.entry(gpu.clone()).or_insert_with(|| Arc::new(Stored::Fine(self.without_file(gpu))));
        }
        let processes = self.processes(claim, ordinals, concerned, &records);
        let ExecutorConfig { driver, boot, extra_nodes, .. } = &self.config;
        Ok(Snapshot {
            driver,
            inventory,
            ordinals,
            records,
            gpus,
            boot,
            modes,
            processes,
            living,
            extra_nodes,
        })
    }

    /// Processes on GPUs that no other claim holds, and on those of which the claim has a partition that others have made:
    /// they may use it. Of a claim that is prepared already none is asked for.
    fn processes(
        &self,
        claim: &Claim,
        ordinals: &Ordinals,
        gpus: &BTreeSet<GpuUuid>,
        records: &Records,
    ) -> BTreeMap<GpuUuid, Vec<ProcessOnGpu>> {
        if records.get(&claim.uid).is_some_and(|stored| Self::is_prepared(stored)) {
            return BTreeMap::new();
        }
        let mut passed_over: BTreeSet<_> = Self::others(records, &claim.uid)
            .flat_map(Record::holds)
            .filter(|hold| hold.kind.needs().is_some())
            .map(|hold| hold.gpu)
            .collect();
        let names = claim.allocation.results.iter().filter_map(|r| PartitionName::parse(&r.device).ok());
        for gpu in names.filter(|name| name.is_static).filter_map(|name| ordinals.gpu(name.ordinal)) {
            passed_over.remove(gpu);
        }
        let on = |gpu: &GpuUuid| Some((gpu.clone(), self.parts.processes.on_gpu(gpu).ok()?));
        gpus.difference(&passed_over).filter_map(on).collect()
    }

    fn attempt(&self, claim: &Claim, call: &Call, is_fresh: bool) -> Result<Attempt, PrepareCause> {
        let begun = self.parts.clock.now();
        let _claim_lock = self.lock_claim(&claim.uid, call.until)?;
        if let Some(tombstone) = self.state.tombstone(&claim.uid)?
            && tombstone.boot == self.config.boot
            && tombstone.at >= call.received
        {
            return Err(PrepareCause::Unprepared);
        }
        let ordinals = self.state.ordinals()?;
        let own = Arc::new(self.state.record(&claim.uid)?);
        let mut concerned = gpus_of(claim, &ordinals);
        concerned.extend(own.fine().map(Record::gpus).unwrap_or_default());
        let gpu_locks = self.lock_gpus(&concerned, call.until)?;
        let is_fresh = is_fresh && self.parts.clock.now() < begun + STALE_AFTER;
        let mut seen = self.look(claim, &ordinals, &concerned)?;
        // As the disk gives it back, whatever is remembered of it.
        match *own {
            Stored::Absent => drop(seen.records.remove(&claim.uid)),
            _ => drop(seen.records.insert(claim.uid.clone(), own.clone())),
        }
        match (self.config.decide)(claim, &seen) {
            Decision::Rebuild => {
                drop(gpu_locks);
                Ok(self.make_again(claim))
            }
            Decision::Ready(prepared) => match own.fine() {
                Some(record) if !self.partitions_live(record) => self.undo_what_is_gone(record),
                Some(record) => match self.ensure_cdi(record) {
                    Ok(_) => {
                        self.note_again(claim, record, call);
                        Ok(Attempt::Done(prepared))
                    }
                    Err(error) => again_if_transient(error.into()),
                },
                None => Ok(Attempt::Done(prepared)),
            },
            Decision::Wait(holders) => Ok(Attempt::Wait(holders)),
            Decision::Refuse(refusal) if refusal.retry() == Retry::Soon => {
                let fenced = refusal.gpu.as_ref().filter(|_| matches!(refusal.why, Why::Fenced(_)));
                let blocker = fenced.map(|gpu| self.blocker(&seen.gpus, gpu, &claim.uid));
                Ok(Attempt::Again(refusal.into(), blocker))
            }
            Decision::Refuse(refusal) => Err(refusal.into()),
            Decision::Run(_) if !is_fresh => Ok(Attempt::LookUp),
            Decision::Run(plan) => self.carry_out(claim, plan, own.fine(), call),
        }
    }

    /// The claim's record was lost or cannot be read. Under the claim's lock.
    fn make_again(&self, claim: &Claim) -> Attempt {
        let why = match self.rebuild_locked(&claim.uid, Some(claim), self.parts.clock.now() + BRIEFLY) {
            Some(Event::Failed { error, .. }) => error,
            Some(_) => return Attempt::MadeAgain,
            None => "another call is running for it".to_owned(),
        };
        Attempt::Again(PrepareCause::Lost(why), None)
    }

    fn carry_out(
        &self,
        claim: &Claim,
        plan: Plan,
        own: Option<&Record>,
        call: &Call,
    ) -> Result<Attempt, PrepareCause> {
        let before = match own {
            Some(record) if plan.undo_first => {
                if let Some(why) = self.undo_first(claim, record)? {
                    return Ok(Attempt::Again(why.into(), None));
                }
                Before::Nothing
            }
            Some(record) if !self.partitions_live(record) => return self.undo_what_is_gone(record),
            Some(record) => Before::Lingering(record.clone()),
            None => Before::Nothing,
        };
        let gpus: BTreeSet<GpuUuid> = plan.devices.iter().map(|device| device.gpu.clone()).collect();
        if let Some(refusal) = self.take_gpus(claim, &plan) {
            self.leave_gpus(&gpus);
            return Ok(Attempt::Again(refusal.into(), None));
        }
        match self.run(claim, plan, &before, call) {
            Ok(prepared) => Ok(Attempt::Done(prepared)),
            Err(cause) => {
                self.leave_gpus(&gpus);
                again_if_transient(cause)
            }
        }
    }

    /// The same answer would name what is gone: undone first (a partition that is gone is no error), then made anew under
    /// the same names.
    fn undo_what_is_gone(&self, record: &Record) -> Result<Attempt, PrepareCause> {
        let reason = "its partitions no longer exist although it was prepared".to_owned();
        let phase = Phase::Leaving(Leaving { reason, undoing: true });
        self.state.write_record(&Record { phase, ..record.clone() })?;
        Ok(Attempt::Again(PrepareCause::Gone, None))
    }

    /// What keeps a GPU fenced: a claim whose step has an unknown outcome, or the GPU's own file.
    fn blocker(&self, gpus: &Gpus, gpu: &GpuUuid, own: &ClaimUid) -> Blocker {
        let fences =
            gpus.get(gpu).and_then(|stored| stored.fine()).into_iter().flat_map(|state| &state.fences);
        let mut claims =
            fences.filter(|fence| fence.boot == self.config.boot).filter_map(|fence| fence.claim.clone());
        claims.find(|uid| uid != own).map_or_else(|| Blocker::Gpu(gpu.clone()), Blocker::Claim)
    }

    /// A claim that is prepared already was asked for again: its record says when, which keeps unprepares that arrived
    /// before from undoing it, and for which pods. A full disk must not keep a claim from its next pod.
    fn note_again(&self, claim: &Claim, record: &Record, call: &Call) {
        let mut again = Record { received: record.received.max(Some(call.received)), ..record.clone() };
        if !claim.pods.is_empty() {
            again.pods.clone_from(&claim.pods);
        }
        if again != *record
            && let Err(error) = self.state.write_record(&again)
        {
            tracing::warn!(
                claim.uid = %claim.uid,
                error = crate::chain(&error),
                "failed to record that the claim is prepared again; a running unprepare may still undo it"
            );
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
    fn undo_first(&self, claim: &Claim, record: &Record) -> Result<Option<Refusal>, PrepareCause> {
        let why = match self.release(record) {
            Ok(()) => return Ok(None),
            Err(LeftBehind::InUse(why)) => {
                let holder = OtherClaim::seen_from(&claim.namespace, &record.reference());
                Why::StillHeld { holder, why }
            }
            Err(LeftBehind::Steps { reason, .. }) => Why::Fenced(reason),
            Err(LeftBehind::Store(error)) => return Err(error.into()),
            Err(LeftBehind::Cdi(error)) => return Err(error.into()),
        };
        Ok(record.devices.first().map(|device| why.about(claim, device)))
    }

    /// Asks holders that can be released to release. No lock is held. An error if one of them cannot be; else the refusal
    /// that names the holder for which the claim waited in vain.
    fn press(
        &self,
        claim: &Claim,
        wanted: &Holders,
        asked: &mut BTreeMap<ClaimUid, Duration>,
        until: Duration,
    ) -> Result<Refusal, Refusal> {
        // For all together: of a crowd of holders that others are at work on, none is waited for longer than of one.
        let at_work = self.parts.clock.now() + BRIEFLY;
        for holder in &wanted.holders {
            let (uid, name) = holder.claim();
            let now = self.parts.clock.now();
            let is_leaving = matches!(holder, Holder::Record { leaving: Some(_), .. });
            let mut found = Lookup::Unknown(String::new());
            if !is_leaving && asked.get(uid).is_none_or(|last| now >= *last + ASK_AGAIN) {
                asked.insert(uid.clone(), now);
                found = self.parts.claims.look_up(uid, name, until);
            }
            match (holder, found) {
                (_, Lookup::Found(found)) if holder.is_in_use(&found) => {
                    return Err(holder.refusal(claim, wanted, true));
                }
                // Only finishes what was unprepared or cut short; a live holder is left alone.
                (Holder::Record { .. }, _) => drop(self.finish(uid, at_work)),
                (Holder::Unreadable { .. }, Lookup::Found(found)) => drop(self.rebuild(uid, Some(&found))),
                (Holder::Unreadable { .. }, Lookup::Gone) => drop(self.rebuild(uid, None)),
                (Holder::Unreadable { .. }, Lookup::Unknown(_)) => {}
            }
        }
        let first = wanted.holders.first().map(|holder| holder.refusal(claim, wanted, false));
        Ok(first.unwrap_or_else(|| Why::NoInventory.of(claim, None, None)))
    }

    pub(crate) fn lock_claim(&self, uid: &ClaimUid, until: Duration) -> Result<LockGuard, LockError> {
        self.parts.locks.acquire(&LockName::Claim(uid.clone()), until)
    }

    /// Locks are taken in UUID order, after the claim lock, so that calls cannot deadlock.
    pub(crate) fn lock_gpus(
        &self,
        gpus: &BTreeSet<GpuUuid>,
        until: Duration,
    ) -> Result<Vec<LockGuard>, LockError> {
        gpus.iter().map(|gpu| self.parts.locks.acquire(&LockName::Gpu(gpu.clone()), until)).collect()
    }

    /// One GPU's lock, if no call that takes long has it.
    pub(crate) fn lock_gpu(&self, gpu: &GpuUuid) -> Result<LockGuard, LockError> {
        self.parts.locks.acquire(&LockName::Gpu(gpu.clone()), self.parts.clock.now() + BRIEFLY)
    }

    /// All records that can be read and are not this claim's.
    pub(crate) fn others<'a>(records: &'a Records, uid: &'a ClaimUid) -> impl Iterator<Item = &'a Record> {
        records.iter().filter(move |(other, _)| *other != uid).filter_map(|(_, stored)| stored.fine())
    }

    /// UIDs of the pods that other claims' records name, of claims that have a device on this GPU.
    pub(crate) fn pods_on<'a>(records: &'a Records, uid: &'a ClaimUid, gpu: &GpuUuid) -> BTreeSet<&'a str> {
        let there = Self::others(records, uid).filter(|record| record.devices.iter().any(|d| d.gpu == *gpu));
        there.flat_map(|record| &record.pods).map(|pod| pod.uid.as_str()).collect()
    }

    /// Whether the claim has a record that says it is prepared.
    pub(crate) fn is_prepared(stored: &Stored<Record>) -> bool {
        stored.fine().is_some_and(|record| record.phase == Phase::Prepared)
    }
}

/// Missing driver files or device nodes may be on their way; nothing has been left behind.
fn again_if_transient(cause: PrepareCause) -> Result<Attempt, PrepareCause> {
    match &cause {
        PrepareCause::Cdi(source) if source.is_transient() => Ok(Attempt::Again(cause, None)),
        PrepareCause::Step { source, .. } if source.cause().is_passing() => Ok(Attempt::Again(cause, None)),
        _ => Err(cause),
    }
}

/// GPUs the claim's devices are on, as far as names can be resolved.
pub(crate) fn gpus_of(claim: &Claim, ordinals: &Ordinals) -> BTreeSet<GpuUuid> {
    let kinds = claim.allocation.results.iter().filter_map(|r| DeviceKind::parse(&r.device).ok());
    kinds.filter_map(|kind| ordinals.gpu(kind.ordinal()).cloned()).collect()
}
