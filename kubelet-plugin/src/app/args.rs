//! The flags, each with its environment twin, checked as they are parsed. [`crate::Config`] adds
//! what follows from several of them.
//!
//! Types like `std::option::Option` are written in full where the value parser makes the whole
//! value: clap gives the short names a meaning of its own.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Parser;
use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use divvy_model::Offer;
use divvy_model::mig::ProfileVariant;
use divvy_offer::ModeLock;
use divvy_telemetry::LogFormat;

use crate::app::config::{Delivery, NodeSelector, values};

/// The node plugin of divvy: publishes this node's GPUs as ResourceSlices and prepares the claims
/// that the scheduler places on it.
#[derive(Debug, Clone, Parser)]
#[command(name = "divvy-kubelet-plugin", version, about)]
pub struct Args {
    /// Name of this node, as in the Kubernetes API.
    #[arg(long, env = "NODE_NAME", value_parser = values::node_name)]
    pub node_name: String,
    /// Driver name in ResourceSlices and claims. With gpu.nvidia.com the plugin takes the place of
    /// NVIDIA's: it has that driver's names of attributes, reads its configs, and serves only nodes
    /// on which NVIDIA's plugin does not run.
    #[arg(long, env = "DRIVER_NAME", default_value = divvy_api::names::DRIVER, value_parser = values::driver_name)]
    pub driver_name: String,
    /// Labels by which the nodes of this plugin are selected: key=value and key!=value, separated
    /// by commas. A plugin that is stopped on a node that they no longer select gives back the MIG
    /// modes that it changed on GPUs that no claim holds. [default: any node]
    #[arg(
        long,
        env = "NODE_SELECTOR",
        default_value = "",
        hide_default_value = true
    )]
    pub node_selector: NodeSelector,
    /// Folder of records, locks and the DRA socket; the same path on the host and in the container.
    /// [default: the driver name in /var/lib/kubelet/plugins]
    #[arg(long, env = "PLUGIN_DIR", default_value = "", hide_default_value = true, value_parser = values::absolute_or_none)]
    pub plugin_dir: std::option::Option<PathBuf>,
    /// A folder in memory that all divvy drivers on the node share: its locks keep two of them
    /// (chart releases with different driver names) from allocating the same GPU, and files that a
    /// reboot may delete are fast to write there. [default: this is the only driver, and such files
    /// are in --plugin-dir]
    #[arg(long, env = "RUN_DIR", default_value = "", hide_default_value = true, value_parser = values::absolute_or_none)]
    pub run_dir: std::option::Option<PathBuf>,
    /// Has the driver cap the memory of shares where it can (R615 and later).
    #[arg(long, env = "MEMORY_CAPS", default_value_t = false, action = clap::ArgAction::Set)]
    pub memory_caps: bool,
    /// Folder of the supervisor of MPS daemons, the same path on the host and in the container:
    /// GPUs are then offered in MPS shares where a GpuPolicy names them. [default: none are]
    #[arg(long, env = "MPS_DIR", default_value = "", hide_default_value = true, value_parser = values::absolute_or_none)]
    pub mps_dir: std::option::Option<PathBuf>,
    /// Root of the node's control groups, as this process sees it and may write it: where the
    /// driver caps the memory of shares, it does so by the groups of pods.
    #[arg(
        long,
        env = "CGROUP_ROOT",
        default_value = "/sys/fs/cgroup",
        value_parser = values::absolute
    )]
    pub cgroup_root: PathBuf,
    /// Folder in which the kubelet looks for registration sockets.
    #[arg(
        long,
        env = "REGISTRY_DIR",
        default_value = "/var/lib/kubelet/plugins_registry",
        value_parser = values::absolute
    )]
    pub registry_dir: PathBuf,
    /// The kubelet's socket that lists the devices of running pods.
    #[arg(
        long,
        env = "POD_RESOURCES_SOCKET",
        default_value = "/var/lib/kubelet/pod-resources/kubelet.sock",
        value_parser = values::absolute
    )]
    pub pod_resources_socket: PathBuf,
    /// Folder from which the container runtime reads CDI files.
    #[arg(long, env = "CDI_DIR", default_value = "/var/run/cdi", value_parser = values::absolute)]
    pub cdi_dir: PathBuf,
    /// Root of the NVIDIA driver's files, as this process sees it. [default: the known places are
    /// searched]
    #[arg(long, env = "DRIVER_ROOT", default_value = "", hide_default_value = true, value_parser = values::absolute_or_none)]
    pub driver_root: std::option::Option<PathBuf>,
    /// The same folder as the host names it. [default: same as --driver-root]
    #[arg(long, env = "HOST_DRIVER_ROOT", default_value = "", hide_default_value = true, value_parser = values::absolute_or_none)]
    pub host_driver_root: std::option::Option<PathBuf>,
    /// Root of the host's /proc, /sys and /dev, as this process sees it.
    #[arg(long, env = "HOST_ROOT", default_value = "/", value_parser = values::absolute)]
    pub host_root: PathBuf,
    /// Table of device nodes and their numbers, for hosts whose GPUs are simulated. [default: /dev
    /// is read]
    #[arg(long, env = "DEVICE_NODES", default_value = "", hide_default_value = true, value_parser = values::path_or_none)]
    pub device_nodes: std::option::Option<PathBuf>,
    /// NVML library to load. [default: libnvidia-ml.so.1 of the driver found]
    #[arg(long, env = "NVML_LIBRARY", default_value = "", hide_default_value = true, value_parser = values::path_or_none)]
    pub nvml_library: std::option::Option<PathBuf>,
    /// The offer of GPUs without a GpuPolicy: auto (by their MIG mode: whole if it is off, as
    /// partitions if it is on), whole, partitions, shared (time-sliced shares), or everything
    /// (whole, as partitions and as time-sliced shares at once; the first claim chooses, and
    /// prepare switches MIG mode where that needs no reset; requires Kubernetes 1.36.2, older
    /// versions get one mode per GPU).
    #[arg(long, env = "OFFER", default_value = "auto", value_parser = PossibleValuesParser::new(Offer::names()).try_map(|name| name.parse::<Offer>()))]
    pub offer: Offer,
    /// Shares of a GPU without a GpuPolicy, at most: a claim that requests no amount gets the GPU
    /// divided by this number.
    #[arg(long, env = "SLOTS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub slots: u32,
    /// The offer of a GPU in several modes at once: auto (if the API server's version shows
    /// that the scheduler counts them correctly, and until a conflict proves otherwise), on or off.
    /// `modeLock` of a GpuPolicy takes precedence.
    #[arg(long, env = "MODE_LOCK", default_value = "auto", value_parser = values::mode_lock)]
    pub mode_lock: ModeLock,
    /// Settings for programs that count GPUs against a quota.
    #[command(flatten)]
    pub quota: QuotaArgs,
    /// MIG profiles to offer besides the plain ones, by suffix, separated by commas: +me, +me.all,
    /// -me, +gfx. Each adds to the work of the cluster's scheduler.
    #[arg(
        long,
        env = "MIG_PROFILES",
        default_value = "",
        allow_hyphen_values = true,
        hide_default_value = true,
        value_parser = values::variants
    )]
    pub mig_profiles: BTreeSet<ProfileVariant>,
    /// Further Xids that do not make a GPU unhealthy, separated by commas, besides application
    /// errors and information.
    #[arg(
        long,
        env = "IGNORED_XIDS",
        default_value = "",
        hide_default_value = true,
        value_parser = values::xids
    )]
    pub ignored_xids: BTreeSet<u32>,
    /// Minimum time in seconds without a fault before a GPU or partition is allocated again; three
    /// good polls in a row are required too.
    #[arg(long, env = "RECOVER_AFTER", default_value_t = 60)]
    pub recover_after: u32,
    /// Readings of the use of GPUs.
    #[command(flatten)]
    pub usage: UsageArgs,
    /// The way in which containers find the driver's libraries: hook (a program makes links and
    /// adds them to the image's loader cache), or mounts (no program runs; LD_LIBRARY_PATH leads to
    /// them and replaces the image's own).
    #[arg(long, env = "LIBRARY_DELIVERY", value_enum, default_value_t)]
    pub library_delivery: Delivery,
    /// Device nodes of the node that a claim's config may request (extraNodes), separated by
    /// commas: those of GDRCopy (/dev/gdrdrv), GPUDirect Storage (/dev/nvidia-fs*) or IMEX
    /// channels, which divvy does not isolate.
    #[arg(
        long,
        env = "EXTRA_NODES",
        default_value = "",
        hide_default_value = true,
        value_parser = values::device_nodes
    )]
    pub extra_nodes: std::vec::Vec<String>,
    /// Gives containers a file with the attributes of their devices for each request.
    #[arg(long, env = "DEVICE_METADATA", default_value_t = true, action = clap::ArgAction::Set)]
    pub device_metadata: bool,
    /// The program that CDI files name for container creation (divvy-cdi-hook); it is copied into
    /// --hook-dir. [default: beside this program]
    #[arg(long, env = "HOOK_PATH", default_value = "", hide_default_value = true, value_parser = values::path_or_none)]
    pub hook_path: std::option::Option<PathBuf>,
    /// Where the container runtime finds that program; the same path on the host and in the
    /// container. It must be accessible to every user, because pods with a user namespace run it
    /// unprivileged. [default: the driver name in /opt/divvy]
    #[arg(long, env = "HOOK_DIR", default_value = "", hide_default_value = true, value_parser = values::absolute_or_none)]
    pub hook_dir: std::option::Option<PathBuf>,
    /// Shows series with the names of namespaces, claims and pods on /metrics.
    #[arg(long, env = "CLAIM_METRICS", default_value_t = true, action = clap::ArgAction::Set)]
    pub claim_metrics: bool,
    /// Address of /metrics, /healthz and /readyz; empty for none.
    #[arg(long, env = "HTTP_ADDR", default_value = "127.0.0.1:9440", value_parser = values::addresses)]
    pub http: std::vec::Vec<SocketAddr>,
    /// Address of /debug/state, which shows every claim on the node to any client.
    /// [default: that of --http if it is a loopback address, else none]
    #[arg(
        long,
        env = "DEBUG_HTTP_ADDR",
        default_value = "",
        hide_default_value = true,
        value_parser = values::addresses
    )]
    pub debug_http: std::vec::Vec<SocketAddr>,
    /// Kubeconfig file. [default: the service account of the pod, else $KUBECONFIG or
    /// ~/.kube/config]
    #[arg(long, env = "KUBECONFIG", default_value = "", hide_default_value = true, value_parser = values::path_or_none)]
    pub kubeconfig: std::option::Option<PathBuf>,
    /// Log format: plain or json.
    #[arg(long, env = "LOG_FORMAT", default_value = "plain")]
    pub log_format: LogFormat,
    /// Log filter: a level, or directives such as `info,divvy_executor=debug`.
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    pub log_level: String,
    /// UID of this pod. It makes the socket names unique, so that the next instance of a rolling
    /// update can register beside this one.
    #[arg(long, env = "POD_UID", default_value = "", hide_default_value = true, value_parser = values::pod_uid)]
    pub pod_uid: std::option::Option<String>,
}

