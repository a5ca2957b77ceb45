//! Restarts, crashes, rolling updates, and files that vanish.

use std::time::Duration;

use divvy_api::node::GpuNodeStatus;
use divvy_fake_cluster::GpuNode;
use divvy_fake_cluster::build::mk_node;
use divvy_gpu_sim::Fault;
use divvy_model::{GpuDriver, GpuOp, MigMode};

use crate::node::{DRIVER, Node, PATIENCE, device, plain, wait};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_stop_finishes_the_call_keeps_slices_and_removes_sockets() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let sockets = plugin.config.sockets.clone();
    let claim = node.claim("c", &["gpu-0"]);
    let before = node.api.count("get", "resourceclaims");
    let held = node.api.hold("get", "resourceclaims");
    let call = node.prepare(&claim);
    let stop = async {
        node.api
            .wait_until(|api| api.count("get", "resourceclaims") > before, PATIENCE)
            .await
            .unwrap();
        let stopping = tokio::spawn(plugin.stop());
        wait("the end of the registration", || {
            (!sockets.registration.exists()).then_some(())
        })
        .await;
        drop(held);
        stopping.await.unwrap();
    };
    let (answer, ()) = tokio::join!(call, stop);
    assert_eq!(answer, Ok(vec![device(&claim, "gpu", "gpu-0")]));
    assert!(!sockets.dra.exists());
    assert_eq!(node.published(), plain(&["gpu-0"]));
}

/// A driver may be slow to say what GPUs there are, and containers of the claims may start at any
/// time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_claims_wait_for_a_slow_driver_and_registration_for_them() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    node.prepare(&node.claim("kept", &["gpu-0"])).await.unwrap();
    let files = node.cdi_files();
    plugin.kill().await;
    fs_err::remove_dir_all(node.cdi_dir()).unwrap();
    node.sim.fault(Fault {
        op: Some(GpuOp::List),
        ..Fault::delay(Duration::from_millis(1500))
    });
    let config = node.config(&[]);
    // By this socket the kubelet finds the plugin.
    let socket = config.sockets.registration.clone();
    fs_err::remove_file(&socket).unwrap();
    let plugin = node.start_with(config);
    wait("registration", || socket.exists().then_some(())).await;
    assert_eq!(node.cdi_files(), files);
    node.sim.clear_faults();
    plugin.stop().await;
}

