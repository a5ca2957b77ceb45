//! A cluster as a value: what each node has, and whether a pod would fit it once some others are
//! gone.

use std::collections::{BTreeMap, BTreeSet};

use divvy_allocator::{AllocError, AllocatedState, Allocator, Inputs, Slices};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};

use crate::pod;
use crate::worlds::Shape;

/// Content of a cluster.
#[derive(Debug, Clone, Default)]
pub struct Cluster {
    pub nodes: Vec<Node>,
    /// Published devices.
    pub slices: Vec<ResourceSlice>,
    /// DeviceClasses.
    pub classes: Vec<DeviceClass>,
    /// Claims, with and without devices.
    pub claims: Vec<ResourceClaim>,
    /// Pods of all namespaces.
    pub pods: Vec<Pod>,
    /// PodDisruptionBudgets of all namespaces.
    pub budgets: Vec<PodDisruptionBudget>,
    /// UIDs of pods that were evicted: claims that only they reserve count as free, also before the
    /// cluster's own controller has noticed.
    pub left: BTreeSet<String>,
}

/// The cluster, indexed.
pub(crate) struct World<'w> {
    pub(crate) cluster: &'w Cluster,
    pub(crate) allocator: &'w Allocator,
    pub(crate) slices: &'w Slices<'w>,
    /// Pods that have not ended, by node, as their numbers.
    pub(crate) pods_of: Vec<Vec<usize>>,
    /// Claims that have devices, by pod, as their numbers.
    pub(crate) claims_of: BTreeMap<usize, Vec<usize>>,
    /// Claims that may have devices of a node's pools, by node, as their numbers.
    pub(crate) near: Vec<Vec<usize>>,
}

impl<'w> World<'w> {
    pub(crate) fn new(
        cluster: &'w Cluster,
        allocator: &'w Allocator,
        slices: &'w Slices<'w>,
    ) -> Self {
        let nodes = cluster.nodes.iter().enumerate();
        let nodes: BTreeMap<&str, usize> = nodes
            .filter_map(|(number, node)| Some((node.metadata.name.as_deref()?, number)))
            .collect();
        let node_of = |pod: &Pod| {
            let name = pod.spec.as_ref()?.node_name.as_deref()?;
            nodes.get(name).copied()
        };
        let pods = cluster.pods.iter().enumerate();
        let pods: BTreeMap<&str, usize> = pods
            .filter_map(|(number, pod)| Some((pod.metadata.uid.as_deref()?, number)))
            .collect();
        let mut pods_of = vec![Vec::new(); cluster.nodes.len()];
        for (number, pod) in cluster.pods.iter().enumerate() {
            let pods = node_of(pod).filter(|_| !pod::has_ended(pod));
            if let Some(pods) = pods.and_then(|node| pods_of.get_mut(node)) {
                pods.push(number);
            }
        }
        let mut claims_of: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (number, claim) in cluster.claims.iter().enumerate() {
            if allocation(claim).is_none() {
                continue;
            }
            for user in users(claim) {
                if let Some(pod) = pods.get(user).copied() {
                    claims_of.entry(pod).or_default().push(number);
                }
            }
        }
        Self {
            cluster,
            allocator,
            slices,
            pods_of,
            claims_of,
            near: near(cluster),
        }
    }

