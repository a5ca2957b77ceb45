//! Letting a claim go, and finishing what an unprepare or a crash has left. Called under the locks
//! of the claim and its GPUs, but for [`finish`], which takes them.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{Caller, Leaving, Phase, Record, RecordedDevice, Stored};
use divvy_gpu::{ChangeError, GpuState, Stuck};
use divvy_model::{ClaimUid, GpuError, GpuErrorCode, GpuUuid, Sharing};

use crate::bring::{NotBrought, Plan, Readings};
use crate::context::Context;
use crate::files::Files;
use crate::gpus::Gpus;
use crate::owned::leave_gpus;
use crate::records::{any_torn, holds_of_others, pods_on};
use crate::{CdiError, Event, StoreError, UnprepareCause, chain};

/// Time limit for giving settings back.
const GIVE_BACK_WITHIN: Duration = Duration::from_secs(10);

/// A claim that could not be let go as a whole. The rest is on record.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeftBehind {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Cdi(#[from] CdiError),
    /// Processes are in the way, and nothing was begun.
    #[error("{0}")]
    InUse(String),
    /// An instance could not be removed, or may not be yet.
    #[error("{reason}")]
    Stuck {
        reason: String,
        /// True if it can pass within seconds.
        soon: bool,
    },
}

impl LeftBehind {
    /// Returns one error for what is stuck on several GPUs.
    pub(crate) fn stuck(stuck: &BTreeMap<GpuUuid, StuckPlaces>) -> Self {
        let reasons: Vec<_> = stuck.values().map(|left| left.reason.as_str()).collect();
        Self::Stuck {
            reason: reasons.join("; "),
            soon: stuck.values().any(|left| left.soon),
        }
    }
}

/// Instances of a claim on a GPU that are still there.
#[derive(Debug)]
pub(crate) struct StuckPlaces {
    pub(crate) reason: String,
    pub(crate) soon: bool,
}

/// Returns the instances that could not be removed. Another change that failed holds no claim: it
/// is logged, and reconcile tries it again.
pub(crate) fn stuck_places(
    gpu: &GpuUuid,
    brought: Result<GpuState, NotBrought>,
) -> Result<Option<StuckPlaces>, StoreError> {
    let stuck = match brought {
        Ok(_) => return Ok(None),
        Err(NotBrought::Store(error)) => return Err(error),
        Err(NotBrought::Stuck(stuck)) => stuck,
    };
    // Only an instance keeps its place from others, and an MPS server the whole GPU. A setting that
    // is not back is set again for a claim that needs it, or given back by reconcile.
    let (removals, others): (Vec<Stuck>, Vec<Stuck>) = stuck
        .into_iter()
        .partition(|stuck| stuck.change.is_removal());
    for Stuck { change, error } in others {
        tracing::warn!(%gpu, error = chain(&error), "failed to {}, will retry", change.of(gpu));
    }
    if removals.is_empty() {
        return Ok(None);
    }
    let reason = |stuck: &Stuck| match &stuck.error {
        ChangeError::NotDone(_) => {
            format!(
                "failed to {}: {}",
                stuck.change.of(gpu),
                chain(&stuck.error)
            )
        }
        ChangeError::Unknown(cause) => chain(cause),
    };
    let reasons: Vec<_> = removals.iter().map(reason).collect();
    Ok(Some(StuckPlaces {
        reason: reasons.join("; "),
        soon: removals.iter().any(|stuck| {
            matches!(stuck.error, ChangeError::Unknown(_)) || stuck.error.cause().is_passing()
        }),
    }))
}

/// Lets a claim go if no process is in the way: its files, its instances, and last its record.
/// Other drivers get its GPUs but those in `wanted`, which the caller goes on with.
pub(crate) fn let_go(
    context: &Context,
    record: &Record,
    wanted: &BTreeSet<GpuUuid>,
) -> Result<(), LeftBehind> {
    match in_the_way(context, record)? {
        Some(why) => Err(LeftBehind::InUse(why)),
        None => remove(context, record, wanted),
    }
}