/// Readings of the use of GPUs.
#[derive(Debug, Clone, clap::Args)]
pub struct UsageArgs {
    /// Reads memory and utilisation of the GPUs that claims hold, for metrics and reports.
    #[arg(long, env = "USAGE", default_value_t = true, action = clap::ArgAction::Set)]
    pub usage: bool,
    /// After so many seconds without any use a claim is reported as idle.
    #[arg(long, env = "IDLE_AFTER", default_value_t = 3600)]
    pub idle_after: u32,
}

/// Settings for programs that count GPUs against a quota.
#[derive(Debug, Clone, clap::Args)]
pub struct QuotaArgs {
    /// Publishes the counter memory of GPUs without a GpuPolicy, by which Kueue can charge a quota
    /// in GiB. `quota.counters` of a GpuPolicy takes precedence. It adds to the work of the
    /// cluster's scheduler.
    #[arg(long, env = "QUOTA_COUNTERS", default_value_t = false, action = clap::ArgAction::Set)]
    pub quota_counters: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::Args;

    /// `cargo xtask reference` runs this with `DIVVY_BLESS=1`.
    #[test]
    fn reference_lists_every_flag() {
        let mut page = "<!-- Written by `cargo xtask reference`. -->\n\n# Flags of the node plugin\n\n\
            The chart sets them from its [values](chart-values.md). An empty variable means the default.\n\n\
            | flag | variable | default | meaning |\n|---|---|---|---|\n"
            .to_owned();
        for flag in Args::command().get_arguments() {
            let text = flag.get_help().map(ToString::to_string).unwrap_or_default();
            // The default of an option without a value is in words in its help.
            let (meaning, words) = text
                .split_once("[default: ")
                .map_or((text.as_str(), None), |(meaning, words)| {
                    (meaning.trim_end(), Some(words.trim_end_matches([']', '.'])))
                });
            let defaults: Vec<String> = flag
                .get_default_values()
                .iter()
                .map(|value| value.to_string_lossy().into_owned())
                .filter(|value| !value.is_empty())
                .map(|value| format!("`{value}`"))
                .collect();
            let default = words.map_or_else(|| defaults.join(", "), str::to_owned);
            let env = flag
                .get_env()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_default();
            page += &format!(
                "| `--{}` | `{env}` | {default} | {meaning} |\n",
                flag.get_long().unwrap_or_default()
            );
        }
        let file = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../docs/reference/plugin-flags.md"
        );
        if std::env::var_os("DIVVY_BLESS").is_some() {
            fs_err::write(file, &page).unwrap();
        }
        assert_eq!(
            fs_err::read_to_string(file).unwrap(),
            page,
            "run `cargo xtask reference`"
        );
    }
}
