//! [`World`]: everything that decides what a node offers, and the [`Fact`]s that change it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::policy::GpuPolicy;
use divvy_model::mig::{MigCapabilities, Placement};
use divvy_model::{
    ClaimUid, DeviceKind, DeviceName, GpuTarget, GpuUuid, Grant, Hold, Inventory, MpsFault,
    MpsServer, Ordinals, ShareUnit, Sharing,
};

use crate::withdrawal::DeviceState;
use crate::{
    Feature, Finding, GpuRules, HealthView, KubeVersion, ModeLock, OneMode, Pool, Resolved,
    ServerFeatures, Uses,
};

/// Settings that do not change while the node runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of the node.
    pub node: String,
    /// The rules of GPUs that no policy names.
    pub rules: GpuRules,
    /// The permission to publish a GPU in several modes, where no policy says it.
    pub mode_lock: ModeLock,
    /// True if nothing is offered before it is known which GPUs others use: where divvy takes the
    /// place of NVIDIA's driver, pods of that driver may still run.
    pub neighbours_first: bool,
    /// For how long after a device is tainted the scheduler may still write an allocation of it.
    pub leave: Duration,
    /// The interval at which the API is asked who holds devices that stay published only for their
    /// holders.
    pub ask_again: Duration,
    /// The time from a question without an answer to the next.
    pub retry: Duration,
}

/// Something that a source has observed.
#[derive(Debug, Clone)]
pub enum Fact {
    /// Time has passed.
    Time,
    /// The inventory as NVML has it.
    Inventory {
        /// The GPUs as they were last read.
        gpus: Arc<Inventory>,
        /// True if the driver cannot be used now.
        driver_down: bool,
    },
    Health(Arc<HealthView>),
    /// The policies in force, and the labels of the node.
    Policies {
        /// The policies that can be read.
        policies: Vec<GpuPolicy>,
        /// The node's labels.
        labels: BTreeMap<String, String>,
    },
    /// GPUs that others use.
    Neighbours(Uses),
    /// The content of the node's records.
    Records(Records),
    /// The API server answered.
    Server {
        version: KubeVersion,
        /// The features whose fields were lost in a dry run, if one was answered. Together with the
        /// version: a device without the fields that limit its use must not be published, not even
        /// for a moment.
        dropped: Option<BTreeSet<Feature>>,
    },
    /// Fields of these features were sent and did not come back.
    Dropped(BTreeSet<Feature>),
    /// The answer to an [`Ask`]; `None` if there was none.
    Answer(Option<Answer>),
    /// A prepare was refused.
    Conflict(ModeConflict),
    /// True if the node's MPS supervisor is away: it does not answer, and not only for a moment.
    MpsAway(bool),
    /// The API server has accepted a pool in full.
    Published(Published),
}

/// Caps of memory that the slices in the API promise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Published {
    /// GPUs whose shares are published as capped, by their number.
    pub capped: BTreeSet<u32>,
    /// Second since the Unix epoch.
    pub at: i64,
}

/// A claim was refused at prepare: its device belongs to a GPU that another claim uses in another
/// mode.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ModeConflict {
    /// The claim that was refused.
    pub claim: Claimant,
    pub device: DeviceName,
    /// The claim that uses the GPU.
    pub holder: Claimant,
    /// The device of that one.
    pub held: DeviceName,
    pub gpu: GpuUuid,
}

/// A claim, as messages name it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Claimant {
    pub uid: ClaimUid,
    /// `namespace/name`.
    pub name: String,
}

/// The content of the node's records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Records {
    /// The numbers in device names.
    pub ordinals: Ordinals,
    /// The devices that claims hold.
    pub held: Vec<Held>,
    /// GPUs about whose state something is not certain.
    pub fenced: BTreeSet<GpuUuid>,
    /// Memory slices with MIG instances that no record accounts for.
    pub foreign: Vec<(GpuUuid, Placement)>,
    /// GPUs whose MIG mode divvy has changed, with the mode as it was found.
    pub mig_found: BTreeMap<GpuUuid, bool>,
    /// The units in which shares were last published, by this process or an earlier one; of GPUs
    /// that had any.
    pub share_units: BTreeMap<GpuUuid, ShareUnit>,
    /// The MPS servers that run.
    pub mps_servers: BTreeMap<GpuTarget, MpsServer>,
    /// The MPS servers among them that are wedged.
    pub mps_wedged: BTreeMap<GpuTarget, MpsFault>,
}

/// A device that a claim holds by its record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The claim as `namespace/name`.
    pub claim: String,
    /// The device, and how it is used.
    pub hold: Hold,
    /// True if the claim was released and something still uses the device.
    pub lingering: bool,
}

