//! Prepare: locks, snapshot, decision; then carry it out, or wait without any lock and look again.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{
    Claim, Decision, Holders, Phase, Prepared, Record, RecordedDevice, Refusal, Stored, decide,
};
use divvy_gpu::Retry;
use divvy_model::GpuUuid;

use crate::context::Context;
use crate::files::Files;
use crate::gpus::Gpus;
use crate::handover::{ask_holders_to_release, wait_for_change};
use crate::hold::{Wanted, hold};
use crate::lost::{Served, serve};
use crate::owned::{leave_gpus, take_gpus};
use crate::rebuild::rebuild_locked;
use crate::release::{LeftBehind, let_go};
use crate::snapshot::{Look, gpus_of, look};
use crate::state::Tombstone;
use crate::{Call, CdiError, Event, Lookup, PrepareCause, Refresh, chain};

/// Waiting time after which a call reads its claim again.
const STALE_AFTER: Duration = Duration::from_secs(1);

/// Outcome of one attempt, made under the locks.
enum Attempt {
    Done(Prepared),
    /// The claim's earlier allocation was let go.
    LetGo,
    /// The claim's record is to be rebuilt, under the claim's lock alone.
    Rebuild,
    /// The claim's record was rebuilt: decided again.
    MadeAgain,
    /// The call has waited, and the claim may have been allocated anew since: it is looked up
    /// without any lock.
    LookUp,
    /// Others are in the way.
    Wait(Holders),
    /// It may go better soon; this is the answer if it does not. The GPU has an open question.
    Again(PrepareCause, Option<GpuUuid>),
}

/// Prepares a claim and returns the answer for the kubelet: tries until it is done, or nothing that
/// can pass within seconds is in the way any more, or there is no time left.
pub(crate) fn prepare(
    context: &Context,
    claim: &Claim,
    call: &Call,
) -> Result<Prepared, PrepareCause> {
    let give_up = call.give_up(context.config.timing.hand_over);
    let mut claim = Cow::Borrowed(claim);
    let mut asked = BTreeMap::new();
    // The claim was read just before the call.
    let mut is_fresh = true;
    // The last cause but an API that does not answer, which says less.
    let mut before = String::new();
    loop {
        // Before the attempt, so that a change during it is not missed while waiting.
        let mut seen = context.state.records_stamp();
        let begun = context.now();
        // An error that waiting does not end leaves by `?`. Everything below may pass within
        // seconds, and `why` is the answer if it does not.
        let why = match attempt(context, &claim, call, is_fresh)? {
            Attempt::Done(prepared) => return Ok(prepared),
            // The record was written after `seen` was taken: the wait below ends at once, and the
            // next attempt finds it. The text is the answer only where there is no more time.
            Attempt::Rebuild | Attempt::MadeAgain | Attempt::LetGo => PrepareCause::Lost(
                "it was rebuilt just now, and no time of this call is left (the kubelet tries again; if this repeats, check the disk of the node)"
                    .into(),
            ),
            // It may have been deallocated while the call waited, and allocated anew.
            Attempt::LookUp => {
                let api = &context.parts.claims;
                match api.look_up(&claim.uid, Some(&claim.reference()), give_up) {
                    Lookup::Found(now) => {
                        claim = Cow::Owned(*now);
                        is_fresh = true;
                        continue;
                    }
                    Lookup::Gone => return Err(PrepareCause::Deallocated),
                    Lookup::Unknown(why) => PrepareCause::NotAsked(why + &before),
                }
            }
            Attempt::Wait(holders) => {
                ask_holders_to_release(context, &claim, &holders, &mut asked, give_up)?.into()
            }
            Attempt::Again(why, Some(gpu)) => {
                // The attempt has released its locks: settling takes the GPU's by itself.
                settle(context, &gpu);
                why
            }
            Attempt::Again(why, None) => {
                // Changes made by this attempt do not count, or it would be made again at once.
                seen = context.state.records_stamp();
                why
            }
        };
        if !wait_for_change(context, call, begun, seen)? {
            return Err(why);
        }
        if !matches!(why, PrepareCause::NotAsked(_)) {
            before = format!(" (the attempt before failed: {})", chain(&why));
        }
        is_fresh = false;
    }
}

/// Asks the hardware about what is in doubt on a GPU: a late call may have come back.
fn settle(context: &Context, gpu: &GpuUuid) {
    if let Err(error) = Gpus::of(context).settle_now(gpu) {
        tracing::warn!(%gpu, error = chain(&error), "failed to settle the GPU's state, will retry");
    }
}

