//! Reads claims from the API: few at a time, and again while the failure may pass.

use std::sync::Mutex;
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::client::ClientBuilder;
use kube::{Api, Client};
use tokio::runtime::{Handle, Runtime};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;
use tower::util::MapResponseLayer;

use divvy_claims::ClaimRef;
use divvy_controller::shallow;

use crate::claims::claim::ClaimError;

/// Reads at once: kube's connector speaks HTTP/1, so that each further one is a TLS handshake.
const AT_ONCE: usize = 8;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// The connection by which claims are read.
pub(crate) enum Connect {
    /// Through connections of their own, of which each is only used by the thread that reads.
    Own(Box<kube::Config>),
    /// Through the plugin's client.
    Shared(Client),
}

/// Reads claims on the thread of the caller: the thread that carries a claim out sends the request,
/// waits and decodes the answer by itself. Through the plugin's runtime every read was handed to
/// four tasks and back.
pub(crate) struct ClaimFetcher {
    connect: Connect,
    idle: Mutex<Vec<Reader>>,
    slots: Semaphore,
    each: Duration,
    /// Timers of callers that wait without a reader.
    runtime: Handle,
}

/// A client whose connections are driven by a runtime of its own, on the thread that uses it.
struct Reader {
    /// Always there until it is dropped.
    runtime: Option<Runtime>,
    client: Client,
}

