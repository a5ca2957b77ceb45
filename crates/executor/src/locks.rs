//! Locks on claims and GPUs: between the threads of a process, and between the two plugin instances
//! of a rolling update.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use divvy_model::{ClaimUid, GpuUuid, lock};
use fs_err as fs;

use crate::locked::Locked;
use crate::{Clock, LockError};

/// Name of a lock. Order of taking: a claim, then its GPUs by UUID, then the node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum LockName {
    Claim(ClaimUid),
    Gpu(GpuUuid),
    Ordinals,
}

/// Lock files are never removed (removing one would let two processes each hold "the" lock), and
/// there is a new claim for every pod: so claims share this many files. Two claims that meet only
/// wait for each other; making a file is the slow part of a lock, so there are not many more than
/// claims on a full node.
const CLAIM_FILES: u64 = 256;

fn claim_file(number: u64) -> String {
    format!("claims-{number:02x}.lock")
}

impl LockName {
    /// The lock file's name.
    pub fn file_name(&self) -> String {
        match self {
            Self::Claim(uid) => {
                // Fixed for ever: the other instance of a rolling update may be of another version
                // and must come to the same file.
                let hash = divvy_model::fnv1a(uid.as_str().bytes());
                claim_file((hash ^ (hash >> 32)) % CLAIM_FILES)
            }
            Self::Gpu(uuid) => format!("{uuid}.lock"),
            Self::Ordinals => "ordinals.lock".to_owned(),
        }
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Claim(uid) => write!(f, "claim UID {uid}"),
            Self::Gpu(uuid) => write!(f, "{uuid}"),
            Self::Ordinals => f.write_str("the GPU numbers"),
        }
    }
}

/// A lock that is held until this is dropped.
pub type LockGuard = Box<dyn Send>;

/// A set of named locks.
pub trait Locks: Send + Sync {
    /// Takes a lock, waiting until `until` at most.
    fn acquire(&self, name: &LockName, until: Duration) -> Result<LockGuard, LockError>;
}

#[derive(Default)]
struct Busy {
    names: Mutex<BTreeSet<String>>,
    freed: Condvar,
}

/// Lock files in a folder. Threads of this process queue in memory; other processes are seen
/// through the file.
pub struct FileLocks {
    dir: PathBuf,
    clock: Arc<dyn Clock>,
    busy: Arc<Busy>,
}

impl FileLocks {
    /// Makes the folder where it is missing, and the files that claims share: no prepare should be
    /// the one to do it.
    pub fn open(dir: impl Into<PathBuf>, clock: Arc<dyn Clock>) -> io::Result<Self> {
        let dir = dir.into();
        fs::create_dir_all(&dir)?;
        let there: BTreeSet<_> = fs::read_dir(&dir)?
            .filter_map(|e| Some(e.ok()?.file_name()))
            .collect();
        for name in (0..CLAIM_FILES).map(claim_file) {
            if !there.contains(OsStr::new(&name)) {
                drop(open_file(&dir.join(name))?);
            }
        }
        Ok(Self {
            dir,
            clock,
            busy: Arc::default(),
        })
    }

