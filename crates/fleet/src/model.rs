//! Nodes as the scheduler sees them: what each holds, which of them fit a pod, and which are best.

use std::fmt;
use std::sync::Arc;

use divvy_allocator::Allocator;

use crate::device::Amount;
use crate::pod;
use crate::reach::Reach;
use crate::run::{Given, Nodes, Settings};
use crate::score::{self, Usage};
use crate::worlds::{Kind, Placement, Shape, StateId, Worlds};

/// Fewest nodes that are looked for, and the lowest share of all, in percent.
const FEWEST: (usize, usize) = (100, 5);

/// A fleet at a moment. Nodes have numbers, counted over all kinds; so have the shapes of its pods.
pub struct Model<'m> {
    pub(crate) worlds: Worlds<'m>,
    settings: Settings,
    /// Number of each shape among those of the worlds, by the number that the caller gave.
    known: Vec<usize>,
    nodes: Vec<OneNode>,
    /// Knowledge of all nodes, by shape.
    reach: Vec<Reach>,
    /// Node at which the next search begins.
    next: usize,
}

#[derive(Debug, Clone)]
struct OneNode {
    state: StateId,
    usage: Usage,
}

/// A pod's place: its node, and what it got there.
#[derive(Debug, Clone)]
pub struct Holding {
    node: usize,
    shape: usize,
    placement: Arc<Placement>,
}

impl Holding {
    /// Returns the number of the node.
    pub fn node(&self) -> usize {
        self.node
    }

    pub(crate) fn amount(&self) -> Amount {
        self.placement.amount
    }
}

impl fmt::Debug for Model<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Model")
            .field("nodes", &self.nodes.len())
            .finish_non_exhaustive()
    }
}

/// Computes for how many nodes that fit the scheduler looks.
pub(crate) fn enough(nodes: usize, percentage: Option<usize>) -> usize {
    let (fewest, lowest) = FEWEST;
    if nodes < fewest {
        return nodes;
    }
    let share = percentage.filter(|share| *share > 0);
    let share = share.unwrap_or_else(|| 50_usize.saturating_sub(nodes / 125).max(lowest));
    (nodes * share.min(100) / 100).max(fewest)
}

impl<'m> Model<'m> {
    /// Returns the fleet as it is at first. Pods come in these shapes, by number.
    pub fn new(
        allocator: &'m Allocator,
        fleet: Nodes<'m>,
        shapes: &[Shape],
        settings: Settings,
    ) -> Self {
        let mut worlds = Worlds::new(allocator, fleet.classes, fleet.kinds);
        let known = shapes.iter().map(|shape| worlds.shape(shape)).collect();
        let of_kind = |(kind, of): (usize, &Kind)| {
            let state = worlds.at_first(kind);
            let idle = Usage::of(pod::allocatable(&of.node));
            let usage = of
                .used
                .iter()
                .fold(idle, |usage, pod| usage.with(*pod, true));
            vec![OneNode { state, usage }; of.count]
        };
        let nodes: Vec<OneNode> = fleet.kinds.iter().enumerate().flat_map(of_kind).collect();
        Self {
            reach: vec![Reach::of(nodes.len()); worlds.shapes().len()],
            known,
            worlds,
            settings,
            nodes,
            next: 0,
        }
    }

    /// Returns the number under which a shape is known here; equal shapes have the same.
    pub fn shape(&self, given: usize) -> usize {
        self.known.get(given).copied().unwrap_or(usize::MAX)
    }

    pub(crate) fn states(&self) -> Vec<StateId> {
        self.nodes.iter().map(|node| node.state).collect()
    }

    /// Says whether every node is known to be too full for the shape.
    pub fn is_closed(&self, shape: usize) -> bool {
        self.reach.get(shape).is_none_or(Reach::is_closed)
    }

    /// Returns the nodes with the highest score among those that the scheduler finds for a shape;
    /// none where it fits nowhere.
    pub fn best(&mut self, shape: usize) -> Vec<usize> {
        let resources = self.resources(shape);
        let nodes = self.nodes_for(shape, resources);
        let mut alternatives = vec![0; nodes.len()];
        let wants = self.worlds.shapes().get(shape);
        if wants.is_some_and(has_alternatives) {
            for (number, score) in nodes.iter().zip(&mut alternatives) {
                let placement = self.placement(shape, *number);
                *score = placement.map_or(0, |placement| placement.score);
            }
            score::weigh_alternatives(&mut alternatives);
        }
        let counted = self.counted(shape);
        let rules = (self.settings.strategy, self.settings.weights);
        let mut scores: Vec<(i64, usize)> = Vec::new();
        for (number, extra) in nodes.iter().zip(&alternatives) {
            let Some(node) = self.nodes.get(*number) else {
                continue;
            };
            let (state, usage) = (node.state, node.usage);
            let with = |(class, count): &(String, u64)| {
                let [all, in_use] = self.worlds.counted(state, class);
                [all, in_use.saturating_add(*count)]
            };
            let devices: Vec<[u64; 2]> = counted.iter().map(with).collect();
            scores.push((usage.score(resources, &devices, rules) + extra, *number));
        }
        let best = scores.iter().map(|(score, _)| *score).max();
        let is_best = |of: &&(i64, usize)| Some(of.0) == best;
        scores.iter().filter(is_best).map(|of| of.1).collect()
    }

