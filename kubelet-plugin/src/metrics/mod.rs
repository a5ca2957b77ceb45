//! The plugin's metrics. Every one is counted somewhere: a test compares this list with what a used
//! plugin shows.

mod gpu_time;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::AtomicI64;
use std::sync::{Arc, Mutex};

use divvy_claims::Phase;
use divvy_executor::HeldDevice;
use divvy_model::health::{HealthBook, XidClass};
use divvy_model::{ClaimUid, DeviceKind, GpuUuid, Inventory, Ordinals};
use divvy_offer::{Finding, HealthView, OneMode, Outputs};
use divvy_telemetry::{Counter, Counters, Durations, Gauge, Gauges, Labels, MetricsRegistry};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Atomic;

use crate::caps::rounds::Repair;
use crate::node::facts::Recorded;

pub(crate) use gpu_time::GpuTimeMetrics;
pub(crate) use usage::UsageMetrics;

/// Categories of failure that exist from the start; others (of later refusals) appear when they
/// happen.
const FAILURES: [&str; 12] = [
    "api",
    "bad-config",
    "cancelled",
    "conflict",
    "device-gone",
    "held",
    "internal",
    "no-driver",
    "not-allocated",
    "other-uid",
    "store",
    "unknown-device",
];

/// The label of a claim operation that succeeded.
pub(crate) const OK: &str = "ok";
/// See [`OK`].
pub(crate) const ERROR: &str = "error";

/// Handles to the metrics.
#[derive(Clone)]
pub(crate) struct Metrics {
    /// Time that one claim's prepare or unprepare took, API read included.
    pub(crate) claim_seconds: Durations,
    /// Failed prepares and unprepares by category.
    failures: Counters,
    /// Claims being worked on.
    pub(crate) running: Gauge,
    /// Claims with a record, by phase.
    records: Gauges,
    /// GPUs that answer.
    gpus: Gauge,
    /// GPUs with which nothing is wrong.
    healthy: Info,
    /// Present faults.
    ailments: Info,
    xids: Counters,
    /// GPUs whose events cannot be had.
    pub(crate) unmonitored: Gauge,
    /// GPUs withheld because what is on them is not certain.
    fenced: Gauge,
    /// MPS servers that serve no new program.
    mps_wedged: Gauge,
    /// 1 if the driver answers.
    pub(crate) driver_up: Gauge,
    /// Devices of claims that are not there any more.
    gone: Info,
    /// Devices of claims, with their pods.
    devices_of_claims: Info,
    /// Published slices, and their size.
    pub(crate) slices: Gauge,
    /// See [`Self::slices`].
    pub(crate) slices_bytes: Gauge,
    /// Devices in the pool that is to be published.
    devices: Gauge,
    /// 1 if GPUs are offered in one mode each although several are asked for, by reason.
    one_mode: Gauges,
    /// Policies in force.
    pub(crate) policies: Gauge,
    /// Policies whose present version cannot be read.
    pub(crate) policies_bad: Gauge,
    /// 1 if the published slices are up to date.
    pub(crate) in_sync: Gauge,
    /// 1 if the kubelet has us registered.
    pub(crate) registered: Gauge,
    /// True while this instance publishes and reconciles.
    pub(crate) publishes: Gauge,
    /// CDI files written again after they had vanished.
    pub(crate) cdi_restored: Counter,
    /// Caps of memory that the rounds have set, by reason.
    caps_repaired: Counters,
    /// Times that the file of GPU numbers was lost and made again.
    pub(crate) numbers_lost: Counter,
    /// Rounds of reconcile.
    pub(crate) reconciles: Counter,
    /// Metrics of use.
    pub(crate) usage: UsageMetrics,
    pub(crate) gpu_time: GpuTimeMetrics,
}

