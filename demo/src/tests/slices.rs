//! The templates of `divvy slices` beside what a plugin publishes.

use divvy_cli::manifests::Manifests;
use divvy_cli::offered::Granted;
use divvy_cli::status::snapshot::Snapshot;
use divvy_cli::templates::{Template, diff};
use divvy_gpu_sim::profiles;
use divvy_model::Offer;

use crate::slices::Kind;
use crate::world::{NODE, PATIENCE};

use super::*;

/// Policies under which every form is published, and few of them.
const POLICIES: [&str; 5] = [
    "",
    "{modes: [Whole, Mig, TimeSlicing, Mps], mig: {sharing: [TimeSlicing, Mps], profiles: [1g.10gb, 1g.10gb+me, 3g.40gb, 1g.5gb, 3g.20gb, 1g.6gb, 1g.24gb, 1g.23gb]}}",
    "{modes: [Whole]}",
    "{modes: [Mig, TimeSlicing], mig: {placementOrder: Descending}, shares: {unit: Percent, minPercent: 5}}",
    "{gpus: {ordinals: [0]}, modes: [TimeSlicing], shares: {slots: 4, minMemory: 1Gi}}",
];

fn policies(rule: &str) -> Vec<divvy_api::policy::GpuPolicy> {
    if rule.is_empty() {
        return Vec::new();
    }
    let text = format!(
        "apiVersion: divvy.dev/v1beta1\nkind: GpuPolicy\nmetadata: {{name: p}}\nspec: {{rules: [{rule}]}}\n"
    );
    Manifests::parse("p", &text).unwrap().policies
}

