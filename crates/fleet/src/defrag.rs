//! Pods to evict so that a wanted pod fits: the fewest, and of as few the least important.
//!
//! Pure. The allocator says whether it fits in the world without them. Evictions only free a node's
//! own pods, so each node is looked at by itself, and the best answer wins.

mod look;
mod search;
mod stays;

#[cfg(test)]
pub(crate) mod tests;

use std::collections::BTreeMap;
use std::fmt;

use divvy_allocator::{AllocError, AllocatedState, Allocator, Features, Slices};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{AllocationResult, ResourceClaim, ResourceClaimStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde::Serialize;

pub use self::look::{Look, look_again};
use self::search::Search;
use crate::cluster::{Cluster, World};
use crate::worlds::Shape;
use crate::{pod, waiting};

/// The pod that is to fit.
#[derive(Debug, Clone, Default)]
pub struct Wanted {
    /// Claims that have no devices yet, and what it demands of the node.
    pub shape: Shape,
    /// Its priority: pods with a higher one stay.
    pub priority: i32,
    /// Further conditions.
    pub care: Care,
}

/// Conditions on evictions that no person has looked at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Care {
    /// Pods that were made later, by whole seconds, stay: what comes in the place of an evicted pod
    /// is not evicted for the same one.
    pub made_before: Option<Time>,
    /// Each evicted pod must fit a node afterwards.
    pub all_fit: bool,
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

impl fmt::Display for Victim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
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

impl World<'_> {
    fn staying(&self, wanted: &Wanted) -> Vec<String> {
        let pods = self.claims_of.keys().filter_map(|number| self.pod(*number));
        let said = pods.filter_map(|pod| {
            let why = stays::why(pod, wanted, &self.cluster.budgets)?;
            Some(format!("{}: {why}", waiting::name(pod)))
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
        waiting::asking(pod, claims.collect())
    }
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
