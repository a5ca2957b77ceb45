//! Looks at claims now and then, and evicts the pods that are due.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_api::names;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::policy::v1::Eviction;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{DeleteOptions, ObjectMeta, Preconditions, Status};
use kube::api::PostParams;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use kube::runtime::reflector::Store;
use kube::{Api, Client, Resource};
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use crate::due::{Candidate, Reason, candidates};
use crate::limits::{Allowance, Limits};
use crate::metrics::{Metrics, Outcome};
use crate::verdict::{Kept, claim_names, verdict};
use crate::{Claims, Clock, Config, chain};

const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;
const TOO_MANY_REQUESTS: u16 = 429;
const GATEWAY_TIMEOUT: u16 = 504;

/// Everything that is needed to act.
pub(crate) struct Reclaimer {
    client: Client,
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
        let reporter =
            Reporter { controller: names::CONTROLLER.to_owned(), instance: Some(config.identity.clone()) };
        Self {
            recorder: Recorder::new(client.clone(), reporter),
            client,
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
            let due = candidates(claims.iter().map(|claim| &**claim), &self.driver, Timestamp::now());
            self.act(due).await;
        }
    }

    fn leads(&self) -> bool {
        self.leads.borrow().is_some_and(|until| self.clock.now() < until)
    }

    async fn act(&mut self, due: Vec<Candidate>) {
        if !self.leads() {
            self.metrics.show(&[]);
            return;
        }
        self.metrics.show(&due);
        let still: BTreeSet<_> =
            due.iter().map(|candidate| (candidate.uid.clone(), candidate.reason)).collect();
        self.reported.retain(|one| still.contains(one));
        for candidate in due {
            match self.limits.allows(&candidate, self.clock.now()) {
                Allowance::Yes => {}
                Allowance::NotThis => continue,
                Allowance::None => return,
            }
            if let Err(error) = self.reclaim(&candidate).await {
                let (pod, namespace) = (&candidate.pod, &candidate.namespace);
                tracing::warn!(pod, namespace, error = chain(&error), "failed to evict a pod");
                self.metrics.count(candidate.reason, Outcome::Failed);
                self.limits.not_again(&candidate, self.clock.now());
            }
        }
    }

    /// Evicts a pod, if what is read of it now allows that.
    async fn reclaim(&mut self, candidate: &Candidate) -> Result<(), kube::Error> {
        let pods = Api::<Pod>::namespaced(self.client.clone(), &candidate.namespace);
        let Some(pod) = pods.get_opt(&candidate.pod).await? else {
            self.keep(candidate, &Kept::Gone);
            return Ok(());
        };
        let namespace = Api::<Namespace>::all(self.client.clone()).get(&candidate.namespace).await?;
        let claims = self.claims_of(&pod, &candidate.namespace).await?;
        if let Err(kept) = verdict(candidate, &pod, &namespace, &claims, &self.driver, Timestamp::now()) {
            self.keep(candidate, &kept);
            return Ok(());
        }
        if self.dry_run {
            self.limits.not_again(candidate, self.clock.now());
            if self.reported.insert((candidate.uid.clone(), candidate.reason)) {
                self.done(candidate, &pod, Outcome::DryRun).await;
            }
            return Ok(());
        }
        // The reads took time.
        if !self.leads() {
            return Ok(());
        }
        let outcome = match evict(&pods, candidate).await {
            Ok(()) => {
                self.limits.evicted(candidate, self.clock.now());
                Outcome::Evicted
            }
            Err(kube::Error::Api(status)) if status.code == TOO_MANY_REQUESTS => {
                self.limits.not_again(candidate, self.clock.now());
                Outcome::Refused
            }
            Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => {
                self.keep(candidate, &Kept::Gone);
                return Ok(());
            }
            Err(error) => {
                if is_uncertain(&error) {
                    self.limits.evicted(candidate, self.clock.now());
                }
                return Err(error);
            }
        };
        self.done(candidate, &pod, outcome).await;
        Ok(())
    }

    /// All claims of a pod that are there.
    async fn claims_of(&self, pod: &Pod, namespace: &str) -> Result<Vec<ResourceClaim>, kube::Error> {
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), namespace);
        let mut claims = Vec::new();
        for name in claim_names(pod) {
            claims.extend(api.get_opt(&name).await?);
        }
        Ok(claims)
    }

    fn keep(&mut self, candidate: &Candidate, kept: &Kept) {
        let Candidate { pod, namespace, claim, .. } = candidate;
        tracing::debug!(pod, namespace, claim, why = kept.why(), "a pod is not evicted");
        let now = self.clock.now();
        match kept {
            // How long it takes to end is seen by looking again.
            Kept::Gone | Kept::Ending if candidate.reason == Reason::OverGrant => {
                self.limits.ending(candidate, now);
            }
            _ => self.limits.not_again(candidate, now),
        }
    }

    async fn done(&self, candidate: &Candidate, pod: &Pod, outcome: Outcome) {
        let Candidate { reason, namespace, claim, .. } = candidate;
        self.metrics.count(*reason, outcome);
        let cause = match reason {
            Reason::OverGrant => format!(
                "the pods of its claim {claim} use so much more GPU memory than granted that others cannot get theirs"
            ),
            Reason::Idle => format!("nothing has used the devices of its claims ({claim}) for a long time"),
        };
        let (type_, name, note) = match outcome {
            Outcome::Evicted => (EventType::Warning, "GpuReclaimed", format!("evicted: {cause}")),
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
            tracing::warn!(pod = candidate.pod, namespace, error = chain(&error), "failed to write an Event");
        }
    }
}

/// Whether what was asked for may have been done.
fn is_uncertain(error: &kube::Error) -> bool {
    match error {
        kube::Error::Api(status) => status.code == GATEWAY_TIMEOUT,
        _ => true,
    }
}

/// `Api::evict` of kube 5.0 sends its options in a field that the API server does not know, and drops without a word.
async fn evict(pods: &Api<Pod>, candidate: &Candidate) -> Result<(), kube::Error> {
    // Not another pod of the same name.
    let must = Preconditions { uid: Some(candidate.uid.clone()), resource_version: None };
    let eviction = Eviction {
        metadata: ObjectMeta { name: Some(candidate.pod.clone()), ..ObjectMeta::default() },
        delete_options: Some(DeleteOptions { preconditions: Some(must), ..DeleteOptions::default() }),
    };
    pods.create_subresource::<_, Status>("eviction", &candidate.pod, &PostParams::default(), &eviction)
        .await?;
    Ok(())
}
