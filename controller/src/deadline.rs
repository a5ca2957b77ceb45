//! A deadline for every answer of the API server.

use std::time::Duration;

use kube::Client;
use tokio::time::timeout;
use tower::{BoxError, service_fn};

use crate::ServerClock;
use crate::shallow::shallow;

/// Usual time within which the API server has to begin an answer: shorter than a lost connection
/// takes to be noticed.
pub const ANSWER: Duration = Duration::from_secs(10);

/// The API server did not begin to answer in time.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("no answer in {0:?}; it may have happened all the same")]
pub struct NoAnswer(Duration);

/// Makes a client whose requests fail with [`NoAnswer`] when the API server does not begin to
/// answer within `limit`. The limit holds for the start of a watch too, not for its events: kube's
/// watcher starts a silent watch again. An answer that stops in the middle is ended by
/// [`kube::Config::read_timeout`]. Each answer sets the clock, and is made [`shallow`].
pub fn with_deadline(client: Client, limit: Duration, clock: ServerClock) -> Client {
    let namespace = client.default_namespace().to_owned();
    let send = service_fn(move |request| {
        let (client, clock) = (client.clone(), clock.clone());
        async move {
            // Only the head of the answer is timed: the body of a watch lasts for minutes.
            let answer = timeout(limit, client.send(request))
                .await
                .map_err(|_| NoAnswer(limit))??;
            clock.read(answer.headers());
            Ok::<_, BoxError>(shallow(answer))
        }
    });
    Client::new(send, namespace)
}