/// Removes all that a record says, in an order that a crash may cut short: the CDI file, so that no
/// container starts with what is going; a record that says *undoing*, so that nothing takes it up
/// again; the instances; the record.
pub(crate) fn remove(
    context: &Context,
    record: &Record,
    wanted: &BTreeSet<GpuUuid>,
) -> Result<(), LeftBehind> {
    let gpus = Gpus::of(context);
    let until = context.now() + GIVE_BACK_WITHIN;
    // No container starts with what is going.
    Files::of(context).remove_cdi(&record.uid)?;
    let caller = Caller::LetsGo(&record.uid, &record.devices);
    let mut plans = Vec::new();
    let read = Readings::now(context)?;
    // Plan everything before the first change.
    for gpu in record.gpus() {
        plans.push(gpus.plan(&gpu, caller, &read)?);
    }

    // A record that says *preparing* or *undoing* is never taken up as it is, so it need not be
    // written again.
    let begun = record.phase == Phase::Preparing || record.is_undoing();
    // From here on the record says that it is going, so that a restart does not take it up again,
    // also where no more than a setting is given back.
    if !begun && plans.iter().any(Plan::changes_hardware) {
        let phase = Phase::Leaving(Leaving {
            reason: "its partitions are being removed".to_owned(),
            undoing: true,
        });
        context.state.write_record(&Record {
            phase,
            ..record.clone()
        })?;
    }

    // Go on past what fails: the rest is free all the same.
    let mut stuck = waits_for_records(&read, record);
    for plan in plans {
        let gpu = plan.gpu.clone();
        if let Some(left) = stuck_places(&gpu, gpus.carry_out(plan, None, until))? {
            stuck.insert(gpu, left);
        }
    }
    if !stuck.is_empty() {
        return Err(keep_what_is_stuck(context, record, &stuck)?);
    }
    // The record goes last, and only then other drivers may have the GPUs.
    context.state.remove_record(&record.uid)?;
    leave_gpus(context, &(&record.gpus() - wanted));
    Ok(())
}

/// Returns GPUs with a shared partition of the claim that stays because a record that cannot be
/// read may be of another user of it.
fn waits_for_records(read: &Readings<'_>, record: &Record) -> BTreeMap<GpuUuid, StuckPlaces> {
    let shared: Vec<_> = record
        .devices
        .iter()
        .filter(|device| device.sharing.is_shared() && device.own_place().is_some())
        .collect();
    let records = read.with_lost();
    if shared.is_empty() || !any_torn(records) {
        return BTreeMap::new();
    }
    let is_kept = |device: &&&RecordedDevice| {
        let mut others = holds_of_others(records, &record.uid);
        others.any(|hold| hold.gpu == device.gpu && hold.target == device.target)
    };
    let waiting = shared.iter().filter(|device| !is_kept(device));
    waiting
        .map(|device| {
            let reason = "a claim's record cannot be read, and it may share its partition";
            let left = StuckPlaces {
                reason: reason.to_owned(),
                soon: false,
            };
            (device.gpu.clone(), left)
        })
        .collect()
}

/// Goes on holding the GPUs on which an instance could not be removed, and no others: no process
/// was in the way before any of it began.
pub(crate) fn keep_what_is_stuck(
    context: &Context,
    record: &Record,
    stuck: &BTreeMap<GpuUuid, StuckPlaces>,
) -> Result<LeftBehind, LeftBehind> {
    // The record shrinks to what is stuck. Its other GPUs are free from the write on, and after it
    // also for other drivers.
    let mut left_on_record = record.clone();
    left_on_record
        .devices
        .retain(|device| stuck.contains_key(&device.gpu));
    let free: BTreeSet<_> = record
        .gpus()
        .into_iter()
        .filter(|gpu| !stuck.contains_key(gpu))
        .collect();
    let left = LeftBehind::stuck(stuck);
    left_on_record.phase = Phase::Leaving(Leaving {
        reason: left.to_string(),
        undoing: true,
    });
    // Retried often while a call waits: only changes are written.
    if context.state.record(&record.uid)?.fine() != Some(&left_on_record) {
        context.state.write_record(&left_on_record)?;
        leave_gpus(context, &free);
    }
    Ok(left)
}

/// Returns what is in the way of letting a claim go: processes on its devices. Neither an unprepare
/// nor a gone claim proves that its containers are gone.
pub(crate) fn in_the_way(context: &Context, record: &Record) -> Result<Option<String>, StoreError> {
    // No process outlives a boot, and no container was started for a prepare without an answer.
    if !record.may_be_of(&context.config.boot) || record.phase == Phase::Preparing {
        return Ok(None);
    }
    for device in record.devices.iter().filter(|d| d.sharing.holds()) {
        let partition = device.given.as_ref().map(|made| made.gi.0);
        if device.target.place().is_some() && partition.is_none() {
            // Nothing was made for it, or it is gone.
            continue;
        }
        if let Some(why) = processes_on(context, record, device, partition)? {
            return Ok(Some(why));
        }
    }
    Ok(None)
}

