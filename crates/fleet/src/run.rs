//! A run: pods arrive, are placed as the scheduler does it, end, and others take their devices.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use divvy_allocator::{Allocator, Features};
use k8s_openapi::api::resource::v1::DeviceClass;

use crate::device::Amount;
use crate::pod;
use crate::queue::{Group, Queue};
use crate::random::Random;
use crate::reach::Reach;
use crate::report::{self, Report};
use crate::score::{self, Usage};
use crate::worlds::{Grant, Kind, Shape, StateId, Worlds};

/// Fewest nodes that are looked for, and the lowest share of all, in percent.
const FEWEST: (usize, usize) = (100, 5);

/// A pod of the workload.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Arrival, in milliseconds from the beginning.
    pub at: u64,
    /// Namespace and name.
    pub name: String,
    /// Number of its shape.
    pub shape: usize,
    /// Time that it runs, in milliseconds; without one it stays.
    pub duration: Option<u64>,
    /// Pods with a higher one come first.
    pub priority: i32,
}

/// The nodes, and the classes of the cluster.
#[derive(Debug, Clone, Copy)]
pub struct Nodes<'n> {
    /// Kinds, in the order in which the scheduler knows their nodes.
    pub kinds: &'n [Kind],
    /// DeviceClasses.
    pub classes: &'n [DeviceClass],
}

/// Where the scheduler puts pods among nodes that fit (`NodeResourcesFit`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Strategy {
    /// Where most is left.
    #[default]
    LeastAllocated,
    /// Where least is left.
    MostAllocated,
}

/// Settings of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Decides between nodes of equal score.
    pub seed: u64,
    /// Where pods go.
    pub strategy: Strategy,
    /// The scheduler's `percentageOfNodesToScore`; without it, the share falls with the nodes.
    pub percentage: Option<usize>,
    /// Release of Kubernetes, 1.`kubernetes`.
    pub kubernetes: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            seed: 1,
            strategy: Strategy::default(),
            percentage: None,
            kubernetes: 37,
        }
    }
}

/// A pod that got devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Placed {
    /// Number of the job.
    pub job: usize,
    /// Number of the node, counted over all kinds.
    pub node: usize,
    /// Time in milliseconds.
    pub at: u64,
    /// Devices, in the order of its claims and requests; without admin access.
    pub devices: Vec<Given>,
}

/// A device that a pod got, or its share of one.
#[derive(Debug, Clone, PartialEq)]
pub struct Given {
    /// Name of the device.
    pub name: String,
    /// Memory in bytes.
    pub memory: f64,
}

/// An event, in the order in which those of one moment happen: devices are free before they are
/// wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ends(usize),
    Arrives(usize),
}

#[derive(Debug, Clone)]
struct OneNode {
    state: StateId,
    usage: Usage,
}

struct Run<'r> {
    worlds: Worlds<'r>,
    jobs: &'r [Job],
    settings: Settings,
    /// By job: number of its shape among those of the worlds.
    shape_of: Vec<usize>,
    nodes: Vec<OneNode>,
    /// By shape.
    reach: Vec<Reach>,
    next: usize,
    random: Random,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    queue: Queue,
    running: BTreeMap<usize, (usize, Vec<Grant>)>,
    placed: Vec<Placed>,
    fullness: Fullness,
}

/// Sum of what is held, over time.
#[derive(Debug, Default)]
struct Fullness {
    now: Amount,
    since: u64,
    /// Bytes times milliseconds.
    sum: f64,
    peak: f64,
}

/// State of a run when its last pod has arrived.
struct Then {
    states: Vec<StateId>,
    waiting: usize,
    /// Memory that was held on average until then, in bytes.
    mean: f64,
}

impl Fullness {
    fn pass(&mut self, now: u64) {
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let span = now.saturating_sub(self.since) as f64;
        self.sum += self.now.memory * span;
        self.since = now;
    }
}

