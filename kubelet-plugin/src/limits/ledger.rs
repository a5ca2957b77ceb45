//! The ledger: the shares whose memory each pod was given, in a file for each pod.
//!
//! Invariants:
//! - A share is in the ledger before its cap is set: the sum of a later share never lacks it.
//! - A file lives as long as its pod's control group, whatever becomes of the claims: the driver
//!   keeps the cap as long, and so do the containers that run under it.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use divvy_executor::Locked;
use divvy_model::GpuUuid;
use serde::{Deserialize, Serialize};

/// The shares that containers of a pod have started with.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct PodCaps {
    /// Path of the pod's control group below the root of the hierarchy.
    pub(crate) group: String,
    /// True if it was made again, of records. These learn late of a pod that comes to a claim which
    /// others use, so that a share may be missing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) of_records: bool,
    /// Bytes of each share, by GPU and by claim and device.
    gpus: BTreeMap<GpuUuid, BTreeMap<String, u64>>,
}

impl PodCaps {
    /// Returns the same with a share of a GPU. It is not counted twice: each container of a claim,
    /// and each restart, asks for it. An amount that stood for it until it was known again falls by
    /// as much.
    pub(crate) fn with(mut self, gpu: &GpuUuid, share: String, bytes: u64) -> Self {
        let shares = self.gpus.entry(gpu.clone()).or_default();
        if !shares.contains_key(&share)
            && let Some(unknown) = shares.remove(UNKNOWN)
            && unknown > bytes
        {
            shares.insert(UNKNOWN.to_owned(), unknown - bytes);
        }
        shares.insert(share, bytes);
        self
    }

    /// Returns the same with shares of a GPU of which only the sum is known, by the driver's limit.
    pub(crate) fn with_unknown(mut self, gpu: &GpuUuid, bytes: u64) -> Self {
        let shares = self.gpus.entry(gpu.clone()).or_default();
        shares.insert(UNKNOWN.to_owned(), bytes);
        self
    }

    /// Returns whether the pod has shares of a GPU.
    pub(crate) fn has(&self, gpu: &GpuUuid) -> bool {
        self.gpus.get(gpu).is_some_and(|shares| !shares.is_empty())
    }

    /// Returns the UIDs of the claims of the pod's shares of a GPU.
    pub(crate) fn claims(&self, gpu: &GpuUuid) -> impl Iterator<Item = &str> {
        let shares = self.gpus.get(gpu).into_iter().flatten();
        shares.map(|(name, _)| name.split_once('/').map_or(name.as_str(), |(uid, _)| uid))
    }

    /// Returns the sums of the pod's shares, by GPU.
    pub(crate) fn sums(&self) -> impl Iterator<Item = (&GpuUuid, u64)> {
        let sum = |shares: &BTreeMap<String, u64>| {
            shares
                .values()
                .fold(0_u64, |sum, bytes| sum.saturating_add(*bytes))
        };
        self.gpus
            .iter()
            .map(move |(gpu, shares)| (gpu, sum(shares)))
    }

    /// Returns the sum of the pod's shares of a GPU.
    pub(crate) fn sum(&self, gpu: &GpuUuid) -> u64 {
        let mut sums = self.sums();
        sums.find(|(of, _)| *of == gpu).map_or(0, |(_, sum)| sum)
    }
}

/// Content of a pod's file.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Noted {
    /// The pod has none yet.
    Nothing,
    Shares(PodCaps),
    /// It cannot be read, for this reason. A sum without its shares would be too small for the
    /// programs that run.
    Torn(String),
}

/// The files, in a folder in memory: a reboot ends the pods.
#[derive(Debug)]
pub(crate) struct Ledger {
    folder: PathBuf,
}

/// Name of shares that are not known any more.
const UNKNOWN: &str = "earlier";

const SUFFIX: &str = ".json";
/// Suffix of a file that could not be read.
const TORN: &str = ".torn";

impl Ledger {
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// Waits for the lock of all files, which two instances of a rolling update share.
    pub(crate) fn lock(&self) -> io::Result<Locked> {
        let path = self.folder.with_extension("lock");
        if let Some(folder) = path.parent() {
            fs_err::create_dir_all(folder)?;
        }
        let mut options = fs_err::OpenOptions::new();
        let file = options
            .create(true)
            .truncate(false)
            .write(true)
            .open(path)?;
        Locked::waiting(file)
    }