/// Starts a plugin on such a node; its slices must be those of the template.
async fn publishes_its_template(sim: &str, rule: &str, driver: &'static str) {
    let (node, troubled) = gpus(sim).start().unwrap();
    let kind = Kind {
        inventory: node.inventory(),
        driver: driver.to_owned(),
        name: NODE.to_owned(),
        labels: crate::world::labels(),
        policies: policies(rule),
        granted: Granted::default(),
    };
    let (template, _) = kind.template(Offer::Auto);
    let world = World::start(&node, &troubled, &kind.policies, driver, &[])
        .await
        .unwrap();
    let mut slices: Vec<ResourceSlice> = world.api.list();
    slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    let report = diff::compare(&template, NODE, &slices);
    assert_eq!(report.differences, [], "--sim {sim}, {rule}, {driver}");
    assert!(report.is_ready(), "--sim {sim}, {rule}: {report:?}");
    // Not only the same to a reader: the same objects, name for name and field for field.
    let published = Template {
        specs: slices
            .iter()
            .map(|slice| divvy_cli::templates::anonymous(driver, slice.spec.clone()))
            .collect(),
        ..template.clone()
    };
    let [wanted, found] = [&template, &published].map(|one| one.yaml().unwrap());
    assert_eq!(wanted, found, "--sim {sim}, {rule}, {driver}");
    for gpu in node.uuids() {
        assert!(
            !wanted.contains(gpu.as_str()),
            "--sim {sim}, {rule}: {gpu} is only of one node"
        );
    }
    assert_eq!(world.stop().await.unwrap(), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_board_publishes_its_template_under_every_policy() {
    let mut nodes = tokio::task::JoinSet::new();
    let boards = profiles().iter().map(|board| format!("{}x2", board.key));
    let mixed = ["h100x3,l4x1,a30x1", "a100-80x2 --mig-on 1"].map(str::to_owned);
    for sim in boards.chain(mixed) {
        for rule in POLICIES {
            let sim = sim.clone();
            nodes.spawn(async move { publishes_its_template(&sim, rule, DRIVER).await });
            if nodes.len() > 3 {
                nodes.join_next().await.unwrap().unwrap();
            }
        }
    }
    nodes.spawn(async { publishes_its_template("h100x2", POLICIES[1], driver::NVIDIA).await });
    while let Some(node) = nodes.join_next().await {
        node.unwrap();
    }
}

/// Reads what `--node` reads, once the node has reported its GPUs.
async fn snapshot(world: &World, policies: &[divvy_api::policy::GpuPolicy]) -> Snapshot {
    let reported = |seen: &[divvy_fake_cluster::GpuNode]| {
        seen.iter()
            .any(|node| node.status.pointer("/gpus/0/product").is_some())
    };
    let there = world
        .api
        .wait_until(|seen| reported(&seen.list()), PATIENCE)
        .await;
    there.expect("a report of the node");
    let reports = world.api.list::<divvy_fake_cluster::GpuNode>().into_iter();
    let reports = reports.map(|node| {
        let status = serde_json::from_value(node.status).unwrap();
        (node.metadata.name.unwrap(), status)
    });
    let mut slices: Vec<ResourceSlice> = world.api.list();
    slices.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    Snapshot {
        driver: world.driver.to_owned(),
        nodes: world.api.list(),
        reports: reports.collect(),
        policies: policies
            .iter()
            .map(|policy| (policy.name.clone(), Ok(policy.clone())))
            .collect(),
        slices,
        ..Snapshot::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_template_of_a_nodes_kind_is_what_the_node_publishes() {
    for (sim, rule) in [
        ("h100x2", POLICIES[1]),
        ("h100x3,l4x1,a30x1", POLICIES[0]),
        ("a100-80x2 --mig-on 1", POLICIES[3]),
        ("t4x2 --driver-version 580.95.05", POLICIES[4]),
    ] {
        let (node, troubled) = gpus(sim).start().unwrap();
        let policies = policies(rule);
        let world = World::start(&node, &troubled, &policies, DRIVER, &[])
            .await
            .unwrap();
        let snapshot = snapshot(&world, &policies).await;
        let kind = crate::slices::node::kind(&snapshot, NODE).unwrap();
        let (template, _) = kind.template(Offer::Auto);
        let report = diff::compare(&template, NODE, &snapshot.slices);
        assert_eq!(report.differences, [], "--sim {sim}, {rule}");
        world.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sick_node_is_compared_with_a_healthy_one_of_its_kind() {
    let (node, troubled) = gpus("h100x2 --sick 1").start().unwrap();
    let world = World::start(&node, &troubled, &[], DRIVER, &[])
        .await
        .unwrap();
    let mut seen = snapshot(&world, &[]).await;
    let kind = |seen: &Snapshot| crate::slices::node::kind(seen, NODE);
    let (template, _) = kind(&seen).unwrap().template(Offer::Auto);
    assert!(template.devices().all(|device| device.taints.is_none()));
    assert_eq!(template.devices().count(), 2);
    let report = diff::compare(&template, NODE, &seen.slices);
    let texts: Vec<&str> = report
        .differences
        .iter()
        .map(|one| one.text.as_str())
        .collect();
    assert_eq!(texts.len(), 1, "{texts:?}");
    assert!(
        texts[0].starts_with("taint gpu.divvy.dev/recovery=reset:NoSchedule on gpu-1"),
        "{texts:?}"
    );
    world.stop().await.unwrap();
    // A board that is in no table, a GPU that cannot be read, a node without a report.
    let error = |seen: &Snapshot| format!("{:#}", kind(seen).err().unwrap());
    let gpus = &mut seen.reports.get_mut(NODE).unwrap().gpus;
    gpus[0].product = "NVIDIA X1000".to_owned();
    assert!(
        error(&seen).starts_with(
            "gpu-0 of node demo-node is an NVIDIA X1000, of which divvy knows no board"
        )
    );
    seen.reports.get_mut(NODE).unwrap().gpus[0].product = String::new();
    assert!(
        error(&seen).starts_with("node demo-node cannot read gpu-0"),
        "{}",
        error(&seen)
    );
    seen.reports.clear();
    assert!(
        error(&seen).contains("node demo-node has no GpuNode"),
        "{}",
        error(&seen)
    );
}
