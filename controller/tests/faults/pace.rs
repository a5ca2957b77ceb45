//! The publisher's requests: how soon, how often, and on what condition.

use std::sync::Arc;
use std::time::Duration;

use divvy_fake_cluster::build::{mk_device, mk_slice};
use divvy_fake_cluster::{FakeApi, Fault};
use k8s_openapi::api::resource::v1::ResourceSlice;
use tokio::time::Instant;

use crate::world::{DRIVER, NODE, PATIENCE, SLICES, World, devices, name, pool, server, start};

/// Changes the first slice as another client, and returns the time until it is repaired.
async fn repaired(api: &FakeApi, world: &mut World) -> Duration {
    let rounds = world.status.borrow().rounds;
    api.modify::<ResourceSlice>("", &name(0), |slice| {
        slice.spec.devices = Some(vec![mk_device("stranger")]);
    })
    .unwrap();
    let changed = Instant::now();
    world.until(|status| status.rounds > rounds).await;
    changed.elapsed()
}

#[tokio::test(start_paused = true)]
async fn foreign_changes_in_a_row_are_repaired_later_and_later() {
    let api = server();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    let mut waits = Vec::new();
    for _ in 0..16 {
        waits.push(repaired(&api, &mut world).await);
    }
    assert!(
        waits[0] < Duration::from_millis(200) && waits[12] >= Duration::from_millis(800),
        "{waits:?}"
    );
    tokio::time::sleep(Duration::from_secs(31)).await;
    let soon = repaired(&api, &mut world).await;
    assert!(soon < Duration::from_millis(200), "{soon:?}");
    assert_eq!(world.status.borrow().writes.updated, 17);
}

#[tokio::test(start_paused = true)]
async fn a_stream_of_foreign_changes_does_not_put_the_repair_off() {
    let api = server();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    let before = world.stored(&wanted).await.rounds;
    for turn in 0..20 {
        api.modify::<ResourceSlice>("", &name(0), |slice| {
            slice.spec.devices = Some(vec![mk_device(&format!("stranger-{turn}"))]);
        })
        .unwrap();
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let rounds = world.status.borrow().rounds - before;
    assert!(rounds >= 1, "{rounds} in a second");
}

/// Lets writes fail until the wait between two attempts is long.
async fn fails_for_long(api: &FakeApi, world: &mut World) {
    let failed = world.status.borrow().writes.failed;
    api.fail_next(8, "update", SLICES, Fault::Status(500));
    api.modify::<ResourceSlice>("", &name(0), |slice| {
        slice.spec.devices = Some(vec![mk_device("stranger")]);
    })
    .unwrap();
    world
        .until(|status| status.writes.failed == failed + 8)
        .await;
}

/// Lets the next write fail once, and returns the time until it works.
async fn works_again(api: &FakeApi, world: &mut World, next: &[&str]) -> Duration {
    api.fail_next(1, "update", SLICES, Fault::Status(500));
    let wanted = pool(&[next]);
    world.desired.send_replace(Some(Arc::new(wanted.clone())));
    let changed = Instant::now();
    world.stored(&wanted).await;
    changed.elapsed()
}

#[tokio::test(start_paused = true)]
async fn a_new_pool_and_a_success_begin_with_short_waits_again() {
    let api = server();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    fails_for_long(&api, &mut world).await;
    // A new pool, before anything has worked.
    let took = works_again(&api, &mut world, &["gpu-1"]).await;
    assert!(took < Duration::from_secs(2), "new pool: {took:?}");
    // A success, after which another client is in the way.
    fails_for_long(&api, &mut world).await;
    world.until(|status| status.in_sync).await;
    api.fail_next(1, "update", SLICES, Fault::Status(500));
    let took = repaired(&api, &mut world).await;
    assert!(took < Duration::from_secs(2), "success: {took:?}");
    // The list after a failure is not asked for again.
    api.forget_requests();
    let wanted = pool(&[&["gpu-2"]]);
    world.desired.send_replace(Some(Arc::new(wanted.clone())));
    world.stored(&wanted).await;
    assert_eq!(api.count("list", SLICES), 0);
}

#[tokio::test(start_paused = true)]
async fn a_slice_that_is_another_ones_before_its_delete_stays() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"], &["gpu-1"]]), pool(&[&["gpu-0"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    let held = api.hold("delete", SLICES);
    world.desired.send_replace(Some(Arc::new(second.clone())));
    api.wait_until(|view| view.count("delete", SLICES) == 1, PATIENCE)
        .await
        .unwrap();
    api.delete::<ResourceSlice>("", &name(1)).unwrap();
    let other = mk_slice(&name(1), "other.example.com", NODE, vec![mk_device("x")]);
    api.put(&other).unwrap();
    drop(held);
    api.clear_faults();
    world.published(&second).await;
    let left: Vec<ResourceSlice> = api.list();
    assert_eq!(devices(&left), [vec!["gpu-0"], vec!["x"]]);
}

