//! Answers of a run.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::device::Amount;
use crate::worlds::{StateId, Worlds};

const GIB: f64 = 1_073_741_824.0;
/// Most states of nodes for which it is worked out what still fits; of more, as many are drawn
/// evenly.
const MOST_STATES: usize = 200;

/// Answers of a run.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    pub nodes: usize,
    pub pods: usize,
    /// Pods that got devices.
    pub accepted: usize,
    /// Pods that wait at the end.
    pub waiting: Vec<Waiting>,
    /// Pods that waited when the last one had arrived.
    pub waiting_at_last_arrival: usize,
    /// Mean wait of the accepted pods.
    pub mean_wait_seconds: f64,
    /// Wait that 95 of 100 accepted pods do not exceed.
    pub p95_wait_seconds: f64,
    /// Part of the memory of all GPUs that was held, in percent: on average
    /// until the last pod had arrived.
    pub full_percent: f64,
    /// The same at its highest.
    pub peak_percent: f64,
    /// Memory that no pod held when the last pod had arrived.
    pub free_gib: f64,
    /// By form: free memory and multiprocessors that no pod of it can get at that time.
    pub stranded: Vec<Form>,
    /// Mark of figures for `stranded` that were worked out for a part of the nodes.
    pub stranded_is_estimated: bool,
    /// End of the run.
    pub ended_seconds: f64,
}

/// Pods of a shape that wait.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Waiting {
    /// The shape.
    pub request: String,
    /// Their number.
    pub pods: usize,
    /// Reason, in one sentence.
    pub reason: String,
}

/// Free GPUs that one form cannot use.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Form {
    /// The shape that asks for the form.
    pub request: String,
    /// Further pods of the shape that fit.
    pub fits: u64,
    /// Free memory in GiB that they leave.
    pub stranded_gib: f64,
    /// Free multiprocessors that they leave.
    pub stranded_cores: f64,
}

/// Counts of a run.
pub(crate) struct Figures<'f> {
    pub(crate) jobs: usize,
    /// In milliseconds.
    pub(crate) waits: &'f [u64],
    /// By shape.
    pub(crate) waiting: &'f BTreeMap<usize, usize>,
    pub(crate) waiting_then: usize,
    /// Bytes until the last pod has arrived, on average, and at the highest.
    pub(crate) held: (f64, f64),
    pub(crate) ended: u64,
    pub(crate) then: &'f [StateId],
    pub(crate) now: &'f [StateId],
}

#[expect(clippy::cast_precision_loss, reason = "figures for people")]
pub(crate) fn of(worlds: &mut Worlds<'_>, figures: &Figures<'_>) -> Report {
    let mut total = Amount::default();
    for state in figures.now {
        total.add(worlds.total(*state));
    }
    let counts = counted(figures.then);
    let mut free = Amount::default();
    for (state, count) in &counts {
        let rest = worlds.total(*state).less(worlds.held(*state));
        free.add(rest.times(*count as f64));
    }
    let sampled = sample(&counts);
    let mut seen = Amount::default();
    for (state, count) in &sampled {
        seen.add(
            worlds
                .total(*state)
                .less(worlds.held(*state))
                .times(*count as f64),
        );
    }
    let scale = if seen.memory > 0.0 {
        free.memory / seen.memory
    } else {
        1.0
    };
    let is_estimated = sampled.len() < counts.len();
    let stranded =
        (0..worlds.shapes().len()).map(|shape| stranded(worlds, shape, &sampled, seen, scale));
    let stranded = stranded.collect();
    let waiting = figures.waiting.iter().map(|(shape, pods)| Waiting {
        request: name(worlds, *shape),
        pods: *pods,
        reason: String::new(),
    });
    let mut waiting: Vec<Waiting> = waiting.collect();
    for (entry, shape) in waiting.iter_mut().zip(figures.waiting.keys()) {
        entry.reason = reason(worlds, *shape, figures.now);
    }
    let mut waits = figures.waits.to_vec();
    waits.sort_unstable();
    let sum: u128 = waits.iter().map(|wait| u128::from(*wait)).sum();
    let percent = |held: f64| {
        if total.memory > 0.0 {
            round(100.0 * held / total.memory)
        } else {
            0.0
        }
    };
    Report {
        nodes: figures.now.len(),
        pods: figures.jobs,
        accepted: waits.len(),
        waiting,
        waiting_at_last_arrival: figures.waiting_then,
        mean_wait_seconds: round(sum as f64 / 1000.0 / waits.len().max(1) as f64),
        p95_wait_seconds: waits
            .get((waits.len() * 95).div_ceil(100).saturating_sub(1))
            .map_or(0.0, |wait| round(*wait as f64 / 1000.0)),
        full_percent: percent(figures.held.0),
        peak_percent: percent(figures.held.1),
        free_gib: round(free.memory / GIB),
        stranded,
        stranded_is_estimated: is_estimated,
        ended_seconds: round(figures.ended as f64 / 1000.0),
    }
}

