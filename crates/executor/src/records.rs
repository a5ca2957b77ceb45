//! Questions about all records together.

use std::collections::BTreeSet;

use divvy_claims::{Phase, Record, Stored};
use divvy_model::{ClaimUid, GpuUuid, Hold};

use crate::state::Records;

/// Returns all records that can be read and are not this claim's.
pub(crate) fn others<'a>(
    records: &'a Records,
    uid: &'a ClaimUid,
) -> impl Iterator<Item = &'a Record> {
    records
        .iter()
        .filter(move |(other, _)| *other != uid)
        .filter_map(|(_, stored)| stored.fine())
}

/// Returns all records that can be read.
pub(crate) fn fine(records: &Records) -> impl Iterator<Item = &Record> {
    records.values().filter_map(|stored| stored.fine())
}

/// Returns the UIDs of the pods that other claims' records name, of claims that have a device on
/// this GPU.
pub(crate) fn pods_on<'a>(
    records: &'a Records,
    uid: &'a ClaimUid,
    gpu: &GpuUuid,
) -> BTreeSet<&'a str> {
    let there = others(records, uid).filter(|r| r.devices.iter().any(|d| d.gpu == *gpu));
    there
        .flat_map(|record| &record.pods)
        .map(|pod| pod.uid.as_str())
        .collect()
}

/// Returns whether a claim has a record that says it is prepared.
pub(crate) fn is_prepared(stored: &Stored<Record>) -> bool {
    stored
        .fine()
        .is_some_and(|record| record.phase == Phase::Prepared)
}

/// Returns whether a record cannot be read: it may hold anything.
pub(crate) fn any_torn(records: &Records) -> bool {
    records
        .values()
        .any(|stored| matches!(**stored, Stored::Corrupt { .. }))
}

/// Returns the holds of other claims that count, as admin access does not.
pub(crate) fn holds_of_others<'a>(
    records: &'a Records,
    uid: &'a ClaimUid,
) -> impl Iterator<Item = Hold> + 'a {
    others(records, uid)
        .flat_map(Record::holds)
        .filter(|hold| hold.sharing.holds())
}
