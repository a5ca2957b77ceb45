//! Unprepare: lets a claim go, and waits a while for what is in the way.

use std::time::Duration;

use divvy_claims::{Record, Stored};
use divvy_model::ClaimUid;

use crate::context::Context;
use crate::files::Files;
use crate::gpus::Gpus;
use crate::rebuild::{rebuild, rebuild_locked};
use crate::records::is_prepared;
use crate::release::{Blocked, let_go_or_linger};
use crate::state::Tombstone;
use crate::{Call, Event, Lookup, UnprepareCause, chain};

/// Outcome of an unprepare. All of these are a success towards the kubelet: an error would leave
/// the pod terminating.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Unprepared {
    /// The devices are free.
    Done,
    /// There was nothing to undo.
    NothingThere,
    /// The claim still holds its devices, for this reason; reconcile finishes it.
    Lingering(String),
    /// The record is of a later version of divvy and stays as it is.
    LeftToNewer { version: u32 },
    /// A later prepare took the claim up again meanwhile.
    PreparedAgain,
}

/// Outcome of one turn, made under the claim's lock.
enum Turn {
    Ended(Unprepared),
    Blocked(Blocked),
    /// Its record was lost and is made again: the next turn lets it go.
    Rebuilt,
    /// Its record cannot be read, and why.
    Unreadable(String),
}

/// Pause between two looks at the processes on a device.
const PROCESS_PAUSE: Duration = Duration::from_millis(100);

/// Unprepares a claim: lets it go in turns until it is gone, or there is no time left for what is
/// in the way.
pub(crate) fn unprepare(
    context: &Context,
    uid: &ClaimUid,
    call: &Call,
) -> Result<Unprepared, UnprepareCause> {
    // A claim that lingers is answered with success too, and the pod stays in Terminating until
    // then: so this does not use up the call's time.
    let wait_until = call
        .until
        .min(call.received + context.config.timing.process_wait);
    let mut waited = Waited::default();
    // A record that is unreadable again right after it was made again is left to reconcile.
    let mut made_again = false;
    loop {
        let blocked = match turn(context, uid, call, &waited)? {
            Turn::Ended(unprepared) => return Ok(unprepared),
            Turn::Blocked(blocked) => blocked,
            Turn::Rebuilt if !std::mem::replace(&mut made_again, true) => continue,
            Turn::Rebuilt => return Ok(unreadable("it is lost again")),
            // No lock is held from here on.
            Turn::Unreadable(why) => match read_again_from_api(context, uid, wait_until) {
                Some(Event::SetAside { .. }) => return Ok(Unprepared::Done),
                // Known again; now it can be undone. No other call has prepared it meanwhile.
                Some(Event::Rebuilt { .. } | Event::Kept { .. })
                    if !std::mem::replace(&mut made_again, true) =>
                {
                    continue;
                }
                _ => return Ok(unreadable(&why)),
            },
        };
        // A prepare of the same claim cancels this call: it goes on with the record, and need not
        // wait for processes that are the claim's own.
        let is_over = context.now() >= wait_until || call.cancel.is_cancelled();
        if !blocked.soon || is_over {
            return match blocked.unwritten {
                None => Ok(Unprepared::Lingering(blocked.why)),
                Some(source) => Err(UnprepareCause::CannotLinger {
                    reason: blocked.why,
                    source,
                }),
            };
        }
        // No lock is held from here until the next turn. A prepare may take the claim up again
        // meanwhile, which that turn finds.
        waited = Waited {
            once: true,
            unwritten: blocked.unwritten.is_some(),
        };
        context.parts.clock.sleep(PROCESS_PAUSE);
    }
}

/// Turns before this one.
#[derive(Default)]
struct Waited {
    /// True if there was one.
    once: bool,
    /// True if the claim lingers and that could not be written: its record still says that it is
    /// prepared.
    unwritten: bool,
}