/// A question that only the API can answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// True if the node's own slices are asked for too: at the start, when an earlier process may
    /// have left some.
    pub slices: bool,
}

/// An answer of the API.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// Devices of the node's pool that claims have allocated, without admin access, and which
    /// claims.
    pub holders: BTreeMap<DeviceName, BTreeSet<Claimant>>,
    /// Devices in the node's slices; empty if they were not asked for.
    pub published: BTreeSet<DeviceName>,
}

/// A conflict that lasts.
#[derive(Debug, Clone)]
pub(crate) struct Conflict {
    pub(crate) of: ModeConflict,
    pub(crate) since: Duration,
    /// True if a device of the two had been withdrawn a moment before, so that the scheduler is not
    /// to blame.
    pub(crate) withdrawn: bool,
    /// A record was read that uses the GPU.
    pub(crate) in_use: bool,
}

/// The last list of claims.
#[derive(Debug, Clone)]
pub(crate) struct Listed {
    pub(crate) asked: Duration,
    pub(crate) holders: BTreeMap<DeviceName, BTreeSet<Claimant>>,
}

impl Listed {
    pub(crate) fn devices(&self) -> BTreeSet<DeviceName> {
        self.holders.keys().cloned().collect()
    }
}

/// The questions to the API.
#[derive(Debug, Default)]
pub(crate) struct Asking {
    /// When the question was asked that is not answered yet.
    pub(crate) since: Option<Duration>,
    /// True if it has ever been answered.
    pub(crate) answered: bool,
    /// The number of questions without an answer.
    pub(crate) unanswered: u32,
    /// When the last one was not.
    pub(crate) failed: Option<Duration>,
}

/// Everything that decides what a node offers. Changed by [`crate::step`] alone.
#[derive(Debug)]
pub struct World {
    pub(crate) settings: Settings,
    pub(crate) inputs: Inputs,
    pub(crate) memory: Memory,
}

/// Facts as they were last learnt. A decision reads them and changes none.
#[derive(Debug, Default)]
pub(crate) struct Inputs {
    pub(crate) inventory: Option<Arc<Inventory>>,
    pub(crate) driver_down: bool,
    pub(crate) mps_away: bool,
    pub(crate) health: Option<Arc<HealthView>>,
    pub(crate) policies: Option<(Vec<GpuPolicy>, BTreeMap<String, String>)>,
    pub(crate) neighbours: Option<Uses>,
    pub(crate) records: Option<Arc<Records>>,
    pub(crate) features: ServerFeatures,
}

/// Knowledge that outlasts a decision: facts of the past that still count, the life of devices and
/// GPUs, and the last results, as far as the next decision starts from them.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// True if something has changed since the last decision.
    pub(crate) changed: bool,
    /// When to decide again although nothing has changed.
    pub(crate) wake_at: Option<Duration>,
    /// Conflicts that are not over.
    pub(crate) conflicts: Vec<Conflict>,
    /// The last list of claims, for as long as a decision needs it.
    pub(crate) listed: Option<Listed>,
    pub(crate) asking: Asking,
    /// The profiles that GPUs can be cut into, as last read.
    pub(crate) capabilities: BTreeMap<GpuUuid, MigCapabilities>,
    /// Every device that is published, but for those of admins.
    pub(crate) devices: BTreeMap<DeviceName, DeviceState>,
    /// The units in which shares are published, by GPU.
    pub(crate) share_units: BTreeMap<GpuUuid, ShareUnit>,
    /// Devices that were withdrawn, and when.
    pub(crate) withdrawn: BTreeMap<DeviceName, Duration>,
    /// The slices in the API, once this process has published since it last could cap memory.
    pub(crate) published: Option<Published>,
    /// Seconds at which slices were accepted that do not promise to cap the memory of shares any
    /// more, by GPU. Promises of an earlier process count like those of this one.
    pub(crate) uncapped: BTreeMap<GpuUuid, i64>,
    /// GPUs with a number that are not there and not published, since when.
    pub(crate) gone: BTreeMap<GpuUuid, Duration>,
    /// GPUs among them whose number no allocation refers to.
    pub(crate) forget: BTreeSet<GpuUuid>,
    pub(crate) last: Last,
    /// A question to hand out with the next outputs, once.
    pub(crate) ask: Option<Ask>,
}

/// Results of the last decision.
#[derive(Debug, Default)]
pub(crate) struct Last {
    /// The pool; devices of GPUs that no longer answer are taken from it.
    pub(crate) pool: Option<Arc<Pool>>,
    /// The rules; a GPU that cannot be read keeps its own.
    pub(crate) resolved: Arc<Resolved>,
    /// Findings about the pool.
    pub(crate) findings: BTreeSet<Finding>,
    pub(crate) one_mode: Option<OneMode>,
    pub(crate) several_asked: bool,
    pub(crate) grants: BTreeMap<GpuUuid, Grant>,
}