#[tokio::test(start_paused = true)]
async fn a_slice_that_was_changed_before_its_delete_is_looked_at_first() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"], &["gpu-1"]]), pool(&[&["gpu-0"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    let held = api.hold("delete", SLICES);
    world.desired.send_replace(Some(Arc::new(second.clone())));
    api.wait_until(|view| view.count("delete", SLICES) == 1, PATIENCE)
        .await
        .unwrap();
    // Its new owner keeps the object.
    api.modify::<ResourceSlice>("", &name(1), |slice| {
        slice.spec.driver = "other.example.com".to_owned();
    })
    .unwrap();
    drop(held);
    api.clear_faults();
    world.published(&second).await;
    assert_eq!(api.list::<ResourceSlice>().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn slices_that_are_deleted_or_written_are_counted_and_no_news() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"], &["gpu-1"]]), pool(&[&["gpu-2"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    world.desired.send_replace(Some(Arc::new(second.clone())));
    let status = world.stored(&second).await;
    let writes = status.writes;
    assert_eq!(
        (
            writes.created,
            writes.updated,
            writes.deleted,
            writes.failed
        ),
        (2, 1, 1, 0)
    );
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert_eq!(*world.status.borrow(), status);
    assert_eq!(status.foreign_deletes, 0);
    // The Node is read once, and nothing is listed but by the watch.
    assert_eq!((api.count("get", "*"), api.count("list", SLICES)), (1, 1));
}

/// A node without GPUs says so with a slice without devices.
#[tokio::test(start_paused = true)]
async fn a_pool_without_devices_is_one_slice() {
    let api = server();
    let wanted = pool(&[]);
    let mut world = start(&api, Some(wanted.clone()));
    let status = world.published(&wanted).await;
    assert_eq!((status.slices, status.devices), (1, 0));
    assert_eq!(api.list::<ResourceSlice>().len(), 1);
}

/// While nothing is watched, only a list shows that a write whose answer was lost has happened.
#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_was_lost_is_listed_and_not_sent_again() {
    let api = server();
    let first = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    api.fail_next(1000, "watch", SLICES, Fault::Status(500));
    api.close_watches();
    world.until(|status| status.watch_error.is_some()).await;
    api.fail_next(1, "create", SLICES, Fault::DropAfter);
    let second = pool(&[&["gpu-0"], &["gpu-1"]]);
    world.desired.send_replace(Some(Arc::new(second.clone())));
    world.published(&second).await;
    assert_eq!(api.count("create", SLICES), 2);
}

#[tokio::test(start_paused = true)]
async fn a_name_is_taken_by_another_driver_or_node_and_not_by_ourselves() {
    for (driver, node, taken) in [
        ("other.example.com", NODE, true),
        (DRIVER, "node-2", true),
        (DRIVER, NODE, false),
    ] {
        let api = server();
        let held = api.hold("create", SLICES);
        let wanted = pool(&[&["gpu-0"]]);
        let mut world = start(&api, Some(wanted.clone()));
        api.wait_until(|view| view.count("create", SLICES) == 1, PATIENCE)
            .await
            .unwrap();
        api.put(&mk_slice(&name(0), driver, node, vec![])).unwrap();
        drop(held);
        api.clear_faults();
        let failed = world.until(|status| status.last_error.is_some()).await;
        let error = failed.last_error.unwrap();
        let said = format!("belongs to driver {driver} on node {node}");
        assert_eq!(error.contains(&said), taken, "{error}");
        if !taken {
            world.stored(&wanted).await;
        }
    }
}
