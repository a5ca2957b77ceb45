//! Records, GPU states, tombstones and ordinals as values, over the [`Store`]'s files.
//!
//! All records are looked at in every prepare (who holds this GPU?), so parsed ones are kept with
//! the stamp of the file they came from. The folder is listed each time: another plugin instance
//! may have changed it.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use divvy_claims::{
    Record, Stored, decode_gpu_state, decode_ordinals, decode_promise, encode_gpu_state,
    encode_ordinals, encode_promise,
};
use divvy_gpu::GpuState;
use divvy_model::{BootId, CapsPromise, ClaimUid, GpuUuid, Ordinals, lock};
use serde::{Deserialize, Serialize};

use crate::{Durability, Entry, Folder, LockGuard, Stamp, Store, StoreError, chain};

/// All records by claim, shared with the cache.
pub(crate) type Records = BTreeMap<ClaimUid, Arc<Stored<Record>>>;

/// States of GPUs, shared with the cache.
pub(crate) type GpuStates = BTreeMap<GpuUuid, Arc<Stored<GpuState>>>;

/// Files of a folder as they were read, each with its stamp.
type Parsed<K, T> = Mutex<BTreeMap<K, (Stamp, Arc<Stored<T>>)>>;

/// When the newest unprepare of a claim arrived: a prepare that arrived before, at the other plugin
/// instance, must not bring the claim back. Not synced: after a loss of power there is no call left
/// that could come late.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tombstone {
    pub(crate) boot: BootId,
    /// Time since boot.
    pub(crate) at: Duration,
    /// True if the claim was prepared again since: then a record that is not there was lost.
    #[serde(default)]
    pub(crate) prepared_again: bool,
}

pub(crate) struct StateFiles {
    store: Arc<dyn Store>,
    parsed_records: Parsed<ClaimUid, Record>,
    parsed_gpus: Parsed<GpuUuid, GpuState>,
}

/// A file of the store.
struct File {
    folder: Folder,
    name: String,
    /// The file in words, for people.
    what: String,
}

impl File {
    fn record(uid: &ClaimUid) -> Self {
        Self {
            folder: Folder::Claims,
            name: format!("{uid}.json"),
            what: format!("the record of claim UID {uid}"),
        }
    }

    fn gpu(gpu: &GpuUuid) -> Self {
        Self {
            folder: Folder::Gpus,
            name: format!("{gpu}.json"),
            what: format!("the state of {gpu}"),
        }
    }

    fn tombstone(uid: &ClaimUid) -> Self {
        let what = format!("the tombstone of claim UID {uid}");
        Self {
            folder: Folder::Tombstones,
            name: format!("{uid}.json"),
            what,
        }
    }

    fn promise(gpu: &GpuUuid) -> Self {
        Self {
            folder: Folder::Node,
            name: format!("caps-{gpu}.json"),
            what: format!("the promise of caps of {gpu}"),
        }
    }

    fn ordinals() -> Self {
        let what = "the file of GPU numbers".to_owned();
        Self {
            folder: Folder::Node,
            name: "ordinals.json".to_owned(),
            what,
        }
    }
}

fn cannot(
    action: &'static str,
    what: impl Into<String>,
) -> impl FnOnce(std::io::Error) -> StoreError {
    let what = what.into();
    move |source| StoreError {
        what,
        action,
        source,
    }
}

impl StateFiles {
    pub(crate) fn new(store: Arc<dyn Store>) -> Self {
        Self {
            store,
            parsed_records: Mutex::default(),
            parsed_gpus: Mutex::default(),
        }
    }

    fn list(&self, folder: Folder, what: &str) -> Result<Vec<Entry>, StoreError> {
        self.store.list(folder).map_err(cannot("read", what))
    }

    fn read(&self, file: File) -> Result<Option<Vec<u8>>, StoreError> {
        self.store
            .read(file.folder, &file.name)
            .map_err(cannot("read", file.what))
    }

