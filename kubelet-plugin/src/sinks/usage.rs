//! Shows what is used: metrics, and, where a claim goes over its grant or becomes idle, a condition
//! in its status and Events.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::names::{conditions, reclaim};
use divvy_claims::ClaimRef;
use divvy_executor::{Executor, HeldDevice};
use divvy_model::{ClaimUid, DeviceName, GpuUuid};
use divvy_offer::Resolved;
use divvy_usage::{Change, Mean, UsagePolicy, Watch, pod_utilization};
use futures::FutureExt;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use k8s_openapi::jiff::Timestamp;
use kube::Api;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::claims::api::KubeClaims;
use crate::claims::held::held_now;
use crate::metrics::UsageMetrics;
use crate::node::facts::{PodsOfClaims, Used};
use crate::sinks::notifier::{EventSubject, Notifier, Written, condition, usage_conditions_of};

/// Shows.
pub(crate) struct UsageSink {
    pub(crate) used: watch::Receiver<Arc<Used>>,
    /// The rules of policies for the GPUs.
    pub(crate) resolved: watch::Receiver<Arc<Resolved>>,
    /// The pods and containers that the kubelet lists for claims.
    pub(crate) listed: watch::Receiver<Arc<PodsOfClaims>>,
    /// `true` while this instance publishes: another one reports claims while it does not.
    pub(crate) publishes: watch::Receiver<bool>,
    /// Time without any use after which a claim is idle, where no policy says otherwise.
    pub(crate) idle_after: Duration,
    /// Time between two confirmations that pods are to be evicted.
    pub(crate) confirm: Duration,
    pub(crate) metrics: UsageMetrics,
    pub(crate) executor: Arc<Executor>,
    pub(crate) claims: Arc<KubeClaims>,
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) reports: TaskTracker,
}

/// Conditions of a claim, by device and type.
type Said = BTreeMap<(DeviceName, String), Condition>;

/// State that is kept from one reading to the next.
struct Memory {
    watch: Watch,
    means: BTreeMap<(String, String), Mean>,
    said: BTreeMap<ClaimUid, (ClaimRef, Said)>,
    writes: Writes,
    /// Claims whose conditions of another instance are yet to be read; `None` before the first
    /// reading since it ended.
    unread: Option<BTreeSet<ClaimRef>>,
}

/// Writes of conditions: of a claim one at a time, or an older one might come last; and again until
/// the server has it, or a pod would be evicted of which the condition was taken back.
#[derive(Default)]
struct Writes {
    wanted: BTreeSet<ClaimUid>,
    running: BTreeMap<ClaimUid, JoinHandle<bool>>,
}

impl Writes {
    /// Returns the claims whose conditions are to be written now.
    fn next(&mut self) -> Vec<ClaimUid> {
        for (uid, ended) in self.running.extract_if(.., |_, write| write.is_finished()) {
            // Failed or panicked: written again, with the newest conditions of then.
            if !matches!(ended.now_or_never(), Some(Ok(true))) {
                self.wanted.insert(uid);
            }
        }
        self.wanted
            .extract_if(.., |uid| !self.running.contains_key(uid))
            .collect()
    }
}

impl UsageSink {
    /// Runs until `stop`.
    pub(crate) async fn run(mut self, stop: CancellationToken) {
        let epoch = Instant::now();
        let mut memory = Memory {
            watch: Watch::new(self.idle_after),
            means: BTreeMap::new(),
            said: BTreeMap::new(),
            writes: Writes::default(),
            unread: None,
        };
        loop {
            tokio::select! {
                Ok(()) = self.publishes.changed() => {
                    // Another instance has written meanwhile, or will: its conditions are read
                    // before the next verdict.
                    memory.unread = None;
                    continue;
                }
                Ok(()) = self.used.changed() => {}
                () = stop.cancelled() => return,
                else => return,
            }
            // Conditions of an earlier instance are read before the first verdict: a verdict
            // without them would write over what it cannot take back.
            let used = self.used.borrow_and_update().clone();
            let devices = used.gpus.values().flat_map(|gpu| &gpu.devices);
            let there: BTreeSet<ClaimRef> = devices.map(|device| device.claim.clone()).collect();
            if memory.unread.is_none() && !there.is_empty() {
                memory.unread = Some(there.clone());
            }
            self.remember(&mut memory, &there).await;
            self.show(&mut memory, &used, epoch.elapsed());
        }
    }

