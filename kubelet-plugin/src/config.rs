//! The validated configuration: everything the plugin needs to know, checked once.

use std::collections::BTreeSet;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_model::health::HealthRules;
use divvy_model::mig::ProfileVariant;
use divvy_offer::{GpuRules, ModeLock, Modes};

use crate::Args;
use crate::sockets::SocketNames;

/// A flag that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("--{flag} {value:?} cannot be used: {reason}")]
pub struct ConfigError {
    /// The flag.
    pub flag: &'static str,
    /// Its value.
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
    /// Driver name.
    pub driver_name: String,
    /// Folder of records, locks and the DRA socket.
    pub plugin_dir: PathBuf,
    /// Folder of locks that all divvy drivers on the node share, if there may be others.
    pub lock_dir: Option<PathBuf>,
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
    /// How containers find the driver's libraries.
    pub library_delivery: Delivery,
    /// The hook program to install.
    pub hook_path: Option<PathBuf>,
    /// The folder to install it to.
    pub hook_dir: PathBuf,
    /// Addresses of the telemetry endpoints, the first that can be bound is used; empty: none.
    pub http: Vec<SocketAddr>,
    /// The same for a second server, which also tells the plugin's state; empty: none.
    pub debug_http: Vec<SocketAddr>,
    /// Kubeconfig, if a certain one.
    pub kubeconfig: Option<PathBuf>,
    /// Intervals and limits.
    pub timing: Timing,
}

/// Intervals and limits. The defaults are what production uses; tests shorten them.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// How long one prepare or unprepare may take in all. The kubelet gives up after 45 s, and a failed prepare
    /// costs the pod 60 to 90 s, so that anything transient is retried up to here.
    pub call: Duration,
    /// How long one GET of a claim may take before it is tried again.
    pub get: Duration,
    /// How often the list of GPUs is asked for.
    pub list: Duration,
    /// How often all facts are read again.
    pub refresh: Duration,
    /// How often neighbours are looked for: what pods hold of others, and processes that no claim accounts for.
    pub neighbours: Duration,
    /// How often other drivers' devices and allocations are asked for; at once when a pod holds one that is not known.
    pub neighbour_drivers: Duration,
    /// How often all claims of the cluster are asked for where another driver publishes one of our GPUs.
    pub neighbour_claims: Duration,
    /// How long a driver may be away before that is told on the node's object: after a boot it comes by itself.
    pub driver_away: Duration,
    /// Longest pause between attempts to reach a driver that is not there.
    pub driver_retry: Duration,
    /// How often the GPUs are asked how they are.
    pub health: Duration,
    /// The same while one is not well.
    pub health_busy: Duration,
    /// How often records are compared with the API, the kubelet and the GPUs.
    pub reconcile: Duration,
    /// The same while something is left to finish (a lingering claim, an orphan in its grace period).
    pub reconcile_busy: Duration,
    /// How often a withdrawn device that is still held is looked for in the API.
    pub withdrawn: Duration,
    /// How long a device that is not offered any more is tainted before the API is asked who holds it: a write of the
    /// scheduler, which may have chosen the device before it saw the taint, must have arrived by then.
    pub leave: Duration,
    /// How long after a CDI file vanished it is restored: the plugin removes files itself.
    pub cdi_settle: Duration,
    /// How often the CDI folder is looked at even if nothing was reported.
    pub cdi_check: Duration,
    /// How often another instance's wish to publish is looked for.
    pub publisher_poll: Duration,
    /// What the executor waits for.
    pub executor: divvy_executor::Timing,
    /// How often the API server's version is asked for.
    pub version: Duration,
    /// How long policies may stay unknown at the start before the node goes on with what it remembers of them.
    pub policy_wait: Duration,
    /// How often a definition of policies that is not there, or a right to them that is missing, is asked for again.
    pub policy_retry: Duration,
    /// Least time between two writes of the node's GpuNode.
    pub gpu_node: Duration,
    /// How often it is looked whether the node's GpuNode was deleted.
    pub gpu_node_look: Duration,
    /// How long running calls may take to finish when the plugin stops.
    pub drain: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            call: Duration::from_secs(40),
            get: Duration::from_secs(10),
            list: Duration::from_secs(5),
            refresh: Duration::from_mins(1),
            neighbours: Duration::from_secs(15),
            neighbour_drivers: Duration::from_mins(10),
            neighbour_claims: Duration::from_hours(1),
            driver_away: Duration::from_mins(1),
            driver_retry: Duration::from_secs(5),
            health: Duration::from_secs(30),
            health_busy: Duration::from_secs(5),
            reconcile: Duration::from_mins(10),
            reconcile_busy: Duration::from_secs(5),
            withdrawn: Duration::from_secs(30),
            leave: Duration::from_mins(1),
            cdi_settle: Duration::from_secs(1),
            cdi_check: Duration::from_mins(5),
            publisher_poll: Duration::from_secs(2),
            executor: divvy_executor::Timing::default(),
            version: Duration::from_mins(10),
            gpu_node: Duration::from_secs(5),
            gpu_node_look: Duration::from_secs(30),
            policy_wait: crate::sources::policies::WAIT,
            policy_retry: crate::sources::policies::RETRY,
            drain: Duration::from_secs(20),
        }
    }
}

