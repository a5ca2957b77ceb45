//! `divvy top` and `divvy ui` as their users run them: the program, a kubeconfig, an API server on
//! a port, and behind its proxy a node plugin.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::process::{Output, Stdio};

use divvy_fake_cluster::build::{
    allocated, mk_claim, mk_device, mk_node, mk_pod, mk_result, mk_slice, reserved,
};
use divvy_fake_cluster::{FakeApi, Fault, GpuNode, HttpServer};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};

const DRIVER: &str = "gpu.divvy.dev";
const GPU: &str = "GPU-12345678-1234-1234-1234-123456780000";

struct Cluster {
    api: FakeApi,
    _server: HttpServer,
    dir: tempfile::TempDir,
}

impl Cluster {
    /// Makes a node with one GPU, which a claim holds, and the pod of its plugin.
    async fn new() -> Self {
        let api = FakeApi::new();
        api.put(&mk_node("n1")).unwrap();
        let mut device = mk_device("gpu-0");
        device.capacity = serde_json::from_value(json!({ "memory": { "value": "80Gi" } })).unwrap();
        let mut slice: ResourceSlice = mk_slice("n1-0", DRIVER, "n1", vec![device]);
        "n1/divvy".clone_into(&mut slice.spec.pool.name);
        api.put(&slice).unwrap();
        let claim = mk_claim("default", "held", DRIVER, 1);
        let claim = allocated(claim, vec![mk_result("gpu", DRIVER, "n1/divvy", "gpu-0")]);
        api.put(&reserved(claim, "runs", "u") as &ResourceClaim)
            .unwrap();
        let mut node = GpuNode::new("n1", Value::Null);
        node.status = json!({ "summary": { "gpus": 1 }, "gpus": [{ "name": "gpu-0", "uuid": GPU, "mode": "whole" }] });
        api.put(&node).unwrap();
        let mut plugin: Pod = mk_pod("gpu-system", "divvy-node-abc", Some("n1"), &[]);
        plugin.metadata.labels = serde_json::from_value(
            json!({ "app.kubernetes.io/part-of": "divvy", "app.kubernetes.io/component": "node" }),
        )
        .unwrap();
        plugin.status = serde_json::from_value(json!({ "phase": "Running" })).unwrap();
        plugin.spec.as_mut().unwrap().containers = serde_json::from_value(json!([
            { "name": "plugin", "ports": [{ "name": "http", "containerPort": 9555 }] }
        ]))
        .unwrap();
        api.put(&plugin).unwrap();
        let labels = format!(
            "namespace=\"default\",claim=\"held\",pod=\"runs\",device=\"gpu-0\",UUID=\"{GPU}\""
        );
        let metrics = format!(
            "divvy_claim_memory_used_bytes{{{labels}}} 21474836480\ndivvy_claim_idle_seconds{{{labels}}} 7200\n# EOF\n"
        );
        api.put_behind_proxy("gpu-system", "divvy-node-abc:9555", "/metrics", &metrics);
        let server = api.serve_http().await.unwrap();
        let dir = tempfile::tempdir().unwrap();
        fs_err::write(dir.path().join("config"), server.kubeconfig()).unwrap();
        Self {
            api,
            _server: server,
            dir,
        }
    }

    fn command(&self, args: &[&str]) -> tokio::process::Command {
        let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_divvy"));
        command
            .args(args)
            .arg("--kubeconfig")
            .arg(self.dir.path().join("config"))
            .env_remove("KUBECONFIG");
        command.kill_on_drop(true);
        command
    }

