//! [`Session`]: a driver whose calls have deadlines, and that is opened again when it must be.

mod calls;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::sync::mpsc::{RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex, Weak, mpsc};
use std::time::{Duration, Instant};

use divvy_model::{CallMarks, GpuDriver, GpuError, GpuErrorCode, GpuOp, GpuUuid, lock};

use crate::workers::Workers;

/// Patience of a [`Session`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionConfig {
    /// Time that one call may take, opening included. NVML itself needs up to ten seconds on a busy
    /// machine.
    pub deadline: Duration,
    /// A session younger than this is not opened again because a GPU is lost: a GPU that stays lost
    /// would have it reopened at each call.
    pub reopen_after: Duration,
    /// The most threads, idle, busy and hanging together.
    pub max_threads: usize,
}

impl Default for SessionConfig {
    fn default() -> Self {
        Self {
            deadline: Duration::from_secs(15),
            reopen_after: Duration::from_secs(30),
            max_threads: 128,
        }
    }
}

/// So many times [`SessionConfig::reopen_after`] is the longest pause between two reopenings for a
/// GPU that stays lost.
const LONGEST_PAUSE: u32 = 8;

/// Time for which calls on a session that is given up are waited for before the next one is opened.
const LEAVING: Duration = Duration::from_secs(2);

/// A call that is past its deadline and has not come back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hanging {
    /// The operation.
    pub op: GpuOp,
    /// The GPU, if it is on one.
    pub gpu: Option<GpuUuid>,
    /// The time since it was called.
    pub since: Duration,
}

/// A driver above a driver: opens it when first needed, runs each call on a thread of its own with
/// a deadline, and opens it again after codes that say the session is dead. A clone is the same
/// session.
///
/// A call past its deadline is `TIMEOUT`; its thread stays until NVML returns, and what it returns
/// then is dropped. Until then further calls of the same operation on the same GPU are `TIMEOUT` at
/// once, so that a GPU that hangs costs one thread per operation and no other call waits for it.
pub struct Session<D> {
    inner: Arc<Inner<D>>,
}

type Open<D> = dyn Fn() -> Result<D, GpuError> + Send + Sync;
type Key = (GpuOp, Option<GpuUuid>);

struct Inner<D> {
    open: Box<Open<D>>,
    config: SessionConfig,
    current: Mutex<Option<Opened<D>>>,
    /// Age that a session must have before it is opened again for a GPU that is lost. Each time
    /// makes it longer: opening again interrupts the events of all GPUs, and a GPU that stays lost
    /// is not found by it.
    pause: Mutex<Duration>,
    /// Held while opening, so that it is done once; never while `current` is held.
    opening: Mutex<()>,
    /// Drivers that were forgotten and may still be used by a call.
    left: Mutex<Vec<Weak<()>>>,
    overdue: Mutex<Overdue>,
    /// GPUs that were listed once.
    known: Mutex<BTreeSet<GpuUuid>>,
    workers: Arc<Workers>,
    marks: Option<Arc<dyn CallMarks>>,
}

struct Opened<D> {
    driver: Arc<Lent<D>>,
    at: Instant,
}

/// Fields are dropped in order: what outlives `open` shows that the driver is closed, not only that
/// it is unused.
struct Lent<D> {
    driver: D,
    open: Arc<()>,
}

/// Calls past their deadline, by number so that each thread finds its own.
#[derive(Default)]
struct Overdue {
    next: u64,
    calls: BTreeMap<u64, (Key, Instant)>,
}

impl Overdue {
    /// Returns the number of a new call; `None` while one like it hangs.
    fn begin(&mut self, key: &Key) -> Option<u64> {
        if self.calls.values().any(|(hanging, _)| hanging == key) {
            return None;
        }
        self.next += 1;
        Some(self.next)
    }
}

impl<D> Clone for Session<D> {
    fn clone(&self) -> Self {
        Self {
            inner: Arc::clone(&self.inner),
        }
    }
}

impl<D> fmt::Debug for Session<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session")
            .field("hanging", &self.hanging())
            .finish_non_exhaustive()
    }
}

