//! Records, GPU states, tombstones and ordinals as values, over the [`Store`]'s files.
//!
//! All records are looked at in every prepare (who holds this GPU?), so parsed ones are kept with the stamp of the file
//! they came from. The folder is listed each time: another plugin instance may have changed it.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use divvy_claims::{GpuState, Record, Stored, decode_ordinals, encode_ordinals};
use divvy_model::{BootId, ClaimUid, GpuUuid, Ordinals};
use serde::{Deserialize, Serialize};

use crate::{Durability, Folder, LockGuard, Stamp, Store, StoreError};

/// All records by claim, shared with the cache.
pub(crate) type Records = BTreeMap<ClaimUid, Arc<Stored<Record>>>;

/// What is kept about GPUs, shared with the cache.
pub(crate) type Gpus = BTreeMap<GpuUuid, Arc<Stored<GpuState>>>;

/// Files of a folder as they were read, each with its stamp.
type Parsed<K, T> = Mutex<BTreeMap<K, (Stamp, Arc<Stored<T>>)>>;

const ORDINALS: &str = "ordinals.json";
const NUMBERS: &str = "the file of GPU numbers";

/// When the newest unprepare of a claim arrived: a prepare that arrived before, at the other plugin instance, must not
/// bring the claim back. Not synced: after a loss of power there is no call left that could come late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tombstone {
    pub(crate) boot: BootId,
    /// Time since boot.
    pub(crate) at: Duration,
}