impl Timing {
    /// A policy changes for all nodes at once, and each then asks who holds what it withdraws: they take turns.
    fn of_node(name: &str) -> Self {
        let timing = Self::default();
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        let turn = timing.leave / 2000 * u32::try_from(hasher.finish() % 1000).unwrap_or(0);
        Self { leave: timing.leave + turn, ..timing }
    }
}

impl TryFrom<Args> for Config {
    type Error = ConfigError;

    fn try_from(args: Args) -> Result<Self, ConfigError> {
        // Taken apart in full, so that a flag nobody uses does not compile without a warning.
        let Args {
            node_name,
            driver_name,
            plugin_dir,
            lock_dir,
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
            library_delivery,
            hook_path,
            hook_dir,
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
        let (device_nodes, nvml_library) = (given(device_nodes), given(nvml_library));
        let (hook_path, hook_dir) = (given(hook_path), given(hook_dir));
        let hook_dir = hook_dir.unwrap_or_else(|| Path::new("/opt/divvy").join(&driver_name));
        let (kubeconfig, plugin_dir, lock_dir) = (given(kubeconfig), given(plugin_dir), given(lock_dir));
        let pod_uid = pod_uid.filter(|uid| !uid.is_empty());
        let plugin_dir =
            plugin_dir.unwrap_or_else(|| Path::new("/var/lib/kubelet/plugins").join(&driver_name));
        check_paths([
            ("plugin-dir", Some(plugin_dir.clone())),
            ("registry-dir", Some(registry_dir.clone())),
            ("pod-resources-socket", Some(pod_resources_socket.clone())),
            ("cdi-dir", Some(cdi_dir.clone())),
            ("host-root", Some(host_root.clone())),
            ("driver-root", driver_root.clone()),
            ("host-driver-root", host_driver_root.clone()),
            ("lock-dir", lock_dir.clone()),
            ("hook-dir", Some(hook_dir.clone())),
        ])?;
        check_pod_uid(pod_uid.as_deref())?;
        let (http, debug_http) = (addresses("http", &http)?, addresses("debug-http", &debug_http)?);
        let mig_profiles = variants(&mig_profiles)?;
        let health = HealthRules {
            ignored_xids: xids(&ignored_xids)?,
            recover_after: Duration::from_secs(u64::from(recover_after)),
            ..HealthRules::default()
        };
        let sockets = SocketNames::new(&driver_name, &plugin_dir, &registry_dir, pod_uid.as_deref())
            .map_err(|too_long| {
                refuse(too_long.flag, &too_long.path.display().to_string(), &too_long.to_string())
            })?;
        Ok(Self {
            timing: Timing::of_node(&node_name),
            node_name,
            driver_name,
            plugin_dir,
            lock_dir,
            sockets,
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
            health,
            library_delivery,
            hook_path,
            hook_dir,
            http,
            debug_http,
            kubeconfig,
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

fn check_paths<const N: usize>(paths: [(&'static str, Option<PathBuf>); N]) -> Result<(), ConfigError> {
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

    /// Whether the telemetry server may tell the plugin's state too: only to processes of its own host or pod.
    pub(crate) fn http_tells_state(&self) -> bool {
        self.debug_http.is_empty() && self.http.iter().all(|address| address.ip().is_loopback())
    }
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
