//! The supervisor over a stand-in for NVIDIA's programs: what it starts, finds again and ends.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "tests; a failure is a panic"
)]

mod health;
mod hostile;
mod memory;
mod notes;
mod programs;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use divvy_host::fixture::Fixture;
use divvy_host::{DriverAt, HostRoot};
use divvy_model::{GpuTarget, MigUuid, MpsNamespace, MpsNamespaceName, MpsProtocol, MpsServer};
use divvy_mps_supervisor::{Settings, Supervisor, process, socket};
use divvy_proto::mps::v1::supervisor_client::SupervisorClient;
use divvy_proto::mps::v1::{
    Limits, Namespace, PutNamespaceRequest, RemoveNamespaceRequest, StartRequest, StateRequest,
    StopRequest,
};

/// A node with a driver root and a folder for daemons.
struct Node {
    dir: tempfile::TempDir,
    /// The folder of NVIDIA's programs.
    bin: PathBuf,
}

impl Node {
    fn new() -> Self {
        Self::with_driver_at("/")
    }

    /// A node with the driver in this folder of it.
    fn with_driver_at(driver: &str) -> Self {
        // Short: a daemon's sockets are below it.
        let dir = tempfile::Builder::new()
            .prefix("m")
            .tempdir_in("/tmp")
            .unwrap();
        fs_err::create_dir_all(dir.path().join("m")).unwrap();
        let fixture = Fixture {
            driver_root: driver.into(),
            ..Fixture::new(Vec::new())
        };
        let root = dir.path().join("root");
        fixture.build(&root).unwrap();
        let bin = HostRoot::under(root).see(driver.as_ref()).join("usr/bin");
        for name in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
            // Copies: each has a file of its own, as NVIDIA's have.
            let of = if name.ends_with("control") {
                control_program()
            } else {
                divvy_mps_stand_in::program().to_owned()
            };
            fs_err::copy(of, bin.join(name)).unwrap();
        }
        Self { dir, bin }
    }

    fn supervisor(&self) -> Supervisor {
        Supervisor::new(self.settings())
    }

    fn settings(&self) -> Settings {
        Settings {
            dir: self.folder(),
            host: HostRoot::under(self.dir.path().join("root")),
            driver: DriverAt::default(),
            cgroup: None,
            memory: None,
        }
    }

    fn folder(&self) -> PathBuf {
        self.dir.path().join("m")
    }

    fn bin(&self) -> &Path {
        &self.bin
    }

    fn fault(&self, fault: &str) {
        fs_err::write(self.bin().join("faults"), fault).unwrap();
    }

    fn log(&self, target: &GpuTarget, file: &str) -> String {
        let folder = self.folder().join(target.to_string());
        let path = folder.join("log").join(file);
        fs_err::read_to_string(path).unwrap_or_default()
    }

    /// Processes of the stand-in that were started for this node.
    fn processes(&self) -> Vec<u32> {
        let entries = fs_err::read_dir("/proc").unwrap().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        pids.filter(|pid| {
            let exe = fs_err::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
            exe.starts_with(self.bin()) && process::read(*pid).is_some()
        })
        .collect()
    }

    fn has_no_process(&self) {
        assert_eq!(self.processes(), Vec::<u32>::new());
    }

    fn wait_for(&self, what: &str, is_so: impl Fn() -> bool) {
        let until = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < until, "{what}: {:?}", self.processes());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// NVIDIA's program, where a test is run over that, or the stand-in.
fn control_program() -> PathBuf {
    let real = std::env::var_os("DIVVY_MPS_CONTROL");
    real.map_or_else(|| divvy_mps_stand_in::program().to_owned(), PathBuf::from)
}

fn gpu(number: u32) -> GpuTarget {
    let uuid = format!("GPU-12345678-1234-1234-1234-12345678000{number}");
    GpuTarget::whole(uuid.parse().unwrap())
}

