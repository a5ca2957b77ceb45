//! Keeps the GpuQuotas of namespaces: lets claims through that fit, by an annotation without which
//! the API server refuses their allocation (ADR 24), and shows the sums in the quotas.
//!
//! `divvy_quota` decides; here is read and written. A namespace is looked at when one of its claims
//! or its quota has changed. Its claims are listed then, not taken from the watch, which may be
//! behind: so no grant of an earlier instance is missed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use divvy_api::names::annotations;
use divvy_api::node::GpuNode;
use divvy_api::quota::{GpuAmount, GpuQuota, GpuQuotaSpec, GpuQuotaStatus, QuotaError, decode};
use divvy_quota::{Catalogue, Grant, Look, look, spec_limits};
use divvy_telemetry::chain;
use futures::StreamExt;
use futures::stream::BoxStream;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::api::{ListParams, Patch, PatchParams};
use kube::core::{ApiResource, DynamicObject};
use kube::runtime::reflector::Store;
use kube::runtime::watcher::{self, Event};
use kube::runtime::{WatchStreamExt, watcher as watch_kind};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::metrics::Metrics;
use crate::{Clock, Config};

const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;
/// Looks after which a status that was written, and is not seen, is written again.
const AGAIN: u32 = 10;
/// Objects in one answer: slices are large.
const PAGE: u32 = 50;

/// Events of a watch that begins again by itself.
type Events<K> = BoxStream<'static, Result<Event<K>, watcher::Error>>;

/// Objects of a kind by namespace and name, and whether all are known.
struct Known<T> {
    found: BTreeMap<(String, String), T>,
    /// Objects that the watch has named again, while it lists them all.
    again: BTreeMap<(String, String), T>,
    is_complete: bool,
}

impl<T> Default for Known<T> {
    fn default() -> Self {
        Self {
            found: BTreeMap::new(),
            again: BTreeMap::new(),
            is_complete: false,
        }
    }
}

impl<T> Known<T> {
    /// Takes an event in.
    fn take<K: kube::ResourceExt>(&mut self, event: Event<K>, reduce: impl FnOnce(K) -> T) {
        let key = |object: &K| (object.namespace().unwrap_or_default(), object.name_any());
        match event {
            Event::Apply(object) => {
                self.found.insert(key(&object), reduce(object));
            }
            Event::Delete(object) => {
                self.found.remove(&key(&object));
            }
            Event::Init => self.again.clear(),
            Event::InitApply(object) => {
                self.again.insert(key(&object), reduce(object));
            }
            Event::InitDone => {
                self.found = std::mem::take(&mut self.again);
                self.is_complete = true;
            }
        }
    }
}

/// A quota as it was read.
#[derive(Debug, Clone)]
struct Quota {
    /// Number of the spec: a write of the status keeps it.
    generation: i64,
    spec: Result<GpuQuotaSpec, QuotaError>,
    /// Status of the object; `None` if that cannot be read.
    status: Option<GpuQuotaStatus>,
}

/// State of a namespace at the last look.
#[derive(Debug)]
struct Looked {
    /// Generation of its quota, and what counts of its claims.
    seen: (i64, BTreeSet<String>),
    /// Changes of devices and classes that had been seen.
    devices: u64,
    at: Instant,
    /// A claim waits, or something is unknown: other devices may change that.
    is_open: bool,
    /// A claim could not be let through.
    has_failed: bool,
    status: GpuQuotaStatus,
}

/// Keeps quotas.
pub(crate) struct Keeper {
    client: Client,
    driver: String,
    claims: Store<ResourceClaim>,
    quotas: Known<Quota>,
    classes: Known<DeviceClass>,
    slices: Known<()>,
    catalogue: Catalogue,
    /// Number of changes of devices and classes.
    devices: u64,
    leads: watch::Receiver<Option<Duration>>,
    clock: Clock,
    every: Duration,
    metrics: Metrics,
    looked: BTreeMap<String, Looked>,
    /// Last write of each status, by namespace and name, and what it said; nothing where it failed.
    written: BTreeMap<(String, String), (Instant, Option<GpuQuotaStatus>)>,
}

