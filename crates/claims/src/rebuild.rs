//! Rebuilding of a record that was lost or cannot be read, from the API and the GPUs' files.

use std::collections::BTreeMap;

use divvy_model::{BootId, GpuUuid, Hold, Place};

use crate::Life;
use crate::decide::conflicts;
use crate::{Claim, Instance, Phase, Record, Refusal, Snapshot, Why, resolve_devices};

/// Instances that were made for a claim, by their place.
pub type MadeFor = BTreeMap<(GpuUuid, Place), Instance>;

/// Makes the record of a claim again that was prepared: as the API says now, if that agrees with
/// the instances that were made for it (`made`: only living ones) and with all other claims.
/// Returns `None` if it does not agree: the claim was allocated anew since, or its partitions are
/// gone.
///
/// Nothing says in which boot the claim was prepared, or if its prepare had come to its end: the
/// record is of an unknown boot, so that it is carried out again before anything is answered from
/// it. At its goal already, that changes nothing.
pub fn rebuild(
    claim: &Claim,
    seen: &Snapshot<'_>,
    made: &MadeFor,
) -> Result<Option<Record>, Refusal> {
    // Phase 1: the devices of the present allocation. If the record of another claim holds one of
    // them, the lost record cannot have held it; a share may be let go beside it just now.
    let mut devices = resolve_devices(claim, seen)?;
    conflicts(claim, &devices, seen)?;
    let others = seen.records.iter().filter(|(uid, _)| **uid != claim.uid);
    let others = others.filter_map(|(_, stored)| stored.fine());
    let excludes = |hold: &Hold| {
        let mut own = devices.iter().map(|device| device.hold(&claim.uid));
        own.any(|own| own.conflicts(hold))
    };
    if others.flat_map(Record::holds).any(|hold| excludes(&hold)) {
        return Ok(None);
    }
    // Phase 2: each partition must live and be the very one that was made for the claim, by ids and
    // UUID. Containers may run in it, so nothing is made in its place.
    for device in &mut devices {
        let Some(place) = device.target.place() else {
            continue;
        };
        let living = match seen.filling(&device.gpu, place) {
            Some(Ok(Some(living))) => living.as_partition(),
            // It may live: not known yet.
            Some(Err(error)) => return Err(Why::GpuUnreadable(error.clone()).about(claim, device)),
            Some(Ok(None)) | None => None,
        };
        let Some(living) = living else {
            return Ok(None);
        };
        // Other users hold a shared partition too, and it may have been made for one of them.
        let of_gpu = seen.gpus.get(&device.gpu).and_then(|stored| stored.fine());
        let of_others = of_gpu
            .filter(|state| device.sharing.is_shared() && state.boot.as_ref() == Some(seen.boot))
            .and_then(|state| state.instances.get(&place));
        let own = made.get(&(device.gpu.clone(), place));
        let noted = own.or(of_others).map(|instance| &instance.life);
        if !device.theirs && noted != Some(&Life::Whole(living.clone())) {
            return Ok(None);
        }
        device.given = Some(living);
    }
    // Phase 3: an instance outside the allocation shows that the lost record was of another one.
    let is_named = |(gpu, place): &(GpuUuid, Place)| {
        devices
            .iter()
            .any(|d| d.gpu == *gpu && d.own_place() == Some(*place))
    };
    if !made.keys().all(is_named) {
        return Ok(None);
    }
    Ok(Some(Record::new(
        claim,
        &BootId::unknown(),
        devices,
        Phase::Prepared,
    )))
}
