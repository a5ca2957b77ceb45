//! The look that a prepare is decided on, taken under the locks of the claim and its GPUs. The plan
//! of the GPUs is made of the same readings.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_claims::{Claim, Phase, ProcessOnGpu, Record, Snapshot, Stored};
use divvy_gpu::{Ask, GpuSeen};
use divvy_model::mig::PartitionName;
use divvy_model::{
    DeviceKind, DeviceName, GpuError, GpuErrorCode, GpuUuid, Inventory, MigMode, Ordinals, Place,
};

use crate::StoreError;
use crate::context::Context;
use crate::executor::ExecutorConfig;
use crate::gpus::{Gpus, without_file};
use crate::records::{ClaimFiles, others};
use crate::state::{GpuStates, Records};

/// Readings of a call, made once under its locks.
#[derive(Debug)]
pub(crate) struct Look<'a> {
    pub(crate) snapshot: Snapshot<'a>,
    /// Files of the GPUs, as they are on disk.
    pub(crate) states: GpuStates,
    pub(crate) claim_files: ClaimFiles,
}

/// Reads what a claim's prepare depends on. `other_drivers` are its GPUs that another driver has.
pub(crate) fn look<'a>(
    context: &'a Context,
    claim: &Claim,
    ordinals: &'a Ordinals,
    concerned: &BTreeSet<GpuUuid>,
    other_drivers: BTreeMap<GpuUuid, String>,
) -> Result<Look<'a>, StoreError> {
    let inventory = context.parts.inventory.inventory();
    // Read everything under the locks that the caller holds; the files of claims first, without
    // which no record is known to be lost.
    let claim_files = ClaimFiles::listed(context);
    let records = context.state.records()?;
    // Before the files of GPUs, in which servers are noted that were found among the processes.
    let processes = processes(context, claim, ordinals, concerned, &records);
    let (mut gpus, mut states) = (context.state.gpus()?, GpuStates::new());
    // Files of its GPUs are read as they are, and not known by their stamps: what was read is
    // changed and written again. A GPU without a file has what was granted to this process.
    for gpu in concerned {
        let stored = Arc::new(context.state.gpu(gpu)?);
        states.insert(gpu.clone(), stored.clone());
        let counts = match *stored {
            Stored::Absent => Arc::new(Stored::Fine(without_file(context, gpu)?)),
            _ => stored,
        };
        gpus.insert(gpu.clone(), counts);
    }
    let places = places(context, claim, &records, ordinals, inventory.as_deref());
    let hardware = concerned
        .iter()
        .map(|gpu| {
            (
                gpu.clone(),
                hardware(context, gpu, &places, inventory.as_deref()),
            )
        })
        .collect();
    let ExecutorConfig {
        driver,
        boot,
        extra_nodes,
        ..
    } = &context.config;
    let snapshot = Snapshot {
        driver,
        inventory,
        ordinals,
        records,
        gpus,
        boot,
        hardware,
        processes,
        other_drivers,
        extra_nodes,
    };
    Ok(Look {
        snapshot,
        states,
        claim_files,
    })
}

/// Returns the GPUs that the claim's devices are on, as far as names can be resolved; with `admin`
/// also those that it only looks at.
pub(crate) fn gpus_of(claim: &Claim, ordinals: &Ordinals, admin: bool) -> BTreeSet<GpuUuid> {
    let results = claim.allocation.results.iter();
    results
        .filter(|result| admin || !result.admin_access)
        .filter_map(|result| DeviceKind::parse(&result.device).ok())
        .filter_map(|kind| ordinals.gpu(kind.ordinal()).cloned())
        .collect()
}

fn hardware(
    context: &Context,
    gpu: &GpuUuid,
    places: &BTreeMap<GpuUuid, BTreeSet<Place>>,
    inventory: Option<&Inventory>,
) -> GpuSeen {
    let hardware = Gpus::of(context).hardware;
    let found = inventory.and_then(|inventory| inventory.gpus.get(gpu));
    // A card without MIG would answer every question about it with an error.
    let mode = found.map(|gpu| gpu.facts.mig_mode);
    let has_none = mode.filter(|mode| *mode == MigMode::Unsupported);
    let ask = Ask {
        mig: mode.is_some() && has_none.is_none(),
        places: places.get(gpu).cloned().unwrap_or_default(),
        in_flight: true,
        // No decision depends on the other settings.
        ..Ask::default()
    };
    let seen = hardware.look(gpu, &ask, context.now(), None);
    GpuSeen {
        mig: seen.mig.or(has_none.map(Ok)),
        ..seen
    }
}

