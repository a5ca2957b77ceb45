//! Looks at claims now and then, and evicts the pods that are due.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_api::names::{self, annotations};
use divvy_controller::{budget, evict};
use divvy_telemetry::chain;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::PostParams;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::due::{Candidate, Reason, candidates};
use crate::limits::{Allowance, Departure, Limits};
use crate::metrics::{Metrics, Outcome};
use crate::verdict::{Kept, claim_names, verdict};
use crate::{Claims, Clock, Config};

const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;
const SERVER_ERRORS: u16 = 500;

/// Attempts to write the Lease, which this instance renews at the same time.
const ATTEMPTS: usize = 5;

/// A pod cannot be evicted now.
#[derive(Debug, thiserror::Error)]
enum ReclaimError {
    #[error(transparent)]
    Api(#[from] kube::Error),
    #[error(
        "annotation {} of Lease {lease} is not what this controller writes: remove it",
        annotations::DEPARTURES
    )]
    Departures {
        lease: String,
        source: serde_json::Error,
    },
}

/// Reads and evicts, with everything that is needed for that.
pub(crate) struct Reclaimer {
    client: Client,
    /// The Lease that this instance must hold to act, which keeps the departures of the last
    /// minute.
    leases: Api<Lease>,
    lease: String,
    identity: String,
    driver: String,
    dry_run: bool,
    every: Duration,
    claims: Store<ResourceClaim>,
    leads: watch::Receiver<Option<Duration>>,
    clock: Clock,
    limits: Limits,
    metrics: Metrics,
    recorder: Recorder,
    /// Pods that a dry run has reported, by UID and reason.
    reported: BTreeSet<(String, Reason)>,
}

impl Reclaimer {
    pub(crate) fn new(
        config: &Config,
        client: Client,
        claims: Store<ResourceClaim>,
        leads: watch::Receiver<Option<Duration>>,
        clock: Clock,
        metrics: Metrics,
    ) -> Self {
        let reporter = Reporter {
            controller: names::CONTROLLER.to_owned(),
            instance: Some(config.identity.clone()),
        };
        Self {
            recorder: Recorder::new(client.clone(), reporter),
            leases: Api::namespaced(client.clone(), &config.namespace),
            client,
            lease: config.lease.clone(),
            identity: config.identity.clone(),
            driver: config.driver.clone(),
            dry_run: config.dry_run,
            every: config.look,
            claims,
            leads,
            clock,
            limits: Limits::new(config.per_minute),
            metrics,
            reported: BTreeSet::new(),
        }
    }

