//! GpuNode objects, in which a node reports on its GPUs.

use divvy_api::node::{GpuNodeStatus, Holder};
use divvy_fake_cluster::{Fault, GpuNode, GpuPolicy};
use divvy_model::{GpuErrorCode, GpuOp};
use serde_json::json;

use crate::node::{Node, wait};

pub(crate) fn status(node: &Node) -> Option<GpuNodeStatus> {
    serde_json::from_value(node.api.get::<GpuNode>("", "n1")?.status).ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_node_has_holders_rules_troubles_and_few_writes() {
    let node = Node::new("h100x3");
    let spec =
        json!({ "rules": [{ "name": "big", "gpus": { "ordinals": [0] }, "modes": ["Whole"] }] });
    node.api.put(&GpuPolicy::new("p", spec)).unwrap();
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let held = wait("the holder", || {
        status(&node).filter(|status| status.summary.claims == 1)
    })
    .await;
    assert_eq!(held.gpus.len(), 3);
    let gpu = &held.gpus[0];
    assert_eq!(
        (
            gpu.name.as_str(),
            gpu.mode.as_str(),
            gpu.policy.as_str(),
            gpu.product.as_str()
        ),
        ("gpu-0", "whole", "p/big", "NVIDIA H100 80GB HBM3")
    );
    assert_eq!(gpu.offered, ["whole"]);
    assert_eq!(
        (gpu.memory_mib, gpu.mig_capable, gpu.fabric.as_str()),
        (Some(81_559), Some(true), "")
    );
    assert_eq!(
        (gpu.architecture.as_str(), gpu.compute_capability.as_str()),
        ("Hopper", "9.0")
    );
    assert!(!gpu.nvlink_domain.is_empty());
    assert!(
        held.gpus
            .iter()
            .all(|other| other.nvlink_domain == gpu.nvlink_domain)
    );
    assert_eq!(held.versions.cuda.split('.').count(), 2);
    let holder = Holder {
        namespace: "default".to_owned(),
        name: "c".to_owned(),
        uid: claim.uid.clone(),
        device: "gpu-0".to_owned(),
        phase: "prepared".to_owned(),
        reason: String::new(),
        pods: vec!["pod".to_owned()],
        since: None,
    };
    assert_eq!(gpu.holders, [holder]);
    assert_eq!(
        (held.summary.free, held.summary.modes.as_str()),
        (2, "1 whole, 2 idle")
    );
    assert_eq!(held.versions.kubernetes, "1.37.1");
    let object = node.api.get::<GpuNode>("", "n1").unwrap();
    let owner = &object.metadata.owner_references.unwrap()[0];
    assert_eq!((owner.kind.as_str(), owner.name.as_str()), ("Node", "n1"));

    node.api.forget_requests();
    tokio::time::sleep(std::time::Duration::from_millis(600)).await;
    assert_eq!(
        node.api.count("patch", "*"),
        0,
        "written while nothing happens"
    );

    // Processes that outlive their claim.
    node.sim.start_process(&node.sim.uuids()[0], 4711);
    node.unprepare(&claim).await.unwrap();
    let stuck = wait("what is stuck", || {
        status(&node).filter(|status| status.summary.trouble == "gpu-0 lingering")
    })
    .await;
    assert_eq!(stuck.gpus[0].holders[0].phase, "leaving");
    assert!(
        stuck.gpus[0].holders[0].reason.contains("4711"),
        "{stuck:?}"
    );
    node.sim.end_process(4711);
    wait("its end", || {
        status(&node).filter(|status| status.summary.free == 3)
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_node_that_cannot_be_written_holds_up_nothing() {
    let node = Node::new("h100x1");
    node.api.unregister::<GpuNode>();
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    node.api
        .fail_next(2, "patch", "gpunodes", Fault::Status(403));
    node.api.register::<GpuNode>(false, true);
    wait("the holder", || {
        status(&node).filter(|status| status.summary.claims == 1)
    })
    .await;
    // It is written as a whole once, and again after it was deleted.
    node.api.forget_requests();
    node.unprepare(&claim).await.unwrap();
    wait("its end", || {
        status(&node).filter(|status| status.summary.claims == 0)
    })
    .await;
    assert_eq!(node.api.count("get", "nodes"), 0);
    node.api.delete::<GpuNode>("", "n1").unwrap();
    node.prepare(&claim).await.unwrap();
    wait("the holder", || {
        status(&node).filter(|status| status.summary.claims == 1)
    })
    .await;
    assert!(
        node.api
            .get::<GpuNode>("", "n1")
            .unwrap()
            .metadata
            .owner_references
            .is_some()
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_gpu_node_comes_back_on_an_idle_node() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let reported = wait("the report", || {
        status(&node).filter(|status| status.summary.free == 2)
    })
    .await;
    for time in 1..=2 {
        node.api.delete::<GpuNode>("", "n1").unwrap();
        let again = wait("the report again", || status(&node)).await;
        assert_eq!(
            (again.summary, again.gpus),
            (reported.summary.clone(), reported.gpus.clone()),
            "{time}"
        );
        assert!(
            node.api
                .get::<GpuNode>("", "n1")
                .unwrap()
                .metadata
                .owner_references
                .is_some()
        );
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_start_of_a_trouble_outlasts_the_plugin_and_has_a_remedy() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let uuid = node.sim.uuids()[0].clone();
    assert!(node.sim.lose_gpu(&uuid));
    // The list of GPUs may say it first, in other words.
    let lost = |status: GpuNodeStatus| {
        let found_out = status
            .troubles
            .iter()
            .any(|trouble| trouble.why == "the GPU fell off the bus");
        (status.summary.trouble == "gpu-0 lost" && found_out)
            .then_some((status.troubles, status.summary.since))
    };
    let reported = wait("the lost GPU", || status(&node).and_then(lost)).await;
    assert_eq!(
        (
            reported.0.len(),
            reported.0[0].kind.as_str(),
            &reported.0[0].since
        ),
        (1, "lost", &reported.1)
    );
    assert!(reported.1.is_some());
    assert_eq!(
        reported.0[0].remedy,
        "reset the GPU or reboot the node (docs/maintenance.md); if it stays lost, check the board"
    );
    plugin.stop().await;
    // Another second, as the record has it, so that a new start differs from the old one.
    let second = |since: &str| since[17..19].to_owned();
    let then = second(reported.1.as_deref().unwrap());
    wait("another second", || {
        let now = k8s_openapi::jiff::Timestamp::now();
        let now = k8s_openapi::jiff::Timestamp::from_second(now.as_second())
            .unwrap()
            .to_string();
        (second(&now) != then).then_some(())
    })
    .await;
    node.api.forget_requests();
    let plugin = node.start().await;
    wait("its first report", || {
        (node.api.count("patch", "gpunodes/status") > 0).then_some(())
    })
    .await;
    let again = wait("the lost GPU", || status(&node).and_then(lost)).await;
    assert_eq!(again, reported);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpus_without_events_are_reported_as_unmonitored_until_events_work() {
    let node = Node::new("h100x2");
    node.sim
        .fault(divvy_gpu_sim::Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::Events));
    let plugin = node.start().await;
    let reported = wait("the trouble", || {
        status(&node)
            .filter(|status| status.summary.trouble == "gpu-0 unmonitored, gpu-1 unmonitored")
    })
    .await;
    assert!(
        reported.troubles[0].why.contains("UNKNOWN (999)"),
        "{:?}",
        reported.troubles
    );
    assert!(reported.troubles[0].since.is_some() && reported.troubles[0].remedy.contains("dmesg"));
    node.sim.clear_faults();
    wait("its end", || {
        status(&node).filter(|status| status.troubles.is_empty())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_driver_never_came_says_so() {
    let node = Node::new("h100x1");
    node.sim.edit(|engine| engine.set_driver_loaded(false));
    let plugin = node.start_with(node.config(&[]));
    let away = |status: &GpuNodeStatus| status.summary.trouble == "driver-down";
    let reported = wait("the missing driver", || status(&node).filter(away)).await;
    assert_eq!((reported.summary.gpus, reported.troubles.len()), (0, 1));
    node.sim.edit(|engine| engine.set_driver_loaded(true));
    wait("its GPU", || {
        status(&node).filter(|status| status.summary.free == 1 && !away(status))
    })
    .await;
    plugin.stop().await;
}

/// Waits until the status of the node's GpuNode is as expected.
async fn wait_status(
    node: &Node,
    what: &str,
    is: impl Fn(&GpuNodeStatus) -> bool,
) -> GpuNodeStatus {
    wait(what, || status(node).filter(|status| is(status))).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gpus_that_no_claim_can_have_are_trouble_with_the_reason() {
    let node = Node::new("h100x2");
    let rules = [
        (
            json!([{ "name": "all", "modes": ["Mig"], "mig": { "profiles": ["9g.99gb"] } }]),
            "none of the MIG profiles 9g.99gb",
        ),
        (
            json!([{ "name": "all", "modes": ["TimeSlicing"], "shares": { "reservedMemory": "90Gi" } }]),
            "reserves all of its memory",
        ),
    ];
    let plugin = node.start().await;
    for (rules, reason) in rules {
        node.api
            .put(&GpuPolicy::new("p", json!({ "rules": rules })))
            .unwrap();
        let status = wait_status(&node, reason, |status| {
            status.summary.trouble == "gpu-0 not-offered, gpu-1 not-offered"
        })
        .await;
        assert_eq!(status.summary.free, 0);
        let trouble = &status.troubles[0];
        assert!(trouble.why.contains(reason), "{trouble:?}");
        assert!(trouble.why.contains("p/all"), "{trouble:?}");
        assert_eq!(
            trouble.remedy,
            "correct the rule with `kubectl edit gpupolicy p`"
        );
        node.api.delete::<GpuPolicy>("", "p").unwrap();
        wait_status(&node, "the end", |status| {
            status.summary.trouble.is_empty() && status.summary.free == 2
        })
        .await;
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_gpus_are_free_while_what_they_were_offered_as_is_withdrawn() {
    let node = Node::new("h100x2");
    let mut config = node.config(&[]);
    // Longer than the test: the earlier form stays.
    config.timing.leave = std::time::Duration::from_hours(1);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    wait_status(&node, "the first report", |status| status.summary.free == 2).await;
    let spec = json!({ "rules": [{ "modes": ["TimeSlicing"] }] });
    node.api.put(&GpuPolicy::new("p", spec)).unwrap();
    let status = wait_status(&node, "the shares", |status| {
        status.gpus.iter().all(|gpu| gpu.offered == ["shares"])
    })
    .await;
    assert!(status.gpus[0].taints.contains(&"withdrawn".to_owned()));
    assert_eq!(status.summary.free, 2);
    plugin.stop().await;
}

/// `shares` alone would say that a claim for shares of GPUs finds some.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shares_of_partitions_are_offered_in_words_of_their_own() {
    let node = Node::new("h100x1");
    let rule = json!({ "modes": ["Mig"], "mig": { "sharing": ["TimeSlicing"] } });
    let spec = json!({ "rules": [rule] });
    node.api.put(&GpuPolicy::new("p", spec)).unwrap();
    let plugin = node.start_with(node.config(&[]));
    plugin.wait_ready().await;
    let offered = |status: &GpuNodeStatus| status.gpus.iter().all(|gpu| gpu.offered.len() == 2);
    let status = wait_status(&node, "the shares", offered).await;
    let words = ["partitions", "shares of partitions"];
    assert_eq!(status.gpus[0].offered, words);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_whose_grant_cannot_be_stored_keeps_itself_back_and_says_why() {
    let node = Node::new("h100x2");
    let spec = json!({ "rules": [{ "modes": ["Whole", "Mig"] }] });
    node.api.put(&GpuPolicy::new("p", spec)).unwrap();
    let uuid = node.sim.uuids()[1].clone();
    let lock = node
        .kubelet
        .config()
        .plugin_dir(crate::node::DRIVER)
        .join(format!("locks/{uuid}.lock"));
    fs_err::create_dir_all(&lock).unwrap();
    let plugin = node.start().await;
    let status = wait_status(&node, "the trouble", |status| {
        status.summary.trouble == "gpu-1 not-stored"
    })
    .await;
    assert!(
        status.troubles[0].why.contains("cannot be stored"),
        "{status:?}"
    );
    let fenced = |expected: bool| {
        let mut published = node.published();
        published.retain(|(name, _)| name == "gpu-0" || name == "gpu-1");
        published.sort();
        let taints: Vec<bool> = published
            .iter()
            .map(|(_, taints)| taints.iter().any(|key| key == "gpu.divvy.dev/fenced"))
            .collect();
        (taints == [false, expected]).then_some(())
    };
    wait("one GPU kept back", || fenced(true)).await;
    fs_err::remove_dir(&lock).unwrap();
    wait("its end", || fenced(false)).await;
    wait_status(&node, "no trouble", |status| {
        status.summary.trouble.is_empty()
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_folder_that_takes_no_record_is_trouble_until_it_does() {
    let node = Node::new("h100x1");
    let mut config = node.config(&[]);
    config.timing.call = std::time::Duration::from_millis(300);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let records = node
        .kubelet
        .config()
        .plugin_dir(crate::node::DRIVER)
        .join("claims");
    fs_err::remove_dir_all(&records).unwrap();
    fs_err::write(&records, "a file").unwrap();
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap_err();
    wait_status(&node, "the trouble", |status| {
        status.summary.trouble == "not-stored"
    })
    .await;
    fs_err::remove_file(&records).unwrap();
    fs_err::create_dir(&records).unwrap();
    wait_status(&node, "its end", |status| status.summary.trouble.is_empty()).await;
    node.prepare(&claim).await.unwrap();
    plugin.stop().await;
}
