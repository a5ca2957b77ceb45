//! Files with the metadata of devices: written before the CDI file that mounts them, from the claim's record.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use divvy_cdi::Mount;
use divvy_claims::{Attributes, Claim, Metadata, MetadataFile, Record, RecordedDevice, metadata_files};
use divvy_model::{ClaimUid, DeviceName};
use fs_err as fs;

use crate::cdi_dir::unless_missing;
use crate::{CdiError, Executor};

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
    before: Option<PathBuf>,
}

impl FileMetadataDir {
    /// The folder need not be there yet; its path is the same on the host and in the container.
    pub fn new(dir: impl Into<PathBuf>) -> Self {
        Self { dir: dir.into(), before: None }
    }

    /// Where an earlier version kept a claim's files; they go with the claim.
    #[must_use]
    pub fn and_before(mut self, dir: PathBuf) -> Self {
        self.before = Some(dir).filter(|before| *before != self.dir);
        self
    }

    fn of(&self, claim: &ClaimUid) -> PathBuf {
        self.dir.join(claim.as_str())
    }
}

/// A claim's files are only written under the claim's lock, so one name is enough.
fn replace(temp: &Path, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = fs::File::create(temp)?;
    file.write_all(bytes)?;
    // Containers run as any user, whatever this process's mask is.
    file.set_permissions(std::fs::Permissions::from_mode(0o644))?;
    fs::rename(temp, path)
}

impl MetadataDir for FileMetadataDir {
    fn claims(&self) -> io::Result<Vec<ClaimUid>> {
        let mut claims = Vec::new();
        for entry in unless_missing(fs::read_dir(&self.dir).map(Some), None)?.into_iter().flatten() {
            claims.extend(entry?.file_name().to_str().and_then(|name| name.parse().ok()));
        }
        Ok(claims)
    }

    fn read(&self, claim: &ClaimUid, request: &str) -> io::Result<Option<Vec<u8>>> {
        unless_missing(fs::read(self.path(claim, request)).map(Some), None)
    }

    fn write(&self, claim: &ClaimUid, request: &str, bytes: &[u8]) -> io::Result<()> {
        let path = self.path(claim, request);
        let temp = path.with_extension("tmp");
        let write = || replace(&temp, &path, bytes);
        let written = match write() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                fs::create_dir_all(self.of(claim))?;
                write()
            }
            done => done,
        };
        written.inspect_err(|_| drop(fs::remove_file(&temp)))
    }

    fn remove(&self, claim: &ClaimUid) -> io::Result<()> {
        if let Some(before) = &self.before {
            unless_missing(fs::remove_dir_all(before.join(claim.as_str())), ())?;
        }
        unless_missing(fs::remove_dir_all(self.of(claim)), ())
    }

    fn path(&self, claim: &ClaimUid, request: &str) -> PathBuf {
        self.of(claim).join(format!("{request}.json"))
    }
}

impl Executor {
    /// What a claim's files say beyond its record; `None` if it is to have none.
    pub(crate) fn metadata_of(&self, claim: &Claim, devices: &[RecordedDevice]) -> Option<Metadata> {
        let attributes = self.config.metadata.then(|| self.attributes_of(devices))?;
        Some(Metadata { pod_claim_name: claim.pod_claim_name.clone(), attributes })
    }

    /// What is published of these devices now.
    pub(crate) fn attributes_of(&self, devices: &[RecordedDevice]) -> BTreeMap<DeviceName, Attributes> {
        let Some(inventory) = self.parts.inventory.inventory() else { return BTreeMap::new() };
        let name = |device: &RecordedDevice| device.allocated.device.clone();
        devices.iter().map(|d| (name(d), self.parts.edits.attributes(&inventory, d))).collect()
    }

    /// The mounts that a device of the claim's CDI file brings.
    pub(crate) fn metadata_mounts(
        &self,
        claim: &ClaimUid,
        device: &str,
        files: &[MetadataFile],
    ) -> Vec<Mount> {
        let mount = |file: &MetadataFile| Mount {
            host_path: self.parts.metadata.path(claim, &file.request).display().to_string(),
            container_path: file.container_path.clone(),
            options: vec!["ro".to_owned(), "bind".to_owned()],
        };
        files.iter().filter(|file| file.cdi_device == device).map(mount).collect()
    }

    fn metadata_failed(
        &self,
        claim: &ClaimUid,
        request: &str,
        action: &'static str,
    ) -> impl FnOnce(io::Error) -> CdiError {
        let file = self.parts.metadata.path(claim, request);
        move |source| CdiError::Metadata { file, action, source }
    }

    /// The files of a claim, as its record has them.
    pub(crate) fn metadata_files(&self, record: &Record) -> Vec<MetadataFile> {
        metadata_files(&self.config.driver, record)
    }

    /// Writes a claim's files unless they are as they should be: running containers have the very files that are there.
    pub(crate) fn ensure_metadata(&self, uid: &ClaimUid, files: &[MetadataFile]) -> Result<bool, CdiError> {
        let dir = &self.parts.metadata;
        let mut changed = false;
        for file in files {
            let there = dir.read(uid, &file.request);
            let there = there.map_err(self.metadata_failed(uid, &file.request, "read"))?;
            if there.is_none_or(|bytes| bytes != file.bytes) {
                let written = dir.write(uid, &file.request, &file.bytes);
                written.map_err(self.metadata_failed(uid, &file.request, "written"))?;
                changed = true;
            }
        }
        Ok(changed)
    }

    pub(crate) fn remove_metadata(&self, claim: &ClaimUid) -> Result<(), CdiError> {
        let failed = self.metadata_failed(claim, "*", "removed");
        self.parts.metadata.remove(claim).map_err(failed)
    }
}
