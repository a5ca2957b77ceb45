//! Giving a claim its devices: the last part of every prepare, and of restoring a claim after a
//! boot. Called under the locks of the claim and its GPUs.
//!
//! A claim whose GPUs are at their goal already is one write: its record says *prepared* before the
//! CDI file exists, and a reader that finds the one without the other writes the other. Where an
//! instance is to be made, a record that says *preparing* comes before it, so that a crash leaves
//! nothing that no record names.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_claims::{Caller, Phase, Prepared, Record, RecordedDevice, Stored};
use divvy_gpu::{Cause, ChangeError, GpuSeen, GpuState, Life, Stuck};
use divvy_model::{GpuUuid, Place};

use crate::bring::{NotBrought, Plan, Readings};
use crate::context::Context;
use crate::files::Files;
use crate::gpus::Gpus;
use crate::release::{LeftBehind, keep_what_is_stuck, remove, stuck_places};
use crate::snapshot::Look;
use crate::{PrepareCause, chain};

/// A claim that is to get devices.
pub(crate) struct Wanted<'w> {
    /// The record that it is to have, as prepared.
    pub(crate) record: Record,
    /// Its present record, if it goes on with that one: it lingers, its partition is gone, or it is
    /// of another boot. A failure leaves it as it is.
    pub(crate) earlier: Option<&'w Record>,
    /// The readings that it was decided on, under the same locks.
    pub(crate) look: &'w Look<'w>,
    pub(crate) until: Duration,
}

/// Changes that a hold has made so far, for its failure.
#[derive(Default)]
struct Progress {
    /// True if the claim's record was written.
    recorded: bool,
    /// True if a GPU may have been changed.
    begun: bool,
}

/// Brings the GPUs of a claim to the goal with it, and writes its record and its files. On failure
/// the GPUs are brought to the goal without it, and then its record is removed or is the earlier
/// one again.
pub(crate) fn hold(context: &Context, wanted: &Wanted<'_>) -> Result<Prepared, PrepareCause> {
    let mut progress = Progress::default();
    match give(context, wanted, &mut progress) {
        Ok(prepared) => Ok(prepared),
        Err(cause) => Err(take_back(context, wanted, cause, &progress)),
    }
}

/// Does all of it, and stops at the first failure.
fn give(
    context: &Context,
    wanted: &Wanted<'_>,
    progress: &mut Progress,
) -> Result<Prepared, PrepareCause> {
    let Wanted {
        record,
        earlier,
        look,
        until,
    } = wanted;
    let (gpus, files) = (Gpus::of(context), Files::of(context));
    let mut record = record.clone();
    let caller = Caller::Gets(&record.uid, &record.devices);
    let mut plans = Vec::new();
    let read = Readings::of(context, look)?;
    // Plan all GPUs before the first is changed: a file that cannot be read then costs nothing.
    for gpu in counted(&record.devices) {
        plans.push(gpus.plan(&gpu, caller, &read)?);
    }

    // A file that the claim still has names partitions of before, and no container is to be given
    // those meanwhile. A claim whose partitions all live is answered from its record.
    let is_partition = |device: &RecordedDevice| device.target.place().is_some();
    if record.devices.iter().any(is_partition) {
        files.remove_cdi(&record.uid)?;
    }
    // The record that holds a place is on disk before an instance is made there.
    if earlier.is_none() && plans.iter().any(Plan::creates) {
        progress.recorded = true;
        context.state.write_record(&Record {
            phase: Phase::Preparing,
            ..record.clone()
        })?;
    }

    // Bring one GPU after the other to its goal; the first failure ends it.
    let mut states = BTreeMap::new();
    for plan in plans {
        progress.begun |= !plan.changes.is_empty();
        let gpu = plan.gpu.clone();
        let brought = gpus.carry_out(plan, Some(&record.uid), *until);
        states.insert(
            gpu.clone(),
            brought.map_err(|error| not_brought(&gpu, error))?,
        );
    }
    // Note what the containers get, as the hardware shows it.
    for device in &mut record.devices {
        let hardware = &look.snapshot.hardware;
        let known = hardware.get(&device.gpu).filter(|_| !progress.begun);
        note_given(context, device, &states, known)?;
    }

    // The content comes before the record, since it can fail for reasons of its own.
    let metadata = files.metadata_files(&record);
    let document = files.document(&record, &metadata)?;
    progress.recorded = true;
    context.state.write_record(&record)?;
    // The CDI file is last: a container that finds it finds everything else.
    files.ensure_metadata(&record.uid, &metadata)?;
    files.write_cdi(&record.uid, &document)?;
    Ok(Prepared::of(&context.config.driver, &record))
}

/// Returns the GPUs of devices that count.
fn counted(devices: &[RecordedDevice]) -> BTreeSet<GpuUuid> {
    let counted = devices.iter().filter(|device| device.sharing.holds());
    counted.map(|device| device.gpu.clone()).collect()
}