fn partition(start: u32) -> GpuTarget {
    let place = format!("19@{start}+1").parse().unwrap();
    GpuTarget {
        target: divvy_model::Target::Partition(place),
        ..gpu(1)
    }
}

fn server(slots: u32) -> MpsServer {
    MpsServer::equal(slots, Some(81_559)).unwrap()
}

fn kill(pid: u32) {
    process::kill(&process::read(pid).unwrap()).unwrap();
}

#[test]
fn a_daemon_is_started_with_its_limits_and_nothing_is_left_after_it() {
    let node = Node::new();
    let supervisor = node.supervisor();
    assert!(supervisor.state(None).unwrap().running.is_empty());
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let log = node.log(&gpu(1), "server.log");
    assert!(
        log.contains("Active Threads Percentage set to 25.0"),
        "{log}"
    );
    let bytes = format!("{:#x}", (81_559_u64 / 4) << 20);
    assert!(log.contains(&bytes), "{log} lacks {bytes}");
    let running = supervisor.state(None).unwrap().running[&gpu(1)].clone();
    assert_eq!(running.server, server(4));
    assert_eq!(running.pids.len(), 2, "the daemon and its server");
    // The same again is nothing; another GPU has a daemon of its own.
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    assert_eq!(supervisor.state(None).unwrap().running[&gpu(1)], running);
    supervisor.start(&gpu(2), None, server(2), false).unwrap();
    assert_eq!(node.processes().len(), 4);
    supervisor.stop(&gpu(1)).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    assert_eq!(supervisor.state(None).unwrap().running.len(), 1);
    supervisor.stop(&gpu(2)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

/// Partitions of a GPU have a daemon each, which sees nothing but its partition. A partition that
/// was made anew since has another UUID, and gets another daemon.
#[test]
fn a_partition_has_a_daemon_of_its_own_that_sees_nothing_else() {
    let node = Node::new();
    let supervisor = node.supervisor();
    let [one, other] = [partition(0), partition(1)];
    let [first, second, again] = ["MIG-1", "MIG-2", "MIG-3"].map(|uuid| uuid.parse().unwrap());
    supervisor
        .start(&one, Some(&first), server(4), false)
        .unwrap();
    supervisor
        .start(&other, Some(&second), server(2), false)
        .unwrap();
    let sees = |target: &GpuTarget| {
        let running = &supervisor.state(None).unwrap().running[target];
        let daemon = running.pids.last().unwrap();
        let variables = fs_err::read(format!("/proc/{daemon}/environ")).unwrap();
        let variables = String::from_utf8(variables).unwrap();
        let mut variables = variables.split('\0').map(str::to_owned);
        let sees = variables.find(|one| one.starts_with("CUDA_VISIBLE_DEVICES="));
        (running.partition.clone(), sees.unwrap())
    };
    let of = |uuid: &MigUuid| (Some(uuid.clone()), format!("CUDA_VISIBLE_DEVICES={uuid}"));
    assert_eq!(sees(&one), of(&first));
    assert_eq!(sees(&other), of(&second));
    let before = supervisor.state(None).unwrap().running;
    supervisor
        .start(&one, Some(&first), server(4), false)
        .unwrap();
    assert_eq!(
        supervisor.state(None).unwrap().running,
        before,
        "nothing to do"
    );
    supervisor
        .start(&one, Some(&again), server(4), false)
        .unwrap();
    assert_eq!(sees(&one), of(&again));
    assert_eq!(sees(&other), of(&second));
    assert_eq!(node.processes().len(), 4);
    // Asked about one GPU, it answers for that one and its partitions.
    let of = |number| {
        supervisor
            .state(Some(&gpu(number).gpu))
            .unwrap()
            .running
            .len()
    };
    assert_eq!((of(1), of(2)), (2, 0));
    supervisor.start(&gpu(2), None, server(4), false).unwrap();
    assert_eq!((of(1), of(2)), (2, 1));
    supervisor.stop(&gpu(2)).unwrap();
    // Another process finds them again.
    assert_eq!(node.supervisor().adopt().unwrap(), 2);
    supervisor.stop(&one).unwrap();
    assert_eq!(supervisor.state(None).unwrap().running.len(), 1);
    supervisor.stop(&other).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

#[test]
fn other_limits_are_those_of_another_daemon() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let before = supervisor.state(None).unwrap().running;
    supervisor.start(&gpu(1), None, server(2), false).unwrap();
    let after = supervisor.state(None).unwrap().running;
    assert_eq!(after[&gpu(1)].server, server(2));
    assert_ne!(after, before);
    assert_eq!(node.processes().len(), 2);
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// The server of a claim that has the GPU alone is known as that, also by another supervisor.
#[test]
fn the_server_of_a_claim_has_its_limits_or_none() {
    let node = Node::new();
    let half = MpsServer::of_claim(Some(50), Some(10 << 30));
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, half, false).unwrap();
    let log = node.log(&gpu(1), "server.log");
    assert!(log.contains("Percentage set to 50.0"), "{log}");
    assert!(log.contains(&format!("{:#x}", 10_u64 << 30)), "{log}");
    drop(supervisor);
    let supervisor = node.supervisor();
    assert_eq!(
        supervisor.state(None).unwrap().running[&gpu(1)].server,
        half
    );
    let all = MpsServer::of_claim(None, None);
    supervisor.start(&gpu(1), None, all, false).unwrap();
    assert_eq!(supervisor.state(None).unwrap().running[&gpu(1)].server, all);
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

#[test]
fn a_daemon_or_server_that_was_killed_leaves_nothing_and_starts_again() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let pipe = node.folder().join(gpu(1).to_string()).join("pipe");
    let mounted = inode(&pipe);
    let daemon: u32 = fs_err::read_to_string(pipe.join("nvidia-cuda-mps-control.pid"))
        .unwrap()
        .parse()
        .unwrap();
    kill(daemon);
    node.wait_for("the daemon ends", || process::read(daemon).is_none());
    assert_eq!(
        supervisor.state(None).unwrap().running.len(),
        0,
        "its server alone is none"
    );
    assert_eq!(node.processes().len(), 1, "which lives on");
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    assert_eq!(node.processes().len(), 2);
    assert_eq!(inode(&pipe), mounted, "containers have the folder mounted");
    // Killed again, and ended instead.
    let running = supervisor.state(None).unwrap().running[&gpu(1)].clone();
    running.pids.iter().for_each(|pid| kill(*pid));
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

#[test]
fn a_start_that_fails_says_why_and_leaves_no_process() {
    for (fault, expected) in [
        ("refuse-start", "`-d` failed"),
        ("server-dies", "the MPS server has ended before it served"),
        (
            "refuse-limits",
            "refused `set_default_active_thread_percentage 25`",
        ),
    ] {
        let node = Node::new();
        let supervisor = node.supervisor();
        node.fault(fault);
        let error = supervisor
            .start(&gpu(1), None, server(4), false)
            .unwrap_err();
        let text = divvy_model::chain(&error);
        assert!(text.contains(expected), "{fault}: {text}");
        node.has_no_process();
        node.fault("");
        supervisor.start(&gpu(1), None, server(4), false).unwrap();
        supervisor.stop(&gpu(1)).unwrap();
    }
}

#[test]
fn a_daemon_that_does_not_quit_is_killed() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    node.fault("slow-quit");
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

#[test]
fn a_missing_program_and_a_long_path_are_refused_in_words() {
    let node = Node::new();
    fs_err::remove_file(node.bin().join("nvidia-cuda-mps-server")).unwrap();
    let error = node
        .supervisor()
        .start(&gpu(1), None, server(4), false)
        .unwrap_err();
    assert!(
        error
            .to_string()
            .contains("has no nvidia-cuda-mps-control or no"),
        "{error}"
    );
    node.has_no_process();
    let long = Supervisor::new(Settings {
        dir: node.folder().join("a".repeat(60)),
        ..node.settings()
    });
    let error = long.start(&gpu(1), None, server(4), false).unwrap_err();
    assert!(
        error.to_string().contains("choose a shorter driver name"),
        "{error}"
    );
}

/// The driver of a driver container has a root of its own, which lacks the folder of sockets.
#[test]
fn a_driver_with_a_root_of_its_own_is_run_with_its_own_libraries() {
    let driver = "/run/nvidia/driver";
    let node = Node::with_driver_at(driver);
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    let root = node.dir.path().join("root/run/nvidia/driver");
    for pid in node.processes() {
        let environ = fs_err::read_to_string(format!("/proc/{pid}/environ")).unwrap();
        let has = |name: &str, folder: &str| {
            let value = environ.split('\0').find_map(|one| one.strip_prefix(name));
            let first = value.and_then(|value| value.split(':').next());
            assert_eq!(first.map(Path::new), Some(&*root.join(folder)), "{environ}");
        };
        has("PATH=", "usr/bin");
        has("LD_LIBRARY_PATH=", "usr/lib/x86_64-linux-gnu");
    }
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
}

/// The daemon outlives the driver's files: a driver container that ends takes them along.
#[test]
fn a_daemon_ends_although_the_driver_is_gone() {
    let node = Node::new();
    let supervisor = node.supervisor();
    supervisor.start(&gpu(1), None, server(4), false).unwrap();
    fs_err::remove_dir_all(node.dir.path().join("root")).unwrap();
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert!(supervisor.state(None).unwrap().running.is_empty());
    let error = supervisor
        .start(&gpu(1), None, server(4), false)
        .unwrap_err();
    assert_eq!(error.to_string(), "the NVIDIA driver cannot be found");
}

/// A namespace of a claim with this size.
fn namespace(claim: u32, cores: u32, mib: u64) -> MpsNamespace {
    MpsNamespace {
        name: name(claim),
        cores,
        memory_mib: Some(mib),
    }
}

fn name(claim: u32) -> MpsNamespaceName {
    format!("c_{claim:016x}").parse().unwrap()
}

/// A supervisor with a server of protocol v3 on the first GPU.
fn with_namespaces(node: &Node) -> Supervisor {
    let supervisor = node.supervisor();
    supervisor
        .start(&gpu(1), None, MpsServer::NAMESPACES, false)
        .unwrap();
    supervisor
}

fn namespaces(supervisor: &Supervisor) -> Vec<MpsNamespace> {
    supervisor.state(None).unwrap().running[&gpu(1)]
        .namespaces
        .clone()
}

/// The folder of sockets of a claim's namespace.
fn sockets(node: &Node, claim: u32) -> PathBuf {
    let pipe = node.folder().join(MpsProtocol::V3.pipe(&gpu(1)));
    pipe.join(name(claim).folder())
}

/// A client of a namespace, which is one until it is dropped.
fn attach(node: &Node, claim: u32) -> OwnedFd {
    socket::connect(&sockets(node, claim).join("control")).unwrap()
}

#[test]
fn namespaces_of_claims_come_and_go_in_one_server() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    assert_eq!(node.processes().len(), 2, "the daemon and its server");
    assert_eq!(namespaces(&supervisor), []);
    let (a, b) = (namespace(1, 30, 10_240), namespace(2, 25, 1044));
    for one in [a, b, a] {
        supervisor.put_namespace(&gpu(1), one).unwrap();
    }
    assert_eq!(namespaces(&supervisor), [a, b]);
    assert!(sockets(&node, 1).join("control").exists());
    supervisor
        .start(&gpu(1), None, MpsServer::NAMESPACES, false)
        .unwrap();
    assert_eq!(namespaces(&supervisor), [a, b], "the same again is nothing");
    supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
    supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
    assert_eq!(namespaces(&supervisor), [b]);
    assert!(!sockets(&node, 1).exists());
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
    let error = supervisor.put_namespace(&gpu(1), a).unwrap_err();
    assert!(error.to_string().contains("no MPS server"), "{error}");
    supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
}

/// A client that comes without a namespace is not limited by its server.
#[test]
fn the_default_namespace_gets_next_to_nothing() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    let log = node.log(&gpu(1), "control.log");
    for limit in ["active-thread-percentage=1", "pinned-memory-limit=64M"] {
        let command = format!("Cmd:namespace set default --server=s --{limit}");
        assert!(log.contains(&command), "{log}");
    }
    let create = format!("Cmd:server create s --uid=0 --allowed-devices={}", gpu(1));
    assert!(log.contains(&create), "{log}");
    supervisor.stop(&gpu(1)).unwrap();
}

#[test]
fn a_size_changes_only_while_no_client_is_there() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    supervisor
        .put_namespace(&gpu(1), namespace(1, 30, 1024))
        .unwrap();
    let client = attach(&node, 1);
    let error = supervisor.put_namespace(&gpu(1), namespace(1, 50, 1024));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("has clients"), "{error}");
    assert_eq!(namespaces(&supervisor), [namespace(1, 30, 1024)]);
    // The same size is nothing to do.
    supervisor
        .put_namespace(&gpu(1), namespace(1, 30, 1024))
        .unwrap();
    drop(client);
    supervisor
        .put_namespace(&gpu(1), namespace(1, 50, 2048))
        .unwrap();
    assert_eq!(namespaces(&supervisor), [namespace(1, 50, 2048)]);
    // What is left of a claim that is gone goes with it.
    let _client = attach(&node, 1);
    supervisor.remove_namespace(&gpu(1), name(1)).unwrap();
    assert_eq!(namespaces(&supervisor), []);
    supervisor.stop(&gpu(1)).unwrap();
}

