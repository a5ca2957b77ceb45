//! The binary itself: flags, the mock library through NVML's C ABI, a kubeconfig, signals and exit
//! codes.

use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

use crate::node::{DRIVER, Node, PATIENCE, device, plain, wait};

const BINARY: &str = env!("CARGO_BIN_EXE_divvy-kubelet-plugin");

/// The mock library, which cargo puts beside this test.
pub(crate) fn library() -> PathBuf {
    std::env::current_exe()
        .unwrap()
        .with_file_name("libnvidia_ml.so")
}

/// A process that does not outlive its test.
pub(crate) struct Process(Child);

/// The file with the state of the mock library's GPUs.
pub(crate) fn mock_state(node: &Node) -> PathBuf {
    node.dir.path().join("gpus.json")
}

impl Process {
    fn start(node: &Node, kubeconfig: &str) -> Self {
        Self::start_with(node, kubeconfig, &[])
    }

    pub(crate) fn start_with(node: &Node, kubeconfig: &str, more: &[(&str, &str)]) -> Self {
        let kubelet = node.kubelet.config();
        let path = node.dir.path().join("kubeconfig");
        fs_err::write(&path, kubeconfig).unwrap();
        let host = node.dir.path().join("host");
        // As container runtimes start it.
        let child = Command::new("/bin/sh")
            .args(["-c", "ulimit -Sn 1024; exec \"$0\"", BINARY])
            .env_clear()
            .env("NODE_NAME", "n1")
            .env("LIBRARY_DELIVERY", "mounts")
            .env("HTTP_ADDR", "")
            .env("PLUGIN_DIR", kubelet.plugin_dir(DRIVER))
            .env("REGISTRY_DIR", kubelet.registry_dir())
            .env("POD_RESOURCES_SOCKET", kubelet.pod_resources_socket())
            .env("CDI_DIR", node.cdi_dir())
            .env("HOST_ROOT", &host)
            .env("DRIVER_ROOT", &host)
            .env("HOST_DRIVER_ROOT", "/")
            .env("DEVICE_NODES", &node.host.node_table)
            .env("NVML_LIBRARY", library())
            .env("KUBECONFIG", &path)
            .env("LOG_LEVEL", "warn")
            .env("DIVVY_MOCK_STATE", mock_state(node))
            .env("DIVVY_MOCK_GPUS", "h100x2")
            .envs(more.iter().copied())
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    pub(crate) fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(i32::try_from(self.0.id()).unwrap()).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    pub(crate) async fn end(&mut self) -> ExitStatus {
        wait("the end of the process", || self.0.try_wait().unwrap()).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _already_gone = self.0.kill();
        let _status = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_binary_serves_is_killed_starts_again_and_stops_at_sigterm() {
    let node = Node::new("h100x2");
    let server = node.api.serve_http().await.unwrap();
    let mut first = Process::start(&node, &server.kubeconfig());
    let registered = node
        .kubelet
        .wait_registered(DRIVER, PATIENCE)
        .await
        .unwrap();
    wait("slices", || {
        (node.published() == plain(&["gpu-1", "gpu-0"])).then_some(())
    })
    .await;
    let limits = fs_err::read_to_string(format!("/proc/{}/limits", first.0.id())).unwrap();
    let files: Vec<&str> = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .unwrap()
        .split_whitespace()
        .collect();
    assert_eq!(files[3], files[4], "{limits}");
    let claim = node.claim("c", &["gpu-1"]);
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-1")])
    );

    first.signal(rustix::process::Signal::KILL);
    first.end().await;
    for file in node.cdi_files().keys() {
        fs_err::remove_file(node.cdi_dir().join(file)).unwrap();
    }
    let mut second = Process::start(&node, &server.kubeconfig());
    wait("the claim's CDI file", || {
        (node.cdi_files().len() == 1).then_some(())
    })
    .await;
    // Both use the same sockets: the second's is connected to before the kubelet finds the first's
    // registration gone.
    let again = |plugins: &[divvy_fake_cluster::kubelet::Plugin]| {
        plugins
            .iter()
            .any(|p| p.connected && p.registration > registered.registration)
            .then_some(())
    };
    node.kubelet.wait_for(again, PATIENCE).await.unwrap();
    assert_eq!(
        node.prepare(&claim).await,
        Ok(vec![device(&claim, "gpu", "gpu-1")])
    );
    assert_eq!(node.unprepare(&claim).await, Ok(()));

    second.signal(rustix::process::Signal::TERM);
    assert!(second.end().await.success());
    assert_eq!(node.published(), plain(&["gpu-1", "gpu-0"]), "slices stay");
    assert!(
        !node
            .kubelet
            .config()
            .plugin_dir(DRIVER)
            .join("dra.sock")
            .exists()
    );
}

#[test]
fn an_invalid_flag_is_reported_on_stderr_with_a_failing_exit_code() {
    let out = Command::new(BINARY)
        .env_clear()
        .args(["--node-name", "n1", "--cdi-dir", "cdi"])
        .output()
        .unwrap();
    assert_eq!(out.status.code(), Some(2));
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(
        said.starts_with(
            "error: invalid value 'cdi' for '--cdi-dir <CDI_DIR>': expected an absolute path\n"
        ),
        "{said}"
    );
}
