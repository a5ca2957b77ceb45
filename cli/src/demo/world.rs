//! The demo's node: simulated GPUs, an API server in this process, a host made of files, the real plugin on its real
//! socket, and a stand-in kubelet. Everything lives in one temporary folder and goes with it.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use divvy_api::names;
use divvy_fake_cluster::{FakeApi, FakeKubelet, KubeletConfig, build};
use divvy_gpu_sim::SimNode;
use divvy_host::fixture::{Fixture, FixtureGpu};
use divvy_kubelet_plugin::{Args, Config, Deps, Offer, RunError};
use divvy_model::{DeviceKind, MigMode};
use divvy_telemetry::{LogFormat, MetricsRegistry, Readiness};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{
    CELDeviceSelector, DeviceClass, DeviceClassSpec, DeviceSelector, ResourceSlice,
};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Name of the demo's node.
pub(crate) const NODE: &str = "demo-node";
/// How long any step of the demo may take before it counts as broken.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// A running node.
pub(crate) struct World {
    pub(crate) api: FakeApi,
    pub(crate) kubelet: FakeKubelet,
    /// Time from the plugin's start to its first slices in the API.
    pub(crate) published_after: Duration,
    plugin: JoinHandle<Result<(), RunError>>,
    stop: CancellationToken,
    folder: TempDir,
}

impl World {
    /// Starts the node and waits until its GPUs are published and the plugin is registered.
    pub(crate) async fn start(sim: &SimNode, offer: Offer) -> Result<Self> {
        let folder =
            tempfile::Builder::new().prefix("divvy-demo-").tempdir().context("a temporary folder")?;
        let host = host_of(sim).build(&folder.path().join("host")).context("the demo's host")?;
        let api = FakeApi::new();
        api.put(&Node { ..build::mk_node(NODE) }).context("the demo's node")?;
        for (name, kind) in CLASSES {
            api.put(&class(name, kind)).context("the demo's device classes")?;
        }
        let kubelet_config = KubeletConfig::new(folder.path().join("kubelet"), NODE, api.clone());
        let args = Args {
            node_name: NODE.to_owned(),
            driver_name: names::DRIVER.to_owned(),
            plugin_dir: Some(kubelet_config.plugin_dir(names::DRIVER)),
            registry_dir: kubelet_config.registry_dir(),
            pod_resources_socket: kubelet_config.pod_resources_socket(),
            cdi_dir: folder.path().join("cdi"),
            driver_root: Some(folder.path().join("host")),
            host_driver_root: Some(PathBuf::from("/")),
            host_root: folder.path().join("host"),
            device_nodes: Some(host.node_table),
            nvml_library: None,
            offer,
            mig_profiles: String::new(),
            hook_path: None,
            http: String::new(),
            debug_http: String::new(),
            kubeconfig: None,
            log_format: LogFormat::Plain,
            log_level: String::new(),
            pod_uid: None,
        };
        let kubelet = FakeKubelet::start(kubelet_config).context("the demo's kubelet")?;
        let deps = Deps {
            client: api.client(),
            gpus: Arc::new(sim.clone()),
            metrics: MetricsRegistry::new(),
            readiness: Readiness::new(),
        };
        let stop = CancellationToken::new();
        let started = Instant::now();
        let config = Config::try_from(args).context("the plugin's configuration")?;
        let mut plugin = tokio::spawn(divvy_kubelet_plugin::run(config, deps, stop.clone()));
        let partitions = offers_partitions(sim, offer);
        let published = api.wait_until(|seen| is_published(&seen.list(), partitions), PATIENCE);
        tokio::select! {
            published = published => published.context("the plugin published nothing")?,
            ended = &mut plugin => {
                ended.context("the plugin died")?.context("the plugin stopped")?;
                bail!("the plugin stopped by itself");
            }
        }
        let published_after = started.elapsed();
        kubelet.wait_registered(names::DRIVER, PATIENCE).await.context("the plugin did not register")?;
        Ok(Self { api, kubelet, published_after, plugin, stop, folder })
    }

