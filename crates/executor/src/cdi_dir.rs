//! The folder from which container runtimes read CDI files.

use std::io;
use std::path::PathBuf;

use divvy_files::{Durability, Replace, unless_missing};
use fs_err as fs;

/// Files by name. Not synced: the folder is usually in memory, and files are restored from records
/// at start.
pub trait CdiDir: Send + Sync {
    /// Names of all files.
    fn list(&self) -> io::Result<Vec<String>>;
    /// A file's content; `None` if there is none.
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>>;
    /// Returns whether there is a file.
    fn exists(&self, name: &str) -> io::Result<bool>;
    /// Writes a file as a whole: a runtime that reads the folder meanwhile sees the old or the new
    /// one.
    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()>;
    /// Removes a file; whether there was one.
    fn remove(&self, name: &str) -> io::Result<bool>;
    /// Where it is, for messages.
    fn place(&self) -> String;
}

/// A folder on the host, usually `/var/run/cdi`.
#[derive(Debug)]
pub struct FileCdiDir {
    dir: PathBuf,
}

impl FileCdiDir {
    /// The folder need not be there yet: on a fresh node the first writer makes it.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    /// Returns the temporary name of a file. Runtimes only read *.json and *.yaml, so it is no CDI
    /// file. It lies in the same folder: the CDI library before 1.1.1 notices a new file by its
    /// rename in there, and none that is moved in from elsewhere. A claim's file is only written
    /// under the claim's lock, so one name is enough, and what a crash leaves is found again.
    fn temp(&self, name: &str) -> PathBuf {
        self.dir.join(format!(".{name}.tmp"))
    }

    /// Makes the folder itself, but none above it: that would hide a mount that is missing.
    fn make(&self) -> io::Result<()> {
        match fs::create_dir(&self.dir) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            done => done,
        }
    }
}

impl CdiDir for FileCdiDir {
    fn list(&self) -> io::Result<Vec<String>> {
        let mut names = Vec::new();
        let Some(entries) = unless_missing(fs::read_dir(&self.dir).map(Some), None)? else {
            return Ok(names);
        };
        for entry in entries {
            names.extend(entry?.file_name().into_string().ok());
        }
        names.sort();
        Ok(names)
    }

    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        unless_missing(fs::read(self.dir.join(name)).map(Some), None)
    }

    fn exists(&self, name: &str) -> io::Result<bool> {
        unless_missing(
            fs::metadata(self.dir.join(name)).map(|meta| meta.is_file()),
            false,
        )
    }

    fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.dir.join(name);
        let write = || Replace::new(&path, self.temp(name), Durability::Lazy).write(bytes);
        match write() {
            // Usually below /run, in memory: after a boot the folder is missing until the first
            // writer makes it.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                self.make()?;
                write().map(drop)
            }
            other => other.map(drop),
        }
    }

    fn remove(&self, name: &str) -> io::Result<bool> {
        unless_missing(fs::remove_file(self.temp(name)), ())?;
        unless_missing(fs::remove_file(self.dir.join(name)).map(|()| true), false)
    }

    fn place(&self) -> String {
        self.dir.display().to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two claims are the first ones on a node at once.
    #[test]
    fn a_folder_that_another_writer_has_just_made_is_taken_as_it_is() {
        let root = tempfile::tempdir().unwrap();
        let folder = FileCdiDir::new(root.path().join("cdi"));
        folder.make().unwrap();
        folder.make().unwrap();
        assert!(folder.list().unwrap().is_empty());
    }
}
