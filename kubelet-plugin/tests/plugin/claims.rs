//! Preparing and unpreparing claims that are as they should be.

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result};
use divvy_fake_cluster::{KubeletConfig, View};
use futures::future::join_all;

use crate::node::{DRIVER, Node, POOL, Plugin, device};

/// A whole GPU is prepared with a self contained CDI file and let go without a trace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_whole_gpu_is_prepared_self_contained_and_leaves_no_trace() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-1"]);
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-1")])
    );
    assert_eq!(node.records(), [format!("{}.json", claim.uid)]);
    let files = node.cdi_files();
    let file = &files[&format!("{DRIVER}-claim_{}.json", claim.uid)];
    assert_eq!(file["kind"], format!("{DRIVER}/claim"));
    let common = &file["containerEdits"];
    assert!(
        common["env"]
            .as_array()
            .unwrap()
            .contains(&"NVIDIA_VISIBLE_DEVICES=void".into()),
        "{common:#}"
    );
    assert!(
        common["mounts"]
            .to_string()
            .contains("libcuda.so.580.95.05"),
        "{common:#}"
    );
    assert_eq!(file["devices"][0]["name"], format!("{}-gpu-1", claim.uid));
    let edits = &file["devices"][0]["containerEdits"];
    assert_eq!(edits["deviceNodes"][0]["path"], "/dev/nvidia1");
    assert_eq!(edits["deviceNodes"][0]["major"], 195);

    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-1")]),
        "again: the same answer"
    );
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    assert_eq!((node.records(), node.cdi_files().len()), (vec![], 0));
    assert_eq!(
        node.unprepare(&claim).await,
        Ok(()),
        "unprepare of unknown is success"
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_gpus_of_one_request_and_separate_requests_are_distinguished() {
    let node = Node::new("h100x4");
    let plugin = node.start().await;
    let both = node.claim("both", &["gpu-3", "gpu-2"]);
    assert_eq!(
        node.prepare(&both).await,
        Ok(vec![
            device(&both, "gpu", "gpu-3"),
            device(&both, "gpu", "gpu-2")
        ])
    );
    let results = vec![
        mk_result("big/a100", DRIVER, POOL, "gpu-0"),
        mk_result("small", DRIVER, POOL, "gpu-1"),
    ];
    let named = node.put(allocated(mk_claim("default", "named", DRIVER, 1), results));
    assert_eq!(
        node.prepare(&named).await,
        Ok(vec![
            device(&named, "big", "gpu-0"),
            device(&named, "small", "gpu-1")
        ]),
        "subrequests are known by the base name"
    );
    plugin.stop().await;
}

/// Returns how often the plugin has compared records with the API.
pub(crate) fn rounds(plugin: &Plugin) -> Option<u64> {
    let text = plugin.metrics.encode();
    text.lines()
        .find_map(|line| line.strip_prefix("divvy_reconciles_total "))?
        .parse()
        .ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_pods_of_a_claim_get_one_answer_and_each_reads_it_once() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("shared", &["gpu-0"]);
    let before = node.api.count("get", "resourceclaims");
    let rounds_before = rounds(&plugin).unwrap();
    let held = node.api.hold("get", "resourceclaims");
    let (first, second) = (node.prepare(&claim), node.prepare(&claim));
    let release = async {
        node.api
            .wait_until(
                |api| api.count("get", "resourceclaims") > before,
                crate::node::PATIENCE,
            )
            .await
            .unwrap();
        drop(held);
    };
    let (first, second, ()) = tokio::join!(first, second, release);
    assert_eq!(first, Ok(vec![device(&claim, "gpu", "gpu-0")]));
    assert_eq!(first, second);
    // One that comes after the claim was read may be about a later allocation: it reads for itself.
    // A round of the reconciler reads it too, also one that was under way.
    let reads = node.api.count("get", "resourceclaims") - before;
    let most = 3 + rounds(&plugin).unwrap() - rounds_before;
    assert!((1..=most).contains(&reads), "{reads} of {most}");
    assert_eq!(node.records().len(), 1);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_calls_at_once_each_get_their_gpu_and_one_call_with_all_lets_go() {
    let node = Node::new("h100x16");
    let plugin = node.start().await;
    let claims: Vec<_> = (0..16)
        .map(|n| node.claim(&format!("c{n}"), &[&format!("gpu-{n}")]))
        .collect();
    let answers = join_all(claims.iter().map(|claim| node.prepare(claim))).await;
    for (n, (claim, answer)) in claims.iter().zip(answers).enumerate() {
        assert_eq!(answer, Ok(vec![device(claim, "gpu", &format!("gpu-{n}"))]));
    }
    assert_eq!(node.records().len(), 16);
    let answers = node.kubelet.unprepare(DRIVER, &claims).await.unwrap();
    assert!(answers.values().all(Result::is_ok), "{answers:?}");
    assert_eq!((node.records().len(), node.cdi_files().len()), (0, 0));
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admin_access_to_a_gpu_in_use_disturbs_no_claim_and_blocks_none() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let admin = |name: &str| {
        let mut result = mk_result("gpu", DRIVER, POOL, "gpu-0");
        result.admin_access = Some(true);
        node.put(allocated(
            mk_claim("default", name, DRIVER, 1),
            vec![result],
        ))
    };
    let before = admin("before");
    assert_eq!(
        node.prepare(&before).await,
        Ok(vec![device(&before, "gpu", "gpu-0")])
    );
    let user = node.claim("user", &["gpu-0"]);
    assert_eq!(
        node.prepare(&user).await,
        Ok(vec![device(&user, "gpu", "gpu-0")])
    );
    let after = admin("after");
    assert_eq!(
        node.prepare(&after).await,
        Ok(vec![device(&after, "gpu", "gpu-0")])
    );
    for claim in [&before, &user, &after] {
        assert_eq!(node.unprepare(claim).await, Ok(()));
    }
    assert_eq!(node.records(), Vec::<String>::new());
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unprepare_that_meets_a_waiting_prepare_ends_it_and_nothing_is_left() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    let before = node.api.count("get", "resourceclaims");
    let held = node.api.hold("get", "resourceclaims");
    let prepare = node.prepare(&claim);
    let unprepare = async {
        node.api
            .wait_until(
                |api| api.count("get", "resourceclaims") > before,
                crate::node::PATIENCE,
            )
            .await
            .unwrap();
        node.unprepare(&claim).await
    };
    let (prepared, unprepared) = tokio::join!(prepare, unprepare);
    assert_eq!(
        prepared.unwrap_err(),
        format!(
            "prepare of claim default/c (UID {}) was cancelled because the claim is being unprepared",
            claim.uid
        )
    );
    assert_eq!(unprepared, Ok(()));
    drop(held);
    assert_eq!((node.records().len(), node.cdi_files().len()), (0, 0));
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_next_claim_waits_inside_its_call_for_the_one_that_is_leaving() {
    let node = Node::new("h100x1");
    let plugin = node.start_patient(&[]).await;
    let first = node.claim("first", &["gpu-0"]);
    node.prepare(&first).await.unwrap();
    // Force-deleted: the API has let go, the kubelet has not asked yet.
    node.api
        .delete::<k8s_openapi::api::resource::v1::ResourceClaim>("default", "first")
        .unwrap();
    let second = node.claim("second", &["gpu-0"]);
    let begun = std::time::Instant::now();
    let leave = async {
        tokio::time::sleep(std::time::Duration::from_millis(300)).await;
        node.unprepare(&first).await
    };
    let (answer, left) = tokio::join!(node.prepare(&second), leave);
    assert_eq!(answer, Ok(vec![device(&second, "gpu", "gpu-0")]));
    assert_eq!(left, Ok(()));
    assert!(begun.elapsed() >= std::time::Duration::from_millis(300));
    assert_eq!(node.records(), [format!("{}.json", second.uid)]);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_allocated_anew_gets_its_new_device_and_lets_the_old_go() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    node.api
        .modify::<k8s_openapi::api::resource::v1::ResourceClaim>("default", "c", |c| {
            let allocation = c.status.as_mut().unwrap().allocation.as_mut().unwrap();
            allocation
                .devices
                .as_mut()
                .unwrap()
                .results
                .as_mut()
                .unwrap()[0]
                .device = "gpu-1".into();
        })
        .unwrap();
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-1")])
    );
    let other = node.claim("other", &["gpu-0"]);
    assert_eq!(
        node.prepare(&other).await,
        Ok(vec![device(&other, "gpu", "gpu-0")])
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kubelet_that_gives_up_on_a_call_finds_its_work_done() {
    let node = Node::with("h100x1", |config| KubeletConfig {
        deadline: std::time::Duration::from_millis(200),
        ..config
    });
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    let held = node.api.hold("get", "resourceclaims");
    let gave_up = node
        .kubelet
        .prepare(DRIVER, std::slice::from_ref(&claim))
        .await
        .unwrap_err();
    assert!(
        gave_up.to_string().contains("did not answer within"),
        "{gave_up}"
    );
    drop(held);
    crate::node::wait("the record", || (node.records().len() == 1).then_some(())).await;
    plugin.stop().await;
    assert_eq!(node.cdi_files().len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_reads_eight_claims_at_once_and_writes_nothing_to_the_api() {
    let node = Node::new("h100x16");
    let mut config = node.config(&[]);
    // The GpuNode is written once, before; what was said of the use of claims is read with the
    // first look at it.
    config.timing.gpu_node = std::time::Duration::from_hours(1);
    config.timing.usage = std::time::Duration::from_hours(1);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    node.wait_calm().await;
    node.api.forget_requests();
    let claims: Vec<_> = (0..16)
        .map(|n| node.claim(&format!("c{n}"), &[&format!("gpu-{n}")]))
        .collect();
    let held = node.api.hold("get", "resourceclaims");
    let reads = || node.api.count("get", "resourceclaims");
    let calls = join_all(claims.iter().map(|claim| node.prepare(claim)));
    let look = async {
        crate::node::wait("eight reads", || (reads() == 8).then_some(())).await;
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        assert_eq!(reads(), 8);
        drop(held);
    };
    let (answers, ()) = tokio::join!(calls, look);
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    assert_eq!(reads(), 16);
    node.kubelet.unprepare(DRIVER, &claims).await.unwrap();
    for verb in ["create", "update", "patch", "delete", "list"] {
        assert_eq!(node.api.count(verb, "*"), 0, "{verb}");
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prepare_does_not_wait_for_the_claims_looked_up_at_the_start() {
    let node = Node::new("h100x16");
    let plugin = node.start().await;
    let claims: Vec<_> = (0..15)
        .map(|n| node.claim(&format!("c{n}"), &[&format!("gpu-{n}")]))
        .collect();
    let answers = join_all(claims.iter().map(|claim| node.prepare(claim))).await;
    assert!(answers.iter().all(Result::is_ok), "{answers:?}");
    plugin.stop().await;
    // An API server that is slow.
    let held = node.api.hold("get", "resourceclaims");
    node.api.forget_requests();
    let plugin = node.start_with(node.config(&[]));
    let reads = || node.api.count("get", "resourceclaims");
    crate::node::wait("its reads", || (reads() >= 4).then_some(())).await;
    node.kubelet
        .wait_registered(DRIVER, crate::node::PATIENCE)
        .await
        .unwrap();
    let late = node.claim("late", &["gpu-15"]);
    let look = async {
        let is_read = |api: &View<'_>| {
            api.requests()
                .iter()
                .any(|seen| seen.verb == "get" && seen.name == late.name)
        };
        node.api
            .wait_until(is_read, crate::node::PATIENCE)
            .await
            .unwrap();
        drop(held);
    };
    let (answer, ()) = tokio::join!(node.prepare(&late), look);
    assert_eq!(answer, Ok(vec![device(&late, "gpu", "gpu-15")]));
    plugin.wait_ready().await;
    plugin.stop().await;
}
