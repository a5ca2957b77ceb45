//! The fleet simulator beside the real scheduler, decision by decision.
//!
//! Pods with claims come and go on a real API server with the real scheduler, and nodes that are
//! only objects. The model of `divvy simulate` follows: each node that the scheduler chose must be
//! one of those that are best in the model, the devices must be the model's, and what waits in one
//! must wait in the other. Where several nodes are best the model goes where the scheduler went.
//! Beside it the simulator runs the same pods by itself, where chance decides between equal nodes.

use std::collections::BTreeMap;
use std::fmt;
use std::io::Write as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use divvy_allocator::{Allocator, Features};
use divvy_api::names::CLASS_GPU;
use divvy_e2e::api::at;
use divvy_e2e::parts::{numbers, version_setting};
use divvy_e2e::{Extent, Gates, poll};
use divvy_fleet::{
    Holding, Job, Kind, Model, Nodes, Random, Settings, Shape, Strategy, Weights, request, simulate,
};
use divvy_offer::{GpuRules, Modes};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, DeviceSubRequest, ResourceSlice};
use serde_json::Value;

use crate::scheduling::{ControlPlane, NodeSpec, PATIENCE, path};

const NAME: &str = "truth";
/// Extended resource of the class of whole GPUs.
const RESOURCE: &str = "nvidia.com/gpu";
/// Time in which the scheduler tries a pod again that fits: its longest back-off, three
/// times.
const AGAIN: Duration = Duration::from_secs(30);
/// Time in which the scheduler notices that a pod and its claims are gone: it has no figure of it.
const NOTICE: Duration = Duration::from_millis(300);
/// Time between two events, for the simulator by itself: longer than any back-off.
const APART: u64 = 60_000;
/// Part of the events that end a pod, in percent.
const ENDS: usize = 30;

/// Requests, and how often each of them comes.
const REQUESTS: [(&str, usize); 13] = [
    ("8*gpu", 8),
    ("4*gpu", 10),
    ("2*gpu", 10),
    ("gpu", 18),
    ("mig:1g.10gb", 9),
    ("mig:2g.20gb", 8),
    ("mig:3g.40gb", 8),
    ("mig:7g.80gb", 2),
    ("share:10Gi", 8),
    ("share:30Gi/30", 5),
    ("mps:10Gi", 6),
    // The first of two that fits, and two claims of one pod.
    ("mig:3g.40gb|share:40Gi", 4),
    ("gpu&share:10Gi", 4),
];

/// Compares the simulator with the real scheduler.
#[derive(Debug, Parser)]
#[command(name = "divvy-bench truth")]
pub(crate) struct Args {
    /// Nodes with eight H100; a fourth of so many with four L40S come beside them
    #[arg(long, default_value_t = 40)]
    nodes: usize,
    /// Pods that come or go, for each seed
    #[arg(long, default_value_t = 300)]
    events: usize,
    /// Number of runs
    #[arg(long, default_value_t = 20)]
    seeds: u64,
    /// Control planes at once: a run waits most of its time for back-offs
    #[arg(long, default_value_t = 4)]
    jobs: usize,
    /// A scheduler that packs, as docs/packing.md configures it, and whole GPUs as an extended
    /// resource
    #[arg(long)]
    packing: bool,
    /// Seed of the first
    #[arg(long, default_value_t = 1)]
    first: u64,
}

/// Counts of what was compared.
#[derive(Debug, Default, Clone, Copy)]
struct Tally {
    bound: usize,
    /// Pods for which one node only was best.
    alone: usize,
    refused: usize,
    ended: usize,
    /// Pods that the simulator by itself placed.
    by_itself: usize,
}

impl Tally {
    fn add(&mut self, other: Self) {
        self.bound += other.bound;
        self.alone += other.alone;
        self.refused += other.refused;
        self.ended += other.ended;
        self.by_itself += other.by_itself;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            bound,
            alone,
            refused,
            ended,
            by_itself,
        } = self;
        write!(
            f,
            "{bound} pods bound ({alone} where one node only was best), {refused} refused at first, \
             {ended} ended; the simulator by itself places {by_itself}"
        )
    }
}

