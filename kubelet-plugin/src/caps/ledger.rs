//! The ledger: the shares whose memory each pod was given, in a file for each pod.
//!
//! Invariants:
//! - A share is in the ledger before its cap is set: the sum of a later share never lacks it.
//! - A file lives as long as its pod's control group, whatever becomes of the claims: the driver
//!   keeps the cap as long, and so do the containers that run under it.
//! - Locks of GPUs are held over calls of the driver, which may hang; the lock of the files is not.
//!   A call that needs both takes that of the GPU first.

use std::fs::TryLockError;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use divvy_executor::Locked;
use divvy_files::{Durability, Replace};
use divvy_model::GpuUuid;

use super::note::PodCaps;

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

const SUFFIX: &str = ".json";
/// Suffix of a file that could not be read.
const TORN: &str = ".torn";

/// Longest wait for a GPU that others are at: as long as a hook waits for its answer.
const PATIENCE: Duration = Duration::from_secs(20);
/// Pause between two looks whether a GPU is free.
const LOOK_AGAIN: Duration = Duration::from_millis(10);

impl Ledger {
    pub(crate) fn new(folder: &Path) -> Self {
        Self {
            folder: folder.to_owned(),
        }
    }

    /// Waits for the lock of all files, which two instances of a rolling update share.
    pub(crate) fn lock(&self) -> io::Result<Locked> {
        Locked::waiting(self.lock_file("lock")?)
    }

    /// Waits for the lock of a GPU's limits, which two instances share: of two containers of a pod
    /// that start at once, one reads what the other has set.
    ///
    /// # Errors
    /// `TimedOut` where the GPU hangs under another one for longer than a container would wait.
    pub(crate) fn lock_gpu(&self, gpu: &GpuUuid) -> io::Result<Locked> {
        let mut file = self.lock_file(&format!("{gpu}.lock"))?;
        let until = Instant::now() + PATIENCE;
        loop {
            match Locked::alone(file) {
                Ok(locked) => return Ok(locked),
                Err((_, TryLockError::Error(error))) => return Err(error),
                Err((_, TryLockError::WouldBlock)) if Instant::now() >= until => {
                    let why = format!("{gpu} does not answer the request of another container");
                    return Err(io::Error::new(io::ErrorKind::TimedOut, why));
                }
                Err((busy, TryLockError::WouldBlock)) => file = busy,
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    /// Opens a file beside the folder to be locked.
    fn lock_file(&self, extension: &str) -> io::Result<fs_err::File> {
        let path = self.folder.with_extension(extension);
        if let Some(folder) = path.parent() {
            fs_err::create_dir_all(folder)?;
        }
        let mut options = fs_err::OpenOptions::new();
        options.create(true).truncate(false).write(true).open(path)
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
        // In memory: after a boot there are no pods.
        Replace::new(&self.path(pod), next, Durability::Lazy)
            .write(&serde_json::to_vec(caps)?)
            .map(drop)
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