impl Drop for Reader {
    fn drop(&mut self) {
        // A runtime that is simply dropped waits, which panics in an async context.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl ClaimFetcher {
    /// `each`: how long one attempt may take. To be called in the plugin's runtime.
    pub(crate) fn new(connect: Connect, each: Duration) -> Self {
        Self {
            connect,
            idle: Mutex::default(),
            slots: Semaphore::new(AT_ONCE),
            each,
            runtime: Handle::current(),
        }
    }

    /// Reads the claim as it is now, or `None` if it is gone; tries until `until` while the failure
    /// may pass. Blocks the thread, which must be none of the runtime's workers.
    pub(crate) fn get(
        &self,
        claim: &ClaimRef,
        until: Instant,
        cancel: &CancellationToken,
    ) -> Result<Option<ResourceClaim>, ClaimError> {
        let begun = Instant::now();
        let (mut attempts, mut last, mut pause) = (0, String::new(), FIRST_PAUSE);
        while !cancel.is_cancelled() {
            match self.attempt(claim, until, cancel) {
                Attempt::Found(found) => return Ok(Some(*found)),
                Attempt::Failed(kube::Error::Api(status)) if status.code == 404 => return Ok(None),
                // A missing right is not tried again: only a person adds it.
                Attempt::Failed(error) if forbidden(&error) => {
                    let error = crate::chain(&error);
                    let message = format!(
                        "reading claim {claim} is forbidden: the plugin's ServiceAccount needs \"get\" on resourceclaims.resource.k8s.io: {error}"
                    );
                    return Err(ClaimError::new("forbidden", message));
                }
                Attempt::Failed(error) => {
                    attempts += 1;
                    let error = crate::chain(&error);
                    tracing::debug!(%claim, error, "failed to read the claim, will retry");
                    last = format!(": {error}");
                }
                Attempt::Late => attempts += 1,
                Attempt::NoTime => {}
            }
            if Instant::now() >= until {
                let within = begun.elapsed().as_secs();
                let message = if attempts == 0 {
                    format!(
                        "no time of this call was left to read claim {claim} from the API (the kubelet tries again)"
                    )
                } else {
                    format!(
                        "failed to read claim {claim} from the API within {within} s, in {attempts} attempts{last}"
                    )
                };
                return Err(ClaimError::new("api", message));
            }
            let _ = self
                .runtime
                .block_on(unless_over(until, cancel, tokio::time::sleep(pause)));
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
        let message =
            format!("prepare of claim {claim} was cancelled because the claim is being unprepared");
        Err(ClaimError::new("cancelled", message))
    }

    /// Reads like `get`, with one attempt and not longer than `within`: for callers that retry by
    /// themselves.
    pub(crate) fn look(
        &self,
        claim: &ClaimRef,
        within: Duration,
    ) -> Result<Option<ResourceClaim>, String> {
        let until = Instant::now() + self.each.min(within);
        self.get(claim, until, &CancellationToken::new())
            .map_err(|error| error.message)
    }

    fn attempt(&self, claim: &ClaimRef, until: Instant, cancel: &CancellationToken) -> Attempt {
        // Usually there is one. Else the plugin's runtime drives the wait, since a reader with a
        // runtime of its own is taken only with a slot.
        let _slot = match self.slots.try_acquire() {
            Ok(slot) => slot,
            // The semaphore is never closed.
            Err(_) => match self
                .runtime
                .block_on(unless_over(until, cancel, self.slots.acquire()))
            {
                Some(Ok(slot)) => slot,
                Some(Err(_)) | None => return Attempt::NoTime,
            },
        };
        let reader = match self.reader() {
            Ok(reader) => reader,
            Err(error) => return Attempt::Failed(error),
        };
        let api = Api::<ResourceClaim>::namespaced(reader.client.clone(), &claim.namespace);
        let answer = reader.runtime.as_ref().map(|runtime| {
            runtime.block_on(unless_over(
                until,
                cancel,
                timeout(self.each, api.get(&claim.name)),
            ))
        });
        // Given back whatever the answer is: the client connects again by itself.
        crate::lock(&self.idle).push(reader);
        match answer.flatten() {
            Some(Ok(Ok(found))) => Attempt::Found(Box::new(found)),
            Some(Ok(Err(error))) => Attempt::Failed(error),
            Some(Err(_late)) => Attempt::Late,
            None => Attempt::NoTime,
        }
    }

    /// A reader for one attempt. There are never more than slots.
    fn reader(&self) -> Result<Reader, kube::Error> {
        if let Some(reader) = crate::lock(&self.idle).pop() {
            return Ok(reader);
        }
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| kube::Error::Service(error.into()))?;
        let client = match &self.connect {
            Connect::Own(config) => {
                // Making a client spawns a worker, which must run in the reader's own runtime.
                let _entered = runtime.enter();
                ClientBuilder::try_from(config.as_ref().clone())?
                    .with_layer(&MapResponseLayer::new(shallow))
                    .build()
            }
            Connect::Shared(client) => client.clone(),
        };
        Ok(Reader {
            runtime: Some(runtime),
            client,
        })
    }
}

/// The result of one attempt.
enum Attempt {
    Found(Box<ResourceClaim>),
    Failed(kube::Error),
    /// No answer in the time of one attempt.
    Late,
    /// The call's time was over, or it was cancelled.
    NoTime,
}

/// Runs `work`, unless the time is over or the call is cancelled before it ends.
async fn unless_over<T>(
    until: Instant,
    cancel: &CancellationToken,
    work: impl Future<Output = T>,
) -> Option<T> {
    tokio::select! {
        biased;
        () = cancel.cancelled() => None,
        done = work => Some(done),
        () = sleep_until(until) => None,
    }
}

fn forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403)
}

#[cfg(test)]
mod tests {
    use divvy_fake_cluster::FakeApi;

    use super::*;

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_call_without_time_says_so_and_counts_no_attempts() {
        let connect = Connect::Shared(FakeApi::new().client());
        let fetcher = ClaimFetcher::new(connect, Duration::from_secs(10));
        let claim = ClaimRef {
            uid: "uid-c".parse().unwrap(),
            namespace: "default".to_owned(),
            name: "c".to_owned(),
        };
        // All are being used, as when many claims come at once.
        let slots = u32::try_from(AT_ONCE).unwrap();
        let busy = fetcher.slots.try_acquire_many(slots).unwrap();
        busy.forget();
        let asked = move || fetcher.get(&claim, Instant::now(), &CancellationToken::new());
        let error = tokio::task::spawn_blocking(asked).await.unwrap();
        let text = error.unwrap_err().message;
        assert!(text.starts_with("no time of this call was left"), "{text}");
    }
}
