//! A run over time: how full each GPU is at some moments.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::AllocationResult;
use serde::Serialize;

use crate::device::{Devices, gpu_of};
use crate::run::{Job, Placed};
use crate::worlds::{Kind, granted};

/// The most nodes of a picture; of more, as many are drawn evenly.
const MOST_NODES: usize = 400;
/// Moments of a picture, evenly over the time.
const MOMENTS: u64 = 96;
/// Digits for tenths of a GPU's memory.
const DIGITS: [char; 11] = ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9', 'a'];

/// GPUs of a fleet at some moments.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Picture {
    /// Nodes of the fleet.
    pub all_nodes: usize,
    /// Names of the nodes that are shown.
    pub nodes: Vec<String>,
    /// Names of the GPUs of each node.
    pub gpus: Vec<Vec<String>>,
    /// States of the fleet.
    pub moments: Vec<Moment>,
}

/// GPUs of a fleet at one moment.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Moment {
    /// Seconds from the beginning.
    pub at: f64,
    /// Pods that run.
    pub running: usize,
    /// Pods that wait.
    pub waiting: usize,
    /// By node, a digit for each GPU: tenths of its memory that are held, from `0` to `a`.
    pub held: Vec<String>,
}

/// A node of the picture.
struct Shown {
    /// Names of the GPUs, the memory that each has, and what is held of it.
    gpus: Vec<(String, f64, f64)>,
}

impl Shown {
    fn add(&mut self, device: &str, memory: f64) {
        let gpu = gpu_of(device);
        if let Some((_, _, held)) = self.gpus.iter_mut().find(|(name, _, _)| *name == gpu) {
            *held += memory;
        }
    }

    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "0 to 10"
    )]
    fn digits(&self) -> String {
        let digit = |(_, has, held): &(String, f64, f64)| {
            let tenths = if *has > 0.0 { held / has * 10.0 } else { 0.0 };
            // A share of a hundredth is not nothing.
            let tenths = if tenths > 0.01 { tenths.max(1.0) } else { 0.0 };
            let place = tenths.round().clamp(0.0, 10.0) as usize;
            DIGITS.get(place).copied().unwrap_or('a')
        };
        self.gpus.iter().map(digit).collect()
    }
}

/// Returns the name of each node of a fleet: nodes of a kind with several are counted.
pub fn node_names(kinds: &[Kind]) -> Vec<String> {
    let of_kind = |kind: &Kind| {
        let name = |number: usize| match kind.count {
            1 => kind.name.clone(),
            _ => format!("{}-{number}", kind.name),
        };
        (0..kind.count).map(name).collect::<Vec<_>>()
    };
    kinds.iter().flat_map(of_kind).collect()
}

/// Draws a run until its last pod has arrived or been placed.
pub fn picture(kinds: &[Kind], jobs: &[Job], placed: &[Placed]) -> Picture {
    let names = node_names(kinds);
    let step = names.len().div_ceil(MOST_NODES).max(1);
    let mut shown: BTreeMap<usize, Shown> = BTreeMap::new();
    let mut first = 0;
    for kind in kinds {
        let devices = Devices::of(&kind.slices);
        for node in (first..first + kind.count).filter(|node| node % step == 0) {
            let gpus = devices.gpus.iter();
            let mut of = Shown {
                gpus: gpus
                    .map(|(name, has)| (name.clone(), has.memory, 0.0))
                    .collect(),
            };
            let results = kind.held.iter();
            let results = results.filter_map(|claim| claim.status.as_ref()?.allocation.clone());
            let results: Vec<AllocationResult> = results.collect();
            for given in granted(&results, &devices) {
                of.add(&given.name, given.memory);
            }
            shown.insert(node, of);
        }
        first += kind.count;
    }
    Picture {
        all_nodes: names.len(),
        nodes: shown
            .keys()
            .filter_map(|node| names.get(*node).cloned())
            .collect(),
        gpus: shown
            .values()
            .map(|of| of.gpus.iter().map(|(name, _, _)| name.clone()).collect())
            .collect(),
        moments: moments(&mut shown, jobs, placed),
    }
}

fn moments(shown: &mut BTreeMap<usize, Shown>, jobs: &[Job], placed: &[Placed]) -> Vec<Moment> {
    let arrivals = jobs.iter().map(|job| job.at);
    let last = arrivals.chain(placed.iter().map(|of| of.at)).max();
    let last = last.unwrap_or(0);
    // A pod that ends at a moment is gone then, and one that starts is there.
    let mut changes: Vec<(u64, bool, &Placed)> = Vec::new();
    for of in placed {
        changes.push((of.at, true, of));
        let duration = jobs.get(of.job).and_then(|job| job.duration);
        if let Some(duration) = duration {
            changes.push((of.at.saturating_add(duration.max(1)), false, of));
        }
    }
    changes.sort_by_key(|(at, starts, of)| (*at, *starts, of.job));
    let mut changes = changes.into_iter().peekable();
    let mut arrivals: Vec<u64> = jobs.iter().map(|job| job.at).collect();
    arrivals.sort_unstable();
    let (mut started, mut ended) = (0, 0);
    let count = if last == 0 { 1 } else { MOMENTS };
    let moment = |number: u64| {
        let at = last / (count.max(2) - 1) * number;
        let at = if number + 1 == count { last } else { at };
        while let Some((_, starts, of)) = changes.next_if(|(when, _, _)| *when <= at) {
            let sign = if starts { 1.0 } else { -1.0 };
            *(if starts { &mut started } else { &mut ended }) += 1;
            if let Some(node) = shown.get_mut(&of.node) {
                for device in &of.devices {
                    node.add(&device.name, sign * device.memory);
                }
            }
        }
        let arrived = arrivals.partition_point(|when| *when <= at);
        #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
        Moment {
            at: at as f64 / 1000.0,
            running: started - ended,
            waiting: arrived - started,
            held: shown.values().map(Shown::digits).collect(),
        }
    };
    (0..count).map(moment).collect()
}