impl Metrics {
    pub(crate) fn new(registry: &MetricsRegistry) -> Self {
        let failure = |operation: &str, category: &str| {
            vec![
                ("operation", operation.to_owned()),
                ("category", category.to_owned()),
            ]
        };
        Self {
            claim_seconds: registry.durations(
                "claim_seconds",
                "Time to prepare or unprepare one claim, API read included",
                "operation",
                &["prepare", "unprepare"],
                &[OK, ERROR],
            ),
            failures: registry.counters(
                "claim_failures",
                "Failed prepares and unprepares of claims, by category",
                FAILURES.map(|category| failure("prepare", category)),
            ),
            running: registry.gauge("claims_running", "Claims being prepared or unprepared"),
            records: registry.gauges(
                "claim_records",
                "Claims with a record on this node, by phase",
                PHASES.map(|phase| vec![("phase", phase.to_owned())]),
            ),
            gpus: registry.gauge("gpus", "GPUs that answer"),
            healthy: Info::new(registry.gauges(
                "gpu_healthy",
                "1 if the GPU and its partitions are healthy",
                [],
            )),
            ailments: Info::new(registry.gauges("gpu_ailment", "Faults of a GPU or a partition", [])),
            xids: registry.counters("gpu_xids", "Xids that GPUs reported", []),
            unmonitored: registry.gauge("gpus_unmonitored", "GPUs without event monitoring"),
            mps_wedged: registry.gauge(
                "mps_servers_wedged",
                "MPS servers that have taken no new program for 30 seconds",
            ),
            fenced: registry.gauge("gpus_fenced", "GPUs withheld because their state is uncertain"),
            driver_up: registry.gauge("driver_up", "1 if the NVIDIA driver answers"),
            gone: Info::new(registry.gauges(
                "claim_device_gone",
                "1 if a device that a claim holds is not there any more",
                [],
            )),
            devices_of_claims: Info::new(registry.gauges(
                "claim_device_info",
                "Devices held by claims, with pods",
                [],
            )),
            slices: registry.gauge("slices", "ResourceSlices published"),
            slices_bytes: registry.gauge("slices_bytes", "Size of the published ResourceSlices, as JSON"),
            devices: registry.gauge("devices", "Devices to publish"),
            one_mode: registry.gauges(
                "one_mode",
                "1 if each GPU is offered in one mode although a policy requests several, by reason",
                OneMode::NAMES.map(|reason| vec![("reason", reason.to_owned())]),
            ),
            policies: registry.gauge("gpu_policies", "GpuPolicies in force"),
            policies_bad: registry
                .gauge("gpu_policies_bad", "GpuPolicies whose current version cannot be read"),
            in_sync: registry.gauge("slices_in_sync", "1 if the published ResourceSlices are up to date"),
            registered: registry.gauge("registered", "1 if the plugin is registered with the kubelet"),
            publishes: registry.gauge("publishes", "1 if this instance publishes and reconciles"),
            caps_repaired: registry.counters(
                "memory_caps_repaired",
                "Caps of the memory of pods that were not as they should be, and were set again",
                Repair::ALL.map(|what| vec![("why", what.reason().to_owned())]),
            ),
            cdi_restored: registry
                .counter("cdi_files_restored", "CDI files restored after they had vanished"),
            numbers_lost: registry
                .counter("gpu_numbers_lost", "Times that the file of GPU numbers was lost and rebuilt"),
            reconciles: registry.counter("reconciles", "Comparisons of records with the API and the GPUs"),
            usage: UsageMetrics::new(registry),
            gpu_time: GpuTimeMetrics::new(registry),
        }
    }

    pub(crate) fn failed(&self, operation: &str, category: &str) {
        let labels = vec![
            ("operation", operation.to_owned()),
            ("category", category.to_owned()),
        ];
        self.failures.get_or_create_owned(&labels).inc();
    }

    /// A cap of memory was set that was not there.
    pub(crate) fn cap_repaired(&self, what: Repair) {
        let labels = vec![("why", what.reason().to_owned())];
        self.caps_repaired.get_or_create_owned(&labels).inc();
    }

