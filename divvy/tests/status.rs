//! `divvy status` as its users run it: the program, a kubeconfig, an API server on a port.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::path::{Path, PathBuf};
use std::process::Output;

use divvy_fake_cluster::build::{
    allocated, mk_claim, mk_class, mk_device, mk_node, mk_pod, mk_result, mk_slice, reserved,
};
use divvy_fake_cluster::{FakeApi, Fault, GpuNode, GpuPolicy, HttpServer};
use k8s_openapi::api::core::v1::{Node, Pod, PodStatus};
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, DeviceSelector, DeviceTaintRule, ResourceClaim, ResourceSlice,
};
use serde_json::{Value, json};

const DRIVER: &str = "gpu.divvy.dev";

struct Cluster {
    api: FakeApi,
    _server: HttpServer,
    dir: tempfile::TempDir,
}

impl Cluster {
    /// Makes a node with one GPU, which a claim holds, and a pod that waits for it.
    async fn new() -> Self {
        let api = FakeApi::new();
        api.put(&mk_node("n1")).unwrap();
        api.put(&mk_class(DRIVER, DRIVER)).unwrap();
        let mut slice: ResourceSlice = mk_slice("n1-0", DRIVER, "n1", vec![mk_device("gpu-0")]);
        "n1/divvy".clone_into(&mut slice.spec.pool.name);
        api.put(&slice).unwrap();
        let held = allocated(
            mk_claim("default", "held", DRIVER, 1),
            vec![mk_result("gpu", DRIVER, "n1/divvy", "gpu-0")],
        );
        let held: ResourceClaim = api.put(&reserved(held, "runs", "u")).unwrap();
        api.put(&mk_claim("default", "waits", DRIVER, 1)).unwrap();
        let status = PodStatus {
            phase: Some("Pending".to_owned()),
            ..PodStatus::default()
        };
        let pod = Pod {
            status: Some(status),
            ..mk_pod("default", "w", None, &["waits"])
        };
        api.put(&pod).unwrap();
        let mut node = GpuNode::new("n1", Value::Null);
        node.status = json!({
            "summary": { "gpus": 1, "free": 0, "claims": 1, "modes": "1 whole" },
            "versions": { "divvy": "0.1.0", "driver": "580.95.05" },
            "gpus": [{
                "name": "gpu-0", "uuid": "GPU-12345678-1234-1234-1234-123456780000", "mode": "whole", "offered": ["whole"],
                "holders": [{ "namespace": "default", "name": "held", "uid": held.metadata.uid, "device": "gpu-0", "phase": "prepared" }],
            }],
        });
        api.put(&node).unwrap();
        let server = api.serve_http().await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("config"), server.kubeconfig()).unwrap();
        Self {
            api,
            _server: server,
            dir,
        }
    }

    async fn run(&self, program: &Path, args: &[&str]) -> Output {
        let mut command = tokio::process::Command::new(program);
        command
            .args(args)
            .arg("--kubeconfig")
            .arg(self.dir.path().join("config"));
        command.env_remove("KUBECONFIG").output().await.unwrap()
    }

    async fn status(&self, args: &[&str]) -> (Option<i32>, String) {
        let all: Vec<&str> = ["status"].iter().chain(args).copied().collect();
        let output = self.run(divvy(), &all).await;
        let text = [output.stdout, output.stderr].concat();
        (output.status.code(), String::from_utf8(text).unwrap())
    }
}

fn divvy() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_divvy"))
}

/// The scheduler adds the taints of an administrator's rules to those that drivers publish.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_of_an_administrator_that_taints_devices_is_why_a_claim_waits() {
    let cluster = Cluster::new().await;
    let mut free: ResourceSlice = mk_slice("n2-0", DRIVER, "n2", vec![mk_device("gpu-0")]);
    "n2/divvy".clone_into(&mut free.spec.pool.name);
    cluster.api.put(&mk_node("n2")).unwrap();
    cluster.api.put(&free).unwrap();
    let (_, fits) = cluster.status(&["claim", "waits"]).await;
    assert!(!fits.contains("example.com/broken"), "{fits}");
    for (name, selector) in [
        ("none", None),
        ("other", Some("n3/divvy")),
        ("this", Some("n2/divvy")),
    ] {
        let selector = selector.map(|pool| json!({ "driver": DRIVER, "pool": pool }));
        let rule: DeviceTaintRule = serde_json::from_value(json!({
            "metadata": { "name": name },
            "spec": { "deviceSelector": selector, "taint": { "key": format!("example.com/{name}"), "effect": "NoSchedule" } },
        }))
        .unwrap();
        cluster.api.put(&rule).unwrap();
    }
    let (_, waits) = cluster.status(&["claim", "waits"]).await;
    assert!(
        waits.contains("on node n2 gpu-0 is tainted with example.com/this:NoSchedule, and the taint example.com/this is of DeviceTaintRule this"),
        "{waits}"
    );
    assert!(
        !waits.contains("example.com/other") && !waits.contains("example.com/none"),
        "{waits}"
    );
}