impl Keeper {
    pub(crate) fn new(
        config: &Config,
        client: Client,
        claims: Store<ResourceClaim>,
        leads: watch::Receiver<Option<Duration>>,
        clock: Clock,
        metrics: &Metrics,
    ) -> Self {
        Self {
            client,
            driver: config.driver.clone(),
            claims,
            quotas: Known::default(),
            classes: Known::default(),
            slices: Known::default(),
            catalogue: Catalogue::new(&config.driver),
            devices: 0,
            leads,
            clock,
            every: config.look,
            metrics: metrics.clone(),
            looked: BTreeMap::new(),
            written: BTreeMap::new(),
        }
    }

    /// Follows quotas, classes, slices and reports, and looks at namespaces.
    pub(crate) async fn run(mut self) {
        if self.claims.wait_until_ready().await.is_err() {
            return;
        }
        let ours = format!("spec.driver={}", self.driver);
        let mut quotas = self.quotas();
        let mut classes = self.events::<DeviceClass>(watcher::Config::default());
        let mut slices = self.events::<ResourceSlice>(watcher::Config::default().fields(&ours));
        let mut reports = self.events::<GpuNode>(watcher::Config::default());
        let mut ticks = interval(self.every / 10);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(event) = quotas.next() => if let Some(event) = sound("GpuQuotas", event) {
                    self.quotas.take(event, quota);
                },
                Some(event) = classes.next() => if let Some(event) = sound("DeviceClasses", event) {
                    self.devices += 1;
                    self.classes.take(event, |class| class);
                },
                Some(event) = slices.next() => if let Some(event) = sound("ResourceSlices", event) {
                    self.devices += 1;
                    self.slice(event);
                },
                Some(event) = reports.next() => if let Some(event) = sound("GpuNodes", event) {
                    self.report(&event);
                },
                _ = ticks.tick() => self.round().await,
                else => return,
            }
        }
    }

    fn events<K>(&self, config: watcher::Config) -> Events<K>
    where
        K: kube::Resource<DynamicType = ()>
            + Clone
            + std::fmt::Debug
            + serde::de::DeserializeOwned
            + Send
            + 'static,
    {
        let all = Api::<K>::all(self.client.clone());
        watch_kind(all, config.page_size(PAGE))
            .default_backoff()
            .boxed()
    }

    /// Returns the quotas as they are written, not as the type: a bad one costs no other.
    fn quotas(&self) -> Events<DynamicObject> {
        let kind = ApiResource::erase::<GpuQuota>(&());
        let all = Api::<DynamicObject>::all_with(self.client.clone(), &kind);
        watch_kind(all, watcher::Config::default())
            .default_backoff()
            .boxed()
    }

    /// Takes a slice in: its devices in the catalogue, its name here.
    fn slice(&mut self, event: Event<ResourceSlice>) {
        match &event {
            Event::Apply(slice) | Event::InitApply(slice) => self.catalogue.put(slice),
            Event::Delete(slice) => {
                let name = slice.metadata.name.as_deref().unwrap_or_default();
                self.catalogue.remove(name);
            }
            Event::Init | Event::InitDone => {}
        }
        let is_done = matches!(event, Event::InitDone);
        self.slices.take(event, |_| ());
        if is_done {
            let names = self.slices.found.keys().map(|(_, name)| name.clone());
            self.catalogue.keep(&names.collect());
        }
    }

    fn report(&mut self, event: &Event<GpuNode>) {
        let name = |report: &GpuNode| report.metadata.name.clone().unwrap_or_default();
        match event {
            Event::Apply(report) | Event::InitApply(report) => {
                self.catalogue.report(&name(report), report.status.as_ref());
            }
            Event::Delete(report) => self.catalogue.report(&name(report), None),
            Event::Init | Event::InitDone => {}
        }
    }

    fn leads(&self) -> bool {
        let until = *self.leads.borrow();
        until.is_some_and(|until| self.clock.now() < until)
    }

    /// Looks at every namespace with a quota of which something has changed.
    async fn round(&mut self) {
        let all_known =
            self.quotas.is_complete && self.classes.is_complete && self.slices.is_complete;
        if !self.leads() || !all_known {
            self.looked.clear();
            self.written.clear();
            self.metrics.quotas.set(0);
            self.metrics.quota_waiting.set(0);
            return;
        }
        let quotas = self.quotas.found.clone();
        let mut claims: BTreeMap<_, BTreeSet<_>> = quotas
            .keys()
            .map(|(namespace, _)| (namespace.clone(), BTreeSet::new()))
            .collect();
        for claim in self.claims.state() {
            let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
            if let Some(claims) = claims.get_mut(namespace) {
                claims.insert(counted(&claim));
            }
        }
        self.looked
            .retain(|namespace, _| quotas.keys().any(|(of, _)| of == namespace));
        self.written.retain(|of, _| quotas.contains_key(of));
        for ((namespace, name), quota) in &quotas {
            match &quota.spec {
                Ok(spec) => {
                    let seen = claims.remove(namespace).unwrap_or_default();
                    let seen = (quota.generation, seen);
                    self.keep(namespace, spec, seen).await;
                }
                Err(error) => self.refuse(namespace, name, quota, error).await,
            }
        }
        for ((namespace, name), quota) in &quotas {
            self.show(namespace, name, quota).await;
        }
        let waiting: u32 = self.looked.values().map(|one| one.status.waiting).sum();
        let number = |number| i64::try_from(number).unwrap_or(i64::MAX);
        self.metrics.quotas.set(number(self.looked.len()));
        self.metrics.quota_waiting.set(waiting.into());
    }

    /// Looks at a namespace, unless nothing of it has changed, and lets through who fits.
    async fn keep(&mut self, namespace: &str, spec: &GpuQuotaSpec, seen: (i64, BTreeSet<String>)) {
        if let Some(last) = self.looked.get(namespace) {
            let may_differ = last.has_failed || last.is_open && last.devices != self.devices;
            let is_due = may_differ && last.at.elapsed() >= self.every;
            if last.seen == seen && !is_due {
                return;
            }
        }
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), namespace);
        // Without a version: what the API server has stored, not what a cache of it has.
        let claims = match api.list(&ListParams::default()).await {
            Ok(claims) => claims.items,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(namespace, error, "failed to list claims, will retry");
                return;
            }
        };
        let classes = self.classes.found.iter();
        let classes = classes.map(|((_, name), class)| (name.clone(), class.clone()));
        let found = look(
            spec_limits(spec),
            &claims,
            &classes.collect(),
            &mut self.catalogue,
        );
        let mut has_failed = false;
        for grant in &found.grants {
            // Each write is asked for anew: this instance may have lost the Lease meanwhile.
            if !self.leads() {
                return;
            }
            has_failed |= !self.grant(&api, namespace, grant).await;
        }
        for (claim, uid) in &found.settled {
            if !self.leads() {
                return;
            }
            has_failed |= !self.settle(&api, namespace, claim, uid).await;
        }
        let looked = Looked {
            seen,
            devices: self.devices,
            at: Instant::now(),
            is_open: found.is_open,
            has_failed,
            status: status(&found),
        };
        self.looked.insert(namespace.to_owned(), looked);
    }

    /// Lets a claim through. Returns whether that was done.
    async fn grant(&self, api: &Api<ResourceClaim>, namespace: &str, grant: &Grant) -> bool {
        let Grant { claim, uid, amount } = grant;
        // By its UID a claim of the same name is not taken for it.
        let patch = json!({"metadata": {
            "uid": uid, "annotations": {annotations::QUOTA: amount.to_string()},
        }});
        match api
            .patch_metadata(claim, &PatchParams::default(), &Patch::Merge(&patch))
            .await
        {
            Ok(_) => {
                self.metrics.quota_grants.inc();
                tracing::info!(namespace, claim, %amount, "let a claim through for its quota");
                true
            }
            Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => false,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(namespace, claim, error, "failed to let a claim through");
                false
            }
        }
    }

    /// Takes the grant of an allocated claim away: from then on it counts with what it was given.
    /// Returns whether that was done.
    async fn settle(
        &self,
        api: &Api<ResourceClaim>,
        namespace: &str,
        claim: &str,
        uid: &str,
    ) -> bool {
        let none = json!({"metadata": {"uid": uid, "annotations": {annotations::QUOTA: null}}});
        let settled = api
            .patch_metadata(claim, &PatchParams::default(), &Patch::Merge(&none))
            .await;
        match settled {
            Ok(_) => true,
            Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => false,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(namespace, claim, error, "failed to take a grant away");
                false
            }
        }
    }

    /// Notes that a quota cannot be kept. Nothing is let through by it.
    async fn refuse(&mut self, namespace: &str, name: &str, quota: &Quota, error: &QuotaError) {
        let message = error.to_string();
        if name == divvy_api::quota::NAME {
            self.looked.remove(namespace);
        }
        let said = quota.status.clone().unwrap_or_default();
        let status = GpuQuotaStatus { message, ..said };
        if self.say(namespace, name, quota, &status).await {
            let error = status.message;
            tracing::warn!(namespace, name, error, "a GpuQuota cannot be kept");
        }
    }

    /// Writes the status of a quota that says something else, now and then.
    async fn show(&mut self, namespace: &str, name: &str, quota: &Quota) {
        let looked = self.looked.get(namespace).filter(|_| quota.spec.is_ok());
        if let Some(status) = looked.map(|looked| looked.status.clone()) {
            self.say(namespace, name, quota, &status).await;
        }
    }

    /// Writes a status, unless the quota has it or one was written a moment ago. Returns whether it
    /// was to be written.
    async fn say(
        &mut self,
        namespace: &str,
        name: &str,
        quota: &Quota,
        status: &GpuQuotaStatus,
    ) -> bool {
        let key = (namespace.to_owned(), name.to_owned());
        // What was written may not be seen yet: the watch has the claims' changes before it.
        let is_recent = self.written.get(&key).is_some_and(|(at, said)| {
            let is_same = said.as_ref() == Some(status);
            at.elapsed() < self.every * if is_same { AGAIN } else { 1 }
        });
        if quota.status.as_ref() == Some(status) || is_recent || !self.leads() {
            return false;
        }
        let is_written = self.write(namespace, name, status).await;
        let said = is_written.then(|| status.clone());
        self.written.insert(key, (Instant::now(), said));
        true
    }

    /// Writes the status of a quota. Returns whether that was done.
    async fn write(&self, namespace: &str, name: &str, status: &GpuQuotaStatus) -> bool {
        // As it is written, not as the type: a bad one gets its words, too.
        let kind = ApiResource::erase::<GpuQuota>(&());
        let client = self.client.clone();
        let api = Api::<DynamicObject>::namespaced_with(client, namespace, &kind);
        // What is empty is left out and would stay as it was.
        let mut status = json!(status);
        if let Some(fields) = status.as_object_mut() {
            fields.entry("message").or_insert(Value::Null);
        }
        let patch = json!({"status": status});
        let written = api
            .patch_status(name, &PatchParams::default(), &Patch::Merge(&patch))
            .await;
        match written {
            Ok(_) => true,
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => false,
            Err(error) => {
                let error = chain(&error);
                tracing::warn!(namespace, error, "failed to write a GpuQuota, will retry");
                false
            }
        }
    }
}