    /// Returns one of the four answers. A file whose content the disk does not give is as bad as a
    /// torn one, and no worse; any other failure says nothing of the file.
    fn stored<T>(
        &self,
        file: File,
        decode: impl FnOnce(&[u8]) -> Stored<T>,
    ) -> Result<Stored<T>, StoreError> {
        match self.read(file) {
            Err(error) if error.is_bad_block() => Ok(Stored::Corrupt {
                reason: chain(&error),
            }),
            read => Ok(read?.map_or(Stored::Absent, |bytes| decode(&bytes))),
        }
    }

    fn write(&self, file: File, bytes: &[u8], durability: Durability) -> Result<Stamp, StoreError> {
        let written = self.store.write(file.folder, &file.name, bytes, durability);
        written.map_err(cannot("written", file.what))
    }

    fn remove(&self, file: File, durability: Durability) -> Result<(), StoreError> {
        let removed = self.store.remove(file.folder, &file.name, durability);
        removed.map(drop).map_err(cannot("removed", file.what))
    }

    /// Keeps the bytes of a file that cannot be read, for people. The file itself stays until it is
    /// replaced or removed: a crash in between must not look like "nothing there".
    fn copy_aside(&self, file: File, name: &str, now: Duration) -> Result<(), StoreError> {
        let what = format!("a copy of {}", file.what);
        let bytes = match self.read(file) {
            Err(error) if error.is_bad_block() => None,
            read => read?,
        };
        let Some(bytes) = bytes else { return Ok(()) };
        let copy = File {
            folder: Folder::Corrupt,
            name: format!("{name}-{}", now.as_millis()),
            what,
        };
        self.write(copy, &bytes, Durability::Lazy).map(drop)
    }

    /// Changes when a record comes or goes, mostly (see [`Store::stamp`]).
    pub(crate) fn records_stamp(&self) -> Option<Stamp> {
        // A folder that cannot be read has no stamp: a call that waits for a change then looks
        // again when its time comes.
        self.store.stamp(Folder::Claims).ok()
    }

    pub(crate) fn record(&self, uid: &ClaimUid) -> Result<Stored<Record>, StoreError> {
        self.stored(File::record(uid), |bytes| decode_record(uid, bytes))
    }

    pub(crate) fn records(&self) -> Result<Records, StoreError> {
        self.all(
            Folder::Claims,
            "the folder of claim records",
            &self.parsed_records,
            |uid| self.record(uid),
        )
    }

    /// All files of a folder by name; those that have not changed since are not read again.
    fn all<K: Ord + Clone + FromStr, T: PartialEq>(
        &self,
        folder: Folder,
        what: &str,
        parsed: &Parsed<K, T>,
        read: impl Fn(&K) -> Result<Stored<T>, StoreError>,
    ) -> Result<BTreeMap<K, Arc<Stored<T>>>, StoreError> {
        let listed: BTreeMap<K, Stamp> = self
            .list(folder, what)?
            .into_iter()
            .filter_map(|e| Some((e.name.strip_suffix(".json")?.parse().ok()?, e.stamp)))
            .collect();
        let (mut all, mut unread) = (BTreeMap::new(), Vec::new());
        {
            // Take what is known by its stamp; the rest is read without the lock.
            let mut parsed = lock(parsed);
            for (key, stamp) in &listed {
                match parsed.get(key) {
                    // An equal stamp is the same content: a file is always replaced, with an inode
                    // and a time of its own.
                    Some((known, value)) if known == stamp => {
                        drop(all.insert(key.clone(), value.clone()));
                    }
                    _ => unread.push((key.clone(), *stamp)),
                }
            }
            parsed.retain(|key, _| listed.contains_key(key));
        }
        // Read what is new or was changed, by this instance or the other.
        for (key, stamp) in unread {
            let value = read(&key)?;
            // Removed since it was listed.
            if value == Stored::Absent {
                continue;
            }
            let value = Arc::new(value);
            all.insert(key.clone(), value.clone());
            // The disk may give its content after all.
            if matches!(*value, Stored::Corrupt { .. }) {
                continue;
            }
            // If the file was replaced between listing and reading, the next listing has another
            // stamp.
            lock(parsed).insert(key, (stamp, value));
        }
        Ok(all)
    }