/// Compares, and fails on any difference.
pub(crate) fn run(args: &Args) -> Result<()> {
    let version = version_setting();
    let (_, minor, _) = numbers(&version).context("a version is like 1.37.1")?;
    let specs = node_specs(args.nodes);
    let (extent, scoring) = if args.packing {
        let weights = Weights {
            devices: 5,
            ..Weights::default()
        };
        let scoring = Settings {
            strategy: Strategy::MostAllocated,
            weights,
            ..Settings::default()
        };
        (Extent::Packing, scoring)
    } else {
        (Extent::Scheduling, Settings::default())
    };
    let (next, all) = (AtomicU64::new(args.first), Mutex::new(Vec::new()));
    let worker = &|number: usize| -> Result<()> {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= args.first + args.seeds {
                return Ok(());
            }
            // A control plane for each: nothing of a run before it is left in a queue or a cache.
            let name = format!("{NAME}-{number}");
            let plane = ControlPlane::start(&name, &version, (extent, Gates::Default), &specs)?;
            let settings = Settings {
                seed,
                kubernetes: minor,
                ..scoring
            };
            let (tally, difference) = one(&plane, args, settings)?;
            say(&format!("seed {seed}: {tally}"));
            if let Some(difference) = &difference {
                say(&format!("seed {seed}: DIFFERENT: {difference}"));
            }
            let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
            all.push((tally, difference.is_some()));
        }
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..args.jobs)
            .map(|number| scope.spawn(move || worker(number)))
            .collect();
        workers.into_iter().try_for_each(|worker| {
            let ended = worker.join();
            ended.map_err(|_| anyhow::anyhow!("a thread panicked"))?
        })
    })?;
    let all = all.into_inner().unwrap_or_else(PoisonError::into_inner);
    let (mut sum, mut differences) = (Tally::default(), 0);
    for (tally, is_different) in all {
        sum.add(tally);
        differences += usize::from(is_different);
    }
    say(&format!(
        "Kubernetes {version}, {} seeds: {sum}",
        args.seeds
    ));
    ensure!(
        differences == 0,
        "{differences} of {} runs differ",
        args.seeds
    );
    Ok(())
}

/// Nodes of unequal size, so that few have equal scores.
fn node_specs(count: usize) -> Vec<NodeSpec> {
    let of = |number: usize, gpus: &str| {
        let step = u32::try_from(number).unwrap_or(u32::MAX);
        NodeSpec {
            name: format!("node-{number:03}"),
            gpus: gpus.to_owned(),
            rules: GpuRules {
                modes: Modes::everything(),
                ..GpuRules::default()
            },
            cores: 96 + step * 7 % 61,
            memory: 900 + step * 37 % 509,
        }
    };
    let large = (0..count).map(|number| of(number, "h100x8"));
    let small = (count..count + count / 4).map(|number| of(number, "l40sx4"));
    large.chain(small).collect()
}

/// A pod of a run.
#[derive(Debug)]
struct Pod {
    name: String,
    shape: usize,
}

/// Runs one seed on a fresh control plane. The second part is the first difference, where the run
/// ends.
fn one(plane: &ControlPlane, args: &Args, settings: Settings) -> Result<(Tally, Option<String>)> {
    let mut nodes: Vec<Node> = plane.all("/api/v1/nodes")?;
    nodes.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let slices: Vec<ResourceSlice> = plane.all("/apis/resource.k8s.io/v1/resourceslices")?;
    let classes: Vec<DeviceClass> = plane.all("/apis/resource.k8s.io/v1/deviceclasses")?;
    let kinds: Vec<Kind> = nodes.into_iter().map(|node| kind(node, &slices)).collect();
    let fleet = Nodes {
        kinds: &kinds,
        classes: &classes,
    };
    let (shapes, story) = story(args, settings.seed)?;
    let allocator = Allocator::new(Features::of_kubernetes(settings.kubernetes));
    let mut lockstep = Lockstep {
        plane,
        kinds: &kinds,
        model: Model::new(&allocator, fleet, &shapes, settings),
        shapes: &shapes,
        waiting: Vec::new(),
        running: BTreeMap::new(),
        tally: Tally::default(),
    };
    let mut jobs: Vec<Job> = Vec::new();
    let mut difference = None;
    for (number, event) in story.iter().enumerate() {
        let at = u64::try_from(number)? * APART;
        let different = match event {
            Event::Arrives(shape) => {
                jobs.push(Job {
                    at,
                    name: String::new(),
                    shape: *shape,
                    duration: None,
                    priority: 0,
                });
                lockstep.arrive(jobs.len() - 1, *shape)?
            }
            Event::Ends(dice) => {
                let ended = lockstep.end(*dice)?;
                if let Some(job) = ended.and_then(|job| jobs.get_mut(job)) {
                    job.duration = Some(at.saturating_sub(job.at));
                }
                None
            }
        };
        difference = match different {
            None => lockstep.settle()?,
            different => different,
        };
        if difference.is_some() {
            break;
        }
    }
    let mut tally = lockstep.tally;
    tally.by_itself = simulate(fleet, &shapes, &jobs, settings).1.len();
    Ok((tally, difference))
}

fn kind(node: Node, slices: &[ResourceSlice]) -> Kind {
    let name = node.metadata.name.clone().unwrap_or_default();
    let its = |slice: &&ResourceSlice| slice.spec.node_name.as_ref() == Some(&name);
    let mut its: Vec<ResourceSlice> = slices.iter().filter(its).cloned().collect();
    its.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    Kind {
        slices: its,
        name,
        count: 1,
        node,
        ..Kind::default()
    }
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// A pod of this shape.
    Arrives(usize),
    /// The running pod that this number falls on.
    Ends(usize),
}

