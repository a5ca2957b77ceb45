//! Others who delete, edit or own slices, and a Node that is missing or made anew.

use std::sync::Arc;
use std::time::Duration;

use divvy_fake_cluster::FakeApi;
use divvy_fake_cluster::build::{mk_device, mk_node, mk_slice};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use tokio::time::Instant;

use crate::world::{DRIVER, NODE, PATIENCE, SLICES, devices, name, pool, server, start};

#[tokio::test(start_paused = true)]
async fn a_slice_deleted_by_others_while_it_is_written_comes_back() {
    let api = server();
    let (first, second) = (
        pool(&[&["gpu-0"], &["gpu-1"]]),
        pool(&[&["gpu-0"], &["gpu-1", "gpu-2"]]),
    );
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    let held = api.hold("update", SLICES);
    world.desired.send_replace(Some(Arc::new(second.clone())));
    api.wait_until(|view| view.count("update", SLICES) == 1, PATIENCE)
        .await
        .unwrap();
    assert_eq!(api.wipe_slices(NODE, None), 2);
    drop(held);
    api.clear_faults();
    world.stored(&second).await;
}

#[tokio::test(start_paused = true)]
async fn foreign_deletes_and_edits_are_repaired_within_a_second() {
    let api = server();
    let wanted = pool(&[&["gpu-0"], &["gpu-1"], &["gpu-2"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    for round in 0..30 {
        let started = Instant::now();
        match round % 3 {
            0 => assert_eq!(api.wipe_slices(NODE, Some(DRIVER)), 3),
            1 => api.delete::<ResourceSlice>("", &name(1)).unwrap(),
            _ => drop(
                api.modify::<ResourceSlice>("", &name(2), |s| s.spec.devices = None)
                    .unwrap(),
            ),
        }
        let before = world.status.borrow().rounds;
        world.until(|status| status.rounds > before).await;
        world.stored(&wanted).await;
        assert!(
            started.elapsed() < Duration::from_secs(1),
            "round {round} took {:?}",
            started.elapsed()
        );
    }
    assert_eq!(world.status.borrow().foreign_deletes, 10 * 3 + 10);
}

#[tokio::test(start_paused = true)]
async fn without_a_pool_what_is_there_stays_and_stopping_keeps_the_slices() {
    let api = server();
    let old = api
        .put(&mk_slice("old", DRIVER, NODE, vec![mk_device("gpu-0")]))
        .unwrap();
    let other = api
        .put(&mk_slice(
            "other",
            DRIVER,
            "node-2",
            vec![mk_device("gpu-0")],
        ))
        .unwrap();
    let mut world = start(&api, None);
    api.wait_until(|view| view.count("watch", SLICES) == 1, PATIENCE)
        .await
        .unwrap();
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(world.slices(), [old, other.clone()]);
    let wanted = pool(&[&["gpu-7"]]);
    world.desired.send_replace(Some(Arc::new(wanted.clone())));
    world.published(&wanted).await;
    assert_eq!(devices(&world.slices()), [["gpu-7"], ["gpu-0"]]);
    world.stop.cancel();
    world.publisher.stopped().await;
    assert_eq!(devices(&api.list()), [["gpu-7"], ["gpu-0"]]);
    assert_eq!(
        api.get::<ResourceSlice>("", "other"),
        Some(other),
        "another node's slice is not touched"
    );
}

#[tokio::test(start_paused = true)]
async fn slices_belong_to_the_node_even_after_it_was_made_anew() {
    let api = server();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    let owner = |api: &FakeApi| {
        api.list::<ResourceSlice>()[0].owner_references()[0]
            .uid
            .clone()
    };
    assert_eq!(
        owner(&api),
        api.get::<Node>("", NODE).unwrap().uid().unwrap()
    );
    api.delete::<Node>("", NODE).unwrap();
    api.put(&mk_node(NODE)).unwrap();
    api.wipe_slices(NODE, None); // as the garbage collector does
    world.until(|status| status.rounds == 2).await;
    assert_eq!(
        owner(&api),
        api.get::<Node>("", NODE).unwrap().uid().unwrap()
    );
}

#[tokio::test(start_paused = true)]
async fn a_missing_node_and_a_taken_name_are_reported_with_a_remedy() {
    let api = FakeApi::new();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    let failed = world.until(|status| status.last_error.is_some()).await;
    assert_eq!(
        failed.last_error.unwrap(),
        "cannot get Node node-1: nodes \"node-1\" not found (--node-name must be the name of the Node object)"
    );
    api.put(&mk_slice(&name(0), "other.example.com", "node-2", vec![]))
        .unwrap();
    api.put(&mk_node(NODE)).unwrap();
    let taken = world
        .until(|status| {
            status
                .last_error
                .as_ref()
                .is_some_and(|e| !e.contains("Node node-1"))
        })
        .await;
    assert_eq!(
        taken.last_error.unwrap(),
        "ResourceSlice 00000-gpu.divvy.dev-node-1 belongs to driver other.example.com on node node-2, not to this \
         node: delete it with `kubectl delete resourceslice 00000-gpu.divvy.dev-node-1`"
    );
    api.delete::<ResourceSlice>("", &name(0)).unwrap();
    world.stored(&wanted).await;
}

#[tokio::test(start_paused = true)]
async fn two_publishers_of_one_pool_do_not_fight() {
    let api = server();
    let wanted = pool(&[&["gpu-0"], &["gpu-1"]]);
    let mut one = start(&api, Some(wanted.clone()));
    let mut two = start(&api, Some(wanted.clone()));
    one.stored(&wanted).await;
    two.stored(&wanted).await;
    api.forget_requests();
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert_eq!(
        (
            api.count("create", SLICES),
            api.count("update", SLICES),
            api.count("delete", SLICES)
        ),
        (0, 0, 0)
    );
}
