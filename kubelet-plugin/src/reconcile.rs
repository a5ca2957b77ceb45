//! Keeps what containers and claims rely on right: CDI files are there before the kubelet may call and come back
//! when they vanish (every instance), and records are squared with the API, the kubelet and the GPUs at start and
//! periodically (the instance that publishes). What there is to do is the executor's; here is when, with what view.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_claims::{Claim, ClaimRef, Phase};
use divvy_executor::{Clock, ClusterView, Event, Executor, HeldDevice, Refresh, Report, SystemClock};
use divvy_host::HostRoot;
use divvy_model::ClaimUid;
use divvy_proto::podresources::v1::PodResources;
use divvy_telemetry::ReadyHandle;
use futures::stream::{self, StreamExt, TryStreamExt};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::api::KubeClaims;
use crate::cdi_watch::FolderWatch;
use crate::config::Config;
use crate::edits::HostEdits;
use crate::events::{Notifier, condition_of};
use crate::grpc::pod_resources::{self, PodsOfClaims};
use crate::grpc::registration::Registered;
use crate::sinks::metrics::Metrics;
use crate::sources::inventory::GpusSeen;

/// How long the start waits for the first answer of the driver, when there are claims whose files need it.
const FIRST_INVENTORY: Duration = Duration::from_secs(10);
/// Longest pause between rounds while something is left to do.
const LONGEST_BUSY: Duration = Duration::from_mins(1);
/// Claims read at once: no more than half of what the API is asked at once, or prepares would wait for them.
const LOOKS: usize = 4;
/// How often a CDI folder that cannot be watched is looked for.
const NO_WATCH: Duration = Duration::from_secs(10);

/// Keeps files and records right.
#[derive(Clone)]
pub(crate) struct Keeper {
    pub(crate) executor: Arc<Executor>,
    pub(crate) edits: Arc<HostEdits>,
    pub(crate) claims: Arc<KubeClaims>,
    pub(crate) config: Config,
    pub(crate) seen: watch::Receiver<GpusSeen>,
    pub(crate) registered: watch::Receiver<Registered>,
    pub(crate) publishes: watch::Receiver<bool>,
    /// Notified when records have changed.
    pub(crate) changed: Arc<Notify>,
    /// Notifies that a claim was unprepared and lingers.
    pub(crate) lingers: Arc<Notify>,
    /// The pods and containers that the kubelet lists for claims.
    pub(crate) listed: watch::Sender<Arc<PodsOfClaims>>,
    /// Puts what is known of claims into their status.
    pub(crate) notifier: Arc<Notifier>,
    pub(crate) metrics: Metrics,
    pub(crate) records: ReadyHandle,
}

/// Waits until the kubelet lists other pods for a claim than its record has. It prepares a claim once, so this is how
/// later pods of a claim are noticed. `known`: what it listed last; the same difference is not reported twice.
async fn other_pods(executor: &Arc<Executor>, config: &Config, known: &watch::Sender<Arc<PodsOfClaims>>) {
    loop {
        tokio::time::sleep(config.timing.neighbours).await;
        let Ok(listed) = pod_resources::pods(&config.pod_resources_socket).await else { continue };
        let now = pod_resources::claims(&listed, &config.driver_name);
        let before = known.send_replace(Arc::new(now.clone()));
        let mut changed = now;
        changed.retain(|claim, pods| before.get(claim) != Some(pods));
        if changed.is_empty() {
            continue;
        }
        let executor = executor.clone();
        let held = tokio::task::spawn_blocking(move || executor.held().unwrap_or_default()).await;
        let differs = |held: &HeldDevice| {
            let on_record: BTreeSet<String> = held.pods.iter().map(|pod| pod.name.clone()).collect();
            let listed = changed.get(&(held.claim.namespace.clone(), held.claim.name.clone()));
            listed.is_some_and(|listed| !listed.keys().eq(&on_record))
        };
        if held.unwrap_or_default().iter().any(differs) {
            return;
        }
    }
}

/// A claim as the API has it: what is ours of it, and whether its status says anything of us.
type Found = (Claim, Option<Condition>);

