//! The validated configuration: everything the plugin needs to know, checked once.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_api::{DEVICE_NODE, is_device_node};
use divvy_model::health::HealthRules;
use divvy_model::mig::ProfileVariant;
use divvy_offer::{GpuRules, ModeLock, Modes};

use crate::Args;
use crate::sockets::{SocketNames, TooLong};

mod timing;

pub use timing::Timing;

/// Where the kubelet looks for plugins' folders.
const PLUGINS: &str = "/var/lib/kubelet/plugins";

/// A flag that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("--{flag} {value:?} cannot be used: {reason}")]
pub struct ConfigError {
    pub flag: &'static str,
    pub value: String,
    /// Why, and what is expected.
    pub reason: String,
}

/// What GPUs that can do MIG are offered as.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Offer {
    /// As their MIG mode is now: off, whole; on, in partitions.
    #[default]
    Auto,
    /// In every mode, where that is possible.
    Everything,
}

impl Offer {
    /// The modes that it stands for.
    pub fn modes(self) -> Modes {
        match self {
            Self::Auto => Modes::AsIs,
            Self::Everything => Modes::everything(),
        }
    }
}

/// How containers find the driver's libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Delivery {
    /// By a program that the container runtime calls.
    #[default]
    Hook,
    /// By mounts and `LD_LIBRARY_PATH` alone.
    Mounts,
}

/// Everything the plugin needs to know.
#[derive(Debug, Clone)]
pub struct Config {
    /// Node name in the API.
    pub node_name: String,
    pub driver_name: String,
    /// Folder of records, locks and the DRA socket.
    pub plugin_dir: PathBuf,
    /// Folder in memory that all divvy drivers on the node share, if there may be others.
    pub run_dir: Option<PathBuf>,
    /// Paths of the two sockets.
    pub sockets: SocketNames,
    /// The kubelet's PodResources socket.
    pub pod_resources_socket: PathBuf,
    /// Folder of CDI files.
    pub cdi_dir: PathBuf,
    /// Root of the driver's files, as we see it; none: the known places are tried.
    pub driver_root: Option<PathBuf>,
    /// The same, as the host names it.
    pub host_driver_root: Option<PathBuf>,
    /// Root of the host's /proc, /sys and /dev, as we see it.
    pub host_root: PathBuf,
    /// Table of device nodes, if they are not to be looked for in /dev.
    pub device_nodes: Option<PathBuf>,
    /// NVML library, if a certain one.
    pub nvml_library: Option<PathBuf>,
    /// How GPUs are offered.
    pub offer: Offer,
    /// Whether a GPU may be offered in several modes, where no policy says it.
    pub mode_lock: ModeLock,
    /// Profiles offered besides the plain ones.
    pub mig_profiles: BTreeSet<ProfileVariant>,
    /// By which rules the health of GPUs is judged.
    pub health: HealthRules,
    /// After so long without any use a claim is called idle; `None`: the use of GPUs is not measured.
    pub idle_after: Option<Duration>,
    /// Device nodes of the host that claims may ask for.
    pub extra_nodes: Vec<String>,
    /// Whether containers get files with the metadata of their devices.
    pub device_metadata: bool,
    /// How containers find the driver's libraries.
    pub library_delivery: Delivery,
    /// The hook program to install.
    pub hook_path: Option<PathBuf>,
    /// The folder to install it to.
    pub hook_dir: PathBuf,
    /// Whether metrics name namespaces, claims and pods.
    pub claim_metrics: bool,
    /// Addresses of the telemetry endpoints, the first that can be bound is used; empty: none.
    pub http: Vec<SocketAddr>,
    /// The same for a second server, which also serves the plugin's state; empty: none.
    pub debug_http: Vec<SocketAddr>,
    /// Kubeconfig, if a certain one.
    pub kubeconfig: Option<PathBuf>,
    /// Intervals and limits.
    pub timing: Timing,
}

