//! Every case of the corpus, against the pure plan and, with the whole publisher, against the fake
//! API server.

mod build;
mod cases;
mod live;
mod model;
mod pure;

use std::collections::BTreeSet;

use divvy_fake_cluster::{FakeApi, Gate};
use divvy_offer::Feature;

use crate::cases::cases;
use crate::live::{Outcome, run};
use crate::model::NOT_APPLICABLE;
use crate::pure::run_pure;

#[test]
fn the_plan_passes_every_case() {
    let failures: Vec<_> = cases()
        .iter()
        .filter_map(|case| {
            run_pure(case)
                .err()
                .map(|why| format!("{}: {why}", case.name))
        })
        .collect();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[tokio::test]
async fn the_publisher_passes_every_case_against_the_fake_api_server() {
    let mut failures = Vec::new();
    for (index, case) in cases().iter().enumerate() {
        let api = FakeApi::new();
        for feature in &case.gates_off {
            api.turn_off(match feature {
                Feature::Taints => Gate::DeviceTaints,
                Feature::Partitions => Gate::PartitionableDevices,
                Feature::Shares => Gate::ConsumableCapacity,
            });
        }
        let off: BTreeSet<_> = case.gates_off.iter().copied().collect();
        match run(&api.client(), case, &format!("c{index}"), &off).await {
            Ok(Outcome::Passed) => {}
            other => failures.push(format!("{}: {other:?}", case.name)),
        }
    }
    assert!(failures.is_empty(), "{}", failures.join("\n"));
}

#[test]
fn titles_are_unique_and_none_is_both_here_and_not_applicable() {
    let mut seen: BTreeSet<_> = NOT_APPLICABLE.iter().map(|(title, _)| *title).collect();
    for case in cases() {
        assert!(seen.insert(case.name), "{}", case.name);
    }
}

/// The same cases against a real API server: `DIVVY_CORPUS_API=http://127.0.0.1:8001` (such as
/// `kubectl proxy` gives), `DIVVY_CORPUS_OFF=DRADeviceTaints,…` for the gates that are off there.
#[tokio::test]
#[ignore = "needs an API server: set DIVVY_CORPUS_API"]
async fn the_publisher_passes_every_case_against_a_real_api_server() {
    let address = std::env::var("DIVVY_CORPUS_API").expect("DIVVY_CORPUS_API is an address");
    let client = kube::Client::try_from(kube::Config::new(address.parse().unwrap())).unwrap();
    let gates = std::env::var("DIVVY_CORPUS_OFF").unwrap_or_default();
    let off = Feature::ALL
        .into_iter()
        .filter(|feature| gates.split(',').any(|gate| gate == feature.gate()))
        .collect();
    let (mut passed, mut skipped, mut failures) = (0, Vec::new(), Vec::new());
    for (index, case) in cases().iter().enumerate() {
        match run(&client, case, &format!("c{index}"), &off).await {
            Ok(Outcome::Passed) => passed += 1,
            Ok(Outcome::Skipped) => skipped.push(case.name),
            Err(why) => failures.push(format!("{}: {why}", case.name)),
        }
    }
    println!("{passed} passed, skipped: {skipped:?}");
    assert!(passed > 0 && failures.is_empty(), "{}", failures.join("\n"));
}
