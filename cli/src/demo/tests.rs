use clap::Parser;

use super::*;

/// The demo's arguments, as they are written.
#[derive(Debug, Parser)]
struct Line {
    #[command(flatten)]
    args: Args,
}

fn gpus(line: &str) -> Gpus {
    Line::try_parse_from(["demo", "--sim"].into_iter().chain(line.split_whitespace())).unwrap().args.gpus
}

/// What the demo says of a manifest; without a policy of its own it is as with the chart's defaults.
async fn of(line: &str, text: &str) -> Report {
    let example = Example::parse("m", text).unwrap();
    let policies = example.manifests.policies.clone();
    let stay = Stay { policies, examples: vec![example], selects: false };
    perform(&gpus(line), &[stay]).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_example_does_what_it_says() {
    let report = perform(&gpus("h100x2"), &examples::stays(None).unwrap()).await.unwrap();
    assert_eq!(report.problems(), Vec::<String>::new());
    assert_eq!(report.scenarios.len(), examples::EXAMPLES.len());
    let skipped: Vec<_> =
        report.scenarios.iter().filter_map(|s| s.skipped.as_ref().map(|why| (&s.name, why))).collect();
    assert_eq!(skipped, []);
}

/// Every board that can be simulated, and nodes with one GPU, in MIG mode and in trouble: an example runs or says what
/// it lacks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_node_ends_well() {
    let boards = divvy_gpu_sim::profiles().iter().map(|profile| format!("{}x2", profile.key));
    let others = [
        "h100x1",
        "h100x2 --mig-on all",
        "h100x3 --foreign-mig 0 --sick 1",
        "a100-80x2 --mig-on all",
        "a30x1,l4x1",
    ];
    let mut nodes = tokio::task::JoinSet::new();
    for line in boards.chain(others.map(str::to_owned)) {
        nodes.spawn(async move {
            let report = perform(&gpus(&line), &examples::stays(None).unwrap()).await.unwrap();
            assert_eq!(report.problems(), Vec::<String>::new(), "--sim {line}");
            let ran = report.scenarios.iter().filter(|scenario| scenario.skipped.is_none()).count();
            assert!(ran > 5, "--sim {line}: only {ran} examples ran");
        });
        // As many at a time as make each wait for what it must, not for the others.
        if nodes.len() > 3 {
            nodes.join_next().await.unwrap().unwrap();
        }
    }
    while let Some(node) = nodes.join_next().await {
        node.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_runs_although_it_was_to_wait_is_a_problem() {
    let text = "apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: c, annotations: {demo.divvy.dev/expect: Pending}}
spec: {devices: {requests: [{name: gpu, exactly: {deviceClassName: gpu.divvy.dev}}]}}
";
    let report = of("h100x1", text).await;
    assert_eq!(report.problems(), ["m: claim default/c was expected to stay pending and does not"]);
}