/// Logs a failure of a watch, which begins again by itself.
fn sound<K>(kind: &str, event: Result<Event<K>, watcher::Error>) -> Option<Event<K>> {
    event
        .inspect_err(|error| tracing::warn!(error = chain(error), "failed to watch {kind}"))
        .ok()
}

/// Returns what counts of a claim, as one text: its UID, its grant, and what it was given.
/// Conditions and users of a claim change more often.
fn counted(claim: &ResourceClaim) -> String {
    let meta = &claim.metadata;
    let grant = meta
        .annotations
        .as_ref()
        .and_then(|all| all.get(annotations::QUOTA));
    let allocation = claim
        .status
        .as_ref()
        .and_then(|status| status.allocation.as_ref());
    let devices = allocation.and_then(|allocation| allocation.devices.as_ref());
    let results = devices
        .into_iter()
        .flat_map(|devices| &devices.results)
        .flatten();
    let given: Vec<_> = results
        .map(|one| format!("{} {} {:?}", one.pool, one.device, one.consumed_capacity))
        .collect();
    let is_ending = meta.deletion_timestamp.is_some();
    format!("{:?} {grant:?} {is_ending} {}", meta.uid, given.join(" "))
}

fn quota(object: DynamicObject) -> Quota {
    let name = object.metadata.name.unwrap_or_default();
    let status = object.data.get("status").cloned();
    Quota {
        generation: object.metadata.generation.unwrap_or_default(),
        spec: decode(&name, object.data.get("spec").unwrap_or(&Value::Null)),
        status: status.and_then(|status| serde_json::from_value(status).ok()),
    }
}

fn status(look: &Look) -> GpuQuotaStatus {
    let number = |number| u32::try_from(number).unwrap_or(u32::MAX);
    GpuQuotaStatus {
        used: GpuAmount {
            memory: look.used.memory_text(),
            percent: look.used.percent_text(),
        },
        claims: number(look.claims.len().saturating_sub(look.waiting())),
        waiting: number(look.waiting()),
        message: look.blocked.clone().unwrap_or_default(),
    }
}