/// Makes one attempt: takes the claim's lock and then those of its GPUs, reads everything under
/// them, decides, and acts on nothing that was read before.
fn attempt(
    context: &Context,
    claim: &Claim,
    call: &Call,
    is_fresh: bool,
) -> Result<Attempt, PrepareCause> {
    let begun = context.now();
    let _claim_lock = context.lock_claim(&claim.uid, call.until)?;
    // An unprepare that arrived later has been here first.
    let tombstone = context.state.tombstone(&claim.uid)?;
    let tombstone = tombstone.filter(|one| one.boot == context.config.boot);
    if tombstone
        .as_ref()
        .is_some_and(|one| one.at >= call.received)
    {
        return Err(PrepareCause::Unprepared);
    }
    // Names resolve to GPUs by the numbers on disk, and not by the present pool: it may have
    // changed since the scheduler chose.
    let ordinals = context.state.ordinals()?;
    let own = Arc::new(context.state.record(&claim.uid)?);
    // The GPUs of the record too: an earlier allocation may be let go before the new one is taken,
    // under the same locks.
    let mut concerned = gpus_of(claim, &ordinals, true);
    concerned.extend(own.fine().map(Record::gpus).unwrap_or_default());
    let gpu_locks = context.lock_gpus(&concerned, call.until)?;
    // The claim's allocation may have changed while the locks were waited for.
    let is_fresh = is_fresh && context.now() < begun + STALE_AFTER;

    // Take the GPUs from other drivers of ours before looking at them: from here on no other driver
    // can take them until this attempt has decided. A claim that is answered again has them
    // already.
    let wanted = gpus_of(claim, &ordinals, false);
    let boot = &context.config.boot;
    let is_answered = own
        .fine()
        .is_some_and(|record| record.answers(&claim.allocation, boot));
    let others = if is_answered {
        BTreeMap::new()
    } else {
        take_gpus(context, &claim.reference(), &wanted)
    };
    let look = || look(context, claim, &ordinals, &concerned, others.clone());
    let done = look()
        .map_err(PrepareCause::from)
        .and_then(|seen| act(context, claim, seen, &own, call, is_fresh))
        .and_then(|done| match done {
            // What was decided on is no longer so: look and decide again, under the same locks.
            Attempt::LetGo => {
                let own = Arc::new(Stored::Absent);
                act(context, claim, look()?, &own, call, is_fresh)
            }
            done => Ok(done),
        });
    // The claim may have none of its GPUs in the end.
    if matches!(done, Ok(Attempt::Done(_))) {
        note_prepared_again(context, claim, tombstone);
    } else {
        leave_gpus(context, &wanted);
    }
    // Making the record again takes the locks of GPUs by itself, perhaps of others, in their order.
    // Only the claim's lock is kept for it.
    drop(gpu_locks);
    match done {
        Ok(Attempt::Rebuild) => Ok(make_again(context, claim)),
        done => done,
    }
}

/// Notes in the tombstone of an earlier unprepare that the claim is prepared again: should its
/// record be lost, the tombstone must not say that it was unprepared.
fn note_prepared_again(context: &Context, claim: &Claim, tombstone: Option<Tombstone>) {
    let Some(earlier) = tombstone.filter(|one| !one.prepared_again) else {
        return;
    };
    let again = Tombstone {
        prepared_again: true,
        ..earlier
    };
    if let Err(error) = context.state.write_tombstone(&claim.uid, &again) {
        let error = chain(&error);
        tracing::warn!(claim.uid = %claim.uid, error, "failed to note that the claim is prepared again");
    }
}

/// Decides, and acts. Under the locks of the claim and its GPUs.
fn act(
    context: &Context,
    claim: &Claim,
    mut look: Look<'_>,
    own: &Arc<Stored<Record>>,
    call: &Call,
    is_fresh: bool,
) -> Result<Attempt, PrepareCause> {
    // The record on disk counts, not a copy in memory.
    let seen = &mut look.snapshot;
    seen.records.insert(claim.uid.clone(), own.clone());
    match decide(claim, seen) {
        Decision::Rebuild => Ok(Attempt::Rebuild),
        Decision::Ready(prepared) => match own.fine() {
            Some(record) => {
                let served = serve(context, record, Refresh::Missing, &seen.hardware);
                answer_again(context, claim, record, call, served, prepared)
            }
            // The claim has no device of ours: there is nothing to serve and no record to write.
            None => Ok(Attempt::Done(prepared)),
        },
        Decision::Wait(holders) => Ok(Attempt::Wait(holders)),
        Decision::Refuse(refusal) if refusal.retry() == Retry::Soon => {
            let gpu = refusal.gpu.clone().filter(|_| refusal.is_about_doubt());
            Ok(Attempt::Again(refusal.into(), gpu))
        }
        Decision::Refuse(refusal) => Err(refusal.into()),
        // Nothing is taken on the word of an old allocation.
        Decision::Hold { .. } if !is_fresh => Ok(Attempt::LookUp),
        // Another allocation, or a prepare that a crash cut short, goes first as a whole: its
        // devices may be among the new ones.
        Decision::Hold {
            devices,
            let_go_first: true,
        } => let_go_of_earlier(context, claim, own.fine(), &devices),
        Decision::Hold {
            devices,
            let_go_first: false,
        } => take(context, claim, devices, own.fine(), &look, call),
    }
}

