//! What the brain knows beside what decides about the offer: for the GpuNode, the kubelet, metrics and the debug page.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_api::node::GpuNodeStatus;
use divvy_model::GpuUuid;
use divvy_offer::{HealthView, Held, OneMode, Outputs, Records};
use serde::Serialize;

use super::Recorded;
use crate::neighbours::{Use, Uses};
use crate::sinks::gpu_node::{Facts, report};
use crate::sources::health;
use crate::sources::inventory::GpusSeen;
use crate::sources::policies::{Effective, KnownPolicies};

/// The latest fact of each source.
#[derive(Debug, Default)]
pub(super) struct Node {
    pub(super) seen: GpusSeen,
    pub(super) view: Option<Arc<HealthView>>,
    pub(super) book: Arc<health::HealthState>,
    pub(super) policies: Option<Arc<KnownPolicies>>,
    pub(super) neighbours: Arc<Uses>,
    pub(super) recorded: Option<Arc<Recorded>>,
}

/// What claims hold, and how it is.
#[derive(Debug, Clone, Default)]
pub(crate) struct Holdings {
    /// By claim.
    pub(crate) devices: Arc<Recorded>,
    /// The health of the GPUs.
    pub(crate) health: Arc<HealthView>,
}

/// Everything, for the debug page.
#[derive(Debug, Clone, Default)]
pub(crate) struct State {
    pub(crate) neighbours: Arc<Uses>,
    pub(crate) health: Arc<health::HealthState>,
    pub(crate) effective: Option<Effective>,
    pub(crate) offering: Offering,
}

/// What is offered and what is not.
#[derive(Debug, Clone, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Offering {
    /// Why a GPU may be published in one mode only.
    #[serde(serialize_with = "in_words")]
    pub(crate) one_mode: Option<OneMode>,
    /// Whether more was asked for.
    pub(crate) several_asked: bool,
    /// What is left out, and why.
    pub(crate) notes: Vec<String>,
}

#[expect(clippy::ref_option, reason = "as serde calls it")]
fn in_words<S: serde::Serializer>(why: &Option<OneMode>, to: S) -> Result<S::Ok, S::Error> {
    why.as_ref().map(ToString::to_string).serialize(to)
}

impl Recorded {
    /// What of it decides about the offer.
    pub(super) fn decisive(&self) -> Records {
        let newer = self.newer.values().flat_map(|head| &head.gpus);
        let held = self.held.iter().map(|held| Held {
            claim: format!("{}/{}", held.claim.namespace, held.claim.name),
            hold: held.hold.clone(),
            lingering: self.lingering.contains(&held.claim.uid),
        });
        Records {
            ordinals: self.ordinals.clone(),
            held: held.collect(),
            fenced: self.fences.keys().chain(newer).cloned().collect(),
            foreign: self.foreign.clone(),
        }
    }
}

impl Node {
    /// The value of the taint of each GPU that others use. What others have given out weighs more than what is seen there.
    pub(super) fn labels(&self) -> BTreeMap<GpuUuid, String> {
        let first = |uses: &BTreeSet<Use>| uses.first().map(|one| Use::label(one).to_owned());
        self.neighbours.iter().filter_map(|(gpu, uses)| Some((gpu.clone(), first(uses)?))).collect()
    }

    /// What the policies make of the GPUs.
    fn effective(&self, outputs: &Outputs) -> Option<Effective> {
        let known = self.policies.clone()?;
        outputs.pool.is_some().then(|| Effective { known, resolved: outputs.resolved.clone() })
    }

    /// What people read about the node. Half a picture is none, except where the driver is why it stays one.
    pub(super) fn report(&self, outputs: &Outputs) -> Option<GpuNodeStatus> {
        let recorded = self.recorded.as_ref()?;
        let effective = self.effective(outputs);
        let seen = &self.seen;
        let whole = seen.inventory.is_some() && effective.is_some() && self.view.is_some();
        if !whole && seen.problem.is_none() {
            return None;
        }
        let one_mode = outputs.one_mode.as_ref().filter(|_| outputs.several_asked);
        Some(report(&Facts {
            inventory: seen.inventory.as_deref(),
            recorded,
            pool: outputs.pool.as_deref(),
            effective: effective.as_ref(),
            health: &self.view.clone().unwrap_or_default(),
            neighbours: &self.neighbours,
            foreign: &outputs.foreign,
            notes: &outputs.notes,
            one_mode,
            driver: seen.down.as_deref().or(seen.problem.as_deref()),
            released: seen.released.as_deref(),
            kubernetes: outputs.kubernetes.clone(),
        }))
    }

    pub(super) fn holdings(&self) -> Holdings {
        Holdings {
            devices: self.recorded.clone().unwrap_or_default(),
            health: self.view.clone().unwrap_or_default(),
        }
    }

    pub(super) fn state(&self, outputs: &Outputs) -> State {
        State {
            neighbours: self.neighbours.clone(),
            health: self.book.clone(),
            effective: self.effective(outputs),
            offering: Offering {
                one_mode: outputs.one_mode.clone(),
                several_asked: outputs.several_asked,
                notes: outputs.notes.iter().map(ToString::to_string).collect(),
            },
        }
    }
}
