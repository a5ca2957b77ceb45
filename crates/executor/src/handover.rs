//! Waiting of a prepare for others, without any lock.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_claims::{Claim, Holder, Holders, Refusal};
use divvy_model::ClaimUid;

use crate::context::Context;
use crate::rebuild::rebuild;
use crate::release::finish;
use crate::{Call, Lookup, PrepareCause, Stamp};

/// Interval at which the API is asked for a holder that is waited for.
const ASK_AGAIN: Duration = Duration::from_secs(2);

/// Minimum delay between attempts, so that prepares waiting for each other do not wake one another
/// in a loop.
const BREATH: Duration = Duration::from_millis(2);

/// Asks the API about holders, and finishes those that are no longer in use. No lock is held. Fails
/// if one of them is in use; else returns the refusal that names the holder for which the claim
/// waited in vain.
pub(crate) fn ask_holders_to_release(
    context: &Context,
    claim: &Claim,
    wanted: &Holders,
    asked: &mut BTreeMap<ClaimUid, Duration>,
    until: Duration,
) -> Result<Refusal, Refusal> {
    // For all together: of a crowd of holders that others are at work on, none is waited for
    // longer than of one.
    let at_work = context.briefly();
    for holder in &wanted.holders {
        let (uid, name) = holder.claim();
        let now = context.now();
        let is_leaving = matches!(
            holder,
            Holder::Record {
                leaving: Some(_),
                ..
            }
        );
        let mut found = Lookup::Unknown(String::new());
        // A holder that is leaving needs no question: it is finished as soon as its processes are
        // gone. Others are asked for at intervals: a holder that is in use after all ends the wait
        // with a refusal.
        if !is_leaving && asked.get(uid).is_none_or(|last| now >= *last + ASK_AGAIN) {
            asked.insert(uid.clone(), now);
            found = context.parts.claims.look_up(uid, name, until);
        }
        match (holder, found) {
            (_, Lookup::Found(found)) if holder.is_in_use(&found) => {
                return Err(holder.refusal(claim, wanted, true));
            }
            // Only finishes what was unprepared or cut short; a live holder is left alone.
            (Holder::Record { .. }, _) => drop(finish(context, uid, at_work)),
            (Holder::Unreadable { .. }, Lookup::Found(found)) => {
                drop(rebuild(context, uid, Some(&found)));
            }
            (Holder::Unreadable { .. }, Lookup::Gone) => drop(rebuild(context, uid, None)),
            (Holder::Unreadable { .. }, Lookup::Unknown(_)) => {}
        }
    }
    Ok(wanted.refusal(claim))
}

/// Waits until the attempt that began at `begun`, when the records had the stamp `seen`, may go
/// better: the folder of records changes (the unprepare that is waited for may reach the other
/// plugin instance), or it is time to look at everything else. Returns false when there is no
/// more time for that.
pub(crate) fn wait_for_change(
    context: &Context,
    call: &Call,
    begun: Duration,
    seen: Option<Stamp>,
) -> Result<bool, PrepareCause> {
    let timing = &context.config.timing;
    let look_again = context.now() + timing.look_again;
    loop {
        if call.cancel.is_cancelled() {
            return Err(PrepareCause::Cancelled);
        }
        let now = context.now();
        if now >= call.give_up(timing.hand_over) {
            return Ok(false);
        }
        let changed = context.state.records_stamp() != seen;
        if now >= look_again || (changed && now >= begun + BREATH) {
            return Ok(true);
        }
        // The longer it has waited the less a few milliseconds more matter.
        let pause = (now.saturating_sub(call.received) / 16).clamp(BREATH, timing.poll.max(BREATH));
        context.parts.clock.sleep(pause);
    }
}
