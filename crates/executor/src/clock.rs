//! Time as a seam, and how long a call may last.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A clock that all processes of a boot share, and the only way anything here waits.
pub trait Clock: Send + Sync {
    /// Time since boot. The same for all processes, so that a tombstone of one instance means
    /// something to another.
    fn now(&self) -> Duration;
    fn sleep(&self, time: Duration);
}

/// The machine's clock.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        // Counts from boot, is the same in all containers of the node, and cannot be set back as
        // the wall clock can.
        let time = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
        Duration::new(
            u64::try_from(time.tv_sec).unwrap_or(0),
            u32::try_from(time.tv_nsec).unwrap_or(0),
        )
    }

    fn sleep(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

/// Stops a waiting call. Steps that have begun are never cut short.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// A call that is not cancelled.
    pub fn new() -> Self {
        Self::default()
    }

    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Returns whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// A call of the kubelet. Made by [`crate::Executor::begin`] as soon as the call arrives, before
/// the claim is fetched: an unprepare that comes later wins over it.
#[derive(Debug, Clone)]
pub struct Call {
    /// When it arrived.
    pub received: Duration,
    /// When it must be answered.
    pub until: Duration,
    /// Set when no caller waits for the answer any more.
    pub cancel: Cancel,
}

impl Call {
    /// When the call gives up waiting for others.
    pub(crate) fn give_up(&self, hand_over: Duration) -> Duration {
        self.until.min(self.received + hand_over)
    }
}