    /// Exit status, standard output and standard error.
    async fn run(&self, args: &[&str]) -> (Option<i32>, String) {
        let Output {
            status,
            stdout,
            stderr,
        } = self.command(args).output().await.unwrap();
        (
            status.code(),
            String::from_utf8([stdout, stderr].concat()).unwrap(),
        )
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_reads_what_the_plugins_serve_through_the_api_server() {
    let cluster = Cluster::new().await;
    let (code, claims) = cluster.run(&["top"]).await;
    assert_eq!(code, Some(0), "{claims}");
    let line =
        "default/held  runs  n1    gpu-0   80 GiB   20 GiB  60 GiB  ?     2h0m  idle, allocated\n";
    assert!(claims.ends_with(line), "{claims}");
    let (_, nodes) = cluster.run(&["top", "nodes", "-o", "json"]).await;
    let nodes: Value = serde_json::from_str(&nodes).unwrap();
    assert_eq!(
        nodes["nodes"][0]["wastedTotal"],
        json!({ "bytes": 60_u64 << 30, "unknown": 0 }),
        "{nodes}"
    );
    assert_eq!(nodes["unread"], json!([]));
    assert_eq!(cluster.run(&["top", "gpus", "-o", "wide"]).await.0, Some(0));
    let (code, text) = cluster.run(&["top", "pods"]).await;
    assert_eq!(code, Some(2), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_the_right_to_read_use_top_names_it_and_shows_what_is_granted() {
    let cluster = Cluster::new().await;
    let unknown =
        "default/held  runs  n1    gpu-0   80 GiB   ?     ?       ?     ?     allocated\n";
    for (verb, resource, right) in [
        (
            "get",
            "pods/proxy",
            "you may not get pods/proxy in namespace gpu-system; ask a cluster admin",
        ),
        // The first list is that of pods which wait.
        (
            "list",
            "pods",
            "you may not list pods in the whole cluster; ask a cluster admin",
        ),
    ] {
        cluster.api.fail_next(3, verb, resource, Fault::Status(403));
        let (code, text) = cluster.run(&["top"]).await;
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains(unknown) && text.contains(right), "{text}");
        cluster.api.clear_faults();
    }
    cluster
        .api
        .fail_next(1, "get", "pods/proxy", Fault::Status(500));
    let (code, text) = cluster.run(&["top", "claims"]).await;
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.contains(unknown) && text.contains("/metrics of divvy-node-abc cannot be read"),
        "{text}"
    );
    cluster
        .api
        .delete::<Pod>("gpu-system", "divvy-node-abc")
        .unwrap();
    let (_, text) = cluster.run(&["top"]).await;
    assert!(
        text.contains(unknown) && text.contains("no node plugin runs"),
        "{text}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ui_listens_on_loopback_only_unless_the_host_is_named() {
    let cluster = Cluster::new().await;
    for listen in ["0.0.0.0:0", "[::]:0", "192.0.2.1:80"] {
        let (code, text) = cluster.run(&["ui", "--no-open", "--listen", listen]).await;
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("--allow-host"), "{text}");
    }
    // With a name it serves that name and no other.
    let mut ui = cluster.command(&[
        "ui",
        "--no-open",
        "--listen",
        "0.0.0.0:0",
        "--allow-host",
        "gpus.example.com",
    ]);
    let mut ui = ui
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(ui.stdout.take().unwrap()).lines();
    let link = lines.next_line().await.unwrap().unwrap();
    let (host, token) = link
        .strip_prefix("http://")
        .unwrap()
        .split_once("/?")
        .unwrap();
    let port = host.strip_prefix("gpus.example.com:").unwrap();
    for (host, expected) in [
        (format!("127.0.0.1:{port}"), "421"),
        (host.to_owned(), "200"),
    ] {
        let mut stream = tokio::net::TcpStream::connect(format!("127.0.0.1:{port}"))
            .await
            .unwrap();
        let request = format!("GET /?{token} HTTP/1.1\r\nhost: {host}\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {expected} ")),
            "{host}: {answer}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ui_needs_a_cluster_that_answers() {
    let cluster = Cluster::new().await;
    let (code, text) = cluster
        .run(&["ui", "--no-open", "--context", "nowhere"])
        .await;
    assert_eq!(code, Some(1), "{text}");
    cluster
        .api
        .fail_next(1, "get", "version", Fault::Status(500));
    let (code, text) = cluster.run(&["ui", "--no-open"]).await;
    assert_eq!(code, Some(1), "{text}");
    // Which server that is, and no link to a page.
    assert!(text.contains("divvy: cluster http://127.0.0.1:"), "{text}");
    assert!(
        !text.contains("token=") && text.contains("the API server does not answer"),
        "{text}"
    );
}
