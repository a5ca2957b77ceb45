//! What is published, and that it stays so.

use std::time::{Duration, Instant};

use divvy_gpu_sim::profile;
use k8s_openapi::api::resource::v1::ResourceSlice;

use crate::node::{DRIVER, Node, PATIENCE, devices, plain, wait};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_plugin_registers_and_publishes_its_gpus_once() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let registered = node.kubelet.wait_registered(DRIVER, PATIENCE).await.unwrap();
    assert_eq!(registered.service, "v1.DRAPlugin");
    assert_eq!(registered.endpoint, plugin.config.sockets.dra.display().to_string());
    assert_eq!(node.published(), plain(&["gpu-1", "gpu-0"]));
    let slices = node.api.list::<ResourceSlice>();
    assert_eq!(slices[0].spec.pool.name, "n1/divvy");
    assert_eq!(slices[0].metadata.owner_references.as_ref().unwrap()[0].name, "n1");

    node.api.forget_requests();
    // Several rounds of listing GPUs and reading all facts.
    tokio::time::sleep(Duration::from_millis(1200)).await;
    for verb in ["create", "update", "patch", "delete", "list"] {
        assert_eq!(node.api.count(verb, "*"), 0, "{verb} while nothing happens");
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slices_wiped_by_a_kubelet_that_starts_are_back_within_two_seconds() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let begun = Instant::now();
    node.kubelet.restart();
    node.api
        .wait_until(|api| devices(api.list::<ResourceSlice>()) == plain(&["gpu-1", "gpu-0"]), PATIENCE)
        .await
        .unwrap();
    assert!(begun.elapsed() < Duration::from_secs(2), "took {:?}", begun.elapsed());
    node.kubelet.wait_registered(DRIVER, PATIENCE).await.unwrap();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_falls_off_is_withdrawn_unless_a_claim_holds_it_and_comes_back_under_its_name() {
    let node = Node::new("h100x3");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-2"]);
    node.prepare(&claim).await.unwrap();
    let uuids = node.sim.uuids();
    node.sim.lose_gpu(&uuids[1]);
    node.sim.lose_gpu(&uuids[2]);
    let tainted = ("gpu-2".to_owned(), vec!["gpu.divvy.dev/lost".to_owned()]);
    let expected = vec![tainted, ("gpu-0".to_owned(), vec![])];
    wait("withdrawal", || (node.published() == expected).then_some(())).await;

    // Released in the API: now it goes too.
    node.unprepare(&claim).await.unwrap();
    node.api.delete::<k8s_openapi::api::resource::v1::ResourceClaim>("default", "c").unwrap();
    wait("the rest", || (node.published() == plain(&["gpu-0"])).then_some(())).await;

    node.sim.restore_gpu(&uuids[1]);
    node.sim.restore_gpu(&uuids[2]);
    wait("the return", || (node.published() == plain(&["gpu-2", "gpu-1", "gpu-0"])).then_some(())).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_added_while_running_is_published_and_names_survive_a_restart() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let first = node.sim.uuids()[0].clone();
    node.sim.add_gpu(profile("l4").unwrap()).unwrap();
    wait("the new GPU", || (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())).await;
    plugin.stop().await;
    node.sim.remove_gpu(&first).unwrap();
    let plugin = node.start().await;
    wait("the rest", || (node.published() == plain(&["gpu-1"])).then_some(())).await;
    plugin.stop().await;
}
