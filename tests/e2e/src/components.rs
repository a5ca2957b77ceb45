//! The programs of a cluster and how each is called.
//!
//! Everything that is not default has its reason beside it; most of them are that several clusters
//! share one machine without systemd, and that tests want an answer in seconds.

use anyhow::Result;

use crate::config::Layout;
use crate::parts::Parts;

/// A program of the cluster. The names are those of `cargo xtask cluster status` and of the log
/// files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Component {
    /// The API server's store.
    Etcd,
    /// The API server.
    ApiServer,
    /// Plain HTTP to the API server on a Unix socket outside the namespaces: what the tests read
    /// objects through.
    ApiProxy,
    /// Deployments, claims from templates, garbage collection.
    ControllerManager,
    /// The stock scheduler.
    Scheduler,
    /// The container runtime.
    Containerd,
    Kubelet,
    /// Service addresses for pods: the driver reaches the API server through one.
    KubeProxy,
}

impl Component {
    /// All of them, in the order they are started.
    pub const ALL: [Self; 8] = [
        Self::Etcd,
        Self::ApiServer,
        Self::Containerd,
        Self::ApiProxy,
        Self::ControllerManager,
        Self::Scheduler,
        Self::Kubelet,
        Self::KubeProxy,
    ];

    /// The name of the component.
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::ApiServer => "kube-apiserver",
            Self::ApiProxy => "api-proxy",
            Self::ControllerManager => "kube-controller-manager",
            Self::Scheduler => "kube-scheduler",
            Self::Containerd => "containerd",
            Self::Kubelet => "kubelet",
            Self::KubeProxy => "kube-proxy",
        }
    }

    /// The component with this name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|component| component.name() == name)
    }

    /// Returns true if it knows Kubernetes' feature gates of devices.
    pub(crate) fn has_gates(self) -> bool {
        matches!(
            self,
            Self::ApiServer | Self::ControllerManager | Self::Scheduler | Self::Kubelet
        )
    }

    /// Its command line.
    pub fn args(self, parts: &Parts, layout: &Layout) -> Result<Vec<String>> {
        let program = match self {
            Self::ApiProxy => "kubectl",
            other => other.name(),
        };
        let mut args = vec![parts.bin(program)?.display().to_string()];
        args.extend(match self {
            Self::Etcd => etcd(),
            Self::ApiServer => api_server(layout),
            Self::ApiProxy => api_proxy(layout),
            Self::ControllerManager => controller_manager(layout),
            Self::Scheduler => scheduler(layout),
            Self::Containerd => vec![flag("config", layout.file("containerd.toml"))],
            Self::Kubelet => kubelet(layout),
            Self::KubeProxy => kube_proxy(layout),
        });
        Ok(args)
    }
}

fn flag(name: &str, value: impl AsRef<str>) -> String {
    format!("--{name}={}", value.as_ref())
}

fn etcd() -> Vec<String> {
    vec![
        flag("data-dir", "/run/etcd"),
        flag("unsafe-no-fsync", "true"),
        flag("listen-client-urls", "http://127.0.0.1:2379"),
        flag("advertise-client-urls", "http://127.0.0.1:2379"),
        flag("listen-peer-urls", "http://127.0.0.1:2380"),
    ]
}

fn api_server(layout: &Layout) -> Vec<String> {
    vec![
        flag("etcd-servers", "http://127.0.0.1:2379"),
        flag("advertise-address", layout.address()),
        flag("service-cluster-ip-range", Layout::SERVICES),
        // It signs its own certificate there; everyone else trusts that.
        flag("cert-dir", layout.file("")),
        flag("token-auth-file", layout.file("tokens.csv")),
        flag("authorization-mode", "Node,RBAC"),
        flag("enable-admission-plugins", "NodeRestriction"),
        flag("service-account-issuer", "https://kubernetes.default.svc"),
        flag(
            "service-account-signing-key-file",
            layout.file("service-account.key"),
        ),
        flag(
            "service-account-key-file",
            layout.file("service-account.key"),
        ),
        flag("allow-privileged", "true"),
        flag("kubelet-preferred-address-types", "InternalIP"),
    ]
}

fn api_proxy(layout: &Layout) -> Vec<String> {
    vec![
        "proxy".to_owned(),
        flag("kubeconfig", layout.kubeconfig("admin")),
        flag("unix-socket", layout.api_socket().display().to_string()),
        // The socket's own permissions decide who gets in.
        flag("reject-paths", "^$"),
    ]
}

fn controller_manager(layout: &Layout) -> Vec<String> {
    vec![
        flag("kubeconfig", layout.kubeconfig("controller-manager")),
        flag("leader-elect", "false"),
        // Its controllers are forbidden everything without accounts of their own.
        flag("use-service-account-credentials", "true"),
        flag(
            "service-account-private-key-file",
            layout.file("service-account.key"),
        ),
        flag("root-ca-file", layout.ca()),
        flag("bind-address", "127.0.0.1"),
        // Its default of 20 makes claims from templates for ten pods a second.
        flag("kube-api-qps", "2000"),
        flag("kube-api-burst", "4000"),
    ]
}

fn scheduler(layout: &Layout) -> Vec<String> {
    vec![
        flag("kubeconfig", layout.kubeconfig("scheduler")),
        flag("leader-elect", "false"),
        flag("bind-address", "127.0.0.1"),
        // The default of 50 hides how fast it is.
        flag("kube-api-qps", "2000"),
        flag("kube-api-burst", "4000"),
    ]
}

fn kubelet(layout: &Layout) -> Vec<String> {
    vec![
        flag("config", layout.file("kubelet.yaml")),
        flag("kubeconfig", layout.kubelet_kubeconfig()),
        flag("hostname-override", layout.node()),
        flag("node-ip", layout.address()),
    ]
}

fn kube_proxy(layout: &Layout) -> Vec<String> {
    let mut args = vec![
        flag("kubeconfig", layout.kubeconfig("kube-proxy")),
        flag("hostname-override", layout.node()),
        flag("proxy-mode", "nftables"),
        flag("cluster-cidr", Layout::PODS),
    ];
    // Left alone it sets sysctls that are read-only in a network namespace, and stops when it
    // cannot.
    for limit in ["max-per-core", "min"] {
        args.push(flag(&format!("conntrack-{limit}"), "0"));
    }
    for limit in [
        "tcp-timeout-established",
        "tcp-timeout-close-wait",
        "udp-timeout",
        "udp-timeout-stream",
    ] {
        args.push(flag(&format!("conntrack-{limit}"), "0s"));
    }
    args
}
