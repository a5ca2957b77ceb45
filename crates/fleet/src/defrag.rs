//! Pods to evict so that a wanted pod fits: the fewest, and of as few the least important.
//!
//! Pure. The allocator says whether it fits in the world without them. Evictions only free a node's
//! own pods, so each node is looked at by itself, and the best answer wins.

mod look;
mod search;
mod stays;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};

use divvy_allocator::{AllocError, AllocatedState, Allocator, Features, Inputs, Slices};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, ResourceClaim, ResourceClaimStatus, ResourceSlice,
};
use serde::Serialize;

pub use self::look::{Look, look_again};
use self::search::Search;
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

/// The pod that is to fit.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// Claims that have no devices yet, and what it demands of the node.
    pub shape: Shape,
    /// Its priority: pods with a higher one stay.
    pub priority: i32,
}

/// A pod that is to be evicted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Victim {
    pub namespace: String,
    pub name: String,
    /// UID, so that no other pod of the name is evicted.
    pub uid: String,
    pub priority: i32,
    /// Node on which its claims fit afterwards; none where it will wait.
    pub then: Option<String>,
}

/// Evictions after which the wanted pod fits a node.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    pub node: String,
    /// Pods to evict, the least important first; none where it fits already.
    pub evict: Vec<Victim>,
    /// Devices that the allocator gives the wanted pod in the world after, as `pool/device`.
    pub devices: Vec<String>,
    /// Mark of a plan of which it is proven that no other needs fewer or less important pods.
    pub is_fewest: bool,
}

/// The answer.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Answer {
    /// The plan; none where no eviction that is allowed makes room.
    pub plan: Option<Plan>,
    /// Pods that hold devices and stay, with the reason, where there is no plan.
    pub staying: Vec<String>,
}

/// Plans evictions for a pod on a release of Kubernetes, 1.`kubernetes`.
pub fn plan(cluster: &Cluster, wanted: &Wanted, kubernetes: u32) -> Result<Answer, AllocError> {
    let allocator = Allocator::new(Features::of_kubernetes(kubernetes));
    let slices = Slices::new(&cluster.slices);
    let world = World::new(cluster, &allocator, &slices);
    let mut best: Option<search::Found> = None;
    let mut is_fewest = true;
    for number in 0..cluster.nodes.len() {
        let Some(search) = Search::new(&world, wanted, number)? else {
            continue;
        };
        let outcome = search.run(best.as_ref())?;
        is_fewest &= outcome.is_complete;
        best = outcome.found.or(best);
        // Nothing is better than what fits already.
        if best.as_ref().is_some_and(|found| found.gone.is_empty()) {
            break;
        }
    }
    let Some(found) = best else {
        return Ok(Answer {
            plan: None,
            staying: world.staying(wanted),
        });
    };
    let plan = world.plan(wanted, &found, is_fewest)?;
    Ok(Answer {
        plan: Some(plan),
        staying: Vec::new(),
    })
}

/// The cluster, indexed.
struct World<'w> {
    cluster: &'w Cluster,
    allocator: &'w Allocator,
    slices: &'w Slices<'w>,
    /// Pods that have not ended, by node, as their numbers.
    pods_of: Vec<Vec<usize>>,
    /// Claims that have devices, by pod, as their numbers.
    claims_of: BTreeMap<usize, Vec<usize>>,
    /// Claims that may have devices of a node's pools, by node, as their numbers.
    near: Vec<Vec<usize>>,
}

impl<'w> World<'w> {
    fn new(cluster: &'w Cluster, allocator: &'w Allocator, slices: &'w Slices<'w>) -> Self {
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

    fn pod(&self, number: usize) -> Option<&'w Pod> {
        self.cluster.pods.get(number)
    }

