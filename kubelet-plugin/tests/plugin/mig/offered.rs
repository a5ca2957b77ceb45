//! Partitions that are published, and the place of their counters.

use k8s_openapi::api::resource::v1::ResourceSlice;

use super::named;
use crate::node::{Node, plain, wait};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_policy_a_gpu_is_offered_by_its_mode_and_keeps_it() {
    let node = Node::new("h100x2");
    node.turn_mig_on(1);
    let plugin = node.start_cutting(node.config(&[])).await;
    let names: Vec<_> = node.published().into_iter().map(|(name, _)| name).collect();
    assert!(
        names.contains(&"gpu-0".to_owned()) && !names.contains(&"gpu-1".to_owned()),
        "{names:?}"
    );
    assert!(
        names
            .iter()
            .filter(|n| n.contains("-mig-"))
            .all(|n| n.starts_with("gpu-1-mig-")),
        "{names:?}"
    );
    assert_eq!(
        names.len(),
        1 + (7 + 4 + 3 + 2 + 1 + 1) + 1,
        "the last is for admins"
    );
    let small = node.claim("small", &["gpu-1-mig-1g10gb-19-0"]);
    assert_eq!(
        node.prepare(&small).await,
        named(&small, "gpu-1-mig-1g10gb-19-0")
    );
    let wrong = node.claim("wrong", &["gpu-0-mig-1g10gb-19-0"]);
    let refused = node.prepare(&wrong).await.unwrap_err();
    assert!(
        refused.contains("MIG mode of") && refused.contains("is off"),
        "{refused}"
    );
    assert_eq!(node.unprepare(&small).await, Ok(()));
    node.nothing_is_left();
    assert!(node.mig_is_on(1) && !node.mig_is_on(0));
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn older_servers_get_what_they_can_hold() {
    for (version, mig_on, expected) in [
        ("1.34.2", false, vec!["gpu-0"]),
        ("1.34.2", true, vec!["gpu-0"]),
        ("1.35.0", false, vec!["gpu-0"]),
        ("1.36.1", false, vec!["gpu-0"]),
        // A claim could end these schedulers, if anything drew on counters.
        ("1.35.5", true, vec!["gpu-0"]),
        ("1.36.1", true, vec!["gpu-0"]),
    ] {
        let node = Node::new("h100x1");
        node.api.set_version(version);
        if mig_on {
            node.turn_mig_on(0);
        }
        let plugin = node.start_with(node.everything());
        plugin.wait_ready().await;
        wait(version, || {
            (node.published() == plain(&expected)).then_some(())
        })
        .await;
        plugin.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pool_with_partitions_has_its_counters_in_slices_of_their_own() {
    let node = Node::new("h100x2");
    let plugin = node.start_with_everything().await;
    let slices = wait("the whole pool", || {
        let slices = node.api.list::<ResourceSlice>();
        let of = |s: &ResourceSlice| (s.spec.pool.generation, s.spec.pool.resource_slice_count);
        let newest = slices.iter().map(of).max()?;
        let whole = usize::try_from(newest.1).unwrap() == slices.len();
        (whole && slices.iter().all(|s| of(s) == newest)).then_some(slices)
    })
    .await;
    let (counters, devices): (Vec<_>, Vec<_>) = slices.iter().partition(|s| {
        s.spec
            .shared_counters
            .as_ref()
            .is_some_and(|c| !c.is_empty())
    });
    let sets: Vec<_> = counters
        .iter()
        .flat_map(|s| s.spec.shared_counters.iter().flatten())
        .map(|c| c.name.clone())
        .collect();
    assert_eq!(sets, ["gpu-0", "gpu-1"]);
    let all = devices.iter().flat_map(|s| s.spec.devices.iter().flatten());
    let (counted, admins): (Vec<_>, Vec<_>) = all.partition(|device| {
        device
            .consumes_counters
            .as_ref()
            .is_some_and(|c| c.len() == 1)
    });
    let admins: Vec<_> = admins
        .into_iter()
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(
        (counted.len(), admins),
        (2 * (1 + 1 + 18), vec!["gpu-0-admin", "gpu-1-admin"])
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn boards_whose_mode_needs_a_reset_are_offered_as_they_are() {
    let node = Node::new("a100-40x2,a30x1");
    // A30s come first on the bus of this node, or last: found by their name.
    let uuids = node.sim.uuids();
    let inventory = node.sim.inventory();
    let a30 = uuids
        .iter()
        .position(|uuid| inventory.gpus[uuid].facts.product_name.contains("A30"))
        .unwrap();
    let a100 = usize::from(a30 == 0);
    let off = (0..3).find(|n| *n != a30 && *n != a100).unwrap();
    node.turn_mig_on(a30);
    node.turn_mig_on(a100);
    let plugin = node.start_with_everything().await;
    let names: Vec<_> = wait("all devices", || {
        let names: Vec<_> = node.published().into_iter().map(|(name, _)| name).collect();
        (names.len() == 2 + (7 + 4 + 3 + 2 + 1 + 1) + (4 + 2 + 1) + 3).then_some(names)
    })
    .await;
    assert_eq!(names[0], format!("gpu-{off}"));
    let devices = [
        format!("gpu-{a30}-mig-2g12gb-5-2"),
        format!("gpu-{a100}-mig-7g40gb-0-0"),
    ];
    for device in &devices {
        let claim = node.claim(device, &[device]);
        assert_eq!(node.prepare(&claim).await, named(&claim, device));
    }
    assert_eq!(
        (node.instances(a30), node.instances(a100)),
        (vec![(5, 2, 2)], vec![(0, 0, 8)])
    );
    let whole = node.claim("whole", &[&format!("gpu-{a100}")]);
    assert!(node.prepare(&whole).await.is_err());
    plugin.stop().await;
}