    fn show(&self, memory: &mut Memory, used: &Used, now: Duration) {
        // Phase 1: what the readings mean. Metrics show it whether or not it is news.
        let policies = policies_of(&self.resolved.borrow());
        let news = memory.watch.step(&used.gpus, &policies, now);
        let pods = means(&mut memory.means, used, now);
        let listed = self.listed.borrow().clone();
        self.metrics
            .show(used, &memory.watch.verdicts(now), &pods, &listed);
        // Phase 2: what is news becomes a condition, kept in memory, and its claim is to be
        // written.
        for change in &news {
            memory
                .writes
                .wanted
                .insert(self.note(&mut memory.said, change, used));
        }
        // A claim that was let go while something was said of it: its next pods begin with nothing.
        let devices = used.gpus.values().flat_map(|gpu| &gpu.devices);
        let there: BTreeSet<&ClaimUid> = devices.map(|device| &device.claim.uid).collect();
        for (claim, _) in memory
            .said
            .extract_if(.., |uid, _| !there.contains(uid))
            .map(|(_, said)| said)
        {
            self.forget(claim);
        }
        // Phase 3: conditions that a controller acts on are renewed before they are too old to
        // count.
        memory
            .writes
            .wanted
            .extend(confirmed(&mut memory.said, self.confirm));
        // Phase 4: writes, last, with everything that has come to a claim in this round.
        for uid in memory.writes.next() {
            if let Some((claim, said)) = memory.said.get(&uid) {
                memory
                    .writes
                    .running
                    .insert(uid, self.write(claim.clone(), said.clone()));
            }
        }
    }

    /// Keeps a change, and reports it. Returns the claim.
    fn note(
        &self,
        said: &mut BTreeMap<ClaimUid, (ClaimRef, Said)>,
        change: &Change,
        used: &Used,
    ) -> ClaimUid {
        let devices = match change {
            Change::Overuse { device, over, .. } => {
                self.metrics.overuses.inc_by((*over).into());
                vec![device.clone()]
            }
            Change::Idle { claim, idle, .. } => {
                self.metrics.idles.inc_by((*idle).into());
                let all = used.gpus.values().flat_map(|gpu| &gpu.devices);
                let own = all.filter(|device| device.claim.uid == claim.uid);
                own.map(|device| device.device.clone()).collect()
            }
            Change::Due { device, .. } => vec![device.clone()],
        };
        let (claim, says) = (change.claim(), change.said());
        let (bad, reason) = (says.bad, says.reason);
        let condition = condition(says.kind, says.status, reason, &says.message);
        tracing::info!(%claim, reason = condition.reason, "{}", condition.message);
        self.report(claim, &condition, bad);
        let (_, said) = said
            .entry(claim.uid.clone())
            .or_insert_with(|| (claim.clone(), Said::new()));
        for device in devices {
            said.insert((device, condition.type_.clone()), condition.clone());
        }
        claim.uid.clone()
    }

    fn report(&self, claim: &ClaimRef, condition: &Condition, bad: bool) {
        let (notifier, executor, claim) =
            (self.notifier.clone(), self.executor.clone(), claim.clone());
        let (reason, message) = (condition.reason.clone(), condition.message.clone());
        self.reports.spawn(async move {
            // The record names the pods: without it only the claim gets the Event.
            let held = held_of(&executor, &claim).await.unwrap_or_default();
            let pods = held
                .first()
                .map(|held| held.pods.clone())
                .unwrap_or_default();
            let action = format!("Measure {}", claim.uid);
            let note = format!("claim {}: {message}", claim.name);
            let pods = pods
                .iter()
                .map(|pod| EventSubject::Pod(&claim.namespace, pod));
            for about in std::iter::once(EventSubject::Claim(&claim)).chain(pods) {
                notifier
                    .report_device(&about, bad, &reason, &action, &note)
                    .await;
            }
        });
    }

    /// Puts all conditions of the claim into its status. Returns whether there is nothing left to
    /// do.
    fn write(&self, claim: ClaimRef, said: Said) -> JoinHandle<bool> {
        let (notifier, executor) = (self.notifier.clone(), self.executor.clone());
        let takes_back = said
            .values()
            .any(|c| c.type_ == conditions::RECLAIM_DUE && c.status == "False");
        self.reports.spawn(async move {
            // Read now and not earlier: a claim that was let go meanwhile has no devices to write
            // about. Records that cannot be read say no such thing: what stands in the status
            // stays, and the claim is written in a later round.
            let Some(held) = held_of(&executor, &claim).await else {
                return false;
            };
            let entries = held.iter().map(|held| {
                let of_device = said
                    .iter()
                    .filter(|((device, _), _)| *device == held.hold.device);
                (
                    &held.allocated,
                    of_device.map(|(_, condition)| condition.clone()).collect(),
                )
            });
            match notifier.usage_conditions(&claim, entries.collect()).await {
                Written::Done => true,
                // An API server that has just started denies what it allows a moment later.
                Written::Denied => !takes_back,
                Written::Failed => false,
            }
        })
    }

    /// Takes everything back that was said of a claim, unless it is only this instance that does
    /// not measure any more.
    fn forget(&self, claim: ClaimRef) {
        let (notifier, executor) = (self.notifier.clone(), self.executor.clone());
        self.reports.spawn(async move {
            // Still held means that another instance measures it now, and writes its own. So may a
            // claim be whose record cannot be read.
            let held = held_of(&executor, &claim).await;
            if held.is_some_and(|held| held.is_empty()) {
                notifier.usage_conditions(&claim, Vec::new()).await;
            }
        });
    }

