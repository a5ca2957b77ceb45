//! Prepare and unprepare of one claim: read it from the API, check that its UID is the requested
//! one, run the executor, count the result, and report to the user what the kubelet's
//! answer does not contain.

use std::collections::{BTreeMap, BTreeSet};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use divvy_api::names::Naming;
use divvy_claims::{Claim, ClaimRef, Clash, Phase, PreparedDevice, Refusal, Retry, Why};
use divvy_controller::ServerClock;
use divvy_executor::{
    Call, Clock, Executor, HeldDevice, PrepareCause, PrepareError, SystemClock, Unprepared,
};
use divvy_model::{ClaimUid, DeviceKind};
use divvy_offer::{Claimant, Fact, ModeConflict};
use futures::future::join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::claim::{Asked, ClaimError, from_api, in_pool};
use super::fetch::ClaimFetcher;
use super::tasks::{ClaimTasks, Reading, Stop};
use crate::metrics::{self, Metrics};
use crate::node::facts::Facts;
use crate::sinks::notifier::{Notifier, condition_of};

/// A failure, as text for the kubelet.
type Failed = String;
type Prepared = Result<Vec<PreparedDevice>, Failed>;
type Released = Result<(), Failed>;
/// A claim as it was read, and our condition in its status.
type ClaimSeen = (Claim, Option<Condition>);

/// Prepares and unprepares claims; the same claim never twice at once.
pub(crate) struct ClaimService {
    tasks: ClaimTasks<Prepared, Released>,
    one: Arc<ClaimWork>,
}

/// The parts that the work of one claim needs.
pub(crate) struct ClaimWork {
    pub(crate) driver: String,
    /// The pool of this node: a device of another node's is not ours to hand out.
    pub(crate) pool: String,
    /// True while NVIDIA's plugin serves the node.
    pub(crate) nvidia_serves: watch::Receiver<bool>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) fetcher: Arc<ClaimFetcher>,
    /// The API server's clock, for times of claims.
    pub(crate) clock: ServerClock,
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) metrics: Metrics,
    /// Time limit of a call.
    pub(crate) budget: Duration,
    /// Notified when records have changed.
    pub(crate) changed: Arc<Notify>,
    /// Notified when a claim was unprepared and lingers.
    pub(crate) lingers: Arc<Notify>,
    /// Notified when a record could not be written.
    pub(crate) unwritten: Arc<Notify>,
    /// Where a GPU that was given out in two modes is reported.
    pub(crate) facts: Facts,
    /// Asks for the GPUs to be read again now.
    pub(crate) refresh: Arc<Notify>,
    /// Work that goes on after the answer.
    pub(crate) after: TaskTracker,
}

impl ClaimService {
    pub(crate) fn new(one: ClaimWork) -> Self {
        Self {
            tasks: ClaimTasks::new(),
            one: Arc::new(one),
        }
    }

    /// Prepares each claim, all at once. The outcome of each, by the UID that was asked for.
    pub(crate) async fn prepare(&self, claims: Vec<Asked>) -> BTreeMap<String, Prepared> {
        let each = claims.into_iter().map(async |asked| {
            let answer = match asked.check() {
                Err(error) => {
                    self.one.metrics.failed("prepare", error.category);
                    Err(error.message)
                }
                Ok(claim) => {
                    let one = self.one.clone();
                    let uid = claim.uid.clone();
                    let done = self.tasks.prepare(&uid, |stop, reading| {
                        let span = tracing::info_span!(
                            "prepare", claim.uid = %claim.uid, claim.namespace = %claim.namespace, claim.name = %claim.name
                        );
                        // From here on a later unprepare, of whichever instance, wins over this
                        // call, also while it waits for the work before it.
                        let call = one.begin(&stop);
                        async move { on_this_thread(|| one.prepare(&claim, &call, &stop, &reading)) }
                            .instrument(span)
                    });
                    done.await.unwrap_or_else(|| Err(died(&asked)))
                }
            };
            (asked.uid, answer)
        });
        join_all(each).await.into_iter().collect()
    }