impl<D> Session<D> {
    /// Calls past their deadline that have not come back, for the status page and health.
    pub fn hanging(&self) -> Vec<Hanging> {
        let overdue = lock(&self.inner.overdue);
        let calls = overdue.calls.values();
        calls
            .map(|((op, gpu), since)| Hanging {
                op: *op,
                gpu: gpu.clone(),
                since: since.elapsed(),
            })
            .collect()
    }

    /// Forgets the open driver; the next call opens it again. NVML itself is shut down when the
    /// last call that is still using it ends.
    pub fn reset(&self) {
        // The driver may be in use by calls that run. A weak reference in `left` shows when the
        // last one has dropped it.
        let old = lock(&self.inner.current).take();
        lock(&self.inner.left).extend(old.map(|old| Arc::downgrade(&old.driver.open)));
    }
}

impl<D: GpuDriver + 'static> Session<D> {
    /// A session that opens its driver with `open`; nothing is opened before the first call.
    pub fn new(
        config: SessionConfig,
        open: impl Fn() -> Result<D, GpuError> + Send + Sync + 'static,
    ) -> Self {
        Self::build(config, None, Box::new(open))
    }

    /// The same, with every change of a GPU marked for other processes for as long as its call
    /// runs.
    pub fn marked(
        config: SessionConfig,
        marks: Arc<dyn CallMarks>,
        open: impl Fn() -> Result<D, GpuError> + Send + Sync + 'static,
    ) -> Self {
        Self::build(config, Some(marks), Box::new(open))
    }

    fn build(config: SessionConfig, marks: Option<Arc<dyn CallMarks>>, open: Box<Open<D>>) -> Self {
        Self {
            inner: Arc::new(Inner {
                open,
                config,
                current: Mutex::new(None),
                pause: Mutex::new(config.reopen_after),
                opening: Mutex::new(()),
                left: Mutex::default(),
                overdue: Mutex::default(),
                known: Mutex::default(),
                workers: Workers::new(config.max_threads),
                marks,
            }),
        }
    }

    /// Makes one call on a thread of its own, and waits for it until the deadline.
    fn call<T: Send + 'static>(
        &self,
        op: GpuOp,
        gpu: Option<&GpuUuid>,
        call: impl Fn(&D) -> Result<T, GpuError> + Send + 'static,
    ) -> Result<T, GpuError> {
        let key: Key = (op, gpu.cloned());
        let error = |code, detail: String| GpuError {
            op,
            code,
            gpu: gpu.cloned(),
            detail: Some(detail),
        };
        let timeout = |detail| Err(error(GpuErrorCode::TIMEOUT, detail));
        // Phases: number the call, mark it for other processes, run it on a thread, wait for the
        // answer, and list it as hanging if there is none.
        //
        // A call like one that hangs gets no number: a second thread would hang beside the first.
        let Some(number) = lock(&self.inner.overdue).begin(&key) else {
            // The same words each time: an answer that changes counts as news.
            return timeout("an earlier call has not returned".to_owned());
        };
        // Mark a change before it can begin: another process must never see it unmarked.
        let mark = match (&self.inner.marks, gpu) {
            (Some(marks), Some(gpu)) if op.changes_gpu() => {
                // With this code nothing has been done.
                let failed = |e: io::Error| {
                    error(
                        GpuErrorCode::NO_PERMISSION,
                        format!("the call cannot be marked for other processes: {e}"),
                    )
                };
                Some(marks.mark(gpu, op).map_err(failed)?)
            }
            _ => None,
        };
        // Hand the call to a thread. Its answer has a place even if it is waited for no longer.
        let (answer, answered) = mpsc::sync_channel(1);
        let inner = Arc::clone(&self.inner);
        let started = Instant::now();
        let job = move || {
            // Dropped last, also when the call panics: after `answer` has spoken, or is gone.
            let _finish = Finish {
                inner: &inner,
                number,
            };
            let answer = answer;
            // However late the call comes back, it is marked until then, and no longer when it is
            // answered.
            let mark = mark;
            let result = inner.attempt(op, &call);
            drop(mark);
            let _if_not_cancelled = answer.send(result);
        };
        self.inner
            .workers
            .run(Box::new(job))
            .map_err(|no| error(GpuErrorCode::TIMEOUT, no.0))?;
        let panicked = || Err(error(GpuErrorCode::UNKNOWN, "the call panicked".to_owned()));
        // Wait for the answer until the deadline.
        match answered.recv_timeout(self.inner.config.deadline) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return panicked(),
            Err(RecvTimeoutError::Timeout) => {}
        }
        // Write the call down as hanging.
        let mut overdue = lock(&self.inner.overdue);
        // The answer may have come since. If it has not, the thread will find its number here: it
        // looks after it has answered, and only when this lock is free.
        match answered.try_recv() {
            Ok(result) => return result,
            Err(TryRecvError::Disconnected) => return panicked(),
            Err(TryRecvError::Empty) => overdue.calls.insert(number, (key, started)),
        };
        drop(overdue);
        tracing::warn!(op = op.name(), ?gpu, "an NVML call hangs");
        timeout(format!("no answer within {:?}", self.inner.config.deadline))
    }
}

