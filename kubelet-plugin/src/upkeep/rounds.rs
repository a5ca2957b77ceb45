//! Rounds of reconcile: records are compared with the API, the kubelet and the GPUs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{Claim, ClaimRef, Phase};
use divvy_executor::{Clock, ClusterView, Event, Executor, HeldDevice, StoreError, SystemClock};
use divvy_host::HostRoot;
use divvy_model::ClaimUid;
use divvy_proto::podresources::v1::PodResources;
use divvy_telemetry::ReadyHandle;
use futures::stream::{self, StreamExt, TryStreamExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Reporter;
use crate::app::config::Config;
use crate::claims::api::KubeClaims;
use crate::grpc::pod_resources;
use crate::metrics::Metrics;
use crate::node::facts::{PodsOfClaims, Registered};
use crate::sinks::notifier::{Notifier, condition_of};

/// Longest pause between rounds while something is left to do.
const LONGEST_BUSY: Duration = Duration::from_mins(1);
/// Claims read at once: no more than half of what the API is asked at once, or prepares would wait
/// for them.
const LOOKS: usize = 4;

/// Longest time without a plugin that counts as the change from NVIDIA's to ours: the kubelet dials
/// a new socket at once, and ours is there a few seconds after the other has ended.
const CHANGE_OF_PLUGINS: Duration = Duration::from_secs(15);

/// Reconciles.
pub(crate) struct Rounds {
    pub(crate) executor: Arc<Executor>,
    pub(crate) claims: Arc<KubeClaims>,
    pub(crate) config: Config,
    pub(crate) registered: watch::Receiver<Registered>,
    /// True while NVIDIA's plugin serves the node.
    pub(crate) nvidia_serves: watch::Receiver<bool>,
    pub(crate) publishes: watch::Receiver<bool>,
    /// The pods and containers that the kubelet lists for claims.
    pub(crate) listed: watch::Sender<Arc<PodsOfClaims>>,
    /// Puts what is known of claims into their status.
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) metrics: Metrics,
    pub(crate) records: ReadyHandle,
    pub(crate) reporter: Reporter,
}

/// Waits until the kubelet lists other pods for a claim than its record has, or none any more. It
/// prepares a claim once, so this is how later pods of a claim are noticed. And it unprepares a
/// claim once, so this is how the end of a claim is noticed that it unprepared at another plugin.
/// `known`: what it listed last; the same difference is not reported twice.
async fn other_pods(
    executor: &Arc<Executor>,
    config: &Config,
    known: &watch::Sender<Arc<PodsOfClaims>>,
) {
    loop {
        tokio::time::sleep(config.timing.neighbours).await;
        let Ok(listed) = pod_resources::pods(&config.pod_resources_socket).await else {
            continue;
        };
        let now = pod_resources::claims(&listed, config);
        // Report a difference once.
        let before = known.send_replace(Arc::new(now.clone()));
        let changed = changes(&before, now);
        if changed.is_empty() {
            continue;
        }
        // Records are read only for a difference: the kubelet's list is usually the same.
        let executor = executor.clone();
        let held = tokio::task::spawn_blocking(move || executor.held()).await;
        // The records are not known: the round compares all of them.
        let Ok(Ok(held)) = held else { return };
        let differs = |held: &HeldDevice| {
            let on_record: BTreeSet<String> =
                held.pods.iter().map(|pod| pod.name.clone()).collect();
            let listed = changed.get(&(held.claim.namespace.clone(), held.claim.name.clone()));
            // A claim that is no longer listed is looked at also where its record names no pod.
            listed.is_some_and(|listed| listed.is_empty() || !listed.keys().eq(&on_record))
        };
        if held.iter().any(differs) {
            return;
        }
    }
}

/// Returns the pods of claims for which the kubelet lists others than before; none for a claim that
/// it no longer lists.
fn changes(before: &PodsOfClaims, now: PodsOfClaims) -> PodsOfClaims {
    let gone = before.keys().filter(|claim| !now.contains_key(*claim));
    let gone: Vec<_> = gone.map(|claim| (claim.clone(), BTreeMap::new())).collect();
    let mut changed = now;
    changed.retain(|claim, pods| before.get(claim) != Some(pods));
    changed.extend(gone);
    changed
}