impl Memory {
    /// Returns whether shares of a GPU, or of a partition of it, are published in one of these
    /// ways.
    pub(crate) fn has_shares(&self, gpu: u32, sharings: &[Sharing]) -> bool {
        let is_one = |name: &DeviceName| {
            let kind = DeviceKind::parse(name);
            kind.is_ok_and(|kind| kind.ordinal() == gpu && sharings.contains(&kind.sharing))
        };
        self.devices.keys().any(is_one)
    }
}

impl World {
    /// A node about which nothing is known yet.
    pub fn new(settings: Settings) -> Self {
        let inputs = Inputs {
            neighbours: (!settings.neighbours_first).then(Uses::default),
            ..Inputs::default()
        };
        Self {
            settings,
            inputs,
            memory: Memory::default(),
        }
    }

    /// Takes a fact in. A fact that says what was known changes nothing.
    pub(crate) fn learn(&mut self, fact: Fact, now: Duration) {
        let known = &mut self.inputs;
        let changed = match fact {
            Fact::Time => false,
            Fact::Inventory { gpus, driver_down } => {
                replace(&mut known.driver_down, driver_down)
                    | replace(&mut known.inventory, Some(gpus))
            }
            Fact::Health(health) => replace(&mut known.health, Some(health)),
            Fact::Policies { policies, labels } => {
                replace(&mut known.policies, Some((policies, labels)))
            }
            Fact::Neighbours(uses) => replace(&mut known.neighbours, Some(uses)),
            Fact::Records(records) => replace(&mut known.records, Some(Arc::new(records))),
            // Version and dry run in one step: in between, a device could be published without the
            // fields that limit its use.
            Fact::Server { version, dropped } => {
                let next = known.features.observe(version);
                let next = match dropped {
                    Some(dropped) => next.tried(dropped),
                    None => next,
                };
                replace(&mut known.features, next)
            }
            Fact::Dropped(features) => {
                let next = known.features.without(features);
                replace(&mut known.features, next)
            }
            // Every answer ends a wait, also one that says nothing new.
            Fact::Answer(answer) => {
                self.memory.answered(answer, now);
                true
            }
            Fact::Conflict(of) => self.memory.meet(of, now),
            Fact::MpsAway(is_away) => replace(&mut known.mps_away, is_away),
            Fact::Published(published) => {
                let known = self.memory.published.as_ref();
                let changed = known.is_none_or(|known| known.capped != published.capped);
                self.memory.published = Some(published);
                changed
            }
        };
        self.memory.changed |= changed;
    }
}

impl Memory {
    /// Takes in the answer to the open question.
    fn answered(&mut self, answer: Option<Answer>, now: Duration) {
        // The list is as of the question: a claim that was allocated since may be missing in it.
        let asked = self.asking.since.take().unwrap_or(now);
        let Some(Answer { holders, published }) = answer else {
            self.asking.unanswered += 1;
            self.asking.failed = Some(now);
            return;
        };
        self.asking.answered = true;
        self.asking.failed = None;
        // An earlier process offered these. They leave like any other device, so that a claim that
        // was given one in the meantime finds it.
        for device in published {
            self.devices.entry(device).or_insert(DeviceState::Offered);
        }
        self.listed = Some(Listed { asked, holders });
    }

    /// Takes in a conflict. Returns false if it is known.
    fn meet(&mut self, of: ModeConflict, now: Duration) -> bool {
        let known = self
            .conflicts
            .iter()
            .any(|known| (&known.of.claim, &known.of.device) == (&of.claim, &of.device));
        if known {
            return false;
        }
        // Judged now, and kept: later the device may be withdrawn because of this conflict.
        let withdrawn = self.was_withdrawn(&of.device) || self.was_withdrawn(&of.held);
        self.conflicts.push(Conflict {
            of,
            since: now,
            withdrawn,
            in_use: false,
        });
        true
    }

    /// Returns whether the device is withdrawn now or was lately: an allocation of it proves
    /// nothing about the scheduler, which may have chosen the device before.
    fn was_withdrawn(&self, device: &DeviceName) -> bool {
        self.devices.get(device) != Some(&DeviceState::Offered)
            || self.withdrawn.contains_key(device)
    }
}

/// Replaces a value and returns whether the new one is another.
fn replace<T: PartialEq>(known: &mut T, new: T) -> bool {
    let changed = *known != new;
    *known = new;
    changed
}
