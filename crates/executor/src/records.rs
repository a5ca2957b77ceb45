//! Questions about all records together.

use std::collections::BTreeSet;
use std::sync::Arc;

use divvy_claims::{Phase, Record, Stored, claim_of_cdi_file};
use divvy_model::{ClaimUid, GpuUuid, Hold};

use crate::StoreError;
use crate::context::Context;
use crate::state::Records;

/// Returns the records that count where something may be given back: a lost record counts as one
/// that cannot be read, since its claim may hold anything until it is made again.
pub(crate) fn with_lost(context: &Context) -> Result<Records, StoreError> {
    let files = ClaimFiles::listed(context);
    files.with_lost(context, &context.state.records()?)
}

/// Names of the CDI files, listed before the records: a record is written before its file, and
/// removed after it, so that a call at work leaves no file without a record.
#[derive(Debug)]
pub(crate) struct ClaimFiles(std::io::Result<Vec<String>>);

impl ClaimFiles {
    pub(crate) fn listed(context: &Context) -> Self {
        Self(context.parts.cdi.list())
    }

    /// Returns records that were read after the files were listed, with those that are lost.
    pub(crate) fn with_lost(
        &self,
        context: &Context,
        records: &Records,
    ) -> Result<Records, StoreError> {
        let files = self.0.as_ref().map_err(|error| StoreError {
            what: format!("the CDI folder {}", context.parts.cdi.place()),
            action: "listed",
            source: match error.raw_os_error() {
                Some(code) => std::io::Error::from_raw_os_error(code),
                None => error.kind().into(),
            },
        })?;
        let mut records = records.clone();
        for uid in files
            .iter()
            .filter_map(|file| claim_of_cdi_file(&context.config.driver, file))
        {
            if !records.contains_key(&uid) && !unprepared_in_this_boot(context, &uid)? {
                let reason = "it is lost, and the claim's CDI file is there".to_owned();
                records.insert(uid, Arc::new(Stored::Corrupt { reason }));
            }
        }
        Ok(records)
    }
}

/// Returns whether an unprepare of a claim has been answered in this boot, and no later prepare.
pub(crate) fn unprepared_in_this_boot(
    context: &Context,
    uid: &ClaimUid,
) -> Result<bool, StoreError> {
    let tombstone = context.state.tombstone(uid)?;
    let boot = &context.config.boot;
    Ok(tombstone.is_some_and(|one| one.boot == *boot && !one.prepared_again))
}

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