    pub(crate) fn xid(&self, gpu: String, xid: u32, class: XidClass) {
        let labels = vec![
            ("UUID", gpu),
            ("xid", xid.to_string()),
            ("class", class.name().to_owned()),
        ];
        self.xids.get_or_create_owned(&labels).inc();
    }

    /// Sets what is wrong with each GPU, and which are gone.
    pub(crate) fn health(&self, book: &HealthBook, view: &HealthView, ordinals: &Ordinals) {
        let name = |gpu: &GpuUuid| {
            ordinals
                .of(gpu)
                .map(|ordinal| DeviceKind::whole(ordinal).to_string())
        };
        let labels = |gpu: &GpuUuid| {
            vec![
                ("UUID", gpu.to_string()),
                ("device", name(gpu).unwrap_or_default()),
            ]
        };
        let gpus = book.gpus();
        // A GPU that is gone has no place in the book, and one whose partition is gone is well by
        // it: no series would look like no fault.
        let is_of_node = |gpu: &&GpuUuid| ordinals.of(gpu).is_some() || view.missing.contains(*gpu);
        let removed: Vec<&GpuUuid> = view.removed.iter().filter(is_of_node).collect();
        let halved: BTreeSet<&GpuUuid> = view.gone.iter().map(|(gpu, _)| gpu).collect();
        let listed = gpus.iter().map(|(uuid, gpu)| {
            let is_well = gpu.is_well() && !halved.contains(uuid);
            (labels(uuid), is_well.into())
        });
        let of_removed = removed.iter().map(|uuid| (labels(uuid), 0));
        self.healthy.set(listed.chain(of_removed).collect());
        let ailments = gpus.iter().flat_map(|(uuid, gpu)| {
            let whole = gpu.ailments.keys().map(|ailment| (None, ailment));
            let parts = gpu
                .partitions
                .iter()
                .flat_map(|(id, all)| all.keys().map(|a| (Some(id.0), a)));
            whole.chain(parts).map(|(instance, ailment)| {
                let mut labels = labels(uuid);
                labels.push(("ailment", ailment.name().to_owned()));
                labels.extend(instance.map(|id| ("GPU_I_ID", id.to_string())));
                (labels, 1)
            })
        });
        let removed = removed.iter().map(|uuid| (*uuid, "gpu-removed"));
        let halved = halved.iter().map(|uuid| (*uuid, "partition-gone"));
        let absent = removed.chain(halved).map(|(uuid, fault)| {
            let mut labels = labels(uuid);
            labels.push(("ailment", fault.to_owned()));
            (labels, 1)
        });
        self.ailments.set(ailments.chain(absent).collect());
    }

    /// Sets what claims hold and is not there any more.
    pub(crate) fn gone(&self, findings: &BTreeSet<Finding>) {
        let gone = findings.iter().filter_map(|finding| {
            let (device, claim, gpu) = match finding {
                Finding::GoneUnderClaim {
                    gpu, device, claim, ..
                } => (device, claim.as_str(), gpu.to_string()),
                // Allocated in the API, and never prepared here.
                Finding::HeldAndGone {
                    device,
                    recorded: false,
                } => (device, "", String::new()),
                _ => return None,
            };
            let (namespace, claim) = claim.split_once('/').unwrap_or_default();
            let labels = vec![
                ("namespace", namespace.to_owned()),
                ("claim", claim.to_owned()),
                ("device", device.to_string()),
                ("UUID", gpu),
            ];
            Some((labels, 1))
        });
        self.gone.set(gone.collect());
    }

