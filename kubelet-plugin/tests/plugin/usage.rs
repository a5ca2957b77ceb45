//! Use of GPUs by claims: what a plugin shows of scripted use, when it reports, and what it asks of
//! the driver.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use divvy_fake_cluster::build::{allocated, mk_claim, mk_result, reserved};
use divvy_fake_cluster::{ClaimRef, Fault as ApiFault, GpuPolicy};
use divvy_gpu_sim::Fault;
use divvy_kubelet_plugin::Config;
use divvy_model::{GpuErrorCode, GpuOp, GpuUuid};
use divvy_nvml::{Session, SessionConfig};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::ResourceClaim;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use serde_json::json;

use crate::node::{DRIVER, Node, POOL, Plugin, wait};

pub(crate) const GIB: u64 = 1 << 30;

pub(crate) fn pod_uid(pod: u32) -> String {
    format!("0b5a4a3e-9b1f-4a8e-b3f1-{pod:012}")
}

/// A share of 4 GiB of a GPU, of a pod with a process of the same number on it.
pub(crate) async fn share(node: &Node, gpu: usize, pod: u32) -> ClaimRef {
    let mut result = mk_result("gpu", DRIVER, POOL, &format!("gpu-{gpu}-ts"));
    let granted = [("memory", "4Gi"), ("cores", "25"), ("slots", "1")];
    let granted = granted.map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned())));
    result.share_id = Some(format!("s-{pod}"));
    result.consumed_capacity = Some(BTreeMap::from(granted));
    let claim = allocated(
        mk_claim("default", &format!("c{pod}"), DRIVER, 1),
        vec![result],
    );
    let claim = reserved(claim, &format!("pod-{pod}"), &pod_uid(pod));
    let stored = node.api.put(&claim).unwrap();
    let claim = ClaimRef::new("default", &format!("c{pod}"), &stored.metadata.uid.unwrap());
    node.prepare(&claim).await.unwrap();
    node.sim
        .start_process(&node.sim.uuids().swap_remove(gpu), pod);
    belongs(node, pod, pod);
    claim
}

/// A process is of a pod.
pub(crate) fn belongs(node: &Node, pid: u32, pod: u32) {
    let folder = node.dir.path().join(format!("host/proc/{pid}"));
    fs_err::create_dir_all(&folder).unwrap();
    fs_err::write(
        folder.join("cgroup"),
        format!("0::/kubepods/pod{}/4f1c", pod_uid(pod)),
    )
    .unwrap();
}

/// The value of the series of a metric that has all of these labels.
pub(crate) fn value(plugin: &Plugin, name: &str, labels: &[&str]) -> Option<f64> {
    let text = plugin.metrics.encode();
    let fits = |line: &&str| {
        line.strip_prefix(name)
            .is_some_and(|rest| rest.starts_with(['{', ' ']))
            && labels.iter().all(|label| line.contains(label))
    };
    text.lines().find(fits)?.rsplit(' ').next()?.parse().ok()
}

pub(crate) async fn shows(plugin: &Plugin, name: &str, labels: &[&str], expected: f64) {
    let what = format!("{name} {labels:?} of {expected}");
    let is = || value(plugin, name, labels).is_some_and(|found| (found - expected).abs() < 1e-6);
    wait(&what, || is().then_some(())).await;
}

fn condition(node: &Node, claim: &ClaimRef, kind: &str) -> Option<Condition> {
    let object: ResourceClaim = node.api.get("default", &claim.name)?;
    let entry = object.status?.devices?.into_iter().next()?;
    entry
        .conditions?
        .into_iter()
        .find(|condition| condition.type_ == kind)
}