/// Answers again for a claim that is prepared already.
fn answer_again(
    context: &Context,
    claim: &Claim,
    record: &Record,
    call: &Call,
    served: Result<Served, CdiError>,
    prepared: Prepared,
) -> Result<Attempt, PrepareCause> {
    match served {
        Ok(Served::Current { .. }) => {
            note_again(context, claim, record, call);
            Ok(Attempt::Done(prepared))
        }
        Ok(Served::Withdrawn { .. }) => Err(Refusal::partition_gone(claim).into()),
        Ok(Served::Unknown(error)) => {
            let refusal = Refusal::partitions_unreadable(claim, error);
            Ok(Attempt::Again(refusal.into(), None))
        }
        Err(error) => again_if_transient(error.into()),
    }
}

/// Gives the claim its devices. A record that is gone on with (`earlier`) stays until its successor
/// is written, so that a failure can put it back.
fn take(
    context: &Context,
    claim: &Claim,
    devices: Vec<RecordedDevice>,
    earlier: Option<&Record>,
    look: &Look<'_>,
    call: &Call,
) -> Result<Attempt, PrepareCause> {
    let mut record = Record::new(claim, &context.config.boot, devices, Phase::Prepared);
    // Lets an unprepare that arrived before this call and gets the lock after it see that the
    // record is not its own to undo.
    record.received = Some(call.received);
    record.metadata = Files::of(context).metadata_of(claim, &record.devices);
    let wanted = Wanted {
        record,
        earlier,
        look,
        until: call.until,
    };
    match hold(context, &wanted) {
        Ok(prepared) => Ok(Attempt::Done(prepared)),
        Err(cause) => again_if_transient(cause),
    }
}

/// Lets the claim's earlier allocation go, or a prepare that a crash cut short, but for the locks
/// of the GPUs that it is to get now.
fn let_go_of_earlier(
    context: &Context,
    claim: &Claim,
    record: Option<&Record>,
    devices: &[RecordedDevice],
) -> Result<Attempt, PrepareCause> {
    let Some(record) = record else {
        return Ok(Attempt::LetGo);
    };
    let held = devices.iter().filter(|device| device.sharing.holds());
    let wanted = held.map(|device| device.gpu.clone()).collect();
    let why = match let_go(context, record, &wanted) {
        Ok(()) => None,
        Err(LeftBehind::InUse(why)) => Refusal::earlier_in_use(claim, record, why),
        Err(LeftBehind::Stuck { reason, .. }) => Refusal::earlier_stuck(claim, record, reason),
        Err(LeftBehind::Store(error)) => return Err(error.into()),
        Err(LeftBehind::Cdi(error)) => return Err(error.into()),
    };
    Ok(why.map_or(Attempt::LetGo, |why| Attempt::Again(why.into(), None)))
}

/// Notes that a claim that is prepared already was asked for again: its record says when, which
/// keeps unprepares that arrived before from undoing it, and for which pods. A full disk must not
/// keep a claim from its next pod.
fn note_again(context: &Context, claim: &Claim, record: &Record, call: &Call) {
    let mut again = Record {
        received: record.received.max(Some(call.received)),
        ..record.clone()
    };
    if !claim.pods.is_empty() {
        again.pods.clone_from(&claim.pods);
    }
    if again != *record
        && let Err(error) = context.state.write_record(&again)
    {
        tracing::warn!(
            claim.uid = %claim.uid,
            error = chain(&error),
            "failed to record that the claim is prepared again; a running unprepare may still undo it"
        );
    }
}

/// Tries again where missing driver files or device nodes may be on their way, or a change may work
/// in a moment; nothing has been left behind.
fn again_if_transient(cause: PrepareCause) -> Result<Attempt, PrepareCause> {
    match &cause {
        PrepareCause::Cdi(source) if source.is_transient() => Ok(Attempt::Again(cause, None)),
        PrepareCause::Change { source, .. } if source.cause().is_passing() => {
            Ok(Attempt::Again(cause, None))
        }
        _ => Err(cause),
    }
}

/// Makes the claim's record again, which was lost or cannot be read. Under the claim's lock.
fn make_again(context: &Context, claim: &Claim) -> Attempt {
    let why = match rebuild_locked(context, &claim.uid, Some(claim), context.briefly()) {
        Some(Event::Failed { error, .. }) => error,
        Some(_) => return Attempt::MadeAgain,
        None => "another call is running for it".to_owned(),
    };
    Attempt::Again(PrepareCause::Lost(why), None)
}