impl Keeper {
    /// What must be done before the kubelet may call: containers of running pods may start at any time, and it asks
    /// again only for new pods.
    pub(crate) async fn before_registration(&mut self) {
        let executor = self.executor.clone();
        let has_records = tokio::task::spawn_blocking(move || executor.has_records()).await;
        // An error counts as some.
        if has_records.unwrap_or(true) {
            let known = |seen: &GpusSeen| seen.inventory.is_some() || seen.problem.is_some();
            let _in_time = tokio::time::timeout(FIRST_INVENTORY, self.seen.wait_for(known)).await;
        }
        self.restore(Refresh::All, &mut BTreeSet::new()).await;
    }

    /// Runs until `stop`.
    pub(crate) async fn run(self, stop: CancellationToken) {
        let files = self.clone().files(stop.clone());
        let lingering = self.clone().lingering(stop.clone());
        tokio::join!(files, lingering, self.rounds(stop));
    }

    /// Frees the devices of lingering claims soon after their last process has ended. Every instance does this: it depends
    /// only on the GPUs, so the instance that answered the unprepare need not notify the one that publishes.
    async fn lingering(self, stop: CancellationToken) {
        let mut logged = BTreeSet::new();
        let mut some = true;
        loop {
            let look = async {
                if some {
                    tokio::time::sleep(self.config.timing.reconcile_busy).await;
                } else {
                    self.lingers.notified().await;
                }
            };
            tokio::select! {
                () = look => {}
                () = stop.cancelled() => return,
            }
            let executor = self.executor.clone();
            let finished = tokio::task::spawn_blocking(move || executor.finish_lingering());
            let Ok((mut report, left)) = finished.await else { continue };
            // Said when it was unprepared.
            report.events.retain(|event| !matches!(event, Event::Kept { .. }));
            some = left;
            self.heed(&report, &mut logged);
        }
    }

    /// Watches CDI files and driver files.
    async fn files(mut self, stop: CancellationToken) {
        let timing = self.config.timing;
        let mut logged = BTreeSet::new();
        let mut refresh = Refresh::Missing;
        self.seen.mark_unchanged();
        let mut look_at_driver = Instant::now() + timing.refresh;
        loop {
            // Watched first, then restored: nothing can vanish unseen in between.
            let mut watch = FolderWatch::new(&self.config.cdi_dir).ok();
            self.restore(std::mem::replace(&mut refresh, Refresh::Missing), &mut logged).await;
            let check = Instant::now()
                + if watch.is_some() { timing.cdi_check } else { NO_WATCH.min(timing.cdi_check) };
            let vanished = async {
                match &mut watch {
                    Some(watch) => drop(watch.vanished(timing.cdi_settle).await),
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = vanished => {}
                () = tokio::time::sleep_until(check) => {}
                Ok(()) = self.seen.changed() => {
                    // GPUs came or the driver was replaced: files written for them may say something else now.
                    self.look_at_driver(true).await;
                    refresh = Refresh::All;
                }
                () = tokio::time::sleep_until(look_at_driver) => {
                    look_at_driver = Instant::now() + timing.refresh;
                    if self.look_at_driver(false).await {
                        refresh = Refresh::All;
                    }
                }
                () = stop.cancelled() => return,
            }
        }
    }

    /// Whether what containers get of the driver has changed.
    async fn look_at_driver(&self, thorough: bool) -> bool {
        let edits = self.edits.clone();
        match tokio::task::spawn_blocking(move || edits.refresh(thorough)).await {
            Ok(Ok(changed)) => {
                if changed {
                    tracing::info!("the driver's files have changed; rewriting CDI files");
                }
                changed
            }
            Ok(Err(error)) => {
                tracing::debug!(error = %crate::chain(&error), "failed to list driver files");
                false
            }
            Err(_) => false,
        }
    }

    async fn restore(&self, refresh: Refresh, logged: &mut BTreeSet<Event>) {
        let executor = self.executor.clone();
        let report =
            tokio::task::spawn_blocking(move || executor.restore_cdi(refresh)).await.unwrap_or_default();
        self.heed(&report, logged);
    }

    /// Rounds of reconcile, while this instance is in charge.
    async fn rounds(mut self, stop: CancellationToken) {
        let timing = self.config.timing;
        let mut logged = BTreeSet::new();
        let mut reported = BTreeSet::new();
        let mut connected_since = None;
        let mut busy = timing.reconcile_busy;
        let (executor, config) = (self.executor.clone(), self.config.clone());
        loop {
            let registered = *self.registered.borrow_and_update() == Registered::Yes;
            connected_since =
                if registered { connected_since.or_else(|| Some(SystemClock.now())) } else { None };
            let publishes = *self.publishes.borrow_and_update();
            let wait = if publishes {
                let open = self.round(connected_since, &mut logged, &mut reported).await;
                self.records.ready();
                busy = if open { (busy * 2).min(LONGEST_BUSY) } else { timing.reconcile_busy };
                if open { busy.min(timing.reconcile) } else { timing.reconcile }
            } else {
                timing.reconcile
            };
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                Ok(()) = self.publishes.changed() => {}
                Ok(()) = self.registered.changed() => {}
                () = other_pods(&executor, &config, &self.listed), if publishes && registered => {}
                () = stop.cancelled() => return,
            }
        }
    }

