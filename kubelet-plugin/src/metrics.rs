//! The plugin's metrics. Every one is counted somewhere: a test compares this list with what a used plugin shows.

use divvy_telemetry::{Counter, Counters, Durations, Gauge, Gauges, MetricsRegistry};

/// Categories of failure that exist from the start; others (of later refusals) appear when they happen.
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

/// What a claim operation came to, as a label.
pub(crate) const OK: &str = "ok";
/// See [`OK`].
pub(crate) const ERROR: &str = "error";

/// Handles to the metrics.
#[derive(Clone)]
pub(crate) struct Metrics {
    /// How long one claim's prepare or unprepare took, API read included.
    pub(crate) claim_seconds: Durations,
    /// Failed prepares and unprepares by category.
    failures: Counters,
    /// Claims being worked on.
    pub(crate) running: Gauge,
    /// Claims with a record, by phase.
    records: Gauges,
    /// GPUs that answer.
    pub(crate) gpus: Gauge,
    /// Devices in the pool that is to be published.
    pub(crate) devices: Gauge,
    /// Whether the published slices are what they should be.
    pub(crate) in_sync: Gauge,
    /// Whether the kubelet has us registered.
    pub(crate) registered: Gauge,
    /// Whether this instance publishes and reconciles.
    pub(crate) publishes: Gauge,
    /// CDI files written again after they had vanished.
    pub(crate) cdi_restored: Counter,
    /// Rounds of reconcile.
    pub(crate) reconciles: Counter,
}

impl Metrics {
    pub(crate) fn new(registry: &MetricsRegistry) -> Self {
        let failure = |operation: &str, category: &str| {
            vec![("operation", operation.to_owned()), ("category", category.to_owned())]
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
            devices: registry.gauge("devices", "Devices to be published"),
            in_sync: registry
                .gauge("slices_in_sync", "1 if the published ResourceSlices are what they should be"),
            registered: registry.gauge("registered", "1 if the kubelet has the plugin registered"),
            publishes: registry.gauge("publishes", "1 if this instance publishes and reconciles"),
            cdi_restored: registry
                .counter("cdi_files_restored", "CDI files written again after they had vanished"),
            reconciles: registry
                .counter("reconciles", "Rounds of comparing records with the API and the GPUs"),
        }
    }

    pub(crate) fn failed(&self, operation: &str, category: &str) {
        let labels = vec![("operation", operation.to_owned()), ("category", category.to_owned())];
        self.failures.get_or_create_owned(&labels).inc();
    }

    /// Sets the number of records in each phase, in the order of [`PHASES`].
    pub(crate) fn records(&self, counts: [i64; PHASES.len()]) {
        for (phase, count) in PHASES.into_iter().zip(counts) {
            self.records.get_or_create_owned(&vec![("phase", phase.to_owned())]).set(count);
        }
    }
}

/// Phases of records, as labels.
pub(crate) const PHASES: [&str; 3] = ["preparing", "prepared", "leaving"];
