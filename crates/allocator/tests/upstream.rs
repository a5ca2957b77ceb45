//! The allocator against answers of the real scheduler's: the Go program in `upstream/` writes
//! worlds with answers, one a line.
#![expect(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that says what it compared"
)]

use std::io::BufRead;
use std::time::{Duration, Instant};

use divvy_allocator::{AllocError, Allocated, AllocatedState, Allocator, Features, Inputs, Slices};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    AllocationResult, DeviceClass, ResourceClaim, ResourceClaimStatus, ResourceSlice,
};
use serde_json::Value;

type Failure = Box<dyn std::error::Error>;

/// A line of input.
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
    slowest: Duration,
}

fn read(line: &str) -> Result<World, Failure> {
    let mut world: Value = serde_json::from_str(line)?;
    let on = |gate: &str| {
        world
            .pointer(&format!("/features/{gate}"))
            .and_then(Value::as_bool)
            .unwrap_or(false)
    };
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
    let id = world
        .get("id")
        .and_then(Value::as_str)
        .unwrap_or("?")
        .to_owned();
    let mut take = |field: &str| match world.get_mut(field).map(Value::take) {
        None | Some(Value::Null) => Value::Array(Vec::new()),
        Some(value) => value,
    };
    Ok(World {
        features,
        node: serde_json::from_value(take("node"))?,
        slices: serde_json::from_value(take("slices"))?,
        classes: serde_json::from_value(take("classes"))?,
        held: serde_json::from_value(take("allocated"))?,
        pods: serde_json::from_value(take("pods"))?,
        answers: serde_json::from_value(take("answers"))?,
        id,
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
    for device in results
        .iter_mut()
        .flat_map(|r| &mut r.devices)
        .flat_map(|d| &mut d.results)
        .flatten()
    {
        device.share_id = None;
    }
    serde_json::to_value(results).unwrap_or_default()
}

fn compare(world: World, tally: &mut Tally) -> Result<(), Failure> {
    let World {
        id,
        features,
        node,
        slices,
        classes,
        mut held,
        pods,
        answers,
    } = world;
    let index = Slices::new(&slices);
    let allocator = Allocator::new(features);
    tally.worlds += 1;
    for (number, (pod, theirs)) in pods.into_iter().zip(answers).enumerate() {
        tally.pods += 1;
        let allocated = AllocatedState::from_claims(&held);
        let inputs = Inputs {
            slices: &index,
            classes: &classes,
            allocated: &allocated,
            node: &node,
        };
        let started = Instant::now();
        let found = allocator.fit(&inputs, &pod.iter().collect::<Vec<_>>());
        tally.slowest = tally.slowest.max(started.elapsed());
        let (kind, ours, text) = answer(found);
        let expected = theirs
            .get("kind")
            .and_then(Value::as_str)
            .unwrap_or_default();
        let results: Vec<AllocationResult> =
            theirs.get("results").map_or(Ok(Vec::new()), |found| {
                serde_json::from_value(found.clone())
            })?;
        if matches!(expected, "timeout" | "panic") || kind == "unknown" {
            tally.unknown += 1;
        } else if kind != expected || (kind == "fits" && ours != without_ids(&results)) {
            tally.different += 1;
            println!("world {id}, pod {number}: {kind} {text} {ours}\n  scheduler: {theirs}");
        }
        tally.fits += usize::from(expected == "fits");
        for (mut claim, allocation) in pod.into_iter().zip(results) {
            claim
                .status
                .get_or_insert_with(ResourceClaimStatus::default)
                .allocation = Some(allocation);
            held.push(claim);
        }
    }
    Ok(())
}

/// Compares all worlds of a text, one a line.
fn compare_all(lines: impl BufRead) -> Tally {
    let mut tally = Tally::default();
    for line in lines.lines() {
        compare(read(&line.unwrap()).unwrap(), &mut tally).unwrap();
    }
    tally
}

/// Small worlds that were once answered differently, each with the real scheduler's answers.
#[test]
fn worlds_that_were_answered_wrongly_are_answered_as_the_scheduler_does() {
    let tally = compare_all(include_str!("worlds.jsonl").as_bytes());
    assert_eq!((tally.different, tally.unknown), (0, 0));
    assert!(tally.pods > 30, "{} pods", tally.pods);
}

/// `cargo xtask soak allocator` runs this on as many worlds as it is asked for.
#[test]
#[ignore = "needs worlds with answers on standard input: cargo xtask soak allocator"]
fn generated_worlds_are_answered_as_the_scheduler_does() {
    let tally = compare_all(std::io::stdin().lock());
    let Tally {
        worlds,
        pods,
        fits,
        unknown,
        different,
        slowest,
    } = tally;
    println!(
        "{worlds} worlds compared, {pods} pods ({fits} fit, {unknown} without an answer on one side), \
         {different} differ; slowest answer {slowest:?}"
    );
    assert!(worlds > 0 && different == 0);
}
