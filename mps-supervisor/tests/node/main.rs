//! A whole node: the plugin over simulated GPUs, a stand-in kubelet and API server, the supervisor
//! as a process of its own, and a stand-in for NVIDIA's programs.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests; a failure is a panic"
)]

mod kills;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use divvy_api::node::GpuNodeStatus;
use divvy_fake_cluster::build::{allocated, mk_claim, mk_node, mk_result, reserved};
use divvy_fake_cluster::{ClaimRef, FakeApi, FakeKubelet, GpuNode, GpuPolicy, KubeletConfig};
use divvy_gpu_sim::SimNode;
use divvy_host::fixture::{Fixture, FixtureGpu, FixtureHost};
use divvy_kubelet_plugin::{Args, Config, Deps, run};
use divvy_model::{ComputeMode, GpuDriver, GpuUuid};
use divvy_mps_supervisor::{process, socket};
use divvy_telemetry::{MetricsRegistry, Readiness};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio_util::sync::CancellationToken;

const DRIVER: &str = "gpu.divvy.dev";
const PATIENCE: Duration = Duration::from_secs(30);
const PROGRAMS: [&str; 2] = ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"];

struct Node {
    api: FakeApi,
    kubelet: FakeKubelet,
    sim: SimNode,
    host: FixtureHost,
    stop: CancellationToken,
    supervisor: Option<Child>,
    dir: TempDir,
}

impl Drop for Node {
    fn drop(&mut self) {
        self.stop.cancel();
        self.kill_supervisor();
    }
}

impl Node {
    /// A node with a plugin, and GPUs that are to be whole or in four MPS shares.
    fn new(programs: &[&str]) -> Self {
        let node = Self::without_plugin(programs, 4);
        node.start_plugin();
        node
    }

    fn start_plugin(&self) {
        let deps = Deps {
            client: self.api.client(),
            kube: None,
            gpus: Arc::new(self.sim.clone()),
            mps: None,
            metrics: MetricsRegistry::new(),
            readiness: Readiness::new(),
        };
        tokio::spawn(run(self.config(), deps, self.stop.clone()));
    }

    /// Why the node offers no MPS shares, once it says so.
    async fn lack(&self) -> String {
        let trouble = wait("the reason", || {
            let object = self.api.get::<GpuNode>("", "n1")?;
            let status: GpuNodeStatus = serde_json::from_value(object.status).ok()?;
            let mut troubles = status.troubles.into_iter();
            troubles.find(|trouble| trouble.kind == "no-mps")
        });
        trouble.await.why
    }

    /// A node whose GPUs are to be whole or in so many MPS shares.
    fn without_plugin(programs: &[&str], slots: u32) -> Self {
        // Short: the sockets of a daemon are below it.
        let dir = tempfile::Builder::new()
            .prefix("n")
            .tempdir_in("/tmp")
            .unwrap();
        let sim = SimNode::parse("h100x2").unwrap();
        let inventory = sim.inventory();
        let gpus = inventory.gpus.values().map(|gpu| FixtureGpu {
            minor: gpu.facts.minor.unwrap(),
            pci: gpu.facts.pci_address,
            numa_node: gpu.topology.numa_node,
            pcie_root: gpu.topology.pcie_root.clone().unwrap_or_default(),
        });
        let root = dir.path().join("h");
        let host = Fixture::new(gpus.collect()).build(&root).unwrap();
        for name in programs {
            let program = root.join("usr/bin").join(name);
            fs_err::copy(divvy_mps_stand_in::program(), program).unwrap();
        }
        fs_err::create_dir_all(dir.path().join("cdi")).unwrap();
        let api = FakeApi::new();
        api.put(&mk_node("n1")).unwrap();
        let rule = json!({ "modes": ["Whole", "Mps"], "shares": { "slots": slots } });
        let policy = GpuPolicy::new("mps", json!({ "rules": [rule] }));
        api.put(&policy).unwrap();
        let config = KubeletConfig::new(dir.path().join("k"), "n1", api.clone());
        let kubelet = FakeKubelet::start(config).unwrap();
        let stop = CancellationToken::new();
        Self {
            api,
            kubelet,
            sim,
            host,
            stop,
            supervisor: None,
            dir,
        }
    }

