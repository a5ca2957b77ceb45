//! `divvy bundle` and completion as their users run them: the program, a kubeconfig, an API server.

#![expect(
    clippy::unwrap_used,
    reason = "helpers of tests; clippy excepts only the test functions themselves"
)]

use std::path::Path;
use std::process::Output;

use divvy_fake_cluster::build::{mk_claim, mk_class, mk_device, mk_node, mk_pod, mk_slice};
use divvy_fake_cluster::{FakeApi, Fault, HttpServer};
use k8s_openapi::api::core::v1::{EnvVar, Pod};

const DRIVER: &str = "gpu.divvy.dev";

struct Cluster {
    api: FakeApi,
    _server: HttpServer,
    dir: tempfile::TempDir,
}

impl Cluster {
    /// Makes a node with one GPU, a claim, and a pod of divvy's own with a secret in a variable.
    async fn new() -> Self {
        let api = FakeApi::new();
        api.put(&mk_node("n1")).unwrap();
        api.put(&mk_class(DRIVER, DRIVER)).unwrap();
        api.put(&mk_slice("n1-0", DRIVER, "n1", vec![mk_device("gpu-0")]))
            .unwrap();
        api.put(&mk_claim("team-a", "train", DRIVER, 1)).unwrap();
        let mut pod: Pod = mk_pod("divvy", "divvy-node-x", Some("n1"), &[]);
        let labels = [("app.kubernetes.io/name".to_owned(), "divvy".to_owned())];
        pod.metadata.labels = Some(labels.into());
        for container in pod.spec.iter_mut().flat_map(|spec| &mut spec.containers) {
            container.env = Some(vec![EnvVar {
                name: "PASSWORD".to_owned(),
                value: Some("hunter2".to_owned()),
                value_from: None,
            }]);
        }
        api.put(&pod).unwrap();
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
            .env("KUBECONFIG", self.dir.path().join("config"));
        command.output().await.unwrap()
    }
}

fn divvy() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_divvy"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_bundle_has_what_may_be_read_without_secrets_and_names_the_rest() {
    let cluster = Cluster::new().await;
    let forbidden = [("nodes", 2), ("resourceclaims", 1)];
    for (resource, times) in forbidden {
        cluster
            .api
            .fail_next(times, "list", resource, Fault::Status(403));
    }
    let folder = cluster.dir.path().join("bundle");
    let output = cluster
        .run(divvy(), &["bundle", "-o", &folder.to_string_lossy()])
        .await;
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert!(
        said.contains("without secrets. Look through it before you send it"),
        "{said}"
    );
    assert!(
        said.contains("not in it: nodes: you may not read them"),
        "{said}"
    );
    let read = |path: &str| fs_err::read_to_string(folder.join(path)).unwrap();
    assert!(read("README.txt").contains("- nodes: you may not read them"));
    assert!(read("README.txt").starts_with("divvy 0."));
    assert!(read("objects/resourceslices.json").contains("gpu-0"));
    assert!(read("status.json").starts_with('{'));
    let pods = read("objects/pods.json");
    assert!(
        pods.contains("divvy-node-x") && pods.contains("PASSWORD"),
        "{pods}"
    );
    assert!(!pods.contains("hunter2"), "{pods}");
    assert!(!folder.join("objects/nodes.json").exists());
    // What is there is never written over.
    let again = cluster
        .run(divvy(), &["bundle", "-o", &folder.to_string_lossy()])
        .await;
    assert_eq!(again.status.code(), Some(1), "{again:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_archive_has_the_same_files() {
    let cluster = Cluster::new().await;
    let file = cluster.dir.path().join("b.tar.gz");
    let output = cluster
        .run(divvy(), &["bundle", "-o", &file.to_string_lossy()])
        .await;
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    let listed = std::process::Command::new("tar")
        .arg("-tzf")
        .arg(&file)
        .output()
        .unwrap();
    let names = String::from_utf8(listed.stdout).unwrap();
    for name in ["README.txt", "objects/nodes.json", "objects/pods.json"] {
        let path = format!("divvy-bundle/{name}\n");
        assert!(names.contains(&path), "{names}");
    }
}

/// kubectl runs the program under this name, with the words so far.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kubectl_completes_commands_and_names_of_the_cluster() {
    let cluster = Cluster::new().await;
    let program = cluster.dir.path().join("kubectl_complete-divvy");
    std::os::unix::fs::symlink(divvy(), &program).unwrap();
    for (words, expected) in [
        (&["sta"][..], "status\n:4\n"),
        (&["status", "node", ""], "n1\n:4\n"),
        (&["status", "pod", "divvy/"], "divvy/divvy-node-x\n:4\n"),
        (&["status", "claim", "team-a/t"], "team-a/train\n:4\n"),
        (&["convert", "-f", ""], ":0\n"),
    ] {
        let output = cluster.run(&program, words).await;
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(said, expected, "{words:?} {output:?}");
    }
}
