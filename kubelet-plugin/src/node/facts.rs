//! Knowledge that the tasks of the plugin pass on: the facts that sources send to the brain, and
//! the types that they are made of. Nothing here imports a task.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::policy::GpuPolicy;
use divvy_claims::{Fence, Head, MpsNote};
use divvy_executor::HeldDevice;
use divvy_model::health::{HealthBook, HealthChange};
use divvy_model::mig::{GpuInstanceId, Placement};
use divvy_model::{
    ClaimUid, GpuErrorCode, GpuTarget, GpuUuid, Inventory, Ordinals, PciAddress, ShareUnit,
};
use divvy_offer::{HealthView, Held, Records, Resolved};
use divvy_usage::GpuUsage;
use k8s_openapi::api::core::v1::Node;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::sinks::notifier::PolicyRef;

/// An observation of a source. A value of the source becomes a fact by `into()`: the part that
/// decides about the offer goes on as it is, beside it is what only reports show.
#[derive(Debug)]
pub(crate) struct Fact {
    /// [`divvy_offer::Fact::Time`] if nothing of it decides.
    pub(crate) offer: divvy_offer::Fact,
    pub(crate) report: Option<Report>,
}

/// The part of an observation that the GpuNode, Events, metrics and the debug page show.
#[derive(Debug)]
pub(crate) enum Report {
    /// The GPUs were read, or could not be.
    Gpus(GpusSeen),
    /// Faults that began or are over.
    Health(Health),
    /// Policies or the node's labels have changed.
    Policies(Arc<KnownPolicies>),
    /// The records, GPU states and numbers with everything that they say.
    Records(Recorded),
    /// The GPUs of which prepare cannot know what it may do, since that cannot be stored, and why.
    Ungranted(BTreeMap<GpuUuid, String>),
    /// The plugin's folder takes nothing (a full disk, say), and why; `None` once it does again.
    Unwritable(Option<String>),
    /// NVIDIA's plugin serves this node, in whose place divvy stands.
    NvidiaServes(bool),
    /// The node's MPS supervisor does not answer; `None` once it does again.
    SupervisorAway(Option<SupervisorAway>),
}

/// An MPS supervisor that does not answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SupervisorAway {
    pub(crate) socket: String,
    /// Name of the driver whose supervisor runs on the node instead.
    pub(crate) other: Option<String>,
}

impl From<divvy_offer::Fact> for Fact {
    fn from(offer: divvy_offer::Fact) -> Self {
        let report = None;
        Self { offer, report }
    }
}

impl From<Report> for Fact {
    fn from(report: Report) -> Self {
        let offer = match &report {
            Report::Gpus(seen) => match seen.inventory.clone() {
                Some(gpus) => divvy_offer::Fact::Inventory {
                    gpus,
                    driver_down: seen.down.is_some(),
                },
                None => divvy_offer::Fact::Time,
            },
            Report::Health(health) => divvy_offer::Fact::Health(health.view.clone()),
            Report::Policies(known) => divvy_offer::Fact::Policies {
                policies: known.policies.clone(),
                labels: known.labels.clone(),
            },
            Report::Records(recorded) => divvy_offer::Fact::Records(recorded.decisive()),
            Report::SupervisorAway(away) => divvy_offer::Fact::MpsAway(away.is_some()),
            Report::Ungranted(_) | Report::Unwritable(_) | Report::NvidiaServes(_) => {
                divvy_offer::Fact::Time
            }
        };
        Self {
            offer,
            report: Some(report),
        }
    }
}

/// Where sources send what they observe.
pub(crate) type Facts = mpsc::UnboundedSender<Fact>;

/// The latest state of the GPUs.
#[derive(Debug, Clone, Default)]
pub(crate) struct GpusSeen {
    /// The result of the last successful read; `None` before the first.
    pub(crate) inventory: Option<Arc<Inventory>>,
    /// When that reading began.
    pub(crate) read_at: Option<std::time::Instant>,
    /// Why the last attempt failed, if it did.
    pub(crate) problem: Option<String>,
    /// Why nothing that needs the driver can be prepared now, although its GPUs were seen.
    pub(crate) down: Option<String>,
    /// The request to release the driver, in words, while it is released.
    pub(crate) released: Option<String>,
}

