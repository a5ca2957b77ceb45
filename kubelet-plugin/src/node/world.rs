//! Knowledge of the brain that does not decide about the offer: for the GpuNode, the kubelet,
//! metrics and the debug page.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_api::node::GpuNodeStatus;
use divvy_model::GpuUuid;
use divvy_offer::{Finding, HealthView, OneMode, Outputs, Severity, Uses};
use serde::Serialize;

use super::facts::{Effective, GpusSeen, HealthState, KnownPolicies, Recorded, SupervisorAway};
use super::findings::{Known, findings};
use crate::sinks::gpu_node::report;

/// The latest fact of each source.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) seen: GpusSeen,
    pub(super) view: Option<Arc<HealthView>>,
    pub(super) book: Arc<HealthState>,
    pub(super) policies: Option<Arc<KnownPolicies>>,
    pub(super) recorded: Option<Arc<Recorded>>,
    /// GPUs whose grant cannot be stored, and why.
    pub(super) ungranted: BTreeMap<GpuUuid, String>,
    /// Why the plugin's folder takes nothing.
    pub(super) unwritable: Option<String>,
    /// True while NVIDIA's plugin serves the node.
    pub(super) nvidia_serves: bool,
    /// The MPS supervisor, while it does not answer.
    pub(super) supervisor_away: Option<SupervisorAway>,
}

/// The devices that claims hold, and their health.
#[derive(Debug, Clone, Default)]
pub(crate) struct Holdings {
    /// By claim.
    pub(crate) devices: Arc<Recorded>,
    pub(crate) health: Arc<HealthView>,
}

/// Everything, for the debug page.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    pub(crate) neighbours: Uses,
    pub(crate) health: Arc<HealthState>,
    pub(crate) effective: Option<Effective>,
    pub(crate) offering: Offering,
}

/// The offer, and the reasons for whatever is not in it.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Offering {
    /// Why a GPU may be published in one mode only.
    #[serde(serialize_with = "in_words")]
    pub(crate) one_mode: Option<OneMode>,
    /// True if policies ask for several modes.
    pub(crate) several_asked: bool,
    /// The reasons why something is left out.
    pub(crate) notes: Vec<String>,
}

#[expect(clippy::ref_option, reason = "as serde calls it")]
fn in_words<S: serde::Serializer>(why: &Option<OneMode>, to: S) -> Result<S::Ok, S::Error> {
    why.as_ref().map(ToString::to_string).serialize(to)
}

impl Node {
    /// Returns the policies and the rules that follow from them; `None` before a pool is decided.
    fn effective(&self, outputs: &Outputs) -> Option<Effective> {
        let known = self.policies.clone()?;
        outputs.pool.is_some().then(|| Effective {
            known,
            resolved: outputs.resolved.clone(),
        })
    }

    /// Calls a function with everything that is known; `None` before the records are read.
    fn with_known<T>(&self, outputs: &Outputs, then: impl FnOnce(&Known<'_>) -> T) -> Option<T> {
        let recorded = self.recorded.as_ref()?;
        let effective = self.effective(outputs);
        let seen = &self.seen;
        Some(then(&Known {
            inventory: seen.inventory.as_deref(),
            recorded,
            pool: outputs.pool.as_deref(),
            effective: effective.as_ref(),
            health: &self.view.clone().unwrap_or_default(),
            offer: &outputs.findings,
            driver: seen.down.as_deref().or(seen.problem.as_deref()),
            released: seen.released.as_deref(),
            kubernetes: outputs.kubernetes.clone(),
            ungranted: &self.ungranted,
            unwritable: self.unwritable.as_deref(),
            nvidia_serves: self.nvidia_serves,
            supervisor_away: self.supervisor_away.as_ref(),
        }))
    }

    /// Returns everything that people should know.
    pub(super) fn findings(&self, outputs: &Outputs) -> BTreeSet<Finding> {
        self.with_known(outputs, findings)
            .unwrap_or_else(|| outputs.findings.clone())
    }

    /// Builds the GpuNode's status. Returns `None` until inventory, policies and health are known,
    /// unless the driver is down: then it reports what is known.
    pub(super) fn report(
        &self,
        outputs: &Outputs,
        findings: &BTreeSet<Finding>,
    ) -> Option<GpuNodeStatus> {
        // Half a picture is worse than the last whole one, except where the driver is the reason
        // why it stays half.
        let decided = self.policies.is_some() && outputs.pool.is_some();
        let whole = self.seen.inventory.is_some() && decided && self.view.is_some();
        if !whole && self.seen.problem.is_none() {
            return None;
        }
        self.with_known(outputs, |known| report(known, findings))
    }

    pub(super) fn holdings(&self) -> Holdings {
        Holdings {
            devices: self.recorded.clone().unwrap_or_default(),
            health: self.view.clone().unwrap_or_default(),
        }
    }

    pub(super) fn state(&self, outputs: &Outputs) -> State {
        // From the findings: the facts themselves are the offer's.
        let mut neighbours = Uses::new();
        for finding in &outputs.findings {
            if let Finding::Neighbour { gpu, used } = finding {
                let uses = neighbours.entry(gpu.clone()).or_default();
                uses.insert(used.clone());
            }
        }
        let left_out = outputs
            .findings
            .iter()
            .filter(|one| one.shown().severity != Severity::Info);
        State {
            neighbours,
            health: self.book.clone(),
            effective: self.effective(outputs),
            offering: Offering {
                one_mode: outputs.one_mode.clone(),
                several_asked: outputs.several_asked,
                notes: left_out.map(ToString::to_string).collect(),
            },
        }
    }
}
