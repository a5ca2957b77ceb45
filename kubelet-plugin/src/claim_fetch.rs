//! Reads claims from the API: few at a time, and again while the failure may pass.

use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::{Api, Client};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use divvy_claims::ClaimRef;

/// Reads at once: kube's connector speaks HTTP/1, so that each further one is a TLS handshake.
const AT_ONCE: usize = 8;
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Why a claim could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FetchError {
    /// There is no such claim (any more).
    #[error(
        "claim {0} is not in the API: it was deleted (the kubelet asks again for a pod that still needs it)"
    )]
    NotFound(String),
    /// We are not allowed to read claims.
    #[error(
        "claim {0} may not be read: the plugin's ServiceAccount needs \"get\" on resourceclaims.resource.k8s.io"
    )]
    Forbidden(String, #[source] Box<kube::Error>),
    /// The API server did not give it in time.
    #[error("claim {claim} could not be read from the API within {} s, {attempts} attempts", within.as_secs())]
    Unavailable {
        claim: String,
        within: Duration,
        attempts: u32,
        #[source]
        last: Option<Box<kube::Error>>,
    },
    /// An unprepare came meanwhile.
    #[error("prepare of claim {0} was given up: it is being unprepared")]
    Cancelled(String),
}

impl FetchError {
    /// A short stable name, for metrics.
    pub(crate) fn category(&self) -> &'static str {
        match self {
            Self::NotFound(_) => "not-found",
            Self::Forbidden(..) => "forbidden",
            Self::Unavailable { .. } => "api",
            Self::Cancelled(_) => "cancelled",
        }
    }
}

/// Reads claims.
pub(crate) struct ClaimFetcher {
    client: Client,
    slots: Semaphore,
    each: Duration,
}

impl ClaimFetcher {
    /// `each`: how long one attempt may take.
    pub(crate) fn new(client: Client, each: Duration) -> Self {
        Self { client, slots: Semaphore::new(AT_ONCE), each }
    }

    /// How long one question may take.
    pub(crate) fn deadline(&self) -> Duration {
        self.each
    }

    /// The claim as it is now; tries until `until` while the failure may pass.
    pub(crate) async fn get(
        &self,
        claim: &ClaimRef,
        until: Instant,
        cancel: &CancellationToken,
    ) -> Result<ResourceClaim, FetchError> {
        let begun = Instant::now();
        let mut attempts = 0;
        let mut last = None;
        tokio::select! {
            biased;
            () = cancel.cancelled() => Err(FetchError::Cancelled(claim.to_string())),
            found = self.attempts(claim, &mut attempts, &mut last) => found,
            () = sleep_until(until) => {
                let within = begun.elapsed();
                Err(FetchError::Unavailable { claim: claim.to_string(), within, attempts, last })
            }
        }
    }

    /// The claim, or `None` if it is gone; one attempt. For reconcile, which comes again by itself.
    pub(crate) async fn look(&self, claim: &ClaimRef) -> Result<Option<ResourceClaim>, FetchError> {
        let until = Instant::now() + self.each;
        match self.get(claim, until, &CancellationToken::new()).await {
            Ok(found) => Ok(Some(found)),
            Err(FetchError::NotFound(_)) => Ok(None),
            Err(other) => Err(other),
        }
    }

    async fn attempts(
        &self,
        claim: &ClaimRef,
        attempts: &mut u32,
        last: &mut Option<Box<kube::Error>>,
    ) -> Result<ResourceClaim, FetchError> {
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &claim.namespace);
        let mut pause = FIRST_PAUSE;
        loop {
            *attempts += 1;
            let answer = match self.slots.acquire().await {
                Ok(_slot) => timeout(self.each, api.get(&claim.name)).await,
                // Nobody closes it.
                Err(_closed) => return Err(FetchError::Cancelled(claim.to_string())),
            };
            match answer {
                Ok(Ok(found)) => return Ok(found),
                Ok(Err(kube::Error::Api(status))) if status.code == 404 => {
                    return Err(FetchError::NotFound(claim.to_string()));
                }
                Ok(Err(error)) if forbidden(&error) => {
                    return Err(FetchError::Forbidden(claim.to_string(), Box::new(error)));
                }
                Ok(Err(error)) => {
                    tracing::debug!(claim = %claim, error = %crate::chain(&error), "claim not read, trying again");
                    *last = Some(Box::new(error));
                }
                Err(_late) => tracing::debug!(claim = %claim, "the API server does not answer, trying again"),
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }
}

fn forbidden(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 403)
}