/// Draws what happens: the same for the same seed.
fn story(args: &Args, seed: u64) -> Result<(Vec<Shape>, Vec<Event>)> {
    let mut dice = Random::new(seed);
    let all: usize = REQUESTS.iter().map(|(_, often)| often).sum();
    let (mut shapes, mut story) = (Vec::new(), Vec::new());
    for _ in 0..args.events {
        if dice.below(100) < ENDS {
            story.push(Event::Ends(dice.below(usize::MAX)));
            continue;
        }
        let mut drawn = dice.below(all);
        let wanted = REQUESTS.iter().find(|(_, often)| {
            let here = drawn < *often;
            drawn = drawn.saturating_sub(*often);
            here
        });
        let (text, _) = wanted.context("a request is drawn")?;
        let mut shape = shape(text)?;
        let whole = text
            .strip_suffix("*gpu")
            .or((*text == "gpu").then_some("1"));
        if let Some(count) = whole.filter(|_| args.packing) {
            shape.extended = [(CLASS_GPU.to_owned(), count.parse()?)].into();
        }
        let gib = 1 << 30;
        let amounts = [1 + dice.below(40), 4 + dice.below(250)];
        let [cores, memory] = amounts.map(|amount| u64::try_from(amount).unwrap_or(1));
        shape.resources = [cores * 1000, memory * gib];
        shapes.push(shape);
        story.push(Event::Arrives(shapes.len() - 1));
    }
    Ok((shapes, story))
}

/// Returns the pod of words as `gpu`, `a|b` (the first that fits) or `a&b` (a claim for each).
fn shape(text: &str) -> Result<Shape> {
    if let Some((first, second)) = text.split_once('&') {
        let mut both = request::shape(first)?;
        both.claims.extend(request::shape(second)?.claims);
        return Ok(both);
    }
    let Some((first, second)) = text.split_once('|') else {
        return Ok(request::shape(text)?);
    };
    let (mut either, other) = (request::shape(first)?, request::shape(second)?);
    let requests = |shape: &Shape| {
        let claim = shape.claims.first()?.spec.clone()?;
        claim.devices?.requests?.first()?.exactly.clone()
    };
    let sub = |name: &str, shape: &Shape| {
        let exactly = requests(shape)?;
        Some(DeviceSubRequest {
            name: name.to_owned(),
            device_class_name: exactly.device_class_name,
            selectors: exactly.selectors,
            capacity: exactly.capacity,
            count: exactly.count,
            ..DeviceSubRequest::default()
        })
    };
    let alternatives = [sub("first", &either), sub("second", &other)];
    let alternatives: Option<Vec<DeviceSubRequest>> = alternatives.into_iter().collect();
    let request = either.claims.first_mut().and_then(|claim| {
        let devices = claim.spec.as_mut()?.devices.as_mut()?;
        devices.requests.as_mut()?.first_mut()
    });
    let request = request.context("a shape has a request")?;
    request.exactly = None;
    request.first_available = Some(alternatives.context("both alternatives ask")?);
    Ok(either)
}

/// The cluster and the model, after the same events.
struct Lockstep<'l> {
    plane: &'l ControlPlane,
    kinds: &'l [Kind],
    model: Model<'l>,
    shapes: &'l [Shape],
    /// By job.
    waiting: Vec<(usize, Pod)>,
    running: BTreeMap<usize, (Pod, Holding)>,
    tally: Tally,
}

