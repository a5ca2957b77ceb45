//! The loop: watch, compare, write, retry. The writes are decided in [`crate::plan`].

use std::sync::Arc;
use std::time::Duration;

use divvy_offer::{Pool, validate};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::api::{Api, DeleteParams, ListParams, PostParams, Preconditions};
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::ExponentialBackoff;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use crate::cache::{Cache, News};
use crate::content::specs;
use crate::deadline::ANSWER;
use crate::error::PublishError;
use crate::plan::{Accepted, Target, Write, plan_sync};
use crate::server_clock::ServerClock;
use crate::status::PublishStatus;
use crate::watch::{Event, LONGEST_WAIT, Watch, backoff};

/// Slices are often deleted together (the kubelet wipes a node's): answering the first at once
/// would be a generation for each. Grows while the deletions continue, up to eight times as long.
const SETTLE: Duration = Duration::from_millis(100);
const SETTLE_DOUBLINGS: u32 = 3;
/// Without foreign changes for this long, [`SETTLE`] counts from its start again.
const QUIET: Duration = Duration::from_secs(30);
/// A watch that has not failed again for so long stands: each attempt has failed before then.
const STANDS: Duration = ANSWER.saturating_add(LONGEST_WAIT);

/// Driver and node whose slices are published.
#[derive(Debug, Clone)]
pub struct PublisherConfig {
    /// Name of the driver, `gpu.divvy.dev`.
    pub driver: String,
    /// Name of the Node object.
    pub node_name: String,
}

impl PublisherConfig {
    /// Returns the field selector of the driver's slices of the node.
    pub(crate) fn selector(&self) -> String {
        format!(
            "spec.driver={},spec.nodeName={}",
            self.driver, self.node_name
        )
    }
}

/// A running publisher.
#[derive(Debug)]
pub struct Publisher {
    status: watch::Receiver<PublishStatus>,
    task: JoinHandle<()>,
}

impl Publisher {
    /// Its state, now and on every change.
    pub fn status(&self) -> watch::Receiver<PublishStatus> {
        self.status.clone()
    }

    /// Waits until it has stopped, after the token was cancelled or the channel of pools closed.
    /// The slices stay.
    pub async fn stopped(self) {
        if let Err(error) = self.task.await {
            tracing::error!(%error, "the publisher failed");
        }
    }
}

/// Starts publishing. While `desired` is `None` nothing is written: what an earlier instance
/// published stays. Ends when `stop` is cancelled or the sender of `desired` is gone; the slices
/// stay then too. Give it a client with a deadline ([`crate::with_deadline`]), which sets the
/// clock: without one, a request that is never answered stops it. Must be called in a tokio
/// runtime.
pub fn spawn(
    client: kube::Client,
    config: PublisherConfig,
    desired: watch::Receiver<Option<Arc<Pool>>>,
    clock: ServerClock,
    stop: CancellationToken,
) -> Publisher {
    let (status, receiver) = watch::channel(PublishStatus::default());
    let worker = Worker {
        slices: Api::all(client.clone()),
        nodes: Api::all(client),
        selector: config.selector(),
        config,
        desired,
        clock,
        status,
        cache: Cache::default(),
        accepted: Accepted::default(),
        owner: None,
        due: Due {
            at: Some(Instant::now()),
            list: false,
        },
        watch_failed: None,
        backoff: backoff(),
        disturbed: (0, None),
    };
    Publisher {
        status: receiver,
        task: tokio::spawn(worker.run(stop)),
    }
}

struct Worker {
    slices: Api<ResourceSlice>,
    nodes: Api<Node>,
    selector: String,
    config: PublisherConfig,
    desired: watch::Receiver<Option<Arc<Pool>>>,
    clock: ServerClock,
    status: watch::Sender<PublishStatus>,
    cache: Cache,
    accepted: Accepted,
    owner: Option<OwnerReference>,
    due: Due,
    /// When the watch failed last, if it may not stand since.
    watch_failed: Option<Instant>,
    backoff: ExponentialBackoff,
    /// Foreign changes in a row, and when the last was.
    disturbed: (u32, Option<Instant>),
}

/// Time of the next comparison, if one is due.
#[derive(Debug)]
struct Due {
    /// Not before then; `None` when there is nothing to do.
    at: Option<Instant>,
    /// The cache cannot be trusted: list first.
    list: bool,
}