    /// One round; whether something is left to do that time or others will settle.
    async fn round(
        &self,
        connected_since: Option<Duration>,
        logged: &mut BTreeSet<Event>,
        reported: &mut BTreeSet<ClaimUid>,
    ) -> bool {
        self.metrics.reconciles.inc();
        let (mut found, listed) = tokio::join!(self.allocated(), self.listed());
        if let (Some(found), Some(listed)) = (&mut found, &listed) {
            self.name_pods(found, listed).await;
        }
        let running = listed.map(|pods| pod_resources::held(&pods, &self.config.driver_name));
        let claims = found.as_ref().map(|found| {
            found.iter().map(|(uid, (claim, _))| (uid.clone(), claim.clone())).collect::<BTreeMap<_, _>>()
        });
        let view = ClusterView { claims, running, kubelet_connected_since: connected_since };
        let executor = self.executor.clone();
        let work = tokio::task::spawn_blocking(move || {
            let report = executor.reconcile(&view);
            let unfinished =
                executor.held().is_ok_and(|held| held.iter().any(|h| h.phase != Phase::Prepared));
            (report, unfinished || view.claims.is_none())
        });
        let Ok((report, unfinished)) = work.await else { return true };
        let open = report.events.iter().any(|e| matches!(e, Event::Kept { .. } | Event::Failed { .. }));
        self.heed(&report, logged);
        let unreported = match found {
            Some(found) => self.report_new(found, reported).await,
            None => false,
        };
        open || unfinished || unreported
    }

    /// A plugin that was killed after its answer, or that the server did not answer, has not written which partitions the
    /// claim has, or that it is no longer refused. What the status says nothing of is written once each: a server may drop
    /// it. Whether something could not be written.
    async fn report_new(&self, found: BTreeMap<ClaimUid, Found>, reported: &mut BTreeSet<ClaimUid>) -> bool {
        reported.retain(|uid| found.contains_key(uid));
        let untrue = |uid: &ClaimUid, said: &Option<Condition>| match said {
            Some(said) => said.status != "True",
            None => !reported.contains(uid),
        };
        let silent: Vec<Found> =
            found.into_iter().filter(|(uid, (_, said))| untrue(uid, said)).map(|(_, found)| found).collect();
        if silent.is_empty() {
            return false;
        }
        let executor = self.executor.clone();
        let unreported = tokio::task::spawn_blocking(move || {
            let held = executor.held().unwrap_or_default().into_iter();
            let prepared: BTreeSet<ClaimUid> =
                held.filter(|held| held.phase == Phase::Prepared).map(|held| held.claim.uid).collect();
            let made = |(claim, said): Found| {
                let made = executor.partitions(&claim.uid).unwrap_or_default();
                let made: BTreeMap<_, _> =
                    made.into_iter().map(|(device, made)| (device, made.uuid)).collect();
                (said.is_some() || !made.is_empty()).then_some((claim, said, made))
            };
            silent
                .into_iter()
                .filter(|(claim, _)| prepared.contains(&claim.uid))
                .filter_map(made)
                .collect::<Vec<_>>()
        });
        let mut left = false;
        for (claim, said, partitions) in unreported.await.unwrap_or_default() {
            if self.notifier.prepared(&claim, said.as_ref(), &partitions).await {
                reported.insert(claim.uid.clone());
            } else {
                left = true;
            }
        }
        left
    }