/// Why no container can be given a GPU; `None` if one can, or the driver was let go on request.
pub(crate) fn what_is_missing(seen: &GpusSeen) -> Option<String> {
    match seen {
        GpusSeen {
            problem: Some(problem),
            ..
        } => Some(problem.clone()),
        GpusSeen {
            down: Some(why),
            released: None,
            ..
        } => Some(why.clone()),
        GpusSeen {
            inventory: Some(_), ..
        } => None,
        GpusSeen {
            inventory: None, ..
        } => Some("reading the GPUs".to_owned()),
    }
}

/// The health of the GPUs.
#[derive(Debug)]
pub(crate) struct Health {
    /// The present faults.
    pub(crate) view: Arc<HealthView>,
    /// All of it, for metrics and the debug page.
    pub(crate) book: Arc<HealthState>,
    /// Faults that began or are over, and their place on the GPU.
    pub(crate) changes: Vec<(HealthChange, Option<Placement>)>,
}

/// The memory of the health source.
#[derive(Debug, Clone, Default)]
pub(crate) struct HealthState {
    pub(crate) book: HealthBook,
    /// Where the GPU instances are that something is wrong with.
    pub(crate) places: BTreeMap<(GpuUuid, GpuInstanceId), Placement>,
    /// True once a fact was sent.
    pub(crate) sent: bool,
    /// GPUs whose events cannot be had, and why; all of them if the driver has none.
    pub(crate) unmonitored: BTreeMap<GpuUuid, GpuErrorCode>,
    pub(crate) no_events: Option<(GpuErrorCode, String)>,
    /// Places of partitions that claims hold and that are no longer there.
    pub(crate) gone: BTreeSet<(GpuUuid, Placement)>,
    /// Where each GPU of the node was last seen.
    pub(crate) slots: BTreeMap<GpuUuid, PciAddress>,
}

/// The policies, and the labels of the node that they may ask for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KnownPolicies {
    /// True if the cluster has the definition of `GpuPolicy`.
    pub(crate) served: bool,
    /// The policies that can be read; of one that cannot, the last version that could.
    pub(crate) policies: Vec<GpuPolicy>,
    /// Policies whose present version cannot be read, and why.
    pub(crate) bad: BTreeMap<String, String>,
    /// Labels of this node.
    pub(crate) labels: BTreeMap<String, String>,
}

impl KnownPolicies {
    /// A policy, for Events about it.
    pub(crate) fn reference(&self, name: &str) -> PolicyRef {
        let policy = self.policies.iter().find(|policy| policy.name == name);
        PolicyRef {
            name: name.to_owned(),
            uid: policy.and_then(|policy| policy.uid.clone()),
            generation: policy.and_then(|policy| policy.generation),
        }
    }
}

/// The policies in force, for the GpuNode and the debug page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Effective {
    /// The policies and the node's labels.
    pub(crate) known: Arc<KnownPolicies>,
    /// The rules that follow from them for each GPU.
    pub(crate) resolved: Arc<Resolved>,
}

impl Effective {
    /// Returns the JSON of `/debug/state`.
    pub(crate) fn state(&self) -> Value {
        let by = |uuid| self.resolved.by.get(uuid).map(ToString::to_string);
        let gpus = self.resolved.rules.iter().map(|(uuid, rules)| {
            (
                uuid.to_string(),
                json!({ "decidedBy": by(uuid), "rules": rules }),
            )
        });
        json!({
            "served": self.known.served,
            "policies": self.known.policies.iter().map(|policy| json!({
                "name": policy.name,
                "generation": policy.generation,
                "priority": policy.spec.priority,
            })).collect::<Vec<_>>(),
            "bad": self.known.bad,
            "nodeLabels": self.known.labels,
            "modeLock": self.resolved.mode_lock,
            "gpus": gpus.collect::<serde_json::Map<_, _>>(),
            "problems": self.resolved.problems.iter().map(ToString::to_string).collect::<Vec<_>>(),
        })
    }
}