/// Returns the processes on one device that are in the way, in words.
fn processes_on(
    context: &Context,
    record: &Record,
    device: &RecordedDevice,
    partition: Option<u32>,
) -> Result<Option<String>, StoreError> {
    let gpu = &device.gpu;
    // A GPU that does not answer counts as in use, unless it certainly runs nothing: handing it on
    // too early would mix two users.
    let mut found = match Gpus::of(context).processes(gpu) {
        Ok(found) => found,
        Err(error) if nothing_is_known_to_run(&error) => return Ok(None),
        Err(error) => {
            return Ok(Some(format!(
                "failed to list the processes on {gpu}: {error}"
            )));
        }
    };
    // For a partition, only the processes in it count.
    found.retain(|p| partition.is_none() || p.gpu_instance == partition);
    let records = context.state.records()?;
    let is_same_share = |sharing: Sharing| sharing.is_shared() && sharing == device.sharing;
    let shared = holds_of_others(&records, &record.uid).any(|hold| {
        hold.gpu == *gpu && hold.target == device.target && is_same_share(hold.sharing)
    });
    if shared {
        // Beside other shares, only what is known to be its own is in the way; the last share
        // answers for all that is left, since another mode may come next.
        let own = |pod: &String| record.pods.iter().any(|own| own.uid == *pod);
        found.retain(|p| p.pod.as_ref().is_some_and(own));
    }
    if found.is_empty() {
        return Ok(None);
    }
    // Processes of pods that have admin access to the same GPU, or another part of it, are not in
    // the way.
    let mut others = pods_on(&records, &record.uid, gpu);
    for own in &record.pods {
        others.remove(own.uid.as_str());
    }
    let pids: BTreeSet<_> = found
        .iter()
        .filter(|p| !p.pod.as_deref().is_some_and(|pod| others.contains(pod)))
        .map(|p| p.pid)
        .collect();
    if pids.is_empty() {
        return Ok(None);
    }
    let list: Vec<_> = pids.iter().map(u32::to_string).collect();
    Ok(Some(format!(
        "process {} still uses {gpu}",
        list.join(", ")
    )))
}

/// Returns whether an error means that no process is known to run. A GPU that is gone, or has no
/// kernel module, runs nothing; without NVML (the driver was removed) processes cannot be listed,
/// and an unprepare must not wait for it. A GPU that never lists processes (vGPU, WSL) does not
/// block either.
fn nothing_is_known_to_run(error: &GpuError) -> bool {
    [
        GpuErrorCode::DRIVER_NOT_LOADED,
        GpuErrorCode::LIBRARY_NOT_FOUND,
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::NO_PERMISSION,
        GpuErrorCode::GPU_IS_LOST,
        GpuErrorCode::GPU_NOT_FOUND,
        GpuErrorCode::NOT_FOUND,
    ]
    .contains(&error.code)
}

/// A claim that still holds its devices.
pub(crate) struct Blocked {
    /// The obstacle.
    pub(crate) why: String,
    /// True if it can pass within seconds: a GPU that is lost does not.
    pub(crate) soon: bool,
    /// Why its record could not be made to say so. The caller must then not report success, since
    /// no later call would look at a claim whose record says that it is prepared.
    pub(crate) unwritten: Option<StoreError>,
}

/// Lets a claim go if nothing is in the way; else records that it lingers, and why.
pub(crate) fn let_go_or_linger(
    context: &Context,
    record: Record,
) -> Result<Option<Blocked>, UnprepareCause> {
    match let_go(context, &record, &BTreeSet::new()) {
        Ok(()) => Ok(None),
        Err(LeftBehind::InUse(why)) => {
            // The claim goes on holding its devices, but no further container of it may start on
            // them.
            Files::of(context).remove_cdi(&record.uid)?;
            let undoing = record.is_undoing();
            let phase = Phase::Leaving(Leaving {
                reason: why.clone(),
                undoing,
            });
            let mut unwritten = None;
            // Written only when the reason is another: this runs several times a second while a
            // call waits.
            if record.phase != phase {
                let lingering = Record { phase, ..record };
                unwritten = context.state.write_record(&lingering).err();
            }
            Ok(Some(Blocked {
                why,
                soon: true,
                unwritten,
            }))
        }
        Err(LeftBehind::Stuck { reason: why, soon }) => Ok(Some(Blocked {
            why,
            soon,
            unwritten: None,
        })),
        Err(LeftBehind::Store(error)) => Err(error.into()),
        Err(LeftBehind::Cdi(error)) => Err(error.into()),
    }
}

/// Finishes a claim that lingers, or whose prepare a crash interrupted. A claim that a call is
/// working on, or that is simply prepared, is left alone. Locks are waited for until `until`.
pub(crate) fn finish(context: &Context, uid: &ClaimUid, until: Duration) -> Option<Event> {
    Event::of(uid, try_finish(context, uid, until))
}

fn try_finish(
    context: &Context,
    uid: &ClaimUid,
    until: Duration,
) -> Result<Option<Event>, UnprepareCause> {
    let _claim_lock = context.lock_claim(uid, until)?;
    let record = match context.state.record(uid)? {
        // Read under the lock: since the claim was listed, a prepare may have taken it up again.
        Stored::Fine(record) if record.phase != Phase::Prepared => record,
        _ => return Ok(None),
    };
    let _gpu_locks = context.lock_gpus(&record.gpus(), until)?;
    let (claim, cut_short) = (uid.clone(), record.phase == Phase::Preparing);
    Ok(Some(match let_go_or_linger(context, record)? {
        None if cut_short => Event::TakenBack { claim },
        None => Event::Released { claim },
        // Here the record says already that it is not prepared; only the reason may be an old one.
        Some(blocked) => Event::Kept {
            claim,
            why: blocked.why,
        },
    }))
}
