//! Brings settings of GPUs to what policies say now, soon after the policies have changed, and MPS
//! servers that have died back to their claims.

use std::sync::Arc;
use std::time::Duration;

use divvy_executor::Executor;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::Reporter;
use crate::node::facts::GpusSeen;

/// Longest pause before what has failed is tried again.
const LONGEST_RETRY: Duration = Duration::from_mins(1);

/// Sets and gives back settings of GPUs when a policy has changed: the MIG mode of a GPU that no
/// rule offers partitions of any more, the time slice of shares that are in use.
pub(crate) struct Granted {
    pub(crate) executor: Arc<Executor>,
    /// Pause before what failed is tried again; it doubles from one failure to the next.
    pub(crate) retry: Duration,
    /// Interval at which MPS servers are looked for that have died under their claims; `None`
    /// without a supervisor.
    pub(crate) mps: Option<Duration>,
    /// Notifies that another grant of a GPU is on disk.
    pub(crate) stored: Arc<Notify>,
    /// The GPUs as the driver lists them, and whether it is released.
    pub(crate) seen: watch::Receiver<GpusSeen>,
    pub(crate) reporter: Reporter,
}

impl Granted {
    /// Runs until `stop`. It asks only the GPUs, so that a policy which changes on all nodes at
    /// once is no load for the API server; and every instance does it, under the locks of the GPUs.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        // Set while something is left to do.
        let mut pause = None;
        loop {
            let again = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            let look = async {
                match self.mps {
                    Some(every) => tokio::time::sleep(every).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.stored.notified() => {}
                () = again => {}
                () = look => {}
                () = stop.cancelled() => return,
            }
            // A question would open a driver that was released to be unloaded.
            if self.seen.borrow().released.is_some() {
                pause = Some(LONGEST_RETRY);
                continue;
            }
            // On a thread: NVML blocks.
            let executor = self.executor.clone();
            let Ok(report) = tokio::task::spawn_blocking(move || executor.tidy()).await else {
                pause = Some(LONGEST_RETRY);
                continue;
            };
            let failed = report.is_open();
            // Ever less often: some failures last until an administrator acts.
            pause = failed.then(|| pause.map_or(self.retry, |last| (last * 2).min(LONGEST_RETRY)));
            self.reporter.report(&report);
        }
    }
}