#[test]
fn a_namespace_that_fails_says_why_and_leaves_nothing() {
    let node = Node::new();
    let supervisor = with_namespaces(&node);
    node.fault("refuse-limits");
    let error = supervisor.put_namespace(&gpu(1), namespace(1, 30, 1024));
    let text = divvy_model::chain(&error.unwrap_err());
    assert!(text.contains("Invalid value"), "{text}");
    assert_eq!(namespaces(&supervisor), []);
    node.fault("");
    supervisor
        .put_namespace(&gpu(1), namespace(1, 30, 1024))
        .unwrap();
    node.fault("sticky");
    let error = supervisor.remove_namespace(&gpu(1), name(1)).unwrap_err();
    assert!(error.to_string().contains("could not be ended"), "{error}");
    assert_eq!(namespaces(&supervisor), [namespace(1, 30, 1024)]);
    node.fault("");
    supervisor.stop(&gpu(1)).unwrap();
}

#[test]
fn a_daemon_or_server_that_dies_takes_its_namespaces_along() {
    for whole in [true, false] {
        let node = Node::new();
        let supervisor = with_namespaces(&node);
        supervisor
            .put_namespace(&gpu(1), namespace(1, 30, 1024))
            .unwrap();
        let before = inode(&sockets(&node, 1));
        let pipe = node.folder().join(MpsProtocol::V3.pipe(&gpu(1)));
        let daemon = fs_err::read_to_string(pipe.join("nvidia-cuda-mps-control.pid"));
        let daemon: u32 = daemon.unwrap().parse().unwrap();
        let pids = node.processes();
        let victim = pids.into_iter().find(|pid| (*pid == daemon) == whole);
        let victim = victim.unwrap();
        kill(victim);
        node.wait_for("it ends", || process::read(victim).is_none());
        assert!(
            supervisor.state(None).unwrap().running.is_empty(),
            "{whole}"
        );
        supervisor
            .start(&gpu(1), None, MpsServer::NAMESPACES, false)
            .unwrap();
        assert_eq!(node.processes().len(), 2, "{whole}");
        assert_eq!(namespaces(&supervisor), [], "{whole}");
        supervisor
            .put_namespace(&gpu(1), namespace(1, 30, 1024))
            .unwrap();
        let after = inode(&sockets(&node, 1));
        assert_eq!(after, before, "containers have the folder mounted");
        supervisor.stop(&gpu(1)).unwrap();
        node.has_no_process();
    }
}

