//! Hands the pool to the publisher once what prepare may do for it is on disk. Until then changes of taints go out.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use divvy_executor::Executor;
use divvy_model::{GpuUuid, Grant};
use divvy_offer::Pool;
use tokio::sync::watch;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::node::Offer;

/// Follows the offer.
pub(crate) struct SlicesSink {
    pub(crate) offer: watch::Receiver<Offer>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) pool: watch::Sender<Option<Pool>>,
    /// How soon after a failed write the next is tried.
    pub(crate) retry: Duration,
}

impl SlicesSink {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut granted: Option<BTreeMap<GpuUuid, Grant>> = None;
        loop {
            let Offer { pool, grants } = self.offer.borrow_and_update().clone();
            let is_granted = granted.as_ref() == Some(&grants);
            if let Some(pool) = &pool {
                publish(&self.pool, pool, is_granted);
            }
            if pool.is_none() || is_granted {
                tokio::select! {
                    Ok(()) = self.offer.changed() => continue,
                    () = stop.cancelled() => return,
                }
            }
            let mut writing = std::pin::pin!(write(self.executor.clone(), grants.clone(), self.retry));
            let written = loop {
                tokio::select! {
                    written = &mut writing => break written,
                    // A GPU that falls ill meanwhile does not wait for it.
                    Ok(()) = self.offer.changed() => {
                        if let Some(pool) = &self.offer.borrow_and_update().pool {
                            publish(&self.pool, pool, false);
                        }
                    }
                    () = stop.cancelled() => return,
                }
            };
            if written {
                granted = Some(grants);
            }
        }
    }
}

/// Writes what prepare may do; whether that worked.
async fn write(executor: Arc<Executor>, grants: BTreeMap<GpuUuid, Grant>, retry: Duration) -> bool {
    let written = tokio::task::spawn_blocking(move || executor.grant(&grants)).await;
    let problem = match written {
        Ok(Ok(())) => return true,
        Ok(Err(error)) => crate::chain(&error),
        Err(died) => died.to_string(),
    };
    tracing::warn!(error = problem, "failed to store what the policies allow prepare to do, will retry");
    sleep(retry).await;
    false
}

/// All of the pool, or its taints on what is published already.
fn publish(to: &watch::Sender<Option<Pool>>, pool: &Pool, all: bool) {
    to.send_if_modified(|published| {
        let next = match published {
            _ if all => pool.clone(),
            Some(published) => published.with_taints_of(pool),
            None => return false,
        };
        let changed = published.as_ref() != Some(&next);
        if changed {
            tracing::info!(pool = %next.name, devices = next.devices().count(), "the pool has changed");
            *published = Some(next);
        }
        changed
    });
}