/// The example's rule, on a GPU in several forms. An administrator who has written it believes that
/// the GPU is out of service.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rule_that_leaves_a_gpu_in_service_is_named() {
    let cluster = Cluster::new().await;
    let forms = ["gpu-0", "gpu-0-ts", "gpu-0-mig-1g10gb-19-0", "gpu-1"];
    let devices = forms.iter().map(|name| mk_device(name)).collect();
    let mut slice: ResourceSlice = mk_slice("n2-0", DRIVER, "n2", devices);
    "n2/divvy".clone_into(&mut slice.spec.pool.name);
    cluster.api.put(&mk_node("n2")).unwrap();
    cluster.api.put(&slice).unwrap();
    let example = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../examples/device-taint/taint.yaml"
    );
    let example = fs_err::read_to_string(example).unwrap();
    let rule = |name: &str, pool: &str, device: &str| {
        let text = example
            .replace("NODE/divvy", pool)
            .replace(": gpu-0", &format!(": {device}"));
        let mut rule: DeviceTaintRule = serde_saphyr::from_str(&text).unwrap();
        rule.metadata.name = Some(name.to_owned());
        rule
    };
    for (name, pool, device) in [
        ("by-node", "n2", "gpu-0"),
        ("no-pool", "n7/divvy", "gpu-0"),
        ("no-device", "n2/divvy", "gpu-9"),
    ] {
        cluster.api.put(&rule(name, pool, device)).unwrap();
    }
    let (code, text) = cluster.status(&[]).await;
    assert_eq!(code, Some(3), "{text}");
    for words in [
        "n2 is a node and no pool",
        "set spec.deviceSelector.pool to n2/divvy",
        "no pool \"n7/divvy\" of gpu.divvy.dev is published",
        "no device is called gpu-9 there",
    ] {
        assert!(text.contains(words), "no {words:?} in {text}");
    }
    for name in ["by-node", "no-pool", "no-device"] {
        cluster.api.delete::<DeviceTaintRule>("", name).unwrap();
    }

    cluster
        .api
        .put(&rule("whole", "n2/divvy", "gpu-0"))
        .unwrap();
    let (_, text) = cluster.status(&[]).await;
    let left = "keeps claims off gpu-0 only, and they can have the same GPU as gpu-0-mig-1g10gb-19-0, gpu-0-ts";
    assert!(text.contains(left), "{text}");
    for form in &forms[1..3] {
        cluster.api.put(&rule(form, "n2/divvy", form)).unwrap();
    }
    let (_, text) = cluster.status(&[]).await;
    assert!(!text.contains("DeviceTaintRule"), "{text}");
}

/// Kubernetes evicts by the claims in a pod's spec, and these have theirs in the status.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_that_an_evicting_taint_leaves_is_named() {
    let cluster = Cluster::new().await;
    let named = |code, text: &str| {
        assert_eq!(code, Some(3), "{text}");
        assert!(text.contains("n1 gpu-0 gpu-0: not-evicted"), "{text}");
        assert!(
            text.contains("kubectl -n default delete pod runs"),
            "{text}"
        );
    };
    let mut slice = cluster.api.get::<ResourceSlice>("", "n1-0").unwrap();
    let taint = json!([{ "key": "gpu.divvy.dev/xid", "value": "79", "effect": "NoExecute" }]);
    let devices = slice.spec.devices.as_mut().unwrap();
    devices[0].taints = serde_json::from_value(taint).unwrap();
    cluster.api.put(&slice).unwrap();
    let (_, text) = cluster.status(&[]).await;
    assert!(!text.contains("not-evicted"), "of a claim: {text}");
    let mut claim = cluster.api.get::<ResourceClaim>("default", "held").unwrap();
    claim.metadata.annotations = Some(
        [(
            "resource.kubernetes.io/extended-resource-claim".to_owned(),
            "true".to_owned(),
        )]
        .into(),
    );
    cluster.api.put(&claim).unwrap();
    for about in [&[][..], &["gpu", "n1/gpu-0"]] {
        let (code, text) = cluster.status(about).await;
        named(code, &text);
    }
}

