//! A run without groups and without answers that are kept, and the comparison with it.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use serde_json::json;

use super::{Brute, REQUESTS, classes, job, kind, with_resources};
use crate::model::enough;
use crate::random::Random;
use crate::run::Placed;
use crate::score::{self, Usage};
use crate::{Job, Kind, Nodes, Settings, Shape, Strategy, Weights, pod, request, simulate};

/// A run in which each pod is tried by itself, on one node after the other.
struct Plain<'p> {
    brute: Brute,
    usage: Vec<Usage>,
    shapes: &'p [Shape],
    jobs: &'p [Job],
    settings: Settings,
    random: Random,
    next: usize,
    /// Time, kind (a pod ends, arrives, tries again), pod.
    events: BTreeSet<(u64, u8, usize)>,
    active: Vec<(i32, Reverse<u64>, Reverse<usize>)>,
    /// Failed attempts and the time of the last one.
    waits: BTreeMap<usize, (u32, u64)>,
    asleep: Vec<usize>,
    /// Node, and name of the claim.
    running: BTreeMap<usize, (usize, String)>,
    placed: Vec<Place>,
}

/// Pod, node, time, names of devices.
type Place = (usize, usize, u64, Vec<String>);

fn place(of: Placed) -> Place {
    let names = of.devices.into_iter().map(|device| device.name);
    (of.job, of.node, of.at, names.collect())
}

impl<'p> Plain<'p> {
    fn new(kinds: &[Kind], shapes: &'p [Shape], jobs: &'p [Job], settings: Settings) -> Self {
        let brute = Brute::new(kinds);
        let arrivals = jobs.iter().enumerate();
        Self {
            usage: brute
                .kinds
                .iter()
                .map(|kind| Usage::of(pod::allocatable(&kind.node)))
                .collect(),
            brute,
            shapes,
            jobs,
            settings,
            random: Random::new(settings.seed),
            next: 0,
            events: arrivals.map(|(number, job)| (job.at, 1, number)).collect(),
            active: Vec::new(),
            waits: BTreeMap::new(),
            asleep: Vec::new(),
            running: BTreeMap::new(),
            placed: Vec::new(),
        }
    }

    /// Returns the placed pods, and the number of those that wait.
    fn go(mut self) -> (Vec<Place>, usize) {
        while let Some((now, _, _)) = self.events.first().copied() {
            let mut freed = false;
            while let Some(event) = self.events.first().copied().filter(|next| next.0 == now) {
                self.events.remove(&event);
                let job = event.2;
                match event.1 {
                    0 => {
                        let (node, claim) = self.running.remove(&job).unwrap();
                        let is_it = |held: &super::ResourceClaim| {
                            held.metadata.name.as_deref() == Some(&claim)
                        };
                        self.brute.held[node].retain(|held| !is_it(held));
                        let resources = self.shapes[self.jobs[job].shape].resources;
                        self.usage[node] = self.usage[node].with(resources, false);
                        freed = true;
                    }
                    1 => self.turn(job, now),
                    _ => self.turn(job, self.waits[&job].1),
                }
            }
            if freed {
                for job in std::mem::take(&mut self.asleep) {
                    let (attempts, failed) = self.waits[&job];
                    let wait = 1_000 * 2_u64.pow((attempts - 1).min(10));
                    let at = failed + wait.min(10_000);
                    if at <= now {
                        self.turn(job, failed);
                    } else {
                        self.events.insert((at, 2, job));
                    }
                }
            }
            self.active.sort_unstable();
            while let Some((_, _, job)) = self.active.pop() {
                if !self.attempt(job.0, now) {
                    let wait = self.waits.entry(job.0).or_default();
                    *wait = (wait.0 + 1, now);
                    self.asleep.push(job.0);
                }
            }
        }
        (self.placed, self.waits.len())
    }

    fn turn(&mut self, job: usize, since: u64) {
        let priority = self.jobs[job].priority;
        self.active.push((priority, Reverse(since), Reverse(job)));
    }

    fn attempt(&mut self, number: usize, now: u64) -> bool {
        let shape = &self.shapes[self.jobs[number].shape];
        let all = self.usage.len();
        let (mut found, mut looked) = (Vec::new(), all);
        for step in 0..all {
            let node = (self.next + step) % all;
            let claim = self.brute.place_shape(node, shape);
            let Some(claim) = claim.filter(|_| self.usage[node].fits(shape.resources)) else {
                continue;
            };
            found.push((node, claim));
            if found.len() == enough(all, self.settings.percentage) {
                looked = step + 1;
                break;
            }
        }
        self.next = (self.next + looked) % all;
        let result = |claim: &super::ResourceClaim| {
            let status = claim.status.clone().unwrap();
            [status.allocation.unwrap()]
        };
        let of = |claim| score::of_alternatives(&[&shape.claims[0]], &result(claim));
        let mut scores: Vec<i64> = found.iter().map(|(_, claim)| of(claim)).collect();
        score::weigh_alternatives(&mut scores);
        for ((node, _), score) in found.iter().zip(&mut scores) {
            *score += self.usage[*node].score(
                shape.resources,
                &self.scored(*node, shape),
                (self.settings.strategy, self.settings.weights),
            );
        }
        let Some(best) = scores.iter().max().copied() else {
            return false;
        };
        let mut best: Vec<_> = found
            .into_iter()
            .zip(scores)
            .filter(|(_, score)| *score == best)
            .collect();
        let ((node, mut claim), _) = best.swap_remove(self.random.below(best.len()));
        let results = result(&claim)[0].devices.clone().unwrap().results;
        let devices = results.unwrap().into_iter().map(|of| of.device).collect();
        let name = format!("job-{number}");
        claim.metadata.name = Some(name.clone());
        self.brute.held[node].push(claim);
        self.usage[node] = self.usage[node].with(shape.resources, true);
        self.waits.remove(&number);
        self.placed.push((number, node, now, devices));
        self.running.insert(number, (node, name));
        if let Some(duration) = self.jobs[number].duration {
            self.events.insert((now + duration.max(1), 0, number));
        }
        true
    }
}