/// Makes one turn, under the claim's lock. The tombstone comes first, so that a prepare which
/// arrived before does not bring the claim back; the record is read after that.
fn turn(
    context: &Context,
    uid: &ClaimUid,
    call: &Call,
    waited: &Waited,
) -> Result<Turn, UnprepareCause> {
    let _claim_lock = context.lock_claim(uid, call.until)?;
    if !waited.once {
        write_tombstone(context, uid, call);
    }
    let record = context.state.record(uid)?;
    if is_prepared(&record) {
        // The turn before has written that the claim lingers. A record that says `prepared` now was
        // written by another call, unless that write failed.
        let taken_up_again = waited.once && !waited.unwritten;
        let is_later = record
            .fine()
            .is_some_and(|record| came_later(context, record, call));
        if taken_up_again || is_later {
            return Ok(Turn::Ended(Unprepared::PreparedAgain));
        }
    }
    match record {
        // The record was lost while instances of the claim live. Only a record keeps their places
        // from others until they are removed.
        Stored::Absent if !Gpus::of(context).strays_of(uid)?.is_empty() => {
            Ok(match rebuild_locked(context, uid, None, call.until) {
                Some(Event::Failed { error: why, .. }) => Turn::Blocked(Blocked {
                    why,
                    soon: true,
                    unwritten: None,
                }),
                // Known again, or gone.
                _ => Turn::Rebuilt,
            })
        }
        Stored::Absent => {
            // A CDI file without a record is left of a record that was lost: files are removed
            // before records.
            Files::of(context).remove_cdi(uid)?;
            Ok(Turn::Ended(if waited.once {
                Unprepared::Done
            } else {
                Unprepared::NothingThere
            }))
        }
        Stored::Newer { version, .. } => Ok(Turn::Ended(Unprepared::LeftToNewer { version })),
        Stored::Corrupt { reason } => Ok(Turn::Unreadable(reason)),
        Stored::Fine(record) => {
            let _gpu_locks = context.lock_gpus(&record.gpus(), call.until)?;
            Ok(match let_go_or_linger(context, record)? {
                None => Turn::Ended(Unprepared::Done),
                Some(blocked) => Turn::Blocked(blocked),
            })
        }
    }
}

fn unreadable(why: &str) -> Unprepared {
    Unprepared::Lingering(format!("its record cannot be read: {why}"))
}

/// Keeps prepares that arrived before from bringing the claim back. Letting go must not fail for
/// want of it: on a full disk nothing can be written, but everything can be removed.
fn write_tombstone(context: &Context, uid: &ClaimUid, call: &Call) {
    // A tombstone that cannot be read is written anew.
    let known = context.state.tombstone(uid).ok().flatten();
    // A later unprepare, of the other instance, had the lock first.
    if known.is_some_and(|known| known.boot == context.config.boot && known.at >= call.received) {
        return;
    }
    let tombstone = Tombstone {
        boot: context.config.boot.clone(),
        at: call.received,
        prepared_again: false,
    };
    if let Err(error) = context.state.write_tombstone(uid, &tombstone) {
        tracing::warn!(
            claim.uid = %uid,
            error = chain(&error),
            "failed to write the claim's tombstone; a running prepare may still complete"
        );
    }
}

/// Returns whether a prepare that arrived after this unprepare, at the other plugin instance, has
/// had the lock first: it made the record, or found it ready.
fn came_later(context: &Context, record: &Record, call: &Call) -> bool {
    record.boot == context.config.boot && record.received.is_some_and(|at| at > call.received)
}

fn read_again_from_api(context: &Context, uid: &ClaimUid, until: Duration) -> Option<Event> {
    match context.parts.claims.look_up(uid, None, until) {
        Lookup::Found(claim) => rebuild(context, uid, Some(&claim)),
        Lookup::Gone => rebuild(context, uid, None),
        Lookup::Unknown(_) => None,
    }
}
