//! Hands the pool to the publisher once what prepare may do for it is on disk, GPU by GPU: one
//! whose grant cannot be stored keeps no other back. Until then only new taints of it go out.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_executor::Executor;
use divvy_model::{GpuUuid, Grant};
use divvy_offer::Pool;
use tokio::sync::{Notify, watch};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;

use crate::node::Offer;
use crate::node::facts::{Facts, Report};

/// The task that follows the offer.
pub(crate) struct SlicesSink {
    pub(crate) offer: watch::Receiver<Offer>,
    pub(crate) executor: Arc<Executor>,
    pub(crate) pool: watch::Sender<Option<Arc<Pool>>>,
    /// The pause between a failed write and the next.
    pub(crate) retry: Duration,
    /// Notified when other grants are on disk.
    pub(crate) granted: Arc<Notify>,
    /// Reports grants that cannot be stored.
    pub(crate) facts: Facts,
}

/// Grants by GPU.
type Grants = BTreeMap<GpuUuid, Grant>;
/// The GPUs whose grant could not be stored, and why.
type Failed = BTreeMap<GpuUuid, String>;

impl SlicesSink {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let mut granted = Grants::new();
        loop {
            let offer = self.offer.borrow_and_update().clone();
            let waiting = new_grants(&offer.grants, &granted);
            // Taints first: a GPU that falls ill does not wait for the disk. What was never
            // published waits for the first write.
            if self.pool.borrow().is_some() || waiting.is_empty() {
                publish(&self.pool, &offer, &waiting);
            }
            if offer.pool.is_none() || waiting.is_empty() {
                tokio::select! {
                    Ok(()) = self.offer.changed() => continue,
                    () = stop.cancelled() => return,
                }
            }
            // While the disk works, new taints still go out; the content of waiting GPUs does not.
            let mut attempt = std::pin::pin!(write(self.executor.clone(), waiting.clone()));
            let failed = loop {
                tokio::select! {
                    failed = &mut attempt => break failed,
                    Ok(()) = self.offer.changed() => {
                        let offer = self.offer.borrow_and_update().clone();
                        let waiting = new_grants(&offer.grants, &granted);
                        if self.pool.borrow().is_some() {
                            publish(&self.pool, &offer, &waiting);
                        }
                    }
                    () = stop.cancelled() => return,
                }
            };
            // Only what is on disk counts as granted. Reported before the retry, so that people see
            // why a change does not take effect.
            let stored = waiting
                .into_iter()
                .filter(|(gpu, _)| !failed.contains_key(gpu));
            granted.extend(stored);
            self.granted.notify_one();
            // Without a brain the plugin ends.
            drop(self.facts.send(Report::Ungranted(failed.clone()).into()));
            if failed.is_empty() {
                continue;
            }
            let offer = self.offer.borrow_and_update().clone();
            publish(&self.pool, &offer, &new_grants(&offer.grants, &granted));
            tokio::select! {
                () = sleep(self.retry) => {}
                Ok(()) = self.offer.changed() => {}
                () = stop.cancelled() => return,
            }
        }
    }
}

/// Returns the grants that are not stored yet.
fn new_grants(grants: &Grants, granted: &Grants) -> Grants {
    let is_new = |(gpu, grant): &(&GpuUuid, &Grant)| granted.get(*gpu) != Some(*grant);
    grants
        .iter()
        .filter(is_new)
        .map(|(gpu, grant)| (gpu.clone(), *grant))
        .collect()
}

/// Stores grants; returns those that could not be stored.
async fn write(executor: Arc<Executor>, grants: Grants) -> Failed {
    let gpus: Vec<GpuUuid> = grants.keys().cloned().collect();
    let written = tokio::task::spawn_blocking(move || match executor.grant(&grants) {
        Ok(()) => Failed::new(),
        // The error does not say which GPU it is about: each is tried alone.
        Err(_) => grants
            .into_iter()
            .filter_map(|(gpu, grant)| {
                let one = Grants::from([(gpu.clone(), grant)]);
                let error = executor.grant(&one).err()?;
                Some((gpu, crate::chain(&error)))
            })
            .collect(),
    });
    let failed = written.await.unwrap_or_else(|died| {
        let why = died.to_string();
        gpus.into_iter().map(|gpu| (gpu, why.clone())).collect()
    });
    for (gpu, error) in &failed {
        tracing::warn!(
            %gpu, error,
            "failed to store what the policies allow prepare to do, will retry"
        );
    }
    failed
}

/// Publishes the offer, but for the content of GPUs whose grant is not stored.
fn publish(to: &watch::Sender<Option<Arc<Pool>>>, offer: &Offer, waiting: &Grants) {
    let Some(pool) = &offer.pool else { return };
    let waiting: BTreeSet<GpuUuid> = waiting.keys().cloned().collect();
    to.send_if_modified(|published| {
        let next = if waiting.is_empty() {
            pool.clone()
        } else {
            let nothing = Pool {
                name: pool.name.clone(),
                slices: Vec::new(),
            };
            Arc::new(pool.held_back(published.as_deref().unwrap_or(&nothing), &waiting))
        };
        let changed = published.as_ref() != Some(&next);
        if changed {
            tracing::info!(pool = %next.name, devices = next.devices().count(), "the pool has changed");
            *published = Some(next);
        }
        changed
    });
}
