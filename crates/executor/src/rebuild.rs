//! Records that cannot be read, or are not there although their claim was prepared: made again from
//! what the API and the GPUs' files say.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{
    AllocatedDevice, Allocation, Claim, Leaving, MadeFor, Phase, Record, RecordedDevice, Stored,
    Times, rebuild as record_of,
};
use divvy_gpu::{Life, Retry};
use divvy_model::mig::PartitionName;
use divvy_model::{ClaimUid, Ordinals, Sharing, Target};

use crate::context::Context;
use crate::files::Files;
use crate::gpus::Gpus;
use crate::owned::take_what_is_held;
use crate::records::{any_torn, unprepared_in_this_boot};
use crate::snapshot::{gpus_of, look};
use crate::{Event, UnprepareCause, chain};

/// Replaces a record that cannot be read, or was lost, by what the API and the GPUs' files say;
/// without `claim` the API knows no such claim. `None` means that nothing was to be done, or that
/// another call is at work on the claim.
pub(crate) fn rebuild(context: &Context, uid: &ClaimUid, claim: Option<&Claim>) -> Option<Event> {
    let until = context.briefly();
    let _claim_lock = match context.lock_claim(uid, until) {
        Ok(lock) => lock,
        Err(error) => return Event::of(uid, Err(error.into())),
    };
    rebuild_locked(context, uid, claim, until)
}

/// Does the same under the claim's lock.
pub(crate) fn rebuild_locked(
    context: &Context,
    uid: &ClaimUid,
    claim: Option<&Claim>,
    until: Duration,
) -> Option<Event> {
    let claim = claim.filter(|claim| !claim.allocation.results.is_empty());
    remake(context, uid, claim, until)
        .unwrap_or_else(|error| Some(Event::failed(Some(uid), &error)))
}

fn remake(
    context: &Context,
    uid: &ClaimUid,
    claim: Option<&Claim>,
    until: Duration,
) -> Result<Option<Event>, UnprepareCause> {
    let (state, gpus) = (&context.state, Gpus::of(context));
    let unreadable = match state.record(uid)? {
        Stored::Corrupt { reason } => Some(reason),
        Stored::Absent => None,
        Stored::Newer { .. } | Stored::Fine(_) => return Ok(None),
    };
    let ordinals = state.ordinals()?;
    // Notes for a claim without a record change only under the claim's lock.
    let noted = gpus.strays_of(uid)?;
    let was_lost = was_lost(context, uid)?;
    if unreadable.is_none() && noted.is_empty() && !(claim.is_some() && was_lost) {
        return Ok(None);
    }
    // A record that cannot be read may hold the place: it is made again first.
    if unreadable.is_none() && !noted.is_empty() && any_torn(&state.records()?) {
        return Ok(Some(Event::Failed {
            claim: Some(uid.clone()),
            error: "its record was lost, and is made again when another claim's record can be read"
                .to_owned(),
        }));
    }

    // Under the locks of all GPUs concerned: what of the noted instances lives.
    let mut concerned: BTreeSet<_> = noted.keys().map(|(gpu, _)| gpu.clone()).collect();
    concerned.extend(
        claim
            .map(|claim| gpus_of(claim, &ordinals, true))
            .unwrap_or_default(),
    );
    let _gpu_locks = context.lock_gpus(&concerned, until)?;
    for gpu in &concerned {
        gpus.settle_locked(gpu)?;
    }
    let made = gpus.living_of(uid)?;

    // A note alone says no more than that an instance was about to be made.
    let was_prepared = unreadable.is_some() || !made.is_empty() || was_lost;
    let rebuilt = match claim.filter(|_| was_prepared) {
        Some(claim) => {
            let look = look(context, claim, &ordinals, &concerned, BTreeMap::new())?;
            match record_of(claim, &look.snapshot, &made) {
                Ok(record) => record.map(|record| (record, claim)),
                // It cannot be said yet.
                Err(refusal) if refusal.retry() != Retry::Never => {
                    return Ok(Some(Event::failed(Some(uid), &refusal)));
                }
                Err(_) => None,
            }
        }
        None => None,
    };
    if unreadable.is_some()
        && let Err(error) = state.copy_record_aside(uid, context.now())
    {
        // Letting go must work on a full disk too.
        tracing::warn!(claim.uid = %uid, error = chain(&error), "failed to keep a copy of an unreadable record");
    }
    if let Some((record, claim)) = rebuilt {
        return serve_again(context, claim, record).map(Some);
    }
    // No container starts with what is going.
    Files::of(context).remove_cdi(uid)?;
    if made.is_empty() {
        state.remove_record(uid)?;
        let reason = unreadable.unwrap_or_default();
        return Ok(Some(Event::SetAside {
            claim: uid.clone(),
            reason,
        }));
    }
    let (record, why) = stand_in(context, uid, claim, &made, &ordinals);
    state.write_record(&record)?;
    Ok(Some(Event::Kept {
        claim: uid.clone(),
        why,
    }))
}