    /// Unprepares each claim, all at once. The outcome of each, by the UID that was asked for.
    pub(crate) async fn unprepare(&self, claims: Vec<Asked>) -> BTreeMap<String, Released> {
        let each = claims.into_iter().map(async |asked| {
            let answer = match asked.check() {
                // No such claim can have been prepared.
                Err(_) => Ok(()),
                Ok(claim) => {
                    let one = self.one.clone();
                    let uid = claim.uid.clone();
                    let span = tracing::info_span!(
                        "unprepare", claim.uid = %claim.uid, claim.namespace = %claim.namespace, claim.name = %claim.name
                    );
                    let work = |stop: Stop| {
                        // Marks the arrival, before the wait for a prepare that runs: prepares that
                        // came earlier lose against it.
                        let call = one.begin(&stop);
                        async move { on_this_thread(|| one.unprepare(&claim, &call)) }.instrument(span)
                    };
                    self.tasks.unprepare(&uid, work).await.unwrap_or_else(|| Err(died(&asked)))
                }
            };
            (asked.uid, answer)
        });
        join_all(each).await.into_iter().collect()
    }

    /// The claims that are being worked on.
    pub(crate) fn busy(&self) -> BTreeSet<ClaimUid> {
        self.tasks.claims()
    }

    /// Returns the number of claims that are being worked on.
    pub(crate) fn running(&self) -> usize {
        self.tasks.running()
    }

    /// Waits until no call runs and all reports to users are written.
    pub(crate) async fn drained(&self) {
        // Work first, then its reports: what ends last still adds some.
        self.tasks.drained().await;
        self.one.after.close();
        self.one.after.wait().await;
    }
}

fn died(asked: &Asked) -> Failed {
    format!(
        "claim {asked}: the call ended unexpectedly (a bug in divvy; see the node plugin's log); the kubelet retries"
    )
}

/// Why a prepare failed, before it is put into words.
enum Failure {
    Early(ClaimError),
    Prepare(Box<PrepareError>),
}

impl Failure {
    fn category(&self) -> &'static str {
        match self {
            Self::Early(error) => error.category,
            Self::Prepare(error) => error.category(),
        }
    }

    fn message(&self) -> String {
        match self {
            Self::Early(error) => error.message.clone(),
            Self::Prepare(error) => crate::chain(&**error),
        }
    }

    /// The fact that a GPU was given out in two modes.
    fn conflict(&self) -> Option<Fact> {
        let Self::Prepare(error) = self else {
            return None;
        };
        let PrepareCause::Refused(refusal) = &error.cause else {
            return None;
        };
        let Refusal {
            claim,
            device: Some(device),
            gpu: Some(gpu),
            why,
        } = &**refusal
        else {
            return None;
        };
        let Why::InUse {
            holder,
            held,
            clash: Clash::Mode,
        } = why
        else {
            return None;
        };
        let named = |claim: &ClaimRef| Claimant {
            uid: claim.uid.clone(),
            name: format!("{}/{}", claim.namespace, claim.name),
        };
        Some(Fact::Conflict(ModeConflict {
            claim: named(claim),
            device: device.clone(),
            holder: named(holder.claim()),
            held: held.clone(),
            gpu: gpu.clone(),
        }))
    }

    /// Returns whether the user has something to do about it that the kubelet's retries do not
    /// settle.
    fn concerns_user(&self) -> bool {
        match self {
            Self::Prepare(error) => match &error.cause {
                PrepareCause::Refused(refusal) => refusal.retry() != Retry::Soon,
                // Another user of the hardware, or the hardware itself, is in the way.
                PrepareCause::Change { .. } => true,
                _ => false,
            },
            Self::Early(_) => false,
        }
    }

    /// Returns whether the claim's status says it until it is prepared after all.
    fn is_for_the_status(&self) -> bool {
        matches!(self, Self::Prepare(error) if error.is_permanent() || matches!(error.cause, PrepareCause::Change { .. }))
    }
}

impl ClaimWork {
    /// Notes that a call has arrived. Its work ends early once `stop` is set.
    fn begin(&self, stop: &Stop) -> Call {
        Call {
            cancel: stop.thread.clone(),
            ..self.executor.begin(self.budget)
        }
    }

