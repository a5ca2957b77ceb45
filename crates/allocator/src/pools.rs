//! From ResourceSlices to the pools that a node can use.
//!
//! Only the highest generation of a pool counts; a pool is *incomplete* while slices of it are missing and
//! *invalid* when its content contradicts itself. Neither is allocated from. The order of pools, slices and
//! devices is the order in which the scheduler tries them.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice, ResourceSliceSpec};

use crate::features::Features;
use crate::nodes::{self, NodeSelectorError};

/// The published slices, indexed so that looking at one node does not walk over those of all others.
#[derive(Debug, Default)]
pub struct Slices<'a> {
    /// Slices with `spec.nodeName`.
    of_node: BTreeMap<&'a str, Vec<&'a ResourceSlice>>,
    /// All others.
    anywhere: Vec<&'a ResourceSlice>,
    /// Every slice of a pool, whatever its node: to tell whether a pool is complete.
    of_pool: BTreeMap<(&'a str, &'a str), Vec<&'a ResourceSlice>>,
}

impl<'a> Slices<'a> {
    /// Indexes the slices of a cluster.
    pub fn new(slices: impl IntoIterator<Item = &'a ResourceSlice>) -> Self {
        let mut index = Self::default();
        for slice in slices {
            match &slice.spec.node_name {
                Some(node) => index.of_node.entry(node).or_default().push(slice),
                None => index.anywhere.push(slice),
            }
            let pool = (slice.spec.driver.as_str(), slice.spec.pool.name.as_str());
            index.of_pool.entry(pool).or_default().push(slice);
        }
        index
    }

    /// The number of slices.
    pub fn len(&self) -> usize {
        self.of_pool.values().map(Vec::len).sum()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.of_pool.is_empty()
    }

    /// The nodes that have slices of their own.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &'a str> {
        self.of_node.keys().copied()
    }
}

/// A pool as one node sees it.
#[derive(Debug)]
pub(crate) struct Pool<'a> {
    pub(crate) driver: &'a str,
    pub(crate) name: &'a str,
    /// Slices with devices that are for this node, or are for the node in part; sorted by name.
    pub(crate) slices: Vec<&'a ResourceSlice>,
    /// Slices that declare counters. Nothing is charged to them yet.
    pub(crate) counters: Vec<&'a ResourceSlice>,
    /// Device slices for other nodes, which draw on the same counters.
    pub(crate) elsewhere: Vec<&'a ResourceSlice>,
    /// Why it must not be used now, if so.
    pub(crate) problem: Option<PoolProblem>,
}

/// Why a pool is not used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum PoolProblem {
    /// Slices are missing: it is being updated.
    Incomplete { seen: usize, wanted: i64 },
    /// It contradicts itself.
    Invalid(String),
}

impl Pool<'_> {
    fn has_binding_conditions(&self) -> bool {
        self.devices().any(|d| d.binding_conditions.as_ref().is_some_and(|c| !c.is_empty()))
    }

    fn devices(&self) -> impl Iterator<Item = &Device> {
        self.slices.iter().flat_map(|s| devices(&s.spec))
    }
}

pub(crate) fn devices(spec: &ResourceSliceSpec) -> impl Iterator<Item = &Device> {
    spec.devices.iter().flatten()
}

/// The pools of a node, in the order in which they are tried.
pub(crate) fn gather<'a>(
    all: &Slices<'a>,
    node: &Node,
    features: Features,
) -> Result<Vec<Pool<'a>>, NodeSelectorError> {
    let own = all.of_node.get(nodes::name(node)).into_iter().flatten();
    let mut relevant: BTreeMap<(&'a str, &'a str), Vec<&'a ResourceSlice>> = BTreeMap::new();
    for slice in own.chain(&all.anywhere) {
        let spec = &slice.spec;
        let partitionable = spec.per_device_node_selection == Some(true) || spec.shared_counters.is_some();
        if partitionable && !features.partitionable_devices {
            continue;
        }
        if slice_is_for(spec, node)? {
            relevant.entry((&spec.driver, &spec.pool.name)).or_default().push(slice);
        }
    }
    let mut pools = Vec::with_capacity(relevant.len());
    for ((driver, name), slices) in relevant {
        let everywhere = all.of_pool.get(&(driver, name)).map(Vec::as_slice).unwrap_or_default();
        pools.extend(build(driver, name, slices, everywhere, features));
    }
    // Waiting for a device to be attached comes last; otherwise the order of names stays.
    pools.sort_by_key(Pool::has_binding_conditions);
    Ok(pools)
}

