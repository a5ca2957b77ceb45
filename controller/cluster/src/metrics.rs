//! Metrics of the controller.

use divvy_telemetry::{Counter, Counters, Gauge, Gauges, Labels, MetricsRegistry};

use crate::due::{Candidate, Reason};

/// Result of an attempt to evict a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Evicted,
    /// It would be evicted, without the dry run.
    DryRun,
    /// A disruption budget forbids it for now.
    Refused,
    Failed,
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Evicted, Self::DryRun, Self::Refused, Self::Failed];

    fn label(self) -> &'static str {
        match self {
            Self::Evicted => "evicted",
            Self::DryRun => "dry-run",
            Self::Refused => "refused",
            Self::Failed => "failed",
        }
    }
}

/// Handles to the series.
#[derive(Debug, Clone)]
pub(crate) struct Metrics {
    reclaims: Counters,
    candidates: Gauges,
    labelled: Gauge,
    labels_left: Gauge,
    /// Claims that a quota has let through.
    pub(crate) quota_grants: Counter,
    /// Quotas that are kept.
    pub(crate) quotas: Gauge,
    /// Claims that wait for a quota.
    pub(crate) quota_waiting: Gauge,
    /// 1 in the instance that acts.
    pub(crate) leader: Gauge,
}

impl Metrics {
    pub(crate) fn new(registry: &MetricsRegistry) -> Self {
        let pairs = Reason::ALL
            .into_iter()
            .flat_map(|r| Outcome::ALL.map(|o| labels(r, o)));
        let reasons = Reason::ALL.map(|reason| vec![("reason", reason.label().to_owned())]);
        Self {
            reclaims: registry.counters(
                "reclaims",
                "Attempts to evict pods, by reason and result",
                pairs,
            ),
            candidates: registry.gauges(
                "reclaim_candidates",
                "Pods of claims that policies call to reclaim, by reason",
                reasons,
            ),
            labelled: registry.gauge(
                "labelled_nodes",
                "Nodes with a GpuNode whose labels this instance keeps",
            ),
            labels_left: registry.gauge(
                "node_labels_left",
                "Labels of nodes that another manager wrote with another value",
            ),
            quota_grants: registry.counter(
                "quota_grants",
                "Claims that this instance let through for the GpuQuota of their namespace",
            ),
            quotas: registry.gauge("gpu_quotas", "GpuQuotas that this instance keeps"),
            quota_waiting: registry.gauge(
                "quota_waiting_claims",
                "Claims that wait for the GpuQuota of their namespace",
            ),
            leader: registry.gauge(
                "leader",
                "Whether this instance acts (1) or waits for another (0)",
            ),
        }
    }

    pub(crate) fn count(&self, reason: Reason, outcome: Outcome) {
        self.reclaims
            .get_or_create_owned(&labels(reason, outcome))
            .inc();
    }

    pub(crate) fn show_labels(&self, labelled: usize, left: usize) {
        let number = |number| i64::try_from(number).unwrap_or(i64::MAX);
        self.labelled.set(number(labelled));
        self.labels_left.set(number(left));
    }

    pub(crate) fn show(&self, candidates: &[Candidate]) {
        for reason in Reason::ALL {
            let number = candidates
                .iter()
                .filter(|candidate| candidate.reason == reason)
                .count();
            let series = self
                .candidates
                .get_or_create_owned(&vec![("reason", reason.label().to_owned())]);
            series.set(i64::try_from(number).unwrap_or(i64::MAX));
        }
    }
}

fn labels(reason: Reason, outcome: Outcome) -> Labels {
    vec![
        ("reason", reason.label().to_owned()),
        ("result", outcome.label().to_owned()),
    ]
}
