//! Rolling updates of the real process under a steady stream of claims. Two instances share a
//! plugin folder, as they do with `maxSurge: 1`: the kubelet calls the newer as soon as it is
//! registered, and the older ends when it has finished what it was asked.
//!
//! More updates than the default: `DIVVY_UPDATES=50 cargo test -p divvy-kubelet-plugin --test
//! plugin rolling -- --nocapture`.

use std::time::Duration;

use divvy_fake_cluster::kubelet::Plugin;
use k8s_openapi::api::resource::v1::ResourceClaim;
use rustix::process::Signal;
use tokio_util::sync::CancellationToken;

use crate::binary::{Process, mock_state};
use crate::node::{Node, PATIENCE, device, wait};

fn uid_of(update: u64) -> String {
    format!("{update:08x}-1111-4111-8111-111111111111")
}

/// Starts an instance and waits until the kubelet knows it and it alone would be called.
async fn start(node: &Node, kubeconfig: &str, update: u64) -> Process {
    let uid = uid_of(update);
    let more = [
        ("POD_UID", uid.as_str()),
        ("OFFER", "everything"),
        ("LOG_LEVEL", "error"),
    ];
    let process = Process::start_with(node, kubeconfig, &more);
    let newest = |plugins: &[Plugin]| {
        plugins
            .last()
            .filter(|plugin| plugin.connected && plugin.endpoint.contains(&uid))
            .map(drop)
    };
    node.kubelet.wait_for(newest, PATIENCE).await.unwrap();
    process
}

/// Claims on one GPU, one after another, each prepared and let go; how many, and at how many of
/// them another instance let go than had prepared. Any failure ends the test.
async fn stream(node: &Node, devices: [&str; 2], over: &CancellationToken) -> (u64, u64) {
    let newest = || {
        node.kubelet
            .plugins()
            .last()
            .map(|plugin| plugin.endpoint.clone())
    };
    let (mut lived, mut crossed) = (0, 0);
    while !over.is_cancelled() {
        let [first, second] = devices;
        let name = if lived % 2 == 0 { first } else { second };
        let claim = node.claim(&format!("{name}-{lived}"), &[name]);
        let by = newest();
        assert_eq!(
            node.prepare(&claim).await,
            Ok(vec![device(&claim, "gpu", name)]),
            "claim {lived} on {name}"
        );
        // As long as a short pod runs.
        tokio::time::sleep(Duration::from_millis(20)).await;
        crossed += u64::from(newest() != by);
        assert_eq!(
            node.unprepare(&claim).await,
            Ok(()),
            "claim {lived} on {name}"
        );
        node.api
            .delete::<ResourceClaim>("default", &claim.name)
            .unwrap();
        lived += 1;
    }
    (lived, crossed)
}

/// Rolling updates under a stream of claims fail none and leave what is published alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_updates_under_a_stream_of_claims_fail_none() {
    let updates = std::env::var("DIVVY_UPDATES")
        .ok()
        .and_then(|n| n.parse().ok())
        .unwrap_or(5);
    let node = Node::new("h100x2");
    let state = nvidia_ml::MockState::open_or_create(mock_state(&node), &"h100x2".parse().unwrap())
        .unwrap();
    let server = node.api.serve_http().await.unwrap();
    let kubeconfig = server.kubeconfig();
    let mut old = start(&node, &kubeconfig, 0).await;
    // The last slice to come.
    wait("all slices", || {
        node.published()
            .iter()
            .any(|(name, _)| name == "gpu-1-admin")
            .then_some(())
    })
    .await;
    let published = node.published();
    // Held over all updates: prepared by the first, let go by the last.
    let kept = node.claim("kept", &["gpu-1-mig-1g10gb-19-6"]);
    let answer = node.prepare(&kept).await;
    assert_eq!(
        answer,
        Ok(vec![device(&kept, "gpu", "gpu-1-mig-1g10gb-19-6")])
    );

    let over = CancellationToken::new();
    let update = async {
        for update in 1..=updates {
            let new = start(&node, &kubeconfig, update).await;
            // Two serve for a while.
            tokio::time::sleep(Duration::from_millis(300)).await;
            old.signal(Signal::TERM);
            assert!(old.end().await.success(), "update {update}");
            old = new;
            assert_eq!(
                node.prepare(&kept).await,
                answer,
                "the same answer of every instance"
            );
        }
        over.cancel();
        old
    };
    let (mut last, whole, parts) = tokio::join!(
        update,
        stream(&node, ["gpu-0", "gpu-0-mig-2g20gb-14-0"], &over),
        stream(
            &node,
            ["gpu-1-mig-1g10gb-19-0", "gpu-1-mig-3g40gb-9-0"],
            &over
        ),
    );
    assert_eq!(node.unprepare(&kept).await, Ok(()));
    let instances: usize = state
        .read()
        .unwrap()
        .gpus()
        .iter()
        .map(|gpu| gpu.instances.len())
        .sum();
    let sockets = node.kubelet.config().registry_dir();
    let sockets: Vec<_> = fs_err::read_dir(sockets)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(
        (node.records(), node.cdi_files().len(), instances),
        (vec![], 0, 0)
    );
    assert_eq!(sockets.len(), 1, "one instance, one socket: {sockets:?}");
    // Who publishes may have looked while the other instance let go; it looks again by itself.
    wait("what was published at first", || {
        (node.published() == published).then_some(())
    })
    .await;
    assert_eq!(node.api.count("delete", "resourceslices"), 0);
    last.signal(Signal::TERM);
    assert!(last.end().await.success());
    let (lived, crossed) = (whole.0 + parts.0, whole.1 + parts.1);
    assert!(whole.0 > 0 && parts.0 > 0, "{lived} claims");
    eprintln!(
        "{updates} updates under {lived} claims, {crossed} of them let go by a newer instance; none failed"
    );
}