fn round(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn name(worlds: &Worlds<'_>, shape: usize) -> String {
    worlds
        .shapes()
        .get(shape)
        .map(|shape| shape.name.clone())
        .unwrap_or_default()
}

fn counted(states: &[StateId]) -> Vec<(StateId, usize)> {
    let mut counts: BTreeMap<StateId, usize> = BTreeMap::new();
    for state in states {
        *counts.entry(*state).or_default() += 1;
    }
    counts.into_iter().collect()
}

/// Draws states evenly.
fn sample(counts: &[(StateId, usize)]) -> Vec<(StateId, usize)> {
    let step = counts.len().div_ceil(MOST_STATES).max(1);
    counts.iter().copied().step_by(step).collect()
}

/// Fills nodes with pods of a shape, and returns what they leave.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "figures for people"
)]
fn stranded(
    worlds: &mut Worlds<'_>,
    shape: usize,
    states: &[(StateId, usize)],
    free: Amount,
    scale: f64,
) -> Form {
    let (mut got, mut fits) = (Amount::default(), 0.0);
    for (state, count) in states {
        let (mut at, mut of_node, mut pods) = (*state, Amount::default(), 0.0);
        while let Some(placement) = worlds.place(at, shape) {
            // Something that holds nothing fits for ever.
            if placement.after == at {
                break;
            }
            at = placement.after;
            pods += 1.0;
            of_node.add(placement.amount);
        }
        got.add(of_node.times(*count as f64));
        fits += pods * *count as f64;
    }
    let left = free.less(got).times(scale);
    Form {
        request: name(worlds, shape),
        fits: (fits * scale).round() as u64,
        stranded_gib: round(left.memory.max(0.0) / GIB),
        stranded_cores: round(left.cores.max(0.0)),
    }
}

/// Says in one sentence why pods of a shape wait.
fn reason(worlds: &mut Worlds<'_>, shape: usize, states: &[StateId]) -> String {
    if let Some(error) = worlds.broken.get(&shape) {
        return format!("no node is tried: {error}");
    }
    let counts = counted(states);
    let (mut able, mut lacking) = (0, 0);
    let mut free = Amount::default();
    for (state, count) in counts {
        if worlds.place(state, shape).is_some() {
            lacking += count;
        }
        let idle = Worlds::idle(worlds.kind(state));
        if worlds.place(idle, shape).is_some() {
            able += count;
            #[expect(clippy::cast_precision_loss, reason = "a figure for people")]
            free.add(
                worlds
                    .total(state)
                    .less(worlds.held(state))
                    .times(count as f64),
            );
        }
    }
    if lacking > 0 {
        return format!(
            "{lacking} nodes have its devices, and none of them the processor time and memory that it requests"
        );
    }
    match able {
        0 => "no node has it, even when all is free".to_owned(),
        able => {
            let nodes = if able == 1 {
                "the one node that can hold it is".to_owned()
            } else {
                format!("all {able} nodes that can hold it are")
            };
            let gib = (free.memory / GIB).round();
            if gib < 1.0 {
                format!("{nodes} full")
            } else {
                format!(
                    "{nodes} in use so that it does not fit, although {gib} GiB of them are free"
                )
            }
        }
    }
}
