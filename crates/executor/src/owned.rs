//! A GPU belongs to one driver of ours at a time. Two releases of the chart under different driver names publish the
//! same GPUs, and neither reads the other's records: so the driver whose claims hold a GPU also holds a lock on it, in
//! a folder that all share.
//!
//! `<uuid>.<driver>` is locked, shared, by the instances of that driver: those of a rolling update are not in each
//! other's way, and the kernel frees it when the last has died. A driver that takes a GPU checks the files of the others,
//! one at a time (`<uuid>`). An instance takes the GPUs of its records before the kubelet may call it. Between the death of
//! an instance and the next one's start the GPU looks free: what keeps another driver from it then are the processes on
//! it and the taint for what others have given out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::TryLockError;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_claims::{Claim, Plan, Record, Refusal, Stored, Why};
use divvy_model::GpuUuid;
use fs_err as fs;

use crate::{Clock, Executor};

/// How long the look at the others may take.
const TURN: Duration = Duration::from_secs(1);

/// The GPUs of this process, by the locks it holds.
pub(crate) struct Owned {
    dir: PathBuf,
    driver: String,
    held: Mutex<BTreeMap<GpuUuid, fs::File>>,
}

/// Why a GPU is not to be had.
#[derive(Debug)]
enum NotOwned {
    /// Another driver has it.
    By(String),
    /// The locks cannot be read or written.
    Io(io::Error),
}

impl From<io::Error> for NotOwned {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

impl Owned {
    pub(crate) fn new(dir: PathBuf, driver: String) -> Self {
        Self { dir, driver, held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, fs::File>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a GPU unless another driver has it; `on_behalf` is for that one's messages.
    fn take(&self, gpu: &GpuUuid, on_behalf: &str, clock: &dyn Clock) -> Result<(), NotOwned> {
        if self.held().contains_key(gpu) {
            return Ok(());
        }
        fs::create_dir_all(&self.dir)?;
        let _turn = self.turn(gpu, clock)?;
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(driver) =
                name.to_str().and_then(|name| name.strip_prefix(gpu.as_str())?.strip_prefix('.'))
            else {
                continue;
            };
            if driver == self.driver {
                continue;
            }
            match open(&entry.path())?.file().try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    let for_whom = fs::read_to_string(entry.path()).unwrap_or_default();
                    return Err(NotOwned::By(format!(
                        "driver {driver}, which has prepared {for_whom} on it"
                    )));
                }
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
        let mut file = open(&self.dir.join(format!("{gpu}.{}", self.driver)))?;
        file.file().lock_shared()?;
        file.set_len(0)?;
        file.write_all(on_behalf.as_bytes())?;
        self.held().insert(gpu.clone(), file);
        Ok(())
    }

    fn turn(&self, gpu: &GpuUuid, clock: &dyn Clock) -> io::Result<fs::File> {
        let file = open(&self.dir.join(gpu.as_str()))?;
        let until = clock.now() + TURN;
        loop {
            match file.file().try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) if clock.now() < until => clock.sleep(Duration::from_millis(1)),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn open(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new().write(true).create(true).truncate(false).open(path)
}

/// GPUs of a record that are held, not only looked at by an admin.
fn held_by(record: &Record) -> BTreeSet<GpuUuid> {
    record.devices.iter().filter(|d| d.kind.needs().is_some()).map(|d| d.gpu.clone()).collect()
}

impl Executor {
    /// Takes the GPUs of a plan; a refusal that names who has one. Under the GPUs' locks.
    pub(crate) fn take_gpus(&self, claim: &Claim, plan: &Plan) -> Option<Refusal> {
        let owned = self.owned.as_ref()?;
        let by = claim.reference().to_string();
        let mut wanted = plan.devices.iter().filter(|device| device.kind.needs().is_some());
        wanted.find_map(|device| {
            let by = match owned.take(&device.gpu, &format!("claim {by}"), &*self.parts.clock) {
                Ok(()) => return None,
                Err(NotOwned::By(other)) => other,
                Err(NotOwned::Io(error)) => {
                    format!("an unknown driver (failed to take the locks: {error})")
                }
            };
            Some(Why::OtherDriver(by).about(claim, device))
        })
    }

    /// Lets those of these GPUs go that no record holds any more. Under their locks.
    pub(crate) fn leave_gpus(&self, gpus: &BTreeSet<GpuUuid>) {
        let Some(owned) = &self.owned else { return };
        // What cannot be read may hold anything.
        let Ok(records) = self.state.records() else { return };
        let fine: Option<Vec<&Record>> = records.values().map(|stored| stored.fine()).collect();
        let Some(fine) = fine else { return };
        let recorded: BTreeSet<GpuUuid> = fine.into_iter().flat_map(held_by).collect();
        owned.held().retain(|gpu, _| !gpus.contains(gpu) || recorded.contains(gpu));
    }

    /// Takes the GPUs that records hold, and lets those go that none does: a record may have been made or removed by
    /// the process before this one, or by another instance.
    pub(crate) fn own_what_is_recorded(&self) {
        let Some(owned) = &self.owned else { return };
        let Ok(records) = self.state.records() else { return };
        for stored in records.values() {
            let (gpus, claim) = match stored.as_ref() {
                Stored::Fine(record) => (held_by(record), Some(record.reference())),
                Stored::Newer { head, .. } => (head.gpus.iter().cloned().collect(), head.claim.clone()),
                Stored::Absent | Stored::Corrupt { .. } => continue,
            };
            let on_behalf = claim.map_or_else(|| "a claim".to_owned(), |claim| format!("claim {claim}"));
            for gpu in gpus {
                match owned.take(&gpu, &on_behalf, &*self.parts.clock) {
                    Ok(()) => {}
                    Err(NotOwned::By(other)) => tracing::error!(
                        %gpu, on_behalf, other,
                        "another driver allocated the GPU while this one was down; both use it"
                    ),
                    Err(NotOwned::Io(error)) => {
                        tracing::error!(%gpu, %error, "failed to lock the GPU against other drivers");
                    }
                }
            }
        }
        let held: Vec<GpuUuid> = owned.held().keys().cloned().collect();
        for gpu in held {
            if let Ok(_lock) = self.lock_gpu(&gpu) {
                self.leave_gpus(&BTreeSet::from([gpu]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A clock that goes on only while it is slept on, and whose first sleep lets go of a lock.
    struct Busy(Mutex<(Duration, Option<fs::File>)>);

    impl Clock for Busy {
        fn now(&self) -> Duration {
            self.0.lock().unwrap().0
        }

        fn sleep(&self, time: Duration) {
            let mut busy = self.0.lock().unwrap();
            busy.0 += time;
            busy.1 = None;
        }
    }

    #[test]
    fn another_drivers_look_at_a_gpu_is_waited_for_and_not_for_ever() {
        let dir = tempfile::tempdir().unwrap();
        let gpu: GpuUuid = "GPU-12345678-1234-1234-1234-123456780001".parse().unwrap();
        let owned = Owned::new(dir.path().to_owned(), "gpu.divvy.dev".to_owned());
        let looks = || {
            let file = open(&dir.path().join(gpu.as_str())).unwrap();
            file.file().lock().unwrap();
            file
        };
        let clock = Busy(Mutex::new((Duration::ZERO, Some(looks()))));
        drop(owned.turn(&gpu, &clock).unwrap());
        let _looks = looks();
        let hangs = Busy(Mutex::new((Duration::ZERO, None)));
        let error = owned.turn(&gpu, &hangs).unwrap_err();
        assert_eq!((error.kind(), hangs.now()), (io::ErrorKind::WouldBlock, TURN));
    }
}
