//! Devices and slices that are published, and stay so.

use std::time::Duration;

use divvy_fake_cluster::{Fault, Gate};
use divvy_gpu_sim::profile;
use divvy_model::MigMode;
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};

use crate::node::{DRIVER, Node, PATIENCE, devices, plain, wait};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plugin_registers_and_publishes_its_gpus_once() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let registered = node
        .kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    assert_eq!(registered.service, "v1.DRAPlugin");
    assert_eq!(
        registered.endpoint,
        plugin.config.sockets.dra.display().to_string()
    );
    assert_eq!(node.published(), plain(&["gpu-1", "gpu-0"]));
    let slices = node.api.list::<ResourceSlice>();
    assert_eq!(slices[0].spec.pool.name, "n1/divvy");
    assert_eq!(
        slices[0].metadata.owner_references.as_ref().unwrap()[0].name,
        "n1"
    );

    node.wait_calm().await;
    node.api.forget_requests();
    // Several rounds of listing GPUs and reading all facts.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    for verb in ["create", "update", "patch", "delete", "list"] {
        assert_eq!(node.api.count(verb, "*"), 0, "{verb} while nothing happens");
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_wiped_by_a_starting_kubelet_are_back_without_a_round() {
    let node = Node::new("h100x2");
    let plugin = node.start_with(node.seldom());
    plugin.wait_ready().await;
    node.kubelet.restart();
    node.api
        .wait_until(
            |api| devices(api.list::<ResourceSlice>()) == plain(&["gpu-1", "gpu-0"]),
            PATIENCE,
        )
        .await
        .unwrap();
    node.kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_falls_off_is_tainted_and_comes_back_under_its_name() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let lost = node.sim.uuids()[1].clone();
    node.sim.lose_gpu(&lost);
    let tainted = ("gpu-1".to_owned(), vec!["gpu.divvy.dev/lost".to_owned()]);
    let expected = vec![tainted, ("gpu-0".to_owned(), vec![])];
    wait("the taint", || (node.published() == expected).then_some(())).await;
    node.sim.restore_gpu(&lost);
    wait("the return", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    assert_eq!(
        node.api.count("delete", "resourceslices"),
        0,
        "it was published all the time"
    );
    plugin.stop().await;
}

/// A GPU that is taken out is withdrawn unless a claim holds it and comes back under its name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_taken_out_is_withdrawn_unless_held_and_keeps_its_name() {
    let node = Node::new("h100x3");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-2"]);
    node.prepare(&claim).await.unwrap();
    let uuids = node.sim.uuids();
    let [one, two] = [&uuids[1], &uuids[2]].map(|uuid| node.sim.remove_gpu(uuid).unwrap());
    let tainted = ("gpu-2".to_owned(), vec!["gpu.divvy.dev/lost".to_owned()]);
    let expected = vec![tainted, ("gpu-0".to_owned(), vec![])];
    wait("withdrawal", || {
        (node.published() == expected).then_some(())
    })
    .await;

    let event = wait("the Event", || {
        node.api
            .list::<Event>()
            .into_iter()
            .find(|e| e.reason.as_deref() == Some("GpuLost"))
    })
    .await;
    assert_eq!(event.regarding.unwrap().kind.as_deref(), Some("Node"));
    assert_eq!(
        event.note.as_deref(),
        Some(
            "gpu-2 is held by a claim, but its GPU is gone: the device stays published with a taint until the claim is released"
        )
    );

    // Released in the API: now it goes too.
    node.unprepare(&claim).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "c").unwrap();
    wait("the rest", || {
        (node.published() == plain(&["gpu-0"])).then_some(())
    })
    .await;

    node.sim
        .edit(|engine| [one, two].map(|gpu| engine.insert_gpu(gpu)));
    wait("the return", || {
        (node.published() == plain(&["gpu-2", "gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_added_while_running_is_published_and_names_survive_a_restart() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let first = node.sim.uuids()[0].clone();
    node.sim.add_gpu(profile("l4").unwrap()).unwrap();
    wait("the new GPU", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    plugin.stop().await;
    node.sim.remove_gpu(&first).unwrap();
    let plugin = node.start().await;
    wait("the rest", || {
        (node.published() == plain(&["gpu-1"])).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_taints_are_dropped_an_unusable_gpu_is_not_published() {
    let node = Node::new("h100x2");
    node.api.turn_off(Gate::DeviceTaints);
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    node.sim.start_process(&node.sim.uuids()[0], 4711);
    node.unprepare(&claim).await.unwrap();
    node.api.delete::<ResourceClaim>("default", "c").unwrap();
    wait("the withdrawal", || {
        (node.published() == plain(&["gpu-1"])).then_some(())
    })
    .await;
    node.sim.end_process(4711);
    wait("the return", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    plugin.stop().await;
}

/// For a moment such a share would look like a GPU that is free.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_the_limits_of_shares_are_dropped_no_share_is_ever_stored() {
    let node = Node::new("h100x2");
    node.api.turn_off(Gate::ConsumableCapacity);
    // What is not answered is asked again before anything is published.
    node.api
        .fail_next(1, "dry-run", "resourceslices", Fault::Status(500));
    node.api
        .fail_next(1, "dry-run", "resourceslices", Fault::DropBefore);
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    let published = node.published();
    assert!(
        published.iter().any(|(device, _)| device.contains("-mig-")),
        "{published:?}"
    );
    assert!(
        !published.iter().any(|(device, _)| device.ends_with("-ts")),
        "{published:?}"
    );
    assert_eq!(
        node.api.count("update", "resourceslices"),
        0,
        "something else was stored before"
    );
    assert_eq!(
        node.api.count("create", "resourceslices"),
        u64::try_from(node.api.list::<ResourceSlice>().len()).unwrap()
    );
    plugin.stop().await;
}

/// Some webhooks refuse dry runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_refuses_dry_runs_is_published_to() {
    let node = Node::new("h100x2");
    node.api
        .fail_next(1000, "dry-run", "resourceslices", Fault::Status(400));
    let plugin = node.start().await;
    assert_eq!(node.published(), plain(&["gpu-1", "gpu-0"]));
    plugin.stop().await;
}

/// An API server that is down at the start blocks no unprepare and gets the slices later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_down_at_the_start_blocks_no_unprepare() {
    let node = Node::new("h100x1");
    node.api.stop();
    let plugin = node.start_with(node.config(&[]));
    node.kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    let old =
        divvy_fake_cluster::ClaimRef::new("default", "old", "11111111-2222-3333-4444-555555555555");
    assert_eq!(node.unprepare(&old).await, Ok(()));
    assert!(
        plugin
            .readiness
            .missing()
            .iter()
            .any(|m| m.starts_with("slices: "))
    );
    node.api.start();
    plugin.wait_ready().await;
    assert_eq!(node.published(), plain(&["gpu-0"]));
    plugin.stop().await;
}

/// A GPU in MIG mode is left out without listing the clusters claims again and again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_in_mig_mode_is_left_out_without_many_lists_of_claims() {
    let node = Node::new("h100x2");
    // Too old a server for partitions, so that nothing of the GPU can be offered.
    node.api.set_version("1.34.9");
    let first = node.sim.uuids()[0].clone();
    node.sim.edit(|engine| {
        engine.gpu(&first).unwrap().facts.mig_mode = MigMode::Supported {
            current: true,
            pending: true,
        };
    });
    let plugin = node.start().await;
    wait("the other GPU", || {
        (node.published() == plain(&["gpu-1"])).then_some(())
    })
    .await;
    node.api.forget_requests();
    // Several times as long as the pause between two such lists.
    tokio::time::sleep(Duration::from_millis(800)).await;
    assert_eq!(node.api.count("list", "resourceclaims"), 0);
    plugin.stop().await;
}

#[tokio::test]
async fn nothing_is_published_before_the_kubelet_has_registered_the_plugin() {
    let node = Node::new("h100x1");
    let elsewhere = node.dir.path().join("not-watched");
    fs_err::create_dir_all(&elsewhere).unwrap();
    let mut config = node.config(&[]);
    let socket = config.sockets.registration.file_name().unwrap().to_owned();
    config.sockets.registration = elsewhere.join(&socket);
    let plugin = node.start_with(config);
    let waiting = wait("all but the registration", || {
        let missing = plugin.readiness.missing();
        let names: Vec<&str> = missing
            .iter()
            .filter_map(|line| line.split(':').next())
            .collect();
        (names == ["registered", "slices"]).then_some(missing)
    })
    .await;
    assert!(
        waiting
            .iter()
            .any(|line| line.contains("publishing starts afterwards")),
        "{waiting:?}"
    );
    assert_eq!(node.api.count("create", "resourceslices"), 0);
    // The kubelet finds the socket.
    fs_err::rename(
        elsewhere.join(&socket),
        node.kubelet.config().registry_dir().join(&socket),
    )
    .unwrap();
    plugin.wait_ready().await;
    assert_eq!(node.api.list::<ResourceSlice>().len(), 1);
    plugin.stop().await;
}

#[tokio::test]
async fn nothing_is_published_before_the_servers_version_is_known() {
    let node = Node::new("h100x1");
    node.api
        .fail_next(1000, "get", "version", Fault::Status(500));
    let plugin = node.start_with(node.config(&[]));
    wait("the reason", || {
        let missing = plugin.readiness.missing();
        missing
            .iter()
            .any(|line| line.contains("what the API server supports is not known yet"))
            .then_some(())
    })
    .await;
    assert_eq!(node.api.count("create", "resourceslices"), 0);
    node.api.clear_faults();
    plugin.wait_ready().await;
    assert_eq!(node.api.list::<ResourceSlice>().len(), 1);
    plugin.stop().await;
}

#[tokio::test]
async fn slices_that_cannot_be_listed_are_named_and_not_the_kubelet() {
    let node = Node::new("h100x1");
    node.api
        .fail_next(10_000, "list", "resourceslices", Fault::Status(403));
    let plugin = node.start_with(node.config(&[]));
    node.kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    let of_slices = |line: &&String| line.starts_with("slices: ");
    wait("the reason", || {
        let missing = plugin.readiness.missing();
        missing
            .iter()
            .find(of_slices)?
            .contains("cannot list ResourceSlices")
            .then_some(())
    })
    .await;
    node.api.clear_faults();
    plugin.wait_ready().await;
    plugin.stop().await;
}
