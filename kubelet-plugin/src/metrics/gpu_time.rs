//! Metrics of GPU time: sums that only grow, by namespace, class, product and form.

use divvy_telemetry::{Counters, Labels, MetricsRegistry};
use divvy_usage::{Ledger, Series, WHOLE};

/// Handles to them.
#[derive(Clone)]
pub(crate) struct GpuTimeMetrics {
    granted: Counters,
    used: Counters,
    granted_memory: Counters,
    used_memory: Counters,
    blocked: Counters,
}

impl GpuTimeMetrics {
    pub(crate) fn new(registry: &MetricsRegistry) -> Self {
        let counters = |name: &str, help: &str| registry.counters(name, help, []);
        Self {
            granted: counters(
                "gpu_seconds_granted",
                "Time for which claims have had GPUs, in seconds of a whole GPU by its memory",
            ),
            used: counters(
                "gpu_seconds_used",
                "Time for which claims have computed, in seconds of a whole GPU",
            ),
            granted_memory: counters(
                "gpu_gib_seconds_granted",
                "GPU memory in GiB that claims have had, times seconds",
            ),
            used_memory: counters(
                "gpu_gib_seconds_used",
                "GPU memory in GiB that claims have used, times seconds",
            ),
            blocked: counters(
                "gpu_seconds_blocked",
                "Time for which the rest of a GPU that claims hold in part could be had in no other form, in seconds of a whole GPU",
            ),
        }
    }

    /// Shows sums that are saved.
    pub(crate) fn show(&self, ledger: &Ledger) {
        for (series, sums) in ledger.sums() {
            let labels = labels(series);
            raise(&self.granted, &labels, sums.granted.gpu_seconds());
            raise(&self.used, &labels, sums.used.gpu_seconds());
            raise(&self.granted_memory, &labels, sums.granted.gib_seconds());
            raise(&self.used_memory, &labels, sums.used.gib_seconds());
        }
        for (product, form, rest) in ledger.blocked() {
            let labels = vec![("product", product.to_owned()), ("form", form.to_owned())];
            raise(&self.blocked, &labels, rest / (WHOLE * 1000));
        }
    }
}

fn labels(series: &Series) -> Labels {
    vec![
        ("namespace", series.namespace.clone()),
        ("class", series.class.clone()),
        ("product", series.product.clone()),
        ("form", series.form.clone()),
    ]
}

/// Brings a counter to a sum.
fn raise(counters: &Counters, labels: &Labels, sum: u64) {
    let counter = counters.get_or_create_owned(labels);
    counter.inc_by(sum.saturating_sub(counter.get()));
}