/// Writes a record that was made again. Its CDI file stays or goes; the record is carried out by
/// restore or the claim's next prepare, which write it.
fn serve_again(
    context: &Context,
    claim: &Claim,
    mut record: Record,
) -> Result<Event, UnprepareCause> {
    let files = Files::of(context);
    record.metadata = files.metadata_of(claim, &record.devices);
    // A file that names another instance must not be served after the record says otherwise.
    if record.devices.iter().any(|d| d.given.is_some()) && !files.is_current(&record)? {
        files.remove_cdi(&record.uid)?;
    }
    // While the record could not be read, nothing kept other drivers from its GPUs.
    take_what_is_held(context, &record);
    context.state.write_record(&record)?;
    Ok(Event::Rebuilt { claim: record.uid })
}

/// Returns whether a claim without a record was not simply unprepared: its CDI file is there and no
/// unprepare left a trace.
fn was_lost(context: &Context, uid: &ClaimUid) -> Result<bool, UnprepareCause> {
    Ok(!unprepared_in_this_boot(context, uid)? && Files::of(context).has_cdi(uid)?)
}

/// Makes a record in the place of one that cannot be read or was lost, while instances that were
/// made for its claim are left: it holds them until they are removed. No other part of a GPU is
/// kept from other claims.
fn stand_in(
    context: &Context,
    uid: &ClaimUid,
    claim: Option<&Claim>,
    made: &MadeFor,
    ordinals: &Ordinals,
) -> (Record, String) {
    let reason = "its record was lost, and its partitions still exist".to_owned();
    let unknown = || "unknown".to_owned();
    let stood_for = Claim {
        uid: uid.clone(),
        namespace: claim.map_or_else(unknown, |claim| claim.namespace.clone()),
        name: claim.map_or_else(unknown, |claim| claim.name.clone()),
        pod_claim_name: None,
        classes: claim.map(|claim| claim.classes.clone()).unwrap_or_default(),
        times: Times::default(),
        allocation: Allocation::default(),
        configs: Vec::new(),
        pods: Vec::new(),
    };
    let devices: Vec<_> = made
        .iter()
        .map(|((gpu, place), instance)| {
            // No name is needed to remove an instance: a GPU without a number gets one that no
            // allocation has.
            let ordinal = ordinals.of(gpu).unwrap_or(u32::MAX);
            let start = place.placement.start;
            let name = PartitionName::new(ordinal, "unknown", place.profile, start);
            RecordedDevice {
                allocated: AllocatedDevice {
                    request: String::new(),
                    pool: String::new(),
                    device: name.device_name(),
                    share_id: None,
                    admin_access: false,
                    consumed_capacity: BTreeMap::new(),
                },
                gpu: gpu.clone(),
                target: Target::Partition(*place),
                // Exclusive, however it was used: nothing may share the partition with a claim that
                // is not known any more.
                sharing: Sharing::Exclusive,
                theirs: false,
                time_slice: None,
                share_memory: None,
                memory_cap: None,
                clears_caps: false,
                mps: None,
                extra_nodes: Vec::new(),
                given: match &instance.life {
                    Life::Whole(made) => Some(made.clone()),
                    Life::Begun | Life::Half { .. } => None,
                },
            }
        })
        .collect();
    let phase = Phase::Leaving(Leaving {
        reason: reason.clone(),
        undoing: devices.iter().any(|device| device.given.is_none()),
    });
    let record = Record::new(&stood_for, &context.config.boot, devices, phase);
    (record, reason)
}