/// After a crash live claims have their files before registration and the same answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_crash_live_claims_have_their_files_before_registration() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let (kept, gone) = (
        node.claim("kept", &["gpu-0"]),
        node.claim("gone", &["gpu-1"]),
    );
    let answer = node.prepare(&kept).await;
    node.prepare(&gone).await.unwrap();
    let files = node.cdi_files();
    plugin.kill().await;
    fs_err::remove_dir_all(node.cdi_dir()).unwrap();
    node.api
        .delete::<k8s_openapi::api::resource::v1::ResourceClaim>("default", "gone")
        .unwrap();

    let plugin = node.start().await;
    assert_eq!(node.cdi_files(), files, "restored before ready");
    assert_eq!(node.prepare(&kept).await, answer);
    // Its pod's unprepare comes sooner or later; the claim is no longer in the API.
    assert_eq!(node.unprepare(&gone).await, Ok(()));
    assert_eq!(node.records(), [format!("{}.json", kept.uid)]);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cdi_files_that_vanish_under_running_pods_come_back() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let files = node.cdi_files();
    for file in files.keys() {
        fs_err::remove_file(node.cdi_dir().join(file)).unwrap();
    }
    wait("the file", || (node.cdi_files() == files).then_some(())).await;
    fs_err::remove_dir_all(node.cdi_dir()).unwrap();
    wait("the folder", || (node.cdi_files() == files).then_some(())).await;
    node.unprepare(&claim).await.unwrap();
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert_eq!(
        node.cdi_files().len(),
        0,
        "what was let go does not come back"
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn in_a_rolling_update_the_newer_instance_takes_over_and_either_serves() {
    let node = Node::new("h100x2");
    let with_uid = |uid: &str| node.start_with(node.config(&["--pod-uid", uid]));
    let old = with_uid("11111111-1111-1111-1111-111111111111");
    old.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();

    let new = with_uid("22222222-2222-2222-2222-222222222222");
    new.wait_ready().await;
    let publishes = |of: &crate::node::Plugin| of.metrics.encode().contains("divvy_publishes 1\n");
    wait("the hand-over", || {
        (publishes(&new) && !publishes(&old)).then_some(())
    })
    .await;
    assert_eq!(
        node.kubelet
            .plugins()
            .iter()
            .filter(|p| p.driver == DRIVER)
            .count(),
        2
    );
    let generation = |node: &Node| {
        let slices = node
            .api
            .list::<k8s_openapi::api::resource::v1::ResourceSlice>();
        slices
            .iter()
            .map(|s| (s.spec.pool.generation, s.metadata.resource_version.clone()))
            .collect::<Vec<_>>()
    };
    let before = generation(&node);
    assert_eq!(
        node.unprepare(&claim).await,
        Ok(()),
        "prepared by one, unprepared by the other"
    );
    old.stop().await;
    assert_eq!(node.records(), Vec::<String>::new());
    let next = node.claim("next", &["gpu-0"]);
    assert_eq!(
        node.prepare(&next).await,
        Ok(vec![device(&next, "gpu", "gpu-0")])
    );
    assert_eq!(generation(&node), before, "nothing was written for it");
    new.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_never_reads_its_gpus_takes_nothing_over() {
    let node = Node::new("h100x2");
    let config = |uid: &str| node.config(&["--pod-uid", uid]);
    let old = node.start_with(config("11111111-1111-1111-1111-111111111111"));
    old.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();

    let deaf = divvy_gpu_sim::SimNode::parse("h100x2").unwrap();
    deaf.edit(|engine| engine.set_driver_loaded(false));
    let second = config("22222222-2222-2222-2222-222222222222");
    let (dra, registration) = (
        second.sockets.dra.clone(),
        second.sockets.registration.clone(),
    );
    let new = node.start_on(second, std::sync::Arc::new(deaf.clone()));
    let waits = || {
        let missing = new.readiness.missing();
        missing
            .iter()
            .any(|part| part.contains("another instance serves the kubelet"))
            .then_some(())
    };
    wait("the reason", waits).await;
    assert!(dra.exists() && !registration.exists());
    let publishes = |of: &crate::node::Plugin| of.metrics.encode().contains("divvy_publishes 1\n");
    // Longer than a hand-over takes.
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert!(publishes(&old) && !publishes(&new) && !registration.exists());
    let other = node.claim("other", &["gpu-1"]);
    node.prepare(&other).await.unwrap();
    assert_eq!(node.unprepare(&claim).await, Ok(()));

    // Its driver comes: now it is the newer one that works.
    deaf.edit(|engine| engine.set_driver_loaded(true));
    new.wait_ready().await;
    wait("the hand-over", || {
        (publishes(&new) && !publishes(&old)).then_some(())
    })
    .await;
    old.stop().await;
    assert_eq!(node.unprepare(&other).await, Ok(()));
    new.stop().await;
}

/// An instance without a driver registers at once where no other serves or the other is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_without_a_driver_registers_where_no_other_serves() {
    let node = Node::new("h100x1");
    let config = |uid: &str| node.config(&["--pod-uid", uid]);
    node.sim.edit(|engine| engine.set_driver_loaded(false));
    let first = node.start_with(config("11111111-1111-1111-1111-111111111111"));
    node.kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    let second = node.start_with(config("22222222-2222-2222-2222-222222222222"));
    wait("its DRA socket", || {
        second.config.sockets.dra.exists().then_some(())
    })
    .await;
    assert!(!second.config.sockets.registration.exists());
    first.kill().await;
    let newest = |plugins: &[divvy_fake_cluster::kubelet::Plugin]| {
        plugins
            .last()
            .filter(|p| p.connected && p.endpoint.contains("22222222"))
            .map(drop)
    };
    node.kubelet.wait_for(newest, PATIENCE).await.unwrap();
    // A claim of which nothing is known is let go without a driver.
    let claim = node.claim("c", &["gpu-0"]);
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_record_whose_claim_and_pod_are_gone_is_undone_after_its_grace() {
    let node = Node::new("h100x1");
    let mut config = node.config(&[]);
    config.timing.executor.orphan_grace = Duration::from_millis(300);
    config.timing.reconcile = Duration::from_millis(100);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    node.api
        .delete::<k8s_openapi::api::resource::v1::ResourceClaim>("default", "c")
        .unwrap();
    wait("the orphan's end", || {
        node.records().is_empty().then_some(())
    })
    .await;
    assert_eq!(node.cdi_files().len(), 0);
    plugin.stop().await;
}

/// An unprepare that waits at the older instance does not undo a later prepare of the newer one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_older_instances_unprepare_does_not_undo_a_later_prepare() {
    let node = Node::new("h100x1");
    let with_uid = |uid: &str| {
        let mut config = node.config(&["--offer", "everything", "--pod-uid", uid]);
        config.timing.call = PATIENCE;
        node.start_with(config)
    };
    let old = with_uid("11111111-1111-1111-1111-111111111111");
    old.wait_ready().await;
    let name = "gpu-0-mig-1g10gb-19-0";
    let claim = node.claim("c", &[name]);
    let hang = node
        .sim
        .fault(Fault::hang().of(GpuOp::CreateGpuInstance).times(1));
    let reads = || node.api.count("get", "resourceclaims");
    let later = async {
        wait("the creation", || {
            node.sim.wait_until_hanging(1, Duration::ZERO).then_some(())
        })
        .await;
        let second = async {
            let new = with_uid("22222222-2222-2222-2222-222222222222");
            wait("the newer instance", || {
                (node.kubelet.plugins().len() == 2).then_some(())
            })
            .await;
            let newest = |plugins: &[divvy_fake_cluster::kubelet::Plugin]| {
                plugins
                    .last()
                    .filter(|p| p.connected && p.endpoint.contains("22222222"))
                    .map(drop)
            };
            node.kubelet.wait_for(newest, PATIENCE).await.unwrap();
            let before = reads();
            let release = async {
                wait("its read", || (reads() > before).then_some(())).await;
                node.sim.release(hang);
            };
            (tokio::join!(node.prepare(&claim), release).0, new)
        };
        // The first waits for the creation, which cannot be cut short.
        tokio::join!(node.unprepare(&claim), second)
    };
    let (_first, (unprepared, (second, new))) = tokio::join!(node.prepare(&claim), later);
    assert_eq!(unprepared, Ok(()));
    assert_eq!(second, Ok(vec![device(&claim, "gpu", name)]));
    assert_eq!(node.records(), [format!("{}.json", claim.uid)]);
    assert_eq!(node.sim.engine().gpus()[0].instances.len(), 1);
    old.stop().await;
    new.stop().await;
}

fn labelled(label: Option<&str>) -> k8s_openapi::api::core::v1::Node {
    let mut node = mk_node("n1");
    let labels = node.metadata.labels.get_or_insert_default();
    labels.extend(label.map(|value| ("divvy.dev/gpu".to_owned(), value.to_owned())));
    node
}

/// A plugin ends in the same way when it is updated and when its node goes to another driver.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_gives_mig_mode_back_only_where_the_node_lost_its_label() {
    let node = Node::new("h100x2");
    let flags = [
        "--offer",
        "everything",
        "--node-selector",
        "divvy.dev/gpu=true",
    ];
    let is_on = |index: usize| {
        let gpu = node.sim.uuids().swap_remove(index);
        node.sim.mig_mode(&gpu).is_ok_and(MigMode::is_on)
    };
    node.api.put(&labelled(Some("true"))).unwrap();
    let plugin = node.start_with(node.config(&flags));
    plugin.wait_ready().await;
    let held = node.claim("held", &["gpu-0-mig-1g10gb-19-0"]);
    let free = node.claim("free", &["gpu-1-mig-1g10gb-19-0"]);
    for claim in [&held, &free] {
        node.prepare(claim).await.unwrap();
    }
    node.unprepare(&free).await.unwrap();
    plugin.stop().await;
    assert!(is_on(0) && is_on(1), "an update touches no GPU");

    let plugin = node.start_with(node.config(&flags));
    plugin.wait_ready().await;
    // Taken off, and the pod deleted before the watch shows it.
    node.api.put(&labelled(None)).unwrap();
    plugin.stop().await;
    assert!(is_on(0), "a claim holds it");
    assert!(!is_on(1));
}

