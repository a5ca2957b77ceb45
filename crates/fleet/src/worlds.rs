//! Devices that nodes can give: one world for each kind, one state for all nodes of a kind that
//! hold the same, and each question asked of the allocator once.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use divvy_allocator::{AllocError, AllocatedState, Allocator, Inputs, Slices, evaluate};
use divvy_model::Quantity;
use k8s_openapi::api::core::v1::{Node, NodeSelector, Toleration};
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceAllocationResult, DeviceClass, DeviceRequestAllocationResult,
    ResourceClaim, ResourceClaimStatus, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Raw;

use crate::device::{Amount, Devices, Known};
use crate::run::Given;
use crate::{pod, score};

/// Nodes that publish the same and hold the same when a run begins.
#[derive(Debug, Clone, Default)]
pub struct Kind {
    /// GPUs, as `--sim` has them, or the name of a node.
    pub name: String,
    /// Number of nodes.
    pub count: usize,
    /// The node that stands for all.
    pub node: Node,
    /// Slices of that node.
    pub slices: Vec<ResourceSlice>,
    /// Claims that have devices of it when a run begins, and keep them.
    pub held: Vec<ResourceClaim>,
    /// Processor time and memory that each of its pods requests then, as in a [`Shape`].
    pub used: Vec<[u64; 2]>,
}

/// A pod as the scheduler sees it. Jobs of one shape get the same answers.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Shape {
    /// Name for people.
    pub name: String,
    /// Claims, which get their devices together.
    pub claims: Vec<ResourceClaim>,
    /// Labels and fields that the node must have.
    pub selector: Option<NodeSelector>,
    /// Taints of nodes that it bears.
    pub tolerations: Vec<Toleration>,
    /// Processor time in thousandths of a core, and memory in bytes.
    pub resources: [u64; 2],
    /// Devices that it asks for as extended resources, by class: its claims have them, too, and the
    /// scheduler can score them.
    pub extended: BTreeMap<String, u64>,
}

/// Content of a node of a kind; equal content has the same number.
pub(crate) type StateId = u32;

/// A device, or a share of it, that a pod has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Grant {
    device: u32,
    /// Amounts that a share consumes by capacity, in billionths; nothing of a device that is held
    /// alone.
    share: Option<BTreeMap<String, i128>>,
}

impl Grant {
    fn amount(&self, device: &Known) -> Amount {
        device.granted(self.share.as_ref().unwrap_or(&BTreeMap::new()))
    }
}

/// Devices that a pod gets in a state.
#[derive(Debug, PartialEq)]
pub(crate) struct Placement {
    pub(crate) grants: Vec<Grant>,
    pub(crate) after: StateId,
    pub(crate) amount: Amount,
    /// Score of the alternatives that were taken (`firstAvailable`).
    pub(crate) score: i64,
}

/// Users of one device: how many hold it, and what they consume.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Held {
    alone: u32,
    shares: u32,
    consumed: BTreeMap<String, i128>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Content {
    kind: usize,
    /// By device, in order.
    held: Vec<(u32, Held)>,
}

/// The kinds of a fleet, and all states that were met.
pub(crate) struct Worlds<'w> {
    allocator: &'w Allocator,
    classes: &'w [DeviceClass],
    kinds: &'w [Kind],
    slices: Vec<Slices<'w>>,
    pub(crate) devices: Vec<Devices>,
    shapes: Vec<Shape>,
    states: Vec<Content>,
    ids: HashMap<Content, StateId>,
    answers: HashMap<(StateId, usize), Option<Arc<Placement>>>,
    /// By shape: the error that keeps it from being placed anywhere.
    pub(crate) broken: BTreeMap<usize, String>,
    /// By kind and shape: permission to use nodes of the kind.
    allowed: HashMap<(usize, usize), bool>,
    /// Devices by kind and class, in order.
    of_class: HashMap<(usize, String), Arc<[u32]>>,
}

