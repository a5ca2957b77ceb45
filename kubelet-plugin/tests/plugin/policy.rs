//! Policies: what is published follows them, and claims survive their changes.

use std::collections::BTreeMap;
use std::time::Duration;

use divvy_fake_cluster::{Fault, GpuPolicy};
use divvy_model::{GpuDriver, MigMode};
use k8s_openapi::api::core::v1::Node as KubeNode;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use serde_json::{Value, json};

use crate::node::{DRIVER, Node, PATIENCE, Plugin, plain, wait};

fn put(node: &Node, name: &str, spec: Value) {
    node.api.put(&GpuPolicy::new(name, spec)).unwrap();
}

/// Returns the offers of GPUs, by ordinal: `w` whole, `m` in partitions, `t` in time-sliced shares.
fn offers(node: &Node) -> BTreeMap<u32, String> {
    let mut offers = BTreeMap::<u32, [bool; 3]>::new();
    for (name, taints) in node.published() {
        if taints.iter().any(|key| key == "gpu.divvy.dev/withdrawn") {
            continue;
        }
        let mut parts = name.trim_start_matches("gpu-").split('-');
        let gpu = offers
            .entry(parts.next().unwrap().parse().unwrap())
            .or_default();
        match parts.next() {
            None => gpu[0] = true,
            Some("mig") => gpu[1] = true,
            Some("ts") => gpu[2] = true,
            Some(_) => {}
        }
    }
    let text = |offer: [bool; 3]| {
        ["w", "m", "t"]
            .into_iter()
            .zip(offer)
            .filter(|(_, is)| *is)
            .map(|(t, _)| t)
            .collect()
    };
    offers
        .into_iter()
        .map(|(gpu, offer)| (gpu, text(offer)))
        .collect()
}

/// Two small partitions of the first GPU.
fn two_partitions(node: &Node) -> (String, String) {
    let mut names = node
        .published()
        .into_iter()
        .map(|(name, _)| name)
        .filter(|n| n.starts_with("gpu-0-mig-1g"));
    (names.next().unwrap(), names.next().unwrap())
}

async fn wait_for_offers(node: &Node, expected: &[&str]) {
    let expected: BTreeMap<u32, String> = (0_u32..)
        .zip(expected)
        .map(|(n, offer)| (n, (*offer).to_owned()))
        .collect();
    wait(
        &format!("{expected:?}, there is {:?}", offers(node)),
        || (offers(node) == expected).then_some(()),
    )
    .await;
}