impl Lockstep<'_> {
    /// Returns how many claims a pod is created with: the scheduler makes that of extended
    /// resources.
    fn claims(&self, shape: usize) -> usize {
        let shape = self.shapes.get(shape);
        let shape = shape.filter(|shape| shape.extended.is_empty());
        shape.map_or(0, |shape| shape.claims.len())
    }

    /// Creates a pod, and waits until the scheduler has bound or refused it.
    fn arrive(&mut self, job: usize, shape: usize) -> Result<Option<String>> {
        let of = self.shapes.get(shape).context("a shape has its number")?;
        let claims = of.claims.iter().take(self.claims(shape));
        let claims = claims.map(|claim| serde_json::to_value(&claim.spec));
        let claims: Vec<Value> = claims.collect::<Result<_, _>>()?;
        let extended = of.extended.values();
        let extended = extended
            .map(|count| (RESOURCE.to_owned(), *count))
            .collect();
        let name = format!("pod-{job:04}");
        self.plane
            .create_with(&name, &claims, of.resources, &extended)?;
        let its = format!("{}/{name}", path("Pod")?);
        let mut refused = false;
        poll("decision of the scheduler", PATIENCE, || {
            let pod = self.plane.api().get(&its)?.context("the pod is gone")?;
            let conditions = at(&pod, "status.conditions").as_array();
            let mut conditions = conditions.into_iter().flatten();
            refused = conditions.any(|condition| at(condition, "reason") == "Unschedulable");
            Ok(refused || at(&pod, "spec.nodeName").is_string())
        })?;
        if refused {
            self.tally.refused += 1;
        }
        self.waiting.push((job, Pod { name, shape }));
        if refused {
            return Ok(None);
        }
        // In the model it must fit, too.
        self.follow()
    }

    /// Ends a running pod; returns its job.
    fn end(&mut self, dice: usize) -> Result<Option<usize>> {
        let running: Vec<usize> = self.running.keys().copied().collect();
        let Some(job) = running.get(dice % running.len().max(1)) else {
            return Ok(None);
        };
        let (pod, holding) = self.running.remove(job).context("the pod runs")?;
        self.plane.end(&pod.name, self.claims(pod.shape))?;
        std::thread::sleep(NOTICE);
        self.model.remove(&holding);
        self.tally.ended += 1;
        Ok(Some(*job))
    }

    /// Waits until no waiting pod fits in the model, and returns a difference: a pod that fits and
    /// is not bound, or one that is bound elsewhere.
    fn settle(&mut self) -> Result<Option<String>> {
        let mut since = Instant::now();
        loop {
            let before = self.waiting.len();
            if let Some(difference) = self.follow()? {
                return Ok(Some(difference));
            }
            if self.waiting.len() < before {
                since = Instant::now();
            }
            let fitting = self.fitting();
            let Some(pod) = fitting else {
                return Ok(None);
            };
            if since.elapsed() > AGAIN {
                return Ok(Some(format!(
                    "{pod} fits in the model, and the scheduler does not bind it"
                )));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns a waiting pod that fits in the model.
    fn fitting(&mut self) -> Option<String> {
        for (_, pod) in &self.waiting {
            let shape = self.model.shape(pod.shape);
            if !self.model.best(shape).is_empty() {
                return Some(pod.name.clone());
            }
        }
        None
    }

    /// Lets the model do what the scheduler did: in the order of the bindings.
    fn follow(&mut self) -> Result<Option<String>> {
        let mut bound = Vec::new();
        for (place, (_, pod)) in self.waiting.iter().enumerate() {
            let its = format!("{}/{}", path("Pod")?, pod.name);
            let object = self.plane.api().get(&its)?.context("the pod is gone")?;
            if let Some(node) = at(&object, "spec.nodeName").as_str() {
                let version = at(&object, "metadata.resourceVersion").as_str();
                let version: u64 = version.unwrap_or_default().parse()?;
                bound.push((version, place, node.to_owned()));
            }
        }
        bound.sort();
        let mut places: Vec<usize> = bound.iter().map(|(_, place, _)| *place).collect();
        for (_, place, node) in &bound {
            let Some((job, pod)) = self.waiting.get(*place) else {
                continue;
            };
            let (job, name, shape) = (*job, pod.name.clone(), pod.shape);
            if let Some(difference) = self.bind(job, &name, shape, node)? {
                return Ok(Some(difference));
            }
        }
        places.sort_unstable();
        for place in places.into_iter().rev() {
            self.waiting.remove(place);
        }
        Ok(None)
    }

    fn bind(&mut self, job: usize, name: &str, given: usize, node: &str) -> Result<Option<String>> {
        let text = self.shapes.get(given).map(|shape| shape.name.clone());
        let what = format!("{name} ({})", text.unwrap_or_default());
        let real = self.plane.devices(name, self.claims(given))?;
        let shape = self.model.shape(given);
        let best = self.model.best(shape);
        let names = |nodes: &[usize]| {
            let all = nodes.iter().filter_map(|number| self.kinds.get(*number));
            all.map(|kind| kind.name.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        };
        let number = self.kinds.iter().position(|kind| kind.name == node);
        let number = number.context("the node is one of ours")?;
        if !best.contains(&number) {
            let best = names(&best);
            return Ok(Some(format!(
                "{what} is on {node}; best in the model: {best}; devices {real:?}"
            )));
        }
        let holding = self.model.place(shape, number);
        let holding = holding.context("what is best fits")?;
        let devices = self.model.devices(&holding);
        let devices: Vec<&str> = devices.iter().map(|device| device.name.as_str()).collect();
        if devices != real {
            return Ok(Some(format!(
                "{what} on {node} has {real:?}; in the model {devices:?}"
            )));
        }
        self.tally.bound += 1;
        self.tally.alone += usize::from(best.len() == 1);
        let pod = Pod {
            name: name.to_owned(),
            shape: given,
        };
        self.running.insert(job, (pod, holding));
        Ok(None)
    }
}

fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}
