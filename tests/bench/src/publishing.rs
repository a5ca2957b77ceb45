//! Costs of published devices to a large cluster: bytes of slices, and the scheduler's processor
//! time for a claim, with whole GPUs only and with everything.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Parser;
use divvy_e2e::api::at;
use divvy_e2e::parts::version_setting;
use divvy_e2e::process::Signal;
use divvy_e2e::{Component, Extent, Gates, poll};
use divvy_fleet::{Shape, request};
use divvy_offer::{GpuRules, Modes};
use serde_json::Value as Json;

use crate::scheduling::{ControlPlane, NodeSpec, path};
use crate::table::{Report, Row, Section, Value};

const NAME: &str = "publishing";
/// Ticks of a second in `/proc/PID/stat`, whatever the kernel's own are.
const TICKS: f64 = 100.0;
/// Time in which nothing is bound before that is an error.
const STUCK: Duration = Duration::from_mins(2);
/// Profiles of a policy that names those in use (`mig.profiles`).
const TWO_PROFILES: [&str; 2] = ["1g.10gb", "3g.40gb"];
/// A claim that no node can hold.
const TOO_LARGE: &str = "share:999Gi";
/// A claim for all GPUs of a node.
const ALL_GPUS: &str = "8*gpu";

/// Measures what publishing costs a large cluster.
#[derive(Debug, Parser)]
#[command(name = "divvy-bench publishing")]
pub(crate) struct Args {
    /// Number of nodes
    #[arg(long, default_value_t = 1000)]
    nodes: usize,
    /// GPUs of each
    #[arg(long, default_value = "h100x8")]
    gpus: String,
    /// Pods with a claim, for each figure
    #[arg(long, default_value_t = 60)]
    pods: usize,
    /// Pods that wait and fit nowhere, while others end
    #[arg(long, default_value_t = 200)]
    waiting: usize,
    /// Only these layouts: "whole only", everything, "two profiles"
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    /// Switch on the gate SchedulerPreQueueingHints of Kubernetes 1.37
    #[arg(long)]
    hints: bool,
}

/// Measures, and prints a table.
pub(crate) fn run(args: &Args) -> Result<()> {
    let version = version_setting();
    let everything = GpuRules {
        modes: Modes::everything(),
        ..GpuRules::default()
    };
    let mut two_profiles = everything.clone();
    two_profiles.profiles = Some(TWO_PROFILES.map(str::to_owned).into());
    let layouts = [
        ("whole only", GpuRules::default(), &["gpu"][..]),
        (
            "everything",
            everything,
            &["gpu", "mig:1g.10gb", "share:10Gi"][..],
        ),
        (
            "two profiles",
            two_profiles,
            &["gpu", "mig:1g.10gb", "share:10Gi"][..],
        ),
    ];
    let wanted = |layout: &str| args.only.is_empty() || args.only.iter().any(|only| only == layout);
    let mut rows = Vec::new();
    for (layout, rules, requests) in layouts {
        if !wanted(layout) {
            continue;
        }
        let spec = |number: usize| NodeSpec {
            name: format!("node-{number:04}"),
            gpus: args.gpus.clone(),
            rules: rules.clone(),
            cores: 192,
            memory: 2048,
        };
        let specs: Vec<NodeSpec> = (0..args.nodes).map(spec).collect();
        let gates = if args.hints {
            Gates::PreQueueingHints
        } else {
            Gates::Default
        };
        let plane = ControlPlane::start(NAME, &version, (Extent::Scheduling, gates), &specs)?;
        let (slices, bytes) = plane.published();
        let nodes = u64::try_from(args.nodes.max(1))?;
        let mut row = |what: &str, value: Value| {
            crate::progress(&format!("{layout}: {what}: {value}"));
            rows.push(Row::new(format!("{layout}: {what}"), value));
        };
        row("slices of a node", Value::Count(slices / nodes));
        row("bytes of them, as JSON", Value::Bytes(bytes / nodes));
        row("bytes of all", Value::Bytes(bytes));
        row(
            "memory of the API server",
            plane.memory(Component::ApiServer)?,
        );
        row(
            "memory of the scheduler",
            plane.memory(Component::Scheduler)?,
        );
        for request in requests {
            let each = bind(&plane, request, args.pods)?;
            let what = format!("scheduler's time for a claim, {request}");
            row(&what, Value::Seconds(each));
        }
        let each = end_beside_waiting(&plane, args.pods, args.waiting)?;
        let what = format!(
            "scheduler's time for a claim that ends while {} pods wait",
            args.waiting
        );
        row(&what, Value::Seconds(each));
        if args.pods == args.nodes {
            for (what, time) in in_vain(&plane, args.pods)? {
                let what = format!("scheduler's time for {what} in vain, one of each node in use");
                row(&what, Value::Seconds(time));
            }
        }
    }
    let name = format!("Kubernetes {version}, {} nodes x {}", args.nodes, args.gpus);
    let report = Report {
        machine: vec![crate::load()?],
        sections: vec![Section { name, rows }],
    };
    crate::finish(&report, None)
}

