//! A task for each claim: a call for a claim joins the work that already runs for it, unless that
//! began to read the claim before the call came (the claim may have been allocated anew in
//! between). The work goes on when the caller is gone (the kubelet's deadline, a lost connection),
//! so that no step is ever dropped half done.
//!
//! An unprepare that meets a running prepare cancels it and waits for its end, and a prepare that
//! meets a running unprepare likewise; what has begun is finished in any case. Different claims do
//! not wait for each other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use divvy_executor::Cancel;
use divvy_model::ClaimUid;
use futures::FutureExt;
use futures::future::{BoxFuture, Shared};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::lock;

/// The outcome of work, for everyone who waits for it. `None`: the task died (a bug; its panic is
/// in the log).
pub(crate) type Joined<T> = Shared<BoxFuture<'static, Option<T>>>;

/// The work that runs for each claim. `P` and `U` are what a prepare and an unprepare come to.
pub(crate) struct ClaimTasks<P, U> {
    running: Arc<Mutex<Running<P, U>>>,
    tracker: TaskTracker,
}

struct Running<P, U> {
    /// The newest work of each claim; it waits for the work before it by itself.
    newest: BTreeMap<ClaimUid, (u64, Work<P, U>)>,
    next: u64,
}

/// A mark that work on a claim has begun to read it: from then on it may be about an allocation
/// that is over.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reading(Arc<AtomicBool>);