    /// Prepares a claim: reads it from the API, has the executor carry it out, and reports the
    /// outcome to the user. A single thread does it from here to the answer.
    fn prepare(
        self: &Arc<Self>,
        claim: &ClaimRef,
        call: &Call,
        stop: &Stop,
        reading: &Reading,
    ) -> Prepared {
        let timer = self.metrics.claim_seconds.start("prepare");
        self.metrics.running.inc();
        reading.begins();
        let mut seen = None;
        let outcome = caught(|| self.carry_out(claim, call, stop, &mut seen));
        let outcome = outcome.unwrap_or_else(|panic| {
            let died = format!(
                "claim {claim}: the call ended unexpectedly ({panic}; a bug in divvy); the kubelet retries"
            );
            Err(Failure::Early(ClaimError::new("internal", died)))
        });
        self.metrics.running.dec();
        // Also after a failure: a prepare that was taken back has written records, or has changed
        // GPUs.
        self.changed.notify_one();
        match outcome {
            Ok(devices) => {
                timer.done(metrics::OK);
                self.report_prepared(seen, &devices);
                Ok(devices)
            }
            Err(failure) => {
                timer.done(metrics::ERROR);
                let message = failure.message();
                self.metrics.failed("prepare", failure.category());
                tracing::warn!(category = failure.category(), error = %message, "failed to prepare a claim");
                if failure.category() == "store" {
                    self.unwritten.notify_one();
                }
                if let Some(conflict) = failure.conflict() {
                    // Without a brain the plugin ends.
                    drop(self.facts.send(conflict.into()));
                }
                if matches!(failure, Failure::Prepare(_)) {
                    // The GPU may not be as it was last read.
                    self.refresh.notify_one();
                }
                self.report_failure(claim, seen, &failure, &message);
                Err(message)
            }
        }
    }

    /// Reads a claim and has the executor prepare it. The claim as read is in `seen` also where
    /// that fails.
    fn carry_out(
        &self,
        asked: &ClaimRef,
        call: &Call,
        stop: &Stop,
        seen: &mut Option<ClaimSeen>,
    ) -> Result<Vec<PreparedDevice>, Failure> {
        let read = self
            .read(asked, call, &stop.token)
            .map_err(Failure::Early)?;
        let (claim, _) = seen.insert(read);
        let done = self.executor.prepare(claim, call);
        done.map(|prepared| prepared.devices)
            .map_err(|error| Failure::Prepare(Box::new(error)))
    }

    fn read(
        &self,
        asked: &ClaimRef,
        call: &Call,
        cancel: &CancellationToken,
    ) -> Result<ClaimSeen, ClaimError> {
        // The call's deadline is a time since boot; tokio's timers have a clock of their own.
        let until = Instant::now() + call.until.saturating_sub(SystemClock.now());
        let object = self.fetcher.get(asked, until, cancel)?.ok_or_else(|| {
            let message = format!(
                "claim {asked} does not exist in the API: it was deleted (the kubelet retries for a pod that still needs it)"
            );
            ClaimError::new("not-found", message)
        })?;
        // Kept for after the answer: a condition that is there already is not written again.
        let condition = condition_of(&object, &self.driver);
        let mut claim = from_api(asked, object, &self.driver)?;
        let now = self.clock.now();
        claim.times = claim.times.believed(now.map(Timestamp::as_second));
        let claim = in_pool(claim, &self.pool, Naming::of(&self.driver))?;
        self.may_begin(&claim)?;
        Ok((claim, condition))
    }

    /// Refuses a claim that was not prepared in this boot, for this allocation, while NVIDIA's
    /// plugin serves the node: its GPU may be in use by a claim of that plugin.
    fn may_begin(&self, claim: &Claim) -> Result<(), ClaimError> {
        if !*self.nvidia_serves.borrow() {
            return Ok(());
        }
        let held = self.executor.held().unwrap_or_default();
        let is_its = |held: &HeldDevice| {
            let goes_on = match &held.phase {
                Phase::Preparing => false,
                Phase::Prepared => true,
                Phase::Leaving(leaving) => !leaving.undoing,
            };
            held.claim.uid == claim.uid
                && goes_on
                && held.allocated_at == claim.allocation.allocated_at
        };
        if held.iter().any(is_its) {
            return Ok(());
        }
        let message = format!(
            "claim {} is not prepared: NVIDIA's plugin serves this node under the same driver name (keep one of the two off this node; the kubelet retries)",
            claim.reference()
        );
        Err(ClaimError::new("nvidia-serves", message))
    }

