//! The folder with the metadata of claims' devices.

use std::io;
use std::path::PathBuf;

use divvy_files::{Durability, Mode, Replace, unless_missing};
use divvy_model::ClaimUid;
use fs_err as fs;

/// Files by claim and request. Not synced: they are made again from records.
pub trait MetadataDir: Send + Sync {
    /// Claims that have files.
    fn claims(&self) -> io::Result<Vec<ClaimUid>>;
    /// A file's content; `None` if there is none.
    fn read(&self, claim: &ClaimUid, request: &str) -> io::Result<Option<Vec<u8>>>;
    /// Writes a file as a whole, readable by everyone.
    fn write(&self, claim: &ClaimUid, request: &str, bytes: &[u8]) -> io::Result<()>;
    /// Removes a claim's files.
    fn remove(&self, claim: &ClaimUid) -> io::Result<()>;
    /// Where the host finds a file.
    fn path(&self, claim: &ClaimUid, request: &str) -> PathBuf;
}

/// A folder on the host, with a folder for each claim.
#[derive(Debug)]
pub struct FileMetadataDir {
    dir: PathBuf,
}

impl FileMetadataDir {
    /// The folder need not be there yet; its path is the same on the host and in the container.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into() }
    }

    fn of(&self, claim: &ClaimUid) -> PathBuf {
        self.dir.join(claim.as_str())
    }
}

impl MetadataDir for FileMetadataDir {
    fn claims(&self) -> io::Result<Vec<ClaimUid>> {
        let mut claims = Vec::new();
        for entry in unless_missing(fs::read_dir(&self.dir).map(Some), None)?
            .into_iter()
            .flatten()
        {
            claims.extend(
                entry?
                    .file_name()
                    .to_str()
                    .and_then(|name| name.parse().ok()),
            );
        }
        Ok(claims)
    }

    fn read(&self, claim: &ClaimUid, request: &str) -> io::Result<Option<Vec<u8>>> {
        unless_missing(fs::read(self.path(claim, request)).map(Some), None)
    }

    fn write(&self, claim: &ClaimUid, request: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(claim, request);
        // One name is enough: a claim's files are only written under the claim's lock. Containers
        // run as any user, whatever this process's mask is.
        let write = || {
            Replace::new(&path, path.with_extension("tmp"), Durability::Lazy)
                .mode(Mode::Exactly(0o644))
                .write(bytes)
        };
        match write() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(self.of(claim))?;
                write().map(drop)
            }
            done => done.map(drop),
        }
    }

    fn remove(&self, claim: &ClaimUid) -> io::Result<()> {
        unless_missing(fs::remove_dir_all(self.of(claim)), ())
    }

    fn path(&self, claim: &ClaimUid, request: &str) -> PathBuf {
        self.of(claim).join(format!("{request}.json"))
    }
}