impl<'w> Worlds<'w> {
    pub(crate) fn new(
        allocator: &'w Allocator,
        classes: &'w [DeviceClass],
        kinds: &'w [Kind],
    ) -> Self {
        let mut worlds = Self {
            allocator,
            classes,
            kinds,
            slices: kinds.iter().map(|kind| Slices::new(&kind.slices)).collect(),
            devices: kinds.iter().map(|kind| Devices::of(&kind.slices)).collect(),
            shapes: Vec::new(),
            states: Vec::new(),
            ids: HashMap::new(),
            answers: HashMap::new(),
            broken: BTreeMap::new(),
            allowed: HashMap::new(),
            of_class: HashMap::new(),
        };
        for kind in 0..kinds.len() {
            let held = Vec::new();
            worlds.id(Content { kind, held });
        }
        worlds
    }

    /// Returns the state of an idle node of a kind.
    pub(crate) fn idle(kind: usize) -> StateId {
        u32::try_from(kind).unwrap_or(u32::MAX)
    }

    /// Returns the number of a shape; equal ones have the same.
    pub(crate) fn shape(&mut self, shape: &Shape) -> usize {
        if let Some(place) = self.shapes.iter().position(|known| known == shape) {
            return place;
        }
        self.shapes.push(shape.clone());
        self.shapes.len() - 1
    }

    pub(crate) fn shapes(&self) -> &[Shape] {
        &self.shapes
    }

    fn id(&mut self, content: Content) -> StateId {
        if let Some(id) = self.ids.get(&content) {
            return *id;
        }
        let id = u32::try_from(self.states.len()).unwrap_or(u32::MAX);
        self.states.push(content.clone());
        self.ids.insert(content, id);
        id
    }

    fn state(&self, id: StateId) -> Option<&Content> {
        self.states.get(usize::try_from(id).ok()?)
    }

    /// Returns the state of a node of a kind when a run begins.
    pub(crate) fn at_first(&mut self, kind: usize) -> StateId {
        let (Some(of), Some(devices)) = (self.kinds.get(kind), self.devices.get(kind)) else {
            return Self::idle(kind);
        };
        let results = of.held.iter().filter_map(|claim| {
            let status = claim.status.as_ref()?;
            status.allocation.clone()
        });
        let results: Vec<AllocationResult> = results.collect();
        let mut held = Vec::new();
        for grant in grants(&results, devices) {
            change(&mut held, &grant, true);
        }
        self.id(Content { kind, held })
    }

    /// Returns what a shape gets of a node in a state; nothing where it does not fit.
    pub(crate) fn place(&mut self, state: StateId, shape: usize) -> Option<Arc<Placement>> {
        if let Some(known) = self.answers.get(&(state, shape)) {
            return known.clone();
        }
        let found = self.ask(state, shape).map(Arc::new);
        self.answers.insert((state, shape), found.clone());
        found
    }

    fn ask(&mut self, state: StateId, shape: usize) -> Option<Placement> {
        let content = self.state(state)?.clone();
        if !self.may_use(content.kind, shape) {
            return None;
        }
        let kind = self.kinds.get(content.kind)?;
        let devices = self.devices.get(content.kind)?;
        let allocated = AllocatedState::from_claims([&as_claim(&content, devices)]);
        let inputs = Inputs {
            slices: self.slices.get(content.kind)?,
            classes: self.classes,
            allocated: &allocated,
            node: &kind.node,
        };
        let claims: Vec<&ResourceClaim> = self.shapes.get(shape)?.claims.iter().collect();
        let found = match self.allocator.fit(&inputs, &claims) {
            Ok(found) => found?,
            // To the scheduler this is an error of the pod, whatever the node.
            Err(error) => {
                if !error.is_of_node() && !matches!(error, AllocError::TooHard { .. }) {
                    self.broken.entry(shape).or_insert_with(|| chain(&error));
                }
                return None;
            }
        };
        let score = score::of_alternatives(&claims, &found.results);
        let grants = grants(&found.results, devices);
        let mut amount = Amount::default();
        for grant in &grants {
            let device = devices.at(grant.device);
            amount.add(device.map(|of| grant.amount(of)).unwrap_or_default());
        }
        let mut held = content.held;
        for grant in &grants {
            change(&mut held, grant, true);
        }
        let after = self.id(Content {
            kind: content.kind,
            held,
        });
        Some(Placement {
            grants,
            after,
            amount,
            score,
        })
    }