fn claims(shape: &Shape) -> Result<Vec<Json>> {
    let specs = shape
        .claims
        .iter()
        .map(|claim| serde_json::to_value(&claim.spec));
    Ok(specs.collect::<Result<_, _>>()?)
}

/// Lets the scheduler bind so many pods, and ends them. Returns its processor time for one, in
/// seconds.
fn bind(plane: &ControlPlane, text: &str, pods: usize) -> Result<f64> {
    let shape = request::shape(text)?;
    let scheduler = plane.cluster.component(Component::Scheduler);
    // Stopped, so that it finds all pods waiting: how fast this program creates them is not
    // measured.
    scheduler.stop(Signal::Term)?;
    let names: Vec<String> = (0..pods).map(|number| format!("pod-{number:04}")).collect();
    for name in &names {
        plane.create(name, &claims(&shape)?, [1000, 1 << 30])?;
    }
    scheduler.start()?;
    let each = until_bound(plane, pods)?;
    for name in &names {
        plane.end(name, shape.claims.len())?;
    }
    Ok(each)
}

fn until_bound(plane: &ControlPlane, pods: usize) -> Result<f64> {
    let (mut left, mut since) = (pods, Instant::now());
    // From the first look at which the scheduler binds: until then it reads what there is.
    let mut begun = None;
    while left > 0 {
        let now = not_bound(plane)?;
        if now != left {
            (left, since) = (now, Instant::now());
            begun.get_or_insert((now, cpu(plane)?));
        }
        ensure!(
            since.elapsed() < STUCK,
            "{left} of {pods} pods are not bound"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    let begun = begun.filter(|(rest, _)| *rest > 0);
    let (rest, before) = begun.context("all pods were bound at one look")?;
    Ok((cpu(plane)? - before) / f64::from(u32::try_from(rest)?))
}

/// Ends pods while others wait that fit nowhere. Returns the scheduler's processor time for each
/// that ends, until it has tried the others again.
fn end_beside_waiting(plane: &ControlPlane, pods: usize, waiting: usize) -> Result<f64> {
    let (one, large) = (request::shape("gpu")?, request::shape(TOO_LARGE)?);
    let names: Vec<String> = (0..pods)
        .map(|number| format!("ends-{number:04}"))
        .collect();
    for name in &names {
        plane.create(name, &claims(&one)?, [1000, 1 << 30])?;
    }
    let mut since = Instant::now();
    let mut left = pods;
    while left > 0 {
        let now = not_bound(plane)?;
        if now < left {
            since = Instant::now();
        }
        left = now;
        ensure!(since.elapsed() < STUCK, "{left} pods are not bound");
        std::thread::sleep(Duration::from_millis(100));
    }
    for number in 0..waiting {
        plane.create(&format!("waits-{number:04}"), &claims(&large)?, [0, 0])?;
    }
    quiet(plane)?;
    let before = cpu(plane)?;
    for name in &names {
        plane.end(name, one.claims.len())?;
    }
    quiet(plane)?;
    let each = (cpu(plane)? - before) / f64::from(u32::try_from(pods.max(1))?);
    Ok(each)
}

/// Lets one pod of each node hold a GPU, and pods ask for all GPUs of a node: by their number, and
/// by `allocationMode: All`. Returns the scheduler's processor time for each attempt, in seconds.
fn in_vain(plane: &ControlPlane, pods: usize) -> Result<Vec<(String, f64)>> {
    let one = request::shape("gpu")?;
    for number in 0..pods {
        // So much processor time that a node has one of them.
        let name = format!("holds-{number:04}");
        plane.create(&name, &claims(&one)?, [100_000, 1 << 30])?;
    }
    let api = plane.api();
    let holding = format!("{}/holds-{:04}", path("Pod")?, pods.saturating_sub(1));
    poll("binding of all pods", STUCK, || {
        let pod = api.get(&holding)?.context("the pod is gone")?;
        Ok(at(&pod, "spec.nodeName").is_string())
    })?;
    let by_number = claims(&request::shape(ALL_GPUS)?)?;
    let mut by_mode = by_number.clone();
    for claim in &mut by_mode {
        let exactly = claim.pointer_mut("/devices/requests/0/exactly");
        let exactly = exactly.and_then(Json::as_object_mut);
        let exactly = exactly.context("a request of a claim")?;
        exactly.remove("count");
        exactly.insert("allocationMode".to_owned(), "All".into());
    }
    let mut times = Vec::new();
    for (name, what, claims) in [
        ("by-number", ALL_GPUS, by_number),
        ("by-mode", "allocationMode: All", by_mode),
    ] {
        quiet(plane)?;
        let before = cpu(plane)?;
        plane.create(name, &claims, [0, 0])?;
        let its = format!("{}/{name}", path("Pod")?);
        poll("refusal of the pod", STUCK, || {
            let pod = api.get(&its)?.context("the pod is gone")?;
            let conditions = at(&pod, "status.conditions").as_array();
            let mut conditions = conditions.into_iter().flatten();
            Ok(conditions.any(|condition| at(condition, "reason") == "Unschedulable"))
        })?;
        times.push((what.to_owned(), cpu(plane)? - before));
        plane.end(name, claims.len())?;
    }
    Ok(times)
}

fn not_bound(plane: &ControlPlane) -> Result<usize> {
    // Few enough to be listed, and the API server has an index of them.
    let waiting = format!("{}?fieldSelector=spec.nodeName%3D", path("Pod")?);
    Ok(plane.api().list(&waiting)?.len())
}

/// Waits until the scheduler has done nothing for longer than its longest back-off.
fn quiet(plane: &ControlPlane) -> Result<()> {
    let rest = Duration::from_secs(11);
    let (begin, mut before) = (Instant::now(), cpu(plane)?);
    loop {
        std::thread::sleep(rest);
        let now = cpu(plane)?;
        if now - before < 0.02 * rest.as_secs_f64() {
            return Ok(());
        }
        ensure!(begin.elapsed() < STUCK * 3, "the scheduler does not rest");
        before = now;
    }
}

/// Returns the processor time that the scheduler has used, in seconds.
fn cpu(plane: &ControlPlane) -> Result<f64> {
    let pid = plane.cluster.component(Component::Scheduler).pid();
    let pid = pid.context("the scheduler does not run")?;
    let stat = plane.cluster.node_path(format!("/proc/{pid}/stat"));
    let stat = fs_err::read_to_string(stat)?;
    let (_, fields) = stat.rsplit_once(") ").context("no stat")?;
    let fields: Vec<&str> = fields.split(' ').collect();
    let ticks = |at: usize| fields.get(at)?.parse::<u32>().ok();
    let ticks = ticks(11).zip(ticks(12)).map(|(user, system)| user + system);
    Ok(f64::from(ticks.context("no processor time")?) / TICKS)
}