pub(crate) fn events(node: &Node, reason: &str) -> Vec<String> {
    let all = node.api.list::<Event>().into_iter();
    let found = all.filter(|event| event.reason.as_deref() == Some(reason));
    let mut about: Vec<_> = found
        .filter_map(|event| event.regarding.as_ref()?.kind.clone())
        .collect();
    about.sort();
    about
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn use_is_shown_for_each_claim_and_pod_and_what_is_not_known_is_not_shown() {
    let node = Node::new("l4x2");
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    let gpu = node.sim.uuids()[0].clone();
    for pod in [1, 2, 3] {
        share(&node, 0, pod).await;
    }
    node.sim
        .edit(|e| e.gpu(&gpu).unwrap().usage.other_bytes = GIB);
    node.sim
        .edit(|e| e.gpu(&gpu).unwrap().usage.reserved_bytes = 2 * GIB);
    node.sim.set_usage(&gpu, 1, Some(3 * GIB), 50);
    node.sim.set_usage(&gpu, 2, Some(GIB), 0);
    node.sim.set_usage(&gpu, 3, None, 10);
    let of = |pod: u32| {
        [
            format!("pod=\"pod-{pod}\""),
            format!("claim=\"c{pod}\""),
            "device=\"gpu-0-ts\"".to_owned(),
        ]
    };
    for (pod, gib, ratio) in [(1, 3.0, 0.5), (2, 1.0, 0.0)] {
        let labels = of(pod);
        let labels: Vec<&str> = labels.iter().map(String::as_str).collect();
        shows(
            &plugin,
            "divvy_claim_memory_used_bytes",
            &labels,
            gib * f64::from(1 << 30),
        )
        .await;
        shows(
            &plugin,
            "divvy_claim_memory_granted_bytes",
            &labels,
            4.0 * f64::from(1 << 30),
        )
        .await;
        let by_process = [&labels[..], &["source=\"process\"", gpu.as_str()]].concat();
        shows(&plugin, "divvy_claim_utilization_ratio", &by_process, ratio).await;
        shows(&plugin, "divvy_claim_overuse", &labels, 0.0).await;
    }
    // Half of the GPU, of a quarter granted; the mean begins with what was before.
    wait("the mean of the pod", || {
        value(
            &plugin,
            "divvy_pod_gpu_utilization_ratio",
            &["namespace=\"default\"", "pod=\"pod-1\""],
        )
        .filter(|ratio| *ratio > 1.5)
    })
    .await;
    wait("the end of what is not known", || {
        value(&plugin, "divvy_claim_memory_used_bytes", &["claim=\"c3\""])
            .is_none()
            .then_some(())
    })
    .await;
    shows(
        &plugin,
        "divvy_claim_utilization_ratio",
        &["claim=\"c3\""],
        0.1,
    )
    .await;
    let of_gpu = [gpu.as_str(), "device=\"gpu-0\""];
    shows(
        &plugin,
        "divvy_gpu_memory_used_bytes",
        &of_gpu,
        5.0 * f64::from(1 << 30),
    )
    .await;
    shows(
        &plugin,
        "divvy_gpu_memory_reserved_bytes",
        &of_gpu,
        2.0 * f64::from(1 << 30),
    )
    .await;
    assert_eq!(
        value(&plugin, "divvy_gpu_memory_unattributed_bytes", &of_gpu),
        None
    );
    node.sim.set_usage(&gpu, 3, Some(0), 0);
    shows(
        &plugin,
        "divvy_gpu_memory_unattributed_bytes",
        &of_gpu,
        f64::from(1 << 30),
    )
    .await;
    assert!(value(&plugin, "divvy_usage_age_seconds", &of_gpu).unwrap() < 30.0);
    assert_eq!(
        value(&plugin, "divvy_usage_age_seconds", &["device=\"gpu-1\""]),
        None,
        "no claim holds it"
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_asked_while_nothing_is_held_or_it_is_turned_off() {
    let node = Node::new("h100x2");
    let polls = async || {
        let before = node.sim.calls(GpuOp::Vitals);
        wait("polls of the GPUs' health", || {
            (node.sim.calls(GpuOp::Vitals) > before + 20).then_some(())
        })
        .await;
    };
    let plugin = node.start_with(node.config(&["--usage", "false"]));
    plugin.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    polls().await;
    assert_eq!(asked(&node, &plugin), (0, BTreeMap::new()), "it is off");
    node.unprepare(&claim).await.unwrap();
    plugin.stop().await;

    let mut config = node.config(&[]);
    // Many rounds for each poll of the health.
    config.timing.usage = Duration::from_millis(10);
    config.timing.usage_lists = Duration::from_millis(10);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    polls().await;
    assert_eq!(
        asked(&node, &plugin),
        (0, BTreeMap::new()),
        "nothing was ever held"
    );
    node.prepare(&claim).await.unwrap();
    let calls = ["memory", "processes", "sm_utilization"];
    let all_begun = || {
        let (_, timed) = asked(&node, &plugin);
        calls
            .iter()
            .all(|call| timed.get(*call).is_some_and(|count| *count > 10))
            .then_some(())
    };
    wait("use being read", all_begun).await;
    node.unprepare(&claim).await.unwrap();
    // It ends with the round in which the claim is gone, and so have the readings of that round.
    wait("the end of the series", || {
        value(&plugin, "divvy_gpu_memory_used_bytes", &[])
            .is_none()
            .then_some(())
    })
    .await;
    let after = asked(&node, &plugin);
    polls().await;
    assert_eq!(
        asked(&node, &plugin),
        after,
        "no claim holds anything any more"
    );
    plugin.stop().await;
}

/// Returns the driver's own count of calls that only the reader of use makes, and the plugin's
/// count of what that reader has asked: others list processes too.
fn asked(node: &Node, plugin: &Plugin) -> (u64, BTreeMap<String, u64>) {
    const OPS: [GpuOp; 4] = [
        GpuOp::Memory,
        GpuOp::Utilization,
        GpuOp::ProcessUtilization,
        GpuOp::SmUtilization,
    ];
    let text = plugin.metrics.encode();
    let mut timed = BTreeMap::new();
    for line in text
        .lines()
        .filter_map(|line| line.strip_prefix("divvy_usage_read_seconds_count{"))
    {
        let call = line
            .split("call=\"")
            .nth(1)
            .and_then(|rest| rest.split('"').next())
            .unwrap();
        let count: u64 = line.rsplit(' ').next().unwrap().parse().unwrap();
        *timed.entry(call.to_owned()).or_insert(0) += count;
    }
    timed.retain(|_, count| *count > 0);
    (OPS.map(|op| node.sim.calls(op)).iter().sum(), timed)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_is_held_has_its_processes_listed_by_one_reader() {
    let node = Node::new("h100x1");
    let mut config = node.config(&[]);
    config.timing.neighbours = Duration::from_millis(20);
    config.timing.usage_lists = Duration::from_hours(1);
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let lists = || node.sim.calls(GpuOp::Processes);
    wait("the watch for neighbours", || (lists() > 3).then_some(())).await;
    node.prepare(&node.claim("c", &["gpu-0"])).await.unwrap();
    wait("the first reading", || {
        value(&plugin, "divvy_gpu_memory_used_bytes", &[]).map(drop)
    })
    .await;
    let (before, rounds) = (lists(), node.sim.calls(GpuOp::SmUtilization));
    wait("readings", || {
        (node.sim.calls(GpuOp::SmUtilization) > rounds + 10).then_some(())
    })
    .await;
    assert!(
        lists() <= before + 1,
        "{before} lists, and then {}",
        lists()
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn overuse_is_reported_when_it_begins_and_ends_also_across_a_restart() {
    let node = Node::new("l4x1");
    let start = async || {
        let plugin = node.start_with(node.config(&["--offer", "everything"]));
        plugin.wait_ready().await;
        plugin
    };
    let plugin = start().await;
    let gpu = node.sim.uuids().remove(0);
    let (over, fine) = (share(&node, 0, 1).await, share(&node, 0, 2).await);
    node.sim.set_usage(&gpu, 2, Some(4 * GIB + (200 << 20)), 0);
    node.sim.set_usage(&gpu, 1, Some(5 * GIB), 0);
    let status =
        |claim: &ClaimRef| condition(&node, claim, "WithinGrant").map(|c| (c.status, c.reason));
    let becomes = async |claim: &ClaimRef, expected: &str, reason: &str| {
        let expected = Some((expected.to_owned(), reason.to_owned()));
        wait("the condition", || {
            (status(claim) == expected).then_some(())
        })
        .await;
    };
    becomes(&over, "False", "MemoryOverGrant").await;
    shows(&plugin, "divvy_claim_overuse", &["claim=\"c1\""], 1.0).await;
    shows(&plugin, "divvy_overuse_total", &[], 1.0).await;
    wait("the Events", || {
        (events(&node, "MemoryOverGrant") == ["Pod", "ResourceClaim"]).then_some(())
    })
    .await;
    let message = condition(&node, &over, "WithinGrant").unwrap().message;
    assert!(
        message.contains("use 5120 MiB of GPU memory and were granted 4096 MiB"),
        "{message}"
    );
    // On transitions only.
    let writes = node.api.count("patch", "resourceclaims/status");
    let rounds = node.sim.calls(GpuOp::Memory);
    wait("readings", || {
        (node.sim.calls(GpuOp::Memory) > rounds + 5).then_some(())
    })
    .await;
    assert_eq!(node.api.count("patch", "resourceclaims/status"), writes);
    // What is not known ends nothing.
    node.sim.set_usage(&gpu, 1, None, 0);
    wait("no figure", || {
        value(&plugin, "divvy_claim_overuse", &["claim=\"c1\""])
            .is_none()
            .then_some(())
    })
    .await;
    assert_eq!(status(&over).unwrap().0, "False");
    plugin.stop().await;

    let plugin = start().await;
    node.sim.set_usage(&gpu, 1, Some(4 * GIB), 0);
    becomes(&over, "True", "MemoryWithinGrant").await;
    shows(&plugin, "divvy_claim_overuse", &["claim=\"c1\""], 0.0).await;
    assert_eq!(
        (status(&fine), value(&plugin, "divvy_overuse_total", &[])),
        (None, Some(0.0))
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_let_go_keeps_no_condition_of_its_use() {
    let node = Node::new("l4x1");
    let plugin = node.start_with(node.config(&["--offer", "everything"]));
    plugin.wait_ready().await;
    let gpu = node.sim.uuids().remove(0);
    let claim = share(&node, 0, 1).await;
    let other = share(&node, 0, 2).await;
    node.sim.set_usage(&gpu, 1, Some(9 * GIB), 0);
    node.sim.set_usage(&gpu, 2, Some(GIB), 0);
    wait("the condition", || condition(&node, &claim, "WithinGrant")).await;
    node.sim.set_usage(&gpu, 1, Some(GIB), 0);
    wait("its end", || {
        condition(&node, &claim, "WithinGrant").filter(|c| c.status == "True")
    })
    .await;
    assert_eq!(condition(&node, &other, "WithinGrant"), None);
    // A claim that is let go while it is over its grant keeps nothing.
    node.sim.set_usage(&gpu, 1, Some(9 * GIB), 0);
    wait("the condition", || {
        condition(&node, &claim, "WithinGrant").filter(|c| c.status == "False")
    })
    .await;
    node.sim.end_process(1);
    node.unprepare(&claim).await.unwrap();
    wait("no condition", || {
        condition(&node, &claim, "WithinGrant")
            .is_none()
            .then_some(())
    })
    .await;
    plugin.stop().await;
}

/// With claims idle after so long.
pub(crate) fn idle_after(mut config: Config, after: Duration) -> Config {
    config.idle_after = Some(after);
    config
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_nothing_uses_is_reported_as_idle_until_something_does() {
    let node = Node::new("h100x2");
    let plugin = node.start_with(idle_after(node.config(&[]), Duration::from_millis(300)));
    plugin.wait_ready().await;
    let gpu = node.sim.uuids().remove(0);
    node.sim.start_process(&gpu, 7);
    node.sim.set_usage(&gpu, 7, Some(GIB), 30);
    let [busy, idle] =
        [("busy", "gpu-0"), ("idle", "gpu-1")].map(|(name, device)| node.claim(name, &[device]));
    // The first process is the claim's own.
    belongs(&node, 7, 0);
    node.sim.end_process(7);
    node.prepare(&busy).await.unwrap();
    node.prepare(&idle).await.unwrap();
    node.sim.start_process(&gpu, 7);
    node.sim.set_usage(&gpu, 7, Some(GIB), 30);
    let status = |claim: &ClaimRef| condition(&node, claim, "Idle").map(|c| (c.status, c.reason));
    let is = |claim: &ClaimRef, expected: (&str, &str)| {
        let expected = Some((expected.0.to_owned(), expected.1.to_owned()));
        (status(claim) == expected).then_some(())
    };
    wait("the condition", || is(&idle, ("True", "NotUsed"))).await;
    wait("the metric", || {
        value(&plugin, "divvy_claim_idle_seconds", &["claim=\"idle\""]).filter(|s| *s > 0.3)
    })
    .await;
    wait("the counter", || {
        value(&plugin, "divvy_idle_total", &[]).filter(|count| *count >= 1.0)
    })
    .await;
    wait("the Event", || {
        events(&node, "NotUsed")
            .contains(&"ResourceClaim".to_owned())
            .then_some(())
    })
    .await;
    shows(
        &plugin,
        "divvy_claim_idle_seconds",
        &["claim=\"busy\""],
        0.0,
    )
    .await;
    let other = node.sim.uuids().remove(1);
    node.sim.start_process(&other, 8);
    node.sim.set_usage(&other, 8, Some(GIB), 5);
    wait("the end", || is(&idle, ("False", "Used"))).await;
    // What cannot be measured is not idle.
    node.sim
        .fault(Fault::fail(GpuErrorCode::UNKNOWN).of(GpuOp::SmUtilization));
    wait("no figure", || {
        value(&plugin, "divvy_claim_idle_seconds", &["claim=\"idle\""])
            .is_none()
            .then_some(())
    })
    .await;
    assert_eq!(status(&idle).unwrap().0, "False");
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_policy_says_to_reclaim_is_marked_confirmed_and_taken_back() {
    let node = Node::new("h100x1");
    let rule = json!({ "usage": { "idle": { "action": "Reclaim", "graceSeconds": 0 } } });
    node.api
        .put(&GpuPolicy::new("p", json!({ "rules": [rule] })))
        .unwrap();
    let start = async |after| {
        let mut config = idle_after(node.config(&[]), after);
        config.timing.usage_confirm = Duration::from_secs(1);
        let plugin = node.start_with(config);
        plugin.wait_ready().await;
        plugin
    };
    let plugin = start(Duration::from_millis(300)).await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let due = |status: &str, reason: &str| {
        let found = condition(&node, &claim, "ReclaimDue")?;
        (found.status == status && found.reason == reason).then_some(found)
    };
    let first = wait("the condition", || due("True", "Idle")).await;
    let confirmed = |c: &Condition| c.last_transition_time.0 > first.last_transition_time.0;
    wait("its confirmation", || due("True", "Idle").filter(confirmed)).await;
    plugin.stop().await;

    // What an earlier instance has said is not true before this one has seen it.
    let plugin = start(Duration::from_hours(1)).await;
    wait("its end", || due("False", "NotDue")).await;
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_taken_back_is_written_until_the_server_has_it() {
    let node = Node::new("h100x1");
    let rule = json!({ "usage": { "idle": { "action": "Reclaim", "graceSeconds": 0 } } });
    node.api
        .put(&GpuPolicy::new("p", json!({ "rules": [rule] })))
        .unwrap();
    let plugin = node.start_with(idle_after(node.config(&[]), Duration::from_millis(300)));
    plugin.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let due = |status: &str| condition(&node, &claim, "ReclaimDue").filter(|c| c.status == status);
    wait("the condition", || due("True")).await;
    let writes = node.api.count("patch", "resourceclaims/status");
    // An API server that has just started has not read tokens and roles yet.
    for code in [500, 401, 403] {
        node.api
            .fail_next(1, "patch", "resourceclaims/status", ApiFault::Status(code));
    }
    let gpu = node.sim.uuids().remove(0);
    node.sim.start_process(&gpu, 7);
    node.sim.set_usage(&gpu, 7, Some(GIB), 30);
    wait("its end", || due("False")).await;
    let needed = node.api.count("patch", "resourceclaims/status");
    assert!(needed >= writes + 4, "three failed");
    let rounds = node.sim.calls(GpuOp::SmUtilization);
    wait("readings", || {
        (node.sim.calls(GpuOp::SmUtilization) > rounds + 5).then_some(())
    })
    .await;
    assert_eq!(
        node.api.count("patch", "resourceclaims/status"),
        needed,
        "and no more"
    );
    plugin.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_idle_verdict_is_over_when_this_instance_is_in_charge_again() {
    let node = Node::new("h100x1");
    let rule = json!({ "usage": { "idle": { "action": "Reclaim", "graceSeconds": 0 } } });
    node.api
        .put(&GpuPolicy::new("p", json!({ "rules": [rule] })))
        .unwrap();
    let config = idle_after(node.config(&[]), Duration::from_millis(300));
    let wish = config.plugin_dir.join("publisher.wish");
    let plugin = node.start_with(config);
    plugin.wait_ready().await;
    let claim = node.claim("c", &["gpu-0"]);
    node.prepare(&claim).await.unwrap();
    let is = |kind: &str, status: &str| {
        condition(&node, &claim, kind)
            .filter(|c| c.status == status)
            .map(drop)
    };
    wait("the conditions", || {
        is("Idle", "True").and(is("ReclaimDue", "True"))
    })
    .await;
    // A newer instance takes over and ends, which frees the lock. Meanwhile the claim is used.
    fs_err::write(wish, u128::MAX.to_string()).unwrap();
    let figure = || value(&plugin, "divvy_gpu_memory_used_bytes", &[]);
    wait("the other instance", || figure().is_none().then_some(())).await;
    let gpu = node.sim.uuids().remove(0);
    node.sim.start_process(&gpu, 7);
    node.sim.set_usage(&gpu, 7, Some(GIB), 30);
    wait("its end", || figure().map(drop)).await;
    wait("the end of what was said", || {
        is("Idle", "False").and(is("ReclaimDue", "False"))
    })
    .await;
    plugin.stop().await;
}

/// Through a session, as in production.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gpu_that_hangs_keeps_no_other_from_being_read() {
    let node = Node::new("h100x2");
    let sim = node.sim.clone();
    let patience = SessionConfig {
        deadline: Duration::from_millis(300),
        ..SessionConfig::default()
    };
    let session = Session::new(patience, move || sim.open());
    let plugin = node.start_on(node.config(&[]), Arc::new(session));
    plugin.wait_ready().await;
    let gpus: Vec<GpuUuid> = node.sim.uuids();
    for (at, name) in ["a", "b"].into_iter().enumerate() {
        node.prepare(&node.claim(name, &[&format!("gpu-{at}")]))
            .await
            .unwrap();
        node.sim
            .start_process(&gpus[at], 70 + u32::try_from(at).unwrap());
    }
    let hangs = node.sim.fault(Fault::hang().of(GpuOp::Memory).on(&gpus[0]));
    wait("a hanging call", || {
        node.sim.wait_until_hanging(1, Duration::ZERO).then_some(())
    })
    .await;
    node.sim.set_usage(&gpus[1], 71, Some(7 * GIB), 0);
    shows(
        &plugin,
        "divvy_gpu_memory_used_bytes",
        &[gpus[1].as_str()],
        7.0 * f64::from(1 << 30),
    )
    .await;
    wait("its figure to go", || {
        value(&plugin, "divvy_gpu_memory_used_bytes", &[gpus[0].as_str()])
            .is_none()
            .then_some(())
    })
    .await;
    wait("its age to grow", || {
        value(&plugin, "divvy_usage_age_seconds", &[gpus[0].as_str()]).filter(|age| *age > 1.0)
    })
    .await;
    assert!(
        value(
            &plugin,
            "divvy_usage_read_seconds_count",
            &["memory", "error"]
        )
        .unwrap()
            > 0.0
    );
    node.sim.release(hangs);
    shows(
        &plugin,
        "divvy_gpu_memory_used_bytes",
        &[gpus[0].as_str()],
        0.0,
    )
    .await;
    plugin.stop().await;
}

/// GPU time goes on from what the earlier process saved: what is still held was held meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn gpu_time_is_counted_over_a_restart() {
    let node = Node::new("h100x2");
    let plugin = node.start().await;
    let claim = share(&node, 0, 1).await;
    let labels = [
        "namespace=\"default\"",
        "class=\"gpu.divvy.dev\"",
        "product=\"NVIDIA H100 80GB HBM3\"",
        "form=\"time-sliced\"",
    ];
    let name = "divvy_gpu_gib_seconds_granted_total";
    let file = node.config(&[]).plugin_dir.join("gpu-time.json");
    let is_saved = || {
        let saved = fs_err::read_to_string(&file).ok()?;
        saved.contains(&claim.uid).then_some(())
    };
    wait("the claim's time is saved", is_saved).await;
    plugin.stop().await;
    // As if the process had been away for an hour.
    let mut saved: serde_json::Value =
        serde_json::from_slice(&fs_err::read(&file).unwrap()).unwrap();
    let at = saved.pointer_mut("/at/sinceBoot").unwrap();
    let before = at.as_u64().unwrap();
    *at = json!(before.saturating_sub(3_600_000));
    let away = (before - at.as_u64().unwrap()) / 1000;
    *saved.pointer_mut("/open/0/uses").unwrap() = json!({"part": 50_000, "memory": 1024});
    fs_err::write(&file, saved.to_string()).unwrap();
    let plugin = node.start().await;
    let granted = wait("the hour is counted", || {
        value(&plugin, name, &labels).filter(|found| *found > 0.0)
    })
    .await;
    let expected = f64::from(u32::try_from(4 * away).unwrap());
    assert!(
        granted >= expected && granted < expected + 240.0,
        "{granted} for {away} s"
    );
    for moved in [
        "divvy_gpu_seconds_granted_total",
        "divvy_gpu_seconds_used_total",
        "divvy_gpu_gib_seconds_used_total",
        "divvy_gpu_seconds_blocked_total",
    ] {
        assert!(value(&plugin, moved, &labels[3..]) > Some(0.0), "{moved}");
    }
    node.unprepare(&claim).await.unwrap();
}
