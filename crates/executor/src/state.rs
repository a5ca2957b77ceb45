//! Records, GPU states, tombstones and ordinals as values, over the [`Store`]'s files.
//!
//! All records are looked at in every prepare (who holds this GPU?), so parsed ones are kept with the stamp of the file
//! they came from. The folder is listed each time: another plugin instance may have changed it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use divvy_claims::{GpuState, Record, Stored, decode_ordinals, encode_ordinals};
use divvy_model::{BootId, ClaimUid, GpuUuid, Ordinals};
use serde::{Deserialize, Serialize};

use crate::{Durability, Folder, LockGuard, Stamp, Store, StoreError};

/// All records by claim, shared with the cache.
pub(crate) type Records = BTreeMap<ClaimUid, Arc<Stored<Record>>>;

/// A record as it was read, and the stamp of its file.
type Parsed = (Stamp, Arc<Stored<Record>>);

const ORDINALS: &str = "ordinals.json";
const NUMBERS: &str = "the file of GPU numbers";

/// When a call for a claim arrived, for calls that overtake each other on their way through two plugin instances. The
/// newest unprepare (a *tombstone*): a prepare that arrived before must not bring the claim back. The newest prepare
/// that found its claim prepared: an unprepare that arrived before must not undo it. Not synced: after a loss of power
/// there is no call left that could come late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trace {
    pub(crate) boot: BootId,
    /// Time since boot.
    pub(crate) at: Duration,
}

/// Whose trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Traced {
    Unprepare,
    RepeatedPrepare,
}

impl Traced {
    const ALL: [Self; 2] = [Self::Unprepare, Self::RepeatedPrepare];

    fn folder(self) -> Folder {
        match self {
            Self::Unprepare => Folder::Tombstones,
            Self::RepeatedPrepare => Folder::Repeats,
        }
    }

    fn of(self, uid: &ClaimUid) -> String {
        match self {
            Self::Unprepare => format!("the tombstone of claim UID {uid}"),
            Self::RepeatedPrepare => format!("the trace of a repeated prepare of claim UID {uid}"),
        }
    }
}

pub(crate) struct State {
    store: Arc<dyn Store>,
    parsed: Mutex<BTreeMap<ClaimUid, Parsed>>,
    numbers: Mutex<Option<(Stamp, Arc<Ordinals>)>>,
}

fn file_of(name: &impl std::fmt::Display) -> String {
    format!("{name}.json")
}

fn cannot(action: &'static str, what: impl Into<String>) -> impl FnOnce(std::io::Error) -> StoreError {
    let what = what.into();
    move |source| StoreError { what, action, source }
}

fn record_of(uid: &ClaimUid) -> String {
    format!("the record of claim UID {uid}")
}

fn state_of(gpu: &GpuUuid) -> String {
    format!("the state of {gpu}")
}

