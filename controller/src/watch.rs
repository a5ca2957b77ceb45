//! A watch on a few objects: a list, then changes from there on, for as long as the task lives. The publisher's on this
//! node's slices, the node plugin's on policies and on its node.
//!
//! Not kube's watcher: it has no deadline for its list and for the start of a watch, so one unanswered request
//! would leave changes unseen.

use std::fmt::Debug;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use kube::Resource;
use kube::api::{Api, ListParams, WatchEvent, WatchParams};
use serde::de::DeserializeOwned;
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
const NOT_FOUND: u16 = 404;

/// What the watch tells.
#[derive(Debug)]
pub enum Event<K> {
    /// All objects, and the version of the list.
    Listed(Vec<K>, Option<String>),
    /// The watch stands: the server answers.
    Watching,
    /// An object was created or changed.
    Apply(Box<K>),
    /// An object was deleted.
    Delete(Box<K>),
}

type Events<K> = BoxStream<'static, Result<WatchEvent<K>, kube::Error>>;

/// The state of the watch. [`Watch::next`] may be dropped at any time without losing an event.
pub struct Watch<K> {
    api: Api<K>,
    selector: String,
    /// As errors name them.
    objects: &'static str,
    /// Everything up to here has been told; `None` asks for a list.
    version: Option<String>,
    events: Option<Events<K>>,
    since: Instant,
    heard: Instant,
    /// Nothing is asked before then.
    from: Option<Instant>,
    backoff: Backoff,
}

impl<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static> Watch<K> {
    /// A watch on the objects that a field selector fits; nothing happens before [`Watch::next`]. `objects` names them
    /// in errors.
    pub fn new(api: Api<K>, selector: String, objects: &'static str) -> Self {
        let now = Instant::now();
        let backoff = Backoff::new(Duration::from_millis(500), Duration::from_secs(5));
        Self {
            api,
            selector,
            objects,
            version: None,
            events: None,
            since: now,
            heard: now,
            from: None,
            backoff,
        }
    }

    /// Whether what was told is complete: false before the first list and while a new one is needed.
    pub fn is_complete(&self) -> bool {
        self.version.is_some()
    }

    /// The next thing to know. After an error it goes on by itself; the wait is inside.
    pub async fn next(&mut self) -> Result<Event<K>, PublishError> {
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
                    if error.code() == Some(NOT_FOUND) {
                        // The kind itself is gone; when it is back, its objects are others.
                        self.version = None;
                    }
                    if error.code() != Some(GONE) {
                        return Err(error);
                    }
                    // Not worth telling: servers forget old versions as a matter of course.
                    self.version = None;
                }
            }
        }
    }

    async fn list(&mut self) -> Result<Event<K>, PublishError> {
        let selected = ListParams::default().fields(&self.selector);
        let list = answered("list", || self.objects.to_owned(), self.api.list(&selected)).await?;
        let version = list.metadata.resource_version;
        self.version = Some(version.clone().unwrap_or_default());
        Ok(Event::Listed(list.items, version))
    }

    async fn start(&mut self, version: &str) -> Result<Event<K>, PublishError> {
        let seconds = u32::try_from(LIFE.as_secs()).unwrap_or_default();
        let selected = WatchParams::default().fields(&self.selector).timeout(seconds);
        let start = self.api.watch(&selected, version);
        let events = answered("watch", || self.objects.to_owned(), start).await?;
        self.events = Some(events.boxed());
        self.since = Instant::now();
        self.heard = self.since;
        Ok(Event::Watching)
    }

    /// `None` is the end of the watch, by the server or by silence: it starts again where it was.
    fn hear(
        &mut self,
        event: Option<Result<WatchEvent<K>, kube::Error>>,
    ) -> Result<Option<Event<K>>, PublishError> {
        self.heard = Instant::now();
        let Some(event) = event else {
            self.events = None;
            if self.since.elapsed() < SHORT {
                self.from = Some(Instant::now() + self.backoff.next());
            }
            return Ok(None);
        };
        let event = event.map_err(|error| broken(self.objects, error))?;
        self.backoff.reset();
        let mut told = |version: Option<String>| {
            if version.is_some() {
                self.version = version;
            }
        };
        Ok(match event {
            WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                told(object.meta().resource_version.clone());
                Some(Event::Apply(Box::new(object)))
            }
            WatchEvent::Deleted(object) => {
                told(object.meta().resource_version.clone());
                Some(Event::Delete(Box::new(object)))
            }
            WatchEvent::Bookmark(bookmark) => {
                told(Some(bookmark.metadata.resource_version));
                None
            }
            WatchEvent::Error(status) => return Err(broken(self.objects, kube::Error::Api(status))),
        })
    }
}

fn broken(objects: &str, error: kube::Error) -> PublishError {
    PublishError::Api { verb: "watch", object: objects.to_owned(), error }
}