/// The content of the numbers, records and GPU states of the node.
#[derive(Debug, Clone, Default)]
pub(crate) struct Recorded {
    /// The numbers in device names.
    pub(crate) ordinals: Ordinals,
    /// By claim.
    pub(crate) held: Vec<HeldDevice>,
    /// Claims that were released, still hold something, and are not being worked on.
    pub(crate) lingering: BTreeSet<ClaimUid>,
    /// GPUs about whose state something is not certain.
    pub(crate) fences: BTreeMap<GpuUuid, Vec<Fence>>,
    /// Records of a later version.
    pub(crate) newer: BTreeMap<ClaimUid, Head>,
    /// MIG instances that no record accounts for.
    pub(crate) foreign: Vec<(GpuUuid, Placement)>,
    /// GPUs whose MIG mode divvy has changed, with the mode as it was found.
    pub(crate) mig_found: BTreeMap<GpuUuid, bool>,
    /// The units in which shares of GPUs were last published, of those that had any.
    pub(crate) share_units: BTreeMap<GpuUuid, ShareUnit>,
    /// The MPS servers that run.
    pub(crate) mps_servers: BTreeMap<GpuTarget, MpsNote>,
}

impl Recorded {
    /// Returns the part that decides about the offer.
    fn decisive(&self) -> Records {
        // A claim that is being worked on holds its device; it lingers only once that has
        // ended.
        let held = self.held.iter().map(|held| Held {
            claim: format!("{}/{}", held.claim.namespace, held.claim.name),
            hold: held.hold.clone(),
            lingering: self.lingering.contains(&held.claim.uid),
        });
        let servers = self.mps_servers.iter();
        let wedged = servers
            .clone()
            .filter_map(|(of, noted)| Some((of.clone(), noted.wedged?)));
        Records {
            ordinals: self.ordinals.clone(),
            held: held.collect(),
            fenced: self.fenced(),
            foreign: self.foreign.clone(),
            mig_found: self.mig_found.clone(),
            share_units: self.share_units.clone(),
            mps_servers: servers
                .map(|(of, noted)| (of.clone(), noted.server))
                .collect(),
            mps_wedged: wedged.collect(),
        }
    }

    /// Returns the GPUs about whose state something is not certain: a change was cut off, or a
    /// later version has written about them.
    pub(crate) fn fenced(&self) -> BTreeSet<GpuUuid> {
        let newer = self.newer.values().flat_map(|head| &head.gpus);
        self.fences.keys().chain(newer).cloned().collect()
    }
}

/// The part of the Node object that decisions need.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct NodeFacts {
    pub(crate) labels: BTreeMap<String, String>,
    /// True if it is cordoned.
    pub(crate) cordoned: bool,
}

impl From<Node> for NodeFacts {
    fn from(node: Node) -> Self {
        let cordoned = node
            .spec
            .and_then(|spec| spec.unschedulable)
            .unwrap_or_default();
        Self {
            labels: node.metadata.labels.unwrap_or_default(),
            cordoned,
        }
    }
}

/// The last answer of the kubelet to the registration.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Registered {
    /// Nothing yet.
    #[default]
    NotYet,
    /// We are registered.
    Yes,
    /// It refused, and why. It tries again by itself.
    Refused(String),
}

/// The names of the pods that have each claim for devices of a driver, with those of their
/// containers that use it; by namespace and name of the claim.
pub(crate) type PodsOfClaims = BTreeMap<(String, String), BTreeMap<String, BTreeSet<String>>>;

/// The use of the GPUs that claims hold.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Used {
    pub(crate) gpus: BTreeMap<GpuUuid, GpuUsage>,
    /// Names of the GPUs, and how old the oldest of their figures is.
    pub(crate) about: BTreeMap<GpuUuid, (String, Duration)>,
}