impl Reading {
    /// From here on no call joins the work.
    pub(crate) fn begins(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn has_begun(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Request to end work, for what waits in it and for the thread that carries it out.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop {
    pub(crate) token: CancellationToken,
    pub(crate) thread: Cancel,
}

impl Stop {
    fn cancel(&self) {
        self.thread.cancel();
        self.token.cancel();
    }
}

enum Work<P, U> {
    Prepare(Joined<P>, Stop, Reading),
    Unprepare(Joined<U>, Stop),
}

impl<P, U> Clone for Work<P, U> {
    fn clone(&self) -> Self {
        match self {
            Self::Prepare(done, cancel, reading) => {
                Self::Prepare(done.clone(), cancel.clone(), reading.clone())
            }
            Self::Unprepare(done, cancel) => Self::Unprepare(done.clone(), cancel.clone()),
        }
    }
}

impl<P: Clone + Send + Sync + 'static, U: Clone + Send + Sync + 'static> ClaimTasks<P, U> {
    pub(crate) fn new() -> Self {
        Self {
            running: Arc::new(Mutex::new(Running {
                newest: BTreeMap::new(),
                next: 0,
            })),
            tracker: TaskTracker::new(),
        }
    }

    /// Joins the claim's prepare if that has not read the claim yet; else starts one, after the
    /// work that runs.
    pub(crate) fn prepare<F>(
        &self,
        uid: &ClaimUid,
        work: impl FnOnce(Stop, Reading) -> F,
    ) -> Joined<P>
    where
        F: Future<Output = P> + Send + 'static,
    {
        // Held until the new work is entered: two calls at once must not both find no work. `work`
        // only makes a future, so the lock is held for a moment.
        let mut running = lock(&self.running);
        let before = running.newest.get(uid).map(|(_, work)| work.clone());
        let cancel = match &before {
            Some(Work::Prepare(done, _, reading)) if !reading.has_begun() => return done.clone(),
            // An unprepare that cancels this one cancels what it waits for.
            Some(Work::Prepare(_, cancel, _)) => cancel.clone(),
            Some(Work::Unprepare(_, cancel)) => {
                // The next prepare does not wait for processes that do not leave.
                cancel.cancel();
                Stop::default()
            }
            None => Stop::default(),
        };
        let reading = Reading::default();
        let done = self.spawn(
            &mut running,
            uid,
            before,
            work(cancel.clone(), reading.clone()),
        );
        let id = running.next;
        running.newest.insert(
            uid.clone(),
            (id, Work::Prepare(done.clone(), cancel, reading)),
        );
        done
    }

    /// Joins the claim's running unprepare, or cancels its running prepare and starts one after it.
    pub(crate) fn unprepare<F>(&self, uid: &ClaimUid, work: impl FnOnce(Stop) -> F) -> Joined<U>
    where
        F: Future<Output = U> + Send + 'static,
    {
        let mut running = lock(&self.running);
        let before = running.newest.get(uid).map(|(_, work)| work.clone());
        match &before {
            Some(Work::Unprepare(done, _)) => return done.clone(),
            // Prepares that wait for one another share a token, so this stops all of them.
            Some(Work::Prepare(_, cancel, _)) => cancel.cancel(),
            None => {}
        }
        let cancel = Stop::default();
        let done = self.spawn(&mut running, uid, before, work(cancel.clone()));
        let id = running.next;
        running
            .newest
            .insert(uid.clone(), (id, Work::Unprepare(done.clone(), cancel)));
        done
    }

    /// The claims that have work running.
    pub(crate) fn claims(&self) -> BTreeSet<ClaimUid> {
        lock(&self.running).newest.keys().cloned().collect()
    }

    /// Returns the number of claims with running work.
    pub(crate) fn running(&self) -> usize {
        lock(&self.running).newest.len()
    }

    /// Waits until all work is done. New work can still be started meanwhile; it is waited for too.
    pub(crate) async fn drained(&self) {
        self.tracker.close();
        self.tracker.wait().await;
    }

    fn spawn<T, F>(
        &self,
        running: &mut Running<P, U>,
        uid: &ClaimUid,
        before: Option<Work<P, U>>,
        work: F,
    ) -> Joined<T>
    where
        T: Clone + Send + Sync + 'static,
        F: Future<Output = T> + Send + 'static,
    {
        running.next += 1;
        let (all, uid, id) = (self.running.clone(), uid.clone(), running.next);
        let task = self.tracker.spawn(async move {
            // Dropped last, also when the work panics: the claim must never stay locked behind dead
            // work. Made here and not outside: a runtime that shuts down drops the work at once,
            // under the lock held now.
            let _leave = Leave {
                running: all,
                uid,
                id,
            };
            match before {
                Some(Work::Prepare(done, ..)) => drop(done.await),
                Some(Work::Unprepare(done, _)) => drop(done.await),
                None => {}
            }
            work.await
        });
        async move { task.await.ok() }.boxed().shared()
    }
}

struct Leave<P, U> {
    running: Arc<Mutex<Running<P, U>>>,
    uid: ClaimUid,
    id: u64,
}

impl<P, U> Drop for Leave<P, U> {
    fn drop(&mut self) {
        let mut running = lock(&self.running);
        if running
            .newest
            .get(&self.uid)
            // Later work of the claim has taken the place, and waits for this one by itself.
            .is_some_and(|(id, _)| *id == self.id)
        {
            running.newest.remove(&self.uid);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::{Notify, oneshot};

    use super::*;

    fn uid(n: u8) -> ClaimUid {
        format!("uid-{n}").parse().unwrap()
    }

    #[tokio::test]
    async fn calls_at_once_for_one_claim_share_one_piece_of_work() {
        let tasks = ClaimTasks::<u32, ()>::new();
        let started = Arc::new(AtomicUsize::new(0));
        let (go, gate) = oneshot::channel::<()>();
        let count = started.clone();
        let first = tasks.prepare(&uid(1), |_, _| async move {
            count.fetch_add(1, Ordering::SeqCst);
            gate.await.unwrap();
            7
        });
        let second = tasks.prepare(&uid(1), |_, _| async { 8 });
        let other = tasks.prepare(&uid(2), |_, _| async { 9 });
        assert_eq!(other.await, Some(9), "another claim does not wait");
        go.send(()).unwrap();
        assert_eq!((first.await, second.await), (Some(7), Some(7)));
        assert_eq!(started.load(Ordering::SeqCst), 1);
        assert_eq!(
            tasks.prepare(&uid(1), |_, _| async { 8 }).await,
            Some(8),
            "a later call is work of its own"
        );
        assert_eq!(tasks.running(), 0);
    }

    /// A call that comes after the claim was read is answered by work of its own after that.
    #[tokio::test]
    async fn a_call_that_comes_after_the_read_is_answered_by_its_own_work() {
        let tasks = ClaimTasks::<u32, ()>::new();
        let (go, gate) = oneshot::channel::<()>();
        let read = Arc::new(Notify::new());
        let has_read = read.clone();
        let first = tasks.prepare(&uid(1), |_, reading| async move {
            reading.begins();
            has_read.notify_one();
            gate.await.unwrap();
            7
        });
        let joins = tasks.prepare(&uid(1), |_, _| async { 0 });
        read.notified().await;
        let second = tasks.prepare(&uid(1), |_, _| async { 8 });
        let third = tasks.prepare(&uid(1), |_, _| async { 9 });
        go.send(()).unwrap();
        assert_eq!(
            (first.await, joins.await),
            (Some(7), Some(7)),
            "the first reads after both have come"
        );
        assert_eq!(
            (second.await, third.await),
            (Some(8), Some(8)),
            "these wait together"
        );
        // An unprepare cancels both.
        let cancelled = |stop: Stop, reading: Reading| async move {
            reading.begins();
            stop.token.cancelled().await;
            1
        };
        let one = tasks.prepare(&uid(1), cancelled);
        tokio::task::yield_now().await;
        let two = tasks.prepare(&uid(1), cancelled);
        let undone = tasks.unprepare(&uid(1), |_| async {}).await;
        assert_eq!(undone, Some(()));
        assert_eq!((one.await, two.await), (Some(1), Some(1)));
    }

    #[tokio::test]
    async fn work_goes_on_when_its_caller_is_gone() {
        let tasks = ClaimTasks::<(), ()>::new();
        let (begun, finished) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
        let (go, gate) = oneshot::channel::<()>();
        let (on_begin, on_finish) = (begun.clone(), finished.clone());
        let call = tasks.prepare(&uid(1), |_, _| async move {
            on_begin.notify_one();
            gate.await.unwrap();
            on_finish.notify_one();
        });
        begun.notified().await;
        drop(call);
        go.send(()).unwrap();
        finished.notified().await;
        tasks.drained().await;
        assert_eq!(tasks.running(), 0);
    }

    /// An unprepare cancels the prepare and runs after it and the next prepare after that.
    #[tokio::test]
    async fn an_unprepare_cancels_the_prepare_and_runs_after_it() {
        let tasks = ClaimTasks::<&str, &str>::new();
        let order = Arc::new(Mutex::new(Vec::new()));
        let (o1, o2, o3) = (order.clone(), order.clone(), order.clone());
        let first = tasks.prepare(&uid(1), |stop, _| async move {
            stop.token.cancelled().await;
            o1.lock().unwrap().push("prepare");
            "cancelled"
        });
        let undo = tasks.unprepare(&uid(1), |stop| async move {
            stop.token.cancelled().await;
            o2.lock().unwrap().push("unprepare");
            "undone"
        });
        let same = tasks.unprepare(&uid(1), |_| async { "not run" });
        let again = tasks.prepare(&uid(1), |_, _| async move {
            o3.lock().unwrap().push("prepare again");
            "done"
        });
        assert_eq!(again.await, Some("done"));
        assert_eq!(
            (first.await, undo.await, same.await),
            (Some("cancelled"), Some("undone"), Some("undone"))
        );
        assert_eq!(
            *order.lock().unwrap(),
            ["prepare", "unprepare", "prepare again"]
        );
    }

    #[tokio::test]
    async fn work_that_panics_does_not_lock_its_claim() {
        let tasks = ClaimTasks::<u32, u32>::new();
        let dead = tasks.prepare(&uid(1), |_, _| async { panic!("a bug") });
        assert_eq!(dead.await, None);
        assert_eq!(tasks.unprepare(&uid(1), |_| async { 1 }).await, Some(1));
        assert_eq!(tasks.running(), 0);
    }
}
