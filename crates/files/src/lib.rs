//! Replaces a file whole or not at all. The caller says what survives a loss of power, who may read
//! the file, and under which name it is written first.

use std::fs::{Metadata, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use fs_err as fs;

/// Survival of a loss of power.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// None: the file can be made again, or its folder is in memory.
    Lazy,
    /// The name leads to the old content or to all of the new.
    Content,
    /// The new content is there once the call returns.
    Synced,
}

/// Permissions of the new file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Permissions that the umask of this process leaves.
    Umask,
    /// Only for the owner, also while the file is written.
    Private,
    /// Exactly these, whatever the umask is.
    Exactly(u32),
}

/// Makes a file or folder of this path last.
pub type Fsync = dyn Fn(&Path, &fs::File) -> io::Result<()> + Send + Sync;

/// Writing of one file.
#[derive(Debug, Clone)]
pub struct Replace<'a> {
    path: &'a Path,
    temp: PathBuf,
    durability: Durability,
    mode: Mode,
}

impl<'a> Replace<'a> {
    /// Replaces `path` by way of `temp`, which lies in the same folder. A failure removes it, a
    /// crash leaves it: a name that is always the same is used again, of others the caller finds
    /// what was left.
    pub fn new(path: &'a Path, temp: impl Into<PathBuf>, durability: Durability) -> Self {
        Self {
            path,
            temp: temp.into(),
            durability,
            mode: Mode::Umask,
        }
    }

    /// Sets the permissions of the new file.
    #[must_use]
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// Writes the file. Returns what the filesystem says of it.
    pub fn write(&self, bytes: &[u8]) -> io::Result<Metadata> {
        self.write_with(bytes, &|_, file| file.sync_all())
    }

    /// Writes the file, and makes it last in this way.
    pub fn write_with(&self, bytes: &[u8], fsync: &Fsync) -> io::Result<Metadata> {
        // Content, name, folder: whatever a crash cuts off, the name leads to the old content or to
        // all of the new.
        let write = || {
            let written = self.fill(bytes, fsync)?;
            fs::rename(&self.temp, self.path)?;
            Ok(written)
        };
        let written = write().inspect_err(|_: &io::Error| drop(fs::remove_file(&self.temp)))?;
        if let (Durability::Synced, Some(folder)) = (self.durability, self.path.parent()) {
            sync_folder(folder, fsync)?;
        }
        Ok(written)
    }

    fn fill(&self, bytes: &[u8], fsync: &Fsync) -> io::Result<Metadata> {
        let mut options = fs::OpenOptions::new();
        options.write(true).create(true).truncate(true);
        if self.mode == Mode::Private {
            fs_err::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        }
        let mut file = options.open(&self.temp)?;
        file.write_all(bytes)?;
        if let Mode::Exactly(mode) = self.mode {
            file.set_permissions(Permissions::from_mode(mode))?;
        }
        // Finer than the filesystem's own clock: two writes are never of the same time.
        file.file().set_modified(SystemTime::now())?;
        if self.durability != Durability::Lazy {
            fsync(&self.temp, &file)?;
        }
        file.metadata()
    }
}

/// Makes the names in a folder last.
pub fn sync_folder(folder: &Path, fsync: &Fsync) -> io::Result<()> {
    fsync(folder, &fs::File::open(folder)?)
}

/// Returns `missing` where there is no such file or folder.
pub fn unless_missing<T>(result: io::Result<T>, missing: T) -> io::Result<T> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(missing),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    /// Returns the names in a folder.
    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let name = |entry: io::Result<fs::DirEntry>| entry.unwrap().file_name();
        let mut names: Vec<_> = entries
            .map(name)
            .map(|name| name.into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_file_lasts_before_its_name_and_its_name_before_the_call_returns() {
        for (durability, expected) in [
            (Durability::Lazy, &[][..]),
            (Durability::Content, &[(false, false)]),
            (Durability::Synced, &[(false, false), (true, true)]),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let (path, temp) = (folder.path().join("a"), folder.path().join("b"));
            let log = std::sync::Arc::new(Mutex::new(Vec::new()));
            let (synced, named) = (log.clone(), path.clone());
            let fsync = move |of: &Path, _: &fs::File| {
                assert!(of.is_dir() || fs::read(of)? == b"new", "synced too early");
                synced.lock().unwrap().push((of.is_dir(), named.exists()));
                Ok(())
            };
            let replace = Replace::new(&path, &temp, durability);
            replace.write_with(b"new", &fsync).unwrap();
            assert_eq!(*log.lock().unwrap(), expected, "{durability:?}");
            assert_eq!(names(folder.path()), ["a"]);
        }
    }

    #[test]
    fn a_failure_leaves_the_old_content_and_nothing_beside_it() {
        let folder = tempfile::tempdir().unwrap();
        let (path, temp) = (folder.path().join("a"), folder.path().join("b"));
        fs::write(&path, "old").unwrap();
        let full: &Fsync = &|_, _| Err(io::ErrorKind::StorageFull.into());
        let replace = Replace::new(&path, &temp, Durability::Content);
        let error = replace.write_with(b"new", full).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(names(folder.path()), ["a"]);
        // What a crash left under the name is taken over.
        fs::write(&temp, "a longer left-over").unwrap();
        replace.write(b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["a"]);
    }

    #[test]
    fn permissions_are_those_asked_for() {
        let folder = tempfile::tempdir().unwrap();
        let (path, temp) = (folder.path().join("a"), folder.path().join("b"));
        for (mode, expected) in [(Mode::Private, 0o600), (Mode::Exactly(0o755), 0o755)] {
            let replace = Replace::new(&path, &temp, Durability::Lazy).mode(mode);
            replace.write(b"x").unwrap();
            let found = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
            assert_eq!(found, expected, "{mode:?}");
        }
    }
}