    /// Says whether a claim holds nothing once these pods are gone.
    fn is_freed(&self, claim: &ResourceClaim, gone: &[usize]) -> bool {
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
    fn fits(
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

    fn fits_beside(
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
            Err(error) => Err(error),
        }
    }

    /// Says whether processor time and memory are left, of a node that says what it has.
    fn has_room(&self, wanted: &Shape, place: &Node, node: usize, gone: &[usize]) -> bool {
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

    fn staying(&self, wanted: &Wanted) -> Vec<String> {
        let pods = self.claims_of.keys().filter_map(|number| self.pod(*number));
        let said = pods.filter_map(|pod| {
            let why = stays::why(pod, wanted.priority, &self.cluster.budgets)?;
            Some(format!("{}: {why}", stays::name(pod)))
        });
        said.collect()
    }

    /// Proves a plan on the world after, and finds where its victims fit then.
    fn plan(
        &self,
        wanted: &Wanted,
        found: &search::Found,
        is_fewest: bool,
    ) -> Result<Plan, AllocError> {
        let gone = &found.gone;
        let kept = self.cluster.claims.iter();
        let kept = kept.filter(|claim| !self.is_freed(claim, gone));
        let mut after = AllocatedState::from_claims(kept);
        let results = self.fits_beside(&wanted.shape, found.node, &after, gone)?;
        let results = results.unwrap_or_default();
        let devices = results
            .iter()
            .filter_map(|result| result.devices.as_ref()?.results.as_ref());
        let devices = devices
            .flatten()
            .map(|of| format!("{}/{}", of.pool, of.device))
            .collect();
        add(&mut after, &wanted.shape.claims, results);
        // The most important one is the first to be placed again.
        let mut evict = Vec::new();
        let mut placed: BTreeMap<usize, Option<String>> = BTreeMap::new();
        for number in gone.iter().rev() {
            let Some(pod) = self.pod(*number) else {
                continue;
            };
            let claims = self
                .claims_of
                .get(number)
                .map(Vec::as_slice)
                .unwrap_or_default();
            // Pods of one claim go where the first of them goes.
            let known = claims.iter().find_map(|claim| placed.get(claim)).cloned();
            let then = match known {
                Some(then) => then,
                None => self.place_again(*number, pod, (wanted, found), &mut after)?,
            };
            placed.extend(claims.iter().map(|claim| (*claim, then.clone())));
            evict.push(Victim {
                namespace: pod.metadata.namespace.clone().unwrap_or_default(),
                name: pod.metadata.name.clone().unwrap_or_default(),
                uid: pod.metadata.uid.clone().unwrap_or_default(),
                priority: pod::priority(pod),
                then,
            });
        }
        evict.reverse();
        let node = self.cluster.nodes.get(found.node);
        Ok(Plan {
            node: node
                .and_then(|node| node.metadata.name.clone())
                .unwrap_or_default(),
            evict,
            devices,
            is_fewest,
        })
    }

    /// Places an evicted pod in the world after; returns the node, if there is one.
    fn place_again(
        &self,
        number: usize,
        pod: &Pod,
        (wanted, found): (&Wanted, &search::Found),
        after: &mut AllocatedState,
    ) -> Result<Option<String>, AllocError> {
        let shape = self.shape(number, pod);
        for (node, place) in self.cluster.nodes.iter().enumerate() {
            // Processor time that was made free is the wanted pod's.
            if node == found.node && wanted.shape.resources != [0, 0] {
                continue;
            }
            if let Some(results) = self.fits_beside(&shape, node, after, &found.gone)? {
                add(after, &shape.claims, results);
                return Ok(place.metadata.name.clone());
            }
        }
        Ok(None)
    }

    /// Returns an evicted pod as its controller makes it again: its claims without devices.
    fn shape(&self, number: usize, pod: &Pod) -> Shape {
        let claims = self.claims_of.get(&number).into_iter().flatten();
        let claims = claims.filter_map(|claim| self.cluster.claims.get(*claim));
        let claims = claims.map(|claim| ResourceClaim {
            status: None,
            ..claim.clone()
        });
        let spec = pod.spec.as_ref();
        Shape {
            name: stays::name(pod),
            claims: claims.collect(),
            selector: spec.and_then(pod::selector),
            tolerations: spec
                .and_then(|spec| spec.tolerations.clone())
                .unwrap_or_default(),
            resources: spec.map(pod::resources).unwrap_or_default(),
        }
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

fn sum([cpu, memory]: [u64; 2], [more_cpu, more_memory]: [u64; 2]) -> [u64; 2] {
    [
        cpu.saturating_add(more_cpu),
        memory.saturating_add(more_memory),
    ]
}

fn allocation(claim: &ResourceClaim) -> Option<&AllocationResult> {
    claim.status.as_ref()?.allocation.as_ref()
}

/// The UIDs of the pods that use a claim.
fn users(claim: &ResourceClaim) -> impl Iterator<Item = &str> {
    let reserved = claim
        .status
        .as_ref()
        .and_then(|status| status.reserved_for.as_ref());
    let reserved = reserved.into_iter().flatten();
    reserved
        .filter(|user| user.resource == "pods")
        .map(|user| user.uid.as_str())
}

fn add(state: &mut AllocatedState, claims: &[ResourceClaim], results: Vec<AllocationResult>) {
    for (claim, result) in claims.iter().zip(results) {
        state.add(&ResourceClaim {
            status: Some(ResourceClaimStatus {
                allocation: Some(result),
                ..ResourceClaimStatus::default()
            }),
            ..claim.clone()
        });
    }
}
