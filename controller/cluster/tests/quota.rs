//! Quotas against the fake API server: who is let through, what is written, and that nothing is
//! written while nothing changes.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::time::Duration;

use divvy_api::names::annotations;
use divvy_api::quota::GpuQuota;
use divvy_cluster_controller::{Config, run};
use divvy_fake_cluster::FakeApi;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_class, mk_device, mk_result, mk_slice};
use divvy_telemetry::{MetricsRegistry, Readiness};
use k8s_openapi::api::resource::v1::{DeviceCapacity, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

const PATIENCE: Duration = Duration::from_secs(20);
const DRIVER: &str = "gpu.divvy.dev";

struct Instance {
    metrics: MetricsRegistry,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Instance {
    fn start(api: &FakeApi, identity: &str) -> Self {
        let config = Config {
            driver: DRIVER.into(),
            namespace: "divvy".into(),
            lease: "divvy-cluster-controller".into(),
            identity: identity.into(),
            dry_run: true,
            per_minute: 5,
            node_labels: false,
            quota: true,
            look: Duration::from_millis(20),
            renew: Duration::from_millis(20),
        };
        let (metrics, stop) = (MetricsRegistry::new(), CancellationToken::new());
        let (registry, token, client) = (metrics.clone(), stop.clone(), api.client());
        let task = tokio::spawn(async move {
            run(config, client, &registry, &Readiness::new(), token).await;
        });
        Self {
            metrics,
            stop,
            task,
        }
    }

    fn shows(&self, line: &str) -> bool {
        self.metrics.encode().lines().any(|found| found == line)
    }

    async fn stop(self) {
        self.stop.cancel();
        self.task.await.unwrap();
    }
}

/// A cluster with four GPUs of 80 GiB on a node.
fn cluster() -> FakeApi {
    let api = FakeApi::new();
    api.register::<GpuQuota>(true, true);
    api.put(&mk_class(DRIVER, DRIVER)).unwrap();
    let gpu = |number: usize| {
        let mut gpu = mk_device(&format!("gpu-{number}"));
        let memory = DeviceCapacity {
            value: Quantity("80Gi".into()),
            ..DeviceCapacity::default()
        };
        gpu.capacity = Some([("memory".to_owned(), memory)].into());
        gpu
    };
    let slice = mk_slice("n1-0", DRIVER, "n1", (0..4).map(gpu).collect());
    api.put(&slice).unwrap();
    api
}

fn put_quota(api: &FakeApi, namespace: &str, name: &str, limits: &Value) {
    let quota = json!({
        "apiVersion": "divvy.dev/v1beta1", "kind": "GpuQuota",
        "metadata": {"namespace": namespace, "name": name}, "spec": {"limits": limits},
    });
    let quota: GpuQuota = serde_json::from_value(quota).unwrap();
    api.put(&quota).unwrap();
}

fn ask(api: &FakeApi, namespace: &str, names: &[&str]) {
    for name in names {
        api.put(&mk_claim(namespace, name, DRIVER, 1)).unwrap();
    }
}

/// The names of the claims that were let through.
fn through(api: &FakeApi, namespace: &str) -> Vec<String> {
    let claims = api.list::<ResourceClaim>().into_iter();
    let claims = claims.filter(|claim| claim.metadata.namespace.as_deref() == Some(namespace));
    let has = |claim: &ResourceClaim| {
        let all = claim.metadata.annotations.as_ref();
        all.is_some_and(|all| all.contains_key(annotations::QUOTA))
    };
    claims
        .filter(has)
        .filter_map(|claim| claim.metadata.name)
        .collect()
}

async fn wait(what: &str, mut is_so: impl FnMut() -> bool) {
    let limit = tokio::time::Instant::now() + PATIENCE;
    while !is_so() {
        assert!(tokio::time::Instant::now() < limit, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn status(api: &FakeApi, namespace: &str, name: &str) -> Value {
    let quota: GpuQuota = api.get(namespace, name).unwrap();
    json!(quota.status)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_are_let_through_up_to_the_limit_and_the_next_when_one_goes() {
    let api = cluster();
    put_quota(&api, "red", "default", &json!({"memory": "160Gi"}));
    ask(&api, "red", &["a", "b", "c"]);
    ask(&api, "free", &["d"]);
    let instance = Instance::start(&api, "a");
    wait("two of three", || {
        through(&api, "red") == ["a", "b"] && status(&api, "red", "default")["waiting"] == 1
    })
    .await;
    assert_eq!(
        status(&api, "red", "default")["used"],
        json!({"memory": "160Gi", "percent": "200"})
    );
    // The round ends with the metrics, after the writes.
    wait("the metric", || {
        instance.shows("divvy_quota_waiting_claims 1")
    })
    .await;
    // A namespace without a quota: nothing is written there.
    assert_eq!(through(&api, "free"), Vec::<String>::new());
    // The scheduler gives one its device; it counts once, not twice.
    let claim: ResourceClaim = api.get("red", "a").unwrap();
    let given = allocated(claim, vec![mk_result("gpu", DRIVER, "n1", "gpu-0")]);
    api.put(&given).unwrap();
    api.delete::<ResourceClaim>("red", "b").unwrap();
    wait("the third", || through(&api, "red") == ["a", "c"]).await;
    wait("no claim waits", || {
        status(&api, "red", "default")["waiting"] == 0
    })
    .await;
    instance.stop().await;
}

/// The watch shows nothing of what is written: each look would find the old status again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_status_that_the_watch_does_not_show_yet_is_not_written_at_each_look() {
    let api = cluster();
    put_quota(&api, "red", "default", &json!({"memory": "160Gi"}));
    put_quota(&api, "bad", "default", &json!({}));
    ask(&api, "red", &["a"]);
    let _late = api.hold("watch", "gpuquotas");
    let begin = std::time::Instant::now();
    let instance = Instance::start(&api, "a");
    let has_words = |namespace: &str| status(&api, namespace, "default").is_object();
    wait("both", || has_words("red") && has_words("bad")).await;
    let renewals = || api.count("update", "leases");
    let until = renewals() + 20;
    wait("twenty renewals", || renewals() >= until).await;
    // Ten looks of 20 ms lie between two writes: for each of the two, and the last is under way.
    let most = 2 * (2 + begin.elapsed().as_millis() / 200);
    let written = api.count("patch", "gpuquotas/status");
    assert!(u128::from(written) <= most, "{written} of {most}");
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grant_is_taken_away_from_a_claim_that_was_given_less() {
    let api = cluster();
    let mut small = mk_device("gpu-0");
    let memory = DeviceCapacity {
        value: Quantity("20Gi".into()),
        ..DeviceCapacity::default()
    };
    small.capacity = Some([("memory".to_owned(), memory)].into());
    let slice = mk_slice("n2-0", DRIVER, "n2", vec![small]);
    api.put(&slice).unwrap();
    put_quota(&api, "red", "default", &json!({"memory": "100Gi"}));
    ask(&api, "red", &["a", "b"]);
    let instance = Instance::start(&api, "a");
    wait("the first", || through(&api, "red") == ["a"]).await;
    let claim: ResourceClaim = api.get("red", "a").unwrap();
    let given = allocated(claim, vec![mk_result("gpu", DRIVER, "n2", "gpu-0")]);
    api.put(&given).unwrap();
    wait("the second", || through(&api, "red") == ["b"]).await;
    // The first has no grant any more: deallocated, it waits.
    let mut claim: ResourceClaim = api.get("red", "a").unwrap();
    claim.status = None;
    api.put(&claim).unwrap();
    wait("the first to wait", || {
        status(&api, "red", "default")["waiting"] == 1
    })
    .await;
    assert_eq!(through(&api, "red"), ["b"]);
    instance.stop().await;
}

/// The one thing that the API server is asked for while nothing changes is the Lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_written_or_listed_while_nothing_changes() {
    let api = cluster();
    put_quota(&api, "red", "default", &json!({"percent": 100}));
    ask(&api, "red", &["a", "b"]);
    let instance = Instance::start(&api, "a");
    wait("the status", || {
        status(&api, "red", "default")["waiting"] == 1
    })
    .await;
    let counts = || {
        [
            ("patch", "resourceclaims"),
            ("patch", "gpuquotas"),
            ("patch", "gpuquotas/status"),
        ]
        .map(|(verb, resource)| api.count(verb, resource))
    };
    // The look after the last write has seen that write.
    let lists = || api.count("list", "resourceclaims");
    let renewals = || api.count("update", "leases");
    let settle = renewals() + 20;
    wait("settled", || renewals() >= settle).await;
    let (before, listed) = (counts(), lists());
    let until = renewals() + 50;
    wait("many looks", || renewals() >= until).await;
    assert_eq!(counts(), before);
    assert_eq!(lists(), listed);
    instance.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bad_quota_lets_no_claim_through_says_so_and_stops_no_other() {
    let api = cluster();
    put_quota(&api, "red", "second", &json!({"memory": "500Gi"}));
    put_quota(&api, "green", "default", &json!({}));
    put_quota(&api, "blue", "default", &json!({"percent": 100}));
    for namespace in ["red", "green", "blue"] {
        ask(&api, namespace, &["a"]);
    }
    let instance = Instance::start(&api, "a");
    wait("the good one", || through(&api, "blue") == ["a"]).await;
    wait("the words", || {
        let says = |namespace, name: &str, words: &str| {
            let status = status(&api, namespace, name);
            status["message"]
                .as_str()
                .is_some_and(|message| message.contains(words))
        };
        says("red", "second", "delete this one") && says("green", "default", "sets no limit")
    })
    .await;
    assert_eq!(through(&api, "red"), Vec::<String>::new());
    assert_eq!(through(&api, "green"), Vec::<String>::new());
    // Mended, it counts, and its words go.
    put_quota(&api, "green", "default", &json!({"percent": 100}));
    wait("the mended one", || through(&api, "green") == ["a"]).await;
    wait("no words", || {
        status(&api, "green", "default").get("message").is_none()
    })
    .await;
    instance.stop().await;
}

/// Instances take turns while claims come: together they let through what one would.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instances_that_take_turns_let_no_more_through() {
    let api = cluster();
    put_quota(&api, "red", "default", &json!({"percent": 300}));
    for turn in 0..6 {
        let instance = Instance::start(&api, &format!("i{turn}"));
        ask(&api, "red", &[&format!("c{turn}")]);
        let wanted = 3.min(turn + 1);
        wait("the turn", || through(&api, "red").len() == wanted).await;
        wait("the status", || {
            status(&api, "red", "default")["waiting"] == json!(turn + 1 - wanted)
        })
        .await;
        instance.stop().await;
        assert_eq!(through(&api, "red").len(), wanted);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_of_a_new_node_lets_a_claim_through_that_waits_for_it() {
    let api = cluster();
    api.delete::<k8s_openapi::api::resource::v1::ResourceSlice>("", "n1-0")
        .unwrap();
    put_quota(&api, "red", "default", &json!({"percent": 100}));
    ask(&api, "red", &["a"]);
    let instance = Instance::start(&api, "a");
    wait("the look", || status(&api, "red", "default").is_object()).await;
    assert_eq!(through(&api, "red"), Vec::<String>::new());
    api.put(&mk_slice("n2-0", DRIVER, "n2", vec![mk_device("gpu-0")]))
        .unwrap();
    wait("the grant", || through(&api, "red") == ["a"]).await;
    instance.stop().await;
}

/// The program, beside this process; it ends with this value.
struct Program {
    child: std::process::Child,
    _folder: tempfile::TempDir,
}

impl Program {
    fn start(kubeconfig: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("kubeconfig");
        fs_err::write(&file, kubeconfig).unwrap();
        let mut command =
            std::process::Command::new(env!("CARGO_BIN_EXE_divvy-cluster-controller"));
        command
            .env("KUBECONFIG", file)
            .args(["--namespace", "divvy", "--identity", "a", "--quota", "true"])
            .args(["--http", "127.0.0.1:0", "--log-level", "warn"]);
        Self {
            child: command.spawn().unwrap(),
            _folder: folder,
        }
    }

    /// Returns its resident memory in MiB: now, and at its highest.
    fn resident_mib(&self) -> [u64; 2] {
        let status = format!("/proc/{}/status", self.child.id());
        let status = fs_err::read_to_string(status).unwrap();
        ["VmRSS:", "VmHWM:"].map(|name| {
            let mut lines = status.lines();
            let line = lines.find(|line| line.starts_with(name)).unwrap();
            let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            kib / 1024
        })
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// A thousand nodes with eight H100 that are everything, 8 000 claims in 50 namespaces with a
/// quota: prints what the controller takes, which writes it makes until all is let through, and
/// that it makes none after that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "prints figures: cargo test --release -p divvy-cluster-controller --test quota -- --ignored --nocapture"]
async fn costs_of_a_thousand_nodes() {
    let api = cluster();
    let slice = |node: &str| {
        let devices = (0..8).flat_map(|gpu| {
            (0..21).map(move |part| {
                let mut device = mk_device(&format!("gpu-{gpu}-mig-1g10gb-19-{part}"));
                let text = |text: String| json!({"string": text});
                let attributes = json!({
                    "type": text("mig".into()), "profile": text(format!("{part}g.10gb")),
                    "uuid": text(format!("MIG-{gpu}-{part}")), "productName": text("NVIDIA H100".into()),
                });
                device.attributes = Some(serde_json::from_value(attributes).unwrap());
                let memory = DeviceCapacity {
                    value: Quantity("10Gi".into()),
                    ..DeviceCapacity::default()
                };
                device.capacity = Some([("memory".to_owned(), memory)].into());
                device
            })
        });
        mk_slice(&format!("{node}-0"), DRIVER, node, devices.collect())
    };
    for node in 0..1000 {
        api.put(&slice(&format!("m{node}"))).unwrap();
    }
    for namespace in 0..50 {
        let namespace = format!("team-{namespace}");
        put_quota(&api, &namespace, "default", &json!({"memory": "12800Gi"}));
        for claim in 0..160 {
            let claim = format!("c{claim}");
            ask(&api, &namespace, &[&claim]);
        }
    }
    let server = api.serve_http().await.unwrap();
    let program = Program::start(&server.kubeconfig());
    let granted = || api.count("patch", "resourceclaims");
    while granted() < 8000 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let writes = || granted() + api.count("patch", "gpuquotas/status");
    let renewals = || api.count("update", "leases");
    // Until ten renewals pass without a write.
    let (mut made, mut since) = (writes(), renewals());
    while renewals() < since + 10 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        if writes() != made {
            (made, since) = (writes(), renewals());
        }
    }
    let claims = |namespace: usize| status(&api, &format!("team-{namespace}"), "default");
    assert!((0..50).all(|namespace| claims(namespace)["claims"] == 160));
    let [now, most] = program.resident_mib();
    println!(
        "memory of the controller with 1000 nodes: {now} MiB, {most} at most; writes for 8000 claims: {made}, lists: {}; \
         writes in the last 10 renewals of the Lease: {}",
        api.count("list", "resourceclaims"),
        writes() - made
    );
    assert!(made < 8000 + 50 * 20, "{made}");
}
