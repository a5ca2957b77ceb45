//! A run: pods arrive, are placed as the scheduler does it, end, and others take their devices.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use divvy_allocator::{Allocator, Features};
use k8s_openapi::api::resource::v1::DeviceClass;

use crate::device::Amount;
use crate::model::{Holding, Model};
use crate::queue::{Group, Queue};
use crate::random::Random;
use crate::report::{self, Report};
use crate::worlds::{Kind, Shape, StateId};

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

/// Weights of what `NodeResourcesFit` scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Weights {
    /// Processor time.
    pub cpu: i64,
    /// Memory.
    pub memory: i64,
    /// Devices that pods ask for as an extended resource; by default none are scored.
    pub devices: i64,
}

impl Default for Weights {
    fn default() -> Self {
        Self {
            cpu: 1,
            memory: 1,
            devices: 0,
        }
    }
}

/// Settings of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// Decides between nodes of equal score.
    pub seed: u64,
    /// Where pods go.
    pub strategy: Strategy,
    /// Weights of what is left there.
    pub weights: Weights,
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
            weights: Weights::default(),
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

struct Run<'r> {
    model: Model<'r>,
    jobs: &'r [Job],
    random: Random,
    events: BinaryHeap<Reverse<(u64, Event)>>,
    queue: Queue,
    running: BTreeMap<usize, Holding>,
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
    let model = Model::new(&allocator, fleet, shapes, settings);
    let mut fullness = Fullness::default();
    for state in model.states() {
        fullness.now.add(model.worlds.held(state));
    }
    let run = Run {
        model,
        jobs,
        random: Random::new(settings.seed),
        events: BinaryHeap::new(),
        queue: Queue::default(),
        running: BTreeMap::new(),
        placed: Vec::new(),
        fullness,
    };
    run.go()
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
            states: self.model.states(),
            waiting: self.queue.waiting().map(|(_, pods)| pods).sum(),
            mean,
        }
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
        let model = &self.model;
        self.queue.retry(now, |shape| model.is_closed(shape));
        freed
    }

    fn shape_of(&self, job: usize) -> usize {
        let job = self.jobs.get(job);
        job.map_or(usize::MAX, |job| self.model.shape(job.shape))
    }

    fn end(&mut self, job: usize) {
        if let Some(holding) = self.running.remove(&job) {
            let freed = self.model.take_away(&holding);
            self.fullness.now = self.fullness.now.less(freed);
        }
    }

    /// Places the first pod of a group. Where it fits nowhere, none of them does: they are alike,
    /// and until a pod ends there is only less. Between nodes of equal score the seed decides.
    fn attempt(&mut self, group: Group, now: u64) {
        let Some(job) = group.first() else {
            return;
        };
        let shape = self.shape_of(job);
        let best = self.model.best(shape);
        let chosen = match best.len() {
            0 => None,
            nodes => best.get(self.random.below(nodes)),
        };
        let Some(holding) = chosen.and_then(|node| self.model.place(shape, *node)) else {
            self.queue.fail(group, now);
            return;
        };
        self.queue.placed(group);
        self.fullness.now.add(holding.amount());
        self.placed.push(Placed {
            job,
            node: holding.node(),
            at: now,
            devices: self.model.devices(&holding),
        });
        self.running.insert(job, holding);
        let ends = self.jobs.get(job).and_then(|job| job.duration);
        if let Some(duration) = ends {
            let at = now.saturating_add(duration.max(1));
            self.events.push(Reverse((at, Event::Ends(job))));
        }
    }

    fn report(mut self, then: &Then) -> (Report, Vec<Placed>) {
        let wait = |placed: &Placed| {
            let arrived = self.jobs.get(placed.job).map_or(0, |job| job.at);
            placed.at.saturating_sub(arrived)
        };
        let waits: Vec<u64> = self.placed.iter().map(wait).collect();
        let waiting: BTreeMap<usize, usize> = self.queue.waiting().collect();
        let now = self.model.states();
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
        (report::of(&mut self.model.worlds, &figures), self.placed)
    }
}