    /// Writes a record. On a full disk, *undoing* is written over the old content: letting go makes
    /// room, and a crash meanwhile leaves at worst a record that is made again.
    pub(crate) fn write_record(&self, record: &Record) -> Result<(), StoreError> {
        // On disk first, then in the cache: another thread that finds the record in memory may rely
        // on it, whatever crashes.
        let (file, bytes) = (File::record(&record.uid), record.encode());
        let (folder, name) = (file.folder, file.name.clone());
        let stamp = match self.write(file, &bytes, Durability::Synced) {
            Err(error) if error.is_full() && record.is_undoing() => self
                .store
                .overwrite(folder, &name, &bytes)
                .map_err(|_| error)?,
            written => written?,
        };
        // The next look at all records need not read this one.
        let value = (stamp, Arc::new(Stored::Fine(record.clone())));
        lock(&self.parsed_records).insert(record.uid.clone(), value);
        Ok(())
    }

    /// Writes a record as it was before; unless it still is so.
    pub(crate) fn put_back(&self, record: &Record) -> Result<(), StoreError> {
        if self.record(&record.uid)?.fine() == Some(record) {
            Ok(())
        } else {
            self.write_record(record)
        }
    }

    pub(crate) fn remove_record(&self, uid: &ClaimUid) -> Result<(), StoreError> {
        // The cached value may stay: a listing without the file drops it, and nothing reads the
        // cache without a listing.
        self.remove(File::record(uid), Durability::Synced)
    }

    pub(crate) fn copy_record_aside(
        &self,
        uid: &ClaimUid,
        now: Duration,
    ) -> Result<(), StoreError> {
        self.copy_aside(File::record(uid), &format!("claim-{uid}"), now)
    }

    /// Removes all but the newest files that were set aside.
    pub(crate) fn prune_corrupt(&self, keep: usize) -> Result<(), StoreError> {
        let mut files = self.list(Folder::Corrupt, "the folder of unreadable files")?;
        // Newest last: by time of change, or, where that is the same, by inode.
        files.sort_by_key(|file| (file.stamp.1, file.stamp.0));
        let surplus = files.len().saturating_sub(keep);
        for Entry { name, .. } in files.into_iter().take(surplus) {
            let what = format!("the unreadable file {name}");
            self.remove(
                File {
                    folder: Folder::Corrupt,
                    name,
                    what,
                },
                Durability::Lazy,
            )?;
        }
        Ok(())
    }

    pub(crate) fn gpu(&self, gpu: &GpuUuid) -> Result<Stored<GpuState>, StoreError> {
        self.stored(File::gpu(gpu), decode_gpu_state)
    }

    pub(crate) fn gpus(&self) -> Result<GpuStates, StoreError> {
        self.all(
            Folder::Gpus,
            "the folder of GPU states",
            &self.parsed_gpus,
            |gpu| self.gpu(gpu),
        )
    }

    /// Writes a GPU's state; the default needs no file.
    pub(crate) fn write_gpu(&self, gpu: &GpuUuid, state: &GpuState) -> Result<(), StoreError> {
        if state.is_default() {
            self.remove(File::gpu(gpu), Durability::Synced)
        } else {
            self.write(File::gpu(gpu), &encode_gpu_state(state), Durability::Synced)
                .map(drop)
        }
    }

