//! The files that the programs of a cluster read, and where they are.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use fs_err as fs;

use crate::images::PAUSE;
use crate::parts::Parts;
use crate::process::output;

/// Paths and addresses of a cluster, as one of its nodes has them.
#[derive(Debug, Clone)]
pub struct Layout {
    name: String,
    state: PathBuf,
    /// The state folder of the first node, where the API server is.
    first: PathBuf,
    node: &'static Node,
}

/// A node of a cluster.
#[derive(Debug, PartialEq, Eq)]
struct Node {
    name: &'static str,
    address: &'static str,
    /// Addresses of its pods.
    pods: &'static str,
    /// The name of its kubeconfig.
    user: &'static str,
}

const FIRST: Node = Node {
    name: Layout::NODE,
    address: "10.89.0.1",
    pods: "10.244.0.0/24",
    user: "kubelet",
};
const SECOND: Node = Node {
    name: "node-2",
    address: "10.89.0.2",
    pods: "10.244.1.0/24",
    user: "kubelet-2",
};

/// Users of the API server: name of the kubeconfig, user, group.
const USERS: &[(&str, &str, &str)] = &[
    ("admin", "admin", "system:masters"),
    ("controller-manager", "system:kube-controller-manager", ""),
    ("scheduler", "system:kube-scheduler", ""),
    ("kubelet", "system:node:node-1", "system:nodes"),
    ("kubelet-2", "system:node:node-2", "system:nodes"),
    ("kube-proxy", "system:kube-proxy", ""),
];

impl Layout {
    /// The name of the first node, which is the only one unless a case adds another.
    pub const NODE: &'static str = "node-1";
    /// The container runtime, as a RuntimeClass names it, that makes twins of control groups: see
    /// `runtime-with-groups.sh`.
    pub const RUNTIME_WITH_GROUPS: &'static str = "groups";
    /// The same with crun in the place of runc.
    pub const CRUN_WITH_GROUPS: &'static str = "groups-crun";
    /// Addresses of services.
    pub const SERVICES: &'static str = "10.96.0.0/16";
    /// Addresses of all pods.
    pub const PODS: &'static str = "10.244.0.0/16";

    /// The layout of the cluster with this name, whose files are in `state`.
    pub fn new(name: &str, state: &Path) -> Self {
        Self {
            name: name.to_owned(),
            state: state.to_owned(),
            first: state.to_owned(),
            node: &FIRST,
        }
    }

    /// Returns the layout of this cluster's second node, whose own files are in `state`.
    pub(crate) fn second(&self, name: &str, state: &Path) -> Self {
        let (name, first) = (name.to_owned(), self.first.clone());
        Self {
            name,
            state: state.to_owned(),
            first,
            node: &SECOND,
        }
    }

    /// Returns true if this is the node with the API server.
    pub(crate) fn is_first(&self) -> bool {
        *self.node == FIRST
    }