/// The GpuNode of a node that lost its label says whose pods cannot end without the plugin, and
/// nothing is wrong any more once the label is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_loses_its_label_under_claims_requires_action() {
    let node = Node::new("h100x3");
    let flags = ["--node-selector", "divvy.dev/gpu=true"];
    let status = || -> Option<GpuNodeStatus> {
        serde_json::from_value(node.api.get::<GpuNode>("", "n1")?.status).ok()
    };
    node.api.put(&labelled(Some("true"))).unwrap();
    let plugin = node.start_with(node.config(&flags));
    plugin.wait_ready().await;
    let claims = [node.claim("a", &["gpu-0"]), node.claim("b", &["gpu-2"])];
    for claim in &claims {
        node.prepare(claim).await.unwrap();
    }
    wait("the holders", || {
        status().filter(|status| status.summary.claims == 2)
    })
    .await;
    node.api.put(&labelled(None)).unwrap();
    plugin.stop().await;
    let left = status().unwrap();
    let names: Vec<_> = left.gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    assert_eq!(names, ["gpu-0", "gpu-2"]);
    assert!(left.gpus.iter().all(|gpu| gpu.offered.is_empty()));
    let (summary, trouble) = (&left.summary, &left.troubles[0]);
    assert_eq!(
        (summary.claims, summary.free, summary.trouble.as_str()),
        (2, 0, "node-left")
    );
    assert!(summary.since.is_some() && !trouble.notice);
    assert_eq!(
        trouble.why,
        "the node no longer has the labels of divvy, so its plugin was stopped; 2 claims still hold GPUs"
    );

    // The label is back, the pods end, and it goes for good.
    node.api.put(&labelled(Some("true"))).unwrap();
    let plugin = node.start_with(node.config(&flags));
    plugin.wait_ready().await;
    for claim in &claims {
        assert_eq!(node.unprepare(claim).await, Ok(()));
    }
    wait("a node without troubles", || {
        status().filter(|s| s.summary.free == 3 && s.troubles.is_empty())
    })
    .await;
    node.api.put(&labelled(None)).unwrap();
    plugin.stop().await;
    let left = status().unwrap();
    assert_eq!((left.gpus.len(), left.summary.trouble.as_str()), (0, ""));
    assert!(left.troubles[0].notice, "{left:?}");
}