    /// Updates the condition of a claim that was refused before, and of one with partitions, whose
    /// UUIDs are known only now.
    fn report_prepared(self: &Arc<Self>, seen: Option<ClaimSeen>, devices: &[PreparedDevice]) {
        let names = devices
            .iter()
            .map(|d| d.device.as_str())
            .collect::<Vec<_>>()
            .join(",");
        // After the answer: a log line can wait, the pod cannot.
        self.after.spawn(
            async move { tracing::info!(device = names, "claim prepared") }.in_current_span(),
        );
        let Some((claim, condition)) = seen else {
            return;
        };
        let was_refused = condition
            .as_ref()
            .is_some_and(|condition| condition.status != "True");
        let has_partitions = claim.allocation.results.iter().any(|result| {
            DeviceKind::parse(&result.device).is_ok_and(|kind| kind.partition().is_some())
        });
        if !was_refused && !has_partitions {
            return;
        }
        let one = self.clone();
        self.after.spawn(async move {
            let (executor, uid) = (one.executor.clone(), claim.uid.clone());
            let made = tokio::task::spawn_blocking(move || executor.partitions(&uid)).await;
            // A status without partitions would say that the claim has none. The next round of
            // reconcile writes what is missing.
            let Ok(Ok(made)) = made else { return };
            let partitions = made
                .into_iter()
                .map(|(device, made)| (device, made.uuid))
                .collect();
            one.notifier
                .prepared(&claim, condition.as_ref(), &partitions)
                .await;
        });
    }

    fn report_failure(
        self: &Arc<Self>,
        claim: &ClaimRef,
        seen: Option<ClaimSeen>,
        failure: &Failure,
        message: &str,
    ) {
        if !failure.concerns_user() {
            return;
        }
        let (one, claim, message) = (self.clone(), claim.clone(), message.to_owned());
        let (category, for_status) = (failure.category(), failure.is_for_the_status());
        // After the answer: a slow API server must not cost the kubelet's patience too.
        self.after.spawn(async move {
            one.notifier.warn(&claim, category, &message).await;
            if let Some((claim, condition)) = seen.filter(|_| for_status) {
                one.notifier
                    .refused(&claim, condition.as_ref(), category, &message)
                    .await;
            }
        });
    }

    /// Unprepares a claim. A step that has begun is finished also after a cancellation.
    fn unprepare(self: &Arc<Self>, claim: &ClaimRef, call: &Call) -> Released {
        let timer = self.metrics.claim_seconds.start("unprepare");
        self.metrics.running.inc();
        let outcome = caught(|| self.executor.unprepare(&claim.uid, call));
        self.metrics.running.dec();
        self.changed.notify_one();
        let (category, message) = match outcome {
            Ok(Ok(done)) => {
                timer.done(metrics::OK);
                self.report_released(claim, &done);
                return Ok(());
            }
            Ok(Err(error)) => (error.category(), crate::chain(&error)),
            Err(panic) => (
                "internal",
                format!(
                    "claim {claim}: the call ended unexpectedly ({panic}); the kubelet retries"
                ),
            ),
        };
        timer.done(metrics::ERROR);
        self.metrics.failed("unprepare", category);
        tracing::warn!(category, error = %message, "failed to unprepare a claim");
        Err(message)
    }

    fn report_released(self: &Arc<Self>, claim: &ClaimRef, done: &Unprepared) {
        let (reason, note) = match done {
            Unprepared::Done | Unprepared::NothingThere | Unprepared::PreparedAgain => {
                tracing::info!(outcome = ?done, "claim unprepared");
                return;
            }
            Unprepared::Lingering(why) => (
                "lingering",
                format!(
                    "the devices of claim {claim} stay held after its release: {why} (they are free as soon as this ends)"
                ),
            ),
            Unprepared::LeftToNewer { version } => (
                "newer-state",
                format!(
                    "the record of claim {claim} was written by a later version of divvy (format {version}) and is left unchanged (run that version again)"
                ),
            ),
        };
        tracing::warn!(reason, note, "claim unprepared, but its devices stay held");
        self.lingers.notify_one();
        let (one, claim) = (self.clone(), claim.clone());
        self.after
            .spawn(async move { one.notifier.warn(&claim, reason, &note).await });
    }
}

/// Runs work that blocks on this thread, which gives the runtime's tasks to another one meanwhile:
/// neither the work nor its answer waits for a thread to wake. Only in a task of its own.
fn on_this_thread<T>(work: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(work)
}

/// Runs work; a panic is an error with its text.
fn caught<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    std::panic::catch_unwind(AssertUnwindSafe(work)).map_err(|panic| {
        let text = panic.downcast_ref::<&str>().copied();
        let owned = || panic.downcast_ref::<String>().map(String::as_str);
        text.or_else(owned).unwrap_or("a panic").to_owned()
    })
}