    fn config(&self) -> Config {
        let kubelet = self.kubelet.config();
        let root = self.dir.path().join("h");
        let flags: [(&str, PathBuf); 13] = [
            ("--node-name", "n1".into()),
            ("--plugin-dir", kubelet.plugin_dir(DRIVER)),
            ("--registry-dir", kubelet.registry_dir()),
            ("--pod-resources-socket", kubelet.pod_resources_socket()),
            ("--cdi-dir", self.dir.path().join("cdi")),
            ("--driver-root", root.clone()),
            ("--host-driver-root", "/".into()),
            ("--host-root", root.clone()),
            ("--device-nodes", self.host.node_table.clone()),
            ("--mps-dir", self.folder()),
            ("--http", PathBuf::new()),
            ("--library-delivery", "mounts".into()),
            ("--usage", "false".into()),
        ];
        let flags = flags.into_iter();
        let args = flags.flat_map(|(flag, value)| [flag.to_owned(), value.display().to_string()]);
        let args = ["plugin".to_owned()].into_iter().chain(args);
        let mut config = Config::try_from(Args::try_parse_from(args).unwrap()).unwrap();
        config.timing.mps = Duration::from_millis(50);
        config.timing.mps_wedged = Duration::from_millis(300);
        config.timing.refresh = Duration::from_millis(200);
        config.timing.driver_retry = Duration::from_millis(100);
        config.timing.gpu_node = Duration::from_millis(100);
        config.timing.executor.hand_over = Duration::from_secs(2);
        config.timing.executor.process_wait = Duration::from_millis(200);
        config
    }

    fn folder(&self) -> PathBuf {
        self.dir.path().join("m")
    }

    fn spawn_supervisor(&self) -> Child {
        Command::new(env!("CARGO_BIN_EXE_divvy-mps-supervisor"))
            .arg("--mps-dir")
            .arg(self.folder())
            .arg("--host-root")
            .arg(self.dir.path().join("h"))
            .arg("--mps-unbounded")
            .stdout(Stdio::null())
            .stderr(self.log().into_parts().0)
            .spawn()
            .unwrap()
    }

    /// The end of the supervisors' log.
    fn log(&self) -> fs_err::File {
        let mut options = fs_err::OpenOptions::new();
        let path = self.dir.path().join("supervisor.log");
        options.create(true).append(true).open(path).unwrap()
    }

    async fn start_supervisor(&mut self) {
        self.supervisor = Some(self.spawn_supervisor());
        let socket = self.folder().join("supervisor.sock");
        wait("the supervisor", || {
            std::os::unix::net::UnixStream::connect(&socket)
                .ok()
                .map(drop)
        })
        .await;
    }

    fn kill_supervisor(&mut self) {
        if let Some(mut child) = self.supervisor.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }

    fn device(&self, name: &str) -> Option<Device> {
        let slices = self.api.list::<ResourceSlice>();
        let mut devices = slices
            .into_iter()
            .flat_map(|slice| slice.spec.devices.unwrap_or_default());
        devices.find(|device| device.name == name)
    }

    fn share(&self, name: &str) -> ClaimRef {
        let mut result = mk_result("gpu", DRIVER, "n1/divvy", "gpu-0-mps");
        let id = name
            .bytes()
            .fold(0_u64, |sum, byte| sum * 131 + u64::from(byte));
        result.share_id = Some(format!(
            "0b5a4a3e-9b1f-4a8e-b3f1-{:012x}",
            id & 0xffff_ffff_ffff
        ));
        let one = ("slots".to_owned(), Quantity("1".to_owned()));
        result.consumed_capacity = Some(BTreeMap::from([one]));
        let claim = allocated(mk_claim("default", name, DRIVER, 1), vec![result]);
        let pod = "0b5a4a3e-9b1f-4a8e-b3f1-0123456789ab";
        let stored = self.api.put(&reserved(claim, "pod", pod)).unwrap();
        ClaimRef::new("default", name, &stored.metadata.uid.unwrap())
    }

    async fn prepare(&self, claim: &ClaimRef) -> Result<(), String> {
        let answers = self
            .kubelet
            .prepare(DRIVER, std::slice::from_ref(claim))
            .await;
        answers.unwrap().remove(&claim.uid).unwrap().map(drop)
    }

