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
    /// Folder of records, locks and the DRA socket; the same path on the host and in the container.
    /// [default: the driver name in /var/lib/kubelet/plugins]
    #[arg(long, env = "PLUGIN_DIR", value_parser = path)]
    pub plugin_dir: Option<PathBuf>,
    /// A folder in memory that all divvy drivers on the node share: its locks keep two of them (chart releases with different
    /// driver names) from allocating the same GPU, and files that a reboot may delete are fast to write there.
    /// [default: this is the only driver, and such files are in --plugin-dir]
    #[arg(long, env = "RUN_DIR", alias = "lock-dir", value_parser = path)]
    pub run_dir: Option<PathBuf>,
    /// Folder in which the kubelet looks for registration sockets.
    #[arg(long, env = "REGISTRY_DIR", default_value = "/var/lib/kubelet/plugins_registry")]
    pub registry_dir: PathBuf,
    /// The kubelet's socket that lists the devices of running pods.
    #[arg(long, env = "POD_RESOURCES_SOCKET", default_value = "/var/lib/kubelet/pod-resources/kubelet.sock")]
    pub pod_resources_socket: PathBuf,
    /// Folder from which the container runtime reads CDI files.
    #[arg(long, env = "CDI_DIR", default_value = "/var/run/cdi")]
    pub cdi_dir: PathBuf,
    /// Root of the NVIDIA driver's files, as this process sees it. [default: the known places are searched]
    #[arg(long, env = "DRIVER_ROOT", value_parser = path)]
    pub driver_root: Option<PathBuf>,
    /// The same folder as the host names it. [default: same as --driver-root]
    #[arg(long, env = "HOST_DRIVER_ROOT", value_parser = path)]
    pub host_driver_root: Option<PathBuf>,
    /// Root of the host's /proc, /sys and /dev, as this process sees it.
    #[arg(long, env = "HOST_ROOT", default_value = "/")]
    pub host_root: PathBuf,
    /// Table of device nodes and their numbers, for hosts whose GPUs are simulated. [default: /dev is read]
    #[arg(long, env = "DEVICE_NODES", value_parser = path)]
    pub device_nodes: Option<PathBuf>,
    /// NVML library to load. [default: libnvidia-ml.so.1 of the driver found]
    #[arg(long, env = "NVML_LIBRARY", value_parser = path)]
    pub nvml_library: Option<PathBuf>,
    /// How GPUs without a GpuPolicy are offered: auto (by their MIG mode: whole if it is off, as partitions if it is on), or
    /// everything (whole, as partitions and as time-sliced shares at once; the first claim chooses, and prepare switches MIG
    /// mode where that needs no reset; requires Kubernetes 1.36.2, older versions get one mode per GPU).
    #[arg(long, env = "OFFER", value_enum, default_value_t)]
    pub offer: Offer,
    /// Whether a GPU is offered in several modes at once: auto (if the API server's version shows that the scheduler counts
    /// them correctly, and until a conflict proves otherwise), on or off. `modeLock` of a GpuPolicy takes precedence.
    #[arg(long, env = "MODE_LOCK", default_value = "auto", value_parser = mode_lock)]
    pub mode_lock: ModeLock,
    /// MIG profiles to offer besides the plain ones, by suffix, separated by commas: +me, +me.all, -me, +gfx. Each adds to
    /// the work of the cluster's scheduler.
    #[arg(
        long,
        env = "MIG_PROFILES",
        default_value = "",
        allow_hyphen_values = true,
        hide_default_value = true
    )]
    pub mig_profiles: String,
    /// Further Xids that do not make a GPU unhealthy, separated by commas, besides application errors and information.
    #[arg(long, env = "IGNORED_XIDS", default_value = "", hide_default_value = true)]
    pub ignored_xids: String,
    /// Minimum time in seconds without a fault before a GPU or partition is allocated again; three good polls in a row are
    /// required too.
    #[arg(long, env = "RECOVER_AFTER", default_value_t = 60)]
    pub recover_after: u32,
    /// What is read of the use of GPUs.
    #[command(flatten)]
    pub usage: UsageArgs,
    /// How containers find the driver's libraries: hook (a program makes links and adds them to the image's loader cache), or
    /// mounts (no program runs; LD_LIBRARY_PATH leads to them and replaces the image's own).
    #[arg(long, env = "LIBRARY_DELIVERY", value_enum, default_value_t)]
    pub library_delivery: Delivery,
    /// Device nodes of the node that a claim's config may request (extraNodes), separated by commas: those of GDRCopy
    /// (/dev/gdrdrv), GPUDirect Storage (/dev/nvidia-fs*) or IMEX channels, which divvy does not isolate.
    #[arg(long, env = "EXTRA_NODES", default_value = "", hide_default_value = true)]
    pub extra_nodes: String,
    /// Whether containers get a file with the attributes of their devices for each request.
    #[arg(long, env = "DEVICE_METADATA", default_value_t = true, action = clap::ArgAction::Set)]
    pub device_metadata: bool,
    /// The program that CDI files name for container creation (divvy-cdi-hook); it is copied into --hook-dir.
    /// [default: beside this program]
    #[arg(long, env = "HOOK_PATH", value_parser = path)]
    pub hook_path: Option<PathBuf>,
    /// Where the container runtime finds that program; the same path on the host and in the container. It must be accessible
    /// to every user, because pods with a user namespace run it unprivileged. [default: the driver name in /opt/divvy]
    #[arg(long, env = "HOOK_DIR", value_parser = path)]
    pub hook_dir: Option<PathBuf>,
    /// Whether /metrics shows series with the names of namespaces, claims and pods.
    #[arg(long, env = "CLAIM_METRICS", default_value_t = true, action = clap::ArgAction::Set)]
    pub claim_metrics: bool,
    /// Address of /metrics, /healthz and /readyz; empty for none.
    #[arg(long, env = "HTTP_ADDR", default_value = "127.0.0.1:9440")]
    pub http: String,
    /// Address of /debug/state, which shows every claim on the node to any client.
    /// [default: that of --http if it is a loopback address, else none]
    #[arg(long, env = "DEBUG_HTTP_ADDR", default_value = "", hide_default_value = true)]
    pub debug_http: String,
    /// Kubeconfig file. [default: the service account of the pod, else $KUBECONFIG or ~/.kube/config]
    #[arg(long, env = "KUBECONFIG", value_parser = path)]
    pub kubeconfig: Option<PathBuf>,
    /// Log format: plain or json.
    #[arg(long, env = "LOG_FORMAT", default_value = "plain")]
    pub log_format: LogFormat,
    /// Log filter: a level, or directives such as `info,divvy_executor=debug`.
    #[arg(long, env = "LOG_LEVEL", default_value = "info")]
    pub log_level: String,
    /// UID of this pod. It makes the socket names unique, so that the next instance of a rolling update can register beside
    /// this one.
    #[arg(long, env = "POD_UID")]
    pub pod_uid: Option<String>,
}

/// What is read of the use of GPUs.
#[derive(Debug, Clone, clap::Args)]
pub struct UsageArgs {
    /// Whether memory and utilisation of the GPUs that claims hold are read, for metrics and reports.
    #[arg(long, env = "USAGE", default_value_t = true, action = clap::ArgAction::Set)]
    pub usage: bool,
    /// After so many seconds without any use a claim is reported as idle.
    #[arg(long, env = "IDLE_AFTER", default_value_t = 3600)]
    pub idle_after: u32,
}

/// The value as given. Charts set variables for empty values too; empty means the default.
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
            let (meaning, words) =
                text.split_once("[default: ").map_or((text.as_str(), None), |(meaning, words)| {
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
            let env = flag.get_env().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
            page += &format!(
                "| `--{}` | `{env}` | {default} | {meaning} |\n",
                flag.get_long().unwrap_or_default()
            );
        }
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/reference/plugin-flags.md");
        if std::env::var_os("DIVVY_BLESS").is_some() {
            fs_err::write(file, &page).unwrap();
        }
        assert_eq!(fs_err::read_to_string(file).unwrap(), page, "run `cargo xtask reference`");
    }
}