impl Worker {
    async fn run(mut self, stop: CancellationToken) {
        let mut watch = Watch::new(self.slices.clone(), &self.selector, "ResourceSlices");
        loop {
            let now = Instant::now();
            // Before the first list nothing can be due.
            let due = self.due.at.filter(|_| watch.is_complete());
            // A round is not raced against events: a write that was cut short would leave the cache
            // without the slice that the server has. Only the end of the program cuts it.
            if due.is_some_and(|at| at <= now) {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = self.round() => {}
                }
                continue;
            }
            tokio::select! {
                () = stop.cancelled() => return,
                changed = self.desired.changed() => {
                    if changed.is_err() {
                        return;
                    }
                    // A new pool is worth a try, whatever the last one met.
                    self.backoff.reset();
                    self.due_in(Duration::ZERO);
                }
                () = sleep_until(due.unwrap_or(now)), if due.is_some() => {}
                () = sleep_until(self.watch_failed.unwrap_or(now) + STANDS), if self.watch_failed.is_some() => {
                    self.watches();
                }
                event = watch.next() => self.note_event(event),
            }
        }
    }

    fn due_in(&mut self, wait: Duration) {
        // Followers see at once that the pool is not up to date, and not only when the first write
        // fails.
        self.due.at = Some(Instant::now() + wait);
        self.status
            .send_if_modified(|status| std::mem::replace(&mut status.in_sync, false));
    }

    fn note_event(&mut self, event: Result<Event<ResourceSlice>, PublishError>) {
        let event = match event {
            Ok(event) => event,
            Err(error) => {
                tracing::warn!(%error, "ResourceSlices are not watched");
                self.watch_failed = Some(Instant::now());
                self.status
                    .send_modify(|status| status.watch_error = Some(error.to_string()));
                return;
            }
        };
        // Own writes come back as events too. The cache knows their resource versions, so they are
        // no news.
        let news = match event {
            // Nothing is written while a list is read, so it is not older than an own write.
            Event::Listed(slices) => {
                let news = self.cache.replace(slices, None);
                self.disturb(news);
                return;
            }
            Event::Apply(slice) => self.cache.apply(*slice),
            Event::Delete(slice) => self.cache.delete(&slice),
        };
        self.watches();
        self.disturb(news);
    }

    fn watches(&mut self) {
        if self.watch_failed.take().is_some() {
            self.status.send_modify(|status| status.watch_error = None);
        }
    }

    /// Another client changed or deleted a slice: reconcile soon.
    fn disturb(&mut self, news: News) {
        match news {
            News::Old => return,
            News::Changed => {}
            News::Deleted => {
                // The Node may have been made anew under the same name, and the slices collected
                // with the old one.
                self.owner = None;
                self.status
                    .send_modify(|status| status.foreign_deletes += 1);
            }
        }
        let now = Instant::now();
        let (count, last) = self.disturbed;
        // The first change after a quiet time is answered soon. A row of them doubles the wait,
        // every fourth one, up to the limit.
        let count = if last.is_some_and(|last| now - last < QUIET) {
            count.saturating_add(1)
        } else {
            0
        };
        self.disturbed = (count, Some(now));
        // A date that is set stays: else a steady stream of changes would put it off for ever.
        if self.due.at.is_none() {
            self.due_in(SETTLE * 2_u32.pow((count / 4).min(SETTLE_DOUBLINGS)));
        }
    }

    /// Compares and writes once, and notes the outcome.
    async fn round(&mut self) {
        // No pool yet: nothing is known about the node, and slices that exist from an earlier run
        // stay as they are.
        let Some(pool) = self.desired.borrow_and_update().clone() else {
            self.due.at = None;
            return;
        };
        self.due.at = None;
        // Check the API's limits before anything is sent: a pool that is refused halfway would be
        // published in part.
        let result = match validate(&pool) {
            Ok(()) => self.sync(&pool).await,
            Err(error) => Err(error.into()),
        };
        match result {
            Ok(generation) => {
                self.backoff.reset();
                self.note_success(pool, generation);
            }
            Err(error) => {
                let retry = error
                    .is_retryable()
                    .then(|| self.backoff.next().unwrap_or_default());
                // After a failure it is not known which writes arrived. List before the next
                // attempt, so that it starts from what the server has.
                self.due.list = true;
                self.due.at = retry.map(|wait| Instant::now() + wait);
                tracing::warn!(%error, ?retry, "cannot publish the pool");
                self.status.send_modify(|status| {
                    status.last_error = Some(error.to_string());
                    status.writes.failed += 1;
                });
            }
        }
    }

    fn note_success(&mut self, pool: Arc<Pool>, generation: i64) {
        // Forget the stored forms of slices that are gone.
        self.accepted.keep(|name| self.cache.has(name));
        let (dropped, altered) = (self.accepted.dropped(), self.accepted.altered());
        let same = self.status.borrow().published.as_deref() == Some(&pool);
        let bytes = (!same).then(|| size(&self.config, &pool));
        let published_at = self.clock.now();
        if published_at.is_none() && !same {
            tracing::warn!(
                "answers of the API server have no date: it is not known since when the slices are so"
            );
        }
        self.status.send_modify(|status| {
            status.bytes = bytes.unwrap_or(status.bytes);
            if !dropped.is_empty() && dropped != status.dropped {
                let gates = dropped.iter().map(|feature| feature.gate()).collect::<Vec<_>>().join(", ");
                tracing::warn!(gates, "the API server drops fields of ResourceSlices: its feature gates are off");
            } else if !altered.is_empty() && altered != status.altered {
                tracing::warn!(slices = ?altered, "the API server stored ResourceSlices otherwise than they were sent");
            }
            status.in_sync = true;
            status.slices = pool.slices.len().max(1);
            status.devices = pool.devices().count();
            status.published = Some(pool);
            status.published_at = published_at;
            status.generation = generation;
            status.last_error = None;
            status.dropped = dropped;
            status.altered = altered;
            status.rounds += 1;
        });
    }

    async fn sync(&mut self, pool: &Pool) -> Result<i64, PublishError> {
        // Phase 1: after a doubt, read what exists. The watch may lag behind.
        if self.due.list {
            let selected = ListParams::default().fields(&self.selector);
            let list = self
                .slices
                .list(&selected)
                .await
                .map_err(PublishError::of("list", "ResourceSlices"))?;
            self.cache
                .replace(list.items, list.metadata.resource_version.as_deref());
            self.due.list = false;
        }
        // Phase 2: the Node that owns the slices, so that they are collected with it. Read once;
        // forgotten when a slice is deleted by others.
        let owner = self.owner().await?;
        let PublisherConfig { driver, node_name } = &self.config;
        let target = Target {
            driver,
            node: node_name,
            owner: &owner,
            pool,
            accepted: &self.accepted,
        };
        // Phase 3: compare, and write in the order of the plan. The first failure ends it; the next
        // round plans anew.
        // Nothing else writes the cache meanwhile: events wait until the round has ended.
        let plan = plan_sync(&self.cache.all(), &target);
        for write in plan.writes {
            tracing::debug!(verb = write.verb(), slice = write.name(), "writing");
            self.write(write).await?;
        }
        Ok(plan.generation)
    }

    async fn owner(&mut self) -> Result<OwnerReference, PublishError> {
        if let Some(owner) = &self.owner {
            return Ok(owner.clone());
        }
        let name = &self.config.node_name;
        let node = self
            .nodes
            .get_metadata(name)
            .await
            .map_err(PublishError::of("get", format!("Node {name}")))?;
        let owner = OwnerReference {
            api_version: "v1".to_owned(),
            kind: "Node".to_owned(),
            name: name.clone(),
            uid: node
                .metadata
                .uid
                .ok_or_else(|| PublishError::NoUid(name.clone()))?,
            controller: Some(true),
            block_owner_deletion: None,
        };
        self.owner = Some(owner.clone());
        Ok(owner)
    }

    async fn write(&mut self, write: Write) -> Result<(), PublishError> {
        let name = write.name().to_owned();
        let failed = PublishError::of(write.verb(), format!("ResourceSlice {name}"));
        match write {
            Write::Delete {
                uid,
                resource_version,
                ..
            } => {
                // Only the very object that was compared: another one of the same name, or a newer
                // version, is looked at first.
                let must = DeleteParams {
                    preconditions: Some(Preconditions {
                        uid,
                        resource_version,
                    }),
                    ..DeleteParams::default()
                };
                match self.slices.delete(&name, &must).await {
                    // It is gone already, which was wanted.
                    Err(kube::Error::Api(status)) if status.code == 404 => {}
                    // The answer is the deleted object or a status: neither is needed.
                    done => drop(done.map_err(failed)?),
                }
                self.cache.deleted(&name);
                self.status.send_modify(|status| status.writes.deleted += 1);
            }
            Write::Update(slice) => {
                // The slice carries the resource version that was compared. If another client wrote
                // it since, the server answers 409, and the next round compares anew.
                let replaced = self
                    .slices
                    .replace(&name, &PostParams::default(), &slice)
                    .await;
                let stored = replaced.map_err(failed)?;
                // A server without a feature gate drops fields without an error. Its answer shows
                // it, and must not look like a foreign change later.
                self.accepted.remember(&slice, &stored);
                self.cache.wrote(stored);
                self.status.send_modify(|status| status.writes.updated += 1);
            }
            Write::Create(slice) => {
                let created = self.slices.create(&PostParams::default(), &slice).await;
                let stored = match created.map_err(failed) {
                    // The cache lacks a slice that the server has, or another driver has the name:
                    // find out which.
                    Err(error) if error.code() == Some(409) => {
                        return Err(self.whose(&name, error).await);
                    }
                    created => created?,
                };
                self.accepted.remember(&slice, &stored);
                self.cache.wrote(stored);
                self.status.send_modify(|status| status.writes.created += 1);
            }
        }
        Ok(())
    }

    /// Says who has the name that could not be created. Our own slice is no mystery: the next list
    /// brings it.
    async fn whose(&self, name: &str, conflict: PublishError) -> PublishError {
        let Ok(slice) = self.slices.get(name).await else {
            return conflict;
        };
        let (driver, node) = (slice.spec.driver, slice.spec.node_name.unwrap_or_default());
        if driver == self.config.driver && node == self.config.node_name {
            return conflict;
        }
        PublishError::NameTaken {
            name: name.to_owned(),
            driver,
            node,
        }
    }
}

/// Bytes of the pool's slices as JSON, without their metadata.
fn size(config: &PublisherConfig, pool: &Pool) -> usize {
    let specs = specs(&config.driver, &config.node_name, pool);
    specs
        .iter()
        .map(|spec| serde_json::to_vec(spec).map_or(0, |json| json.len()))
        .sum()
}
