//! The configuration of the plugin: its flags, and what follows from them.

use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_api::names::Naming;
use divvy_host::DriverAt;
use divvy_model::health::HealthRules;
use divvy_offer::{GpuRules, ShareRules};

use crate::Args;
use crate::host::sockets::{SocketNames, TooLong, fits};

mod node_selector;
mod timing;
pub(crate) mod values;

pub use node_selector::NodeSelector;
pub use timing::Timing;

/// Where the kubelet looks for plugins' folders.
const PLUGINS: &str = "/var/lib/kubelet/plugins";
/// Name of the socket of the hook program.
const HOOK_SOCKET: &str = "hook.sock";
/// Where CDI hooks of divvy are installed.
const HOOKS: &str = "/opt/divvy";

/// The way in which containers find the driver's libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Delivery {
    /// By a program that the container runtime calls.
    #[default]
    Hook,
    /// By mounts and `LD_LIBRARY_PATH` alone.
    Mounts,
}

/// Everything the plugin needs to know. A flag that nothing follows from is read from [`Args`],
/// which this dereferences to.
#[derive(Debug, Clone)]
pub struct Config {
    /// The flags, as given.
    pub args: Args,
    /// Folder of records, locks and the DRA socket.
    pub plugin_dir: PathBuf,
    /// The folder to install the hook program to.
    pub hook_dir: PathBuf,
    /// Paths of the two sockets.
    pub sockets: SocketNames,
    /// By which rules the health of GPUs is judged.
    pub health: HealthRules,
    /// After so long without any use a claim is called idle; `None`: the use of GPUs is not
    /// measured.
    pub idle_after: Option<Duration>,
    /// Intervals and limits.
    pub timing: Timing,
}

impl Config {
    /// Returns the folder of this driver's files that a reboot may delete.
    pub fn own_run_dir(&self) -> PathBuf {
        let run = self.run_dir.as_ref();
        run.map_or_else(
            || self.plugin_dir.clone(),
            |run| run.join(&self.driver_name),
        )
    }

    /// Returns the pool of this node.
    pub fn pool(&self) -> String {
        divvy_offer::pool_name(&self.node_name)
    }

    /// Returns the names of attributes and capacities under the driver's name.
    pub fn naming(&self) -> Naming {
        Naming::of(&self.driver_name)
    }

    /// Returns whether a device on this node is ours, by its driver and pool. In the place of
    /// NVIDIA's driver, only the pool distinguishes its devices from ours.
    pub(crate) fn owns(&self, driver: &str, pool: &str) -> bool {
        driver == self.driver_name && (!self.naming().stands_in() || pool == self.pool())
    }

    /// Returns whether a device is one of NVIDIA's driver on this node, in whose place we stand.
    pub(crate) fn is_nvidias(&self, driver: &str, pool: &str) -> bool {
        self.naming().stands_in() && driver == self.driver_name && pool == self.node_name
    }

    /// Returns where to look for the NVIDIA driver.
    pub(crate) fn driver_at(&self) -> DriverAt {
        DriverAt {
            seen: self.driver_root.clone(),
            host: self.host_driver_root.clone(),
        }
    }

    /// Returns the socket on which the hook program asks for caps of memory, and reports
    /// why it failed.
    pub fn hook_socket(&self) -> PathBuf {
        self.own_run_dir().join(HOOK_SOCKET)
    }
}

impl Deref for Config {
    type Target = Args;

    fn deref(&self) -> &Args {
        &self.args
    }
}

impl TryFrom<Args> for Config {
    type Error = TooLong;

    fn try_from(args: Args) -> Result<Self, TooLong> {
        let below = |folder: &str| Path::new(folder).join(&args.driver_name);
        let plugin_dir = args.plugin_dir.clone();
        // The driver's name keeps two releases of the chart on one node apart.
        let plugin_dir = plugin_dir.unwrap_or_else(|| below(PLUGINS));
        let hook_dir = args.hook_dir.clone().unwrap_or_else(|| below(HOOKS));
        let sockets = SocketNames::new(
            &args.driver_name,
            &plugin_dir,
            &args.registry_dir,
            args.pod_uid.as_deref(),
        )?;
        // The program that asks there would wait in vain, at each start of a container.
        if args.memory_caps {
            let run = args.run_dir.as_ref().map(|run| run.join(&args.driver_name));
            let flag = run.as_ref().map_or("plugin-dir", |_| "run-dir");
            let folder = run.unwrap_or_else(|| plugin_dir.clone());
            fits(flag, folder.join(HOOK_SOCKET))?;
        }
        let health = HealthRules {
            ignored_xids: args.ignored_xids.clone(),
            recover_after: Duration::from_secs(u64::from(args.recover_after)),
            ..HealthRules::default()
        };
        let idle_after = Duration::from_secs(u64::from(args.usage.idle_after));
        Ok(Self {
            plugin_dir,
            hook_dir,
            sockets,
            health,
            idle_after: args.usage.usage.then_some(idle_after),
            timing: Timing::of_node(&args.node_name),
            args,
        })
    }
}

impl Config {
    /// The rules of GPUs that no policy speaks of.
    pub(crate) fn gpu_rules(&self) -> GpuRules {
        GpuRules {
            modes: self.offer.into(),
            rare: self.mig_profiles.clone(),
            shares: ShareRules {
                slots: self.slots,
                ..ShareRules::default()
            },
            counts_memory: self.quota.quota_counters,
            ..GpuRules::default()
        }
    }

    /// Returns whether the telemetry server may serve the plugin's state too: only to processes of
    /// its own host or pod.
    pub(crate) fn http_serves_state(&self) -> bool {
        self.debug_http.is_empty() && self.http.iter().all(|address| address.ip().is_loopback())
    }
}

#[cfg(test)]
mod tests;
