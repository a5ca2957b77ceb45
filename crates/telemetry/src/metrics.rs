//! Metrics, all called `divvy_…`.

use std::fmt;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Metric, Registry};

/// Seconds: from a cached answer to the kubelet's deadline.
const BUCKETS: [f64; 15] = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 45.0,
];

/// The result of a timer that was dropped without one.
const CANCELLED: &str = "cancelled";

/// Label names and values of one series.
pub type Labels = Vec<(&'static str, String)>;

/// Counters that differ in their labels.
pub type Counters = Family<Labels, Counter>;

/// Gauges that differ in their labels.
pub type Gauges = Family<Labels, Gauge>;

/// Gauges of numbers that need not be whole.
pub type RealGauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// Where metrics are registered and read. Clones are handles to the same registry.
#[derive(Clone)]
pub struct MetricsRegistry {
    registry: Arc<Mutex<Registry>>,
    /// Series with this label are not shown.
    hidden: Option<&'static str>,
}

impl Default for MetricsRegistry {
    fn default() -> Self {
        Self {
            registry: Arc::new(Mutex::new(Registry::with_prefix("divvy"))),
            hidden: None,
        }
    }
}

impl fmt::Debug for MetricsRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MetricsRegistry")
    }
}

impl MetricsRegistry {
    /// An empty registry.
    pub fn new() -> Self {
        Self::default()
    }

    fn lock(&self) -> MutexGuard<'_, Registry> {
        // A panic while it was held leaves at worst one metric unregistered: the others are still
        // served.
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers any metric. The name goes without `divvy_` and, for counters, without `_total`;
    /// the help without a full stop.
    pub fn register(&self, name: &str, help: &str, metric: impl Metric) {
        self.lock().register(name, help, metric);
    }

    pub fn counter(&self, name: &str, help: &str) -> Counter {
        let counter = Counter::default();
        self.register(name, help, counter.clone());
        counter
    }

    pub fn gauge(&self, name: &str, help: &str) -> Gauge {
        let gauge = Gauge::default();
        self.register(name, help, gauge.clone());
        gauge
    }

    /// Counters by label; those in `zero` exist from the start, so that a first failure shows as a
    /// step.
    pub fn counters(
        &self,
        name: &str,
        help: &str,
        zero: impl IntoIterator<Item = Labels>,
    ) -> Counters {
        let family = Counters::default();
        for labels in zero {
            family.get_or_create_owned(&labels);
        }
        self.register(name, help, family.clone());
        family
    }

    /// Gauges by label; those in `zero` exist from the start.
    pub fn gauges(&self, name: &str, help: &str, zero: impl IntoIterator<Item = Labels>) -> Gauges {
        let family = Gauges::default();
        for labels in zero {
            family.get_or_create_owned(&labels);
        }
        self.register(name, help, family.clone());
        family
    }

    /// Gauges of numbers that need not be whole, by label.
    pub fn real_gauges(&self, name: &str, help: &str) -> RealGauges {
        let family = RealGauges::default();
        self.register(name, help, family.clone());
        family
    }

