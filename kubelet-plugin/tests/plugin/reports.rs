//! Events, conditions, metrics and the debug page.

use divvy_fake_cluster::FakeApi;
use divvy_gpu_sim::Fault;
use divvy_model::health::{GpuEventKind, RecoveryAction};
use divvy_model::{GpuErrorCode, GpuOp};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::node::{DRIVER, Node, device, wait};
use crate::usage::{idle_after, share};

/// Status, reason and message of our condition on a claim.
fn condition(api: &FakeApi, claim: &str) -> Option<(String, String, String)> {
    let claim = api.get::<ResourceClaim>("default", claim)?;
    let device = claim
        .status?
        .devices?
        .into_iter()
        .find(|d| d.driver == DRIVER)?;
    let condition = device
        .conditions?
        .into_iter()
        .find(|c| c.type_ == "Prepared")?;
    Some((condition.status, condition.reason, condition.message))
}

/// A claim that can never be served shows it in an event and a condition until it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_can_never_be_served_has_an_event_and_a_condition() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let first = node.claim("first", &["gpu-0"]);
    node.prepare(&first).await.unwrap();
    // As a scheduler with a fault would: the same GPU twice.
    let second = node.claim("second", &["gpu-0"]);
    let message = node.prepare(&second).await.unwrap_err();
    assert_eq!(
        message,
        format!(
            "device gpu-0 ({}) of claim default/second (UID {}): it is held by claim default/first (UID {}), which is in use with device gpu-0 (the scheduler allocated one GPU to both claims: delete one of them and its pod)",
            node.sim.uuids()[0],
            second.uid,
            first.uid
        )
    );
    let refused = ("False".to_owned(), "Conflict".to_owned(), message.clone());
    wait("the condition", || {
        (condition(&node.api, "second") == Some(refused.clone())).then_some(())
    })
    .await;
    let event = wait("the Event", || node.api.list::<Event>().into_iter().next()).await;
    let about = event.regarding.unwrap();
    assert_eq!(
        (about.kind.as_deref(), about.name.as_deref()),
        (Some("ResourceClaim"), Some("second"))
    );
    assert_eq!(about.uid.as_deref(), Some(second.uid.as_str()));
    assert_eq!(
        (event.reason.as_deref(), event.note.as_deref()),
        (Some("Conflict"), Some(message.as_str()))
    );

    // The kubelet asks again: nothing new to say in the claim.
    let patches = || node.api.count("patch", "resourceclaims/status");
    let before = patches();
    node.prepare(&second).await.unwrap_err();
    node.unprepare(&first).await.unwrap();
    assert_eq!(
        node.prepare(&second).await,
        Ok(vec![device(&second, "gpu", "gpu-0")])
    );
    let cured = (
        "True".to_owned(),
        "Prepared".to_owned(),
        "devices are prepared".to_owned(),
    );
    wait("the cure", || {
        (condition(&node.api, "second") == Some(cured.clone())).then_some(())
    })
    .await;
    assert_eq!(patches(), before + 1);
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_prepared_after_all_does_not_stay_refused() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let first = node.claim("first", &["gpu-0"]);
    node.prepare(&first).await.unwrap();
    let second = node.claim("second", &["gpu-0"]);
    node.prepare(&second).await.unwrap_err();
    let says =
        |status: &str| condition(&node.api, "second").is_some_and(|(said, ..)| said == status);
    wait("the refusal", || says("False").then_some(())).await;
    node.unprepare(&first).await.unwrap();
    node.api
        .delete::<ResourceClaim>("default", "first")
        .unwrap();
    // Reporting was not possible, as when the plugin is killed right after its answer.
    let before = node.api.count("patch", "resourceclaims/status");
    node.api.fail_next(
        10_000,
        "patch",
        "resourceclaims/status",
        divvy_fake_cluster::Fault::Status(503),
    );
    node.prepare(&second).await.unwrap();
    wait("the attempt", || {
        (node.api.count("patch", "resourceclaims/status") > before).then_some(())
    })
    .await;
    plugin.stop().await;
    assert!(says("False"));
    node.api.clear_faults();

    let plugin = node.start().await;
    wait("the cure", || says("True").then_some(())).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn trouble_with_a_second_gpu_is_no_repetition_of_that_with_the_first() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    for uuid in node.sim.uuids() {
        node.sim.fault(
            Fault::fail(GpuErrorCode::UNKNOWN)
                .of(GpuOp::Facts)
                .on(&uuid),
        );
        wait("its Event", || {
            let events = node.api.list::<Event>().into_iter();
            let mut notes = events
                .filter(|e| e.reason.as_deref() == Some("GpuUnreadable"))
                .filter_map(|e| e.note);
            notes.any(|note| note.contains(uuid.as_str())).then_some(())
        })
        .await;
    }
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_released_claim_with_processes_keeps_its_gpu_tainted() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let uuid = node.sim.uuids()[0].clone();
    node.sim.start_process(&uuid, 4711);
    assert_eq!(
        node.unprepare(&claim).await,
        Ok(()),
        "an error would keep the pod terminating"
    );
    let tainted = vec![(
        "gpu-0".to_owned(),
        vec!["gpu.divvy.dev/lingering".to_owned()],
    )];
    wait("the taint", || (node.published() == tainted).then_some(())).await;
    let event = wait("the Event", || node.api.list::<Event>().into_iter().next()).await;
    assert_eq!(
        event.note.unwrap(),
        format!(
            "the devices of claim default/c (UID {}) stay held after its release: process 4711 still uses {uuid} (they are free as soon as this ends)",
            claim.uid
        )
    );
    node.sim.end_process(4711);
    wait("the end", || node.records().is_empty().then_some(())).await;
    wait("the taint's end", || {
        (node.published() == crate::node::plain(&["gpu-0"])).then_some(())
    })
    .await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lingering_gpu_is_free_soon_after_its_last_process() {
    let node = Node::new("h100x1");
    // Only the unprepare itself can trigger a check.
    let plugin = node.start_with(node.seldom());
    plugin.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let uuid = node.sim.uuids()[0].clone();
    node.sim.start_process(&uuid, 4711);
    assert_eq!(node.unprepare(&claim).await, Ok(()));
    assert_eq!(node.records(), [format!("{}.json", claim.uid)]);
    node.sim.end_process(4711);
    wait("the end", || node.records().is_empty().then_some(())).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_takes_no_events_fails_no_prepare() {
    let node = Node::new("h100x1");
    let plugin = node.start().await;
    let first = node.claim("first", &["gpu-0"]);
    node.prepare(&first).await.unwrap();
    let second = node.claim("second", &["gpu-0"]);
    let held = (
        node.api.hold("create", "events"),
        node.api.hold("patch", "resourceclaims/status"),
    );
    node.prepare(&second).await.unwrap_err();
    node.unprepare(&first).await.unwrap();
    node.prepare(&second).await.unwrap();
    drop(held);
    plugin.stop().await;
}

/// Names of metrics that nothing has moved from zero.
fn unmoved(text: &str) -> Vec<&str> {
    let names = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
    names
        .filter(|name| {
            let moved = |line: &&str| {
                line.starts_with(name)
                    && line
                        .rsplit(' ')
                        .next()
                        .is_some_and(|v| v.parse() != Ok(0.0))
            };
            !text.lines().any(|line| moved(&line))
        })
        .collect()
}

/// `docs/metrics.md` has these metrics and no others.
fn assert_documented(text: &str) {
    let mut shown: Vec<String> = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE "))
        .map(|line| match line.split_once(' ') {
            Some((name, "counter")) => format!("{name}_total"),
            Some((name, _)) => name.to_owned(),
            None => line.to_owned(),
        })
        .collect();
    shown.sort();
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/metrics.md");
    let page = fs_err::read_to_string(path).unwrap();
    // A test of the cluster controller reads the section about its metrics.
    let (plugin, rest) = page
        .split_once("\n## The cluster controller's metrics\n")
        .unwrap();
    let (_, rest) = rest.split_once("\n## ").unwrap();
    let mut documented: Vec<String> = plugin
        .lines()
        .chain(rest.lines())
        .filter_map(|line| {
            line.strip_prefix("| `")?
                .split('`')
                .next()
                .map(str::to_owned)
        })
        .collect();
    documented.sort();
    assert_eq!(shown, documented);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_metric_moves_in_the_life_of_a_plugin_and_is_documented() {
    let node = Node::new("h100x4");
    for (name, spec) in [
        ("good", serde_json::json!({})),
        ("bad", serde_json::json!({ "prio": 1 })),
    ] {
        node.api
            .put(&divvy_fake_cluster::GpuPolicy::new(name, spec))
            .unwrap();
    }
    // A fence, from a claim of a later version.
    let newer = node.claim("newer", &["gpu-1"]);
    let plugin = node.start().await;
    node.prepare(&newer).await.unwrap();
    let plugin_dir = plugin.config.plugin_dir.clone();
    plugin.stop().await;
    crate::records::make_newer(&crate::records::record(&node, &newer.uid));
    fs_err::write(plugin_dir.join("node/ordinals.json"), b"").unwrap();
    // Memory is capped, and the runtime of the share below calls no hook.
    let able = crate::limits::able(&node, &crate::usage::pod_uid(1));
    let flags = ["--offer", "everything", "--mode-lock", "off"];
    let flags = flags.into_iter().chain(able.iter().map(String::as_str));
    let mut config = node.config(&flags.collect::<Vec<_>>());
    config.timing.caps = std::time::Duration::from_millis(50);
    let plugin = node.start_with(idle_after(config, std::time::Duration::from_millis(100)));
    plugin.wait_ready().await;
    // A share that uses more than it was granted; the claims below use nothing.
    share(&node, 2, 1).await;
    let used = node.sim.uuids()[2].clone();
    node.sim.set_usage(&used, 1, Some(5 << 30), 50);
    node.sim
        .edit(|e| e.gpu(&used).unwrap().usage.reserved_bytes = 1);
    node.sim
        .edit(|e| e.gpu(&used).unwrap().usage.other_bytes = 1);
    wait("overuse", || {
        plugin
            .metrics
            .encode()
            .contains("divvy_overuse_total 1")
            .then_some(())
    })
    .await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    node.prepare(&node.claim("conflict", &["gpu-0"]))
        .await
        .unwrap_err();
    node.prepare(&node.claim("gone", &["gpu-3"])).await.unwrap();
    let gone = node.sim.uuids().remove(3);
    node.sim.remove_gpu(&gone).unwrap();
    let gpu = node.sim.uuids()[1].clone();
    node.sim
        .edit(|e| e.set_recovery(&gpu, Some(RecoveryAction::Reset)))
        .unwrap();
    node.sim.send_event(&gpu, GpuEventKind::Xid(79), None);
    // From the next wait on.
    let deaf = Fault::fail(GpuErrorCode::NOT_SUPPORTED).of(GpuOp::Events);
    wait("the Xid", || {
        plugin
            .metrics
            .encode()
            .contains("divvy_gpu_xids_total{")
            .then_some(())
    })
    .await;
    node.sim.fault(deaf);
    for file in node.cdi_files().keys() {
        fs_err::remove_file(node.cdi_dir().join(file)).unwrap();
    }
    let held = node.api.hold("get", "resourceclaims");
    let running = node.prepare(&claim);
    let look = async {
        wait("every metric", || {
            let text = plugin.metrics.encode();
            // These move in `usage.rs`, after a restart, and in `mps.rs`, where its alert fires.
            let elsewhere = [
                "divvy_gpu_gib_seconds_granted",
                "divvy_gpu_gib_seconds_used",
                "divvy_gpu_seconds_blocked",
                "divvy_gpu_seconds_granted",
                "divvy_gpu_seconds_used",
                "divvy_mps_servers_wedged",
            ];
            let is_known = |name: &&str| elsewhere.contains(name);
            unmoved(&text).iter().all(is_known).then_some(())
        })
        .await;
        assert_documented(&plugin.metrics.encode());
        drop(held);
    };
    let (answer, ()) = tokio::join!(running, look);
    answer.unwrap();
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_debug_page_shows_claims_and_pool_and_readyz_says_ok() {
    let node = Node::new("h100x1");
    // A free port: bound and released, and tried again if another process was faster.
    let (plugin, address) = loop {
        let free = std::net::TcpListener::bind("127.0.0.1:0")
            .unwrap()
            .local_addr()
            .unwrap();
        let plugin = node.start_with(node.config(&["--http", &free.to_string()]));
        let up = || plugin.readiness.missing().is_empty() || plugin.has_ended();
        wait("readiness", || up().then_some(())).await;
        if !plugin.has_ended() {
            break (plugin, free);
        }
    };
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let get = async |path: &str| {
        let mut stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer.split_once("\r\n\r\n").unwrap().1.to_owned()
    };
    assert_eq!(get("/readyz").await, "ok\n");
    let state: serde_json::Value = serde_json::from_str(&get("/debug/state").await).unwrap();
    assert_eq!(state["registered"], true);
    assert_eq!(state["pool"]["inSync"], true);
    assert_eq!(
        state["executor"]["claims"][&claim.uid]["claim"]["name"], "c",
        "{state:#}"
    );
    plugin.stop().await;
}
