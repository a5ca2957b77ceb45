//! The task that watches the policies.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use divvy_api::policy::{GpuPolicy, GpuPolicyObject};
use divvy_controller::{PublishError, Watch, Watched};
use divvy_offer::Finding;
use kube::core::{ApiResource, DynamicObject};
use kube::{Api, Client};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::book::{Book, Unreadable};
use crate::app::config::Config;
use crate::host::saved;
use crate::metrics::Metrics;
use crate::node::facts::{Facts, KnownPolicies, NodeFacts, Report};
use crate::sinks::notifier::Notifier;

/// The last readable versions of the policies, in a file: a node that restarts while a policy is
/// bad or the API server is away goes on as before.
#[derive(Serialize, Deserialize)]
struct Stored {
    policies: Vec<GpuPolicy>,
}

const FORBIDDEN: u16 = 403;
const NOT_FOUND: u16 = 404;

/// Watches. Nothing is sent before policies and labels have been read once, or could not be for a
/// while.
pub(crate) struct PolicyWatch {
    node: String,
    policies: Watch<DynamicObject>,
    nodes: watch::Receiver<Option<Arc<NodeFacts>>>,
    book: Book,
    file: PathBuf,
    retry: Duration,
    wait: Duration,
    notifier: Arc<Notifier>,
    reports: TaskTracker,
    metrics: Metrics,
    facts: Facts,
    /// The last fact that was sent.
    sent: Option<KnownPolicies>,
    /// The next fact, sent as soon as policies and labels are read.
    known: KnownPolicies,
    /// True if they could not be saved.
    unsaved: bool,
    /// True once the policies have been read.
    read: bool,
    /// Enough has been waited.
    impatient: bool,
    /// Not asked for before then: there is no such kind, or no right to it.
    later: Option<Instant>,
    /// Already logged.
    problem: Option<String>,
}

/// The parts that the watch is made of.
pub(crate) struct PolicyWiring<'a> {
    pub(crate) client: Client,
    pub(crate) config: &'a Config,
    pub(crate) nodes: watch::Receiver<Option<Arc<NodeFacts>>>,
    pub(crate) facts: Facts,
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) reports: TaskTracker,
    pub(crate) metrics: Metrics,
}