/// A claim's CEL is its tenant's text, and an administrator's terminal shows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_text_of_tenants_cannot_clear_an_administrators_terminal() {
    let cluster = Cluster::new().await;
    let mut free: ResourceSlice = mk_slice("n2-0", DRIVER, "n2", vec![mk_device("gpu-0")]);
    "n2/divvy".clone_into(&mut free.spec.pool.name);
    cluster.api.put(&mk_node("n2")).unwrap();
    cluster.api.put(&free).unwrap();
    let mut claim: ResourceClaim = mk_claim("default", "evil", DRIVER, 1);
    let expression =
        "device.attributes['gpu.divvy.dev'].productName == '\u{1b}[2J\u{1b}[31mOWNED\u{202e}'";
    let devices = claim.spec.as_mut().unwrap().devices.as_mut().unwrap();
    let request = devices.requests.as_mut().unwrap()[0]
        .exactly
        .as_mut()
        .unwrap();
    request.selectors = Some(vec![DeviceSelector {
        cel: Some(CELDeviceSelector {
            expression: expression.to_owned(),
        }),
    }]);
    cluster.api.put(&claim).unwrap();
    let status = PodStatus {
        phase: Some("Pending".to_owned()),
        ..PodStatus::default()
    };
    let pod = Pod {
        status: Some(status),
        ..mk_pod("default", "evil", None, &["evil"])
    };
    cluster.api.put(&pod).unwrap();
    // Expressions are for wide output.
    for about in [&["-o", "wide"][..], &["claim", "evil", "-o", "wide"]] {
        let (_, text) = cluster.status(about).await;
        assert!(text.contains(r"\u{1b}[2J"), "{text:?}");
        assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_exit_status_of_every_answer_shows_whether_action_is_required() {
    let cluster = Cluster::new().await;
    let (code, fleet) = cluster.status(&[]).await;
    assert_eq!(code, Some(0), "{fleet}");
    assert!(
        fleet.contains("\nn1    1     0     1       1 whole  -        580.95.05  -\n"),
        "{fleet}"
    );
    assert!(fleet.contains("pod default/w"), "{fleet}");
    assert!(
        fleet.contains("n1 gpu-0 is whole for runs: it starts when n1 gpu-0 is free"),
        "{fleet}"
    );
    let (_, wide) = cluster.status(&["-o", "wide"]).await;
    assert!(wide.contains("held by default/held"), "{wide}");
    assert!(fleet.ends_with("\nno action required\n"), "{fleet}");
    let (code, claim) = cluster.status(&["claim", "waits"]).await;
    assert_eq!(code, Some(0), "{claim}");
    assert!(
        claim.starts_with("claim default/waits, pods w\nwaiting: no device is allocated"),
        "{claim}"
    );
    let (_, claim) = cluster
        .status(&["claim", "default/held", "-o", "json"])
        .await;
    let claim: Value = serde_json::from_str(&claim).unwrap();
    let device = &claim["devices"][0];
    assert_eq!(
        (&claim["state"], &device["node"], &device["phase"]),
        (&json!("prepared"), &json!("n1"), &json!("prepared"))
    );
    assert_eq!(cluster.status(&["gpu", "GPU-12345678"]).await.0, Some(0));
    let (_, yaml) = cluster.status(&["node", "n1", "-o", "yaml"]).await;
    assert!(yaml.starts_with("needsPerson: false\n"), "{yaml}");

    cluster.api.modify::<GpuNode>("", "n1", |node| {
        node.status["troubles"] = json!([{ "kind": "lost", "gpu": "gpu-0", "why": "the GPU fell off the bus", "since": "2026-11-21T19:48:00Z" }]);
    }).unwrap();
    for about in [
        &[][..],
        &["node", "n1"],
        &["gpu", "n1/gpu-0"],
        &["claim", "held"],
    ] {
        let (code, text) = cluster.status(about).await;
        assert_eq!(code, Some(3), "{text}");
        assert!(
            text.contains("  n1 gpu-0: lost, for ")
                && text.contains("why: the GPU fell off the bus"),
            "{text}"
        );
    }
}

/// An object that may not be read is not taken for one that does not exist.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_credentials_and_missing_rights_are_the_answer() {
    let cluster = Cluster::new().await;
    cluster
        .api
        .fail_next(1, "list", "gpunodes", Fault::Status(401));
    let (code, text) = cluster.status(&[]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("the API server refuses your credentials (401): log in again"),
        "{text}"
    );
    cluster.api.fail_next(9, "list", "pods", Fault::Status(403));
    let (code, text) = cluster.status(&["pod", "default/w"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains(
            "you may not list pods in namespace default (kubectl auth can-i list pods -n default)"
        ),
        "{text}"
    );
    assert!(!text.contains("does not exist"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unreadable_kinds_are_named_and_a_missing_object_is_an_error() {
    let cluster = Cluster::new().await;
    cluster
        .api
        .fail_next(2, "list", "resourceclaims", Fault::Status(403));
    let (code, text) = cluster.status(&[]).await;
    assert_eq!(code, Some(0), "{text}");
    let right = "unknown:\n  ResourceClaims cannot be listed; unknown: which claims hold devices and which wait (you may not list \
                 resourceclaims.resource.k8s.io in the whole cluster; ask a cluster admin for a ClusterRoleBinding to view, \
                 or choose a namespace that you may read (-n))\n\nno action required, as far as is known";
    assert!(text.contains(right), "{text}");
    // Those of one namespace may be.
    cluster
        .api
        .fail_next(1, "list", "resourceclaims", Fault::Status(403));
    let (code, text) = cluster.status(&["claim", "default/held"]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("devices are ready"), "{text}");
    assert!(
        text.contains("ResourceClaims of namespaces other than default cannot be listed"),
        "{text}"
    );
    for (resource, words) in [
        (
            "gpunodes",
            "ask a cluster admin for a ClusterRoleBinding to divvy-view",
        ),
        (
            "nodes",
            "list nodes in the whole cluster; ask a cluster admin for a ClusterRole that grants it",
        ),
        (
            "resourceslices",
            "unknown: the published devices (you may not list",
        ),
        (
            "deviceclasses",
            "unknown: which devices the classes select (you may not list",
        ),
    ] {
        cluster
            .api
            .fail_next(1, "list", resource, Fault::Status(403));
        let (code, text) = cluster.status(&[]).await;
        assert_eq!(
            code,
            Some(0),
            "nothing is wrong where {resource} may not be read: {text}"
        );
        assert!(text.contains(words), "{text}");
    }
    cluster.api.unregister::<GpuNode>();
    let (code, text) = cluster.status(&["node", "n1"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("GpuNodes are not served: the CRD gpunodes.divvy.dev is missing"),
        "{text}"
    );
    cluster
        .api
        .fail_next(1, "get", "version", Fault::Status(500));
    let (code, text) = cluster.status(&[]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.starts_with("divvy: cluster http://127.0.0.1:"),
        "{text}"
    );
    let (code, text) = cluster.status(&["--context", "nowhere"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("nowhere"), "{text}");
}

/// Plugins cannot report where the definition of their reports is gone: that is said, and not that
/// they are silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deleted_crd_is_named_and_no_plugin_is_blamed_for_it() {
    let cluster = Cluster::new().await;
    let labels = |node: &mut Node| {
        let gpu = ("divvy.dev/gpu".to_owned(), "true".to_owned());
        node.metadata.labels = Some([gpu].into());
    };
    cluster.api.modify::<Node>("", "n1", labels).unwrap();
    cluster.api.unregister::<GpuNode>();
    let (code, text) = cluster.status(&[]).await;
    assert_eq!(code, Some(3), "{text}");
    let says = "the CRD gpunodes.divvy.dev is missing, and divvy's chart installs it (helm upgrade --install";
    assert!(text.contains(says), "{text}");
    assert!(!text.contains("no-report"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_beginning_of_many_uuids_says_how_many_there_are() {
    let cluster = Cluster::new().await;
    let gpu = |n: u32| json!({ "name": format!("gpu-{n}"), "uuid": format!("GPU-1234567{n}"), "mode": "idle" });
    let gpus: Vec<Value> = (0..8).map(gpu).collect();
    let many = |node: &mut GpuNode| node.status["gpus"] = json!(gpus);
    cluster.api.modify::<GpuNode>("", "n1", many).unwrap();
    let (code, text) = cluster.status(&["gpu", "GPU-1234"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("n1/gpu-4 and 3 more; give more of the UUID"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shared_gpu_shows_what_each_claim_has_and_what_is_left() {
    let cluster = Cluster::new().await;
    let device = json!({
        "name": "gpu-0-ts", "allowMultipleAllocations": true,
        "capacity": { "memory": { "value": "80Gi" }, "cores": { "value": "100" }, "slots": { "value": "16" } },
    });
    let share = |slice: &mut ResourceSlice| {
        slice.spec.devices = Some(vec![serde_json::from_value(device).unwrap()]);
    };
    cluster
        .api
        .modify::<ResourceSlice>("", "n1-0", share)
        .unwrap();
    let held = |claim: &mut ResourceClaim| {
        let devices = claim
            .status
            .as_mut()
            .unwrap()
            .allocation
            .as_mut()
            .unwrap()
            .devices
            .as_mut();
        let result = &mut devices.unwrap().results.as_mut().unwrap()[0];
        "gpu-0-ts".clone_into(&mut result.device);
        let granted = json!({ "memory": "10Gi", "cores": "25", "slots": "1" });
        result.consumed_capacity = Some(serde_json::from_value(granted).unwrap());
    };
    cluster
        .api
        .modify::<ResourceClaim>("default", "held", held)
        .unwrap();
    let as_share = |node: &mut GpuNode| {
        node.status["gpus"][0]["holders"][0]["device"] = json!("gpu-0-ts");
        node.status["gpus"][0]["mode"] = json!("time-sliced");
    };
    cluster.api.modify::<GpuNode>("", "n1", as_share).unwrap();
    let (code, text) = cluster.status(&["gpu", "n1/gpu-0"]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("memory 10 GiB, cores 25, slots 1"), "{text}");
    let left = "left for shares: memory 70 GiB of 80 GiB, cores 75 of 100, slots 15 of 16";
    assert!(text.contains(left), "{text}");
}

/// The kubelet asks for a claim again and again while the one before it is still leaving.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_waits_for_the_former_holder_says_for_whom() {
    let cluster = Cluster::new().await;
    let leaving = |node: &mut GpuNode| {
        node.status["gpus"][0]["holders"] = json!([{
            "namespace": "default", "name": "before", "uid": "b", "device": "gpu-0-ts", "phase": "leaving",
            "reason": "process 42 is still on it", "pods": ["old"],
        }]);
    };
    cluster.api.modify::<GpuNode>("", "n1", leaving).unwrap();
    let (_, text) = cluster.status(&["claim", "held"]).await;
    assert!(
        text.contains("gpu-0: waits until claim default/before (pod old) has left gpu-0; it is leaving: process 42 is still on it"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_kubeconfig_is_reported_once() {
    let output = tokio::process::Command::new(divvy())
        .arg("status")
        .env("KUBECONFIG", "/nowhere/config")
        .output()
        .await
        .unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(text.matches("/nowhere/config").count(), 1, "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn under_the_name_kubectl_divvy_it_is_a_plugin_of_kubectl() {
    let cluster = Cluster::new().await;
    let plugin: PathBuf = cluster.dir.path().join("kubectl-divvy");
    std::os::unix::fs::symlink(divvy(), &plugin).unwrap();
    let output = cluster.run(&plugin, &["status"]).await;
    assert_eq!(output.status.code(), Some(0));
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .starts_with("NODE")
    );
    let help = tokio::process::Command::new(&plugin)
        .args(["status", "--help"])
        .output()
        .await
        .unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    assert!(
        help.contains("Usage: kubectl divvy status [OPTIONS] [COMMAND]"),
        "{help}"
    );
}

/// Users know their pods: by name or its beginning, and also where a claim is asked for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pod_is_found_by_name_by_its_beginning_and_in_place_of_a_claim() {
    let cluster = Cluster::new().await;
    let (code, pod) = cluster.status(&["pod", "default/w"]).await;
    assert_eq!(code, Some(0), "{pod}");
    assert!(pod.starts_with("pod default/w\nwaiting: "), "{pod}");
    assert!(pod.contains("default/waits  waiting"), "{pod}");
    assert!(
        pod.contains("why: n1 gpu-0 is whole for runs: it starts when n1 gpu-0 is free"),
        "{pod}"
    );
    let long: Pod = Pod {
        status: Some(PodStatus {
            phase: Some("Running".to_owned()),
            ..PodStatus::default()
        }),
        ..mk_pod("default", "train-5d9c7b-x2k4p", Some("n1"), &["held"])
    };
    cluster.api.put(&long).unwrap();
    let (code, pod) = cluster.status(&["pod", "train", "-o", "json"]).await;
    assert_eq!(code, Some(0), "{pod}");
    let pod: Value = serde_json::from_str(&pod).unwrap();
    assert_eq!(
        (&pod["pod"], &pod["step"], &pod["claims"][0]["state"]),
        (
            &json!("default/train-5d9c7b-x2k4p"),
            &json!("running"),
            &json!("prepared")
        )
    );
    let (code, claim) = cluster.status(&["claim", "default/w"]).await;
    assert_eq!(code, Some(0), "{claim}");
    assert!(
        claim.contains("there is no claim default/w; this is the pod of that name"),
        "{claim}"
    );
    let (code, none) = cluster.status(&["pod", "nothing"]).await;
    assert_eq!(code, Some(1), "{none}");
    assert!(
        none.contains("pod default/nothing does not exist"),
        "{none}"
    );
    cluster
        .api
        .fail_next(1, "list", "events", Fault::Status(403));
    let (_, pod) = cluster.status(&["pod", "w"]).await;
    assert!(
        pod.contains("Events of namespace default cannot be listed"),
        "{pod}"
    );
}

/// The policy's author sees whether it does anything, by exit status, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_policy_is_judged_by_what_the_nodes_report() {
    let cluster = Cluster::new().await;
    let (code, none) = cluster.status(&["policy"]).await;
    assert_eq!(code, Some(0), "{none}");
    assert!(none.starts_with("there is no GpuPolicy"), "{none}");
    let numbered = |number: u32| json!({ "rules": [{ "gpus": { "ordinals": [number] } }] });
    let policy = GpuPolicy::new("p", numbered(0));
    cluster.api.put(&policy).unwrap();
    cluster
        .api
        .modify::<GpuNode>("", "n1", |node| {
            node.status["gpus"][0]["policy"] = json!("p/rules[0]");
        })
        .unwrap();
    let (code, decides) = cluster.status(&["policy"]).await;
    assert_eq!(code, Some(0), "{decides}");
    assert!(
        decides.contains("p       0         rules[0]  1      1\n"),
        "{decides}"
    );
    cluster.api.put(&GpuPolicy::new("q", numbered(7))).unwrap();
    cluster
        .api
        .put(&GpuPolicy::new("bad", json!({ "rules": 1 })))
        .unwrap();
    let plugin: PathBuf = cluster.dir.path().join("kubectl-divvy");
    std::os::unix::fs::symlink(divvy(), &plugin).unwrap();
    let output = cluster.run(&plugin, &["status", "policy"]).await;
    let all = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(3), "{all}");
    assert!(
        all.contains("gpus.ordinals: no GPU of its nodes has 7"),
        "{all}"
    );
    assert!(
        all.contains("bad: bad-policy\n    why: spec.rules: must be a list"),
        "{all}"
    );
    let (code, one) = cluster.status(&["policy", "p", "-o", "json"]).await;
    assert_eq!(code, Some(0), "{one}");
    let one: Value = serde_json::from_str(&one).unwrap();
    assert_eq!(
        one["policies"][0]["rules"][0]["decides"],
        json!({ "n1": ["gpu-0"] })
    );
    let (_, yaml) = cluster.status(&["policy", "q", "-o", "yaml"]).await;
    assert!(yaml.starts_with("needsPerson: true\n"), "{yaml}");
    let (code, text) = cluster.status(&["policy", "r"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.ends_with("GpuPolicy r does not exist; there are bad, p, q\n"),
        "{text}"
    );
    cluster
        .api
        .fail_next(1, "list", "gpupolicies", Fault::Status(403));
    let (code, text) = cluster.status(&["policy", "p"]).await;
    assert_eq!(code, Some(1), "{text}");
    assert!(
        text.contains("GpuPolicies cannot be listed; unknown: what the policies say"),
        "{text}"
    );
    cluster.api.unregister::<GpuPolicy>();
    let (code, text) = cluster.status(&["policy"]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(text.contains("GpuPolicies are not served"), "{text}");
}