    /// Returns the state after a pod has let its devices go.
    pub(crate) fn release(&mut self, state: StateId, grants: &[Grant]) -> StateId {
        let Some(content) = self.state(state) else {
            return state;
        };
        let mut content = content.clone();
        for grant in grants {
            change(&mut content.held, grant, false);
        }
        self.id(content)
    }

    /// Says whether the pod may run on nodes of the kind: labels and taints.
    fn may_use(&mut self, kind: usize, shape: usize) -> bool {
        if let Some(known) = self.allowed.get(&(kind, shape)) {
            return *known;
        }
        let (Some(of), Some(wants)) = (self.kinds.get(kind), self.shapes.get(shape)) else {
            return false;
        };
        let may = pod::may_run_on(&of.node, wants.selector.as_ref(), &wants.tolerations);
        self.allowed.insert((kind, shape), may);
        may
    }

    /// Counts devices of a class of a node in a state: all, and those in use.
    pub(crate) fn counted(&mut self, state: StateId, class: &str) -> [u64; 2] {
        let kind = self.kind(state);
        let key = (kind, class.to_owned());
        let known = self.of_class.get(&key).map(Arc::clone);
        let of_class = known.unwrap_or_else(|| {
            let found: Arc<[u32]> = self.of_class(kind, class).into();
            self.of_class.insert(key, Arc::clone(&found));
            found
        });
        let held = self.state(state).map(|content| &content.held);
        let in_use = held.into_iter().flatten();
        let in_use = in_use.filter(|(device, _)| of_class.binary_search(device).is_ok());
        [of_class.len(), in_use.count()].map(|count| u64::try_from(count).unwrap_or(u64::MAX))
    }

    /// Finds the devices of a class; none where a selector cannot be evaluated, as the scheduler
    /// does.
    fn of_class(&self, kind: usize, class: &str) -> Vec<u32> {
        let named = |of: &&DeviceClass| of.metadata.name.as_deref() == Some(class);
        let class = self.classes.iter().find(named);
        let (Some(class), Some(of), Some(devices)) =
            (class, self.kinds.get(kind), self.devices.get(kind))
        else {
            return Vec::new();
        };
        let spec = class.spec.as_ref();
        let selectors = spec.and_then(|spec| spec.selectors.as_ref());
        let selectors = selectors.into_iter().flatten();
        let selectors: Vec<&str> = selectors
            .filter_map(|selector| Some(selector.cel.as_ref()?.expression.as_str()))
            .collect();
        let mut found = Vec::new();
        for slice in &of.slices {
            let driver = &slice.spec.driver;
            for device in slice.spec.devices.iter().flatten() {
                let mut matches = true;
                for selector in &selectors {
                    match evaluate(selector, driver, device) {
                        Ok(does) => matches &= does,
                        Err(_) => return Vec::new(),
                    }
                }
                if matches {
                    found.extend(devices.place(driver, &slice.spec.pool.name, &device.name));
                }
            }
        }
        found.sort_unstable();
        found
    }

    /// Returns what the holders of a state have together.
    pub(crate) fn held(&self, state: StateId) -> Amount {
        let mut sum = Amount::default();
        let Some(content) = self.state(state) else {
            return sum;
        };
        let devices = self.devices.get(content.kind);
        for (device, held) in &content.held {
            let device = devices.and_then(|devices| devices.at(*device));
            sum.add(
                device
                    .map(|device| device.granted(&held.consumed))
                    .unwrap_or_default(),
            );
        }
        sum
    }

    pub(crate) fn kind(&self, state: StateId) -> usize {
        self.state(state).map_or(0, |content| content.kind)
    }

    /// Returns granted devices by name.
    pub(crate) fn given(&self, state: StateId, grants: &[Grant]) -> Vec<Given> {
        let devices = self.devices.get(self.kind(state));
        devices
            .map(|devices| given(grants, devices))
            .unwrap_or_default()
    }

