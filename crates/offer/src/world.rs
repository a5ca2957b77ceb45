//! [`World`]: everything that decides what a node offers, and the [`Fact`]s that change it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use divvy_api::policy::GpuPolicy;
use divvy_model::mig::{MigCapabilities, Placement};
use divvy_model::{ClaimUid, DeviceName, GpuUuid, Hold, Inventory, Ordinals};

use crate::withdrawal::DeviceState;
use crate::{Feature, GpuRules, HealthView, KubeVersion, ModeLock, Note, OneMode, Outputs, ServerFeatures};

/// What does not change while the node runs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of the node.
    pub node: String,
    /// The rules of GPUs that no policy names.
    pub rules: GpuRules,
    /// Whether a GPU may be published in several modes, where no policy says it.
    pub mode_lock: ModeLock,
    /// For how long after a device is tainted the scheduler may still write an allocation of it.
    pub leave: Duration,
    /// How often the API is asked who holds devices that stay published only for their holders.
    pub ask_again: Duration,
    /// How soon after a question without an answer the next is asked.
    pub retry: Duration,
}

/// Something that a source has observed.
#[derive(Debug, Clone)]
pub enum Fact {
    /// Time has passed.
    Time,
    /// What NVML says.
    Inventory {
        /// The GPUs as they were last read.
        gpus: Arc<Inventory>,
        /// Whether the driver cannot be used now.
        driver_down: bool,
    },
    /// How the GPUs are.
    Health(Arc<HealthView>),
    /// The policies in force, and the labels of the node.
    Policies {
        /// The policies that can be read.
        policies: Vec<GpuPolicy>,
        /// The node's labels.
        labels: BTreeMap<String, String>,
    },
    /// GPUs that others use, with the value of their taint.
    Neighbours(BTreeMap<GpuUuid, String>),
    /// What the node's records say.
    Records(Records),
    /// The API server answered.
    Server {
        /// Its version.
        version: KubeVersion,
        /// The features whose fields were lost in a dry run, if one was answered. Together with the version: a device
        /// without the fields that limit its use must not be published, not even for a moment.
        dropped: Option<BTreeSet<Feature>>,
    },
    /// Fields of these features were sent and did not come back.
    Dropped(BTreeSet<Feature>),
    /// The answer to an [`Ask`]; `None` if there was none.
    Answer(Option<Answer>),
    /// A prepare was refused.
    Conflict(ModeConflict),
}

/// A claim was refused at prepare: its device belongs to a GPU that another claim uses in another mode.
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

/// What the node's records say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Records {
    /// The numbers in device names.
    pub ordinals: Ordinals,
    /// What claims hold.
    pub held: Vec<Held>,
    /// GPUs about whose state something is not certain.
    pub fenced: BTreeSet<GpuUuid>,
    /// Memory slices with MIG instances that no record accounts for.
    pub foreign: Vec<(GpuUuid, Placement)>,
}

/// A device that a claim holds by its record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// The claim as `namespace/name`.
    pub claim: String,
    /// The device, and how it is used.
    pub hold: Hold,
    /// Whether the claim was released and something still uses the device.
    pub lingering: bool,
}

/// A question that only the API can answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ask {
    /// Whether the node's own slices are asked for too: at the start, when an earlier process may have left some.
    pub slices: bool,
}

/// What the API answered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Answer {
    /// Devices of the node's pool that claims have allocated, without admin access, and which claims.
    pub holders: BTreeMap<DeviceName, BTreeSet<Claimant>>,
    /// Devices in the node's slices; empty if they were not asked for.
    pub published: BTreeSet<DeviceName>,
}

/// A conflict that lasts.
#[derive(Debug, Clone)]
pub(crate) struct Conflict {
    pub(crate) of: ModeConflict,
    pub(crate) since: Duration,
    /// One of the devices had been withdrawn a moment before, so that the scheduler is not to blame.
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
    /// Whether it has ever been answered.
    pub(crate) answered: bool,
    /// How often it was not.
    pub(crate) unanswered: u32,
    /// When the last one was not.
    pub(crate) failed: Option<Duration>,
}

