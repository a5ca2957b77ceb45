//! Several modes of one GPU, and what becomes of them on a cluster that cannot keep them apart.

use divvy_model::mig::GpuInstanceProfileId;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::json;

use crate::node::{Node, Plugin, wait};

fn metric(plugin: &Plugin, line: &str) -> bool {
    plugin.metrics.encode().lines().any(|one| one == line)
}

fn reported(node: &Node, reason: &str) -> Option<String> {
    let events = node.api.list::<Event>();
    events
        .into_iter()
        .find(|event| event.reason.as_deref() == Some(reason))
        .and_then(|event| event.note)
}

/// Names of devices that nothing keeps claims away from, but for those for admins.
fn open(node: &Node) -> Vec<String> {
    let published = node.published().into_iter();
    let open = published.filter(|(name, taints)| taints.is_empty() && !name.ends_with("-admin"));
    open.map(|(name, _)| name).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_allocated_in_two_modes_leaves_one_mode_for_each_with_events() {
    let node = Node::new("h100x2");
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    wait("every mode", || (open(&node).len() == 2 * 20).then_some(())).await;
    let share = node.claim("share", &["gpu-0-ts"]);
    node.prepare(&share).await.unwrap();
    assert_eq!(
        open(&node).len(),
        2 * 20,
        "counters keep them apart, not taints"
    );

    // A scheduler that does not count right.
    let whole = node.claim("whole", &["gpu-0"]);
    let refused = node.prepare(&whole).await.unwrap_err();
    assert!(refused.contains("default/share"), "{refused}");
    wait("one mode", || (open(&node) == ["gpu-1"]).then_some(())).await;
    let published = node.published();
    let taints = |name: &str| {
        published
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, taints)| taints.len())
    };
    assert!(
        taints("gpu-0-ts") > Some(0) && taints("gpu-0") > Some(0),
        "{published:?}"
    );
    let sets = || {
        node.api
            .list::<ResourceSlice>()
            .into_iter()
            .filter_map(|s| s.spec.shared_counters)
    };
    wait("the end of the other modes", || {
        (sets().flatten().count() == 0).then_some(())
    })
    .await;
    let text = wait("an Event", || reported(&node, "OneModeForEachGpu")).await;
    assert!(
        text.contains("the scheduler has allocated a GPU in two modes at once"),
        "{text}"
    );
    let text = wait("an Event", || reported(&node, "GivenTwice")).await;
    assert!(
        text.contains("(default/share has gpu-0-ts, default/whole has gpu-0, refused at prepare)"),
        "{text}"
    );
    assert!(
        metric(&plugin, "divvy_one_mode{reason=\"conflict\"} 1"),
        "{}",
        plugin.metrics.encode()
    );

    // The claim that came too late goes, and with it the conflict.
    node.api
        .delete::<ResourceClaim>("default", "whole")
        .unwrap();
    node.unprepare(&whole).await.unwrap();
    wait("every mode", || (open(&node).len() == 2 * 20).then_some(())).await;
    assert!(
        metric(&plugin, "divvy_one_mode{reason=\"conflict\"} 0"),
        "{}",
        plugin.metrics.encode()
    );
    plugin.stop().await;
}