    fn wait_in_process(
        &self,
        name: &LockName,
        file: &str,
        until: Duration,
    ) -> Result<Reserved, LockError> {
        // Threads of this process queue in memory, where they need not ask again and again.
        let mut names = lock(&self.busy.names);
        while names.contains(file) {
            let left = until.saturating_sub(self.clock.now());
            if left.is_zero() {
                return Err(LockError::TimedOut {
                    lock: name.to_string(),
                });
            }
            // Woken for whatever lock is freed, since all names share the condition: the loop looks
            // whether it was this one.
            names = self
                .busy
                .freed
                .wait_timeout(names, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        names.insert(file.to_owned());
        Ok(Reserved {
            busy: self.busy.clone(),
            file: file.to_owned(),
        })
    }
}

fn open_file(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
}

/// A lock as this process sees it.
struct Reserved {
    busy: Arc<Busy>,
    file: String,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        lock(&self.busy.names).remove(&self.file);
        self.busy.freed.notify_all();
    }
}

/// Fields are dropped in order: the file first, so that the next thread finds it free.
struct HeldLock {
    _file: Locked,
    _reserved: Reserved,
}

impl Locks for FileLocks {
    fn acquire(&self, name: &LockName, until: Duration) -> Result<LockGuard, LockError> {
        let file_name = name.file_name();
        // First against the threads of this process, then against other processes.
        let reserved = self.wait_in_process(name, &file_name, until)?;
        let io = |source| LockError::Io {
            lock: name.to_string(),
            source,
        };
        let path = self.dir.join(&file_name);
        // Opened anew each time: flock belongs to the open file, and is freed by the kernel when
        // the process is killed.
        let mut file = open_file(&path).map_err(io)?;
        // The file lock cannot be waited for with a deadline, so it is tried again and again.
        let mut pause = Duration::from_millis(1);
        loop {
            file = match Locked::alone(file) {
                Ok(locked) => {
                    return Ok(Box::new(HeldLock {
                        _file: locked,
                        _reserved: reserved,
                    }));
                }
                Err((file, std::fs::TryLockError::WouldBlock)) => {
                    let left = until.saturating_sub(self.clock.now());
                    if left.is_zero() {
                        return Err(LockError::TimedOut {
                            lock: name.to_string(),
                        });
                    }
                    // Short at first, since most locks are held for milliseconds. The bound keeps a
                    // long wait from waking the processor all the time.
                    self.clock.sleep(pause.min(left));
                    pause = (pause * 2).min(Duration::from_millis(20));
                    file
                }
                Err((_, std::fs::TryLockError::Error(source))) => return Err(io(source)),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SystemClock;

    fn soon() -> Duration {
        SystemClock.now() + Duration::from_millis(30)
    }

    /// A held lock times out for others of the process and of another and is free when dropped.
    #[test]
    fn a_held_lock_times_out_for_others_and_is_free_when_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let open = || FileLocks::open(dir.path(), Arc::new(SystemClock)).unwrap();
        // Two sets over one folder stand for two plugin instances: flock belongs to the open file.
        let (a, b) = (open(), open());
        let gpu = LockName::Gpu("GPU-12345678-1234-1234-1234-123456780001".parse().unwrap());
        let held = a.acquire(&gpu, soon()).unwrap();
        for locks in [&a, &b] {
            let error = locks.acquire(&gpu, soon()).map(drop).unwrap_err();
            assert_eq!(
                error.to_string(),
                "another call held the lock of GPU-12345678-1234-1234-1234-123456780001 until the deadline (another plugin instance may hang; check its log)"
            );
        }
        drop(held);
        drop(b.acquire(&gpu, soon()).unwrap());
        drop(a.acquire(&gpu, soon()).unwrap());
    }

    #[test]
    fn claims_have_a_bounded_number_of_lock_files_with_fixed_names() {
        let name = |uid: &str| LockName::Claim(uid.parse().unwrap()).file_name();
        // Both instances of a rolling update must mean the same file: these names never change.
        assert_eq!(
            name("0f0e0d0c-1111-2222-3333-444455556666"),
            "claims-76.lock"
        );
        assert_eq!(
            name("5a1c7d3e-9b0f-4c2d-8e6a-1f2b3c4d5e6f"),
            "claims-54.lock"
        );
        let names: BTreeSet<_> = (0..20_000).map(|n| name(&format!("c{n}"))).collect();
        assert_eq!(names.len(), 256);
        let dir = tempfile::tempdir().unwrap();
        let locks = FileLocks::open(dir.path(), Arc::new(SystemClock)).unwrap();
        drop(
            locks
                .acquire(&LockName::Claim("a".parse().unwrap()), soon())
                .unwrap(),
        );
        let there: BTreeSet<_> = fs::read_dir(dir.path())
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(
            there, names,
            "made at start, and no other by a claim's lock"
        );
    }
}
