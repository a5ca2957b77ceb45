//! Partitions that are gone under the pods of a claim: the GPU was reset, the driver loaded again,
//! or the instance destroyed.
//!
//! A container that starts again must not get the device nodes of such a partition, because the
//! driver gives the numbers of instances out again. So the claim's files are withdrawn until it is
//! released, or carried out again after a boot. Under the claim's lock.

use std::collections::{BTreeMap, BTreeSet};

use divvy_claims::Record;
use divvy_gpu::{Ask, GpuSeen};
use divvy_model::{GpuError, GpuErrorCode, GpuUuid, Place};

use crate::CdiError;
use crate::context::Context;
use crate::files::{Files, Refresh};
use crate::hardware::Hardware;

/// State of the files of a prepared claim after a look at its partitions.
pub(crate) enum Served {
    /// They are as its record says.
    Current {
        /// True if one was missing or out of date.
        written: bool,
    },
    /// A partition is gone, so there are none.
    Withdrawn {
        /// True if there was one until now.
        removed: bool,
    },
    /// There are none, and whether its partitions live cannot be read.
    Unknown(GpuError),
}

/// Writes the files of a prepared claim, or withdraws them if a partition that it was given is
/// gone. Readings in `known`, taken under the same locks, are not taken again.
pub(crate) fn serve(
    context: &Context,
    record: &Record,
    refresh: Refresh,
    known: &BTreeMap<GpuUuid, GpuSeen>,
) -> Result<Served, CdiError> {
    let files = Files::of(context);
    match find_gone(context, record, known) {
        Ok(false) => {
            let written = match refresh {
                Refresh::Missing => files.ensure_cdi(record)?,
                Refresh::All => files.refresh_cdi(record)?,
            };
            Ok(Served::Current { written })
        }
        Ok(true) => {
            let removed = files.has_cdi(&record.uid)?;
            if removed {
                files.remove_cdi(&record.uid)?;
            }
            Ok(Served::Withdrawn { removed })
        }
        // A file that is there was right when the partitions were last seen, and stays. A missing
        // file may have been withdrawn.
        Err(_) if files.has_cdi(&record.uid)? => Ok(Served::Current { written: false }),
        Err(error) => Ok(Served::Unknown(error)),
    }
}

/// Returns whether a partition that a record says was given is certainly gone. Each GPU is asked
/// for its instances once.
fn find_gone(
    context: &Context,
    record: &Record,
    known: &BTreeMap<GpuUuid, GpuSeen>,
) -> Result<bool, GpuError> {
    let hardware = Hardware::of(context);
    let mut places = BTreeMap::<GpuUuid, BTreeSet<Place>>::new();
    let given = record
        .devices
        .iter()
        .filter(|device| device.given.is_some());
    for device in given {
        let of_gpu = places.entry(device.gpu.clone()).or_default();
        of_gpu.extend(device.target.place());
    }
    let mut unread = None;
    for (gpu, places) in places {
        let ask = Ask {
            places,
            in_flight: true,
            ..Ask::default()
        };
        let seen = hardware.look(&gpu, &ask, context.now(), known.get(&gpu));
        // A call that has not returned may still change what is there.
        if let Some(op) = seen.in_flight {
            unread = Some(GpuError::on_gpu(op, GpuErrorCode::TIMEOUT, &gpu));
            continue;
        }
        for (place, filling) in seen.places {
            let here = |target: Option<Place>| target == Some(place);
            let mut devices = record.devices.iter().filter(|device| device.gpu == gpu);
            if devices.any(|device| here(device.target.place()) && device.is_gone(&filling)) {
                return Ok(true);
            }
            unread = filling.err().or(unread);
        }
    }
    unread.map_or(Ok(false), Err)
}