impl From<TooLong> for ConfigError {
    fn from(too_long: TooLong) -> Self {
        refuse(too_long.flag, &too_long.path.display().to_string(), &too_long.to_string())
    }
}

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        // Destructured in full, so that an unused flag causes a compiler warning.
        let Args {
            node_name,
            driver_name,
            plugin_dir,
            run_dir,
            registry_dir,
            pod_resources_socket,
            cdi_dir,
            driver_root,
            host_driver_root,
            host_root,
            device_nodes,
            nvml_library,
            offer,
            mode_lock,
            mig_profiles,
            ignored_xids,
            recover_after,
            usage,
            extra_nodes,
            device_metadata,
            library_delivery,
            hook_path,
            hook_dir,
            claim_metrics,
            http,
            debug_http,
            kubeconfig,
            log_format: _,
            log_level: _,
            pod_uid,
        } = args;
        check_names(&node_name, &driver_name)?;
        // A chart sets variables for what was left empty, too.
        let given = |path: Option<PathBuf>| path.filter(|path| !path.as_os_str().is_empty());
        let (driver_root, host_driver_root) = (given(driver_root), given(host_driver_root));
        let hook_dir = given(hook_dir).unwrap_or_else(|| Path::new("/opt/divvy").join(&driver_name));
        let plugin_dir = given(plugin_dir).unwrap_or_else(|| Path::new(PLUGINS).join(&driver_name));
        let (run_dir, pod_uid) = (given(run_dir), pod_uid.filter(|uid| !uid.is_empty()));
        check_paths([
            ("plugin-dir", Some(&plugin_dir)),
            ("registry-dir", Some(&registry_dir)),
            ("pod-resources-socket", Some(&pod_resources_socket)),
            ("cdi-dir", Some(&cdi_dir)),
            ("host-root", Some(&host_root)),
            ("driver-root", driver_root.as_ref()),
            ("host-driver-root", host_driver_root.as_ref()),
            ("run-dir", run_dir.as_ref()),
            ("hook-dir", Some(&hook_dir)),
        ])?;
        check_pod_uid(pod_uid.as_deref())?;
        let sockets = SocketNames::new(&driver_name, &plugin_dir, &registry_dir, pod_uid.as_deref())?;
        Ok(Self {
            timing: Timing::of_node(&node_name),
            node_name,
            driver_name,
            plugin_dir,
            run_dir,
            sockets,
            pod_resources_socket,
            cdi_dir,
            driver_root,
            host_driver_root,
            host_root,
            device_nodes: given(device_nodes),
            nvml_library: given(nvml_library),
            offer,
            mode_lock,
            mig_profiles: variants(&mig_profiles)?,
            health: health(&ignored_xids, recover_after)?,
            idle_after: usage.usage.then_some(Duration::from_secs(usage.idle_after.into())),
            extra_nodes: device_nodes_of(&extra_nodes)?,
            device_metadata,
            library_delivery,
            hook_path: given(hook_path),
            hook_dir,
            claim_metrics,
            http: addresses("http", &http)?,
            debug_http: addresses("debug-http", &debug_http)?,
            kubeconfig: given(kubeconfig),
        })
    }
}

fn check_names(node_name: &str, driver_name: &str) -> Result<(), ConfigError> {
    check(
        "node-name",
        node_name,
        is_dns_subdomain(node_name, 253),
        "expected a node's name (DNS subdomain)",
    )?;
    check(
        "driver-name",
        driver_name,
        is_dns_subdomain(driver_name, 63),
        "expected a DNS subdomain of at most 63 lower-case characters, as gpu.divvy.dev",
    )
}

