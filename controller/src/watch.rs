//! A watch on a few objects for as long as the task lives: kube's [`watcher`], with its list in one
//! piece, waits between attempts, and errors that say what was tried. The publisher's on this
//! node's slices, the node plugin's on policies.

use std::fmt::Debug;
use std::time::Duration;

use futures::StreamExt;
use futures::stream::BoxStream;
use kube::Resource;
use kube::api::Api;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{self, ExponentialBackoff, watcher};
use serde::de::DeserializeOwned;
use tokio::time::{Instant, sleep_until};

use crate::error::PublishError;

const GONE: u16 = 410;
const NOT_FOUND: u16 = 404;

/// News from the watch.
#[derive(Debug)]
pub enum Event<K> {
    /// All objects.
    Listed(Vec<K>),
    /// An object was created or changed.
    Apply(Box<K>),
    /// An object was deleted.
    Delete(Box<K>),
}

/// The state of the watch. [`Watch::next`] may be dropped at any time without losing an event.
pub struct Watch<K> {
    api: Api<K>,
    config: watcher::Config,
    /// Name of the objects in errors.
    objects: &'static str,
    events: BoxStream<'static, Result<watcher::Event<K>, watcher::Error>>,
    /// The objects of the list that is being read; `None` once it is complete.
    listing: Option<Vec<K>>,
    /// No request is made before then.
    from: Option<Instant>,
    backoff: ExponentialBackoff,
}

impl<K: Resource + Clone + DeserializeOwned + Debug + Send + 'static> Watch<K> {
    /// A watch on the objects that a field selector matches; nothing happens before
    /// [`Watch::next`]. `objects` names them in errors.
    pub fn new(api: Api<K>, selector: &str, objects: &'static str) -> Self {
        let config = watcher::Config::default().fields(selector);
        let events = watcher(api.clone(), config.clone()).boxed();
        Self {
            api,
            config,
            objects,
            events,
            listing: Some(Vec::new()),
            from: None,
            backoff: backoff(),
        }
    }

    /// Returns true if the objects are known in full: false before the first list and while a new
    /// one is needed.
    pub fn is_complete(&self) -> bool {
        self.listing.is_none()
    }

    /// The next event. After an error, the next call waits and then goes on.
    pub async fn next(&mut self) -> Result<Event<K>, PublishError> {
        loop {
            // Cleared only after the wait: a call that is dropped while it waits leaves the rest of
            // it to the next.
            if let Some(from) = self.from {
                sleep_until(from).await;
                self.from = None;
            }
            // The stream of a watcher has no end.
            let Some(event) = self.events.next().await else {
                return std::future::pending().await;
            };
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    self.from = Some(Instant::now() + self.backoff.next().unwrap_or_default());
                    let error = PublishError::watch(self.objects, error);
                    if let Some(NOT_FOUND | GONE) = error.code() {
                        // Known versions are of no use: they are forgotten, or the kind itself was
                        // deleted.
                        self.events = watcher(self.api.clone(), self.config.clone()).boxed();
                        self.listing = Some(Vec::new());
                    }
                    if error.code() == Some(GONE) {
                        // Not worth reporting: servers forget old versions as a matter of course.
                        continue;
                    }
                    return Err(error);
                }
            };
            match event {
                watcher::Event::Init => self.listing = Some(Vec::new()),
                watcher::Event::InitApply(object) => {
                    self.listing.get_or_insert_default().push(object);
                }
                watcher::Event::InitDone => {
                    // The backoff goes on: a list that succeeds before each failure of the watch
                    // must not begin it anew. Only an event shows that the watch stands.
                    return Ok(Event::Listed(self.listing.take().unwrap_or_default()));
                }
                watcher::Event::Apply(object) => {
                    self.backoff.reset();
                    return Ok(Event::Apply(Box::new(object)));
                }
                watcher::Event::Delete(object) => {
                    self.backoff.reset();
                    return Ok(Event::Delete(Box::new(object)));
                }
            }
        }
    }
}

/// Doubling waits with jitter, so that the nodes of a cluster do not come back in step after an
/// outage of the API server.
pub(crate) fn backoff() -> ExponentialBackoff {
    backon::ExponentialBuilder::new()
        .with_min_delay(FIRST_WAIT)
        .with_max_delay(LONGEST_WAIT / 2)
        .with_jitter()
        .without_max_times()
        .into()
}

/// The wait after the first failure is this, and up to twice as long by jitter.
const FIRST_WAIT: Duration = Duration::from_millis(200);
/// No wait is longer.
pub(crate) const LONGEST_WAIT: Duration = Duration::from_secs(5);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_grow_up_to_the_limit_without_end_and_start_over_after_a_success() {
        let mut backoff = backoff();
        for expected in [200, 400, 800, 1600, 2500, 2500]
            .into_iter()
            .chain([2500; 100])
        {
            let wait = backoff.next().unwrap().as_millis();
            assert!(
                (expected..=2 * expected).contains(&wait),
                "{wait} for {expected}"
            );
        }
        backoff.reset();
        assert!(backoff.next().unwrap() <= 2 * FIRST_WAIT);
    }
}