    /// The node's name.
    pub fn node(&self) -> &'static str {
        self.node.name
    }

    /// The node's address; every cluster has a network of its own, so all have the same.
    pub fn address(&self) -> &'static str {
        self.node.address
    }

    /// Addresses of the node's pods.
    pub(crate) fn pods(&self) -> &'static str {
        self.node.pods
    }

    /// A configuration file.
    pub fn file(&self, name: &str) -> String {
        self.state.join("etc").join(name).display().to_string()
    }

    fn file_of_first(&self, name: &str) -> String {
        self.first.join("etc").join(name).display().to_string()
    }

    /// The kubeconfig of a user, as `admin`.
    pub fn kubeconfig(&self, user: &str) -> String {
        self.file_of_first(&format!("{user}.kubeconfig"))
    }

    /// The node's own.
    pub(crate) fn kubelet_kubeconfig(&self) -> String {
        self.kubeconfig(self.node.user)
    }

    /// The certificate that all trust; the API server makes it when it first starts.
    pub fn ca(&self) -> String {
        self.file_of_first("apiserver.crt")
    }

    /// A socket of the API without credentials or TLS, for processes that may open files of this
    /// user.
    pub fn api_socket(&self) -> PathBuf {
        self.first.join("api.sock")
    }

    /// The cgroup below which everything of the node's pods is, without the leading `/`.
    pub fn cgroup(&self) -> String {
        format!("divvy-e2e-{}", self.name)
    }

    /// Returns the scheduler's configuration of docs/packing.md, with the way to the API server:
    /// beside a file, the scheduler takes no flags for that.
    fn packing(&self) -> Result<String> {
        let page = include_str!("../../../docs/packing.md");
        let (_, file) = page
            .split_once("```yaml\n# scheduler.yaml")
            .context("docs/packing.md has no scheduler.yaml")?;
        let (file, _) = file.split_once("```").context("no end of scheduler.yaml")?;
        let kubeconfig = self.kubeconfig("scheduler");
        Ok(format!(
            "#{file}clientConnection: {{kubeconfig: {kubeconfig}, qps: 2000, burst: 4000}}\nleaderElection: {{leaderElect: false}}\n"
        ))
    }

    /// Writes every file.
    pub fn write(&self, parts: &Parts) -> Result<()> {
        fs::create_dir_all(self.file("cni"))?;
        fs::write(self.file("kubelet.yaml"), self.kubelet())?;
        fs::write(self.file("packing.yaml"), self.packing()?)?;
        fs::write(self.file("containerd.toml"), self.containerd(parts)?)?;
        self.write_runtimes(parts)?;
        fs::write(self.file("cni/10-ptp.conflist"), cni(self.node.pods))?;
        if !self.is_first() {
            return Ok(());
        }
        let mut tokens = Vec::new();
        for (name, user, group) in USERS {
            tokens.push(format!("token-{name},{user},{name},{group}\n"));
            fs::write(
                self.kubeconfig(name),
                self.kubeconfig_text(&format!("token-{name}")),
            )?;
        }
        fs::write(self.file("tokens.csv"), tokens.concat())?;
        let key = self.file("service-account.key");
        output(Command::new("openssl").args([
            "ecparam",
            "-name",
            "prime256v1",
            "-genkey",
            "-noout",
            "-out",
            &key,
        ]))?;
        Ok(())
    }

    /// The folder that stands in for the node's `/`.
    pub(crate) fn host(&self) -> PathBuf {
        self.state.join("host")
    }

    /// Returns the runtimes that make twins of control groups: with crun only where it is
    /// installed.
    pub fn runtimes_with_groups() -> Vec<&'static str> {
        let by_crun = crun().map(|_| Self::CRUN_WITH_GROUPS);
        [Self::RUNTIME_WITH_GROUPS]
            .into_iter()
            .chain(by_crun)
            .collect()
    }

    /// Returns the program of a runtime with groups.
    fn with_groups(&self, runtime: &str) -> String {
        self.file(&format!("runtime-with-{runtime}.sh"))
    }

    /// Writes the programs of the runtimes with groups.
    fn write_runtimes(&self, parts: &Parts) -> Result<()> {
        for runtime in Self::runtimes_with_groups() {
            let program = match crun().filter(|_| runtime == Self::CRUN_WITH_GROUPS) {
                Some(crun) => crun,
                None => parts.bin("runc")?,
            };
            let file = self.with_groups(runtime);
            let text = include_str!("runtime-with-groups.sh")
                .replace("@RUNTIME@", &program.display().to_string())
                .replace("@HOST@", &self.host().display().to_string());
            fs::write(&file, text)?;
            fs::set_permissions(&file, Permissions::from_mode(0o755))?;
        }
        Ok(())
    }

    /// A kubeconfig for any token, as one of a ServiceAccount.
    pub fn kubeconfig_text(&self, token: &str) -> String {
        let (ca, address) = (self.ca(), FIRST.address);
        format!(
            "apiVersion: v1
kind: Config
clusters:
- name: e2e
  cluster: {{server: \"https://{address}:6443\", certificate-authority: \"{ca}\"}}
users:
- name: e2e
  user: {{token: \"{token}\"}}
contexts:
- name: e2e
  context: {{cluster: e2e, user: e2e}}
current-context: e2e
"
        )
    }

    fn kubelet(&self) -> String {
        format!(
            "apiVersion: kubelet.config.k8s.io/v1beta1
kind: KubeletConfiguration
containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
cgroupRoot: /{cgroup} # keeps parallel clusters apart
cgroupDriver: cgroupfs # no systemd here
failCgroupV1: false
enforceNodeAllocatable: []
oomScoreAdj: 0 # a lower one needs a right that containers lack
failSwapOn: false
authentication: {{anonymous: {{enabled: true}}, webhook: {{enabled: false}}}}
authorization: {{mode: AlwaysAllow}}
clusterDNS: [10.96.0.10] # no server answers there; without one every pod gets a warning
clusterDomain: cluster.local
maxPods: 250
nodeStatusUpdateFrequency: 2s
# A full disk of the host is not what is tested.
evictionHard: {{nodefs.available: \"0%\", nodefs.inodesFree: \"0%\", imagefs.available: \"0%\", imagefs.inodesFree: \"0%\"}}
imageGCHighThresholdPercent: 100
imageGCLowThresholdPercent: 99
",
            cgroup = self.cgroup()
        )
    }

    fn containerd(&self, parts: &Parts) -> Result<String> {
        let text = format!(
            r#"version = 3
root = "/var/lib/containerd"
state = "/run/containerd"

[grpc]
address = "/run/containerd/containerd.sock"

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{PAUSE}"

[plugins."io.containerd.cri.v1.runtime"]
enable_cdi = true
cdi_spec_dirs = ["/etc/cdi", "/run/cdi"]
# A lower score than our own needs a right that we may lack; without this sandboxes fail.
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{cni}"]
conf_dir = "{conf}"

[plugins."io.containerd.cri.v1.runtime".containerd]
default_runtime_name = "runc"

"#,
            cni = parts.cni_dir().display(),
            conf = self.file("cni"),
        );
        let runc = ("runc", parts.bin("runc")?.display().to_string());
        let with_groups = Self::runtimes_with_groups().into_iter();
        let with_groups = with_groups.map(|name| (name, self.with_groups(name)));
        let runtimes = [runc].into_iter().chain(with_groups);
        Ok(runtimes.fold(text, |text, (name, program)| {
            text + &runtime(name, &program)
        }))
    }
}

/// Returns a container runtime in containerd's configuration.
fn runtime(name: &str, program: &str) -> String {
    let table = format!(r#"plugins."io.containerd.cri.v1.runtime".containerd.runtimes.{name}"#);
    format!(
        r#"
[{table}]
runtime_type = "io.containerd.runc.v2"

[{table}.options]
BinaryName = "{program}"
SystemdCgroup = false
"#
    )
}

/// Returns the crun of this machine, if it is installed.
fn crun() -> Option<PathBuf> {
    program("crun")
}

/// Returns a program of this machine, if it is installed.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH")?;
    let mut programs = std::env::split_paths(&folders).map(|folder| folder.join(name));
    programs.find(|program| program.exists())
}

fn cni(subnet: &str) -> String {
    format!(
        r#"{{
  "cniVersion": "1.0.0",
  "name": "pods",
  "plugins": [
    {{"type": "ptp", "ipam": {{"type": "host-local", "subnet": "{subnet}", "routes": [{{"dst": "0.0.0.0/0"}}]}}}}
  ]
}}
"#
    )
}