/// The time since which the kubelet can unprepare claims. The grace of orphans counts from there.
#[derive(Debug, Default)]
struct Connection {
    /// Since when it has had a plugin of our driver's name, ours or NVIDIA's.
    since: Option<Duration>,
    /// When the last one went away.
    lost: Option<Duration>,
}

impl Connection {
    /// Returns the time since which the kubelet has had a plugin; `None` while it has none. The
    /// change from one plugin to the other is no break: the kubelet was there all the time.
    fn learn(&mut self, has_plugin: bool, now: Duration) -> Option<Duration> {
        if !has_plugin {
            self.lost.get_or_insert(now);
            return None;
        }
        let away = self.lost.take().map(|lost| now.saturating_sub(lost));
        if away.is_some_and(|away| away > CHANGE_OF_PLUGINS) {
            self.since = None;
        }
        Some(*self.since.get_or_insert(now))
    }
}

/// A claim as the API has it: what is ours of it, and whether its status says anything of us.
type Found = (Claim, Option<Condition>);

impl Rounds {
    /// Rounds of reconcile, while this instance is in charge.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let timing = self.config.timing;
        let mut reported = BTreeSet::new();
        let mut connection = Connection::default();
        let mut busy = timing.reconcile_busy;
        let (executor, config) = (self.executor.clone(), self.config.clone());
        loop {
            // The kubelet unprepares claims of ours at NVIDIA's plugin, while that one serves the
            // node: no other plugin is asked again.
            let registered = *self.registered.borrow_and_update() == Registered::Yes
                || *self.nvidia_serves.borrow_and_update();
            // The grace of orphans counts only while the kubelet can unprepare: it begins anew
            // after each longer time without a registration.
            let connected_since = connection.learn(registered, SystemClock.now());
            let publishes = *self.publishes.borrow_and_update();
            // Reconcile only where this instance is in charge, and ever less often while something
            // stays open.
            let wait = if publishes {
                let open = self.round(connected_since, &mut reported).await;
                self.records.ready();
                busy = if open {
                    (busy * 2).min(LONGEST_BUSY)
                } else {
                    timing.reconcile_busy
                };
                if open {
                    busy.min(timing.reconcile)
                } else {
                    timing.reconcile
                }
            } else {
                timing.reconcile
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                Ok(()) = self.publishes.changed() => {}
                Ok(()) = self.registered.changed() => {}
                Ok(()) = self.nvidia_serves.changed() => {}
                () = other_pods(&executor, &config, &self.listed), if publishes && registered => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// Runs one round. Returns whether something is left to do that time or others will settle.
    async fn round(
        &mut self,
        connected_since: Option<Duration>,
        reported: &mut BTreeSet<ClaimUid>,
    ) -> bool {
        self.metrics.reconciles.inc();
        // Ask the API and the kubelet at once; what does not answer counts as unknown.
        let (mut found, listed) = tokio::join!(self.allocated(), self.listed());
        if let (Some(found), Some(listed)) = (&mut found, &listed) {
            self.name_pods(found, listed).await;
        }
        let running = listed.map(|pods| pod_resources::held(&pods, &self.config));
        let claims = found.as_ref().map(|found| {
            found
                .iter()
                .map(|(uid, (claim, _))| (uid.clone(), claim.clone()))
                .collect::<BTreeMap<_, _>>()
        });
        let view = ClusterView {
            claims,
            running,
            kubelet_connected_since: connected_since,
        };
        // Compare on a thread of its own: files and NVML block.
        let executor = self.executor.clone();
        let work = tokio::task::spawn_blocking(move || {
            let report = executor.reconcile(&view);
            let held = executor.held();
            let phases = held.map(|held| held.into_iter().map(|held| held.phase).collect());
            (report, is_unfinished(phases) || view.claims.is_none())
        });
        let Ok((report, unfinished)) = work.await else {
            return true;
        };
        let open = report
            .events
            .iter()
            .any(|e| matches!(e, Event::Kept { .. }))
            || report.is_open();
        self.reporter.report(&report);
        let unreported = match found {
            Some(found) => self.report_new(found, reported).await,
            None => false,
        };
        open || unfinished || unreported
    }

    /// A plugin that was killed after its answer, or that the server did not answer, has not
    /// written which partitions the claim has, or that it is no longer refused. A thing of
    /// which the status says nothing is written once: a server may drop it. Returns whether
    /// something could not be written.
    async fn report_new(
        &self,
        found: BTreeMap<ClaimUid, Found>,
        reported: &mut BTreeSet<ClaimUid>,
    ) -> bool {
        reported.retain(|uid| found.contains_key(uid));
        let untrue = |uid: &ClaimUid, said: &Option<Condition>| match said {
            Some(said) => said.status != "True",
            None => !reported.contains(uid),
        };
        let silent: Vec<Found> = found
            .into_iter()
            .filter(|(uid, (_, said))| untrue(uid, said))
            .map(|(_, found)| found)
            .collect();
        if silent.is_empty() {
            return false;
        }
        let executor = self.executor.clone();
        let unreported = tokio::task::spawn_blocking(move || {
            let held = executor.held()?.into_iter();
            let prepared: BTreeSet<ClaimUid> = held
                .filter(|held| held.phase == Phase::Prepared)
                .map(|held| held.claim.uid)
                .collect();
            let mut unreported = Vec::new();
            for (claim, said) in silent {
                if !prepared.contains(&claim.uid) {
                    continue;
                }
                let made = executor.partitions(&claim.uid)?.into_iter();
                let made: BTreeMap<_, _> = made.map(|(device, made)| (device, made.uuid)).collect();
                if said.is_some() || !made.is_empty() {
                    unreported.push((claim, said, made));
                }
            }
            Ok::<_, StoreError>(unreported)
        });
        // Records that cannot be read are read again in the next round.
        let Ok(Ok(unreported)) = unreported.await else {
            return true;
        };
        let mut left = false;
        for (claim, said, partitions) in unreported {
            if self
                .notifier
                .prepared(&claim, said.as_ref(), &partitions)
                .await
            {
                reported.insert(claim.uid.clone());
            } else {
                left = true;
            }
        }
        left
    }

    /// Claims of this node that are allocated, as far as records and files name them; `None` if the
    /// API does not answer. They are read one by one as long as records have their names: a list of
    /// all claims of the cluster is needed only when records or files are damaged.
    async fn allocated(&self) -> Option<BTreeMap<ClaimUid, Found>> {
        // Records say which claims to ask for.
        let executor = self.executor.clone();
        let known = tokio::task::spawn_blocking(move || {
            let held = executor.held().ok()?;
            let known: BTreeMap<ClaimUid, ClaimRef> = held
                .into_iter()
                .map(|held| (held.claim.uid.clone(), held.claim))
                .collect();
            // Where that cannot be read, all are asked for; the round itself reports why.
            Some((known, executor.has_nameless_claims().unwrap_or(true)))
        });
        let (known, nameless) = known.await.ok()??;
        let found = if nameless {
            self.claims.list().await.map_err(|e| crate::chain(&e))
        } else {
            // Read each claim by name, a few at once.
            let looks = known.into_values().map(|claim| {
                let fetcher = self.claims.fetcher.clone();
                let look = tokio::task::spawn_blocking(move || fetcher.look(&claim, Duration::MAX));
                let died = |why| {
                    format!("the thread reading a claim ended unexpectedly ({why}; a bug in divvy)")
                };
                async move { look.await.unwrap_or_else(|why| Err(died(why))) }
            });
            let looks: Result<Vec<_>, _> = stream::iter(looks).buffered(LOOKS).try_collect().await;
            looks.map(|found| found.into_iter().flatten().collect())
        };
        match found {
            Ok(objects) => {
                let ours = objects.into_iter().filter_map(|object| {
                    let said = condition_of(&object, &self.config.driver_name);
                    self.claims
                        .ours(object)
                        .map(|(uid, claim)| (uid, (claim, said)))
                });
                Some(ours.collect())
            }
            Err(error) => {
                tracing::warn!(%error, "failed to compare claims with the API, will retry");
                None
            }
        }
    }

    async fn listed(&self) -> Option<Vec<PodResources>> {
        match pod_resources::pods(&self.config.pod_resources_socket).await {
            Ok(pods) => Some(pods),
            Err(error) => {
                tracing::debug!(error = %crate::chain(&error), "failed to list the devices of pods from the kubelet");
                None
            }
        }
    }

    /// Adds the pods that the kubelet lists for a claim and the claim's status does not name: one
    /// that is reserved for a PodGroup names none of the group's pods.
    async fn name_pods(&self, found: &mut BTreeMap<ClaimUid, Found>, listed: &[PodResources]) {
        let mut listed = pod_resources::claims(listed, &self.config);
        let mut nameless = Vec::new();
        for (claim, _) in found.values_mut() {
            let pods = listed
                .remove(&(claim.namespace.clone(), claim.name.clone()))
                .unwrap_or_default();
            let names = crate::host::pods::unnamed(&claim.pods, pods.into_keys());
            if !names.is_empty() {
                nameless.push((claim, names));
            }
        }
        if nameless.is_empty() {
            return;
        }
        let host = HostRoot::under(&self.config.host_root);
        let uids = tokio::task::spawn_blocking(move || crate::host::pods::uids(&host))
            .await
            .unwrap_or_default();
        for (claim, names) in nameless {
            crate::host::pods::add(&mut claim.pods, &claim.namespace, names, &uids);
        }
    }
}

/// Returns whether a claim is in the middle of something, as records are that cannot be read: both
/// are looked at again soon.
fn is_unfinished<E>(phases: Result<Vec<Phase>, E>) -> bool {
    phases.map_or(true, |phases| {
        phases.iter().any(|phase| *phase != Phase::Prepared)
    })
}

#[cfg(test)]
mod tests {
    use divvy_claims::Leaving;

    use super::*;

    fn listed(all: &[(&str, &[&str])]) -> PodsOfClaims {
        let pods = |pods: &[&str]| -> BTreeMap<String, BTreeSet<String>> {
            let containers = || BTreeSet::from(["main".to_owned()]);
            pods.iter()
                .map(|pod| ((*pod).to_owned(), containers()))
                .collect()
        };
        let one =
            |(claim, of): &(&str, &[&str])| (("ns".to_owned(), (*claim).to_owned()), pods(of));
        all.iter().map(one).collect()
    }

    #[test]
    fn a_claim_that_the_kubelet_lists_no_more_is_a_change() {
        let before = listed(&[("same", &["a"]), ("gone", &["a"]), ("other", &["a"])]);
        let now = listed(&[("same", &["a"]), ("other", &["a", "b"]), ("new", &["c"])]);
        let changed = listed(&[("gone", &[]), ("other", &["a", "b"]), ("new", &["c"])]);
        assert_eq!(changes(&before, now.clone()), changed);
        assert_eq!(changes(&now, now.clone()), PodsOfClaims::new());
    }

    #[test]
    fn a_change_of_plugins_does_not_begin_the_grace_of_orphans_anew() {
        let s = Duration::from_secs;
        let mut connection = Connection::default();
        assert_eq!(connection.learn(false, s(1)), None);
        assert_eq!(connection.learn(true, s(30)), Some(s(30)));
        assert_eq!(
            connection.learn(false, s(60)),
            None,
            "no plugin is called meanwhile"
        );
        assert_eq!(connection.learn(false, s(63)), None);
        assert_eq!(connection.learn(true, s(66)), Some(s(30)));
        assert_eq!(connection.learn(false, s(70)), None);
        assert_eq!(
            connection.learn(true, s(90)),
            Some(s(90)),
            "too long for a change"
        );
        assert_eq!(connection.learn(true, s(99)), Some(s(90)));
    }

    #[test]
    fn a_claim_that_is_not_prepared_is_looked_at_again_soon() {
        let all = |phases: &[Phase]| is_unfinished(Ok::<_, ()>(phases.to_vec()));
        assert!(!all(&[]));
        assert!(!all(&[Phase::Prepared, Phase::Prepared]));
        assert!(all(&[Phase::Prepared, Phase::Preparing]));
        let leaving = Leaving {
            reason: "a program runs".to_owned(),
            undoing: false,
        };
        assert!(all(&[Phase::Leaving(leaving)]));
        assert!(is_unfinished(Err(())), "it is not known");
    }
}