/// Everything that decides what a node offers. Changed by [`crate::step`] alone.
#[derive(Debug)]
pub struct World {
    pub(crate) settings: Settings,
    pub(crate) inventory: Option<Arc<Inventory>>,
    pub(crate) driver_down: bool,
    pub(crate) health: Option<Arc<HealthView>>,
    pub(crate) policies: Option<(Vec<GpuPolicy>, BTreeMap<String, String>)>,
    pub(crate) neighbours: BTreeMap<GpuUuid, String>,
    pub(crate) records: Option<Arc<Records>>,
    pub(crate) features: ServerFeatures,
    pub(crate) conflicts: Vec<Conflict>,
    pub(crate) listed: Option<Listed>,
    pub(crate) asking: Asking,
    /// What GPUs can be cut into, as last read.
    pub(crate) capabilities: BTreeMap<GpuUuid, MigCapabilities>,
    /// Every device that is published, but for those of admins.
    pub(crate) devices: BTreeMap<DeviceName, DeviceState>,
    /// Devices that were withdrawn, and when.
    pub(crate) withdrawn: BTreeMap<DeviceName, Duration>,
    /// GPUs with a number that are not there and not published, since when.
    pub(crate) gone: BTreeMap<GpuUuid, Duration>,
    /// Whether something has changed since the last decision.
    pub(crate) changed: bool,
    pub(crate) said: Said,
    pub(crate) outputs: Outputs,
}

/// What people were notified of, so that each is said once.
#[derive(Debug, Default)]
pub(crate) struct Said {
    pub(crate) notes: BTreeSet<Note>,
    pub(crate) foreign: BTreeSet<(GpuUuid, Placement)>,
    pub(crate) one_mode: Option<OneMode>,
}

impl World {
    /// A node about which nothing is known yet.
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            inventory: None,
            driver_down: false,
            health: None,
            policies: None,
            neighbours: BTreeMap::new(),
            records: None,
            features: ServerFeatures::default(),
            conflicts: Vec::new(),
            listed: None,
            asking: Asking::default(),
            capabilities: BTreeMap::new(),
            devices: BTreeMap::new(),
            withdrawn: BTreeMap::new(),
            gone: BTreeMap::new(),
            changed: false,
            said: Said::default(),
            outputs: Outputs::default(),
        }
    }

    /// Takes a fact in.
    pub(crate) fn learn(&mut self, fact: Fact, now: Duration) {
        let changed = match fact {
            Fact::Time => false,
            Fact::Inventory { gpus, driver_down } => {
                replace(&mut self.driver_down, driver_down) | replace(&mut self.inventory, Some(gpus))
            }
            Fact::Health(health) => replace(&mut self.health, Some(health)),
            Fact::Policies { policies, labels } => replace(&mut self.policies, Some((policies, labels))),
            Fact::Neighbours(uses) => replace(&mut self.neighbours, uses),
            Fact::Records(records) => replace(&mut self.records, Some(Arc::new(records))),
            Fact::Server { version, dropped } => {
                let next = self.features.observe(version);
                let next = match dropped {
                    Some(dropped) => next.tried(dropped),
                    None => next,
                };
                replace(&mut self.features, next)
            }
            Fact::Dropped(features) => {
                let next = self.features.without(features);
                replace(&mut self.features, next)
            }
            Fact::Answer(answer) => {
                self.answered(answer, now);
                true
            }
            Fact::Conflict(of) => {
                let known = self
                    .conflicts
                    .iter()
                    .any(|known| (&known.of.claim, &known.of.device) == (&of.claim, &of.device));
                if !known {
                    let withdrawn = self.was_withdrawn(&of.device) || self.was_withdrawn(&of.held);
                    self.conflicts.push(Conflict { of, since: now, withdrawn, in_use: false });
                }
                !known
            }
        };
        self.changed |= changed;
    }

    fn answered(&mut self, answer: Option<Answer>, now: Duration) {
        let asked = self.asking.since.take().unwrap_or(now);
        let Some(Answer { holders, published }) = answer else {
            self.asking.unanswered += 1;
            self.asking.failed = Some(now);
            return;
        };
        self.asking.answered = true;
        self.asking.failed = None;
        for device in published {
            self.devices.entry(device).or_insert(DeviceState::Offered);
        }
        self.listed = Some(Listed { asked, holders });
    }

    /// Whether the device is withdrawn now or was lately: an allocation of it proves nothing about the scheduler, which
    /// may have chosen the device before.
    fn was_withdrawn(&self, device: &DeviceName) -> bool {
        self.devices.get(device) != Some(&DeviceState::Offered) || self.withdrawn.contains_key(device)
    }
}

/// Whether the new value is another.
fn replace<T: PartialEq>(known: &mut T, new: T) -> bool {
    let changed = *known != new;
    *known = new;
    changed
}