fn slice_is_for(spec: &ResourceSliceSpec, node: &Node) -> Result<bool, NodeSelectorError> {
    if let Some(wanted) = &spec.node_name {
        return Ok(wanted == nodes::name(node));
    }
    if spec.all_nodes == Some(true) {
        return Ok(true);
    }
    if let Some(selector) = &spec.node_selector {
        return nodes::matches(selector, node);
    }
    if spec.per_device_node_selection == Some(true) {
        for device in devices(spec) {
            if nodes::device_is_for(device, node)? {
                return Ok(true);
            }
        }
    }
    // None of the fields that are known: perhaps a later way to say where devices are.
    Ok(false)
}

/// The pool from its slices that are for the node; `None` when a newer generation is only elsewhere.
fn build<'a>(
    driver: &'a str,
    name: &'a str,
    relevant: Vec<&'a ResourceSlice>,
    everywhere: &[&'a ResourceSlice],
    features: Features,
) -> Option<Pool<'a>> {
    let generation = relevant.iter().map(|s| s.spec.pool.generation).max()?;
    let mut slices: Vec<&ResourceSlice> =
        relevant.into_iter().filter(|s| s.spec.pool.generation == generation).collect();
    let wanted = slices.first()?.spec.pool.resource_slice_count;
    let complete = |seen: usize| i64::try_from(seen) == Ok(wanted);
    let mut problem = None;
    let mut others = Vec::new();
    if !complete(slices.len()) {
        if everywhere.iter().any(|s| s.spec.pool.generation > generation) {
            return None;
        }
        let here: BTreeSet<*const ResourceSlice> = slices.iter().map(|s| std::ptr::from_ref(*s)).collect();
        let same = everywhere.iter().copied().filter(|s| s.spec.pool.generation == generation);
        others = same.filter(|s| !here.contains(&std::ptr::from_ref(*s))).collect();
        let seen = slices.len() + others.len();
        if !complete(seen) {
            problem = Some(PoolProblem::Incomplete { seen, wanted });
        }
    }
    slices.sort_by_key(|s| s.metadata.name.as_deref());
    others.sort_by_key(|s| s.metadata.name.as_deref());
    let declares = |s: &&ResourceSlice| s.spec.shared_counters.is_some();
    let (counters, slices): (Vec<_>, Vec<_>) = slices.into_iter().partition(declares);
    let (more_counters, elsewhere): (Vec<_>, Vec<_>) = others.into_iter().partition(declares);
    let counters = counters.into_iter().chain(more_counters).collect();
    let mut pool = Pool { driver, name, slices, counters, elsewhere, problem };
    if pool.problem.is_none() {
        pool.problem = contradiction(&pool, features).map(PoolProblem::Invalid);
    }
    Some(pool)
}

/// What makes a pool invalid, if anything does.
fn contradiction(pool: &Pool<'_>, features: Features) -> Option<String> {
    let mut names = BTreeSet::new();
    for device in pool.devices() {
        if !names.insert(device.name.as_str()) {
            return Some(format!("duplicate device name {}", device.name));
        }
    }
    if !features.partitionable_devices {
        // Counters mean nothing then; a device that consumes some is not usable, the others are.
        return None;
    }
    let mut sets = BTreeMap::new();
    for set in pool.counters.iter().flat_map(|s| s.spec.shared_counters.iter().flatten()) {
        if sets.insert(set.name.as_str(), &set.counters).is_some() {
            return Some(format!("duplicate counter set name {}", set.name));
        }
    }
    let elsewhere = pool.elsewhere.iter().flat_map(|s| devices(&s.spec));
    for device in pool.devices().chain(elsewhere) {
        for consumption in device.consumes_counters.iter().flatten() {
            let Some(set) = sets.get(consumption.counter_set.as_str()) else {
                return Some(format!(
                    "device {} references unknown counter set {}",
                    device.name, consumption.counter_set
                ));
            };
            if let Some((counter, _)) = consumption.counters.iter().find(|(name, _)| !set.contains_key(*name))
            {
                return Some(format!(
                    "device {} references unknown counter {counter} in counter set {}",
                    device.name, consumption.counter_set
                ));
            }
        }
    }
    None
}