    pub(crate) fn pod(&self, number: usize) -> Option<&'w Pod> {
        self.cluster.pods.get(number)
    }

    /// Says whether a claim holds nothing once these pods are gone.
    pub(crate) fn is_freed(&self, claim: &ResourceClaim, gone: &[usize]) -> bool {
        let reserved = claim
            .status
            .as_ref()
            .and_then(|status| status.reserved_for.as_deref());
        let reserved = reserved.unwrap_or_default();
        // A claim that something else holds, or no known object, stays.
        !reserved.is_empty()
            && reserved.iter().all(|user| {
                let is_it = |number: &usize| {
                    let uid = self.pod(*number).and_then(|pod| pod.metadata.uid.as_ref());
                    uid == Some(&user.uid)
                };
                let has_left = self.cluster.left.contains(&user.uid);
                user.resource == "pods" && (has_left || gone.iter().any(is_it))
            })
    }

    /// Returns the devices that the wanted pod gets on a node once pods are gone.
    pub(crate) fn fits(
        &self,
        wanted: &Shape,
        node: usize,
        gone: &[usize],
    ) -> Result<Option<Vec<AllocationResult>>, AllocError> {
        let near = self.near.get(node).into_iter().flatten();
        let near = near.filter_map(|number| self.cluster.claims.get(*number));
        let kept = near.filter(|claim| !self.is_freed(claim, gone));
        let state = AllocatedState::from_claims(kept);
        self.fits_beside(wanted, node, &state, gone)
    }

    pub(crate) fn fits_beside(
        &self,
        wanted: &Shape,
        node: usize,
        allocated: &AllocatedState,
        gone: &[usize],
    ) -> Result<Option<Vec<AllocationResult>>, AllocError> {
        let Some(place) = self.cluster.nodes.get(node) else {
            return Ok(None);
        };
        let may = pod::may_run_on(place, wanted.selector.as_ref(), &wanted.tolerations);
        if !may || !self.has_room(wanted, place, node, gone) {
            return Ok(None);
        }
        let inputs = Inputs {
            slices: self.slices,
            classes: &self.cluster.classes,
            allocated,
            node: place,
        };
        let claims: Vec<&ResourceClaim> = wanted.claims.iter().collect();
        match self.allocator.fit(&inputs, &claims) {
            Ok(found) => Ok(found.map(|found| found.results)),
            Err(error) if error.is_of_node() => Ok(None),
            // The scheduler gives up, too, and says nothing of other nodes.
            Err(AllocError::TooHard { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Says whether processor time and memory are left, of a node that says what it has.
    pub(crate) fn has_room(
        &self,
        wanted: &Shape,
        place: &Node,
        node: usize,
        gone: &[usize],
    ) -> bool {
        let pods = self.pods_of.get(node).into_iter().flatten();
        let staying = pods.filter(|number| !gone.contains(number));
        let specs = staying.filter_map(|number| self.pod(*number)?.spec.as_ref());
        let used = specs.map(pod::resources).fold([0, 0], sum);
        let all = sum(used, wanted.resources);
        let both = pod::allocatable(place)
            .into_iter()
            .zip(all)
            .zip(wanted.resources);
        both.into_iter()
            .all(|((has, used), wanted)| has == 0 || wanted == 0 || used <= has)
    }
}

/// Returns by node the claims that have devices of its pools, or of pools that are for no one node.
fn near(cluster: &Cluster) -> Vec<Vec<usize>> {
    let mut owner: BTreeMap<(&str, &str), &str> = BTreeMap::new();
    for slice in &cluster.slices {
        if let Some(node) = &slice.spec.node_name {
            owner.insert((&slice.spec.driver, &slice.spec.pool.name), node);
        }
    }
    let of_node = |node: &Node| {
        let name = node.metadata.name.as_deref();
        let is_near = |claim: &ResourceClaim| {
            let devices = allocation(claim).and_then(|result| result.devices.as_ref());
            let mut results = devices
                .into_iter()
                .flat_map(|devices| &devices.results)
                .flatten();
            results.any(|result| {
                let owner = owner.get(&(result.driver.as_str(), result.pool.as_str()));
                owner.is_none_or(|owner| Some(*owner) == name)
            })
        };
        let claims = cluster.claims.iter().enumerate();
        claims
            .filter(|(_, claim)| is_near(claim))
            .map(|(number, _)| number)
            .collect()
    };
    cluster.nodes.iter().map(of_node).collect()
}

pub(crate) fn sum([cpu, memory]: [u64; 2], [more_cpu, more_memory]: [u64; 2]) -> [u64; 2] {
    [
        cpu.saturating_add(more_cpu),
        memory.saturating_add(more_memory),
    ]
}

pub(crate) fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

/// The UIDs of the pods that use a claim.
pub(crate) fn users(claim: &ResourceClaim) -> impl Iterator<Item = &str> {
    let reserved = claim
        .status
        .as_ref()
        .and_then(|status| status.reserved_for.as_ref());
    let reserved = reserved.into_iter().flatten();
    reserved
        .filter(|user| user.resource == "pods")
        .map(|user| user.uid.as_str())
}