    fn path(&self, pod: &str) -> PathBuf {
        self.folder.join(format!("{pod}{SUFFIX}"))
    }

    /// Reads a pod's shares.
    pub(crate) fn read(&self, pod: &str) -> io::Result<Noted> {
        match fs_err::read(self.path(pod)) {
            Ok(bytes) => Ok(match serde_json::from_slice(&bytes) {
                Ok(caps) => Noted::Shares(caps),
                Err(error) => Noted::Torn(error.to_string()),
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Noted::Nothing),
            Err(error) => Err(error),
        }
    }

    /// Sets a pod's file aside, for people, that cannot be read.
    pub(crate) fn set_aside(&self, pod: &str) -> io::Result<()> {
        fs_err::rename(self.path(pod), self.folder.join(format!("{pod}{TORN}")))
    }

    /// Writes a pod's shares, whole or not at all.
    pub(crate) fn write(&self, pod: &str, caps: &PodCaps) -> io::Result<()> {
        fs_err::create_dir_all(&self.folder)?;
        let next = self.folder.join(format!("{pod}.new"));
        fs_err::write(&next, serde_json::to_vec(caps)?)?;
        fs_err::rename(next, self.path(pod))
    }

    /// Removes a pod's files.
    pub(crate) fn remove(&self, pod: &str) -> io::Result<()> {
        for path in [self.path(pod), self.folder.join(format!("{pod}{TORN}"))] {
            match fs_err::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Returns the UIDs of the pods that have a file.
    pub(crate) fn pods(&self) -> io::Result<Vec<String>> {
        let entries = match fs_err::read_dir(&self.folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error),
        };
        let names = entries.map(|entry| Ok(entry?.file_name()));
        let names: io::Result<Vec<_>> = names.collect();
        let pod = |name: std::ffi::OsString| Some(name.to_str()?.strip_suffix(SUFFIX)?.to_owned());
        Ok(names?.into_iter().filter_map(pod).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_of_a_pod_are_added_up_by_gpu_and_each_counts_once() {
        let gpu = |n: u8| -> GpuUuid {
            format!("GPU-12345678-1234-1234-1234-12345678000{n}")
                .parse()
                .unwrap()
        };
        let caps = PodCaps::default()
            .with(&gpu(1), "a/gpu-0-ts".to_owned(), 4)
            .with(&gpu(1), "b/gpu-0-ts".to_owned(), 6)
            .with(&gpu(1), "a/gpu-0-ts".to_owned(), 4)
            .with(&gpu(2), "a/gpu-1-ts".to_owned(), 1);
        assert_eq!([1, 2, 3].map(|n| caps.sum(&gpu(n))), [10, 1, 0]);
        let folder = tempfile::tempdir().unwrap();
        let ledger = Ledger::new(&folder.path().join("caps"));
        assert_eq!(ledger.pods().unwrap(), [""; 0]);
        assert_eq!(ledger.read("p").unwrap(), Noted::Nothing);
        ledger.write("p", &caps).unwrap();
        assert_eq!(ledger.read("p").unwrap(), Noted::Shares(caps.clone()));
        assert_eq!([1, 3].map(|n| caps.has(&gpu(n))), [true, false]);
        assert_eq!(caps.claims(&gpu(1)).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(ledger.pods().unwrap(), ["p"]);
        ledger.remove("p").unwrap();
        ledger.remove("p").unwrap();
        assert_eq!(ledger.pods().unwrap(), [""; 0]);
        fs_err::write(ledger.path("p"), "{").unwrap();
        let torn = ledger.read("p").unwrap();
        assert!(matches!(torn, Noted::Torn(_)), "{torn:?}");
        ledger.set_aside("p").unwrap();
        assert_eq!(ledger.read("p").unwrap(), Noted::Nothing);
        assert_eq!(ledger.pods().unwrap(), [""; 0]);
        ledger.remove("p").unwrap();
        assert_eq!(fs_err::read_dir(&ledger.folder).unwrap().count(), 0);
    }
}