    /// Sets what the records say.
    pub(crate) fn recorded(&self, recorded: &Recorded, fenced: usize) {
        let phases: BTreeMap<&ClaimUid, &Phase> = recorded
            .held
            .iter()
            .map(|held| (&held.claim.uid, &held.phase))
            .collect();
        let count =
            |is: fn(&Phase) -> bool| gauge(phases.values().filter(|phase| is(phase)).count());
        let counts = [
            count(|phase| matches!(phase, Phase::Preparing)),
            count(|phase| matches!(phase, Phase::Prepared)),
            count(|phase| matches!(phase, Phase::Leaving(_))),
        ];
        for (phase, count) in PHASES.into_iter().zip(counts) {
            self.records
                .get_or_create_owned(&vec![("phase", phase.to_owned())])
                .set(count);
        }
        self.fenced.set(gauge(fenced));
        let servers = recorded.mps_servers.values();
        let wedged = servers.filter(|noted| noted.wedged.is_some());
        self.mps_wedged.set(gauge(wedged.count()));
        self.held(&recorded.held);
    }

    /// Sets what is offered.
    pub(crate) fn offer(&self, inventory: Option<&Inventory>, outputs: &Outputs) {
        // Before the first pool nothing is offered, and zeros would look like a node without GPUs.
        let Some(pool) = &outputs.pool else { return };
        self.gpus
            .set(gauge(inventory.map_or(0, |inventory| inventory.gpus.len())));
        self.devices.set(gauge(pool.devices().count()));
        let why = outputs.one_mode.as_ref().filter(|_| outputs.several_asked);
        for reason in OneMode::NAMES {
            let so = why.is_some_and(|why| why.name() == reason);
            self.one_mode
                .get_or_create_owned(&vec![("reason", reason.to_owned())])
                .set(so.into());
        }
    }

    /// Sets who holds what: one series for each pod, or one for a claim without any.
    fn held(&self, held: &[HeldDevice]) {
        let each = held.iter().flat_map(|held| {
            let mut labels: Labels = vec![
                ("namespace", held.claim.namespace.clone()),
                ("claim", held.claim.name.clone()),
                ("claim_uid", held.claim.uid.to_string()),
                ("device", held.hold.device.to_string()),
                ("UUID", held.hold.gpu.to_string()),
            ];
            if let Some(made) = &held.made {
                labels.push(("GPU_I_ID", made.gi.0.to_string()));
                labels.push(("mig_uuid", made.uuid.to_string()));
            }
            let pods: Vec<&str> = match held.pods.as_slice() {
                [] => vec![""],
                pods => pods.iter().map(|pod| pod.name.as_str()).collect(),
            };
            let series: Vec<(Labels, i64)> = pods
                .into_iter()
                .map(|pod| {
                    let mut labels = labels.clone();
                    labels.push(("pod", pod.to_owned()));
                    (labels, 1)
                })
                .collect();
            series
        });
        self.devices_of_claims.set(each.collect());
    }
}

fn gauge(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Gauges whose series come and go with the things they are about.
pub(crate) struct Info<N = i64, A = AtomicI64> {
    gauges: Family<Labels, prometheus_client::metrics::gauge::Gauge<N, A>>,
    known: Arc<Mutex<BTreeMap<Labels, N>>>,
}

impl<N, A> Clone for Info<N, A> {
    fn clone(&self) -> Self {
        Self {
            gauges: self.gauges.clone(),
            known: self.known.clone(),
        }
    }
}

impl<N: Copy + PartialEq, A: Atomic<N> + Default> Info<N, A> {
    pub(crate) fn new(
        gauges: Family<Labels, prometheus_client::metrics::gauge::Gauge<N, A>>,
    ) -> Self {
        Self {
            gauges,
            known: Arc::default(),
        }
    }

    /// These series and no others.
    pub(crate) fn set(&self, now: BTreeMap<Labels, N>) {
        let mut known = crate::lock(&self.known);
        // Most sets are unchanged. Then nothing of the family is locked, which a scrape reads.
        if *known == now {
            return;
        }
        // Series that are over are removed before others are set: a pod that moves must not be seen
        // twice.
        for gone in known.keys().filter(|labels| !now.contains_key(*labels)) {
            self.gauges.remove(gone);
        }
        for (labels, value) in &now {
            self.gauges.get_or_create_owned(labels).set(*value);
        }
        *known = now;
    }
}

/// Phases of records, as labels.
const PHASES: [&str; 3] = ["preparing", "prepared", "leaving"];