/// Takes a call off the list of hanging ones, if it got there, when its thread is done with it.
struct Finish<'a, D> {
    inner: &'a Inner<D>,
    number: u64,
}

impl<D> Drop for Finish<'_, D> {
    fn drop(&mut self) {
        let late = lock(&self.inner.overdue).calls.remove(&self.number);
        if let Some(((op, gpu), since)) = late {
            tracing::info!(op = op.name(), ?gpu, took = ?since.elapsed(), "a hanging NVML call came back");
        }
    }
}

impl<D: GpuDriver + 'static> Inner<D> {
    /// Makes the call, and once more on a fresh driver if the first says that the session is dead.
    /// A change is not made once more: only the caller knows how to find out whether it happened.
    fn attempt<T>(
        &self,
        op: GpuOp,
        call: &dyn Fn(&D) -> Result<T, GpuError>,
    ) -> Result<T, GpuError> {
        // Opening happens on the thread of the call, under its deadline: `nvmlInit` can hang as any
        // call.
        let driver = self.driver()?;
        let result = call(&driver.driver);
        // A GPU that is lost is looked for by a fresh session, unless closing this one would cost
        // the partitions of another GPU. Asked without a lock: NVML may take its time.
        if let Err(error) = &result
            && error.code == GpuErrorCode::GPU_IS_LOST
            && self.may_reopen(&driver)
            && would_lose_partitions(&driver.driver)
        {
            self.put_off();
            return result;
        }
        match &result {
            Err(error) if self.forget_if_dead(&driver, error.code) && !op.changes_gpu() => {
                // NVML initialises itself again only when the old session is closed.
                drop(driver);
                call(&self.driver()?.driver)
            }
            _ => result,
        }
    }

    /// Returns the open driver, or opens it.
    fn driver(&self) -> Result<Arc<Lent<D>>, GpuError> {
        let open_one = || {
            lock(&self.current)
                .as_ref()
                .map(|opened| Arc::clone(&opened.driver))
        };
        if let Some(driver) = open_one() {
            return Ok(driver);
        }
        // The first caller opens; the others wait here and find it open.
        let _only_one = lock(&self.opening);
        if let Some(driver) = open_one() {
            return Ok(driver);
        }
        // Close first, then open: see there.
        self.wait_until_left();
        let driver = Arc::new(Lent {
            driver: (self.open)()?,
            open: Arc::default(),
        });
        // A failed opening leaves nothing behind: the next call tries again.
        *lock(&self.current) = Some(Opened {
            driver: Arc::clone(&driver),
            at: Instant::now(),
        });
        Ok(driver)
    }

    /// NVML initialises itself again only when the old session is closed, and one call waits for
    /// events most of the time. Calls that hang are not waited for.
    fn wait_until_left(&self) {
        // A session that cannot be closed in time is given up: a new one beside it is better than
        // none.
        let left = std::mem::take(&mut *lock(&self.left));
        let until = Instant::now() + LEAVING.min(self.config.deadline / 2);
        while left.iter().any(|open| open.strong_count() > 0)
            && lock(&self.overdue).calls.is_empty()
            && Instant::now() < until
        {
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Returns whether the call is worth repeating on a fresh session; forgets `driver` if it is
    /// still the current one.
    fn forget_if_dead(&self, driver: &Arc<Lent<D>>, code: GpuErrorCode) -> bool {
        // Decide under the lock: of several calls that meet the dead session at once, one forgets
        // it.
        let mut current = lock(&self.current);
        // Another call has said so before: what is open now, or will be, is fresh.
        let Some(opened) = current.as_ref() else {
            return true;
        };
        if !Arc::ptr_eq(&opened.driver, driver) {
            return true;
        }
        let dead = match code {
            // The last is a library that is older or newer than the module: the driver was replaced
            // under us.
            GpuErrorCode::UNINITIALIZED
            | GpuErrorCode::DRIVER_NOT_LOADED
            | GpuErrorCode::LIB_RM_VERSION_MISMATCH => true,
            // NVML attaches to GPUs when it is initialised: one that was reset is found again only
            // by that.
            GpuErrorCode::GPU_IS_LOST => self.is_old_enough(opened),
            _ => false,
        };
        // Make the next reopening for a lost GPU a later one.
        if dead && code == GpuErrorCode::GPU_IS_LOST {
            let mut pause = lock(&self.pause);
            // A session that no call wanted opened again for that long was fine.
            let since = if opened.at.elapsed() > *pause * 2 {
                self.config.reopen_after
            } else {
                *pause
            };
            *pause = (since * 2).min(self.config.reopen_after * LONGEST_PAUSE);
        }
        // Forget the driver, and remember for the next opening that it may still be at work.
        if dead {
            let old = current.take();
            drop(current);
            lock(&self.left).extend(old.map(|old| Arc::downgrade(&old.driver.open)));
        }
        dead
    }
}

impl<D> Inner<D> {
    /// Returns whether a session is old enough to be opened again for a GPU that is lost.
    fn is_old_enough(&self, opened: &Opened<D>) -> bool {
        opened.at.elapsed() >= *lock(&self.pause)
    }

    /// Returns whether a driver is the current one, and old enough to be opened again for a GPU
    /// that is lost.
    fn may_reopen(&self, driver: &Arc<Lent<D>>) -> bool {
        let current = lock(&self.current);
        let opened = current.as_ref();
        opened
            .is_some_and(|opened| Arc::ptr_eq(&opened.driver, driver) && self.is_old_enough(opened))
    }

    /// Keeps the session for another pause, as if it had been opened just now.
    fn put_off(&self) {
        if let Some(opened) = lock(&self.current).as_mut() {
            opened.at = Instant::now();
            tracing::warn!(
                "a GPU is lost and is not looked for again: without persistence mode, closing NVML would remove the MIG instances of other GPUs (run nvidia-persistenced)"
            );
        }
    }
}

/// Returns whether partitions of a GPU that answers would be gone with the session: the kernel
/// module forgets them when the last program closes the GPU, unless it has persistence mode. A GPU
/// that does not say whether it has counts as one that forgets; one that never says does not.
fn would_lose_partitions<D: GpuDriver>(driver: &D) -> bool {
    let forgets = |gpu: &GpuUuid| match driver.persistence_mode(gpu) {
        Ok(persistent) => !persistent,
        Err(error) => {
            error.code != GpuErrorCode::NOT_SUPPORTED
                && error.code != GpuErrorCode::FUNCTION_NOT_FOUND
        }
    };
    let has_partitions = |gpu: &GpuUuid| {
        driver
            .gpu_instances(gpu)
            .is_ok_and(|living| !living.is_empty())
    };
    let gpus = driver.list().unwrap_or_default();
    gpus.iter().any(|gpu| has_partitions(gpu) && forgets(gpu))
}