/// Runs jobs on a fleet.
pub fn simulate(
    fleet: Nodes<'_>,
    shapes: &[Shape],
    jobs: &[Job],
    settings: Settings,
) -> (Report, Vec<Placed>) {
    let allocator = Allocator::new(Features::of_kubernetes(settings.kubernetes));
    let mut worlds = Worlds::new(&allocator, fleet.classes, fleet.kinds);
    let known: Vec<usize> = shapes.iter().map(|shape| worlds.shape(shape)).collect();
    let shape_of = |job: &Job| known.get(job.shape).copied().unwrap_or(usize::MAX);
    let mut fullness = Fullness::default();
    let of_kind = |(kind, of): (usize, &Kind)| {
        let state = worlds.at_first(kind);
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        fullness.now.add(worlds.held(state).times(of.count as f64));
        let idle = Usage::of(pod::allocatable(&of.node));
        let usage = of
            .used
            .iter()
            .fold(idle, |usage, pod| usage.with(*pod, true));
        vec![OneNode { state, usage }; of.count]
    };
    let nodes: Vec<OneNode> = fleet.kinds.iter().enumerate().flat_map(of_kind).collect();
    let count = worlds.shapes().len();
    let run = Run {
        shape_of: jobs.iter().map(shape_of).collect(),
        reach: vec![Reach::of(nodes.len()); count],
        worlds,
        jobs,
        settings,
        nodes,
        next: 0,
        random: Random::new(settings.seed),
        events: BinaryHeap::new(),
        queue: Queue::default(),
        running: BTreeMap::new(),
        placed: Vec::new(),
        fullness,
    };
    run.go()
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

impl Run<'_> {
    fn go(mut self) -> (Report, Vec<Placed>) {
        for (number, job) in self.jobs.iter().enumerate() {
            self.events.push(Reverse((job.at, Event::Arrives(number))));
        }
        let last = self.jobs.iter().map(|job| job.at).max().unwrap_or(0);
        let mut then: Option<Then> = None;
        while let Some(now) = self.next_moment() {
            if now > last && then.is_none() {
                then = Some(self.then(last));
            }
            self.fullness.pass(now);
            let freed = self.happen(now);
            if freed {
                self.queue.wake(now);
            }
            while let Some(group) = self.queue.pop() {
                self.attempt(group, now);
            }
            self.fullness.peak = self.fullness.peak.max(self.fullness.now.memory);
        }
        let then = match then {
            Some(then) => then,
            None => self.then(last),
        };
        self.report(&then)
    }

    fn next_moment(&self) -> Option<u64> {
        let event = self.events.peek().map(|Reverse((at, _))| *at);
        [event, self.queue.next_retry()].into_iter().flatten().min()
    }

    /// Notes how things are when the last pod has arrived.
    fn then(&mut self, last: u64) -> Then {
        self.fullness.pass(last);
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        let mean = match last {
            0 => self.fullness.now.memory,
            last => self.fullness.sum / last as f64,
        };
        Then {
            states: self.states(),
            waiting: self.queue.waiting().map(|(_, pods)| pods).sum(),
            mean,
        }
    }

    fn states(&self) -> Vec<StateId> {
        self.nodes.iter().map(|node| node.state).collect()
    }

    /// Lets all happen that is due; says whether devices are free again.
    fn happen(&mut self, now: u64) -> bool {
        let mut freed = false;
        while let Some(Reverse((_, event))) =
            self.events.peek().copied().filter(|next| next.0.0 == now)
        {
            self.events.pop();
            match event {
                Event::Ends(job) => {
                    self.end(job);
                    freed = true;
                }
                Event::Arrives(job) => {
                    let priority = self.jobs.get(job).map_or(0, |job| job.priority);
                    self.queue.arrive(job, self.shape_of(job), priority, now);
                }
            }
        }
        // Where every node is known to be full, an attempt only costs time.
        let reach = &self.reach;
        let is_closed = |shape: usize| reach.get(shape).is_none_or(Reach::is_closed);
        self.queue.retry(now, is_closed);
        freed
    }

    fn shape_of(&self, job: usize) -> usize {
        self.shape_of.get(job).copied().unwrap_or(usize::MAX)
    }

    fn end(&mut self, job: usize) {
        let Some((number, grants)) = self.running.remove(&job) else {
            return;
        };
        let resources = self.resources(job);
        let Some(node) = self.nodes.get_mut(number) else {
            return;
        };
        let before = self.worlds.held(node.state);
        node.state = self.worlds.release(node.state, &grants);
        node.usage = node.usage.with(resources, false);
        let freed = before.less(self.worlds.held(node.state));
        self.fullness.now = self.fullness.now.less(freed);
        // More is free: what fitted still does.
        for reach in &mut self.reach {
            reach.has_more(number);
        }
    }

    fn resources(&self, job: usize) -> [u64; 2] {
        let shape = self.worlds.shapes().get(self.shape_of(job));
        shape.map(|shape| shape.resources).unwrap_or_default()
    }

    /// Places the first pod of a group. Where it fits nowhere, none of them does: they are alike,
    /// and until a pod ends there is only less.
    fn attempt(&mut self, group: Group, now: u64) {
        let Some(job) = group.first() else {
            return;
        };
        let shape = self.shape_of(job);
        let resources = self.resources(job);
        let nodes = self.nodes_for(shape, resources);
        let chosen = self.choose(&nodes, shape, resources);
        let placed = chosen.and_then(|number| {
            let state = self.nodes.get(number)?.state;
            Some((number, self.worlds.place(state, shape)?))
        });
        let Some((number, placement)) = placed else {
            self.queue.fail(group, now);
            return;
        };
        self.queue.placed(group);
        if let Some(node) = self.nodes.get_mut(number) {
            node.state = placement.after;
            node.usage = node.usage.with(resources, true);
        }
        // Less is free: what was full still is.
        for reach in &mut self.reach {
            reach.has_less(number);
        }
        self.fullness.now.add(placement.amount);
        self.running.insert(job, (number, placement.grants.clone()));
        let devices = self.worlds.given(placement.after, &placement.grants);
        self.placed.push(Placed {
            job,
            node: number,
            at: now,
            devices,
        });
        let ends = self.jobs.get(job).and_then(|job| job.duration);
        if let Some(duration) = ends {
            let at = now.saturating_add(duration.max(1));
            self.events.push(Reverse((at, Event::Ends(job))));
        }
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

    /// Chooses the node with the highest score; between equal ones the seed decides.
    fn choose(&mut self, nodes: &[usize], shape: usize, resources: [u64; 2]) -> Option<usize> {
        let mut alternatives = vec![0; nodes.len()];
        let has_alternatives = self
            .worlds
            .shapes()
            .get(shape)
            .is_some_and(has_alternatives);
        if has_alternatives {
            for (number, score) in nodes.iter().zip(&mut alternatives) {
                let state = self.nodes.get(*number)?.state;
                *score = self
                    .worlds
                    .place(state, shape)
                    .map_or(0, |placement| placement.score);
            }
            score::weigh_alternatives(&mut alternatives);
        }
        let strategy = self.settings.strategy;
        let score = |number: usize, extra: i64| {
            let usage = self
                .nodes
                .get(number)
                .map(|node| node.usage)
                .unwrap_or_default();
            usage.score(resources, strategy) + extra
        };
        let scores = nodes
            .iter()
            .zip(&alternatives)
            .map(|(number, extra)| (score(*number, *extra), *number));
        let scores: Vec<(i64, usize)> = scores.collect();
        let best = scores.iter().map(|(score, _)| *score).max()?;
        let best: Vec<usize> = scores
            .iter()
            .filter(|(score, _)| *score == best)
            .map(|(_, number)| *number)
            .collect();
        best.get(self.random.below(best.len())).copied()
    }

    fn report(mut self, then: &Then) -> (Report, Vec<Placed>) {
        let wait = |placed: &Placed| {
            let arrived = self.jobs.get(placed.job).map_or(0, |job| job.at);
            placed.at.saturating_sub(arrived)
        };
        let waits: Vec<u64> = self.placed.iter().map(wait).collect();
        let waiting: BTreeMap<usize, usize> = self.queue.waiting().collect();
        let now = self.states();
        let ended = self.fullness.since;
        let figures = report::Figures {
            jobs: self.jobs.len(),
            waits: &waits,
            waiting: &waiting,
            waiting_then: then.waiting,
            held: (then.mean, self.fullness.peak),
            ended,
            then: &then.states,
            now: &now,
        };
        (report::of(&mut self.worlds, &figures), self.placed)
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
