//! A GPU belongs to one driver of ours at a time. Two releases of the chart under different driver
//! names publish the same GPUs, and neither reads the other's records: so the driver whose claims
//! hold a GPU also holds a lock on it, in a folder that all share.
//!
//! `<uuid>.<driver>` is locked, shared, by the instances of that driver: those of a rolling update
//! are not in each other's way, and the kernel frees it when the last has died. A driver that takes
//! a GPU checks the files of the others, one at a time (`<uuid>`). An instance takes the GPUs of
//! its records before the kubelet may call it. Between the death of an instance and the next one's
//! start the GPU looks free: what keeps another driver from it then are the processes on it and the
//! taint for what others have given out.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::TryLockError;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;

use divvy_claims::{ClaimRef, Record, Stored};
use divvy_model::{GpuUuid, lock};
use fs_err as fs;

use crate::Clock;
use crate::context::Context;
use crate::locked::Locked;

/// Time limit for the look at the others.
const TURN: Duration = Duration::from_secs(1);

/// The GPUs of this process, by the locks it holds.
pub(crate) struct Owned {
    dir: PathBuf,
    driver: String,
    held: Mutex<BTreeMap<GpuUuid, Locked>>,
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
        Self {
            dir,
            driver,
            held: Mutex::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, BTreeMap<GpuUuid, Locked>> {
        lock(&self.held)
    }

    /// Takes a GPU unless another driver has it; `on_behalf` is for that one's messages.
    fn take(&self, gpu: &GpuUuid, on_behalf: &str, clock: &dyn Clock) -> Result<(), NotOwned> {
        if self.held().contains_key(gpu) {
            return Ok(());
        }
        fs::create_dir_all(&self.dir)?;
        // Phase 1: one driver looks at a time. Two that look at once would both find the other's
        // file free, and both take the GPU.
        let _turn = self.turn(gpu, clock)?;
        // Phase 2: the files of the other drivers. An exclusive lock that can be had shows that no
        // instance of that driver holds a share; it is freed at once with the file.
        for entry in fs::read_dir(&self.dir)? {
            let entry = entry?;
            let name = entry.file_name();
            let Some(driver) = name
                .to_str()
                .and_then(|name| name.strip_prefix(gpu.as_str())?.strip_prefix('.'))
            else {
                continue;
            };
            if driver == self.driver {
                continue;
            }
            match Locked::alone(open(&entry.path())?) {
                Ok(_) => {}
                Err((_, TryLockError::WouldBlock)) => {
                    let noted = fs::read_to_string(entry.path()).ok();
                    let for_whom = noted.filter(|text| !text.is_empty());
                    let for_whom = for_whom.unwrap_or_else(|| "a claim".to_owned());
                    return Err(NotOwned::By(format!(
                        "driver {driver}, which has prepared {for_whom} on it"
                    )));
                }
                Err((_, TryLockError::Error(error))) => return Err(error.into()),
            }
        }
        // Phase 3: a share of our own. Other drivers try this file only in a turn, which is ours
        // now: taking the share does not block.
        let mut file = Locked::shared(open(&self.dir.join(format!("{gpu}.{}", self.driver)))?)?;
        file.set_len(0)?;
        file.write_all(on_behalf.as_bytes())?;
        self.held().insert(gpu.clone(), file);
        Ok(())
    }

    fn turn(&self, gpu: &GpuUuid, clock: &dyn Clock) -> io::Result<Locked> {
        let mut file = open(&self.dir.join(gpu.as_str()))?;
        let until = clock.now() + TURN;
        loop {
            file = match Locked::alone(file) {
                Ok(locked) => return Ok(locked),
                Err((file, TryLockError::WouldBlock)) if clock.now() < until => file,
                Err((_, error)) => return Err(error.into()),
            };
            clock.sleep(Duration::from_millis(1));
        }
    }
}

fn open(path: &Path) -> io::Result<fs::File> {
    fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
}

/// Returns the GPUs of a record that are held, not only looked at by an admin.
pub(crate) fn held_by(record: &Record) -> BTreeSet<GpuUuid> {
    let held = record.holds().filter(|hold| hold.sharing.holds());
    held.map(|hold| hold.gpu).collect()
}

/// Takes GPUs for a claim, before its GPUs are looked at. Returns those that another driver has, or
/// may have, with that driver in words. Under the GPUs' locks.
pub(crate) fn take_gpus(
    context: &Context,
    claim: &ClaimRef,
    gpus: &BTreeSet<GpuUuid>,
) -> BTreeMap<GpuUuid, String> {
    let Some(owned) = &context.owned else {
        return BTreeMap::new();
    };
    let on_behalf = format!("claim {claim}");
    let refused = |gpu: &GpuUuid| {
        let by = match owned.take(gpu, &on_behalf, &*context.parts.clock) {
            Ok(()) => return None,
            Err(NotOwned::By(other)) => other,
            Err(NotOwned::Io(error)) => {
                format!("an unknown driver (failed to take the locks: {error})")
            }
        };
        Some((gpu.clone(), by))
    };
    gpus.iter().filter_map(refused).collect()
}

/// Lets GPUs go that no record holds any more. Under their locks.
pub(crate) fn leave_gpus(context: &Context, gpus: &BTreeSet<GpuUuid>) {
    let Some(owned) = &context.owned else { return };
    // A record that cannot be read may hold anything.
    let Ok(records) = context.state.records() else {
        return;
    };
    // A single record that cannot be read keeps all GPUs.
    let fine: Option<Vec<&Record>> = records.values().map(|stored| stored.fine()).collect();
    let Some(fine) = fine else { return };
    let recorded: BTreeSet<GpuUuid> = fine.into_iter().flat_map(held_by).collect();
    owned
        .held()
        .retain(|gpu, _| !gpus.contains(gpu) || recorded.contains(gpu));
}

/// Takes the GPUs that records hold, and lets those go that none does: a record may have been made
/// or removed by the process before this one, or by another instance.
pub(crate) fn own_what_is_recorded(context: &Context) {
    let Some(owned) = &context.owned else { return };
    let Ok(records) = context.state.records() else {
        return;
    };
    // Take the GPUs that records hold, those of later versions too.
    for stored in records.values() {
        match stored.as_ref() {
            Stored::Fine(record) => take_what_is_held(context, record),
            Stored::Newer { head, .. } => {
                let gpus = head.gpus.iter().cloned().collect();
                take_held(context, &gpus, head.claim.as_ref());
            }
            Stored::Absent | Stored::Corrupt { .. } => {}
        }
    }
    // Leave those that none holds, each under its lock: a prepare may be about to write a record.
    let held: Vec<GpuUuid> = owned.held().keys().cloned().collect();
    for gpu in held {
        if let Ok(_lock) = context.lock_gpu(&gpu) {
            leave_gpus(context, &BTreeSet::from([gpu]));
        }
    }
}

/// Takes the GPUs that a record holds. A GPU that another driver has is logged: both use it.
pub(crate) fn take_what_is_held(context: &Context, record: &Record) {
    take_held(context, &held_by(record), Some(&record.reference()));
}

fn take_held(context: &Context, gpus: &BTreeSet<GpuUuid>, claim: Option<&ClaimRef>) {
    let Some(owned) = &context.owned else { return };
    let on_behalf = claim.map_or_else(|| "a claim".to_owned(), |claim| format!("claim {claim}"));
    for gpu in gpus {
        match owned.take(gpu, &on_behalf, &*context.parts.clock) {
            Ok(()) => {}
            Err(NotOwned::By(other)) => tracing::error!(
                %gpu, on_behalf, other,
                "another driver took a GPU that a claim holds, while this one was down"
            ),
            Err(NotOwned::Io(error)) => {
                tracing::error!(%gpu, %error, "failed to lock the GPU against other drivers");
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
        assert_eq!(
            (error.kind(), hangs.now()),
            (io::ErrorKind::WouldBlock, TURN)
        );
    }
}