/// A server of another protocol takes its place, and comes back.
#[test]
fn a_server_with_slots_and_one_with_namespaces_follow_each_other() {
    let node = Node::new();
    let supervisor = node.supervisor();
    for server in [server(4), MpsServer::NAMESPACES, server(2)] {
        supervisor.start(&gpu(1), None, server, false).unwrap();
        assert_eq!(
            supervisor.state(None).unwrap().running[&gpu(1)].server,
            server
        );
        assert_eq!(node.processes().len(), 2);
    }
    supervisor.stop(&gpu(1)).unwrap();
    node.has_no_process();
    assert_eq!(fs_err::read_dir(node.folder()).unwrap().count(), 0);
}

#[test]
fn a_server_of_v3_that_does_not_serve_is_no_server() {
    for (fault, gpus, expected) in [
        ("no-v3", None, "`-p 3 -m -d` failed"),
        ("server-dies", None, "the MPS server was not there"),
        (
            "",
            Some("GPU-other"),
            "Server encountered a fatal exception",
        ),
        ("refuse-limits", None, "refused `namespace set default`"),
    ] {
        let node = Node::new();
        let supervisor = node.supervisor();
        node.fault(fault);
        if let Some(known) = gpus {
            fs_err::write(node.bin().join("gpus"), known).unwrap();
        }
        let error = supervisor.start(&gpu(1), None, MpsServer::NAMESPACES, false);
        let text = divvy_model::chain(&error.unwrap_err());
        assert!(text.contains(expected), "{fault}: {text}");
        node.has_no_process();
        assert!(supervisor.state(None).unwrap().running.is_empty());
    }
}

