//! Calls that fail, hang, conflict, or lose what they were given, and watches that end.

use std::sync::Arc;
use std::time::Duration;

use divvy_controller::{PublisherConfig, dropped_features};
use divvy_fake_cluster::build::mk_device;
use divvy_fake_cluster::{FakeApi, Fault, Gate};
use divvy_offer::Taint;
use k8s_openapi::api::resource::v1::ResourceSlice;
use tokio::time::Instant;

use crate::world::{DRIVER, NODE, PATIENCE, SLICES, name, pool, server, start};

#[tokio::test(start_paused = true)]
async fn a_failed_write_is_reported_and_retried_until_it_works() {
    for (fault, message) in [
        (
            Fault::Status(500),
            "cannot create ResourceSlice 00000-gpu.divvy.dev-node-1: injected: create resourceslices fails",
        ),
        (
            Fault::DropBefore,
            "cannot create ResourceSlice 00000-gpu.divvy.dev-node-1: ",
        ),
        (
            Fault::Hang,
            "cannot create ResourceSlice 00000-gpu.divvy.dev-node-1: no answer in 10s; it may have happened all the same",
        ),
        (
            Fault::Status(403),
            "nodes, and the admission policy must allow this node)",
        ),
    ] {
        let api = server();
        api.fail_next(3, "create", SLICES, fault);
        let wanted = pool(&[&["gpu-1", "gpu-0"]]);
        let mut world = start(&api, Some(wanted.clone()));
        let failed = world.until(|status| status.last_error.is_some()).await;
        let text = failed.last_error.unwrap();
        assert!(text.contains(message) && !failed.in_sync, "{text}");
        let status = world.stored(&wanted).await;
        assert_eq!(
            (
                status.last_error,
                status.writes.failed,
                status.writes.created
            ),
            (None, 3, 1)
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_answer_was_lost_is_not_done_twice() {
    let api = server();
    api.fail_next(1, "create", SLICES, Fault::DropAfter);
    let first = pool(&[&["gpu-0"], &["gpu-1"]]);
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    assert_eq!(api.list::<ResourceSlice>().len(), 2);
    for (verb, next) in [
        ("update", pool(&[&["gpu-0"], &["gpu-2"]])),
        ("delete", pool(&[&["gpu-0"]])),
    ] {
        api.fail_next(1, verb, SLICES, Fault::DropAfter);
        world.desired.send_replace(Some(Arc::new(next.clone())));
        let status = world.stored(&next).await;
        assert!(status.writes.failed > 0, "{verb}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_conflict_is_resolved_with_a_fresh_list() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"]]), pool(&[&["gpu-0", "gpu-1"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    let held = api.hold("update", SLICES);
    world.desired.send_replace(Some(Arc::new(second.clone())));
    api.wait_until(|view| view.count("update", SLICES) == 1, PATIENCE)
        .await
        .unwrap();
    api.modify::<ResourceSlice>("", &name(0), |s| {
        s.spec.devices = Some(vec![mk_device("stranger")]);
    })
    .unwrap();
    drop(held);
    api.clear_faults();
    let status = world.stored(&second).await;
    assert_eq!(status.writes.failed, 1);
}

#[tokio::test(start_paused = true)]
async fn a_slice_that_is_gone_before_its_delete_is_fine() {
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
    drop(held);
    api.clear_faults();
    let status = world.stored(&second).await;
    assert_eq!((status.writes.failed, status.writes.deleted), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn an_expired_or_closed_watch_misses_nothing() {
    let api = server();
    let wanted = pool(&[&["gpu-0"], &["gpu-1"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    for close in [FakeApi::expire_watches, FakeApi::close_watches] {
        api.delete::<ResourceSlice>("", &name(0)).unwrap();
        close(&api);
        world.until(|status| !status.in_sync).await;
        world.stored(&wanted).await;
        api.delete::<ResourceSlice>("", &name(1)).unwrap();
        world.until(|status| !status.in_sync).await;
        world.stored(&wanted).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_list_or_watch_is_asked_again_and_then_the_error_ends() {
    let wanted = pool(&[&["gpu-0"]]);
    for verb in ["list", "watch"] {
        let api = server();
        api.fail_next(1, verb, SLICES, Fault::Hang);
        let mut world = start(&api, Some(wanted.clone()));
        let failed = world.until(|status| status.watch_error.is_some()).await;
        let expected = format!(
            "cannot {verb} ResourceSlices: no answer in 10s; it may have happened all the same"
        );
        assert_eq!(failed.watch_error.unwrap(), expected);
        world.stored(&wanted).await;
        world.until(|status| status.watch_error.is_none()).await;
        api.delete::<ResourceSlice>("", &name(0)).unwrap();
        let deleted = Instant::now();
        world.until(|status| status.foreign_deletes == 1).await;
        world.stored(&wanted).await;
        assert!(
            deleted.elapsed() < Duration::from_secs(1),
            "{verb}: {:?}",
            deleted.elapsed()
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_watch_that_stands_again_is_no_error_any_more_also_without_an_event() {
    let api = server();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    api.fail_next(3, "watch", SLICES, Fault::Status(500));
    api.close_watches();
    world.until(|status| status.watch_error.is_some()).await;
    let failed = Instant::now();
    world.until(|status| status.watch_error.is_none()).await;
    assert!(
        failed.elapsed() < Duration::from_secs(30),
        "{:?}",
        failed.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn a_watch_from_a_version_that_the_server_forgot_begins_with_a_list() {
    let api = server();
    let wanted = pool(&[&["gpu-0"]]);
    let mut world = start(&api, Some(wanted.clone()));
    world.stored(&wanted).await;
    for (status, reported) in [(410, false), (404, true)] {
        api.forget_requests();
        api.fail_next(1, "watch", SLICES, Fault::Status(status));
        api.close_watches();
        api.wait_until(|view| view.count("list", SLICES) == 1, PATIENCE)
            .await
            .unwrap();
        api.wait_until(|view| view.count("watch", SLICES) == 2, PATIENCE)
            .await
            .unwrap();
        assert_eq!(
            world.status.borrow().watch_error.is_some(),
            reported,
            "{status}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_api_server_that_was_away_finds_the_slices_as_they_should_be() {
    let api = server();
    let (first, second) = (pool(&[&["gpu-0"]]), pool(&[&["gpu-0", "gpu-1"]]));
    let mut world = start(&api, Some(first.clone()));
    world.stored(&first).await;
    api.stop();
    world.desired.send_replace(Some(Arc::new(second.clone())));
    let failed = world
        .until(|status| status.last_error.is_some() && status.watch_error.is_some())
        .await;
    assert!(
        failed
            .last_error
            .unwrap()
            .contains("the fake API server is stopped")
    );
    assert!(
        failed
            .watch_error
            .unwrap()
            .starts_with("cannot watch ResourceSlices: ")
    );
    tokio::time::sleep(Duration::from_mins(10)).await;
    api.delete::<ResourceSlice>("", &name(0)).unwrap();
    let back = Instant::now();
    api.start();
    world.stored(&second).await;
    world
        .until(|status| status.last_error.is_none() && status.watch_error.is_none())
        .await;
    assert!(
        back.elapsed() < Duration::from_secs(6),
        "{:?}",
        back.elapsed()
    );
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_and_little_is_read_while_nothing_changes() {
    let api = server();
    let wanted = pool(&[&["gpu-0"], &["gpu-1"]]);
    let mut world = start(&api, Some(wanted.clone()));
    let before = world.stored(&wanted).await;
    api.forget_requests();
    tokio::time::sleep(Duration::from_hours(24)).await;
    assert_eq!(*world.status.borrow(), before);
    for verb in ["create", "update", "patch", "delete", "get"] {
        assert_eq!(api.count(verb, "*"), 0, "{verb}");
    }
    assert_eq!(api.count("list", "*"), 0);
    assert!(
        api.count("watch", "*") <= 24 * 13,
        "{} watches in a day",
        api.count("watch", "*")
    );
}

#[tokio::test(start_paused = true)]
async fn dropped_fields_are_reported_once_and_not_sent_again() {
    let api = server();
    api.turn_off(Gate::DeviceTaints);
    let mut wanted = pool(&[&["gpu-0"]]);
    wanted.slices[0].devices[0].taints = vec![Taint::no_schedule("gpu.divvy.dev/lost", None)];
    let mut world = start(&api, Some(wanted.clone()));
    let status = world.published(&wanted).await;
    assert_eq!(status.dropped, [divvy_offer::Feature::Taints].into());
    assert_eq!(status.altered, [name(0)].into());
    tokio::time::sleep(Duration::from_hours(1)).await;
    world.desired.send_replace(Some(Arc::new(wanted.clone())));
    world.until(|status| status.rounds == 2).await;
    assert_eq!(
        (api.count("create", SLICES), api.count("update", SLICES)),
        (1, 0)
    );
    let without = pool(&[&["gpu-0"]]);
    world.desired.send_replace(Some(Arc::new(without.clone())));
    let status = world.published(&without).await;
    assert_eq!(status.dropped, [].into(), "what is not sent is not dropped");
}

#[tokio::test(start_paused = true)]
async fn lost_fields_are_forgotten_with_their_slice_even_if_only_listed() {
    let api = server();
    api.turn_off(Gate::DeviceTaints);
    let mut wanted = pool(&[&["gpu-0"], &["gpu-1"]]);
    wanted.slices[1].devices[0].taints = vec![Taint::no_schedule("gpu.divvy.dev/lost", None)];
    let mut world = start(&api, Some(wanted.clone()));
    assert_eq!(
        world.published(&wanted).await.dropped,
        [divvy_offer::Feature::Taints].into()
    );
    api.expire_watches();
    api.delete::<ResourceSlice>("", &name(1)).unwrap();
    world
        .until(|status| !status.in_sync && status.foreign_deletes == 1)
        .await;
    let without = pool(&[&["gpu-0"]]);
    world.desired.send_replace(Some(Arc::new(without.clone())));
    let status = world.stored(&without).await;
    assert_eq!((status.dropped, status.altered), ([].into(), [].into()));
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_shows_which_features_a_server_drops_and_stores_nothing() {
    use divvy_offer::Feature;

    let api = server();
    let config = PublisherConfig {
        driver: DRIVER.into(),
        node_name: NODE.into(),
    };
    let client = api.client();
    let ask = async || dropped_features(&client, &config, "node-1/divvy").await;
    assert_eq!(ask().await.unwrap(), [].into());
    let gates = [
        (Gate::DeviceTaints, Feature::Taints),
        (Gate::PartitionableDevices, Feature::Partitions),
        (Gate::ConsumableCapacity, Feature::Shares),
    ];
    for (number, (gate, _)) in gates.iter().enumerate() {
        api.turn_off(*gate);
        let off = gates
            .iter()
            .take(number + 1)
            .map(|(_, feature)| *feature)
            .collect();
        assert_eq!(ask().await.unwrap(), off);
    }
    assert_eq!(
        (api.list::<ResourceSlice>(), api.count("create", SLICES)),
        (Vec::new(), 0)
    );
    api.fail_next(1, "dry-run", SLICES, Fault::Status(400));
    assert!(
        ask()
            .await
            .unwrap_err()
            .to_string()
            .starts_with("cannot create a ResourceSlice in a dry run: ")
    );
}

#[tokio::test(start_paused = true)]
async fn a_pool_over_a_limit_is_not_sent_and_not_tried_again() {
    let api = server();
    let mut world = start(&api, Some(pool(&[&["gpu-0"], &["gpu-0"]])));
    let failed = world.until(|status| status.last_error.is_some()).await;
    assert_eq!(
        failed.last_error.unwrap(),
        "the pool cannot be published: slice 1: the device \"gpu-0\" is there twice"
    );
    tokio::time::sleep(Duration::from_hours(1)).await;
    assert_eq!(
        (
            world.status.borrow().writes.failed,
            api.count("create", "*")
        ),
        (1, 0)
    );
    let good = pool(&[&["gpu-0"], &["gpu-1"]]);
    world.desired.send_replace(Some(Arc::new(good.clone())));
    world.stored(&good).await;
}
