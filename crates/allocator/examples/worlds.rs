//! Compares the allocator with answers of the real scheduler's: `upstream/` writes worlds with answers, one a line, this
//! reads them. Exits with 1 on a difference. With the argument `time` it only measures how long the answers take.

use std::io::{BufRead, stdin};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use divvy_allocator::{AllocError, Allocated, AllocatedState, Allocator, Features, Inputs, Slices};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, ResourceClaim, ResourceClaimStatus, ResourceSlice,
};
use serde_json::Value;

type Failure = Box<dyn std::error::Error>;

/// One line of input.
struct World {
    id: String,
    features: Features,
    node: Node,
    slices: Vec<ResourceSlice>,
    classes: Vec<DeviceClass>,
    held: Vec<ResourceClaim>,
    pods: Vec<Vec<ResourceClaim>>,
    answers: Vec<Value>,
}

#[derive(Default)]
struct Tally {
    worlds: usize,
    pods: usize,
    fits: usize,
    /// The real allocator gave no answer, or this one said that it cannot.
    unknown: usize,
    different: usize,
    took: Vec<Duration>,
}

fn read(line: &str) -> Result<World, Failure> {
    let mut world: Value = serde_json::from_str(line)?;
    let on = |gate: &str| world["features"][gate].as_bool().unwrap_or(false);
    let features = Features {
        admin_access: on("admin_access"),
        prioritized_list: on("prioritized_list"),
        device_taints: on("device_taints"),
        partitionable_devices: on("partitionable_devices"),
        device_binding: on("device_binding"),
        consumable_capacity: on("consumable_capacity"),
        fractional_capacity: on("fractional_capacity"),
        list_attributes: on("list_attributes"),
    };
    let mut take = |field: &str| match world[field].take() {
        Value::Null => Value::Array(Vec::new()),
        value => value,
    };
    Ok(World {
        features,
        node: serde_json::from_value(take("node"))?,
        slices: serde_json::from_value(take("slices"))?,
        classes: serde_json::from_value(take("classes"))?,
        held: serde_json::from_value(take("allocated"))?,
        pods: serde_json::from_value(take("pods"))?,
        answers: serde_json::from_value(take("answers"))?,
        id: world["id"].as_str().unwrap_or("?").to_owned(),
    })
}

/// The answer in the words of `upstream/`, and the results if it fits.
fn answer(found: Result<Option<Allocated>, AllocError>) -> (&'static str, Value, String) {
    match found {
        Ok(Some(allocated)) => ("fits", without_ids(&allocated.results), String::new()),
        Ok(None) => ("none", Value::Null, String::new()),
        Err(error) if error.is_unknown() => ("unknown", Value::Null, error.to_string()),
        Err(error) if error.is_of_node() => ("node-error", Value::Null, error.to_string()),
        Err(error) => ("error", Value::Null, error.to_string()),
    }
}

/// Results without the ids of shares, which are random.
fn without_ids(results: &[AllocationResult]) -> Value {
    let mut results = results.to_vec();
    for device in results.iter_mut().flat_map(|r| &mut r.devices).flat_map(|d| &mut d.results).flatten() {
        device.share_id = None;
    }
    serde_json::to_value(results).unwrap_or_default()
}

fn compare(world: World, tally: &mut Tally) -> Result<(), Failure> {
    let World { id, features, node, slices, classes, mut held, pods, answers } = world;
    let index = Slices::new(&slices);
    let allocator = Allocator::new(features);
    tally.worlds += 1;
    for (number, (pod, theirs)) in pods.into_iter().zip(answers).enumerate() {
        tally.pods += 1;
        let allocated = AllocatedState::from_claims(&held);
        let inputs = Inputs { slices: &index, classes: &classes, allocated: &allocated, node: &node };
        let started = Instant::now();
        let found = allocator.fit(&inputs, &pod.iter().collect::<Vec<_>>());
        tally.took.push(started.elapsed());
        let (kind, ours, text) = answer(found);
        let (expected, results) = (theirs["kind"].as_str().unwrap_or_default(), &theirs["results"]);
        let results: Vec<AllocationResult> =
            if results.is_null() { Vec::new() } else { serde_json::from_value(results.clone())? };
        if matches!(expected, "timeout" | "panic") || kind == "unknown" {
            tally.unknown += 1;
        } else if kind != expected || (kind == "fits" && ours != without_ids(&results)) {
            tally.different += 1;
            println!("world {id}, pod {number}: {kind} {text} {ours}\n  scheduler: {theirs}");
        }
        tally.fits += usize::from(expected == "fits");
        for (mut claim, allocation) in pod.into_iter().zip(results) {
            claim.status.get_or_insert_with(ResourceClaimStatus::default).allocation = Some(allocation);
            held.push(claim);
        }
    }
    Ok(())
}

/// How long each answer takes: the median of some.
fn time(world: &World) {
    let index = Slices::new(&world.slices);
    let allocator = Allocator::new(world.features);
    let allocated = AllocatedState::from_claims(&world.held);
    let inputs =
        Inputs { slices: &index, classes: &world.classes, allocated: &allocated, node: &world.node };
    for (number, pod) in world.pods.iter().enumerate() {
        let claims: Vec<_> = pod.iter().collect();
        let mut kind = "";
        let mut took: Vec<Duration> = (0..15)
            .map(|_| {
                let started = Instant::now();
                kind = answer(allocator.fit(&inputs, &claims)).0;
                started.elapsed()
            })
            .collect();
        took.sort_unstable();
        let median = took.get(took.len() / 2).copied().unwrap_or_default();
        println!("{} pod {number}: {kind} in {median:?} (first {:?})", world.id, took.last());
    }
}

fn run() -> Result<bool, Failure> {
    let only_time = std::env::args().nth(1).as_deref() == Some("time");
    let mut tally = Tally::default();
    for line in stdin().lock().lines() {
        let world = read(&line?)?;
        if only_time {
            time(&world);
        } else {
            compare(world, &mut tally)?;
        }
    }
    if only_time {
        return Ok(true);
    }
    let Tally { worlds, pods, fits, unknown, different, mut took } = tally;
    took.sort_unstable();
    println!(
        "{worlds} worlds compared, {pods} pods ({fits} fit, {unknown} without an answer on one side), {different} differ; slowest answer {:?}",
        took.last().copied().unwrap_or_default()
    );
    Ok(different == 0 && worlds > 0)
}

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}