pub(crate) struct StateFiles {
    store: Arc<dyn Store>,
    parsed_records: Parsed<ClaimUid, Record>,
    parsed_gpus: Parsed<GpuUuid, GpuState>,
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

fn tombstone_of(uid: &ClaimUid) -> String {
    format!("the tombstone of claim UID {uid}")
}

fn state_of(gpu: &GpuUuid) -> String {
    format!("the state of {gpu}")
}

impl StateFiles {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            parsed_records: Mutex::default(),
            parsed_gpus: Mutex::default(),
            numbers: Mutex::default(),
        }
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
        self.all(Folder::Claims, "the folder of claim records", &self.parsed_records, |uid| self.record(uid))
    }

    /// All files of a folder by name; those that have not changed since are not read again.
    fn all<K: Ord + Clone + FromStr, T: PartialEq>(
        &self,
        folder: Folder,
        what: &str,
        parsed: &Parsed<K, T>,
        read: impl Fn(&K) -> Result<Stored<T>, StoreError>,
    ) -> Result<BTreeMap<K, Arc<Stored<T>>>, StoreError> {
        let entries = self.store.list(folder).map_err(cannot("read", what))?;
        let listed: Vec<(K, Stamp)> = entries
            .into_iter()
            .filter_map(|e| Some((e.name.strip_suffix(".json")?.parse().ok()?, e.stamp)))
            .collect();
        let (mut all, mut unread) = (BTreeMap::new(), Vec::new());
        {
            let mut parsed = parsed.lock().unwrap_or_else(PoisonError::into_inner);
            for (key, stamp) in &listed {
                match parsed.get(key) {
                    Some((known, value)) if known == stamp => drop(all.insert(key.clone(), value.clone())),
                    _ => unread.push((key.clone(), *stamp)),
                }
            }
            if parsed.len() > listed.len() + unread.len() {
                parsed.retain(|key, _| listed.iter().any(|(l, _)| l == key));
            }
        }
        for (key, stamp) in unread {
            let value = read(&key)?;
            // Removed since it was listed.
            if value == Stored::Absent {
                continue;
            }
            let value = Arc::new(value);
            all.insert(key.clone(), value.clone());
            // If the file was replaced between listing and reading, the next listing has another stamp.
            parsed.lock().unwrap_or_else(PoisonError::into_inner).insert(key, (stamp, value));
        }
        Ok(all)
    }

    pub(crate) fn write_record(&self, record: &Record) -> Result<(), StoreError> {
        let name = file_of(&record.uid);
        self.store
            .write(Folder::Claims, &name, &record.encode(), Durability::Synced)
            .map_err(cannot("written", record_of(&record.uid)))
    }

    /// Writes a record as it was before; unless it still is so.
    pub(crate) fn put_back(&self, record: &Record) -> Result<(), StoreError> {
        if self.record(&record.uid)?.fine() == Some(record) { Ok(()) } else { self.write_record(record) }
    }

    pub(crate) fn remove_record(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        self.store
            .remove(Folder::Claims, &file_of(uid), Durability::Synced)
            .map(drop)
            .map_err(cannot("removed", record_of(uid)))
    }

    /// Keeps the bytes of a record that cannot be read, for people. The record itself stays until it is replaced or
    /// removed: a crash in between must not look like "no claim".
    pub(crate) fn copy_aside(&self, uid: &ClaimUid, now: Duration) -> Result<(), StoreError> {
        let read = self.store.read(Folder::Claims, &file_of(uid)).map_err(cannot("read", record_of(uid)))?;
        let Some(bytes) = read else { return Ok(()) };
        let name = format!("claim-{uid}-{}", now.as_millis());
        self.store
            .write(Folder::Corrupt, &name, &bytes, Durability::Lazy)
            .map_err(cannot("written", format!("a copy of {}", record_of(uid))))
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

    pub(crate) fn gpus(&self) -> Result<Gpus, StoreError> {
        self.all(Folder::Gpus, "the folder of GPU states", &self.parsed_gpus, |gpu| self.gpu(gpu))
    }

    /// Writes a GPU's state; the default needs no file.
    pub(crate) fn write_gpu(&self, gpu: &GpuUuid, state: &GpuState) -> Result<(), StoreError> {
        let name = file_of(gpu);
        if state.is_default() {
            let removed = self.store.remove(Folder::Gpus, &name, Durability::Synced);
            return removed.map(drop).map_err(cannot("removed", state_of(gpu)));
        }
        let written = self.store.write(Folder::Gpus, &name, &state.encode(), Durability::Synced);
        written.map_err(cannot("written", state_of(gpu)))
    }

    /// Keeps the bytes of a GPU's state that cannot be read, for people.
    pub(crate) fn copy_gpu_aside(&self, gpu: &GpuUuid, now: Duration) -> Result<(), StoreError> {
        let read = self.store.read(Folder::Gpus, &file_of(gpu)).map_err(cannot("read", state_of(gpu)))?;
        let Some(bytes) = read else { return Ok(()) };
        let name = format!("{gpu}-{}", now.as_millis());
        let written = self.store.write(Folder::Corrupt, &name, &bytes, Durability::Lazy);
        written.map_err(cannot("written", format!("a copy of {}", state_of(gpu))))
    }

    /// A tombstone that cannot be read was of another time: none lasts.
    pub(crate) fn tombstone(&self, uid: &ClaimUid) -> Result<Option<Tombstone>, StoreError> {
        let read = self.store.read(Folder::Tombstones, &file_of(uid));
        let bytes = read.map_err(cannot("read", tombstone_of(uid)))?;
        Ok(bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    pub(crate) fn write_tombstone(&self, uid: &ClaimUid, tombstone: &Tombstone) -> Result<(), StoreError> {
        let bytes = serde_json::to_vec(tombstone).unwrap_or_default();
        self.store
            .write(Folder::Tombstones, &file_of(uid), &bytes, Durability::Lazy)
            .map_err(cannot("written", tombstone_of(uid)))
    }

    /// Removes tombstones of another boot, and those made before `before`. `lock` takes a claim's lock if it is free; that
    /// of a claim that is being worked on is left for the next time.
    pub(crate) fn prune_tombstones(
        &self,
        boot: &BootId,
        before: Duration,
        lock: impl Fn(&ClaimUid) -> Option<LockGuard>,
    ) -> Result<(), StoreError> {
        let listed =
            self.store.list(Folder::Tombstones).map_err(cannot("read", "the folder of tombstones"))?;
        for entry in listed {
            let Some(Ok(uid)) = entry.name.strip_suffix(".json").map(str::parse::<ClaimUid>) else {
                continue;
            };
            let is_old = || {
                let tombstone = self.tombstone(&uid)?;
                Ok::<_, StoreError>(tombstone.is_none_or(|t| t.boot != *boot || t.at < before))
            };
            // Under the lock once more: a newer one may have been written meanwhile.
            if is_old()?
                && let Some(_lock) = lock(&uid)
                && is_old()?
            {
                self.store
                    .remove(Folder::Tombstones, &entry.name, Durability::Lazy)
                    .map_err(cannot("removed", tombstone_of(&uid)))?;
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
                let what =
                    format!("{NUMBERS} node/{ORDINALS} (rebuilt when the GPUs and the API server answer)");
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