    async fn unprepare(&self, claim: &ClaimRef) -> Result<(), String> {
        let answers = self
            .kubelet
            .unprepare(DRIVER, std::slice::from_ref(claim))
            .await;
        answers.unwrap().remove(&claim.uid).unwrap()
    }

    /// The CDI file of a claim.
    fn cdi(&self, claim: &ClaimRef) -> Value {
        let entries = fs_err::read_dir(self.dir.path().join("cdi")).unwrap();
        let mut paths = entries.map(|entry| entry.unwrap().path());
        let of = |path: &PathBuf| path.display().to_string().contains(&claim.uid);
        serde_json::from_slice(&fs_err::read(paths.find(of).unwrap()).unwrap()).unwrap()
    }

    fn gpu(&self) -> GpuUuid {
        let inventory = self.sim.inventory();
        let mut gpus: Vec<_> = inventory.gpus.values().map(|g| &g.facts).collect();
        gpus.sort_by_key(|facts| facts.pci_address);
        gpus[0].uuid.clone()
    }

    fn mode(&self) -> ComputeMode {
        self.sim.facts(&self.gpu()).unwrap().compute_mode.unwrap()
    }

    /// Daemons and servers of the stand-in that were started for this node, without the runs of its
    /// program that ask a daemon something.
    fn processes(&self) -> Vec<u32> {
        let programs = self.dir.path().join("h/usr/bin");
        let entries = fs_err::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let is_ours = |pid: &u32| {
            let exe = fs_err::read_link(Path::new("/proc").join(pid.to_string()).join("exe"));
            let said = fs_err::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let is_one = exe.is_ok_and(|exe| {
                exe.starts_with(&programs)
                    && (exe.ends_with(PROGRAMS[1]) || said.contains("--as-daemon"))
            });
            is_one && process::read(*pid).is_some()
        };
        pids.filter(is_ours).collect()
    }
}