impl State {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self { store, parsed: Mutex::default(), numbers: Mutex::default() }
    }

    /// Changes when a record comes or goes, mostly (see [`Store::stamp`]).
    pub(crate) fn records_stamp(&self) -> Option<Stamp> {
        self.store.stamp(Folder::Claims).ok()
    }

    pub(crate) fn record(&self, uid: &ClaimUid) -> Result<Stored<Record>, StoreError> {
        let bytes = self.store.read(Folder::Claims, &file_of(uid)).map_err(cannot("read", record_of(uid)))?;
        Ok(bytes.map_or(Stored::Absent, |bytes| decode_record(uid, &bytes)))
    }

    pub(crate) fn records(&self) -> Result<Records, StoreError> {
        let entries =
            self.store.list(Folder::Claims).map_err(cannot("read", "the folder of claim records"))?;
        let listed: Vec<(ClaimUid, Stamp)> = entries
            .into_iter()
            .filter_map(|e| Some((e.name.strip_suffix(".json")?.parse().ok()?, e.stamp)))
            .collect();
        let mut records = Records::new();
        let mut unread = Vec::new();
        {
            let mut parsed = self.parsed.lock().unwrap_or_else(PoisonError::into_inner);
            for (uid, stamp) in &listed {
                match parsed.get(uid) {
                    Some((known, record)) if known == stamp => {
                        records.insert(uid.clone(), record.clone());
                    }
                    _ => unread.push((uid.clone(), *stamp)),
                }
            }
            if parsed.len() > listed.len() + unread.len() {
                parsed.retain(|uid, _| listed.iter().any(|(l, _)| l == uid));
            }
        }
        for (uid, stamp) in unread {
            let record = self.record(&uid)?;
            // Removed since it was listed.
            if record == Stored::Absent {
                continue;
            }
            let record = Arc::new(record);
            records.insert(uid.clone(), record.clone());
            // If the file was replaced between listing and reading, the next listing has another stamp.
            self.parsed.lock().unwrap_or_else(PoisonError::into_inner).insert(uid, (stamp, record));
        }
        Ok(records)
    }

    pub(crate) fn write_record(&self, record: &Record) -> Result<(), StoreError> {
        let name = file_of(&record.uid);
        self.store
            .write(Folder::Claims, &name, &record.encode(), Durability::Synced)
            .map_err(cannot("written", record_of(&record.uid)))
    }

    /// Writes a record's file as it was before; unless it still is so.
    pub(crate) fn put_back(&self, uid: &ClaimUid, bytes: &[u8]) -> Result<(), StoreError> {
        let name = file_of(uid);
        let now = self.store.read(Folder::Claims, &name).map_err(cannot("read", record_of(uid)))?;
        if now.as_deref() == Some(bytes) {
            return Ok(());
        }
        self.store
            .write(Folder::Claims, &name, bytes, Durability::Synced)
            .map_err(cannot("written", record_of(uid)))
    }

    pub(crate) fn remove_record(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        self.store
            .remove(Folder::Claims, &file_of(uid), Durability::Synced)
            .map(drop)
            .map_err(cannot("removed", record_of(uid)))
    }

    /// Keeps the bytes of a record that cannot be read, for people. The record itself stays until it is replaced or
    /// removed: a crash in between must not look like "no claim". The bytes, if there is such a file.
    pub(crate) fn copy_aside(&self, uid: &ClaimUid, now: Duration) -> Result<Option<Vec<u8>>, StoreError> {
        let read = self.store.read(Folder::Claims, &file_of(uid)).map_err(cannot("read", record_of(uid)))?;
        let Some(bytes) = read else { return Ok(None) };
        let name = format!("claim-{uid}-{}", now.as_millis());
        self.store
            .write(Folder::Corrupt, &name, &bytes, Durability::Lazy)
            .map_err(cannot("written", format!("a copy of {}", record_of(uid))))?;
        Ok(Some(bytes))
    }

    /// Removes all but the newest files that were set aside.
    pub(crate) fn prune_corrupt(&self, keep: usize) -> Result<(), StoreError> {
        let mut files =
            self.store.list(Folder::Corrupt).map_err(cannot("read", "the folder of unreadable files"))?;
        // Newest last: by time of change, or, where that is the same, by inode.
        files.sort_by_key(|file| (file.stamp.1, file.stamp.0));
        let surplus = files.len().saturating_sub(keep);
        for file in files.into_iter().take(surplus) {
            self.store
                .remove(Folder::Corrupt, &file.name, Durability::Lazy)
                .map_err(cannot("removed", format!("the unreadable file {}", file.name)))?;
        }
        Ok(())
    }

    pub(crate) fn gpu(&self, gpu: &GpuUuid) -> Result<Stored<GpuState>, StoreError> {
        let bytes = self.store.read(Folder::Gpus, &file_of(gpu)).map_err(cannot("read", state_of(gpu)))?;
        Ok(bytes.map_or(Stored::Absent, |bytes| GpuState::decode(&bytes)))
    }

    pub(crate) fn gpus(&self) -> Result<BTreeMap<GpuUuid, Stored<GpuState>>, StoreError> {
        let entries = self.store.list(Folder::Gpus).map_err(cannot("read", "the folder of GPU states"))?;
        let names = entries.into_iter().filter_map(|e| e.name.strip_suffix(".json")?.parse::<GpuUuid>().ok());
        names.map(|gpu| Ok((gpu.clone(), self.gpu(&gpu)?))).collect()
    }

    /// Writes a GPU's state. A corrupt one before it is kept for people; a newer one is never touched.
    pub(crate) fn write_gpu(&self, gpu: &GpuUuid, state: &GpuState, now: Duration) -> Result<(), StoreError> {
        let name = file_of(gpu);
        match self.gpu(gpu)? {
            Stored::Newer { .. } => return Ok(()),
            Stored::Corrupt { .. } => {
                if let Some(bytes) =
                    self.store.read(Folder::Gpus, &name).map_err(cannot("read", state_of(gpu)))?
                {
                    self.store
                        .write(
                            Folder::Corrupt,
                            &format!("{gpu}-{}", now.as_millis()),
                            &bytes,
                            Durability::Lazy,
                        )
                        .map_err(cannot("written", format!("a copy of {}", state_of(gpu))))?;
                }
            }
            Stored::Absent | Stored::Fine(_) => {}
        }
        if state.is_default() {
            let removed = self.store.remove(Folder::Gpus, &name, Durability::Synced);
            removed.map(drop).map_err(cannot("removed", state_of(gpu)))
        } else {
            self.store
                .write(Folder::Gpus, &name, &state.encode(), Durability::Synced)
                .map_err(cannot("written", state_of(gpu)))
        }
    }

    /// The newest such call for a claim. A trace that cannot be read was of another time: it never lasts.
    pub(crate) fn trace(&self, of: Traced, uid: &ClaimUid) -> Result<Option<Trace>, StoreError> {
        let read = self.store.read(of.folder(), &file_of(uid));
        let bytes = read.map_err(cannot("read", of.of(uid)))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    pub(crate) fn write_trace(&self, of: Traced, uid: &ClaimUid, trace: &Trace) -> Result<(), StoreError> {
        let bytes = serde_json::to_vec(trace).unwrap_or_default();
        self.store
            .write(of.folder(), &file_of(uid), &bytes, Durability::Lazy)
            .map_err(cannot("written", of.of(uid)))
    }

    /// Removes traces of another boot, and those made before `before`. `lock` takes a claim's lock if it is free; the
    /// traces of a claim that is being worked on are left for the next time.
    pub(crate) fn prune_traces(
        &self,
        boot: &BootId,
        before: Duration,
        lock: impl Fn(&ClaimUid) -> Option<LockGuard>,
    ) -> Result<(), StoreError> {
        for of in Traced::ALL {
            let listed = self.store.list(of.folder()).map_err(cannot("read", "a folder of traces"))?;
            for entry in listed {
                let Some(Ok(uid)) = entry.name.strip_suffix(".json").map(str::parse::<ClaimUid>) else {
                    continue;
                };
                let is_old = || {
                    let trace = self.trace(of, &uid)?;
                    Ok::<_, StoreError>(trace.is_none_or(|t| t.boot != *boot || t.at < before))
                };
                if !is_old()? {
                    continue;
                }
                // A newer one may have been written meanwhile.
                if let Some(_lock) = lock(&uid)
                    && is_old()?
                {
                    self.store
                        .remove(of.folder(), &entry.name, Durability::Lazy)
                        .map_err(cannot("removed", of.of(&uid)))?;
                }
            }
        }
        Ok(())
    }

    /// The numbers; none while there is no file. Without them no device name means anything: they are not guessed.
    pub(crate) fn ordinals(&self) -> Result<Arc<Ordinals>, StoreError> {
        let stamp = self.store.file_stamp(Folder::Node, ORDINALS).map_err(cannot("read", NUMBERS))?;
        let stamp = stamp.unwrap_or_default();
        if let Some((known, numbers)) = self.numbers.lock().unwrap_or_else(PoisonError::into_inner).as_ref()
            && *known == stamp
        {
            return Ok(numbers.clone());
        }
        let numbers = match self.stored_ordinals()? {
            Stored::Fine(numbers) => Arc::new(numbers),
            Stored::Absent | Stored::Newer { .. } => Arc::default(),
            Stored::Corrupt { reason } => {
                let what = format!(
                    "{NUMBERS} node/{ORDINALS} (it is made again by itself when GPUs and API server have answered)"
                );
                return Err(cannot("read", what)(std::io::Error::other(reason)));
            }
        };
        *self.numbers.lock().unwrap_or_else(PoisonError::into_inner) = Some((stamp, numbers.clone()));
        Ok(numbers)
    }

    pub(crate) fn stored_ordinals(&self) -> Result<Stored<Ordinals>, StoreError> {
        let read = self.store.read(Folder::Node, ORDINALS).map_err(cannot("read", NUMBERS))?;
        Ok(read.map_or(Stored::Absent, |bytes| decode_ordinals(&bytes)))
    }

    /// Keeps the bytes of numbers that cannot be read, for people; they stay until they are replaced.
    pub(crate) fn copy_ordinals_aside(&self, now: Duration) -> Result<(), StoreError> {
        let read = self.store.read(Folder::Node, ORDINALS).map_err(cannot("read", NUMBERS))?;
        let name = format!("ordinals-{}", now.as_millis());
        self.store
            .write(Folder::Corrupt, &name, &read.unwrap_or_default(), Durability::Lazy)
            .map_err(cannot("written", format!("a copy of {NUMBERS}")))
    }

    pub(crate) fn write_ordinals(&self, ordinals: &Ordinals) -> Result<(), StoreError> {
        let written =
            self.store.write(Folder::Node, ORDINALS, &encode_ordinals(ordinals), Durability::Synced);
        *self.numbers.lock().unwrap_or_else(PoisonError::into_inner) = None;
        written.map_err(cannot("written", NUMBERS))
    }
}

/// A file that names another claim inside is not what was written there.
fn decode_record(uid: &ClaimUid, bytes: &[u8]) -> Stored<Record> {
    match Record::decode(bytes) {
        Stored::Fine(record) if record.uid != *uid => {
            Stored::Corrupt { reason: format!("it is the record of claim UID {}", record.uid) }
        }
        other => other,
    }
}