fn inode(path: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    fs_err::metadata(path).unwrap().ino()
}

/// The supervisor as a process of its own.
struct Program(Child);

impl Program {
    fn start(node: &Node) -> Self {
        Self::with(node, &["--mps-unbounded"])
    }

    fn with(node: &Node, args: &[&str]) -> Self {
        let child = Command::new(env!("CARGO_BIN_EXE_divvy-mps-supervisor"))
            .arg("--mps-dir")
            .arg(node.folder())
            .arg("--host-root")
            .arg(node.dir.path().join("root"))
            .args(args)
            .stderr(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }
}

impl Program {
    /// Returns whether it has not come to its socket, nor to its end.
    fn runs_without_socket(&mut self, node: &Node) -> bool {
        let socket = node.folder().join("supervisor.sock");
        !socket.exists() && matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

async fn client(node: &Node) -> SupervisorClient<tonic::transport::Channel> {
    let socket = format!("unix:{}", node.folder().join("supervisor.sock").display());
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let endpoint = tonic::transport::Endpoint::from_shared(socket.clone()).unwrap();
        match endpoint.connect().await {
            Ok(channel) => return SupervisorClient::new(channel),
            Err(error) => assert!(Instant::now() < until, "{error}"),
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn limits() -> Limits {
    let MpsServer {
        slots,
        cores,
        memory_mib,
        protocol,
    } = server(4);
    Limits {
        slots: slots.unwrap(),
        cores,
        memory_mib: memory_mib.unwrap(),
        protocol: protocol.number(),
    }
}

#[tokio::test]
async fn a_supervisor_that_was_killed_finds_its_daemons_again() {
    let node = Node::new();
    let program = Program::start(&node);
    let mut asks = client(&node).await;
    let target = gpu(1).to_string();
    let start = StartRequest {
        target: target.clone(),
        limits: Some(limits()),
        partition_uuid: String::new(),
        anew: false,
    };
    asks.start(start.clone()).await.unwrap();
    // That of a claim with the GPU alone has no slots.
    let own = Limits {
        slots: 0,
        cores: 50,
        memory_mib: 0,
        protocol: 2,
    };
    let start_own = StartRequest {
        target: gpu(2).to_string(),
        limits: Some(own),
        partition_uuid: String::new(),
        anew: false,
    };
    asks.start(start_own).await.unwrap();
    let before = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(before.daemons.len(), 2);
    assert_eq!(before.daemons[0].limits, Some(limits()));
    assert_eq!(before.daemons[1].limits, Some(own));
    drop(program);
    assert_eq!(node.processes().len(), 4, "daemons and servers live on");
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    let after = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(after, before);
    asks.start(start).await.unwrap();
    asks.stop(StopRequest { target }).await.unwrap();
    let target = gpu(2).to_string();
    asks.stop(StopRequest { target }).await.unwrap();
    node.has_no_process();
    for odd in ["gpu-0", &format!("{}:19", gpu(1))] {
        let refused = asks
            .stop(StopRequest {
                target: odd.to_owned(),
            })
            .await;
        assert_eq!(refused.unwrap_err().code(), tonic::Code::InvalidArgument);
    }
}

/// A partition needs its UUID, and a whole GPU has none.
#[tokio::test]
async fn a_server_of_a_partition_is_asked_for_by_its_place_and_uuid() {
    let node = Node::new();
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    let start = |target: &GpuTarget, uuid: &str| StartRequest {
        anew: false,
        target: target.to_string(),
        limits: Some(limits()),
        partition_uuid: uuid.to_owned(),
    };
    for (target, uuid) in [
        (gpu(1), "MIG-1"),
        (partition(0), ""),
        (partition(0), "GPU-1"),
    ] {
        let refused = asks.start(start(&target, uuid)).await;
        assert_eq!(refused.unwrap_err().code(), tonic::Code::InvalidArgument);
    }
    asks.start(start(&partition(0), "MIG-1")).await.unwrap();
    let state = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(state.daemons[0].target, partition(0).to_string());
    assert_eq!(state.daemons[0].partition_uuid, "MIG-1");
    let target = partition(0).to_string();
    asks.stop(StopRequest { target }).await.unwrap();
    node.has_no_process();
}

#[tokio::test]
async fn a_killed_supervisor_finds_namespaces_again_and_takes_ours_only() {
    let node = Node::new();
    let program = Program::start(&node);
    let mut asks = client(&node).await;
    let target = gpu(1).to_string();
    let unlimited = Limits {
        slots: 0,
        cores: 100,
        memory_mib: 0,
        protocol: 3,
    };
    let start = |limits| StartRequest {
        target: gpu(1).to_string(),
        limits: Some(limits),
        partition_uuid: String::new(),
        anew: false,
    };
    asks.start(start(unlimited)).await.unwrap();
    let put = |name: &str, cores| PutNamespaceRequest {
        target: gpu(1).to_string(),
        namespace: Some(Namespace {
            name: name.to_owned(),
            cores,
            memory_mib: 1044,
        }),
    };
    let ours = name(7).to_string();
    asks.put_namespace(put(&ours, 30)).await.unwrap();
    let before = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(before.daemons[0].namespaces.len(), 1);
    drop(program);
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    let after = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(after, before);
    let limited = Limits {
        cores: 50,
        ..unlimited
    };
    let odd = Limits {
        protocol: 4,
        ..unlimited
    };
    for refused in [
        asks.put_namespace(put("../default", 30)).await.map(drop),
        asks.put_namespace(put("default", 30)).await.map(drop),
        asks.put_namespace(put(&ours, 0)).await.map(drop),
        asks.start(start(limited)).await.map(drop),
        asks.start(start(odd)).await.map(drop),
    ] {
        assert_eq!(refused.unwrap_err().code(), tonic::Code::InvalidArgument);
    }
    let end = RemoveNamespaceRequest {
        target: target.clone(),
        name: ours,
    };
    asks.remove_namespace(end).await.unwrap();
    let after = asks
        .state(StateRequest::default())
        .await
        .unwrap()
        .into_inner();
    assert_eq!(after.daemons[0].namespaces, []);
    asks.stop(StopRequest { target }).await.unwrap();
    node.has_no_process();
}

/// At any moment of a start or a stop; what is left is ended by the next process.
#[tokio::test]
async fn a_supervisor_that_is_killed_at_work_leaves_no_orphan() {
    let node = Arc::new(Node::new());
    for round in 0..8_u64 {
        let program = Program::start(&node);
        let mut asks = client(&node).await;
        let target = gpu(1).to_string();
        let start = StartRequest {
            target: target.clone(),
            limits: Some(limits()),
            partition_uuid: String::new(),
            anew: false,
        };
        let works = tokio::spawn(async move {
            drop(asks.start(start).await);
            drop(asks.stop(StopRequest { target }).await);
        });
        // A moment that depends on the round: the number of processes that are there by then.
        let seen = (round % 3).try_into().unwrap_or(0);
        let until = Instant::now() + Duration::from_millis(300);
        while node.processes().len() < seen && Instant::now() < until {
            tokio::task::yield_now().await;
        }
        drop(program);
        drop(works.await);
        let _program = Program::start(&node);
        let mut asks = client(&node).await;
        let target = gpu(1).to_string();
        asks.stop(StopRequest { target }).await.unwrap();
        node.wait_for("all have ended", || node.processes().is_empty());
    }
}

/// At any moment between the commands for a namespace: the next process makes it as it is asked
/// for, and ends it.
#[tokio::test]
async fn a_supervisor_that_is_killed_amid_namespaces_leaves_none_half_made() {
    let node = Arc::new(Node::new());
    let target = gpu(1).to_string();
    let unlimited = Limits {
        slots: 0,
        cores: 100,
        memory_mib: 0,
        protocol: 3,
    };
    let start = StartRequest {
        target: target.clone(),
        partition_uuid: String::new(),
        anew: false,
        limits: Some(unlimited),
    };
    let of = |cores| Namespace {
        name: name(7).to_string(),
        cores,
        memory_mib: 1044,
    };
    let put = |cores| PutNamespaceRequest {
        target: gpu(1).to_string(),
        namespace: Some(of(cores)),
    };
    let end = || RemoveNamespaceRequest {
        target: gpu(1).to_string(),
        name: name(7).to_string(),
    };
    for round in 0..9_u32 {
        let program = Program::start(&node);
        let mut asks = client(&node).await;
        asks.start(start.clone()).await.unwrap();
        let requests = (put(30), end(), put(20));
        let works = tokio::spawn(async move {
            let (first, ends, second) = requests;
            drop(asks.put_namespace(first).await);
            drop(asks.remove_namespace(ends).await);
            drop(asks.put_namespace(second).await);
        });
        // A moment that depends on the round: before there is anything, once it is there, and once
        // it is gone.
        for is_there in [true, false].into_iter().take((round % 3) as usize) {
            let until = Instant::now() + Duration::from_secs(1);
            while sockets(&node, 7).exists() != is_there && Instant::now() < until {
                tokio::task::yield_now().await;
            }
        }
        drop(program);
        drop(works.await);
        let _program = Program::start(&node);
        let mut asks = client(&node).await;
        asks.put_namespace(put(20)).await.unwrap();
        let state = asks
            .state(StateRequest::default())
            .await
            .unwrap()
            .into_inner();
        assert_eq!(state.daemons[0].namespaces, [of(20)], "round {round}");
        asks.remove_namespace(end()).await.unwrap();
        let state = asks
            .state(StateRequest::default())
            .await
            .unwrap()
            .into_inner();
        assert_eq!(state.daemons[0].namespaces, [], "round {round}");
        assert!(!sockets(&node, 7).exists(), "round {round}");
    }
    let _program = Program::start(&node);
    let mut asks = client(&node).await;
    asks.stop(StopRequest { target }).await.unwrap();
    node.has_no_process();
}