async fn wait<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < until, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn claims_of_mps_shares_come_and_go_with_their_daemon() {
    let mut node = Node::new(&PROGRAMS);
    node.start_supervisor().await;
    let device = wait("the device", || node.device("gpu-0-mps")).await;
    let slots = &device.capacity.as_ref().unwrap()["slots"];
    assert_eq!(slots.value.0, "4");
    node.kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    let (a, b) = (node.share("a"), node.share("bb"));
    node.prepare(&a).await.unwrap();
    node.prepare(&b).await.unwrap();
    assert_eq!(node.processes().len(), 2, "one daemon with one server");
    assert_eq!(node.mode(), ComputeMode::ExclusiveProcess);
    let edits = &node.cdi(&a)["devices"][0]["containerEdits"];
    let env: Vec<&str> = edits["env"]
        .as_array()
        .unwrap()
        .iter()
        .filter_map(Value::as_str)
        .collect();
    assert!(
        env.contains(&"CUDA_MPS_PIPE_DIRECTORY=/run/divvy/mps"),
        "{env:?}"
    );
    assert!(
        env.contains(&"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20389M"),
        "{env:?}"
    );
    assert!(
        !env.iter().any(|one| one.contains("ACTIVE_THREAD")),
        "the server's alone"
    );
    let pipe = node.folder().join(node.gpu().as_str()).join("pipe");
    let mounts = edits["mounts"].as_array().unwrap();
    let mounted = |host: &Path| {
        let is_it = |mount: &&Value| mount["hostPath"].as_str() == host.to_str();
        mounts
            .iter()
            .find(is_it)
            .map(|mount| mount["containerPath"].clone())
    };
    assert_eq!(mounted(&pipe), Some(json!("/run/divvy/mps")));
    let memory = pipe.with_file_name("shm");
    assert_eq!(mounted(&memory), Some(json!("/dev/shm")));
    // What is mounted is there.
    assert!(pipe.join("control").exists() && memory.is_dir());
    node.unprepare(&a).await.unwrap();
    assert_eq!(node.processes().len(), 2, "the other needs it");
    node.unprepare(&b).await.unwrap();
    assert_eq!(node.processes(), Vec::<u32>::new());
    assert_eq!(node.mode(), ComputeMode::Default);
    assert!(!pipe.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_daemon_comes_back_and_a_killed_supervisor_goes_on() {
    let mut node = Node::new(&PROGRAMS);
    node.start_supervisor().await;
    node.kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    wait("the device", || node.device("gpu-0-mps")).await;
    let a = node.share("a");
    node.prepare(&a).await.unwrap();
    let before = node.processes();
    for pid in &before {
        process::kill(&process::read(*pid).unwrap()).unwrap();
    }
    let after = wait("another daemon", || {
        let now = node.processes();
        // Beside it only the program itself runs, for each question to the daemon.
        let file = node.folder().join(node.gpu().as_str()).join("daemon.json");
        let is_ready =
            fs_err::read_to_string(file).is_ok_and(|text| text.contains("\"ready\":true"));
        let is_new = now.len() == 2 && now.iter().all(|pid| !before.contains(pid)) && is_ready;
        is_new.then_some(now)
    })
    .await;
    // Without a supervisor nothing new is started, what runs goes on, and the claim stays held.
    node.kill_supervisor();
    let b = node.share("bb");
    let error = node.prepare(&b).await.unwrap_err();
    assert!(
        error.contains("the MPS supervisor does not answer"),
        "{error}"
    );
    assert_eq!(node.processes(), after);
    drop(node.unprepare(&a).await);
    assert_eq!(node.mode(), ComputeMode::ExclusiveProcess);
    node.start_supervisor().await;
    node.unprepare(&a).await.unwrap();
    wait("the end of the daemon", || {
        node.processes().is_empty().then_some(())
    })
    .await;
    wait("the mode", || {
        (node.mode() == ComputeMode::Default).then_some(())
    })
    .await;
}

/// A server in the state FAULT is left to its client, and another takes its place afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_wedged_is_another_once_its_client_has_ended() {
    let mut node = Node::new(&PROGRAMS);
    node.start_supervisor().await;
    node.kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    wait("the device", || node.device("gpu-0-mps")).await;
    node.prepare(&node.share("a")).await.unwrap();
    let of_server = |pid: &u32| process::read(*pid).is_some_and(|one| one.program == PROGRAMS[1]);
    let server = |node: &Node| node.processes().into_iter().find(of_server);
    let before = server(&node).unwrap();
    let pipe = node.folder().join(node.gpu().as_str()).join("pipe");
    let client = socket::connect(&pipe.join("control")).unwrap();
    let faults = node.dir.path().join("h/usr/bin/faults");
    fs_err::write(&faults, format!("fault {before}")).unwrap();
    let is_tainted = |node: &Node| {
        let taints = node.device("gpu-0-mps").unwrap().taints.unwrap_or_default();
        taints.iter().any(|taint| {
            taint.key == "gpu.divvy.dev/mps" && taint.value.as_deref() == Some("fault")
        })
    };
    wait("the taint", || is_tainted(&node).then_some(())).await;
    assert_eq!(server(&node), Some(before));
    drop(client);
    wait("another server", || {
        server(&node).filter(|now| *now != before)
    })
    .await;
    wait("the end of the taint", || {
        (!is_tainted(&node)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_without_its_mps_programs_offers_none_and_says_why() {
    let node = Node::new(&PROGRAMS[..1]);
    wait("the whole GPU", || node.device("gpu-0")).await;
    let why = node.lack().await;
    assert!(why.contains("nvidia-cuda-mps-server"), "{why}");
    assert_eq!(node.device("gpu-0-mps"), None);
}

/// The version of the driver does not say it: its programs were tried, and those of another driver
/// are tried again.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_whose_mps_serves_one_user_offers_none_and_says_why() {
    let mut node = Node::without_plugin(&PROGRAMS, 4);
    let programs = node.dir.path().join("h/usr/bin");
    fs_err::write(programs.join("faults"), "no-multiuser").unwrap();
    node.start_supervisor().await;
    node.start_plugin();
    wait("the whole GPU", || node.device("gpu-0")).await;
    let why = node.lack().await;
    assert!(why.contains("programs of one user alone"), "{why}");
    assert_eq!(node.device("gpu-0-mps"), None);
    // Another driver.
    fs_err::write(programs.join("faults"), "").unwrap();
    let control = programs.join(PROGRAMS[0]);
    fs_err::remove_file(&control).unwrap();
    fs_err::copy(divvy_mps_stand_in::program(), control).unwrap();
    wait("the shares", || node.device("gpu-0-mps")).await;
}
