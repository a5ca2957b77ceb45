//! One deadline for every answer of the API server.

use std::time::Duration;

use kube::Client;
use tokio::time::timeout;
use tower::{BoxError, service_fn};

/// How long the API server may take to begin an answer, usually: shorter than a lost connection takes to be noticed.
pub const ANSWER: Duration = Duration::from_secs(10);

/// The API server did not begin to answer in time.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("no answer in {0:?}; it may have happened all the same")]
pub struct NoAnswer(Duration);

/// A client whose requests fail with [`NoAnswer`] when the API server does not begin to answer within `limit`. That goes
/// for the start of a watch too, not for its events: kube's watcher starts a silent watch again. What stops in the middle
/// of an answer is ended by [`kube::Config::read_timeout`].
pub fn with_deadline(client: Client, limit: Duration) -> Client {
    let namespace = client.default_namespace().to_owned();
    let send = service_fn(move |request| {
        let client = client.clone();
        async move {
            let answer = timeout(limit, client.send(request)).await.map_err(|_| NoAnswer(limit))?;
            Ok::<_, BoxError>(answer?)
        }
    });
    Client::new(send, namespace)
}
