//! The thread that waits for events. It waits only while the gate is open: a driver that is not there, or is to be let
//! go, is left alone.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_model::health::GpuEvents;
use divvy_model::{GpuDriver, GpuError, GpuErrorCode};
use tokio::sync::mpsc;

/// One wait; for as long a closed gate may be passed.
const WAIT: Duration = Duration::from_secs(1);
const AFTER_FAILURE: Duration = Duration::from_secs(5);
/// Retry interval when the driver does not support events.
const WITHOUT_EVENTS: Duration = Duration::from_mins(5);

/// Events, or why there are none.
pub(super) type Heard = Result<GpuEvents, GpuError>;

#[derive(Default)]
struct State {
    open: bool,
    stop: bool,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

/// Opens and closes the way of the thread; ends it when dropped.
pub(super) struct Gate(Arc<Shared>);

impl Gate {
    /// Starts the thread, with the gate closed.
    pub(super) fn watch(gpus: Arc<dyn GpuDriver>, out: mpsc::Sender<Heard>) -> Self {
        let shared = Arc::new(Shared::default());
        let watched = shared.clone();
        let thread = std::thread::Builder::new().name("gpu-events".to_owned());
        if let Err(error) = thread.spawn(move || watched.run(&*gpus, &out)) {
            tracing::error!(%error, "failed to start the thread for GPU events; health is only polled");
        }
        Self(shared)
    }

    pub(super) fn open(&self, open: bool) {
        let mut state = self.0.lock();
        if state.open != open {
            state.open = open;
            self.0.changed.notify_all();
        }
    }
}

impl Drop for Gate {
    fn drop(&mut self) {
        self.0.lock().stop = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing under the lock can panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self, gpus: &dyn GpuDriver, out: &mpsc::Sender<Heard>) {
        // The first answer is sent in any case.
        let mut last: Option<Heard> = None;
        while self.may_pass() {
            let heard = gpus.wait_events(WAIT);
            let pause = match &heard {
                Ok(_) => Duration::ZERO,
                Err(e)
                    if matches!(e.code, GpuErrorCode::NOT_SUPPORTED | GpuErrorCode::FUNCTION_NOT_FOUND) =>
                {
                    WITHOUT_EVENTS
                }
                Err(_) => AFTER_FAILURE,
            };
            let nothing_new = match (&heard, &last) {
                (Ok(now), Some(Ok(last))) => now.events.is_empty() && now.unmonitored == last.unmonitored,
                (Err(now), Some(Err(last))) => now == last,
                _ => false,
            };
            if !nothing_new && out.blocking_send(heard.clone()).is_err() {
                return;
            }
            last = Some(heard);
            self.pause(pause);
        }
    }

    /// Waits until the gate is open; `false` when it is time to end.
    fn may_pass(&self) -> bool {
        let closed = |state: &mut State| !state.open && !state.stop;
        let state = self.changed.wait_while(self.lock(), closed).unwrap_or_else(PoisonError::into_inner);
        !state.stop
    }

    fn pause(&self, time: Duration) {
        if !time.is_zero() {
            let waiting = |state: &mut State| state.open && !state.stop;
            drop(self.changed.wait_timeout_while(self.lock(), time, waiting));
        }
    }
}