/// A conflict with a device that was withdrawn fences its GPU and costs the others nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_conflict_with_a_withdrawn_device_fences_its_gpu_only() {
    let node = Node::new("h100x2");
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    let rule = json!({ "gpus": { "ordinals": [0] }, "modes": ["TimeSlicing"] });
    node.api
        .put(&divvy_fake_cluster::GpuPolicy::new(
            "shares",
            json!({ "rules": [rule] }),
        ))
        .unwrap();
    wait("the end of the other modes", || {
        (node.published().len() == 2 + 21).then_some(())
    })
    .await;
    let share = node.claim("share", &["gpu-0-ts"]);
    node.prepare(&share).await.unwrap();
    // The scheduler chose it before the policy, and its write was held up.
    let whole = node.claim("whole", &["gpu-0"]);
    node.prepare(&whole).await.unwrap_err();
    let text = wait("an Event", || reported(&node, "GivenTwice")).await;
    assert!(
        text.contains("default/whole has gpu-0, refused at prepare")
            && text.contains("default/share has"),
        "{text}"
    );
    wait("the fence", || {
        open(&node)
            .iter()
            .all(|name| name.starts_with("gpu-1"))
            .then_some(())
    })
    .await;
    assert_eq!(open(&node).len(), 20);
    assert_eq!(reported(&node, "OneModeForEachGpu"), None);
    node.api
        .delete::<ResourceClaim>("default", "whole")
        .unwrap();
    wait("shares", || {
        open(&node).contains(&"gpu-0-ts".to_owned()).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_mode_lock_can_be_turned_off_and_on() {
    for (flags, version, expected) in [
        (["--mode-lock", "off"], "1.37.1", 1),
        (["--mode-lock", "auto"], "1.36.1", 1),
        (["--mode-lock", "on"], "1.36.1", 20),
    ] {
        let node = Node::new("h100x1");
        node.api.set_version(version);
        let plugin =
            node.start_with(node.config(&[&["--offer", "everything"], &flags[..]].concat()));
        plugin.wait_ready().await;
        wait(flags[1], || (open(&node).len() == expected).then_some(())).await;
        let reasons: Vec<_> = ["turned-off", "version"]
            .into_iter()
            .filter(|reason| metric(&plugin, &format!("divvy_one_mode{{reason=\"{reason}\"}} 1")))
            .collect();
        let expected: &[&str] = match flags[1] {
            "off" => &["turned-off"],
            "auto" => &["version"],
            _ => &[],
        };
        assert_eq!(reasons, expected, "{flags:?}");
        if expected.is_empty() {
            assert_eq!(reported(&node, "OneModeForEachGpu"), None);
        } else {
            wait("the Event", || reported(&node, "OneModeForEachGpu")).await;
        }
        plugin.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn static_mig_instances_are_published_where_a_policy_says_so() {
    let node = Node::new("h100x1");
    let gpu = node.sim.uuids()[0].clone();
    node.sim.edit(|engine| {
        engine.gpu(&gpu).unwrap().facts.mig_mode = divvy_model::MigMode::Supported {
            current: true,
            pending: true,
        };
    });
    let foreign = node
        .sim
        .make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4)
        .unwrap();
    let spec = json!({ "rules": [{ "mig": { "instances": "Static" } }] });
    node.api
        .put(&divvy_fake_cluster::GpuPolicy::new("static", spec))
        .unwrap();
    let plugin = node.start_with(node.config(&[]));
    plugin.wait_ready().await;
    wait("the instance", || {
        (open(&node) == ["gpu-0-mig-static-3g40gb-9-4"]).then_some(())
    })
    .await;
    let device = node
        .api
        .list::<ResourceSlice>()
        .into_iter()
        .flat_map(|slice| slice.spec.devices.into_iter().flatten())
        .find(|device| device.name.contains("-mig-"))
        .unwrap();
    let uuid = device.attributes.unwrap()["uuid"].string.clone().unwrap();
    assert_eq!(uuid, foreign.uuid.to_string());
    assert_eq!(reported(&node, "ForeignMigInstance"), None);
    let claim = node.claim("c", &["gpu-0-mig-static-3g40gb-9-4"]);
    let prepared = node.prepare(&claim).await.unwrap();
    assert_eq!(prepared[0].device_name, "gpu-0-mig-static-3g40gb-9-4");
    let reported = |spec: &serde_json::Value| {
        spec.to_string()
            .contains("DIVVY_MIG_STATIC_GPU_0_MIG_STATIC_3G40GB_9_4=true")
    };
    assert!(
        node.cdi_files().values().any(reported),
        "{:?}",
        node.cdi_files()
    );
    node.unprepare(&claim).await.unwrap();
    assert_eq!(
        node.sim.inventory().gpus[&gpu]
            .mig
            .as_ref()
            .unwrap()
            .instances
            .as_ref()
            .map(Vec::len),
        Some(1),
        "it stays"
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_given_before_instances_changed_hands_is_served_after() {
    let node = Node::new("h100x1");
    let gpu = node.sim.uuids()[0].clone();
    node.sim
        .edit(|engine| engine.set_mig_mode(&gpu, true))
        .unwrap();
    let foreign = node
        .sim
        .make_foreign_instance(&gpu, GpuInstanceProfileId(9), 4)
        .unwrap();
    let (theirs, ours) = ("gpu-0-mig-static-3g40gb-9-4", "gpu-0-mig-1g10gb-19-0");
    let policy = |instances: &str| {
        let spec = json!({ "rules": [{ "modes": ["Mig"], "mig": { "instances": instances } }] });
        node.api
            .put(&divvy_fake_cluster::GpuPolicy::new("instances", spec))
            .unwrap();
    };
    policy("Static");
    let plugin = node.start_with(node.config(&[]));
    plugin.wait_ready().await;
    wait("their instance", || (open(&node) == [theirs]).then_some(())).await;
    let claim = node.claim("theirs", &[theirs]);
    policy("OnDemand");
    wait("instances of ours", || {
        open(&node)
            .iter()
            .any(|device| device == ours)
            .then_some(())
    })
    .await;
    node.prepare(&claim).await.unwrap();
    node.unprepare(&claim).await.unwrap();
    let claim = node.claim("ours", &[ours]);
    policy("Static");
    wait("theirs only", || (open(&node) == [theirs]).then_some(())).await;
    node.prepare(&claim).await.unwrap();
    let living = || node.sim.inventory().gpus[&gpu].mig.clone().unwrap();
    assert_eq!(living().instances.unwrap().len(), 2);
    node.unprepare(&claim).await.unwrap();
    assert_eq!(
        living().uuids.into_values().collect::<Vec<_>>(),
        [foreign.uuid]
    );
    plugin.stop().await;
}