    /// Places a pod on a node; nothing where its devices do not fit there.
    pub fn place(&mut self, shape: usize, node: usize) -> Option<Holding> {
        let placement = self.placement(shape, node)?;
        let resources = self.resources(shape);
        if let Some(of) = self.nodes.get_mut(node) {
            of.state = placement.after;
            of.usage = of.usage.with(resources, true);
        }
        // Less is free: what was full still is.
        for reach in &mut self.reach {
            reach.has_less(node);
        }
        Some(Holding {
            node,
            shape,
            placement,
        })
    }

    /// Takes a pod away, and returns what is free again.
    pub(crate) fn take_away(&mut self, holding: &Holding) -> Amount {
        let resources = self.resources(holding.shape);
        let Some(of) = self.nodes.get_mut(holding.node) else {
            return Amount::default();
        };
        let before = self.worlds.held(of.state);
        of.state = self.worlds.release(of.state, &holding.placement.grants);
        of.usage = of.usage.with(resources, false);
        // More is free: what fitted still does.
        for reach in &mut self.reach {
            reach.has_more(holding.node);
        }
        let after = self.nodes.get(holding.node).map(|of| of.state);
        before.less(
            after
                .map(|state| self.worlds.held(state))
                .unwrap_or_default(),
        )
    }

    /// Takes a pod away.
    pub fn remove(&mut self, holding: &Holding) {
        self.take_away(holding);
    }

    /// Returns the devices of a pod, in the order of its claims and requests; without admin access.
    pub fn devices(&self, holding: &Holding) -> Vec<Given> {
        self.worlds
            .given(holding.placement.after, &holding.placement.grants)
    }

    fn placement(&mut self, shape: usize, node: usize) -> Option<Arc<Placement>> {
        let state = self.nodes.get(node)?.state;
        self.worlds.place(state, shape)
    }

    /// Returns the devices of a pod that are scored, by class.
    fn counted(&self, shape: usize) -> Vec<(String, u64)> {
        let shape = self.worlds.shapes().get(shape);
        let shape = shape.filter(|_| self.settings.weights.devices != 0);
        let counted = shape.into_iter().flat_map(|shape| &shape.extended);
        counted
            .map(|(class, count)| (class.clone(), *count))
            .collect()
    }

    fn resources(&self, shape: usize) -> [u64; 2] {
        let shape = self.worlds.shapes().get(shape);
        shape.map(|shape| shape.resources).unwrap_or_default()
    }

    /// Finds nodes that fit, from where the last search ended, until there are enough.
    fn nodes_for(&mut self, shape: usize, resources: [u64; 2]) -> Vec<usize> {
        let all = self.nodes.len();
        let mut found = Vec::new();
        if all == 0 || self.worlds.broken.contains_key(&shape) {
            return found;
        }
        let enough = enough(all, self.settings.percentage);
        let start = self.next;
        for (mut from, until) in [(start, all), (0, start)] {
            while let Some(number) = self.next_open(shape, from, until) {
                from = number + 1;
                if self.fits(shape, number, resources) {
                    found.push(number);
                    if found.len() == enough {
                        self.next = (number + 1) % all;
                        return found;
                    }
                }
            }
        }
        found
    }

    fn next_open(&self, shape: usize, from: usize, until: usize) -> Option<usize> {
        self.reach.get(shape)?.next_open(from, until)
    }

    fn fits(&mut self, shape: usize, number: usize, resources: [u64; 2]) -> bool {
        let (Some(node), Some(reach)) = (self.nodes.get(number), self.reach.get_mut(shape)) else {
            return false;
        };
        if !reach.is_known_to_fit(number) {
            let fits = self.worlds.place(node.state, shape).is_some();
            reach.learn(number, fits);
            if !fits {
                return false;
            }
        }
        node.usage.fits(resources)
    }
}

fn has_alternatives(shape: &Shape) -> bool {
    let specs = shape
        .claims
        .iter()
        .filter_map(|claim| claim.spec.as_ref()?.devices.as_ref());
    let mut requests = specs.flat_map(|devices| devices.requests.iter().flatten());
    requests.any(|request| request.first_available.is_some())
}