/// Returns the places of the claim's partitions: of those allocated to it, and of those on record.
/// On the GPUs of the former also those of other claims' partitions, since nothing new is made
/// where one of them is gone.
fn places(
    context: &Context,
    claim: &Claim,
    records: &Records,
    ordinals: &Ordinals,
    inventory: Option<&Inventory>,
) -> BTreeMap<GpuUuid, BTreeSet<Place>> {
    let mut places = BTreeMap::<GpuUuid, BTreeSet<Place>>::new();
    let own = records.get(&claim.uid).and_then(|stored| stored.fine());
    for device in own.into_iter().flat_map(|record| &record.devices) {
        if let Some(place) = device.target.place() {
            places.entry(device.gpu.clone()).or_default().insert(place);
        }
    }
    // A claim that is answered again makes nothing.
    let makes = own.is_none_or(|record| !record.answers(&claim.allocation, &context.config.boot));
    let others: Vec<_> = others(records, &claim.uid)
        .filter(|record| makes && record.phase != Phase::Preparing)
        .flat_map(|record| &record.devices)
        .collect();
    let results = claim.allocation.results.iter();
    for name in results.filter_map(|result| partition(&result.device)) {
        let place = || {
            let gpu = ordinals.gpu(name.ordinal)?;
            let mig = inventory?.gpus.get(gpu)?.mig.as_ref()?;
            let placement = mig.capabilities.placement(name.profile, name.start)?;
            let profile = name.profile;
            Some((gpu.clone(), Place { profile, placement }))
        };
        if let Some((gpu, place)) = place() {
            let beside = others.iter().filter(|device| device.gpu == gpu);
            let beside: BTreeSet<Place> = beside.filter_map(|d| d.target.place()).collect();
            let of_gpu = places.entry(gpu).or_default();
            of_gpu.insert(place);
            of_gpu.extend(beside);
        }
    }
    places
}

/// Returns the partition that a device is, or is a share of.
fn partition(device: &DeviceName) -> Option<PartitionName> {
    DeviceKind::parse(device).ok()?.partition().cloned()
}

/// Returns whether a GPU answers like this to every list of its processes.
fn never_lists_processes(error: &GpuError) -> bool {
    [
        GpuErrorCode::NOT_SUPPORTED,
        GpuErrorCode::NO_PERMISSION,
        GpuErrorCode::FUNCTION_NOT_FOUND,
    ]
    .contains(&error.code)
}

/// Returns the processes on GPUs that no other claim holds, and on those of which the claim has a
/// partition that others have made: they may use it. None is asked for where the
/// claim is answered from its record. A GPU that never lists processes (vGPU, WSL) is left out.
fn processes(
    context: &Context,
    claim: &Claim,
    ordinals: &Ordinals,
    gpus: &BTreeSet<GpuUuid>,
    records: &Records,
) -> BTreeMap<GpuUuid, Result<Vec<ProcessOnGpu>, GpuError>> {
    let boot = &context.config.boot;
    let own = records.get(&claim.uid).and_then(|stored| stored.fine());
    if own.is_some_and(|record| record.answers(&claim.allocation, boot)) {
        return BTreeMap::new();
    }
    // Processes on a GPU that another claim holds in this boot are taken for that claim's: if it is
    // in the way, the hold itself says so.
    let in_this_boot = others(records, &claim.uid).filter(|record| record.boot == *boot);
    let holds = in_this_boot.flat_map(Record::holds);
    let holds = holds.filter(|hold| hold.sharing.holds());
    let mut passed_over: BTreeSet<_> = holds.map(|hold| hold.gpu).collect();
    let results = claim.allocation.results.iter();
    let names = results.filter_map(|result| partition(&result.device));
    for gpu in names
        .filter(|name| name.is_static)
        .filter_map(|name| ordinals.gpu(name.ordinal))
    {
        passed_over.remove(gpu);
    }
    let on = |gpu: &GpuUuid| match Gpus::of(context).processes(gpu) {
        Err(error) if never_lists_processes(&error) => None,
        listed => Some((gpu.clone(), listed)),
    };
    gpus.difference(&passed_over).filter_map(on).collect()
}
