//! The controller against an API server: what it reads, evicts and reports, and which of two
//! instances acts.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::time::Duration;

use divvy_cluster_controller::{Config, run};
use divvy_fake_cluster::build::{allocated, mk_claim, mk_pod, mk_result, reserved};
use divvy_fake_cluster::{FakeApi, Fault};
use divvy_telemetry::{MetricsRegistry, Readiness};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod, PodStatus};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, DeviceClaimConfiguration, OpaqueDeviceConfiguration, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
use k8s_openapi::apimachinery::pkg::runtime::RawExtension;
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const DRIVER: &str = "gpu.divvy.dev";

fn config(identity: &str) -> Config {
    Config {
        driver: DRIVER.into(),
        namespace: "divvy".into(),
        lease: "divvy-cluster-controller".into(),
        identity: identity.into(),
        dry_run: false,
        per_minute: 5,
        node_labels: false,
        quota: false,
        look: Duration::from_millis(20),
        renew: Duration::from_millis(20),
    }
}

/// A running instance.
struct Instance {
    metrics: MetricsRegistry,
    ready: Readiness,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Instance {
    fn start(api: &FakeApi, config: Config) -> Self {
        let (metrics, stop) = (MetricsRegistry::new(), CancellationToken::new());
        let (registry, token, client) = (metrics.clone(), stop.clone(), api.client());
        let ready = Readiness::new();
        let readiness = ready.clone();
        let task = tokio::spawn(async move {
            run(config, client, &registry, &readiness, token).await;
        });
        Self {
            metrics,
            ready,
            stop,
            task,
        }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }

    fn shows(&self, line: &str) -> bool {
        self.metrics.encode().lines().any(|found| found == line)
    }
}

async fn wait(what: &str, done: impl FnMut() -> bool) {
    wait_for(Duration::from_secs(20), what, done).await;
}

async fn wait_for(limit: Duration, what: &str, mut done: impl FnMut() -> bool) {
    let limit = tokio::time::Instant::now() + limit;
    while !done() {
        assert!(tokio::time::Instant::now() < limit, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn fake() -> FakeApi {
    let api = FakeApi::new();
    let metadata = ObjectMeta {
        name: Some("n".into()),
        ..ObjectMeta::default()
    };
    api.put(&Namespace {
        metadata,
        ..Namespace::default()
    })
    .unwrap();
    api
}

/// Puts a pod that has been there for an hour.
fn put_pod(api: &FakeApi, name: &str, claim: &str) -> Pod {
    let long_ago = Some(Time(Timestamp::now() - Duration::from_hours(1)));
    let mut pod = mk_pod("n", name, Some("node"), &[claim]);
    pod.metadata.creation_timestamp.clone_from(&long_ago);
    pod.status = Some(PodStatus {
        start_time: long_ago,
        ..PodStatus::default()
    });
    api.put(&pod).unwrap()
}

/// Puts a pod that holds a device with a condition.
fn put(api: &FakeApi, name: &str, device: &str, reason: &str) -> ResourceClaim {
    let pod = put_pod(api, name, name);
    let result = mk_result("gpu", DRIVER, "node", device);
    let claim = allocated(mk_claim("n", name, "gpu.divvy.dev", 1), vec![result]);
    let mut claim = reserved(claim, name, pod.metadata.uid.as_deref().unwrap());
    let condition = Condition {
        type_: "ReclaimDue".into(),
        status: "True".into(),
        reason: reason.into(),
        message: "as the policy says".into(),
        last_transition_time: Time(Timestamp::now()),
        observed_generation: None,
    };
    claim.status.as_mut().unwrap().devices = Some(vec![AllocatedDeviceStatus {
        driver: DRIVER.into(),
        pool: "node".into(),
        device: device.into(),
        conditions: Some(vec![condition]),
        ..AllocatedDeviceStatus::default()
    }]);
    api.put(&claim).unwrap()
}

fn there(api: &FakeApi, pod: &str) -> bool {
    api.get::<Pod>("n", pod).is_some()
}

fn events(api: &FakeApi, pod: &str, reason: &str) -> usize {
    let about =
        |event: &Event| event.regarding.as_ref().and_then(|it| it.name.as_deref()) == Some(pod);
    let all = api.list::<Event>();
    all.iter()
        .filter(|event| about(event) && event.reason.as_deref() == Some(reason))
        .count()
}

fn holder(api: &FakeApi) -> Option<String> {
    api.get::<Lease>("divvy", "divvy-cluster-controller")?
        .spec?
        .holder_identity
}

/// `docs/metrics.md` has these metrics and no others in its section.
fn assert_documented(text: &str) {
    let shown = text
        .lines()
        .filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let shown = shown.map(|(name, kind)| {
        if kind == "counter" {
            format!("{name}_total")
        } else {
            name.to_owned()
        }
    });
    let page = include_str!("../../../docs/metrics.md");
    let (_, section) = page
        .split_once("\n## The cluster controller's metrics\n")
        .unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let documented = section
        .lines()
        .filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    assert_eq!(shown.collect::<Vec<_>>(), documented.collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pods_that_are_due_are_evicted_reported_and_counted_and_no_others() {
    let api = fake();
    put(&api, "idle", "gpu-0", "Idle");
    put(&api, "over", "gpu-1-ts", "OverGrant");
    put(&api, "used", "gpu-2", "NotDue");
    let kept = put(&api, "kept", "gpu-3", "Idle");
    api.modify::<ResourceClaim>("n", &kept.metadata.name.unwrap(), |claim| {
        let annotations = claim.metadata.annotations.get_or_insert_default();
        annotations.insert("divvy.dev/keep-idle".into(), "true".into());
    })
    .unwrap();
    let instance = Instance::start(&api, config("a"));
    wait("the evictions", || {
        !there(&api, "idle") && !there(&api, "over")
    })
    .await;
    wait("the Events", || {
        ["idle", "over"]
            .iter()
            .all(|pod| events(&api, pod, "GpuReclaimed") == 1)
    })
    .await;
    wait("the counts", || {
        ["idle", "overuse"].iter().all(|reason| {
            instance.shows(&format!(
                "divvy_reclaims_total{{reason=\"{reason}\",result=\"evicted\"}} 1"
            ))
        })
    })
    .await;
    assert_documented(&instance.metrics.encode());
    assert!(there(&api, "used") && there(&api, "kept"));
    assert_eq!(api.count("create", "pods/eviction"), 2);
    instance.stop().await;
    assert_eq!(
        holder(&api).as_deref(),
        Some(""),
        "the next instance need not wait"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_reports_each_pod_once_and_evicts_none() {
    let api = fake();
    put(&api, "idle", "gpu-0", "Idle");
    let instance = Instance::start(
        &api,
        Config {
            dry_run: true,
            ..config("a")
        },
    );
    let counted = r#"divvy_reclaims_total{reason="idle",result="dry-run"} 1"#;
    wait("the report", || {
        events(&api, "idle", "GpuReclaimDryRun") == 1 && instance.shows(counted)
    })
    .await;
    // A further pod shows that it looked again.
    put(&api, "second", "gpu-1", "Idle");
    wait("its report", || {
        events(&api, "second", "GpuReclaimDryRun") == 1
    })
    .await;
    assert!(there(&api, "idle") && events(&api, "idle", "GpuReclaimDryRun") == 1);
    assert_eq!(api.count("create", "pods/eviction"), 0);
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disruption_budget_or_a_failing_server_keeps_only_its_own_pod() {
    let api = fake();
    api.fail_next(1, "create", "pods/eviction", Fault::Budget);
    put(&api, "a", "gpu-0", "Idle");
    let instance = Instance::start(&api, config("a"));
    wait("the refusal", || {
        events(&api, "a", "GpuReclaimRefused") == 1
    })
    .await;
    api.fail_next(1, "create", "pods/eviction", Fault::Status(500));
    put(&api, "b", "gpu-1", "Idle");
    let failed = r#"divvy_reclaims_total{reason="idle",result="failed"} 1"#;
    wait("the failure", || instance.shows(failed)).await;
    api.fail_next(1, "get", "pods", Fault::DropBefore);
    put(&api, "c", "gpu-2", "Idle");
    wait("the next failure", || {
        instance.shows(&failed.replace("} 1", "} 2"))
    })
    .await;
    put(&api, "d", "gpu-3", "Idle");
    wait("an eviction", || !there(&api, "d")).await;
    assert!(
        there(&api, "a") && there(&api, "b") && there(&api, "c"),
        "each is left alone for a minute"
    );
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_pods_that_are_due_one_goes_where_the_limit_is_one() {
    let api = fake();
    put(&api, "a", "gpu-0", "Idle");
    put(&api, "b", "gpu-1", "Idle");
    let instance = Instance::start(
        &api,
        Config {
            per_minute: 1,
            ..config("a")
        },
    );
    wait("the eviction", || !there(&api, "a")).await;
    let renewed = api.count("get", "leases");
    wait("a while", || api.count("get", "leases") > renewed + 10).await;
    assert!(there(&api, "b"));
    assert_eq!(api.count("get", "pods"), 1, "the other is not even read");
    instance.stop().await;
}

/// Puts a pod that takes long to end, and returns its UID.
fn put_last(api: &FakeApi) -> String {
    let last = put_pod(api, "last", "p");
    api.modify::<Pod>("n", "last", |pod| {
        pod.metadata.finalizers = Some(vec!["example.invalid/ends-late".into()]);
    })
    .unwrap();
    last.metadata.uid.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_newest_pod_has_ended_the_next_waits_for_another_reading() {
    let api = fake();
    put(&api, "p", "gpu-0-ts", "OverGrant");
    let uid = put_last(&api);
    let claim = api.get::<ResourceClaim>("n", "p").unwrap();
    let before = claim.clone();
    api.put(&reserved(claim, "last", &uid)).unwrap();
    api.delete::<Pod>("n", "last").unwrap();
    assert!(
        api.get::<Pod>("n", "last")
            .unwrap()
            .metadata
            .deletion_timestamp
            .is_some()
    );
    let instance = Instance::start(&api, config("a"));
    wait("it to be seen", || api.count("get", "pods") > 0).await;
    api.modify::<Pod>("n", "last", |pod| pod.metadata.finalizers = None)
        .unwrap();
    api.modify::<ResourceClaim>("n", "p", |claim| claim.status.clone_from(&before.status))
        .unwrap();
    let renewed = api.count("get", "leases");
    wait("a while", || api.count("get", "leases") > renewed + 20).await;
    assert!(there(&api, "p") && !there(&api, "last"));
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_without_an_answer_counts_as_one() {
    for (fault, is_gone) in [
        (Fault::DropAfter, true),
        (Fault::Status(504), false),
        (Fault::Status(500), false),
    ] {
        let api = fake();
        api.fail_next(1, "create", "pods/eviction", fault);
        put(&api, "a", "gpu-0", "Idle");
        let instance = Instance::start(
            &api,
            Config {
                per_minute: 1,
                ..config("a")
            },
        );
        let failed = r#"divvy_reclaims_total{reason="idle",result="failed"} 1"#;
        wait("the failure", || instance.shows(failed)).await;
        put(&api, "b", "gpu-1", "Idle");
        let both = r#"divvy_reclaim_candidates{reason="idle"} 2"#;
        wait("it to be seen", || instance.shows(both)).await;
        let renewed = api.count("get", "leases");
        wait("a while", || api.count("get", "leases") > renewed + 10).await;
        assert_eq!((there(&api, "a"), there(&api, "b")), (!is_gone, true));
        instance.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_pod_of_the_same_name_is_not_evicted() {
    let api = fake();
    put(&api, "p", "gpu-0", "Idle");
    let held = api.hold("create", "pods/eviction");
    let instance = Instance::start(&api, config("a"));
    wait("the attempt", || api.count("create", "pods/eviction") == 1).await;
    api.delete::<Pod>("n", "p").unwrap();
    put_pod(&api, "p", "p");
    drop(held);
    put(&api, "q", "gpu-1", "Idle");
    wait("the next", || !there(&api, "q")).await;
    assert!(there(&api, "p"));
    let metrics = instance.metrics.encode();
    let failures = metrics
        .lines()
        .filter(|line| line.contains(r#"result="failed""#) && !line.ends_with(" 0"));
    assert_eq!(failures.count(), 0, "that is no failure: {metrics}");
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_is_ready_once_it_knows_the_claims_and_ends_with_its_lease() {
    let api = fake();
    let held = api.hold("list", "resourceclaims");
    let instance = Instance::start(&api, config("a"));
    wait("the list", || api.count("list", "resourceclaims") == 1).await;
    assert_eq!(instance.ready.missing().len(), 1);
    drop(held);
    wait("the claims", || instance.ready.missing().is_empty()).await;
    wait("the Lease", || instance.shows("divvy_leader 1")).await;

    // Another instance may begin only when this one has given the Lease back.
    let before = api.count("update", "leases");
    let held = api.hold("update", "leases");
    instance.stop.cancel();
    wait("the release", || api.count("update", "leases") > before).await;
    assert!(!instance.task.is_finished());
    drop(held);
    instance.stop().await;
    assert_eq!(holder(&api).unwrap_or_default(), "");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_instances_one_acts_and_the_other_when_it_has_ended() {
    let api = fake();
    let first = Instance::start(&api, config("a"));
    wait("the first", || first.shows("divvy_leader 1")).await;
    let second = Instance::start(&api, config("b"));
    wait("the second to ask", || api.count("get", "leases") > 20).await;
    assert!(second.shows("divvy_leader 0"));
    // The second does not do in its place what the first cannot do.
    api.fail_next(1, "create", "pods/eviction", Fault::Budget);
    put(&api, "p", "gpu-0", "Idle");
    wait("the refusal", || {
        events(&api, "p", "GpuReclaimRefused") == 1
    })
    .await;
    assert!(there(&api, "p"));
    first.stop().await;
    wait("the second", || {
        second.shows("divvy_leader 1") && !there(&api, "p")
    })
    .await;
    assert_eq!(holder(&api).as_deref(), Some("b"));
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_has_lost_the_lease_evicts_nothing_any_more() {
    let api = fake();
    let instance = Instance::start(&api, config("a"));
    wait("it", || instance.shows("divvy_leader 1")).await;
    api.modify::<Lease>("divvy", "divvy-cluster-controller", |lease| {
        lease.spec.as_mut().unwrap().holder_identity = Some("other".into());
    })
    .unwrap();
    wait("the loss", || instance.shows("divvy_leader 0")).await;
    put(&api, "p", "gpu-0", "Idle");
    let before = api.count("get", "leases");
    wait("a while", || api.count("get", "leases") > before + 20).await;
    assert_eq!(api.count("create", "pods/eviction"), 0);
    assert_eq!(api.count("get", "pods"), 0, "it does not even look");
    instance.stop().await;
    assert_eq!(
        holder(&api).as_deref(),
        Some("other"),
        "only what is its own is given back"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_loses_the_lease_while_it_reads_evicts_nothing() {
    let api = fake();
    let held = api.hold("get", "pods");
    put(&api, "p", "gpu-0", "Idle");
    let instance = Instance::start(&api, config("a"));
    wait("it to read", || api.count("get", "pods") == 1).await;
    api.modify::<Lease>("divvy", "divvy-cluster-controller", |lease| {
        lease.spec.as_mut().unwrap().holder_identity = Some("other".into());
    })
    .unwrap();
    wait("the loss", || instance.shows("divvy_leader 0")).await;
    drop(held);
    wait("the rest of its reads", || {
        instance.shows("divvy_reclaim_candidates{reason=\"idle\"} 0")
    })
    .await;
    assert!(there(&api, "p"));
    instance.stop().await;
}

/// The Lease shows that other pods went while this one was read: the eviction is not asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_that_cannot_be_counted_any_more_is_not_asked_for() {
    let api = fake();
    let one_a_minute = || Config {
        per_minute: 1,
        ..config("a")
    };
    let departures = |lease: &Lease| {
        let all = lease.metadata.annotations.as_ref()?;
        all.get("divvy.dev/departures").cloned()
    };
    let lease = || api.get::<Lease>("divvy", "divvy-cluster-controller");
    // What the Lease says once a pod has gone.
    put(&api, "q", "gpu-1", "Idle");
    let first = Instance::start(&api, one_a_minute());
    wait("the first eviction", || !there(&api, "q")).await;
    first.stop().await;
    let gone = lease().as_ref().and_then(departures).unwrap();
    let set = |text: Option<String>| {
        api.modify::<Lease>("divvy", "divvy-cluster-controller", |lease| {
            lease.metadata.annotations =
                text.map(|text| [("divvy.dev/departures".to_owned(), text)].into());
        })
        .unwrap();
    };
    set(None);
    let evictions = api.count("create", "pods/eviction");
    let held = api.hold("get", "pods");
    let reads = api.count("get", "pods");
    put(&api, "p", "gpu-0", "Idle");
    let second = Instance::start(&api, one_a_minute());
    wait("it to read", || api.count("get", "pods") > reads).await;
    set(Some(gone));
    drop(held);
    let before = api.count("get", "leases");
    wait("a while", || api.count("get", "leases") > before + 20).await;
    assert_eq!(api.count("create", "pods/eviction"), evictions);
    assert!(there(&api, "p"));
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_cannot_renew_the_lease_stops_by_itself() {
    let api = fake();
    let instance = Instance::start(&api, config("a"));
    wait("it", || instance.shows("divvy_leader 1")).await;
    api.fail_next(usize::MAX, "*", "leases", Fault::Status(500));
    wait("its time to be over", || instance.shows("divvy_leader 0")).await;
    put(&api, "p", "gpu-0", "Idle");
    let before = api.count("get", "leases");
    wait("a while", || api.count("get", "leases") > before + 20).await;
    assert_eq!(api.count("get", "pods"), 0);
    instance.stop().await;
}

/// Runs instances one after the other, each until it has seen that `candidates` pods are due and
/// has looked several times more.
async fn restart_again_and_again(api: &FakeApi, per_minute: usize, reason: &str, candidates: u64) {
    for identity in ["a", "b", "c"] {
        let config = Config {
            per_minute,
            ..config(identity)
        };
        let instance = Instance::start(api, config);
        let due = format!("divvy_reclaim_candidates{{reason=\"{reason}\"}} {candidates}");
        wait("the candidates", || instance.shows(&due)).await;
        let before = api.count("get", "leases");
        wait("a while", || api.count("get", "leases") > before + 20).await;
        instance.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_restarts_often_evicts_no_more_than_the_limit() {
    let api = fake();
    for (pod, device) in [("a", "gpu-0"), ("b", "gpu-1"), ("c", "gpu-2")] {
        put(&api, pod, device, "Idle");
    }
    restart_again_and_again(&api, 1, "idle", 3).await;
    let left = ["a", "b", "c"].map(|pod| there(&api, pod));
    assert_eq!(left, [false, true, true]);
    // The limit is that of the last minute.
    api.modify::<Lease>("divvy", "divvy-cluster-controller", |lease| {
        let all = lease.metadata.annotations.as_mut().unwrap();
        let text = all.get_mut("divvy.dev/departures").unwrap();
        let mut departures: serde_json::Value = serde_json::from_str(text).unwrap();
        let earlier = Timestamp::now() - Duration::from_mins(2);
        departures[0]["at"] = earlier.to_string().into();
        *text = departures.to_string();
    })
    .unwrap();
    let instance = Instance::start(&api, config("d"));
    wait("the next", || !there(&api, "b")).await;
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_instance_that_restarts_again_and_again_evicts_one_pod_of_a_gpu() {
    let api = fake();
    put(&api, "a", "gpu-0-ts", "OverGrant");
    put(&api, "b", "gpu-0-ts", "OverGrant");
    restart_again_and_again(&api, 5, "overuse", 2).await;
    assert_eq!((there(&api, "a"), there(&api, "b")), (false, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_none_goes_in_the_place_of_a_pod_that_has_ended() {
    let api = fake();
    put(&api, "p", "gpu-0-ts", "OverGrant");
    let uid = put_last(&api);
    let claim = api.get::<ResourceClaim>("n", "p").unwrap();
    let before = claim.clone();
    api.put(&reserved(claim, "last", &uid)).unwrap();
    api.delete::<Pod>("n", "last").unwrap();
    let first = Instance::start(&api, config("a"));
    let noted = || {
        let lease = api.get::<Lease>("divvy", "divvy-cluster-controller");
        lease.is_some_and(|lease| lease.metadata.annotations.is_some())
    };
    wait("it to be noted", noted).await;
    first.stop().await;
    api.modify::<Pod>("n", "last", |pod| pod.metadata.finalizers = None)
        .unwrap();
    api.modify::<ResourceClaim>("n", "p", |claim| claim.status.clone_from(&before.status))
        .unwrap();
    restart_again_and_again(&api, 5, "overuse", 1).await;
    assert!(there(&api, "p") && !there(&api, "last"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_has_too_much_to_do_is_no_disruption_budget() {
    let api = fake();
    api.fail_next(1, "create", "pods/eviction", Fault::Status(429));
    put(&api, "a", "gpu-0", "Idle");
    let instance = Instance::start(
        &api,
        Config {
            per_minute: 1,
            ..config("a")
        },
    );
    let failed = r#"divvy_reclaims_total{reason="idle",result="failed"} 1"#;
    wait("the failure", || instance.shows(failed)).await;
    put(&api, "b", "gpu-1", "Idle");
    wait("the next, which has its place", || !there(&api, "b")).await;
    assert_eq!(events(&api, "a", "GpuReclaimRefused"), 0);
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_a_budget_keeps_takes_no_place() {
    let api = fake();
    api.fail_next(1, "create", "pods/eviction", Fault::Budget);
    put(&api, "a", "gpu-0", "Idle");
    put(&api, "b", "gpu-1", "Idle");
    let instance = Instance::start(
        &api,
        Config {
            per_minute: 1,
            ..config("a")
        },
    );
    wait("the other", || !there(&api, "b")).await;
    assert!(there(&api, "a"));
    assert_eq!(events(&api, "a", "GpuReclaimRefused"), 1);
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_evicted_while_what_was_evicted_cannot_be_read() {
    let api = fake();
    let first = Instance::start(&api, config("a"));
    wait("it", || first.shows("divvy_leader 1")).await;
    let set = |text: Option<&str>| {
        api.modify::<Lease>("divvy", "divvy-cluster-controller", |lease| {
            let text = text.map(|text| ("divvy.dev/departures".to_owned(), text.to_owned()));
            lease.metadata.annotations = text.map(|text| [text].into());
        })
        .unwrap();
    };
    set(Some("[1]"));
    put(&api, "p", "gpu-0", "Idle");
    wait("it to be seen", || {
        first.shows("divvy_reclaim_candidates{reason=\"idle\"} 1")
    })
    .await;
    let before = api.count("get", "leases");
    wait("a while", || api.count("get", "leases") > before + 20).await;
    assert!(there(&api, "p"));
    set(None);
    wait("the eviction", || !there(&api, "p")).await;
    first.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_request_without_an_answer_ends_before_another_instance_may_begin() {
    let api = fake();
    put(&api, "p", "gpu-0", "Idle");
    let held = api.hold("create", "pods/eviction");
    let instance = Instance::start(&api, config("a"));
    let failed = r#"divvy_reclaims_total{reason="idle",result="failed"} 1"#;
    // Five seconds after the ten for which an instance acts that cannot renew the Lease, it is
    // over.
    wait_for(Duration::from_secs(6), "the end of the request", || {
        instance.shows(failed)
    })
    .await;
    drop(held);
    instance.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_that_looks_at_a_pod_again_reports_it_once() {
    let api = fake();
    put(&api, "p", "gpu-0", "Idle");
    let instance = Instance::start(
        &api,
        Config {
            dry_run: true,
            look: Duration::from_secs(10),
            ..config("a")
        },
    );
    let began = tokio::time::Instant::now();
    wait_for(Duration::from_mins(10), "several looks", || {
        api.count("get", "pods") > 3
    })
    .await;
    assert!(
        began.elapsed() > Duration::from_mins(2),
        "it is left alone for a minute each time"
    );
    assert!(instance.shows(r#"divvy_reclaims_total{reason="idle",result="dry-run"} 1"#));
    assert_eq!(api.count("*", "events"), 1);
    instance.stop().await;
}

/// Returns what the Lease says of evictions.
fn departures(api: &FakeApi) -> Option<String> {
    let lease = api.get::<Lease>("divvy", "divvy-cluster-controller")?;
    lease.metadata.annotations?.remove("divvy.dev/departures")
}

/// The Lease still names it, but it has not renewed it for so long that another instance may begin.
#[tokio::test(start_paused = true)]
async fn one_whose_time_ends_while_it_reads_takes_its_eviction_back() {
    let api = fake();
    let instance = Instance::start(
        &api,
        Config {
            renew: Duration::from_mins(5),
            ..config("a")
        },
    );
    wait("it", || instance.shows("divvy_leader 1")).await;
    let held = api.hold("get", "pods");
    tokio::time::advance(Duration::from_secs(7)).await;
    put(&api, "p", "gpu-0", "Idle");
    wait("it to read", || api.count("get", "pods") == 1).await;
    tokio::time::advance(Duration::from_secs(4)).await;
    drop(held);
    wait("the eviction to be taken back", || {
        departures(&api).as_deref() == Some("[]")
    })
    .await;
    assert!(there(&api, "p"));
    assert_eq!(api.count("create", "pods/eviction"), 0);
    instance.stop().await;
}

#[tokio::test(start_paused = true)]
async fn the_time_of_an_instance_counts_from_when_its_write_began() {
    let api = fake();
    let held = api.hold("create", "leases");
    let instance = Instance::start(
        &api,
        Config {
            renew: Duration::from_mins(5),
            ..config("a")
        },
    );
    wait("its write", || api.count("create", "leases") == 1).await;
    tokio::time::advance(Duration::from_secs(4)).await;
    drop(held);
    wait("it", || instance.shows("divvy_leader 1")).await;
    // Seven seconds after the answer are eleven after the question.
    tokio::time::advance(Duration::from_secs(7)).await;
    put(&api, "p", "gpu-0", "Idle");
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(api.count("get", "pods"), 0);
    instance.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_writes_nothing_of_a_pod_that_is_ending() {
    let api = fake();
    put(&api, "p", "gpu-0-ts", "OverGrant");
    let uid = put_last(&api);
    let claim = api.get::<ResourceClaim>("n", "p").unwrap();
    api.put(&reserved(claim, "last", &uid)).unwrap();
    api.delete::<Pod>("n", "last").unwrap();
    let instance = Instance::start(
        &api,
        Config {
            dry_run: true,
            ..config("a")
        },
    );
    wait("it to be seen again", || api.count("get", "pods") > 3).await;
    assert_eq!(departures(&api), None);
    instance.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_dry_run_reports_a_pod_anew_that_was_not_due_meanwhile() {
    let api = fake();
    put(&api, "p", "gpu-0", "Idle");
    let instance = Instance::start(
        &api,
        Config {
            dry_run: true,
            ..config("a")
        },
    );
    let reported = |times: u32| {
        let line = format!(r#"divvy_reclaims_total{{reason="idle",result="dry-run"}} {times}"#);
        instance.shows(&line)
    };
    let candidates = |number: u32| {
        instance.shows(&format!(
            r#"divvy_reclaim_candidates{{reason="idle"}} {number}"#
        ))
    };
    wait("the report", || reported(1)).await;
    let say = |reason: &str| {
        api.modify::<ResourceClaim>("n", "p", |claim| {
            let devices = claim.status.as_mut().unwrap().devices.as_mut().unwrap();
            let conditions = devices[0].conditions.as_mut().unwrap();
            conditions[0].reason = reason.to_owned();
        })
        .unwrap();
    };
    say("NotDue");
    wait("it to be seen", || candidates(0)).await;
    say("Idle");
    wait_for(Duration::from_mins(3), "the second report", || reported(2)).await;
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_opts_out_stays_whatever_its_claim_says() {
    let api = fake();
    put(&api, "kept", "gpu-0", "Idle");
    api.modify::<Pod>("n", "kept", |pod| {
        let annotations = pod.metadata.annotations.get_or_insert_default();
        annotations.insert("divvy.dev/keep-idle".into(), "true".into());
    })
    .unwrap();
    let instance = Instance::start(&api, config("a"));
    wait("it to be read", || api.count("get", "pods") == 1).await;
    put(&api, "next", "gpu-1", "Idle");
    wait("the next", || !there(&api, "next")).await;
    assert!(there(&api, "kept"));
    assert_eq!(api.count("create", "pods/eviction"), 1);
    instance.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_is_gone_is_looked_for_once_a_minute() {
    let api = fake();
    put(&api, "p", "gpu-0", "Idle");
    api.delete::<Pod>("n", "p").unwrap();
    let instance = Instance::start(&api, config("a"));
    let began = tokio::time::Instant::now();
    wait_for(Duration::from_mins(5), "two looks", || {
        api.count("get", "pods") == 2
    })
    .await;
    assert!(began.elapsed() > Duration::from_secs(50));
    instance.stop().await;
}

/// The instance leads by its own clock, while the Lease names another one.
#[tokio::test(start_paused = true)]
async fn one_that_does_not_know_of_its_loss_reads_no_pod() {
    let api = fake();
    let instance = Instance::start(
        &api,
        Config {
            renew: Duration::from_mins(5),
            ..config("a")
        },
    );
    wait("it", || instance.shows("divvy_leader 1")).await;
    api.modify::<Lease>("divvy", "divvy-cluster-controller", |lease| {
        lease.spec.as_mut().unwrap().holder_identity = Some("other".into());
    })
    .unwrap();
    put(&api, "p", "gpu-0", "Idle");
    let before = api.count("get", "leases");
    wait("some looks", || api.count("get", "leases") > before + 5).await;
    assert!(there(&api, "p"));
    assert_eq!(api.count("get", "pods"), 0);
    instance.stop().await;
}

/// Anyone who may make a claim can nest its parameters deeper than a parser follows them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_nested_too_deep_keeps_no_pod_from_its_eviction() {
    let api = fake();
    let nested = (0..400).fold(json!(1), |inner, _| json!({ "a": inner }));
    let opaque = OpaqueDeviceConfiguration {
        driver: "nic.example.com".into(),
        parameters: RawExtension(nested),
    };
    let entry = DeviceClaimConfiguration {
        opaque: Some(opaque),
        requests: None,
    };
    let mut hostile = mk_claim("n", "hostile", DRIVER, 1);
    let devices = hostile.spec.as_mut().unwrap().devices.as_mut().unwrap();
    devices.config = Some(vec![entry]);
    api.put(&hostile).unwrap();
    put(&api, "idle", "gpu-0", "Idle");
    let instance = Instance::start(&api, config("a"));
    wait("the eviction", || !there(&api, "idle")).await;
    // It comes by the watch, too.
    api.delete::<ResourceClaim>("n", "hostile").unwrap();
    api.put(&hostile).unwrap();
    put(&api, "next", "gpu-1", "Idle");
    wait("the next eviction", || !there(&api, "next")).await;
    instance.stop().await;
}
