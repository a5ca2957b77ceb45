//! The controller against an API server: what it reads, evicts and reports, and which of two instances acts.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::time::Duration;

use divvy_cluster_controller::{Config, run};
use divvy_fake_cluster::build::{allocated, mk_claim, mk_pod, mk_result, reserved};
use divvy_fake_cluster::{FakeApi, Fault};
use divvy_telemetry::{MetricsRegistry, Readiness};
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::core::v1::{Namespace, Pod};
use k8s_openapi::api::events::v1::Event;
use k8s_openapi::api::resource::v1::{AllocatedDeviceStatus, ResourceClaim};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, ObjectMeta, Time};
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
        look: Duration::from_millis(20),
        renew: Duration::from_millis(20),
    }
}

/// A running instance.
struct Instance {
    metrics: MetricsRegistry,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Instance {
    fn start(api: &FakeApi, config: Config) -> Self {
        let (metrics, stop) = (MetricsRegistry::new(), CancellationToken::new());
        let (registry, token, client) = (metrics.clone(), stop.clone(), api.client());
        let task = tokio::spawn(async move {
            run(config, client, &registry, &Readiness::new(), token).await;
        });
        Self { metrics, stop, task }
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }

    fn shows(&self, line: &str) -> bool {
        self.metrics.encode().lines().any(|found| found == line)
    }
}

async fn wait(what: &str, mut done: impl FnMut() -> bool) {
    let limit = tokio::time::Instant::now() + Duration::from_secs(20);
    while !done() {
        assert!(tokio::time::Instant::now() < limit, "{what} did not happen");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn fake() -> FakeApi {
    let api = FakeApi::new();
    let metadata = ObjectMeta { name: Some("n".into()), ..ObjectMeta::default() };
    api.put(&Namespace { metadata, ..Namespace::default() }).unwrap();
    api
}

/// A pod that holds a device with a condition.
fn put(api: &FakeApi, name: &str, device: &str, reason: &str) -> ResourceClaim {
    let pod = api.put(&mk_pod("n", name, Some("node"), &[name])).unwrap();
    let result = mk_result("gpu", DRIVER, "node", device);
    let claim = allocated(mk_claim("n", name, "gpu.divvy.dev", 1), vec![result]);
    let mut claim = reserved(claim, name, pod.metadata.uid.as_deref().unwrap());
    let condition = Condition {
        type_: "ReclaimDue".into(),
        status: "True".into(),
        reason: reason.into(),
        message: "as the policy says".into(),
        // Confirmed a while after the pod came.
        last_transition_time: Time(Timestamp::now() + Duration::from_mins(1)),
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
    let about = |event: &Event| event.regarding.as_ref().and_then(|it| it.name.as_deref()) == Some(pod);
    let all = api.list::<Event>();
    all.iter().filter(|event| about(event) && event.reason.as_deref() == Some(reason)).count()
}

fn holder(api: &FakeApi) -> Option<String> {
    api.get::<Lease>("divvy", "divvy-cluster-controller")?.spec?.holder_identity
}

/// `docs/metrics.md` has these metrics and no others in its section.
fn assert_documented(text: &str) {
    let shown = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let shown =
        shown.map(|(name, kind)| if kind == "counter" { format!("{name}_total") } else { name.to_owned() });
    let page = include_str!("../../../docs/metrics.md");
    let (_, section) = page.split_once("\n## The cluster controller's metrics\n").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let documented = section.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
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
    wait("the evictions", || !there(&api, "idle") && !there(&api, "over")).await;
    wait("the Events", || ["idle", "over"].iter().all(|pod| events(&api, pod, "GpuReclaimed") == 1)).await;
    wait("the counts", || {
        ["idle", "overuse"].iter().all(|reason| {
            instance.shows(&format!("divvy_reclaims_total{{reason=\"{reason}\",result=\"evicted\"}} 1"))
        })
    })
    .await;
    assert_documented(&instance.metrics.encode());
    assert!(there(&api, "used") && there(&api, "kept"));
    assert_eq!(api.count("create", "pods/eviction"), 2);
    instance.stop().await;
    assert_eq!(holder(&api).as_deref(), Some(""), "the next instance need not wait");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dry_run_reports_each_pod_once_and_evicts_none() {
    let api = fake();
    put(&api, "idle", "gpu-0", "Idle");
    let instance = Instance::start(&api, Config { dry_run: true, ..config("a") });
    let counted = r#"divvy_reclaims_total{reason="idle",result="dry-run"} 1"#;
    wait("the report", || events(&api, "idle", "GpuReclaimDryRun") == 1 && instance.shows(counted)).await;
    // A further pod shows that it looked again.
    put(&api, "second", "gpu-1", "Idle");
    wait("its report", || events(&api, "second", "GpuReclaimDryRun") == 1).await;
    assert!(there(&api, "idle") && events(&api, "idle", "GpuReclaimDryRun") == 1);
    assert_eq!(api.count("create", "pods/eviction"), 0);
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disruption_budget_and_a_failing_server_keep_a_pod_and_stop_nothing_else() {
    let api = fake();
    api.fail_next(1, "create", "pods/eviction", Fault::Status(429));
    put(&api, "a", "gpu-0", "Idle");
    let instance = Instance::start(&api, config("a"));
    wait("the refusal", || events(&api, "a", "GpuReclaimRefused") == 1).await;
    api.fail_next(1, "create", "pods/eviction", Fault::Status(500));
    put(&api, "b", "gpu-1", "Idle");
    let failed = r#"divvy_reclaims_total{reason="idle",result="failed"} 1"#;
    wait("the failure", || instance.shows(failed)).await;
    api.fail_next(1, "get", "pods", Fault::DropBefore);
    put(&api, "c", "gpu-2", "Idle");
    wait("the next failure", || instance.shows(&failed.replace("} 1", "} 2"))).await;
    put(&api, "d", "gpu-3", "Idle");
    wait("an eviction", || !there(&api, "d")).await;
    assert!(there(&api, "a") && there(&api, "b") && there(&api, "c"), "each is left alone for a minute");
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_pods_that_are_due_one_goes_where_the_limit_is_one() {
    let api = fake();
    put(&api, "a", "gpu-0", "Idle");
    put(&api, "b", "gpu-1", "Idle");
    let instance = Instance::start(&api, Config { per_minute: 1, ..config("a") });
    wait("the eviction", || !there(&api, "a")).await;
    let renewed = api.count("get", "leases");
    wait("a while", || api.count("get", "leases") > renewed + 10).await;
    assert!(there(&api, "b"));
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_pod_that_came_last_has_ended_the_next_waits_for_another_reading() {
    let api = fake();
    put(&api, "p", "gpu-0-ts", "OverGrant");
    let mut last = mk_pod("n", "last", Some("node"), &["p"]);
    last.metadata.finalizers = Some(vec!["example.invalid/ends-late".into()]);
    let uid = api.put(&last).unwrap().metadata.uid.unwrap();
    let claim = api.get::<ResourceClaim>("n", "p").unwrap();
    let before = claim.clone();
    api.put(&reserved(claim, "last", &uid)).unwrap();
    api.delete::<Pod>("n", "last").unwrap();
    assert!(api.get::<Pod>("n", "last").unwrap().metadata.deletion_timestamp.is_some());
    let instance = Instance::start(&api, config("a"));
    wait("it to be seen", || api.count("get", "pods") > 0).await;
    api.modify::<Pod>("n", "last", |pod| pod.metadata.finalizers = None).unwrap();
    api.modify::<ResourceClaim>("n", "p", |claim| claim.status.clone_from(&before.status)).unwrap();
    let renewed = api.count("get", "leases");
    wait("a while", || api.count("get", "leases") > renewed + 20).await;
    assert!(there(&api, "p") && !there(&api, "last"));
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_eviction_without_an_answer_counts_as_one() {
    for (fault, is_gone) in [(Fault::DropAfter, true), (Fault::Status(504), false)] {
        let api = fake();
        api.fail_next(1, "create", "pods/eviction", fault);
        put(&api, "a", "gpu-0", "Idle");
        let instance = Instance::start(&api, Config { per_minute: 1, ..config("a") });
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
    api.put(&mk_pod("n", "p", Some("node"), &["p"])).unwrap();
    drop(held);
    put(&api, "q", "gpu-1", "Idle");
    wait("the next", || !there(&api, "q")).await;
    assert!(there(&api, "p"));
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_instances_one_acts_and_the_other_when_it_has_ended() {
    let api = fake();
    let first = Instance::start(&api, config("a"));
    wait("the first", || first.shows("divvy_leader 1")).await;
    let second = Instance::start(&api, config("b"));
    wait("the second to ask", || api.count("get", "leases") > 20).await;
    assert!(second.shows("divvy_leader 0"));
    // What the first cannot do the second does not do either.
    api.fail_next(1, "create", "pods/eviction", Fault::Status(429));
    put(&api, "p", "gpu-0", "Idle");
    wait("the refusal", || events(&api, "p", "GpuReclaimRefused") == 1).await;
    assert!(there(&api, "p"));
    first.stop().await;
    wait("the second", || second.shows("divvy_leader 1") && !there(&api, "p")).await;
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
    assert_eq!(holder(&api).as_deref(), Some("other"), "only what is its own is given back");
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
    wait("the rest of its reads", || instance.shows("divvy_reclaim_candidates{reason=\"idle\"} 0")).await;
    assert!(there(&api, "p"));
    instance.stop().await;
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
