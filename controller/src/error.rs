//! Why a pool could not be published, for the log and the status.

use std::error::Error as _;
use std::future::Future;
use std::time::Duration;

use divvy_offer::LimitError;
use tokio::time::timeout;

/// Waiting for one answer. Shorter than a lost connection takes to be noticed; the client retries 429 and 503 within.
const ANSWER: Duration = Duration::from_secs(10);

/// A failed attempt to publish.
#[derive(Debug, thiserror::Error)]
pub enum PublishError {
    /// The pool breaks a limit of the API. Not tried again until there is another pool.
    #[error(transparent)]
    Invalid(#[from] LimitError),
    /// The API server answered with an error, or could not be reached.
    #[error("cannot {verb} {object}: {}{}", reason(.error), hint(verb, .error))]
    Api {
        /// What was tried.
        verb: &'static str,
        /// On what.
        object: String,
        /// The answer; told in full, so not a source.
        error: kube::Error,
    },
    /// The API server did not answer.
    #[error("cannot {verb} {object}: no answer in {limit:?}; it may have happened all the same")]
    NoAnswer {
        /// What was tried.
        verb: &'static str,
        /// On what.
        object: String,
        /// How long was waited.
        limit: Duration,
    },
    /// The Node has no UID: not a Node as API servers make them.
    #[error("Node {0} has no UID")]
    NoUid(String),
    /// Somebody has a slice of our name.
    #[error(
        "ResourceSlice {name} belongs to driver {driver} on node {node}, not to this node: delete it with \
         `kubectl delete resourceslice {name}`"
    )]
    NameTaken {
        /// The name.
        name: String,
        /// Its driver.
        driver: String,
        /// Its node.
        node: String,
    },
}

impl PublishError {
    /// Whether the same attempt may succeed later.
    pub fn is_retryable(&self) -> bool {
        !matches!(self, Self::Invalid(_))
    }

    /// The HTTP status of the answer, if there was one.
    pub fn code(&self) -> Option<u16> {
        match self {
            Self::Api { error: kube::Error::Api(status), .. } => Some(status.code),
            _ => None,
        }
    }
}

/// The server's own words, or the whole chain of what went wrong on the way to it.
fn reason(error: &kube::Error) -> String {
    if let kube::Error::Api(status) = error {
        return status.message.clone();
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

/// What helps with an answer of the API server.
fn hint(verb: &str, error: &kube::Error) -> &'static str {
    let kube::Error::Api(status) = error else { return "" };
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

/// Waits for an answer of the API server, but not for ever.
pub(crate) async fn answered<T>(
    verb: &'static str,
    object: impl Fn() -> String,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, PublishError> {
    match timeout(ANSWER, call).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => Err(PublishError::Api { verb, object: object(), error }),
        Err(_) => Err(PublishError::NoAnswer { verb, object: object(), limit: ANSWER }),
    }
}
