//! Flags as they are written, each with its environment twin. [`crate::Config`] is what comes out of them; nothing
//! else is passed on.

use std::convert::Infallible;
use std::path::PathBuf;

use clap::Parser;
use divvy_offer::ModeLock;
use divvy_telemetry::LogFormat;

use crate::config::{Delivery, Offer};

/// The node plugin of divvy: publishes this node's GPUs as ResourceSlices and prepares the claims that the
/// scheduler places on it.
#[derive(Debug, Clone, Parser)]
#[command(name = "divvy-kubelet-plugin", version, about)]
pub struct Args {
    /// Name of this node, as in the Kubernetes API.
    #[arg(long, env = "NODE_NAME")]
    pub node_name: String,
    /// Driver name in ResourceSlices and claims.
    #[arg(long, env = "DRIVER_NAME", default_value = divvy_api::names::DRIVER)]
    pub driver_name: String,
    /// Where records, locks and the DRA socket live; the same path on the host and in the container.
    /// [default: the driver name in /var/lib/kubelet/plugins]
    #[arg(long, env = "PLUGIN_DIR", value_parser = path)]
    pub plugin_dir: Option<PathBuf>,
    /// A folder that all divvy drivers on the node share: two of them (releases of the chart with driver names of their own)
    /// do not give out the same GPU at once. [default: this is the only one]
    #[arg(long, env = "LOCK_DIR", value_parser = path)]
    pub lock_dir: Option<PathBuf>,
    /// Where the kubelet looks for registration sockets.
    #[arg(long, env = "REGISTRY_DIR", default_value = "/var/lib/kubelet/plugins_registry")]
    pub registry_dir: PathBuf,
    /// Socket on which the kubelet tells which devices running pods hold.
    #[arg(long, env = "POD_RESOURCES_SOCKET", default_value = "/var/lib/kubelet/pod-resources/kubelet.sock")]
    pub pod_resources_socket: PathBuf,
    /// Where the container runtime looks for CDI files.
    #[arg(long, env = "CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// Root of the NVIDIA driver's files, as this process sees it. [default: the known places are tried]
    #[arg(long, env = "DRIVER_ROOT", value_parser = path)]
    pub driver_root: Option<PathBuf>,
    /// The same folder as the host names it. [default: as --driver-root]
    #[arg(long, env = "HOST_DRIVER_ROOT", value_parser = path)]
    pub host_driver_root: Option<PathBuf>,
    /// Root of the host's /proc, /sys and /dev, as this process sees it.
    #[arg(long, env = "HOST_ROOT", default_value = "/")]
    pub host_root: PathBuf,
    /// Table of device nodes and their numbers, for hosts whose GPUs are simulated. [default: /dev is looked at]
    #[arg(long, env = "DEVICE_NODES", value_parser = path)]
    pub device_nodes: Option<PathBuf>,
    /// NVML library to load. [default: libnvidia-ml.so.1 of the driver found]
    #[arg(long, env = "NVML_LIBRARY", value_parser = path)]
    pub nvml_library: Option<PathBuf>,
    /// What GPUs are offered as: auto (as their MIG mode is now: off, whole; on, in partitions), or
    /// everything (whole, in partitions and in time-sliced shares at once: whoever comes first decides; prepare switches
    /// MIG mode where that needs no reset; Kubernetes 1.36.2 and later, below it one of them).
    #[arg(long, env = "OFFER", value_enum, default_value_t)]
    pub offer: Offer,
    /// Whether one GPU is offered in several modes at once where several are asked for: auto (if the version of the API
    /// server says that the scheduler keeps them apart, and until a claim proves otherwise), on or off. A GpuPolicy
    /// with modeLock overrides it.
    #[arg(long, env = "MODE_LOCK", default_value = "auto", value_parser = mode_lock)]
    pub mode_lock: ModeLock,
    /// MIG profiles that are offered besides the plain ones, by suffix, separated by commas: +me, +me.all, -me, +gfx.
    /// Each costs the scheduler of the whole cluster.
    #[arg(
        long,
        env = "MIG_PROFILES",
        default_value = "",
        allow_hyphen_values = true,
        hide_default_value = true
    )]
    pub mig_profiles: String,
    /// Xids that do not make a GPU unfit, separated by commas, besides those that are an application's affair or
    /// nobody's.
    #[arg(long, env = "IGNORED_XIDS", default_value = "", hide_default_value = true)]
    pub ignored_xids: String,
    /// How many seconds a GPU or partition has to be without an ailment before it is given out again, at the least:
    /// three good polls in a row are needed besides.
    #[arg(long, env = "RECOVER_AFTER", default_value_t = 60)]
    pub recover_after: u32,
    /// How containers find the driver's libraries: hook (a program makes links and enters them into the image's loader
    /// cache), or mounts (no program is called; LD_LIBRARY_PATH leads to them and replaces the image's own).
    #[arg(long, env = "LIBRARY_DELIVERY", value_enum, default_value_t)]
    pub library_delivery: Delivery,
    /// Device nodes of the node that a claim's config may ask for (extraNodes), separated by commas: those of GDRCopy
    /// (/dev/gdrdrv), GPUDirect Storage (/dev/nvidia-fs*) or IMEX channels, whose isolation is not divvy's.
    #[arg(long, env = "EXTRA_NODES", default_value = "", hide_default_value = true)]
    pub extra_nodes: String,
    /// The program that CDI files call at container creation (divvy-cdi-hook); it is copied into --hook-dir.
    /// [default: beside this program]
    #[arg(long, env = "HOOK_PATH", value_parser = path)]
    pub hook_path: Option<PathBuf>,
    /// Where the container runtime finds that program; the same path on the host and in the container. In pods with a user
    /// namespace it is called by a user to whom only what is open to all is open. [default: the driver name in /opt/divvy]
    #[arg(long, env = "HOOK_DIR", value_parser = path)]
    pub hook_dir: Option<PathBuf>,
    /// Address of /metrics, /healthz and /readyz; empty for none.
    #[arg(long, env = "HTTP_ADDR", default_value = "127.0.0.1:9440")]
    pub http: String,
    /// Address of /debug/state, which tells of every claim on the node to whoever asks.
    /// [default: that of --http if it is a loopback address, else none]
    #[arg(long, env = "DEBUG_HTTP_ADDR", default_value = "", hide_default_value = true)]
    pub debug_http: String,
    /// Kubeconfig file. [default: the service account of the pod, else $KUBECONFIG or ~/.kube/config]
    #[arg(long, env = "KUBECONFIG", value_parser = path)]
    pub kubeconfig: Option<PathBuf>,
    /// How log lines look: plain or json.
    #[arg(long, env = "LOG_FORMAT", default_value = "plain")]
    pub log_format: LogFormat,
    /// What is logged: a level, or filter directives such as `info,divvy_executor=debug`.
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    pub log_level: String,
    /// UID of this pod. With it the sockets get names of their own, so that the next instance of a rolling update
    /// can register beside this one.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: Option<String>,
}

/// As it stands, empty too: charts set variables also for what was left empty, and that means the default.
#[expect(clippy::unnecessary_wraps, reason = "clap wants a parser that may fail")]
fn path(text: &str) -> Result<PathBuf, Infallible> {
    Ok(PathBuf::from(text))
}

fn mode_lock(text: &str) -> Result<ModeLock, String> {
    match text {
        "auto" | "" => Ok(ModeLock::Auto),
        "on" => Ok(ModeLock::On),
        "off" => Ok(ModeLock::Off),
        _ => Err("expected auto, on or off".to_owned()),
    }
}