impl PolicyWatch {
    pub(crate) fn new(wiring: PolicyWiring<'_>) -> Self {
        let PolicyWiring {
            client,
            config,
            nodes,
            facts,
            notifier,
            reports,
            metrics,
        } = wiring;
        // Read as written, not as the type: the decoder says which field of which rule is wrong.
        let policies = Api::all_with(client, &ApiResource::erase::<GpuPolicyObject>(&()));
        let (plugin_dir, timing) = (&config.plugin_dir, &config.timing);
        let file = plugin_dir.join("policies.json");
        let stored = saved::load(&file).map(|stored: Stored| stored.policies);
        let book = Book::remembering(stored.unwrap_or_default());
        // The same as in the file, so that it is written again when they turn out to be gone.
        let known = KnownPolicies {
            policies: book.policies(),
            ..KnownPolicies::default()
        };
        Self {
            node: config.node_name.clone(),
            policies: Watch::new(policies, "", "GpuPolicies"),
            nodes,
            book,
            file,
            retry: timing.policy_retry,
            wait: timing.policy_wait,
            notifier,
            reports,
            metrics,
            facts,
            sent: None,
            known,
            unsaved: false,
            read: false,
            impatient: false,
            later: None,
            problem: None,
        }
    }

    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        // A single deadline for the whole start, however often the watch fails before it.
        let fallback = Instant::now() + self.wait;
        loop {
            let later = self.later;
            tokio::select! {
                () = stop.cancelled() => return,
                () = sleep_until(later.unwrap_or(fallback)), if later.is_some() => self.later = None,
                // Not polled before `later`: it would ask again at its own, faster pace.
                event = self.policies.next(), if later.is_none() => self.take_in(event),
                Ok(()) = self.nodes.changed() => {}
                () = sleep_until(fallback), if !self.impatient => self.impatient = true,
            }
            self.send();
        }
    }

    /// Takes in what the watch says, and reports policies that cannot be read.
    fn take_in(&mut self, event: Result<Watched<DynamicObject>, PublishError>) {
        let unreadable = match event {
            Ok(Watched::Listed(objects)) => {
                self.problem = None;
                self.known.served = true;
                self.read = true;
                self.book.listed(objects)
            }
            Ok(Watched::Apply(object)) => self.book.applied(*object).into_iter().collect(),
            Ok(Watched::Delete(object)) => {
                self.book
                    .deleted(object.metadata.name.as_deref().unwrap_or_default());
                Vec::new()
            }
            Err(error) => {
                match error.code() {
                    // No definition is an answer: there are no policies. A missing right, which
                    // only a person ends, and a failure leave in force what was known.
                    Some(NOT_FOUND) => {
                        // With the definition, the policies are gone too.
                        // The file is written anew below, or a restart would bring them back.
                        self.book.clear();
                        self.known.served = false;
                        self.read = true;
                        self.later = Some(Instant::now() + self.retry);
                        if self.problem.replace(String::new()).is_none() {
                            tracing::info!(
                                "the cluster has no definition of GpuPolicy; the flags decide the modes of GPUs"
                            );
                        }
                        Vec::new()
                    }
                    code => {
                        if code == Some(FORBIDDEN) {
                            self.read = true;
                            self.later = Some(Instant::now() + self.retry);
                        }
                        say(
                            &mut self.problem,
                            &error,
                            "failed to watch policies; the last known ones stay in force",
                        );
                        return;
                    }
                }
            }
        };
        for one in unreadable {
            self.report(one);
        }
    }

    fn report(&self, unreadable: Unreadable) {
        let Unreadable {
            policy,
            why,
            has_earlier,
        } = unreadable;
        let instead = if has_earlier {
            "its last readable version stays in force"
        } else {
            "it is ignored"
        };
        let note = format!(
            "node {} cannot use this policy, {instead}: {why}",
            self.node
        );
        tracing::warn!(policy = policy.name, why, has_earlier, "invalid policy");
        let notifier = self.notifier.clone();
        let bad = Finding::BadPolicy {
            policy: policy.name.clone(),
            why,
        };
        self.reports.spawn(async move {
            notifier
                .warn_policy(&policy, &bad.reason(), "", &note)
                .await;
        });
    }

    fn send(&mut self) {
        let policies = self.book.policies();
        let facts = self.nodes.borrow_and_update().clone();
        // Phase 1: is enough known? Policies that select by labels without the labels would select
        // nothing, and take GPUs away for a moment.
        let labels_matter = policies.iter().any(selects_by_labels);
        let read = self.read && (facts.is_some() || !labels_matter);
        if self.sent.is_none() && !read {
            if !self.impatient {
                return;
            }
            tracing::warn!(
                policies = self.read,
                labels = facts.is_some(),
                "failed to read policies or the node's labels; using the last known ones"
            );
        }
        self.known.labels = facts.map(|facts| facts.labels.clone()).unwrap_or_default();
        // Phase 2: onto the disk before they are in force, so that a restart without the API server
        // decides the same.
        if policies != self.known.policies || self.unsaved {
            let saved = saved::save(
                &self.file,
                &Stored {
                    policies: policies.clone(),
                },
            );
            if let Err(error) = &saved {
                tracing::warn!(%error, "failed to store the policies, will retry with the next change");
            }
            self.unsaved = saved.is_err();
        }
        self.known.policies = policies;
        self.known.bad.clone_from(self.book.bad());
        let gauge = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.metrics.policies.set(gauge(self.known.policies.len()));
        self.metrics.policies_bad.set(gauge(self.known.bad.len()));
        // Phase 3: to the brain, if anything has changed.
        if self.sent.as_ref() != Some(&self.known) {
            self.sent = Some(self.known.clone());
            // Without a brain the plugin ends.
            drop(
                self.facts
                    .send(Report::Policies(Arc::new(self.known.clone())).into()),
            );
        }
    }
}

fn selects_by_labels(policy: &GpuPolicy) -> bool {
    let rules = policy
        .spec
        .rules
        .iter()
        .filter_map(|rule| rule.nodes.as_ref());
    policy
        .spec
        .nodes
        .iter()
        .chain(rules)
        .any(|nodes| nodes.selector.is_some())
}

/// Logs a problem, once for as long as it stays the same.
fn say(before: &mut Option<String>, error: &PublishError, what: &str) {
    let text = error.to_string();
    if before.as_ref() != Some(&text) {
        tracing::warn!(error = text, "{what}");
        *before = Some(text);
    }
}

/// Time for which policies may stay unknown before the node goes on with those that it remembers.
pub(crate) const WAIT: Duration = Duration::from_secs(10);
/// Interval at which a definition that is not there, or a right that is missing, is asked for
/// again.
pub(crate) const RETRY: Duration = Duration::from_secs(30);
