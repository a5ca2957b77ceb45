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
mod namespaces;
mod notes;
mod programs;
mod restarts;
mod slots;

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
