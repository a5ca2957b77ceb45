//! Things that must be right before the kubelet may call: CDI files, records of an earlier boot,
//! prepares that a crash cut short, and GPUs against what others have left of them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{Claim, Phase, Record, Refusal, Stored, Times, fit_after_boot};
use divvy_model::ClaimUid;

use crate::context::Context;
use crate::files::Files;
use crate::gpus::Gpus;
use crate::hold::{Wanted, hold};
use crate::lost::{Served, serve};
use crate::owned::{held_by, own_what_is_recorded, take_gpus};
use crate::release::{finish, remove};
use crate::snapshot::look;
use crate::state::Records;
use crate::{Event, Lookup, PrepareCause, PrepareError, Refresh, Report, UnprepareCause};

/// Time limit for carrying one claim out again after a reboot.
const EXECUTE_AGAIN: Duration = Duration::from_mins(1);

/// Time limit for the API before a claim is carried out again.
const ASK_WITHIN: Duration = Duration::from_secs(2);

/// Takes back prepares that a crash cut short, finishes lingering claims, carries records of an
/// earlier boot out again under the same CDI names, writes CDI files, and gives back what no claim
/// needs of a GPU. Comes before registering with the kubelet, which asks again only for new
/// sandboxes, and whenever files in the CDI folder vanish.
pub(crate) fn restore_cdi(context: &Context, refresh: Refresh) -> Report {
    let mut report = Report::default();
    // First against other drivers of ours: while no instance of this driver ran, the kernel had
    // freed its locks.
    own_what_is_recorded(context);
    let records = match context.state.records() {
        Ok(records) => records,
        Err(error) => {
            report.events.push(Event::failed(None, &error));
            return report;
        }
    };
    // Claims that let go come first: another boot's record may need what they hold.
    for (uid, stored) in &records {
        if stored.fine().is_some_and(|r| r.phase != Phase::Prepared) {
            report
                .events
                .extend(finish(context, uid, context.briefly()));
        }
    }
    let mut ask = true;
    for (uid, stored) in &records {
        match stored.as_ref() {
            Stored::Fine(record) if record.phase == Phase::Prepared => {
                // The API is asked before any lock is taken: its answer may take seconds.
                let is_gone = is_gone(context, record, &mut ask);
                let done = restore(context, uid, refresh, is_gone);
                report.events.extend(Event::of(uid, done));
            }
            Stored::Newer { version, .. } => report.events.push(Event::Kept {
                claim: uid.clone(),
                why: format!(
                    "its record was written by a later version of divvy (format {version})"
                ),
            }),
            Stored::Corrupt { reason } => report.events.push(Event::Kept {
                claim: uid.clone(),
                why: format!("its record cannot be read and is rebuilt from the API: {reason}"),
            }),
            Stored::Fine(_) | Stored::Absent => {}
        }
    }
    // Last, when the records above say what is held: a GPU that a claim has just let go is given
    // back in the same round.
    Gpus::of(context).tidy(refresh == Refresh::All, &mut report);
    report
}

/// Finishes lingering claims, as far as that is possible now, by asking only the GPUs. Returns
/// whether any is left.
pub(crate) fn finish_lingering(context: &Context) -> (Report, bool) {
    let mut report = Report::default();
    let lingering = |records: Records| {
        let leaving = |stored: &Stored<Record>| {
            stored
                .fine()
                .is_some_and(|record| matches!(record.phase, Phase::Leaving(_)))
        };
        records
            .into_iter()
            .filter(|(_, stored)| leaving(stored))
            .map(|(uid, _)| uid)
            .collect::<Vec<_>>()
    };
    let left = context.state.records().map(lingering).and_then(|claims| {
        let finish = |uid| finish(context, uid, context.briefly());
        report.events.extend(claims.iter().filter_map(finish));
        if claims.is_empty() {
            Ok(claims)
        } else {
            context.state.records().map(lingering)
        }
    });
    let any_left = left.map_or_else(
        |error| {
            report.events.push(Event::failed(None, &error));
            // Not known is not none.
            true
        },
        |left| !left.is_empty(),
    );
    (report, any_left)
}