fn metric(plugin: &Plugin, name: &str) -> String {
    let text = plugin.metrics.encode();
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{name} ")))
        .unwrap();
    line.rsplit(' ').next().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_gpu_of_a_node_may_become_something_else_and_a_change_is_published() {
    let node = Node::new("h100x3");
    put(
        &node,
        "p",
        json!({ "rules": [
            { "gpus": { "ordinals": [0] }, "modes": ["Whole"] },
            { "gpus": { "ordinals": [1] }, "modes": ["Mig"], "mig": { "profiles": ["7g.80gb"] } },
            { "gpus": { "ordinals": [2] }, "modes": ["TimeSlicing"], "shares": { "slots": 4 } },
        ] }),
    );
    let plugin = node.start().await;
    let without_admin: Vec<String> = node
        .published()
        .into_iter()
        .map(|(name, _)| name)
        .filter(|name| !name.ends_with("-admin"))
        .collect();
    assert_eq!(without_admin, ["gpu-0", "gpu-2-ts", "gpu-1-mig-7g80gb-0-0"]);
    assert_eq!(metric(&plugin, "divvy_gpu_policies"), "1");

    let everything = json!({ "products": ["*h100*"] });
    put(
        &node,
        "p",
        json!({ "rules": [{ "gpus": everything, "modes": ["Whole", "Mig", "TimeSlicing"] }] }),
    );
    wait_for_offers(&node, &["wmt", "wmt", "wmt"]).await;

    // Another one, which is asked first, and then none at all.
    put(
        &node,
        "q",
        json!({ "priority": 1, "rules": [{ "gpus": { "ordinals": [2] }, "modes": ["Whole"] }] }),
    );
    wait_for_offers(&node, &["wmt", "wmt", "w"]).await;
    node.api.delete::<GpuPolicy>("", "p").unwrap();
    node.api.delete::<GpuPolicy>("", "q").unwrap();
    wait("the defaults", || {
        (node.published() == plain(&["gpu-2", "gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_are_for_nodes_by_name_and_by_labels_that_may_change() {
    let node = Node::new("h100x1");
    put(
        &node,
        "a",
        json!({ "nodes": { "names": ["n2"] }, "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    put(
        &node,
        "b",
        json!({ "nodes": { "selector": { "matchLabels": { "pool": "cut" } } }, "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let plugin = node.start().await;
    assert_eq!(offers(&node), [(0, "w".to_owned())].into());
    let label = |value: &str| {
        let value = value.to_owned();
        node.api
            .modify::<KubeNode>("", "n1", |n| {
                n.metadata
                    .labels
                    .get_or_insert_default()
                    .insert("pool".to_owned(), value);
            })
            .unwrap();
    };
    label("cut");
    wait_for_offers(&node, &["wm"]).await;
    label("other");
    wait_for_offers(&node, &["w"]).await;
    put(
        &node,
        "c",
        json!({ "nodes": { "names": ["n1"] }, "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    wait_for_offers(&node, &["wm"]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn use_of_what_is_no_longer_offered_lists_no_claims_again() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let plugin = node.start().await;
    wait_for_offers(&node, &["wm"]).await;
    let (first, second) = two_partitions(&node);
    let claims = [node.claim("a", &[&first]), node.claim("b", &[&second])];
    for claim in &claims {
        node.prepare(claim).await.unwrap();
    }
    put(&node, "p", json!({ "rules": [{ "modes": ["Whole"] }] }));
    let partitions = || {
        let published = node.published().into_iter().map(|(name, _)| name);
        published
            .filter(|name| name.contains("-mig-"))
            .collect::<Vec<_>>()
    };
    let held = [first.clone(), second.clone()];
    wait("the end of the others", || {
        (partitions() == held).then_some(())
    })
    .await;
    node.api.forget_requests();
    // Several times as long as the pause between two such lists.
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert_eq!(node.api.count("list", "resourceclaims"), 0);

    // Each goes with its claim.
    node.unprepare(&claims[0]).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "a").unwrap();
    wait("the end of one", || {
        (partitions() == held[1..]).then_some(())
    })
    .await;
    node.unprepare(&claims[1]).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "b").unwrap();
    wait("the end of the other", || {
        partitions().is_empty().then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_allocated_but_not_prepared_survives_a_change() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let plugin = node.start().await;
    wait_for_offers(&node, &["wm"]).await;
    // The scheduler has given it out; no pod has started.
    let (partition, other) = two_partitions(&node);
    let claim = node.claim("cut", &[&partition]);
    // GPUs are as they are from now on, and this one's MIG mode is off.
    node.api.delete::<GpuPolicy>("", "p").unwrap();
    // What is held stays, with a taint; the rest goes.
    let taints = |name: &str| {
        node.published()
            .into_iter()
            .find(|(n, _)| n == name)
            .map(|(_, taints)| taints)
    };
    wait("the end of the others", || {
        taints(&other).is_none().then_some(())
    })
    .await;
    assert_eq!(
        taints(&partition),
        Some(vec!["gpu.divvy.dev/withdrawn".to_owned()])
    );
    plugin.stop().await;
    let plugin = node.start().await;
    node.prepare(&claim).await.unwrap();
    let on = || {
        let mode = node.sim.mig_mode(&node.sim.uuids()[0]).unwrap();
        matches!(mode, MigMode::Supported { current: true, .. })
    };
    assert!(on(), "turned on for the claim");
    // No rule asks for the mode, so it goes with the claim.
    wait_for_offers(&node, &["w"]).await;
    node.unprepare(&claim).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "cut").unwrap();
    wait("the mode as it was found", || (!on()).then_some(())).await;
    plugin.stop().await;
}

/// A policy whose partitions were used and released is deleted: MIG mode that divvy turned on goes
/// off, and the GPU is whole again. A mode that was on before divvy came stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mig_mode_of_a_deleted_policy_is_given_back_and_its_gpu_is_whole() {
    let node = Node::new("h100x2");
    let gpus = node.sim.uuids();
    let on = MigMode::Supported {
        current: true,
        pending: true,
    };
    node.sim
        .edit(|engine| engine.gpu(&gpus[1]).unwrap().facts.mig_mode = on);
    let is_on = |gpu: usize| node.sim.mig_mode(&gpus[gpu]).unwrap().is_on();
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let plugin = node.start_with(node.seldom());
    plugin.wait_ready().await;
    wait_for_offers(&node, &["wm", "wm"]).await;
    let serve = async |name: &str| {
        let claim = node.claim("c", &[name]);
        node.prepare(&claim).await.unwrap();
        node.unprepare(&claim).await.unwrap();
        node.api.delete::<ResourceClaim>("default", "c").unwrap();
    };
    for gpu in 0..2 {
        serve(&format!("gpu-{gpu}-mig-1g10gb-19-0")).await;
    }
    assert!(is_on(0) && is_on(1), "off only when something needs it");

    node.api.delete::<GpuPolicy>("", "p").unwrap();
    wait_for_offers(&node, &["w", "m"]).await;
    wait("the mode as it was found", || (!is_on(0)).then_some(())).await;
    assert!(is_on(1), "it was on before");
    serve("gpu-0").await;
    serve("gpu-1-mig-1g10gb-19-0").await;
    plugin.stop().await;

    // The next plugin finds both as they are, and offers them so.
    let plugin = node.start().await;
    wait_for_offers(&node, &["w", "m"]).await;
    assert!(!is_on(0) && is_on(1));
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_allocated_while_its_device_goes_keeps_it_published() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let plugin = node.start().await;
    wait_for_offers(&node, &["wm"]).await;
    let (partition, other) = two_partitions(&node);
    let held = node.api.hold("list", "resourceclaims");
    put(&node, "p", json!({ "rules": [{ "modes": ["Whole"] }] }));
    // First the taint, and only then the question who holds what.
    let taints = |name: &str| {
        node.published()
            .into_iter()
            .find(|(n, _)| n == name)
            .map(|(_, taints)| taints)
    };
    let withdrawn = Some(vec!["gpu.divvy.dev/withdrawn".to_owned()]);
    wait("the taints", || {
        (taints(&partition) == withdrawn && taints(&other) == withdrawn).then_some(())
    })
    .await;
    let claim = node.claim("late", &[&partition]);
    drop(held);
    wait("the end of the others", || {
        taints(&other).is_none().then_some(())
    })
    .await;
    assert_eq!(taints(&partition), withdrawn);
    node.prepare(&claim).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "late").unwrap();
    wait("its end", || taints(&partition).is_none().then_some(())).await;
    assert_eq!(offers(&node), [(0, "w".to_owned())].into());
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_held_partition_stays_published_over_a_restart() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig", "TimeSlicing"] }] }),
    );
    let plugin = node.start().await;
    wait_for_offers(&node, &["wmt"]).await;
    let (partition, _) = two_partitions(&node);
    node.claim("cut", &[&partition]);
    plugin.stop().await;
    // In every mode as before, but not in such partitions.
    let fewer = json!({ "profiles": ["3g.40gb"] });
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig", "TimeSlicing"], "mig": fewer }] }),
    );
    let is_gone = |node: &Node| !node.published().iter().any(|(name, _)| *name == partition);
    // The holders are unknown for a while.
    node.api
        .fail_next(2, "list", "resourceclaims", Fault::Status(500));
    for _ in 0..2 {
        let plugin = node.start().await;
        wait("the others' end", || {
            (node.published().len() < 8).then_some(())
        })
        .await;
        assert!(!is_gone(&node), "{:?}", node.published());
        plugin.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn earlier_policies_grants_are_known_right_after_a_restart() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let plugin = node.start().await;
    wait_for_offers(&node, &["wm"]).await;
    let claim = node.claim("cut", &[&two_partitions(&node).0]);
    plugin.stop().await;
    // Else a report about the next one could be about this one.
    node.kubelet
        .wait_for(|plugins| plugins.is_empty().then_some(()), PATIENCE)
        .await
        .unwrap();
    let gpu = node.sim.uuids()[0].clone();
    let held = node.api.hold("list", "gpupolicies");
    for _ in 0..2 {
        let plugin = node.start_with(node.config(&[]));
        node.kubelet
            .wait_registered(DRIVER, PATIENCE)
            .await
            .unwrap();
        node.prepare(&claim).await.unwrap();
        node.unprepare(&claim).await.unwrap();
        // The next needs the right once more.
        node.sim
            .edit(|engine| engine.set_mig_mode(&gpu, false))
            .unwrap();
        plugin.stop().await;
        node.kubelet
            .wait_for(|plugins| plugins.is_empty().then_some(()), PATIENCE)
            .await
            .unwrap();
    }
    drop(held);
}

/// A bad policy is reported and the node keeps the last good one also over a restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_policy_is_reported_and_the_last_good_one_stays() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let plugin = node.start().await;
    wait_for_offers(&node, &["wm"]).await;
    put(&node, "p", json!({ "rules": [{ "mode": ["Whole"] }] }));
    put(&node, "worse", json!({ "priority": "high" }));
    let reported_of = |name: &str| {
        let about = |e: &Event| {
            e.regarding
                .as_ref()
                .is_some_and(|r| r.name.as_deref() == Some(name))
        };
        node.api
            .list::<Event>()
            .into_iter()
            .find(about)
            .map(|event| {
                assert_eq!(event.reason.as_deref(), Some("BadPolicy"));
                assert_eq!(event.regarding.unwrap().kind.as_deref(), Some("GpuPolicy"));
                event.note.unwrap()
            })
    };
    let reported = wait("the Event", || reported_of("p")).await;
    assert!(
        reported.starts_with("node n1 cannot use this policy, its last readable version stays in force: spec.rules[0].mode: unknown field `mode`"),
        "{reported}"
    );
    assert!(
        wait("the other Event", || reported_of("worse"))
            .await
            .contains("it is ignored")
    );
    wait("the metric", || {
        (metric(&plugin, "divvy_gpu_policies_bad") == "2").then_some(())
    })
    .await;
    assert_eq!(offers(&node), [(0, "wm".to_owned())].into());
    plugin.stop().await;

    // It is reported once, by the node that finds it first.
    let events = || {
        node.api
            .list::<Event>()
            .iter()
            .filter(|e| e.reason.as_deref() == Some("BadPolicy"))
            .count()
    };
    assert_eq!(events(), 2);
    node.api.forget_requests();
    let plugin = node.start().await;
    wait("both tries", || {
        (node.api.count("create", "events") >= 2).then_some(())
    })
    .await;
    assert_eq!(events(), 2);
    assert_eq!(metric(&plugin, "divvy_gpu_policies_bad"), "2");
    assert_eq!(offers(&node), [(0, "wm".to_owned())].into());
    node.api.delete::<GpuPolicy>("", "p").unwrap();
    wait_for_offers(&node, &["w"]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_without_the_definition_is_served_by_the_flags() {
    let node = Node::new("h100x1");
    node.api.unregister::<GpuPolicy>();
    let plugin = node.start().await;
    assert_eq!(offers(&node), [(0, "w".to_owned())].into());
    node.api.register::<GpuPolicy>(false, false);
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    wait_for_offers(&node, &["wm"]).await;
    // With the definition, its objects go.
    node.api.unregister::<GpuPolicy>();
    wait_for_offers(&node, &["w"]).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_right_or_an_answer_the_last_policies_are_used() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let plugin = node.start().await;
    wait_for_offers(&node, &["wm"]).await;
    plugin.stop().await;

    node.api
        .fail_next(1000, "list", "gpupolicies", Fault::Status(403));
    node.api
        .fail_next(1000, "list", "nodes", Fault::Status(403));
    let plugin = node.start().await;
    assert_eq!(offers(&node), [(0, "wm".to_owned())].into());
    // What is not allowed is asked for again.
    node.api.clear_faults();
    node.api.delete::<GpuPolicy>("", "p").unwrap();
    wait_for_offers(&node, &["w"]).await;
    plugin.stop().await;

    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    node.api
        .fail_next(100_000, "list", "gpupolicies", Fault::Status(500));
    let mut config = node.config(&[]);
    config.timing.policy_wait = Duration::from_millis(500);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    assert_eq!(
        offers(&node),
        [(0, "w".to_owned())].into(),
        "what was known last is that there was none"
    );
    node.api.clear_faults();
    wait_for_offers(&node, &["wm"]).await;
    assert!(
        node.api
            .wait_until(|api| api.count("watch", "gpupolicies") > 0, PATIENCE)
            .await
            .is_ok()
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_withdrawal_that_an_earlier_process_began_is_completed_by_the_next() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let with_patience = |patience| {
        let mut config = node.config(&[]);
        config.timing.leave = patience;
        node.start_with(config)
    };
    let plugin = with_patience(Duration::from_hours(1));
    plugin.wait_ready().await;
    let is_there = |name: &str| {
        node.published()
            .iter()
            .any(|(published, _)| published == name)
    };
    let (first, second) = wait("partitions", || {
        node.published()
            .iter()
            .any(|(name, _)| name.contains("-mig-"))
            .then(|| two_partitions(&node))
    })
    .await;
    put(&node, "p", json!({ "rules": [{ "modes": ["Whole"] }] }));
    let taints_of = || {
        node.published()
            .into_iter()
            .find(|(name, _)| *name == first)
            .map(|(_, taints)| taints)
    };
    wait("the taint", || {
        taints_of().filter(|taints| !taints.is_empty())
    })
    .await;
    plugin.stop().await;
    let plugin = with_patience(Duration::from_secs(3));
    assert!(is_there(&second));
    // A scheduler that had not seen the taint has given it out.
    let claim = node.claim("c", &[&first]);
    plugin.wait_ready().await;
    wait("the end of the others", || {
        (!is_there(&second)).then_some(())
    })
    .await;
    assert!(is_there(&first), "{:?}", node.published());
    node.prepare(&claim).await.unwrap();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_note_for_a_restart_that_failed_is_written_when_it_can_be() {
    let node = Node::new("h100x1");
    put(
        &node,
        "p",
        json!({ "rules": [{ "modes": ["Whole", "Mig"] }] }),
    );
    let dir = node.kubelet.config().plugin_dir(DRIVER);
    let file = dir.join("policies.json");
    // As a full disk does: nothing can take its place.
    fs_err::create_dir_all(file.join("in-the-way")).unwrap();
    let plugin = node.start().await;
    wait_for_offers(&node, &["wm"]).await;
    fs_err::remove_dir_all(&file).unwrap();
    // Triggers a new decision, but with the same policy.
    let label = |node: &mut KubeNode| {
        node.metadata
            .labels
            .get_or_insert_default()
            .insert("some".to_owned(), "label".to_owned());
    };
    node.api.modify::<KubeNode>("", "n1", label).unwrap();
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    wait("the file", || file.is_file().then_some(())).await;
    plugin.stop().await;
}
