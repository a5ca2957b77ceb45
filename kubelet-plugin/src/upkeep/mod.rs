//! Keeps what containers and claims rely on right: CDI files are there before the kubelet may call
//! and come back when they vanish, lingering claims are finished and GPUs follow their policies
//! (every instance), and records are squared with the API, the kubelet and the GPUs at start and
//! periodically (the instance that publishes). The executor knows what there is to do; here is
//! when, with what view.

pub(crate) mod cdi_files;
mod cdi_watch;
pub(crate) mod drain;
pub(crate) mod granted;
pub(crate) mod leaving;
pub(crate) mod lingering;
pub(crate) mod publisher_lock;
pub(crate) mod rounds;

use std::collections::BTreeSet;
use std::sync::Arc;

use divvy_executor::{Event, Report};
use divvy_model::{ClaimUid, MpsFault};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::metrics::Metrics;
use crate::sinks::notifier::Notifier;

/// The four loops that keep files and records right, each with a clock of its own.
pub(crate) struct Keeper {
    pub(crate) files: cdi_files::CdiFiles,
    pub(crate) lingering: lingering::Lingering,
    pub(crate) rounds: rounds::Rounds,
    pub(crate) granted: granted::Granted,
}

impl Keeper {
    /// Writes the CDI files, before the kubelet may call.
    pub(crate) async fn before_registration(&mut self) {
        self.files.before_registration().await;
    }

    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        tokio::join!(
            self.files.run(stop.clone()),
            self.lingering.run(stop.clone()),
            self.rounds.run(stop.clone()),
            self.granted.run(stop)
        );
    }
}

/// Reports to the log, the metrics, the reader of records and users what the executor did.
#[derive(Clone)]
pub(crate) struct Reporter {
    /// Notified when records have changed.
    changed: Arc<Notify>,
    metrics: Metrics,
    notifier: Arc<Notifier>,
    /// Where Events are written.
    tasks: TaskTracker,
    /// Conditions that last and are in the log already.
    logged: BTreeSet<Event>,
}

impl Reporter {
    pub(crate) fn new(
        changed: Arc<Notify>,
        metrics: Metrics,
        (notifier, tasks): (Arc<Notifier>, TaskTracker),
    ) -> Self {
        Self {
            changed,
            metrics,
            notifier,
            tasks,
            logged: BTreeSet::new(),
        }
    }

    /// Writes Events on claims whose programs are hit. Not waited for: the API server may hang, and
    /// files and GPUs are brought right all the same.
    fn write_events(&self, report: &Report) {
        for event in &report.events {
            let (reason, claims, note) = match event {
                Event::MpsServerRestarted { gpu, claims } => (
                    "mps-server-restarted",
                    claims,
                    format!(
                        "the MPS server of {gpu} had ended, or served no new program any more, and was started again: programs that still ran there have lost their memory and contexts, \
                         and have to start again (delete pods that do not do so by themselves)"
                    ),
                ),
                Event::MpsServerWedged {
                    gpu,
                    target,
                    fault,
                    holder,
                    claims,
                } => ("mps-server-wedged", claims, {
                    let (state, remedy) = match fault {
                        MpsFault::Fault => (
                            "every program that uses it got a fatal error, and no other can connect until all of them have ended",
                            "delete the pods of this claim if their programs do not end by themselves",
                        ),
                        MpsFault::NoAnswer => (
                            "programs that use it may hang, and no other can connect",
                            "delete the pods of the claims that have it",
                        ),
                        MpsFault::Held => (
                            "no program can connect until it has ended, and those that run go on",
                            "delete its pod",
                        ),
                    };
                    let on = target.of(gpu);
                    let by = holder.as_ref().map(|holder| format!(", {holder}"));
                    format!(
                        "the MPS server of {on} {fault}{}: {state} ({remedy})",
                        by.unwrap_or_default()
                    )
                }),
                _ => continue,
            };
            for claim in claims.clone() {
                let (notifier, note) = (self.notifier.clone(), note.clone());
                self.tasks.spawn(async move {
                    notifier.warn(&claim, reason, &note).await;
                });
            }
        }
    }

    /// Logs new events, counts, writes Events for users, and notifies tasks that depend on records.
    /// Every loop reports so: any of them may be the one that starts a server again.
    fn report(&mut self, report: &Report) {
        self.write_events(report);
        let events: BTreeSet<Event> = report.events.iter().cloned().collect();
        for event in events.difference(&self.logged) {
            match event {
                Event::Failed { claim, error } => {
                    tracing::error!(
                        claim.uid = claim.as_ref().map(ClaimUid::as_str),
                        error,
                        "reconcile failed, will retry"
                    );
                }
                Event::Kept { claim, why } => {
                    tracing::warn!(claim.uid = %claim, why, "record kept");
                }
                Event::CdiRestored { claim } => {
                    self.metrics.cdi_restored.inc();
                    tracing::warn!(claim.uid = %claim, "CDI file was missing or out of date; rewritten");
                }
                Event::CdiWithdrawn { claim } => {
                    tracing::warn!(claim.uid = %claim, "a partition of the claim is gone; its CDI file is removed until the claim is released");
                }
                Event::MpsServerRestarted { gpu, .. } => {
                    tracing::warn!(%gpu, "an MPS server had ended under its claims or was wedged; started again");
                }
                Event::MpsServerWedged {
                    gpu,
                    target,
                    fault,
                    holder,
                    claims,
                } => {
                    let holder = holder.as_ref().map(ToString::to_string);
                    let claims: Vec<_> = claims.iter().map(ToString::to_string).collect();
                    tracing::warn!(
                        on = target.of(gpu),
                        ?claims,
                        holder,
                        "the MPS server {fault} and serves no new program"
                    );
                }
                other => tracing::info!(what = ?other, "reconciled"),
            }
        }
        if events.iter().any(|e| {
            !matches!(
                e,
                Event::Kept { .. }
                    | Event::Failed { .. }
                    | Event::CdiRestored { .. }
                    | Event::CdiWithdrawn { .. }
            )
        }) {
            self.changed.notify_one();
        }
        // Only lasting conditions are remembered: a file that vanishes twice is logged twice.
        self.logged = events
            .into_iter()
            .filter(|e| matches!(e, Event::Kept { .. } | Event::Failed { .. }))
            .collect();
    }
}
