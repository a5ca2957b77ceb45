//! A fake kubelet: registers plugins over their sockets, calls their DRA service, wipes slices,
//! serves pod resources.
//!
//! It lives in a folder that stands for `/var/lib/kubelet`: `plugins_registry/` is watched for
//! registration sockets, `pod-resources/kubelet.sock` is served. Where it differs from the real
//! one: it looks for sockets every 25 ms instead of being notified, and containers do not exist, so
//! [`FakeKubelet::start_pod`] only returns what they would get.

mod calls;
mod health;
mod pod_resources;
mod pods;
mod registry;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_proto::dra::SERVICE;
use divvy_proto::podresources::v1::PodResources;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub use calls::{ClaimRef, Prepared};
pub use health::HealthWatch;
pub use pods::ContainerDevices;
pub use registry::Plugin;

use crate::api::FakeApi;
use registry::Registry;

/// Where and how a kubelet runs.
#[derive(Debug, Clone)]
pub struct KubeletConfig {
    /// Stands for `/var/lib/kubelet`; made if it is not there.
    pub root: PathBuf,
    /// Name of the node.
    pub node: String,
    /// The API server: pods and claims are read there, and slices wiped.
    pub api: FakeApi,
    /// The DRA services it knows; one before 1.34 does not know `v1.DRAPlugin`.
    pub services: Vec<String>,
    /// Time that a driver may be without a connected plugin before its slices go; 30 s in the real
    /// kubelet.
    pub wipe_after: Duration,
    /// Deadline of prepare and unprepare; 45 s in the real kubelet.
    pub deadline: Duration,
}

impl KubeletConfig {
    /// The real kubelet's timing.
    pub fn new(root: impl Into<PathBuf>, node: &str, api: FakeApi) -> Self {
        Self {
            root: root.into(),
            node: node.into(),
            api,
            services: vec![SERVICE.to_owned()],
            wipe_after: Duration::from_secs(30),
            deadline: Duration::from_secs(45),
        }
    }

    /// Where plugins put their registration sockets.
    pub fn registry_dir(&self) -> PathBuf {
        self.root.join("plugins_registry")
    }

    /// Where a driver puts its service socket and state.
    pub fn plugin_dir(&self, driver: &str) -> PathBuf {
        self.root.join("plugins").join(driver)
    }

    /// The socket on which pod resources are served.
    pub fn pod_resources_socket(&self) -> PathBuf {
        self.root.join("pod-resources").join("kubelet.sock")
    }
}

/// Faults between kubelet and plugin, as the kubelet sees them.
#[derive(Debug, thiserror::Error)]
pub enum KubeletError {
    /// No plugin of the driver is registered.
    #[error("no plugin of driver {driver} is registered{}", hint(.refused))]
    NotRegistered {
        /// The driver asked for.
        driver: String,
        /// Faults of the sockets that are there.
        refused: Vec<String>,
    },
    /// The call failed as a whole.
    #[error("{method} of driver {driver} failed: {status}", status = .status.message())]
    Call {
        /// The driver called.
        driver: String,
        /// The RPC.
        method: &'static str,
        /// Answer of the plugin.
        status: Box<tonic::Status>,
    },
    /// No answer within the deadline.
    #[error("{method} of driver {driver} did not answer within {deadline:?}")]
    Deadline {
        /// The driver called.
        driver: String,
        /// The RPC.
        method: &'static str,
        deadline: Duration,
    },
    /// The answer leaves claims out or names others.
    #[error("{method} of driver {driver} answered for claims {answered:?} instead of {asked:?}")]
    Mismatch {
        /// The driver called.
        driver: String,
        /// The RPC.
        method: &'static str,
        /// UIDs asked for.
        asked: Vec<String>,
        /// UIDs answered.
        answered: Vec<String>,
    },
    /// The plugin's service socket cannot be used.
    #[error("the service socket {endpoint} of driver {driver} cannot be used")]
    Endpoint {
        driver: String,
        /// Its socket.
        endpoint: String,
        /// Why.
        source: tonic::transport::Error,
    },
    /// A pod cannot be started or stopped.
    #[error("pod {pod}: {problem}")]
    Pod {
        /// `namespace/name`.
        pod: String,
        /// Description of the fault.
        problem: String,
    },
}