    /// The promise of caps that was noted of a GPU, for where its own file is lost.
    pub(crate) fn promise(&self, gpu: &GpuUuid) -> Result<CapsPromise, StoreError> {
        match self.read(File::promise(gpu)) {
            Err(error) if error.is_bad_block() => Ok(CapsPromise::Given),
            read => Ok(read?.map_or(CapsPromise::Never, |bytes| decode_promise(&bytes))),
        }
    }

    /// Notes the promise of caps of a GPU, beside its own file.
    pub(crate) fn write_promise(&self, gpu: &GpuUuid, caps: CapsPromise) -> Result<(), StoreError> {
        let bytes = encode_promise(caps);
        self.write(File::promise(gpu), &bytes, Durability::Synced)
            .map(drop)
    }

    pub(crate) fn copy_gpu_aside(&self, gpu: &GpuUuid, now: Duration) -> Result<(), StoreError> {
        self.copy_aside(File::gpu(gpu), gpu.as_str(), now)
    }

    /// A tombstone that cannot be read was of another time: none lasts.
    pub(crate) fn tombstone(&self, uid: &ClaimUid) -> Result<Option<Tombstone>, StoreError> {
        Ok(self
            .read(File::tombstone(uid))?
            .and_then(|bytes| serde_json::from_slice(&bytes).ok()))
    }

    pub(crate) fn write_tombstone(
        &self,
        uid: &ClaimUid,
        tombstone: &Tombstone,
    ) -> Result<(), StoreError> {
        // Cannot fail: a boot id and a time are plain values.
        let bytes = serde_json::to_vec(tombstone).unwrap_or_default();
        self.write(File::tombstone(uid), &bytes, Durability::Lazy)
            .map(drop)
    }

    /// Removes tombstones of another boot, and those made before `before`. `lock` takes a claim's
    /// lock if it is free; that of a claim that is being worked on is left for the next time.
    pub(crate) fn prune_tombstones(
        &self,
        boot: &BootId,
        before: Duration,
        lock: impl Fn(&ClaimUid) -> Option<LockGuard>,
    ) -> Result<(), StoreError> {
        for entry in self.list(Folder::Tombstones, "the folder of tombstones")? {
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
                self.remove(File::tombstone(&uid), Durability::Lazy)?;
            }
        }
        Ok(())
    }

    /// The numbers; none while there is no file. Without them no device name means anything: they
    /// are not guessed.
    pub(crate) fn ordinals(&self) -> Result<Ordinals, StoreError> {
        match self.stored_ordinals()? {
            Stored::Fine(numbers) => Ok(numbers),
            // An empty map resolves no name: a prepare that needs a number is refused, and none is
            // made up.
            Stored::Absent | Stored::Newer { .. } => Ok(Ordinals::default()),
            Stored::Corrupt { reason } => {
                let File { name, what, .. } = File::ordinals();
                let what =
                    format!("{what} node/{name} (rebuilt when the GPUs and the API server answer)");
                Err(cannot("read", what)(std::io::Error::other(reason)))
            }
        }
    }

    pub(crate) fn stored_ordinals(&self) -> Result<Stored<Ordinals>, StoreError> {
        self.stored(File::ordinals(), decode_ordinals)
    }

    pub(crate) fn copy_ordinals_aside(&self, now: Duration) -> Result<(), StoreError> {
        self.copy_aside(File::ordinals(), "ordinals", now)
    }

    pub(crate) fn write_ordinals(&self, ordinals: &Ordinals) -> Result<(), StoreError> {
        self.write(
            File::ordinals(),
            &encode_ordinals(ordinals),
            Durability::Synced,
        )
        .map(drop)
    }
}

/// A file that names another claim inside is not what was written there.
fn decode_record(uid: &ClaimUid, bytes: &[u8]) -> Stored<Record> {
    match Record::decode(bytes) {
        Stored::Fine(record) if record.uid != *uid => Stored::Corrupt {
            reason: format!("it is the record of claim UID {}", record.uid),
        },
        other => other,
    }
}