    /// Registers histograms of times in seconds, by the label `label` and by `result`. Every pair
    /// of the given values and results (and `cancelled`) exists from the start.
    pub fn durations(
        &self,
        name: &str,
        help: &str,
        label: &'static str,
        values: &[&'static str],
        results: &[&'static str],
    ) -> Durations {
        let durations = Durations {
            label,
            family: Family::new_with_constructor(|| Histogram::new(BUCKETS)),
        };
        for value in values {
            for result in results.iter().chain([&CANCELLED]) {
                durations.series(value, result);
            }
        }
        self.register(name, help, durations.family.clone());
        durations
    }

    /// The same registry, which does not show series that have this label.
    #[must_use]
    pub fn hiding(self, label: &'static str) -> Self {
        Self {
            hidden: Some(label),
            ..self
        }
    }

    /// All metrics in OpenMetrics text.
    pub fn encode(&self) -> String {
        let mut out = String::new();
        if let Err(error) = encode(&mut out, &self.lock()) {
            // Writing to a String does not fail; a metric's own encoder could.
            tracing::error!(%error, "a metric could not be written");
        }
        let Some(hidden) = self.hidden else {
            return out;
        };
        // Quotes in values are escaped: neither pattern can be part of one.
        let patterns = [format!("{{{hidden}=\""), format!(",{hidden}=\"")];
        let is_shown =
            |line: &&str| line.starts_with('#') || !patterns.iter().any(|p| line.contains(p));
        out.split_inclusive('\n').filter(is_shown).collect()
    }
}

type Histograms = Family<Vec<(&'static str, &'static str)>, Histogram, fn() -> Histogram>;

/// Histograms of durations, by one label and by result. See [`MetricsRegistry::durations`].
#[derive(Clone, Debug)]
pub struct Durations {
    label: &'static str,
    family: Histograms,
}

impl Durations {
    fn series(&self, value: &'static str, result: &'static str) -> Histogram {
        self.family
            .get_or_create_owned(&vec![(self.label, value), ("result", result)])
    }

    /// Starts the clock for one value of the label.
    pub fn start(&self, value: &'static str) -> Timer {
        Timer {
            durations: self.clone(),
            value,
            started: Instant::now(),
            result: CANCELLED,
        }
    }
}

/// A running clock. Dropped without [`done`](Self::done), it counts as `cancelled`.
#[derive(Debug)]
#[must_use = "the duration is recorded when this is dropped"]
pub struct Timer {
    durations: Durations,
    value: &'static str,
    started: Instant,
    result: &'static str,
}

impl Timer {
    /// Stops the clock with a result.
    pub fn done(mut self, result: &'static str) {
        self.result = result;
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        self.durations
            .series(self.value, self.result)
            .observe(self.started.elapsed().as_secs_f64());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn series_exist_before_anything_happened() {
        let metrics = MetricsRegistry::new();
        metrics.counters(
            "prepare_failures",
            "Failed",
            [vec![("reason", "held".to_owned())]],
        );
        metrics.gauge("devices", "Published devices");
        assert_eq!(
            metrics.encode(),
            "# HELP divvy_prepare_failures Failed.\n\
             # TYPE divvy_prepare_failures counter\n\
             divvy_prepare_failures_total{reason=\"held\"} 0\n\
             # HELP divvy_devices Published devices.\n\
             # TYPE divvy_devices gauge\n\
             divvy_devices 0\n\
             # EOF\n"
        );
    }

    #[test]
    fn series_with_a_hidden_label_are_not_shown_whatever_values_say() {
        let metrics = MetricsRegistry::new();
        let of = |namespace: &str| {
            vec![
                ("UUID", "GPU-1".to_owned()),
                ("namespace", namespace.to_owned()),
            ]
        };
        let tricky = vec![("why", "a,namespace=\"b\"".to_owned())];
        metrics.gauges(
            "held",
            "Held",
            [of("a"), vec![("namespace", "b".to_owned())], tricky],
        );
        assert_eq!(
            metrics
                .encode()
                .lines()
                .filter(|line| line.starts_with("divvy_held"))
                .count(),
            3
        );
        let shown = metrics.hiding("namespace").encode();
        let shown: Vec<&str> = shown
            .lines()
            .filter(|line| line.starts_with("divvy_held"))
            .collect();
        assert_eq!(shown, [r#"divvy_held{why="a,namespace=\"b\""} 0"#]);
    }

    #[test]
    fn a_timer_counts_under_its_result_and_a_dropped_one_as_cancelled() {
        let metrics = MetricsRegistry::new();
        let durations = metrics.durations(
            "call_seconds",
            "Calls",
            "method",
            &["prepare"],
            &["ok", "error"],
        );
        durations.start("prepare").done("ok");
        drop(durations.start("prepare"));
        let text = metrics.encode();
        let mut counts: Vec<_> = text
            .lines()
            .filter(|line| line.contains("_count"))
            .collect();
        counts.sort_unstable();
        assert_eq!(
            counts,
            [
                "divvy_call_seconds_count{method=\"prepare\",result=\"cancelled\"} 1",
                "divvy_call_seconds_count{method=\"prepare\",result=\"error\"} 0",
                "divvy_call_seconds_count{method=\"prepare\",result=\"ok\"} 1",
            ]
        );
    }
}