/// Returns whether the API says that a claim of another boot no longer has what its record says. An
/// API that does not answer is asked once.
fn is_gone(context: &Context, record: &Record, ask: &mut bool) -> bool {
    // One that may be of this boot may have programs: it is let go as an orphan.
    if !*ask || record.may_be_of(&context.config.boot) {
        return false;
    }
    let until = context.now() + ASK_WITHIN;
    let api = &context.parts.claims;
    match api.look_up(&record.uid, Some(&record.reference()), until) {
        Lookup::Found(claim) => !record.is_of(&claim.allocation),
        Lookup::Gone => true,
        Lookup::Unknown(_) => {
            *ask = false;
            false
        }
    }
}

/// Brings back what a prepared claim has: its CDI file, and for one of another boot everything.
pub(crate) fn restore(
    context: &Context,
    uid: &ClaimUid,
    refresh: Refresh,
    is_gone: bool,
) -> Result<Option<Event>, UnprepareCause> {
    let now = context.now();
    // Read the record again under its lock: an unprepare may have been here.
    let _claim_lock = context.lock_claim(uid, context.briefly())?;
    let record = match context.state.record(uid)? {
        Stored::Fine(record) if record.phase == Phase::Prepared => record,
        _ => return Ok(None),
    };
    let claim = uid.clone();
    if record.boot == context.config.boot {
        return Ok(match serve(context, &record, refresh, &BTreeMap::new())? {
            Served::Current { written } => written.then_some(Event::CdiRestored { claim }),
            Served::Withdrawn { removed } => removed.then_some(Event::CdiWithdrawn { claim }),
            Served::Unknown(error) => Some(Event::Failed {
                claim: Some(claim),
                error: format!(
                    "its CDI file is missing and is not written while its partitions cannot be read: {error}"
                ),
            }),
        });
    }
    if is_gone {
        // Nothing of it is left but files, and settings that a restore may have begun.
        let _gpu_locks = context.lock_gpus(&record.gpus(), context.briefly())?;
        return Ok(Some(match remove(context, &record, &BTreeSet::new()) {
            Ok(()) => Event::Released { claim },
            Err(left) => Event::failed(Some(uid), &left),
        }));
    }
    let reference = record.reference();
    let done = execute_again(context, &record, now + EXECUTE_AGAIN);
    Ok(Some(match done {
        Ok(()) => Event::ExecutedAgain { claim },
        // No failure of this node: nothing else is to be done again because of it.
        Err(PrepareCause::Refused(refusal)) if refusal.is_about_others() => Event::Kept {
            claim,
            why: refusal.to_string(),
        },
        Err(cause) => Event::failed(
            Some(uid),
            &PrepareError {
                claim: reference,
                cause,
            },
        ),
    }))
}

/// Carries a record of an earlier boot out again: hardware state does not outlast one. A failure
/// leaves the record as it is: it goes on holding its GPUs and is carried out later.
fn execute_again(context: &Context, earlier: &Record, until: Duration) -> Result<(), PrepareCause> {
    if context.parts.inventory.inventory().is_none() {
        // It is tried again as soon as the driver answers.
        return Err(Refusal::no_driver(earlier.reference()).into());
    }
    let gpus: BTreeSet<_> = earlier.gpus();
    let _gpu_locks = context.lock_gpus(&gpus, until)?;
    // Decide as for a prepare, but for other records: theirs were prepared before the boot too.
    let ordinals = context.state.ordinals()?;
    let claim = claim_of(earlier);
    // Another driver may have taken a GPU since the boot.
    let others = take_gpus(context, &earlier.reference(), &held_by(earlier));
    let look = look(context, &claim, &ordinals, &gpus, others)?;
    fit_after_boot(&claim, &earlier.devices, &look.snapshot)?;

    let mut record = earlier.clone();
    record.boot = context.config.boot.clone();
    // Times of arrival count from boot. A time of the boot before would look later than every call
    // of this one.
    record.received = None;
    if let Some(metadata) = &mut record.metadata {
        // A card may have another address now.
        metadata.attributes = Files::of(context).attributes_of(&record.devices);
    }
    // A failure leaves the earlier record, so that it is tried again.
    let wanted = Wanted {
        record,
        earlier: Some(earlier),
        look: &look,
        until,
    };
    hold(context, &wanted).map(drop)
}

/// Returns the claim that a record was made of, as far as the record says.
fn claim_of(record: &Record) -> Claim {
    Claim {
        uid: record.uid.clone(),
        namespace: record.namespace.clone(),
        name: record.name.clone(),
        pod_claim_name: None,
        classes: record.classes.clone(),
        times: Times::default(),
        allocation: record.allocation(),
        configs: Vec::new(),
        pods: record.pods.clone(),
    }
}
