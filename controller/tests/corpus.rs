//! Every case of the corpus, against the pure plan and, with the whole publisher, against the fake API server.

use std::collections::BTreeSet;

use divvy_carve::Feature;
use divvy_controller::corpus::{NOT_APPLICABLE, Outcome, cases, run, run_pure};
use divvy_fake_cluster::{FakeApi, Gate};

#[test]
fn the_plan_passes_every_case() {
    let failures: Vec<_> = cases()
        .iter()
        .filter_map(|case| run_pure(case).err().map(|why| format!("{}: {why}", case.name)))
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
