//! From ResourceSlices to the pools that a node can use.
//!
//! Only the highest generation of a pool counts; a pool is *incomplete* while slices of it are
//! missing and *invalid* when its content contradicts itself. Neither is allocated from. The order
//! of pools, slices and devices is the order in which the scheduler tries them.
//!
//! A pool whose slices are all for one node looks the same in every call: it is checked once, when
//! the slices are indexed.

mod build;
mod counters;

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice, ResourceSliceSpec};

use crate::features::Features;
use crate::nodes::{self, NodeSelectorError};

pub(crate) use build::{Pool, PoolProblem};
pub(crate) use counters::Charge;

/// The published slices, indexed so that looking at one node does not walk over those of all
/// others.
#[derive(Debug, Default)]
pub struct Slices<'a> {
    of_node: BTreeMap<&'a str, OfNode<'a>>,
    /// Slices without `spec.nodeName`.
    anywhere: Vec<&'a ResourceSlice>,
    /// Every slice of a pool, whatever its node: shows whether a pool is complete.
    of_pool: BTreeMap<(&'a str, &'a str), Vec<&'a ResourceSlice>>,
}

/// Pools and slices that are published with a node's name.
#[derive(Debug, Default)]
struct OfNode<'a> {
    /// Pools that have no slice for anything else, in order.
    pools: Vec<Gathered<'a>>,
    /// Slices of other pools.
    slices: Vec<&'a ResourceSlice>,
}

impl<'a> Slices<'a> {
    /// Indexes the slices of a cluster.
    pub fn new(slices: impl IntoIterator<Item = &'a ResourceSlice>) -> Self {
        let mut index = Self::default();
        // A scheduler that does not know compatibility groups ignores the slices that have some.
        for slice in slices
            .into_iter()
            .filter(|slice| !counters::has_groups(slice))
        {
            if slice.spec.node_name.is_none() {
                index.anywhere.push(slice);
            }
            let pool = (slice.spec.driver.as_str(), slice.spec.pool.name.as_str());
            index.of_pool.entry(pool).or_default().push(slice);
        }
        for ((driver, name), slices) in &index.of_pool {
            if let Some(node) = only_node(slices) {
                let pool = Pool::build(driver, name, slices.clone(), slices, Features::ALL);
                index
                    .of_node
                    .entry(node)
                    .or_default()
                    .pools
                    .extend(pool.map(Arc::new));
                continue;
            }
            for slice in slices {
                if let Some(node) = &slice.spec.node_name {
                    index.of_node.entry(node).or_default().slices.push(slice);
                }
            }
        }
        index
    }

    /// The number of slices.
    pub fn len(&self) -> usize {
        self.of_pool.values().map(Vec::len).sum()
    }

    /// Says whether there is none.
    pub fn is_empty(&self) -> bool {
        self.of_pool.is_empty()
    }

    /// The nodes that have slices of their own.
    pub(crate) fn nodes(&self) -> impl Iterator<Item = &'a str> {
        self.of_node.keys().copied()
    }

    fn everywhere(&self, driver: &'a str, pool: &'a str) -> &[&'a ResourceSlice] {
        self.of_pool
            .get(&(driver, pool))
            .map(Vec::as_slice)
            .unwrap_or_default()
    }
}

/// The node that all slices name.
fn only_node<'a>(slices: &[&'a ResourceSlice]) -> Option<&'a str> {
    let node = slices.first()?.spec.node_name.as_deref()?;
    slices
        .iter()
        .all(|s| s.spec.node_name.as_deref() == Some(node))
        .then_some(node)
}

/// A pool of a node: the one that was checked before, or one that was put together for this call.
pub(crate) type Gathered<'a> = Arc<Pool<'a>>;

pub(crate) fn devices(spec: &ResourceSliceSpec) -> impl Iterator<Item = &Device> {
    spec.devices.iter().flatten()
}

/// The pools of a node, in the order in which they are tried.
pub(crate) fn gather<'a>(
    all: &'a Slices<'a>,
    node: &Node,
    features: Features,
) -> Result<Vec<Gathered<'a>>, NodeSelectorError> {
    let own = all.of_node.get(nodes::name(node));
    let mut relevant: BTreeMap<(&'a str, &'a str), Vec<&'a ResourceSlice>> = BTreeMap::new();
    let mut pools = Vec::new();
    let kept = own.map(|o| o.pools.as_slice()).unwrap_or_default();
    if features.partitionable_devices {
        pools.extend_from_slice(kept);
    } else {
        let usable = |s: &&ResourceSlice| !partitionable(&s.spec);
        for pool in kept {
            let slices: Vec<_> = all
                .everywhere(pool.driver, pool.name)
                .iter()
                .copied()
                .filter(usable)
                .collect();
            if !slices.is_empty() {
                relevant.insert((pool.driver, pool.name), slices);
            }
        }
    }
    for slice in own.iter().flat_map(|o| &o.slices).chain(&all.anywhere) {
        let spec = &slice.spec;
        if partitionable(spec) && !features.partitionable_devices {
            continue;
        }
        if slice_is_for(spec, node)? {
            relevant
                .entry((&spec.driver, &spec.pool.name))
                .or_default()
                .push(slice);
        }
    }
    for ((driver, name), slices) in relevant {
        let pool = Pool::build(driver, name, slices, all.everywhere(driver, name), features);
        pools.extend(pool.map(Arc::new));
    }
    // Waiting for a device to be attached comes last.
    pools.sort_by_key(|pool| (pool.waits, pool.driver, pool.name));
    Ok(pools)
}

/// Says whether a slice means nothing to a scheduler without partitionable devices.
fn partitionable(spec: &ResourceSliceSpec) -> bool {
    spec.per_device_node_selection == Some(true) || spec.shared_counters.is_some()
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
