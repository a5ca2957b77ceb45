//! The search on one node: subsets of its pods by their number, from none on.
//!
//! Without budgets, more evictions never make less room: what does not fit without all of them
//! never does, and a pod without whose eviction nothing fits is in every plan. A first plan, from
//! which pods are spared one after another, bounds the search.

use std::collections::{BTreeMap, BTreeSet};

use divvy_allocator::AllocError;

use super::{Wanted, stays};
use crate::cluster::{World, allocation};
use crate::device::gpu_of;
use crate::{pod, waiting};

/// Subsets that are tried on a node before the best known one is taken without a proof.
const MOST_TRIES: usize = 2_000;

/// Pods that make room on a node, the least important first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) node: usize,
    pub(super) gone: Vec<usize>,
    /// Priorities, the highest first.
    ranks: Vec<i32>,
}

impl Found {
    /// Returns what is compared: fewer pods, then lower priorities.
    fn cost(&self) -> (usize, &[i32]) {
        (self.gone.len(), &self.ranks)
    }
}

/// Answer of a node.
pub(super) struct Outcome {
    /// A plan that is better than the one known before.
    pub(super) found: Option<Found>,
    /// Mark of a search that left nothing out.
    pub(super) is_complete: bool,
}

pub(super) struct Search<'s, 'w> {
    world: &'s World<'w>,
    wanted: &'s Wanted,
    node: usize,
    /// Pods that may go and hold devices, or take what the wanted pod needs; the least important
    /// first.
    pods: Vec<usize>,
    tries: usize,
}

impl<'s, 'w> Search<'s, 'w> {
    /// Begins a search; nothing where no eviction makes room.
    pub(super) fn new(
        world: &'s World<'w>,
        wanted: &'s Wanted,
        node: usize,
    ) -> Result<Option<Self>, AllocError> {
        let budgets = &world.cluster.budgets;
        let counts = |number: &usize| {
            let Some(pod) = world.pod(*number) else {
                return false;
            };
            let useful = world.claims_of.contains_key(number) || wanted.shape.resources != [0, 0];
            useful && stays::why(pod, wanted, budgets).is_none()
        };
        let all = world.pods_of.get(node).into_iter().flatten().copied();
        let mut pods: Vec<usize> = all.filter(counts).collect();
        pods.sort_by_key(|number| {
            world
                .pod(*number)
                .map(|pod| (pod::priority(pod), waiting::name(pod)))
        });
        let search = Self {
            world,
            wanted,
            node,
            pods,
            tries: 0,
        };
        let fits = search.fits(&search.pods)?;
        Ok(fits.then_some(search))
    }

    fn fits(&self, gone: &[usize]) -> Result<bool, AllocError> {
        let found = self.world.fits(&self.wanted.shape, self.node, gone)?;
        Ok(found.is_some())
    }

    /// Says whether budgets allow it.
    fn is_allowed(&self, gone: &[usize]) -> bool {
        let budgets = &self.world.cluster.budgets;
        let mut counts: BTreeMap<usize, usize> = BTreeMap::new();
        let pods = gone.iter().filter_map(|number| self.world.pod(*number));
        for budget in pods.flat_map(|pod| stays::of_pod(pod, budgets)) {
            *counts.entry(budget).or_default() += 1;
        }
        counts.iter().all(|(budget, count)| {
            let allowed = budgets.get(*budget).map(stays::allowed);
            *count <= allowed.unwrap_or(0)
        })
    }

    /// Says whether all evicted pods fit a node afterwards, where they must.
    fn all_go_on(&self, found: &Found) -> Result<bool, AllocError> {
        if !self.wanted.care.all_fit {
            return Ok(true);
        }
        let plan = self.world.plan(self.wanted, found, true)?;
        Ok(plan.evict.iter().all(|victim| victim.then.is_some()))
    }

    fn found(&self, gone: &[usize]) -> Found {
        let pods = gone.iter().filter_map(|number| self.world.pod(*number));
        let mut ranks: Vec<i32> = pods.map(pod::priority).collect();
        ranks.sort_unstable_by(|a, b| b.cmp(a));
        let mut gone = gone.to_vec();
        gone.sort_by_key(|number| self.pods.iter().position(|pod| pod == number));
        Found {
            node: self.node,
            gone,
            ranks,
        }
    }

