//! One deadline for every answer of the API server.

use std::time::Duration;

use kube::Client;
use tower::service_fn;
use tower::timeout::Timeout;

/// How long the server may take to begin an answer: shorter than a lost connection takes to be noticed.
pub(crate) const ANSWER: Duration = Duration::from_secs(10);

/// A client whose requests fail when the API server does not begin to answer in time. That goes for the start of a watch
/// too, not for its events: kube's watcher starts a silent watch again. What hangs in the middle of a list is ended by
/// [`kube::Config::read_timeout`].
pub fn with_deadline(client: Client) -> Client {
    let namespace = client.default_namespace().to_owned();
    let send = service_fn(move |request| {
        let client = client.clone();
        async move { client.send(request).await }
    });
    Client::new(Timeout::new(send, ANSWER), namespace)
}