fn check_paths<const N: usize>(paths: [(&'static str, Option<&PathBuf>); N]) -> Result<(), ConfigError> {
    for (flag, path) in paths {
        if let Some(path) = path {
            check(flag, &path.display().to_string(), path.is_absolute(), "expected an absolute path")?;
        }
    }
    Ok(())
}

fn check_pod_uid(uid: Option<&str>) -> Result<(), ConfigError> {
    let Some(uid) = uid else { return Ok(()) };
    let ok =
        !uid.is_empty() && uid.len() <= 63 && uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    check("pod-uid", uid, ok, "expected a pod's UID (letters, digits and dashes)")
}

impl Config {
    /// The rules of GPUs that no policy speaks of.
    pub(crate) fn gpu_rules(&self) -> GpuRules {
        GpuRules { modes: self.offer.modes(), rare: self.mig_profiles.clone(), ..GpuRules::default() }
    }

    /// Whether the telemetry server may serve the plugin's state too: only to processes of its own host or pod.
    pub(crate) fn http_serves_state(&self) -> bool {
        self.debug_http.is_empty() && self.http.iter().all(|address| address.ip().is_loopback())
    }
}

fn health(ignored_xids: &str, recover_after: u32) -> Result<HealthRules, ConfigError> {
    Ok(HealthRules {
        ignored_xids: xids(ignored_xids)?,
        recover_after: Duration::from_secs(u64::from(recover_after)),
        ..HealthRules::default()
    })
}

/// Xids, separated by commas.
fn xids(text: &str) -> Result<BTreeSet<u32>, ConfigError> {
    let of = |number: &str| {
        number.parse().map_err(|_| {
            refuse("ignored-xids", number, "expected Xid numbers, separated by commas, as 109,119")
        })
    };
    text.split(',').map(str::trim).filter(|number| !number.is_empty()).map(of).collect()
}

/// Suffixes of profiles, separated by commas.
fn variants(text: &str) -> Result<BTreeSet<ProfileVariant>, ConfigError> {
    const RARE: [ProfileVariant; 4] =
        [ProfileVariant::Media, ProfileVariant::AllMedia, ProfileVariant::NoMedia, ProfileVariant::Graphics];
    let of = |suffix: &str| {
        let found = RARE.into_iter().find(|variant| variant.suffix() == Some(suffix));
        found.ok_or_else(|| {
            refuse("mig-profiles", suffix, "expected +me, +me.all, -me or +gfx, separated by commas")
        })
    };
    text.split(',').map(str::trim).filter(|suffix| !suffix.is_empty()).map(of).collect()
}

/// `:9440` is every address of the machine, IPv6 included where there is any.
fn addresses(flag: &'static str, text: &str) -> Result<Vec<SocketAddr>, ConfigError> {
    let refused =
        || refuse(flag, text, "expected an address and a port, as 127.0.0.1:9440 or :9440, or nothing");
    match text.strip_prefix(':') {
        _ if text.is_empty() => Ok(Vec::new()),
        Some(port) => {
            let port: u16 = port.parse().map_err(|_| refused())?;
            Ok(vec![
                (std::net::Ipv6Addr::UNSPECIFIED, port).into(),
                (std::net::Ipv4Addr::UNSPECIFIED, port).into(),
            ])
        }
        None => Ok(vec![text.parse().map_err(|_| refused())?]),
    }
}

/// Paths of device nodes, separated by commas.
fn device_nodes_of(text: &str) -> Result<Vec<String>, ConfigError> {
    let of = |path: &str| {
        let reason = format!("expected {DEVICE_NODE}, several separated by commas");
        check("extra-nodes", path, is_device_node(path), &reason)?;
        Ok(path.to_owned())
    };
    text.split(',').map(str::trim).filter(|path| !path.is_empty()).map(of).collect()
}

fn check(flag: &'static str, value: &str, ok: bool, reason: &str) -> Result<(), ConfigError> {
    if ok { Ok(()) } else { Err(refuse(flag, value, reason)) }
}

fn refuse(flag: &'static str, value: &str, reason: &str) -> ConfigError {
    ConfigError { flag, value: value.to_owned(), reason: reason.to_owned() }
}

fn is_dns_subdomain(text: &str, longest: usize) -> bool {
    let alphanumeric = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    text.len() <= longest
        && text.split('.').all(|label| {
            label.bytes().all(|b| alphanumeric(b) || b == b'-')
                && label.bytes().next().is_some_and(alphanumeric)
                && label.bytes().last().is_some_and(alphanumeric)
        })
}

#[cfg(test)]
mod tests;
