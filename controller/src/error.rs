//! Why a pool could not be published, for the log and the status.

use std::error::Error as _;

use divvy_offer::LimitError;
use kube::runtime::watcher;

use crate::deadline::NoAnswer;

/// A failed attempt to publish.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The pool breaks a limit of the API. Not tried again until there is another pool.
    #[error(transparent)]
    Invalid(#[from] LimitError),
    /// The API server answered with an error, or could not be reached.
    #[error("cannot {verb} {object}: {}{}", reason(.error), hint(verb, .error))]
    Api {
        /// Operation that was tried.
        verb: &'static str,
        /// On what.
        object: String,
        /// The answer; shown in full, so not a source.
        error: kube::Error,
    },
    /// The Node has no UID: not a Node as API servers make them.
    #[error("Node {0} has no UID")]
    NoUid(String),
    /// Another object has the name of our slice.
    #[error(
        "ResourceSlice {name} belongs to driver {driver} on node {node}, not to this node: delete it with \
         `kubectl delete resourceslice {name}`"
    )]
    NameTaken {
        name: String,
        driver: String,
        node: String,
    },
}

impl PublishError {
    /// For `map_err`, with what was tried on what.
    pub(crate) fn of(
        verb: &'static str,
        object: impl Into<String>,
    ) -> impl FnOnce(kube::Error) -> Self {
        move |error| Self::Api {
            verb,
            object: object.into(),
            error,
        }
    }

    pub(crate) fn watch(objects: &'static str, error: watcher::Error) -> Self {
        match error {
            watcher::Error::InitialListFailed(error) => Self::of("list", objects)(error),
            watcher::Error::WatchStartFailed(error) | watcher::Error::WatchFailed(error) => {
                Self::of("watch", objects)(error)
            }
            watcher::Error::WatchError(status) => {
                Self::of("watch", objects)(kube::Error::Api(status))
            }
            error @ watcher::Error::NoResourceVersion => {
                Self::of("watch", objects)(kube::Error::Service(error.into()))
            }
        }
    }

    /// Returns true if the same attempt may succeed later.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::Invalid(_))
    }

    /// The HTTP status of the answer, if there was one.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Api {
                error: kube::Error::Api(status),
                ..
            } => Some(status.code),
            _ => None,
        }
    }
}

/// The server's own words, or the whole chain of what went wrong on the way to it.
fn reason(error: &kube::Error) -> String {
    match error {
        kube::Error::Api(status) => return status.message.clone(),
        kube::Error::Service(error) if error.is::<NoAnswer>() => return error.to_string(),
        _ => {}
    }
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // kube's errors repeat their source.
        if !text.contains(&next) {
            text = format!("{text}: {next}");
        }
        cause = error.source();
    }
    text
}

/// Returns the remedy for an answer of the API server.
fn hint(verb: &str, error: &kube::Error) -> &'static str {
    let kube::Error::Api(status) = error else {
        return "";
    };
    match (status.code, verb) {
        (401, _) => " (is the ServiceAccount token valid?)",
        (403, _) => {
            " (the ServiceAccount needs get, list, watch, create, update and delete on resourceslices and get on \
             nodes, and the admission policy must allow this node)"
        }
        (404, "get") => " (--node-name must be the name of the Node object)",
        (404, "list" | "create" | "watch") => {
            " (is resource.k8s.io/v1 served? It needs Kubernetes 1.34 or later)"
        }
        _ => "",
    }
}
