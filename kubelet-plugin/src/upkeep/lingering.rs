//! Finishes claims that were released while processes still used their devices.

use std::sync::Arc;
use std::time::Duration;

use divvy_executor::{Event, Executor};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Reporter;

/// Frees the devices of lingering claims.
pub(crate) struct Lingering {
    pub(crate) executor: Arc<Executor>,
    /// Interval at which their processes are looked for.
    pub(crate) every: Duration,
    /// Notifies that a claim was unprepared and lingers.
    pub(crate) lingers: Arc<Notify>,
    pub(crate) reporter: Reporter,
}

impl Lingering {
    /// Frees the devices of lingering claims soon after their last process has ended. Every
    /// instance does this: it depends only on the GPUs, so the instance that answered the unprepare
    /// need not notify the one that publishes.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut some = true;
        loop {
            let look = async {
                if some {
                    tokio::time::sleep(self.every).await;
                } else {
                    self.lingers.notified().await;
                }
            };
            tokio::select! {
                () = look => {}
                () = stop.cancelled() => return,
            }
            // The processes are asked for on a thread: NVML may take its time.
            let executor = self.executor.clone();
            let finished = tokio::task::spawn_blocking(move || executor.finish_lingering());
            let Ok((mut report, left)) = finished.await else {
                continue;
            };
            // Said when it was unprepared.
            report
                .events
                .retain(|event| !matches!(event, Event::Kept { .. }));
            some = left;
            self.reporter.report(&report);
        }
    }
}