    /// The CDI document of a claim.
    pub(crate) fn cdi(&self, uid: &str) -> Option<serde_json::Value> {
        let file = self.folder.path().join("cdi").join(divvy_cdi::claim_file_name(names::DRIVER, uid));
        serde_json::from_slice(&fs_err::read(file).ok()?).ok()
    }

    /// Stops the plugin and names what claims have left on the node: records and CDI files.
    pub(crate) async fn stop(self) -> Result<Vec<String>> {
        self.stop.cancel();
        self.plugin.await.context("the plugin died")?.context("the plugin did not stop cleanly")?;
        let mut left = Vec::new();
        let records = self.kubelet.config().plugin_dir(names::DRIVER).join("claims");
        for folder in [records, self.folder.path().join("cdi")] {
            if !folder.is_dir() {
                continue;
            }
            for entry in fs_err::read_dir(&folder)? {
                let path = entry?.path();
                // Locks are never unlinked, so that no two holders can lock different files of one name.
                if path.extension().is_some_and(|e| e == "json") {
                    left.push(path.strip_prefix(self.folder.path()).unwrap_or(&path).display().to_string());
                }
            }
        }
        Ok(left)
    }
}

fn host_of(sim: &SimNode) -> Fixture {
    let inventory = sim.inventory();
    let mut gpus: Vec<FixtureGpu> = inventory
        .gpus
        .values()
        .filter_map(|gpu| {
            Some(FixtureGpu {
                minor: gpu.facts.minor?,
                pci: gpu.facts.pci_address,
                numa_node: gpu.topology.numa_node,
                pcie_root: gpu.topology.pcie_root.clone().unwrap_or_else(|| "pci0000:00".to_owned()),
            })
        })
        .collect();
    gpus.sort_by_key(|gpu| gpu.minor);
    let mut fixture = Fixture::new(gpus);
    fixture.driver_version.clone_from(&inventory.system.driver_version);
    fixture
}

/// Whether partitions will be published.
fn offers_partitions(sim: &SimNode, offer: Offer) -> bool {
    sim.inventory().gpus.values().filter(|gpu| gpu.mig.is_some()).any(|gpu| match gpu.facts.mig_mode {
        MigMode::Unsupported => false,
        mode @ MigMode::Supported { .. } => {
            mode.is_on() || (offer == Offer::Everything && gpu.facts.architecture.toggles_mig_without_reset())
        }
    })
}

/// Whether the pool is whole, with partitions if there are to be any: they come once the plugin has heard the API
/// server's version.
fn is_published(slices: &[ResourceSlice], partitions: bool) -> bool {
    let Some(newest) = slices.iter().map(|slice| slice.spec.pool.generation).max() else { return false };
    let newest: Vec<_> = slices.iter().filter(|slice| slice.spec.pool.generation == newest).collect();
    let whole = newest
        .first()
        .is_some_and(|slice| usize::try_from(slice.spec.pool.resource_slice_count) == Ok(newest.len()));
    let is_partition = |name: &str| {
        name.parse().is_ok_and(|name| matches!(DeviceKind::parse(&name), Ok(DeviceKind::Partition(_))))
    };
    let mut devices = newest.iter().flat_map(|slice| slice.spec.devices.iter().flatten());
    whole && (!partitions || devices.any(|device| is_partition(&device.name)))
}

/// The classes that the chart installs, each with the type of its devices.
pub(crate) const CLASSES: [(&str, &str); 2] = [(names::CLASS_GPU, "gpu"), (names::CLASS_MIG, "mig")];

fn class(name: &str, kind: &str) -> DeviceClass {
    let domain = names::DRIVER;
    let expression =
        format!(r#"device.driver == "{domain}" && device.attributes["{domain}"].type == "{kind}""#);
    let selector = DeviceSelector { cel: Some(CELDeviceSelector { expression }) };
    DeviceClass {
        metadata: ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() },
        spec: Some(DeviceClassSpec { selectors: Some(vec![selector]), ..DeviceClassSpec::default() }),
    }
}
