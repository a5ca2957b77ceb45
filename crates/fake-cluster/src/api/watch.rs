//! Watch streams.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use futures::stream::{self, Stream};
use hyper::body::{Bytes, Frame};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Duration, Instant, sleep_until};

use super::Shared;
use super::call::Query;
use super::error::ApiError;
use super::json::{set, text};
use super::kinds::Kind;
use super::select::Selector;
use super::state::State;
use super::store::Change;

/// An open watch.
struct Open {
    shared: Arc<Shared>,
    wake: watch::Receiver<()>,
    kind: Kind,
    namespace: String,
    selector: Selector,
    /// Everything up to this version has been sent.
    cursor: u64,
    epoch: u64,
    deadline: Option<Instant>,
    queue: VecDeque<Value>,
    done: bool,
}

/// Starts a watch; the query says from where.
pub(crate) fn open(
    shared: &Arc<Shared>,
    state: &State,
    kind: Kind,
    namespace: &str,
    query: &Query,
    selector: Selector,
) -> Result<impl Stream<Item = Result<Frame<Bytes>, io::Error>> + Send + use<>, ApiError> {
    let parameter = |name: &str| query.get(name).map(String::as_str).unwrap_or_default();
    let from = parameter("resourceVersion");
    let initial = parameter("sendInitialEvents") == "true";
    let mut queue = VecDeque::new();
    let mut cursor = state.store.version();
    if initial || from.is_empty() || from == "0" {
        let found = state
            .store
            .list(&kind.res, namespace)
            .filter(|object| selector.matches(object));
        queue.extend(found.map(|object| event("ADDED", object)));
        if initial {
            let mut end = bookmark(&kind, cursor);
            let annotations = json!({"k8s.io/initial-events-end": "true"});
            set(
                &mut end,
                &["object", "metadata", "annotations"],
                Some(annotations),
            );
            queue.push_back(end);
        }
    } else {
        cursor = from.parse().map_err(|_| {
            ApiError::new(400, format!("resourceVersion: Invalid value: \"{from}\""))
        })?;
    }
    let seconds: Option<u64> = parameter("timeoutSeconds").parse().ok();
    let open = Open {
        wake: shared.changed.subscribe(),
        shared: shared.clone(),
        kind,
        namespace: namespace.to_owned(),
        selector,
        cursor,
        epoch: state.epoch,
        deadline: seconds.and_then(|s| Instant::now().checked_add(Duration::from_secs(s))),
        queue,
        done: false,
    };
    Ok(stream::unfold(open, next))
}

async fn next(mut open: Open) -> Option<(Result<Frame<Bytes>, io::Error>, Open)> {
    loop {
        if let Some(event) = open.queue.pop_front() {
            let line = Bytes::from(format!("{event}\n"));
            return Some((Ok(Frame::data(line)), open));
        }
        if open.done {
            return None;
        }
        // Marked as seen before looking, so that a change after the look wakes us.
        open.wake.borrow_and_update();
        if let Err(broken) = open.look() {
            open.done = true;
            return Some((Err(broken), open));
        }
        if open.queue.is_empty() && !open.done {
            open.wait().await;
        }
    }
}

impl Open {
    /// Queues what happened since the last look.
    fn look(&mut self) -> Result<(), io::Error> {
        let shared = self.shared.clone();
        let state = shared.lock();
        if !state.running {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionReset,
                "the fake API server was stopped",
            ));
        }
        if state.epoch != self.epoch {
            self.done = true;
            return Ok(());
        }
        let Some(changes) = state.store.changes(self.cursor) else {
            let expired = ApiError::new(410, format!("too old resource version: {}", self.cursor));
            self.queue
                .push_back(json!({"type": "ERROR", "object": expired.status()}));
            self.done = true;
            return Ok(());
        };
        let news: Vec<Value> = changes.filter_map(|change| self.relevant(change)).collect();
        self.queue.extend(news);
        self.cursor = state.store.version();
        Ok(())
    }

    /// The event that this watch sees of a change: leaving the selection looks like a deletion.
    fn relevant(&self, change: &Change) -> Option<Value> {
        let elsewhere = !self.namespace.is_empty() && change.namespace != self.namespace;
        if change.res != self.kind.res || elsewhere {
            return None;
        }
        let chosen = |object: &Option<Value>| {
            object
                .as_ref()
                .is_some_and(|object| self.selector.matches(object))
        };
        match (chosen(&change.old), chosen(&change.new)) {
            (true, true) => change.new.as_ref().map(|object| event("MODIFIED", object)),
            (false, true) => change.new.as_ref().map(|object| event("ADDED", object)),
            (true, false) => change.old.as_ref().map(|object| {
                let mut last = object.clone();
                let version = json!(change.version.to_string());
                set(&mut last, &["metadata", "resourceVersion"], Some(version));
                event("DELETED", &last)
            }),
            (false, false) => None,
        }
    }

    async fn wait(&mut self) {
        let timeout = async {
            match self.deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let ended = tokio::select! {
            // An error means that the server is gone for good.
            changed = self.wake.changed() => changed.is_err(),
            () = timeout => true,
        };
        self.done = self.done || ended;
    }
}

fn event(kind: &str, object: &Value) -> Value {
    debug_assert!(
        !text(object, "/metadata/resourceVersion").is_empty(),
        "stored objects have a version"
    );
    json!({"type": kind, "object": object})
}

fn bookmark(kind: &Kind, version: u64) -> Value {
    json!({"type": "BOOKMARK", "object": {
        "kind": kind.name, "apiVersion": kind.api_version(),
        "metadata": {"resourceVersion": version.to_string()}, "spec": {},
    }})
}
