//! CDI files: there before the kubelet may call, written again when they vanish or when what they
//! name of the driver has changed.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use divvy_executor::{Executor, Refresh};
use divvy_model::GpuUuid;
use divvy_model::mig::Placement;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Reporter;
use super::cdi_watch::FolderWatch;
use crate::app::config::Timing;
use crate::host::edits::HostEdits;
use crate::node::Holdings;
use crate::node::facts::GpusSeen;

/// Time for which the start waits for the first answer of the driver, when there are claims whose
/// files need it.
const FIRST_INVENTORY: Duration = Duration::from_secs(10);
/// Interval at which a CDI folder that cannot be watched is looked for.
const NO_WATCH: Duration = Duration::from_secs(10);

/// Longest pause before what has failed is tried again.
const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// The files to write next, and how long to wait before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Due {
    refresh: Refresh,
    /// The pause after a failure, which doubles from one to the next; none after a success.
    retry: Option<Duration>,
}

impl Default for Due {
    fn default() -> Self {
        Self {
            refresh: Refresh::All,
            retry: None,
        }
    }
}

impl Due {
    /// Returns what is due after an attempt: the same again where something of it failed, since a
    /// file that is there and out of date is not missing.
    fn after(self, failed: bool, first: Duration) -> Self {
        let next = || {
            let doubled = |last: Duration| (last * 2).min(LONGEST_RETRY);
            self.retry.map_or(first, doubled)
        };
        Self {
            refresh: if failed {
                self.refresh
            } else {
                Refresh::Missing
            },
            retry: failed.then(next),
        }
    }

    /// Returns the pause, which is `usual` after a success.
    fn pause(self, usual: Duration) -> Duration {
        self.retry.map_or(usual, |retry| retry.min(usual))
    }
}

/// Keeps CDI files right.
pub(crate) struct CdiFiles {
    pub(crate) executor: Arc<Executor>,
    pub(crate) edits: Arc<HostEdits>,
    pub(crate) folder: PathBuf,
    pub(crate) timing: Timing,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    /// The health of the GPUs, with the partitions that are gone under claims.
    pub(crate) holdings: watch::Receiver<Holdings>,
    pub(crate) reporter: Reporter,
    /// The files to write next, and when.
    pub(crate) due: Due,
}

/// Waits until other partitions are gone under claims than `known`.
async fn other_gone(
    holdings: &mut watch::Receiver<Holdings>,
    known: &mut BTreeSet<(GpuUuid, Placement)>,
) {
    loop {
        let now = holdings.borrow_and_update().health.gone.clone();
        if now != *known {
            *known = now;
            return;
        }
        if holdings.changed().await.is_err() {
            // Without a brain the plugin ends.
            std::future::pending::<()>().await;
        }
    }
}

impl CdiFiles {
    /// Writes all files, before the kubelet may call: containers of running pods may start at any
    /// time, and it asks again only for new pods.
    pub(crate) async fn before_registration(&mut self) {
        let executor = self.executor.clone();
        let has_records = tokio::task::spawn_blocking(move || executor.has_records()).await;
        // An error counts as some.
        if has_records.unwrap_or(true) {
            let known = |seen: &GpusSeen| seen.inventory.is_some() || seen.problem.is_some();
            let _in_time = tokio::time::timeout(FIRST_INVENTORY, self.seen.wait_for(known)).await;
        }
        self.restore().await;
    }

    /// Watches CDI files and driver files.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let timing = self.timing;
        // The files of this inventory were written before registration.
        self.seen.mark_unchanged();
        let mut look_at_driver = Instant::now() + timing.refresh;
        let mut gone = BTreeSet::new();
        loop {
            // Watched first, then restored: nothing can vanish unseen in between.
            let mut watch = FolderWatch::new(&self.folder).ok();
            self.restore().await;
            let usual = if watch.is_some() {
                timing.cdi_check
            } else {
                NO_WATCH.min(timing.cdi_check)
            };
            // Without an event the folder is looked at all the same: notifications may be lost.
            let check = Instant::now() + self.due.pause(usual);
            let vanished = async {
                match &mut watch {
                    Some(watch) => drop(watch.vanished(timing.cdi_settle).await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = vanished => {}
                // The files of their claims are removed.
                () = other_gone(&mut self.holdings, &mut gone) => {}
                () = tokio::time::sleep_until(check) => {}
                Ok(()) = self.seen.changed() => {
                    // GPUs came or the driver was replaced: files written for them may say
                    // something else now.
                    self.look_at_driver(true).await;
                    self.due.refresh = Refresh::All;
                }
                () = tokio::time::sleep_until(look_at_driver) => {
                    look_at_driver = Instant::now() + timing.refresh;
                    if self.look_at_driver(false).await {
                        self.due.refresh = Refresh::All;
                    }
                }
                () = stop.cancelled() => return,
            }
        }
    }

    /// Lists the driver's files again. Returns whether containers would get others.
    async fn look_at_driver(&self, thorough: bool) -> bool {
        let edits = self.edits.clone();
        match tokio::task::spawn_blocking(move || edits.refresh(thorough)).await {
            Ok(Ok(changed)) => {
                if changed {
                    tracing::info!("the driver's files have changed; rewriting CDI files");
                }
                changed
            }
            Ok(Err(error)) => {
                tracing::debug!(error = %crate::chain(&error), "failed to list driver files");
                false
            }
            Err(_) => false,
        }
    }

    /// Writes the CDI files that are due, and works out what is due next.
    async fn restore(&mut self) {
        let (executor, refresh) = (self.executor.clone(), self.due.refresh);
        let report = tokio::task::spawn_blocking(move || executor.restore_cdi(refresh)).await;
        // After a failure all files are due again.
        let failed = match &report {
            Ok(report) => report.is_open(),
            // Only a panic: nothing is known to be written.
            Err(_) => true,
        };
        if let Ok(report) = report {
            self.reporter.report(&report);
        }
        self.due = self.due.after(failed, self.timing.driver_retry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refresh_that_failed_is_tried_again_as_a_whole_and_ever_less_often() {
        let first = Duration::from_secs(5);
        let usual = Duration::from_mins(5);
        let mut due = Due::default();
        let mut pauses = Vec::new();
        for _ in 0..6 {
            due = due.after(true, first);
            assert_eq!(due.refresh, Refresh::All);
            pauses.push(due.pause(usual).as_secs());
        }
        assert_eq!(pauses, [5, 10, 20, 40, 60, 60]);
        due = due.after(false, first);
        assert_eq!((due.refresh, due.pause(usual)), (Refresh::Missing, usual));
        due = due.after(true, first);
        assert_eq!(due.refresh, Refresh::Missing);
    }
}