    /// Returns what the GPUs of a node have together.
    pub(crate) fn total(&self, state: StateId) -> Amount {
        let content = self.state(state);
        let devices = content.and_then(|content| self.devices.get(content.kind));
        devices.map(|devices| devices.total).unwrap_or_default()
    }
}

/// Adds a grant to what is held, or takes it away.
fn change(all: &mut Vec<(u32, Held)>, grant: &Grant, add: bool) {
    let place = match all.binary_search_by_key(&grant.device, |(device, _)| *device) {
        Ok(place) => place,
        Err(place) => {
            all.insert(place, (grant.device, Held::default()));
            place
        }
    };
    let Some((_, held)) = all.get_mut(place) else {
        return;
    };
    let count = if grant.share.is_some() {
        &mut held.shares
    } else {
        &mut held.alone
    };
    *count = if add {
        *count + 1
    } else {
        count.saturating_sub(1)
    };
    for (name, amount) in grant.share.iter().flatten() {
        let sum = held.consumed.entry(name.clone()).or_default();
        *sum += if add { *amount } else { -amount };
    }
    if held.alone == 0 && held.shares == 0 {
        all.remove(place);
    }
}

/// Returns the claim that holds all that a state holds: to the allocator the sum is the same.
fn as_claim(content: &Content, devices: &Devices) -> ResourceClaim {
    let results = content.held.iter().filter_map(|(place, held)| {
        let device = devices.at(*place)?;
        let consumed = held.consumed.iter();
        let consumed = consumed.map(|(name, amount)| (name.clone(), raw(*amount)));
        Some(DeviceRequestAllocationResult {
            driver: device.driver.clone(),
            pool: device.pool.clone(),
            device: device.name.clone(),
            share_id: (held.shares > 0).then(|| "held".to_owned()),
            consumed_capacity: (held.shares > 0).then(|| consumed.collect()),
            ..DeviceRequestAllocationResult::default()
        })
    });
    ResourceClaim {
        status: Some(ResourceClaimStatus {
            allocation: Some(AllocationResult {
                devices: Some(DeviceAllocationResult {
                    results: Some(results.collect()),
                    config: None,
                }),
                ..AllocationResult::default()
            }),
            ..ResourceClaimStatus::default()
        }),
        ..ResourceClaim::default()
    }
}

/// Writes billionths as an amount that is read back as the same.
fn raw(nanos: i128) -> Raw {
    const UNIT: i128 = 1_000_000_000;
    Raw(if nanos % UNIT == 0 {
        (nanos / UNIT).to_string()
    } else {
        format!("{nanos}n")
    })
}

fn grants(results: &[AllocationResult], devices: &Devices) -> Vec<Grant> {
    let results = results
        .iter()
        .filter_map(|result| result.devices.as_ref()?.results.as_ref());
    // Admin access holds nothing.
    let results = results
        .flatten()
        .filter(|result| result.admin_access != Some(true));
    let grant = |result: &DeviceRequestAllocationResult| {
        let consumed = result
            .consumed_capacity
            .iter()
            .flatten()
            .filter_map(|(name, amount)| {
                Some((name.clone(), amount.0.parse::<Quantity>().ok()?.nanos()))
            });
        Some(Grant {
            device: devices.place(&result.driver, &result.pool, &result.device)?,
            share: result.share_id.as_ref().map(|_| consumed.collect()),
        })
    };
    results.filter_map(grant).collect()
}

fn given(grants: &[Grant], devices: &Devices) -> Vec<Given> {
    let given = grants.iter().filter_map(|grant| {
        let device = devices.at(grant.device)?;
        Some(Given {
            name: device.name.clone(),
            memory: grant.amount(device).memory,
        })
    });
    given.collect()
}

/// Returns the devices of allocations that are among these.
pub(crate) fn granted(results: &[AllocationResult], devices: &Devices) -> Vec<Given> {
    given(&grants(results, devices), devices)
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text += &format!(": {inner}");
        cause = inner.source();
    }
    text
}
