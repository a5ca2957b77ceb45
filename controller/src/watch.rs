//! The watch on this node's slices: a list, then changes from there on, for as long as the task lives.
//!
//! Not kube's watcher: it has no deadline for its list and for the start of a watch, so one unanswered request
//! would leave foreign deletes unseen.

use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use kube::core::Status;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::error::{PublishError, answered};
use crate::retry::Backoff;

/// The server ends a watch after this long.
const LIFE: Duration = Duration::from_secs(290);
/// A watch that is silent for longer than it should live is dead.
const SILENCE: Duration = Duration::from_mins(5);
/// A watch that ends sooner than this ended for a reason.
const SHORT: Duration = Duration::from_secs(1);
const GONE: u16 = 410;

/// What the watch tells.
#[derive(Debug)]
pub(crate) enum Event {
    /// All slices, and the version of the list.
    Listed(Vec<ResourceSlice>, Option<String>),
    /// The watch stands: the server answers.
    Watching,
    /// A slice was created or changed.
    Apply(Box<ResourceSlice>),
    /// A slice was deleted.
    Delete(Box<ResourceSlice>),
}

type Events = BoxStream<'static, Result<WatchEvent<ResourceSlice>, kube::Error>>;

/// The state of the watch. [`Watch::next`] may be dropped at any time without losing an event.
pub(crate) struct Watch {
    api: Api<ResourceSlice>,
    selector: String,
    /// Everything up to here has been told; `None` asks for a list.
    version: Option<String>,
    events: Option<Events>,
    since: Instant,
    heard: Instant,
    /// Nothing is asked before then.
    from: Option<Instant>,
    backoff: Backoff,
}

impl Watch {
    pub(crate) fn new(api: Api<ResourceSlice>, selector: String) -> Self {
        let now = Instant::now();
        let backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(5));
        Self { api, selector, version: None, events: None, since: now, heard: now, from: None, backoff }
    }

    /// Whether what was told is complete: false before the first list and while a new one is needed.
    pub(crate) fn is_complete(&self) -> bool {
        self.version.is_some()
    }

    /// The next thing to know. After an error it goes on by itself; the wait is inside.
    pub(crate) async fn next(&mut self) -> Result<Event, PublishError> {
        loop {
            if let Some(from) = self.from {
                sleep_until(from).await;
                self.from = None;
            }
            let step = match (&self.version, &mut self.events) {
                (None, _) => self.list().await.map(Some),
                (Some(version), None) => {
                    let version = version.clone();
                    self.start(&version).await.map(Some)
                }
                (Some(_), Some(events)) => {
                    let event = timeout_at(self.heard + SILENCE, events.next()).await;
                    self.hear(event.unwrap_or(None))
                }
            };
            match step {
                Ok(Some(event)) => return Ok(event),
                Ok(None) => {}
                Err(error) => {
                    if self.events.take().is_some() && self.since.elapsed() >= SHORT {
                        self.backoff.reset();
                    }
                    self.from = Some(Instant::now() + self.backoff.next());
                    if error.code() != Some(GONE) {
                        return Err(error);
                    }
                    // Not worth telling: servers forget old versions as a matter of course.
                    self.version = None;
                }
            }
        }
    }

    async fn list(&mut self) -> Result<Event, PublishError> {
        let selected = ListParams::default().fields(&self.selector);
        let list = answered("list", || "ResourceSlices".to_owned(), self.api.list(&selected)).await?;
        let version = list.metadata.resource_version;
        self.version = Some(version.clone().unwrap_or_default());
        Ok(Event::Listed(list.items, version))
    }

    async fn start(&mut self, version: &str) -> Result<Event, PublishError> {
        let seconds = u32::try_from(LIFE.as_secs()).unwrap_or_default();
        let selected = WatchParams::default().fields(&self.selector).timeout(seconds);
        let start = self.api.watch(&selected, version);
        let events = answered("watch", || "ResourceSlices".to_owned(), start).await?;
        self.events = Some(events.boxed());
        self.since = Instant::now();
        self.heard = self.since;
        Ok(Event::Watching)
    }

    /// `None` is the end of the watch, by the server or by silence: it starts again where it was.
    fn hear(
        &mut self,
        event: Option<Result<WatchEvent<ResourceSlice>, kube::Error>>,
    ) -> Result<Option<Event>, PublishError> {
        self.heard = Instant::now();
        let Some(event) = event else {
            self.events = None;
            if self.since.elapsed() < SHORT {
                self.from = Some(Instant::now() + self.backoff.next());
            }
            return Ok(None);
        };
        let event = event.map_err(broken)?;
        self.backoff.reset();
        let mut told = |version: Option<String>| {
            if version.is_some() {
                self.version = version;
            }
        };
        Ok(match event {
            WatchEvent::Added(slice) | WatchEvent::Modified(slice) => {
                told(slice.metadata.resource_version.clone());
                Some(Event::Apply(Box::new(slice)))
            }
            WatchEvent::Deleted(slice) => {
                told(slice.metadata.resource_version.clone());
                Some(Event::Delete(Box::new(slice)))
            }
            WatchEvent::Bookmark(bookmark) => {
                told(Some(bookmark.metadata.resource_version));
                None
            }
            WatchEvent::Error(status) => return Err(refused(status)),
        })
    }
}

fn broken(error: kube::Error) -> PublishError {
    PublishError::Api { verb: "watch", object: "ResourceSlices".to_owned(), error }
}

fn refused(status: Box<Status>) -> PublishError {
    broken(kube::Error::Api(status))
}
