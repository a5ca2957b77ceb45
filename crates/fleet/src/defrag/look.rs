//! Looks at the cluster between the evictions of a plan.

use divvy_allocator::{AllocError, Allocator, Features, Slices};

use super::{Victim, Wanted, plan, stays};
use crate::cluster::{Cluster, World};

/// Answer to a look at the cluster while a plan is carried out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Look {
    /// The rest of the plan makes room.
    AsPlanned,
    /// Without any eviction, a node has room.
    Fits {
        /// The node.
        node: String,
        /// Devices, as `pool/device`.
        devices: Vec<String>,
    },
    /// The plan is not one for this cluster any more.
    Changed(String),
}

/// Looks whether the rest of a plan's evictions on a node is still what makes room.
pub fn look_again(
    cluster: &Cluster,
    wanted: &Wanted,
    (node, rest): (&str, &[Victim]),
    kubernetes: u32,
) -> Result<Look, AllocError> {
    let now = plan(cluster, wanted, kubernetes)?.plan;
    let fewer = match now {
        Some(plan) if plan.evict.is_empty() => {
            return Ok(Look::Fits {
                node: plan.node,
                devices: plan.devices,
            });
        }
        Some(plan) => plan.evict.len() < rest.len(),
        None => false,
    };
    if fewer {
        return Ok(Look::Changed("fewer evictions make room now".to_owned()));
    }
    let allocator = Allocator::new(Features::of_kubernetes(kubernetes));
    let slices = Slices::new(&cluster.slices);
    World::new(cluster, &allocator, &slices).still(wanted, node, rest)
}

impl World<'_> {
    /// Says whether these pods are still there, may still go, and still make room on their node.
    fn still(&self, wanted: &Wanted, node: &str, rest: &[Victim]) -> Result<Look, AllocError> {
        let mut nodes = self.cluster.nodes.iter();
        let place = nodes.position(|of| of.metadata.name.as_deref() == Some(node));
        let Some(place) = place else {
            return Ok(Look::Changed(format!("node {node} is gone")));
        };
        let mut gone = Vec::new();
        for victim in rest {
            let is_it = |number: &usize| {
                let uid = self
                    .pod(*number)
                    .and_then(|pod| pod.metadata.uid.as_deref());
                uid == Some(victim.uid.as_str())
            };
            let mut here = self.pods_of.get(place).into_iter().flatten().copied();
            let Some(number) = here.find(is_it) else {
                let why = format!("pod {victim} has left node {node}");
                return Ok(Look::Changed(why));
            };
            let pod = self.pod(number);
            if let Some(why) = pod.and_then(|pod| stays::why(pod, wanted, &self.cluster.budgets)) {
                return Ok(Look::Changed(format!("pod {victim} stays: {why}")));
            }
            gone.push(number);
        }
        let why = match (self.fits(&wanted.shape, place, &gone)?, rest) {
            (Some(_), _) => return Ok(Look::AsPlanned),
            (None, []) => format!("it does not fit node {node}, although all of the plan are gone"),
            (None, _) => format!("it does not fit node {node} any more when the rest is evicted"),
        };
        Ok(Look::Changed(why))
    }
}
