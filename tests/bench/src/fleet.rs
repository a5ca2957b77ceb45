//! The fleet simulator, in this process: pods of the stated mixes on growing fleets whose GPUs are
//! offered as everything.

use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use divvy_fake_cluster::build::mk_node;
use divvy_fleet::generate::{MIXES, draw};
use divvy_fleet::{Job, Kind, Nodes, Settings, Shape, request, simulate, trace};
use k8s_openapi::api::resource::v1::DeviceClass;

use crate::allocator::classes;
use crate::offered::{everything, slices};
use crate::rig::NODE;
use crate::stats::median;
use crate::table::{Budget, Row, Value};

/// Pods for each node, over a day.
const PODS: usize = 5;
/// The largest fleet, and the time and memory that it may take.
const LARGEST: (usize, Duration, u64) = (10_000, Duration::from_mins(5), 4 << 30);
/// Nodes on which one claim is placed, and the time that it may take.
const ONE: (usize, Duration) = (1_000, Duration::from_millis(20));

struct Fleet {
    kind: Kind,
    classes: Vec<DeviceClass>,
}

impl Fleet {
    fn run(&self, nodes: usize, (shapes, jobs): &(Vec<Shape>, Vec<Job>)) -> usize {
        let kinds = [Kind {
            count: nodes,
            ..self.kind.clone()
        }];
        let of = Nodes {
            kinds: &kinds,
            classes: &self.classes,
        };
        simulate(of, shapes, jobs, Settings::default()).0.accepted
    }
}

/// Draws pods of all mixes in equal parts.
fn workload(pods: usize) -> Result<(Vec<Shape>, Vec<Job>)> {
    let (mut shapes, mut jobs): (Vec<Shape>, Vec<Job>) = (Vec::new(), Vec::new());
    for mix in MIXES {
        for line in draw(&mix, pods / MIXES.len(), 24.0, 1) {
            let wanted = request::shape(&line.request)?;
            let known = shapes.iter().position(|shape| *shape == wanted);
            let shape = known.unwrap_or(shapes.len());
            if known.is_none() {
                shapes.push(wanted);
            }
            jobs.push(Job {
                at: trace::milliseconds(line.time),
                name: line.namespace,
                shape,
                duration: line.duration.map(trace::milliseconds),
                priority: line.priority.unwrap_or(0),
            });
        }
    }
    jobs.sort_by_key(|job| job.at);
    Ok((shapes, jobs))
}

/// Measures fleets of growing size, up to so many nodes.
pub(crate) fn measure(largest: usize) -> Result<Vec<Row>> {
    let pool = everything("h100x8", NODE)?;
    let fleet = Fleet {
        kind: Kind {
            name: "h100x8".to_owned(),
            node: mk_node(NODE),
            slices: slices(&pool, NODE, "bench"),
            ..Kind::default()
        },
        classes: classes(),
    };
    let mut rows = Vec::new();
    let one = request::shape("mig:1g.10gb")?;
    let job = Job {
        at: 0,
        name: String::new(),
        shape: 0,
        duration: None,
        priority: 0,
    };
    let one = (vec![one], vec![job]);
    let (nodes, most) = ONE;
    let took = median(5, || {
        fleet.run(nodes, &one);
    });
    let row = Row::new(format!("one claim on {nodes} nodes"), took);
    rows.push(row.budget(Budget::AtMost(most.into())));
    for nodes in [10, 100, 1_000, 10_000] {
        if nodes > largest {
            break;
        }
        let pods = workload(nodes * PODS)?;
        let start = Instant::now();
        let accepted = fleet.run(nodes, &pods);
        let took = start.elapsed();
        let what = format!(
            "{} pods on {nodes} nodes, {accepted} accepted",
            pods.1.len()
        );
        let row = Row::new(what, took);
        let each = took / u32::try_from(pods.1.len().max(1))?;
        let is_largest = nodes == LARGEST.0;
        rows.push(if is_largest {
            row.budget(Budget::AtMost(LARGEST.1.into()))
        } else {
            row
        });
        rows.push(Row::new(format!("of it each pod, {nodes} nodes"), each));
        if is_largest {
            let row = Row::new(
                "memory of this process, at its highest",
                Value::Bytes(peak()?),
            );
            rows.push(row.budget(Budget::AtMost(Value::Bytes(LARGEST.2))));
        }
    }
    Ok(rows)
}

/// Returns the most memory that this process has had.
fn peak() -> Result<u64> {
    let status = fs_err::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next());
    let kib: u64 = kib.context("VmHWM in /proc/self/status")?.parse()?;
    Ok(kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fleets_are_measured_up_to_the_largest_that_is_asked_for() {
        let rows = measure(10).unwrap();
        assert_eq!(rows.len(), 3);
    }
}
