//! The [`Store`] of a node: files below the plugin's folder.

use std::io::{self, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use divvy_files::{Fsync, Mode, Replace, sync_folder, unless_missing};
use fs_err as fs;

use super::{Durability, Entry, Folder, Stamp, Store};

/// Suffix of files that are being written; a crash may leave some.
const TEMP: &str = ".tmp";

/// Files below a folder of the host's disk.
pub struct FileStore {
    root: PathBuf,
    next: AtomicU64,
    /// Makes a file or folder, of this path, last. Tests look at when it is called.
    fsync: Box<Fsync>,
}

impl FileStore {
    /// Makes the folders where they are missing and removes temporary files that a crash left.
    pub fn open(root: impl Into<PathBuf>) -> io::Result<Self> {
        Self::with_fsync(root.into(), Box::new(|_, file| file.sync_all()))
    }

    fn with_fsync(root: PathBuf, fsync: Box<Fsync>) -> io::Result<Self> {
        let store = Self {
            root,
            next: AtomicU64::new(0),
            fsync,
        };
        for folder in Folder::ALL {
            let dir = store.dir(folder);
            fs::create_dir_all(&dir)?;
            for entry in fs::read_dir(&dir)? {
                let path = entry?.path();
                if is_abandoned(&path) {
                    unless_missing(fs::remove_file(&path), ())?;
                }
            }
            // An earlier process may have died between its rename and its fsync: what we are about
            // to trust must last.
            store.sync_dir(&dir)?;
        }
        Ok(store)
    }

    /// The folder on disk.
    pub fn dir(&self, folder: Folder) -> PathBuf {
        self.root.join(folder.name())
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        sync_folder(dir, &*self.fsync)
    }
}

/// Returns whether a path is a temporary file that no writer can still be at: another plugin
/// instance may be writing right now, and its process id means nothing in our container.
fn is_abandoned(path: &Path) -> bool {
    let temporary = path
        .file_name()
        .and_then(|n| n.to_str())
        .is_some_and(|n| n.ends_with(TEMP));
    let age = || fs::metadata(path).ok()?.modified().ok()?.elapsed().ok();
    temporary && age().is_some_and(|age| age > Duration::from_mins(10))
}

fn stamp_of(meta: &std::fs::Metadata) -> Stamp {
    Stamp(meta.ino(), (meta.mtime(), meta.mtime_nsec()), meta.size())
}

impl Store for FileStore {
    fn list(&self, folder: Folder) -> io::Result<Vec<Entry>> {
        let mut entries = Vec::new();
        for entry in fs::read_dir(self.dir(folder))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            // Files that are being written, by this instance or the other.
            if name.starts_with('.') {
                continue;
            }
            match entry.metadata() {
                Ok(meta) if meta.is_file() => entries.push(Entry {
                    name,
                    stamp: stamp_of(&meta),
                }),
                Ok(_) => {}
                // Removed since it was listed.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        entries.sort();
        Ok(entries)
    }

    fn stamp(&self, folder: Folder) -> io::Result<Stamp> {
        fs::metadata(self.dir(folder)).map(|meta| stamp_of(&meta))
    }

    fn read(&self, folder: Folder, name: &str) -> io::Result<Option<Vec<u8>>> {
        let opened = unless_missing(fs::File::open(self.dir(folder).join(name)).map(Some), None)?;
        let Some(file) = opened else { return Ok(None) };
        let mut bytes = Vec::new();
        // From the bare file: what fs_err returns lacks the system's code, by which a bad block is
        // known.
        file.file().read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn write(
        &self,
        folder: Folder,
        name: &str,
        bytes: &[u8],
        durability: Durability,
    ) -> io::Result<Stamp> {
        let dir = self.dir(folder);
        let serial = self.next.fetch_add(1, Ordering::Relaxed);
        // Unique per process and write. Another instance may have the same process id in its
        // container, but a name is only written under its lock.
        let temp = format!(".{name}.{}.{serial}{TEMP}", std::process::id());
        let durability = match durability {
            Durability::Synced => divvy_files::Durability::Synced,
            Durability::Lazy => divvy_files::Durability::Lazy,
        };
        let path = dir.join(name);
        let replace = Replace::new(&path, dir.join(temp), durability).mode(Mode::Private);
        let written = replace.write_with(bytes, &*self.fsync)?;
        Ok(stamp_of(&written))
    }

    fn overwrite(&self, folder: Folder, name: &str, bytes: &[u8]) -> io::Result<Stamp> {
        let path = self.dir(folder).join(name);
        let mut file = fs::OpenOptions::new().write(true).open(&path)?;
        let length = bytes.len() as u64;
        if length > file.metadata()?.blocks() * 512 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        file.write_all(bytes)?;
        // Shorter than before: what is left of the old content goes.
        file.set_len(length)?;
        file.file().set_modified(SystemTime::now())?;
        (self.fsync)(&path, &file)?;
        Ok(stamp_of(&file.metadata()?))
    }

    fn remove(&self, folder: Folder, name: &str, durability: Durability) -> io::Result<bool> {
        let dir = self.dir(folder);
        let was_there = unless_missing(fs::remove_file(dir.join(name)).map(|()| true), false)?;
        // A removal is synced too: a claim whose record came back after a loss of power would hold
        // its devices again.
        if was_there && durability == Durability::Synced {
            self.sync_dir(&dir)?;
        }
        Ok(was_there)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Name that was made to last, and whether the record had its name then.
    type Log = Arc<Mutex<Vec<(bool, bool)>>>;

    #[test]
    fn a_write_lasts_before_its_name_and_its_name_before_it_returns() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("claims/a.json");
        let log = Log::default();
        let (synced, named) = (log.clone(), record.clone());
        let fsync = move |path: &Path, _: &fs::File| {
            // Whatever is in the file by then lasts.
            let is_whole = path.is_dir() || fs::read(path)? == b"1";
            assert!(
                is_whole,
                "{} is synced before it is written",
                path.display()
            );
            synced.lock().unwrap().push((path.is_dir(), named.exists()));
            Ok(())
        };
        let store = FileStore::with_fsync(dir.path().to_owned(), Box::new(fsync)).unwrap();
        assert_eq!(
            log.lock().unwrap().len(),
            Folder::ALL.len(),
            "each folder that is about to be trusted"
        );
        let synced = || std::mem::take(&mut *log.lock().unwrap());
        synced();
        let (file, folder) = (false, true);
        store
            .write(Folder::Claims, "a.json", b"1", Durability::Synced)
            .unwrap();
        assert_eq!(synced(), [(file, false), (folder, true)]);
        store
            .remove(Folder::Claims, "a.json", Durability::Synced)
            .unwrap();
        assert_eq!(synced(), [(folder, false)]);
        store
            .write(Folder::Claims, "a.json", b"2", Durability::Lazy)
            .unwrap();
        store
            .remove(Folder::Claims, "a.json", Durability::Lazy)
            .unwrap();
        assert_eq!(synced(), []);
    }

    #[test]
    fn a_file_is_written_over_in_its_own_blocks_and_no_further() {
        let dir = tempfile::tempdir().unwrap();
        let synced = Arc::new(AtomicU64::new(0));
        let count = synced.clone();
        let fsync = move |_: &Path, _: &fs::File| {
            count.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        let store = FileStore::with_fsync(dir.path().to_owned(), Box::new(fsync)).unwrap();
        let over = |bytes: &[u8]| store.overwrite(Folder::Claims, "a.json", bytes);
        assert_eq!(over(b"1").unwrap_err().kind(), io::ErrorKind::NotFound);
        let first = store
            .write(Folder::Claims, "a.json", b"first", Durability::Synced)
            .unwrap();
        synced.store(0, Ordering::Relaxed);
        let content = || store.read(Folder::Claims, "a.json").unwrap().unwrap();
        let mut before = first;
        // Also of the same length, and at once: an equal stamp would be the same content.
        for bytes in [&b"a longer one"[..], b"one", b"two", b"one"] {
            let stamp = over(bytes).unwrap();
            assert_eq!(content(), bytes);
            assert_eq!(synced.swap(0, Ordering::Relaxed), 1, "it lasts");
            assert_ne!(stamp, before);
            before = stamp;
            assert_eq!(store.list(Folder::Claims).unwrap()[0].stamp, stamp);
        }
        let error = over(&vec![b'x'; 1 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(content(), b"one");
    }

    #[test]
    fn a_content_that_cannot_be_read_is_an_error_with_the_systems_code() {
        let dir = tempfile::tempdir().unwrap();
        let store = FileStore::open(dir.path()).unwrap();
        fs::create_dir(dir.path().join("claims/a.json")).unwrap();
        let error = store.read(Folder::Claims, "a.json").unwrap_err();
        assert_eq!(
            error.raw_os_error(),
            Some(rustix::io::Errno::ISDIR.raw_os_error())
        );
        assert_eq!(store.read(Folder::Claims, "b.json").unwrap(), None);
    }
}