    /// Searches for a plan that is better than a known one.
    pub(super) fn run(mut self, known: Option<&Found>) -> Result<Outcome, AllocError> {
        let mut best: Option<Found> = None;
        let is_better = |found: &Found, best: &Option<Found>| {
            let than = best.as_ref().or(known);
            than.is_none_or(|than| found.cost() < than.cost())
        };
        for start in self.starts() {
            if !self.fits(&start)? {
                continue;
            }
            let spared = self.spare(start)?;
            let found = self.found(&spared);
            if is_better(&found, &best) && self.is_allowed(&spared) && self.all_go_on(&found)? {
                best = Some(found);
            }
        }
        let mut needed = Vec::new();
        for pod in &self.pods {
            let others: Vec<usize> = self
                .pods
                .iter()
                .copied()
                .filter(|other| other != pod)
                .collect();
            if !self.fits(&others)? {
                needed.push(*pod);
            }
        }
        let free: Vec<usize> = self
            .pods
            .iter()
            .copied()
            .filter(|pod| !needed.contains(pod))
            .collect();
        for more in 0..=free.len() {
            let bound = best.as_ref().or(known).map(|best| best.gone.len());
            if bound.is_some_and(|bound| needed.len() + more > bound) {
                break;
            }
            let mut chosen: Vec<usize> = (0..more).collect();
            loop {
                let gone: Vec<usize> = needed
                    .iter()
                    .copied()
                    .chain(chosen.iter().filter_map(|place| free.get(*place).copied()))
                    .collect();
                let found = self.found(&gone);
                self.tries += 1;
                if self.tries > MOST_TRIES {
                    return Ok(Outcome {
                        found: best,
                        is_complete: false,
                    });
                }
                let is_allowed = is_better(&found, &best) && self.is_allowed(&gone);
                if is_allowed && self.fits(&gone)? && self.all_go_on(&found)? {
                    best = Some(found);
                }
                if !next(&mut chosen, free.len()) {
                    break;
                }
            }
        }
        Ok(Outcome {
            found: best,
            is_complete: true,
        })
    }

    /// The sets from which pods are spared: those of each GPU, and all.
    fn starts(&self) -> Vec<Vec<usize>> {
        let mut by_gpu: BTreeMap<String, BTreeSet<usize>> = BTreeMap::new();
        for pod in &self.pods {
            for claim in self.world.claims_of.get(pod).into_iter().flatten() {
                let result = self.world.cluster.claims.get(*claim).and_then(allocation);
                let devices = result.and_then(|result| result.devices.as_ref());
                for device in devices
                    .iter()
                    .flat_map(|devices| &devices.results)
                    .flatten()
                {
                    let gpu = format!("{}/{}", device.pool, gpu_of(&device.device));
                    by_gpu.entry(gpu).or_default().insert(*pod);
                }
            }
        }
        let mut starts: Vec<Vec<usize>> = by_gpu
            .into_values()
            .map(|pods| pods.into_iter().collect())
            .collect();
        starts.push(self.pods.clone());
        starts
    }

    /// Spares pods, the most important first, for as long as it still fits.
    fn spare(&self, mut gone: Vec<usize>) -> Result<Vec<usize>, AllocError> {
        for pod in self.pods.iter().rev() {
            let Some(place) = gone.iter().position(|other| other == pod) else {
                continue;
            };
            gone.remove(place);
            if !self.fits(&gone)? {
                gone.insert(place, *pod);
            }
        }
        Ok(gone)
    }
}

/// Goes on to the next subset of so many of `all`, in lexical order.
fn next(chosen: &mut [usize], all: usize) -> bool {
    let count = chosen.len();
    let can_grow = |place: usize, value: usize| value + 1 < all - (count - 1 - place);
    let Some(place) = (0..count).rev().find(|place| {
        chosen
            .get(*place)
            .is_some_and(|value| can_grow(*place, *value))
    }) else {
        return false;
    };
    let first = chosen.get(place).map_or(0, |value| value + 1);
    for (step, slot) in chosen.iter_mut().skip(place).enumerate() {
        *slot = first + step;
    }
    true
}
