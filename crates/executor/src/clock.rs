//! Time as a seam, and how long a call may last.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};

/// A clock that all processes of a boot share, and the only way anything here waits.
pub trait Clock: Send + Sync {
    /// Time since boot. The same for all processes, so that a tombstone of one instance means something to another.
    fn now(&self) -> Duration;
    /// Waits.
    fn sleep(&self, time: Duration);
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Duration::new(u64::try_from(time.tv_sec).unwrap_or(0), u32::try_from(time.tv_nsec).unwrap_or(0))
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Tells a waiting call to stop. Steps that have begun are never cut short.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<Cancelled>);

#[derive(Debug, Default)]
struct Cancelled {
    flag: AtomicBool,
    /// Readable once cancelled; made by the first call that waits.
    told: OnceLock<OwnedFd>,
}

impl Cancel {
    /// A call nobody has cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels.
    pub fn cancel(&self) {
        self.0.flag.store(true, Ordering::SeqCst);
        if let Some(told) = self.0.told.get() {
            // Can only fail because it is full of such news.
            let _ = rustix::io::write(told, &1_u64.to_ne_bytes());
        }
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.flag.load(Ordering::SeqCst)
    }

    /// Becomes readable when the call is cancelled; `None` if the process has no file descriptor left. Ask for it first
    /// and then whether it is cancelled already.
    pub(crate) fn told(&self) -> Option<BorrowedFd<'_>> {
        if self.0.told.get().is_none()
            && let Ok(fd) = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
        {
            drop(self.0.told.set(fd));
        }
        self.0.told.get().map(AsFd::as_fd)
    }
}

/// One call of the kubelet. Made by [`crate::Executor::begin`] as soon as the call arrives, before the claim is fetched:
/// an unprepare that comes later wins over it.
#[derive(Debug, Clone)]
pub struct Call {
    /// When it arrived.
    pub received: Duration,
    /// When it must be answered.
    pub until: Duration,
    /// Set when nobody waits for the answer any more.
    pub cancel: Cancel,
}