/// Notes the partition that a device is, on its GPU as it was brought to its goal. `known` is what
/// was read of the GPU, if nothing has been changed since.
fn note_given(
    context: &Context,
    device: &mut RecordedDevice,
    states: &BTreeMap<GpuUuid, GpuState>,
    known: Option<&GpuSeen>,
) -> Result<(), PrepareCause> {
    let Some(place) = device.target.place().filter(|_| device.sharing.holds()) else {
        return Ok(());
    };
    // An administrator's instance has no note of ours, and may have been made anew since the
    // allocation: the GPU is asked.
    let made = if device.theirs {
        let known = known.and_then(|known| known.places.get(&place).cloned());
        let ask = || Gpus::of(context).hardware.filling(&device.gpu, place);
        let filling = known.unwrap_or_else(ask);
        let living = filling.map_err(|error| PrepareCause::Change {
            change: find_partition(device, place),
            source: ChangeError::NotDone(Cause::from_gpu("its instances cannot be read", error)),
        })?;
        living.and_then(|living| living.as_partition())
    } else {
        let state = states.get(&device.gpu);
        let noted = state.and_then(|state| state.instances.get(&place));
        noted.and_then(|instance| match &instance.life {
            Life::Whole(made) => Some(made.clone()),
            Life::Begun | Life::Half { .. } => None,
        })
    };
    match made {
        Some(made) => {
            device.given = Some(made);
            Ok(())
        }
        None => Err(PrepareCause::Change {
            change: find_partition(device, place),
            source: ChangeError::NotDone(Cause::new(if device.theirs {
                "the static instance no longer exists, and this driver does not create it"
            } else {
                "it does not exist as a whole"
            })),
        }),
    }
}

fn find_partition(device: &RecordedDevice, place: Place) -> String {
    format!(
        "find the partition of {} on {}",
        place.in_words(),
        device.gpu
    )
}

fn not_brought(gpu: &GpuUuid, error: NotBrought) -> PrepareCause {
    match error {
        NotBrought::Store(error) => error.into(),
        NotBrought::Stuck(stuck) => match stuck.into_iter().next() {
            Some(Stuck { change, error }) => PrepareCause::Change {
                change: change.of(gpu),
                source: error,
            },
            None => PrepareCause::Change {
                change: format!("change {gpu}"),
                source: ChangeError::NotDone(Cause::new("nothing was to be done")),
            },
        },
    }
}

/// Undoes what a failed prepare did, in the same call: the claim has again what its earlier record
/// says, or nothing. The record goes last: a crash before that finds all that is left by it.
fn take_back(
    context: &Context,
    wanted: &Wanted<'_>,
    first: PrepareCause,
    progress: &Progress,
) -> PrepareCause {
    // Nothing was changed or written.
    if !progress.begun && !progress.recorded {
        return first;
    }
    match undo(context, wanted, progress) {
        Ok(()) => first,
        Err(left) => PrepareCause::Undo {
            first: Box::new(first),
            undo: chain(&left),
        },
    }
}

fn undo(context: &Context, wanted: &Wanted<'_>, progress: &Progress) -> Result<(), LeftBehind> {
    let Wanted {
        record,
        earlier,
        until,
        ..
    } = wanted;
    let state = &context.state;
    if progress.recorded {
        Files::of(context).remove_cdi(&record.uid)?;
    }
    // The record comes before the first thing that goes: a crash would leave one that says
    // "prepared" of what is gone.
    match earlier {
        // The claim has again what its earlier record says. Its programs may run: nothing of it is
        // taken.
        Some(earlier) if earlier.may_be_of(&context.config.boot) => {
            return Ok(state.put_back(earlier)?);
        }
        Some(earlier) => state.put_back(earlier)?,
        // A record of this call is let go as any other.
        None if progress.recorded => {
            if let Stored::Fine(recorded) = state.record(&record.uid)? {
                return remove(context, &recorded, &record.gpus());
            }
        }
        None => {}
    }
    // Nothing on record names what this call has made. Planned anew and not played back: the goal
    // without the claim is the same, however far the hold came.
    let gpus = Gpus::of(context);
    let caller = Caller::LetsGo(&record.uid, &record.devices);
    let mut stuck = BTreeMap::new();
    for gpu in counted(&record.devices) {
        let brought = gpus.bring(&gpu, caller, None, *until);
        if let Some(left) = stuck_places(&gpu, brought)? {
            stuck.insert(gpu, left);
        }
    }
    if !stuck.is_empty() {
        return Err(match earlier {
            // It goes on holding its GPUs.
            Some(_) => LeftBehind::stuck(&stuck),
            // Devices that could not be removed stay on record, or nothing would try again.
            None => keep_what_is_stuck(context, record, &stuck)?,
        });
    }
    // Also where a write that failed has left one.
    if earlier.is_none() && progress.recorded {
        state.remove_record(&record.uid)?;
    }
    Ok(())
}
