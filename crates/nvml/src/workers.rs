//! Threads for calls that may never return: each call gets one to itself, idle ones are used again,
//! and there is a limit to how many there can be.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

type Job = Box<dyn FnOnce() + Send>;

/// Time that an idle thread stays.
const IDLE: Duration = Duration::from_secs(10);

/// No thread could be had: too many calls hang, or the system has none to give.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoThread(pub(crate) String);

pub(crate) struct Workers {
    state: Mutex<State>,
    more: Condvar,
    limit: usize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Job>,
    idle: usize,
    threads: usize,
}

impl Workers {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            state: Mutex::default(),
            more: Condvar::new(),
            limit,
        })
    }

    /// Runs a job on a thread of its own, at once.
    pub(crate) fn run(self: &Arc<Self>, job: Job) -> Result<(), NoThread> {
        let mut state = self.lock();
        // Each queued job has an idle thread that will take it. Idle threads are counted under the
        // same lock, so a job never waits behind a call that hangs.
        if state.queue.len() < state.idle {
            state.queue.push_back(job);
            self.more.notify_one();
            return Ok(());
        }
        if state.threads >= self.limit {
            return Err(NoThread(format!(
                "all {} threads for NVML calls hang",
                self.limit
            )));
        }
        // Count the thread before the lock is free: others must not exceed the limit meanwhile.
        state.threads += 1;
        drop(state);
        let workers = Arc::clone(self);
        let spawned = thread::Builder::new()
            .name("nvml-call".to_owned())
            .spawn(move || workers.work(job));
        if let Err(error) = spawned {
            self.lock().threads -= 1;
            return Err(NoThread(format!("no thread for an NVML call: {error}")));
        }
        Ok(())
    }

    fn work(&self, first: Job) {
        let mut job = first;
        loop {
            // The caller learns of a panic from its channel; the thread goes on.
            let _ = catch_unwind(AssertUnwindSafe(job));
            match self.next() {
                Some(next) => job = next,
                None => return,
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = self.lock();
        state.idle += 1;
        let next = loop {
            if let Some(job) = state.queue.pop_front() {
                break Some(job);
            }
            let (again, waited) = self
                .more
                .wait_timeout(state, IDLE)
                .unwrap_or_else(PoisonError::into_inner);
            state = again;
            // A job may have been queued for this thread just as its time ran out: take it then.
            if waited.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                break None;
            }
        };
        state.idle -= 1;
        next
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        divvy_model::lock(&self.state)
    }
}