    async fn found(
        &self,
        claim: &ClaimRef,
    ) -> Result<Vec<(DeviceName, &'static str)>, kube::Error> {
        let api = Api::<ResourceClaim>::namespaced(self.claims.client.clone(), &claim.namespace);
        let found = api.get_opt(&claim.name).await?;
        let found = found.filter(|found| found.metadata.uid.as_deref() == Some(claim.uid.as_str()));
        Ok(found
            .map(|found| usage_conditions_of(&found, &self.claims.driver))
            .unwrap_or_default())
    }

    /// Reads the conditions that an earlier instance of the plugin has written to the claims: they
    /// are over when readings say so.
    async fn remember(&self, memory: &mut Memory, there: &BTreeSet<ClaimRef>) {
        let Some(unread) = &mut memory.unread else {
            return;
        };
        let claims: Vec<ClaimRef> = std::mem::take(unread)
            .into_iter()
            .filter(|c| there.contains(c))
            .collect();
        for claim in claims {
            let found = match self.found(&claim).await {
                Ok(found) => found,
                Err(error) => {
                    let error = crate::chain(&error);
                    tracing::debug!(%claim, error, "failed to read the conditions of a claim");
                    memory.unread.get_or_insert_default().insert(claim);
                    continue;
                }
            };
            for (device, kind) in found {
                let (_, said) = memory
                    .said
                    .entry(claim.uid.clone())
                    .or_insert_with(|| (claim.clone(), Said::new()));
                let about = (device, kind.to_owned());
                if said.contains_key(&about) {
                    // This instance knows better.
                    continue;
                }
                let condition = if kind == conditions::RECLAIM_DUE {
                    // Not before this instance has seen it: the other may have ended long ago.
                    condition(
                        kind,
                        false,
                        reclaim::NOT_DUE,
                        "the node plugin has restarted",
                    )
                } else if kind == conditions::IDLE {
                    memory.watch.was_idle(&claim.uid);
                    condition(
                        kind,
                        true,
                        "NotUsed",
                        "nothing uses the devices of the claim",
                    )
                } else {
                    memory.watch.was_over(&claim.uid, &about.0);
                    let message = "the pods of the claim use more memory than it was granted";
                    condition(kind, false, "MemoryOverGrant", message)
                };
                said.insert(about, condition);
            }
            if let Some((_, said)) = memory.said.get(&claim.uid)
                && said
                    .keys()
                    .any(|(_, kind)| *kind == conditions::RECLAIM_DUE)
            {
                memory.writes.wanted.insert(claim.uid);
            }
        }
    }
}

/// Returns the rules of policies about the use of GPUs.
fn policies_of(resolved: &Resolved) -> BTreeMap<GpuUuid, UsagePolicy> {
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    let of = resolved.rules.iter().map(|(gpu, rules)| {
        let usage = rules.usage;
        let policy = UsagePolicy {
            idle_after: usage.idle_after.map(seconds),
            evict: usage.evict,
            reclaim: usage.reclaim.then(|| seconds(usage.grace)),
        };
        (gpu.clone(), policy)
    });
    of.collect()
}

/// Renews the conditions of claims whose pods are still to be evicted, and returns these: a
/// controller that acts on it is to ignore what is old, because a node that does not measure any
/// more cannot take it back.
fn confirmed(said: &mut BTreeMap<ClaimUid, (ClaimRef, Said)>, every: Duration) -> Vec<ClaimUid> {
    let (now, mut anew) = (Timestamp::now(), Vec::new());
    for (uid, (_, said)) in said {
        for ((_, kind), condition) in said.iter_mut() {
            let age = now
                .duration_since(condition.last_transition_time.0)
                .unsigned_abs();
            if *kind == conditions::RECLAIM_DUE && condition.status == "True" && age > every {
                condition.last_transition_time = Time(now);
                anew.push(uid.clone());
            }
        }
    }
    anew
}

/// Returns the devices that a claim holds now; `None` if the records cannot be read.
async fn held_of(executor: &Arc<Executor>, claim: &ClaimRef) -> Option<Vec<HeldDevice>> {
    let mut held = held_now(executor).await?;
    held.retain(|held| held.claim.uid == claim.uid);
    Some(held)
}

/// Returns means of a minute, of the pods whose utilisation is known now.
fn means(
    kept: &mut BTreeMap<(String, String), Mean>,
    used: &Used,
    now: Duration,
) -> BTreeMap<(String, String), f64> {
    let ratios = pod_utilization(used.gpus.values());
    kept.retain(|pod, _| ratios.contains_key(pod));
    let mean = |(pod, ratio): ((String, String), divvy_usage::Figure<f64>)| {
        let ratio = kept.entry(pod.clone()).or_default().add(now, ratio.ok()?);
        Some((pod, ratio))
    };
    ratios.into_iter().filter_map(mean).collect()
}