    pub(crate) async fn run(mut self) {
        let mut ticks = interval(self.every);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let claims: Claims = self.claims.state();
            let due = candidates(
                claims.iter().map(|claim| &**claim),
                &self.driver,
                Timestamp::now(),
            );
            self.act(due).await;
        }
    }

    fn leads(&self) -> bool {
        self.leads
            .borrow()
            .is_some_and(|until| self.clock.now() < until)
    }

    async fn act(&mut self, due: Vec<Candidate>) {
        if !self.leads() {
            self.metrics.show(&[]);
            return;
        }
        self.metrics.show(&due);
        let still: BTreeSet<_> = due
            .iter()
            .map(|candidate| (candidate.uid.clone(), candidate.reason))
            .collect();
        self.reported.retain(|one| still.contains(one));
        // Evictions by another instance count before anything is read of pods.
        if !due.is_empty() && !self.dry_run {
            match self.recall().await {
                Ok(Some(_)) => {}
                Ok(None) => return,
                Err(error) => {
                    let error = chain(&error);
                    tracing::warn!(error, "failed to read what was evicted; nothing is evicted");
                    return;
                }
            }
        }
        for candidate in due {
            match self.limits.allows(&candidate, self.clock.now()) {
                Allowance::Yes => {}
                Allowance::NotThis => continue,
                Allowance::None => return,
            }
            if let Err(error) = self.reclaim(&candidate).await {
                let (pod, namespace) = (&candidate.pod, &candidate.namespace);
                tracing::warn!(
                    pod,
                    namespace,
                    error = chain(&error),
                    "failed to evict a pod"
                );
                self.metrics.count(candidate.reason, Outcome::Failed);
                self.limits.not_again(&candidate, self.clock.now());
            }
        }
    }

    /// Evicts a pod, if what is read of it now allows that.
    async fn reclaim(&mut self, candidate: &Candidate) -> Result<(), ReclaimError> {
        // Everything that decides is read now, not taken from the watch, which may be behind.
        let pods = Api::<Pod>::namespaced(self.client.clone(), &candidate.namespace);
        let Some(pod) = pods.get_opt(&candidate.pod).await? else {
            return self.keep(candidate, &Kept::Gone).await;
        };
        let namespace = Api::<Namespace>::all(self.client.clone())
            .get(&candidate.namespace)
            .await?;
        let claims = self.claims_of(&pod, &candidate.namespace).await?;
        if let Err(kept) = verdict(
            candidate,
            &pod,
            &namespace,
            &claims,
            &self.driver,
            Timestamp::now(),
        ) {
            return self.keep(candidate, &kept).await;
        }
        if self.dry_run {
            self.limits.not_again(candidate, self.clock.now());
            if self
                .reported
                .insert((candidate.uid.clone(), candidate.reason))
            {
                self.done(candidate, &pod, Outcome::DryRun).await;
            }
            return Ok(());
        }
        // The eviction is counted before it is asked for: an instance that ends in between leaves
        // one too many behind, not one too few.
        let count = |limits: &mut Limits, now, clock| {
            let may = limits.allows(candidate, now) == Allowance::Yes;
            if may {
                limits.evicted(candidate, now, clock);
            }
            may
        };
        if !self.record(count).await? {
            return Ok(());
        }
        // The requests took time, and another instance may have the Lease by now.
        if !self.leads() {
            self.stays(candidate).await;
            return Ok(());
        }
        let answer = evict(&pods, &candidate.pod, &candidate.uid).await;
        if answer.as_ref().is_err_and(|error| !is_uncertain(error)) {
            self.stays(candidate).await;
        }
        self.limits.not_again(candidate, self.clock.now());
        let outcome = match answer {
            Ok(()) => Outcome::Evicted,
            Err(kube::Error::Api(status)) if budget(&status).is_some() => Outcome::Refused,
            Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => {
                return self.keep(candidate, &Kept::Gone).await;
            }
            Err(error) => return Err(error.into()),
        };
        self.done(candidate, &pod, outcome).await;
        Ok(())
    }

    /// Reads the Lease and the departures that it keeps. `None` if this instance does not hold it.
    async fn recall(&mut self) -> Result<Option<Lease>, ReclaimError> {
        let Some(lease) = self.leases.get_opt(&self.lease).await? else {
            return Ok(None);
        };
        let holder = lease
            .spec
            .as_ref()
            .and_then(|spec| spec.holder_identity.as_ref());
        if holder != Some(&self.identity) {
            return Ok(None);
        }
        let stored = lease.metadata.annotations.as_ref();
        let stored = stored.and_then(|all| all.get(annotations::DEPARTURES));
        let stored: Option<Vec<Departure>> = stored
            .map(|text| serde_json::from_str(text))
            .transpose()
            .map_err(|source| self.unreadable(source))?;
        let now = self.clock.now();
        self.limits
            .learn(stored.unwrap_or_default(), now, Timestamp::now());
        Ok(Some(lease))
    }

    fn unreadable(&self, source: serde_json::Error) -> ReclaimError {
        ReclaimError::Departures {
            lease: self.lease.clone(),
            source,
        }
    }

    /// Changes the departures in the Lease. Returns whether that was done: not if `change` refuses,
    /// or if this instance does not hold the Lease any more.
    ///
    /// The write has the version that was read, so that of two instances that believe they hold the
    /// Lease one is refused. It is tried again after a conflict, because this instance renews the
    /// Lease meanwhile.
    async fn record(
        &mut self,
        change: impl Fn(&mut Limits, Duration, Timestamp) -> bool,
    ) -> Result<bool, ReclaimError> {
        for _ in 0..ATTEMPTS {
            let Some(mut lease) = self.recall().await? else {
                return Ok(false);
            };
            let (now, mut changed) = (self.clock.now(), self.limits.clone());
            if !change(&mut changed, now, Timestamp::now()) {
                return Ok(false);
            }
            let text = serde_json::to_string(&changed.stored(now))
                .map_err(|source| self.unreadable(source))?;
            let all = lease.metadata.annotations.get_or_insert_default();
            all.insert(annotations::DEPARTURES.to_owned(), text);
            let written = self
                .leases
                .replace(&self.lease, &PostParams::default(), &lease)
                .await;
            match written {
                Ok(_) => {
                    self.limits = changed;
                    return Ok(true);
                }
                Err(kube::Error::Api(status)) if status.code == CONFLICT => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(false)
    }

    /// Takes it back that a pod was counted as evicted. If that fails, it counts for a minute.
    async fn stays(&mut self, candidate: &Candidate) {
        let take_back = |limits: &mut Limits, _, _| {
            limits.stays(candidate);
            true
        };
        if let Err(error) = self.record(take_back).await {
            let error = chain(&error);
            tracing::warn!(error, "failed to take back that a pod was evicted");
        }
    }

    /// Returns all claims of a pod that are there.
    async fn claims_of(
        &self,
        pod: &Pod,
        namespace: &str,
    ) -> Result<Vec<ResourceClaim>, kube::Error> {
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), namespace);
        let mut claims = Vec::new();
        for name in claim_names(pod) {
            claims.extend(api.get_opt(&name).await?);
        }
        Ok(claims)
    }

    /// Leaves a pod alone for a while.
    async fn keep(&mut self, candidate: &Candidate, kept: &Kept) -> Result<(), ReclaimError> {
        let Candidate {
            pod,
            namespace,
            claim,
            ..
        } = candidate;
        tracing::debug!(
            pod,
            namespace,
            claim,
            why = kept.why(),
            "a pod is not evicted"
        );
        let is_leaving = matches!(kept, Kept::Gone | Kept::Ending);
        if !is_leaving || candidate.reason != Reason::OverGrant {
            self.limits.not_again(candidate, self.clock.now());
        } else if self.dry_run {
            self.limits
                .ending(candidate, self.clock.now(), Timestamp::now());
        } else {
            // Looking again shows for how long it is ending.
            let end = |limits: &mut Limits, now, clock| {
                limits.ending(candidate, now, clock);
                true
            };
            self.record(end).await?;
        }
        Ok(())
    }

    async fn done(&self, candidate: &Candidate, pod: &Pod, outcome: Outcome) {
        let Candidate {
            reason,
            namespace,
            claim,
            ..
        } = candidate;
        self.metrics.count(*reason, outcome);
        let cause = match reason {
            Reason::OverGrant => format!(
                "the pods of its claim {claim} use so much more GPU memory than granted that others cannot get theirs"
            ),
            Reason::Idle => {
                format!("nothing has used the devices of its claims ({claim}) for a long time")
            }
        };
        let (type_, name, note) = match outcome {
            Outcome::Evicted => (
                EventType::Warning,
                "GpuReclaimed",
                format!("evicted: {cause}"),
            ),
            Outcome::Refused => (
                EventType::Normal,
                "GpuReclaimRefused",
                format!("a disruption budget forbids its eviction: {cause}"),
            ),
            _ => (
                EventType::Normal,
                "GpuReclaimDryRun",
                format!("would be evicted without the dry run: {cause}"),
            ),
        };
        tracing::info!(pod = candidate.pod, namespace, "{note}");
        let event = Event {
            type_,
            reason: name.to_owned(),
            note: Some(note),
            action: "Evict".to_owned(),
            secondary: None,
        };
        if let Err(error) = self.recorder.publish(&event, &pod.object_ref(&())).await {
            tracing::warn!(
                pod = candidate.pod,
                namespace,
                error = chain(&error),
                "failed to write an Event"
            );
        }
    }
}

/// Returns whether an eviction may have been done in spite of the error: the server, or a proxy
/// before it, failed in the middle.
fn is_uncertain(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code >= SERVER_ERRORS,
        _ => true,
    }
}