    /// Claims of this node that are allocated, as far as records and files name them; `None` if the API does not answer.
    /// They are read one by one as long as records have their names: a list of all claims of the cluster is needed only
    /// when records or files are damaged.
    async fn allocated(&self) -> Option<BTreeMap<ClaimUid, Found>> {
        let executor = self.executor.clone();
        let known = tokio::task::spawn_blocking(move || {
            let held = executor.held().ok()?;
            let known: BTreeMap<ClaimUid, ClaimRef> =
                held.into_iter().map(|held| (held.claim.uid.clone(), held.claim)).collect();
            // Where that cannot be read, all are asked for; the round itself reports why.
            Some((known, executor.has_nameless_claims().unwrap_or(true)))
        });
        let (known, nameless) = known.await.ok()??;
        let found = if nameless {
            self.claims.list().await.map_err(|e| crate::chain(&e))
        } else {
            let looks = known.into_values().map(|claim| {
                let fetcher = self.claims.fetcher.clone();
                let look = tokio::task::spawn_blocking(move || fetcher.look(&claim, Duration::MAX));
                let died =
                    |why| format!("the thread reading a claim ended unexpectedly ({why}; a bug in divvy)");
                async move { look.await.unwrap_or_else(|why| Err(died(why))) }
            });
            let looks: Result<Vec<_>, _> = stream::iter(looks).buffered(LOOKS).try_collect().await;
            looks.map(|found| found.into_iter().flatten().collect())
        };
        match found {
            Ok(objects) => {
                let ours = objects.into_iter().filter_map(|object| {
                    let said = condition_of(&object, &self.config.driver_name);
                    self.claims.ours(object).map(|(uid, claim)| (uid, (claim, said)))
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

    /// Adds the pods that the kubelet lists for a claim and the claim's status does not name: one that is reserved for a
    /// PodGroup names none of the group's pods.
    async fn name_pods(&self, found: &mut BTreeMap<ClaimUid, Found>, listed: &[PodResources]) {
        let mut listed = pod_resources::claims(listed, &self.config.driver_name);
        let mut nameless = Vec::new();
        for (claim, _) in found.values_mut() {
            let pods = listed.remove(&(claim.namespace.clone(), claim.name.clone())).unwrap_or_default();
            let mut names: BTreeSet<String> = pods.into_keys().collect();
            names.retain(|name| !claim.pods.iter().any(|pod| pod.name == *name));
            if !names.is_empty() {
                nameless.push((claim, names));
            }
        }
        if nameless.is_empty() {
            return;
        }
        let host = HostRoot::under(&self.config.host_root);
        let uids = tokio::task::spawn_blocking(move || crate::pods::uids(&host)).await.unwrap_or_default();
        for (claim, names) in nameless {
            crate::pods::add(&mut claim.pods, &claim.namespace, names, &uids);
        }
    }

    /// Logs new events, counts, and notifies tasks that depend on records.
    fn heed(&self, report: &Report, logged: &mut BTreeSet<Event>) {
        let events: BTreeSet<Event> = report.events.iter().cloned().collect();
        for event in events.difference(logged) {
            match event {
                Event::Failed { claim, error } => {
                    tracing::error!(
                        claim.uid = claim.as_ref().map(ClaimUid::as_str),
                        error,
                        "reconcile failed, will retry"
                    );
                }
                Event::Kept { claim, why } => tracing::warn!(claim.uid = %claim, why, "record kept"),
                Event::CdiRestored { claim } => {
                    self.metrics.cdi_restored.inc();
                    tracing::warn!(claim.uid = %claim, "CDI file was missing or out of date; rewritten");
                }
                other => tracing::info!(what = ?other, "reconciled"),
            }
        }
        if events
            .iter()
            .any(|e| !matches!(e, Event::Kept { .. } | Event::Failed { .. } | Event::CdiRestored { .. }))
        {
            self.changed.notify_one();
        }
        // Only lasting conditions are remembered: a file that vanishes twice is logged twice.
        *logged =
            events.into_iter().filter(|e| matches!(e, Event::Kept { .. } | Event::Failed { .. })).collect();
    }
}