impl Plain<'_> {
    /// Counts a node's whole GPUs, and those in use with the pod's, where they are scored.
    fn scored(&self, node: usize, shape: &Shape) -> Vec<[u64; 2]> {
        let Some(count) = shape.extended.get("gpu.divvy.dev") else {
            return Vec::new();
        };
        let is_whole = |name: &str| !name.trim_start_matches("gpu-").contains('-');
        let slices = &self.brute.kinds[node].slices;
        let devices = slices
            .iter()
            .flat_map(|slice| slice.spec.devices.iter().flatten());
        let all = devices.filter(|device| is_whole(&device.name)).count();
        let held = self.brute.held[node].iter().flat_map(|claim| {
            let allocation = claim.status.as_ref().unwrap().allocation.as_ref().unwrap();
            allocation
                .devices
                .as_ref()
                .unwrap()
                .results
                .iter()
                .flatten()
        });
        let in_use = held.filter(|result| is_whole(&result.device)).count();
        vec![[
            u64::try_from(all).unwrap(),
            u64::try_from(in_use).unwrap() + count,
        ]]
    }
}

/// Shapes of all kinds, one of them with alternatives and two with processor time; whole GPUs are
/// asked for as an extended resource.
fn shapes() -> Vec<Shape> {
    let mut shapes: Vec<Shape> = REQUESTS
        .iter()
        .map(|text| request::shape(text).unwrap())
        .collect();
    shapes[0].resources = [3_000, 1 << 30];
    shapes[3].resources = [500, 8 << 30];
    for shape in &mut shapes {
        let whole = shape.name.strip_suffix("*gpu");
        let whole = whole.or((shape.name == "gpu").then_some("1"));
        if let Some(count) = whole {
            shape.extended = [("gpu.divvy.dev".to_owned(), count.parse().unwrap())].into();
        }
    }
    let mut either = request::shape("gpu").unwrap();
    let requests = json!({"devices": {"requests": [{"name": "gpu", "firstAvailable": [
        {"name": "whole", "deviceClassName": "gpu.divvy.dev"},
        {"name": "half", "deviceClassName": "mig.divvy.dev"}]}]}});
    either.claims[0].spec = Some(serde_json::from_value(requests).unwrap());
    shapes.push(either);
    shapes
}

fn compare(kinds: &[Kind], jobs: &[Job], settings: Settings) -> (usize, usize) {
    let shapes = shapes();
    let classes = classes();
    let fleet = Nodes {
        kinds,
        classes: &classes,
    };
    let (report, placed) = simulate(fleet, &shapes, jobs, settings);
    let waiting = report.waiting.iter().map(|of| of.pods).sum();
    let plain = Plain::new(kinds, &shapes, jobs, settings).go();
    let placed: Vec<Place> = placed.into_iter().map(place).collect();
    assert_eq!((placed, waiting), plain, "{settings:?}");
    (plain.0.len(), waiting)
}

/// More pods than fit, many of them alike and at one moment: where each goes, when, and what it
/// gets.
#[test]
fn groups_and_kept_answers_change_no_assignment() {
    let mut random = Random::new(23);
    let (mut placed, mut waited) = (0, 0);
    for seed in 0..40 {
        let kinds = [
            with_resources(kind("a", 1 + random.below(2), 2)),
            kind("b", random.below(3), 1),
        ];
        let jobs: Vec<Job> = (0..40)
            .map(|number: u64| {
                let duration = 200 + random.below(9_000) as u64;
                let duration = (random.below(6) > 0).then_some(duration);
                let priority = i32::try_from(random.below(2)).unwrap();
                let shape = random.below(REQUESTS.len() + 1);
                job(number / 4 * 900, shape, duration, priority)
            })
            .collect();
        let settings = Settings {
            seed,
            strategy: [Strategy::LeastAllocated, Strategy::MostAllocated][random.below(2)],
            weights: Weights {
                devices: [0, 5][random.below(2)],
                ..Weights::default()
            },
            ..Settings::default()
        };
        let counts = compare(&kinds, &jobs, settings);
        placed += counts.0;
        waited += counts.1;
    }
    assert!(placed > 300 && waited > 100, "{placed} {waited}");
}

/// More nodes than the scheduler looks for: the search goes on where the last one ended.
#[test]
fn the_search_over_many_nodes_changes_no_assignment() {
    let kinds = [kind("a", 70, 1), kind("b", 70, 1)];
    let jobs: Vec<Job> = (0..30)
        .map(|number| job(number * 100, 0, Some(1_500), 0))
        .collect();
    let settings = Settings {
        percentage: Some(80),
        ..Settings::default()
    };
    assert_eq!(compare(&kinds, &jobs, settings), (30, 0));
}