fn hint(refused: &[String]) -> String {
    if refused.is_empty() {
        String::new()
    } else {
        format!("; refused: {}", refused.join("; "))
    }
}

/// The kubelet. Dropping it stops it and removes its socket.
#[derive(Debug)]
pub struct FakeKubelet {
    shared: Arc<Shared>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    config: KubeletConfig,
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    registry: Registry,
    /// Claims prepared on this node, by UID.
    claims: BTreeMap<String, pods::Claim>,
    /// Answers of the pod resources socket for pods that were not started here.
    extra_pods: Vec<PodResources>,
    /// Pods started here, by UID.
    pods: BTreeMap<String, PodResources>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        self.changed.send_replace(());
    }
}

impl FakeKubelet {
    /// Starts a kubelet: makes its folders, wipes the node's slices as the real one does, serves
    /// pod resources, and looks for plugins. Must be called in a tokio runtime.
    pub fn start(config: KubeletConfig) -> io::Result<Self> {
        fs_err::create_dir_all(config.registry_dir())?;
        config.api.wipe_slices(&config.node, None);
        let socket = config.pod_resources_socket();
        let shared = Arc::new(Shared {
            config,
            state: Mutex::default(),
            changed: watch::Sender::new(()),
        });
        let serving = pod_resources::serve(&shared, &socket)?;
        let watching = tokio::spawn(registry::run(shared.clone()));
        Ok(Self {
            shared,
            tasks: vec![serving, watching],
        })
    }

    /// Returns its configuration.
    pub fn config(&self) -> &KubeletConfig {
        &self.shared.config
    }

    /// Restarts it: the node's slices are wiped, connections and what is prepared are forgotten,
    /// and every plugin whose socket is there is registered again.
    pub fn restart(&self) {
        let config = &self.shared.config;
        {
            let mut state = self.shared.lock();
            state.registry = Registry::default();
            for claim in state.claims.values_mut() {
                claim.forget_answers();
            }
        }
        config.api.wipe_slices(&config.node, None);
        self.shared.wake();
    }

    /// The registered plugins, oldest first.
    pub fn plugins(&self) -> Vec<Plugin> {
        self.shared.lock().registry.plugins()
    }

    /// Why sockets in the registry folder are not registered, as `file: why`.
    pub fn refused(&self) -> Vec<String> {
        self.shared.lock().registry.refused()
    }

    /// Waits until a driver has a registered plugin.
    pub async fn wait_registered(
        &self,
        driver: &str,
        timeout: Duration,
    ) -> Result<Plugin, KubeletError> {
        let found = self
            .wait_for(
                |plugins| plugins.iter().rfind(|p| p.driver == driver).cloned(),
                timeout,
            )
            .await;
        found.ok_or_else(|| KubeletError::NotRegistered {
            driver: driver.into(),
            refused: self.refused(),
        })
    }

    /// Waits until `look` finds something in the registered plugins; `None` after the timeout.
    pub async fn wait_for<T>(
        &self,
        mut look: impl FnMut(&[Plugin]) -> Option<T>,
        timeout: Duration,
    ) -> Option<T> {
        let mut wake = self.shared.changed.subscribe();
        let wait = async {
            loop {
                wake.borrow_and_update();
                if let Some(found) = look(&self.plugins()) {
                    return Some(found);
                }
                wake.changed().await.ok()?;
            }
        };
        tokio::time::timeout(timeout, wait).await.ok().flatten()
    }

    /// Sets the answers of the pod resources socket in addition to the pods started here.
    pub fn set_pod_resources(&self, pods: Vec<PodResources>) {
        self.shared.lock().extra_pods = pods;
    }
}

impl Drop for FakeKubelet {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
        // Ends the tasks that keep connections to plugins.
        self.shared.lock().registry = Registry::default();
        remove_socket(&self.shared.config.pod_resources_socket());
    }
}

/// Removes a socket file that may not be there; anything else shows when the next one binds.
fn remove_socket(path: &Path) {
    if let Err(error) = fs_err::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::debug!(%error, "a socket was left behind");
    }
}
